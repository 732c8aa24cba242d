"""The mixer as the self-attention of a Megatron layer: this rank's heads between two projections.

The first projection is column-parallel and gives queries, keys, values and gate; the second is
row-parallel.

The plain model is `interdomain.model.Transformer`: the model as it is exported, with all heads on
one rank. Its parameters, their names and their initial values are the reference here.

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
from interdomain.model.parallel import GroupRank
from interdomain.model.transformer import mixer_class

from .checkpoint import RECORD, read_record, record_of
from .settings import check_settings
from .training import SSMTensorsOnce

# Parameters that all heads share, so that every rank has them; interdomain attention has all others
# per head.
SHARED_BY_HEADS = ("k_norm.weight", "v_norm.weight", "o_norm.weight")
# Projections of the fixed-state baselines whose whole product every rank needs. Each baseline has
# some of them.
OF_ALL_HEADS = ("wq", "wk", "wa", "wb", "gate_down")


class Computed(nn.Module):
    """Takes the place of a projection in a mixer, and looks up its product.

    The mixer calls it as it would call the projection. In place of hidden states it passes on the
    products of all projections, by name.

    Args:
        name: The projection's name.
        weight: Its matrix, if every rank has all of it. None: its rows are part of in_proj.
    """

    def __init__(self, name: str, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.name = name
        self.weight = weight

    def forward(self, products: dict[str, Tensor]) -> Tensor:
        return products[self.name]


@dataclass
class InterdomainAttentionSubmodules:
    """The classes of the two projections, Megatron's own or Transformer Engine's.

    Attributes:
        in_proj: A column-parallel linear layer. It may begin with the input norm.
        out_proj: A row-parallel linear layer.
    """

    in_proj: ModuleSpec | type
    out_proj: ModuleSpec | type


class Float32Norm(KeptInFloat32, InputNorm):
    """An input norm in float32, like the SSM parameters.

    Megatron cannot save a parameter group that mixes precisions.
    """


def plain_config(
    settings: Any,
    groups: int,
    mixers: tuple[MixerConfig, ...],
    mlp_apart: bool = False,
    **others: Any,
) -> ModelConfig:
    """Returns the plain model's configuration for Megatron's settings.

    Args:
        settings: A TransformerConfig, or parsed arguments.
        groups: Number of heads of keys and values. Fixed-state baselines do not take it.
        mixers: The mixers of the layers in order. A shorter pattern is repeated.
        mlp_apart: True if Megatron counts a mixer and its MLP as two layers, as HybridModel does.
        others: Further fields of ModelConfig.
    """
    n_layers = settings.num_layers
    if mlp_apart:
        n_layers //= 2
    # A MixerConfig has None for as many heads of keys and values as query heads.
    n_kv_heads = None
    if groups != settings.num_attention_heads:
        n_kv_heads = groups
    layers = []
    for mixer in mixers:
        if mixer.kind not in FIXED_STATE:
            mixer = replace(mixer, n_kv_heads=n_kv_heads)
        layers.append(mixer)
    return ModelConfig(
        dim=settings.hidden_size,
        n_layers=n_layers,
        n_heads=settings.num_attention_heads,
        head_dim=settings.kv_channels,
        norm_eps=settings.layernorm_epsilon,
        mixers=tuple(layers),
        **others,
    )


class InterdomainAttention(MegatronModule):
    """Self-attention of a Megatron layer: [S, B, dim] -> ([S, B, dim], None).

    With sequence parallelism the hidden states are [S / ranks, B, dim].

    `core` is the plain model's mixer for this rank's heads, without its projections. Those of
    queries, keys, values and gate are one column-parallel product, `in_proj`, whose rows on a rank
    are [wq | wk | wv | wg] of its heads. A fixed-state baseline has all its other parameters on
    every rank, and computes this rank's part of the heads (`Mixer.tp_rank`).

    Args:
        config: Megatron's TransformerConfig.
        submodules: The classes of the projections.
        layer_number: The layer's number in the model, from 1.
        pg_collection: Megatron's process groups; tp and cp are used.
        mixers: The settings of the layers' mixers in order; a shorter pattern is repeated. Their
            n_kv_heads is replaced by config.num_query_groups.
        rope_theta: Base of the rotary embedding.
        max_seq_len: Tokens of a training sequence, for the record in a checkpoint.
        execution: How the mixer is computed. None: the defaults.
        seed: Seed of the initial values (`initial_value` of the whole tensors, of which each rank
            takes its part).
        contiguous: True if context-parallel ranks have the sequences' pieces in order
            (`training.contiguous`).
        mlp_apart: True if layer_number counts a mixer and its MLP as two layers, as HybridModel
            does.
        tokenizer: The sha256 of the corpus's tokenizer, for the record in a checkpoint.
        documents: How documents begin and end in the corpus (`Documents.to_dict`), for the record
            in a checkpoint.

    Attributes:
        tp_group: The tensor-parallel ranks.
        layer: The place of the layer in the plain model, from 0.
        whole: The configuration of a plain model whose layers are all like this one.
        core: The mixer of this rank's heads, with `Computed` in place of its projections.
        in_proj: The column-parallel projection.
        out_proj: The row-parallel projection.
        in_proj_rows: The projections that in_proj joins, with the number of rows of each on this
            rank, in their order.
        shared_rows: The projections of a fixed-state baseline whose whole product every rank needs
            (OF_ALL_HEADS), with their numbers of rows. They stay parameters of the core.
        shared_parameters: The names of the core's parameters that every rank has whole. All others
            are split by heads along their first dimension.
        record: The layer's record as a checkpoint has it (`checkpoint.record_of`).
        recompute: True if the backward pass computes the core again, as Megatron's selective
            recomputation does for core_attn.
    Raises:
        ValueError: A setting of Megatron is not possible with this mixer.
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
        **_: Any,  # arguments that some versions give every attention
    ) -> None:
        super().__init__(config)
        self.pg_collection = pg_collection
        self.tp_group = pg_collection.tp
        ranks = self.tp_group.size()
        model = plain_config(
            config,
            config.num_query_groups,
            mixers,
            mlp_apart,
            rope_theta=rope_theta,
            max_seq_len=max_seq_len,
        )
        _check(config, ranks, model, contiguous)
        self.layer = layer_number - 1
        if mlp_apart:
            self.layer //= 2
        self.whole = model.layers[self.layer]
        has_fixed_state = self.whole.mixer.kind in FIXED_STATE

        # The mixer of this rank's heads. A fixed-state baseline is the whole mixer, which computes
        # a part of its heads, and whose projections this rank divides with the others.
        if has_fixed_state:
            local = self.whole
            divided_by = ranks
        else:
            local = _config_of_heads(self.whole, ranks)
            divided_by = 1
        with torch.device("meta"):
            core: Any = mixer_class(local.mixer)(local, execution)
            if has_fixed_state and ranks > 1:
                core.tp_rank = GroupRank(self.tp_group.group_name, self.tp_group.rank(), ranks)

            # Take its projections out: their products are computed by in_proj,
            # `_products_of_all_heads` and out_proj.
            self.in_proj_rows: dict[str, int] = {}
            self.shared_rows: dict[str, int] = {}
            for name in ("wq", "wk", "wv", "wg"):
                projection = getattr(core, name, None)
                if isinstance(projection, Linear) and not projection.whole:
                    self.in_proj_rows[name] = projection.out_features // divided_by
                    setattr(core, name, Computed(name))
            for name in OF_ALL_HEADS:
                projection = getattr(core, name, None)
                if isinstance(projection, Linear):
                    self.shared_rows[name] = projection.out_features
                    setattr(core, name, Computed(name, projection.weight))
            width = core.wo.in_features // divided_by
            core.wo = nn.Identity()
            for name in ("k_norm", "v_norm"):
                if getattr(core, name, None) is not None:
                    norm = Float32Norm(local.n_kv_heads, local.head_dim, local.norm_eps)
                    setattr(core, name, norm)
        device = torch.device("cpu")
        if not config.use_cpu_initialization:
            device = torch.cuda.current_device()
        self.core = core.to_empty(device=device)
        if config.context_parallel_size > 1:
            cp = pg_collection.cp
            core.cp_rank = GroupRank(cp.group_name, cp.rank(), cp.size())

        # The projections.
        same = dict(config=config, bias=False, is_expert=False, tp_group=self.tp_group)
        self.in_proj: Any = build_module(
            submodules.in_proj,
            config.hidden_size,
            sum(self.in_proj_rows.values()) * ranks,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **same,
        )
        if self.shared_rows and hasattr(self.in_proj, "layer_norm_weight"):
            raise ValueError(
                f"{self.whole.mixer.kind} has products of all heads, which need the input norm "
                "that is within in_proj. Give layer_spec this mixer, or the attention's "
                "submodules an in_proj without a norm."
            )
        self.out_proj: Any = build_module(
            submodules.out_proj,
            width * ranks,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **same,
        )

        # Parameters that every rank has whole: Megatron sums their gradients under sequence
        # parallelism.
        names = [name for name, _ in core.named_parameters()]
        self.shared_parameters = tuple(
            name for name in names if has_fixed_state or name in SHARED_BY_HEADS
        )
        for name, p in core.named_parameters():
            if name in self.shared_parameters:
                p.sequence_parallel = config.sequence_parallel
            else:
                set_tensor_model_parallel_attributes(p, is_parallel=True, dim=0, stride=1)
        if config.perform_initialization:
            self._initialize(seed)
        # Megatron's own layers are made in this dtype. The SSM parameters stay float32.
        core.to(config.params_dtype)
        self.record = record_of(self.whole, tokenizer, documents)
        selective = config.recompute_granularity == "selective"
        self.recompute = selective and "core_attn" in (config.recompute_modules or ())

    @torch.no_grad()
    def _initialize(self, seed: int) -> None:
        """Draws each tensor of the plain mixer whole, and takes this rank's part."""
        ranks = self.tp_group.size()
        rank = self.tp_group.rank()
        with torch.device("meta"):
            whole = mixer_class(self.whole.mixer)(self.whole).state_dict()

        def draw(name: str, dim: int = 0) -> Tensor:
            """Returns this rank's part along `dim` of the mixer's tensor of this name."""
            full = initial_value(
                f"layers.{self.layer}.attention.{name}", whole[name].shape, self.whole, seed
            )
            return full if name in self.shared_parameters else full.chunk(ranks, dim)[rank]

        for name, tensor in self.core.state_dict().items():
            tensor.copy_(draw(name))
        rows = [draw(f"{name}.weight") for name in self.in_proj_rows]
        self.in_proj.weight.copy_(torch.cat(rows))
        self.out_proj.weight.copy_(draw("wo.weight", dim=1))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        inference_params: Any = None,
        **_: Any,  # rotary tables and the like, which the mixer makes for itself
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the layer's mixer.

        Args:
            hidden_states: The layer's input, [S, B, dim]; with sequence parallelism
                [S / ranks, B, dim].
            attention_mask: Unused: the mixer is causal.
            inference_context: Must be None.
            packed_seq_params: Where packed documents end (`PackedSeqParams`). None: each sequence
                is one document.
            inference_params: Must be None.
        Returns:
            The output in the shape of hidden_states, and None for a bias.
        Raises:
            NotImplementedError: One of Megatron's inference engines calls it.
        """
        if inference_context is not None or inference_params is not None:
            raise NotImplementedError(
                "Megatron's inference engines keep keys and values, and this mixer keeps a state "
                "of fixed size. Convert the checkpoint (interdomain convert) and generate from "
                "the exported model."
            )
        # The products of this rank's heads. For a fixed-state baseline also those that every rank
        # needs whole.
        x, _ = self.in_proj(hidden_states)
        if self.shared_rows:
            x = torch.cat([x, self._products_of_all_heads(hidden_states)], dim=-1)

        # The place of each token in its sequence (`order`) and, if documents are packed, in its
        # document (`positions`). A context-parallel rank has its own piece of a sequence.
        order = torch.arange(x.shape[0], device=x.device)
        cp_rank = self.core.cp_rank
        if cp_rank is not None:
            order = order + cp_rank.rank * len(order)
        positions = None
        rotated_by = order
        if packed_seq_params is not None:
            positions = _positions(packed_seq_params, order, x.shape[1])
            rotated_by = positions
        packing = self.core.packing(self.whole.mixer, order, positions, x.dtype, cp_rank)
        rope = rope_of(self.whole, rotated_by, x.dtype)

        # With selective recomputation the backward pass computes the mixer again from x. False:
        # each rank keeps its x whole.
        if self.recompute and torch.is_grad_enabled():
            o = tensor_parallel.checkpoint(lambda x: self._mix(x, rope, packing), False, x)
        else:
            o = self._mix(x, rope, packing)
        return self.out_proj(o)

    def _products_of_all_heads(self, hidden_states: Tensor) -> Tensor:
        """Returns the products that every rank needs whole, [S, B, sum of shared_rows]."""
        weights = [getattr(self.core, name).weight for name in self.shared_rows]
        y = F.linear(hidden_states, torch.cat(weights))
        if self.tp_group.size() == 1:
            return y
        if self.config.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(y, group=self.tp_group)
        y = tensor_parallel.copy_to_tensor_model_parallel_region(y, group=self.tp_group)
        if y.requires_grad:
            # Megatron sums a gradient that is not contiguous into a copy, which it drops.
            y.register_hook(Tensor.contiguous)
        return y

    def _mix(self, x: Tensor, rope: tuple[Tensor, Tensor], packing: Any) -> Tensor:
        """Computes the mixer without its projections.

        Args:
            x: The products, [S, B, rows of in_proj and of `_products_of_all_heads`].
            rope: Cosines and sines of the rotary embedding.
            packing: What the mixer must know about packed documents, from `Mixer.packing`.
        Returns:
            The input of out_proj, [S, B, its columns on this rank].
        """
        # Copies of the shared parameters, whose backward pass sums the gradients over the ranks.
        # With sequence parallelism Megatron sums them.
        shared = {}
        if self.tp_group.size() > 1 and not self.config.sequence_parallel:
            for name, p in self.core.named_parameters():
                if name in self.shared_parameters:
                    shared[name] = tensor_parallel.copy_to_tensor_model_parallel_region(
                        p, group=self.tp_group
                    )
        # The tensors of the SSM parameters, if they are computed once a step: this field of
        # Megatron's configuration is then an SSMTensorsOnce. None: the core computes its own.
        ssm_tensors = None
        ssm_tensors_once = self.config.finalize_model_grads_func
        if self.training and isinstance(ssm_tensors_once, SSMTensorsOnce):
            x, ssm_tensors = ssm_tensors_once.enter(self, x)
        # The product of each projection, by name. One split, so that the backward pass makes one
        # copy.
        rows = self.in_proj_rows | self.shared_rows
        parts = x.transpose(0, 1).split(list(rows.values()), dim=-1)
        products = dict(zip(rows, parts, strict=True))
        # Call the core with these copies. Its input is the products, and it has no state.
        o = torch.func.functional_call(
            self.core, shared, (products, rope, ssm_tensors, None, packing)
        )
        return o.to(x.dtype).transpose(0, 1).contiguous()

    def backward_dw(self) -> None:
        """Computes the gradients that Transformer Engine's linear layers have delayed."""
        self.in_proj.backward_dw()
        self.out_proj.backward_dw()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None, **_: Any
    ) -> dict:
        """Returns this layer's tensors for a checkpoint, each with this rank's place in it.

        A checkpoint has a tensor for each projection in in_proj, split by heads.

        Args:
            prefix: How the names of this layer's tensors begin.
            sharded_offsets: The place of this layer among stacked layers, as Megatron gives it.
            metadata: Megatron's settings of a checkpoint, with its process groups.
        """
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        groups = dict(tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"])
        # The layer's record. It is a copy, because a load writes the checkpoint's record into it.
        # `_load_from_state_dict` then compares that with self.record.
        sharded = make_sharded_tensors_for_checkpoint(
            {RECORD: self.record.clone()}, prefix, {}, sharded_offsets, **groups
        )
        # The parameters and buffers of the core: split over the ranks along dimension 0, or whole.
        core = self.core.state_dict(keep_vars=True)
        divided = {name: 0 for name in core if name not in self.shared_parameters}
        sharded |= make_sharded_tensors_for_checkpoint(
            core, f"{prefix}core.", divided, sharded_offsets, **groups
        )
        # wq and wk have the same name in a checkpoint, whether they are part of in_proj or not.
        for name in ("wq", "wk"):
            if name in self.shared_rows:
                sharded[f"{prefix}core.{name}.weight"].key = f"{prefix}in_proj.weight.{name}"
        # The two projections, and the rows of in_proj divided by projection.
        for name in ("in_proj", "out_proj"):
            sharded |= sharded_state_dict_default(
                getattr(self, name),
                f"{prefix}{name}.",
                sharded_offsets,
                metadata,
                tp_group=self.tp_group,
            )
        key = f"{prefix}in_proj.weight"
        sharded[key] = _split_by_projection(sharded[key], self.in_proj_rows)
        return sharded

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        """Loads this module's tensors, and compares the checkpoint's record with this model.

        Args:
            state_dict: The tensors of a checkpoint by name. The record is taken out.
            prefix: How the names of this module's tensors begin.
            args: PyTorch's other arguments.
        Raises:
            ValueError: The checkpoint is of another model or tokenizer.
        """
        record = state_dict.pop(prefix + RECORD, None)
        if record is not None:
            loaded = read_record(record)
            # A layer does not know the vocabulary, and a model may be trained with another length.
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
                    "the checkpoint is of another tokenizer: its tokens mean other texts. Give a "
                    "corpus of that one."
                )
        super()._load_from_state_dict(state_dict, prefix, *args)


def _config_of_heads(whole: ModelConfig, ranks: int) -> ModelConfig:
    """Returns the configuration of a model that has only one rank's heads.

    Args:
        whole: The plain model's configuration.
        ranks: Number of tensor-parallel ranks, which divide the heads equally.
    """
    mixer = whole.mixer
    if mixer.n_kv_heads is not None:
        mixer = replace(mixer, n_kv_heads=mixer.n_kv_heads // ranks)
    return replace(whole, dim=whole.dim // ranks, n_heads=whole.n_heads // ranks, mixers=(mixer,))


def check_split(whole: ModelConfig, ranks: int) -> None:
    """Checks that tensor-parallel ranks can divide the heads of all layers.

    Args:
        whole: The plain model's configuration.
        ranks: Number of tensor-parallel ranks.
    Raises:
        ValueError: They cannot.
    """
    for mixer in whole.mixers:
        if mixer.kind in FIXED_STATE:
            heads = state_shape(mixer, whole.dim).heads
            if heads % ranks:
                raise ValueError(
                    f"{heads} heads of {mixer.kind}'s state cannot be split over {ranks} ranks. "
                    "Set mixer.state_heads."
                )
        groups = mixer.n_kv_heads or whole.n_heads
        if whole.n_heads % ranks or groups % ranks:
            raise ValueError(
                f"{whole.n_heads} heads and {groups} heads of keys and values cannot be split "
                f"over {ranks} ranks. Take another number of ranks or of heads."
            )


def _check(config: Any, ranks: int, model: ModelConfig, contiguous: bool) -> None:
    """Checks that the layers of a model can be made with Megatron's settings.

    Args:
        config: Megatron's TransformerConfig.
        ranks: Number of tensor-parallel ranks.
        model: The plain model's configuration.
        contiguous: True if context-parallel ranks have the sequences' pieces in order.
    Raises:
        ValueError: A setting is not possible.
    """
    # The settings that must have one value, from settings.toml.
    check_settings(config)
    if len(model.mixers) > 1 and not config.hetereogenous_dist_checkpoint:
        raise ValueError(
            "the layers of a hybrid have tensors of other names and shapes. Set "
            "hetereogenous_dist_checkpoint=True."
        )
    check_split(model, ranks)
    if config.context_parallel_size > 1 and not contiguous:
        raise ValueError(
            "context-parallel ranks hand a state from piece to piece, and Megatron gives a rank "
            "two pieces that are far apart. Start Megatron-LM's script by "
            "interdomain.megatron.run; in your own loop, cut batches by "
            "interdomain.megatron.contiguous and give layer_spec contiguous=True."
        )
    # The arguments of Megatron's own training script, None if it is not running. They have ssm_lr
    # if `arguments.add_arguments` added it.
    arguments = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    if arguments is not None and not hasattr(arguments, "ssm_lr"):
        raise ValueError(
            "the script does not know this mixer's optimizer settings. Start it as python -m "
            "interdomain.megatron.run SCRIPT."
        )
    # Check them again: a file of settings or a checkpoint may have changed them since the command
    # line was read.
    check_settings(arguments)


def _split_by_projection(tensor: Any, rows: dict[str, int]) -> ShardedTensorFactory:
    """Divides a rank's rows of in_proj into one tensor per projection in a checkpoint.

    Each of them is split by heads.

    Args:
        tensor: Megatron's ShardedTensor of in_proj.
        rows: Number of rows of each projection on this rank, in their order in in_proj.
    Returns:
        Megatron's description of a tensor that is divided for a checkpoint and joined after a load.
    """
    # The place of in_proj in a checkpoint.
    bare = tensor.without_data()

    @torch.no_grad()
    def build(key, data, replica_id, flattened_range):
        # The arguments are the factory's fields. Megatron may have changed them since, such as key.
        whole = replace(
            bare,
            key=key,
            data=data,
            dtype=data.dtype,
            replica_id=replica_id,
            flattened_range=flattened_range,
        )
        pieces = []
        start = 0
        for name, size in rows.items():
            # Megatron's narrow returns a list.
            for piece in whole.narrow(0, start, size):
                piece.key = f"{key}.{name}"
                pieces.append(piece)
            start += size
        return pieces

    factory: Any = ShardedTensorFactory
    return factory(tensor.key, tensor.data, build, torch.cat, tensor.replica_id)


def _positions(packed: Any, order: Tensor, batch: int) -> Tensor:
    """Returns the number of tokens of its document before each token, [1, S].

    Args:
        packed: Megatron's PackedSeqParams.
        order: The place of each of this rank's tokens in the sequence, [S].
        batch: Number of sequences, which must be 1.
    Raises:
        NotImplementedError: The documents are packed in another format, or in several sequences.
    """
    if packed.qkv_format != "thd" or batch != 1:
        raise NotImplementedError(
            f"packed sequences of format {packed.qkv_format}, batch {batch}: only thd, batch 1."
        )
    # The end of each document, with its padding if there is some; the first entry is 0.
    ends = packed.cu_seqlens_q_padded
    if ends is None:
        ends = packed.cu_seqlens_q
    # The number of documents that end before a token. The entry of this number is where its own
    # document begins.
    document = torch.searchsorted(ends[1:].contiguous(), order, right=True)
    return (order - ends[document])[None]
