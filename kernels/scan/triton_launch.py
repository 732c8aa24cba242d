"""Launches of the Triton passes: tables of powers, pointers, grids.

Shapes as in triton_passes.py: B batch, T time, H state heads, Hq = G H query heads, R key features,
D value width, P channels of a state, M basis functions, N = 2M, L tokens of a chunk, S segments.
Tile sizes come from triton_plan.py.

Tokens come as [B, T, heads, width] with the last dimension dense (`aligned`), all other tensors are
contiguous (`dense`). Every pointer is a multiple of 16 bytes, or None if there is no tensor. A
launcher allocates the tensors that it returns.
"""
# Triton kernels are called with launch options, and with plain numbers for constexprs.
# pyright: reportCallIssue=false, reportArgumentType=false

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .chunkwise import Exchange
from .triton_adjoint import adjoint_kernel
from .triton_passes import contract_kernel, expand_kernel, mix_kernel
from .triton_plan import Plan, segment_count
from .triton_tables import chain_kernel, sum_kernel, tables_kernel


class Launches(NamedTuple):
    """The passes over one set of sequences.

    Time is cut into segments that run side by side. Powers of Lambda are rounded once from fp64. r
    = L // 2 balances their range: |Lambda|^-32 .. |Lambda|^32 at L = 64.

    Attributes:
        plan: Tile sizes.
        T: Tokens of a sequence.
        segments: S.
        chunks: Chunks of a segment; the last segment may be shorter.
        documents: The document of each token, [B, T] int32, dense, or None.
        t: Lambda^(r-j) as (Re | Im), [H, L, 2M].
        t_conj: The same as (Re | -Im).
        t_conj_T: t_conj transposed, [H, 2M, L].
        E: Lambda^(i-r), [H, L, 2M] fp32.
        step: Lambda^(r+1) and Lambda^L, [H, 2, 2M] fp32.
        power: If S > 1: Lambda^n for the n tokens of a segment and of the last one, [2, H, M, 2]
            fp32.
        rows: In the linear readout in place of b~, the same in every chunk: E w, [H, L, 2M] in the
            operands' dtype.
        scores: Likewise D_ij = Re(w^T Lambda^(i-j)) for j <= i, [H, L, L], summed over M before it
            is rounded.
    """

    plan: Plan
    T: int
    segments: int
    chunks: int
    documents: Tensor | None
    t: Tensor
    t_conj: Tensor
    t_conj_T: Tensor
    E: Tensor
    step: Tensor
    power: Tensor | None
    rows: Tensor | None
    scores: Tensor | None

    @classmethod
    def build(
        cls, plan: Plan, log_decay: Tensor, T: int, chunks: int, documents: Tensor | None = None,
        readout: Tensor | None = None,
    ) -> "Launches":  # fmt: skip
        """Computes the tables.

        Args:
            plan: Tile sizes.
            log_decay: theta, [H, M, 2].
            T: Tokens of a sequence.
            chunks: Chunks of a segment.
            documents: The document of each token, [B, T], or None.
            readout: w, [H, 2M], for the linear readout; None for the other one.
        """
        (H, M, _), L, length = log_decay.shape, plan.chunk, chunks * plan.chunk
        segments = triton.cdiv(T, length)
        t, t_conj, t_conj_T = (
            torch.empty(shape, dtype=plan.dtype, device=log_decay.device)
            for shape in ((H, L, 2 * M), (H, L, 2 * M), (H, 2 * M, L))
        )
        E, step = log_decay.new_empty(H, L, 2 * M), log_decay.new_empty(H, 2, 2 * M)
        power = log_decay.new_empty(2, H, M, 2) if segments > 1 else None
        rows, scores = (
            (None, None) if readout is None else (torch.empty_like(t), t.new_empty(H, L, L))
        )
        # Sines in fp64 are long programs: each thread has few numbers.
        BL = max(1, min(L, 256 // M))
        tables_kernel[(H * L // BL,)](
            dense(log_decay), t, t_conj, t_conj_T, E, step, power, dense(readout), rows, scores,
            H, length, T - (segments - 1) * length, M=M, L=L, BL=BL, num_warps=4,
        )  # fmt: skip
        return cls(
            plan,
            T,
            segments,
            chunks,
            dense(documents),
            t,
            t_conj,
            t_conj_T,
            E,
            step,
            power,
            rows,
            scores,
        )

    @property
    def even(self) -> bool:
        """True if the passes leave out the masks of a short last chunk.

        It is False with documents: `adjoint` beside `decay` would spill 296 bytes (Triton 3.9).
        """
        return self.T % self.plan.chunk == 0 and self.documents is None

    def options(self, tile: tuple[int, int, int]) -> dict:
        """Returns the constants and launch options of a pass.

        Args:
            tile: (block size, warps, stages), from the plan.
        """
        _, warps, stages = tile
        sizes = dict(M=self.E.shape[2] // 2, L=self.plan.chunk, PRECISION=self.plan.precision)
        return sizes | dict(num_warps=warps, num_stages=stages, maxnreg=self.plan.registers)

    def contract(
        self, q: Tensor, k: Tensor, state: Tensor | None, channels: tuple[int, int], final: Tensor | None = None, *,
        total: bool = False, conj: bool = False,
    ) -> Tensor:  # fmt: skip
        """Runs pass 1.

        Args:
            q: Rows, [B, T, Hq, R].
            k: Columns, [B, T, H, R].
            state: States before every segment, [B, H, S, M, P, 2], or None for zeros.
            channels: (the first channel of k in the state, P).
            final: Filled with the last state, [B, H, M, P, 2], if given.
            total: True for parts of sum_t a_t, for `conj_sum` (then Hq = H).
            conj: True for conjugates.

        Returns:
            a, [B, Hq, T, 2M] in the operands' dtype, or its conjugate; with `total` the parts of
            the sum.
        """
        B, T, Hq, R = q.shape
        H, N = k.shape[2], self.E.shape[2]
        # A sum over time splits the width of a key, too.
        BR = min(_power_of_two(R), 64) if total else _power_of_two(R)
        BM = _block(N // 2, self.plan.contract[0] // (4 * BR if total else 2 * BR))
        blocks = triton.cdiv(R, BR)
        if total:
            out = torch.empty(B, H, self.segments * blocks, N, dtype=torch.float32, device=q.device)
        else:
            out = torch.empty(B, Hq, T, N, dtype=self.plan.dtype, device=q.device)
        contract_kernel[(B * Hq * self.segments * blocks * (N // 2 // BM),)](
            q, k, self.t, self.E, self.step, state, out, final, self.documents,
            T, self.segments, self.chunks, Hq, Hq // H, channels[1], channels[0], *_strides(q), *_strides(k),
            R=R, BR=BR, BM=BM, SUM=total, CONJ=conj, EVEN=self.even, **self.options(self.plan.contract),
        )  # fmt: skip
        return out

    def mix(self, a: Tensor, mixing: Tensor, c: Tensor | None = None) -> tuple:
        """Computes b~ = E (W a) for every token.

        Args:
            a: The result of pass 1, [B, Hq, T, 2M].
            mixing: W, [H, 2M, 2M].
            c: conj(c) of the backward, or None.

        Returns:
            b~, and with c also e~ = E conj(W^T conj(c)) and the gradient of W in fp32; None
            without.
        """
        (B, Hq, T, N), H = a.shape, mixing.shape[0]
        BM = min(N // 2, max(8, self.plan.mix[0] // (2 * N)))
        chunks, programs = triton.cdiv(T, self.plan.chunk), N // 2 // BM
        b, blocks, e, parts = torch.empty_like(a), 4, None, None
        if c is not None:
            # The programs of a stretch of time add up a gradient of their own, 16 M^2 bytes: as few
            # as fill the GPU.
            blocks = triton.cdiv(chunks, segment_count(B * Hq * programs, chunks, a.device))
            e = torch.empty_like(c)
            parts = self.E.new_empty(B, H, Hq // H * triton.cdiv(chunks, blocks), N, N)
        mix_kernel[(B * Hq * triton.cdiv(chunks, blocks) * programs,)](
            a, c, dense(mixing.to(self.plan.dtype)), self.E, b, e, parts, T, blocks, Hq, Hq // H,
            BM=BM, EVEN=T % self.plan.chunk == 0, **self.options(self.plan.mix),
        )  # fmt: skip
        return b, e, None if parts is None else parts.sum((0, 2))

    def expand(
        self, b: Tensor | None, v: Tensor, state: Tensor | None, channels: tuple[int, int], out: Tensor | None,
        final: Tensor | None = None, *, mixing: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Runs pass 2 of (b~, v).

        Args:
            b: [B, Hq, T, 2M]; None for the linear readout. With `mixing` it is a, and b~ = E (W a).
            v: Columns, [B, T, H, D].
            state: States before every segment, or None for zeros.
            channels: (the first channel of v in the state, P).
            out: Filled with o, [B, T, Hq, D]. If it is None, only states are computed.
            final: Filled with the last state, [B, H, M, P, 2]. Without `out` it is [B, H, S, M, P,
                2] and takes the states after the segments, each started from zero.
            mixing: W, [H, 2M, 2M], to mix here.
        """
        # Without an output the readout does not matter, and time is cut by state heads.
        B, T, H, D = v.shape
        Hq, N = (H if out is None else out.shape[2]), self.E.shape[2]
        rows, scores = (b, None) if b is not None or out is None else (self.rows, self.scores)
        tile = self.plan.fused if mixing is not None and self.plan.fused else self.plan.expand
        BD = _block(min(_power_of_two(D), 64), tile[0] // N)
        W = None if mixing is None else dense(mixing.to(self.plan.dtype))
        expand_kernel[(B * Hq * self.segments * triton.cdiv(D, BD),)](
            rows, v, scores, W, self.t_conj_T, self.E, self.step, state, out, final, self.documents,
            T, self.segments, self.chunks, Hq, Hq // H, channels[1], channels[0], *_strides(v), *_strides(out, like=v),
            D=D, BD=BD, EVEN=self.even, **self.options(tile),
        )  # fmt: skip

    def adjoint(
        self, b: Tensor | None, d_o: Tensor, costate: Tensor | None, channels: tuple[int, int], out: Tensor | None = None,
        initial: Tensor | None = None, *, v: Tensor | None = None, state: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Runs pass 3 of (b~, do).

        Args:
            b: As in `expand`.
            d_o: [B, T, Hq, D].
            costate: Gradients of the states after every segment, [B, H, S, M, P, 2], or None for
                zeros.
            channels: (the first channel of the result in the state, P).
            out: Filled with the result, [B, T, H, D]. If it is None, only costates are computed.
            initial: Filled with the gradient of the initial state, [B, H, M, P, 2]. Without `out`
                it is [B, H, S, M, P, 2] and takes the gradients of the states before the segments,
                each from zero after it.
            v: The columns that (b~, do) belong to, to compute the gradient of log_decay too.
            state: States before every segment, [B, H, S, M, P, 2], with `v`.

        Returns:
            With `v`, the part of the gradient of log_decay that (b~; do, v) carry, or (e~; q, k),
            in parts for `conj_sum`; else None.
        """
        B, T, Hq, D = d_o.shape
        H, _, N = self.E.shape
        G, decay = Hq // H, self.plan.decay
        rows, scores = (self.rows, self.scores) if b is None else (b, None)
        # Programs of the pass itself, and beside them those of the gradient of log_decay.
        BD = _block(min(_power_of_two(D), 64), self.plan.expand[0] // N)
        BK = min(_power_of_two(D), 64, decay // 32)
        BM = _block(N // 2, decay // (2 * BK))
        blocks = triton.cdiv(D, BK)
        programs = triton.cdiv(D, BD) + (0 if v is None else G * blocks * (N // 2 // BM))
        parts = None if v is None else self.E.new_empty(B, H, G * self.segments * blocks, N)
        adjoint_kernel[(B * H * self.segments * programs,)](
            rows, d_o, v, scores, self.t_conj, self.t_conj_T, self.E, self.step, state, costate, out, initial, parts,
            self.documents, T, self.segments, self.chunks, H, channels[1], channels[0],
            *_strides(d_o), *_strides(v, like=d_o), *_strides(out, like=d_o),
            D=D, G=G, BD=BD, BK=BK, BM=BM, HELD=self.plan.held and self.documents is None, EVEN=self.even,
            **self.options(self.plan.expand),
        )  # fmt: skip
        return parts

    def states(
        self, initial: Tensor | None, *parts: Tensor, local: Tensor | None = None
    ) -> Tensor | None:
        """Computes the states before every segment.

        Args:
            initial: The state before the tokens, [B, H, M, P, 2], or None for zeros.
            *parts: k and v, or z.
            local: The result of `local_states`, if it was computed before.

        Returns:
            [B, H, S, M, P, 2]; None for one segment from zero.
        """
        if self.segments == 1:
            return dense(initial)
        return self.chain(self.local_states(*parts) if local is None else local, initial)

    def local_states(self, *parts: Tensor) -> Tensor:
        """Computes the states that every segment leaves by itself, [B, H, S, M, P, 2].

        Args:
            *parts: k and v, or z.
        """
        P, first = sum(x.shape[3] for x in parts), 0
        local = self._local(parts[0].shape[0], P)
        for x in parts:
            self.expand(None, x, None, (first, P), None, local)
            first += x.shape[3]
        return local

    def costates(
        self,
        d_final: Tensor | None,
        *pairs: tuple[Tensor | None, Tensor, tuple[int, int]],
        leave: Exchange | None = None,
    ) -> Callable[[], Tensor | None]:
        """Computes the gradients of the states after every segment.

        Args:
            d_final: The gradient of the final state, or None.
            *pairs: (b, d_o, channels), each as in `adjoint`.
            leave: The exchange with other ranks, or None.

        Returns:
            A function that waits for `leave` and gives the gradients; they are None for one segment
            and no gradient.
        """
        if self.segments == 1 and leave is None:
            return lambda: dense(d_final)
        _, rows, (_, P) = pairs[0]
        local = self._local(rows.shape[0], P)
        for b, rows, channels in pairs:
            self.adjoint(b, rows, None, channels, None, local)
        pending = None if leave is None else leave(self.end(local, reverse=True))
        return lambda: self.chain(local, pending() if pending else d_final, reverse=True)

    def end(self, local: Tensor, *, reverse: bool = False) -> Tensor:
        """Computes the state that all segments together leave, [B, H, M, P, 2].

        Args:
            local: The states that each leaves by itself.
            reverse: True for costates.
        """
        # The state before the last segment, carried over it, and the segment's own.
        last, chained = 0 if reverse else -1, self.chain(local, None, reverse=reverse)
        if self.power is None or chained is None:  # one segment
            return local[:, :, last]
        state = torch.view_as_complex(chained[:, :, last])
        step = torch.view_as_complex(self.power[0 if reverse else 1])[:, :, None]
        state = (torch.conj_physical(step) if reverse else step) * state
        # A document that begins in the last segment cuts off the states before it.
        if self.documents is not None:
            length = self.chunks * self.plan.chunk
            before = self.documents[:, (self.segments - 1) * length - 1]
            passes = (
                self.documents[:, length - 1] == 0 if reverse else before == self.documents[:, -1]
            )
            state = state * passes[:, None, None, None]
        return local[:, :, last] + torch.view_as_real(state)

    def _local(self, B: int, P: int) -> Tensor:
        """Allocates a state of P channels for each segment."""
        H, _, N = self.E.shape
        return self.E.new_empty(B, H, self.segments, N // 2, P, 2)

    def chain(self, local: Tensor, start: Tensor | None, *, reverse: bool = False) -> Tensor | None:
        """Computes states before (in reverse: costates after) every segment.

        Args:
            local: States by each segment alone, [B, H, S, M, P, 2].
            start: [B, H, M, P, 2] before the first segment (after the last one). None means zeros.
            reverse: True for costates.

        Returns:
            [B, H, S, M, P, 2]; for one segment, `start` itself.
        """
        B, H, S, M, P, _ = local.shape
        if S == 1:
            return dense(start)
        out = torch.empty_like(local)
        BE = 32
        chain_kernel[(B * H * triton.cdiv(M * P, BE),)](
            local, dense(start), self.power, out, self.documents, S, H, P, self.T, self.chunks * self.plan.chunk,
            M=M, BS=16, BE=BE, REVERSE=reverse, num_warps=4,
        )  # fmt: skip
        return out


def conj_sum(*parts, pairs: bool = True) -> Tensor:
    """Sums over everything but heads, and conjugates.

    Args:
        *parts: One or two tensors, [B, H, n, 2M] fp32.
        pairs: True for [H, M, 2]; False for [H, 2M] as (Re | Im).
    """
    x, y = parts[0], parts[-1]
    B, H, n, N = x.shape
    out = x.new_empty((H, N // 2, 2) if pairs else (H, N))
    sum_kernel[(H * N // 32,)](
        x,
        y,
        out,
        B,
        H,
        n,
        y.shape[2] if len(parts) == 2 else 0,
        M=N // 2,
        BN=32,
        BR=32,
        PAIRS=pairs,
        num_warps=4,
    )
    return out


def aligned(x: Tensor) -> Tensor:
    """Returns x if its rows can be read 16 bytes at a time, else a copy with padded rows.

    The rows of a projection can be read in this way. Copied are widths that are no multiple of 16
    (values with a column of ones) and views that start between two 16-byte words. Read as they are,
    every number would be an access of its own, and its address in a register (up to 2,488 bytes
    spilled).
    """
    strides = (s for s, n in zip(x.stride(), x.shape[:-1], strict=False) if n > 1)
    if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s % 16 == 0 for s in strides):
        return x
    return padded_empty(x).copy_(x)


def dense(x):
    """Returns x if it is contiguous and starts at a 16-byte word, else a copy; None for None."""
    if x is None or (x.is_contiguous() and x.data_ptr() % 16 == 0):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def padded_empty(x: Tensor) -> Tensor:
    """Allocates memory in x's shape, with rows padded to a multiple of 16."""
    width = x.shape[-1]
    return torch.empty(*x.shape[:-1], -(-width // 16) * 16, dtype=x.dtype, device=x.device)[
        ..., :width
    ]


def _strides(x: Tensor | None, like: Tensor | None = None) -> tuple[int, ...]:
    """Returns the strides of x without the last one.

    `like` takes the place of a tensor that is not there: the same sizes need no other compilation.
    """
    x = like if x is None else x
    assert x is not None
    # The stride of a dimension of one may be anything: 0 keeps it from asking for another
    # compilation.
    return tuple(s if n > 1 else 0 for s, n in zip(x.stride()[:3], x.shape, strict=False))


def _power_of_two(n: int) -> int:
    """Returns the next power of two, at least 16 for tensor cores."""
    return max(16, triton.next_power_of_2(n))


def _block(size: int, limit: int) -> int:
    """Returns the size of a block: `size`, at most `limit`, and at least 16 for tensor cores."""
    return max(16, min(size, limit))
