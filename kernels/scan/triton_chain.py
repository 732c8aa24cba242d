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


@triton.jit(do_not_specialize=["S", "H", "P", "T", "length"])
def chain_kernel(
    p_local,
    p_start,
    p_powers,
    p_out,
    p_n,
    S,
    H,
    P,
    T,
    length,
    M: tl.constexpr,
    BS: tl.constexpr,
    BE: tl.constexpr,
    HAS_START: tl.constexpr,
    REVERSE: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """States before every segment: X_0 = start, X_(s+1) = Lambda^length X_s + local_s.

    REVERSE: costates after every segment, X_(S-1) = start and X_(s-1) = conj(Lambda)^n X_s + local_s, n = length but for
    the last segment, which has `last` tokens.
    DOCUMENTS: p_n [B, T] holds numbers of documents; a segment in which one ends passes nothing on from before it.
    Grid: B H ceil(M P / BE) programs; each takes BE numbers of the state through time, BS segments at once: log2(BS)
    steps instead of BS. Tiles: powers and states [BS, BE], complex. Bytes per segment: its state read once, written once.
    p_local, p_out [B, H, S, M, P, 2]; p_start [B, H, M, P, 2]; p_powers [2, H, M, 2], from
    `tables_kernel`: Lambda^length and Lambda^last. Computed here, every thread would do so for all the numbers that it holds.
    """
    NE = tl.cdiv(M * P, BE)
    i_bh = tl.cast(tl.program_id(0) // NE, tl.int64)
    o_e = tl.program_id(0) % NE * BE + tl.arange(0, BE)
    m_e = o_e < M * P
    p_f = p_powers + (i_bh % H * M + o_e // P) * 2
    b_fr = tl.load(p_f, mask=m_e, other=0.0)
    b_fi = tl.load(p_f + 1, mask=m_e, other=0.0)
    if REVERSE:
        b_fi = -b_fi
        b_lr = tl.load(p_f + H * M * 2, mask=m_e, other=0.0)
        b_li = -tl.load(p_f + H * M * 2 + 1, mask=m_e, other=0.0)

    b_xr = tl.zeros([BE], dtype=tl.float32)
    b_xi = tl.zeros([BE], dtype=tl.float32)
    if HAS_START:
        p_x = p_start + i_bh * M * P * 2 + 2 * o_e
        b_xr = tl.load(p_x, mask=m_e, other=0.0)
        b_xi = tl.load(p_x + 1, mask=m_e, other=0.0)
    p_u = p_local + i_bh * S * M * P * 2 + 2 * o_e[None, :]
    p_y = p_out + i_bh * S * M * P * 2 + 2 * o_e[None, :]
    p_first = p_out + (i_bh * S + (S - 1 if REVERSE else 0)) * M * P * 2 + 2 * o_e
    tl.store(p_first, b_xr, mask=m_e)
    tl.store(p_first + 1, b_xi, mask=m_e)
    for i_0 in range(0, S - 1, BS):
        o_s = i_0 + tl.arange(0, BS)
        i_s = (S - 1 - o_s if REVERSE else o_s).to(tl.int64)
        m_x = (o_s < S - 1)[:, None] & m_e[None, :]
        o_u = i_s[:, None] * M * P * 2
        b_ur = tl.load(p_u + o_u, mask=m_x, other=0.0)
        b_ui = tl.load(p_u + o_u + 1, mask=m_x, other=0.0)
        b_pr = tl.broadcast_to(b_fr[None, :], [BS, BE])
        b_pi = tl.broadcast_to(b_fi[None, :], [BS, BE])
        if REVERSE:
            b_pr = tl.where((o_s == 0)[:, None], b_lr[None, :], b_pr)
            b_pi = tl.where((o_s == 0)[:, None], b_li[None, :], b_pi)
        if DOCUMENTS:
            m_s = o_s < S - 1
            p_t = p_n + i_bh // H * T + i_s * length
            n_before = tl.load(p_t - 1, mask=m_s & (i_s > 0), other=0)
            n_last = tl.load(p_n + i_bh // H * T + tl.minimum((i_s + 1) * length, T) - 1, mask=m_s, other=0)
            b_pr = tl.where((n_before == n_last)[:, None], b_pr, 0.0)
            b_pi = tl.where((n_before == n_last)[:, None], b_pi, 0.0)
        b_pr, b_pi, b_ur, b_ui = tl.associative_scan((b_pr, b_pi, b_ur, b_ui), 0, compose)
        b_ur += b_pr * b_xr[None, :] - b_pi * b_xi[None, :]
        b_ui += b_pr * b_xi[None, :] + b_pi * b_xr[None, :]
        o_y = o_u - M * P * 2 if REVERSE else o_u + M * P * 2
        tl.store(p_y + o_y, b_ur, mask=m_x)
        tl.store(p_y + o_y + 1, b_ui, mask=m_x)
        b_xr = tl.sum(tl.where((o_s == i_0 + BS - 1)[:, None], b_ur, 0.0), axis=0)
        b_xi = tl.sum(tl.where((o_s == i_0 + BS - 1)[:, None], b_ui, 0.0), axis=0)
