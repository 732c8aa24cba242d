"""One token as two kernels (the linear readout: as the second): every state is read once and written once, in place.
Semantics as in step.py.

Shapes: B batch, H state heads, G query heads per state head, Hq = G H, R key features, D value width, P = R + D
channels, M basis functions, S blocks of them.

    contract   X^k = Lambda X^k + k^T    a = X^k q    b_s = W[:, s] a[s]     a program per block s of a head's modes
    expand     X^v = Lambda X^v + v^T    b = sum_s b_s    o = Re(b^T X^v)    a program per block of a head's values
    linear readout: expand alone, over all channels, with b = w

Decoding is bound by reading and writing the states: 16 M P bytes per state head and token, fp32. A head is many programs, so
that one sequence fills a GPU. W is read once per batch row, mostly from the L2 cache: 16 M^2 bytes per head, or half of that
(see `interdomain_step`). Nothing is decided on the host: a step can be captured in a CUDA graph. There is no autotuning, which
would run the update in place many times, and no atomics: results repeat bit for bit. These functions record no gradient.
"""
# Triton kernels are called with launch options, and with plain numbers for constexprs.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # numbers of X in a tile: 32 registers of each of 128 threads


@triton.jit
def _advance(
    p_x, o_m, o_c, m_m, C, b_lr, b_li, b_z, P: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr
):
    """X = Lambda X + z^T, in memory, of the channels o_c [2 BC] of modes o_m [BM], a channel being a pair of numbers, C numbers
    in all. Returns (Re, Im), each [BM, BC].

    Loaded as rows of numbers, 16 bytes at a time: as pairs [BM, BC, 2] it would be 8.
    """
    o_x = o_m[:, None] * (2 * P) + o_c[None, :]
    m_x = m_m[:, None] & (o_c < C)[None, :]
    b_re, b_im = tl.split(tl.reshape(tl.load(p_x + o_x, mask=m_x, other=0.0), [BM, BC, 2]))
    b_xr = b_lr[:, None] * b_re - b_li[:, None] * b_im + b_z[None, :]
    b_xi = b_lr[:, None] * b_im + b_li[:, None] * b_re
    tl.store(p_x + o_x, tl.reshape(tl.join(b_xr, b_xi), [BM, 2 * BC]), mask=m_x)
    return b_xr, b_xi


@triton.jit(do_not_specialize=["H"])
def contract_step_kernel(
    p_q, p_k, p_lam, p_w, p_x, p_b, H, stride_qb, stride_qh, stride_kb, stride_kh,
    G: tl.constexpr, R: tl.constexpr, P: tl.constexpr, M: tl.constexpr, UPPER: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid: B H S programs, S = ceil(M / BM). Tiles: X^k [BM, BC], and two of W [BN, BM], or four; BC >= R, BN >= M.

    p_lam [H, M, 2], p_w [H, 2M, 2M] or, UPPER, [H, M, 2M]; p_x [B, H, M, P, 2]: a program reads and
    writes no state of another program, each number before it writes it. p_b [B, H, G, S, 2M].
    """
    DTYPE = p_x.dtype.element_ty
    S: tl.constexpr = (M + BM - 1) // BM
    i_p = tl.program_id(0)
    i_s = i_p % S
    i_bh = tl.cast(i_p // S, tl.int64)
    i_b = i_bh // H
    i_h = i_bh % H
    p_x += i_bh * (M * P * 2)
    p_lam += i_h * (2 * M)
    p_w += i_h * ((1 if UPPER else 2) * M * 2 * M)
    p_q += i_b * stride_qb + i_h * G * stride_qh
    p_b += (i_bh * G * S + i_s) * (2 * M)
    o_m = i_s * BM + tl.arange(0, BM)
    o_c = tl.arange(0, BC)
    o_n = tl.arange(0, BN)
    m_m = o_m < M
    m_c = o_c < R
    m_n = o_n < M

    b_lr = tl.load(p_lam + 2 * o_m, mask=m_m, other=0.0)
    b_li = tl.load(p_lam + 2 * o_m + 1, mask=m_m, other=0.0)
    b_k = tl.load(p_k + i_b * stride_kb + i_h * stride_kh + o_c, mask=m_c, other=0.0).to(DTYPE)
    b_xr, b_xi = _advance(p_x, o_m, tl.arange(0, 2 * BC), m_m, 2 * R, b_lr, b_li, b_k, P, BM, BC)
    p_wt = p_w + o_n[:, None] * (2 * M) + o_m[None, :]
    m_w = m_n[:, None] & m_m[None, :]
    b_wrr = tl.load(p_wt, mask=m_w, other=0.0)
    b_wri = tl.load(p_wt + M, mask=m_w, other=0.0)
    if UPPER:
        b_wir, b_wii = -b_wri, b_wrr
    else:
        b_wir = tl.load(p_wt + 2 * M * M, mask=m_w, other=0.0)
        b_wii = tl.load(p_wt + 2 * M * M + M, mask=m_w, other=0.0)
    for i_g in range(G):
        b_q = tl.load(p_q + i_g * stride_qh + o_c, mask=m_c, other=0.0).to(DTYPE)[None, :]
        b_ar = tl.sum(b_xr * b_q, axis=1)[None, :]
        b_ai = tl.sum(b_xi * b_q, axis=1)[None, :]
        p_bt = p_b + i_g * (S * 2 * M) + o_n
        tl.store(p_bt, tl.sum(b_wrr * b_ar + b_wri * b_ai, axis=1), mask=m_n)
        tl.store(p_bt + M, tl.sum(b_wir * b_ar + b_wii * b_ai, axis=1), mask=m_n)


@triton.jit(do_not_specialize=["H"])
def expand_step_kernel(
    p_v, p_lam, p_b, p_x, p_o, H, stride_vb, stride_vh, stride_bb, stride_bh,
    G: tl.constexpr, S: tl.constexpr, R: tl.constexpr, P: tl.constexpr, M: tl.constexpr,
    BM: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Grid: B H ceil(D / BD) programs, D = P - R. Tiles: X^v [BM, BD], b [BS, BM] twice; BM >= M, BS >= S.

    p_b [B, H, G, S, 2M] with strides of its first two; p_o [B, H, G, D]; the rest as above.
    """
    DTYPE = p_x.dtype.element_ty
    D: tl.constexpr = P - R
    ND: tl.constexpr = (D + BD - 1) // BD
    i_p = tl.program_id(0)
    i_d = i_p % ND
    i_bh = tl.cast(i_p // ND, tl.int64)
    i_b = i_bh // H
    i_h = i_bh % H
    p_x += i_bh * (M * P * 2) + 2 * R
    p_lam += i_h * (2 * M)
    p_b += i_b * stride_bb + i_h * stride_bh
    o_m = tl.arange(0, BM)
    o_d = i_d * BD + tl.arange(0, BD)
    o_s = tl.arange(0, BS)
    m_m = o_m < M
    m_d = o_d < D

    b_lr = tl.load(p_lam + 2 * o_m, mask=m_m, other=0.0)
    b_li = tl.load(p_lam + 2 * o_m + 1, mask=m_m, other=0.0)
    b_v = tl.load(p_v + i_b * stride_vb + i_h * stride_vh + o_d, mask=m_d, other=0.0).to(DTYPE)
    o_c = i_d * (2 * BD) + tl.arange(0, 2 * BD)
    b_xr, b_xi = _advance(p_x, o_m, o_c, m_m, 2 * D, b_lr, b_li, b_v, P, BM, BD)
    for i_g in range(G):
        p_bt = p_b + (i_g * S + o_s[:, None]) * (2 * M) + o_m[None, :]
        m_b = (o_s < S)[:, None] & m_m[None, :]
        b_br = tl.sum(tl.load(p_bt, mask=m_b, other=0.0), axis=0)[:, None]
        b_bi = tl.sum(tl.load(p_bt + M, mask=m_b, other=0.0), axis=0)[:, None]
        b_o = tl.sum(b_br * b_xr - b_bi * b_xi, axis=0)
        tl.store(p_o + (i_bh * G + i_g) * D + o_d, b_o.to(p_o.dtype.element_ty), mask=m_d)


def scan_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, mixing: Tensor, state: Tensor
) -> Tensor:
    """Returns o [B, Hq, D] in v's dtype. state [B, H, M, P, 2], contiguous, is overwritten with the new one."""
    B, H, R = k.shape
    G, M, P = q.shape[1] // H, decay.shape[1], state.shape[3]
    q, k, decay = _rows(q), _rows(k), decay.contiguous()
    tiles = contract_tiles(R, M)
    S = triton.cdiv(M, tiles["BM"])
    b = torch.empty(B, H, G, S, 2 * M, dtype=state.dtype, device=state.device)
    with torch.cuda.device_of(state):
        contract_step_kernel[(B * H * S,)](
            q, k, decay, mixing.contiguous(), state, b, H, *q.stride()[:2], *k.stride()[:2],
            G=G, R=R, P=P, M=M, UPPER=mixing.shape[1] == M, **tiles,
            # Threads that hold the same sum must round it alike: fused, a product that is rounded meets one that is not.
            enable_fp_fusion=False,
        )  # fmt: skip
        return _expand(v, decay, b, b.stride()[:2], state, R)


def linear_one_step(z: Tensor, decay: Tensor, readout: Tensor, state: Tensor) -> Tensor:
    """Returns y [B, H, P] in z's dtype; state as in `scan_step`."""
    b = readout.contiguous()[:, None, None]
    with torch.cuda.device_of(state):
        return _expand(z, decay.contiguous(), b[None], (0, b.stride(0)), state, 0)


def _expand(
    v: Tensor, decay: Tensor, b: Tensor, strides: tuple[int, ...], state: Tensor, R: int
) -> Tensor:
    """Returns o [B, H G, D]; R: the channel at which v begins."""
    (B, H, D), (G, S), (M, P) = v.shape, b.shape[2:4], state.shape[2:4]
    v = _rows(v)
    o = torch.empty(B, H, G, D, dtype=v.dtype, device=v.device)
    tiles = expand_tiles(B * H, D, M)
    expand_step_kernel[(B * H * triton.cdiv(D, tiles["BD"]),)](
        v, decay, b, state, o, H, *v.stride()[:2], *strides,
        G=G, S=S, R=R, P=P, M=M, BS=triton.next_power_of_2(S), **tiles,
    )  # fmt: skip
    return o.flatten(1, 2)


def contract_tiles(R: int, M: int) -> dict[str, int]:
    """16 modes per program where they fit, all keys of each: 64 contiguous bytes of every row of W."""
    BC, BN = triton.next_power_of_2(R), triton.next_power_of_2(M)
    BM = max(1, min(16, BN, TILE // 2 // max(BC, BN)))
    return dict(BM=BM, BC=BC, BN=BN, num_warps=_warps(2 * BM * BC))


def expand_tiles(heads: int, D: int, M: int) -> dict[str, int]:
    """A tile of values; half and a quarter of one where that leaves fewer than 512 programs, four per multiprocessor."""
    BM, wide = triton.next_power_of_2(M), triton.next_power_of_2(D)
    BD = max(1, min(wide, TILE // 2 // BM))
    while BD > 16 and heads * triton.cdiv(D, BD) < 512:  # 16 pairs are 128 bytes
        BD //= 2
    return dict(BM=BM, BD=BD, num_warps=_warps(2 * BM * BD))


def _warps(numbers: int) -> int:
    """Four, if the tile of X has a number for every thread. In place there may be no copies: a warp that came late to load a
    copy would find the number that another one had stored."""
    return max(1, min(4, numbers // 32))


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
