"""The dynamics of a model's layers, computed once for the forward passes of several micro-batches."""

from typing import Any

import torch
from torch import Tensor


class SharedDynamics:
    """Dynamics that many forward passes read, whose gradients are added up here until `backward`.

    The passes have graphs of their own, which end here: what all passes have in common is gone through once.

    layers: the result of `Transformer.dynamics`.
    """

    def __init__(self, layers: list[tuple[Tensor, ...]]) -> None:
        self.layers = layers
        self.gradients: list[list[Tensor | None]] = [[None] * len(layer) for layer in layers]

    def enter(
        self, h: Tensor, which: slice = slice(None)
    ) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """(h, the dynamics by layer) for a forward pass of all layers, or some, that goes on from these hidden states."""
        layers = self.layers[which]
        h, *copies = _Enter.apply(
            self.gradients[which], h, *(x.detach() for layer in layers for x in layer)
        )
        rest = iter(copies)
        return h, [tuple(next(rest) for _ in layer) for layer in layers]

    def backward(self) -> None:
        """Go backward from the dynamics to their parameters, once for all passes."""
        tensors = []
        gradients = []
        for layer, of_layer in zip(self.layers, self.gradients, strict=True):
            for tensor, gradient in zip(layer, of_layer, strict=True):
                if gradient is not None:
                    tensors.append(tensor)
                    gradients.append(gradient)
        if tensors:
            torch.autograd.backward(tensors, gradients)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, held: list[list[Tensor | None]], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.held = held
        return tensors

    @staticmethod
    def backward(ctx: Any, by_h: Tensor, *gradients: Tensor) -> tuple[Any, ...]:
        rest = iter(gradients)
        for layer in ctx.held:
            layer[:] = [g if old is None else old + g for old, g in zip(layer, rest, strict=False)]
        return None, by_h, *(None for _ in gradients)
