"""The model in Megatron-Core's distributed checkpoints (torch_dist), read and written without Megatron.

Such a folder is one of torch.distributed.checkpoint, with metadata.json beside the index. Its tensors are stacked over layers
(`decoder.layers.mlp.linear_fc2.weight` [L, dim, hidden]), or stand by layer (`decoder.layers.3.mlp...`).
"""

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import distributed_checkpoint as checkpoints
from .config import ModelConfig
from .transformer import meta_model

FORMAT = "metadata.json"  # {"sharded_backend": "torch_dist", ...}
TRACKER = "latest_checkpointed_iteration.txt"
RECORD = "interdomain"  # of each layer's self_attention: its configuration as JSON, uint8
RECORD_BYTES = 1024
LAYERS = "decoder.layers."
NAMES = {
    "tok_embeddings.weight": "embedding.word_embeddings.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "output.weight": "output_layer.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "pre_mlp_layernorm.weight",
    "feed_forward.w1.weight": "mlp.linear_fc1.weight",  # its rows: all of w1, then all of w3
    "feed_forward.w3.weight": "mlp.linear_fc1.weight",
    "feed_forward.w2.weight": "mlp.linear_fc2.weight",
    "attention.wo.weight": "self_attention.out_proj.weight",
}


def record_of(config: ModelConfig) -> Tensor:
    """uint8 [RECORD_BYTES]: what a checkpoint says of a layer. Not pickled, and by it another mixer's checkpoint is refused."""
    return torch.frombuffer(bytearray(json.dumps(config.to_dict()).encode().ljust(RECORD_BYTES)), dtype=torch.uint8)


def config_in(record: Tensor) -> ModelConfig:
    """Inverse of `record_of`; the vocabulary's size is not known to a layer. Raises: ValueError."""
    return ModelConfig.from_dict(json.loads(bytes(record.tolist()).decode()))


def place_of(name: str) -> tuple[str, int | None]:
    """(Megatron's name, layer or None) of a plain model's tensor; of a layer without `decoder.layers.`."""
    if not name.startswith("layers."):
        return NAMES[name], None
    _, layer, rest = name.split(".", 2)
    if rest in NAMES:
        return NAMES[rest], int(layer)
    own = rest.removeprefix("attention.")
    projection = re.fullmatch(r"(w[qkvg])\.weight", own)
    return f"self_attention.{f'in_proj.weight.{projection[1]}' if projection else f'core.{own}'}", int(layer)


def find_checkpoint(folder: Path) -> Path | None:
    """`folder` if it is a Megatron checkpoint, the newest one of it if it is a run's folder, else None."""
    if (folder / FORMAT).is_file():
        return folder
    if not (folder / TRACKER).is_file():
        return None
    last = (folder / TRACKER).read_text().strip()
    return folder / (last if last == "release" else f"iter_{int(last):07d}")


class MegatronCheckpoint:
    """The model's tensors in a checkpoint, by the plain model's names; nothing else in it is read, and nothing unpickled.

    Raises: FileNotFoundError, ValueError for a folder that is damaged or holds another model.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.index = folder, checkpoints.tensor_index(folder)
        keys = [key for key in self.index if re.fullmatch(rf"decoder\.layers\.(0\.)?self_attention\.{RECORD}", key)]
        if not keys:
            raise ValueError(f"{folder} holds no model of this project: its layers have no record of their mixer.")
        self.stacked = keys[0] == f"{LAYERS}self_attention.{RECORD}"
        record = checkpoints.read_tensors(folder, keys, self.index)[keys[0]]
        rows = self.index[NAMES["tok_embeddings.weight"]].size[0]
        self.config = replace(config_in(record[0] if self.stacked else record), vocab_size=rows)
        digits = re.search(r"\d+$", folder.name)
        self.step = int(digits[0]) if digits else 0
        expected = {name: list(t.shape) for name, t in meta_model(self.config).state_dict().items()}
        for name, shape in expected.items():
            key, layer = self._key(name)
            found = list(self.index[key].size)[self._is_stacked(layer) :] if key in self.index else "missing"
            wanted = [2 * shape[0], shape[1]] if key.endswith("linear_fc1.weight") else shape
            if found != wanted:
                raise ValueError(f"{folder}: {key} is {found}, and its record describes {wanted}. Take another step.")

    def _is_stacked(self, layer: int | None) -> bool:
        return self.stacked and layer is not None

    def _key(self, name: str) -> tuple[str, int | None]:
        key, layer = place_of(name)
        if layer is None:
            return key, None
        return f"{LAYERS}{key}" if self.stacked else f"{LAYERS}{layer}.{key}", layer

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Raises: ValueError."""
        whole = checkpoints.read_tensors(self.folder, sorted({self._key(name)[0] for name in names}), self.index)
        found = {}
        for name in names:
            key, layer = self._key(name)
            tensor = whole[key][layer] if self._is_stacked(layer) else whole[key]
            if key.endswith("linear_fc1.weight"):
                tensor = tensor.chunk(2)[name.endswith("w3.weight")]
            found[name] = tensor.clone()
        return found

    def check_bytes(self, names: Iterable[str]) -> None:
        """Raises ValueError unless these tensors are stored as they were saved."""
        checkpoints.check_bytes(self.folder, {self._key(name)[0] for name in names})


def write_checkpoint(folder: Path, config: ModelConfig, tensors: dict[str, Tensor]) -> None:
    """A checkpoint that Megatron's `--load` starts a run from, on any layout of ranks: `release/` and the tracker's file.

    tensors: the plain model's, in the precision in which Megatron is to find them. Raises: OSError.
    """
    by_key: dict[str, dict[int | None, list[Tensor]]] = {}
    for name in meta_model(config).state_dict():  # w1 comes before w3
        key, layer = place_of(name)
        by_key.setdefault(key, {}).setdefault(layer, []).append(tensors[name])
    found: dict[str, Any] = {
        key if None in parts else f"{LAYERS}{key}": torch.cat(parts[None])
        if None in parts
        else torch.stack([torch.cat(part) for _, part in sorted(parts.items())])
        for key, parts in by_key.items()
    }
    found[f"{LAYERS}self_attention.{RECORD}"] = record_of(config).repeat(config.n_layers, 1)
    for module in ("self_attention.in_proj", "self_attention.out_proj", "mlp.linear_fc1", "mlp.linear_fc2"):
        for layer in range(config.n_layers):  # Megatron asks for them; there is nothing in them
            found[f"{LAYERS}{module}._extra_state/shard_{layer}_{config.n_layers}"] = [None]
    step = folder / "release"
    checkpoints.write_tensors(step, found)
    versions = {"sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
    (step / FORMAT).write_text(json.dumps({"sharded_backend": "torch_dist", **versions}))
    torch.save({"checkpoint_version": 3.0}, step / "common.pt")
    (folder / TRACKER).write_text("release")
