"""The model in Megatron-Core's distributed checkpoints (torch_dist), without importing Megatron.

Such a folder is one of torch.distributed.checkpoint, with metadata.json beside the index. The names
of its tensors have one of three forms:

stacked     GPTModel: `decoder.layers.mlp.linear_fc2.weight` is [L, dim, hidden]
by layer    GPTModel with layers of several kinds: `decoder.layers.0.mlp.linear_fc2.weight`
hybrid      HybridModel, whose mixers and MLPs are layers: `decoder.layers.1.mlp.linear_fc2.weight`

The plain model is `interdomain.model.Transformer`, as an exported model is. Functions here take its
names, such as `layers.0.feed_forward.w2.weight`.
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

# Megatron's file in a checkpoint: {"sharded_backend": "torch_dist", ...}
FORMAT = "metadata.json"
# Megatron's file in a run's folder, which names the latest checkpoint.
TRACKER = "latest_checkpointed_iteration.txt"
# The tensor of each layer's self_attention that has its configuration as JSON, uint8.
RECORD = "interdomain"
RECORD_BYTES = 1024  # the size of that tensor; JSON is followed by spaces
TOKENIZER_DIGITS = 16  # digits of the tokenizer's sha256 that a record has
LAYERS = "decoder.layers."  # how the names of all layers' tensors begin
Form = Literal["stacked", "by layer", "hybrid"]
HYBRID_NORM = "decoder.final_norm.weight"  # the last norm in a checkpoint of HybridModel
# Letters of HybridModel's layer pattern by the kind of mixer. Every other kind is G. The MLP that
# follows each mixer is -.
LETTERS = {"softmax": "*", "mamba2": "M"}
FUSED = "mlp.linear_fc1.weight"  # its rows are all of w1, then all of w3
# Names in a checkpoint, by the plain model's. The first three are whole names; the others follow
# the beginning of a layer's names.
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
# Settings of Megatron's TransformerConfig that change the logits and can leave all names and shapes
# as they are, with the plain model's values.
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
# Flags of Megatron-LM that a run needs, for errors.
FLAGS = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights"
)
OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")  # how the names of its tensors begin


class LayerRecord(NamedTuple):
    """The contents of a layer's record.

    Attributes:
        config: The configuration of a plain model all of whose layers are like this one. Its
            vocabulary's size is the default: a layer does not know it.
        backbone: The settings of BACKBONE with their values in the run.
        tokenizer: The beginning of the sha256 of the run's tokenizer; None if the run did not know
            it.
        documents: How documents begin and end in the data (`Documents.to_dict`); None if the run
            did not know it.
    """

    config: ModelConfig
    backbone: dict[str, Any]
    tokenizer: str | None
    documents: dict[str, list[int]] | None


def record_of(
    config: ModelConfig, tokenizer: str | None = None, documents: dict[str, list[int]] | None = None
) -> Tensor:
    """Makes a layer's record.

    Args:
        config: The configuration of a plain model all of whose layers are like this one.
        tokenizer: The sha256 of the corpus's tokenizer, if it is known.
        documents: How documents begin and end in the data (`Documents.to_dict`), if it is known.
    Returns:
        JSON as uint8 [RECORD_BYTES], which is read without unpickling.
    """
    record: dict[str, Any] = config.to_dict() | {"backbone": BACKBONE}
    if tokenizer:
        record["tokenizer"] = tokenizer[:TOKENIZER_DIGITS]
    if documents:
        record["documents"] = documents
    text = json.dumps(record).encode()
    return torch.frombuffer(bytearray(text.ljust(RECORD_BYTES)), dtype=torch.uint8)


def read_record(record: Tensor) -> LayerRecord:
    """Reads what `record_of` has made.

    Raises:
        ValueError: It is not such a record, or of another version.
    """
    settings = json.loads(bytes(record.tolist()).decode())
    backbone = settings.pop("backbone", {})
    tokenizer = settings.pop("tokenizer", None)
    documents = settings.pop("documents", None)
    return LayerRecord(ModelConfig.from_dict(settings), backbone, tokenizer, documents)


def hybrid_pattern(config: ModelConfig) -> str:
    """Returns the layers of a model as HybridModel's --hybrid-layer-pattern, such as "G-G-*-".

    Args:
        config: The plain model's configuration.
    Raises:
        ValueError: Two mixers that differ would have one letter.
    """
    pattern = ""
    mixers = {}
    for layer in config.layers:
        letter = LETTERS.get(layer.mixer.kind, "G")
        if mixers.setdefault(letter, layer.mixer) != layer.mixer:
            raise ValueError(
                f"the model has mixers that differ and would all be {letter} in a layer pattern, "
                "which has one mixer for a letter. Use GPTModel, whose layers may all differ."
            )
        pattern += f"{letter}-"
    return pattern


def place_of(name: str, form: Form = "stacked") -> tuple[str, int | None]:
    """Finds a plain model's tensor in a Megatron checkpoint.

    Args:
        name: Its name in the plain model.
        form: "stacked" if a tensor of the checkpoint has all layers, "by layer" if each layer has
            its own, or "hybrid" if a mixer and its MLP are two layers.
    Returns:
        The name of the tensor in the checkpoint that holds it; and its index along that tensor's
        first dimension if layers are stacked, else None.
    """
    if not name.startswith("layers."):
        if name == "norm.weight" and form == "hybrid":
            return HYBRID_NORM, None
        return NAMES[name], None
    _, layer, rest = name.split(".", 2)
    prefix = _prefix(int(layer), form, is_mlp=rest.startswith(("ffn_norm.", "feed_forward.")))
    stacked_at = int(layer) if form == "stacked" else None
    if rest in NAMES:
        return prefix + NAMES[rest], stacked_at
    inner = rest.removeprefix("attention.")
    if re.fullmatch(r"w[qkvg]\.weight", inner):
        return f"{prefix}self_attention.in_proj.weight.{inner[:2]}", stacked_at
    return f"{prefix}self_attention.core.{inner}", stacked_at


def _prefix(layer: int, form: Form, is_mlp: bool = False) -> str:
    """Returns how the names of a layer's tensors begin in a checkpoint.

    Args:
        layer: The layer's place in the plain model.
        form: The form of the checkpoint's names.
        is_mlp: True for the tensors of its MLP, False for those of its mixer. HybridModel has a
            layer for each of the two.
    """
    if form == "stacked":
        return LAYERS
    if form == "hybrid":
        layer = 2 * layer + is_mlp
    return f"{LAYERS}{layer}."


def part_of(whole: dict[str, Tensor], name: str, form: Form = "stacked") -> Tensor:
    """Returns a plain model's tensor as a view of a checkpoint's.

    Args:
        whole: The checkpoint's tensors by their names there. A tensor may hold those of all layers,
            or w1 and w3 of a layer.
        name: The tensor's name in the plain model.
        form: "stacked" if a tensor of the checkpoint has all layers, "by layer" if each layer has
            its own, or "hybrid" if a mixer and its MLP are two layers.
    """
    key, layer = place_of(name, form)
    tensor = whole[key] if layer is None else whole[key][layer]
    # One tensor of the checkpoint has the rows of w1, then those of w3.
    if key.endswith(FUSED):
        w1, w3 = tensor.chunk(2)
        return w3 if name.endswith("w3.weight") else w1
    return tensor


def find_checkpoint(folder: Path) -> Path | None:
    """Finds the Megatron checkpoint of a folder.

    It is the folder, or the newest checkpoint in it if it is a run's folder; None if there is none.
    """
    if (folder / FORMAT).is_file():
        return folder
    if not (folder / TRACKER).is_file():
        return None
    last = (folder / TRACKER).read_text().strip()
    if last != "release":
        last = f"iter_{int(last):07d}"
    return folder / last


class MegatronCheckpoint:
    """The model's tensors in a checkpoint, by the plain model's names.

    Nothing else is read, and nothing is unpickled.

    Args:
        folder: The checkpoint.
    Attributes:
        folder: The checkpoint.
        index: The description of each tensor, by its name in the checkpoint.
        form: The form of the checkpoint's names: "stacked", "by layer" or "hybrid".
        config: The plain model's configuration.
        record: The run's record, with the same members as interdomain.json.
        tokenizer: The beginning of the sha256 of the run's tokenizer; None if the run did not know
            it.
    Raises:
        FileNotFoundError: The folder holds no checkpoint.
        ValueError: It is damaged, or of another model: its settings differ, or it has other
            tensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = tensor_index(folder)
        keys = [key for key in self.index if key.endswith(f"self_attention.{RECORD}")]
        if not keys:
            raise ValueError(
                f"{folder} holds no model of this project: its layers have no record of their "
                "mixer."
            )

        # The form of the names, and the record of each layer.
        if keys == [f"{LAYERS}self_attention.{RECORD}"]:
            self.form: Form = "stacked"
            stack = read_tensors(folder, keys)[keys[0]]
            # All layers are alike.
            records = [read_record(stack[0])]
            mixers = records[0].config.mixers
        else:
            self.form = "hybrid" if HYBRID_NORM in self.index else "by layer"
            keys.sort(key=_layer_number)
            tensors = read_tensors(folder, keys)
            records = [read_record(tensors[key]) for key in keys]
            mixers = tuple(record.config.mixer for record in records)

        # The model.
        rows = self.index[NAMES["tok_embeddings.weight"]].size[0]
        self.config = replace(records[0].config, vocab_size=rows, mixers=mixers)
        self.tokenizer = records[0].tokenizer
        for record in records:
            _check_backbone(folder, record.backbone)
        self._check_tensors(keys)

        # The record of the run.
        digits = re.search(r"\d+$", folder.name)
        step = int(digits[0]) if digits else 0
        self.record: dict[str, Any] = {
            **cell_of(self.config, _size_of(self.config))._asdict(),
            "step": step,
            "tokens": None,
            "run": {"host": "Megatron-Core", "documents": records[0].documents},
            "versions": {},
        }

    def _check_tensors(self, records: list[str]) -> None:
        """Checks that the checkpoint has all tensors of the model in their shapes, and no others.

        An optimizer's tensors may be there, too.

        Args:
            records: The names of the tensors that are the layers' records.
        Raises:
            ValueError: A tensor is missing, has another shape, or is not of the model.
        """
        tensors = meta_model(self.config).state_dict()
        places = {name: place_of(name, self.form) for name in tensors}
        known = {*records, *(key for key, _ in places.values())}
        others = [key for key in self.index if key not in known and not OPTIMIZER.match(key)]
        if others:
            raise ValueError(
                f"{self.folder} has {len(others)} tensor(s) for which an exported model has no "
                f"place, such as {min(others)}. Without them the logits would be others. Train "
                f"with {FLAGS}, and without experts, position embeddings or MTP layers."
            )
        for name, (key, layer) in places.items():
            shape = list(tensors[name].shape)
            if key.endswith(FUSED):
                shape[0] *= 2
            if layer is not None:
                shape.insert(0, self.config.n_layers)
            stored: Any = "missing"
            if key in self.index:
                stored = list(self.index[key].size)
            if stored != shape:
                raise ValueError(
                    f"{self.folder}: {key} is {stored}, and an exported model needs {shape}. "
                    f"Train with {FLAGS} and --ffn-hidden-size {self.config.ffn_hidden}. If the "
                    "run had these, the checkpoint is damaged: take another step."
                )

    def stored_together(self, names: list[str]) -> list[list[str]]:
        """Divides tensors of the model by the tensor of the checkpoint that holds them.

        Args:
            names: Their names in the plain model.
        """
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(place_of(name, self.form)[0], []).append(name)
        return list(groups.values())

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Reads tensors of the model.

        Args:
            names: Their names in the plain model.
        Returns:
            The tensors by these names.
        Raises:
            ValueError: The checkpoint is damaged.
        """
        # Tensors of the checkpoint may hold several of the model: each is read once. The copies let
        # go of the rest.
        keys = sorted({place_of(name, self.form)[0] for name in names})
        whole = read_tensors(self.folder, keys)
        return {name: part_of(whole, name, self.form).clone() for name in names}

    def check_bytes(self, names: Iterable[str]) -> None:
        """Checks that tensors of the model are stored as they were saved.

        Args:
            names: Their names in the plain model.
        Raises:
            ValueError: The bytes of a tensor do not match their checksum.
        """
        check_bytes(self.folder, {place_of(name, self.form)[0] for name in names})


def _layer_number(key: str) -> int:
    """Returns the number in a name such as "decoder.layers.3.self_attention.interdomain"."""
    return int(key.removeprefix(LAYERS).partition(".")[0])


def _check_backbone(folder: Path, backbone: dict[str, Any]) -> None:
    """Checks that a run had the plain model's settings of BACKBONE.

    Args:
        folder: The checkpoint, for the error.
        backbone: The settings that the run recorded.
    Raises:
        ValueError: It had others, or did not record them.
    """
    for name in sorted(BACKBONE.keys() | backbone.keys()):
        value = backbone.get(name, "not recorded")
        if name not in BACKBONE or value != BACKBONE[name]:
            raise ValueError(
                f"{folder} is of a run with {name} = {value!r}. An exported model cannot have "
                f"that: its logits would be others. Train with {FLAGS}, and without flags of "
                "another activation or norm."
            )


def _size_of(config: ModelConfig) -> str:
    """Returns the row of SIZES with the model's width, layers and heads, or "unknown"."""
    shape = (config.dim, config.n_layers, config.n_heads)
    for name, row in SIZES.items():
        if shape == (row["dim"], row["n_layers"], row["n_heads"]):
            return name
    return "unknown"


def open_checkpoint(folder: Path, tokenizer: Path | None) -> tuple[MegatronCheckpoint, Tokenizer]:
    """Opens a checkpoint and its tokenizer.

    Args:
        folder: The checkpoint.
        tokenizer: The folder of the run's corpus, or the file of the corpus's tokenizer. None is an
            error, because the checkpoint has no tokenizer.
    Raises:
        ValueError: No tokenizer is given, or not that of the run.
    """
    if not tokenizer:
        raise ValueError(
            f"{folder} is a checkpoint of Megatron-Core, without a tokenizer. Give the corpus's "
            "with --tokenizer."
        )
    checkpoint = MegatronCheckpoint(folder)
    loaded = load_tokenizer(tokenizer)
    check_vocab(loaded.vocab_size, checkpoint.config.vocab_size)
    digits = loaded.sha256[:TOKENIZER_DIGITS]
    if checkpoint.tokenizer not in (None, digits):
        raise ValueError(
            f"--tokenizer {tokenizer} is not the tokenizer of the run's corpus (sha256 "
            f"{digits}... against {checkpoint.tokenizer}...). Give the corpus that the run was "
            "trained on."
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
    """Writes a checkpoint from which Megatron's `--load` starts a run, on any layout of ranks.

    It is the folder `release`, with Megatron's file that names the latest checkpoint beside it.

    Args:
        folder: The folder to write to.
        config: The plain model's configuration.
        tensors: The plain model's tensors by name, in the precision that Megatron is to find.
        tokenizer: The sha256 of the model's tokenizer, if it is known.
        hybrid: True for HybridModel, False for GPTModel.
        documents: How documents begin and end in the data (`Documents.to_dict`), if it is known.
    Raises:
        OSError: The folder cannot be written.
    """
    if hybrid:
        form: Form = "hybrid"
    elif len(config.mixers) == 1:
        form = "stacked"
    else:
        form = "by layer"

    # The parts of each tensor of the checkpoint: by layer if layers are stacked (else by None), and
    # w1 before w3 of a layer. Join the parts of a layer, then stack the layers.
    parts: dict[str, dict[int | None, list[Tensor]]] = {}
    for name in meta_model(config).state_dict():
        key, layer = place_of(name, form)
        parts.setdefault(key, {}).setdefault(layer, []).append(tensors[name])
    state: dict[str, Any] = {}
    for key, layers in parts.items():
        joined = [torch.cat(part) for part in layers.values()]
        state[key] = joined[0] if None in layers else torch.stack(joined)

    # The records, and empty states of Megatron's linear layers, which it asks for.
    if form == "stacked":
        record = record_of(config, tokenizer, documents)
        state[f"{LAYERS}self_attention.{RECORD}"] = record.repeat(config.n_layers, 1)
    if hybrid:
        state["output_layer._extra_state/shard_0_1"] = [None]
    for i, layer_config in enumerate(config.layers):
        attention = f"{_prefix(i, form)}self_attention"
        mlp = f"{_prefix(i, form, is_mlp=True)}mlp"
        # Megatron ends the name of an extra state by its place among the stacked layers, and their
        # number.
        shard = "shard_0_1"
        if form == "stacked":
            shard = f"shard_{i}_{config.n_layers}"
        if form != "stacked":
            state[f"{attention}.{RECORD}"] = record_of(layer_config, tokenizer, documents)
        state[f"{attention}.in_proj._extra_state/{shard}"] = [None]
        state[f"{attention}.out_proj._extra_state/{shard}"] = [None]
        state[f"{mlp}.linear_fc1._extra_state/{shard}"] = [None]
        state[f"{mlp}.linear_fc2._extra_state/{shard}"] = [None]
    step = folder / "release"
    write_tensors(step, state)

    # Megatron's own files.
    versions = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    (step / FORMAT).write_text(json.dumps(versions))
    common: dict[str, Any] = {"checkpoint_version": 3.0}
    if hybrid:
        # Without arguments Megatron takes it for a checkpoint of GPTModel, and translates it. It
        # compares these four with those of the run.
        common["args"] = Namespace(
            hybrid_layer_pattern=hybrid_pattern(config),
            num_layers=2 * config.n_layers,
            hidden_size=config.dim,
            num_attention_heads=config.n_heads,
        )
    torch.save(common, step / "common.pt")
    (folder / TRACKER).write_text("release")
