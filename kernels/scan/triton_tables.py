"""The tables of powers that the chunkwise passes read, in one launch. Notation as in triton_passes.py."""

import triton
import triton.language as tl


@triton.jit
def tables_kernel(
    p_theta,
    p_t,
    p_tc,
    p_tt,
    p_e,
    p_step,
    M: tl.constexpr,
    L: tl.constexpr,
    BL: tl.constexpr,
):
    """T_j = Lambda^(r-j) three ways, E_i = Lambda^(i-r), Lambda^(r+1) and Lambda^L from theta [H, M, 2], r = L // 2.

    Grid: H L / BL programs. Through fp64, as in `powers`: the phase reaches 8,192 radians. Sine and cosine of E serve T.
    """
    NL: tl.constexpr = L // BL
    i_h = tl.program_id(0) // NL
    i_l = tl.program_id(0) % NL
    o_l = i_l * BL + tl.arange(0, BL)[:, None]
    o_m = tl.arange(0, M)[None, :]
    b_re = tl.load(p_theta + (i_h * M + o_m) * 2).to(tl.float64)
    b_im = tl.load(p_theta + (i_h * M + o_m) * 2 + 1).to(tl.float64)
    b_n = (o_l - L // 2).to(tl.float64)
    b_cos = tl.cos(b_im * b_n)
    b_sin = tl.sin(b_im * b_n)

    o_x = (i_h * L + o_l) * (2 * M) + o_m
    b_e = tl.exp(b_re * b_n)
    tl.store(p_e + o_x, (b_e * b_cos).to(tl.float32))
    tl.store(p_e + o_x + M, (b_e * b_sin).to(tl.float32))
    b_t = tl.exp(-b_re * b_n)
    # Rounded once to fp32, as the tables of the other backends, and from there.
    b_tr = (b_t * b_cos).to(tl.float32).to(p_t.dtype.element_ty)
    b_ti = (-b_t * b_sin).to(tl.float32).to(p_t.dtype.element_ty)
    b_tc = (b_t * b_sin).to(tl.float32).to(p_t.dtype.element_ty)
    tl.store(p_t + o_x, b_tr)
    tl.store(p_t + o_x + M, b_ti)
    tl.store(p_tc + o_x, b_tr)
    tl.store(p_tc + o_x + M, b_tc)
    o_y = (i_h * 2 * M + o_m) * L + o_l
    tl.store(p_tt + o_y, b_tr)
    tl.store(p_tt + o_y + M * L, b_tc)

    if i_l == 0:
        o_2 = tl.arange(0, 2)[:, None]
        b_j = tl.where(o_2 == 0, L // 2 + 1, L).to(tl.float64)
        b_s = tl.exp(b_re * b_j)
        p_s = p_step + (i_h * 2 + o_2) * (2 * M) + o_m
        tl.store(p_s, (b_s * tl.cos(b_im * b_j)).to(tl.float32))
        tl.store(p_s + M, (b_s * tl.sin(b_im * b_j)).to(tl.float32))
