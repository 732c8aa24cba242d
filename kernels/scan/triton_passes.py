"""The passes of the chunkwise scan as Triton kernels: contract (pass 1), mix (W), expand (pass 2). Pass 3 and the gradient of
the decay are in triton_adjoint.py.

Shapes: B batch, T time, H state heads, G query heads per state head, Hq = G H, R key features, D value width,
P channels of a state row, M basis functions, L chunk length, S segments of time that run side by side.

One program walks the chunks of one segment with its state on chip, in fp32; no state of a token ever reaches memory.
Programs are numbered along one grid axis (the others end at 65,535). Notation and derivation: docs/kernels.md.

    name      numbers                                                                shape
    p_t       T_j = Lambda^(r-j) as (Re | Im)                                        [H, L, 2M]       operand dtype
    p_tc      the same as (Re | -Im); p_tt is p_tc transposed, [H, 2M, L]            [H, L, 2M]       operand dtype
    p_e       E_i = Lambda^(i-r) as (Re | Im)                                        [H, L, 2M]       fp32
    p_step    enter = Lambda^(r+1) and carry = Lambda^L, each as (Re | Im)           [H, 2, 2M]       fp32
    p_a, p_b  a (or c), and b~ = E b (or e~ = E e), rows (Re | Im)                   [B, Hq, T, 2M]   operand dtype
    p_x, p_g  states before, costates after each segment; real pairs, unit gain      [B, H, S, M, P, 2] fp32
    p_n       numbers of packed documents,                                          [B, T] int32

A pointer that is None is compiled out: no state before (p_x), none asked for (p_y), no documents (p_n).
Complex numbers are stacked (Re | Im) along one axis: a complex product is one real matrix product, and the halves are split in
registers where they meet E or a power of Lambda. A state enters a chunk times enter in the first chunk, times carry after it.
No product takes a transposed accumulator: Triton 3.4 to 3.7.0 miscompile that on Hopper. `tl.trans` is applied to loaded tiles.
Operands are bf16 with fp32 accumulation, or fp32 with `PRECISION` (never plain TF32).
EVEN: every chunk has L tokens. A mask that ends in `| EVEN` the compiler then knows to be true, and leaves out.
"""
# Triton compiles these functions: their types are not what Python sees.
# pyright: reportAssignmentType=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit
def stacked_index(i_m, M: tl.constexpr, BM: tl.constexpr):
    """Positions within (Re | Im), 2M long, of the 2 BM numbers that belong to block i_m of the basis functions."""
    o_n = tl.arange(0, 2 * BM)
    return (o_n // BM) * M + i_m * BM + o_n % BM


@triton.jit
def state_offsets(o_n, o_p, P, M: tl.constexpr):
    """Offset of number o_n of (Re | Im), channel o_p, in a state [M, P, 2].

    For stores after the loop. Loads before it spell this out in 32 bits: an expression common to both would be computed once,
    and its addresses kept in registers all through the loop.
    """
    return tl.cast(o_n % M, tl.int64) * (2 * P) + 2 * o_p + o_n // M


@triton.jit
def documents_of(p_n, i_b, i_c, T, L: tl.constexpr):
    """Numbers of a chunk's tokens [L], of the token before the chunk (0 before the first) and of its last token."""
    i_t = i_c * L
    o_t = i_t + tl.arange(0, L)
    p_n += i_b * T
    b_n = tl.load(p_n + o_t, mask=o_t < T, other=-1)
    return (
        b_n,
        tl.load(p_n + i_t - 1, mask=i_t > 0, other=0),
        tl.load(p_n + tl.minimum(i_t + L, T) - 1),
    )


@triton.jit
def identity(L: tl.constexpr, DTYPE: tl.constexpr):
    """Identity matrix. A product with it, exact in bf16, has the layout of products: `wgmma` takes that as first operand from
    registers."""
    o_l = tl.arange(0, L)
    return tl.where(o_l[:, None] == o_l[None, :], 1.0, 0.0).to(DTYPE)


@triton.jit
def scale_columns(b_x, b_re, b_im, N: tl.constexpr, BM: tl.constexpr, CONJ: tl.constexpr = 0):
    """Columns (Re | Im) of b_x [N, 2 BM] times the complex numbers (b_re, b_im), [N, BM] or [1, BM].

    CONJ: 1, the conjugate of b_x times those; 2, the conjugate of the product.
    """
    b_u, b_w = tl.split(tl.permute(tl.reshape(b_x, [N, 2, BM]), (0, 2, 1)))
    if CONJ == 1:
        b_y = tl.join(b_u * b_re + b_w * b_im, b_u * b_im - b_w * b_re)
    elif CONJ == 2:
        b_y = tl.join(b_u * b_re - b_w * b_im, -b_u * b_im - b_w * b_re)
    else:
        b_y = tl.join(b_u * b_re - b_w * b_im, b_u * b_im + b_w * b_re)
    return tl.reshape(tl.permute(b_y, (0, 2, 1)), [N, 2 * BM])


@triton.jit
def scale_rows(b_x, b_re, b_im, BM: tl.constexpr, N: tl.constexpr):
    """Rows (Re ; Im) of b_x [2 BM, N] times the complex numbers (b_re, b_im), [BM, 1]."""
    b_u, b_w = tl.split(tl.permute(tl.reshape(b_x, [2, BM, N]), (1, 2, 0)))
    b_y = tl.join(b_u * b_re - b_w * b_im, b_u * b_im + b_w * b_re)
    return tl.reshape(tl.permute(b_y, (2, 0, 1)), [2 * BM, N])


@triton.jit(do_not_specialize=["T", "S", "chunks", "Hq", "G", "P", "first"])
def contract_kernel(
    p_q, p_k, p_t, p_e, p_step, p_x, p_a, p_y, p_n,
    T, S, chunks, Hq, G, P, first, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    R: tl.constexpr, M: tl.constexpr, L: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr,
    PRECISION: tl.constexpr, SUM: tl.constexpr, CONJ: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Pass 1: a_i = X^k_i q_i = E_i (sum_(j<=i) (q_i . k_j) T_j + S q_i), for (q, k) and, backwards, (do, v).

    Grid: B Hq S (M / BM) ceil(R / BR) programs; R <= BR unless SUM. Tiles: state [BR, 2 BM] fp32, q and k [L, BR],
    T [L, 2 BM], scores [L, L]. Bytes per token and query head: q, k once per block of M, a once.
    SUM (linear readout): p_a is [programs of one (b, h), 2M] fp32 and takes sum_t a_t of a block of channels; the
    rows are added up chunk over chunk and meet E once at the end.
    CONJ: the conjugate of a goes to p_a.
    p_y [B, H, M, P, 2] takes the last state in channels first .. first + R.
    """
    DTYPE = p_t.dtype.element_ty
    NM: tl.constexpr = M // BM
    NR: tl.constexpr = (R + BR - 1) // BR
    i_p = tl.program_id(0)
    i_m = i_p % NM
    i_r = i_p // NM % NR
    i_s = i_p // (NM * NR) % S
    i_q = i_p // (NM * NR * S) % Hq
    i_b = (i_p // (NM * NR * S * Hq)).to(tl.int64)
    i_h = i_q // G
    o_l = tl.arange(0, L)
    o_r = i_r * BR + tl.arange(0, BR)
    o_m = i_m * BM + tl.arange(0, BM)
    o_n = stacked_index(i_m, M, BM)
    m_r = (o_r < R) | (EVEN and R % BR == 0)

    b_t = tl.load(p_t + (i_h * L + o_l)[:, None] * (2 * M) + o_n[None, :])
    p_em = p_e + (i_h * L + o_l)[:, None] * (2 * M) + o_m[None, :]
    b_er = tl.load(p_em)
    b_ei = tl.load(p_em + M)
    b_s = tl.zeros([BR, 2 * BM], dtype=tl.float32)
    if p_x is not None:
        o_x = (o_n % M)[None, :] * (2 * P) + (o_n // M)[None, :] + 2 * (first + o_r)[:, None]
        b_s = tl.load(
            p_x + ((i_b * (Hq // G) + i_h) * S + i_s) * M * P * 2 + o_x,
            mask=m_r[:, None],
            other=0.0,
        )
    if SUM:
        b_sum = tl.zeros([L, 2 * BM], dtype=tl.float32)

    p_qt = (
        p_q
        + i_b * stride_qb
        + i_q.to(tl.int64) * stride_qh
        + o_l[:, None] * stride_qt
        + o_r[None, :]
    )
    p_kt = (
        p_k
        + i_b * stride_kb
        + i_h.to(tl.int64) * stride_kh
        + o_l[:, None] * stride_kt
        + o_r[None, :]
    )
    p_at = p_a + (i_b * Hq + i_q) * T * (2 * M) + o_l[:, None] * (2 * M) + o_n[None, :]
    start = i_s * chunks
    stop = tl.minimum(start + chunks, tl.cdiv(T, L))
    for i_c in range(start, stop):
        i_t = tl.cast(i_c, tl.int64) * L
        m_t = (i_c * L + o_l < T) | EVEN
        b_q = tl.load(p_qt + i_t * stride_qt, mask=m_t[:, None] & m_r[None, :], other=0.0).to(DTYPE)
        b_k = tl.load(p_kt + i_t * stride_kt, mask=m_t[:, None] & m_r[None, :], other=0.0).to(DTYPE)
        # Loaded here, not before the loop: 64 numbers that would otherwise hold a quarter of the registers.
        p_f = p_step + i_h * (4 * M) + tl.where(i_c == start, 0, 2 * M) + o_m
        b_s = scale_columns(b_s, tl.load(p_f)[None, :], tl.load(p_f + M)[None, :], BR, BM)
        b_p = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        m_p = o_l[:, None] >= o_l[None, :]
        b_a = tl.dot(b_q, b_s.to(DTYPE), input_precision=PRECISION)
        if p_n is not None:
            b_n, n_before, n_last = documents_of(p_n, i_b, i_c, T, L)
            m_p = m_p & (b_n[:, None] == b_n[None, :])
            b_a = tl.where((b_n == n_before)[:, None], b_a, 0.0)
            b_s = tl.where(n_before == n_last, b_s, 0.0)
            # The tokens of the last document, loaded once more: no product takes the transpose of what was computed.
            m_k = (m_t & (b_n == n_last))[:, None] & m_r[None, :]
            b_k = tl.load(p_kt + i_t * stride_kt, mask=m_k, other=0.0).to(DTYPE)
        b_p = tl.where(m_p, b_p, 0.0).to(DTYPE)
        b_a = tl.dot(b_p, b_t, b_a, input_precision=PRECISION)
        if SUM:
            b_sum += b_a
        else:
            if p_n is not None:
                # Always 0, which the compiler cannot know: E is read again, and its 64 registers are free until here.
                b_er = tl.load(p_em + i_c // T)
                b_ei = tl.load(p_em + i_c // T + M)
            b_a = scale_columns(b_a, b_er, b_ei, L, BM, 2 * CONJ)
            tl.store(p_at + i_t * (2 * M), b_a.to(p_a.dtype.element_ty), mask=m_t[:, None])
        b_s = tl.dot(tl.trans(b_k), b_t, b_s, input_precision=PRECISION)

    if SUM:
        b_sum = tl.sum(scale_columns(b_sum, b_er, b_ei, L, BM), axis=0)
        tl.store(p_a + (i_p // NM).to(tl.int64) * (2 * M) + o_n, b_sum)
    if p_y is not None:  # noqa: SIM102 (decided when the kernel is compiled; the next line when it runs)
        if (i_s == S - 1) & (i_q % G == 0):
            p_f = p_e + (i_h * L + T - 1 - (stop - 1) * L) * (2 * M) + o_m
            b_s = scale_columns(b_s, tl.load(p_f)[None, :], tl.load(p_f + M)[None, :], BR, BM)
            p_yt = (
                p_y
                + (i_b * (Hq // G) + i_h) * M * P * 2
                + state_offsets(o_n[None, :], first + o_r[:, None], P, M)
            )
            tl.store(p_yt, b_s, mask=m_r[:, None])


@triton.jit(do_not_specialize=["T", "blocks", "Hq", "G"])
def mix_kernel(
    p_a, p_c, p_w, p_e, p_b, p_y, p_dw, T, blocks, Hq, G,
    M: tl.constexpr, L: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """b~ = E (W a) for every token, with p_w [H, 2M, 2M] W.

    With p_c, which is conj(c), besides e~ = E conj(W^T conj(c)) to p_y, and dW = sum_t conj(c_t) a_t^T to p_dw.

    Grid: B Hq ceil(T / (L blocks)) (M / BM) programs; each keeps its columns of W^T, and of W, on chip for `blocks`
    chunks. Tiles: a and c [L, 2M], W [2M, 2 BM], b~ and e~ [L, 2 BM], dW [2 BM, 2M] fp32. Bytes per token and query
    head: a and c once per block of M, b~ and e~ once. p_dw: [programs of all (b, h) / (M / BM), 2M, 2M] fp32, summed
    outside in a fixed order.
    """
    NM: tl.constexpr = M // BM
    # dW takes a program's own columns of c. Where they are half of all, c comes in halves, and none is on chip twice.
    HALVES: tl.constexpr = NM == 2
    i_p = tl.program_id(0)
    spans = tl.cdiv(T, L * blocks)
    i_m = i_p % NM
    i_s = i_p // NM % spans
    i_q = i_p // (NM * spans)  # over B Hq
    i_h = i_q % Hq // G
    o_l = tl.arange(0, L)
    o_k = tl.arange(0, 2 * M)
    o_m = i_m * BM + tl.arange(0, BM)
    o_n = stacked_index(i_m, M, BM)
    p_wh = p_w + i_h * (4 * M * M)
    b_wt = tl.load(p_wh + o_n[None, :] * (2 * M) + o_k[:, None])
    p_em = p_e + (i_h * L + o_l)[:, None] * (2 * M) + o_m[None, :]
    b_er = tl.load(p_em)
    b_ei = tl.load(p_em + M)
    base = i_q.to(tl.int64) * T * (2 * M)
    o_x = base + o_l[:, None] * (2 * M) + o_k[None, :]
    o_y = base + o_l[:, None] * (2 * M) + o_n[None, :]
    if p_c is not None:
        o_r = stacked_index(1 - i_m, M, BM) if HALVES else o_k
        b_wr = tl.load(p_wh + o_r[:, None] * (2 * M) + o_n[None, :])
        if HALVES:
            b_w = tl.load(p_wh + o_n[:, None] * (2 * M) + o_n[None, :])
        o_z = base + o_l[:, None] * (2 * M) + o_r[None, :]
        b_dw = tl.zeros([2 * BM, 2 * M], dtype=tl.float32)
    for i_c in range(i_s * blocks, tl.minimum((i_s + 1) * blocks, tl.cdiv(T, L))):
        i_t = tl.cast(i_c, tl.int64) * (L * 2 * M)
        m_t = ((i_c * L + o_l < T) | EVEN)[:, None]
        b_a = tl.load(p_a + o_x + i_t, mask=m_t, other=0.0)
        b_b = scale_columns(tl.dot(b_a, b_wt, input_precision=PRECISION), b_er, b_ei, L, BM)
        tl.store(p_b + o_y + i_t, b_b.to(p_b.dtype.element_ty), mask=m_t)
        if p_c is not None:
            b_c = tl.load(p_c + o_y + i_t, mask=m_t, other=0.0)
            # Not the last product: Triton leaves one in flight over the loop's end if nothing but itself takes its result, and
            # ptxas then waits for every wgmma before the next.
            b_dw = tl.dot(tl.trans(b_c), b_a, b_dw, input_precision=PRECISION)
            b_r = tl.load(p_c + o_z + i_t, mask=m_t, other=0.0)
            b_y = tl.dot(b_r, b_wr, input_precision=PRECISION)
            if HALVES:
                b_y = tl.dot(b_c, b_w, b_y, input_precision=PRECISION)
            b_y = scale_columns(b_y, b_er, b_ei, L, BM, 1)
            tl.store(p_y + o_y + i_t, b_y.to(p_y.dtype.element_ty), mask=m_t)
    if p_c is not None:
        p_dwt = p_dw + (i_p // NM).to(tl.int64) * (4 * M * M)
        tl.store(p_dwt + o_n[:, None] * (2 * M) + o_k[None, :], b_dw)


@triton.jit(do_not_specialize=["T", "S", "chunks", "Hq", "G", "P", "first"])
def expand_kernel(
    p_b, p_v, p_d, p_w, p_tt, p_e, p_step, p_x, p_o, p_y, p_n,
    T, S, chunks, Hq, G, P, first, stride_vb, stride_vt, stride_vh, stride_ob, stride_ot, stride_oh,
    D: tl.constexpr, M: tl.constexpr, L: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Pass 2: o_i = Re(b_i^T X^v_i) = sum_(j<=i) Re(b~_i^T T_j) v_j + Re(b~_i^T S); dq likewise from (e~, k).

    Grid: B Hq S ceil(D / BD) programs. Tiles: state [2M, BD] fp32 as (Re ; -Im), b~ [L, 2M], v and o [L, BD],
    T [2M, L], scores [L, L]. Bytes per token and query head: b~ and the scores once per block of D, v and o once.
    With p_w, W [H, 2M, 2M], p_b is a, and b~ = E (W a) is made here, with W on chip.
    With p_d (linear readout) b~ is the same for every chunk, p_b [H, L, 2M], and so are the scores, p_d [H, L, L].
    With p_o, the state after the last token goes to p_y [B, H, M, P, 2], channels first .. first + D. Without it only states
    are wanted: those after every segment, started from zero, go to p_y [B, H, S, M, P, 2] (G = 1, p_b is unused).
    """
    DTYPE = p_tt.dtype.element_ty
    OUTPUT: tl.constexpr = p_o is not None
    LINEAR: tl.constexpr = p_d is not None
    ND: tl.constexpr = (D + BD - 1) // BD
    i_p = tl.program_id(0)
    i_d = i_p % ND
    i_s = i_p // ND % S
    i_q = i_p // (ND * S) % Hq
    i_b = (i_p // (ND * S * Hq)).to(tl.int64)
    i_h = i_q // G
    i_bh = i_b * (Hq // G) + i_h
    o_l = tl.arange(0, L)
    o_d = i_d * BD + tl.arange(0, BD)
    o_m = tl.arange(0, M)
    o_n = tl.arange(0, 2 * M)
    m_d = (o_d < D) | (EVEN and D % BD == 0)

    b_tt = tl.load(p_tt + (i_h * 2 * M + o_n)[:, None] * L + o_l[None, :])
    p_f = p_step + i_h * (4 * M) + o_m
    b_fr = tl.load(p_f)
    b_fi = tl.load(p_f + M)
    b_cr = tl.load(p_f + 2 * M)
    b_ci = tl.load(p_f + 3 * M)
    b_sign = tl.where(o_n < M, 1.0, -1.0)[:, None]
    b_s = tl.zeros([2 * M, BD], dtype=tl.float32)
    if p_x is not None:
        o_x = (o_n % M)[:, None] * (2 * P) + (o_n // M)[:, None] + 2 * (first + o_d)[None, :]
        b_s = b_sign * tl.load(
            p_x + (i_bh * S + i_s) * M * P * 2 + o_x, mask=m_d[None, :], other=0.0
        )

    p_vt = (
        p_v
        + i_b * stride_vb
        + i_h.to(tl.int64) * stride_vh
        + o_l[:, None] * stride_vt
        + o_d[None, :]
    )
    if OUTPUT:
        p_ot = (
            p_o
            + i_b * stride_ob
            + i_q.to(tl.int64) * stride_oh
            + o_l[:, None] * stride_ot
            + o_d[None, :]
        )
        p_bt = p_b + (i_b * Hq + i_q) * T * (2 * M) + o_l[:, None] * (2 * M) + o_n[None, :]
    if p_w is not None:
        b_w = tl.load(p_w + i_h * (4 * M * M) + o_n[None, :] * (2 * M) + o_n[:, None])
        p_em = p_e + (i_h * L + o_l)[:, None] * (2 * M) + o_m[None, :]
        b_er = tl.load(p_em)
        b_ei = tl.load(p_em + M)
    if LINEAR:
        b_b = tl.load(p_b + (i_h * L + o_l)[:, None] * (2 * M) + o_n[None, :])
        b_p = tl.load(p_d + (i_h * L + o_l)[:, None] * L + o_l[None, :])
    start = i_s * chunks
    stop = tl.minimum(start + chunks, tl.cdiv(T, L))
    for i_c in range(start, stop):
        i_t = tl.cast(i_c, tl.int64) * L
        m_t = (i_c * L + o_l < T) | EVEN
        b_v = tl.load(p_vt + i_t * stride_vt, mask=m_t[:, None] & m_d[None, :], other=0.0).to(DTYPE)
        b_re = tl.where(i_c == start, b_fr, b_cr)[:, None]
        b_im = tl.where(i_c == start, b_fi, b_ci)[:, None]
        b_s = scale_rows(b_s, b_re, -b_im, M, BD)  # the rows hold the conjugate
        if p_n is not None:
            b_n, n_before, n_last = documents_of(p_n, i_b, i_c, T, L)
        if OUTPUT:
            if not LINEAR:
                b_b = tl.load(p_bt + i_t * (2 * M), mask=m_t[:, None], other=0.0)
                if p_w is not None:
                    b_b = tl.dot(b_b, b_w, input_precision=PRECISION)
                    b_b = scale_columns(b_b, b_er, b_ei, L, M).to(DTYPE)
                b_p = tl.dot(b_b, b_tt, input_precision=PRECISION)
                b_p = tl.where(o_l[:, None] >= o_l[None, :], b_p, 0.0).to(DTYPE)
            b_o = tl.dot(b_b, b_s.to(DTYPE), input_precision=PRECISION)
            b_d = b_p
            if p_n is not None:
                b_d = tl.where(b_n[:, None] == b_n[None, :], b_p, 0.0)
                b_o = tl.where((b_n == n_before)[:, None], b_o, 0.0)
            b_o = tl.dot(b_d, b_v, b_o, input_precision=PRECISION)
            tl.store(
                p_ot + i_t * stride_ot,
                b_o.to(p_o.dtype.element_ty),
                mask=m_t[:, None] & m_d[None, :],
            )
        if p_n is not None:
            b_s = tl.where(n_before == n_last, b_s, 0.0)
            b_v = tl.where((b_n == n_last)[:, None], b_v, 0.0)
        b_s = tl.dot(b_tt, b_v, b_s, input_precision=PRECISION)

    if p_y is not None:  # noqa: SIM102 (decided when the kernel is compiled; the next line when it runs)
        if (not OUTPUT) | ((i_s == S - 1) & (i_q % G == 0)):
            p_f = p_e + (i_h * L + tl.minimum(L, T - (stop - 1) * L) - 1) * (2 * M) + o_m
            b_s = b_sign * scale_rows(b_s, tl.load(p_f)[:, None], -tl.load(p_f + M)[:, None], M, BD)
            i_y = i_bh if OUTPUT else i_bh * S + i_s
            p_yt = p_y + i_y * M * P * 2 + state_offsets(o_n[:, None], first + o_d[None, :], P, M)
            tl.store(p_yt, b_s, mask=m_d[None, :])
