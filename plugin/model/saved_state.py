"""States on disk: a long prompt is read once, and continued as often as wanted.

One safetensors file: the tensors of every layer, the logits after the last token, the tokens, and which model they belong to.
"""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from interdomain.folders import require_utf8, write_whole

from .state import KVCache, ModelState
from .transformer import Transformer

# Shapes: B batch, V vocabulary.

FORMAT, VERSION = "interdomain-state", 2
SAMPLES = 256  # values of a tensor in a fingerprint
HALF = (torch.bfloat16, torch.float16)


class SavedState(NamedTuple):
    """state; logits after the last token, [B, V]; the tokens of each row."""

    state: ModelState
    logits: Tensor
    tokens: list[list[int]]


def fingerprints(model: nn.Module) -> dict[str, str]:
    """What tells a model from others of its shape, on any device: as it is in each half precision, by the name of that.

    One that was loaded in a half precision has that alone; any two of which one was not have one in common.
    """
    loaded = model.tok_embeddings.weight.dtype
    return {str(dtype): _fingerprint(model, dtype) for dtype in ((loaded,) if loaded in HALF else HALF)}


def _fingerprint(model: nn.Module, dtype: torch.dtype) -> str:
    """A sha256 of values spread over every tensor, rounded: training changes all of them."""
    digest = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().flatten()
        values = flat[:: max(1, flat.numel() // SAMPLES)].to("cpu", dtype).contiguous()
        digest.update(name.encode() + values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save_state(path: Path | str, model: Transformer, state: ModelState, logits: Tensor, tokens: list[list[int]]) -> int:
    """Write what `generation.prefill` returned for `tokens`, one list a row. Returns: bytes written.

    Raises: ValueError if the tokens are not those that the state has seen, or the path is not UTF-8; OSError, with nothing on
        disk changed.
    """
    require_utf8(path)
    lengths = state.position.tolist()
    if [len(row) for row in tokens] != lengths:
        raise ValueError(f"the state has seen {lengths} tokens, but {[len(row) for row in tokens]} are given.")
    contents = {
        "logits": logits,
        "position": state.position,
        "tokens": torch.tensor([t for row in tokens for t in row], dtype=torch.int64),
    }
    for i, layer in enumerate(state.layers):
        used = slice(None, state.length if isinstance(layer, KVCache) else None)
        contents |= {f"layers.{i}.{name}": x[:, :, used] for name, x in layer.tensors().items()}
    contents = {name: x.detach().cpu().contiguous() for name, x in contents.items()}
    about = {"length": state.length, "padded": state.padded, "model": fingerprints(model)}
    about["sha256"] = _checksum(about, contents)
    data = save(contents, {"format": FORMAT, "version": str(VERSION), "about": json.dumps(about)})
    write_whole(path, data)
    return len(data)


def _checksum(about: dict, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        digest.update(x.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def load_state(path: Path | str, model: Transformer) -> SavedState:
    """Inverse of `save_state`, on the model's device and in its dtypes.

    Raises: FileNotFoundError; ValueError for a file that is no state, of a newer version, damaged, or of another model.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no state {path}. Write one with --save-state, or leave out --load-state.")
    require_utf8(path)
    try:
        with safe_open(path, framework="pt") as f:
            metadata = f.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"{path} is not a saved state (tools.generate --save-state writes them).")
            if metadata.get("version") != str(VERSION):
                raise ValueError(
                    f"{path} is of format version {metadata.get('version')}; this program reads version {VERSION}. Read the "
                    "prompt again, or update this program."
                )
            about = json.loads(metadata["about"])
            if not about["model"].items() & fingerprints(model).items():
                raise ValueError(
                    f"{path} was saved by another model, another step of its training, or the same in another half precision. "
                    "Load it with the model that read the prompt, or read the prompt again."
                )
            tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
        recorded = about.pop("sha256", None)  # older ones have none
        if recorded is not None and recorded != _checksum(about, tensors):
            raise TypeError("its checksum differs")
        _check(model, about, tensors)
        return _rebuilt(model, about, tensors)
    except (
        SafetensorError,
        json.JSONDecodeError,
        KeyError,
        TypeError,
        AttributeError,
        RuntimeError,
        OverflowError,
    ) as e:
        raise ValueError(f"{path} is truncated or damaged ({type(e).__name__}: {e}). Read the prompt again.") from e


def _check(model: Transformer, about: dict, tensors: dict[str, Tensor]) -> None:
    """Raises TypeError for what no state is, whatever its checksum."""
    length, padded, vocab_size = about["length"], about["padded"], model.config.vocab_size
    position, tokens, logits = (tensors[name] for name in ("position", "tokens", "logits"))
    if type(length) is not int or type(padded) is not bool:
        raise TypeError(f"length is {length!r}, padded is {padded!r}")
    for name, x in ("position", position), ("tokens", tokens):
        if x.ndim != 1 or x.dtype != torch.int64 or (x < 0).any():
            raise TypeError(f"{name} is {x.dtype} of shape {list(x.shape)}")
    if (position > length).any() or not (padded or (position == length).all()) or position.sum() != len(tokens):
        raise TypeError(f"{len(tokens)} tokens in rows of {position.tolist()}, length {length}")
    if (tokens >= vocab_size).any() or logits.shape != (len(position), vocab_size):
        raise TypeError(f"logits are {list(logits.shape)}, the vocabulary is {vocab_size}")


def _rebuilt(model: Transformer, about: dict, tensors: dict[str, Tensor]) -> SavedState:
    position = tensors["position"]
    state = model.init_state(len(position), capacity=about["length"])
    for i, layer in enumerate(state.layers):
        for name, x in layer.tensors().items():
            found = tensors[f"layers.{i}.{name}"]
            if found.shape != x.shape:
                raise TypeError(f"layers.{i}.{name} is {list(found.shape)}, expected {list(x.shape)}")
            x.copy_(found)
    state.position.copy_(position)
    state.length, state.padded = about["length"], about["padded"]
    tokens = [row.tolist() for row in tensors["tokens"].split(position.tolist())]
    return SavedState(state, tensors["logits"].to(state.position.device), tokens)
