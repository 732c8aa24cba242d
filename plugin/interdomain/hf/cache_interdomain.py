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

    They are constant over the sequence, and the result of `Mixer.ssm_tensors` for this mixer. A
    softmax mixer has none, an empty tuple.

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
        made_in: The number of the backward pass in which this was made, -1 outside of one.
    """

    def __init__(self, k: Tensor, v: Tensor) -> None:
        # By this number `append` knows a pass that activation checkpointing computes again.
        self.made_in = backward_pass()
        self.k = k
        self.v = v

    def append(self, k: Tensor, v: Tensor, *place: Any) -> tuple[Tensor, Tensor]:
        """Adds the keys and values of new tokens behind the cached ones, and returns all.

        Args:
            k: Rotated keys of the new tokens, [B, H, T, head_dim], for H heads of keys.
            v: Values of the new tokens, [B, H, T, head_dim].
            place: The mixer also says into which slots the tokens go, as the package's own cache
                asks (`KVCache.append`). This is ignored: here they always stand behind the others.

        Returns:
            All keys and all values, each [B, H, S, head_dim], S cached and new tokens.

        Raises:
            ValueError: Activation checkpointing computes a pass again in the backward pass. It
                would add the same tokens a second time.
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

    # Properties of transformers' base class. The cache counts as not linear: it knows its length,
    # and `generate` gives the model only what is new.
    is_compileable = False  # pyright: ignore[reportAssignmentType]
    is_croppable = False  # pyright: ignore[reportAssignmentType]
    is_linear = (False,)  # pyright: ignore[reportAssignmentType]

    # transformers' exporters make inputs and outputs of an exported step from `vars`. These are not
    # among them: a number would be a constant of the graph, and it needs neither tables nor masks.
    __slots__ = ("length", "made_in", "masks", "tables")

    def __new__(cls, *args: Any) -> "InterdomainCache":
        """Makes a cache without tokens, and sets the attributes in __slots__.

        They are not set in __init__, because transformers' exporters make a cache without it.

        Args:
            args: What a caller may give to a cache's constructor. They are ignored.
        """
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
            mask: A mask of the tokens that were read and of T new ones, [B, length + T], 0 for
                padding. Only the first `length` columns are compared.

        Returns:
            Also True before any pass, and for a mask with another number of rows.
        """
        # Nothing was read yet; or the pass itself refuses another number of rows, with its own
        # error (`InterdomainModel._prepare`).
        if self.position is None or len(mask) != self.batch_size:
            return True
        # The mask of all passes so far. self.masks has only those of passes with padding.
        read = torch.ones(len(mask), self.length, dtype=torch.bool, device=mask.device)
        for begin, passed in self.masks:
            read[:, begin : begin + passed.shape[1]] = passed
        return torch.equal(mask[:, : self.length].bool(), read)

    def state_of(self, layer_idx: int, mixer: Any, x: Tensor) -> tuple[Any, Any]:
        """Returns what a layer's mixer needs for its next pass, from what the cache has of it.

        `keep_state` takes the state back when the mixer has advanced it.

        Args:
            layer_idx: The layer's place in the model.
            mixer: Its mixer.
            x: The hidden states that the mixer reads, [B, T, dim].

        Returns:
            The layer's state for the mixer to advance, a `MixerState` or `Slots`; and the tables of
            its SSM parameters, an empty tuple for softmax.

        Raises:
            ValueError: Activation checkpointing computes a pass again in the backward pass. The
                cache has moved on since.
        """
        check_not_recomputed(self.made_in)
        stored = self.states.get(layer_idx)
        if isinstance(mixer, SoftmaxMixer):
            # Keys and values without a token, before the first pass.
            empty = x.new_empty(x.shape[0], mixer.n_kv_heads, 0, mixer.head_dim)
            keys, values = stored or (empty, empty)
            return Slots(keys, values), ()

        # The tables, and the forms of them that kernels for one token read (`prepared`), are
        # computed in the first pass, and then read from the cache.
        tables = self.tables.get(layer_idx)
        if stored is None or tables is None:
            ssm_tensors = ssm_tensors_of(mixer, x)
            # A state of zeros, without room for tokens: its size is fixed.
            state = mixer.init_state(x.shape[0], 0, x.dtype, x.device, ssm_tensors)
            # An exported graph computes its tables from the parameters. It keeps none, and has no
            # use for those of the kernels.
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

    def keep_state(self, layer_idx: int, state: Any, kept_slots: Tensor | None) -> None:
        """Keeps the state that a mixer has advanced, for the layer's next pass.

        Args:
            layer_idx: The layer's place in the model.
            state: The state that `state_of` returned, as the mixer has left it.
            kept_slots: For softmax with a window, the slots whose keys and values the cache keeps,
                [B, window]; None for all.
        """
        if isinstance(state, MixerState):
            self.states[layer_idx] = state.conv, state.ssm
        elif kept_slots is None:
            self.states[layer_idx] = state.k, state.v
        else:
            # `take` gathers along the second dimension, and the slots are the third.
            keys = take(state.k.transpose(1, 2), kept_slots).transpose(1, 2)
            values = take(state.v.transpose(1, 2), kept_slots).transpose(1, 2)
            self.states[layer_idx] = keys, values

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> "InterdomainCache":
        """Returns a cache with the function's result in place of each tensor.

        The tables of parameters are shared: they have no rows, and no pass writes them.

        Args:
            function: It maps a tensor [B, ...] to one whose first dimension is again the batch.
        """
        other = InterdomainCache()
        other.length = self.length
        if self.position is not None:
            other.position = function(self.position)
        other.slots = {window: function(slots) for window, slots in self.slots.items()}
        # A state is two tensors: the convolutions' inputs and the recurrence's state, or keys and
        # values.
        for layer_idx, (first, second) in self.states.items():
            other.states[layer_idx] = function(first), function(second)
        other.masks = [(begin, function(mask)) for begin, mask in self.masks]
        other.tables = dict(self.tables)
        return other

    def _replace_contents(self, other: "InterdomainCache") -> None:
        """Gives this cache the contents of another. Callers go on with this object.

        Args:
            other: A cache that nobody else uses.
        """
        # `vars` does not have the attributes in __slots__.
        self.length = other.length
        self.masks = other.masks
        self.tables = other.tables
        vars(self).update(vars(other))

    def __copy__(self) -> "InterdomainCache":
        # The copy has the same tensors: a pass puts new ones in their place, and writes none.
        return self._mapped(lambda x: x)

    def __deepcopy__(self, memo: dict) -> "InterdomainCache":
        return self._mapped(Tensor.clone)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        # All layers have read the same tokens. transformers gives the model what comes after them.
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Returns the columns of an attention mask for the next tokens, and its first token, 0.

        Args:
            query_length: The number of the next tokens.
            layer_idx: Ignored: all layers have read the same tokens.
        """
        return self.length + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # no limit

    def __len__(self) -> int:
        """Returns the number of layers that have a state."""
        return len(self.states)

    @property
    def batch_size(self) -> int:
        # The number of rows, -1 before the first pass.
        return -1 if self.position is None else len(self.position)

    def reset(self) -> None:
        """Forgets all tokens, as if the cache were new."""
        self._replace_contents(InterdomainCache())

    def crop(self, tokens: int) -> None:
        """Raises NotImplementedError: a state cannot take tokens back.

        Args:
            tokens: What transformers asks for, the tokens to keep or, if negative, to remove.
        """
        raise NotImplementedError(
            f"crop({tokens}): a recurrent state cannot take tokens back. Copy the cache before them (copy.copy), or "
            "read the text again from its start."
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row, with its copies next to it.

        Args:
            repeats: The number of rows in place of each.
        """
        self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows of these indices, [B'] integers, in this order."""
        self.reorder_cache(indices)

    def reorder_cache(self, indices: Tensor) -> None:
        """Replaces all rows by those of these indices: the beams that go on.

        Args:
            indices: [B'] integers. A row may be left out or repeated.
        """
        self._replace_contents(self._mapped(lambda x: x[indices.to(x.device)]))


def token_order(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Orders the tokens of each row first and its padding last.

    Args:
        mask: [B, T], False for padding.

    Returns:
        The positions in this order, [B, T], by which `take` moves tokens; the positions by which it
        moves them back, [B, T]; and the number of tokens in each row, [B].
    """
    lengths = mask.sum(1, keepdim=True)
    # The new position of each token is the number of tokens before it. That of padding is the
    # number of all tokens and of the padding before it. The sums count the token itself, too.
    inverse = torch.where(mask, mask.cumsum(1), lengths + (~mask).cumsum(1)) - 1
    # The inverse of these: the token at position i goes to inverse[i], so order[inverse[i]] is i.
    positions = torch.arange(mask.shape[1], device=mask.device).expand_as(inverse)
    order = torch.zeros_like(inverse).scatter(1, inverse, positions)
    return order, inverse, lengths[:, 0]


class Rows(NamedTuple):
    """What a layer needs to know of the rows of a batch.

    Recurrent layers compute with every row's tokens first and its padding last, where no token sees
    it. Softmax layers leave padding where it is.

    Attributes:
        packing: The argument `packing` of the layer's mixer. For recurrent layers a `Packing` with
            the length of each row; for softmax layers an `Attended` with the mask of the keys. None
            if there is nothing to mask.
        order: The positions in the recurrent layers' order, [B, T]; None if they stay as they are.
        inverse: The positions that undo `order`, [B, T]; None if `order` is.
        kept_slots: For softmax with a window, the slots whose keys and values the cache keeps after
            the pass, [B, window]; None for all.
    """

    packing: Any = None
    order: Tensor | None = None
    inverse: Tensor | None = None
    kept_slots: Tensor | None = None

    @classmethod
    def padded(cls, mask: Tensor) -> "Rows":
        """Returns the rows of a batch with padding for recurrent layers.

        They move the tokens of each row before its padding, and count its tokens: the state is then
        the one after the last token.

        Args:
            mask: [B, T], False for padding.
        """
        order, inverse, lengths = token_order(mask)
        return cls(packing=Packing(lengths=lengths), order=order, inverse=inverse)

    @classmethod
    def attended(
        cls,
        window: int,
        numbers: Tensor,
        mask: Tensor | None,
        cache: InterdomainCache | None,
        dtype: torch.dtype,
    ) -> "Rows":
        """Returns the rows of a batch for softmax layers, all of the same window.

        A softmax layer computes with S slots of keys and values: those in its cache, then one for
        each of the T new tokens. This also notes in the cache which token is in each slot.

        Args:
            window: The number of tokens that a query attends to, itself included; 0 for all.
            numbers: The number of each new token in its row, [B, T]: how many tokens the row has
                before it, in this pass and earlier ones, without padding. The numbers of padding do
                not matter.
            mask: [B, T], False for padding; None for no padding.
            cache: The cache that the layers read and advance; None without one.
            dtype: The data type of the scores.

        Returns:
            Rows with `kept_slots`, the slots that the cache keeps after the pass; and in `packing`
            the mask that is added to the scores, [B, 1, T, S], or None if usual causal attention
            needs no mask.
        """
        # The number of the token in each slot, -1 for padding: those in the cache, then the new
        # ones.
        T = numbers.shape[1]
        slots = numbers if mask is None else numbers.masked_fill(~mask, -1)
        cached = None if cache is None else cache.slots.get(window)
        if cached is not None:
            slots = torch.cat((cached.to(slots.device), slots), dim=1)
        S = slots.shape[1]

        # With a window the cache keeps each row's last tokens, whatever padding is between: the
        # slots with the largest numbers.
        kept_slots = None
        if cache is not None and window and window < S:
            kept_slots = slots.topk(window, dim=1).indices
            cache.slots[window] = slots.gather(1, kept_slots)
        elif cache is not None:
            cache.slots[window] = slots

        # Without padding, without tokens in the cache, and if the window has room for all tokens,
        # the usual causal attention needs no mask.
        if mask is None and cached is None and not (window and window < T):
            return cls(kept_slots=kept_slots)
        # The slots that each query attends to, [B, T, S]: no padding, no later token, and with a
        # window no token before it.
        seen = (slots[:, None] >= 0) & (slots[:, None] <= numbers[..., None])
        if window:
            seen &= slots[:, None] > numbers[..., None] - window
        # Each query attends to its own slot, padding too: without any key it would be NaN.
        own_slot = S - T + torch.arange(T, device=slots.device)[:, None]
        seen = seen | (torch.arange(S, device=slots.device) == own_slot)
        mask_of_scores = additive_mask(seen[:, None], dtype)
        return cls(packing=Attended(mask=mask_of_scores), kept_slots=kept_slots)
