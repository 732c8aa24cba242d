"""The recurrence token by token as Triton kernels: contract (pass 1), expand (pass 2), and both backwards.

Shapes: B batch, T time, H state heads, G query heads per state head, Hq = G H, C channels of one side (R keys or D
values) of the P = R + D of a state, M basis functions, K tokens per segment, N = ceil(T / K).

Each is a loop over time with its part of the state in registers, in the dtype of p_lam. The algorithm around them and
the rule for the states of the past are in sequential.py.

    p_lam         Re, Im of Lambda, Re, Im of 1 / Lambda                                [H, 4, M]
    p_a           a, c as (Re | Im)                                                     [Hq, B, T, 2M]
    p_b, p_e      the same layout; the constant w of a linear readout has batch and token strides of 0
    p_x, p_y      state before the first and after the last token, from this side's     [B, H, M, P, 2]
                  first channel on; p_g is the gradient of the latter
    p_c           states before every K tokens                                          [B, H, N, 2, M, C]

Programs are numbered along one grid axis (the others end at 65,535), offsets that grow with B, T or H are 64 bits.
A pointer that is None is compiled out. A condition known at compile time stands in an `if` of its own: Triton does not
compile what is under a false one.
"""
# Triton compiles these functions: their types are not what Python sees.
# pyright: reportAssignmentType=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T", "Hq", "G", "P"])
def contract_scan_kernel(
    p_q, p_k, p_lam, p_x, p_a, p_y, p_c, T, Hq, G, P,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_ab, stride_ah,
    C: tl.constexpr, M: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
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
    if p_x is not None:
        b_re = tl.load(p_x + o_x, mask=m_x, other=0.0)
        b_im = tl.load(p_x + o_x + 1, mask=m_x, other=0.0)
    if p_c is not None:
        p_ct = p_c + i_bh * tl.cdiv(T, K) * 2 * M * C + o_m[None, :] * C + o_c[:, None]

    p_qt = p_q + i_b * stride_qb + i_q * stride_qh + o_c
    p_kt = p_k + i_b * stride_kb + i_h * stride_kh + o_c
    p_at = p_a + i_b * stride_ab + i_q * stride_ah + o_m
    b_q = tl.load(p_qt, mask=m_c, other=0.0)
    b_k = tl.load(p_kt, mask=m_c, other=0.0)
    for i_t in range(0, T):
        if p_c is not None:
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
        b_old = b_re
        b_re = b_old * b_lr - b_im * b_li + b_k.to(DTYPE)[:, None]
        b_im = b_old * b_li + b_im * b_lr
        b_row = b_q.to(DTYPE)[:, None]
        tl.store(p_at, tl.sum(b_re * b_row, axis=0), mask=m_m)
        tl.store(p_at + M, tl.sum(b_im * b_row, axis=0), mask=m_m)
        p_at += 2 * M
        b_q = b_q_next
        b_k = b_k_next

    if p_y is not None:  # noqa: SIM102
        if i_q % G == 0:
            tl.store(p_y + o_x, b_re, mask=m_x)
            tl.store(p_y + o_x + 1, b_im, mask=m_x)


@triton.jit(do_not_specialize=["T", "Hq", "G", "P"])
def expand_scan_kernel(
    p_b, p_v, p_lam, p_x, p_o, p_y, p_c, T, Hq, G, P,
    stride_bb, stride_bt, stride_bh, stride_vb, stride_vt, stride_vh, stride_ob, stride_ot, stride_oh,
    C: tl.constexpr, M: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Pass 2: X^v_t = Lambda X^v_(t-1) + v_t, o_t = Re(b_t^T X^v_t); linear readout with b_t = w (strides 0).

    Grid: B Hq ceil(C / BC) programs. Tiles: X [BM, BC], all M <= BM modes of BC channels. Bytes per token and query
    head: b once per block of channels, v and o once. With p_c only the states are wanted: p_b and p_o are unused.
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
    if p_x is not None:
        b_re = tl.load(p_x + o_x, mask=m_x, other=0.0)
        b_im = tl.load(p_x + o_x + 1, mask=m_x, other=0.0)
    if p_c is not None:
        p_ct = p_c + i_bh * tl.cdiv(T, K) * 2 * M * C + o_m[:, None] * C + o_c[None, :]

    p_vt = p_v + i_b * stride_vb + i_h * stride_vh + o_c
    b_v = tl.load(p_vt, mask=m_c, other=0.0)
    if p_c is None:
        p_ot = p_o + i_b * stride_ob + i_q * stride_oh + o_c
        p_bt = p_b + i_b * stride_bb + i_q * stride_bh + o_m
        b_br = tl.load(p_bt, mask=m_m, other=0.0)
        b_bi = tl.load(p_bt + M, mask=m_m, other=0.0)
    for i_t in range(0, T):
        if p_c is not None:  # noqa: SIM102
            if i_t % K == 0:
                tl.store(p_ct, b_re, mask=m_x)
                tl.store(p_ct + M * C, b_im, mask=m_x)
                p_ct += 2 * M * C
        p_vt += stride_vt
        b_v_next = tl.load(p_vt, mask=o_c < tl.where(i_t + 1 < T, C, 0), other=0.0)
        if p_c is None:
            p_bt += stride_bt
            m_next = o_m < tl.where(i_t + 1 < T, M, 0)
            b_br_next = tl.load(p_bt, mask=m_next, other=0.0)
            b_bi_next = tl.load(p_bt + M, mask=m_next, other=0.0)
        b_old = b_re
        b_re = b_old * b_lr - b_im * b_li + b_v.to(DTYPE)[None, :]
        b_im = b_old * b_li + b_im * b_lr
        b_v = b_v_next
        if p_c is None:
            b_o = tl.sum(b_br[:, None] * b_re - b_bi[:, None] * b_im, axis=0)
            tl.store(p_ot, b_o.to(p_o.dtype.element_ty), mask=m_c)
            p_ot += stride_ot
            b_br = b_br_next
            b_bi = b_bi_next

    if p_y is not None:  # noqa: SIM102
        if i_q % G == 0:
            tl.store(p_y + o_x, b_re, mask=m_x)
            tl.store(p_y + o_x + 1, b_im, mask=m_x)


@triton.jit
def _advance(b_re, b_im, b_lr, b_li, p_kt, stride_kt, left, o_c, C: tl.constexpr, STEPS: tl.constexpr):
    """STEPS tokens forward, or the `left` that remain."""
    for i in tl.static_range(STEPS):
        b_k = tl.load(p_kt + i * stride_kt, mask=o_c < tl.where(i < left, C, 0), other=0.0).to(b_re.dtype)[None, :]
        b_old = b_re
        b_re = tl.where(i < left, b_old * b_lr - b_im * b_li + b_k, b_old)
        b_im = tl.where(i < left, b_old * b_li + b_im * b_lr, b_im)
    return b_re, b_im


@triton.jit(do_not_specialize=["T", "N", "Hq", "G", "P"])
def reverse_scan_kernel(
    p_e, p_q, p_k, p_lam, p_c, p_g, p_dq, p_dk, p_dx, p_theta, p_w, T, N, Hq, G, P,
    stride_eb, stride_et, stride_eh, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    C: tl.constexpr, M: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, K: tl.constexpr, ANCHOR: tl.constexpr,
):  # fmt: skip
    """Backward in time: P_t += e_t q_t^T, dk_t = Re(sum_m P_t), dq_t = Re(e_t^T X_t), dtheta += P_t (X_t - k_t),
    then P_(t-1) = Lambda P_t and X_(t-1) = (X_t - k_t) / Lambda, ANCHOR - 1 times (ANCHOR = K / 4) from a known state.

    For (e, q, k); for (b, do, v), where there is no p_dq; for (w, dy, z), e with strides 0, where p_w takes sum_t X_t dy_t.
    Without p_dq, p_theta and p_w the states are not needed and p_c, p_k are unused.
    Grid: B Hq ceil(C / BC) programs. Tiles [BM, BC]: X, P, three anchors, dtheta. Bytes per token and query head: e
    once per block of channels, q, k, dq, dk once, k and a state every K tokens a second time.
    p_dq as q but contiguous; p_dk [B, T, Hq, C], p_dx [B, Hq, M, P, 2] from this side's first channel on, p_theta and
    p_w [B, Hq, NC, 2M]: one slice per query head, summed by the caller.
    """
    QUERY: tl.constexpr = p_dq is not None
    DECAY: tl.constexpr = p_theta is not None
    READOUT: tl.constexpr = p_w is not None
    RECOVER: tl.constexpr = QUERY or DECAY or READOUT
    DTYPE = p_lam.dtype.element_ty
    NC: tl.constexpr = (C + BC - 1) // BC
    i_p = tl.program_id(0)
    i_c = i_p % NC
    i_q = tl.cast(i_p // NC % Hq, tl.int64)
    i_b = tl.cast(i_p // (NC * Hq), tl.int64)
    i_h = i_q // G
    i_bh = i_b * (Hq // G) + i_h
    i_bq = i_b * Hq + i_q
    o_m = tl.arange(0, BM)
    o_c = i_c * BC + tl.arange(0, BC)
    m_m = o_m < M
    m_c = o_c < C
    m_x = m_m[:, None] & m_c[None, :]
    o_x = (o_m[:, None] * P + o_c[None, :]) * 2

    p_l = p_lam + i_h * 4 * M + o_m
    b_lr = tl.load(p_l, mask=m_m, other=0.0)[:, None]
    b_li = tl.load(p_l + M, mask=m_m, other=0.0)[:, None]
    b_pr = tl.zeros([BM, BC], dtype=DTYPE)
    b_pi = tl.zeros([BM, BC], dtype=DTYPE)
    if p_g is not None:  # noqa: SIM102
        if i_q % G == 0:  # the state has one gradient, whatever the number of its query heads
            b_pr = tl.load(p_g + i_bh * M * P * 2 + o_x, mask=m_x, other=0.0)
            b_pi = -tl.load(p_g + i_bh * M * P * 2 + o_x + 1, mask=m_x, other=0.0)
    if RECOVER:
        b_ir = tl.load(p_l + 2 * M, mask=m_m, other=0.0)[:, None]
        b_ii = tl.load(p_l + 3 * M, mask=m_m, other=0.0)[:, None]
        p_ct = p_c + (i_bh * N + N - 1) * 2 * M * C + o_m[:, None] * C + o_c[None, :]
    if DECAY:
        b_tr = tl.zeros([BM, BC], dtype=DTYPE)
        b_ti = tl.zeros([BM, BC], dtype=DTYPE)
    if READOUT:
        b_wr = tl.zeros([BM, BC], dtype=DTYPE)
        b_wi = tl.zeros([BM, BC], dtype=DTYPE)

    i_last = tl.cast(T, tl.int64) - 1
    p_et = p_e + i_b * stride_eb + i_q * stride_eh + i_last * stride_et + o_m
    p_qt = p_q + i_b * stride_qb + i_q * stride_qh + i_last * stride_qt + o_c
    p_kt = p_k + i_b * stride_kb + i_h * stride_kh + i_last * stride_kt + o_c
    o_d = ((i_b * T + i_last) * Hq + i_q) * C + o_c
    b_er = tl.load(p_et, mask=m_m, other=0.0)
    b_ei = tl.load(p_et + M, mask=m_m, other=0.0)
    b_q = tl.load(p_qt, mask=m_c, other=0.0)
    if RECOVER:
        b_k = tl.load(p_kt, mask=m_c, other=0.0)
    for i_n in range(0, N):
        i_start = (N - 1 - i_n) * K
        count = tl.minimum(K, T - i_start)
        if RECOVER:
            p_f = p_kt - (count - 1) * stride_kt
            b_xr = tl.load(p_ct, mask=m_x, other=0.0)
            b_xi = tl.load(p_ct + M * C, mask=m_x, other=0.0)
            p_ct -= 2 * M * C
            b_ur, b_ui = _advance(b_xr, b_xi, b_lr, b_li, p_f, stride_kt, count, o_c, C, ANCHOR)
            p_f += ANCHOR * stride_kt
            b_vr, b_vi = _advance(b_ur, b_ui, b_lr, b_li, p_f, stride_kt, count - ANCHOR, o_c, C, ANCHOR)
            p_f += ANCHOR * stride_kt
            b_sr, b_si = _advance(b_vr, b_vi, b_lr, b_li, p_f, stride_kt, count - 2 * ANCHOR, o_c, C, ANCHOR)
            p_f += ANCHOR * stride_kt
            b_xr, b_xi = _advance(b_sr, b_si, b_lr, b_li, p_f, stride_kt, count - 3 * ANCHOR, o_c, C, ANCHOR)
        for i in range(0, count):
            i_k = count - 1 - i
            m_next = o_c < tl.where(i_start + i_k > 0, C, 0)
            m_row = o_m < tl.where(i_start + i_k > 0, M, 0)
            p_et -= stride_et
            p_qt -= stride_qt
            p_kt -= stride_kt
            b_er_next = tl.load(p_et, mask=m_row, other=0.0)
            b_ei_next = tl.load(p_et + M, mask=m_row, other=0.0)
            b_q_next = tl.load(p_qt, mask=m_next, other=0.0)
            b_row = b_q.to(DTYPE)[None, :]
            b_pr += b_er[:, None] * b_row
            b_pi += b_ei[:, None] * b_row
            tl.store(p_dk + o_d, tl.sum(b_pr, axis=0).to(p_dk.dtype.element_ty), mask=m_c)
            if QUERY:
                b_dq = tl.sum(b_er[:, None] * b_xr - b_ei[:, None] * b_xi, axis=0)
                tl.store(p_dq + o_d, b_dq.to(p_dq.dtype.element_ty), mask=m_c)
            if READOUT:
                b_wr += b_xr * b_row
                b_wi += b_xi * b_row
            if RECOVER:
                b_k_next = tl.load(p_kt, mask=m_next, other=0.0)
                b_xr -= b_k.to(DTYPE)[None, :]
                b_k = b_k_next
                if DECAY:
                    b_tr += b_pr * b_xr - b_pi * b_xi
                    b_ti += b_pr * b_xi + b_pi * b_xr
                if i_k % ANCHOR == 0:
                    b_xr = tl.where(i_k == ANCHOR, b_ur, tl.where(i_k == 2 * ANCHOR, b_vr, b_sr))
                    b_xi = tl.where(i_k == ANCHOR, b_ui, tl.where(i_k == 2 * ANCHOR, b_vi, b_si))
                else:
                    b_old = b_xr
                    b_xr = b_old * b_ir - b_xi * b_ii
                    b_xi = b_old * b_ii + b_xi * b_ir
            b_old = b_pr
            b_pr = b_old * b_lr - b_pi * b_li
            b_pi = b_old * b_li + b_pi * b_lr
            o_d -= Hq * C
            b_er = b_er_next
            b_ei = b_ei_next
            b_q = b_q_next

    if p_dx is not None:
        tl.store(p_dx + i_bq * M * P * 2 + o_x, b_pr, mask=m_x)
        tl.store(p_dx + i_bq * M * P * 2 + o_x + 1, -b_pi, mask=m_x)
    o_w = (i_bq * NC + i_c) * 2 * M + o_m
    if DECAY:
        tl.store(p_theta + o_w, tl.sum(b_tr, axis=1), mask=m_m)
        tl.store(p_theta + o_w + M, -tl.sum(b_ti, axis=1), mask=m_m)
    if READOUT:
        tl.store(p_w + o_w, tl.sum(b_wr, axis=1), mask=m_m)
        tl.store(p_w + o_w + M, -tl.sum(b_wi, axis=1), mask=m_m)
