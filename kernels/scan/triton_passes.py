"""Passes of the chunkwise scan as Triton kernels: contract (pass 1), mix (W) and expand (pass 2).

The scan is the recurrence of the paper's eq. 11 with the readout of its eq. 13. Pass 3 and the
gradient of the decay are in triton_adjoint.py. Notation and derivation: docs/kernels.md.

Shapes: B batch, T time, H state heads, G query heads per state head, Hq = G H, R key features, D
value width, P channels of a state (R + D, or D in the linear readout), M basis functions, L chunk
length, S segments of time that run side by side. In exponents, r = L // 2 is the middle of a chunk,
and i and j are positions in the chunk.

One program goes through the chunks of one segment, and keeps its part of the state in registers, in
fp32. Only states between segments are in memory, never a state per token. All program ids are along
the first axis of the grid: the other axes end at 65,535.

    pointer  tensor                                                  shape               dtype
    p_t      T_j = Lambda^(r-j) as (Re | Im)                         [H, L, 2M]          operands'
    p_tc     conj(T_j), that is (Re | -Im)                           [H, L, 2M]          operands'
    p_tt     conj(T_j) transposed                                    [H, 2M, L]          operands'
    p_e      E_i = Lambda^(i-r) as (Re | Im)                         [H, L, 2M]          fp32
    p_step   enter = Lambda^(r+1), carry = Lambda^L, each (Re | Im)  [H, 2, 2M]          fp32
    p_a      a of (q, k), or c of (do, v), rows (Re | Im)            [B, Hq, T, 2M]      operands'
    p_b      b~ = E b, or e~ = E e, rows (Re | Im)                   [B, Hq, T, 2M]      operands'
    p_x      states X before each segment (unit gain), real pairs    [B, H, S, M, P, 2]  fp32
    p_g      gradients of the states after each segment, real pairs  [B, H, S, M, P, 2]  fp32
    p_n      the document of each token                              [B, T]              int32

A pointer that is None stands for a tensor that is not there: zeros in place of a state (p_x), a
state that is not wanted (p_y), no packed documents (p_n). The code for it is then not compiled.

Names: `p_*` pointers, `i_*` indices (of a program's head, segment, block, ...), `o_*` offsets,
`b_*` tiles, `m_*` masks, `n_*` documents, `stride_*` strides in elements (stride_qb: tensor q,
dimension b of b batch, t time, h heads), constants in capitals.

Complex numbers are stacked as (Re | Im) along one axis, so that a complex product is one real
matrix product of width 2M. The halves are split in registers only to multiply by E or by a power of
Lambda.

Inside a chunk, Lambda^(i-j) = E_i T_j. The state X before a chunk is used as S = Lambda^(r+1) X, so
that E_i applies once to the sum of both: X_i = E_i (S + sum_(j<=i) T_j z_j^T). The tile of the
state is multiplied by `enter` before the first chunk (X becomes S), and by `carry` before every
later chunk (S and the sum of its chunk become the next S). It leaves the last chunk, which has n
tokens, as Lambda^(n-1-r) (S + sum_j T_j z_j^T).

Rules. No product takes a transposed accumulator, because Triton 3.4 to 3.7.0 miscompile that on
Hopper: `tl.trans` is applied to loaded tiles only. Operands are bf16 with fp32 accumulation, or
fp32 with `PRECISION` (never plain TF32). EVEN means that every chunk has L tokens: the compiler
then knows that a mask that ends in `| EVEN` is true, and leaves it out.
"""
# Triton compiles these functions, so that their types differ from those that Python sees.
# pyright: reportAssignmentType=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit
def stacked_index(i_m, M: tl.constexpr, BM: tl.constexpr):
    """Returns the positions in (Re | Im) of one block of basis functions, [2 BM].

    Args:
        i_m: The index of the block.
        M: Basis functions; (Re | Im) has M real parts, then M imaginary parts.
        BM: Basis functions of a block.

    Returns:
        The positions of the block's BM real parts, then those of its BM imaginary parts.
    """
    # The half (0 or 1), the block in it, and the place in the block.
    o_n = tl.arange(0, 2 * BM)
    return (o_n // BM) * M + i_m * BM + o_n % BM


@triton.jit
def state_offsets(o_n, o_p, P, M: tl.constexpr):
    """Returns the int64 offsets of elements in a state [M, P, 2], for stores after a kernel's loop.

    Kernels also load a state before their loop over chunks. There they write the same expression
    out in 32-bit integers, on purpose. If the load used this function too, the compiler would
    compute the offsets once, before the loop, and keep them in registers until the store.

    Args:
        o_n: Positions in (Re | Im), from 0 to 2M - 1: M real parts, then M imaginary parts.
        o_p: Channels, from 0 to P - 1.
        P: Channels of a state.
        M: Basis functions.
    """
    return tl.cast(o_n % M, tl.int64) * (2 * P) + 2 * o_p + o_n // M


@triton.jit
def documents_of(p_n, i_b, i_c, T, L: tl.constexpr):
    """Loads the ids of the packed documents that decide which tokens read and reach which states.

    A token reads the state before its chunk if it has the document of the token before the chunk.
    It reaches the state after the chunk if it has the document of the chunk's last token.

    Args:
        p_n: The id of each token's document, [B, T] int32.
        i_b: The index of the sequence.
        i_c: The index of the chunk.
        T: Tokens of a sequence.
        L: Chunk length.

    Returns:
        The ids of the documents of the chunk's tokens [L] (-1 past T), of the token before the
        chunk (0 before the first token: the document of the initial state), and of the chunk's last
        token.
    """
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
    """Returns the identity matrix [L, L] in DTYPE.

    The product of a tile with it is exact in bf16 and has the register layout of a product's
    result. In that layout `wgmma`, the matrix instruction of Hopper, can take the tile as its first
    operand from registers.
    """
    o_l = tl.arange(0, L)
    return tl.where(o_l[:, None] == o_l[None, :], 1.0, 0.0).to(DTYPE)


@triton.jit
def scale_columns(b_x, b_re, b_im, N: tl.constexpr, BM: tl.constexpr, CONJ: tl.constexpr = 0):
    """Multiplies the columns (Re | Im) of a tile by complex numbers.

    Args:
        b_x: The tile x, [N, 2 BM]: BM columns of real parts, then BM of imaginary parts.
        b_re: Real parts of the factors y, [N, BM] or [1, BM].
        b_im: Imaginary parts of the factors, likewise.
        N: Rows of the tile.
        BM: Complex columns of the tile.
        CONJ: 0 for x y, 1 for conj(x) y, 2 for conj(x y).
    """
    # [N, 2 BM] -> [N, 2, BM] -> the real parts of x, b_u, and the imaginary ones, b_w: [N, BM]
    # each.
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
    """Multiplies the rows (Re ; Im) of a tile by complex numbers.

    Args:
        b_x: The tile, [2 BM, N]: BM rows of real parts, then BM of imaginary parts.
        b_re: Real parts of the factors, [BM, 1].
        b_im: Imaginary parts of the factors, likewise.
        BM: Complex rows of the tile.
        N: Columns of the tile.
    """
    # [2 BM, N] -> [2, BM, N] -> the real parts of the tile, b_u, and the imaginary ones, b_w: [BM,
    # N] each.
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
    """Pass 1: reads the state of the keys by each query.

    a_i = X^k_i q_i = E_i (sum_(j<=i) (q_i . k_j) T_j + S q_i), where E and T are powers of the
    decay and S = Lambda^(r+1) X for the state X before the chunk (see the module's head). The
    forward runs it for (q, k), the backward also for (do, v), which gives c = X^v do.

    Grid: B Hq S (M / BM) ceil(R / BR) programs; R <= BR unless SUM. Tiles: state [BR, 2 BM] fp32, q
    and k [L, BR], T [L, 2 BM], scores [L, L]. Bytes per token and query head: q and k once per
    block of M, a once.

    Args:
        p_q: The rows q, [B, T, Hq, R], the last dimension dense.
        p_k: The columns k, [B, T, H, R], the last dimension dense.
        p_t: T as (Re | Im), [H, L, 2M]: T_j = Lambda^(r-j) for position j of a chunk, r = L // 2.
        p_e: E as (Re | Im), [H, L, 2M] fp32: E_i = Lambda^(i-r).
        p_step: enter = Lambda^(r+1) and carry = Lambda^L as (Re | Im), [H, 2, 2M] fp32. A state is
            multiplied by the first when it enters a segment, and by the second at each later chunk.
        p_x: States before each segment, [B, H, S, M, P, 2] fp32, or None for zeros.
        p_a: Filled with a, [B, Hq, T, 2M] (with its conjugate if CONJ). With SUM, [B Hq S ceil(R /
            BR), 2M] fp32, filled with parts of sum_t a_t.
        p_y: Filled with the last state in channels first to first + R, [B, H, M, P, 2], or None.
        p_n: The id of each token's document, [B, T] int32, or None.
        T: Tokens of a sequence.
        S: Segments.
        chunks: Chunks of a segment; the last segment may have fewer.
        Hq: Query heads.
        G: Query heads per state head.
        P: Channels of a state.
        first: The channel of the state at which k begins.
        stride_qb: Stride of q over sequences.
        stride_qt: Stride of q over tokens.
        stride_qh: Stride of q over heads.
        stride_kb: Stride of k over sequences.
        stride_kt: Stride of k over tokens.
        stride_kh: Stride of k over heads.
        R: Width of q and k.
        M: Basis functions.
        L: Chunk length.
        BR: Channels of a program.
        BM: Basis functions of a program.
        PRECISION: Precision of fp32 products.
        SUM: True to add up a over time (the linear readout's gradient).
        CONJ: True to store the conjugate of a.
        EVEN: True if every chunk has L tokens.
    """
    # This program's block of basis functions, block of channels, segment, query head and sequence.
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

    # Load the tables, and the state before the segment, transposed: [channels, basis functions].
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

    # Pointers to the tokens of chunk 0; the loop adds the chunk's offset.
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
    # In each chunk, b_s is the state S of the keys, b_q and b_k are its tokens, b_p their scores,
    # and b_a is the result a.
    for i_c in range(start, stop):
        i_t = tl.cast(i_c, tl.int64) * L
        m_t = (i_c * L + o_l < T) | EVEN
        b_q = tl.load(p_qt + i_t * stride_qt, mask=m_t[:, None] & m_r[None, :], other=0.0).to(DTYPE)
        b_k = tl.load(p_kt + i_t * stride_kt, mask=m_t[:, None] & m_r[None, :], other=0.0).to(DTYPE)
        # The state enters the chunk. `enter` and `carry` are loaded in each chunk: before the loop,
        # their 64 values would occupy a quarter of the registers.
        p_f = p_step + i_h * (4 * M) + tl.where(i_c == start, 0, 2 * M) + o_m
        b_s = scale_columns(b_s, tl.load(p_f)[None, :], tl.load(p_f + M)[None, :], BR, BM)
        # The scores q k^T within the chunk, and q S from the tokens before it.
        b_p = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        m_p = o_l[:, None] >= o_l[None, :]
        b_a = tl.dot(b_q, b_s.to(DTYPE), input_precision=PRECISION)
        # Packed documents: scores count within a document. Only tokens of the document before the
        # chunk read its state, and the state passes on only if all of the chunk belongs to it.
        if p_n is not None:
            b_n, n_before, n_last = documents_of(p_n, i_b, i_c, T, L)
            m_p = m_p & (b_n[:, None] == b_n[None, :])
            b_a = tl.where((b_n == n_before)[:, None], b_a, 0.0)
            b_s = tl.where(n_before == n_last, b_s, 0.0)
            # Only keys of the chunk's last document reach the state. They are loaded once more:
            # masked in registers they would be a computed tile, and only loaded ones are
            # transposed.
            m_k = (m_t & (b_n == n_last))[:, None] & m_r[None, :]
            b_k = tl.load(p_kt + i_t * stride_kt, mask=m_k, other=0.0).to(DTYPE)
        # Add the tokens within the chunk: tril(q k^T) T.
        b_p = tl.where(m_p, b_p, 0.0).to(DTYPE)
        b_a = tl.dot(b_p, b_t, b_a, input_precision=PRECISION)
        # Multiply by E and store. A sum over time adds the rows chunk over chunk, and multiplies by
        # E once, after the loop.
        if SUM:
            b_sum += b_a
        else:
            if p_n is not None:
                # i_c // T is always 0, which the compiler cannot know. So it loads E once more
                # here, and the 64 registers of E are free until then.
                b_er = tl.load(p_em + i_c // T)
                b_ei = tl.load(p_em + i_c // T + M)
            b_a = scale_columns(b_a, b_er, b_ei, L, BM, CONJ=2 * CONJ)
            tl.store(p_at + i_t * (2 * M), b_a.to(p_a.dtype.element_ty), mask=m_t[:, None])
        # Add the chunk's keys to the state: S + sum_j k_j T_j.
        b_s = tl.dot(tl.trans(b_k), b_t, b_s, input_precision=PRECISION)

    # Each program of SUM stores one row.
    if SUM:
        b_sum = tl.sum(scale_columns(b_sum, b_er, b_ei, L, BM), axis=0)
        tl.store(p_a + (i_p // NM).to(tl.int64) * (2 * M) + o_n, b_sum)
    # The last segment stores the final state, once for the query heads that share it. The factor
    # Lambda^(n-1-r) for the n tokens of the last chunk is row n - 1 of E.
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
    """Multiplies the result of pass 1 by W: b~ = E (W a) for every token.

    Pass 1 (`contract_kernel`) reads a state by each token: by the queries it gives a, and in the
    backward by the gradients of the outputs it gives c. W is a real matrix on stacked (Re | Im). E
    is the power of the decay that belongs to a token's position in its chunk; the tilde of b~ and
    e~ means that it is a factor of them. The backward also computes e~ = E conj(W^T conj(c)), where
    conj changes the sign of the imaginary half, and dW = sum_t conj(c_t) a_t^T.

    Grid: B Hq ceil(T / (L blocks)) (M / BM) programs. Each keeps its columns of W^T, and of W, on
    chip for `blocks` chunks. Tiles: a and conj(c) [L, 2M], W [2M, 2 BM], b~ and e~ [L, 2 BM], dW [2
    BM, 2M] fp32. Bytes per token and query head: a and conj(c) once per block of M, and if M / BM
    is not 2, also the block's own columns of conj(c); b~ and e~ once.

    Args:
        p_a: a as (Re | Im), [B, Hq, T, 2M], in the operands' dtype.
        p_c: conj(c), likewise; None in the forward.
        p_w: W, [H, 2M, 2M], in the operands' dtype.
        p_e: E as (Re | Im), [H, L, 2M] fp32: E_i = Lambda^(i-r) for position i of a chunk, with r =
            L // 2.
        p_b: Filled with b~ as (Re | Im), [B, Hq, T, 2M].
        p_y: Filled with e~, likewise, if there is p_c.
        p_dw: Filled with parts of dW if there is p_c, one for each query head and span of time:
            [B Hq ceil(T / (L blocks)), 2M, 2M] fp32. PyTorch adds them in a fixed order.
        T: Tokens of a sequence.
        blocks: Chunks of a program.
        Hq: Query heads.
        G: Query heads per state head.
        M: Basis functions.
        L: Chunk length.
        BM: Basis functions of a program's results.
        PRECISION: Precision of fp32 products.
        EVEN: True if every chunk has L tokens.
    """
    NM: tl.constexpr = M // BM
    # dW needs this program's own columns of conj(c), e~ needs all of them. If its own are half of
    # all columns, conj(c) is loaded in two halves, its own and the other one, so that no column is
    # loaded twice. Otherwise all columns are loaded, and its own once more.
    HALVES: tl.constexpr = NM == 2
    # This program's block of basis functions, span of time, query head (of all sequences) and state
    # head.
    i_p = tl.program_id(0)
    spans = tl.cdiv(T, L * blocks)
    i_m = i_p % NM
    i_s = i_p // NM % spans
    i_q = i_p // (NM * spans)
    i_h = i_q % Hq // G
    o_l = tl.arange(0, L)
    o_k = tl.arange(0, 2 * M)
    o_m = i_m * BM + tl.arange(0, BM)
    o_n = stacked_index(i_m, M, BM)
    # Load the columns of W^T for b, and E.
    p_wh = p_w + i_h * (4 * M * M)
    b_wt = tl.load(p_wh + o_n[None, :] * (2 * M) + o_k[:, None])
    p_em = p_e + (i_h * L + o_l)[:, None] * (2 * M) + o_m[None, :]
    b_er = tl.load(p_em)
    b_ei = tl.load(p_em + M)
    base = i_q.to(tl.int64) * T * (2 * M)
    o_x = base + o_l[:, None] * (2 * M) + o_k[None, :]
    o_y = base + o_l[:, None] * (2 * M) + o_n[None, :]
    # The backward needs the columns of W for e: b_w multiplies the program's own columns of
    # conj(c), and b_wr the other ones (without halves, all of them).
    if p_c is not None:
        o_r = stacked_index(1 - i_m, M, BM) if HALVES else o_k
        b_wr = tl.load(p_wh + o_r[:, None] * (2 * M) + o_n[None, :])
        if HALVES:
            b_w = tl.load(p_wh + o_n[:, None] * (2 * M) + o_n[None, :])
        o_z = base + o_l[:, None] * (2 * M) + o_r[None, :]
        b_dw = tl.zeros([2 * BM, 2 * M], dtype=tl.float32)
    # One chunk after the other. b_a is a, b_b is b~, b_c and b_r are columns of conj(c), b_y is e~.
    for i_c in range(i_s * blocks, tl.minimum((i_s + 1) * blocks, tl.cdiv(T, L))):
        i_t = tl.cast(i_c, tl.int64) * (L * 2 * M)
        m_t = ((i_c * L + o_l < T) | EVEN)[:, None]
        # b~ = E (W a).
        b_a = tl.load(p_a + o_x + i_t, mask=m_t, other=0.0)
        b_b = scale_columns(tl.dot(b_a, b_wt, input_precision=PRECISION), b_er, b_ei, L, BM)
        tl.store(p_b + o_y + i_t, b_b.to(p_b.dtype.element_ty), mask=m_t)
        if p_c is not None:
            # The program's own columns of conj(c), for dW.
            b_c = tl.load(p_c + o_y + i_t, mask=m_t, other=0.0)
            # This product must not be the last one in the loop. Triton leaves a product in flight
            # over the end of the loop if only the same product takes its result, and ptxas then
            # waits for every wgmma before the next one.
            b_dw = tl.dot(tl.trans(b_c), b_a, b_dw, input_precision=PRECISION)
            # e~ = E conj(W^T conj(c)). b_r are the other columns of conj(c), or all.
            b_r = tl.load(p_c + o_z + i_t, mask=m_t, other=0.0)
            b_y = tl.dot(b_r, b_wr, input_precision=PRECISION)
            if HALVES:
                b_y = tl.dot(b_c, b_w, b_y, input_precision=PRECISION)
            b_y = scale_columns(b_y, b_er, b_ei, L, BM, CONJ=1)
            tl.store(p_y + o_y + i_t, b_y.to(p_y.dtype.element_ty), mask=m_t)
    # The programs of one span of time store the rows of one part of dW.
    if p_c is not None:
        p_dwt = p_dw + (i_p // NM).to(tl.int64) * (4 * M * M)
        tl.store(p_dwt + o_n[:, None] * (2 * M) + o_k[None, :], b_dw)


@triton.jit(do_not_specialize=["T", "S", "chunks", "Hq", "G", "P", "first"])
def expand_kernel(
    p_b, p_v, p_d, p_w, p_tt, p_e, p_step, p_x, p_o, p_y, p_n,
    T, S, chunks, Hq, G, P, first, stride_vb, stride_vt, stride_vh, stride_ob, stride_ot, stride_oh,
    D: tl.constexpr, M: tl.constexpr, L: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Pass 2: reads the state of the values with the weights b.

    o_i = Re(b_i^T X^v_i) = sum_(j<=i) Re(b~_i^T T_j) v_j + Re(b~_i^T S), where b~ = E b, E and T
    are powers of the decay, and S = Lambda^(r+1) X for the state X before the chunk (see the
    module's head). The backward computes dq in the same way, from (e~, k).

    Grid: B Hq S ceil(D / BD) programs. Tiles: state [2M, BD] fp32 as (Re ; -Im), b~ [L, 2M], v and
    o [L, BD], T [2M, L], scores [L, L]. Bytes per token and query head: b~ and the scores once per
    block of D, v and o once.

    Args:
        p_b: b~ as (Re | Im), [B, Hq, T, 2M]. With p_w it is a, and b~ = E (W a) is computed here.
            With p_d it is [H, L, 2M], the same for every chunk.
        p_v: The columns v, [B, T, H, D], the last dimension dense.
        p_d: Scores Re(b~_i^T T_j) for j <= i of the linear readout, [H, L, L], the same for every
            chunk; None for the query readout.
        p_w: W, [H, 2M, 2M], in the operands' dtype, or None.
        p_tt: conj(T) transposed, [H, 2M, L]: T_j = Lambda^(r-j) for position j of a chunk, r = L //
            2.
        p_e: E as (Re | Im), [H, L, 2M] fp32: E_i = Lambda^(i-r).
        p_step: enter = Lambda^(r+1) and carry = Lambda^L as (Re | Im), [H, 2, 2M] fp32. A state is
            multiplied by the first when it enters a segment, and by the second at each later chunk.
        p_x: States before each segment, [B, H, S, M, P, 2] fp32, or None for zeros.
        p_o: Filled with o, [B, T, Hq, D], the last dimension dense. None if only states are wanted;
            then G = 1, and p_b is not read.
        p_y: With p_o, filled with the state after the last token in channels first to first + D,
            [B, H, M, P, 2], or None. Without p_o, filled with the states that the segments leave
            when each starts from zero, [B, H, S, M, P, 2].
        p_n: The id of each token's document, [B, T] int32, or None.
        T: Tokens of a sequence.
        S: Segments.
        chunks: Chunks of a segment; the last segment may have fewer.
        Hq: Query heads.
        G: Query heads per state head.
        P: Channels of a state.
        first: The channel of the state at which v begins.
        stride_vb: Stride of v over sequences.
        stride_vt: Stride of v over tokens.
        stride_vh: Stride of v over heads.
        stride_ob: Stride of o over sequences.
        stride_ot: Stride of o over tokens.
        stride_oh: Stride of o over heads.
        D: Width of v and o.
        M: Basis functions.
        L: Chunk length.
        BD: Channels of a program.
        PRECISION: Precision of fp32 products.
        EVEN: True if every chunk has L tokens.
    """
    # This program's block of channels, segment, query head, sequence and state head.
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

    # Load the tables, and the state before the segment. Its conjugate is stored, (Re ; -Im),
    # because Re(b^T S) = Re b . Re S - Im b . Im S is then one real product of b (Re | Im) with it.
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

    # Pointers to the tokens of chunk 0; the loop adds the chunk's offset.
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
    # Load W^T and E if b~ is computed here, or the linear readout's b~ and scores.
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
    # In each chunk, b_s is the conjugate of the state S of the values, b_b are the weights b~, b_p
    # their scores, b_v the values, and b_o is the output.
    for i_c in range(start, stop):
        i_t = tl.cast(i_c, tl.int64) * L
        m_t = (i_c * L + o_l < T) | EVEN
        b_v = tl.load(p_vt + i_t * stride_vt, mask=m_t[:, None] & m_d[None, :], other=0.0).to(DTYPE)
        # The state enters the chunk. The rows are conjugates, so they take the conjugate factor.
        b_re = tl.where(i_c == start, b_fr, b_cr)[:, None]
        b_im = tl.where(i_c == start, b_fi, b_ci)[:, None]
        b_s = scale_rows(b_s, b_re, -b_im, M, BD)
        if p_n is not None:
            b_n, n_before, n_last = documents_of(p_n, i_b, i_c, T, L)
        if OUTPUT:
            # b~ of the chunk, and its scores with the tokens of the chunk.
            if not LINEAR:
                b_b = tl.load(p_bt + i_t * (2 * M), mask=m_t[:, None], other=0.0)
                if p_w is not None:
                    b_b = tl.dot(b_b, b_w, input_precision=PRECISION)
                    b_b = scale_columns(b_b, b_er, b_ei, L, M).to(DTYPE)
                b_p = tl.dot(b_b, b_tt, input_precision=PRECISION)
                b_p = tl.where(o_l[:, None] >= o_l[None, :], b_p, 0.0).to(DTYPE)
            # The output: the state before the chunk, and the tokens within the chunk. In packed
            # documents, each counts only within the document of the token that reads.
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
        # Add the chunk's values to the state. In packed documents, the state after the chunk
        # belongs to the chunk's last document.
        if p_n is not None:
            b_s = tl.where(n_before == n_last, b_s, 0.0)
            b_v = tl.where((b_n == n_last)[:, None], b_v, 0.0)
        b_s = tl.dot(b_tt, b_v, b_s, input_precision=PRECISION)

    # Store the final state (the last segment only, once for the query heads that share it), or the
    # state after each segment. Lambda^(n-1-r) for the n tokens of the last chunk is row n - 1 of E.
    if p_y is not None:  # noqa: SIM102 (decided when the kernel is compiled; the next line when it runs)
        if (not OUTPUT) | ((i_s == S - 1) & (i_q % G == 0)):
            p_f = p_e + (i_h * L + tl.minimum(L, T - (stop - 1) * L) - 1) * (2 * M) + o_m
            b_s = b_sign * scale_rows(b_s, tl.load(p_f)[:, None], -tl.load(p_f + M)[:, None], M, BD)
            i_y = i_bh if OUTPUT else i_bh * S + i_s
            p_yt = p_y + i_y * M * P * 2 + state_offsets(o_n[:, None], first + o_d[None, :], P, M)
            tl.store(p_yt, b_s, mask=m_d[None, :])
