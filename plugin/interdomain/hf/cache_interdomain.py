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
    """Returns the tables that a mixer's recurrence reads: tensors computed from its SSM parameters.

    They are the same for all tokens. A softmax mixer has no recurrence: an empty tuple.

    Args:
        mixer: The mixer of a layer.
        x: Hidden states, of which only the dtype counts. The tables are at least float32; they are
            float64 if x or the parameters are.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    # The mixer computes the tables of a list of mixers, and returns a list. Here it is the only
    # one.
    tables_by_mixer = mixer.ssm_tensors([mixer], dtype)
    return tables_by_mixer[0]


class Slots:
    """The state of a softmax layer in one pass: cached keys and values. Its mixer adds new ones.

    Attributes:
        k: Keys, [B, H, S, head_dim].
        v: Values, [B, H, S, head_dim].
        made_in: The number of the backward pass in which this was made, -1 outside of one.
    """

    def __init__(self, k: Tensor, v: Tensor) -> None:
        # Activation checkpointing computes a pass again within a backward pass. `append` knows it
        # by this number, which is then another one than here.
        self.made_in = backward_pass()
        self.k = k
        self.v = v

    def append(self, k: Tensor, v: Tensor, *place: Any) -> tuple[Tensor, Tensor]:
        """Adds the keys and values of new tokens behind the cached ones, and returns all.

        The softmax mixer calls this with the arguments of the package's own cache,
        `KVCache.append`.

        Args:
            k: Rotated keys of the new tokens, [B, H, T, head_dim], for H heads of keys.
            v: Values of the new tokens, [B, H, T, head_dim].
            place: Ignored. These arguments say into which slots the package's own cache writes the
                tokens; here they always stand behind the others.

        Returns:
            All keys and all values, each [B, H, S, head_dim], S cached and new tokens.

        Raises:
            ValueError: Activation checkpointing computes a pass again in the backward pass. It
                would add the same tokens a second time.
        """
        check_not_recomputed(self.made_in)
        # [B, H, cached, head_dim] and [B, H, T, head_dim] -> [B, H, S, head_dim]
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

    def __new__(cls) -> "InterdomainCache":
        """Makes a cache without tokens, and sets the attributes in __slots__.

        They are set here and not in __init__, because transformers' exporters make a cache by
        `__new__` only.
        """
        cache = super().__new__(cls)
        # No tokens were read, so there are no passes with padding to remember.
        cache.length = 0
        cache.masks = []
        # The first pass computes what recurrences read of their parameters, by layer.
        cache.tables = {}
        # Activation checkpointing computes a pass again within a backward pass. `state_of` knows it
        # by this number, which is then another one than here.
        cache.made_in = backward_pass()
        return cache

    def __init__(self) -> None:
        # Exporters set these attributes themselves. `__new__` has set the others.
        self.position: Tensor | None = None
        self.slots: dict[int, Tensor] = {}
        self.states: dict[int, tuple[Tensor, Tensor]] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(length={self.length}, batch_size={self.batch_size})"

    def has_read(self, mask: Tensor) -> bool:
        """Returns True if a mask has padding in the same places as the tokens that were read.

        Args:
            mask: A mask of the tokens that were read and of T new ones, [B, length + T], 0 for
                padding. Only the first `length` columns are compared.

        Returns:
            The result of the comparison. It is True, too, if there is nothing to compare: before
            any pass, and for a mask with another number of rows.
        """
        # Another number of rows is not judged here: the pass itself refuses it, with an error of
        # its own (`InterdomainModel._prepare`).
        if self.position is None or len(mask) != self.batch_size:
            return True

        # Put the masks of the passes so far together. self.masks has only those of passes with
        # padding, so all other tokens are True.
        read = torch.ones(len(mask), self.length, dtype=torch.bool, device=mask.device)
        for begin, mask_of_pass in self.masks:
            end = begin + mask_of_pass.shape[1]
            read[:, begin:end] = mask_of_pass
        return torch.equal(mask[:, : self.length].bool(), read)

    def state_of(self, layer_idx: int, mixer: Any, x: Tensor) -> tuple[Any, Any]:
        """Returns what a layer's mixer needs for its next pass: its state and its tables.

        The mixer advances the state, and `keep_state` then takes it back into the cache.

        Args:
            layer_idx: The layer's place in the model.
            mixer: Its mixer.
            x: The hidden states that the mixer reads, [B, T, dim].

        Returns:
            The layer's state, a `MixerState` (recurrence) or `Slots` (softmax); and the tables that
            a recurrence reads of its parameters (`ssm_tensors_of`), an empty tuple for softmax.

        Raises:
            ValueError: Activation checkpointing computes a pass again in the backward pass. The
                cache has moved on since.
        """
        # It is an error if a backward pass is running, but not the one in which the cache was made.
        check_not_recomputed(self.made_in)
        batch = x.shape[0]
        stored = self.states.get(layer_idx)

        # Softmax: the cached keys and values. Before the first pass they are those of no tokens.
        if isinstance(mixer, SoftmaxMixer):
            empty = x.new_empty(batch, mixer.n_kv_heads, 0, mixer.head_dim)
            keys, values = stored or (empty, empty)
            return Slots(keys, values), ()

        # Recurrence: a layer's first pass computes its tables and `prepared`, the forms of them
        # that kernels for one token read. Later passes read both from the cache. A cache that comes
        # from an exported graph has states, but no tables: they are computed then, too.
        tables = self.tables.get(layer_idx)
        if stored is None or tables is None:
            ssm_tensors = ssm_tensors_of(mixer, x)
            # The mixer makes a state of zeros, with `prepared`. The state has a fixed size, so it
            # needs no room for tokens (capacity).
            state = mixer.init_state(
                batch, capacity=0, dtype=x.dtype, device=x.device, ssm_tensors=ssm_tensors
            )
            # An exported graph does not call these kernels.
            if is_exporting():
                state.prepared = None
            tables = ssm_tensors, state.prepared
        ssm_tensors, prepared = tables
        # An exported graph keeps no tables: it computes them from the parameters in each pass.
        if not is_exporting():
            self.tables[layer_idx] = tables

        # Later passes go on from the state of the last one, not from zeros. It is copied, because
        # the mixer may write into it, and a copy of the cache may have the same tensors.
        if stored is not None:
            convolution_inputs, ssm = stored
            state = MixerState(conv=convolution_inputs.clone(), ssm=ssm.clone(), prepared=prepared)
        return state, ssm_tensors

    def keep_state(self, layer_idx: int, state: Any, kept_slots: Tensor | None) -> None:
        """Keeps the state that a mixer has advanced, for the layer's next pass.

        Args:
            layer_idx: The layer's place in the model.
            state: The state that `state_of` returned, as the mixer has left it: a `MixerState` or
                `Slots`.
            kept_slots: For softmax with a window, the slots whose keys and values the cache keeps,
                [B, window]; None for all.
        """
        # A recurrence: the last inputs of the convolutions, and the recurrence's state.
        if isinstance(state, MixerState):
            self.states[layer_idx] = state.conv, state.ssm
        # Softmax: the keys and values of all slots, or of those that a window keeps.
        elif kept_slots is None:
            self.states[layer_idx] = state.k, state.v
        else:
            # `take` gathers along the second dimension, and the slots of [B, H, S, head_dim] are
            # the third.
            keys = take(state.k.transpose(1, 2), kept_slots).transpose(1, 2)
            values = take(state.v.transpose(1, 2), kept_slots).transpose(1, 2)
            self.states[layer_idx] = keys, values

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> "InterdomainCache":
        """Returns a cache with the function's result in place of each tensor of rows of the batch.

        Args:
            function: It maps a tensor [B, ...] to one whose first dimension is again the batch:
                copies it, or selects rows.
        """
        other = InterdomainCache()
        # What does not depend on rows is the same in both. The tables of parameters are shared: no
        # pass writes them.
        other.length = self.length
        other.tables = dict(self.tables)
        # What has rows.
        if self.position is not None:
            other.position = function(self.position)
        other.slots = {window: function(slots) for window, slots in self.slots.items()}
        other.masks = [(begin, function(mask)) for begin, mask in self.masks]
        # A state is two tensors: the convolutions' inputs and the recurrence's state, or keys and
        # values.
        for layer_idx, (first, second) in self.states.items():
            other.states[layer_idx] = function(first), function(second)
        return other

    def _replace_contents(self, other: "InterdomainCache") -> None:
        """Gives this cache the contents of another one.

        The caller of `generate` and its beams hold this object, so it is changed in place.

        Args:
            other: A cache that nobody else uses, so that its tensors need no copy.
        """
        # First the attributes in __slots__ but made_in, then all others, which `vars` has.
        self.length = other.length
        self.masks = other.masks
        self.tables = other.tables
        vars(self).update(vars(other))

    def __copy__(self) -> "InterdomainCache":
        # The copy has the same tensors. A pass of either cache puts new ones in their place, and
        # writes none.
        return self._mapped(lambda x: x)

    def __deepcopy__(self, memo: dict) -> "InterdomainCache":
        return self._mapped(Tensor.clone)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        # All layers have read the same tokens, so layer_idx does not matter. transformers gives the
        # model what comes after these tokens.
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Returns the number of columns of an attention mask for the next tokens, and 0.

        The second number is the token that the first column stands for, the first one.

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
        """Repeats each row, with its copies next to it: rows a, b become a, a, b, b.

        Args:
            repeats: The number of rows in place of each.
        """
        indices = torch.arange(self.batch_size).repeat_interleave(repeats)
        self.reorder_cache(indices)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows of these indices, [B'] integers, in this order."""
        self.reorder_cache(indices)

    def reorder_cache(self, indices: Tensor) -> None:
        """Keeps the rows of these indices, in this order. Beam search calls it.

        Args:
            indices: The old row of each new one, [B'] integers. A row may be left out or repeated.
        """
        self._replace_contents(self._mapped(lambda x: x[indices.to(x.device)]))


def token_order(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the order that puts the tokens of each row first and its padding last.

    For the row (padding, a, b, padding) the order is (1, 2, 0, 3), and its inverse (2, 0, 1, 3).

    Args:
        mask: [B, T], False for padding.

    Returns:
        order: The old position of each new one, [B, T]: `take(x, order)` moves tokens first.
        inverse: The new position of each old one, [B, T]: `take(x, inverse)` moves them back.
        lengths: The number of tokens in each row, [B].
    """
    lengths = mask.sum(1, keepdim=True)
    # The new position of a token is the number of tokens before it. Padding comes after all tokens
    # and the padding before it. cumsum counts the element itself, too.
    tokens_before = mask.cumsum(1) - 1
    padding_before = (~mask).cumsum(1) - 1
    inverse = torch.where(mask, tokens_before, lengths + padding_before)
    # The element at position i goes to inverse[i], so order[inverse[i]] is i.
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
        """Returns the order and lengths that recurrent layers need for a batch with padding.

        The layers read the tokens of each row first and its padding last. By `lengths` they keep
        the state after a row's last token.

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
        """Returns the mask that softmax layers of one window need, and the slots to keep.

        A softmax layer computes with S slots of keys and values: those in its cache, then one for
        each of the T new tokens. This method also notes in the cache which token is in each slot.

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
        # The number of the token in each slot, [B, S], -1 for padding: first the slots in the
        # cache, then those of the new tokens.
        T = numbers.shape[1]
        slots = numbers if mask is None else numbers.masked_fill(~mask, -1)
        cached = None if cache is None else cache.slots.get(window)
        if cached is not None:
            slots = torch.cat((cached.to(slots.device), slots), dim=1)
        S = slots.shape[1]

        # Say which slots the cache keeps. With a window these are each row's last tokens, whatever
        # padding is between: the slots with the largest numbers.
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

        # The slots that each query attends to, [B, T, S]: no padding, no later token than its own,
        # and with a window no token before the window.
        key = slots[:, None]  # [B, 1, S]
        query = numbers[..., None]  # [B, T, 1]
        seen = (key >= 0) & (key <= query)
        if window:
            seen &= key > query - window
        # Each query also attends to its own slot, which is one of the last T. A query that is
        # padding may have no other key, and softmax over no keys is NaN.
        own_slot = S - T + torch.arange(T, device=slots.device)[:, None]  # [T, 1]
        seen = seen | (torch.arange(S, device=slots.device) == own_slot)
        mask_of_scores = additive_mask(seen[:, None], dtype)  # [B, 1, T, S]
        return cls(packing=Attended(mask=mask_of_scores), kept_slots=kept_slots)
