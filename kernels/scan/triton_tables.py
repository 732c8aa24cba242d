"""What the chunkwise passes read beside tokens and states, and the sums of what their programs leave: a launch each.

Notation as in triton_passes.py.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["H", "length", "last"])
def tables_kernel(
    p_theta,
    p_t,
    p_tc,
    p_tt,
    p_e,
    p_step,
    p_powers,
    p_w,
    p_rows,
    p_scores,
    H,
    length,
    last,
    M: tl.constexpr,
    L: tl.constexpr,
    BL: tl.constexpr,
    SEGMENTS: tl.constexpr,
    LINEAR: tl.constexpr,
):
    """T_j = Lambda^(r-j) three ways, E_i = Lambda^(i-r), Lambda^(r+1) and Lambda^L from theta [H, M, 2], r = L // 2.

    SEGMENTS: Lambda^length and Lambda^last, of a segment's tokens and the last one's, to p_powers [2, H, M, 2].
    LINEAR: for the readout w [H, 2M] at p_w, rows E_i w to p_rows [H, L, 2M], and D_ij = Re(w^T Lambda^(i-j)) for j <= i, 0
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

    if LINEAR:
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
        if SEGMENTS:
            b_j = tl.where(o_2 == 0, length, last).to(tl.float64)
            b_s = tl.exp(b_re * b_j)
            p_s = p_powers + ((o_2 * H + i_h) * M + o_m) * 2
            tl.store(p_s, (b_s * tl.cos(b_im * b_j)).to(tl.float32))
            tl.store(p_s + 1, (b_s * tl.sin(b_im * b_j)).to(tl.float32))


@triton.jit
def add_rows(b_sum, p_x, o_n, rows, n, i_h, H, N: tl.constexpr, BR: tl.constexpr):
    """b_sum + what p_x [rows / n, H, n, N] holds of head i_h, columns o_n, row block after row block."""
    for i_r in range(0, rows, BR):
        o_r = (i_r + tl.arange(0, BR)).to(tl.int64)
        o_x = ((o_r // n * H + i_h) * n + o_r % n) * N
        b_sum += tl.load(p_x + o_x[:, None] + o_n[None, :], mask=(o_r < rows)[:, None], other=0.0)
    return b_sum


@triton.jit(do_not_specialize=["B", "H", "n_x", "n_y"])
def sum_kernel(
    p_x, p_y, p_out, B, H, n_x, n_y, M: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, PAIRS: tl.constexpr
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
