"""The cache that transformers carries between forward passes, and batches with padding.

Shapes: B batch, T tokens, H heads of keys, S slots of softmax's cache, W width of the convolutions,
E their channels.
"""

from collections.abc import Callable
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


def ssm_tensors_of(mixer: Any, x: Tensor) -> Any:
    """Returns the tables of a mixer's SSM parameters, which its recurrence reads.

    They are the result of `Mixer.ssm_tensors`.

    Args:
        mixer: The mixer of a layer.
        x: Hidden states. The tables are float64 if these are, else float32.
    """
    return mixer.ssm_tensors([mixer], torch.promote_types(x.dtype, torch.float32))[0]


class Slots:
    """The state of a softmax layer in one pass: cached keys and values. Its mixer adds new ones.

    Attributes:
        k: Keys, [B, H, S, head_dim].
        v: Values, [B, H, S, head_dim].
        made_in: `backward_pass` when this was made.
    """

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.made_in = backward_pass()
        self.k = k
        self.v = v

    def append(self, k: Tensor, v: Tensor, *place: Any) -> tuple[Tensor, Tensor]:
        """Adds keys and values behind the others, and returns all.

        Args:
            k: Keys of the new tokens, [B, H, T, head_dim].
            v: Values of the new tokens, [B, H, T, head_dim].
            place: The other arguments of `KVCache.append`, the package's own cache. They are
                ignored: here the new tokens always stand behind the others.
        """
        check_not_recomputed(self.made_in)
        self.k = torch.cat([self.k, k.to(self.k.dtype)], dim=2)
        self.v = torch.cat([self.v, v.to(self.v.dtype)], dim=2)
        return self.k, self.v


class InterdomainCache(Cache):
    """`past_key_values` of the model.

    A recurrent layer has a state of fixed size. A softmax layer has the keys and values of all
    tokens so far, or with a window those of each row's last tokens. The cache cannot go back: to
    continue one text in several ways, copy it (`copy.copy`) before.

    It is a plain object on purpose, and no pytree node. Wrappers such as FSDP2 and DDP rebuild the
    dataclasses, tuples, lists, dictionaries and pytree nodes among a module's arguments and
    results, and a layer would then advance the copy. By its base class PEFT knows it for a cache,
    and so do transformers' exporters, which make a pytree node of it.

    Attributes:
        length: The number of tokens that were read, padding included.
        position: The number of tokens of each row without padding, [B]; None before the first pass.
        slots: The token that each slot of softmax layers holds, [B, S], by the layers' window (0
            for none); -1 for padding.
        states: The state of each layer by its index: the last inputs of the convolutions [B, W - 1,
            E] and the recurrence's state, or keys and values [B, H, S, head_dim].
        tables: What each recurrence reads of its parameters, by its layer's index: the tables of
            `Mixer.ssm_tensors`, and the forms of them that a decode step reads
            (`MixerState.prepared`). They are computed once.
        masks: The passes with padding, as (length before the pass, mask [B, T] with False for
            padding).
        made_in: The number of the backward pass in which the cache was made, -1 outside of one
            (`backward_pass`). By it a pass that activation checkpointing computes again is an
            error.
    """

    # Properties of the base class. The cache counts as not linear: it knows its length, and
    # `generate` gives the model only what is new.
    is_compileable = False  # pyright: ignore[reportAssignmentType]
    is_croppable = False  # pyright: ignore[reportAssignmentType]
    is_linear = (False,)  # pyright: ignore[reportAssignmentType]

    # transformers' exporters make inputs and outputs of an exported step from `vars`. These are not
    # among them: a number would be a constant of the graph, and it needs neither tables nor masks.
    __slots__ = ("length", "made_in", "masks", "tables")

    def __new__(cls, *args: Any) -> "InterdomainCache":
        # The attributes in __slots__ are set here, because exporters make a cache without __init__.
        cache = super().__new__(cls)
        cache.length = 0
        cache.made_in = backward_pass()
        cache.masks = []
        cache.tables = {}
        return cache

    def __init__(self) -> None:
        self.position: Tensor | None = None
        self.slots: dict[int, Tensor] = {}
        self.states: dict[int, tuple[Tensor, Tensor]] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(length={self.length}, batch_size={self.batch_size})"

    def has_read(self, mask: Tensor) -> bool:
        """Returns whether a mask has padding in the same places as the tokens that were read.

        Args:
            mask: [B, length + T], 0 for padding.
        """
        # `_prepare` raises an error for another number of rows.
        if self.position is None or len(mask) != self.batch_size:
            return True
        # The mask of all passes so far. self.masks has only those of passes with padding.
        read = torch.ones(len(mask), self.length, dtype=torch.bool, device=mask.device)
        for begin, passed in self.masks:
            read[:, begin : begin + passed.shape[1]] = passed
        return torch.equal(mask[:, : self.length].bool(), read)

    def state_of(self, layer_idx: int, mixer: Any, x: Tensor) -> tuple[Any, Any]:
        """Prepares a pass of a layer.

        Args:
            layer_idx: The layer's place in the model.
            mixer: Its mixer.
            x: The hidden states that the mixer reads, [B, T, dim].

        Returns:
            The layer's state for the mixer to advance, a `MixerState` or `Slots`; and the tables of
            its SSM parameters, an empty tuple for softmax.
        """
        check_not_recomputed(self.made_in)
        stored = self.states.get(layer_idx)
        if isinstance(mixer, SoftmaxMixer):
            empty = x.new_empty(x.shape[0], mixer.n_kv_heads, 0, mixer.head_dim)
            keys, values = stored or (empty, empty)
            return Slots(keys, values), ()

        # The tables are computed in the first pass, and then read from the cache.
        tables = self.tables.get(layer_idx)
        if stored is None or tables is None:
            ssm_tensors = ssm_tensors_of(mixer, x)
            state = mixer.init_state(x.shape[0], 0, x.dtype, x.device, ssm_tensors)
            # An exported graph computes its tables from the parameters. It keeps none, and has no
            # use for those of step kernels.
            if is_exporting():
                state.prepared = None
            tables = ssm_tensors, state.prepared
        if not is_exporting():
            self.tables[layer_idx] = tables
        ssm_tensors, prepared = tables
        if stored is not None:
            # The state of the last pass. Copies, because a mixer may write into its state.
            convolution_inputs, ssm = stored
            state = MixerState(convolution_inputs.clone(), ssm.clone(), prepared)
        return state, ssm_tensors

    def take_over(self, layer_idx: int, state: Any, stay: Tensor | None) -> None:
        """Keeps the state that a mixer has advanced.

        Args:
            layer_idx: The layer's place in the model.
            state: The state that `state_of` returned.
            stay: The slots of softmax that stay in the cache, [B, window]; None for all.
        """
        if isinstance(state, MixerState):
            self.states[layer_idx] = state.conv, state.ssm
        elif stay is None:
            self.states[layer_idx] = state.k, state.v
        else:
            # `take` gathers along the second dimension, and the slots are the third.
            keys = take(state.k.transpose(1, 2), stay).transpose(1, 2)
            values = take(state.v.transpose(1, 2), stay).transpose(1, 2)
            self.states[layer_idx] = keys, values

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> "InterdomainCache":
        """Returns a cache with the function's result for each tensor.

        The tables, which no pass writes, are shared.
        """
        other = InterdomainCache()
        other.length = self.length
        if self.position is not None:
            other.position = function(self.position)
        other.slots = {window: function(slots) for window, slots in self.slots.items()}
        # A state is two tensors: of a recurrent layer, or keys and values.
        for layer_idx, (first, second) in self.states.items():
            other.states[layer_idx] = function(first), function(second)
        other.masks = [(begin, function(mask)) for begin, mask in self.masks]
        other.tables = dict(self.tables)
        return other

    def _become(self, other: "InterdomainCache") -> None:
        """Replaces the contents of this cache by those of another. Callers keep this object."""
        # `vars` leaves out the attributes in __slots__.
        self.length = other.length
        self.masks = other.masks
        self.tables = other.tables
        vars(self).update(vars(other))

    def __copy__(self) -> "InterdomainCache":
        # The same tensors: a pass puts new ones in their place, and writes none.
        return self._mapped(lambda x: x)

    def __deepcopy__(self, memo: dict) -> "InterdomainCache":
        return self._mapped(Tensor.clone)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Returns the length of an attention mask for the next tokens, and its first token."""
        return self.length + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # no limit

    def __len__(self) -> int:
        """Returns the number of layers that have a state."""
        return len(self.states)

    @property
    def batch_size(self) -> int:
        return -1 if self.position is None else len(self.position)

    def reset(self) -> None:
        """Forgets all tokens."""
        self._become(InterdomainCache())

    def crop(self, tokens: int) -> None:
        """Raises NotImplementedError: a state cannot take tokens back."""
        raise NotImplementedError(
            f"crop({tokens}): a recurrent state cannot take tokens back. Copy the cache before them (copy.copy), or "
            "read the text again from its start."
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row, with its copies next to it."""
        self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows of these indices."""
        self.reorder_cache(indices)

    def reorder_cache(self, indices: Tensor) -> None:
        """Puts rows of these indices in the place of all rows: the beams that go on."""
        self._become(self._mapped(lambda x: x[indices.to(x.device)]))


def token_order(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Orders the tokens of each row first and its padding last.

    Args:
        mask: [B, T], False for padding.

    Returns:
        The positions in this order, [B, T]; the positions that undo it, [B, T]; and the number of
        tokens, [B].
    """
    lengths = mask.sum(1, keepdim=True)
    # The new position of each token is the number of tokens before it. That of padding is the
    # number of all tokens and of the padding before it.
    back = torch.where(mask, mask.cumsum(1), lengths + (~mask).cumsum(1)) - 1
    # The inverse: place back[i] of the new order has position i.
    places = torch.arange(mask.shape[1], device=mask.device).expand_as(back)
    order = torch.zeros_like(back).scatter(1, back, places)
    return order, back, lengths[:, 0]


class Rows(NamedTuple):
    """What a layer needs to know of the rows of a batch.

    Recurrent layers compute with every row's tokens first and its padding last, where no token sees
    it. Softmax layers leave padding where it is.

    Attributes:
        packing: The argument `packing` of the layer's mixer. For recurrent layers a `Packing` with
            the length of each row; for softmax layers an `Attended` with the mask of the keys. None
            if there is nothing to mask.
        order: The positions in the recurrent layers' order, [B, T]; None if they stay as they are.
        back: The positions that undo `order`, [B, T]; None if `order` is.
        stay: For softmax with a window, the slots that stay in the cache, [B, window]; None for
            all.
    """

    packing: Any = None
    order: Tensor | None = None
    back: Tensor | None = None
    stay: Tensor | None = None

    @classmethod
    def padded(cls, mask: Tensor) -> "Rows":
        """Returns the rows of a batch with padding for recurrent layers.

        Args:
            mask: [B, T], False for padding.
        """
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
        """Returns the rows for softmax layers, and notes in the cache which token is in each slot.

        Args:
            window: The number of tokens that a query attends to; 0 for all.
            token: Each token's number in its row, [B, T].
            mask: [B, T], False for padding; None for no padding.
            cache: The cache that the layers read and advance; None without one.
            dtype: The data type of the scores.

        Returns:
            Rows with `stay`; and with the mask of the keys as `packing`, unless usual causal
            attention needs none.
        """
        # The token of each slot, -1 for padding: those in the cache, then the new ones.
        T = token.shape[1]
        slots = token if mask is None else token.masked_fill(~mask, -1)
        cached = None if cache is None else cache.slots.get(window)
        if cached is not None:
            slots = torch.cat((cached.to(slots.device), slots), dim=1)
        S = slots.shape[1]

        # The cache keeps each row's last tokens, whatever padding is between: the slots with the
        # largest numbers.
        stay = None
        if cache is not None and window and window < S:
            stay = slots.topk(window, dim=1).indices
            cache.slots[window] = slots.gather(1, stay)
        elif cache is not None:
            cache.slots[window] = slots

        # Without padding, a cache or a window that cuts, the usual causal attention needs no mask.
        if mask is None and cached is None and not (window and window < T):
            return cls(stay=stay)
        # The slots that each query attends to, [B, T, S]: no padding, no later token, and with a
        # window no token before it.
        seen = (slots[:, None] >= 0) & (slots[:, None] <= token[..., None])
        if window:
            seen &= slots[:, None] > token[..., None] - window
        # Padding attends to itself: a query without any key would be NaN.
        own = S - T + torch.arange(T, device=slots.device)[:, None]
        seen = seen | (torch.arange(S, device=slots.device) == own)
        return cls(Attended(additive_mask(seen[:, None], dtype)), stay=stay)
