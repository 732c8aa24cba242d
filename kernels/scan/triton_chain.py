"""The states between the segments of time: an associative scan over what each segment alone would leave.

Shapes: B batch, H state heads, S segments, M basis functions, P channels of a state row.
"""

import triton
import triton.language as tl


@triton.jit
def compose(a_re, a_im, x_re, x_im, b_re, b_im, y_re, y_im):
    """Two segments in a row, X -> a X + x and then X -> b X + y, as one."""
    return (
        b_re * a_re - b_im * a_im,
        b_re * a_im + b_im * a_re,
        b_re * x_re - b_im * x_im + y_re,
        b_re * x_im + b_im * x_re + y_im,
    )


@triton.jit
def power(b_re, b_im, n, REVERSE: tl.constexpr):
    """Lambda^n in fp32, through fp64; its conjugate for costates."""
    b_x = tl.exp(b_re * n)
    b_y = b_x * tl.sin(b_im * n)
    return (b_x * tl.cos(b_im * n)).to(tl.float32), (-b_y if REVERSE else b_y).to(tl.float32)


@triton.jit(do_not_specialize=["S", "H", "P", "length", "last"])
def chain_kernel(
    p_local,
    p_start,
    p_theta,
    p_out,
    S,
    H,
    P,
    length,
    last,
    M: tl.constexpr,
    BS: tl.constexpr,
    BE: tl.constexpr,
    HAS_START: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """States before every segment: X_0 = start, X_(s+1) = Lambda^length X_s + local_s.

    REVERSE: costates after every segment, X_(S-1) = start and X_(s-1) = conj(Lambda)^n X_s + local_s, n = length but for
    the last segment, which has `last` tokens.
    Grid: B H ceil(M P / BE) programs; each takes BE numbers of the state through time, BS segments at once: log2(BS)
    steps instead of BS. Tiles: powers and states [BS, BE], complex. Bytes per segment: its state read once, written once.
    p_local, p_out [B, H, S, M, P, 2]; p_start [B, H, M, P, 2]; p_theta [H, M, 2].
    """
    NE = tl.cdiv(M * P, BE)
    i_bh = tl.cast(tl.program_id(0) // NE, tl.int64)
    o_e = tl.program_id(0) % NE * BE + tl.arange(0, BE)
    m_e = o_e < M * P
    o_2 = tl.arange(0, 2)
    p_th = p_theta + (i_bh % H * M + o_e // P) * 2
    b_re = tl.load(p_th, mask=m_e, other=0.0).to(tl.float64)
    b_im = tl.load(p_th + 1, mask=m_e, other=0.0).to(tl.float64)
    b_fr, b_fi = power(b_re, b_im, length, REVERSE)
    if REVERSE:
        b_lr, b_li = power(b_re, b_im, last, REVERSE)

    o_x = 2 * o_e[:, None] + o_2[None, :]
    b_x = tl.zeros([BE, 2], dtype=tl.float32)
    if HAS_START:
        b_x = tl.load(p_start + i_bh * M * P * 2 + o_x, mask=m_e[:, None], other=0.0)
    p_local += i_bh * S * M * P * 2
    p_out += i_bh * S * M * P * 2
    tl.store(p_out + (tl.cast(S - 1, tl.int64) if REVERSE else 0) * M * P * 2 + o_x, b_x, mask=m_e[:, None])
    b_xr, b_xi = tl.split(b_x)
    for i_0 in range(0, S - 1, BS):
        o_s = i_0 + tl.arange(0, BS)
        i_s = (S - 1 - o_s if REVERSE else o_s).to(tl.int64)
        m_x = (o_s < S - 1)[:, None, None] & m_e[None, :, None]
        o_u = i_s[:, None, None] * M * P * 2 + o_x[None, :, :]
        b_ur, b_ui = tl.split(tl.load(p_local + o_u, mask=m_x, other=0.0))
        b_pr = tl.broadcast_to(b_fr[None, :], [BS, BE])
        b_pi = tl.broadcast_to(b_fi[None, :], [BS, BE])
        if REVERSE:
            b_pr = tl.where((o_s == 0)[:, None], b_lr[None, :], b_pr)
            b_pi = tl.where((o_s == 0)[:, None], b_li[None, :], b_pi)
        b_pr, b_pi, b_ur, b_ui = tl.associative_scan((b_pr, b_pi, b_ur, b_ui), 0, compose)
        b_ur += b_pr * b_xr[None, :] - b_pi * b_xi[None, :]
        b_ui += b_pr * b_xi[None, :] + b_pi * b_xr[None, :]
        o_y = o_u - M * P * 2 if REVERSE else o_u + M * P * 2
        tl.store(p_out + o_y, tl.join(b_ur, b_ui), mask=m_x)
        b_xr = tl.sum(tl.where((o_s == i_0 + BS - 1)[:, None], b_ur, 0.0), axis=0)
        b_xi = tl.sum(tl.where((o_s == i_0 + BS - 1)[:, None], b_ui, 0.0), axis=0)
