"""Llama-style pre-norm decoder around token mixers. Child names are TorchTitan's, so that its helpers apply as they are."""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import Execution, MixerConfig, ModelConfig
from .dynamics import SharedDynamics
from .initialize import initialize
from .layers import Embedding, Linear, RMSNorm, rope_of
from .loss import Head
from .mixers.base import Mixer, counted_from_starts
from .mixers.fixed_state import MIXERS
from .mixers.interdomain import InterdomainMixer
from .mixers.softmax import SoftmaxMixer
from .shard import Part
from .state import ModelState

MIXER_CLASSES: dict[str, type[Mixer]] = {
    "interdomain": InterdomainMixer,
    "softmax": SoftmaxMixer,
    **MIXERS,
}


def mixer_class(config: MixerConfig) -> type[Mixer]:
    """A layer's mixer: its function, and what it costs."""
    return MIXER_CLASSES[config.kind]


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = Linear(dim, hidden)
        self.w2 = Linear(hidden, dim)
        self.w3 = Linear(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """One layer: mixer and feed-forward. With `heads`, x is that part of the tokens. The mixer and the feed-forward
    compute all tokens, with their part of the heads and of the width."""

    heads: Part | None = None

    def __init__(self, config: ModelConfig, execution: Execution | None) -> None:
        super().__init__()
        self.mixer = config.mixer
        self.attention = mixer_class(config.mixer)(config, execution)
        self.feed_forward = FeedForward(config.dim, config.ffn_hidden)
        self.attention_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, eps=config.norm_eps)
        for module in (self.attention, self.feed_forward):
            initialize(module, config)

    def forward(
        self, x: Tensor, rope: Any, dynamics: Any, state: Any = None, packing: Any = None
    ) -> Tensor:
        """x [B, T, dim] -> [B, T, dim]; a state is advanced."""
        x = x + self._of_all_tokens(
            self.attention, self.attention_norm(x), rope, dynamics, state, packing
        )
        return x + self._of_all_tokens(self.feed_forward, self.ffn_norm(x))

    def _of_all_tokens(self, module: nn.Module, x: Tensor, *others: Any) -> Tensor:
        if self.heads is None:
            return module(x, *others)
        return self.heads.scatter_tokens(module(self.heads.gather_tokens(x), *others))


class Transformer(nn.Module):
    """The decoder: tokens [B, T] -> logits [B, T, vocab_size], or the summed loss of labels (paper, backbone details).

    Initial values come from PyTorch's global generator. `init_weights(seed)` draws again, the same numbers on every machine.
    A stage of a pipeline is a model from which modules were taken away: `tok_embeddings`, `norm` or `output` set to None,
    layers deleted (each keeps its name). All stages of a rank get the same arguments.

    Args:
        config: of the model, from `build_config`.
        execution: how the mixers are computed; every choice computes the same function. None: the defaults.

    Attributes:
        shard: which part of the sequences the model computes (`set_parts`); None: all.
        heads: which part of the heads; None: all.
        shared: the dynamics that a trainer has computed for all micro-batches of a step; None: each pass computes them.
    """

    shard: Part | None = None
    heads: Part | None = None
    shared: SharedDynamics | None = None

    def __init__(self, config: ModelConfig, execution: Execution | None = None) -> None:
        super().__init__()
        self.config = config
        self.bf16_products = execution is not None and execution.bf16_products
        self.tok_embeddings = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict(
            {str(i): TransformerBlock(c, execution) for i, c in enumerate(config.layers)}
        )
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.output = Head(config.dim, config.vocab_size)
        for name in ("tok_embeddings", "output"):  # the blocks have their values
            initialize(getattr(self, name), config, prefix=f"{name}.")

    def set_parts(self, *, shard: Part | None = None, heads: Part | None = None) -> None:
        """Compute these parts, together with the other ranks of their process groups. Losses and gradients are to be summed
        over the ranks. Call it before modules are wrapped.

        Args:
            shard: part of the sequences (context parallelism): tokens, positions, labels and results are the shard's.
                None: all.
            heads: part of the heads, the feed-forward's width and the vocabulary (tensor parallelism), and of the tokens
                between the mixers. Each number must be a multiple of its size. Arguments are those of all tokens. The
                parameters that `shard.split_dimension` names are to be replaced by this rank's parts, or all by DTensors,
                with `LocalParameters.local`. None: all.
        """
        modules: Any = self.modules()
        for module in modules:
            if hasattr(module, "shard"):
                module.shard = shard
            if hasattr(module, "heads"):
                module.heads = heads

    def forward(
        self,
        tokens: Tensor,
        state: ModelState | None = None,
        positions: Tensor | None = None,
        *,
        last: int | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Logits of whole sequences; with a state, of a piece that continues from it.

        Args:
            tokens: [B, T]. Of a stage without embedding the hidden states, [B, T, dim]; with heads it has T / size of them.
            state: from `init_state`; advanced in place.
            positions: [B, T] integers, if sequences hold several packed documents: how many tokens of its document come
                before each token. A position that is not the one before plus one begins a document. Nothing is carried from
                one document into another: not state, convolution or attention.
            last: logits of the last so many positions only, [B, last, V]. None: of all.
            labels: [B, T] integers, for each position the token after it, or IGNORE_INDEX. The result is then the
                cross-entropy, summed over tokens, a float32 scalar; the logits of all tokens never exist at once. With heads,
                the part of the sum whose labels are of this rank's vocabulary. A stage without head ignores them.

        Returns:
            Logits, [B, T, V]; with heads, of all tokens this rank's columns. Or the loss of labels. Of a stage without head
                the hidden states.

        Raises:
            ValueError: positions with a state, or of another type or shape; a state of other rows.
            NotImplementedError: a state or `last` where the model computes a part.
        """
        kinds, part = dict.fromkeys(self._kinds), self.shard or self.heads
        if part is not None and (state is not None or last is not None):
            raise NotImplementedError(
                f"state and last are for whole sequences and all heads, and this model computes one of {part.size} parts; "
                "generate with a model that has no parts."
            )
        h: Tensor = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        B, T = h.shape[0], h.shape[1] * (1 if self.heads is None else self.heads.size)
        order = torch.arange(T, device=tokens.device)
        if state is not None:
            if positions is not None:
                raise ValueError(
                    "positions are for whole sequences; a state knows its own: leave one out."
                )
            if len(state.position) != B:
                raise ValueError(
                    f"{B} row(s) of tokens for a state of {len(state.position)}; there must be one each."
                )
            positions = state.position[:, None] + order
            packing = {
                kind: mixer_class(kind).continuing(kind, state, T, h.dtype) for kind in kinds
            }
        else:
            order = order if self.shard is None else order + self.shard.rank * T
            if positions is not None:
                positions = counted_from_starts(positions, B, T, self.shard)
            packing = {
                kind: mixer_class(kind).packing(kind, order, positions, h.dtype, self.shard)
                for kind in kinds
            }
            positions = order if positions is None else positions
        rope = (
            rope_of(self.config, positions, h.dtype) if any(kind.rope for kind in kinds) else None
        )
        if state is not None:
            dynamics = state.dynamics
        elif self.shared is not None:
            dynamics = self.shared.layers
        else:
            dynamics = self.dynamics()
        products = contextlib.nullcontext()
        if (
            self.bf16_products
        ):  # autocast's cache would keep a bf16 copy of every weight to the end, to use it once
            products = torch.autocast(h.device.type, torch.bfloat16, cache_enabled=False)
        with products:
            for i, (kind, layer) in enumerate(zip(self._kinds, self.layers.values(), strict=True)):
                h = layer(h, rope, dynamics[i], state and state.layers[i], packing[kind])
            if state is not None:
                state.advance(T)
            h = h if last is None else h[:, -last:]
            h = h if self.norm is None else self.norm(h)
            if self.output is None:
                return h
            return self.output(h) if labels is None else self.output(h, labels)

    @property
    def _mixers(self) -> list[Any]:
        blocks: Any = self.layers.values()
        return [block.attention for block in blocks]

    @property
    def _kinds(self) -> list[MixerConfig]:
        """The kind of each layer. Tables are made once for all layers of a kind."""
        blocks: Any = self.layers.values()
        return [block.mixer for block in blocks]

    def dynamics(self) -> list[tuple[Tensor, ...]]:
        """Tensors that the scan of each layer reads of the parameters, float32; constant over the sequence.

        Computed outside the blocks and passed in: a float32 island that their precision and compilation do not touch.
        """
        mixers, kinds, by_layer = self._mixers, self._kinds, {}
        for kind in dict.fromkeys(kinds):
            alike = [i for i, other in enumerate(kinds) if other == kind]
            by_layer |= zip(
                alike, mixer_class(kind).dynamics([mixers[i] for i in alike]), strict=True
            )
        return [by_layer[i] for i in range(len(kinds))]

    def init_state(self, batch: int, capacity: int = 0) -> ModelState:
        """The state before the first token.

        Args:
            batch: B, sequences.
            capacity: tokens that softmax without a window has room for from the start; its cache grows where they are more.
        """
        weight, dynamics = self.tok_embeddings.weight, self.dynamics()
        place = capacity, torch.bfloat16 if self.bf16_products else weight.dtype, weight.device
        return ModelState(
            [
                mixer.init_state(batch, *place, tensors)
                for mixer, tensors in zip(self._mixers, dynamics, strict=True)
            ],
            torch.zeros(batch, dtype=torch.int64, device=weight.device),
            dynamics,
        )

    def init_weights(self, seed: int = 42) -> None:
        """Set every parameter and buffer: the same numbers on every device and under every sharding."""
        initialize(self, self.config, seed)


def count_parameters(model: nn.Module) -> int:
    """Numbers in all parameters."""
    return sum(p.numel() for p in model.parameters())


def meta_model(config: ModelConfig) -> Transformer:
    """The model on the meta device, without memory: for counting and checking shapes."""
    with torch.device("meta"):
        return Transformer(config)
