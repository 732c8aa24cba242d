"""Pass 3 of the chunkwise scan as a Triton kernel, with the gradient of the decay beside it. Notation as in triton_passes.py;
derivation in kernels/README.md."""

import triton
import triton.language as tl

from .triton_decay import decay_pass
from .triton_passes import documents_of, identity, scale_rows, state_offsets


@triton.jit
def adjoint_pass(
    i_p,
    p_b,
    p_do,
    p_d,
    p_tc,
    p_e,
    p_step,
    p_g,
    p_dv,
    p_y,
    p_n,
    T,
    S,
    chunks,
    H,
    P,
    first,
    stride_db,
    stride_dt,
    stride_dh,
    stride_gb,
    stride_gt,
    stride_gh,
    D: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    L: tl.constexpr,
    BD: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_COSTATE: tl.constexpr,
    STORE_STATE: tl.constexpr,
    OUTPUT: tl.constexpr,
    LINEAR: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    HELD: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Pass 3, chunks in reverse: dv_j = sum_(i>=j) Re(T_j^T b~_i) do_i + Re(T_j^T Z); dk likewise from (e~, q).

    Z, the costate, collects b~_i do_i^T of later tokens and is the conjugate of the gradient of the state.
    i_p: one of B H S ceil(D / BD); each adds up the G query heads of its state head. Tiles: costate [2M, BD] fp32 as
    (Re ; Im), b~ [L, 2M], do and dv [L, BD], T [L, 2M], transposed scores [L, L]. Bytes per token and query head: b~
    and the scores once per block of D, do once; dv once per state head.
    p_g: gradient of the state after each segment. STORE_STATE: 1, the gradient of the initial state goes to p_y
    [B, H, M, P, 2]; 2, the gradient of the state before every segment, from zero after it, to p_y [B, H, S, M, P, 2].
    LINEAR, OUTPUT: as in `expand_kernel` (without OUTPUT p_b is still read). HELD: T stays in registers.
    """
    DTYPE = p_tc.dtype.element_ty
    ND: tl.constexpr = (D + BD - 1) // BD
    i_d = i_p % ND
    i_s = i_p // ND % S
    i_bh = (i_p // (ND * S)).to(tl.int64)
    i_b = i_bh // H
    i_h = i_bh % H
    o_l = tl.arange(0, L)
    o_d = i_d * BD + tl.arange(0, BD)
    o_m = tl.arange(0, M)
    o_n = tl.arange(0, 2 * M)
    m_d = (o_d < D) | (EVEN and D % BD == 0)
    start = i_s * chunks
    stop = tl.minimum(start + chunks, tl.cdiv(T, L))

    b_tc = tl.load(p_tc + (i_h * L + o_l)[:, None] * (2 * M) + o_n[None, :])
    if HELD and OUTPUT:
        b_tc = tl.dot(identity(L, DTYPE), b_tc).to(DTYPE)
    p_f = p_step + i_h * (4 * M) + o_m
    b_cr = tl.load(p_f + 2 * M)
    b_ci = tl.load(p_f + 3 * M)
    # The costate enters the last chunk, n tokens long, with Lambda^(n-1-r).
    p_l = p_e + (i_h * L + tl.minimum(L, T - (stop - 1) * L) - 1) * (2 * M) + o_m
    b_lr = tl.load(p_l)
    b_li = tl.load(p_l + M)
    b_sign = tl.where(o_n < M, 1.0, -1.0)[:, None]
    b_z = tl.zeros([2 * M, BD], dtype=tl.float32)
    if HAS_COSTATE:
        o_x = (o_n % M)[:, None] * (2 * P) + (o_n // M)[:, None] + 2 * (first + o_d)[None, :]
        b_z = b_sign * tl.load(p_g + (i_bh * S + i_s) * M * P * 2 + o_x, mask=m_d[None, :], other=0.0)

    p_dt = p_do + i_b * stride_db + i_h * G * stride_dh + o_l[:, None] * stride_dt + o_d[None, :]
    p_gt = p_dv + i_b * stride_gb + i_h * stride_gh + o_l[:, None] * stride_gt + o_d[None, :]
    p_bt = p_b + i_bh * G * T * (2 * M) + o_l[:, None] * (2 * M) + o_n[None, :]
    if LINEAR:
        b_b = tl.load(p_b + (i_h * L + o_l)[:, None] * (2 * M) + o_n[None, :])
        b_p = tl.load(p_d + (i_h * L + o_l)[None, :] * L + o_l[:, None])
    for i in range(0, stop - start):
        i_c = stop - 1 - i
        i_t = tl.cast(i_c, tl.int64) * L
        m_t = (i_c * L + o_l < T) | EVEN
        b_re = tl.where(i == 0, b_lr, b_cr)[:, None]
        b_im = tl.where(i == 0, b_li, b_ci)[:, None]
        b_z = scale_rows(b_z, b_re, b_im, M, BD)
        if DOCUMENTS:
            b_n, n_before, n_last = documents_of(p_n, i_b, i_c, T, L)
        if OUTPUT:
            b_dv = tl.dot(b_tc, b_z.to(DTYPE), input_precision=PRECISION)
            if DOCUMENTS:
                b_dv = tl.where((b_n == n_last)[:, None], b_dv, 0.0)
        if DOCUMENTS:
            b_z = tl.where(n_before == n_last, b_z, 0.0)
        for i_g in range(0, G):
            p_dg = p_dt + i_t * stride_dt + tl.cast(i_g, tl.int64) * stride_dh
            b_do = tl.load(p_dg, mask=m_t[:, None] & m_d[None, :], other=0.0).to(DTYPE)
            if not LINEAR:
                b_b = tl.load(p_bt + (tl.cast(i_g, tl.int64) * T + i_t) * (2 * M), mask=m_t[:, None], other=0.0)
            if OUTPUT:
                if not LINEAR:
                    b_p = tl.dot(b_tc, tl.trans(b_b), input_precision=PRECISION)
                    b_p = tl.where(o_l[:, None] <= o_l[None, :], b_p, 0.0).to(DTYPE)
                b_d = b_p
                if DOCUMENTS:
                    b_d = tl.where(b_n[:, None] == b_n[None, :], b_p, 0.0)
                b_dv = tl.dot(b_d, b_do, b_dv, input_precision=PRECISION)
            if DOCUMENTS:
                b_do = tl.where((b_n == n_before)[:, None], b_do, 0.0)
            b_z = tl.dot(tl.trans(b_b), b_do, b_z, input_precision=PRECISION)
        if OUTPUT:
            tl.store(p_gt + i_t * stride_gt, b_dv.to(p_dv.dtype.element_ty), mask=m_t[:, None] & m_d[None, :])

    if STORE_STATE:  # noqa: SIM102 (decided when the kernel is compiled; the next line when it runs)
        if (STORE_STATE == 2) | (i_s == 0):
            b_z = b_sign * scale_rows(b_z, tl.load(p_f)[:, None], tl.load(p_f + M)[:, None], M, BD)
            i_y = i_bh * S + i_s if STORE_STATE == 2 else i_bh
            p_yt = p_y + i_y * M * P * 2 + state_offsets(o_n[:, None], first + o_d[None, :], P, M)
            tl.store(p_yt, b_z, mask=m_d[None, :])


@triton.jit(do_not_specialize=["T", "S", "chunks", "H", "P", "first"])
def adjoint_kernel(
    p_b,
    p_do,
    p_v,
    p_d,
    p_tc,
    p_tt,
    p_e,
    p_step,
    p_x,
    p_g,
    p_dv,
    p_y,
    p_out,
    p_n,
    T,
    S,
    chunks,
    H,
    P,
    first,
    stride_db,
    stride_dt,
    stride_dh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_gb,
    stride_gt,
    stride_gh,
    D: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    L: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
    BM: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_COSTATE: tl.constexpr,
    STORE_STATE: tl.constexpr,
    ADJOINT: tl.constexpr,
    DECAY: tl.constexpr,
    OUTPUT: tl.constexpr,
    LINEAR: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    HELD: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Pass 3 (ADJOINT), the part of the decay's gradient that the same tensors carry (DECAY), or both side by side.

    Both walk the chunks of a segment in reverse and read b~ and do. Where both are asked for, the programs of one
    (batch, state head, segment) have consecutive numbers: they run at the same time, and what one of them has fetched the
    others find in L2. Bytes from memory per token and query head then: b~, do, v in and dv out, each once.

    Grid: B H S (ADJOINT ceil(D / BD) + DECAY G ceil(D / BK) (M / BM)) programs.
    """
    NA: tl.constexpr = (D + BD - 1) // BD if ADJOINT else 0
    ND: tl.constexpr = (D + BK - 1) // BK * (M // BM)
    N: tl.constexpr = NA + (G * ND if DECAY else 0)
    i_g = tl.program_id(0) // N
    i_n = tl.program_id(0) % N
    if i_n < NA:
        adjoint_pass(
            i_g * NA + i_n, p_b, p_do, p_d, p_tc, p_e, p_step, p_g, p_dv, p_y, p_n, T, S, chunks, H, P, first,
            stride_db, stride_dt, stride_dh, stride_gb, stride_gt, stride_gh,
            D, G, M, L, BD, PRECISION, HAS_COSTATE, STORE_STATE, OUTPUT, LINEAR, DOCUMENTS, HELD, EVEN,
        )  # fmt: skip
    elif DECAY:
        i_d = i_n - NA
        i_q = i_g // S * G + i_d // ND  # over B Hq; the segments of a query head follow one another
        decay_pass(
            (i_q * S + i_g % S) * ND + i_d % ND, p_b, p_do, p_v, p_tt, p_e, p_step, p_x, p_g, p_out, p_n,
            T, S, chunks, H * G, P, first, stride_db, stride_dt, stride_dh, stride_vb, stride_vt, stride_vh,
            D, G, M, L, BK, BM, PRECISION, HAS_STATE, HAS_COSTATE, LINEAR, DOCUMENTS, HELD, EVEN,
        )  # fmt: skip
