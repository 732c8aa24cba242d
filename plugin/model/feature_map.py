"""What stands between the projections and the scan: short convolution, rotary embedding, feature map, input norm."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Shapes: B batch, T time, H heads, R head_dim, W convolution width, E channels.


class ShortConv(nn.Module):
    """Causal depthwise convolution over time, with bias (paper eq. silu-feature, SC). 5 parameters per channel at width 4."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [B, T, E]; past: the W - 1 inputs before x, [B, W - 1, E], zeros if None.

        Returns: (y [B, T, E], the last W - 1 inputs [B, W - 1, E]).
        """
        B, T, E = x.shape
        if past is None:
            past = x.new_zeros(B, self.width - 1, E)
        window = torch.cat([past.to(x.dtype), x], dim=1)  # [B, W - 1 + T, E]
        # Shifted sums in [B, T, E]: one fused pass under torch.compile, and no transpose to the layout of conv1d.
        y = self.bias
        for i in range(self.width):
            y = y + window[:, i : i + T] * self.weight[:, 0, i]
        return y, window[:, T:]


def widened(x: Tensor) -> Tensor:
    """x in float32 for arithmetic that bf16 would spoil; a float64 model stays float64 throughout."""
    return x if x.dtype == torch.float64 else x.float()


def rope_tables(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles at integer `positions` [T] or [B, T], each [..., T, 1, head_dim / 2] of `dtype`."""
    # float64: a float32 angle is off by 2e-4 radians at position 4096 and by 0.06 at a million.
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim)
    angles = positions[..., None, None].double() * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x [B, T, H, R]; the halves of R form the pairs. Computed in float32 or wider, returned in x's dtype."""
    cos, sin = rope
    a, b = widened(x).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class SiLUFeatureMap(nn.Module):
    """xi(x) = SiLU(x) / ||SiLU(x)||_2 over R (paper eq. silu-feature, after the convolution). No parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(F.silu(widened(x)), dim=-1, eps=1e-6).to(x.dtype)


class RandomFourierFeatures(nn.Module):
    """xi(x) = sqrt(2 / R) [cos(w x), sin(w x)], R wide (paper eq. bochner): xi(x).xi(y) estimates a Gaussian kernel.

    The frequencies are drawn once and fixed (a buffer, [H_kv, R / 2, R]); query heads of a group use those of their keys, or
    the inner product would estimate nothing.
    """

    def __init__(self, n_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.empty(n_kv_heads, head_dim // 2, head_dim, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, H, R] with H a multiple of H_kv -> [B, T, H, R]."""
        B, T, H, R = x.shape
        groups = widened(x).view(B, T, self.frequencies.shape[0], -1, R)
        angles = torch.einsum("bthgr,hfr->bthgf", groups, self.frequencies.to(groups.dtype))
        features = torch.cat([angles.cos(), angles.sin()], dim=-1) * (2 / R) ** 0.5
        return features.view(B, T, H, R).to(x.dtype)


class InputNorm(nn.Module):
    """RMSNorm over R, scale shared by the heads, plus a bias per head (paper eq. inputnorm). R + H * R parameters."""

    def __init__(self, n_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(head_dim))
        self.bias = nn.Parameter(torch.empty(n_heads, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps) + self.bias.to(x.dtype)
