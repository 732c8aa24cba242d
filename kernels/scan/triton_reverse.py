"""The recurrence backwards, token by token, as a Triton kernel. Notation as in triton_recurrence.py."""

import triton
import triton.language as tl

from .triton_recurrence import continues


@triton.jit
def _advance(
    b_re,
    b_im,
    b_lr,
    b_li,
    p_kt,
    stride_kt,
    left,
    o_c,
    p_n,
    t,
    C: tl.constexpr,
    STEPS: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """STEPS tokens forward from token t, or the `left` that remain."""
    for i in tl.static_range(STEPS):
        if DOCUMENTS:
            m_same = continues(p_n, t + i, i < left)
            b_re = tl.where(m_same, b_re, 0.0)
            b_im = tl.where(m_same, b_im, 0.0)
        b_k = tl.load(p_kt + i * stride_kt, mask=o_c < tl.where(i < left, C, 0), other=0.0).to(b_re.dtype)[None, :]
        b_old = b_re
        b_re = tl.where(i < left, b_old * b_lr - b_im * b_li + b_k, b_old)
        b_im = tl.where(i < left, b_old * b_li + b_im * b_lr, b_im)
    return b_re, b_im


@triton.jit(do_not_specialize=["T", "N", "Hq", "G", "P"])
def reverse_scan_kernel(
    p_e,
    p_q,
    p_k,
    p_lam,
    p_c,
    p_g,
    p_dq,
    p_dk,
    p_dx,
    p_theta,
    p_w,
    p_n,
    T,
    N,
    Hq,
    G,
    P,
    stride_eb,
    stride_et,
    stride_eh,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    C: tl.constexpr,
    M: tl.constexpr,
    BC: tl.constexpr,
    BM: tl.constexpr,
    K: tl.constexpr,
    ANCHOR: tl.constexpr,
    HAS_COSTATE: tl.constexpr,
    STORE_COSTATE: tl.constexpr,
    QUERY: tl.constexpr,
    DECAY: tl.constexpr,
    READOUT: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """Backward in time: P_t += e_t q_t^T, dk_t = Re(sum_m P_t), dq_t = Re(e_t^T X_t), dtheta += P_t (X_t - k_t),
    then P_(t-1) = Lambda P_t and X_(t-1) = (X_t - k_t) / Lambda, ANCHOR - 1 times (ANCHOR = K / 4) from a known state.

    For (e, q, k); for (b, do, v), where there is no dq (QUERY off); for (w, dy, z), e with strides 0, where READOUT
    asks for sum_t X_t dy_t. Without QUERY, DECAY and READOUT the states are not needed and p_c, p_k are unused.
    Grid: B Hq ceil(C / BC) programs. Tiles [BM, BC]: X, P, three anchors, dtheta. Bytes per token and query head: e
    once per block of channels, q, k, dq, dk once, k and a state every K tokens a second time.
    p_dq as q but contiguous; p_dk [B, T, Hq, C], p_dx [B, Hq, M, P, 2] from this side's first channel on, p_theta and
    p_w [B, Hq, NC, 2M]: one slice per query head, summed by the caller.
    """
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
    if HAS_COSTATE:  # noqa: SIM102
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

    p_nb = p_n
    if DOCUMENTS:
        p_nb = p_n + i_b * T
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
            b_ur, b_ui = _advance(
                b_xr, b_xi, b_lr, b_li, p_f, stride_kt, count, o_c, p_nb, i_start, C, ANCHOR, DOCUMENTS
            )
            p_f += ANCHOR * stride_kt
            t = i_start + ANCHOR
            left = count - ANCHOR
            b_vr, b_vi = _advance(b_ur, b_ui, b_lr, b_li, p_f, stride_kt, left, o_c, p_nb, t, C, ANCHOR, DOCUMENTS)
            p_f += ANCHOR * stride_kt
            t += ANCHOR
            left -= ANCHOR
            b_sr, b_si = _advance(b_vr, b_vi, b_lr, b_li, p_f, stride_kt, left, o_c, p_nb, t, C, ANCHOR, DOCUMENTS)
            p_f += ANCHOR * stride_kt
            t += ANCHOR
            left -= ANCHOR
            b_xr, b_xi = _advance(b_sr, b_si, b_lr, b_li, p_f, stride_kt, left, o_c, p_nb, t, C, ANCHOR, DOCUMENTS)
        for i in range(0, count):
            i_k = count - 1 - i
            if DOCUMENTS:
                m_same = continues(p_nb, i_start + i_k, True)
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
                    if DOCUMENTS:  # noqa: SIM102
                        if (
                            m_same == 0
                        ):  # nothing of the document before is left: its state, forwards from the checkpoint
                            p_f = p_kt - (i_k - 1) * stride_kt
                            p_cf = p_ct + 2 * M * C
                            b_xr = tl.load(p_cf, mask=m_x, other=0.0)
                            b_xi = tl.load(p_cf + M * C, mask=m_x, other=0.0)
                            for i_f in range(0, i_k):
                                i_u = i_start + i_f
                                b_xr, b_xi = _advance(
                                    b_xr, b_xi, b_lr, b_li, p_f, stride_kt, 1, o_c, p_nb, i_u, C, 1, DOCUMENTS
                                )
                                p_f += stride_kt
            if DOCUMENTS:
                b_pr = tl.where(m_same, b_pr, 0.0)
                b_pi = tl.where(m_same, b_pi, 0.0)
            b_old = b_pr
            b_pr = b_old * b_lr - b_pi * b_li
            b_pi = b_old * b_li + b_pi * b_lr
            o_d -= Hq * C
            b_er = b_er_next
            b_ei = b_ei_next
            b_q = b_q_next

    if STORE_COSTATE:
        tl.store(p_dx + i_bq * M * P * 2 + o_x, b_pr, mask=m_x)
        tl.store(p_dx + i_bq * M * P * 2 + o_x + 1, -b_pi, mask=m_x)
    o_w = (i_bq * NC + i_c) * 2 * M + o_m
    if DECAY:
        tl.store(p_theta + o_w, tl.sum(b_tr, axis=1), mask=m_m)
        tl.store(p_theta + o_w + M, -tl.sum(b_ti, axis=1), mask=m_m)
    if READOUT:
        tl.store(p_w + o_w, tl.sum(b_wr, axis=1), mask=m_m)
        tl.store(p_w + o_w + M, -tl.sum(b_wi, axis=1), mask=m_m)
