"""How the Triton passes are launched: tables of powers, pointers, grids. Tile sizes come from triton_plan.py.

Shapes as in triton_passes.py. Tokens come [B, T, heads, width] with the last dimension dense (`aligned`), all else contiguous
(`dense`); every pointer is a multiple of 16 bytes, or None where there is no tensor. A launcher allocates what it returns.
"""
# Triton kernels are called with launch options, and with plain numbers for constexprs.
# pyright: reportCallIssue=false, reportArgumentType=false

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .triton_adjoint import adjoint_kernel
from .triton_passes import contract_kernel, expand_kernel, mix_kernel
from .triton_plan import Plan, segment_count
from .triton_tables import chain_kernel, sum_kernel, tables_kernel


class Span(NamedTuple):
    """Time cut into segments that run side by side: S segments of `chunks` chunks, the last one shorter.

    documents: numbers of packed documents, [B, T] int32, dense, or None.
    """

    T: int
    segments: int
    chunks: int
    documents: Tensor | None = None

    def even(self, chunk: int) -> bool:
        """Whether the passes leave out the masks of a short last chunk. Not with documents: `adjoint` beside `decay` would
        spill 296 bytes (Triton 3.9)."""
        return self.T % chunk == 0 and self.documents is None


class Constant(NamedTuple):
    """What stands for b~ in the linear readout, the same in every chunk."""

    rows: Tensor  # E w, [H, L, 2M] in the operands' dtype
    scores: Tensor  # D_ij = Re(w^T Lambda^(i-j)) for j <= i, [H, L, L]; summed over M before it is rounded


class Tables(NamedTuple):
    """Powers of Lambda, rounded once from fp64. r = L // 2 balances the range: |Lambda|^-32 .. |Lambda|^32 at L = 64."""

    t: Tensor  # Lambda^(r-j) as (Re | Im), [H, L, 2M]
    t_conj: Tensor  # (Re | -Im)
    t_conj_T: Tensor  # the same, [H, 2M, L]
    E: Tensor  # Lambda^(i-r), [H, L, 2M] fp32
    step: Tensor  # Lambda^(r+1) and Lambda^L, [H, 2, 2M] fp32
    segment: Tensor | None = None  # Lambda^n, n the tokens of a segment and of the last one, [2, H, M, 2] fp32
    constant: Constant | None = None

    @classmethod
    def build(cls, log_decay: Tensor, plan: Plan, span: Span, readout: Tensor | None = None) -> "Tables":
        """`segment` is there if `span` cuts time, `constant` with a linear readout, [H, 2M]."""
        (H, M, _), L, length = log_decay.shape, plan.chunk, span.chunks * plan.chunk
        t, t_conj, t_conj_T = (
            torch.empty(shape, dtype=plan.dtype, device=log_decay.device)
            for shape in ((H, L, 2 * M), (H, L, 2 * M), (H, 2 * M, L))
        )
        E, step = log_decay.new_empty(H, L, 2 * M), log_decay.new_empty(H, 2, 2 * M)
        segment = log_decay.new_empty(2, H, M, 2) if span.segments > 1 else None
        constant = None if readout is None else Constant(torch.empty_like(t), t.new_empty(H, L, L))
        BL = max(1, min(L, 256 // M))  # fp64 sines are long: few numbers per thread
        tables_kernel[(H * L // BL,)](
            dense(log_decay), t, t_conj, t_conj_T, E, step, segment, _dense(readout), *(constant or (None, None)),
            H, length, span.T - (span.segments - 1) * length, M=M, L=L, BL=BL, num_warps=4,
        )  # fmt: skip
        return cls(t, t_conj, t_conj_T, E, step, segment, constant)


def contract(
    plan: Plan, tab: Tables, span: Span, q: Tensor, k: Tensor, state: Tensor | None, channels: tuple[int, int],
    final: Tensor | None = None, *, total: bool = False, conj: bool = False,
) -> Tensor:  # fmt: skip
    """Pass 1 -> a [B, Hq, T, 2M] in the operands' dtype, or its conjugate; with `total`, parts of sum_t a_t for `conj_sum`
    (Hq = H).

    state: before every segment, [B, H, S, M, P, 2]. channels: (first channel in it, P). final [B, H, M, P, 2] is filled.
    """
    B, T, Hq, R = q.shape
    H, N = k.shape[2], tab.E.shape[2]
    numbers, warps, stages = plan.contract
    BR = min(_power_of_two(R), 64) if total else _power_of_two(R)
    BM = _block(N // 2, numbers // (4 * BR if total else 2 * BR))
    blocks = triton.cdiv(R, BR)
    if total:
        out = torch.empty(B, H, span.segments * blocks, N, dtype=torch.float32, device=q.device)
    else:
        out = torch.empty(B, Hq, T, N, dtype=plan.dtype, device=q.device)
    contract_kernel[(B * Hq * span.segments * blocks * (N // 2 // BM),)](
        q, k, tab.t, tab.E, tab.step, state, out, final, span.documents,
        T, span.segments, span.chunks, Hq, Hq // H, channels[1], channels[0], *_strides(q), *_strides(k),
        R=R, M=N // 2, L=plan.chunk, BR=BR, BM=BM, PRECISION=plan.precision, SUM=total, CONJ=conj,
        EVEN=span.even(plan.chunk), num_warps=warps, num_stages=stages, maxnreg=plan.registers,
    )  # fmt: skip
    return out


def mix(plan: Plan, tab: Tables, a: Tensor, mixing: Tensor, c: Tensor | None = None) -> tuple:
    """-> b~ = E (W a) for every token; with c, which is conj(c), also e~ = E conj(W^T conj(c)) and the gradient of W in fp32.

    mixing: W, [H, 2M, 2M].
    """
    (B, Hq, T, N), H = a.shape, mixing.shape[0]
    numbers, warps, stages = plan.mix
    BM = min(N // 2, max(8, numbers // (2 * N)))
    chunks, programs = triton.cdiv(T, plan.chunk), N // 2 // BM
    blocks, e, parts = 4, None, None
    if c is not None:
        # The programs of a stretch of time add up a gradient of their own, 16 M^2 bytes: as few as fill the GPU.
        blocks = triton.cdiv(chunks, segment_count(B * Hq * programs, chunks, a.device))
        e = torch.empty_like(c)
        parts = tab.E.new_empty(B, H, Hq // H * triton.cdiv(chunks, blocks), N, N)
    b = torch.empty_like(a)
    mix_kernel[(B * Hq * triton.cdiv(chunks, blocks) * programs,)](
        a, c, dense(mixing.to(plan.dtype)), tab.E, b, e, parts, T, blocks, Hq, Hq // H,
        M=N // 2, L=plan.chunk, BM=BM, PRECISION=plan.precision, EVEN=T % plan.chunk == 0,
        num_warps=warps, num_stages=stages, maxnreg=plan.registers,
    )  # fmt: skip
    return b, e, None if parts is None else parts.sum((0, 2))


def expand(
    plan: Plan, tab: Tables, span: Span, b: Tensor | Constant | None, v: Tensor, state: Tensor | None,
    channels: tuple[int, int], out: Tensor | None, final: Tensor | None = None, *, mixing: Tensor | None = None,
) -> None:  # fmt: skip
    """Pass 2 of (b~, v) into out [B, T, Hq, D] and the last state into final [B, H, M, P, 2].

    b: [B, Hq, T, 2M], or Constant; with `mixing`, W [H, 2M, 2M], it is a and b~ = E (W a). Without `out` b is not used,
    and final is [B, H, S, M, P, 2] and takes the states after the segments, each started from zero.
    """
    rows, scores = b if isinstance(b, Constant) else (b, None)
    B, T, H, D = v.shape
    Hq, N = (H if out is None else out.shape[2]), tab.E.shape[2]
    numbers, warps, stages = plan.fused if mixing is not None and plan.fused else plan.expand
    BD = _block(min(_power_of_two(D), 64), numbers // N)
    expand_kernel[(B * Hq * span.segments * triton.cdiv(D, BD),)](
        rows, v, scores, None if mixing is None else dense(mixing.to(plan.dtype)), tab.t_conj_T, tab.E, tab.step,
        state, out, final, span.documents,
        T, span.segments, span.chunks, Hq, Hq // H, channels[1], channels[0], *_strides(v), *_strides(out, like=v),
        D=D, M=N // 2, L=plan.chunk, BD=BD, PRECISION=plan.precision, EVEN=span.even(plan.chunk),
        num_warps=warps, num_stages=stages, maxnreg=plan.registers,
    )  # fmt: skip


def adjoint(
    plan: Plan, tab: Tables, span: Span, b: Tensor | Constant, d_o: Tensor, costate: Tensor | None,
    channels: tuple[int, int], H: int, out: Tensor | None = None, initial: Tensor | None = None, *,
    v: Tensor | None = None, state: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Pass 3 of (b~, do) into out [B, T, H, D] and the gradient of the initial state into initial [B, H, M, P, 2]. With `v`
    -> the part of the gradient of log_decay that (b~; do, v) carry, or (e~; q, k), in parts for `conj_sum`.

    costate: gradients of the states after every segment, [B, H, S, M, P, 2]; state: before every segment, likewise. With
    `initial` but without `out`, initial is [B, H, S, M, P, 2] and takes the gradients of the states before the segments, each
    from zero after it.
    """
    B, T, Hq, D = d_o.shape
    G, N = Hq // H, tab.E.shape[2]
    rows, scores = b if isinstance(b, Constant) else (b, None)
    numbers, warps, stages = plan.expand
    BD = _block(min(_power_of_two(D), 64), numbers // N)
    BK = min(_power_of_two(D), 64, plan.decay // 32)
    BM = _block(N // 2, plan.decay // (2 * BK))
    blocks = triton.cdiv(D, BK)
    programs = triton.cdiv(D, BD) + (0 if v is None else G * blocks * (N // 2 // BM))
    parts = None if v is None else tab.E.new_empty(B, H, G * span.segments * blocks, N)
    adjoint_kernel[(B * H * span.segments * programs,)](
        rows, d_o, v, scores, tab.t_conj, tab.t_conj_T, tab.E, tab.step, state, costate, out, initial, parts,
        span.documents, T, span.segments, span.chunks, H, channels[1], channels[0],
        *_strides(d_o), *_strides(v, like=d_o), *_strides(out, like=d_o),
        D=D, G=G, M=N // 2, L=plan.chunk, BD=BD, BK=BK, BM=BM, PRECISION=plan.precision,
        HELD=plan.held and span.documents is None, EVEN=span.even(plan.chunk),
        num_warps=warps, num_stages=stages, maxnreg=plan.registers,
    )  # fmt: skip
    return parts


def conj_sum(*parts, pairs: bool = True) -> Tensor:
    """Conjugate of the sum of one or two [B, H, n, 2M] fp32 over all but heads: [H, M, 2], or [H, 2M] as (Re | Im)."""
    x, y = parts[0], parts[-1]
    B, H, n, N = x.shape
    out = x.new_empty((H, N // 2, 2) if pairs else (H, N))
    sum_kernel[(H * N // 32,)](
        x, y, out, B, H, n, y.shape[2] if len(parts) == 2 else 0, M=N // 2, BN=32, BR=32, PAIRS=pairs, num_warps=4
    )  # fmt: skip
    return out


def chain(tab: Tables, local: Tensor, start: Tensor | None, span: Span, chunk: int, *, reverse: bool = False) -> Tensor:
    """States before (reverse: costates after) every segment, [B, H, S, M, P, 2], from what each alone leaves, `local`.

    start: [B, H, M, P, 2] before the first segment (after the last), None for zeros.
    """
    B, H, S, M, P, _ = local.shape
    out = torch.empty_like(local)
    BE = 32
    chain_kernel[(B * H * triton.cdiv(M * P, BE),)](
        local, _dense(start), tab.segment, out, span.documents, S, H, P, span.T, span.chunks * chunk,
        M=M, BS=16, BE=BE, REVERSE=reverse, num_warps=4,
    )  # fmt: skip
    return out


def aligned(x: Tensor) -> Tensor:
    """x, if its rows can be read 16 bytes at a time, as those of a projection can; else a copy with padded rows.

    Widths that are no multiple of 16 (values with a column of ones) and views that start between two 16-byte words are copied:
    read as they are, every number would be an access of its own, and its address in a register (up to 2,488 bytes spilled).
    """
    strides = (s for s, n in zip(x.stride(), x.shape[:-1], strict=False) if n > 1)
    if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s % 16 == 0 for s in strides):
        return x
    return padded_empty(x).copy_(x)


def dense(x: Tensor) -> Tensor:
    """x, if it is contiguous and starts at a 16-byte word; else a copy that does."""
    return x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else dense(x)


def padded_empty(x: Tensor) -> Tensor:
    """Uninitialised, in x's shape, rows padded to a multiple of 16."""
    width = x.shape[-1]
    return torch.empty(*x.shape[:-1], -(-width // 16) * 16, dtype=x.dtype, device=x.device)[..., :width]


def _strides(x: Tensor | None, like: Tensor | None = None) -> tuple[int, ...]:
    """Without the last. `like` stands in where there is no tensor: the same sizes, so no compilation of their own."""
    x = like if x is None else x
    assert x is not None
    # The stride of a dimension of one may be anything: 0 keeps it from asking for another compilation.
    return tuple(s if n > 1 else 0 for s, n in zip(x.stride()[:3], x.shape, strict=False))


def _power_of_two(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


def _block(size: int, limit: int) -> int:
    """Tensor cores want at least 16 of everything."""
    return max(16, min(size, limit))
