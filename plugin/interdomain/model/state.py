"""The state that a model carries from one piece of a sequence to the next.

Its size is fixed for every mixer but softmax without a window. A model advances a state in place.
If no gradient is recorded, its tensors keep their addresses, which CUDA graphs need.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

# Shapes: B batch, T tokens, H heads of keys and state, R head_dim, M basis functions, P width of z,
#         W taps of the convolution, E channels of the convolutions, S slots of a cache,
#         K key width and V value width of a baseline.


def backward_pass() -> int | None:
    """Returns the number of the backward pass that this thread is in, -1 outside of one.

    While torch.compile traces a function it is None.
    """
    if torch.compiler.is_compiling():
        return None
    return torch._C._current_graph_task_id()


def check_not_recomputed(made_in: int | None) -> None:
    """Checks that a forward pass that advances a state is not being recomputed.

    A backward pass computes a forward pass again only for activation checkpointing. The first
    forward pass has advanced the state by then.

    Args:
        made_in: `backward_pass` when the state was made. None for a state that a compiled function
            makes for itself.
    Raises:
        ValueError: The state was made before this backward pass.
    """
    if made_in is None or torch.compiler.is_exporting():
        return
    # A compiled function may be checkpointed, too: with gradients its graph breaks here. A decode
    # step records no gradients and keeps its graph whole.
    if torch.compiler.is_compiling() and not torch.is_grad_enabled():
        return
    if torch._C._current_graph_task_id() not in (-1, made_in):
        raise ValueError(
            "Activation checkpointing computes this layer again in the backward pass, and the "
            "layer's state has moved on since: the gradients would be wrong. Leave out the state "
            "(cache), give the layer a copy of it within the checkpointed function (copy.copy), or "
            "do not checkpoint the pass that reads it."
        )


class State:
    """Base of the states, which are advanced in place.

    They are plain objects on purpose. Wrappers such as FSDP2 and DDP rebuild the dataclasses,
    tuples, lists and dictionaries among a module's arguments, and the module would then advance the
    copy.

    Attributes:
        made_in: `backward_pass` when the state was made.
    """

    def __init__(self) -> None:
        self.made_in = backward_pass()

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors of the state by attribute."""
        raise NotImplementedError

    def replaced(self, **attributes: Any) -> Self:
        """Returns a state like this one, but with these attributes.

        Args:
            attributes: New values by attribute; all others are shared with this state.
        """
        # No constructor is called: subclasses have different arguments.
        other = object.__new__(type(self))
        vars(other).update(vars(self), made_in=backward_pass(), **attributes)
        return other

    def clone(self) -> Self:
        """Returns an independent copy, to continue one text in several ways."""
        return self._map(Tensor.clone)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Returns a state of the function's results for each tensor."""
        tensors = self.tensors()
        for name, tensor in tensors.items():
            tensors[name] = function(tensor)
        return self.replaced(**tensors)

    # Both kinds of copies share no tensor that is written in place. Python's own deep copy fails
    # for tensors with a gradient's history.
    def __copy__(self) -> Self:
        return self.clone()

    def __deepcopy__(self, memo: dict) -> Self:
        return self.clone()


class MixerState(State):
    """The state of a layer with a state of fixed size.

    Attributes:
        conv: The last W - 1 inputs of the layer's convolutions, of q, k and v side by side,
            [B, W - 1, E].
        ssm: The recurrence's state: X of the scan (unit gain), [B, H, M, P, 2], or S of a baseline,
            [B, H, K, V]; at least float32.
        prepared: What a mixer's step kernels read of its parameters. None if it has none.
        capacity: None: the state does not grow.
    """

    capacity: int | None = None

    def __init__(
        self,
        conv: Tensor,
        ssm: Tensor,
        prepared: Any = None,
    ) -> None:
        super().__init__()
        self.conv = conv
        self.ssm = ssm
        self.prepared = prepared

    def advance(self, conv: Tensor, ssm: Tensor) -> None:
        """Replaces the state. Tensors that were updated in place are kept.

        Args:
            conv: The new value of the attribute `conv`.
            ssm: The new value of the attribute `ssm`.
        """
        check_not_recomputed(self.made_in)
        self.conv = overwritten(self.conv, conv)
        self.ssm = overwritten(self.ssm, ssm)

    def tensors(self) -> dict[str, Tensor]:
        return {"ssm": self.ssm, "conv": self.conv}


class KVCache(State):
    """The cache of a softmax layer: rotated keys, and values. Token i of a row is in slot i.

    It grows if there are more tokens than slots. The slots after a row's last token hold anything.

    Attributes:
        k: Keys, [B, H, S, R].
        v: Values, [B, H, S, R].
    """

    def __init__(self, k: Tensor, v: Tensor) -> None:
        super().__init__()
        self.k = k
        self.v = v

    @property
    def capacity(self) -> int | None:
        """The number of slots, S. None if the cache does not grow."""
        return self.k.shape[2]

    def tensors(self) -> dict[str, Tensor]:
        return {"k": self.k, "v": self.v}

    def append(
        self,
        k: Tensor,
        v: Tensor,
        token: Tensor,
        before: int,
    ) -> tuple[Tensor, Tensor]:
        """Adds keys and values, and returns those that the new tokens may attend to.

        Args:
            k: Keys of the new tokens, [B, H, T, R].
            v: Values of the new tokens, [B, H, T, R].
            token: The place of each new token in its row, [B, T].
            before: The number of slots before the new tokens to return.
        Returns:
            The keys and values in the first `before` + T slots.
        """
        check_not_recomputed(self.made_in)
        # Grow to the longest row after the new tokens.
        slots = before + k.shape[2]
        if slots > self.k.shape[2]:
            self.reserve(slots)
        self._write(k, v, token)
        return self.k[:, :, :slots], self.v[:, :, :slots]

    def _write(
        self,
        k: Tensor,
        v: Tensor,
        slots: Tensor,
    ) -> None:
        """Writes keys and values [B, H, T, R] into slots [B, T]."""
        index = _slot_index(slots, k)
        k = k.to(self.k.dtype)
        v = v.to(self.v.dtype)
        # A gradient's history needs the old tensors.
        if writable(self.k, k):
            self.k.scatter_(2, index, k)
            self.v.scatter_(2, index, v)
        else:
            self.k = self.k.scatter(2, index, k)
            self.v = self.v.scatter(2, index, v)

    def reserve(self, slots: int) -> None:
        """Gives the cache this number of slots, at least as many as are filled."""
        self.k = _with_slots(self.k, slots)
        self.v = _with_slots(self.v, slots)


class WindowCache(KVCache):
    """Rotated keys and values of the last S tokens: token i of a row is in slot i mod S."""

    @property
    def capacity(self) -> int | None:
        return None

    def append(
        self,
        k: Tensor,
        v: Tensor,
        token: Tensor,
        before: int,
    ) -> tuple[Tensor, Tensor]:
        """Overwrites the oldest keys and values, and returns those that new tokens may attend to.

        Args:
            k: Keys of the new tokens, [B, H, T, R].
            v: Values of the new tokens, [B, H, T, R].
            token: The place of each new token in its row, [B, T].
            before: The number of tokens before the new ones to return, at most S.
        Returns:
            For one new token, the keys and values in all slots; otherwise those of the `before`
            tokens before the new ones and of the new ones, in order.
        """
        check_not_recomputed(self.made_in)
        T = k.shape[2]
        S = self.k.shape[2]
        keys = k
        values = v
        if T > 1:
            # Read the old tokens before the new ones overwrite them.
            order = torch.arange(before, device=k.device)
            index = _slot_index((token[:, :1] - before + order) % S, k)
            keys = torch.cat([self.k.gather(2, index).to(k.dtype), k], dim=2)
            values = torch.cat([self.v.gather(2, index).to(v.dtype), v], dim=2)
        self._write(k[:, :, -S:], v[:, :, -S:], token[:, -S:] % S)
        if T == 1:
            return self.k, self.v
        return keys, values


def _slot_index(slots: Tensor, like: Tensor) -> Tensor:
    """Expands slots [B, T] to the index of gather and scatter for tensors [B, H, T, R].

    Args:
        slots: The slot of each token.
        like: A tensor whose H and R the index gets.
    """
    return slots[:, None, :, None].expand(-1, like.shape[1], -1, like.shape[3])


def _with_slots(x: Tensor, slots: int) -> Tensor:
    """Gives x [B, H, S, R] this number of slots: adds zeros, or leaves out the last ones."""
    return F.pad(x, (0, 0, 0, slots - x.shape[2]))


class ModelState(State):
    """The state of a model between two pieces of a text, from `Transformer.init_state`.

    Attributes:
        layers: The state of each layer: a `MixerState`, a `KVCache`, or another mixer's.
        position: The number of tokens that each row has seen, [B] int64.
        ssm_tensors: The SSM tensors of each layer, computed once for the weights that the state
            belongs to.
        length: The number of tokens that the longest row has seen.
        ragged: True if some row has seen fewer (`stack`).
        captured: True if steps are captured in a CUDA graph (`generation.Decoder`). They then read
            no number of the host, and leave `length` as it is.
    """

    def __init__(
        self,
        layers: list[Any],
        position: Tensor,
        ssm_tensors: list[tuple[Tensor, ...]],
    ) -> None:
        """Makes a state whose rows have all seen the same number of tokens, `length` = 0 so far.

        The arguments are the attributes of these names.
        """
        super().__init__()
        self.layers = layers
        self.position = position
        self.ssm_tensors = ssm_tensors
        self.length: int = 0
        self.ragged: bool = False
        self.captured: bool = False

    @property
    def capacity(self) -> int | None:
        """The number of tokens that all caches have room for. None if no cache grows."""
        capacities = [layer.capacity for layer in self.layers if layer.capacity is not None]
        return min(capacities, default=None)

    def reserve(self, tokens: int) -> None:
        """Gives each cache that grows room for this number of tokens in all.

        A cache also grows by itself, but not under a captured CUDA graph, whose addresses are
        fixed.
        """
        for layer in self.layers:
            if layer.capacity is not None:
                layer.reserve(tokens)

    def advance(self, tokens: int) -> None:
        """Counts `tokens` more tokens in each row."""
        position = self.position + tokens
        # With gradients a new tensor: a compiled backward pass may compute the rotary angles again,
        # from the old position.
        if not torch.is_grad_enabled():
            position = overwritten(self.position, position)
        self.position = position
        if not self.captured:
            self.length += tokens

    def nbytes(self) -> int:
        """Returns the bytes of all layers' states."""
        total = 0
        for layer in self.layers:
            for tensor in layer.tensors().values():
                total += tensor.nbytes
        return total

    def select(self, rows: Tensor) -> "ModelState":
        """Returns a state of these rows, [B'] integers, in this order. A row may repeat (beams)."""
        return self._map(lambda x: x.index_select(0, rows.to(x.device)))

    def _map(self, function: Callable[[Tensor], Tensor]) -> "ModelState":
        layers = [layer._map(function) for layer in self.layers]
        return self.replaced(layers=layers, position=function(self.position), captured=False)

    @classmethod
    def stack(cls, states: list["ModelState"]) -> "ModelState":
        """Joins the rows of several states into one batch; each row continues where it was.

        Caches get the slots of the longest row.

        Args:
            states: States of one model, each of one or several rows.
        """
        length = max(state.length for state in states)
        layers = []
        for parts in zip(*[state.layers for state in states], strict=True):
            # Join one layer's tensors. Caches of different lengths are padded.
            joined = {}
            for name in parts[0].tensors():
                tensors = [part.tensors()[name] for part in parts]
                if parts[0].capacity is not None:
                    tensors = [_with_slots(x, length) for x in tensors]
                joined[name] = torch.cat(tensors)
            layers.append(parts[0].replaced(**joined))
        return states[0].replaced(
            layers=layers,
            position=torch.cat([state.position for state in states]),
            length=length,
            ragged=any(state.ragged or state.length < length for state in states),
            captured=False,
        )


def overwritten(old: Tensor, new: Tensor) -> Tensor:
    """Returns `old` with the contents of `new`, or `new` itself if `old` must not be written.

    Args:
        old: A tensor of the state.
        new: Its next contents, of the same shape.
    """
    if new is old or not writable(old, new):
        return new
    return old.copy_(new)


def writable(old: Tensor, new: Tensor) -> bool:
    """Returns True if `old` may be written in place: autograd records neither tensor."""
    return not (torch.is_grad_enabled() and (old.requires_grad or new.requires_grad))
