"""One token of all projections of a layer in one launch: `input_features` at T = 1, and the past for the next token.

Shapes: B batch, H heads of all projections, R head_dim (even), W convolution width, C convolved channels. A head's position
decides its stages: the first C / R are convolved, the first `rotated` turned, the first `silu` mapped, the last `normed`
normalised. Equations in triton_kernels.py. Bytes: x and y, past twice, and a head's parameters once for BB sequences.
"""

# ruff: noqa: RUF005, SIM102 (Triton has tuples, and no starred expressions; what a constant excludes is not compiled)
# Triton kernels are called with launch options, and with plain numbers for constexprs.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_kernels import _load, _store, _wide

HALF_TILE = 512  # numbers in half a tile, at most: 4 of each of 128 threads


@triton.jit(do_not_specialize=["B"])
def step_kernel(
    p_x, p_past, p_weight, p_bias, p_cos, p_sin, p_scale, p_shift, p_y, B, stride_xb, stride_pb, stride_pt, stride_rb,
    H: tl.constexpr, R: tl.constexpr, W: tl.constexpr, C: tl.constexpr, ROTATED: tl.constexpr, SILU: tl.constexpr,
    NORMED: tl.constexpr, EPS: tl.constexpr, BB: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Grid: H ceil(B / BB) programs. Tiles: the halves of R, [BB, BH] each. p_weight [W, C], p_past [B, W - 1, C],
    p_scale and p_shift [NORMED, R], p_y [B, H, R]."""
    HALF: tl.constexpr = R // 2
    i_h = tl.program_id(0) % H
    o_b = tl.cast(tl.program_id(0) // H, tl.int64) * BB + tl.arange(0, BB)[:, None]
    o_r = tl.arange(0, BH)[None, :]
    o_e = i_h * R + o_r
    m_r = o_r < HALF
    m = (o_b < B) & m_r
    x = _load(p_x + o_b * stride_xb + o_e, m, HALF)
    b_a, b_b = _wide(x)
    if C > 0:
        if i_h < C // R:
            p_window = p_past + o_b * stride_pb + o_e
            window = ()
            for i in tl.static_range(W - 1):
                window = window + (_load(p_window + i * stride_pt, m, HALF),)
            window = window + (x,)
            bias = _wide(_load(p_bias + o_e, m_r, HALF))
            b_a, b_b = bias[0], bias[1]
            for i in tl.static_range(W):  # the oldest first
                w = _wide(_load(p_weight + i * C + o_e, m_r, HALF))
                u = _wide(window[i])
                b_a += w[0] * u[0]
                b_b += w[1] * u[1]
            tl.debug_barrier()  # all of the past is read before any of it is overwritten
            for i in tl.static_range(W - 1):
                _store(p_window + i * stride_pt, window[i + 1], m, HALF)
    if ROTATED > 0:
        if i_h < ROTATED:
            b_c = tl.load(p_cos + o_b * stride_rb + o_r, mask=m, other=0.0)
            b_s = tl.load(p_sin + o_b * stride_rb + o_r, mask=m, other=0.0)
            b_t = b_a * b_c - b_b * b_s
            b_b = b_b * b_c + b_a * b_s
            b_a = b_t
    if SILU > 0:
        if i_h < SILU:
            b_a = b_a / (1.0 + tl.exp(-b_a))
            b_b = b_b / (1.0 + tl.exp(-b_b))
            b_g = tl.rsqrt(tl.maximum(tl.sum(b_a * b_a + b_b * b_b, axis=1), 1e-12))[:, None]
            b_a *= b_g
            b_b *= b_g
    if NORMED > 0:
        if i_h >= H - NORMED:
            o_n = o_e - (H - NORMED) * R
            scale = _wide(_load(p_scale + o_n, m_r, HALF))
            shift = _wide(_load(p_shift + o_n, m_r, HALF))
            b_g = tl.rsqrt(tl.sum(b_a * b_a + b_b * b_b, axis=1) / R + EPS)[:, None]
            b_a = b_a * b_g * scale[0] + shift[0]
            b_b = b_b * b_g * scale[1] + shift[1]
    _store(p_y + o_b * (H * R) + o_e, (b_a, b_b), m, HALF)


def step(
    x: Tensor, head_dim: int, weight: Tensor | None, bias: Tensor | None, past: Tensor | None, cos: Tensor | None,
    sin: Tensor | None, rotated: int, silu: int, scale: Tensor | None, shift: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    """Returns y [B, H, R], contiguous. Arguments as in plain.py, None for tensors that are not there."""
    (B, E), R = x.shape, head_dim
    y = torch.empty(B, E // R, R, dtype=x.dtype, device=x.device)
    x = x if x.stride(-1) == 1 else x.contiguous()
    window = past if past is None or past.stride(-1) == 1 else past.contiguous()
    BH = max(16, triton.next_power_of_2(R // 2))
    BB = min(triton.next_power_of_2(B), max(1, HALF_TILE // BH))
    cos, sin = (None if t is None else t.float() for t in (cos, sin))
    tables = (None if t is None else t.contiguous() for t in (weight, bias, cos, sin, scale, shift))
    W, C = (0, 0) if weight is None else weight.shape
    with torch.cuda.device_of(x):
        step_kernel[(E // R * triton.cdiv(B, BB),)](
            x, window, *tables, y, B, x.stride(0), *((0, 0) if window is None else window.stride()[:2]),
            R // 2 if cos is not None and cos.ndim == 4 and cos.shape[0] > 1 else 0,  # angles that differ by row
            H=E // R, R=R, W=W, C=C, ROTATED=rotated, SILU=silu, NORMED=0 if scale is None else scale.shape[0],
            EPS=eps, BB=BB, BH=BH, num_warps=max(1, min(4, BB * BH // 64)),
        )  # fmt: skip
    if past is not None and window is not None and window is not past:
        past.copy_(window)
    return y
