"""The input features of one token, for all projections of a layer in one launch.

It is `input_features` at T = 1, and it also writes the convolution's past for the next token. The
equations and the names of variables are those of triton_kernels.py.

Shapes: B batch, H heads of all projections together, R head_dim (even), W convolution width, C
convolved channels.

The position of a head decides which stages it has. The first C / R heads are convolved, the first
`rotated` heads are rotated (RoPE), the first `silu` heads have SiLU and the l2 norm, and the last
heads are normalised (RMSNorm, as many as `scale` has rows).

Bytes: x and y once, past twice (read and written), and a head's parameters once per BB sequences.
"""

# ruff: noqa: RUF005, SIM102 (Triton has tuples, and no starred expressions; code that a constant
# excludes is not compiled)
# Triton kernels are called with launch options, and with plain numbers for constexprs.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_kernels import _load, _store, _to_fp32

# The most elements of a tile of `step_kernel`, which holds half a head for BB sequences: 4 in each
# of 128 threads.
MAX_TILE = 512


@triton.jit(do_not_specialize=["B"])
def step_kernel(
    p_x, p_past, p_weight, p_bias, p_cos, p_sin, p_scale, p_shift, p_y, B, stride_xb, stride_pb, stride_pt, stride_rb,
    H: tl.constexpr, R: tl.constexpr, W: tl.constexpr, C: tl.constexpr, ROTATED: tl.constexpr, SILU: tl.constexpr,
    NORMED: tl.constexpr, EPS: tl.constexpr, BB: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Computes the input features of one token, one head and BB sequences.

    A head's place decides which stages it has: the first C / R heads are convolved, the first
    ROTATED are rotated, the first SILU have SiLU and the l2 norm, the last NORMED the RMSNorm.

    Grid: H ceil(B / BB) programs. Tiles: the two halves of R, [BB, BH] each.

    Args:
        p_x: The projections' outputs one after the other, [B, H R], the last dimension dense.
        p_past: The W - 1 inputs of the convolved channels before x, [B, W - 1, C], the oldest
            first, the last dimension dense; overwritten with the last W - 1 inputs, x included.
            None without a convolution.
        p_weight: The convolution's weight, transposed: [W, C], the oldest lag first; or None.
        p_bias: The convolution's bias, [C], or None.
        p_cos: The rotary cosines, [R/2] or [B, R/2] fp32, or None.
        p_sin: The rotary sines, likewise.
        p_scale: The RMSNorm's scale, [NORMED, R], or None.
        p_shift: The RMSNorm's shift, [NORMED, R], or None.
        p_y: The result, [B, H, R].
        B: Sequences.
        stride_xb: Stride of x over sequences.
        stride_pb: Stride of past over sequences.
        stride_pt: Stride of past over tokens.
        stride_rb: Stride of the rotary tables over sequences; 0 if all sequences share them.
        H: Heads of all projections.
        R: Channels of a head.
        W: Width of the convolution; 0 for none.
        C: Convolved channels, those of the first C / R heads.
        ROTATED: Number of the first heads that RoPE rotates.
        SILU: Number of the first heads with SiLU and the l2 norm.
        NORMED: Number of the last heads with the RMSNorm.
        EPS: The eps of the RMSNorm.
        BB: Sequences of a program.
        BH: Width of a tile, a power of two, at least R/2.
    """
    HALF: tl.constexpr = R // 2
    # This program's head, sequences and channels.
    i_h = tl.program_id(0) % H
    o_b = tl.cast(tl.program_id(0) // H, tl.int64) * BB + tl.arange(0, BB)[:, None]
    o_r = tl.arange(0, BH)[None, :]
    o_e = i_h * R + o_r
    m_r = o_r < HALF
    m = (o_b < B) & m_r
    x = _load(p_x + o_b * stride_xb + o_e, m, HALF)
    # The first half of the channels is a, the second b.
    b_a, b_b = _to_fp32(x)
    # Convolution: the past and x are the window. Its last W - 1 inputs are the past of the next
    # token.
    if C > 0:
        if i_h < C // R:
            p_window = p_past + o_b * stride_pb + o_e
            window = ()
            for i in tl.static_range(W - 1):
                window = window + (_load(p_window + i * stride_pt, m, HALF),)
            window = window + (x,)
            bias = _to_fp32(_load(p_bias + o_e, m_r, HALF))
            b_a, b_b = bias[0], bias[1]
            # From the oldest input to the newest, as in the other forms: the order of a sum decides
            # its rounding.
            for i in tl.static_range(W):
                w = _to_fp32(_load(p_weight + i * C + o_e, m_r, HALF))
                u = _to_fp32(window[i])
                b_a += w[0] * u[0]
                b_b += w[1] * u[1]
            # All threads have read the past before any thread overwrites it.
            tl.debug_barrier()
            for i in tl.static_range(W - 1):
                _store(p_window + i * stride_pt, window[i + 1], m, HALF)
    # RoPE rotates channel i with channel i + R/2.
    if ROTATED > 0:
        if i_h < ROTATED:
            b_c = tl.load(p_cos + o_b * stride_rb + o_r, mask=m, other=0.0)
            b_s = tl.load(p_sin + o_b * stride_rb + o_r, mask=m, other=0.0)
            b_t = b_a * b_c - b_b * b_s
            b_b = b_b * b_c + b_a * b_s
            b_a = b_t
    # SiLU, then the l2 norm: divided by max(|s|, 1e-6), as s^2 is bounded by 1e-12.
    if SILU > 0:
        if i_h < SILU:
            b_a = b_a / (1.0 + tl.exp(-b_a))
            b_b = b_b / (1.0 + tl.exp(-b_b))
            b_g = tl.rsqrt(tl.maximum(tl.sum(b_a * b_a + b_b * b_b, axis=1), 1e-12))[:, None]
            b_a *= b_g
            b_b *= b_g
    # RMSNorm with a scale and a bias of each head's own.
    if NORMED > 0:
        if i_h >= H - NORMED:
            o_n = o_e - (H - NORMED) * R
            scale = _to_fp32(_load(p_scale + o_n, m_r, HALF))
            shift = _to_fp32(_load(p_shift + o_n, m_r, HALF))
            b_g = tl.rsqrt(tl.sum(b_a * b_a + b_b * b_b, axis=1) / R + EPS)[:, None]
            b_a = b_a * b_g * scale[0] + shift[0]
            b_b = b_b * b_g * scale[1] + shift[1]
    _store(p_y + o_b * (H * R) + o_e, (b_a, b_b), m, HALF)


def step(
    x: Tensor, head_dim: int, weight: Tensor | None, bias: Tensor | None, past: Tensor | None, cos: Tensor | None,
    sin: Tensor | None, rotated: int, silu: int, scale: Tensor | None, shift: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    """Applies the input features to one token.

    Args:
        x: The projections' outputs one after the other, [B, E] with E = H R.
        head_dim: R, the channels of a head.
        weight: The weight of the convolution of the first C channels, transposed: [W, C], the
            oldest lag first, or None.
        bias: The convolution's bias, [C], or None.
        past: The W - 1 inputs of these channels before x, [B, W - 1, C], overwritten with the last
            W - 1; or None.
        cos: The rotary cosines, [1, 1, R/2] or [B, 1, 1, R/2], or None.
        sin: The rotary sines, likewise.
        rotated: Number of the first heads that RoPE rotates.
        silu: Number of the first heads with SiLU and the l2 norm.
        scale: The RMSNorm's scale, [N, R], of the last N heads, or None.
        shift: The RMSNorm's shift, likewise.
        eps: The eps of the RMSNorm.

    Returns:
        y, [B, H, R] in x's dtype, contiguous.
    """
    B, E = x.shape
    R = head_dim
    H = E // R
    y = torch.empty(B, H, R, dtype=x.dtype, device=x.device)

    # The kernel reads rows whose last dimension is dense. `window` is past, or a copy of it: the
    # kernel overwrites the copy, which is then written back below.
    x = x if x.stride(-1) == 1 else x.contiguous()
    window = past if past is None or past.stride(-1) == 1 else past.contiguous()
    past_strides = (0, 0)
    if window is not None:
        past_strides = window.stride()[:2]

    # Each sequence has rotary angles of its own only if the tables have a row for each.
    cos, sin = (None if t is None else t.float() for t in (cos, sin))
    rope_stride = 0
    if cos is not None and cos.ndim == 4 and cos.shape[0] > 1:
        rope_stride = R // 2
    parameters = (
        None if t is None else t.contiguous() for t in (weight, bias, cos, sin, scale, shift)
    )
    W, C = (0, 0) if weight is None else weight.shape
    normed = 0 if scale is None else scale.shape[0]

    # A program computes one head of BB sequences, with a warp for every 64 elements of a tile, at
    # most four.
    BH = max(16, triton.next_power_of_2(R // 2))
    BB = min(triton.next_power_of_2(B), max(1, MAX_TILE // BH))
    with torch.cuda.device_of(x):
        step_kernel[(H * triton.cdiv(B, BB),)](
            x, window, *parameters, y, B, x.stride(0), *past_strides, rope_stride,
            H=H, R=R, W=W, C=C, ROTATED=rotated, SILU=silu, NORMED=normed,
            EPS=eps, BB=BB, BH=BH, num_warps=max(1, min(4, BB * BH // 64)),
        )  # fmt: skip
    if past is not None and window is not None and window is not past:
        past.copy_(window)
    return y
