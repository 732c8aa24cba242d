"""The standalone folder: what is written is read back, in every dtype, and what is damaged is refused by name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from interdomain.model import pretrained
from interdomain.model.pretrained import (
    CONFIG,
    INDEX,
    TOKENIZER,
    WEIGHTS,
    load_model,
    load_pretrained,
    write_config,
    write_weights,
)

from .common import OPTIONS, lively, random_tokens, small_config


def write_folder(folder, model, tokenizer, dtype="float32", max_shard_bytes=10**9):
    folder.mkdir()
    state = model.state_dict()
    read = lambda names: {name: state[name] for name in names}  # noqa: E731
    count = write_weights(folder, model.config, getattr(torch, dtype), read, max_shard_bytes)
    write_config(folder, model.config, dtype, tokenizer, {"step": 3})
    shutil.copyfile(tokenizer.path, folder / TOKENIZER)
    return count


def small_model(condition="interdomain", **overrides):
    return lively(small_config(condition, vocab_size=420, **overrides), torch.float32)


@pytest.fixture
def folder(tmp_path, tokenizer):
    write_folder(tmp_path / "model", small_model(), tokenizer)
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("condition", "option", "max_shard_bytes"),
    [("interdomain", "all", 1), ("s4d", "plain", 20_000), ("softmax", "plain", 10**9)],
)
def test_round_trip(tmp_path, tokenizer, condition, option, max_shard_bytes):
    model = small_model(condition, **OPTIONS[option])
    count = write_folder(tmp_path / "model", model, tokenizer, max_shard_bytes=max_shard_bytes)
    assert count == len(model.state_dict())
    files = sorted(tmp_path.glob("model/*.safetensors"))
    if max_shard_bytes == 10**9:
        assert [file.name for file in files] == [WEIGHTS]
        assert not (tmp_path / "model" / INDEX).exists()
    else:
        assert len(files) == (count if max_shard_bytes == 1 else len(files)) > 1
        index = json.loads((tmp_path / "model" / INDEX).read_text())
        assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in model.state_dict().values())
        for file in files:
            assert len(held := load_file(file)) == 1 or sum(t.nbytes for t in held.values()) <= max_shard_bytes
    loaded, found = load_pretrained(tmp_path / "model")
    assert loaded.config == model.config
    assert found.sha256 == tokenizer.sha256
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
        assert loaded.state_dict()[name].dtype == torch.float32


# Relative RMS of the logits. bf16 keeps 8 bits (2^-9 per rounding), fp16 11; two layers of weights and activations.
LOW_PRECISION = {"bfloat16": 4e-2, "float16": 5e-3}


@pytest.mark.parametrize("dtype", LOW_PRECISION)
@pytest.mark.parametrize(("condition", "option"), [("interdomain", "rff"), ("s4d", "plain"), ("softmax", "plain")])
@pytest.mark.parametrize("when", ["written", "loaded"])
def test_low_precision_spares_the_dynamics(tmp_path, tokenizer, condition, option, dtype, when):
    # Initial dynamics: the random C of `lively` makes a readout that no rounding leaves in place.
    model = small_model(condition, **OPTIONS[option])
    model.init_weights(0)
    write_folder(tmp_path / "model", model, tokenizer, dtype if when == "written" else "float32")
    loaded, _ = load_pretrained(tmp_path / "model", dtype=None if when == "written" else getattr(torch, dtype))
    kept = set()
    for name, tensor in loaded.state_dict().items():
        original = model.state_dict()[name]
        if ".ssm." in name or name.endswith("frequencies"):
            kept.add(name)
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, original)
        else:
            assert tensor.dtype == getattr(torch, dtype)
            assert torch.equal(tensor, original.to(tensor.dtype))
    assert bool(kept) == (condition != "softmax")
    tokens = random_tokens(model.config, 2, 100)
    with torch.no_grad():
        wanted, found = model(tokens), loaded(tokens)
        state = loaded.init_state(2)  # float32 whatever the weights are
        loaded(tokens[:, :90], state)
        stepped = loaded(tokens[:, 90:91], state)
    assert found.dtype == getattr(torch, dtype)
    assert 0 < (found.float() - wanted).norm() / wanted.norm() < LOW_PRECISION[dtype]
    assert (stepped[:, 0].float() - wanted[:, 90]).norm() / wanted[:, 90].norm() < 2 * LOW_PRECISION[dtype]


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
    write_folder(tmp_path / "model", small_model(), tokenizer, max_shard_bytes=20_000)
    shards = sorted((tmp_path / "model").glob("*.safetensors"))
    whole = shards[1].read_bytes()
    shards[1].unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks {shards[1].name}"):
        load_model(tmp_path / "model")
    shards[1].write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="truncated or damaged"):
        load_model(tmp_path / "model")
    shutil.copyfile(shards[0], shards[1])
    with pytest.raises(ValueError, match="is missing"):
        load_model(tmp_path / "model")
    shards[1].write_bytes(whole)
    load_model(tmp_path / "model")
    # An index cannot point out of its folder.
    secret = tmp_path / "secret.safetensors"
    shutil.copyfile(shards[1], secret)
    text = (tmp_path / "model" / INDEX).read_text()
    (tmp_path / "model" / INDEX).write_text(text.replace(shards[1].name, "../secret.safetensors"))
    with pytest.raises(FileNotFoundError, match=r"lacks secret\.safetensors"):
        load_model(tmp_path / "model")
    (tmp_path / "model" / INDEX).write_text("[]")
    with pytest.raises(ValueError, match="damaged"):
        load_model(tmp_path / "model")


def test_a_disk_that_fills_is_an_oserror(tmp_path, tokenizer, monkeypatch):
    def full(*args, **kwargs):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(pretrained, "save_file", full)
    with pytest.raises(OSError, match=r"model\.safetensors failed .*No space left.*free space"):
        write_folder(tmp_path / "model", small_model(), tokenizer)


DAMAGE = {
    "empty folder": (lambda f: [p.unlink() for p in f.iterdir()], "is not a model folder"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "lacks model.safetensors"),
    "no tokenizer": (lambda f: (f / TOKENIZER).unlink(), "has no tokenizer.model"),
    "another tokenizer": (
        lambda f: (f / TOKENIZER).write_bytes((f / TOKENIZER).read_bytes() + b"\x1a\x00"),
        "tokenizer.*checksum differs",
    ),
    "config no JSON": (lambda f: (f / CONFIG).write_text("{"), "config.json is damaged"),
    "config of another": (lambda f: (f / CONFIG).write_text('{"model_type": "llama"}'), "not ours"),
    "newer version": (lambda f: edit_json(f / CONFIG, format_version=2), "version 2"),
    "other size": (lambda f: edit_json(f / CONFIG, num_hidden_layers=3), r"layers\.2\..*is missing"),
    "one bit of the weights": (lambda f: flip_a_bit(f / WEIGHTS), "model.safetensors.*checksum differs"),
    "truncated weights": (lambda f: truncate(f / WEIGHTS, -100), "truncated or damaged"),
    "tensor unknown": (lambda f: edit_weights(f, extra=torch.zeros(1)), "extra is unknown"),
    "tensor of another shape": (
        lambda f: edit_weights(f, **{"model.norm.weight": torch.zeros(3)}),
        r"norm.weight is torch.float32 \[3\].*says float \[32\]",
    ),
    "tensor of integers": (
        lambda f: edit_weights(f, **{"model.norm.weight": torch.ones(32, dtype=torch.int64)}),
        "norm.weight is torch.int64",
    ),
    "a name that is no UTF-8": (lambda f: f.rename(f.with_name("\udce9")), "is not UTF-8"),
}


def test_a_damaged_folder_is_refused(folder, tmp_path):
    for name, (break_it, words) in DAMAGE.items():
        damaged = shutil.copytree(folder, tmp_path / name)
        moved = break_it(damaged)
        with pytest.raises((ValueError, FileNotFoundError), match=f"(?s){words}"):
            load_pretrained(moved if isinstance(moved, Path) else damaged)


def test_options_of_loading(folder):
    for dtype in (torch.int8, torch.float8_e4m3fn, "bfloat16"):
        with pytest.raises(ValueError, match=f"dtype is {dtype!r}"):
            load_model(folder, dtype=dtype)
    flip_a_bit(folder / WEIGHTS)
    load_model(folder, verify=False)
    # Folders from before there were checksums load as they did.
    edit_json(folder / CONFIG, weights=None)
    load_model(folder)
