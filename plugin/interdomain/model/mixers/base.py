"""The interface of a token mixer: the function, its state, and its costs. Nothing else asks which mixer a layer has.

A `config` is that of a model all of whose layers are alike, so `config.mixer` is the layer's own (`ModelConfig.layers`).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import ModelConfig
from ..settings import MixerConfig
from ..shard import Part

# Shapes: B batch, T time.


class Packing(NamedTuple):
    """What a recurrence must know of the rows of a batch; the same in all layers.

    Attributes:
        documents: the number of each token's document, [B, T]; 0 for one that goes on from before. None: one document.
        back: of a shard, how many tokens of its document come before the first, [B].
        lengths: tokens of each row, [B], where padding follows them. The state is that after the tokens. None: all.
    """

    documents: Tensor | None = None
    back: Tensor | None = None
    lengths: Tensor | None = None


class Mixer(nn.Module):
    """Base of the mixers: x [B, T, dim] -> [B, T, dim] by `forward(x, rope, dynamics, state, packing)`.

    Attributes:
        shard: which part of the sequences x is, where several ranks have the parts; None: all of them.
        heads: which part of the heads this mixer computes, of all tokens of x: what it returns is to be summed over the ranks.
            Its matrices are this rank's parts, or DTensors with them (`split_dimension`); all else is whole. None: all heads.
    Raises: NotImplementedError for what a mixer does not answer; nothing is taken over from another one.
    """

    shard: "Part | None" = None
    heads: "Part | None" = None

    @staticmethod
    def dynamics(mixers: list[Any], dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, ...]]:
        """Tensors that are constant over the sequence, of mixers with the same settings: computed once per forward. By default
        there are none. dtype: of the arithmetic, where the parameters have less."""
        return [()] * len(mixers)

    def call_core(self, core: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Calls the function of the queries, keys and values, which is linear in the values.

        The inspector (`model/maps.py`) gives a mixer another method of this name for one forward pass, to see the call.
        """
        return core(*args, **options)

    @staticmethod
    def packing(
        mixer: MixerConfig,
        order: Tensor,
        positions: Tensor | None,
        dtype: torch.dtype,
        shard: "Part | None",
    ) -> Any:
        """What `forward` needs to know of packed documents and the shard: the same in all layers with this mixer.

        Args:
            order: Where the tokens stand in the sequence, [T].
            positions: Where they stand in their documents, [B, T]. None: each sequence is one document.
        """
        raise NotImplementedError("this mixer cannot keep packed documents apart")

    @staticmethod
    def continuing(mixer: MixerConfig, state: Any, tokens: int, dtype: torch.dtype) -> Any:
        """The same for a piece that continues from a `ModelState`. By default nothing: a state is all that the piece needs."""

    def init_state(
        self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device, dynamics: Any
    ) -> Any:
        """The layer's state before the first token; `capacity` tokens of room where it grows."""
        raise NotImplementedError(f"{type(self).__name__} has no state: it cannot generate")

    @classmethod
    def state_shapes(cls, config: ModelConfig, ranks: int = 1) -> dict[str, tuple[int, ...]]:
        """Shapes of a sequence's state in one layer, by the names in a MixerState, for one of so many ranks that share the
        heads. Of mixers whose state does not grow."""
        raise NotImplementedError("this mixer's state has no fixed shape")

    @staticmethod
    def state_grows(config: ModelConfig) -> bool:
        """True if the state has room for a number of tokens, and not one size for all lengths."""
        return False

    @staticmethod
    def macs(config: ModelConfig, seq_len: int) -> dict[str, int]:
        """Multiply-adds of one layer's mixer per token: its core as "mixer", and as "linear" products with matrices that are no
        `Linear`, if it has such. `model.flops` counts the modules `Linear` and `ShortConv`."""
        raise NotImplementedError("this mixer does not count its FLOPs")

    @classmethod
    def state_size(cls, config: ModelConfig) -> int:
        """Numbers of one layer's state per sequence (of a growing one per token), without the convolutions' last inputs."""
        return math.prod(cls.state_shapes(config)["ssm"])

    @staticmethod
    def kept(config: ModelConfig) -> tuple[int, int]:
        """Numbers per token of one layer that autograd keeps: (inputs of features and core, scores unless recomputed)."""
        raise NotImplementedError("this mixer does not say what its backward pass keeps")

    @classmethod
    def received(cls, config: ModelConfig, context: int, tensor: int) -> tuple[int, int]:
        """Numbers that a rank with one of `context` shards of a sequence and of `tensor` parts of the heads receives for a
        layer, forward, and as many backward: (per sequence in float32, per token of the shard in the activations' dtype)."""
        raise NotImplementedError(
            "this mixer does not say what ranks with shards of its sequences exchange"
        )


class Recurrence(Mixer):
    """Base of the mixers with a state of fixed size: they take a `Packing`."""

    @staticmethod
    def packing(
        mixer: MixerConfig,
        order: Tensor,
        positions: Tensor | None,
        dtype: torch.dtype,
        shard: "Part | None",
    ) -> Packing | None:
        if positions is None:
            return None
        documents = (positions == 0).cumsum(1, dtype=torch.int32)
        return Packing(documents, None if shard is None else positions[:, 0])


def take(x: Tensor, index: Tensor) -> Tensor:
    """x [B, T, ...] at positions index [B, J] of each row: [B, J, ...]."""
    return x.gather(
        1, index.view(*index.shape, *(1,) * (x.ndim - 2)).expand(*index.shape, *x.shape[2:])
    )


def last_inputs(past: Tensor, x: Tensor, n: int, lengths: Tensor | None) -> Tensor:
    """The last n inputs of the convolutions, [B, n, E], of x [B, T, E] and those before it; with lengths [B] of each row's
    first tokens."""
    x = torch.cat([past.to(x.dtype), x], dim=1)
    if lengths is None:
        return x[:, -n:]
    return take(x, lengths[:, None] + torch.arange(n, device=x.device))


def counted_from_starts(positions: Tensor, batch: int, tokens: int, shard: "Part | None") -> Tensor:
    """Positions [B, T] of packed documents, each counted from its document's first token: int64.

    A token begins a document if its position is 0, or is not that of the token before plus one. In a shard after the first of a
    sequence, the first document's positions stay as they are given: only they say how much of it other ranks have.

    Raises: ValueError for positions of another type or shape.
    """
    expected = f"expected integers {[batch, tokens]}, a tensor: how many tokens of its document come before each token."
    if not isinstance(positions, Tensor):
        raise ValueError(f"positions are a {type(positions).__name__}; {expected}")
    if positions.is_floating_point() or positions.shape != (batch, tokens):
        raise ValueError(f"positions are {positions.dtype} {list(positions.shape)}; {expected}")
    positions = positions.long()
    begins = (positions[:, 1:] == 0) | (positions[:, 1:] != positions[:, :-1] + 1)
    begins = F.pad(begins, (1, 0), value=True)
    order = torch.arange(tokens, device=positions.device)
    start = order.where(begins, 0).cummax(1).values
    counted = order - start
    if shard is None or shard.rank == 0:
        return counted
    return torch.where(start == 0, counted + positions[:, :1], counted)
