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
    write_config(folder, model.config, "float32", tokenizer, {"step": 3})
    shutil.copyfile(tokenizer.path, folder / TOKENIZER)
    return count


def small_model(**overrides):
    return lively(small_config("interdomain", vocab_size=420, **overrides), torch.float32)


@pytest.fixture
def folder(tmp_path, tokenizer):
    write_model(tmp_path / "model", small_model(), tokenizer)
    return tmp_path / "model"


def test_round_trip_in_shards(tmp_path, tokenizer):
    model = small_model(**OPTIONS["all"])
    state = model.state_dict()
    folder = tmp_path / "model"
    assert write_model(folder, model, tokenizer, max_shard_bytes=20_000) == len(state)
    weight_map = {}
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        weight_map |= dict.fromkeys(tensors, file.name)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 20_000
    index = json.loads((folder / INDEX).read_text())
    assert index["weight_map"] == weight_map
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in state.values())
    loaded, loaded_tokenizer = load_pretrained(folder)
    assert loaded.config == model.config
    assert loaded_tokenizer.sha256 == tokenizer.sha256
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())
    assert_same_tensors(loaded.state_dict(), state)


def test_a_damaged_sharded_model_is_refused(tmp_path, tokenizer):
    folder = tmp_path / "model"
    write_model(folder, small_model(), tokenizer, max_shard_bytes=20_000)
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


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_changed_bytes_are_refused(folder):
    flip_a_bit(folder / WEIGHTS)
    with pytest.raises(ValueError, match=r"model\.safetensors.*checksum differs"):
        load_pretrained(folder)
    # `tools.evaluate` loads a model that it has verified itself.
    load_model(folder, verify=False)
    weights = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(weights[:-100])
    with pytest.raises(ValueError, match="truncated or damaged"):
        load_pretrained(folder)


def test_another_tokenizer_is_refused(folder):
    with open(folder / TOKENIZER, "ab") as file:
        file.write(b"\x1a\x00")
    with pytest.raises(ValueError, match=r"tokenizer.*checksum differs"):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format_version": 3}, "version 3"),
        ({"num_hidden_layers": 3}, r"Missing key.*layers\.2\."),
        ({"hidden_size": 2**40}, "config.json is damaged"),
        ({"model_type": "llama"}, "config.json is damaged"),
    ],
)
def test_a_wrong_configuration_is_refused(folder, changes, words):
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=f"(?s){words}"):
        load_pretrained(folder)


def test_a_configuration_that_is_no_json_is_refused(folder):
    (folder / CONFIG).write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
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
    config = json.loads((folder / CONFIG).read_text())
    # transformers saves a model without checksums.
    (folder / CONFIG).write_text(json.dumps(config | {"weights": None}))
    with pytest.raises(ValueError, match=f"(?s){words}"):
        load_pretrained(folder)
