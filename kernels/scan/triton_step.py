"""One token of the scan as two Triton kernels, which update the state in place.

The function is that of step.py: the recurrence (paper eq. 11) and the readout (paper eq. 13) of one
token. The linear readout needs the second kernel only. No gradient is recorded.

Shapes: B batch, H state heads, G query heads per state head, Hq = G H, R key features, D value
width, P channels of a state (R + D, or the width of z in the linear readout), M basis functions, S
blocks of basis functions.

    contract   X^k = Lambda X^k + k^T    a = X^k q        b_s = W[:, s] a[s]
    expand     X^v = Lambda X^v + v^T    b = sum_s b_s    o = Re(b^T X^v)

A program of `contract` computes one block s of a head's basis functions, one of `expand` a block of
a head's values. The linear readout is `expand` over all channels, with b = w. Names of variables
are as in triton_passes.py.

Decoding is bound by reading and writing the states: 16 M P bytes per state head and token, fp32. A
head has many programs, so that one sequence fills a GPU. W is read once per sequence, mostly from
the L2
cache: 16 M^2 bytes per head, or half of that (see `interdomain_step`). Nothing is decided on the
host, so a step can be captured in a CUDA graph. There is no autotuning, which would update the
state many times, and there are no atomics, so results are bitwise reproducible.
"""
# Triton kernels are called with launch options, and with plain numbers for constexprs.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

# The most real numbers of a tile of the state: 32 registers in each of 128 threads.
MAX_TILE = 4096


@triton.jit
def _advance_state(
    p_x, o_m, o_c, m_m, C, b_lr, b_li, b_z, P: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr
):
    """Updates a tile of the state in memory: X = Lambda X + z^T (paper eq. 11, with unit gain).

    Args:
        p_x: Pointer to the head's state [M, P, 2], at the first channel of its keys or values.
        o_m: Basis functions, [BM].
        o_c: Positions of the real and imaginary parts in a row of the state, [2 BC]; channel c is
            at 2 c and 2 c + 1.
        m_m: Mask of the basis functions that exist, [BM].
        C: Positions that exist: twice the number of keys or values.
        b_lr: Real part of Lambda, [BM].
        b_li: Imaginary part of Lambda, [BM].
        b_z: The token's keys or values, [BC].
        P: Channels of a state.
        BM: Basis functions of the tile.
        BC: Channels of the tile.

    Returns:
        The real and the imaginary part of the new X, [BM, BC] each.
    """
    # A row is loaded as 2 BC real numbers, 16 bytes at a time. Addressed as pairs [BM, BC, 2] it
    # would be 8 bytes at a time.
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
    """Updates the keys' part of the state, reads it by the queries, and multiplies by columns of W.

    X^k = Lambda X^k + k^T, then a = X^k q, then a part of b = W a. A program has one block s of the
    basis functions, and so the part a[s] of a. It computes b_s = W[:, s] a[s]; b is the sum of b_s
    over all blocks, which `expand_step_kernel` computes.

    Grid: B H S programs, S = ceil(M / BM). Tiles: X^k [BM, BC], and four of W [BN, BM], or two with
    UPPER.

    Args:
        p_q: Query features, [B, Hq, R], the last dimension dense.
        p_k: Key features, [B, H, R], the last dimension dense.
        p_lam: Lambda as real pairs, [H, M, 2].
        p_w: W on (Re | Im), [H, 2M, 2M]; with UPPER its upper half [H, M, 2M].
        p_x: The state, [B, H, M, P, 2], updated in place. A program reads and writes its own part
            only, and each element is read before it is written.
        p_b: Filled with b_s = W[:, s] a[s] as (Re | Im), [B, H, G, S, 2M].
        H: State heads.
        stride_qb: Stride of q over sequences.
        stride_qh: Stride of q over heads.
        stride_kb: Stride of k over sequences.
        stride_kh: Stride of k over heads.
        G: Query heads per state head.
        R: Width of q and k.
        P: Channels of a state.
        M: Basis functions.
        UPPER: True if W = [[V, -Y], [Y, V]] is given by its upper half [V | -Y].
        BM: Basis functions of a program.
        BC: Width of the tile of keys, at least R.
        BN: Rows of the tiles of W, at least M.
    """
    # This program's block of basis functions, sequence and head.
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

    # Update the state: its first R channels are the keys.
    b_lr = tl.load(p_lam + 2 * o_m, mask=m_m, other=0.0)
    b_li = tl.load(p_lam + 2 * o_m + 1, mask=m_m, other=0.0)
    b_k = tl.load(p_k + i_b * stride_kb + i_h * stride_kh + o_c, mask=m_c, other=0.0).to(DTYPE)
    b_xr, b_xi = _advance_state(
        p_x, o_m, tl.arange(0, 2 * BC), m_m, 2 * R, b_lr, b_li, b_k, P, BM, BC
    )
    # Load this block's columns of the four quarters of W: b_wri maps imaginary parts of a to real
    # parts of b. With UPPER the lower half follows from the upper one.
    p_wt = p_w + o_n[:, None] * (2 * M) + o_m[None, :]
    m_w = m_n[:, None] & m_m[None, :]
    b_wrr = tl.load(p_wt, mask=m_w, other=0.0)
    b_wri = tl.load(p_wt + M, mask=m_w, other=0.0)
    if UPPER:
        b_wir, b_wii = -b_wri, b_wrr
    else:
        b_wir = tl.load(p_wt + 2 * M * M, mask=m_w, other=0.0)
        b_wii = tl.load(p_wt + 2 * M * M + M, mask=m_w, other=0.0)
    # Each query head that shares the state: a = X^k q, and its share of b = W a.
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
    """Updates the values' part of the state, and reads it with the weights b.

    X^v = Lambda X^v + v^T, then o = Re(b^T X^v). `contract_step_kernel` has computed b in parts: b
    = sum_s b_s.

    Grid: B H ceil(D / BD) programs, D = P - R. Tiles: X^v [BM, BD], and two of b [BS, BM].

    Args:
        p_v: Values, [B, H, D], the last dimension dense.
        p_lam: Lambda as real pairs, [H, M, 2].
        p_b: The parts b_s of b as (Re | Im), [B, H, G, S, 2M]; the last three dimensions dense.
        p_x: The state, [B, H, M, P, 2], updated in place. A program reads and writes its own part
            only.
        p_o: Filled with o, [B, H, G, D].
        H: State heads.
        stride_vb: Stride of v over sequences.
        stride_vh: Stride of v over heads.
        stride_bb: Stride of b over sequences; 0 if all sequences share b.
        stride_bh: Stride of b over heads.
        G: Query heads per state head.
        S: The number of parts of b.
        R: The channel of the state at which the values begin.
        P: Channels of a state.
        M: Basis functions.
        BM: Rows of the tile of the state, at least M.
        BD: Values of a program.
        BS: Rows of the tiles of b, at least S.
    """
    # This program's block of values, sequence and head.
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

    # Update the state: the values follow the R channels of the keys.
    b_lr = tl.load(p_lam + 2 * o_m, mask=m_m, other=0.0)
    b_li = tl.load(p_lam + 2 * o_m + 1, mask=m_m, other=0.0)
    b_v = tl.load(p_v + i_b * stride_vb + i_h * stride_vh + o_d, mask=m_d, other=0.0).to(DTYPE)
    o_c = i_d * (2 * BD) + tl.arange(0, 2 * BD)
    b_xr, b_xi = _advance_state(p_x, o_m, o_c, m_m, 2 * D, b_lr, b_li, b_v, P, BM, BD)
    # Each query head that shares the state: b = sum_s b_s, and o = Re(b^T X^v).
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
    """Computes one token of the scan, and overwrites the state with the new one.

    Args:
        q: Query features, [B, Hq, R].
        k: Key features, [B, H, R].
        v: Values, [B, H, D].
        decay: Lambda as real pairs, [H, M, 2].
        mixing: W on (Re | Im), [H, 2M, 2M], or its upper half, [H, M, 2M] = [V | -Y], if W is
            [[V, -Y], [Y, V]].
        state: X before the token, [B, H, M, P, 2] with P = R + D, contiguous; overwritten.

    Returns:
        o, [B, Hq, D] in v's dtype.
    """
    B, H, R = k.shape
    G = q.shape[1] // H
    M = decay.shape[1]
    P = state.shape[3]
    q = _dense_rows(q)
    k = _dense_rows(k)
    decay = decay.contiguous()
    # Each of S programs of a head writes a part of b = W a, and the second kernel adds them up.
    tiles = contract_tiles(R, M)
    S = triton.cdiv(M, tiles["BM"])
    b = torch.empty(B, H, G, S, 2 * M, dtype=state.dtype, device=state.device)
    with torch.cuda.device_of(state):
        contract_step_kernel[(B * H * S,)](
            q, k, decay, mixing.contiguous(), state, b, H, *q.stride()[:2], *k.stride()[:2],
            G=G, R=R, P=P, M=M, UPPER=mixing.shape[1] == M, **tiles,
            # Threads that compute the same sum must round it alike. With fused multiply-add, one
            # thread would round a product that another one does not.
            enable_fp_fusion=False,
        )  # fmt: skip
        return _launch_expand(v, decay, b, b.stride()[:2], state, first_channel=R)


def linear_one_step(z: Tensor, decay: Tensor, readout: Tensor, state: Tensor) -> Tensor:
    """Computes one token of the linear scan, and overwrites the state with the new one.

    Args:
        z: The token's inputs, [B, H, P].
        decay: Lambda as real pairs, [H, M, 2].
        readout: w as (Re w | Im w), [H, 2M].
        state: X before the token, [B, H, M, P, 2], contiguous; overwritten.

    Returns:
        y, [B, H, P] in z's dtype.
    """
    # In `expand_step_kernel` the weights b are w, the same for all sequences: [1, H, 1, 1, 2M] with
    # a stride of 0 over sequences, one query head per state head and one part. z has all channels
    # of the state.
    b = readout.contiguous()[:, None, None]
    with torch.cuda.device_of(state):
        return _launch_expand(
            z, decay.contiguous(), b[None], (0, b.stride(0)), state, first_channel=0
        )


def _launch_expand(
    v: Tensor,
    decay: Tensor,
    b: Tensor,
    strides: tuple[int, ...],
    state: Tensor,
    first_channel: int,
) -> Tensor:
    """Launches `expand_step_kernel`: X^v = Lambda X^v + v^T in place, and o = Re(b^T X^v).

    Args:
        v: Values, [B, H, D].
        decay: Lambda as real pairs, [H, M, 2], contiguous.
        b: S parts whose sum is b, as (Re | Im), [B or 1, H, G, S, 2M] for G query heads per state
            head.
        strides: Strides of b over sequences and heads.
        state: The state, [B, H, M, P, 2], contiguous; overwritten in the D channels of v.
        first_channel: The channel of the state at which v begins.

    Returns:
        o, [B, H G, D] in v's dtype.
    """
    B, H, D = v.shape
    G, S = b.shape[2:4]
    M, P = state.shape[2:4]
    v = _dense_rows(v)
    o = torch.empty(B, H, G, D, dtype=v.dtype, device=v.device)
    tiles = expand_tiles(B * H, D, M)
    expand_step_kernel[(B * H * triton.cdiv(D, tiles["BD"]),)](
        v, decay, b, state, o, H, *v.stride()[:2], *strides,
        G=G, S=S, R=first_channel, P=P, M=M, BS=triton.next_power_of_2(S), **tiles,
    )  # fmt: skip
    return o.flatten(1, 2)


def contract_tiles(R: int, M: int) -> dict[str, int]:
    """Returns the tile sizes and warps of `contract_step_kernel`.

    A program has all R key features of BM basis functions: 16, or fewer if a tile of MAX_TILE
    numbers (real and imaginary parts) does not hold them. It reads BM contiguous numbers of each
    row of each quarter of W.

    Args:
        R: Width of the keys.
        M: Basis functions.
    """
    BC = triton.next_power_of_2(R)
    BN = triton.next_power_of_2(M)
    BM = max(1, min(16, BN, MAX_TILE // 2 // max(BC, BN)))
    return dict(BM=BM, BC=BC, BN=BN, num_warps=_warps_of_tile(2 * BM * BC))


def expand_tiles(heads: int, D: int, M: int) -> dict[str, int]:
    """Returns the tile sizes and warps of `expand_step_kernel`.

    Args:
        heads: State heads of all sequences, B H.
        D: Width of the values.
        M: Basis functions.
    """
    # A tile has all basis functions. At most MAX_TILE real numbers are half as many complex ones.
    BM = triton.next_power_of_2(M)
    padded_D = triton.next_power_of_2(D)
    BD = max(1, min(padded_D, MAX_TILE // 2 // BM))
    # Halve the tile until there are 512 programs, four per multiprocessor. 16 complex values are
    # 128 bytes, a cache line.
    while BD > 16 and heads * triton.cdiv(D, BD) < 512:
        BD //= 2
    return dict(BM=BM, BD=BD, num_warps=_warps_of_tile(2 * BM * BD))


def _warps_of_tile(elements: int) -> int:
    """Returns the number of warps for a tile of the state: at most four, and an element per thread.

    With fewer elements than threads, several threads would have copies of one element. The state is
    updated in place: a warp that is late would load the value that another one has stored.

    Args:
        elements: Real numbers in the tile.
    """
    return max(1, min(4, elements // 32))


def _dense_rows(x: Tensor) -> Tensor:
    """Returns x, or a copy if its last dimension is not dense."""
    return x if x.stride(-1) == 1 else x.contiguous()
