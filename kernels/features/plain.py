"""The input features in plain PyTorch, recorded by autograd.

This is the path on a CPU, and tests compare the kernels with it.
"""
# The tensors of a stage are given together, or are None together, which the types do not say.
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportOptionalOperand=false, reportCallIssue=false

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# Shapes: B batch, T time, H heads, R head_dim, E = H R channels, W convolution width, C convolved
# channels and N normalised heads of a step.


def recompute_in_backward(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Calls a function, of which autograd keeps only the arguments until the backward.

    The backward calls it again for its intermediate results. torch.compile chooses by itself what
    it keeps. In torch.func's transforms, which do not support this, everything is kept.

    Args:
        function: A function of tensors without random numbers, whose results are cheap to compute.
        *args: Its arguments.
    """
    if (
        not torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
    ):
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def features(
    x: Tensor, head_dim: int, weight: Tensor | None = None, bias: Tensor | None = None, past: Tensor | None = None,
    documents: Tensor | None = None, cos: Tensor | None = None, sin: Tensor | None = None, silu: bool = False,
    scale: Tensor | None = None, shift: Tensor | None = None, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Applies the input features to whole sequences: convolution, RoPE, feature map and norm.

    Args:
        x: A projection's output, [B, T, E] with E = H R channels.
        head_dim: R, the channels of a head.
        weight: The convolution's taps, [E, W] or [E, 1, W]; None for no convolution.
        bias: The convolution's bias, [E]. It is given if weight is.
        past: The inputs of the W - 1 tokens before x, [B, W - 1, E], or None for zeros.
        documents: The id of each token's document, [B, T], or None. The convolution stays within
            one.
        cos: Cosines of the rotary angles, [T, 1, R/2] or [B, T, 1, R/2]; None for no RoPE.
        sin: Their sines, likewise.
        silu: True for SiLU and the l2 norm.
        scale: The weight of the input norm, [R]; None for no norm.
        shift: The bias of the input norm, [H, R]; None if scale is.
        eps: The eps of the RMSNorm.

    Returns:
        [B, T, H, R] in x's dtype.
    """
    args = (x, head_dim, weight, bias, past, documents, cos, sin, silu, scale, shift, eps)
    # Autograd keeps only the inputs, as with the kernels. RoPE alone does not need even these.
    if weight is None and not silu and scale is None:
        return _features(*args)
    return recompute_in_backward(_features, *args)


def _features(
    x: Tensor, head_dim: int, weight: Tensor | None, bias: Tensor | None, past: Tensor | None,
    documents: Tensor | None, cos: Tensor | None, sin: Tensor | None, silu: bool, scale: Tensor | None,
    shift: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    """Computes `features`, whose arguments it has. Autograd keeps every intermediate result."""
    # All arithmetic is in fp32, or fp64.
    dtype = torch.float32
    if x.dtype == torch.float64:
        dtype = torch.float64
    y = x.to(dtype)
    # The short convolution (SC of paper eq. 10).
    if weight is not None:
        y = _convolved(y, weight.flatten(1).to(dtype), bias.to(dtype), past, documents)
    y = y.unflatten(-1, (-1, head_dim))  # [B, T, E] -> [B, T, H, R]
    # RoPE: the halves (a, b) of a head become (a cos - b sin, b cos + a sin). `other` is (b, a).
    if cos is not None:
        other = y.roll(head_dim // 2, dims=-1)
        y = y * torch.cat([cos, cos], dim=-1) + other * torch.cat([-sin, sin], dim=-1)
    # The feature map SiLU(y) / max(||SiLU(y)||, 1e-6) (paper eq. 10), and the input norm, an
    # RMSNorm with a bias (paper eq. 12).
    if silu:
        y = F.normalize(F.silu(y), dim=-1, eps=1e-6)
    if scale is not None:
        y = F.rms_norm(y, scale.shape, scale.to(dtype), eps) + shift.to(dtype)
    # This is the only rounding.
    return y.to(x.dtype)


def _convolved(
    x: Tensor, weight: Tensor, bias: Tensor, past: Tensor | None, documents: Tensor | None
) -> Tensor:
    """Applies the causal depthwise convolution, in the dtype of x.

    y_t = bias + sum_i weight[:, i] x_(t - (W - 1) + i), over the inputs of the token's own
    document.

    Args:
        x: The inputs, [B, T, E] with E channels.
        weight: The taps of each channel, [E, W], the oldest lag first.
        bias: The bias of each channel, [E].
        past: The W - 1 inputs before x, [B, W - 1, E], or None for zeros.
        documents: The id of each token's document, [B, T], or None for one document.
    """
    # The inputs of all taps: the W - 1 inputs before x, then x, [B, W - 1 + T, E].
    T = x.shape[1]
    W = weight.shape[-1]
    if past is None:
        window = F.pad(x, (0, 0, W - 1, 0))
    else:
        window = torch.cat([past.to(x.dtype), x], dim=1)
    # Add the inputs of one tap after the other, [B, T, E] each. conv1d would need a transpose. The
    # weights of a tap are copied into one row of memory: read with a stride of W, they would take
    # four times as long as the sum.
    y = bias
    taps = weight.mT.contiguous()
    for i in range(W):
        seen = window[:, i : i + T]
        # A token reads only inputs of its own document. Inputs before the first token are of
        # document 0, which is what F.pad gives.
        if documents is not None:
            same = F.pad(documents, (W - 1, 0))[:, i : i + T] == documents
            seen = torch.where(same[..., None], seen, 0)
        y = torch.addcmul(y, seen, taps[i])
    return y


def step(
    x: Tensor, head_dim: int, weight: Tensor | None = None, bias: Tensor | None = None, past: Tensor | None = None,
    cos: Tensor | None = None, sin: Tensor | None = None, rotated: int = 0, silu: int = 0,
    scale: Tensor | None = None, shift: Tensor | None = None, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Applies the input features to one token of all projections. It may overwrite x.

    Args:
        x: The projections q, k and v side by side, [B, H R].
        head_dim: R, the channels of a head.
        weight: The taps of the convolution of the first C channels, the oldest first, [W, C]; or
            None, and then bias and past are None, too.
        bias: The convolution's bias, [C], or None.
        past: The inputs of the last W - 1 tokens, [B, W - 1, C], which are overwritten; or None.
        cos: The rotary cosines, [1, 1, R/2] or [B, 1, 1, R/2], or None.
        sin: The rotary sines, likewise.
        rotated: Number of the first heads that RoPE rotates.
        silu: Number of the first heads with SiLU and the l2 norm.
        scale: The RMSNorm's scale, [N, R], of the last N heads, or None.
        shift: The RMSNorm's shift, likewise.
        eps: The eps of the RMSNorm.

    Returns:
        [B, H, R] in x's dtype.
    """
    # All arithmetic is in fp32, or fp64. In those dtypes y is x itself, which is overwritten.
    dtype = torch.float32
    if x.dtype == torch.float64:
        dtype = torch.float64
    y = x.to(dtype)
    # In each stage, u is a view of the part of y that the stage changes in place. First the short
    # convolution of the first C channels, and its past for the next token.
    if weight is not None:
        u = y[:, : weight.shape[1]]
        window = torch.cat([past, u[:, None]], dim=1)  # [B, W, C]
        past.copy_(window[:, 1:])
        u.copy_((window * weight).sum(1).add_(bias))
    y = y.view(x.shape[0], -1, head_dim)  # [B, H, R]
    # RoPE of the first heads: the halves (a, b) become (a cos - b sin, b cos + a sin). `other` is
    # (-b, a).
    if rotated:
        u = y[:, :rotated].view(y.shape[0], rotated, 2, -1)  # [B, rotated, 2 halves, R/2]
        other = u.flip(2)
        other[:, :, 0].neg_()
        u.mul_(cos).addcmul_(other, sin)
    # SiLU and the l2 norm of the first heads, as in `features`.
    if silu:
        u = F.silu(y[:, :silu], inplace=True)
        u.div_(torch.linalg.vector_norm(u, dim=-1, keepdim=True).clamp_min_(1e-6))
    # RMSNorm of the last heads: 1 / sqrt(mean(u^2) + eps), scale and shift.
    if scale is not None:
        u = y[:, -len(scale) :]
        norm = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
        factor = torch.addcmul(norm.new_full((1,), eps), norm, norm, value=1 / head_dim).rsqrt_()
        u.mul_(factor).mul_(scale).add_(shift)
    return y.to(x.dtype)
