"""One token at a time: O(M (R + D) + M^2) work per head, and no position anywhere (the recurrence is time-invariant).

Shapes: B batch, H state heads, Hq = G H query heads, R key features, D value width, P = R + D channels,
M basis functions. `scan_step` and `linear_one_step` are plain PyTorch, differentiable: real arithmetic on pairs, so that
inductor fuses it. The ops further down are the fused kernels of triton_step.py, for CUDA and without gradients.
"""

import torch
from torch import Tensor

from .namespace import op_name
from .tables import powers


def scan_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    dtype, R, M = log_decay.dtype, q.shape[-1], log_decay.shape[1]
    X_re, X_im = _advance(torch.cat((k.to(dtype), v.to(dtype)), dim=-1), log_decay, state)
    q = q.to(dtype).unflatten(1, (k.shape[1], -1))  # [B, H, G, R]
    a = torch.cat((q @ X_re[..., :R].mT, q @ X_im[..., :R].mT), dim=-1)  # [B, H, G, 2M]
    b = a @ mixing.mT
    o = b[..., :M] @ X_re[..., R:] - b[..., M:] @ X_im[..., R:]
    return o.flatten(1, 2).to(v.dtype), torch.stack((X_re, X_im), dim=-1)


def linear_one_step(z: Tensor, log_decay: Tensor, readout: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    M = log_decay.shape[1]
    X_re, X_im = _advance(z.to(log_decay.dtype), log_decay, state)
    y = (readout[:, :M, None] * X_re - readout[:, M:, None] * X_im).sum(-2)
    return y.to(z.dtype), torch.stack((X_re, X_im), dim=-1)


def _advance(z: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Lambda X + z^T; z [B, H, P], state [B, H, M, P, 2]."""
    one = torch.ones(1, device=z.device)  # made on the device: a copy from the host would break CUDA-graph capture
    decay_re, decay_im = powers(log_decay, one)[:, 0, :, None, :].unbind(-1)  # [H, M, 1]
    X_re, X_im = state.unbind(-1)
    return decay_re * X_re - decay_im * X_im + z[:, :, None, :], decay_re * X_im + decay_im * X_re


# The fused kernels as ops: torch.compile sees one node, and triton is imported where they run. The names that end in an
# underscore overwrite the state.


@torch.library.custom_op(
    op_name(__name__, "scan_step"),
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor mixing, Tensor state) -> (Tensor, Tensor)",
)
def fused_scan_step(q, k, v, log_decay, mixing, state):
    from . import triton_step

    return triton_step.scan_step(q, k, v, log_decay, mixing, state)


@torch.library.custom_op(
    op_name(__name__, "scan_step_"),
    mutates_args=("state",),
    schema="(Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor mixing, Tensor(a!) state) -> Tensor",
)
def fused_scan_step_(q, k, v, log_decay, mixing, state):
    from . import triton_step

    return triton_step.scan_step(q, k, v, log_decay, mixing, state, inplace=True)[0]


@torch.library.custom_op(
    op_name(__name__, "linear_step"),
    mutates_args=(),
    schema="(Tensor z, Tensor log_decay, Tensor readout, Tensor state) -> (Tensor, Tensor)",
)
def fused_linear_step(z, log_decay, readout, state):
    from . import triton_step

    return triton_step.linear_one_step(z, log_decay, readout, state)


@torch.library.custom_op(
    op_name(__name__, "linear_step_"),
    mutates_args=("state",),
    schema="(Tensor z, Tensor log_decay, Tensor readout, Tensor(a!) state) -> Tensor",
)
def fused_linear_step_(z, log_decay, readout, state):
    from . import triton_step

    return triton_step.linear_one_step(z, log_decay, readout, state, inplace=True)[0]


@fused_scan_step_.register_fake
def _(q, k, v, log_decay, mixing, state):
    return v.new_empty(*q.shape[:2], v.shape[2])


@fused_scan_step.register_fake
def _(q, k, v, log_decay, mixing, state):
    return v.new_empty(*q.shape[:2], v.shape[2]), state.new_empty(state.shape)


@fused_linear_step_.register_fake
def _(z, log_decay, readout, state):
    return z.new_empty(z.shape)


@fused_linear_step.register_fake
def _(z, log_decay, readout, state):
    return z.new_empty(z.shape), state.new_empty(state.shape)
