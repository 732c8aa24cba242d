"""The dynamics of a model's layers, computed once for the forward passes of several micro-batches."""

from typing import Any

import torch
from torch import Tensor


class SharedDynamics:
    """Dynamics that many forward passes read, whose gradients are added up here until `backward`.

    The passes have graphs of their own, which end here. So a pass may go backward in two halves, first by its activations and
    then by its weights, as the zero-bubble schedules of a pipeline do: what all passes have in common is gone through once.

    layers: the result of `Transformer.dynamics`.
    """

    def __init__(self, layers: list[tuple[Tensor, ...]]) -> None:
        self.layers = layers
        self.tensors = [x for layer in layers for x in layer]
        self.gradients: list[Tensor | None] = [None] * len(self.tensors)

    def enter(self, h: Tensor) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """(h, the dynamics by layer) for a forward pass that goes on from these hidden states.

        The gradients come back together with that of h: the half of a backward pass that is by activations has them all.
        """
        h, *copies = _Enter.apply(self, h, *(x.detach() for x in self.tensors))
        rest = iter(copies)
        return h, [tuple(next(rest) for _ in layer) for layer in self.layers]

    def backward(self) -> None:
        """Go backward from the dynamics to their parameters, once for all passes."""
        pairs = [(x, g) for x, g in zip(self.tensors, self.gradients, strict=True) if g is not None]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shared: SharedDynamics, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.shared = shared
        return tensors

    @staticmethod
    def backward(ctx: Any, by_h: Tensor, *gradients: Tensor) -> tuple[Any, ...]:
        held = ctx.shared.gradients
        held[:] = [g if old is None else old + g for old, g in zip(held, gradients, strict=True)]
        return None, by_h, *(None for _ in gradients)
