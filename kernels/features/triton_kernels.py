"""Kernels of the input features: one pass over memory forward, and one backward. Semantics as in plain.py.

Shapes: B batch, T time, H heads, N = B H rows, R head_dim (even), E = H R channels, W convolution width, K parameter
gradients per channel.

    u_t = bias + sum_j w_j x_(t-j)                        w_j = weight[:, W-1-j], the tap at lag j; x_t = past for t < 0
    s = SiLU(RoPE(u))      S = |s|^2 over R               each of the three if asked for
    y = scale s g(S) + shift                              g: the l2 norm of SiLU features and the RMSNorm in one factor

A program owns BN rows and walks BT tokens in order; the two halves of R are two tiles, which RoPE pairs without moving a
number. Backwards, du comes from x and dy at the same token, and

    dx_(t-W+1) = sum_j w_j du_(t-W+1+j)                   complete, and written, when du_t is known

so the last W - 1 inputs and their pending dx, to which later tokens add, stay in registers: no tile is shifted, nothing is read
twice but W - 1 tokens at the ends of a program. In packed sequences a tap counts where both its ends are of one document.
Parameters' gradients are one sum per program, which PyTorch adds in a fixed order: no atomics, so results repeat bit for bit.

Bytes per token and channel in bf16: forward 4 (x, y) + 2 (W-1) / BT; backward 6 (dy, x, dx) + 6 (W-1) / BT + 8 K / BT, where
K = W + 1 with a convolution, and 2 more with the norm. At W = 4: forward at BT = 64 4.1, backward at BT = 128 6.5 (q),
6.6 (k). A decoding step (T = 1) reads `past` and x and writes y.
"""

# ruff: noqa: RUF005 (Triton has tuples, and no starred expressions)
# Triton compiles these functions: their types are not what Python sees.
# pyright: reportAssignmentType=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit
def _place(T, H, N, BT, R: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr):
    """Returns the segment of time, its first token and end; rows [BN, 1]; channels of the first half [1, BH]; their mask."""
    NT = tl.cdiv(T, BT)
    i_t = tl.cast(tl.program_id(0) % NT, tl.int64)
    o_n = tl.cast(tl.program_id(0) // NT, tl.int64) * BN + tl.arange(0, BN)[:, None]
    o_r = tl.arange(0, BH)[None, :]
    return i_t, i_t * BT, tl.minimum(i_t * BT + BT, T), o_n, o_r, (o_n < N) & (o_r < R // 2)


@triton.jit
def _load(p, m, HALF: tl.constexpr):
    """The two halves of R, in the dtype of the memory."""
    return tl.load(p, mask=m, other=0.0), tl.load(p + HALF, mask=m, other=0.0)


@triton.jit
def _wide(x):
    return x[0].to(tl.float32), x[1].to(tl.float32)


@triton.jit
def _store(p, x, m, HALF: tl.constexpr):
    tl.store(p, x[0].to(p.dtype.element_ty), mask=m)
    tl.store(p + HALF, x[1].to(p.dtype.element_ty), mask=m)


@triton.jit
def _times(x, y):
    return x[0] * y[0], x[1] * y[1]


@triton.jit
def _add(x, y):
    return x[0] + y[0], x[1] + y[1]


@triton.jit
def _add_product(z, x, y):
    return z[0] + x[0] * y[0], z[1] + x[1] * y[1]


@triton.jit
def _taps(p_weight, m, HALF: tl.constexpr, W: tl.constexpr):
    """(w_0, ..., w_(W-1)), by lag."""
    taps = ()
    for j in tl.static_range(W):
        taps = taps + (_wide(_load(p_weight + (W - 1 - j), m, HALF * W)),)
    return taps


@triton.jit
def _history(p_x, p_past, t_0, stride_xt, stride_pt, m, HALF: tl.constexpr, W: tl.constexpr):
    """(x_(t_0-1), ..., x_(t_0-W+1))."""
    history = ()
    for j in tl.static_range(1, W):
        t = t_0 - j
        x = _wide(_load(p_x + t * stride_xt, m & (t >= 0), HALF))
        if p_past is not None:
            x = _add(x, _wide(_load(p_past + (t + W - 1) * stride_pt, m & (t < 0), HALF)))
        history = history + (x,)
    return history


@triton.jit
def _document(p_doc, t, m_n):
    """Numbers of the rows' documents at t, [BN, 1]; 0 before the first token, as in `past`."""
    return tl.load(p_doc + t, mask=m_n & (t >= 0), other=0)


@triton.jit
def _documents(p_doc, t_0, m_n, W: tl.constexpr):
    """Numbers of the documents of the W - 1 tokens before t_0, the last one first."""
    documents = ()
    for j in tl.static_range(1, W):
        documents = documents + (_document(p_doc, t_0 - j, m_n),)
    return documents


@triton.jit
def _same_document(window, documents, W: tl.constexpr):
    """Inputs that share the document of the token at lag 0. The others are zero from here on: their document has ended."""
    same = (window[0],)
    for j in tl.static_range(1, W):
        m_j = documents[j] == documents[0]
        same = same + ((tl.where(m_j, window[j][0], 0.0), tl.where(m_j, window[j][1], 0.0)),)
    return same


@triton.jit
def _convolved(window, taps, bias, W: tl.constexpr):
    u = bias
    for i in tl.static_range(W):  # the oldest first
        u = _add_product(u, taps[W - 1 - i], window[W - 1 - i])
    return u


@triton.jit
def _norms(b_S, R: tl.constexpr, SILU: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr):
    """g(S) and 2 g'(S) / g(S); g = 1 / n, 1 / sqrt(m) or 1 / (n sqrt(m)) with n^2 = max(S, 1e-12), m = S / (R n^2) + EPS."""
    if SILU:
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
    """Grid: ceil(T / BT) ceil(N / BN) programs. W = 0: no convolution; a pointer that is None: not asked for.
    p_doc [B, T] int32, p_weight [E, W],
    p_y [B, T, H, R], rest as named."""
    DOCS: tl.constexpr = p_doc is not None
    ROPE: tl.constexpr = p_cos is not None
    NORM: tl.constexpr = p_scale is not None
    HALF: tl.constexpr = R // 2
    _, t_0, t_1, o_n, o_r, m = _place(T, H, N, BT, R, BN, BH)
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
    taps, bias, history, documents, scale, shift = (), (), (), (), (), ()
    if W:
        taps = _taps(p_weight + o_e * W, m, HALF, W)
        bias = _wide(_load(p_bias + o_e, m, HALF))
        history = _history(p_x, p_past, t_0, stride_xt, stride_pt, m, HALF, W)
        if DOCS:
            documents = _documents(p_doc, t_0, o_n < N, W)
    if NORM:
        scale = _wide(_load(p_scale + o_r, m, HALF))
        shift = _wide(_load(p_shift + o_e, m, HALF))
    ahead = ()
    for i in tl.static_range(AHEAD):
        ahead = ahead + (_load(p_x + (t_0 + i) * stride_xt, m & (t_0 + i < t_1), HALF),)

    for t in tl.range(t_0, t_1, loop_unroll_factor=UNROLL):
        s = _wide(ahead[0])
        t_n = t + AHEAD
        ahead = ahead[1:] + (_load(p_x + t_n * stride_xt, m & (t_n < t_1), HALF),)
        if W:
            window = (s,) + history
            if DOCS:
                near = (_document(p_doc, t, o_n < N),) + documents
                window = _same_document(window, near, W)
                documents = near[: W - 1]
            s = _convolved(window, taps, bias, W)
            history = window[: W - 1]
        if ROPE:
            b_c = tl.load(p_cos + t * HALF, mask=m, other=0.0)
            b_s = tl.load(p_sin + t * HALF, mask=m, other=0.0)
            s = (s[0] * b_c - s[1] * b_s, s[1] * b_c + s[0] * b_s)
        if SILU:
            s = (s[0] / (1.0 + tl.exp(-s[0])), s[1] / (1.0 + tl.exp(-s[1])))
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
    """Returns du, and s g(S), with which dy gives the gradient of scale."""
    b_a, b_b = u
    b_da, b_db = dy
    if ROPE:
        b_c = tl.load(p_cos + o_t, mask=m, other=0.0)
        b_s = tl.load(p_sin + o_t, mask=m, other=0.0)
        b_a, b_b = b_a * b_c - b_b * b_s, b_b * b_c + b_a * b_s
    if SILU:
        b_ga = 1.0 / (1.0 + tl.exp(-b_a))
        b_gb = 1.0 / (1.0 + tl.exp(-b_b))
        b_a *= b_ga
        b_b *= b_gb
    if NORM:
        b_da *= scale[0]
        b_db *= scale[1]
    if SILU or NORM:
        b_g, b_k = _norms(tl.sum(b_a * b_a + b_b * b_b, axis=1)[:, None], R, SILU, NORM, EPS)
        b_k *= b_g * tl.sum(b_da * b_a + b_db * b_b, axis=1)[:, None]
        b_da = b_g * b_da + b_k * b_a
        b_db = b_g * b_db + b_k * b_b
    if SILU:
        b_da *= b_ga + b_a * (1.0 - b_ga)
        b_db *= b_gb + b_b * (1.0 - b_gb)
    if SILU or NORM:
        b_a *= b_g
        b_b *= b_g
    if ROPE:
        b_da, b_db = b_da * b_c + b_db * b_s, b_db * b_c - b_da * b_s
    return (b_da, b_db), (b_a, b_b)


@triton.jit
def _add_to_pending(pending, du, taps, documents, W: tl.constexpr, DOCS: tl.constexpr):
    """pending[j]: the part of dx_(t-1-j) from tokens before t. Returns dx_(t-W+1), complete with du_t, and the next pending."""
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
    """Grid as forward. p_dx [B, T, E], p_dpast [B, W - 1, E], p_sums [ceil(T / BT), N, K, R]: weight, bias; scale, shift."""
    DOCS: tl.constexpr = p_doc is not None
    ROPE: tl.constexpr = p_cos is not None
    NORM: tl.constexpr = p_scale is not None
    HALF: tl.constexpr = R // 2
    LAG: tl.constexpr = W - 1 if W else 0
    K: tl.constexpr = (W + 1 if W else 0) + (2 if NORM else 0)
    i_t, t_0, t_1, o_n, o_r, m = _place(T, H, N, BT, R, BN, BH)
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
    b_zero = tl.zeros([BN, BH], dtype=tl.float32)
    zero = (b_zero, b_zero)
    taps, bias, history, documents, pending, scale = (), (), (), (), (), ()
    if W:
        taps = _taps(p_weight + o_e * W, m, HALF, W)
        bias = _wide(_load(p_bias + o_e, m, HALF))
        history = _history(p_x, p_past, t_0, stride_xt, stride_pt, m, HALF, W)
        pending = (zero,) * LAG
        if DOCS:
            documents = _documents(p_doc, t_0, o_n < N, W)
    if NORM:
        scale = _wide(_load(p_scale + o_r, m, HALF))
    sums = (zero,) * K
    ahead = ()
    for i in tl.static_range(AHEAD):
        t_n = t_0 + i
        m_n = m & (t_n < T)
        ahead = ahead + (
            (_load(p_x + t_n * stride_xt, m_n, HALF), _load(p_dy + t_n * stride_dt, m_n, HALF)),
        )

    for t in tl.range(t_0, t_1, loop_unroll_factor=UNROLL):
        u = _wide(ahead[0][0])
        dy = _wide(ahead[0][1])
        t_n = t + AHEAD
        m_n = m & (t_n < T)
        ahead = ahead[1:] + (
            (_load(p_x + t_n * stride_xt, m_n, HALF), _load(p_dy + t_n * stride_dt, m_n, HALF)),
        )
        window = (u,) + history
        near = documents
        if W:
            if DOCS:
                near = (_document(p_doc, t, o_n < N),) + documents
                window = _same_document(window, near, W)
                documents = near[:LAG]
            u = _convolved(window, taps, bias, W)
        du, feature = _cotangent(u, dy, p_cos, p_sin, t * HALF, scale, m, R, ROPE, SILU, NORM, EPS)
        dx = du
        added = ()
        if W:
            dx, pending = _add_to_pending(pending, du, taps, near, W, DOCS)
            history = window[:LAG]
            for i in tl.static_range(W):
                added = added + (_add_product(sums[i], du, window[W - 1 - i]),)
            added = added + (_add(sums[W], du),)
        if NORM:
            added = added + (_add_product(sums[K - 2], dy, feature), _add(sums[K - 1], dy))
        sums = added
        _store(p_dx + (t - LAG) * H * R, dx, m & (t - LAG >= t_0), HALF)
        if p_dpast is not None:
            _store(p_dpast + t * H * R, dx, m & (t < LAG), HALF)

    # The last tokens' dx lacks what the next W - 1 tokens owe it. Those are the next program's; past T, dy is zero.
    if W:
        for t in tl.range(t_1, t_1 + LAG):
            u = _wide(ahead[0][0])
            dy = _wide(ahead[0][1])
            t_n = t + AHEAD
            m_n = m & (t_n < T)
            ahead = ahead[1:] + (
                (_load(p_x + t_n * stride_xt, m_n, HALF), _load(p_dy + t_n * stride_dt, m_n, HALF)),
            )
            window = (u,) + history
            near = documents
            if DOCS:
                # Inputs of another document are left in: they reach a du that owes nothing to this program's tokens.
                near = (_document(p_doc, t, (o_n < N) & (t < T)),) + documents
                documents = near[:LAG]
            u = _convolved(window, taps, bias, W)
            m_t = m & (t < T)
            du, feature = _cotangent(
                u, dy, p_cos, p_sin, t * HALF, scale, m_t, R, ROPE, SILU, NORM, EPS
            )
            dx, pending = _add_to_pending(pending, du, taps, near, W, DOCS)
            history = window[:LAG]
            _store(p_dx + (t - LAG) * H * R, dx, m & (t - LAG >= t_0), HALF)
            if p_dpast is not None:
                _store(p_dpast + t * H * R, dx, m & (t < LAG), HALF)

    for i in tl.static_range(K):
        _store(p_sums + ((i_t * N + o_n) * K + i) * R + o_r, sums[i], m, HALF)
