"""The model in Megatron-Core's distributed checkpoints (torch_dist), read and written without importing Megatron.

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

from interdomain.checkpoint.index import (
    check_bytes,
    read_tensors,
    tensor_index,
    write_tensors,
)
from interdomain.data import Tokenizer, check_vocab, load_tokenizer, recorded_documents
from interdomain.model.config import SIZES, ModelConfig, cell_of
from interdomain.model.transformer import meta_model

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
FLAGS = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights"
)
OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")  # how its tensors' names begin


class LayerRecord(NamedTuple):
    """The contents of a layer's record.

    config: the model, as if all its layers were like this one; no layer knows the vocabulary's size. backbone: BACKBONE of the
    run. tokenizer: the beginning of its sha256, if the run knew it. documents: how documents begin and end, likewise.
    """

    config: ModelConfig
    backbone: dict[str, Any]
    tokenizer: str | None
    documents: dict[str, list[int]] | None


def record_of(
    config: ModelConfig, tokenizer: str | None = None, documents: dict[str, list[int]] | None = None
) -> Tensor:
    """A layer's record, uint8 [RECORD_BYTES]: JSON, which is read without unpickling.

    Args:
        tokenizer: The sha256 of the corpus's tokenizer, if it is known.
        documents: How documents begin and end in the data (`Documents.to_dict`), if it is known.
    """
    record: dict[str, Any] = config.to_dict() | {"backbone": BACKBONE}
    if tokenizer:
        record["tokenizer"] = tokenizer[:TOKENIZER_DIGITS]
    if documents:
        record["documents"] = documents
    text = json.dumps(record).encode()
    return torch.frombuffer(bytearray(text.ljust(RECORD_BYTES)), dtype=torch.uint8)


def read_record(record: Tensor) -> LayerRecord:
    """Inverse of `record_of`. Raises: ValueError."""
    settings = json.loads(bytes(record.tolist()).decode())
    backbone = settings.pop("backbone", {})
    tokenizer = settings.pop("tokenizer", None)
    documents = settings.pop("documents", None)
    return LayerRecord(ModelConfig.from_dict(settings), backbone, tokenizer, documents)


def hybrid_pattern(config: ModelConfig) -> str:
    """The model as HybridModel's --hybrid-layer-pattern, such as "G-G-*-". Raises: ValueError for two mixers of one letter."""
    pattern, mixers = "", {}
    for layer in config.layers:
        letter = LETTERS.get(layer.mixer.kind, "G")
        if mixers.setdefault(letter, layer.mixer) != layer.mixer:
            raise ValueError(
                f"the model has mixers that differ and would all be {letter} in a layer pattern, which has one mixer for a "
                "letter. Use GPTModel, whose layers may all differ."
            )
        pattern += f"{letter}-"
    return pattern


def place_of(name: str, form: Form = "stacked") -> tuple[str, int | None]:
    """Where a plain model's tensor is in a Megatron checkpoint: its name there, and its layer where layers are stacked."""
    if not name.startswith("layers."):
        return HYBRID_NORM if (name, form) == ("norm.weight", "hybrid") else NAMES[name], None
    _, layer, rest = name.split(".", 2)
    prefix = _prefix(int(layer), form, mlp=rest.startswith(("ffn_norm.", "feed_forward.")))
    stacked_at = int(layer) if form == "stacked" else None
    if rest in NAMES:
        return prefix + NAMES[rest], stacked_at
    inner = rest.removeprefix("attention.")
    if re.fullmatch(r"w[qkvg]\.weight", inner):
        return f"{prefix}self_attention.in_proj.weight.{inner[:2]}", stacked_at
    return f"{prefix}self_attention.core.{inner}", stacked_at


def _prefix(layer: int, form: Form, mlp: bool = False) -> str:
    """How the names of a layer's tensors begin, of its mixer or its MLP."""
    if form == "stacked":
        return LAYERS
    return f"{LAYERS}{2 * layer + mlp if form == 'hybrid' else layer}."


def part_of(whole: dict[str, Tensor], name: str, form: Form = "stacked") -> Tensor:
    """A plain model's tensor, of a checkpoint's tensors by their names there; a view."""
    key, layer = place_of(name, form)
    tensor = whole[key] if layer is None else whole[key][layer]
    if key.endswith(FUSED):
        w1, w3 = tensor.chunk(2)
        return w3 if name.endswith("w3.weight") else w1
    return tensor


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

    Attributes:
        config: The model.
        record: The run's record, as beside a checkpoint of this project.
        tokenizer: The beginning of its sha256, if the run knew it.
    Raises:
        FileNotFoundError: The folder holds no checkpoint.
        ValueError: It is damaged, or of another model: other settings, or tensors too many.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = tensor_index(folder)
        keys = [key for key in self.index if key.endswith(f"self_attention.{RECORD}")]
        if not keys:
            raise ValueError(
                f"{folder} holds no model of this project: its layers have no record of their mixer."
            )

        # The form of the names, and the record of each layer.
        stacked = keys == [f"{LAYERS}self_attention.{RECORD}"]
        self.form: Form = (
            "stacked" if stacked else "hybrid" if HYBRID_NORM in self.index else "by layer"
        )
        keys.sort(
            key=lambda key: int(key.removeprefix(LAYERS).partition(".")[0]) if not stacked else 0
        )
        tensors = read_tensors(folder, keys)
        records = [read_record(tensors[key][0] if stacked else tensors[key]) for key in keys]

        # The model.
        mixers = (
            tuple(record.config.mixer for record in records)
            if not stacked
            else records[0].config.mixers
        )
        rows = self.index[NAMES["tok_embeddings.weight"]].size[0]
        self.config = replace(records[0].config, vocab_size=rows, mixers=mixers)
        self.tokenizer = records[0].tokenizer
        for record in records:
            _check_backbone(folder, record.backbone)
        self._check_tensors(keys)

        # The record of the run.
        step = re.search(r"\d+$", folder.name)
        self.record: dict[str, Any] = {
            **cell_of(self.config, _size_of(self.config))._asdict(),
            "step": int(step[0]) if step else 0,
            "tokens": None,
            "run": {"host": "Megatron-Core", "documents": records[0].documents},
            "versions": {},
        }

    def _check_tensors(self, records: list[str]) -> None:
        """Raises: ValueError unless the checkpoint has all tensors of the model, in their shapes, and no others."""
        shapes = {
            name: list(tensor.shape)
            for name, tensor in meta_model(self.config).state_dict().items()
        }
        known = {*records, *(place_of(name, self.form)[0] for name in shapes)}
        if more := sorted(
            key for key in self.index if key not in known and not OPTIMIZER.match(key)
        ):
            raise ValueError(
                f"{self.folder} has {len(more)} tensor(s) for which a folder has no place, first of all {more[0]}. Without "
                f"them the logits would be others. Train with {FLAGS}, and without experts, position embeddings or MTP layers."
            )
        for name, shape in shapes.items():
            key, layer = place_of(name, self.form)
            if key.endswith(FUSED):
                shape = [2 * shape[0], *shape[1:]]
            if layer is not None:
                shape = [self.config.n_layers, *shape]
            stored = list(self.index[key].size) if key in self.index else "missing"
            if stored != shape:
                raise ValueError(
                    f"{self.folder}: {key} is {stored}, and a folder needs {shape}. Train with {FLAGS} and --ffn-hidden-size "
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


def _check_backbone(folder: Path, backbone: dict[str, Any]) -> None:
    """Raises: ValueError for settings of a run that the plain model does not have, or that are not recorded."""
    for name in sorted(BACKBONE.keys() | backbone.keys()):
        value = backbone.get(name, "not recorded")
        if BACKBONE.get(name) != value or name not in BACKBONE:
            raise ValueError(
                f"{folder} is of a run with {name} = {value!r}. A folder cannot have that: its logits would be others. "
                f"Train with {FLAGS}, and without flags of another activation or norm."
            )


def _size_of(config: ModelConfig) -> str:
    """The row of SIZES that the model may be of."""
    for name, row in SIZES.items():
        if all(row[key] == getattr(config, key) for key in ("dim", "n_layers", "n_heads")):
            return name
    return "unknown"


def open_checkpoint(folder: Path, tokenizer: Path | None) -> tuple[MegatronCheckpoint, Tokenizer]:
    """A checkpoint and the tokenizer of its run's corpus. Raises: ValueError without a tokenizer or with another one."""
    if not tokenizer:
        raise ValueError(
            f"{folder} is a checkpoint of Megatron-Core, without a tokenizer. Give the corpus's with --tokenizer."
        )
    checkpoint = MegatronCheckpoint(folder)
    loaded = load_tokenizer(tokenizer)
    check_vocab(loaded.vocab_size, checkpoint.config.vocab_size)
    digits = loaded.sha256[:TOKENIZER_DIGITS]
    if checkpoint.tokenizer not in (None, digits):
        raise ValueError(
            f"--tokenizer {tokenizer} is not the tokenizer of the run's corpus (sha256 {digits}... against "
            f"{checkpoint.tokenizer}...). Give the corpus that the run was trained on."
        )
    loaded.documents = recorded_documents(checkpoint.record["run"], loaded)
    return checkpoint, loaded


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
        tensors: The plain model's, in the precision in which Megatron is to find them.
        tokenizer: Its sha256.
        hybrid: For HybridModel, else for GPTModel.
        documents: As of `record_of`.
    Raises:
        OSError: The folder cannot be written.
    """
    form: Form = "hybrid" if hybrid else "stacked" if len(config.mixers) == 1 else "by layer"

    # The tensors: w1 and w3 of a layer are one there, then the layers.
    parts: dict[str, dict[int | None, list[Tensor]]] = {}
    for name in meta_model(config).state_dict():  # layer by layer, w1 before w3
        key, layer = place_of(name, form)
        parts.setdefault(key, {}).setdefault(layer, []).append(tensors[name])
    state: dict[str, Any] = {}
    for key, layers in parts.items():
        joined = [torch.cat(part) for part in layers.values()]
        state[key] = joined[0] if None in layers else torch.stack(joined)

    # The records, and empty states of Megatron's linears, which it asks for.
    if form == "stacked":
        state[f"{LAYERS}self_attention.{RECORD}"] = record_of(config, tokenizer, documents).repeat(
            config.n_layers, 1
        )
    if hybrid:
        state["output_layer._extra_state/shard_0_1"] = [None]
    for i, layer_config in enumerate(config.layers):
        mixer, mlp = _prefix(i, form), _prefix(i, form, mlp=True)
        if form != "stacked":
            state[f"{mixer}self_attention.{RECORD}"] = record_of(layer_config, tokenizer, documents)
        shard = f"shard_{i}_{config.n_layers}" if form == "stacked" else "shard_0_1"
        for linear in (
            f"{mixer}self_attention.in_proj",
            f"{mixer}self_attention.out_proj",
            f"{mlp}mlp.linear_fc1",
            f"{mlp}mlp.linear_fc2",
        ):
            state[f"{linear}._extra_state/{shard}"] = [None]
    step = folder / "release"
    write_tensors(step, state)

    # Megatron's own files.
    versions = {
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    (step / FORMAT).write_text(json.dumps({"sharded_backend": "torch_dist", **versions}))
    common: dict[str, Any] = {"checkpoint_version": 3.0}
    if hybrid:  # else Megatron takes it for one of GPTModel, and translates; these it then compares
        common["args"] = Namespace(
            hybrid_layer_pattern=hybrid_pattern(config),
            num_layers=2 * config.n_layers,
            hidden_size=config.dim,
            num_attention_heads=config.n_heads,
        )
    torch.save(common, step / "common.pt")
    (folder / TRACKER).write_text("release")
