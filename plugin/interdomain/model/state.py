"""The state that a model carries from one piece of a sequence to the next: fixed in size for every mixer but softmax
without a window.

A model advances a state in place. Where no gradient is recorded its tensors keep their addresses, which CUDA graphs need.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

# Shapes: B batch, H heads of keys and state, M basis functions, P width of z, W convolution width, E channels, S slots.


def backward_pass() -> int | None:
    """Number of the backward pass that this thread is in; -1 for none. None while torch.compile traces a function."""
    return None if torch.compiler.is_compiling() else torch._C._current_graph_task_id()


def check_not_recomputed(made_in: int | None) -> None:
    """Raises ValueError for a state that was made before this backward pass, which computes a forward pass again: only
    activation checkpointing does so, and the first pass has advanced the state already.

    Args:
        made_in: `backward_pass` when the state was made; None for a state that a compiled function makes for itself.
    """
    if made_in is None or torch.compiler.is_exporting():
        return
    # A compiled function may be checkpointed, too: with gradients its graph breaks here. A decode step has none.
    if torch.compiler.is_compiling() and not torch.is_grad_enabled():
        return
    if torch._C._current_graph_task_id() not in (-1, made_in):
        raise ValueError(
            "Activation checkpointing computes this layer again in the backward pass, and the layer's state has moved on "
            "since: the gradients would be wrong. Leave out the state (cache), give the layer a copy of it within the "
            "checkpointed function (copy.copy), or do not checkpoint the pass that reads it."
        )


class State:
    """Base of the states, which are advanced in place.

    They are plain objects on purpose. Wrappers such as FSDP2 and DDP rebuild the dataclasses, tuples, lists and dictionaries
    among a module's arguments, and the module would then advance the copy.

    Attributes:
        made_in: `backward_pass` when the state was made.
    """

    def __init__(self) -> None:
        self.made_in = backward_pass()

    def tensors(self) -> dict[str, Tensor]:
        """What the state consists of, by attribute."""
        raise NotImplementedError

    def replaced(self, **attributes: Any) -> Self:
        """A state like this one, but for these attributes."""
        other = object.__new__(type(self))
        vars(other).update(vars(self), made_in=backward_pass(), **attributes)
        return other

    def clone(self) -> Self:
        """A copy, to continue one text in several ways."""
        return self._map(Tensor.clone)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        return self.replaced(**{name: function(tensor) for name, tensor in self.tensors().items()})

    # A copy shares no tensor that is written in place. Those with a gradient's history cannot be copied otherwise.
    def __copy__(self) -> Self:
        return self.clone()

    def __deepcopy__(self, memo: dict) -> Self:
        return self.clone()


class MixerState(State):
    """The state of an interdomain layer.

    Attributes:
        conv: the last W - 1 inputs of the convolutions that the layer has, of q, k and v side by side, [B, W - 1, E].
        ssm: X of the scan (unit gain), [B, H, M, P, 2] float32.
        prepared: what a decode step reads of the parameters.
    """

    capacity: int | None = None

    def __init__(
        self,
        conv: Tensor,
        ssm: Tensor,
        prepared: tuple[dict[str, Any], dict[str, Any]] | None = None,
    ) -> None:
        super().__init__()
        self.conv = conv
        self.ssm = ssm
        self.prepared = prepared

    def advance(self, conv: Tensor, ssm: Tensor) -> None:
        """Replace the state. Tensors that were updated in place are kept."""
        check_not_recomputed(self.made_in)
        self.conv = overwritten(self.conv, conv)
        self.ssm = overwritten(self.ssm, ssm)

    def tensors(self) -> dict[str, Tensor]:
        return {"ssm": self.ssm, "conv": self.conv}


class KVCache(State):
    """The cache of a softmax layer: rotated keys and values, each [B, H, S, head_dim]. Token i of a row is in slot i.

    It grows if there are more tokens than slots. Slots after a row's last token mean nothing.
    """

    def __init__(self, k: Tensor, v: Tensor) -> None:
        super().__init__()
        self.k = k
        self.v = v

    @property
    def capacity(self) -> int | None:
        return self.k.shape[2]

    def tensors(self) -> dict[str, Tensor]:
        return {"k": self.k, "v": self.v}

    def append(self, k: Tensor, v: Tensor, token: Tensor, before: int) -> tuple[Tensor, Tensor]:
        """Add the keys and values of a piece, [B, H, T, head_dim].

        Args:
            token: The place of each new token in its row, [B, T].
            before: Slots before the piece that are returned.
        Returns:
            The keys and values of the first `before` + T slots.
        """
        check_not_recomputed(self.made_in)
        slots = before + k.shape[2]
        if slots > self.k.shape[2]:
            self.reserve(slots)
        self._write(k, v, token)
        return self.k[:, :, :slots], self.v[:, :, :slots]

    def _write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        index = _by_slot(slots, k)
        k = k.to(self.k.dtype)
        v = v.to(self.v.dtype)
        if writable(self.k, k):
            self.k.scatter_(2, index, k)
            self.v.scatter_(2, index, v)
        else:
            self.k = self.k.scatter(2, index, k)
            self.v = self.v.scatter(2, index, v)

    def reserve(self, slots: int) -> None:
        """Make this many slots in all."""
        self.k = _with_slots(self.k, slots)
        self.v = _with_slots(self.v, slots)


class WindowCache(KVCache):
    """Rotated keys and values of the last S tokens, each [B, H, S, head_dim]: token i of a row is in slot i mod S."""

    @property
    def capacity(self) -> int | None:
        return None

    def append(self, k: Tensor, v: Tensor, token: Tensor, before: int) -> tuple[Tensor, Tensor]:
        """Put the keys and values of a piece in the place of the oldest, as `KVCache.append`.

        Returns:
            Keys and values: of all slots for a piece of one token, else of the `before` tokens before it and its own.
        """
        check_not_recomputed(self.made_in)
        T = k.shape[2]
        S = self.k.shape[2]
        keys, values = k, v
        if T > 1:
            order = torch.arange(before, device=k.device)
            index = _by_slot((token[:, :1] - before + order) % S, k)
            keys = torch.cat([self.k.gather(2, index).to(k.dtype), k], dim=2)
            values = torch.cat([self.v.gather(2, index).to(v.dtype), v], dim=2)
        self._write(k[:, :, -S:], v[:, :, -S:], token[:, -S:] % S)
        return (keys, values) if T > 1 else (self.k, self.v)


def _by_slot(slots: Tensor, like: Tensor) -> Tensor:
    """Indices along the slots [B, T] for gather and scatter of tensors [B, H, T, head_dim]."""
    return slots[:, None, :, None].expand(-1, like.shape[1], -1, like.shape[3])


def _with_slots(x: Tensor, slots: int) -> Tensor:
    """x [B, H, S, head_dim] with this many slots: zeros are added, or the last ones left out."""
    return F.pad(x, (0, 0, 0, slots - x.shape[2]))


class ModelState(State):
    """The state of a model between two pieces of a text: from `Transformer.init_state`, advanced in place.

    Attributes:
        layers: per layer a MixerState, a KVCache or that of another mixer.
        position: tokens seen per row, [B] int64.
        dynamics: per layer what the scan reads of the parameters: computed once, for the weights that the state belongs to.
        length: tokens seen in the longest row.
        ragged: whether some row has fewer (see `stack`).
        captured: whether steps are captured in a CUDA graph (`generation.Decoder`): they read no number of the host's, and
            leave `length` as it is.
    """

    def __init__(
        self, layers: list[Any], position: Tensor, dynamics: list[tuple[Tensor, ...]]
    ) -> None:
        super().__init__()
        self.layers = layers
        self.position = position
        self.dynamics = dynamics
        self.length: int = 0
        self.ragged: bool = False
        self.captured: bool = False

    @property
    def capacity(self) -> int | None:
        """Tokens that softmax's caches have room for; None where no layer has such a cache."""
        return min(
            (layer.capacity for layer in self.layers if layer.capacity is not None), default=None
        )

    def reserve(self, tokens: int) -> None:
        """Make room in caches for so many tokens, those seen included."""
        for layer in self.layers:
            if layer.capacity is not None:
                layer.reserve(tokens)

    def advance(self, tokens: int) -> None:
        """Count `tokens` of each row."""
        position = self.position + tokens
        # With gradients a new tensor: a compiled backward pass may compute the rotary angles again, from the old position.
        self.position = (
            position if torch.is_grad_enabled() else overwritten(self.position, position)
        )
        if not self.captured:
            self.length += tokens

    def nbytes(self) -> int:
        """Bytes of all layers' states."""
        return sum(t.nbytes for layer in self.layers for t in layer.tensors().values())

    def select(self, rows: Tensor) -> "ModelState":
        """A state of these rows, [B'] integers, in this order; a row may be taken several times (beams)."""
        return self._map(lambda x: x.index_select(0, rows.to(x.device)))

    def _map(self, function: Callable[[Tensor], Tensor]) -> "ModelState":
        layers = [layer._map(function) for layer in self.layers]
        return self.replaced(layers=layers, position=function(self.position), captured=False)

    @classmethod
    def stack(cls, states: list["ModelState"]) -> "ModelState":
        """Rows of several states as one batch; each row continues where it was. Caches get the slots of the longest row."""
        length = max(s.length for s in states)
        layers = []
        for rows in zip(*(s.layers for s in states), strict=True):
            joined = {}
            for name in rows[0].tensors():
                tensors = [row.tensors()[name] for row in rows]
                if rows[0].capacity is not None:
                    tensors = [_with_slots(x, length) for x in tensors]
                joined[name] = torch.cat(tensors)
            layers.append(rows[0].replaced(**joined))
        ragged = any(s.ragged or s.length < length for s in states)
        position = torch.cat([s.position for s in states])
        return states[0].replaced(
            layers=layers, position=position, length=length, ragged=ragged, captured=False
        )


def overwritten(old: Tensor, new: Tensor) -> Tensor:
    """`old` with the contents of `new`; or `new` itself, where `old` is not to be written."""
    return old.copy_(new) if new is not old and writable(old, new) else new


def writable(old: Tensor, new: Tensor) -> bool:
    """True if `old` may be written in place: autograd records neither tensor."""
    return not (torch.is_grad_enabled() and (old.requires_grad or new.requires_grad))
