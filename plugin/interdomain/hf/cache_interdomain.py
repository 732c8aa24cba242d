"""The cache that transformers carries from one forward pass to the next, and batches whose rows differ in length."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .plain_interdomain import (
    Attended,
    MixerState,
    Packing,
    SoftmaxMixer,
    additive_mask,
    backward_pass,
    check_not_recomputed,
    is_exporting,
    take,
)

# Shapes: B batch, T tokens, H heads of state, W convolution width, E channels of the convolutions, S slots of softmax's cache.


def dynamics_of(mixer: Any, x: Tensor) -> Any:
    """The tables of a mixer's SSM parameters (`Mixer.dynamics`): float64 if the hidden states x are, else float32."""
    return mixer.dynamics([mixer], torch.promote_types(x.dtype, torch.float32))[0]


class Slots:
    """Keys and values of a softmax layer, [B, H, S, head_dim], to which its mixer adds those of a pass."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.made_in = backward_pass()
        self.k = k
        self.v = v

    def append(self, k: Tensor, v: Tensor, *place: Any) -> tuple[Tensor, Tensor]:
        check_not_recomputed(self.made_in)
        self.k = torch.cat([self.k, k.to(self.k.dtype)], dim=2)
        self.v = torch.cat([self.v, v.to(self.v.dtype)], dim=2)
        return self.k, self.v


class InterdomainCache(Cache):
    """`past_key_values`. A recurrent layer has a state of fixed size, a softmax layer the keys and values so far: of all slots,
    or of the last `window` tokens of each row.

    It cannot go back: to continue one text in several ways, copy it (`copy.copy`) before.

    It is a plain object on purpose, and no pytree node. Wrappers such as FSDP2 and DDP rebuild the dataclasses, tuples, lists,
    dictionaries and pytree nodes among a module's arguments and results, and a layer would then advance the copy. By its base
    class PEFT knows it for a cache, and so do transformers' exporters, which then make pytree nodes of caches.

    Args:
        gathered: what iterating over another cache gives, as nn.DataParallel joins the rows of several. None for no token yet.

    Attributes:
        length: tokens read, padding included. position: tokens of each row without padding, [B]; None before the first.
        slots: by the window of softmax layers (0: none), which token each slot of theirs holds, [B, S]; -1 for padding.
        states: by layer, (last inputs of the convolutions [B, W - 1, E], the recurrence's state), or (keys, values).
        tables: by layer, what the mixer reads of its parameters, computed once: `Mixer.dynamics`, and a step's forms of them.
        masks: (tokens before, mask [B, T], False for padding) of each pass with padding.
        made_in: `backward_pass` when the cache was made.
    """

    # Properties of the base class. Not linear: it counts the tokens, and `generate` gives it only what is new.
    is_compileable = False  # pyright: ignore[reportAssignmentType]
    is_croppable = False  # pyright: ignore[reportAssignmentType]
    is_linear = (False,)  # pyright: ignore[reportAssignmentType]

    # These are not in `vars`, which transformers' exporters go by: a number of Python's would be a constant of an exported
    # step, and the tables and masks would be inputs and outputs of it.
    __slots__ = ("length", "made_in", "masks", "tables")

    def __new__(cls, *args: Any) -> "InterdomainCache":
        cache = super().__new__(cls)
        cache.length = 0
        cache.made_in = backward_pass()
        cache.masks = []
        cache.tables = {}
        return cache

    def __init__(self, gathered: Iterable | None = None) -> None:
        self.position: Tensor | None = None
        self.slots: dict[int, Tensor] = {}
        self.states: dict[int, tuple[Tensor, Tensor]] = {}
        if gathered is not None:
            mask, self.position, self.slots, self.states = gathered
            if mask is not None:
                self.length = mask.shape[1]
                self.masks = [(0, mask)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(length={self.length}, batch_size={self.batch_size})"

    def __iter__(self) -> Iterator[Any]:
        """Its parts, of tensors whose first dimension is the rows."""
        yield None if self.position is None else self.mask()
        yield self.position
        yield self.slots
        yield self.states

    def mask(self) -> Tensor:
        """The mask of all tokens that were read, [B, length]; False for padding."""
        assert self.position is not None
        read = torch.ones(
            self.batch_size, self.length, dtype=torch.bool, device=self.position.device
        )
        for begin, mask in self.masks:
            read[:, begin : begin + mask.shape[1]] = mask
        return read

    def has_read(self, mask: Tensor) -> bool:
        """True if what this mask has before the new tokens, [B, length + T], is what was read."""
        if (
            self.position is None or len(mask) != self.batch_size
        ):  # other rows are refused elsewhere
            return True
        return torch.equal(mask[:, : self.length].bool(), self.mask().to(mask.device))

    def state_of(self, layer_idx: int, mixer: Any, x: Tensor) -> tuple[Any, Any]:
        """(the state of a layer, which its mixer advances; what `Mixer.dynamics` gives) for hidden states x [B, T, dim]."""
        check_not_recomputed(self.made_in)
        kept = self.states.get(layer_idx)
        if isinstance(mixer, SoftmaxMixer):
            empty = x.new_empty(x.shape[0], mixer.n_kv_heads, 0, mixer.head_dim)
            keys, values = kept or (empty, empty)
            return Slots(keys, values), ()
        dynamics, prepared = self.tables.get(layer_idx) or (dynamics_of(mixer, x), None)
        if kept is None or layer_idx not in self.tables:
            state = mixer.init_state(x.shape[0], 0, x.dtype, x.device, dynamics)
            prepared = state.prepared = None if is_exporting() else state.prepared
        if kept is not None:
            conv, ssm = kept
            state = MixerState(
                conv.clone(), ssm.clone(), prepared
            )  # copies: a mixer may write into its state
        if not is_exporting():
            self.tables[layer_idx] = dynamics, prepared
        return state, dynamics

    def take_over(self, layer_idx: int, state: Any, stay: Tensor | None) -> None:
        """Keep what a mixer has made of its state. stay: the slots of softmax that stay, [B, window]; None: all."""
        tensors = (state.conv, state.ssm) if isinstance(state, MixerState) else (state.k, state.v)
        if stay is not None:
            tensors = [take(x.transpose(1, 2), stay).transpose(1, 2) for x in tensors]
        first, second = tensors
        self.states[layer_idx] = first, second

    def _with(self, function: Callable[[Tensor], Tensor]) -> "InterdomainCache":
        """A cache of the function of each tensor. The tables, which no pass writes, are shared."""
        other = InterdomainCache()
        other.length = self.length
        other.position = None if self.position is None else function(self.position)
        other.slots = {window: function(x) for window, x in self.slots.items()}
        other.states = {i: (function(x), function(y)) for i, (x, y) in self.states.items()}
        other.masks = [(begin, function(x)) for begin, x in self.masks]
        other.tables = dict(self.tables)
        return other

    def __copy__(self) -> "InterdomainCache":
        return self._with(
            lambda x: x
        )  # a pass puts new tensors in the place of the old ones, and writes none

    def __deepcopy__(self, memo: dict) -> "InterdomainCache":
        return self._with(Tensor.clone)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(length of an attention mask for the next tokens, its first token)."""
        return self.length + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # transformers' word for no limit

    def __len__(self) -> int:
        """Layers that have a state."""
        return len(self.states)

    @property
    def batch_size(self) -> int:
        return -1 if self.position is None else len(self.position)

    def reset(self) -> None:
        """Forget all tokens."""
        self.length = 0
        self.masks = []
        self.tables = {}
        vars(self).update(vars(InterdomainCache()))

    def crop(self, tokens: int) -> None:
        raise NotImplementedError(
            f"crop({tokens}): a recurrent state cannot take tokens back. Copy the cache before them (copy.copy), or "
            "read the text again from its start."
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def reorder_cache(self, indices: Tensor) -> None:
        """Rows of other texts in place of these: the beams that go on."""
        others = self._with(lambda x: x[indices.to(x.device)])
        self.masks = others.masks
        vars(self).update(vars(others))


def token_order(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The positions of each row with its tokens first and its padding last, [B, T]; those that undo it; how many tokens, [B].
    mask: [B, T], False for padding."""
    lengths = mask.sum(1, keepdim=True)
    back = torch.where(mask, mask.cumsum(1), lengths + (~mask).cumsum(1)) - 1
    places = torch.arange(mask.shape[1], device=mask.device).expand_as(back)
    return torch.zeros_like(back).scatter(1, back, places), back, lengths[:, 0]


class Rows(NamedTuple):
    """A layer's information about the rows of a batch.

    Recurrent layers compute with every row's tokens first and its padding last, where no token sees it. Softmax layers leave
    padding where it is.

    Attributes:
        told: The mixer's argument `packing`.
        order: The positions in the recurrent layers' order, [B, T]; None if they stay as they are.
        back: The positions that undo `order`.
        stay: For softmax with a window, the slots that stay in the cache, [B, window]; None for all.
    """

    told: Any = None
    order: Tensor | None = None
    back: Tensor | None = None
    stay: Tensor | None = None

    @classmethod
    def padded(cls, mask: Tensor) -> "Rows":
        """The rows for recurrent layers. mask: [B, T], False for padding."""
        order, back, lengths = token_order(mask)
        return cls(Packing(lengths=lengths), order, back)

    @classmethod
    def attended(
        cls,
        window: int,
        token: Tensor,
        mask: Tensor | None,
        cache: InterdomainCache | None,
        dtype: torch.dtype,
    ) -> "Rows":
        """The rows for softmax layers. token: each token's number in its row, [B, T]; the cache notes those of its slots."""
        T, stay = token.shape[1], None
        before = None if cache is None else cache.slots.get(window)
        tokens = token if mask is None else token.masked_fill(~mask, -1)
        slots = tokens if before is None else torch.cat((before.to(tokens.device), tokens), dim=1)
        S = slots.shape[1]
        if cache is not None:
            if window and window < S:
                # Each row's last tokens, whatever padding is between.
                stay = slots.topk(window, dim=1).indices
            cache.slots[window] = slots if stay is None else slots.gather(1, stay)
        if mask is None and before is None and not (window and window < T):
            return cls(stay=stay)
        seen = (slots[:, None] >= 0) & (slots[:, None] <= token[..., None])
        if window:
            seen &= slots[:, None] > token[..., None] - window
        # Padding attends to itself: a query without any key would be NaN.
        itself = (
            torch.arange(S, device=slots.device)
            == S - T + torch.arange(T, device=slots.device)[:, None]
        )
        return cls(Attended(additive_mask((seen | itself)[:, None], dtype)), stay=stay)
