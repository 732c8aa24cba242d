"""The features in plain PyTorch, recorded by autograd: the CPU path, and what judges the kernels."""

import torch
from torch import Tensor
from torch.nn import functional as F

# Shapes: B batch, T time, H heads, R head_dim, E = H R channels, W convolution width.


def features(x, head_dim, weight, bias, past, documents, cos, sin, silu, scale, shift, eps) -> Tensor:
    """x [B, T, E]; weight [E, W]; past [B, W - 1, E]; documents [B, T]; None for what is not there. -> [B, T, H, R]."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.to(dtype)
    if weight is not None:
        y = _convolved(y, weight.to(dtype), bias.to(dtype), past, documents)
    y = y.unflatten(-1, (-1, head_dim))
    if cos is not None:
        a, b = y.chunk(2, dim=-1)
        y = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    if silu:
        y = F.normalize(F.silu(y), dim=-1, eps=1e-6)
    if scale is not None:
        y = F.rms_norm(y, scale.shape, scale.to(dtype), eps) + shift.to(dtype)
    return y.to(x.dtype)  # the only rounding


def _convolved(x: Tensor, weight: Tensor, bias: Tensor, past: Tensor | None, documents: Tensor | None) -> Tensor:
    T, W = x.shape[1], weight.shape[-1]
    window = F.pad(x, (0, 0, W - 1, 0)) if past is None else torch.cat([past.to(x.dtype), x], dim=1)
    # Shifted sums in [B, T, E]: no transpose to the layout of conv1d.
    y = bias
    for i in range(W):
        seen = window[:, i : i + T]
        if documents is not None:  # what came before the first token is of document 0
            own = F.pad(documents, (W - 1, 0))[:, i : i + T] == documents
            seen = torch.where(own[..., None], seen, 0)
        y = y + seen * weight[:, i]
    return y


def step(x, head_dim, weight, bias, past, cos, sin, rotated, silu, scale, shift, eps) -> Tensor:
    """One token of all projections, x [B, H R] -> [B, H, R]: as few passes over as few numbers as can be, in place.

    weight [W, C] and past [B, W - 1, C], overwritten; scale and shift [N, R]; see `input_features_step`.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if weight is None:
        y = x.to(dtype, copy=True)
    else:
        C = weight.shape[1]
        window = torch.cat([past, x[:, None, :C]], dim=1)
        past.copy_(window[:, 1:])
        y = (window * weight.to(dtype)).sum(1).add_(bias)
        y = y if x.shape[1] == C else torch.cat([y, x[:, C:]], dim=1)
    y = y.view(x.shape[0], -1, head_dim)
    if rotated:
        u = y[:, :rotated].unflatten(-1, (2, -1))  # the halves
        turned = u * cos
        turned[..., 0, :].addcmul_(u[..., 1, :], sin[..., 0, :], value=-1)
        turned[..., 1, :].addcmul_(u[..., 0, :], sin[..., 0, :])
        u.copy_(turned)
    if silu:
        s = F.silu(y[:, :silu], inplace=True)
        s.div_(torch.linalg.vector_norm(s, dim=-1, keepdim=True).clamp_min_(1e-6))
    if scale is not None:
        s = y[:, -len(scale) :]
        m = torch.linalg.vector_norm(s, dim=-1, keepdim=True).square_().div_(head_dim).add_(eps)
        s.mul_(m.rsqrt_()).mul_(scale).add_(shift)
    return y.to(x.dtype)
