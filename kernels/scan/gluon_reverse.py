"""Pass 3 and the gradient of the decay in one program, for Hopper: the alternative to triton_adjoint.py. Notation as in
triton_passes.py, tiles as in gluon_tiles.py, derivation in kernels/README.md."""

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
    scale_rows,
    split_pairs,
    turned,
)


@gluon.jit(do_not_specialize=["T", "S", "chunks", "H", "P", "first"])
def reverse_kernel(
    p_b,
    p_do,
    p_v,
    p_tc,
    p_tt,
    p_e,
    p_step,
    p_x,
    p_g,
    p_dv,
    p_y,
    p_out,
    T,
    S,
    chunks,
    H,
    P,
    first,
    stride_db,
    stride_dt,
    stride_dh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_gb,
    stride_gt,
    stride_gh,
    HAS_STATE: gl.constexpr,
    HAS_COSTATE: gl.constexpr,
    STORE_STATE: gl.constexpr,
    EVEN: gl.constexpr,
):
    """dv as in `adjoint_pass` and g as in `decay_pass`, for one query head per state head; dk and g from (e~, q, k).

    Grid: B H S programs of two warp groups, each over the chunks of its segment in reverse. On chip: the costate Z (b_z),
    its derivative Y (b_t) and y (b_y), [128, 64] fp32 with modes as rows. b~, do and v are read from memory once and lie in
    shared memory for all their products; the next chunk is copied meanwhile. Z is the first operand of one product, from
    registers, and the second of another, from shared memory. b~^T goes to registers once, for three products.

    A buffer in shared memory is written once per chunk, after the barrier at the start of the chunk. So no warp group writes
    what the other still multiplies: `warpgroup_mma_wait` waits for the own group only (triton-lang/triton #11047).
    """
    o_l = gl.arange(0, L, gl.SliceLayout(1, BLOCKED))
    o_d = gl.arange(0, WIDTH, gl.SliceLayout(0, BLOCKED))
    o_c = turned(gl.arange(0, 2 * M, gl.SliceLayout(0, BLOCKED)))
    o_r = gl.arange(0, 2 * M, gl.SliceLayout(1, ROWS))
    o_n = turned(o_r)
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

    s_b = gl.allocate_shared_memory(gl.bfloat16, [2, L, 2 * M], SHARED)
    s_do = gl.allocate_shared_memory(gl.bfloat16, [2, L, WIDTH], SHARED)
    s_v = gl.allocate_shared_memory(gl.bfloat16, [2, L, WIDTH], SHARED)
    s_z = gl.allocate_shared_memory(gl.bfloat16, [2 * M, WIDTH], SHARED)
    s_p = gl.allocate_shared_memory(gl.bfloat16, [L, L], SHARED)
    s_d = gl.allocate_shared_memory(gl.bfloat16, [L, L], SHARED)
    p_bt = p_b + i_bh * T * (2 * M) + o_l[:, None] * (2 * M) + o_c[None, :]
    p_dt = p_do + i_b * stride_db + i_h.to(gl.int64) * stride_dh + o_l[:, None] * stride_dt + o_d[None, :]
    p_vt = p_v + i_b * stride_vb + i_h.to(gl.int64) * stride_vh + o_l[:, None] * stride_vt + o_d[None, :]
    p_gt = p_dv + i_b * stride_gb + i_h.to(gl.int64) * stride_gh + o_l[:, None] * stride_gt + o_d[None, :]
    i_t = (stop - 1).to(gl.int64) * L
    m_l = (stop - 1) * L + o_l < T
    copy_rows(s_b.index(0), p_bt + i_t * (2 * M), m_l, EVEN)
    copy_rows(s_do.index(0), p_dt + i_t * stride_dt, m_l, EVEN)
    copy_rows(s_v.index(0), p_vt + i_t * stride_vt, m_l, EVEN)
    async_copy.commit_group()

    s_t = gl.allocate_shared_memory(gl.bfloat16, [L, 2 * M], SHARED)
    s_t.store(gl.load(p_tc + (i_h * L + o_l)[:, None] * (2 * M) + o_c[None, :]))
    p_f = p_step + i_h * (4 * M) + o_m
    b_cr = gl.load(p_f + 2 * M)
    b_ci = gl.load(p_f + 3 * M)
    # The costate enters the last chunk, n tokens long, with Lambda^(n-1-r).
    p_l = p_e + (i_h * L + gl.minimum(L, T - (stop - 1) * L) - 1) * (2 * M) + o_m
    b_re = gl.load(p_l)
    b_im = gl.load(p_l + M)
    b_z = gl.zeros([2 * M, WIDTH], gl.float32, ROWS)
    b_t = gl.zeros([2 * M, WIDTH], gl.float32, ROWS)
    b_y = gl.zeros([2 * M, L], gl.float32, ROWS)
    if HAS_COSTATE:
        o_x = o_m[:, None] * (2 * P) + (o_n // M)[:, None] + 2 * (first + o_k)[None, :]
        b_sign = gl.where(o_n < M, 1.0, -1.0)[:, None]
        b_z = b_sign * gl.load(p_g + (i_bh * S + i_s) * M * P * 2 + o_x)

    for i in range(0, stop - start):
        i_c = stop - 1 - i
        n = gl.minimum(L, T - i_c * L)
        s_bc = s_b.index(i % 2)
        s_dc = s_do.index(i % 2)
        s_vc = s_v.index(i % 2)
        async_copy.wait_group(0)
        fence_async_shared()
        if i_c > start:
            i_t = (i_c - 1).to(gl.int64) * L
            m_n = o_l < L  # only the last chunk, the first one here, may be short
            copy_rows(s_b.index((i + 1) % 2), p_bt + i_t * (2 * M), m_n, EVEN)
            copy_rows(s_do.index((i + 1) % 2), p_dt + i_t * stride_dt, m_n, EVEN)
            copy_rows(s_v.index((i + 1) % 2), p_vt + i_t * stride_vt, m_n, EVEN)
        async_copy.commit_group()

        zero = gl.zeros([L, L], gl.float32, COLUMNS)
        b_p = warpgroup_mma(s_dc, s_vc.permute((1, 0)), zero, use_acc=False, is_async=True)
        b_d = warpgroup_mma(s_t, s_bc.permute((1, 0)), zero, use_acc=False, is_async=True)
        b_z = scale_rows(b_z, b_re, b_im)
        b_t = scale_rows(b_t, b_re, b_im)
        b_re = b_cr
        b_im = b_ci
        b_ta = gl.convert_layout(b_t.to(gl.bfloat16), ROWS_FIRST)
        b_y = warpgroup_mma(b_ta, s_vc.permute((1, 0)), b_y, is_async=True)
        b_zh = b_z.to(gl.bfloat16)
        s_z.store(b_zh)
        b_t += b_z * n.to(gl.float32)
        b_p, b_d = warpgroup_mma_wait(1, deps=[b_p, b_d])
        # The integer weights multiply fp32 numbers, before those are rounded.
        b_p = gl.where(o_i[:, None] >= o_j[None, :], b_p * (o_i[:, None] - o_j[None, :]).to(gl.float32), 0.0)
        s_p.store(b_p.to(gl.bfloat16))
        b_d = gl.where(o_i[:, None] <= o_j[None, :], b_d, 0.0)
        s_d.store(b_d.to(gl.bfloat16))
        b_za = gl.convert_layout(b_zh, ROWS_FIRST)
        b_x = warpgroup_mma(
            b_za, s_vc.permute((1, 0)), gl.zeros([2 * M, L], gl.float32, ROWS), use_acc=False, is_async=True
        )
        b_x, b_y, b_ta, b_za = warpgroup_mma_wait(0, deps=[b_x, b_y, b_ta, b_za])
        b_y += b_x * (n - 1 - o_k).to(gl.float32)[None, :]

        fence_async_shared()
        b_dv = warpgroup_mma(s_t, s_z, zero, use_acc=False, is_async=True)
        b_dv = warpgroup_mma(s_d, s_dc, b_dv, is_async=True)
        b_ba = s_bc.permute((1, 0)).load(ROWS_FIRST)
        b_y = warpgroup_mma(b_ba, s_p, b_y, is_async=True)
        b_z = warpgroup_mma(b_ba, s_dc, b_z, is_async=True)
        o_w = gl.arange(1, L + 1, gl.SliceLayout(0, ROWS_FIRST))
        b_bw = (b_ba.to(gl.float32) * o_w.to(gl.float32)[None, :]).to(gl.bfloat16)
        b_t = warpgroup_mma(b_bw, s_dc, b_t, is_async=True)
        b_dv = warpgroup_mma_wait(3, deps=[b_dv])
        b_g = gl.convert_layout(b_dv.to(p_dv.dtype.element_ty), BLOCKED)
        p_o = p_gt + i_c.to(gl.int64) * L * stride_gt
        if EVEN:
            gl.store(p_o, b_g)
        else:
            gl.store(p_o, b_g, mask=(i_c * L + o_l < T)[:, None])
        b_y, b_t, b_z, b_ba, b_bw = warpgroup_mma_wait(0, deps=[b_y, b_t, b_z, b_ba, b_bw])

    b_yr, b_yi = split_pairs(b_y)
    b_tr, b_ti = split_pairs(gl.load(p_tt + (i_h * 2 * M + o_n)[:, None] * L + o_k[None, :]).to(gl.float32))
    b_gr = gl.sum(b_tr * b_yr + b_ti * b_yi, axis=2)  # the table holds conjugates
    b_gi = gl.sum(b_tr * b_yi - b_ti * b_yr, axis=2)
    b_re = gl.load(p_f)
    b_im = gl.load(p_f + M)
    # As before the loop, in 64 bits: spelled alike, the addresses would be kept in registers all through it.
    o_x = o_m.to(gl.int64)[:, None] * (2 * P) + (o_n // M)[:, None] + 2 * (first + o_k)[None, :]
    if HAS_STATE:
        b_xr, b_xi = split_pairs(gl.load(p_x + (i_bh * S + i_s) * M * P * 2 + o_x))
        b_ur, b_ui = split_pairs(scale_rows(b_t, b_re, b_im))
        b_gr += gl.sum(b_xr * b_ur - b_xi * b_ui, axis=2)
        b_gi += gl.sum(b_xr * b_ui + b_xi * b_ur, axis=2)
    o_g = gl.arange(0, 8, gl.SliceLayout(1, b_gr.type.layout))[:, None] * 8
    o_g += gl.arange(0, 8, gl.SliceLayout(0, b_gr.type.layout))[None, :]
    p_o = p_out + (i_bh * S + i_s) * (2 * M) + o_g
    gl.store(p_o, b_gr)
    gl.store(p_o + M, b_gi)
    if STORE_STATE:  # noqa: SIM102 (decided when the kernel is compiled; the next line when it runs)
        if i_s == 0:
            b_z = scale_rows(b_z, b_re, b_im)
            gl.store(p_y + i_bh * M * P * 2 + o_x, gl.where(o_n < M, 1.0, -1.0)[:, None] * b_z)
