"""Small kernels around the chunkwise passes: tables of powers, states between segments of time, sums of gradients.

Notation as in triton_passes.py.
"""
# Triton compiles these functions: their types are not what Python sees.
# pyright: reportAssignmentType=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["H", "length", "last"])
def tables_kernel(
    p_theta, p_t, p_tc, p_tt, p_e, p_step, p_powers, p_w, p_rows, p_scores, H, length, last,
    M: tl.constexpr, L: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """T_j = Lambda^(r-j) three ways, E_i = Lambda^(i-r), Lambda^(r+1) and Lambda^L from theta [H, M, 2], r = L // 2.

    Lambda^length and Lambda^last, for the tokens of a segment and of the last segment, go to p_powers [2, H, M, 2], or None.
    For the readout w [H, 2M] at p_w, or None, rows E_i w to p_rows [H, L, 2M], and D_ij = Re(w^T Lambda^(i-j)) for j <= i, 0
    above the diagonal, to p_scores [H, L, L]. A program has BL lags l = i - j; their numbers lie at columns (i - l) mod L, so
    that all lags together fill D, zeros included.
    Grid: H L / BL programs. Through fp64, as in `powers`: the phase reaches 8,192 radians. Sine and cosine of E serve T.
    """
    NL: tl.constexpr = L // BL
    i_h = tl.program_id(0) // NL
    i_l = tl.program_id(0) % NL
    o_l = i_l * BL + tl.arange(0, BL)[:, None]
    o_m = tl.arange(0, M)[None, :]
    b_re = tl.load(p_theta + (i_h * M + o_m) * 2).to(tl.float64)
    b_im = tl.load(p_theta + (i_h * M + o_m) * 2 + 1).to(tl.float64)
    b_n = (o_l - L // 2).to(tl.float64)
    b_cos = tl.cos(b_im * b_n)
    b_sin = tl.sin(b_im * b_n)

    o_x = (i_h * L + o_l) * (2 * M) + o_m
    b_e = tl.exp(b_re * b_n)
    b_er = (b_e * b_cos).to(tl.float32)
    b_ei = (b_e * b_sin).to(tl.float32)
    tl.store(p_e + o_x, b_er)
    tl.store(p_e + o_x + M, b_ei)
    b_t = tl.exp(-b_re * b_n)
    # Rounded once to fp32, as the tables of the other backends, and from there.
    b_tr = (b_t * b_cos).to(tl.float32).to(p_t.dtype.element_ty)
    b_ti = (-b_t * b_sin).to(tl.float32).to(p_t.dtype.element_ty)
    b_tc = (b_t * b_sin).to(tl.float32).to(p_t.dtype.element_ty)
    tl.store(p_t + o_x, b_tr)
    tl.store(p_t + o_x + M, b_ti)
    tl.store(p_tc + o_x, b_tr)
    tl.store(p_tc + o_x + M, b_tc)
    o_y = (i_h * 2 * M + o_m) * L + o_l
    tl.store(p_tt + o_y, b_tr)
    tl.store(p_tt + o_y + M * L, b_tc)

    if p_w is not None:
        b_wr = tl.load(p_w + i_h * (2 * M) + o_m)
        b_wi = tl.load(p_w + i_h * (2 * M) + M + o_m)
        tl.store(p_rows + o_x, (b_er * b_wr - b_ei * b_wi).to(p_rows.dtype.element_ty))
        tl.store(p_rows + o_x + M, (b_er * b_wi + b_ei * b_wr).to(p_rows.dtype.element_ty))
        b_p = tl.exp(b_re * o_l.to(tl.float64))
        b_pr = (b_p * tl.cos(b_im * o_l.to(tl.float64))).to(tl.float32)
        b_pi = (b_p * tl.sin(b_im * o_l.to(tl.float64))).to(tl.float32)
        b_d = tl.sum(b_wr * b_pr - b_wi * b_pi, axis=1)[:, None]
        o_i = tl.arange(0, L)[None, :]
        b_d = tl.where(o_i >= o_l, b_d, 0.0).to(p_scores.dtype.element_ty)
        tl.store(p_scores + (i_h * L + o_i) * L + (o_i - o_l + L) % L, b_d)

    if i_l == 0:
        o_2 = tl.arange(0, 2)[:, None]
        b_j = tl.where(o_2 == 0, L // 2 + 1, L).to(tl.float64)
        b_s = tl.exp(b_re * b_j)
        p_s = p_step + (i_h * 2 + o_2) * (2 * M) + o_m
        tl.store(p_s, (b_s * tl.cos(b_im * b_j)).to(tl.float32))
        tl.store(p_s + M, (b_s * tl.sin(b_im * b_j)).to(tl.float32))
        if p_powers is not None:
            b_j = tl.where(o_2 == 0, length, last).to(tl.float64)
            b_s = tl.exp(b_re * b_j)
            p_s = p_powers + ((o_2 * H + i_h) * M + o_m) * 2
            tl.store(p_s, (b_s * tl.cos(b_im * b_j)).to(tl.float32))
            tl.store(p_s + 1, (b_s * tl.sin(b_im * b_j)).to(tl.float32))


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
    p_local, p_start, p_powers, p_out, p_n, S, H, P, T, length,
    M: tl.constexpr, BS: tl.constexpr, BE: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """States before every segment: X_0 = start, X_(s+1) = Lambda^length X_s + local_s.

    REVERSE: costates after every segment, X_(S-1) = start and X_(s-1) = conj(Lambda)^n X_s + local_s, n = length but for
    the last segment, which has `last` tokens.
    p_start None: zeros. p_n [B, T], numbers of documents: a segment in which one ends passes nothing on from before it.
    Grid: B H ceil(M P / BE) programs; each takes BE numbers of the state through time, BS segments at once: log2(BS)
    steps instead of BS. Tiles: powers and states [BS, BE], complex. Bytes per segment: its state read once, written once.
    p_local, p_out [B, H, S, M, P, 2]; p_start [B, H, M, P, 2]; p_powers [2, H, M, 2], from
    `tables_kernel`: Lambda^length and Lambda^last. Here every thread would compute them for all the numbers that it holds.
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
    if p_start is not None:
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
        if p_n is not None:
            m_s = o_s < S - 1
            p_t = p_n + i_bh // H * T + i_s * length
            n_before = tl.load(p_t - 1, mask=m_s & (i_s > 0), other=0)
            n_last = tl.load(
                p_n + i_bh // H * T + tl.minimum((i_s + 1) * length, T) - 1, mask=m_s, other=0
            )
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


@triton.jit
def add_rows(b_sum, p_x, o_n, rows, n, i_h, H, N: tl.constexpr, BR: tl.constexpr):
    """b_sum plus the rows of p_x [rows / n, H, n, N] for head i_h, columns o_n, row block after row block."""
    for i_r in range(0, rows, BR):
        o_r = (i_r + tl.arange(0, BR)).to(tl.int64)
        o_x = ((o_r // n * H + i_h) * n + o_r % n) * N
        b_sum += tl.load(p_x + o_x[:, None] + o_n[None, :], mask=(o_r < rows)[:, None], other=0.0)
    return b_sum


@triton.jit(do_not_specialize=["B", "H", "n_x", "n_y"])
def sum_kernel(
    p_x,
    p_y,
    p_out,
    B,
    H,
    n_x,
    n_y,
    M: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Conjugates of the sums of p_x [B, H, n_x, 2M] and p_y [B, H, n_y, 2M] over all but heads; n_y may be 0.

    Numbers come as (Re | Im) and leave so, [H, 2M], or as PAIRS, [H, M, 2]. Grid: H 2M / BN programs, in a fixed order.
    """
    NN: tl.constexpr = 2 * M // BN
    i_h = tl.program_id(0) // NN
    o_n = tl.program_id(0) % NN * BN + tl.arange(0, BN)
    b_sum = tl.zeros([BR, BN], dtype=tl.float32)
    b_sum = add_rows(b_sum, p_x, o_n, B * n_x, n_x, i_h, H, 2 * M, BR)
    b_sum = add_rows(b_sum, p_y, o_n, B * n_y, n_y, i_h, H, 2 * M, BR)
    b_out = tl.sum(b_sum, axis=0) * tl.where(o_n < M, 1.0, -1.0)
    o_y = o_n % M * 2 + o_n // M if PAIRS else o_n
    tl.store(p_out + i_h * (2 * M) + o_y, b_out)
