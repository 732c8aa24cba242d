"""States on disk: a long prompt is read once, and continued as often as wanted.

One safetensors file: the tensors of every layer, the logits after the last token, the tokens, and which model they belong to.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from interdomain.folders import require_utf8, write_whole

from .state import ModelState
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


def fingerprints(model: Transformer) -> dict[str, str]:
    """What tells a model from others of its shape, on any device: a sha256 of values spread over every tensor, all of which
    training changes, as rounded to each half precision, by the name of that.

    A model that was loaded in a half precision has that one alone; any two of which one was not have one in common.
    """
    loaded, found = model.tok_embeddings.weight.dtype, {}
    for dtype in (loaded,) if loaded in HALF else HALF:
        digest = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True).encode())
        for name, tensor in sorted(model.state_dict().items()):
            flat = tensor.detach().flatten()
            values = flat[:: max(1, flat.numel() // SAMPLES)].to("cpu", dtype).contiguous()
            digest.update(name.encode() + values.view(torch.uint8).numpy().tobytes())
        found[str(dtype)] = digest.hexdigest()
    return found


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
        used = layer.aligned(state.length, state.length)  # a cache without its spare room
        contents |= {f"layers.{i}.{name}": x for name, x in used.tensors().items()}
    contents = {name: x.detach().cpu().contiguous() for name, x in contents.items()}
    about = {"length": state.length, "padded": state.padded, "model": fingerprints(model)}
    about["sha256"] = _checksum(about, contents)
    data = save(contents, {"format": FORMAT, "version": str(VERSION), "about": json.dumps(about)})
    write_whole(Path(path), data)
    return len(data)


def _checksum(about: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        digest.update(x.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def load_state(path: Path | str, model: Transformer) -> SavedState:
    """Inverse of `save_state`, on the model's device and in its dtypes.

    Raises: FileNotFoundError; ValueError for a file that is no state, of a newer version, damaged, or of another model.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no state {path}. Write one with --save-state, or leave out --load-state.")
    require_utf8(path)
    damaged = f"{path} is truncated or damaged. Read the prompt again."
    try:
        with safe_open(path, framework="pt") as f:
            metadata = f.metadata() or {}
            tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    except SafetensorError as e:
        raise ValueError(damaged) from e
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is not a saved state (tools.generate --save-state writes them).")
    if metadata.get("version") != str(VERSION):
        raise ValueError(
            f"{path} is of format version {metadata.get('version')}; this program reads version {VERSION}. Read the prompt "
            "again, or update this program."
        )
    try:
        about = json.loads(metadata["about"])
        intact = about.pop("sha256") == _checksum(about, tensors)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(damaged) from e
    if not intact:
        raise ValueError(damaged)
    if not about["model"].items() & fingerprints(model).items():
        raise ValueError(
            f"{path} was saved by another model, another step of its training, or the same in another half precision. Load it "
            "with the model that read the prompt, or read the prompt again."
        )
    position, length = tensors["position"], about["length"]
    state = model.init_state(len(position), capacity=length)
    for i, layer in enumerate(state.layers):
        for name, x in layer.tensors().items():
            x.copy_(tensors[f"layers.{i}.{name}"])
    state.position.copy_(position)
    state.length, state.padded = length, about["padded"]
    tokens = [row.tolist() for row in tensors["tokens"].split(position.tolist())]
    return SavedState(state, tensors["logits"].to(state.position.device), tokens)
