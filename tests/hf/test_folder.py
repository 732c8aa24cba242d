"""Exported models: they load as they were written, and as transformers saves them again."""

import importlib
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch

from interdomain.checkpoint.model_code import PLAIN
from interdomain.checkpoint.pretrained import load_model, stored_name, to_transformers
from interdomain.model import Transformer, build_config

from ..common import REPOSITORY
from ..model.common import assert_same_tensors
from .common import CLOSE, GREEDY, each_kind, greedy, random_texts


def load(folder, **options):
    from transformers import AutoModelForCausalLM

    options = {"trust_remote_code": True} | options
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def test_the_code_of_an_exported_model(exported):
    """A reader finds four files, of which one has the package's definitions."""
    folder = exported("interdomain")[1]
    files = {path.name: path.read_text() for path in folder.glob("*.py")}
    files.pop(PLAIN)
    assert len(files) == 3
    for name, text in files.items():
        assert (REPOSITORY / "plugin/interdomain/hf" / name).read_text() == text
    card = (folder / "README.md").read_text()
    assert "license:" not in card  # nobody gave one for the weights
    assert 'target_modules=["w1", "w2", "w3", "wk", "wo", "wq", "wv"]' in card


def test_kernels_of_another_interface_are_not_used(tmp_path, exported, monkeypatch, caplog):
    shutil.copytree(exported("interdomain")[1], tmp_path / "of_another_time")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("interdomain.scan.INTERFACE", 2)
    assert not importlib.import_module("of_another_time.plain_interdomain").HAS_PACKAGE
    words = "calls interface 1 of the package interdomain, and the installed one has 2"
    assert words in caplog.text


def stored_tensors(model, dtype=torch.float32):
    """Returns a native model's tensors as transformers has them: SSM parameters and random frequencies stay float32."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if ".ssm." not in name and not name.endswith("frequencies"):
            tensor = tensor.to(dtype)
        tensors[stored_name(name)] = tensor
    return tensors


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-4), (torch.bfloat16, 0.1), (torch.float64, 1e-9)],
    ids=str,
)
@each_kind
@torch.no_grad()
def test_every_bit_arrives_in_every_dtype(exported, case, dtype, tolerance):
    model, folder = exported(case)
    there = load(folder, dtype=dtype)
    assert not there.training
    assert_same_tensors(there.state_dict(), stored_tensors(model, dtype))
    tokens = random_texts(1, 9)
    native = load_model(folder, dtype=dtype)
    torch.testing.assert_close(there(tokens).logits, native(tokens), rtol=tolerance, atol=tolerance)


@each_kind
@torch.no_grad()
def test_saved_and_loaded_again(native, there, tmp_path):
    """transformers' save_pretrained writes shards and the code, which this package reads, too."""
    folder = tmp_path / "saved"
    there.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert_same_tensors(load(folder).state_dict(), stored_tensors(native))
    tokens = random_texts(1, 5)
    torch.testing.assert_close(load_model(folder)(tokens), native(tokens), **CLOSE)


def test_the_package_registers_the_same_classes(tmp_path, exported, package):
    """No trust is asked for, and a saved model has its code."""
    from transformers import AutoConfig, AutoModel

    model, folder = exported("interdomain")
    assert type(AutoConfig.from_pretrained(folder)) is package.InterdomainConfig
    there = load(folder, trust_remote_code=None)
    assert type(there) is package.InterdomainForCausalLM
    there.save_pretrained(tmp_path)
    for file in folder.glob("*.py"):
        assert (tmp_path / file.name).read_text() == file.read_text()
    tokens = random_texts(1, 9)
    hidden = AutoModel.from_pretrained(folder)(tokens).last_hidden_state
    torch.testing.assert_close(there.output(hidden), there(tokens).logits)
    text = load(tmp_path).generate(tokens, max_new_tokens=3, **GREEDY)
    assert torch.equal(text, greedy(model, tokens, 3))


def test_a_configuration_is_uploaded_with_the_code_of_an_exported_model(
    tmp_path, exported, package, monkeypatch
):
    """A stand-in keeps what transformers would upload."""
    from transformers.utils import hub

    uploaded = {}

    def upload(self, working_dir, *args, **options):
        for file in Path(working_dir).glob("*.py"):
            uploaded[file.name] = file.read_text()

    # The hub's functions, which are not the same in all versions of transformers.
    for name in ("hf_api", "create_repo", "create_and_tag_model_card"):
        monkeypatch.setattr(hub, name, mock.Mock(), raising=False)
    monkeypatch.setattr(hub.PushToHubMixin, "_upload_modified_files", upload)
    folder = exported("interdomain")[1]
    config = package.InterdomainConfig.from_pretrained(folder)
    config.save_pretrained(tmp_path / "saved", push_to_hub=True)
    assert uploaded == {file.name: file.read_text() for file in folder.glob("*.py")}


def test_added_tokens(tmp_path, exported):
    """Rows that only pad the vocabulary are never generated."""
    model, folder = exported("interdomain")
    there = load(folder)
    there.resize_token_embeddings(428, 64, mean_resizing=False)
    assert there.generation_config.suppress_tokens == [*range(428, 448)]
    there.resize_token_embeddings(428)
    assert there.generation_config.suppress_tokens is None
    tokens = torch.tensor([[5, 6, 7, 427]])
    logits = there(tokens).logits
    assert logits.shape == (1, 4, 428)
    torch.testing.assert_close(logits[:, :3, :420], model(tokens[:, :3]), **CLOSE)
    there.save_pretrained(tmp_path)
    assert load(tmp_path).config.vocab_size == 428
    assert load_model(tmp_path).config.vocab_size == 428


def test_a_new_model_starts_as_the_native_one_does(package):
    """Constant values are the same. Drawn values have the same spread, with other seeds.

    initializer_range, which is twice the native 0.02 here, is the spread of linear layers.
    """
    config = build_config(
        "debug",
        layers=["interdomain", "s4d", "mamba2", "softmax"],
        output_gate=True,
        c_form="diagonal",
        feature_map="favor",
        normalize=True,
    )
    settings = package.InterdomainConfig(**to_transformers(config), initializer_range=0.04)
    torch.manual_seed(0)
    state = package.InterdomainForCausalLM(settings).state_dict()
    for name, tensor in Transformer(config).state_dict().items():
        found = state[stored_name(name)]
        if tensor.unique().numel() == 1 or name.endswith(("log_A_real", "A_imag")):
            assert torch.equal(found, tensor), name
        elif tensor.numel() > 300:
            linear = tensor.ndim == 2 and "ssm" not in name
            wanted = tensor.std() * (2 if linear else 1)
            torch.testing.assert_close(found.std(), wanted, rtol=0.15, atol=0, msg=name)
