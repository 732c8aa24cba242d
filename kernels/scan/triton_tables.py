"""Small Triton kernels around the chunkwise passes.

They compute the tables of powers, the states between segments of time, and the sums of the
gradients' parts.

Shapes: B batch, T time, H state heads, P channels of a state, M basis functions, L chunk length, S
segments of time. As in triton_passes.py, r = L // 2, T_j = Lambda^(r-j), E_i = Lambda^(i-r), and
(Re | Im) means that the real parts of M complex numbers come first and the imaginary ones after
them.
"""
# Triton compiles these functions, so that their types differ from those that Python sees.
# pyright: reportAssignmentType=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["H", "length", "last"])
def tables_kernel(
    p_theta, p_t, p_tc, p_tt, p_e, p_step, p_powers, p_w, p_rows, p_scores, H, length, last,
    M: tl.constexpr, L: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Computes the tables of powers of Lambda for the passes, from theta = log Lambda.

    All powers are computed in fp64 and rounded once to fp32, as in `tables.powers`, because the
    phase reaches 8,192 radians. E and T share one sine and one cosine, because
    T_j = 1 / E_j.

    Grid: H L / BL programs.

    Args:
        p_theta: theta per token, [H, M, 2] fp32.
        p_t: Filled with T as (Re | Im), [H, L, 2M] in the operands' dtype.
        p_tc: Filled with conj(T), likewise.
        p_tt: Filled with conj(T) transposed, [H, 2M, L], in the operands' dtype.
        p_e: Filled with E as (Re | Im), [H, L, 2M] fp32.
        p_step: Filled with Lambda^(r+1) and Lambda^L as (Re | Im), [H, 2, 2M] fp32.
        p_powers: Filled with Lambda^length and Lambda^last, [2, H, M, 2] fp32; None for one
            segment.
        p_w: The weights w of the linear readout as (Re | Im), [H, 2M] fp32; None for the query
            readout.
        p_rows: With p_w, filled with E_i w as (Re | Im), [H, L, 2M] in the operands' dtype.
        p_scores: With p_w, filled with D_ij = Re(w^T Lambda^(i-j)) for j <= i and 0 above the
            diagonal, [H, L, L] in the operands' dtype.
        H: State heads.
        length: Tokens of a segment.
        last: Tokens of the last segment.
        M: Basis functions.
        L: Chunk length.
        BL: Positions of a program.
    """
    # This program's head and positions, and theta of the head in fp64.
    NL: tl.constexpr = L // BL
    i_h = tl.program_id(0) // NL
    i_l = tl.program_id(0) % NL
    o_l = i_l * BL + tl.arange(0, BL)[:, None]
    o_m = tl.arange(0, M)[None, :]
    b_re = tl.load(p_theta + (i_h * M + o_m) * 2).to(tl.float64)
    b_im = tl.load(p_theta + (i_h * M + o_m) * 2 + 1).to(tl.float64)
    # At position l, E = Lambda^n with n = l - r, and T = Lambda^(-n) has the opposite phase:
    # |Lambda^n| = exp(Re(theta) n), and the phase is Im(theta) n.
    b_n = (o_l - L // 2).to(tl.float64)
    b_cos = tl.cos(b_im * b_n)
    b_sin = tl.sin(b_im * b_n)

    # E, rounded once to fp32.
    o_x = (i_h * L + o_l) * (2 * M) + o_m
    b_e = tl.exp(b_re * b_n)
    b_er = (b_e * b_cos).to(tl.float32)
    b_ei = (b_e * b_sin).to(tl.float32)
    tl.store(p_e + o_x, b_er)
    tl.store(p_e + o_x + M, b_ei)
    # T is rounded to fp32, as in the tables of the other backends, and then to the operands' dtype.
    b_t = tl.exp(-b_re * b_n)
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

    # The linear readout: rows E w, and scores D. For scores, positions o_l are lags i - j. The
    # scores of lag l at row i are in column i - l. Where that is negative, the program writes the
    # zero of column i - l + L, so that all lags together fill D.
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

    # One program of each head computes the powers that do not depend on the position.
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
    """Composes two affine maps: X -> a X + x, and then X -> b X + y, is X -> b a X + (b x + y).

    A segment of time maps the state before it to the state after it in this way.

    Args:
        a_re: Real part of a, the power of Lambda of the earlier segment.
        a_im: Imaginary part of a.
        x_re: Real part of x, the state that the earlier segment leaves by itself.
        x_im: Imaginary part of x.
        b_re: Real part of b, of the later segment.
        b_im: Imaginary part of b.
        y_re: Real part of y, of the later segment.
        y_im: Imaginary part of y.

    Returns:
        The real and imaginary parts of b a, and then those of b x + y.
    """
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
    """Computes the states before every segment from the states that each segment leaves by itself.

    The state before segment s is X_s: X_0 = start and X_(s+1) = Lambda^length X_s + local_s. With
    REVERSE it computes the gradients of the states after every segment: X_(S-1) = start and X_(s-1)
    = conj(Lambda)^n X_s + local_s, where n is `length`, or for the last segment its number of
    tokens.

    Each program takes BE complex elements of the state through time. An associative scan takes BS
    segments at once, in log2(BS) steps instead of BS.

    Grid: B H ceil(M P / BE) programs. Tiles: powers and states [BS, BE], complex. Bytes per
    segment: its state is read once and written once.

    Args:
        p_local: The state that each segment leaves when it starts from zero, [B, H, S, M, P, 2];
            with REVERSE, the gradient of the state before it when that of the state after it is
            zero.
        p_start: X_0, or X_(S-1) with REVERSE, [B, H, M, P, 2]; None for zeros.
        p_powers: Lambda^length and Lambda^last from `tables_kernel`, [2, H, M, 2]. Computed in this
            kernel, every thread would compute them for each of its elements.
        p_out: Filled with X_0 to X_(S-1), [B, H, S, M, P, 2].
        p_n: The id of each token's document, [B, T] int32, or None. A state passes through a
            segment only if the token before it and its last token share a document.
        S: Segments.
        H: State heads.
        P: Channels of a state.
        T: Tokens of a sequence.
        length: Tokens of a segment; the last one may have fewer.
        M: Basis functions.
        BS: Segments that are scanned at once.
        BE: Elements of the state of a program.
        REVERSE: True to go from the last segment to the first.
    """
    # This program's sequence and head (i_bh), its elements of the state, and their powers of
    # Lambda.
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

    # The first state in the direction of the scan is given. Store it.
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

    # BS segments at a time. Each segment but the last one gives the state of the next. o_s counts
    # in the direction of the scan, i_s are the segments. b_pr and b_pi are the segments' powers of
    # Lambda, b_ur and b_ui the states that they leave by themselves, and b_xr and b_xi the state
    # before the block of BS segments.
    for i_0 in range(0, S - 1, BS):
        o_s = i_0 + tl.arange(0, BS)
        i_s = (S - 1 - o_s if REVERSE else o_s).to(tl.int64)
        m_x = (o_s < S - 1)[:, None] & m_e[None, :]
        o_u = i_s[:, None] * M * P * 2
        b_ur = tl.load(p_u + o_u, mask=m_x, other=0.0)
        b_ui = tl.load(p_u + o_u + 1, mask=m_x, other=0.0)
        # The power of Lambda of each segment: in reverse the first one is the last, shorter
        # segment.
        b_pr = tl.broadcast_to(b_fr[None, :], [BS, BE])
        b_pi = tl.broadcast_to(b_fi[None, :], [BS, BE])
        if REVERSE:
            b_pr = tl.where((o_s == 0)[:, None], b_lr[None, :], b_pr)
            b_pi = tl.where((o_s == 0)[:, None], b_li[None, :], b_pi)
        # A segment passes its state on if the token before it and its last token share a document.
        if p_n is not None:
            m_s = o_s < S - 1
            p_t = p_n + i_bh // H * T + i_s * length
            n_before = tl.load(p_t - 1, mask=m_s & (i_s > 0), other=0)
            n_last = tl.load(
                p_n + i_bh // H * T + tl.minimum((i_s + 1) * length, T) - 1, mask=m_s, other=0
            )
            b_pr = tl.where((n_before == n_last)[:, None], b_pr, 0.0)
            b_pi = tl.where((n_before == n_last)[:, None], b_pi, 0.0)
        # The map of all segments up to each one, applied to the state before the block.
        b_pr, b_pi, b_ur, b_ui = tl.associative_scan((b_pr, b_pi, b_ur, b_ui), 0, compose)
        b_ur += b_pr * b_xr[None, :] - b_pi * b_xi[None, :]
        b_ui += b_pr * b_xi[None, :] + b_pi * b_xr[None, :]
        # It is the state of the next segment. The last one is the state before the next block.
        o_y = o_u - M * P * 2 if REVERSE else o_u + M * P * 2
        tl.store(p_y + o_y, b_ur, mask=m_x)
        tl.store(p_y + o_y + 1, b_ui, mask=m_x)
        b_xr = tl.sum(tl.where((o_s == i_0 + BS - 1)[:, None], b_ur, 0.0), axis=0)
        b_xi = tl.sum(tl.where((o_s == i_0 + BS - 1)[:, None], b_ui, 0.0), axis=0)


@triton.jit
def add_rows(b_sum, p_x, o_n, rows, n, i_h, H, N: tl.constexpr, BR: tl.constexpr):
    """Adds the rows of one head to b_sum, BR rows at a time.

    Args:
        b_sum: The sum so far, [BR, BN] fp32.
        p_x: The tensor, [B, H, n, N] fp32: n rows of N columns for each sequence and head.
        o_n: The columns to add up, [BN]; all of them are below N.
        rows: Rows of one head in all sequences, B n.
        n: Rows of one head and sequence.
        i_h: The index of the head.
        H: Heads.
        N: Columns of the tensor.
        BR: Rows of a block.

    Returns:
        The sum, [BR, BN]: row i has added rows i, i + BR, ...
    """
    # Row r of the head is row r % n of sequence r // n.
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
    """Sums parts of a gradient over all but heads and basis functions, and conjugates.

    The order of the additions is fixed. Grid: H 2M / BN programs.

    Args:
        p_x: Parts as (Re | Im), [B, H, n_x, 2M] fp32.
        p_y: More parts, [B, H, n_y, 2M] fp32.
        p_out: Filled with the result, [H, 2M] as (Re | Im), or [H, M, 2] with PAIRS.
        B: Sequences.
        H: Heads.
        n_x: Parts in p_x per sequence and head.
        n_y: Parts in p_y per sequence and head; may be 0.
        M: Basis functions.
        BN: Columns of a program.
        BR: Rows that are loaded at once.
        PAIRS: True for real pairs in the last axis.
    """
    # This program's head and columns.
    NN: tl.constexpr = 2 * M // BN
    i_h = tl.program_id(0) // NN
    o_n = tl.program_id(0) % NN * BN + tl.arange(0, BN)
    b_sum = tl.zeros([BR, BN], dtype=tl.float32)
    b_sum = add_rows(b_sum, p_x, o_n, B * n_x, n_x, i_h, H, 2 * M, BR)
    b_sum = add_rows(b_sum, p_y, o_n, B * n_y, n_y, i_h, H, 2 * M, BR)
    # Columns from M on are imaginary parts, which change their sign.
    b_out = tl.sum(b_sum, axis=0) * tl.where(o_n < M, 1.0, -1.0)
    o_y = o_n % M * 2 + o_n // M if PAIRS else o_n
    tl.store(p_out + i_h * (2 * M) + o_y, b_out)
