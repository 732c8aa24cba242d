"""One token as one kernel: every state is read once and written once, in place if asked. Semantics as in step.py.

Shapes: B batch, H state heads, G query heads per state head, Hq = G H, R key features, D value width, P = R + D
channels, M basis functions.

    X = Lambda X + z^T      a = X^k q      b = W a      o = Re(b^T X^v)      linear readout: y = Re(w^T X)

Decoding is bound by reading and writing the states: 16 M P bytes per state head and token, fp32. W, 16 M^2 bytes per
head, is shared by the batch and stays in the L2 cache. No position enters and nothing is decided on the host: a step
can be captured in a CUDA graph and replayed. There is no autotuning, which would run the update in place many times.
These functions record no gradient.
"""

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["N"])
def decay_table_kernel(p_theta, p_lam, N, M: tl.constexpr, BLOCK: tl.constexpr):
    """Lambda = exp(theta), [H, 2, M] from [H, M, 2], through fp64 as in `powers`: the phase reaches 128 radians.

    A launch of its own, because in a tile of the step every thread would compute these for all the modes it holds.
    """
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < N
    b_re = tl.exp(tl.load(p_theta + 2 * o_n, mask=m_n, other=0.0).to(tl.float64))
    b_im = tl.load(p_theta + 2 * o_n + 1, mask=m_n, other=0.0).to(tl.float64)
    p_out = p_lam + (o_n // M) * (2 * M) + o_n % M
    tl.store(p_out, (b_re * tl.cos(b_im)).to(p_lam.dtype.element_ty), mask=m_n)
    tl.store(p_out + M, (b_re * tl.sin(b_im)).to(p_lam.dtype.element_ty), mask=m_n)


@triton.jit
def _advance(p_x, p_y, o_x, m_x, b_lr, b_li, b_z):
    """Lambda X + z^T for a tile of interleaved pairs, read from p_x, written to p_y. -> (Re, Im)."""
    o_2 = tl.arange(0, 2)[None, None, :]
    b_re, b_im = tl.split(tl.load(p_x + o_x[:, :, None] + o_2, mask=m_x[:, :, None], other=0.0))
    b_xr = b_lr[:, None] * b_re - b_li[:, None] * b_im + b_z[None, :]
    b_xi = b_lr[:, None] * b_im + b_li[:, None] * b_re
    tl.store(p_y + o_x[:, :, None] + o_2, tl.join(b_xr, b_xi), mask=m_x[:, :, None])
    return b_xr, b_xi


@triton.jit(do_not_specialize=["H"])
def scan_step_kernel(
    p_q,
    p_k,
    p_v,
    p_lam,
    p_w,
    p_x,
    p_y,
    p_o,
    H,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_vb,
    stride_vh,
    G: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    BG: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """a = X^k q over blocks of BC keys, then b = W a and o = Re(b^T X^v) over blocks of BN modes.

    Grid: B H programs. Tiles: X^k [BM, BC], X^v [BN, BD], W four times [BN, BM], a [BG, BM], o [BG, BD]; BG >= G,
    BM >= M, BD >= D. Bytes per program: 16 M P of states, 16 M^2 of W, and the token.
    p_lam [H, 2, M], p_w [H, 2M, 2M], p_x and p_y [B, H, M, P, 2], which may be the same: a program reads and writes
    no state but its own, each tile before it writes it. p_o [B, Hq, D].
    """
    DTYPE = p_x.dtype.element_ty
    P: tl.constexpr = R + D
    i_bh = tl.cast(tl.program_id(0), tl.int64)
    i_b = i_bh // H
    i_h = i_bh % H
    p_x += i_bh * (M * P * 2)
    p_y += i_bh * (M * P * 2)
    p_w += i_h * (4 * M * M)
    p_lam += i_h * (2 * M)
    p_q += i_b * stride_qb + i_h * G * stride_qh
    o_g = tl.arange(0, BG)
    o_m = tl.arange(0, BM)
    m_m = o_m < M

    b_lr = tl.load(p_lam + o_m, mask=m_m, other=0.0)
    b_li = tl.load(p_lam + M + o_m, mask=m_m, other=0.0)
    b_ar = tl.zeros([BG, BM], dtype=DTYPE)
    b_ai = tl.zeros([BG, BM], dtype=DTYPE)
    for i_c in range(0, R, BC):
        o_c = i_c + tl.arange(0, BC)
        m_c = o_c < R
        b_k = tl.load(p_k + i_b * stride_kb + i_h * stride_kh + o_c, mask=m_c, other=0.0).to(DTYPE)
        o_x = o_m[:, None] * (2 * P) + o_c[None, :] * 2
        b_xr, b_xi = _advance(p_x, p_y, o_x, m_m[:, None] & m_c[None, :], b_lr, b_li, b_k)
        for i_g in tl.static_range(G):
            b_q = tl.load(p_q + i_g * stride_qh + o_c, mask=m_c, other=0.0).to(DTYPE)[None, :]
            b_ar += tl.where(o_g[:, None] == i_g, tl.sum(b_xr * b_q, axis=1)[None, :], 0.0)
            b_ai += tl.where(o_g[:, None] == i_g, tl.sum(b_xi * b_q, axis=1)[None, :], 0.0)

    o_d = tl.arange(0, BD)
    m_d = o_d < D
    b_v = tl.load(p_v + i_b * stride_vb + i_h * stride_vh + o_d, mask=m_d, other=0.0).to(DTYPE)
    b_o = tl.zeros([BG, BD], dtype=DTYPE)
    for i_n in range(0, M, BN):
        o_n = i_n + tl.arange(0, BN)
        m_n = o_n < M
        b_nr = tl.load(p_lam + o_n, mask=m_n, other=0.0)
        b_ni = tl.load(p_lam + M + o_n, mask=m_n, other=0.0)
        o_y = o_n[:, None] * (2 * P) + (R + o_d[None, :]) * 2
        b_yr, b_yi = _advance(p_x, p_y, o_y, m_n[:, None] & m_d[None, :], b_nr, b_ni, b_v)
        p_wn = p_w + o_n[:, None] * (2 * M) + o_m[None, :]
        m_w = m_n[:, None] & m_m[None, :]
        b_wrr = tl.load(p_wn, mask=m_w, other=0.0)
        b_wri = tl.load(p_wn + M, mask=m_w, other=0.0)
        b_wir = tl.load(p_wn + 2 * M * M, mask=m_w, other=0.0)
        b_wii = tl.load(p_wn + 2 * M * M + M, mask=m_w, other=0.0)
        for i_g in tl.static_range(G):
            b_gr = tl.sum(tl.where(o_g[:, None] == i_g, b_ar, 0.0), axis=0)[None, :]
            b_gi = tl.sum(tl.where(o_g[:, None] == i_g, b_ai, 0.0), axis=0)[None, :]
            b_br = tl.sum(b_wrr * b_gr + b_wri * b_gi, axis=1)[:, None]
            b_bi = tl.sum(b_wir * b_gr + b_wii * b_gi, axis=1)[:, None]
            b_row = tl.sum(b_br * b_yr - b_bi * b_yi, axis=0)
            b_o += tl.where(o_g[:, None] == i_g, b_row[None, :], 0.0)
    p_ot = p_o + (i_bh * G + o_g[:, None]) * D + o_d[None, :]
    tl.store(p_ot, b_o.to(p_o.dtype.element_ty), mask=(o_g < G)[:, None] & m_d[None, :])


@triton.jit(do_not_specialize=["H"])
def linear_step_kernel(
    p_z,
    p_lam,
    p_w,
    p_x,
    p_y,
    p_o,
    H,
    stride_zb,
    stride_zh,
    P: tl.constexpr,
    M: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """y = Re(w^T X). Grid: B H ceil(P / BC) programs. Tile: X [BM, BC]. p_w [H, 2M], p_o [B, H, P]; rest as above."""
    DTYPE = p_x.dtype.element_ty
    NC: tl.constexpr = (P + BC - 1) // BC
    i_p = tl.program_id(0)
    i_bh = tl.cast(i_p // NC, tl.int64)
    i_b = i_bh // H
    i_h = i_bh % H
    o_m = tl.arange(0, BM)
    o_c = i_p % NC * BC + tl.arange(0, BC)
    m_m = o_m < M
    m_c = o_c < P
    p_lam += i_h * (2 * M)
    b_lr = tl.load(p_lam + o_m, mask=m_m, other=0.0)
    b_li = tl.load(p_lam + M + o_m, mask=m_m, other=0.0)
    b_z = tl.load(p_z + i_b * stride_zb + i_h * stride_zh + o_c, mask=m_c, other=0.0).to(DTYPE)
    o_x = i_bh * (M * P * 2) + o_m[:, None] * (2 * P) + o_c[None, :] * 2
    b_xr, b_xi = _advance(p_x, p_y, o_x, m_m[:, None] & m_c[None, :], b_lr, b_li, b_z)
    b_wr = tl.load(p_w + i_h * (2 * M) + o_m, mask=m_m, other=0.0)[:, None]
    b_wi = tl.load(p_w + i_h * (2 * M) + M + o_m, mask=m_m, other=0.0)[:, None]
    b_y = tl.sum(b_wr * b_xr - b_wi * b_xi, axis=0)
    tl.store(p_o + i_bh * P + o_c, b_y.to(p_o.dtype.element_ty), mask=m_c)


def scan_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor, state: Tensor, *, inplace: bool = False
) -> tuple[Tensor, Tensor]:
    """-> (o [B, Hq, D] in v's dtype, the new state: `state` itself if `inplace`, which must then be contiguous)."""
    B, H, R = k.shape
    Hq, D, M = q.shape[1], v.shape[2], log_decay.shape[1]
    q, k, v = _rows(q), _rows(k), _rows(v)
    before, after = _states(state, inplace)
    o = torch.empty(B, Hq, D, dtype=v.dtype, device=v.device)
    tiles = scan_tiles(Hq // H, R, D, M)
    with _device(q):
        scan_step_kernel[(B * H,)](
            *(q, k, v, _decay(log_decay), mixing.contiguous(), before, after, o, H),
            *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
            **dict(G=Hq // H, R=R, D=D, M=M),
            **tiles,
        )
    return o, after


def linear_one_step(
    z: Tensor, log_decay: Tensor, readout: Tensor, state: Tensor, *, inplace: bool = False
) -> tuple[Tensor, Tensor]:
    """-> (y [B, H, P] in z's dtype, the new state as in `scan_step`)."""
    (B, H, P), M = z.shape, log_decay.shape[1]
    z = _rows(z)
    before, after = _states(state, inplace)
    y = torch.empty(B, H, P, dtype=z.dtype, device=z.device)
    tiles = linear_tiles(P, M)
    with _device(z):
        linear_step_kernel[(B * H * triton.cdiv(P, tiles["BC"]),)](
            *(z, _decay(log_decay), readout.contiguous(), before, after, y, H),
            *z.stride()[:2],
            **dict(P=P, M=M),
            **tiles,
        )
    return y, after


def scan_tiles(G: int, R: int, D: int, M: int) -> dict[str, int]:
    """At most 4,096 complex numbers of X in a tile (32 registers of 256 threads), 4 times 4,096 of W."""
    BM, BD = triton.next_power_of_2(M), triton.next_power_of_2(D)
    BC = min(triton.next_power_of_2(R), 4096 // BM)
    BN = min(BM, 4096 // BM, 4096 // BD)
    warps = 8 if BM * max(BC, BM) >= 2048 else 4
    return dict(BG=triton.next_power_of_2(G), BM=BM, BC=BC, BN=BN, BD=BD, num_warps=warps)


def linear_tiles(P: int, M: int) -> dict[str, int]:
    """32 channels per program: the readout needs no other channel, so small batches spread over the GPU."""
    BM = triton.next_power_of_2(M)
    return dict(BM=BM, BC=min(triton.next_power_of_2(P), 32), num_warps=4)


def _decay(log_decay: Tensor) -> Tensor:
    H, M, _ = log_decay.shape
    out = torch.empty(H, 2, M, dtype=log_decay.dtype, device=log_decay.device)
    decay_table_kernel[(triton.cdiv(H * M, 128),)](log_decay.contiguous(), out, H * M, M=M, BLOCK=128, num_warps=4)
    return out


def _states(state: Tensor, inplace: bool) -> tuple[Tensor, Tensor]:
    if inplace:
        if not state.is_contiguous():
            raise ValueError(f"state has strides {state.stride()}; to be updated in place it must be contiguous")
        return state, state
    return state.contiguous(), torch.empty(state.shape, dtype=state.dtype, device=state.device)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _device(x: Tensor):
    """Triton launches on the current device, PyTorch on that of the tensor."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
