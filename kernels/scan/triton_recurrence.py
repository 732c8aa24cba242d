"""The recurrence token by token as Triton kernels: contract (pass 1) and expand (pass 2); the way back has its own file.

Shapes: B batch, T time, H state heads, G query heads per state head, Hq = G H, C channels of one side (R keys or D
values) of the P = R + D of a state, M basis functions, K tokens per segment, N = ceil(T / K).

Each is a loop over time with its part of the state in registers, in the dtype of p_lam. The algorithm around them and
the rule for the states of the past are in triton_sequential.py.

    p_lam         Re, Im of Lambda, Re, Im of 1 / Lambda                                [H, 4, M]
    p_a           a, c as (Re | Im)                                                     [Hq, B, T, 2M]
    p_b, p_e      the same layout; the constant w of a linear readout has batch and token strides of 0
    p_x, p_y      state before the first and after the last token, from this side's     [B, H, M, P, 2]
                  first channel on; p_g is the gradient of the latter
    p_c           states before every K tokens                                          [B, H, N, 2, M, C]
    p_n           numbers of packed documents, read if DOCUMENTS: a state ends with its own [B, T] int32

Programs are numbered along one grid axis (the others end at 65,535), offsets that grow with B, T or H are 64 bits.
A condition known at compile time stands in an `if` of its own: Triton does not compile what is under a false one.
"""

import triton
import triton.language as tl


@triton.jit
def continues(p_n, t, m_t):
    """Whether token t is of the document of the token before it; the state before the first is that of document 0."""
    return tl.load(p_n + t, mask=m_t, other=0) == tl.load(p_n + t - 1, mask=m_t & (t > 0), other=0)


@triton.jit(do_not_specialize=["T", "Hq", "G", "P"])
def contract_scan_kernel(
    p_q,
    p_k,
    p_lam,
    p_x,
    p_a,
    p_y,
    p_c,
    p_n,
    T,
    Hq,
    G,
    P,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_ab,
    stride_ah,
    C: tl.constexpr,
    M: tl.constexpr,
    BC: tl.constexpr,
    BM: tl.constexpr,
    K: tl.constexpr,
    HAS_STATE: tl.constexpr,
    STORE_STATE: tl.constexpr,
    CHECKPOINT: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """Pass 1: X^k_t = Lambda X^k_(t-1) + k_t, a_t = X^k_t q_t; backwards c from (do, v).

    Grid: B Hq ceil(M / BM) programs. Tiles: X [BC, BM], all C channels of BM modes (channels first: a thread then sums
    most of them itself). Bytes per token and query head: q, k once per block of modes, a once.
    """
    DTYPE = p_lam.dtype.element_ty
    NM: tl.constexpr = (M + BM - 1) // BM
    i_p = tl.program_id(0)
    i_m = i_p % NM
    i_q = tl.cast(i_p // NM % Hq, tl.int64)
    i_b = tl.cast(i_p // (NM * Hq), tl.int64)
    i_h = i_q // G
    i_bh = i_b * (Hq // G) + i_h
    o_m = i_m * BM + tl.arange(0, BM)
    o_c = tl.arange(0, BC)
    m_m = o_m < M
    m_c = o_c < C
    m_x = m_c[:, None] & m_m[None, :]
    o_x = i_bh * M * P * 2 + (o_m[None, :] * P + o_c[:, None]) * 2

    b_lr = tl.load(p_lam + i_h * 4 * M + o_m, mask=m_m, other=0.0)[None, :]
    b_li = tl.load(p_lam + i_h * 4 * M + M + o_m, mask=m_m, other=0.0)[None, :]
    b_re = tl.zeros([BC, BM], dtype=DTYPE)
    b_im = tl.zeros([BC, BM], dtype=DTYPE)
    if HAS_STATE:
        b_re = tl.load(p_x + o_x, mask=m_x, other=0.0)
        b_im = tl.load(p_x + o_x + 1, mask=m_x, other=0.0)
    if CHECKPOINT:
        p_ct = p_c + i_bh * tl.cdiv(T, K) * 2 * M * C + o_m[None, :] * C + o_c[:, None]

    p_qt = p_q + i_b * stride_qb + i_q * stride_qh + o_c
    p_kt = p_k + i_b * stride_kb + i_h * stride_kh + o_c
    p_at = p_a + i_b * stride_ab + i_q * stride_ah + o_m
    b_q = tl.load(p_qt, mask=m_c, other=0.0)
    b_k = tl.load(p_kt, mask=m_c, other=0.0)
    for i_t in range(0, T):
        if CHECKPOINT:
            if (i_t % K == 0) & (i_q % G == 0):
                tl.store(p_ct, b_re, mask=m_x)
                tl.store(p_ct + M * C, b_im, mask=m_x)
            p_ct += tl.where(i_t % K == 0, 2 * M * C, 0)
        # The next token is on its way while this one is worked on.
        p_qt += stride_qt
        p_kt += stride_kt
        m_next = o_c < tl.where(i_t + 1 < T, C, 0)
        b_q_next = tl.load(p_qt, mask=m_next, other=0.0)
        b_k_next = tl.load(p_kt, mask=m_next, other=0.0)
        if DOCUMENTS:
            m_same = continues(p_n + i_b * T, i_t, True)
            b_re = tl.where(m_same, b_re, 0.0)
            b_im = tl.where(m_same, b_im, 0.0)
        b_old = b_re
        b_re = b_old * b_lr - b_im * b_li + b_k.to(DTYPE)[:, None]
        b_im = b_old * b_li + b_im * b_lr
        b_row = b_q.to(DTYPE)[:, None]
        tl.store(p_at, tl.sum(b_re * b_row, axis=0), mask=m_m)
        tl.store(p_at + M, tl.sum(b_im * b_row, axis=0), mask=m_m)
        p_at += 2 * M
        b_q = b_q_next
        b_k = b_k_next

    if STORE_STATE:  # noqa: SIM102
        if i_q % G == 0:
            tl.store(p_y + o_x, b_re, mask=m_x)
            tl.store(p_y + o_x + 1, b_im, mask=m_x)


@triton.jit(do_not_specialize=["T", "Hq", "G", "P"])
def expand_scan_kernel(
    p_b,
    p_v,
    p_lam,
    p_x,
    p_o,
    p_y,
    p_c,
    p_n,
    T,
    Hq,
    G,
    P,
    stride_bb,
    stride_bt,
    stride_bh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_ob,
    stride_ot,
    stride_oh,
    C: tl.constexpr,
    M: tl.constexpr,
    BC: tl.constexpr,
    BM: tl.constexpr,
    K: tl.constexpr,
    HAS_STATE: tl.constexpr,
    STORE_STATE: tl.constexpr,
    CHECKPOINT: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """Pass 2: X^v_t = Lambda X^v_(t-1) + v_t, o_t = Re(b_t^T X^v_t); linear readout with b_t = w (strides 0).

    Grid: B Hq ceil(C / BC) programs. Tiles: X [BM, BC], all M <= BM modes of BC channels. Bytes per token and query
    head: b once per block of channels, v and o once. With CHECKPOINT only the states are wanted: p_b and p_o are unused.
    """
    DTYPE = p_lam.dtype.element_ty
    NC: tl.constexpr = (C + BC - 1) // BC
    i_p = tl.program_id(0)
    i_c = i_p % NC
    i_q = tl.cast(i_p // NC % Hq, tl.int64)
    i_b = tl.cast(i_p // (NC * Hq), tl.int64)
    i_h = i_q // G
    i_bh = i_b * (Hq // G) + i_h
    o_m = tl.arange(0, BM)
    o_c = i_c * BC + tl.arange(0, BC)
    m_m = o_m < M
    m_c = o_c < C
    m_x = m_m[:, None] & m_c[None, :]
    o_x = i_bh * M * P * 2 + (o_m[:, None] * P + o_c[None, :]) * 2

    b_lr = tl.load(p_lam + i_h * 4 * M + o_m, mask=m_m, other=0.0)[:, None]
    b_li = tl.load(p_lam + i_h * 4 * M + M + o_m, mask=m_m, other=0.0)[:, None]
    b_re = tl.zeros([BM, BC], dtype=DTYPE)
    b_im = tl.zeros([BM, BC], dtype=DTYPE)
    if HAS_STATE:
        b_re = tl.load(p_x + o_x, mask=m_x, other=0.0)
        b_im = tl.load(p_x + o_x + 1, mask=m_x, other=0.0)
    if CHECKPOINT:
        p_ct = p_c + i_bh * tl.cdiv(T, K) * 2 * M * C + o_m[:, None] * C + o_c[None, :]

    p_vt = p_v + i_b * stride_vb + i_h * stride_vh + o_c
    b_v = tl.load(p_vt, mask=m_c, other=0.0)
    if not CHECKPOINT:
        p_ot = p_o + i_b * stride_ob + i_q * stride_oh + o_c
        p_bt = p_b + i_b * stride_bb + i_q * stride_bh + o_m
        b_br = tl.load(p_bt, mask=m_m, other=0.0)
        b_bi = tl.load(p_bt + M, mask=m_m, other=0.0)
    for i_t in range(0, T):
        if CHECKPOINT:  # noqa: SIM102
            if i_t % K == 0:
                tl.store(p_ct, b_re, mask=m_x)
                tl.store(p_ct + M * C, b_im, mask=m_x)
                p_ct += 2 * M * C
        p_vt += stride_vt
        b_v_next = tl.load(p_vt, mask=o_c < tl.where(i_t + 1 < T, C, 0), other=0.0)
        if not CHECKPOINT:
            p_bt += stride_bt
            m_next = o_m < tl.where(i_t + 1 < T, M, 0)
            b_br_next = tl.load(p_bt, mask=m_next, other=0.0)
            b_bi_next = tl.load(p_bt + M, mask=m_next, other=0.0)
        if DOCUMENTS:
            m_same = continues(p_n + i_b * T, i_t, True)
            b_re = tl.where(m_same, b_re, 0.0)
            b_im = tl.where(m_same, b_im, 0.0)
        b_old = b_re
        b_re = b_old * b_lr - b_im * b_li + b_v.to(DTYPE)[None, :]
        b_im = b_old * b_li + b_im * b_lr
        b_v = b_v_next
        if not CHECKPOINT:
            b_o = tl.sum(b_br[:, None] * b_re - b_bi[:, None] * b_im, axis=0)
            tl.store(p_ot, b_o.to(p_o.dtype.element_ty), mask=m_c)
            p_ot += stride_ot
            b_br = b_br_next
            b_bi = b_bi_next

    if STORE_STATE:  # noqa: SIM102
        if i_q % G == 0:
            tl.store(p_y + o_x, b_re, mask=m_x)
            tl.store(p_y + o_x + 1, b_im, mask=m_x)
