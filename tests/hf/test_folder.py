"""Folders: what is loaded is what was written, what transformers saves loads too, and a reader finds four files."""

import ast
import importlib
import json
import shutil

import torch

from interdomain.checkpoint.model_code import MODULES, PLAIN
from interdomain.checkpoint.pretrained import load_model, stored_name, to_transformers
from interdomain.model import Transformer, build_config

from ..common import REPOSITORY
from ..model.common import assert_same_tensors
from .common import CLOSE, ON, each_kind, greedy, random_texts


def load(folder, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        pretrained_model_name_or_path=folder, **{"trust_remote_code": True, **options}
    )


def test_what_a_reader_finds(exported):
    """Code that fits an afternoon and imports nothing but torch and transformers, the license, and the card's header."""
    folder = exported("interdomain")[1]
    files, package = sorted(folder.glob("*.py")), REPOSITORY / "plugin" / "interdomain"
    assert len(files) == 4
    trees = {file: ast.parse(file.read_text()) for file in files}
    assert sum(len([*ast.walk(tree)]) for tree in trees.values()) <= 30_000
    for file, tree in trees.items():
        if (
            file.name == PLAIN
        ):  # of the package's definitions; none stands twice, so that none has another's function
            names = [
                node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
            ]
            assert len(names) == len(set(names)) > 40
            texts = "".join((package / module).read_text() for module in MODULES)
            for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
                assert ast.get_source_segment(file.read_text(), function) in texts, function.name
        else:
            assert file.read_bytes() == (package / "hf" / file.name).read_bytes()
    assert (folder / "LICENSE").read_bytes() == (REPOSITORY / "LICENSE").read_bytes()
    card = (folder / "README.md").read_text()
    assert "license:" not in card  # of the weights: nobody gave one
    assert 'target_modules=["w1", "w2", "w3", "wk", "wo", "wq", "wv"]' in card


def test_kernels_of_another_interface_are_not_used(tmp_path, exported, monkeypatch, caplog):
    shutil.copytree(exported("interdomain")[1], tmp_path / "of_another_time")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("interdomain.scan.INTERFACE", 2)
    assert not importlib.import_module("of_another_time.plain_interdomain").HAS_PACKAGE
    assert (
        "calls interface 1 of the package interdomain, and the installed one has 2" in caplog.text
    )


@each_kind
def test_every_bit_arrives_in_every_dtype(exported, case):
    model, folder = exported(case)
    tokens = random_texts(1, 9)
    for dtype, error in ((torch.float32, 1e-4), (torch.bfloat16, 0.1), (torch.float64, 1e-9)):
        there, native = load(folder, dtype=dtype), load_model(folder, dtype=dtype)
        assert not there.training
        wanted = {}
        for name, tensor in model.state_dict().items():
            spared = ".ssm." in name or name.endswith("frequencies")
            wanted[stored_name(name)] = tensor if spared else tensor.to(dtype)
        assert_same_tensors(there.state_dict(), wanted)
        with torch.no_grad():
            torch.testing.assert_close(there(tokens).logits, native(tokens), rtol=error, atol=error)
    half = load(folder).half().state_dict()
    assert {tensor.dtype for name, tensor in half.items() if ".ssm." in name} <= {torch.float32}
    assert half["output.weight"].dtype == torch.float16


@each_kind
def test_saved_and_loaded_again(native, there, tmp_path):
    """By transformers' own save_pretrained, in shards: with the code, and readable by this package too."""
    there.save_pretrained(tmp_path / "saved", max_shard_size="100KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    assert "weights" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    wanted = {stored_name(name): tensor for name, tensor in native.state_dict().items()}
    for again in (load(tmp_path / "saved"), there):
        assert_same_tensors(again.state_dict(), wanted)
    with torch.no_grad():
        torch.testing.assert_close(
            load_model(tmp_path / "saved")(random_texts(1, 5)), native(random_texts(1, 5)), **CLOSE
        )


def test_the_package_registers_the_same_classes(tmp_path, exported, package):
    """No trust is asked for, and what is saved is a folder with code."""
    from transformers import AutoConfig, AutoModel

    hf, (model, folder) = package, exported("interdomain")
    assert type(AutoConfig.from_pretrained(folder)) is hf.InterdomainConfig
    there = load(folder, trust_remote_code=None)
    assert type(there) is hf.InterdomainForCausalLM
    there.save_pretrained(tmp_path / "saved")
    code = [
        {file.name: file.read_text() for file in path.glob("*.py")}
        for path in (tmp_path / "saved", folder)
    ]
    assert code[0] == code[1]
    tokens = random_texts(1, 9)
    base = AutoModel.from_pretrained(folder)
    torch.testing.assert_close(there.output(base(tokens).last_hidden_state), there(tokens).logits)
    again = load(tmp_path / "saved")
    assert torch.equal(again.generate(tokens, max_new_tokens=3, **ON), greedy(model, tokens, 3))


def test_added_tokens(tmp_path, exported):
    model, folder = exported("interdomain")
    there, tokens = load(folder), random_texts(1, 9)
    there.resize_token_embeddings(428, 64, mean_resizing=False)
    assert there.generation_config.suppress_tokens == [*range(428, 448)]
    there.resize_token_embeddings(428)
    assert there.generation_config.suppress_tokens is None
    logits = there(torch.cat([tokens, torch.tensor([[427]])], dim=1)).logits
    assert logits.shape == (1, 10, 428)
    torch.testing.assert_close(logits[:, :9, :420], model(tokens), **CLOSE)
    there.save_pretrained(tmp_path / "more")
    assert (
        load(tmp_path / "more").config.vocab_size
        == load_model(tmp_path / "more").config.vocab_size
        == 428
    )


def test_a_new_model_starts_as_the_native_one_does(package):
    """By the package's `initial_value`, with other seeds: what is constant is the same, the rest has the same spread."""
    options = dict(
        layers=["interdomain", "s4d", "mamba2", "softmax"], output_gate=True, c_form="diagonal"
    )
    config = build_config("debug", feature_map="favor", normalize=True, **options)
    torch.manual_seed(0)
    there = package.InterdomainForCausalLM(
        package.InterdomainConfig(**to_transformers(config), initializer_range=0.04)
    )
    for name, tensor in Transformer(config).state_dict().items():
        found = there.state_dict()[stored_name(name)]
        if tensor.unique().numel() == 1 or name.endswith(("log_A_real", "A_imag")):
            assert torch.equal(found, tensor), name
        elif tensor.numel() > 300:
            linear = tensor.ndim == 2 and "ssm" not in name
            torch.testing.assert_close(
                found.std(), tensor.std() * (1 + linear), rtol=0.15, atol=0, msg=name
            )
