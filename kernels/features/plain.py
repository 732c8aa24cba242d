"""The input features in plain PyTorch, recorded by autograd.

This is the path on a CPU, and tests compare the kernels with it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Shapes: B batch, T time, H heads, R head_dim, E = H R channels, W convolution width.


def features(
    x: Tensor, head_dim: int, weight: Any = None, bias: Any = None, past: Any = None, documents: Any = None, cos: Any = None,
    sin: Any = None, silu: Any = False, scale: Any = None, shift: Any = None, eps: Any = 1e-5,
) -> Tensor:  # fmt: skip
    """Applies the input features, as `input_features` does.

    Args:
        x: [B, T, E].
        head_dim: R.
        weight: [E, W] or [E, 1, W], or None.
        bias: [E], or None.
        past: [B, W - 1, E], or None for zeros.
        documents: [B, T], or None.
        cos: [T, 1, R/2] or [B, T, 1, R/2], or None.
        sin: Likewise.
        silu: True for SiLU and the l2 norm.
        scale: [R], or None.
        shift: [H, R], or None.
        eps: The eps of the norm.

    Returns:
        [B, T, H, R] in x's dtype.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.to(dtype)
    if weight is not None:
        y = _convolved(y, weight.flatten(1).to(dtype), bias.to(dtype), past, documents)
    y = y.unflatten(-1, (-1, head_dim))
    if cos is not None:
        other = y.roll(head_dim // 2, dims=-1)  # the halves (b, a) of (a, b)
        y = y * torch.cat([cos, cos], dim=-1) + other * torch.cat([-sin, sin], dim=-1)
    if silu:
        y = F.normalize(F.silu(y), dim=-1, eps=1e-6)
    if scale is not None:
        y = F.rms_norm(y, scale.shape, scale.to(dtype), eps) + shift.to(dtype)
    return y.to(x.dtype)  # the only rounding


def _convolved(
    x: Tensor, weight: Tensor, bias: Tensor, past: Tensor | None, documents: Tensor | None
) -> Tensor:
    """Convolves x [B, T, E] with a causal depthwise kernel, weight [E, W]."""
    T, W = x.shape[1], weight.shape[-1]
    window = F.pad(x, (0, 0, W - 1, 0)) if past is None else torch.cat([past.to(x.dtype), x], dim=1)
    # Shifted sums in [B, T, E]: no transpose to the layout of conv1d. A tap's weights are copied to
    # one piece: read with a stride of W, they would take four times as long as the sum.
    y, taps = bias, weight.mT.contiguous()
    for i in range(W):
        seen = window[:, i : i + T]
        # A tap sees only its own document. What came before the first token is of document 0.
        if documents is not None:
            same = F.pad(documents, (W - 1, 0))[:, i : i + T] == documents
            seen = torch.where(same[..., None], seen, 0)
        y = torch.addcmul(y, seen, taps[i])
    return y


def step(
    x: Tensor, head_dim: int, weight: Any = None, bias: Any = None, past: Any = None, cos: Any = None, sin: Any = None,
    rotated: Any = 0, silu: Any = 0, scale: Any = None, shift: Any = None, eps: Any = 1e-5,
) -> Tensor:  # fmt: skip
    """Applies the input features to one token of all projections, and overwrites x.

    Args:
        x: [B, H R].
        head_dim: R.
        weight: [W, C], or None.
        bias: [C], or None.
        past: [B, W - 1, C], overwritten; or None.
        cos: [1, 1, R/2] or [B, 1, 1, R/2], or None.
        sin: Likewise.
        rotated: Number of the first heads that RoPE rotates.
        silu: Number of the first heads with SiLU and the l2 norm.
        scale: [N, R], of the last N heads, or None.
        shift: Likewise.
        eps: The eps of the norm.

    Returns:
        [B, H, R] in x's dtype.
    """
    y = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    if weight is not None:
        u = y[:, : weight.shape[1]]
        window = torch.cat([past, u[:, None]], dim=1)
        past.copy_(window[:, 1:])
        u.copy_((window * weight).sum(1).add_(bias))
    y = y.view(x.shape[0], -1, head_dim)
    if rotated:
        u = y[:, :rotated].view(y.shape[0], rotated, 2, -1)  # the halves
        other = u.flip(2)
        other[:, :, 0].neg_()
        u.mul_(cos).addcmul_(other, sin)
    if silu:
        u = F.silu(y[:, :silu], inplace=True)
        u.div_(torch.linalg.vector_norm(u, dim=-1, keepdim=True).clamp_min_(1e-6))
    if scale is not None:
        u = y[:, -len(scale) :]
        n = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
        u.mul_(torch.addcmul(n.new_full((1,), eps), n, n, value=1 / head_dim).rsqrt_()).mul_(
            scale
        ).add_(shift)
    return y.to(x.dtype)
