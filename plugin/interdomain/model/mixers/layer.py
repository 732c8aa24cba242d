"""Interdomain Attention as a layer of any model: `from interdomain import InterdomainAttention`."""

from typing import Any

import torch
from torch import Tensor, nn

from ..config import MIXER_SETTINGS, Execution, MixerConfig, ModelConfig, check_names
from ..initialize import initialize
from ..layers import rope_of
from ..state import ModelState
from .base import counted_from_starts
from .interdomain import InterdomainMixer

# Shapes: B batch, T tokens.


class InterdomainAttention(nn.Module):
    """Causal attention through a state of fixed size: x [B, T, dim] -> [B, T, dim] (paper, "Our architecture", eqs. 10 to 13).

    It takes the place of causal self-attention. Norm and residual connection belong to the model around it. Initial values
    come from PyTorch's global generator. The parameters of the recurrence (`mixer.ssm`) stay float32 in `.bfloat16()` and
    `.half()`. The paper trains them, and those of `k_norm` and `v_norm`, without weight decay and with a learning rate of at
    most 1e-3.

    Args:
        dim: width of the model.
        n_heads: query heads; a head is dim / n_heads wide.
        n_layers: of the model around it. The output projection starts at a standard deviation of 0.02 / sqrt(2 n_layers).
        rope_theta: base of the rotary embedding.
        norm_eps: epsilon of the input norms.
        backend: of the scan, one of `interdomain.scan.BACKENDS`.
        options: any field of `interdomain.model.MixerConfig` but `kind`: n_basis (M), n_kv_heads, readout, c_form, rope, ...

    Raises:
        ValueError: a setting is unknown, or not possible with the others.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        *,
        n_layers: int = 12,
        rope_theta: float = 10_000.0,
        norm_eps: float = 1e-5,
        backend: str = "auto",
        **options: Any,
    ) -> None:
        super().__init__()
        check_names("mixer", options, [name for name in MIXER_SETTINGS if name != "kind"])
        sizes = dict(dim=dim, n_layers=n_layers, n_heads=n_heads, head_dim=dim // n_heads)
        self.config = ModelConfig(
            **sizes, rope_theta=rope_theta, norm_eps=norm_eps, mixers=(MixerConfig(**options),)
        )
        self.mixer = InterdomainMixer(self.config, Execution(backend))
        initialize(self.mixer, self.config)

    def forward(
        self, x: Tensor, state: ModelState | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """x [B, T, dim] -> [B, T, dim]: whole sequences; with a state, a piece of any length that continues from it.

        Args:
            state: from `init_state`; advanced in place. Make a new one after the weights have changed.
            positions: [B, T] integers, if sequences hold several packed documents: how many tokens of its document come
                before each token. A position that is not the one before plus one begins a document. Nothing is carried from
                one document into another.
        Raises: ValueError for a state and positions, and for positions of another type or shape.
        """
        if state is not None and positions is not None:
            raise ValueError(
                "positions are for whole sequences; a state counts its own: leave one of the two out."
            )
        order = torch.arange(x.shape[1], device=x.device)
        if state is None:
            if positions is not None:
                positions = counted_from_starts(positions, x.shape[0], x.shape[1], None)
            documents = self.mixer.packing(self.config.mixer, order, positions, x.dtype, None)
            rope = rope_of(self.config, order if positions is None else positions, x.dtype)
            return self.mixer(x, rope, packing=documents)
        rope = rope_of(self.config, state.position[:, None] + order, x.dtype)
        y = self.mixer(x, rope, state.dynamics[0], state.layers[0])
        state.advance(x.shape[1])
        return y

    def init_state(self, batch: int) -> ModelState:
        """The state before the first token of `batch` sequences, with what the scan reads of the parameters as they are now."""
        weight, dynamics = self.mixer.wo.weight, self.mixer.dynamics([self.mixer])
        layer = self.mixer.init_state(batch, 0, weight.dtype, weight.device, dynamics[0])
        position = torch.zeros(batch, dtype=torch.int64, device=weight.device)
        return ModelState([layer], position, [*dynamics])
