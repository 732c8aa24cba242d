"""The Llama-style pre-norm decoder around token mixers.

Child modules have TorchTitan's names, so that its helpers apply to them as they are. `Transformer`
also computes the part of a model that one rank has: a pipeline stage, a shard of the sequences, or
a part of the heads.

Shapes: B batch, T tokens, V vocabulary.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from interdomain.features.plain import recompute_in_backward

from .config import Execution, MixerConfig, ModelConfig
from .initialize import initialize
from .layers import Embedding, Linear, RMSNorm, rope_of
from .loss import Head
from .mixers.base import Mixer, counted_from_starts
from .mixers.fixed_state import MIXERS
from .mixers.interdomain import InterdomainMixer
from .mixers.softmax import SoftmaxMixer
from .parallel import GroupRank
from .shared_ssm import SharedSSMTensors
from .state import ModelState

MIXER_CLASSES: dict[str, type[Mixer]] = {
    "interdomain": InterdomainMixer,
    "softmax": SoftmaxMixer,
    **MIXERS,
}


def mixer_class(config: MixerConfig) -> type[Mixer]:
    """Returns the class of a layer's mixer, which computes it and knows its costs."""
    return MIXER_CLASSES[config.kind]


class FeedForward(nn.Module):
    """SwiGLU: [B, T, dim] -> [B, T, dim].

    Args:
        dim: The width of the model.
        hidden: The width of the hidden layer.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        """Makes the three matrices, from `dim` to `hidden` (w1, w3) and back (w2)."""
        super().__init__()
        self.w1 = Linear(dim, hidden)
        self.w2 = Linear(hidden, dim)
        self.w3 = Linear(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(recompute_in_backward(_silu_product, self.w1(x), self.w3(x)))


def _silu_product(gate: Tensor, x: Tensor) -> Tensor:
    """Returns SiLU(gate) * x."""
    return F.silu(gate) * x


class TransformerBlock(nn.Module):
    """One layer: a mixer and a feed-forward network, each with a norm and a residual connection.

    Args:
        config: Configuration of the layer (an entry of `ModelConfig.layers`).
        execution: How the mixer is computed. None: the defaults.

    Attributes:
        mixer: The settings of the layer's mixer.
        tp_rank: This rank's place in tensor parallelism. The norms and residual connections then
            have the rank's part of the tokens; the mixer and the feed-forward network compute all
            tokens, with the rank's part of the heads and of the width. None: the block is whole.
    """

    tp_rank: GroupRank | None = None

    def __init__(self, config: ModelConfig, execution: Execution | None) -> None:
        """Makes the layer of `config` and draws its initial values."""
        super().__init__()
        self.mixer = config.mixer
        self.attention = mixer_class(config.mixer)(config, execution)
        self.feed_forward = FeedForward(config.dim, config.ffn_hidden)
        self.attention_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, eps=config.norm_eps)
        for module in (self.attention, self.feed_forward):
            initialize(module, config)

    def forward(
        self, x: Tensor, rope: Any, ssm_tensors: Any, state: Any = None, packing: Any = None
    ) -> Tensor:
        """Computes the layer.

        Args:
            x: Hidden states, [B, T, dim]; in tensor parallelism [B, T / size, dim].
            rope: Cosines and sines of the rotary embedding, from `rope_of`. None: no layer rotates.
            ssm_tensors: The layer's entry of `Transformer.ssm_tensors`.
            state: The layer's state, which is advanced in place. None: x begins the sequences.
            packing: The result of the mixer's `packing` or `continuing`.
        Returns:
            Hidden states of the shape of x.
        """
        # The norms and the residual connections are of this rank's tokens.
        x = x + self._of_all_tokens(
            self.attention, self.attention_norm(x), rope, ssm_tensors, state, packing
        )
        return x + self._of_all_tokens(self.feed_forward, self.ffn_norm(x))

    def _of_all_tokens(self, module: nn.Module, x: Tensor, *others: Any) -> Tensor:
        """Calls a module with the tokens of all ranks.

        The sum of the ranks' results is shared out by tokens again.

        Args:
            module: The mixer or the feed-forward network.
            x: Hidden states of this rank's tokens, [B, T / size, dim], or all without tensor
                parallelism.
            others: The other arguments of the module.
        """
        if self.tp_rank is None:
            return module(x, *others)
        return self.tp_rank.scatter_tokens(module(self.tp_rank.gather_tokens(x), *others))


class Transformer(nn.Module):
    """The decoder: tokens [B, T] -> logits [B, T, V], or the summed loss of labels.

    Initial values come from PyTorch's global generator. `init_weights(seed)` draws again, the same
    numbers on every machine. A pipeline stage is a model from which modules were taken away:
    `tok_embeddings`, `norm` or `output` set to None, layers deleted (each keeps its name). All
    stages of a rank get the same arguments.

    Args:
        config: The model, from `build_config`.
        execution: How the mixers are computed; every choice computes the same function. None: the
            defaults.

    Attributes:
        cp_rank: This rank's place in context parallelism (`set_ranks`). None: the model computes
            whole sequences.
        tp_rank: This rank's place in tensor parallelism. None: the model computes all heads.
        shared: The result of `ssm_tensors` that a trainer has computed for all micro-batches of a
            step. None: each forward pass computes it.
    """

    cp_rank: GroupRank | None = None
    tp_rank: GroupRank | None = None
    shared: SharedSSMTensors | None = None

    def __init__(self, config: ModelConfig, execution: Execution | None = None) -> None:
        """Makes the model of `config` and draws its initial values."""
        super().__init__()
        self.config = config
        self.bf16_products = execution is not None and execution.bf16_products
        self.tok_embeddings = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict()
        for i, layer in enumerate(config.layers):
            self.layers[str(i)] = TransformerBlock(layer, execution)
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.output = Head(config.dim, config.vocab_size)
        # The blocks have initialised themselves.
        initialize(self.tok_embeddings, config, prefix="tok_embeddings.")
        initialize(self.output, config, prefix="output.")

    def set_ranks(
        self, *, cp_rank: GroupRank | None = None, tp_rank: GroupRank | None = None
    ) -> None:
        """Makes the model compute one rank's part. Call it before modules are wrapped.

        The ranks of the process groups then compute together, and losses and gradients are to be
        summed over them.

        Args:
            cp_rank: This rank's place in context parallelism: tokens, positions, labels and results
                are this rank's piece of the sequences. None: whole sequences.
            tp_rank: This rank's place in tensor parallelism. It divides the heads, the feed-forward
                width and the vocabulary, each of which must be a multiple of its size, and the
                tokens between the mixers. Arguments are those of all tokens. The parameters that
                `parallel.split_dimension` names are to be replaced by this rank's parts, or all by
                DTensors with `LocalParameters.local`. None: all heads.
        """
        modules: Any = self.modules()
        for module in modules:
            if hasattr(module, "cp_rank"):
                module.cp_rank = cp_rank
            if hasattr(module, "tp_rank"):
                module.tp_rank = tp_rank

    def forward(
        self,
        tokens: Tensor,
        state: ModelState | None = None,
        positions: Tensor | None = None,
        *,
        last: int | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Computes whole sequences, or with a state the next piece of them.

        Args:
            tokens: [B, T] integers. A stage without embedding gets the hidden states, [B, T, dim];
                in tensor parallelism [B, T / size, dim].
            state: From `init_state`; it is advanced in place. None: the tokens begin the sequences.
            positions: [B, T] integers, if sequences hold several packed documents: the number of
                tokens of the same document before each token. A position that is not the one before
                plus one begins a document. Nothing is carried from one document into another: no
                state, convolution or attention.
            last: Return only the logits of this many last positions, [B, last, V]. None: of all.
            labels: [B, T] integers: the token after each position, or IGNORE_INDEX. The result is
                then the cross-entropy summed over the tokens, a float32 scalar; the logits of all
                tokens never exist at once. In tensor parallelism it is the part of the sum whose
                labels are in this rank's vocabulary. A stage without head ignores labels.
        Returns:
            The logits, [B, T, V]; in tensor parallelism this rank's columns for all tokens. Or the
            loss of the labels. A stage without head returns the hidden states.
        Raises:
            ValueError: Positions are given together with a state, or have another type or shape; or
                the state has another number of rows than the tokens.
            NotImplementedError: A state or `last` is given to a model that computes one rank's
                part.
        """
        part = self.cp_rank or self.tp_rank
        if part is not None and (state is not None or last is not None):
            raise NotImplementedError(
                "state and last are for whole sequences and all heads, and this model computes "
                f"one of {part.size} parts; generate with a model that has no parts."
            )
        h: Tensor = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        B = h.shape[0]
        T = h.shape[1]
        if self.tp_rank is not None:
            # h has this rank's part of the tokens.
            T *= self.tp_rank.size

        # The place of each token in its document, and what each kind of mixer must know about
        # packed documents. Layers with the same settings share it.
        configs = self._mixer_configs
        mixers = dict.fromkeys(configs)
        packing = {}
        order = torch.arange(T, device=tokens.device)
        if state is not None:
            if positions is not None:
                raise ValueError(
                    "positions are for whole sequences; a state knows its own: leave one out."
                )
            if len(state.position) != B:
                raise ValueError(
                    f"{B} row(s) of tokens for a state of {len(state.position)}; there must be "
                    "one each."
                )
            positions = state.position[:, None] + order
            for mixer in mixers:
                packing[mixer] = mixer_class(mixer).continuing(mixer, state, T, h.dtype)
        else:
            if self.cp_rank is not None:
                order = order + self.cp_rank.rank * T
            if positions is not None:
                positions = counted_from_starts(positions, B, T, self.cp_rank)
            for mixer in mixers:
                packing[mixer] = mixer_class(mixer).packing(
                    mixer, order, positions, h.dtype, self.cp_rank
                )
            if positions is None:
                positions = order

        # Tensors that all layers read: rotary tables, and what each scan reads of its parameters.
        rope = None
        if any(mixer.rope for mixer in mixers):
            rope = rope_of(self.config, positions, h.dtype)
        if state is not None:
            ssm_tensors = state.ssm_tensors
        elif self.shared is not None:
            ssm_tensors = self.shared.layers
        else:
            ssm_tensors = self.ssm_tensors()

        products = contextlib.nullcontext()
        if self.bf16_products:
            # Autocast's cache would keep a bf16 copy of every weight to the end, to use it once.
            products = torch.autocast(h.device.type, torch.bfloat16, cache_enabled=False)
        with products:
            for i, (mixer, layer) in enumerate(zip(configs, self.layers.values(), strict=True)):
                layer_state = None if state is None else state.layers[i]
                h = layer(h, rope, ssm_tensors[i], layer_state, packing[mixer])
            if state is not None:
                state.advance(T)

            # The head, with the loss if there are labels.
            if last is not None:
                h = h[:, -last:]
            if self.norm is not None:
                h = self.norm(h)
            if self.output is None:
                return h
            return self.output(h) if labels is None else self.output(h, labels)

    @property
    def _mixers(self) -> list[Any]:
        """The mixer modules of the layers."""
        blocks: Any = self.layers.values()
        return [block.attention for block in blocks]

    @property
    def _mixer_configs(self) -> list[MixerConfig]:
        """The settings of the layers' mixers."""
        blocks: Any = self.layers.values()
        return [block.mixer for block in blocks]

    def ssm_tensors(self) -> list[tuple[Tensor, ...]]:
        """Returns the float32 tensors that the scan of each layer reads of the parameters.

        They are computed outside the blocks and passed in, so that the blocks' precision and
        compilation do not touch them. Layers whose mixers have the same settings are computed
        together.
        """
        # The mixer class computes all layers with the same settings at once.
        configs = self._mixer_configs
        mixers = self._mixers
        by_layer: dict[int, tuple[Tensor, ...]] = {}
        for config in dict.fromkeys(configs):
            alike = [i for i, other in enumerate(configs) if other == config]
            tensors = mixer_class(config).ssm_tensors([mixers[i] for i in alike])
            by_layer.update(zip(alike, tensors, strict=True))
        return [by_layer[i] for i in range(len(configs))]

    def init_state(self, batch: int, capacity: int = 0) -> ModelState:
        """Returns the state before the first token.

        Args:
            batch: Number of sequences, B.
            capacity: Number of tokens that the caches of softmax without a window have room for. A
                cache grows when there are more.
        """
        weight = self.tok_embeddings.weight
        dtype = torch.bfloat16 if self.bf16_products else weight.dtype
        ssm_tensors = self.ssm_tensors()
        layers = []
        for mixer, tensors in zip(self._mixers, ssm_tensors, strict=True):
            layers.append(mixer.init_state(batch, capacity, dtype, weight.device, tensors))
        position = torch.zeros(batch, dtype=torch.int64, device=weight.device)
        return ModelState(layers, position, ssm_tensors)

    def init_weights(self, seed: int = 42) -> None:
        """Sets every parameter and buffer, the same on every device and under every sharding.

        Args:
            seed: Seed of all values.
        """
        initialize(self, self.config, seed)


def count_parameters(model: nn.Module) -> int:
    """Returns the number of elements of all parameters."""
    return sum(p.numel() for p in model.parameters())


def meta_model(config: ModelConfig) -> Transformer:
    """Builds the model on the meta device, without memory, to count parameters and check shapes."""
    with torch.device("meta"):
        return Transformer(config)
