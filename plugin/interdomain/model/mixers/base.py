"""The interface of a token mixer: its function, its state and its costs.

The decoder, the hosts and the planner know a layer's mixer only by the methods of `Mixer`. A
`config` in this file is an entry of `ModelConfig.layers`: the configuration of a model whose layers
are all alike, so that `config.mixer` belongs to this layer.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import ModelConfig
from ..parallel import GroupRank
from ..settings import MixerConfig
from ..state import MixerState

# Shapes: B batch, T tokens (on this rank), J chosen tokens, E channels of the convolutions, W taps
#         of a convolution.


class Packing(NamedTuple):
    """Documents and padding in the rows of a batch, for the recurrences of all layers.

    Attributes:
        documents: The number of each token's document, [B, T]. Document 0 continues from the state,
            or from the previous context-parallel rank. None means one document.
        back: The number of tokens that the first token's document has on previous context-parallel
            ranks, [B].
        lengths: The number of tokens in each row, [B]; padding follows them, and the new state is
            the one after the tokens. None means that no row has padding.
    """

    documents: Tensor | None = None
    back: Tensor | None = None
    lengths: Tensor | None = None


class Mixer(nn.Module):
    """Base of the token mixers.

    `forward(x, rope, ssm_tensors, state, packing)` maps x [B, T, dim] to [B, T, dim].

    Attributes:
        cp_rank: This rank's place in context parallelism: x holds its part of each sequence. None
            means whole sequences.
        tp_rank: This rank's place in tensor parallelism: the mixer computes its part of the heads
            for all tokens of x, and the outputs must be summed over the ranks. The matrices are
            this rank's slices, or DTensors with them (`split_dimension`); all other parameters are
            whole. None means all heads.
    """

    cp_rank: "GroupRank | None" = None
    tp_rank: "GroupRank | None" = None

    @staticmethod
    def ssm_tensors(
        mixers: list[Any], dtype: torch.dtype = torch.float32
    ) -> list[tuple[Tensor, ...]]:
        """Returns the SSM tensors of each mixer: what its recurrence reads of its parameters.

        They are constant over the sequence, and computed once per forward pass or training step,
        outside the layers. By default there are none.

        Args:
            mixers: Mixers with the same settings.
            dtype: The least precise dtype to compute in. Parameters of a more precise dtype keep
                theirs.
        """
        return [()] * len(mixers)

    def call_core(
        self,
        core: Callable[..., Any],
        *args: Any,
        **options: Any,
    ) -> Any:
        """Calls the mixer's core: the function of q, k and v, which is linear in v.

        The inspector (`model/maps.py`) replaces this method for one forward pass to record the
        call.

        Args:
            core: The scan, the recurrence or softmax attention.
            args: Its arguments, tensors with the batch first.
            options: Its keyword arguments.
        """
        return core(*args, **options)

    @staticmethod
    def packing(
        mixer: MixerConfig,
        order: Tensor,
        positions: Tensor | None,
        dtype: torch.dtype,
        cp_rank: "GroupRank | None",
    ) -> Any:
        """Returns the argument `packing` of `forward` for whole sequences, for all layers.

        Args:
            mixer: Settings of the layers.
            order: The place of each token in its sequence, [T].
            positions: The place of each token in its document, [B, T]. None means that each
                sequence is one document.
            dtype: The dtype of the hidden states.
            cp_rank: This rank's place in context parallelism.
        """
        raise NotImplementedError("this mixer has no method `packing`")

    @staticmethod
    def continuing(
        mixer: MixerConfig,
        state: Any,
        tokens: int,
        dtype: torch.dtype,
    ) -> Any:
        """Returns the argument `packing` of `forward` for tokens that continue from a state.

        By default it is None: the layer's state holds everything that the tokens need.

        Args:
            mixer: Settings of the layers.
            state: The `ModelState` that the tokens continue from.
            tokens: The number of new tokens in each row, T.
            dtype: The dtype of the hidden states.
        """

    def init_state(
        self,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        ssm_tensors: Any,
    ) -> Any:
        """Returns the layer's state before the first token.

        Args:
            batch: The number of sequences.
            capacity: The number of tokens that a growing state has room for.
            dtype: The dtype of the hidden states.
            device: The device of the state.
            ssm_tensors: This mixer's entry in the result of `ssm_tensors`.
        """
        raise NotImplementedError("this mixer has no method `init_state`")

    @classmethod
    def state_shapes(cls, config: ModelConfig, ranks: int = 1) -> dict[str, tuple[int, ...]]:
        """Returns the shape of one sequence's state in one layer, by the attribute of `MixerState`.

        Only mixers whose state does not grow have it.

        Args:
            config: Configuration of the layer.
            ranks: The number of tensor-parallel ranks that share the heads.
        """
        raise NotImplementedError("this mixer has no method `state_shapes`")

    @staticmethod
    def state_grows(config: ModelConfig) -> bool:
        """Returns True if the state grows with the number of tokens.

        Args:
            config: Configuration of the layer.
        """
        return False

    @staticmethod
    def macs(config: ModelConfig, seq_len: int) -> dict[str, int]:
        """Returns the multiply-adds per token of one layer's mixer.

        The modules `Linear` and `ShortConv` are not counted: `model.flops` counts them. The key
        "mixer" is the core; "linear" is products with matrices that are no `Linear`.

        Args:
            config: Configuration of the layer.
            seq_len: Tokens of a sequence.
        """
        raise NotImplementedError("this mixer has no method `macs`")

    @classmethod
    def state_size(cls, config: ModelConfig) -> int:
        """Returns the number of elements in one layer's state per sequence.

        The inputs of the convolutions are not counted. For a growing state it is the number per
        token.

        Args:
            config: Configuration of the layer.
        """
        return math.prod(cls.state_shapes(config)["ssm"])

    @staticmethod
    def saved_elements(config: ModelConfig) -> tuple[int, int]:
        """Returns the elements per token that one layer saves for the backward pass.

        The first number counts the inputs of the features and of the core. The second counts the
        scan's scores, which are saved only if `Execution.recompute` is False.

        Args:
            config: Configuration of the layer.
        """
        raise NotImplementedError("this mixer has no method `saved_elements`")

    @classmethod
    def received_elements(
        cls,
        config: ModelConfig,
        context: int,
        tensor: int,
    ) -> tuple[int, int]:
        """Returns the elements that a context-parallel rank receives for one layer.

        The backward pass receives as many as the forward pass. The first number is per sequence, in
        float32. The second is per token of this rank, in the dtype of the activations.

        Args:
            config: Configuration of the layer.
            context: The number of context-parallel ranks.
            tensor: The number of tensor-parallel ranks.
        """
        raise NotImplementedError("this mixer has no method `received_elements`")


class Recurrence(Mixer):
    """Base of the mixers with a state of fixed size, whose `packing` is a `Packing`.

    Attributes:
        layer: Configuration of the layer.
    """

    layer: ModelConfig

    def init_state(
        self,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        ssm_tensors: Any,
    ) -> MixerState:
        """Returns a state of zeros.

        Args:
            batch: The number of sequences, B.
            capacity: Ignored: the state does not grow.
            dtype: The dtype of the hidden states. The recurrence's state is at least float32.
            device: The device of the state.
            ssm_tensors: This mixer's entry in the result of `ssm_tensors`.
        """
        shapes = self.state_shapes(self.layer)
        exact = torch.promote_types(dtype, torch.float32)
        return MixerState(
            conv=torch.zeros(batch, *shapes["conv"], dtype=dtype, device=device),
            ssm=torch.zeros(batch, *shapes["ssm"], dtype=exact, device=device),
            prepared=self._prepare_step(ssm_tensors),
        )

    def _prepare_step(self, ssm_tensors: Any) -> Any:
        """Returns `MixerState.prepared`; None if the mixer has no step kernels.

        Args:
            ssm_tensors: This mixer's entry in the result of `ssm_tensors`.
        """

    @staticmethod
    def packing(
        mixer: MixerConfig,
        order: Tensor,
        positions: Tensor | None,
        dtype: torch.dtype,
        cp_rank: "GroupRank | None",
    ) -> Packing | None:
        """Numbers the documents of each sequence; see `Mixer.packing`.

        Args:
            mixer: Ignored.
            order: Ignored.
            positions: The place of each token in its document, [B, T]. None means that each
                sequence is one document; the result is then None, too.
            dtype: Ignored.
            cp_rank: This rank's place in context parallelism. None means whole sequences.
        """
        if positions is None:
            return None
        # A document begins at position 0; what comes before the first of them is document 0.
        documents = (positions == 0).cumsum(1, dtype=torch.int32)
        back = None
        if cp_rank is not None:
            back = positions[:, 0]
        return Packing(documents, back)


def take(x: Tensor, index: Tensor) -> Tensor:
    """Gathers tokens of each row: x [B, T, ...] at index [B, J] -> [B, J, ...]."""
    trailing = x.shape[2:]
    index = index.view(*index.shape, *[1] * len(trailing))
    return x.gather(1, index.expand(*index.shape[:2], *trailing))


def last_inputs(
    past: Tensor,
    x: Tensor,
    n: int,
    lengths: Tensor | None,
) -> Tensor:
    """Returns the last n inputs of the convolutions, [B, n, E].

    Args:
        past: The n inputs before x, [B, n, E].
        x: The new inputs, [B, T, E].
        n: The number of inputs that a convolution reads before its own, W - 1.
        lengths: The number of tokens in each row of x, [B]; padding follows them. None means T.
    """
    x = torch.cat([past.to(x.dtype), x], dim=1)
    if lengths is None:
        return x[:, -n:]
    return take(x, lengths[:, None] + torch.arange(n, device=x.device))


def counted_from_starts(
    positions: Tensor,
    batch: int,
    tokens: int,
    cp_rank: "GroupRank | None",
) -> Tensor:
    """Counts each token's place in its document from the document's first token, [B, T] int64.

    A token begins a document if its position is 0, or is not the position before it plus one. On a
    context-parallel rank after the first, the positions of the first document stay as given: only
    they say how many of its tokens other ranks hold.

    Args:
        positions: Integers as the user gave them, [B, T].
        batch: B.
        tokens: T.
        cp_rank: This rank's place in context parallelism.
    Raises:
        ValueError: `positions` is not a tensor of integers with shape [B, T].
    """
    got = f"a {type(positions).__name__}"
    if isinstance(positions, Tensor):
        got = f"{positions.dtype} {list(positions.shape)}"
    valid = isinstance(positions, Tensor) and positions.shape == (batch, tokens)
    if not valid or positions.is_floating_point():
        raise ValueError(
            f"positions are {got}; expected integers {[batch, tokens]}, a tensor: the number of "
            "tokens before each token in its document."
        )

    # The index of the token with which each token's document begins.
    positions = positions.long()
    begins = (positions[:, 1:] == 0) | (positions[:, 1:] != positions[:, :-1] + 1)
    begins = F.pad(begins, (1, 0), value=True)
    order = torch.arange(tokens, device=positions.device)
    start = order.where(begins, 0).cummax(1).values
    counted = order - start

    # The first document may have begun on a previous rank.
    if cp_rank is None or cp_rank.rank == 0:
        return counted
    return torch.where(start == 0, counted + positions[:, :1], counted)
