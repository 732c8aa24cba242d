"""Exported models: what is written is read back, and a damaged one is refused by name."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from interdomain.checkpoint.pretrained import (
    CONFIG,
    INDEX,
    TOKENIZER,
    WEIGHTS,
    load_model,
    load_pretrained,
    write_config,
    write_weights,
)

from .common import OPTIONS, assert_same_tensors, lively, small_config


def write_model(folder, model, tokenizer, max_shard_bytes=10**9):
    state = model.state_dict()

    def read(names):
        return {name: state[name] for name in names}

    folder.mkdir()
    count = write_weights(folder, model.config, torch.float32, read, max_shard_bytes)
    assert count == len(state)
    write_config(folder, model.config, "float32", tokenizer, {"step": 3})
    shutil.copyfile(tokenizer.path, folder / TOKENIZER)
    return folder


def small_model(**overrides):
    return lively(small_config("interdomain", vocab_size=420, **overrides), torch.float32)


@pytest.fixture
def folder(tmp_path, tokenizer):
    return write_model(tmp_path / "model", small_model(), tokenizer)


def test_round_trip_in_shards(tmp_path, tokenizer):
    model = small_model(**OPTIONS["all"])
    folder = write_model(tmp_path / "model", model, tokenizer, max_shard_bytes=20_000)
    weight_map = {}
    total_size = 0
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        shard_size = sum(x.nbytes for x in tensors.values())
        assert shard_size <= 20_000 or len(tensors) == 1
        weight_map |= dict.fromkeys(tensors, file.name)
        total_size += shard_size
    index = json.loads((folder / INDEX).read_text())
    assert index == {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    loaded, loaded_tokenizer = load_pretrained(folder)
    assert loaded.config == model.config
    assert loaded_tokenizer.sha256 == tokenizer.sha256
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())
    assert_same_tensors(loaded.state_dict(), model.state_dict())


def test_a_damaged_sharded_model_is_refused(tmp_path, tokenizer):
    folder = write_model(tmp_path / "model", small_model(), tokenizer, max_shard_bytes=20_000)
    first, shard, *_ = sorted(folder.glob("*.safetensors"))
    shard.rename(tmp_path / "secret.safetensors")
    with pytest.raises(FileNotFoundError, match=f"lacks {shard.name}"):
        load_model(folder)
    shutil.copyfile(first, shard)
    with pytest.raises(ValueError, match="Missing key"):
        load_model(folder)
    # An index cannot point out of its folder.
    index = (folder / INDEX).read_text()
    (folder / INDEX).write_text(index.replace(shard.name, "../secret.safetensors"))
    with pytest.raises(FileNotFoundError, match=r"lacks secret\.safetensors"):
        load_model(folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (CONFIG, "is not a model folder"),
        (WEIGHTS, "lacks model.safetensors"),
        (TOKENIZER, "has no tokenizer.model"),
    ],
)
def test_a_missing_file_is_named(folder, name, words):
    (folder / name).unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        load_pretrained(folder)


def test_changed_bytes_are_refused(folder):
    weights = bytearray((folder / WEIGHTS).read_bytes())
    weights[-1] ^= 1
    (folder / WEIGHTS).write_bytes(weights)
    with pytest.raises(ValueError, match=r"model\.safetensors.*checksum differs"):
        load_pretrained(folder)
    # `tools.evaluate` loads a model that it has verified itself.
    load_model(folder, verify=False)
    (folder / WEIGHTS).write_bytes(weights[:-100])
    with pytest.raises(ValueError, match="truncated or damaged"):
        load_pretrained(folder)


def test_another_tokenizer_is_refused(folder):
    with open(folder / TOKENIZER, "ab") as file:
        file.write(b"\x1a\x00")
    with pytest.raises(ValueError, match=r"tokenizer.*checksum differs"):
        load_pretrained(folder)


def change_config(folder, **changes):
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("format_version", 3, "version 3"),
        ("num_hidden_layers", 3, r"Missing key.*layers\.2\."),
        ("hidden_size", 2**40, "config.json is damaged"),
        ("model_type", "llama", "config.json is damaged"),
    ],
)
def test_a_wrong_configuration_is_refused(folder, name, value, words):
    change_config(folder, **{name: value})
    with pytest.raises(ValueError, match=f"(?s){words}"):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("extra", torch.zeros(1), "Unexpected key.*extra"),
        ("model.norm.weight", torch.zeros(3), r"size mismatch for norm.weight: .*\[3\].*\[32\]"),
        ("model.norm.weight", torch.ones(32).long(), "norm.weight.*floating point"),
    ],
)
def test_a_wrong_tensor_is_refused(folder, name, tensor, words):
    save_file(load_file(folder / WEIGHTS) | {name: tensor}, folder / WEIGHTS)
    change_config(folder, weights=None)  # transformers saves a model without checksums
    with pytest.raises(ValueError, match=f"(?s){words}"):
        load_pretrained(folder)
