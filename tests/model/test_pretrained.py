"""The standalone folder: what is written is read back, in every dtype, and what is damaged is refused by name."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from interdomain.model import CONDITIONS
from interdomain.model.pretrained import (
    CONFIG,
    INDEX,
    TOKENIZER,
    WEIGHTS,
    load_model,
    load_pretrained,
    read_tensors,
    shard_names,
    storage_dtype,
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


@pytest.mark.parametrize("option", ["plain", "all"])
@pytest.mark.parametrize("condition", ["interdomain", "s4d", "softmax"])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000, 1])
def test_round_trip(tmp_path, tokenizer, condition, option, max_shard_bytes):
    if condition != "interdomain" and option == "all":
        return
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


def test_shards_hold_every_name_in_order():
    sizes = {"a": 5, "b": 5, "c": 11, "d": 1, "e": 9}
    assert shard_names(sizes, 10) == [["a", "b"], ["c"], ["d", "e"]]
    assert shard_names(sizes, 1) == [["a"], ["b"], ["c"], ["d"], ["e"]]
    assert shard_names(sizes, 31) == [list(sizes)]


# Relative RMS of the logits. bf16 keeps 8 bits (2^-9 per rounding), fp16 11; two layers of weights and activations.
LOW_PRECISION = {"bfloat16": 4e-2, "float16": 5e-3}


@pytest.mark.parametrize("dtype", LOW_PRECISION)
@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("when", ["written", "loaded"])
def test_low_precision_spares_the_dynamics(tmp_path, tokenizer, condition, dtype, when):
    # Initial dynamics: the random C of `lively` makes a readout that no rounding leaves in place.
    model = small_model(condition)
    model.init_weights(0)
    write_folder(tmp_path / "model", model, tokenizer, dtype if when == "written" else "float32")
    loaded, _ = load_pretrained(tmp_path / "model", dtype=None if when == "written" else getattr(torch, dtype))
    kept = set()
    for name, tensor in loaded.state_dict().items():
        original = model.state_dict()[name]
        if ".ssm." in name:
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
        assert found.dtype == getattr(torch, dtype)
        error = (found.float() - wanted).norm() / wanted.norm()
        assert 0 < error < LOW_PRECISION[dtype]
        # And through the state, which is float32 whatever the weights are.
        state = loaded.init_state(2)
        loaded(tokens[:, :90], state)
        stepped = loaded(tokens[:, 90:91], state)
        assert (stepped[:, 0].float() - wanted[:, 90]).norm() / wanted[:, 90].norm() < 2 * LOW_PRECISION[dtype]
    if condition != "softmax":
        assert all(layer.ssm.dtype == torch.float32 for layer in state.layers)


def test_what_stays_float32():
    config = small_config("interdomain", feature_map="rff")
    names = lively(config).state_dict()
    kept = {n.rpartition(".")[2] for n in names if storage_dtype(n, torch.bfloat16) == torch.float32}
    assert kept == {"log_dt", "log_A_real", "A_imag", "C", "frequencies"}
    assert storage_dtype("layers.0.attention.ssm.c", torch.float16) == torch.float32
    assert storage_dtype("layers.0.attention.k_norm.weight", torch.float16) == torch.float16


def edit_json(path, change):
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def edit_weights(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def truncate(path, keep):
    path.write_bytes(path.read_bytes()[:keep])


DAMAGE = {
    "empty folder": (
        lambda f: [p.unlink() for p in f.iterdir()],
        ["is not a model folder", CONFIG, "interdomain.tools.convert"],
    ),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), ["lacks model.safetensors", "convert again"]),
    "no tokenizer": (lambda f: (f / TOKENIZER).unlink(), ["has no tokenizer.model"]),
    "another tokenizer": (
        lambda f: (f / TOKENIZER).write_bytes((f / TOKENIZER).read_bytes() + b"\x1a\x00"),
        ["tokenizer", "checksum differs"],
    ),
    "tokenizer unrecorded": (
        lambda f: edit_json(f / CONFIG, lambda r: r.pop("tokenizer")),
        ["tokenizer", "checksum differs"],
    ),
    "config no JSON": (lambda f: (f / CONFIG).write_text("{"), [CONFIG, "damaged"]),
    "config no object": (lambda f: (f / CONFIG).write_text("[]"), [CONFIG, "damaged"]),
    "config of another": (lambda f: (f / CONFIG).write_text('{"model_type": "llama"}'), [CONFIG, "not ours"]),
    "newer version": (
        lambda f: edit_json(f / CONFIG, lambda r: r.update(format_version=2)),
        ["version 2", "reads version 1"],
    ),
    "small vocabulary": (
        lambda f: edit_json(f / CONFIG, lambda r: r.update(vocab_size=100)),
        ["400", "100", "vocab_size"],
    ),
    "other size": (
        lambda f: edit_json(f / CONFIG, lambda r: r.update(num_hidden_layers=3)),
        ["layers.2.", "is missing", "and"],
    ),
    "one bit of the weights": (lambda f: flip_a_bit(f / WEIGHTS), [WEIGHTS, "checksum differs", "convert again"]),
    "weights unrecorded": (lambda f: edit_json(f / CONFIG, lambda r: r["weights"].clear()), ["checksum differs"]),
    "truncated weights": (lambda f: truncate(f / WEIGHTS, -100), [WEIGHTS, "truncated or damaged"]),
    "empty weights": (lambda f: truncate(f / WEIGHTS, 0), [WEIGHTS, "truncated or damaged"]),
    "tensor missing": (lambda f: edit_weights(f, lambda t: t.pop("model.norm.weight")), ["norm.weight is missing"]),
    "tensor unknown": (
        lambda f: edit_weights(f, lambda t: t.update(extra=torch.zeros(1))),
        ["extra is unknown"],
    ),
    "tensor of another shape": (
        lambda f: edit_weights(f, lambda t: t.update({"model.norm.weight": torch.zeros(3)})),
        ["norm.weight is [3]", "says [32]"],
    ),
    "tensor of integers": (
        lambda f: edit_weights(f, lambda t: t.update({"norm.weight": torch.ones(32, dtype=torch.int64)})),
        ["norm.weight", "int64"],
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_refused(folder, damage):
    break_it, words = DAMAGE[damage]
    break_it(folder)
    with pytest.raises((ValueError, FileNotFoundError)) as refused:
        load_pretrained(folder)
    for word in words:
        assert word in str(refused.value)


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
    with pytest.raises(ValueError, match="lacks the tensor"):
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


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64, "bfloat16"], ids=str)
def test_a_dtype_that_is_not_computed_with_is_refused(folder, dtype):
    with pytest.raises(ValueError, match=rf"dtype is {dtype!r}: give torch.float32"):
        load_model(folder, dtype=dtype)


def test_a_precision_in_place_of_a_dtype(folder):
    tokens = torch.arange(20)[None]
    model = load_model(folder, precision="bf16-products")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model(tokens).dtype == torch.bfloat16
    assert load_model(folder, precision="float32")(tokens).dtype == torch.float32
    assert load_model(folder, precision="bf16").tok_embeddings.weight.dtype == torch.bfloat16
    for options in (dict(precision="fp8"), dict(precision="bf16", dtype=torch.float32)):
        with pytest.raises(ValueError, match="give bf16, bf16-products, float32, and no dtype"):
            load_model(folder, **options)


def test_a_folder_whose_name_is_not_utf8_is_not_damaged(folder):
    there = folder.rename(folder.with_name("\udce9"))
    with pytest.raises(ValueError, match="is not UTF-8: safetensors cannot open it"):
        load_model(there)


def test_weights_need_not_be_verified(folder):
    flip_a_bit(folder / WEIGHTS)
    load_model(folder, verify=False)
    # Folders from before there were checksums load as they did.
    edit_json(folder / CONFIG, lambda r: r.pop("weights"))
    load_model(folder)


def test_some_tensors_by_name(folder):
    assert list(read_tensors(folder, ["norm.weight"])) == ["norm.weight"]
    with pytest.raises(ValueError, match=r"lacks the tensor nope \(and 0 more\)"):
        read_tensors(folder, ["norm.weight", "nope"])


def test_a_disk_that_fills_is_an_oserror(tmp_path, tokenizer, monkeypatch):
    from safetensors import SafetensorError

    from interdomain.model import pretrained

    def full(*args, **kwargs):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(pretrained, "save_file", full)
    with pytest.raises(OSError, match=r"model\.safetensors failed .*No space left.*free space"):
        write_folder(tmp_path / "model", small_model(), tokenizer)
