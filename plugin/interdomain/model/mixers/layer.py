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
    """Causal attention through a state of fixed size (paper eqs. 10 to 13).

    It maps x [B, T, dim] to [B, T, dim], and takes the place of causal self-attention. Norm and
    residual connection belong to the model around it. Initial values come from PyTorch's global
    generator. The SSM parameters (`mixer.ssm`) stay float32 in `.bfloat16()` and `.half()`. The
    paper trains them, and those of `k_norm` and `v_norm`, without weight decay and with a learning
    rate of at most 1e-3.

    Args:
        dim: The width of the model.
        n_heads: Query heads. A head is dim / n_heads wide.
        n_layers: Layers of the model around it. The output projection starts at a standard
            deviation of 0.02 / sqrt(2 n_layers).
        rope_theta: The base of the rotary embedding.
        norm_eps: Epsilon of the input norms.
        backend: Implementation of the scan, one of `interdomain.scan.BACKENDS`.
        options: Any field of `interdomain.model.MixerConfig` except `kind`: n_basis (M),
            n_kv_heads, readout, c_form, rope, ...

    Raises:
        ValueError: A setting is unknown, or is not possible together with the others.
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
        self.config = ModelConfig(
            dim=dim,
            n_layers=n_layers,
            n_heads=n_heads,
            head_dim=dim // n_heads,
            rope_theta=rope_theta,
            norm_eps=norm_eps,
            mixers=(MixerConfig(**options),),
        )
        self.mixer = InterdomainMixer(self.config, Execution(backend))
        initialize(self.mixer, self.config)

    def forward(
        self,
        x: Tensor,
        state: ModelState | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Mixes whole sequences or, with a state, a piece of any length that continues from it.

        Args:
            x: Hidden states, [B, T, dim].
            state: From `init_state`. It is advanced in place. Make a new one after the weights have
                changed.
            positions: For sequences of several packed documents, the number of tokens before each
                token in its document, [B, T] integers. A position that is not the position before
                it plus one begins a document. Nothing is carried from one document into another.
        Returns:
            [B, T, dim].
        Raises:
            ValueError: A state and positions are given, or positions have another type or shape.
        """
        if state is not None and positions is not None:
            raise ValueError(
                "positions are for whole sequences, and a state counts its own: leave one of the "
                "two out."
            )
        order = torch.arange(x.shape[1], device=x.device)

        # A piece that continues from a state.
        if state is not None:
            rope = rope_of(self.config, state.position[:, None] + order, x.dtype)
            y = self.mixer(x, rope, state.ssm_tensors[0], state.layers[0])
            state.advance(x.shape[1])
            return y

        # Whole sequences; a position restarts in each document.
        if positions is not None:
            positions = counted_from_starts(positions, x.shape[0], x.shape[1], None)
        packing = self.mixer.packing(
            self.config.mixer,
            order,
            positions,
            x.dtype,
            None,
        )
        rope = rope_of(self.config, order if positions is None else positions, x.dtype)
        return self.mixer(x, rope, packing=packing)

    def init_state(self, batch: int) -> ModelState:
        """Returns the state before the first token of `batch` sequences.

        It holds the SSM tensors of the present weights.
        """
        weight = self.mixer.wo.weight
        ssm_tensors = self.mixer.ssm_tensors([self.mixer])
        layer = self.mixer.init_state(
            batch,
            0,
            weight.dtype,
            weight.device,
            ssm_tensors[0],
        )
        position = torch.zeros(batch, dtype=torch.int64, device=weight.device)
        return ModelState([layer], position, [*ssm_tensors])
