"""Pass 3 of the chunkwise scan and the gradient of the decay, in one Triton kernel.

Both are part of the backward only. They walk the chunks of a segment from the last to the first.
Derivation: docs/kernels.md, "The backward pass".

Shapes, names of variables and the table of pointers are those of triton_passes.py. In short: B
batch, T time, H state heads, G query heads per state head, Hq = G H, D width of the values (or of
the keys, where k takes the place of v), P channels of a state, M basis functions, L chunk length, S
segments, r = L // 2.

The costate of a state X is the conjugate of the gradient of X. Inside a chunk of n tokens the
kernels use Z = Lambda^(n-1-r) times the costate after the chunk: token j reads it as Re(T_j^T Z).
The forward uses S = Lambda^(r+1) X in the same way.
"""
# Triton compiles these functions, so that their types differ from those that Python sees.
# pyright: reportAssignmentType=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from .triton_passes import documents_of, identity, scale_rows, state_offsets


@triton.jit
def adjoint_pass(
    i_p, p_b, p_do, p_d, p_tc, p_e, p_step, p_g, p_dv, p_y, p_n,
    T, S, chunks, H, P, first, stride_db, stride_dt, stride_dh, stride_gb, stride_gt, stride_gh,
    D: tl.constexpr, G: tl.constexpr, M: tl.constexpr, L: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr, IN_REGISTERS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Pass 3: the gradient of the values, from the chunks in reverse.

    dv_j = sum_(i>=j) Re(T_j^T b~_i) do_i + Re(T_j^T Z), where do is the gradient of the outputs,
    T_j is a power of the decay, and b~ are the weights of pass 2. The costate Z collects b~_i
    do_i^T of later chunks: it is the conjugate of the gradient of the state after the chunk, times
    Lambda^(n-1-r) for a chunk of n tokens. dk comes in the same way from (e~, q). The sums go over
    the G query heads that share a state head.

    Tiles: costate [2M, BD] fp32 as (Re ; Im), b~ [L, 2M], do and dv [L, BD], T [L, 2M], transposed
    scores [L, L]. Bytes per token and query head: b~ and the scores once per block of D, do once;
    dv once per state head.

    Args:
        i_p: The index of this program, one of B H S ceil(D / BD).
        p_b: b~ as (Re | Im), [B, Hq, T, 2M]. With p_d it is [H, L, 2M], the same for every chunk.
        p_do: The rows do, [B, T, Hq, D], the last dimension dense.
        p_d: Scores of the linear readout, [H, L, L], as in `expand_kernel`; None for the query
            readout.
        p_tc: conj(T) as (Re | -Im), [H, L, 2M]: T_j = Lambda^(r-j) for position j of a chunk, with
            r = L // 2.
        p_e: E as (Re | Im), [H, L, 2M] fp32: E_i = Lambda^(i-r).
        p_step: enter = Lambda^(r+1) and carry = Lambda^L as (Re | Im), [H, 2, 2M] fp32.
        p_g: Gradients of the states after each segment, [B, H, S, M, P, 2] fp32, or None for zeros.
        p_dv: Filled with dv, [B, T, H, D], the last dimension dense. None if only costates are
            wanted.
        p_y: With p_dv, filled with the gradient of the initial state in channels first to first +
            D, [B, H, M, P, 2], or None. Without p_dv, filled with the gradients of the states
            before the segments when each starts from zero after it, [B, H, S, M, P, 2].
        p_n: The id of each token's document, [B, T] int32, or None.
        T: Tokens of a sequence.
        S: Segments.
        chunks: Chunks of a segment; the last segment may have fewer.
        H: State heads.
        P: Channels of a state.
        first: The channel of the state at which v begins.
        stride_db: Stride of do over sequences.
        stride_dt: Stride of do over tokens.
        stride_dh: Stride of do over heads.
        stride_gb: Stride of dv over sequences.
        stride_gt: Stride of dv over tokens.
        stride_gh: Stride of dv over heads.
        D: Width of do and dv.
        G: Query heads per state head.
        M: Basis functions.
        L: Chunk length.
        BD: Channels of a program.
        PRECISION: Precision of fp32 products.
        IN_REGISTERS: True to keep T in registers through the loop over chunks.
        EVEN: True if every chunk has L tokens.
    """
    # This program's block of channels, segment, sequence and state head.
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

    # Load the tables. The product with the identity brings conj(T) into the layout in which it can
    # be a first operand from registers.
    b_tc = tl.load(p_tc + (i_h * L + o_l)[:, None] * (2 * M) + o_n[None, :])
    if IN_REGISTERS and OUTPUT:
        b_tc = tl.dot(identity(L, DTYPE), b_tc).to(DTYPE)
    p_f = p_step + i_h * (4 * M) + o_m
    b_cr = tl.load(p_f + 2 * M)
    b_ci = tl.load(p_f + 3 * M)
    # The costate enters the last chunk, which has n tokens, times Lambda^(n-1-r): row n - 1 of E.
    p_l = p_e + (i_h * L + tl.minimum(L, T - (stop - 1) * L) - 1) * (2 * M) + o_m
    b_lr = tl.load(p_l)
    b_li = tl.load(p_l + M)
    # The costate after the segment is the conjugate of the gradient: the sign of the imaginary
    # rows.
    b_sign = tl.where(o_n < M, 1.0, -1.0)[:, None]
    b_z = tl.zeros([2 * M, BD], dtype=tl.float32)
    if p_g is not None:
        o_x = (o_n % M)[:, None] * (2 * P) + (o_n // M)[:, None] + 2 * (first + o_d)[None, :]
        b_z = b_sign * tl.load(
            p_g + (i_bh * S + i_s) * M * P * 2 + o_x, mask=m_d[None, :], other=0.0
        )

    # Pointers to the tokens of chunk 0 and the first query head; the loops add the offsets.
    p_dt = p_do + i_b * stride_db + i_h * G * stride_dh + o_l[:, None] * stride_dt + o_d[None, :]
    if OUTPUT:
        p_gt = p_dv + i_b * stride_gb + i_h * stride_gh + o_l[:, None] * stride_gt + o_d[None, :]
    p_bt = p_b + i_bh * G * T * (2 * M) + o_l[:, None] * (2 * M) + o_n[None, :]
    if LINEAR:
        b_b = tl.load(p_b + (i_h * L + o_l)[:, None] * (2 * M) + o_n[None, :])
        b_p = tl.load(p_d + (i_h * L + o_l)[None, :] * L + o_l[:, None])
    # From the last chunk to the first. b_z is the costate Z, b_b are the weights b~, b_p their
    # scores [j, i], b_do and b_dv are do and dv.
    for i in range(0, stop - start):
        i_c = stop - 1 - i
        i_t = tl.cast(i_c, tl.int64) * L
        m_t = (i_c * L + o_l < T) | EVEN
        # The costate enters the chunk: times Lambda^(n-1-r) the last one, times Lambda^L the
        # others.
        b_re = tl.where(i == 0, b_lr, b_cr)[:, None]
        b_im = tl.where(i == 0, b_li, b_ci)[:, None]
        b_z = scale_rows(b_z, b_re, b_im, M, BD)
        if p_n is not None:
            b_n, n_before, n_last = documents_of(p_n, i_b, i_c, T, L)
        # The part of dv that comes from later chunks. In packed documents, only tokens of the
        # chunk's last document have reached the state after the chunk.
        if OUTPUT:
            b_dv = tl.dot(b_tc, b_z.to(DTYPE), input_precision=PRECISION)
            if p_n is not None:
                b_dv = tl.where((b_n == n_last)[:, None], b_dv, 0.0)
        # The costate passes to the state before the chunk only if the chunk and the token before it
        # share one document.
        if p_n is not None:
            b_z = tl.where(n_before == n_last, b_z, 0.0)
        # Add up the query heads that share the state head.
        for i_g in range(0, G):
            p_dg = p_dt + i_t * stride_dt + tl.cast(i_g, tl.int64) * stride_dh
            b_do = tl.load(p_dg, mask=m_t[:, None] & m_d[None, :], other=0.0).to(DTYPE)
            if not LINEAR:
                b_b = tl.load(
                    p_bt + (tl.cast(i_g, tl.int64) * T + i_t) * (2 * M),
                    mask=m_t[:, None],
                    other=0.0,
                )
            # The part of dv from tokens i >= j of the same chunk, by scores [j, i] of one document.
            if OUTPUT:
                if not LINEAR:
                    b_p = tl.dot(b_tc, tl.trans(b_b), input_precision=PRECISION)
                    b_p = tl.where(o_l[:, None] <= o_l[None, :], b_p, 0.0).to(DTYPE)
                b_d = b_p
                if p_n is not None:
                    b_d = tl.where(b_n[:, None] == b_n[None, :], b_p, 0.0)
                b_dv = tl.dot(b_d, b_do, b_dv, input_precision=PRECISION)
            # Add this chunk's tokens to the costate: those that have read the state before the
            # chunk.
            if p_n is not None:
                b_do = tl.where((b_n == n_before)[:, None], b_do, 0.0)
            b_z = tl.dot(tl.trans(b_b), b_do, b_z, input_precision=PRECISION)
        if OUTPUT:
            tl.store(
                p_gt + i_t * stride_gt,
                b_dv.to(p_dv.dtype.element_ty),
                mask=m_t[:, None] & m_d[None, :],
            )

    # Store the gradient of the initial state (the first segment only), or of the state before each
    # segment: the conjugate of enter Z, where enter = Lambda^(r+1) leads from S back to X.
    if p_y is not None:  # noqa: SIM102 (decided when the kernel is compiled; the next line when it runs)
        if (not OUTPUT) | (i_s == 0):
            b_z = b_sign * scale_rows(b_z, tl.load(p_f)[:, None], tl.load(p_f + M)[:, None], M, BD)
            i_y = i_bh if OUTPUT else i_bh * S + i_s
            p_yt = p_y + i_y * M * P * 2 + state_offsets(o_n[:, None], first + o_d[None, :], P, M)
            tl.store(p_yt, b_z, mask=m_d[None, :])


@triton.jit
def split_pairs(b_x, BM: tl.constexpr, N: tl.constexpr):
    """Splits a tile of complex numbers into real and imaginary parts, [BM / 8, 8, N] each.

    Args:
        b_x: The tile, [2 BM, N]. Its rows alternate in groups of eight: 8 real parts, then the 8
            imaginary parts that belong to them.
        BM: Complex rows of the tile.
        N: Columns of the tile.
    """
    return tl.split(tl.permute(tl.reshape(b_x, [BM // 8, 2, 8, N]), (0, 2, 3, 1)))


@triton.jit
def scale_pairs(b_x, b_re, b_im, BM: tl.constexpr, N: tl.constexpr):
    """Multiplies the rows of a tile by complex numbers.

    Args:
        b_x: The tile, [2 BM, N], its rows in groups of eight as in `split_pairs`.
        b_re: Real parts of the factors, [BM].
        b_im: Imaginary parts of the factors, likewise.
        BM: Complex rows of the tile.
        N: Columns of the tile.
    """
    # Split, multiply as complex numbers, and join in the same order of rows.
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
    PRECISION: tl.constexpr, IN_REGISTERS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The part of the gradient of theta = log_decay that (b~; do, v) carries, or (e~; q, k).

    Here do is the gradient of the outputs and b~ are the weights of pass 2. e~, q and k take the
    places of b~, do and v for the part of the keys. T_j and E_i are powers of the decay (see p_tt
    and p_e).

    It computes g = sum_j T_j y_j + Y X, from the chunks in reverse. The gradient is conj(g).

    y_j = sum_(i>=j) (i - j) (do_i . v_j) b~_i + (n - 1 - j) Z v_j + Y v_j belongs to token j of a
    chunk of n tokens: T_j y_j is the derivative by theta of everything that v_j contributes to. Z
    is the costate as in `adjoint_pass`. Y is the derivative of Z by theta, which the kernel carries
    beside Z. Without the change of frame, a chunk maps Y to Lambda^n (Y + n Z) + sum_i (i + 1) b~_i
    do_i^T.

    Y starts at zero after every segment, and X is the state before the segment. So a weight is at
    most the length of a segment, and no two large sums are subtracted from one another. T is the
    same in every chunk, so that y_j can be summed over chunks in the accumulator of its products.

    Tiles: costate Z and its derivative Y [2 BM, BD] fp32, y [2 BM, L] fp32, do and v [L, BD], b~
    [L, 2 BM], scores [L, L]. Bytes per token and query head: b~ once per block of D, do and v once
    per block of M.

    Tokens are the columns of y, so that Z and Y are first operands of products and stay in
    registers. Their rows alternate in groups of eight: 8 real parts, then their 8 imaginary parts.
    A thread has rows r and r + 8 of a product's result, so that both parts of a complex number are
    in one thread at any BM.

    Args:
        i_p: The index of this program, one of B Hq S ceil(D / BD) (M / BM).
        p_b: b~ as (Re | Im), [B, Hq, T, 2M]. With p_d it is [H, L, 2M], the same for every chunk.
        p_do: The rows do, [B, T, Hq, D], the last dimension dense.
        p_v: The columns v, [B, T, H, D], the last dimension dense.
        p_d: Not None in the linear readout; it is not read here.
        p_tt: conj(T) transposed, [H, 2M, L]: T_j = Lambda^(r-j) for position j of a chunk, with r =
            L // 2.
        p_e: E as (Re | Im), [H, L, 2M] fp32: E_i = Lambda^(i-r).
        p_step: enter = Lambda^(r+1) and carry = Lambda^L as (Re | Im), [H, 2, 2M] fp32.
        p_x: States before each segment, [B, H, S, M, P, 2] fp32, or None for zeros.
        p_g: Gradients of the states after each segment, likewise.
        p_out: Filled with parts of g as (Re g | Im g), [B Hq S ceil(D / BD), 2M] fp32. `sum_kernel`
            adds them in a fixed order.
        p_n: The id of each token's document, [B, T] int32, or None.
        T: Tokens of a sequence.
        S: Segments.
        chunks: Chunks of a segment; the last segment may have fewer.
        Hq: Query heads.
        P: Channels of a state.
        first: The channel of the state at which v begins.
        stride_db: Stride of do over sequences.
        stride_dt: Stride of do over tokens.
        stride_dh: Stride of do over heads.
        stride_vb: Stride of v over sequences.
        stride_vt: Stride of v over tokens.
        stride_vh: Stride of v over heads.
        D: Width of do and v.
        G: Query heads per state head.
        M: Basis functions.
        L: Chunk length.
        BD: Channels of a program.
        BM: Basis functions of a program, a multiple of 8.
        PRECISION: Precision of fp32 products.
        IN_REGISTERS: True to keep b~^T in registers for all of its products, by a product with the
            identity.
        EVEN: True if every chunk has L tokens.
    """
    # This program's block of basis functions, block of channels, segment, query head and sequence.
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
    # Rows alternate in groups of eight, real and imaginary. o_i is 1 if a row holds an imaginary
    # part, else 0. o_n is the position of a row in (Re | Im).
    o_i = o_2 // 8 % 2
    o_n = i_m * BM + o_2 // 16 * 8 + o_2 % 8 + o_i * M
    m_d = (o_d < D) | (EVEN and D % BD == 0)
    start = i_s * chunks
    stop = tl.minimum(start + chunks, tl.cdiv(T, L))

    # Load the factors of the costate, as in `adjoint_pass`, and the costate after the segment.
    p_f = p_step + i_h * (4 * M) + o_m
    p_l = p_e + (i_h * L + tl.minimum(L, T - (stop - 1) * L) - 1) * (2 * M) + o_m
    b_lr = tl.load(p_l)
    b_li = tl.load(p_l + M)
    b_cr = tl.load(p_f + 2 * M)
    b_ci = tl.load(p_f + 3 * M)
    i_x = ((i_b * (Hq // G) + i_h) * S + i_s) * M * P * 2
    # b_z is Z, and b_t is Y.
    b_z = tl.zeros([2 * BM, BD], dtype=tl.float32)
    b_t = tl.zeros([2 * BM, BD], dtype=tl.float32)
    if p_g is not None:
        # The query heads of a group share the state: only the first of them starts from its
        # gradient.
        m_g = m_d & (i_q % G == 0)
        o_x = (o_n % M)[:, None] * (2 * P) + o_i[:, None] + 2 * (first + o_d)[None, :]
        b_z = tl.where(o_i == 0, 1.0, -1.0)[:, None] * tl.load(
            p_g + i_x + o_x, mask=m_g[None, :], other=0.0
        )
    # The positions in the chunk, and y.
    b_i = o_l.to(tl.float32)
    if IN_REGISTERS:
        b_eye = identity(L, DTYPE)
    b_y = tl.zeros([2 * BM, L], dtype=tl.float32)

    # Pointers to the tokens of chunk 0; the loop adds the chunk's offset.
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
    # From the last chunk to the first. b_z is the costate Z, b_t its derivative Y, b_y is y; b_b
    # are the weights b~, b_p the scores (i - j) (do_i . v_j).
    for i in range(0, stop - start):
        i_c = stop - 1 - i
        i_t = tl.cast(i_c, tl.int64) * L
        m_t = (i_c * L + o_l < T) | EVEN
        # The chunk has n tokens.
        n = L if EVEN else tl.minimum(L, T - i_c * L)
        b_b = tl.load(p_bt if LINEAR else p_bt + i_t * (2 * M), mask=m_t[:, None], other=0.0)
        b_do = tl.load(p_dt + i_t * stride_dt, mask=m_t[:, None] & m_d[None, :], other=0.0).to(
            DTYPE
        )
        b_v = tl.load(p_vt + i_t * stride_vt, mask=m_t[:, None] & m_d[None, :], other=0.0).to(DTYPE)
        b_re = tl.where(i == 0, b_lr, b_cr)
        b_im = tl.where(i == 0, b_li, b_ci)
        # The costate and its derivative (b_t) enter the chunk.
        b_z = scale_pairs(b_z, b_re, b_im, BM, BD)
        b_t = scale_pairs(b_t, b_re, b_im, BM, BD)

        # Scores (do_i . v_j) (i - j) within the chunk. Here and below, the integer weights multiply
        # fp32 values, before those are rounded to the operands' dtype.
        b_p = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        # It is b_p * (i - j), written so that no [L, L] tile of weights stays in registers.
        b_p = tl.where(o_l[:, None] >= o_l[None, :], b_p * b_i[:, None] - b_p * b_i[None, :], 0.0)
        # Packed documents: only tokens of the chunk's last document reach the state after the
        # chunk, and only tokens of the document before the chunk read the state before it. v and do
        # are loaded once more with these masks.
        if p_n is not None:
            b_n, n_before, n_last = documents_of(p_n, i_b, i_c, T, L)
            b_p = tl.where(b_n[:, None] == b_n[None, :], b_p, 0.0)
            m_v = (m_t & (b_n == n_last))[:, None] & m_d[None, :]
            b_v = tl.load(p_vt + i_t * stride_vt, mask=m_v, other=0.0).to(DTYPE)
            m_o = (m_t & (b_n == n_before))[:, None] & m_d[None, :]
            b_do = tl.load(p_dt + i_t * stride_dt, mask=m_o, other=0.0).to(DTYPE)
        # y += (n - 1 - j) Z v_j + Y v_j.
        b_x = tl.dot(b_z.to(DTYPE), tl.trans(b_v), input_precision=PRECISION)
        b_y += b_x * (n - 1 - o_l).to(tl.float32)[None, :]
        b_y = tl.dot(b_t.to(DTYPE), tl.trans(b_v), b_y, input_precision=PRECISION)
        # y += sum_i (i - j) (do_i . v_j) b~_i. b~^T is the first operand of three products. If it
        # stays in registers, it takes the weight i + 1 of the second one; else do takes the weight.
        b_bt = tl.trans(b_b)
        b_bw = b_bt
        if IN_REGISTERS:
            b_bt = tl.dot(b_bt, b_eye)
            b_bw = (b_bt * (b_i + 1.0)[None, :]).to(DTYPE)
            b_bt = b_bt.to(DTYPE)
        b_y = tl.dot(b_bt, b_p.to(DTYPE), b_y, input_precision=PRECISION)
        # Z and Y pass to the state before the chunk only if both share one document.
        if p_n is not None:
            b_z = tl.where(n_before == n_last, b_z, 0.0)
            b_t = tl.where(n_before == n_last, b_t, 0.0)
        b_w = b_do
        if not IN_REGISTERS:
            if L < 64 and p_n is None:
                # These GPUs multiply by `mma.sync`. A tile that goes both into products and into
                # other arithmetic would lie in shared memory with eight rows in one bank. So do is
                # loaded once more, at an address that the compiler cannot know to be the same (i_c
                # // T is 0).
                b_w = tl.load(
                    p_dt + (i_t * stride_dt + i_c // T), mask=m_t[:, None] & m_d[None, :], other=0.0
                )
            b_w = (b_w.to(tl.float32) * (b_i + 1.0)[:, None]).to(DTYPE)
        # Y += n Z + sum_i (i + 1) b~_i do_i^T, and then Z += sum_i b~_i do_i^T.
        b_t = tl.dot(b_bw, b_w, b_t + b_z * tl.cast(n, tl.float32), input_precision=PRECISION)
        b_z = tl.dot(b_bt, b_do, b_z, input_precision=PRECISION)

    # g = sum_j T_j y_j, complex. The table holds conjugates of T.
    o_8 = tl.reshape(o_m, [BM // 8, 8, 1])
    b_yr, b_yi = split_pairs(b_y, BM, L)
    p_tt += i_h * (2 * M) * L + o_8 * L + tl.reshape(o_l, [1, 1, L])
    b_tr = tl.load(p_tt).to(tl.float32)
    b_ti = -tl.load(p_tt + M * L).to(tl.float32)
    b_gr = tl.reshape(tl.sum(b_tr * b_yr - b_ti * b_yi, axis=2), [BM])
    b_gi = tl.reshape(tl.sum(b_tr * b_yi + b_ti * b_yr, axis=2), [BM])
    # g += Y X with the state before the segment; enter = Lambda^(r+1) leads from the chunk's frame
    # to X.
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
    BM: tl.constexpr, PRECISION: tl.constexpr, IN_REGISTERS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Pass 3 and, if there is p_out, the part of the decay's gradient that the same tensors carry.

    The tensors are explained in `adjoint_pass` and `decay_pass`. DECAY is 1 if there is p_out, else
    0. Some programs run `adjoint_pass`, the others `decay_pass`. Both walk the chunks of a segment
    in reverse and read b~ and do. The programs of one (batch, state head, segment) have consecutive
    ids, so that they run at the same time and find in the L2 cache what one of them has loaded.
    Then b~, do and v are read from memory once, and dv is written once, per token and query head.

    Grid: B H S (ceil(D / BD) + DECAY G ceil(D / BK) (M / BM)) programs.

    Args:
        p_b: b~, [B, Hq, T, 2M], or e~. With p_d it is [H, L, 2M], the same for every chunk.
        p_do: The rows do, [B, T, Hq, D], or q.
        p_v: The columns v, [B, T, H, D], or k. It is read only if there is p_out.
        p_d: Scores of the linear readout, [H, L, L]; None for the query readout.
        p_tc: conj(T), [H, L, 2M]: T_j = Lambda^(r-j) for position j of a chunk, with r = L // 2.
        p_tt: conj(T) transposed, [H, 2M, L].
        p_e: E, [H, L, 2M] fp32: E_i = Lambda^(i-r).
        p_step: enter = Lambda^(r+1) and carry = Lambda^L, [H, 2, 2M] fp32.
        p_x: States before each segment, [B, H, S, M, P, 2] fp32, or None for zeros. It is read only
            if there is p_out.
        p_g: Gradients of the states after each segment, likewise.
        p_dv: Filled as in `adjoint_pass`, or None.
        p_y: Filled as in `adjoint_pass`, or None.
        p_out: Filled as in `decay_pass`, or None if the decay's gradient is not wanted.
        p_n: The id of each token's document, [B, T] int32, or None.
        T: Tokens of a sequence.
        S: Segments.
        chunks: Chunks of a segment; the last segment may have fewer.
        H: State heads.
        P: Channels of a state.
        first: The channel of the state at which v begins.
        stride_db: Stride of do over sequences.
        stride_dt: Stride of do over tokens.
        stride_dh: Stride of do over heads.
        stride_vb: Stride of v over sequences.
        stride_vt: Stride of v over tokens.
        stride_vh: Stride of v over heads.
        stride_gb: Stride of dv over sequences.
        stride_gt: Stride of dv over tokens.
        stride_gh: Stride of dv over heads.
        D: Width of do, v and dv.
        G: Query heads per state head.
        M: Basis functions.
        L: Chunk length.
        BD: Channels of a program of `adjoint_pass`.
        BK: Channels of a program of `decay_pass`.
        BM: Basis functions of a program of `decay_pass`.
        PRECISION: Precision of fp32 products.
        IN_REGISTERS: True to keep first operands of several products in registers.
        EVEN: True if every chunk has L tokens.
    """
    # N programs for each (batch, state head, segment): NA of pass 3, then G ND of the decay.
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
            D, G, M, L, BD, PRECISION, IN_REGISTERS, EVEN,
        )  # fmt: skip
    elif DECAY:
        i_d = i_n - NA
        # The query head, of all sequences. decay_pass counts its programs by query head, then
        # segment.
        i_q = i_g // S * G + i_d // ND
        decay_pass(
            (i_q * S + i_g % S) * ND + i_d % ND, p_b, p_do, p_v, p_d, p_tt, p_e, p_step, p_x, p_g, p_out, p_n,
            T, S, chunks, H * G, P, first, stride_db, stride_dt, stride_dh, stride_vb, stride_vt, stride_vh,
            D, G, M, L, BK, BM, PRECISION, IN_REGISTERS, EVEN,
        )  # fmt: skip
