"""The dynamics of all layers of a rank, computed once a step and not in every layer's forward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from interdomain.model.dynamics import SharedDynamics
from interdomain.model.mixers.interdomain import InterdomainMixer


class DynamicsOnce:
    """A TransformerConfig's `finalize_model_grads_func`: one backward pass through the dynamics, then Megatron's own function.

    While a config has it, mixers in training read dynamics that are computed once a step: in the first step each for itself,
    later those of all layers of the rank together, which the call of the first step has seen.
    """

    def __init__(self, finalize: Callable[..., Any]) -> None:
        self.finalize = finalize
        self.mixers: list[Any] = []
        self.shared: dict[Any, tuple[SharedDynamics, int]] = {}  # by mixer; with its place among the layers

    def enter(self, mixer: Any, x: Tensor) -> tuple[Tensor, Any]:
        """(x, the dynamics for a pass of the mixer that goes on from x). None: the mixer computes its own."""
        if mixer not in self.shared:
            # Recomputed layers go forward without gradients first, and in a first step there is nothing yet.
            if not torch.is_grad_enabled() or not isinstance(mixer.core, InterdomainMixer):
                return x, None
            alike = [other for other in self.mixers if other.whole.mixer == mixer.whole.mixer] or [mixer]
            shared = SharedDynamics(mixer.core.dynamics([other.core for other in alike]))
            self.shared |= {other: (shared, i) for i, other in enumerate(alike)}
        shared, i = self.shared[mixer]
        x, (dynamics,) = shared.enter(x, slice(i, i + 1))
        return x, dynamics

    def __call__(self, model: list[Any], *args: Any, **named: Any) -> Any:
        modules = [module for chunk in model for module in chunk.modules()]
        self.mixers = [m for m in modules if isinstance(getattr(m, "core", None), InterdomainMixer)]
        for shared in dict.fromkeys(shared for shared, _ in self.shared.values()):
            shared.backward()
        self.shared.clear()
        return self.finalize(model, *args, **named)
