"""Triton kernels of the input features: one pass over memory forward, and one backward.

The function is that of plain.py: short convolution, RoPE, SiLU with the l2 norm (paper eq. 10), and
RMSNorm with a bias per head (paper eq. 12). Each stage runs only if it is asked for. The equations
of the backward are derived in docs/api/features.md.

Shapes: B batch, T time, H heads, N = B H rows, R head_dim (even), E = H R channels, W convolution
width, K parameter gradients per channel (W + 1 for a convolution, and 2 for the norm).

    u_t = bias + sum_j w_j x_(t-j)     w_j = weight[:, W-1-j] is the tap at lag j; x_t = past, t < 0
    s = SiLU(RoPE(u))                  S = |s|^2 over R
    y = scale s g(S) + shift           the factor g holds both the l2 norm and the RMSNorm

One program computes BN rows (a row is one head of one sequence) over BT consecutive tokens, token
after token. A tile is [BN, BH] with BH >= R/2, and every tensor is a tuple of two tiles: the first
and the second half of the R channels. RoPE rotates channel i with channel i + R/2, so that its
pairs are in the same place of the two tiles. In the backward, du comes from x and dy at the same
token, and

    dx_(t-W+1) = sum_j w_j du_(t-W+1+j)     is complete, and is written, when du_t is known

So the last W - 1 inputs stay in registers, and so do the incomplete dx of the last W - 1 tokens, to
which later tokens add. No tile is shifted between threads. Only the W - 1 tokens at the ends of a
program are read twice. In packed sequences a tap counts only if both of its tokens belong to the
same document. Each program writes one sum per parameter, and PyTorch adds these sums in a fixed
order. There are no atomics, so results are bitwise reproducible.

Names: `p_*` pointers (p_x is the tensor x), `o_*` offsets, `b_*` tiles, `m_*` masks, `stride_*`
strides in elements (stride_xb: tensor x, dimension b), constants in capitals. A pointer that is
None means that the stage was not asked for; its code is then not compiled.

Bytes per token and channel in bf16: forward 4 (x, y) + 2 (W-1) / BT; backward 6 (dy, x, dx)
+ 6 (W-1) / BT + 8 K / BT. At W = 4, the forward at BT = 64 moves 4.1, the backward at BT = 128
moves 6.5 (q) or 6.6 (k). One token (T = 1) reads `past` and x and writes y.
"""

# ruff: noqa: RUF005 (Triton has tuples, and no starred expressions)
# Triton compiles these functions, so that their types differ from those that Python sees.
# pyright: reportAssignmentType=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit
def _tile_of_program(T, N, BT, R: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr):
    """Returns which tokens, rows and channels this program computes, from its id.

    A row is one head of one sequence. A program computes BN rows over BT consecutive tokens.

    Args:
        T: Tokens of a sequence.
        N: Rows: the heads of all sequences.
        BT: Tokens of a program.
        R: Channels of a head.
        BN: Rows of a program.
        BH: Width of a tile, which holds half the channels: a power of two, at least R/2.

    Returns:
        i_t: The index of the program's stretch of time.
        t_0: Its first token.
        t_1: The end of its tokens (not included).
        o_n: Its rows, [BN, 1].
        o_r: The channels of the first half of a head, [1, BH].
        m: The mask of the elements that exist, [BN, BH].
    """
    # The stretches of time of one block of rows have consecutive program ids. int64: an offset may
    # exceed 2^31.
    NT = tl.cdiv(T, BT)
    i_t = tl.cast(tl.program_id(0) % NT, tl.int64)
    o_n = tl.cast(tl.program_id(0) // NT, tl.int64) * BN + tl.arange(0, BN)[:, None]
    o_r = tl.arange(0, BH)[None, :]
    return i_t, i_t * BT, tl.minimum(i_t * BT + BT, T), o_n, o_r, (o_n < N) & (o_r < R // 2)


@triton.jit
def _load(p, m, HALF: tl.constexpr):
    """Loads the two halves of heads as a pair of tiles [BN, BH], in the dtype of the memory.

    Args:
        p: Pointers to the channels of the first half, [BN, BH].
        m: Mask of the elements that exist, [BN, BH]; the others are 0.
        HALF: Elements in memory from a channel of the first half to its partner in the second.
    """
    return tl.load(p, mask=m, other=0.0), tl.load(p + HALF, mask=m, other=0.0)


@triton.jit
def _to_fp32(x):
    """Converts a pair of tiles, one for each half of the channels, to fp32."""
    return x[0].to(tl.float32), x[1].to(tl.float32)


@triton.jit
def _store(p, x, m, HALF: tl.constexpr):
    """Stores a pair of tiles x, the counterpart of `_load`.

    Args:
        p: Pointers to the channels of the first half, [BN, BH].
        x: The pair. It is converted to the dtype of the memory.
        m: Mask of the elements that exist, [BN, BH].
        HALF: Elements in memory from a channel of the first half to its partner in the second.
    """
    tl.store(p, x[0].to(p.dtype.element_ty), mask=m)
    tl.store(p + HALF, x[1].to(p.dtype.element_ty), mask=m)


@triton.jit
def _times(x, y):
    """Returns x y. x, y and the result are pairs of tiles, one for each half of the channels."""
    return x[0] * y[0], x[1] * y[1]


@triton.jit
def _add(x, y):
    """Returns x + y for pairs of tiles, one for each half of the channels."""
    return x[0] + y[0], x[1] + y[1]


@triton.jit
def _add_product(z, x, y):
    """Returns z + x y for pairs of tiles, one for each half of the channels."""
    return z[0] + x[0] * y[0], z[1] + x[1] * y[1]


@triton.jit
def _taps(p_weight, m, HALF: tl.constexpr, W: tl.constexpr):
    """Loads the taps of the convolution in fp32, (w_0, ..., w_(W-1)), ordered by lag.

    The tap w_j weighs the input j tokens before. It is column W - 1 - j of the weight, [channels,
    W], and a pair of tiles, one for each half of a head's channels.

    Args:
        p_weight: Pointers to column 0 of the weight for the channels of the first half, [BN, BH].
        m: Mask of the elements that exist, [BN, BH].
        HALF: Half the channels of a head.
        W: Width of the convolution.
    """
    # The two halves of a head are HALF rows of the weight apart.
    taps = ()
    for j in tl.static_range(W):
        taps = taps + (_to_fp32(_load(p_weight + (W - 1 - j), m, HALF * W)),)
    return taps


@triton.jit
def _history(p_x, p_past, t_0, stride_xt, stride_pt, m, HALF: tl.constexpr, W: tl.constexpr):
    """Loads the W - 1 inputs before token t_0, (x_(t_0-1), ..., x_(t_0-W+1)), in fp32.

    Each input is a pair of tiles, one for each half of a head's channels.

    Args:
        p_x: Pointers to x at token 0, [BN, BH].
        p_past: Pointers to the first of the W - 1 inputs before x, or None for zeros.
        t_0: The program's first token.
        stride_xt: Stride of x over tokens.
        stride_pt: Stride of past over tokens.
        m: Mask of the elements that exist, [BN, BH].
        HALF: Half the channels of a head.
        W: Width of the convolution.
    """
    history = ()
    for j in tl.static_range(1, W):
        t = t_0 - j
        x = _to_fp32(_load(p_x + t * stride_xt, m & (t >= 0), HALF))
        if p_past is not None:
            # One of the two loads is masked, and gives 0. past[W - 1 + t] is the input of t < 0.
            x = _add(x, _to_fp32(_load(p_past + (t + W - 1) * stride_pt, m & (t < 0), HALF)))
        history = history + (x,)
    return history


@triton.jit
def _document(p_doc, t, m_n):
    """Loads the id of the packed document that token t of each row belongs to, [BN, 1].

    Before the first token it is 0: the inputs before the sequence (`past`) belong to document 0.

    Args:
        p_doc: Pointers to the id of each row's token 0, [BN, 1].
        t: The token.
        m_n: Mask of the rows that exist, [BN, 1].
    """
    return tl.load(p_doc + t, mask=m_n & (t >= 0), other=0)


@triton.jit
def _documents(p_doc, t_0, m_n, W: tl.constexpr):
    """Loads the ids of the packed documents of the W - 1 tokens before t_0, the latest token first.

    Tokens before the first one of a sequence have 0. The convolution compares these ids, because a
    token reads only inputs of its own document.

    Args:
        p_doc: Pointers to the id of each row's token 0, [BN, 1].
        t_0: The program's first token.
        m_n: Mask of the rows that exist, [BN, 1].
        W: Width of the convolution.
    """
    documents = ()
    for j in tl.static_range(1, W):
        documents = documents + (_document(p_doc, t_0 - j, m_n),)
    return documents


@triton.jit
def _without_other_documents(window, documents, W: tl.constexpr):
    """Returns the window with zeros in place of inputs of other documents than its newest one.

    The ids of packed documents never fall along T, so an input of another document never counts
    again: the caller may keep the zeros as the history of the next token.

    Args:
        window: The inputs of the current token and of the W - 1 tokens before it (lags 0 to W - 1),
            each a pair of tiles, one for each half of a head's channels.
        documents: The ids of the documents of these tokens, likewise from lag 0, [BN, 1] each.
        W: Width of the convolution.
    """
    same = (window[0],)
    for j in tl.static_range(1, W):
        m_j = documents[j] == documents[0]
        same = same + ((tl.where(m_j, window[j][0], 0.0), tl.where(m_j, window[j][1], 0.0)),)
    return same


@triton.jit
def _convolved(window, taps, bias, W: tl.constexpr):
    """Returns u = bias + sum_j taps[j] window[j], the causal convolution (SC of paper eq. 10).

    Args:
        window: The inputs of the current token and of the W - 1 tokens before it (lags 0 to W - 1),
            each a pair of tiles, one for each half of a head's channels.
        taps: The weights of these inputs, likewise, from `_taps`.
        bias: The bias, a pair of tiles.
        W: Width of the convolution.
    """
    u = bias
    # From the oldest input to the newest, as in plain.py and in the kernel for one token: the order
    # of a sum decides its rounding.
    for i in tl.static_range(W):
        u = _add_product(u, taps[W - 1 - i], window[W - 1 - i])
    return u


@triton.jit
def _norms(b_S, R: tl.constexpr, SILU: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr):
    """Returns the factor g(S) of the l2 norm and the RMSNorm, and 2 g'(S) / g(S) for the backward.

    Both norms multiply a head's channels s by one factor, which depends only on S, the sum of their
    squares:
        l2 norm    divides by n, n^2 = max(S, 1e-12)
        RMSNorm    divides the result by sqrt(m), m = S / (R n^2) + EPS, with n = 1 without l2 norm
    So g is 1 / n (only SILU), 1 / sqrt(m) (only NORM) or 1 / (n sqrt(m)) (both).

    Args:
        b_S: S, [BN, 1].
        R: Channels of a head.
        SILU: True for the l2 norm.
        NORM: True for the RMSNorm. At least one of SILU and NORM is true.
        EPS: The eps of the RMSNorm.
    """
    if SILU:
        # Above the bound of 1e-12, n^2 = S and m is constant, so that g'(S) / g(S) = -1 / (2 S).
        # Below it, n is constant: only m depends on S. b_q is S / n^2.
        b_n2 = tl.maximum(b_S, 1e-12)
        b_q = b_S / b_n2
        if NORM:
            b_m = b_q / R + EPS
            return tl.rsqrt(b_n2 * b_m), -tl.where(b_S > 1e-12, 1.0, 1.0 / (R * b_m)) / b_n2
        return tl.rsqrt(b_n2), -tl.where(b_S > 1e-12, 1.0, 0.0) / b_n2
    b_m = b_S / R + EPS
    return tl.rsqrt(b_m), -1.0 / (R * b_m)


@triton.jit(do_not_specialize=["T", "H", "N", "BT"])
def forward_kernel(
    p_x, p_past, p_doc, p_weight, p_bias, p_cos, p_sin, p_scale, p_shift, p_y, T, H, N, BT,
    stride_xb, stride_xt, stride_pb, stride_pt, stride_rb,
    R: tl.constexpr, W: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr, SILU: tl.constexpr, EPS: tl.constexpr,
    AHEAD: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Computes the input features of BN rows over BT tokens. A row is one head of one sequence.

    Shapes: B sequences of T tokens, H heads of R channels, E = H R channels. Tiles hold half a
    head's channels, [BN, BH], and come in pairs: the first half and the second. Names: `p_*`
    pointers, `i_*` indices, `o_*` offsets, `b_*` tiles, `m` and `m_*` masks.

    Grid: ceil(T / BT) ceil(N / BN) programs.

    Args:
        p_x: The projection's output, [B, T, E], its last dimension dense.
        p_past: The W - 1 inputs before x, [B, W - 1, E], its last dimension dense; None for zeros.
        p_doc: The id of each token's document, [B, T] int32, or None for one document.
        p_weight: The convolution's weight, [E, W], or None.
        p_bias: The convolution's bias, [E], or None.
        p_cos: The rotary cosines, [T, R/2] or [B, T, R/2] fp32, or None.
        p_sin: The rotary sines, likewise.
        p_scale: The RMSNorm's scale, [R], or None.
        p_shift: The RMSNorm's shift, [H, R], or None.
        p_y: The result, [B, T, H, R].
        T: Tokens of a sequence.
        H: Heads.
        N: Rows, B H.
        BT: Tokens of a program.
        stride_xb: Stride of x over sequences.
        stride_xt: Stride of x over tokens.
        stride_pb: Stride of past over sequences.
        stride_pt: Stride of past over tokens.
        stride_rb: Stride of the rotary tables over sequences; 0 if all sequences share them.
        R: Channels of a head.
        W: Width of the convolution; 0 for none.
        BN: Rows of a program.
        BH: Width of a tile, a power of two, at least R/2.
        SILU: True for SiLU and the l2 norm.
        EPS: The eps of the RMSNorm.
        AHEAD: Number of tokens that are loaded before they are needed, at least 1.
        UNROLL: Tokens in one iteration of the compiled loop.
    """
    # Which stages there are is known when the kernel is compiled.
    DOCS: tl.constexpr = p_doc is not None
    ROPE: tl.constexpr = p_cos is not None
    NORM: tl.constexpr = p_scale is not None
    HALF: tl.constexpr = R // 2
    # Move every pointer to this program's rows and channels; the loop adds the token's offset.
    _, t_0, t_1, o_n, o_r, m = _tile_of_program(T, N, BT, R, BN, BH)
    i_b = o_n // H
    o_e = o_n % H * R + o_r
    p_x += i_b * stride_xb + o_e
    p_y += i_b * T * H * R + o_e
    if p_past is not None:
        p_past += i_b * stride_pb + o_e
    if ROPE:
        p_cos += i_b * stride_rb + o_r
        p_sin += i_b * stride_rb + o_r
    if DOCS:
        p_doc += i_b * T
    # Load what all tokens share. `history` has the inputs of the W - 1 tokens before the current
    # one, the latest first, and `documents` their documents.
    taps, bias, history, documents, scale, shift = (), (), (), (), (), ()
    if W:
        taps = _taps(p_weight + o_e * W, m, HALF, W)
        bias = _to_fp32(_load(p_bias + o_e, m, HALF))
        history = _history(p_x, p_past, t_0, stride_xt, stride_pt, m, HALF, W)
        if DOCS:
            documents = _documents(p_doc, t_0, o_n < N, W)
    if NORM:
        scale = _to_fp32(_load(p_scale + o_r, m, HALF))
        shift = _to_fp32(_load(p_shift + o_e, m, HALF))
    # `ahead` has the inputs of the current token and the AHEAD - 1 after it, as they are in memory.
    # They are loaded early, so that arithmetic hides the latency of the memory.
    ahead = ()
    for i in tl.static_range(AHEAD):
        ahead = ahead + (_load(p_x + (t_0 + i) * stride_xt, m & (t_0 + i < t_1), HALF),)

    # One token after the other: s is the pair of tiles that goes through the stages.
    for t in tl.range(t_0, t_1, loop_unroll_factor=UNROLL):
        # Take token t, and start to load token t + AHEAD in its place.
        s = _to_fp32(ahead[0])
        t_n = t + AHEAD
        ahead = ahead[1:] + (_load(p_x + t_n * stride_xt, m & (t_n < t_1), HALF),)
        # Convolve this input and those of the W - 1 inputs before it that are of its document. The
        # newest W - 1 of the window are the history of the next token.
        if W:
            window = (s,) + history
            if DOCS:
                window_documents = (_document(p_doc, t, o_n < N),) + documents
                window = _without_other_documents(window, window_documents, W)
                documents = window_documents[: W - 1]
            s = _convolved(window, taps, bias, W)
            history = window[: W - 1]
        # Rotate the pairs of the two halves.
        if ROPE:
            b_c = tl.load(p_cos + t * HALF, mask=m, other=0.0)
            b_s = tl.load(p_sin + t * HALF, mask=m, other=0.0)
            s = (s[0] * b_c - s[1] * b_s, s[1] * b_c + s[0] * b_s)
        # SiLU(x) = x sigmoid(x).
        if SILU:
            s = (s[0] / (1.0 + tl.exp(-s[0])), s[1] / (1.0 + tl.exp(-s[1])))
        # Both norms are one factor; its derivative is for the backward only.
        if SILU or NORM:
            b_g = _norms(tl.sum(s[0] * s[0] + s[1] * s[1], axis=1)[:, None], R, SILU, NORM, EPS)[0]
            s = (s[0] * b_g, s[1] * b_g)
        if NORM:
            s = _add_product(shift, s, scale)
        _store(p_y + t * H * R, s, m, HALF)


@triton.jit
def _cotangent(
    u, dy, p_cos, p_sin, o_t, scale, m,
    R: tl.constexpr, ROPE: tl.constexpr, SILU: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of u, the result of the convolution, at one token.

    The forward is, with the factor g of both norms (`_norms`):
        s = SiLU(RoPE(u))    S = |s|^2 over a head's channels    y = scale s g(S) + shift
    This function recomputes s from u, and goes back through the stages:
        e = scale dy
        ds = g e + k g (e . s) s, where k = 2 g'(S) / g(S)
        du = RoPE^T (ds SiLU'(RoPE(u)))

    Args:
        u: The result of the convolution, or x if there is none. It is a pair of tiles [BN, BH], the
            halves of a head's channels; so are dy, scale and the results.
        dy: The gradient of y.
        p_cos: Pointers to the rotary cosines of token 0, [BN, BH], or None.
        p_sin: Pointers to the rotary sines of token 0, likewise.
        o_t: Offset of the token in these tables.
        scale: The RMSNorm's scale; () without NORM.
        m: Mask of the elements that exist, [BN, BH].
        R: Channels of a head.
        ROPE: True for RoPE.
        SILU: True for SiLU and the l2 norm.
        NORM: True for the RMSNorm.
        EPS: The eps of the RMSNorm.

    Returns:
        du, and s g(S): its product with dy is the gradient of scale.
    """
    # The first half of the channels is a, the second b. They hold u, then RoPE(u), s, and at last
    # s g; da and db hold the gradient of y, then e, ds and du.
    b_a, b_b = u
    b_da, b_db = dy
    # Forward once more: s, and for the derivative of SiLU its sigmoids.
    if ROPE:
        b_c = tl.load(p_cos + o_t, mask=m, other=0.0)
        b_s = tl.load(p_sin + o_t, mask=m, other=0.0)
        b_a, b_b = b_a * b_c - b_b * b_s, b_b * b_c + b_a * b_s
    if SILU:
        b_ga = 1.0 / (1.0 + tl.exp(-b_a))
        b_gb = 1.0 / (1.0 + tl.exp(-b_b))
        b_a *= b_ga
        b_b *= b_gb
    # Back through scale (da and db become e) and both norms (they become ds = g e + w s, where w =
    # k g (e . s)).
    if NORM:
        b_da *= scale[0]
        b_db *= scale[1]
    if SILU or NORM:
        b_g, b_k = _norms(tl.sum(b_a * b_a + b_b * b_b, axis=1)[:, None], R, SILU, NORM, EPS)
        b_w = b_k * (b_g * tl.sum(b_da * b_a + b_db * b_b, axis=1)[:, None])
        b_da = b_g * b_da + b_w * b_a
        b_db = b_g * b_db + b_w * b_b
    # SiLU' = sigmoid + s (1 - sigmoid). After it, a and b become s g for the gradient of scale.
    if SILU:
        b_da *= b_ga + b_a * (1.0 - b_ga)
        b_db *= b_gb + b_b * (1.0 - b_gb)
    if SILU or NORM:
        b_a *= b_g
        b_b *= b_g
    # The transpose of a rotation is the rotation by the opposite angle.
    if ROPE:
        b_da, b_db = b_da * b_c + b_db * b_s, b_db * b_c - b_da * b_s
    return (b_da, b_db), (b_a, b_b)


@triton.jit
def _add_to_pending(pending, du, taps, documents, W: tl.constexpr, DOCS: tl.constexpr):
    """Adds to the gradients of the last W inputs the part that comes from token t.

    The input x_(t-j) went into u_t with the tap w_j, so its gradient gets w_j du_t. It is complete
    when it has the parts of W tokens, t - j to t - j + W - 1. Every vector is a pair of tiles, one
    for each half of a head's channels.

    Args:
        pending: pending[j] is the part of dx_(t-1-j) that comes from tokens before t, for j from 0
            to W - 2.
        du: The gradient of the convolution's result u at token t.
        taps: The weights of the convolution by lag, (w_0, ..., w_(W-1)).
        documents: With DOCS, the ids of the documents of tokens t, t - 1, ..., t - W + 1; else ().
        W: Width of the convolution.
        DOCS: True for packed documents.

    Returns:
        dx_(t-W+1), which du_t completes, and the next value of `pending`.
    """
    # The token itself has lag 0; token t - j has lag j and tap w_j.
    added = (_times(taps[0], du),)
    for j in tl.static_range(1, W):
        b_a, b_b = du
        if DOCS:
            m_j = documents[j] == documents[0]
            b_a, b_b = tl.where(m_j, b_a, 0.0), tl.where(m_j, b_b, 0.0)
        added = added + (_add_product(pending[j - 1], taps[j], (b_a, b_b)),)
    return added[W - 1], added[: W - 1]


@triton.jit(do_not_specialize=["T", "H", "N", "BT"])
def backward_kernel(
    p_dy, p_x, p_past, p_doc, p_weight, p_bias, p_cos, p_sin, p_scale, p_dx, p_dpast, p_sums, T, H, N, BT,
    stride_db, stride_dt, stride_dh, stride_xb, stride_xt, stride_pb, stride_pt, stride_rb,
    R: tl.constexpr, W: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr, SILU: tl.constexpr, EPS: tl.constexpr,
    AHEAD: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of `forward_kernel` for BN rows over BT tokens.

    Shapes: B sequences of T tokens, H heads of R channels, E = H R channels, N = B H rows, K
    gradients of parameters per channel. A row is one head of one sequence. Tiles hold half a head's
    channels, [BN, BH], and come in pairs: the first half and the second. Names: `p_*` pointers,
    `i_*` indices, `o_*` offsets, `b_*` tiles, `m` and `m_*` masks.

    Grid: ceil(T / BT) ceil(N / BN) programs.

    Args:
        p_dy: The gradient of y, [B, T, H, R], its last dimension dense.
        p_x: The projection's output, [B, T, E], its last dimension dense.
        p_past: The W - 1 inputs before x, [B, W - 1, E], its last dimension dense; None for zeros.
        p_doc: The id of each token's document, [B, T] int32, or None for one document.
        p_weight: The convolution's weight, [E, W], or None.
        p_bias: The convolution's bias, [E], or None.
        p_cos: The rotary cosines, [T, R/2] or [B, T, R/2] fp32, or None.
        p_sin: The rotary sines, likewise.
        p_scale: The RMSNorm's scale, [R], or None.
        p_dx: The gradient of x, [B, T, E].
        p_dpast: The gradient of past, [B, W - 1, E], or None if it is not wanted.
        p_sums: The sums over this program's tokens, [ceil(T / BT), N, K, R] fp32. The K rows are
            the gradients of weight[:, 0] to weight[:, W-1] and of bias if W > 0, then of scale and
            shift with NORM.
        T: Tokens of a sequence.
        H: Heads.
        N: Rows, B H.
        BT: Tokens of a program.
        stride_db: Stride of dy over sequences.
        stride_dt: Stride of dy over tokens.
        stride_dh: Stride of dy over heads.
        stride_xb: Stride of x over sequences.
        stride_xt: Stride of x over tokens.
        stride_pb: Stride of past over sequences.
        stride_pt: Stride of past over tokens.
        stride_rb: Stride of the rotary tables over sequences; 0 if all sequences share them.
        R: Channels of a head.
        W: Width of the convolution; 0 for none.
        BN: Rows of a program.
        BH: Width of a tile, a power of two, at least R/2.
        SILU: True for SiLU and the l2 norm.
        EPS: The eps of the RMSNorm.
        AHEAD: Number of tokens that are loaded before they are needed, at least 1.
        UNROLL: Tokens in one iteration of the compiled loop.
    """
    # Which stages there are is known when the kernel is compiled. dx of a token is complete LAG
    # tokens later. There are K gradients of parameters for each channel.
    DOCS: tl.constexpr = p_doc is not None
    ROPE: tl.constexpr = p_cos is not None
    NORM: tl.constexpr = p_scale is not None
    HALF: tl.constexpr = R // 2
    LAG: tl.constexpr = W - 1 if W else 0
    K: tl.constexpr = (W + 1 if W else 0) + (2 if NORM else 0)
    # Move every pointer to this program's rows and channels; the loop adds the token's offset.
    i_t, t_0, t_1, o_n, o_r, m = _tile_of_program(T, N, BT, R, BN, BH)
    i_b = o_n // H
    o_e = o_n % H * R + o_r
    p_dy += i_b * stride_db + o_n % H * stride_dh + o_r
    p_x += i_b * stride_xb + o_e
    p_dx += i_b * T * H * R + o_e
    if p_dpast is not None:
        p_dpast += i_b * LAG * H * R + o_e
    if p_past is not None:
        p_past += i_b * stride_pb + o_e
    if ROPE:
        p_cos += i_b * stride_rb + o_r
        p_sin += i_b * stride_rb + o_r
    if DOCS:
        p_doc += i_b * T
    # Load what all tokens share. `history` has the inputs of the W - 1 tokens before the current
    # one, the latest first, `documents` their documents, and `pending` their incomplete gradients.
    # No token of this program adds to dx of tokens before it: `pending` starts at zero.
    b_zero = tl.zeros([BN, BH], dtype=tl.float32)
    zero = (b_zero, b_zero)
    taps, bias, history, documents, pending, scale = (), (), (), (), (), ()
    if W:
        taps = _taps(p_weight + o_e * W, m, HALF, W)
        bias = _to_fp32(_load(p_bias + o_e, m, HALF))
        history = _history(p_x, p_past, t_0, stride_xt, stride_pt, m, HALF, W)
        pending = (zero,) * LAG
        if DOCS:
            documents = _documents(p_doc, t_0, o_n < N, W)
    if NORM:
        scale = _to_fp32(_load(p_scale + o_r, m, HALF))
    # The gradients of the parameters, in the order of the rows of p_sums.
    sums = (zero,) * K
    # `ahead` has x and dy of the current token and the AHEAD - 1 after it. Tokens up to T are
    # loaded, not up to t_1: the last loop reads W - 1 tokens of the next program.
    ahead = ()
    for i in tl.static_range(AHEAD):
        t_n = t_0 + i
        m_n = m & (t_n < T)
        ahead = ahead + (
            (_load(p_x + t_n * stride_xt, m_n, HALF), _load(p_dy + t_n * stride_dt, m_n, HALF)),
        )

    # One token after the other: u is the convolution's result, du its gradient, dx that of an
    # input.
    for t in tl.range(t_0, t_1, loop_unroll_factor=UNROLL):
        # Take x and dy of token t, and start to load those of token t + AHEAD.
        u = _to_fp32(ahead[0][0])
        dy = _to_fp32(ahead[0][1])
        t_n = t + AHEAD
        m_n = m & (t_n < T)
        ahead = ahead[1:] + (
            (_load(p_x + t_n * stride_xt, m_n, HALF), _load(p_dy + t_n * stride_dt, m_n, HALF)),
        )
        # The convolution once more, as in the forward: u of token t.
        window = (u,) + history
        window_documents = documents
        if W:
            if DOCS:
                window_documents = (_document(p_doc, t, o_n < N),) + documents
                window = _without_other_documents(window, window_documents, W)
                documents = window_documents[:LAG]
            u = _convolved(window, taps, bias, W)
        # Back through norms, SiLU and RoPE, and then through the convolution.
        du, feature = _cotangent(u, dy, p_cos, p_sin, t * HALF, scale, m, R, ROPE, SILU, NORM, EPS)
        dx = du
        # Add this token to the gradients of the parameters: weight (column i has lag W - 1 - i),
        # bias, scale and shift.
        added = ()
        if W:
            dx, pending = _add_to_pending(pending, du, taps, window_documents, W, DOCS)
            history = window[:LAG]
            for i in tl.static_range(W):
                added = added + (_add_product(sums[i], du, window[W - 1 - i]),)
            added = added + (_add(sums[W], du),)
        if NORM:
            added = added + (_add_product(sums[K - 2], dy, feature), _add(sums[K - 1], dy))
        sums = added
        # dx of token t - LAG is complete if it belongs to this program. Tokens before the first
        # one are `past`: past[t] is the input of token t - LAG < 0.
        _store(p_dx + (t - LAG) * H * R, dx, m & (t - LAG >= t_0), HALF)
        if p_dpast is not None:
            _store(p_dpast + t * H * R, dx, m & (t < LAG), HALF)

    # dx of this program's last W - 1 tokens still lacks the part from the W - 1 tokens after them,
    # so their du is computed here too. Those tokens belong to the next program, which adds up their
    # gradients of parameters. From T on, dy is zero.
    if W:
        for t in tl.range(t_1, t_1 + LAG):
            u = _to_fp32(ahead[0][0])
            dy = _to_fp32(ahead[0][1])
            t_n = t + AHEAD
            m_n = m & (t_n < T)
            ahead = ahead[1:] + (
                (_load(p_x + t_n * stride_xt, m_n, HALF), _load(p_dy + t_n * stride_dt, m_n, HALF)),
            )
            window = (u,) + history
            window_documents = documents
            if DOCS:
                # The window is not masked here. If token t has the document of the program's last
                # token, the loop above has set the inputs of earlier documents to zero. If it has a
                # later document, u is wrong, but its du does not reach this program's tokens.
                window_documents = (_document(p_doc, t, (o_n < N) & (t < T)),) + documents
                documents = window_documents[:LAG]
            u = _convolved(window, taps, bias, W)
            m_t = m & (t < T)
            du, feature = _cotangent(
                u, dy, p_cos, p_sin, t * HALF, scale, m_t, R, ROPE, SILU, NORM, EPS
            )
            dx, pending = _add_to_pending(pending, du, taps, window_documents, W, DOCS)
            history = window[:LAG]
            _store(p_dx + (t - LAG) * H * R, dx, m & (t - LAG >= t_0), HALF)
            if p_dpast is not None:
                _store(p_dpast + t * H * R, dx, m & (t < LAG), HALF)

    # The sums of this program; PyTorch adds those of all programs.
    for i in tl.static_range(K):
        _store(p_sums + ((i_t * N + o_n) * K + i) * R + o_r, sums[i], m, HALF)
