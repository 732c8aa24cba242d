"""The model in Megatron-Core's distributed checkpoints (torch_dist), read and written without Megatron.

Such a folder is one of torch.distributed.checkpoint, with metadata.json beside the index. Its tensors' names have three forms:

stacked     GPTModel: `decoder.layers.mlp.linear_fc2.weight` is [L, dim, hidden]
by layer    GPTModel with layers of several kinds: `decoder.layers.0.mlp.linear_fc2.weight`
hybrid      HybridModel, where a mixer and its MLP are two layers: `decoder.layers.1.mlp.linear_fc2.weight`
"""

import json
import re
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from interdomain.model.config import SIZES, ModelConfig, cell_of
from interdomain.model.transformer import meta_model

from .checkpoint_index import check_bytes, read_tensors, tensor_index, write_tensors

FORMAT = "metadata.json"  # {"sharded_backend": "torch_dist", ...}
TRACKER = "latest_checkpointed_iteration.txt"
RECORD = "interdomain"  # of each layer's self_attention: its configuration as JSON, uint8
RECORD_BYTES = 1024
TOKENIZER_DIGITS = 16
LAYERS = "decoder.layers."
Form = Literal["stacked", "by layer", "hybrid"]
HYBRID_NORM = "decoder.final_norm.weight"
# Letters of HybridModel's layer pattern, by the kind of mixer. Every other kind is G, and the MLP that follows each is -.
LETTERS = {"softmax": "*", "mamba2": "M"}
FUSED = "mlp.linear_fc1.weight"  # its rows: all of w1, then all of w3
NAMES = {
    "tok_embeddings.weight": "embedding.word_embeddings.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "output.weight": "output_layer.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "pre_mlp_layernorm.weight",
    "feed_forward.w1.weight": FUSED,
    "feed_forward.w3.weight": FUSED,
    "feed_forward.w2.weight": "mlp.linear_fc2.weight",
    "attention.wo.weight": "self_attention.out_proj.weight",
}
# Settings of Megatron's TransformerConfig that change the logits and may leave all names and shapes: the plain model's values.
BACKBONE = {
    "activation_func": "silu",
    "gated_linear_unit": True,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": False,
    "use_mup": False,
}
FLAGS = "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights"
OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")  # how its tensors' names begin


class LayerRecord(NamedTuple):
    """What a layer's record says. Older records have an empty `backbone`, and no `documents`."""

    config: ModelConfig
    backbone: dict[str, Any]
    tokenizer: str | None
    documents: dict[str, list[int]] | None


def record_of(
    config: ModelConfig, tokenizer: str | None = None, documents: dict[str, list[int]] | None = None
) -> Tensor:
    """uint8 [RECORD_BYTES]: a layer's configuration and BACKBONE as JSON, which is read without unpickling.

    Args:
        tokenizer: its sha256, if it is known, of which the record has the beginning.
        documents: how documents begin and end in the data (`Documents.to_dict`), if it is known.
    """
    more: dict[str, Any] = {"backbone": BACKBONE}
    if tokenizer:
        more["tokenizer"] = tokenizer[:TOKENIZER_DIGITS]
    if documents:
        more["documents"] = documents
    record = json.dumps(config.to_dict() | more).encode()
    return torch.frombuffer(bytearray(record.ljust(RECORD_BYTES)), dtype=torch.uint8)


def read_record(record: Tensor) -> LayerRecord:
    """Inverse of `record_of`; no layer knows the vocabulary's size. Raises: ValueError."""
    settings = json.loads(bytes(record.tolist()).decode())
    backbone = settings.pop("backbone", {})
    tokenizer = settings.pop("tokenizer", None)
    documents = settings.pop("documents", None)
    return LayerRecord(ModelConfig.from_dict(settings), backbone, tokenizer, documents)


def hybrid_pattern(config: ModelConfig) -> str:
    """The model as HybridModel's --hybrid-layer-pattern, such as "G-G-*-". Raises: ValueError for two mixers of one letter."""
    mixers = [layer.mixer for layer in config.layers]
    for letter in (letters := [LETTERS.get(mixer.kind, "G") for mixer in mixers]):
        if len(same := {mixer for mixer, its in zip(mixers, letters, strict=True) if its == letter}) > 1:
            raise ValueError(
                f"the model has {len(same)} mixers that differ and would all be {letter} in a layer pattern, which has one "
                "mixer for a letter. Use GPTModel, whose layers may all differ."
            )
    return "".join(f"{letter}-" for letter in letters)


def place_of(name: str, form: Form = "stacked") -> tuple[str, int | None]:
    """(name in a Megatron checkpoint, where in it the layer is, or None) of a plain model's tensor."""
    if not name.startswith("layers."):
        return HYBRID_NORM if (name, form) == ("norm.weight", "hybrid") else NAMES[name], None
    _, layer, rest = name.split(".", 2)
    prefix = _prefix(int(layer), form, mlp=rest.startswith(("ffn_norm.", "feed_forward.")))
    place = int(layer) if form == "stacked" else None
    if rest in NAMES:
        return prefix + NAMES[rest], place
    inner = rest.removeprefix("attention.")
    projection = re.fullmatch(r"(w[qkvg])\.weight", inner)
    return f"{prefix}self_attention.{f'in_proj.weight.{projection[1]}' if projection else f'core.{inner}'}", place


def _prefix(layer: int, form: Form, mlp: bool = False) -> str:
    """How the names of a layer's tensors begin, of its mixer or its MLP."""
    if form == "stacked":
        return LAYERS
    return f"{LAYERS}{2 * layer + mlp if form == 'hybrid' else layer}."


def part_of(whole: dict[str, Tensor], name: str, form: Form = "stacked") -> Tensor:
    """A plain model's tensor, of a checkpoint's tensors by their names there; a view."""
    key, layer = place_of(name, form)
    tensor = whole[key] if layer is None else whole[key][layer]
    return tensor.chunk(2)[name.endswith("w3.weight")] if key.endswith(FUSED) else tensor


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

    Attributes: config; record: facts of the run, as in a sidecar; tokenizer: the beginning of its sha256, if the run knew it;
        settings_recorded: whether the checkpoint says that the run had this BACKBONE.

    Raises: FileNotFoundError; ValueError for a folder that is damaged or holds another model: other settings, tensors too many.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.index = folder, tensor_index(folder)
        records = [key for key in self.index if key.endswith(f"self_attention.{RECORD}")]
        if not records:
            raise ValueError(f"{folder} holds no model of this project: its layers have no record of their mixer.")
        stacked = records == [f"{LAYERS}self_attention.{RECORD}"]
        self.form: Form = "stacked" if stacked else "hybrid" if HYBRID_NORM in self.index else "by layer"
        tensors = read_tensors(folder, records)
        each_layer = [read_record(tensors[key][0] if stacked else tensors[key]) for key in sorted(records, key=_layer)]
        layers, backbones, tokenizers, documents = zip(*each_layer, strict=True)
        self.tokenizer: str | None = tokenizers[0]
        if other := {f"{name} = {x!r}" for each in backbones for name, x in each.items() if BACKBONE.get(name) != x}:
            raise ValueError(
                f"{folder} is of a run with {', '.join(sorted(other))}. A folder cannot have that: its logits would be others. "
                f"Train with {FLAGS}, and without flags of another activation or norm."
            )
        self.settings_recorded = all(each.keys() >= BACKBONE.keys() for each in backbones)
        rows = self.index[NAMES["tok_embeddings.weight"]].size[0]
        self.config = replace(layers[0], vocab_size=rows, mixers=tuple(layer.mixer for layer in layers))
        digits = re.search(r"\d+$", folder.name)
        facts = {
            "step": int(digits[0]) if digits else 0,
            "tokens": None,
            "run": {
                "host": "Megatron-Core",
                "settings_recorded": self.settings_recorded,
                "documents": documents[0],
            },
            "versions": {},
        }
        self.record = {**cell_of(self.config, _size_of(self.config))._asdict(), **facts}
        expected = {name: list(t.shape) for name, t in meta_model(self.config).state_dict().items()}
        known = {*records, *(place_of(name, self.form)[0] for name in expected)}
        if more := sorted(key for key in self.index if key not in known and not OPTIMIZER.match(key)):
            raise ValueError(
                f"{folder} has {len(more)} tensor(s) for which a folder has no place, first of all {more[0]}. Without them "
                f"the logits would be others. Train with {FLAGS}, and without experts, position embeddings or MTP layers."
            )
        for name, shape in expected.items():
            key, layer = place_of(name, self.form)
            stored = list(self.index[key].size) if key in self.index else "missing"
            rows = shape[:1] if not key.endswith(FUSED) else [2 * shape[0]]
            wanted = [*([] if layer is None else [self.config.n_layers]), *rows, *shape[1:]]
            if stored != wanted:
                raise ValueError(
                    f"{folder}: {key} is {stored}, and a folder needs {wanted}. Train with {FLAGS} and --ffn-hidden-size "
                    f"{self.config.ffn_hidden}. If the run had these, the checkpoint is damaged: take another step."
                )

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Raises: ValueError."""
        keys = sorted({place_of(name, self.form)[0] for name in names})
        whole = read_tensors(self.folder, keys)
        return {name: part_of(whole, name, self.form).clone() for name in names}

    def check_bytes(self, names: Iterable[str]) -> None:
        """Raises ValueError unless these tensors are stored as they were saved."""
        check_bytes(self.folder, {place_of(name, self.form)[0] for name in names})


def _layer(key: str) -> int:
    """The number in a key; 0 without one."""
    number = re.search(r"\d+", key)
    return int(number[0]) if number else 0


def _size_of(config: ModelConfig) -> str:
    """The row of SIZES that the model may be of."""
    shape = ("dim", "n_layers", "n_heads")
    rows = (name for name, row in SIZES.items() if all(row[key] == getattr(config, key) for key in shape))
    return next(rows, "unknown")


def write_checkpoint(
    folder: Path,
    config: ModelConfig,
    tensors: dict[str, Tensor],
    tokenizer: str | None = None,
    hybrid: bool = False,
    documents: dict[str, list[int]] | None = None,
) -> None:
    """A checkpoint that Megatron's `--load` starts a run from, on any layout of ranks: `release/` and the tracker's file.

    Args:
        tensors: the plain model's, in the precision in which Megatron is to find them.
        tokenizer: its sha256.
        hybrid: for HybridModel, else for GPTModel.
        documents: as of `record_of`.
    Raises: OSError.
    """
    by_key: dict[str, dict[int | None, list[Tensor]]] = {}
    form: Form = "hybrid" if hybrid else "stacked" if len(config.mixers) == 1 else "by layer"
    for name in meta_model(config).state_dict():  # layer by layer, w1 before w3
        key, layer = place_of(name, form)
        by_key.setdefault(key, {}).setdefault(layer, []).append(tensors[name])
    state: dict[str, Any] = {}
    for key, layers in by_key.items():
        parts = [torch.cat(part) for part in layers.values()]
        state[key] = parts[0] if None in layers else torch.stack(parts)
    if form == "stacked":
        state[f"{LAYERS}self_attention.{RECORD}"] = record_of(config, tokenizer, documents).repeat(config.n_layers, 1)
    if hybrid:
        state["output_layer._extra_state/shard_0_1"] = [None]
    for i, layer_config in enumerate(config.layers):
        if form != "stacked":
            state[f"{_prefix(i, form)}self_attention.{RECORD}"] = record_of(layer_config, tokenizer, documents)
        place = f"shard_{i}_{config.n_layers}" if form == "stacked" else "shard_0_1"
        for module in ("self_attention.in_proj", "self_attention.out_proj", "mlp.linear_fc1", "mlp.linear_fc2"):
            # Megatron asks for them; there is nothing in them.
            prefix = _prefix(i, form, mlp=module.startswith("mlp."))
            state[f"{prefix}{module}._extra_state/{place}"] = [None]
    step = folder / "release"
    write_tensors(step, state)
    versions = {"sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
    (step / FORMAT).write_text(json.dumps({"sharded_backend": "torch_dist", **versions}))
    common: dict[str, Any] = {"checkpoint_version": 3.0}
    if hybrid:  # else Megatron takes it for one of GPTModel, and translates; what it then compares
        shape = dict(num_layers=2 * config.n_layers, hidden_size=config.dim, num_attention_heads=config.n_heads)
        common["args"] = Namespace(hybrid_layer_pattern=hybrid_pattern(config), **shape)
    torch.save(common, step / "common.pt")
    (folder / TRACKER).write_text("release")
