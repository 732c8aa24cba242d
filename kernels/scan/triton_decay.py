"""The gradient of the decay as a Triton kernel. Notation as in triton_passes.py; derivation in kernels/README.md."""

import triton
import triton.language as tl

from .triton_passes import documents_of


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


@triton.jit(do_not_specialize=["T", "S", "chunks", "Hq", "G", "P", "first"])
def decay_kernel(
    p_b,
    p_q,
    p_k,
    p_tt,
    p_e,
    p_step,
    p_x,
    p_g,
    p_out,
    p_n,
    T,
    S,
    chunks,
    Hq,
    G,
    P,
    first,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    R: tl.constexpr,
    M: tl.constexpr,
    L: tl.constexpr,
    BR: tl.constexpr,
    BM: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_COSTATE: tl.constexpr,
    LINEAR: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """g = sum_i e~_i x_i + Q dX/dtheta, the part of dL/dtheta that (e; q, k) carries, or backwards (b; do, v).

    x_i = sum_(j<=i) (i - j) (q_i . k_j) T_j + (i + 1) S q_i + D q_i is the derivative of a_i by theta over E_i, D that of
    the state, which the kernel carries beside the state: D' = Lambda^n (D + n S + sum_j (n - 1 - j) T_j k_j) over a chunk
    of n tokens. D starts at zero in every segment; what leaves the segment meets the cotangent Q of the state after it.
    So weights grow with the length of a segment at most, and no two large sums are subtracted.

    Grid: B Hq S ceil(R / BR) (M / BM) programs. Tiles: state and its derivative [2 BM, BR] fp32, q and k [L, BR], x and
    T [2 BM, L], e~ [BM, L] twice, scores [L, L]. Bytes per token and query head: e~ once per block of R, q and k once per
    block of M. p_out: [programs of all (b, h), 2M] fp32 as (Re g | Im g), summed outside in a fixed order.

    Tokens are columns here: state and derivative are first operands, which stay in registers, and sums over tokens stay
    within a warp. Rows hold conjugates, in turns of eight: 8 real parts, their 8 imaginary parts. A thread has rows r and
    r + 8 of a product, so that a complex number is in one thread at any BM.
    """
    DTYPE = p_tt.dtype.element_ty
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
    o_2 = tl.arange(0, 2 * BM)
    o_n = i_m * BM + o_2 // 16 * 8 + o_2 % 8  # basis function of a row
    o_i = o_2 // 8 % 2  # 1 where it is the imaginary part
    m_r = o_r < R

    b_t = tl.load(p_tt + (i_h * 2 * M + o_i * M + o_n)[:, None] * L + o_l[None, :])
    i_x = ((i_b * (Hq // G) + i_h) * S + i_s) * M * P * 2
    b_s = tl.zeros([2 * BM, BR], dtype=tl.float32)
    b_d = tl.zeros([2 * BM, BR], dtype=tl.float32)
    if HAS_STATE:
        o_x = o_n[:, None] * (2 * P) + o_i[:, None] + 2 * (first + o_r)[None, :]
        b_s = tl.where(o_i == 0, 1.0, -1.0)[:, None] * tl.load(p_x + i_x + o_x, mask=m_r[None, :], other=0.0)
    b_i = o_l.to(tl.float32)
    b_gr = tl.zeros([BM], dtype=tl.float32)
    b_gi = tl.zeros([BM], dtype=tl.float32)

    p_qt = p_q + i_b * stride_qb + i_q.to(tl.int64) * stride_qh + o_l[:, None] * stride_qt + o_r[None, :]
    p_kt = p_k + i_b * stride_kb + i_h.to(tl.int64) * stride_kh + o_l[:, None] * stride_kt + o_r[None, :]
    if LINEAR:
        p_bt = p_b + (i_h * L + o_l)[None, :] * (2 * M) + o_m[:, None]
    else:
        p_bt = p_b + (i_b * Hq + i_q) * T * (2 * M) + o_l[None, :] * (2 * M) + o_m[:, None]
    start = i_s * chunks
    stop = tl.minimum(start + chunks, tl.cdiv(T, L))
    for i_c in range(start, stop):
        i_t = tl.cast(i_c, tl.int64) * L
        m_t = i_c * L + o_l < T
        n = tl.minimum(L, T - i_c * L)
        # No product takes e~, so that it is not fetched ahead of its chunk: first of all, then.
        p_bc = p_bt if LINEAR else p_bt + i_t * (2 * M)
        b_br = tl.load(p_bc, mask=m_t[None, :], other=0.0)
        b_bi = tl.load(p_bc + M, mask=m_t[None, :], other=0.0)
        b_q = tl.load(p_qt + i_t * stride_qt, mask=m_t[:, None] & m_r[None, :], other=0.0).to(DTYPE)
        b_k = tl.load(p_kt + i_t * stride_kt, mask=m_t[:, None] & m_r[None, :], other=0.0).to(DTYPE)
        p_f = p_step + i_h * (4 * M) + tl.where(i_c == start, 0, 2 * M) + o_m
        b_re = tl.load(p_f)
        b_im = -tl.load(p_f + M)
        b_s = scale_pairs(b_s, b_re, b_im, BM, BR)
        b_d = scale_pairs(b_d, b_re, b_im, BM, BR)

        # The integer weights multiply fp32 numbers, before those are rounded to the operands' dtype.
        b_p = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
        # b_p * (i - j), spelled so that no [L, L] tile of weights stays in registers.
        b_p = tl.where(o_l[:, None] <= o_l[None, :], b_p * b_i[None, :] - b_p * b_i[:, None], 0.0)
        b_x = tl.dot(b_s.to(DTYPE), tl.trans(b_q), input_precision=PRECISION) * (b_i + 1.0)[None, :]
        b_x = tl.dot(b_d.to(DTYPE), tl.trans(b_q), b_x, input_precision=PRECISION)
        if DOCUMENTS:
            b_n, n_before, n_last = documents_of(p_n, i_b, i_c, T, L)
            b_p = tl.where(b_n[:, None] == b_n[None, :], b_p, 0.0)
            b_x = tl.where((b_n == n_before)[None, :], b_x, 0.0)
            b_s = tl.where(n_before == n_last, b_s, 0.0)
            b_d = tl.where(n_before == n_last, b_d, 0.0)
            m_k = (m_t & (b_n == n_last))[:, None] & m_r[None, :]
            b_k = tl.load(p_kt + i_t * stride_kt, mask=m_k, other=0.0).to(DTYPE)
        b_x = tl.dot(b_t, b_p.to(DTYPE), b_x, input_precision=PRECISION)
        b_xr, b_xi = split_pairs(b_x, BM, L)
        b_er = tl.reshape(b_br.to(tl.float32), [BM // 8, 8, L])
        b_ei = tl.reshape(b_bi.to(tl.float32), [BM // 8, 8, L])
        b_gr += tl.reshape(tl.sum(b_er * b_xr + b_ei * b_xi, axis=2), [BM])
        b_gi += tl.reshape(tl.sum(b_ei * b_xr - b_er * b_xi, axis=2), [BM])

        b_w = (b_k.to(tl.float32) * (n - 1 - o_l).to(tl.float32)[:, None]).to(DTYPE)
        b_d = tl.dot(b_t, b_w, b_d + b_s * n.to(tl.float32), input_precision=PRECISION)
        b_s = tl.dot(b_t, b_k, b_s, input_precision=PRECISION)

    if HAS_COSTATE:
        p_f = p_e + (i_h * L + tl.minimum(L, T - (stop - 1) * L) - 1) * (2 * M) + o_m
        b_dr, b_di = split_pairs(scale_pairs(b_d, tl.load(p_f), -tl.load(p_f + M), BM, BR), BM, BR)
        # Q is the conjugate of the gradient; so are both factors here.
        o_y = tl.reshape(o_m, [BM // 8, 8, 1]) * (2 * P) + 2 * tl.reshape(first + o_r, [1, 1, BR])
        m_y = tl.reshape(m_r, [1, 1, BR])
        b_yr = tl.load(p_g + i_x + o_y, mask=m_y, other=0.0)
        b_yi = tl.load(p_g + i_x + o_y + 1, mask=m_y, other=0.0)
        # One query head of a group stands for the state that they share.
        shared = tl.where(i_q % G == 0, 1.0, 0.0)
        b_gr += shared * tl.reshape(tl.sum(b_yr * b_dr - b_yi * b_di, axis=2), [BM])
        b_gi -= shared * tl.reshape(tl.sum(b_yr * b_di + b_yi * b_dr, axis=2), [BM])
    p_o = p_out + (i_p // NM).to(tl.int64) * (2 * M) + o_m
    tl.store(p_o, b_gr)
    tl.store(p_o + M, b_gi)
