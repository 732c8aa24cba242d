"""What a model carries from one piece of a sequence to the next: fixed in size for every mixer but softmax."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

# Shapes: B batch, H heads of keys and state, M basis functions, P width of z, W convolution width, E channels, S seen tokens.


@dataclass
class MixerState:
    """conv: per convolved projection the last W - 1 inputs, [B, W - 1, E]; ssm: unit-gain X, [B, H, M, P, 2] float32."""

    conv: dict[str, Tensor]
    ssm: Tensor

    def tensors(self) -> list[Tensor]:
        return [self.ssm, *self.conv.values()]

    @classmethod
    def stack(cls, states: list["MixerState"]) -> "MixerState":
        return cls(
            conv={name: torch.cat([s.conv[name] for s in states]) for name in states[0].conv},
            ssm=torch.cat([s.ssm for s in states]),
        )


@dataclass
class KVCache:
    """Rotated keys and values of all tokens so far, each [B, S, H, head_dim]; row b holds tokens from slot start[b] on.

    start [B] is None where all rows are full.
    """

    k: Tensor
    v: Tensor
    start: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        return [self.k, self.v]

    @classmethod
    def stack(cls, states: list["KVCache"]) -> "KVCache":
        """Rows of unequal length are filled up on the left, so that all grow at the same end."""
        longest = max(s.k.shape[1] for s in states)
        missing = [longest - s.k.shape[1] for s in states]
        starts = [
            n + (s.k.new_zeros(s.k.shape[0], dtype=torch.int64) if s.start is None else s.start)
            for s, n in zip(states, missing, strict=True)
        ]
        k, v = (
            torch.cat([F.pad(t, (0, 0, 0, 0, n, 0)) for t, n in zip(tensors, missing, strict=True)])
            for tensors in ([s.k for s in states], [s.v for s in states])
        )
        unequal = any(missing) or any(s.start is not None for s in states)
        return cls(k, v, torch.cat(starts) if unequal else None)


@dataclass
class ModelState:
    """One entry per layer, and per row the number of tokens seen, [B] int64.

    dynamics: what the scan reads of the parameters, per layer: computed once, for the weights that the state belongs to.
    """

    layers: list[MixerState | KVCache]
    position: Tensor
    dynamics: list[tuple[Tensor, ...]]

    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer.tensors())

    @classmethod
    def stack(cls, states: list["ModelState"]) -> "ModelState":
        """Rows of several states as one batch; each row continues where it was."""
        layers = [type(rows[0]).stack(list(rows)) for rows in zip(*(s.layers for s in states), strict=True)]
        return cls(layers, torch.cat([s.position for s in states]), states[0].dynamics)
