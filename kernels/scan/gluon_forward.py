"""The forward of the chunkwise scan in one program, for Hopper: the alternative to contract, W and expand. a and b~ stay on
chip. Notation as in triton_passes.py, tiles as in gluon_tiles.py, derivation in kernels/README.md."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .gluon_tiles import (
    BLOCKED,
    COLUMNS,
    ROWS,
    ROWS_FIRST,
    SHARED,
    WIDTH,
    L,
    M,
    copy_rows,
    join_pairs,
    scale_rows,
    split_pairs,
    turned,
)


@gluon.jit(do_not_specialize=["T", "S", "chunks", "H"])
def forward_kernel(
    p_q,
    p_k,
    p_v,
    p_tt,
    p_e,
    p_step,
    p_w,
    p_x,
    p_o,
    p_a,
    p_y,
    T,
    S,
    chunks,
    H,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_ob,
    stride_ot,
    stride_oh,
    HAS_STATE: gl.constexpr,
    STORE_STATE: gl.constexpr,
    STORE_A: gl.constexpr,
    EVEN: gl.constexpr,
):
    """o_i = Re((W a_i)^T X^v_i) with a_i = X^k_i q_i, for one query head per state head.

    Grid: B H S programs of two warp groups, each over the chunks of its segment. On chip: the states X^k (b_x) and X^v
    (b_z), [128, 64] fp32 with modes as rows. a and b~ have tokens as columns, so that X^k and T are first operands, from
    registers. Bytes per token: q, k and v in, o out, each once. Barriers: see `reverse_kernel`.
    p_w: W [H, 2M, 2M] fp32. p_x: states before every segment, [B, H, S, M, 2 WIDTH, 2]. STORE_STATE: the last state goes
    to p_y [B, H, M, 2 WIDTH, 2]. STORE_A: a goes to p_a [B, H, T, 2M], for the backward.
    """
    P: gl.constexpr = 2 * WIDTH
    o_l = gl.arange(0, L, gl.SliceLayout(1, BLOCKED))
    o_d = gl.arange(0, WIDTH, gl.SliceLayout(0, BLOCKED))
    o_c = turned(gl.arange(0, 2 * M, gl.SliceLayout(0, BLOCKED)))
    o_n = turned(gl.arange(0, 2 * M, gl.SliceLayout(1, ROWS)))
    o_m = o_n % M
    o_k = gl.arange(0, WIDTH, gl.SliceLayout(0, ROWS))
    o_i = gl.arange(0, L, gl.SliceLayout(1, COLUMNS))
    o_j = gl.arange(0, L, gl.SliceLayout(0, COLUMNS))

    i_s = gl.program_id(0) % S
    i_bh = (gl.program_id(0) // S).to(gl.int64)
    i_b = i_bh // H
    i_h = (i_bh % H).to(gl.int32)
    start = i_s * chunks
    stop = gl.minimum(start + chunks, gl.cdiv(T, L))

    s_q = gl.allocate_shared_memory(gl.bfloat16, [2, L, WIDTH], SHARED)
    s_k = gl.allocate_shared_memory(gl.bfloat16, [2, L, WIDTH], SHARED)
    s_v = gl.allocate_shared_memory(gl.bfloat16, [2, L, WIDTH], SHARED)
    s_p = gl.allocate_shared_memory(gl.bfloat16, [L, L], SHARED)
    s_d = gl.allocate_shared_memory(gl.bfloat16, [L, L], SHARED)
    s_a = gl.allocate_shared_memory(gl.bfloat16, [2 * M, L], SHARED)
    s_b = gl.allocate_shared_memory(gl.bfloat16, [2 * M, L], SHARED)
    s_x = gl.allocate_shared_memory(gl.bfloat16, [2 * M, WIDTH], SHARED)
    p_qt = p_q + i_b * stride_qb + i_h.to(gl.int64) * stride_qh + o_l[:, None] * stride_qt + o_d[None, :]
    p_kt = p_k + i_b * stride_kb + i_h.to(gl.int64) * stride_kh + o_l[:, None] * stride_kt + o_d[None, :]
    p_vt = p_v + i_b * stride_vb + i_h.to(gl.int64) * stride_vh + o_l[:, None] * stride_vt + o_d[None, :]
    p_ot = p_o + i_b * stride_ob + i_h.to(gl.int64) * stride_oh + o_l[:, None] * stride_ot + o_d[None, :]
    i_t = start.to(gl.int64) * L
    m_l = start * L + o_l < T
    copy_rows(s_q.index(0), p_qt + i_t * stride_qt, m_l, EVEN)
    copy_rows(s_k.index(0), p_kt + i_t * stride_kt, m_l, EVEN)
    copy_rows(s_v.index(0), p_vt + i_t * stride_vt, m_l, EVEN)
    async_copy.commit_group()

    s_w = gl.allocate_shared_memory(gl.bfloat16, [2 * M, 2 * M], SHARED)
    o_w = turned(gl.arange(0, 2 * M, gl.SliceLayout(1, BLOCKED)))
    s_w.store(gl.load(p_w + i_h * (4 * M * M) + o_w[:, None] * (2 * M) + o_c[None, :]).to(gl.bfloat16))
    # The table holds conjugates of T; the imaginary rows change their sign.
    o_tt = i_h * (2 * M) + o_w
    b_tt = gl.load(p_tt + o_tt[:, None] * L + o_d[None, :])
    b_tt = gl.where((o_w < M)[:, None], b_tt, -b_tt)
    s_t = gl.allocate_shared_memory(gl.bfloat16, [2 * M, L], SHARED)
    s_t.store(b_tt)
    b_tt = s_t.load(ROWS_FIRST)
    # E with tokens as columns: real part in the first row of a mode, imaginary part in the second.
    b_er, b_ei = split_pairs(gl.load(p_e + (i_h * L + o_k)[None, :] * (2 * M) + o_n[:, None]))
    p_f = p_step + i_h * (4 * M) + o_m
    b_re = gl.load(p_f)
    b_im = gl.load(p_f + M)
    b_cr = gl.load(p_f + 2 * M)
    b_ci = gl.load(p_f + 3 * M)
    b_x = gl.zeros([2 * M, WIDTH], gl.float32, ROWS)
    b_z = gl.zeros([2 * M, WIDTH], gl.float32, ROWS)
    if HAS_STATE:
        p_xs = p_x + (i_bh * S + i_s) * M * P * 2 + o_m[:, None] * (2 * P) + (o_n // M)[:, None] + 2 * o_k[None, :]
        b_x = gl.load(p_xs)
        b_z = gl.load(p_xs + 2 * WIDTH)

    for i in range(0, stop - start):
        i_c = start + i
        s_qc = s_q.index(i % 2)
        s_kc = s_k.index(i % 2)
        s_vc = s_v.index(i % 2)
        async_copy.wait_group(0)
        fence_async_shared()
        if i_c + 1 < stop:
            i_t = (i_c + 1).to(gl.int64) * L
            m_n = (i_c + 1) * L + o_l < T
            copy_rows(s_q.index((i + 1) % 2), p_qt + i_t * stride_qt, m_n, EVEN)
            copy_rows(s_k.index((i + 1) % 2), p_kt + i_t * stride_kt, m_n, EVEN)
            copy_rows(s_v.index((i + 1) % 2), p_vt + i_t * stride_vt, m_n, EVEN)
        async_copy.commit_group()

        zero = gl.zeros([L, L], gl.float32, COLUMNS)
        none = gl.zeros([2 * M, L], gl.float32, ROWS)
        b_p = warpgroup_mma(s_kc, s_qc.permute((1, 0)), zero, use_acc=False, is_async=True)
        b_x = scale_rows(b_x, b_re, b_im)
        b_z = scale_rows(b_z, b_re, b_im)
        b_re = b_cr
        b_im = b_ci
        b_xa = gl.convert_layout(b_x.to(gl.bfloat16), ROWS_FIRST)
        b_a = warpgroup_mma(b_xa, s_qc.permute((1, 0)), none, use_acc=False, is_async=True)
        s_x.store(b_z.to(gl.bfloat16))
        b_p = warpgroup_mma_wait(1, deps=[b_p])
        s_p.store(gl.where(o_i[:, None] <= o_j[None, :], b_p, 0.0).to(gl.bfloat16))
        fence_async_shared()
        b_a = warpgroup_mma(b_tt, s_p, b_a, is_async=True)
        b_x = warpgroup_mma(b_tt, s_kc, b_x, is_async=True)
        b_z = warpgroup_mma(b_tt, s_vc, b_z, is_async=True)
        b_a, b_xa = warpgroup_mma_wait(2, deps=[b_a, b_xa])
        b_u, b_w = split_pairs(b_a)
        s_a.store(join_pairs(b_u * b_er - b_w * b_ei, b_u * b_ei + b_w * b_er).to(gl.bfloat16))
        fence_async_shared()
        b_b = warpgroup_mma(s_w, s_a, none, use_acc=False, is_async=True)
        b_b, b_x, b_z, b_tt = warpgroup_mma_wait(0, deps=[b_b, b_x, b_z, b_tt])
        b_u, b_w = split_pairs(b_b)
        # b~ conjugate, so that products with the states and T have real parts.
        s_b.store(join_pairs(b_u * b_er - b_w * b_ei, -b_u * b_ei - b_w * b_er).to(gl.bfloat16))
        fence_async_shared()
        b_d = warpgroup_mma(s_b.permute((1, 0)), s_t, zero, use_acc=False, is_async=True)
        b_o = warpgroup_mma(s_b.permute((1, 0)), s_x, zero, use_acc=False, is_async=True)
        if STORE_A:
            p_at = p_a + (i_bh * T + i_c.to(gl.int64) * L + o_l)[:, None] * (2 * M) + o_c[None, :]
            gl.store(p_at, s_a.permute((1, 0)).load(BLOCKED), mask=(i_c * L + o_l < T)[:, None])
        b_d = warpgroup_mma_wait(1, deps=[b_d])
        s_d.store(gl.where(o_i[:, None] >= o_j[None, :], b_d, 0.0).to(gl.bfloat16))
        fence_async_shared()
        b_o = warpgroup_mma(s_d, s_vc, b_o, is_async=True)
        b_o = warpgroup_mma_wait(0, deps=[b_o])
        b_g = gl.convert_layout(b_o.to(p_o.dtype.element_ty), BLOCKED)
        p_ot_c = p_ot + i_c.to(gl.int64) * L * stride_ot
        if EVEN:
            gl.store(p_ot_c, b_g)
        else:
            gl.store(p_ot_c, b_g, mask=(i_c * L + o_l < T)[:, None])

    if STORE_STATE:  # noqa: SIM102 (decided when the kernel is compiled; the next line when it runs)
        if i_s == S - 1:
            p_l = p_e + (i_h * L + T - 1 - (stop - 1) * L) * (2 * M) + o_m
            b_re = gl.load(p_l)
            b_im = gl.load(p_l + M)
            o_y = o_m.to(gl.int64)[:, None] * (2 * P) + (o_n // M)[:, None] + 2 * o_k[None, :]
            gl.store(p_y + i_bh * M * P * 2 + o_y, scale_rows(b_x, b_re, b_im))
            gl.store(p_y + i_bh * M * P * 2 + o_y + 2 * WIDTH, scale_rows(b_z, b_re, b_im))
