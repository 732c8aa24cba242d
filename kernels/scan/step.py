"""One token at a time: O(M (R + D) + M^2) work per head, and no position anywhere (the recurrence is time-invariant).

Shapes: B batch, T time, H state heads, Hq = G H query heads, R key features, D value width, P = R + D channels,
M basis functions. decay: Lambda, [H, M, 2]. mixing: W, [H, 2M, 2M], or its upper half [H, M, 2M] (see `interdomain_step`).

Plain PyTorch, differentiable: real arithmetic on pairs, which inductor fuses. The fused kernels are in triton_step.py.
"""

import torch
from torch import Tensor

from .tables import powers


def decay_factor(log_decay: Tensor) -> Tensor:
    """Lambda = exp(log_decay) per token, for `interdomain_step` and `linear_step`.

    Args:
        log_decay: theta, [H, M, 2].

    Returns:
        Lambda, [H, M, 2].
    """
    one = torch.ones(1, device=log_decay.device)  # made there: a copy from the host would break CUDA-graph capture
    return powers(log_decay, one)[:, 0]


def scan_step(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, mixing: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (o [B, Hq, D] in v's dtype, the new state [B, H, M, P, 2])."""
    dtype, R, M = decay.dtype, q.shape[-1], decay.shape[1]
    X_re, X_im = _advanced(torch.cat((k.to(dtype), v.to(dtype)), dim=-1), decay, state)
    q = q.to(dtype).unflatten(1, (k.shape[1], -1))  # [B, H, G, R]
    a_re, a_im = q @ X_re[..., :R].mT, q @ X_im[..., :R].mT  # [B, H, G, M]
    b = torch.cat((a_re, a_im), dim=-1) @ mixing.mT
    if mixing.shape[1] == M:
        b = torch.cat((b, torch.cat((a_im, -a_re), dim=-1) @ mixing.mT), dim=-1)
    o = b[..., :M] @ X_re[..., R:] - b[..., M:] @ X_im[..., R:]
    return o.flatten(1, 2).to(v.dtype), torch.stack((X_re, X_im), dim=-1)


def linear_one_step(z: Tensor, decay: Tensor, readout: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (y [B, H, P] in z's dtype, the new state [B, H, M, P, 2])."""
    M = decay.shape[1]
    X_re, X_im = _advanced(z.to(decay.dtype), decay, state)
    y = (readout[:, :M, None] * X_re - readout[:, M:, None] * X_im).sum(-2)
    return y.to(z.dtype), torch.stack((X_re, X_im), dim=-1)


def _advanced(z: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Lambda X + z^T; z [B, H, P], state [B, H, M, P, 2]."""
    decay_re, decay_im = decay[:, :, None].unbind(-1)  # [H, M, 1]
    X_re, X_im = state.unbind(-1)
    return decay_re * X_re - decay_im * X_im + z[:, :, None, :], decay_re * X_im + decay_im * X_re
