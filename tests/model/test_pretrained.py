"""The standalone folder: what is written is read back, in every dtype, and what is damaged is refused by name."""

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


def write_folder(folder, model, tokenizer, max_shard_bytes=10**9):
    folder.mkdir()
    state = model.state_dict()
    read = lambda names: {name: state[name] for name in names}  # noqa: E731
    count = write_weights(folder, model.config, torch.float32, read, max_shard_bytes)
    write_config(folder, model.config, "float32", tokenizer, {"step": 3})
    shutil.copyfile(tokenizer.path, folder / TOKENIZER)
    return count


def small_model(**overrides):
    return lively(small_config("interdomain", vocab_size=420, **overrides), torch.float32)


@pytest.fixture
def folder(tmp_path, tokenizer):
    write_folder(tmp_path / "model", small_model(), tokenizer)
    return tmp_path / "model"


def test_round_trip_in_shards(tmp_path, tokenizer):
    model = small_model(**OPTIONS["all"])
    count = write_folder(tmp_path / "model", model, tokenizer, max_shard_bytes=20_000)
    assert count == len(model.state_dict())
    files = sorted(tmp_path.glob("model/*.safetensors"))
    assert len(files) > 1
    index = json.loads((tmp_path / "model" / INDEX).read_text())
    assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in model.state_dict().values())
    for file in files:
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 20_000
    loaded, found = load_pretrained(tmp_path / "model")
    assert loaded.config == model.config
    assert found.sha256 == tokenizer.sha256
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())
    assert_same_tensors(loaded.state_dict(), model.state_dict())


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder, **changes):
    save_file(load_file(folder / WEIGHTS) | changes, folder / WEIGHTS)


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def truncate(path, keep):
    path.write_bytes(path.read_bytes()[:keep])


def test_a_damaged_sharded_folder_is_refused(tmp_path, tokenizer):
    folder = tmp_path / "model"
    write_folder(folder, small_model(), tokenizer, max_shard_bytes=20_000)
    first, shard, *_ = sorted(folder.glob("*.safetensors"))
    index = (folder / INDEX).read_text()
    shard.rename(tmp_path / "secret.safetensors")
    with pytest.raises(FileNotFoundError, match=f"lacks {shard.name}"):
        load_model(folder)
    shutil.copyfile(first, shard)
    with pytest.raises(ValueError, match="Missing key"):
        load_model(folder)
    # An index cannot point out of its folder.
    (folder / INDEX).write_text(index.replace(shard.name, "../secret.safetensors"))
    with pytest.raises(FileNotFoundError, match=r"lacks secret\.safetensors"):
        load_model(folder)


DAMAGE = {
    "empty folder": (lambda f: [p.unlink() for p in f.iterdir()], "is not a model folder"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "lacks model.safetensors"),
    "no tokenizer": (lambda f: (f / TOKENIZER).unlink(), "has no tokenizer.model"),
    "another tokenizer": (
        lambda f: (f / TOKENIZER).write_bytes((f / TOKENIZER).read_bytes() + b"\x1a\x00"),
        "tokenizer.*checksum differs",
    ),
    "config no JSON": (lambda f: (f / CONFIG).write_text("{"), "config.json is damaged"),
    "newer version": (lambda f: edit_json(f / CONFIG, format_version=3), "version 3"),
    "other size": (
        lambda f: edit_json(f / CONFIG, num_hidden_layers=3),
        r"Missing key.*layers\.2\.",
    ),
    "one bit of the weights": (
        lambda f: flip_a_bit(f / WEIGHTS),
        "model.safetensors.*checksum differs",
    ),
    "truncated weights": (lambda f: truncate(f / WEIGHTS, -100), "truncated or damaged"),
    "tensor unknown": (
        lambda f: edit_weights(f, extra=torch.zeros(1)),
        "Unexpected key.*extra",
    ),
    "tensor of another shape": (
        lambda f: edit_weights(f, **{"model.norm.weight": torch.zeros(3)}),
        r"size mismatch for norm.weight: .*\[3\].*\[32\]",
    ),
    "tensor of integers": (
        lambda f: edit_weights(f, **{"model.norm.weight": torch.ones(32, dtype=torch.int64)}),
        "norm.weight.*floating point",
    ),
}
for name, value in dict(hidden_size=2**40, model_type="llama").items():
    wrong = {name: value}
    DAMAGE[str(wrong)] = (
        lambda f, wrong=wrong: edit_json(f / CONFIG, **wrong),
        "config.json is damaged",
    )


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder_is_refused(folder, name):
    break_it, words = DAMAGE[name]
    break_it(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=f"(?s){words}"):
        load_pretrained(folder)


def test_without_checksums(folder):
    """`tools.evaluate` loads a folder that it has verified so, and transformers saves one so."""
    flip_a_bit(folder / WEIGHTS)
    load_model(folder, verify=False)
    edit_json(folder / CONFIG, weights=None)
    load_model(folder)
