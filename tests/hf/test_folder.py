"""Folders: what is loaded is what was written, what transformers saves loads too, and a reader finds five files."""

import ast
import importlib
import json
import shutil

import pytest
import torch

from interdomain.files.model_code import PLAIN
from interdomain.files.pretrained import load_model, stored_name

from ..common import REPOSITORY
from .common import CLOSE, KINDS, ON, code_of, greedy, random_texts


def load(folder, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        pretrained_model_name_or_path=folder, **{"trust_remote_code": True, **options}
    )


def test_what_a_reader_finds(exported):
    """Code that fits an afternoon and imports nothing but torch and transformers, the license, and the card's header."""
    folder = exported("interdomain")[1]
    files, package = sorted(folder.glob("*.py")), REPOSITORY / "plugin" / "interdomain"
    assert len(files) <= 5
    assert sum(len(file.read_text().splitlines()) for file in files) <= 2200
    for file in files:
        tree = ast.parse(file.read_text())
        if file.name != PLAIN:
            assert file.read_bytes() == (package / "hf" / file.name).read_bytes()
        optional = {id(node) for block in ast.walk(tree) if isinstance(block, ast.Try) for node in ast.walk(block)}
        imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom) and id(n) not in optional]
        names = {a.name for n in imports if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module for n in imports if isinstance(n, ast.ImportFrom) and not n.level}
        allowed = {"collections", "dataclasses", "functools", "hashlib", "logging", "math", "re", "typing"}
        allowed |= {"torch", "transformers"}
        assert {name.partition(".")[0] for name in names} <= allowed
    assert (folder / "LICENSE").read_bytes() == (REPOSITORY / "LICENSE").read_bytes()
    card = (folder / "README.md").read_text()
    assert "license:" not in card  # of the weights: nobody gave one
    assert 'target_modules=["w1", "w2", "w3", "wk", "wo", "wq", "wv"]' in card


def test_kernels_of_another_interface_are_not_used(tmp_path, exported, monkeypatch, caplog):
    shutil.copytree(exported("interdomain")[1], tmp_path / "of_another_time")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("interdomain.scan.INTERFACE", 2)
    assert not importlib.import_module("of_another_time.plain_interdomain").HAS_PACKAGE
    assert "calls interface 1 of the package interdomain, and the installed one has 2" in caplog.text


@pytest.mark.parametrize("case", KINDS)
def test_every_bit_arrives_in_every_dtype(exported, case):
    model, folder = exported(case)
    tokens = random_texts(1, 9)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        there, native = load(folder, dtype=dtype), load_model(folder, dtype=dtype)
        assert not there.training
        for name, tensor in model.state_dict().items():
            spared = ".ssm." in name or name.endswith("frequencies")
            found, ours = there.state_dict()[stored_name(name)], native.state_dict()[name]
            assert found.dtype == (torch.float32 if spared else dtype), name
            assert ours.dtype == (torch.promote_types(dtype, torch.float32) if spared else dtype), name
            for loaded in (found, ours):
                assert torch.equal(loaded.double(), (tensor if spared else tensor.to(dtype)).double()), name
        with torch.no_grad():
            wanted = native(tokens)
            close = CLOSE if dtype == torch.float32 else dict(rtol=1e-9, atol=1e-9)
            close = dict(rtol=0.1, atol=0.1) if dtype.itemsize == 2 else close
            torch.testing.assert_close(there(tokens).logits, wanted, **close)
    half = load(folder).half()
    assert half.state_dict()["output.weight"].dtype == torch.float16
    for mixer in (layer.attention for layer in half.model.layers):
        assert not hasattr(mixer, "ssm") or {p.dtype for p in mixer.ssm.parameters()} == {torch.float32}


@pytest.mark.parametrize("case", KINDS)
def test_saved_and_loaded_again(tmp_path, loaded, case):
    """By transformers' own save_pretrained, in shards: with the code, and readable by this package too."""
    model, there = loaded(case)
    there.save_pretrained(tmp_path / "saved", max_shard_size="100KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    assert "weights" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    for again in (load(tmp_path / "saved"), there):
        for name, tensor in model.state_dict().items():
            assert torch.equal(again.state_dict()[stored_name(name)], tensor), name
    with torch.no_grad():
        torch.testing.assert_close(
            load_model(tmp_path / "saved")(random_texts(1, 5)), model(random_texts(1, 5)), **CLOSE
        )


def test_the_package_registers_the_same_classes(tmp_path, exported, package):
    """No trust is asked for, and what is saved is a folder with code."""
    from transformers import AutoConfig, AutoModel

    hf, (model, folder) = package, exported("interdomain")
    assert type(AutoConfig.from_pretrained(folder)) is hf.InterdomainConfig
    there = load(folder, trust_remote_code=None)
    assert type(there) is hf.InterdomainForCausalLM
    there.save_pretrained(tmp_path / "saved")
    code = [{file.name: file.read_text() for file in path.glob("*.py")} for path in (tmp_path / "saved", folder)]
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
    assert load(tmp_path / "more").config.vocab_size == load_model(tmp_path / "more").config.vocab_size == 428


def test_a_new_model_starts_as_the_native_one_does(loaded):
    """The same distributions, by name."""
    from interdomain.files.pretrained import to_transformers
    from interdomain.model import Transformer, build_config

    code = code_of(loaded("interdomain")[1])
    for condition, options in (
        ("interdomain", dict(output_gate=True)),
        ("s4d", {}),
        ("single-query", dict(c_form="diagonal", feature_map="favor", normalize=True)),
    ):
        config = build_config("debug", condition, n_layers=2, **options)
        torch.manual_seed(0)
        there = code.InterdomainForCausalLM(code.InterdomainConfig(**to_transformers(config)))
        native = Transformer(config)
        for name, tensor in native.state_dict().items():
            found = there.state_dict()[stored_name(name)]
            if name.endswith("log_dt"):
                assert (found.exp() - 0.0505).abs().max() <= 0.0496
            elif name.endswith("frequencies"):  # orthogonal
                gram = found @ found.mT
                torch.testing.assert_close(gram, torch.diag_embed(gram.diagonal(dim1=1, dim2=2)), rtol=0, atol=1e-4)
            elif name.endswith(".C") or (tensor.numel() > 300 and "ssm" not in name):
                torch.testing.assert_close(found.std(), tensor.std(), rtol=0.15, atol=0, msg=name)
            elif name.endswith(("log_A_real", "A_imag", "norm.weight", "norm.bias")):
                assert torch.equal(found, tensor), name
