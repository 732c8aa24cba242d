"""What a model carries from one piece of a sequence to the next: fixed in size for every mixer but softmax.

A model advances a state in place. Where no gradient is recorded its tensors keep their addresses, which CUDA graphs need.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

# Shapes: B batch, H heads of keys and state, M basis functions, P width of z, W convolution width, E channels, S slots.


@dataclass
class MixerState:
    """conv: the last W - 1 inputs of the convolutions of q, k and v, as far as there are, one after the other, [B, W - 1, E];
    ssm: unit-gain X, [B, H, M, P, 2] float32; step: what a step reads of the parameters, the mixer's own."""

    conv: Tensor
    ssm: Tensor
    step: tuple | None = None

    def advance(self, conv: Tensor, ssm: Tensor) -> None:
        """Take over new contents (what is the tensor of the state itself was written in place)."""
        self.conv, self.ssm = overwritten(self.conv, conv), overwritten(self.ssm, ssm)

    def without_padding(self, seen: Tensor) -> None:
        """Remove what padding before the first of `seen` [B] tokens of each row has left."""
        back = torch.arange(self.conv.shape[1], 0, -1, device=seen.device)  # the input of how many tokens ago
        conv = self.conv.where((back <= seen[:, None])[:, :, None], 0)
        self.advance(conv, self.ssm.where((seen > 0)[:, None, None, None, None], 0))

    def tensors(self) -> dict[str, Tensor]:
        return {"ssm": self.ssm, "conv": self.conv}

    def replaced(self, tensors: dict[str, Tensor]) -> "MixerState":
        return MixerState(tensors["conv"], tensors["ssm"], self.step)


@dataclass
class KVCache:
    """Rotated keys and values, each [B, H, S, head_dim]; S is the room there is, not the tokens seen."""

    k: Tensor
    v: Tensor

    def append(self, k: Tensor, v: Tensor, begin: int | Tensor) -> tuple[Tensor, Tensor]:
        """Put k, v [B, H, T, head_dim] at slots `begin` on; returns all keys and values so far.

        With a tensor [1] for `begin` nothing depends on its value (T = 1, in a CUDA graph): there must be room, and all
        slots are returned.
        """
        if isinstance(begin, Tensor):
            return self.k.index_copy_(2, begin, k.to(self.k.dtype)), self.v.index_copy_(2, begin, v.to(self.v.dtype))
        end = begin + k.shape[2]
        if not writable(self.k, k):
            self.k, self.v = torch.cat([self.k[:, :, :begin], k], 2), torch.cat([self.v[:, :, :begin], v], 2)
        else:
            if end > self.k.shape[2]:
                self.reserve(begin, max(end, 2 * begin))
            self.k[:, :, begin:end] = k
            self.v[:, :, begin:end] = v
        return self.k[:, :, :end], self.v[:, :, :end]

    def reserve(self, used: int, slots: int) -> None:
        """Make room for `slots` in all, of which the first `used` are kept."""
        self.k, self.v = (F.pad(x[:, :, :used], (0, 0, 0, slots - used)) for x in (self.k, self.v))

    def without_padding(self, seen: Tensor) -> None:
        """Slots of padding are masked, not emptied."""

    def tensors(self) -> dict[str, Tensor]:
        return {"k": self.k, "v": self.v}

    def replaced(self, tensors: dict[str, Tensor]) -> "KVCache":
        return KVCache(tensors["k"], tensors["v"])


@dataclass
class ModelState:
    """One entry per layer, and where each row stands.

    Attributes:
        position: tokens seen per row, [B] int64.
        dynamics: what the scan reads of the parameters, per layer: computed once, for the weights that the state belongs to.
        frequencies: of RoPE, as `rope_frequencies` gives them; None without.
        length: tokens and left padding seen, the same in all rows: the slots of a cache in use.
        padded: some row has padding.
        cursor: `length` as a tensor [1] on the device, where steps are captured in a CUDA graph (`generation.Decoder`);
            the model then advances it in place of `length`.
    """

    layers: list[MixerState | KVCache]
    position: Tensor
    dynamics: list[tuple[Tensor, ...]]
    frequencies: Tensor | None
    length: int = 0
    padded: bool = False
    cursor: Tensor | None = None

    @property
    def capacity(self) -> int | None:
        """Tokens that there is room for; None where there is no limit."""
        return self.layers[0].k.shape[2] if isinstance(self.layers[0], KVCache) else None

    def advance(self, tokens: int, padding: Tensor | None = None) -> None:
        """Count `tokens` of each row, `padding` [B] of which are none."""
        seen = tokens if padding is None else tokens - padding
        position = self.position + seen
        # With gradients a new tensor: a compiled backward pass may compute the rotary angles again, from the old position.
        self.position = position if torch.is_grad_enabled() else overwritten(self.position, position)
        if self.cursor is None:
            self.length += tokens
        else:
            self.cursor.add_(tokens)
        if padding is not None:
            self.padded = True
            for layer in self.layers:
                layer.without_padding(self.position)

    def reserve(self, tokens: int) -> None:
        """Make room for so many more tokens, where there is a limit."""
        if self.capacity is not None and self.capacity < self.length + tokens:
            for layer in self.layers:
                layer.reserve(self.length, self.length + tokens)

    def snapshot(self) -> list[Tensor]:
        """Copies of what a step overwrites, on the host, for a GPU may have no room; of a cache nothing, to which it adds."""
        return [x.to("cpu", copy=True) for x in self._overwritten()]

    def restore(self, snapshot: list[Tensor]) -> None:
        """Undo the steps since then; addresses stay."""
        for x, old in zip(self._overwritten(), snapshot, strict=True):
            x.copy_(old)
        if self.cursor is not None:
            self.cursor.fill_(self.length)

    def take(self, rows: Tensor) -> None:
        """Become `select(rows)`, as many rows as there are; addresses stay."""
        for x, new in zip(self._tensors(), self.select(rows)._tensors(), strict=True):
            x.copy_(new)

    def fits(self, other: "ModelState", room: int) -> bool:
        """Whether `become(other)` is possible, with room for so many more tokens; a cache of more than twice those needed, all
        of which a step of fixed shape attends to, does not."""
        if len(self.position) != len(other.position) or self.padded != other.padded:
            return False
        pairs = zip(self._tensors(), other._tensors(), strict=True)
        if any((x.dtype, x.device) != (y.dtype, y.device) for x, y in pairs):
            return False
        needed = other.length + max(1, room)
        return self.capacity is None or needed <= self.capacity <= 2 * needed

    def become(self, other: "ModelState") -> None:
        """A copy of `other`, a state of the same model, with what it reads of the parameters; addresses stay."""
        for layer, new in zip(self.layers, other.layers, strict=True):
            if isinstance(layer, KVCache):
                for x, y in ((layer.k, new.k), (layer.v, new.v)):
                    x[:, :, : other.length] = y[:, :, : other.length]
                    x[:, :, other.length :] = 0  # under the mask: zero times an infinity would be NaN
            else:
                for x, y in zip(*(tree_leaves((s.conv, s.ssm, s.step)) for s in (layer, new)), strict=True):
                    if x is not None:
                        x.copy_(y)
        self.position.copy_(other.position)
        self.dynamics, self.length = other.dynamics, other.length
        if self.cursor is not None:
            self.cursor.fill_(self.length)

    def leave_inference_mode(self) -> None:
        """Copies in place of tensors that were made in an inference mode, and could not be written outside of it."""

        def kept(x: Tensor) -> Tensor:
            return x.clone() if x.is_inference() else x

        if any(x.is_inference() for x in self._tensors()):
            self.layers = [layer.replaced({n: kept(x) for n, x in layer.tensors().items()}) for layer in self.layers]
            self.position = kept(self.position)

    def _tensors(self) -> list[Tensor]:
        return [self.position, *(x for layer in self.layers for x in layer.tensors().values())]

    def _overwritten(self) -> list[Tensor]:
        recurrent = [layer for layer in self.layers if isinstance(layer, MixerState)]
        return [self.position, *(x for layer in recurrent for x in layer.tensors().values())]

    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer.tensors().values())

    def clone(self) -> "ModelState":
        """A state of its own, with the same future: to continue one text in several ways."""
        return self._map(Tensor.clone)

    def select(self, rows: Tensor) -> "ModelState":
        """A state of these rows, [B'] integers, in this order; a row may be taken several times (beams)."""
        return self._map(lambda x: x.index_select(0, rows.to(x.device)))

    def _map(self, function) -> "ModelState":
        layers = [layer.replaced({n: function(t) for n, t in layer.tensors().items()}) for layer in self.layers]
        return replace(self, layers=layers, position=function(self.position), cursor=None)

    @classmethod
    def stack(cls, states: list["ModelState"]) -> "ModelState":
        """Rows of several states as one batch; each row continues where it was.

        Caches of unequal length are filled up on the left, so that all grow at the same end.
        """
        length = max(s.length for s in states)
        layers = []
        for rows in zip(*(s.layers for s in states), strict=True):
            tensors = [layer.tensors() for layer in rows]
            if isinstance(rows[0], KVCache):
                tensors = [
                    {n: F.pad(t[:, :, : s.length], (0, 0, length - s.length, 0)) for n, t in layer.items()}
                    for layer, s in zip(tensors, states, strict=True)
                ]
            layers.append(rows[0].replaced({name: torch.cat([t[name] for t in tensors]) for name in tensors[0]}))
        padded = any(s.padded or s.length < length for s in states)
        first = states[0]
        position = torch.cat([s.position for s in states])
        return cls(layers, position, first.dynamics, first.frequencies, length, padded)


def overwritten(old: Tensor, new: Tensor) -> Tensor:
    """`old` with the contents of `new`; or `new` itself, where `old` is not to be written."""
    return old.copy_(new) if new is not old and writable(old, new) else new


def writable(old: Tensor, new: Tensor) -> bool:
    """Whether `old` may be written in place: autograd records neither, and it was not made in an inference mode now over."""
    if torch.is_grad_enabled() and (old.requires_grad or new.requires_grad):
        return False
    if torch.compiler.is_compiling():  # which cannot ask
        return True
    return torch.is_inference_mode_enabled() or not old.is_inference()
