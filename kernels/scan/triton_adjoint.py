"""Pass 3 of the chunkwise scan and the gradient of the decay, in one Triton kernel. Notation as in triton_passes.py;
derivation in docs/kernels.md."""
# Triton compiles these functions: their types are not what Python sees.
# pyright: reportAssignmentType=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from .triton_passes import documents_of, identity, scale_rows, state_offsets


@triton.jit
def adjoint_pass(
    i_p, p_b, p_do, p_d, p_tc, p_e, p_step, p_g, p_dv, p_y, p_n,
    T, S, chunks, H, P, first, stride_db, stride_dt, stride_dh, stride_gb, stride_gt, stride_gh,
    D: tl.constexpr, G: tl.constexpr, M: tl.constexpr, L: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr, HELD: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Pass 3, chunks in reverse: dv_j = sum_(i>=j) Re(T_j^T b~_i) do_i + Re(T_j^T Z); dk likewise from (e~, q).

    Z, the costate, collects b~_i do_i^T of later tokens and is the conjugate of the gradient of the state.
    i_p: one of B H S ceil(D / BD); each adds up the G query heads of its state head. Tiles: costate [2M, BD] fp32 as
    (Re ; Im), b~ [L, 2M], do and dv [L, BD], T [L, 2M], transposed scores [L, L]. Bytes per token and query head: b~
    and the scores once per block of D, do once; dv once per state head.
    p_g: gradient of the state after each segment. With p_dv, the gradient of the initial state goes to p_y [B, H, M, P, 2].
    Without it only costates are wanted: the gradient of the state before every segment, from zero after it, goes to p_y
    [B, H, S, M, P, 2]. p_d: as in `expand_kernel`. HELD: T stays in registers.
    """
    DTYPE = p_tc.dtype.element_ty
    OUTPUT: tl.constexpr = p_dv is not None
    LINEAR: tl.constexpr = p_d is not None
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
    if p_g is not None:
        o_x = (o_n % M)[:, None] * (2 * P) + (o_n // M)[:, None] + 2 * (first + o_d)[None, :]
        b_z = b_sign * tl.load(
            p_g + (i_bh * S + i_s) * M * P * 2 + o_x, mask=m_d[None, :], other=0.0
        )

    p_dt = p_do + i_b * stride_db + i_h * G * stride_dh + o_l[:, None] * stride_dt + o_d[None, :]
    if OUTPUT:
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
        if p_n is not None:
            b_n, n_before, n_last = documents_of(p_n, i_b, i_c, T, L)
        if OUTPUT:
            b_dv = tl.dot(b_tc, b_z.to(DTYPE), input_precision=PRECISION)
            if p_n is not None:
                b_dv = tl.where((b_n == n_last)[:, None], b_dv, 0.0)
        if p_n is not None:
            b_z = tl.where(n_before == n_last, b_z, 0.0)
        for i_g in range(0, G):
            p_dg = p_dt + i_t * stride_dt + tl.cast(i_g, tl.int64) * stride_dh
            b_do = tl.load(p_dg, mask=m_t[:, None] & m_d[None, :], other=0.0).to(DTYPE)
            if not LINEAR:
                b_b = tl.load(
                    p_bt + (tl.cast(i_g, tl.int64) * T + i_t) * (2 * M),
                    mask=m_t[:, None],
                    other=0.0,
                )
            if OUTPUT:
                if not LINEAR:
                    b_p = tl.dot(b_tc, tl.trans(b_b), input_precision=PRECISION)
                    b_p = tl.where(o_l[:, None] <= o_l[None, :], b_p, 0.0).to(DTYPE)
                b_d = b_p
                if p_n is not None:
                    b_d = tl.where(b_n[:, None] == b_n[None, :], b_p, 0.0)
                b_dv = tl.dot(b_d, b_do, b_dv, input_precision=PRECISION)
            if p_n is not None:
                b_do = tl.where((b_n == n_before)[:, None], b_do, 0.0)
            b_z = tl.dot(tl.trans(b_b), b_do, b_z, input_precision=PRECISION)
        if OUTPUT:
            tl.store(
                p_gt + i_t * stride_gt,
                b_dv.to(p_dv.dtype.element_ty),
                mask=m_t[:, None] & m_d[None, :],
            )

    if p_y is not None:  # noqa: SIM102 (decided when the kernel is compiled; the next line when it runs)
        if (not OUTPUT) | (i_s == 0):
            b_z = b_sign * scale_rows(b_z, tl.load(p_f)[:, None], tl.load(p_f + M)[:, None], M, BD)
            i_y = i_bh if OUTPUT else i_bh * S + i_s
            p_yt = p_y + i_y * M * P * 2 + state_offsets(o_n[:, None], first + o_d[None, :], P, M)
            tl.store(p_yt, b_z, mask=m_d[None, :])


@triton.jit
def split_pairs(b_x, BM: tl.constexpr, N: tl.constexpr):
    """Real and imaginary parts [BM / 8, 8, N] of b_x [2 BM, N], whose rows come in turns of eight."""
    return tl.split(tl.permute(tl.reshape(b_x, [BM // 8, 2, 8, N]), (0, 2, 3, 1)))


@triton.jit
def scale_pairs(b_x, b_re, b_im, BM: tl.constexpr, N: tl.constexpr):
    """Rows of b_x [2 BM, N], in turns of eight, times the complex numbers (b_re, b_im), [BM]."""
    b_u, b_w = split_pairs(b_x, BM, N)
    b_re = tl.reshape(b_re, [BM // 8, 8, 1])
    b_im = tl.reshape(b_im, [BM // 8, 8, 1])
    b_y = tl.join(b_u * b_re - b_w * b_im, b_u * b_im + b_w * b_re)
    return tl.reshape(tl.permute(b_y, (0, 3, 1, 2)), [2 * BM, N])


@triton.jit
def decay_pass(
    i_p, p_b, p_do, p_v, p_d, p_tt, p_e, p_step, p_x, p_g, p_out, p_n,
    T, S, chunks, Hq, P, first, stride_db, stride_dt, stride_dh, stride_vb, stride_vt, stride_vh,
    D: tl.constexpr, G: tl.constexpr, M: tl.constexpr, L: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    PRECISION: tl.constexpr, HELD: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """g = sum_j T_j y_j + Y X, the part of dL/dtheta that (b~; do, v) carries, or (e~; q, k). Chunks in reverse.

    y_j = sum_(i>=j) (i - j) (do_i . v_j) b~_i + (n - 1 - j) Z v_j + Y v_j is over T_j the derivative by theta of what
    v_j meets, Z the costate as in `adjoint_pass` and Y its derivative, which the kernel carries beside it:
    Y' = Lambda^n (Y + n Z) + sum_i (i + 1) b~_i do_i over a chunk of n tokens. Y starts at zero in every segment; what leaves
    the segment meets the state X before it. So weights grow with the length of a segment at most, and no two large sums are
    subtracted. T is the same in every chunk: y_j is summed over chunks in the accumulator of its products.

    i_p: one of B Hq S ceil(D / BD) (M / BM). Tiles: costate and its derivative [2 BM, BD] fp32, y [2 BM, L] fp32,
    do and v [L, BD], b~ [L, 2 BM], scores [L, L]. Bytes per token and query head: b~ once per block of D, do and v once per
    block of M. p_out: [programs of all (b, h), 2M] fp32 as (Re g | Im g), summed outside in a fixed order.

    Tokens are columns here: costate and derivative are first operands, which stay in registers. Rows come in turns of eight:
    8 real parts, their 8 imaginary parts. A thread has rows r and r + 8 of a product, so that a complex number is in one thread
    at any BM. HELD: so does b~^T, by a product with the identity.
    """
    DTYPE = p_tt.dtype.element_ty
    LINEAR: tl.constexpr = p_d is not None
    NM: tl.constexpr = M // BM
    ND: tl.constexpr = (D + BD - 1) // BD
    i_m = i_p % NM
    i_d = i_p // NM % ND
    i_s = i_p // (NM * ND) % S
    i_q = i_p // (NM * ND * S) % Hq
    i_b = (i_p // (NM * ND * S * Hq)).to(tl.int64)
    i_h = i_q // G
    o_l = tl.arange(0, L)
    o_d = i_d * BD + tl.arange(0, BD)
    o_m = i_m * BM + tl.arange(0, BM)
    o_2 = tl.arange(0, 2 * BM)
    o_i = o_2 // 8 % 2  # 1 where a row holds an imaginary part
    o_n = i_m * BM + o_2 // 16 * 8 + o_2 % 8 + o_i * M  # a row's place in (Re | Im)
    m_d = (o_d < D) | (EVEN and D % BD == 0)
    start = i_s * chunks
    stop = tl.minimum(start + chunks, tl.cdiv(T, L))

    p_f = p_step + i_h * (4 * M) + o_m
    # The costate enters the last chunk, n tokens long, with Lambda^(n-1-r).
    p_l = p_e + (i_h * L + tl.minimum(L, T - (stop - 1) * L) - 1) * (2 * M) + o_m
    b_lr = tl.load(p_l)
    b_li = tl.load(p_l + M)
    b_cr = tl.load(p_f + 2 * M)
    b_ci = tl.load(p_f + 3 * M)
    i_x = ((i_b * (Hq // G) + i_h) * S + i_s) * M * P * 2
    b_z = tl.zeros([2 * BM, BD], dtype=tl.float32)
    b_t = tl.zeros([2 * BM, BD], dtype=tl.float32)
    if p_g is not None:
        # One query head of a group stands for the state that they share.
        m_g = m_d & (i_q % G == 0)
        o_x = (o_n % M)[:, None] * (2 * P) + o_i[:, None] + 2 * (first + o_d)[None, :]
        b_z = tl.where(o_i == 0, 1.0, -1.0)[:, None] * tl.load(
            p_g + i_x + o_x, mask=m_g[None, :], other=0.0
        )
    b_i = o_l.to(tl.float32)
    if HELD:
        b_eye = identity(L, DTYPE)
    b_y = tl.zeros([2 * BM, L], dtype=tl.float32)

    p_dt = (
        p_do
        + i_b * stride_db
        + i_q.to(tl.int64) * stride_dh
        + o_l[:, None] * stride_dt
        + o_d[None, :]
    )
    p_vt = (
        p_v
        + i_b * stride_vb
        + i_h.to(tl.int64) * stride_vh
        + o_l[:, None] * stride_vt
        + o_d[None, :]
    )
    if LINEAR:
        p_bt = p_b + (i_h * L + o_l)[:, None] * (2 * M) + o_n[None, :]
    else:
        p_bt = p_b + (i_b * Hq + i_q) * T * (2 * M) + o_l[:, None] * (2 * M) + o_n[None, :]
    for i in range(0, stop - start):
        i_c = stop - 1 - i
        i_t = tl.cast(i_c, tl.int64) * L
        m_t = (i_c * L + o_l < T) | EVEN
        n = L if EVEN else tl.minimum(L, T - i_c * L)
        b_b = tl.load(p_bt if LINEAR else p_bt + i_t * (2 * M), mask=m_t[:, None], other=0.0)
        b_do = tl.load(p_dt + i_t * stride_dt, mask=m_t[:, None] & m_d[None, :], other=0.0).to(
            DTYPE
        )
        b_v = tl.load(p_vt + i_t * stride_vt, mask=m_t[:, None] & m_d[None, :], other=0.0).to(DTYPE)
        b_re = tl.where(i == 0, b_lr, b_cr)
        b_im = tl.where(i == 0, b_li, b_ci)
        b_z = scale_pairs(b_z, b_re, b_im, BM, BD)
        b_t = scale_pairs(b_t, b_re, b_im, BM, BD)

        # The integer weights multiply fp32 numbers, before those are rounded to the operands' dtype.
        b_p = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        # b_p * (i - j), spelled so that no [L, L] tile of weights stays in registers.
        b_p = tl.where(o_l[:, None] >= o_l[None, :], b_p * b_i[:, None] - b_p * b_i[None, :], 0.0)
        if p_n is not None:
            b_n, n_before, n_last = documents_of(p_n, i_b, i_c, T, L)
            b_p = tl.where(b_n[:, None] == b_n[None, :], b_p, 0.0)
            m_v = (m_t & (b_n == n_last))[:, None] & m_d[None, :]
            b_v = tl.load(p_vt + i_t * stride_vt, mask=m_v, other=0.0).to(DTYPE)
            m_o = (m_t & (b_n == n_before))[:, None] & m_d[None, :]
            b_do = tl.load(p_dt + i_t * stride_dt, mask=m_o, other=0.0).to(DTYPE)
        b_x = tl.dot(b_z.to(DTYPE), tl.trans(b_v), input_precision=PRECISION)
        b_y += b_x * (n - 1 - o_l).to(tl.float32)[None, :]
        b_y = tl.dot(b_t.to(DTYPE), tl.trans(b_v), b_y, input_precision=PRECISION)
        # b~^T is the first operand of three products; the weight i + 1 is on it where it is held, else on do.
        b_bt = tl.trans(b_b)
        b_bw = b_bt
        if HELD:
            b_bt = tl.dot(b_bt, b_eye)
            b_bw = (b_bt * (b_i + 1.0)[None, :]).to(DTYPE)
            b_bt = b_bt.to(DTYPE)
        b_y = tl.dot(b_bt, b_p.to(DTYPE), b_y, input_precision=PRECISION)
        if p_n is not None:
            b_z = tl.where(n_before == n_last, b_z, 0.0)
            b_t = tl.where(n_before == n_last, b_t, 0.0)
        b_w = b_do
        if not HELD:
            if L < 64 and p_n is None:
                # `mma.sync`: what meets products and other arithmetic, too, would lie in shared memory with eight rows in a
                # bank. So do is read once more, at an address that the compiler cannot know to be the same (i_c // T is 0).
                b_w = tl.load(
                    p_dt + (i_t * stride_dt + i_c // T), mask=m_t[:, None] & m_d[None, :], other=0.0
                )
            b_w = (b_w.to(tl.float32) * (b_i + 1.0)[:, None]).to(DTYPE)
        b_t = tl.dot(b_bw, b_w, b_t + b_z * tl.cast(n, tl.float32), input_precision=PRECISION)
        b_z = tl.dot(b_bt, b_do, b_z, input_precision=PRECISION)

    o_8 = tl.reshape(o_m, [BM // 8, 8, 1])
    b_yr, b_yi = split_pairs(b_y, BM, L)
    p_tt += i_h * (2 * M) * L + o_8 * L + tl.reshape(o_l, [1, 1, L])
    b_tr = tl.load(p_tt).to(tl.float32)
    b_ti = -tl.load(p_tt + M * L).to(tl.float32)  # the table holds conjugates
    b_gr = tl.reshape(tl.sum(b_tr * b_yr - b_ti * b_yi, axis=2), [BM])
    b_gi = tl.reshape(tl.sum(b_tr * b_yi + b_ti * b_yr, axis=2), [BM])
    if p_x is not None:
        b_dr, b_di = split_pairs(scale_pairs(b_t, tl.load(p_f), tl.load(p_f + M), BM, BD), BM, BD)
        o_s = o_8 * (2 * P) + 2 * tl.reshape(first + o_d, [1, 1, BD])
        m_s = tl.reshape(m_d, [1, 1, BD])
        b_xr = tl.load(p_x + i_x + o_s, mask=m_s, other=0.0)
        b_xi = tl.load(p_x + i_x + o_s + 1, mask=m_s, other=0.0)
        b_gr += tl.reshape(tl.sum(b_xr * b_dr - b_xi * b_di, axis=2), [BM])
        b_gi += tl.reshape(tl.sum(b_xr * b_di + b_xi * b_dr, axis=2), [BM])
    p_o = p_out + (i_p // NM).to(tl.int64) * (2 * M) + o_m
    tl.store(p_o, b_gr)
    tl.store(p_o + M, b_gi)


@triton.jit(do_not_specialize=["T", "S", "chunks", "H", "P", "first"])
def adjoint_kernel(
    p_b, p_do, p_v, p_d, p_tc, p_tt, p_e, p_step, p_x, p_g, p_dv, p_y, p_out, p_n, T, S, chunks, H, P, first,
    stride_db, stride_dt, stride_dh, stride_vb, stride_vt, stride_vh, stride_gb, stride_gt, stride_gh,
    D: tl.constexpr, G: tl.constexpr, M: tl.constexpr, L: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr,
    BM: tl.constexpr, PRECISION: tl.constexpr, HELD: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Pass 3 (to p_dv, p_y) and, with p_out, beside it the part of the decay's gradient that the same tensors carry.

    Both walk the chunks of a segment in reverse and read b~ and do. The programs of one (batch, state head, segment) have
    consecutive numbers: they run at the same time, and what one has fetched the others find in L2. Bytes from memory per
    token and query head then: b~, do, v in and dv out, each once.

    Grid: B H S (ceil(D / BD) + DECAY G ceil(D / BK) (M / BM)) programs.
    """
    DECAY: tl.constexpr = p_out is not None
    NA: tl.constexpr = (D + BD - 1) // BD
    ND: tl.constexpr = (D + BK - 1) // BK * (M // BM)
    N: tl.constexpr = NA + (G * ND if DECAY else 0)
    i_g = tl.program_id(0) // N
    i_n = tl.program_id(0) % N
    if i_n < NA:
        adjoint_pass(
            i_g * NA + i_n, p_b, p_do, p_d, p_tc, p_e, p_step, p_g, p_dv, p_y, p_n, T, S, chunks, H, P, first,
            stride_db, stride_dt, stride_dh, stride_gb, stride_gt, stride_gh,
            D, G, M, L, BD, PRECISION, HELD, EVEN,
        )  # fmt: skip
    elif DECAY:
        i_d = i_n - NA
        i_q = i_g // S * G + i_d // ND  # over B Hq; the segments of a query head follow one another
        decay_pass(
            (i_q * S + i_g % S) * ND + i_d % ND, p_b, p_do, p_v, p_d, p_tt, p_e, p_step, p_x, p_g, p_out, p_n,
            T, S, chunks, H * G, P, first, stride_db, stride_dt, stride_dh, stride_vb, stride_vt, stride_vh,
            D, G, M, L, BK, BM, PRECISION, HELD, EVEN,
        )  # fmt: skip
