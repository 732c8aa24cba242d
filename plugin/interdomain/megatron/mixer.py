"""The mixer as a Megatron layer's self-attention: this rank's heads between a column-parallel and a row-parallel projection.

Shapes: S time, B batch (Megatron's order is [S, B, dim]), H heads, R head_dim.
"""

import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor, nn
from torch.nn import functional as F

from interdomain.model.config import FIXED_STATE, Execution, MixerConfig, ModelConfig, state_shape
from interdomain.model.feature_maps import KeptInFloat32
from interdomain.model.initialize import initial_value
from interdomain.model.layers import InputNorm, Linear, rope_of
from interdomain.model.shard import Part
from interdomain.model.transformer import mixer_class

from .checkpoint import RECORD, read_record, record_of
from .settings import refuse
from .training import DynamicsOnce

# By all heads, so by all ranks; every other parameter of interdomain attention is per head.
SHARED = ("k_norm.weight", "v_norm.weight", "o_norm.weight")
# Projections of the baselines with a fixed state, as far as one has them, of whose products every rank needs all.
OF_ALL_HEADS = ("wq", "wk", "wa", "wb", "gate_down")


class Computed(nn.Module):
    """Takes the place of a projection: its part of a product that was computed for all of them at once.

    weight: a matrix that every rank has all of; None for rows of in_proj."""

    def __init__(self, name: str, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.name, self.weight = name, weight

    def forward(self, parts: dict[str, Tensor]) -> Tensor:
        return parts[self.name]


@dataclass
class InterdomainAttentionSubmodules:
    """The modules of the two projections: Megatron's own or Transformer Engine's. in_proj may begin with the input norm."""

    in_proj: ModuleSpec | type
    out_proj: ModuleSpec | type


class Float32Norm(KeptInFloat32, InputNorm):
    """An input norm in the dynamics' group of the optimizer: Megatron cannot save a group that mixes precisions."""


def plain_config(
    settings: Any,
    groups: int,
    mixers: tuple[MixerConfig, ...],
    mlp_apart: bool = False,
    **others: Any,
) -> ModelConfig:
    """The plain model of a TransformerConfig, or of parsed arguments, with so many heads of keys.

    mlp_apart: whether a mixer and its MLP are two layers there, as in HybridModel. others: of ModelConfig.
    """
    shared = groups if groups != settings.num_attention_heads else None
    return ModelConfig(
        dim=settings.hidden_size,
        n_layers=settings.num_layers // (2 if mlp_apart else 1),
        n_heads=settings.num_attention_heads,
        head_dim=settings.kv_channels,
        norm_eps=settings.layernorm_epsilon,
        mixers=tuple(m if m.kind in FIXED_STATE else replace(m, n_kv_heads=shared) for m in mixers),
        **others,
    )


class InterdomainAttention(MegatronModule):
    """hidden_states [S, B, dim] ([S / tp, B, dim] with sequence parallelism) -> (the same shape, None).

    `core` is the plain model's mixer for this rank's heads, without its projections. Those of queries, keys, values and gate
    are one column-parallel product, `in_proj`, whose rows on a rank are [wq | wk | wv | wg] of its heads. A baseline with a
    fixed state has all its other parameters on every rank, and computes its part of the heads (`Mixer.heads`).

    Args:
        mixers: the settings of the layers in order, repeated where they are fewer, but for n_kv_heads: config.num_query_groups.
        seed: of the initial values: `initial_value` of the whole tensors, of which each rank takes its part.
        contiguous: whether context-parallel ranks have the sequences' pieces in order (`training.contiguous`).
        mlp_apart: whether layer_number counts a mixer and its MLP as two, as HybridModel does.
        tokenizer: the sha256 of the corpus's, for the record in a checkpoint.
        documents: how documents begin and end in the corpus, likewise.
    """

    def __init__(
        self,
        config: Any,
        submodules: InterdomainAttentionSubmodules,
        layer_number: int,
        pg_collection: Any = None,
        *,
        mixers: tuple[MixerConfig, ...],
        rope_theta: float,
        max_seq_len: int,
        execution: Execution | None,
        seed: int,
        contiguous: bool = False,
        mlp_apart: bool,
        tokenizer: str | None = None,
        documents: dict[str, list[int]] | None = None,
        **_: Any,  # of attention, in some versions
    ) -> None:
        super().__init__(config)
        self.pg_collection = pg_collection
        self.tp_group = pg_collection.tp
        tp = self.tp_group.size()
        heads, groups = config.num_attention_heads, config.num_query_groups
        whole = plain_config(
            config, groups, mixers, mlp_apart, rope_theta=rope_theta, max_seq_len=max_seq_len
        )
        _refuse(config, tp, whole, contiguous)
        self.layer = (layer_number - 1) // (2 if mlp_apart else 1)
        self.whole = whole.layers[self.layer]  # as of a model all of whose layers are like this one

        # The mixer of this rank's heads. One with a fixed state is that of all heads, and computes a part of them.
        fixed = self.whole.mixer.kind in FIXED_STATE
        local = self.whole
        split = tp  # the ranks that share the rows of the local mixer's projections
        if not fixed:
            local_mixer = replace(
                self.whole.mixer, n_kv_heads=groups // tp if groups != heads else None
            )
            local = replace(
                self.whole, dim=config.hidden_size // tp, n_heads=heads // tp, mixers=(local_mixer,)
            )
            split = 1
        with torch.device("meta"):
            core: Any = mixer_class(local.mixer)(local, execution)
            if fixed and tp > 1:
                core.heads = Part(self.tp_group.group_name, self.tp_group.rank(), tp)

            # Its projections are elsewhere: in in_proj, in `_of_all_heads`, and in out_proj.
            self.parts: dict[str, int] = {}  # rows of in_proj on this rank
            self.of_all_heads: dict[
                str, int
            ] = {}  # rows of the products that every rank needs all of
            for name in ("wq", "wk", "wv", "wg"):
                if (
                    isinstance(projection := getattr(core, name, None), Linear)
                    and not projection.whole
                ):
                    self.parts[name] = projection.out_features // split
                    setattr(core, name, Computed(name))
            for name in OF_ALL_HEADS:
                if isinstance(projection := getattr(core, name, None), Linear):
                    self.of_all_heads[name] = projection.out_features
                    setattr(core, name, Computed(name, projection.weight))
            width = core.wo.in_features // split
            core.wo = nn.Identity()
            for name in ("k_norm", "v_norm"):
                if getattr(core, name, None) is not None:
                    setattr(
                        core, name, Float32Norm(local.n_kv_heads, local.head_dim, local.norm_eps)
                    )
        device = (
            torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        )
        self.core = core.to_empty(device=device)
        if config.context_parallel_size > 1:
            core.shard = Part(
                pg_collection.cp.group_name, pg_collection.cp.rank(), pg_collection.cp.size()
            )

        # The projections.
        same = dict(config=config, bias=False, is_expert=False, tp_group=self.tp_group)
        self.in_proj: Any = build_module(
            submodules.in_proj,
            config.hidden_size,
            sum(self.parts.values()) * tp,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **same,
        )
        if self.of_all_heads and hasattr(self.in_proj, "layer_norm_weight"):
            raise ValueError(
                f"{self.whole.mixer.kind} has products of all heads, which need the input norm that is within in_proj. Give "
                "layer_spec this mixer, or the attention's submodules an in_proj without a norm."
            )
        self.out_proj: Any = build_module(
            submodules.out_proj,
            width * tp,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **same,
        )

        # The parameters that every rank has all of: Megatron sums their gradients under sequence parallelism.
        self.shared = tuple(name for name, _ in core.named_parameters() if fixed or name in SHARED)
        for name, p in core.named_parameters():
            if name in self.shared:
                p.sequence_parallel = config.sequence_parallel
            else:
                set_tensor_model_parallel_attributes(p, is_parallel=True, dim=0, stride=1)
        if config.perform_initialization:
            self._initialize(seed)
        core.to(config.params_dtype)  # as Megatron's own layers are made; the dynamics stay float32
        self.record = record_of(self.whole, tokenizer, documents)
        selective = config.recompute_granularity == "selective"
        self.recompute = selective and "core_attn" in (config.recompute_modules or ())

    @torch.no_grad()
    def _initialize(self, seed: int) -> None:
        with torch.device("meta"):
            shapes = {
                name: t.shape
                for name, t in mixer_class(self.whole.mixer)(self.whole).state_dict().items()
            }

        def this_ranks_part(name: str, dim: int = 0) -> Tensor:
            at = f"layers.{self.layer}.attention.{name}"
            full = initial_value(at, shapes[name], self.whole, seed)
            return (
                full
                if name in self.shared
                else full.chunk(self.tp_group.size(), dim)[self.tp_group.rank()]
            )

        for name, tensor in self.core.state_dict().items():
            tensor.copy_(this_ranks_part(name))
        self.in_proj.weight.copy_(
            torch.cat([this_ranks_part(f"{name}.weight") for name in self.parts])
        )
        self.out_proj.weight.copy_(this_ranks_part("wo.weight", dim=1))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        inference_params: Any = None,
        **_: Any,  # rotary tables and the like, which the mixer makes for itself
    ) -> tuple[Tensor, Tensor | None]:
        if inference_context is not None or inference_params is not None:
            raise NotImplementedError(
                "Megatron's inference engines keep keys and values, and this mixer keeps a state of fixed size. Convert the "
                "checkpoint to a folder (interdomain convert) and generate from there."
            )
        x, _ = self.in_proj(hidden_states)
        if self.of_all_heads:
            x = torch.cat([x, self._of_all_heads(hidden_states)], dim=-1)
        order = torch.arange(x.shape[0], device=x.device)
        shard = self.core.shard
        if shard is not None:
            order = order + shard.rank * len(order)
        positions = (
            None if packed_seq_params is None else _positions(packed_seq_params, order, x.shape[1])
        )
        packing = self.core.packing(self.whole.mixer, order, positions, x.dtype, shard)
        rope = rope_of(self.whole, order if positions is None else positions, x.dtype)
        if self.recompute and torch.is_grad_enabled():
            o = tensor_parallel.checkpoint(lambda x: self._mix(x, rope, packing), False, x)
        else:
            o = self._mix(x, rope, packing)
        return self.out_proj(o)

    def _of_all_heads(self, hidden_states: Tensor) -> Tensor:
        """The products of which every rank needs all, [S, B, E]."""
        y = F.linear(
            hidden_states,
            torch.cat([getattr(self.core, name).weight for name in self.of_all_heads]),
        )
        if self.tp_group.size() == 1:
            return y
        if self.config.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(y, group=self.tp_group)
        y = tensor_parallel.copy_to_tensor_model_parallel_region(y, group=self.tp_group)
        if y.requires_grad:
            y.register_hook(
                Tensor.contiguous
            )  # Megatron sums over the ranks a copy of what is not, and drops it
        return y

    def _mix(self, x: Tensor, rope: tuple[Tensor, Tensor], packing: Any) -> Tensor:
        """[S, B, rows of in_proj and of `_of_all_heads`] -> [S, B, columns of out_proj]."""
        shared = {}
        if (
            self.tp_group.size() > 1 and not self.config.sequence_parallel
        ):  # nobody else sums their gradients
            shared = {
                name: tensor_parallel.copy_to_tensor_model_parallel_region(p, group=self.tp_group)
                for name, p in self.core.named_parameters()
                if name in self.shared
            }
        dynamics = None
        dynamics_once = self.config.finalize_model_grads_func
        if self.training and isinstance(dynamics_once, DynamicsOnce):
            x, dynamics = dynamics_once.enter(self, x)
        sizes = self.parts | self.of_all_heads
        parts = x.transpose(0, 1).split(
            list(sizes.values()), dim=-1
        )  # at once: one copy in the backward pass
        products = dict(zip(sizes, parts, strict=True))
        o = torch.func.functional_call(self.core, shared, (products, rope, dynamics, None, packing))
        return o.to(x.dtype).transpose(0, 1).contiguous()

    def backward_dw(self) -> None:
        """Gradients of the projections' weights, where Transformer Engine's linears delay them."""
        self.in_proj.backward_dw()
        self.out_proj.backward_dw()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None, **_: Any
    ) -> dict:
        """Megatron's: every tensor of a checkpoint with this rank's place in it; the projections one by one."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        groups = dict(tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"])
        # A copy: loading writes into what stands here, and then the two are compared.
        sharded = make_sharded_tensors_for_checkpoint(
            {RECORD: self.record.clone()}, prefix, {}, sharded_offsets, **groups
        )
        core = self.core.state_dict(keep_vars=True)
        split = {name: 0 for name in core if name not in self.shared}
        sharded |= make_sharded_tensors_for_checkpoint(
            core, f"{prefix}core.", split, sharded_offsets, **groups
        )
        for name in {
            "wq",
            "wk",
        } & self.of_all_heads.keys():  # under one name, whether ranks share it or not
            sharded[f"{prefix}core.{name}.weight"].key = f"{prefix}in_proj.weight.{name}"
        for name in ("in_proj", "out_proj"):
            sharded |= sharded_state_dict_default(
                getattr(self, name),
                f"{prefix}{name}.",
                sharded_offsets,
                metadata,
                tp_group=self.tp_group,
            )
        key = f"{prefix}in_proj.weight"
        sharded[key] = _by_projection(sharded[key], self.parts)
        return sharded

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        record = state_dict.pop(prefix + RECORD, None)
        if record is not None:
            loaded = read_record(record)
            # A layer knows neither of them.
            theirs = replace(
                loaded.config, vocab_size=self.whole.vocab_size, max_seq_len=self.whole.max_seq_len
            )
            if theirs != self.whole:
                raise ValueError(
                    f"the checkpoint is of another model: {theirs}; this one is {self.whole}."
                )
            tokenizer = read_record(self.record).tokenizer
            if loaded.tokenizer and tokenizer and loaded.tokenizer != tokenizer:
                raise ValueError(
                    "the checkpoint is of another tokenizer: its tokens mean other texts. Give a corpus of that one."
                )
        super()._load_from_state_dict(state_dict, prefix, *args)


def check_split(whole: ModelConfig, ranks: int) -> None:
    """Raises: ValueError for a model whose heads cannot be split over so many tensor-parallel ranks."""
    for mixer in whole.mixers:
        if mixer.kind in FIXED_STATE and (n := state_shape(mixer, whole.dim).heads) % ranks:
            raise ValueError(
                f"{n} heads of {mixer.kind}'s state cannot be split over {ranks} ranks. Set mixer.state_heads."
            )
        groups = mixer.n_kv_heads or whole.n_heads
        if whole.n_heads % ranks or groups % ranks:
            raise ValueError(
                f"{whole.n_heads} heads and {groups} heads of keys and values cannot be split over {ranks} ranks. Take "
                "another number of ranks or of heads."
            )


def _refuse(config: Any, tp: int, whole: ModelConfig, contiguous: bool) -> None:
    refuse(config)
    if len(whole.mixers) > 1 and not config.hetereogenous_dist_checkpoint:
        raise ValueError(
            "the layers of a hybrid have tensors of other names and shapes. Set hetereogenous_dist_checkpoint=True."
        )
    check_split(whole, tp)
    if config.context_parallel_size > 1 and not contiguous:
        raise ValueError(
            "context-parallel ranks hand a state from piece to piece, and Megatron gives a rank two pieces that are far apart. "
            "Start Megatron-LM's script by interdomain.megatron.run; in your own loop, cut batches by "
            "interdomain.megatron.contiguous and give layer_spec contiguous=True."
        )
    # Of Megatron's own training script, if one is running.
    arguments = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    if arguments is not None and not hasattr(arguments, "ssm_lr"):
        raise ValueError(
            "the script does not know this mixer's optimizer settings. Start it as python -m interdomain.megatron.run SCRIPT."
        )
    refuse(arguments)  # again: a file of settings or a checkpoint may have changed them


def _by_projection(tensor: Any, parts: dict[str, int]) -> ShardedTensorFactory:
    """A rank's rows of in_proj as one tensor per projection in a checkpoint, each split by heads."""
    bare = tensor.without_data()

    @torch.no_grad()
    def build(key, t, replica_id, flattened_range):
        rows = replace(
            bare,
            key=key,
            data=t,
            dtype=t.dtype,
            replica_id=replica_id,
            flattened_range=flattened_range,
        )
        pieces = []
        start = 0
        for name, size in parts.items():
            for piece in rows.narrow(0, start, size):
                piece.key = f"{key}.{name}"
                pieces.append(piece)
            start += size
        return pieces

    factory: Any = ShardedTensorFactory
    return factory(tensor.key, tensor.data, build, torch.cat, tensor.replica_id)


def _positions(packed: Any, order: Tensor, batch: int) -> Tensor:
    """Positions in the documents, [1, S]: how many tokens of its document come before each token."""
    if packed.qkv_format != "thd" or batch != 1:
        raise NotImplementedError(
            f"packed sequences of format {packed.qkv_format}, batch {batch}: only thd, batch 1."
        )
    ends = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    document = torch.searchsorted(ends[1:].contiguous(), order, right=True)
    return (order - ends[document])[None]
