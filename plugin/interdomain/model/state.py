"""The state that a model carries from one piece of a sequence to the next: fixed in size for every mixer but softmax
without a window.

A model advances a state in place. Where no gradient is recorded its tensors keep their addresses, which CUDA graphs need.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from .recomputation import backward_pass, check_not_recomputed

# Shapes: B batch, H heads of keys and state, M basis functions, P width of z, W convolution width, E channels, S slots.


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
        self, conv: Tensor, ssm: Tensor, prepared: tuple[dict[str, Any], dict[str, Any]] | None = None
    ) -> None:
        super().__init__()
        self.conv = conv
        self.ssm = ssm
        self.prepared = prepared

    def advance(self, conv: Tensor, ssm: Tensor) -> None:
        """Take over new contents (what is the tensor of the state itself was written in place)."""
        check_not_recomputed(self.made_in)
        self.conv, self.ssm = overwritten(self.conv, conv), overwritten(self.ssm, ssm)

    def aligned(self, used: int, length: int) -> "MixerState":
        return self

    def tensors(self) -> dict[str, Tensor]:
        return {"ssm": self.ssm, "conv": self.conv}


class KVCache(State):
    """The cache of a softmax layer: rotated keys and values. It grows where there are more tokens than slots.

    Attributes:
        k: [B, H, S, head_dim]; S slots, of which the first are in use.
        v: likewise.
    """

    def __init__(self, k: Tensor, v: Tensor) -> None:
        super().__init__()
        self.k = k
        self.v = v

    @property
    def capacity(self) -> int:
        return self.k.shape[2]

    def append(self, k: Tensor, v: Tensor, begin: int | Tensor) -> tuple[Tensor, Tensor]:
        """Put k, v [B, H, T, head_dim] at slots `begin` on; returns all keys and values so far.

        With a tensor [1] for `begin` nothing depends on its value (T = 1, in a CUDA graph): there must be room, and all
        slots are returned.
        """
        check_not_recomputed(self.made_in)
        if isinstance(begin, Tensor):
            return self.k.index_copy_(2, begin, k.to(self.k.dtype)), self.v.index_copy_(2, begin, v.to(self.v.dtype))
        end = begin + k.shape[2]
        if end > self.capacity or not writable(self.k, k):
            self.k, self.v = (
                torch.cat([old[:, :, :begin], new.to(old.dtype)], dim=2) for old, new in ((self.k, k), (self.v, v))
            )
        else:
            self.k[:, :, begin:end] = k
            self.v[:, :, begin:end] = v
        return self.k[:, :, :end], self.v[:, :, :end]

    def reserve(self, used: int, slots: int) -> None:
        """Make room for `slots` in all, of which the first `used` are kept."""
        self.k, self.v = (F.pad(x[:, :, :used], (0, 0, 0, slots - used)) for x in (self.k, self.v))

    def aligned(self, used: int, length: int) -> "KVCache":
        """The first `used` slots as the last of `length`."""
        return KVCache(*(F.pad(x[:, :, :used], (0, 0, length - used, 0)) for x in (self.k, self.v)))

    def tensors(self) -> dict[str, Tensor]:
        return {"k": self.k, "v": self.v}


class WindowCache(State):
    """Rotated keys and values of the last S tokens, each [B, H, S, head_dim]: token i is in slot i mod S."""

    capacity: int | None = None

    def __init__(self, k: Tensor, v: Tensor) -> None:
        super().__init__()
        self.k = k
        self.v = v

    def append(self, k: Tensor, v: Tensor, begin: int | Tensor) -> tuple[Tensor, Tensor]:
        """Put k, v [B, H, T, head_dim] of the tokens `begin` on in the place of the oldest.

        Returns: keys and values, for T = 1 of all slots; else of the min(begin, S) tokens before, in their order, and of these.
        A tensor [1] for `begin` as in KVCache.
        """
        check_not_recomputed(self.made_in)
        T, S, seen = k.shape[2], self.k.shape[2], None
        if T > 1:
            assert isinstance(begin, int)
            before = torch.arange(begin - min(begin, S), begin, device=k.device) % S
            pairs = (self.k, k), (self.v, v)
            seen = [torch.cat([old.index_select(2, before).to(new.dtype), new], 2) for old, new in pairs]
        slots = (begin + torch.arange(T, device=k.device)[-S:]) % S
        k, v = k[:, :, -S:].to(self.k.dtype), v[:, :, -S:].to(self.v.dtype)
        if writable(self.k, k):
            self.k.index_copy_(2, slots, k)
            self.v.index_copy_(2, slots, v)
        else:
            self.k, self.v = self.k.index_copy(2, slots, k), self.v.index_copy(2, slots, v)
        return (self.k, self.v) if seen is None else (seen[0], seen[1])

    def aligned(self, used: int, length: int) -> "WindowCache":
        """The state with `length` tokens before the next, where `used` were: the new first tokens are padding."""
        return WindowCache(*(x.roll(length - used, 2) for x in (self.k, self.v)))

    def tensors(self) -> dict[str, Tensor]:
        return {"k": self.k, "v": self.v}


class ModelState(State):
    """The state of a model between two pieces of a text: from `Transformer.init_state`, advanced in place.

    Attributes:
        layers: per layer a MixerState, a KVCache or that of another mixer.
        position: tokens seen per row, [B] int64.
        dynamics: per layer what the scan reads of the parameters: computed once, for the weights that the state belongs to.
        length: slots of a cache in use, the same in all rows: tokens, and padding on the left of them.
        padded: whether some row has padding (see `stack`).
        cursor: `length` as a tensor [1] on the device, where `generation.Decoder` captures steps in a CUDA graph. The model
            then advances it in place of `length`.
    """

    def __init__(self, layers: list[Any], position: Tensor, dynamics: list[tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.layers = layers
        self.position = position
        self.dynamics = dynamics
        self.length: int = 0
        self.padded: bool = False
        self.cursor: Tensor | None = None

    @property
    def capacity(self) -> int | None:
        """Tokens that softmax's caches have room for; None where no layer has such a cache."""
        return min((layer.capacity for layer in self.layers if layer.capacity is not None), default=None)

    def reserve(self, tokens: int) -> None:
        """Make room in caches for so many tokens, those seen included."""
        for layer in self.layers:
            if layer.capacity is not None:
                layer.reserve(self.length, tokens)

    def advance(self, tokens: int) -> None:
        """Count `tokens` of each row."""
        position = self.position + tokens
        # With gradients a new tensor: a compiled backward pass may compute the rotary angles again, from the old position.
        self.position = position if torch.is_grad_enabled() else overwritten(self.position, position)
        if self.cursor is None:
            self.length += tokens
        else:
            self.cursor.add_(tokens)

    def nbytes(self) -> int:
        """Bytes of all layers' states."""
        return sum(t.nbytes for layer in self.layers for t in layer.tensors().values())

    def select(self, rows: Tensor) -> "ModelState":
        """A state of these rows, [B'] integers, in this order; a row may be taken several times (beams)."""
        return self._map(lambda x: x.index_select(0, rows.to(x.device)))

    def _map(self, function: Callable[[Tensor], Tensor]) -> "ModelState":
        layers = [layer._map(function) for layer in self.layers]
        return self.replaced(layers=layers, position=function(self.position), cursor=None)

    @classmethod
    def stack(cls, states: list["ModelState"]) -> "ModelState":
        """Rows of several states as one batch; each row continues where it was.

        Caches of unequal length are filled up on the left, so that all grow at the same end.
        """
        length = max(s.length for s in states)
        layers = []
        for rows in zip(*(s.layers for s in states), strict=True):
            rows = [layer.aligned(s.length, length) for layer, s in zip(rows, states, strict=True)]
            joined = {name: torch.cat([row.tensors()[name] for row in rows]) for name in rows[0].tensors()}
            layers.append(rows[0].replaced(**joined))
        padded = any(s.padded or s.length < length for s in states)
        position = torch.cat([s.position for s in states])
        return states[0].replaced(layers=layers, position=position, length=length, padded=padded, cursor=None)


def overwritten(old: Tensor, new: Tensor) -> Tensor:
    """`old` with the contents of `new`; or `new` itself, where `old` is not to be written."""
    return old.copy_(new) if new is not old and writable(old, new) else new


def writable(old: Tensor, new: Tensor) -> bool:
    """True if `old` may be written in place: autograd records neither tensor."""
    return not (torch.is_grad_enabled() and (old.requires_grad or new.requires_grad))
