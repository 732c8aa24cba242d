"""Launches of the Triton passes: tables of powers, pointers, grids.

Shapes as in triton_passes.py: B batch, T time, H state heads, Hq = G H query heads, R key features,
D value width, P channels of a state, M basis functions, N = 2M, L tokens of a chunk, S segments.
Tile sizes come from triton_plan.py. Pass 1 contracts (q, k) to a and (do, v) to c. The matrix W of
the readout makes b~ = E (W a) and e~ = E conj(W^T conj(c)) of them. Pass 2 expands (b~, v) to the
outputs, and pass 3 is its adjoint. docs/kernels.md derives them.

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
    """The passes over one set of sequences, with the tables that they share.

    Time is cut into segments that run side by side. Powers of Lambda are rounded once from fp64.
    r = L // 2 balances their range: |Lambda|^-32 to |Lambda|^32 at L = 64.

    Attributes:
        plan: Tile sizes.
        T: Tokens of a sequence.
        segments: S.
        chunks: Chunks of a segment; the last segment may be shorter.
        documents: The id of each token's document, [B, T] int32, dense, or None.
        t: T_j = Lambda^(r-j) as (Re | Im), [H, L, 2M] in the operands' dtype.
        t_conj: conj(T_j), that is (Re | -Im), likewise.
        t_conj_T: t_conj transposed, [H, 2M, L].
        E: E_i = Lambda^(i-r) as (Re | Im), [H, L, 2M] fp32.
        step: Lambda^(r+1) and Lambda^L as (Re | Im), [H, 2, 2M] fp32.
        power: Lambda^n as real pairs, [2, H, M, 2] fp32: power[0] for the n tokens of a full
            segment, power[1] for those of the last one. None for one segment.
        rows: E w for the linear readout w, [H, L, 2M] in the operands' dtype. It takes the place of
            b~, and is the same for every chunk. None for the query readout.
        scores: D_ij = Re(w^T Lambda^(i-j)) for j <= i of the linear readout, [H, L, L] in the
            operands' dtype, summed over M before it is rounded. None for the query readout.
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
        """Allocates the tables and launches the kernel that computes them.

        Args:
            plan: Tile sizes and launch options.
            log_decay: theta = log Lambda as real pairs, [H, M, 2] fp32.
            T: Tokens of a sequence.
            chunks: Chunks of a segment.
            documents: The id of each token's document, [B, T], or None.
            readout: The weights w of the linear readout as (Re w | Im w), [H, 2M]; None for the
                query readout.
        """
        H, M, _ = log_decay.shape
        L = plan.chunk
        length = chunks * L
        segments = triton.cdiv(T, length)
        t = torch.empty(H, L, 2 * M, dtype=plan.dtype, device=log_decay.device)
        t_conj = torch.empty_like(t)
        t_conj_T = torch.empty(H, 2 * M, L, dtype=plan.dtype, device=log_decay.device)
        E = log_decay.new_empty(H, L, 2 * M)
        step = log_decay.new_empty(H, 2, 2 * M)
        power = None
        if segments > 1:
            power = log_decay.new_empty(2, H, M, 2)
        rows = None
        scores = None
        if readout is not None:
            rows = torch.empty_like(t)
            scores = t.new_empty(H, L, L)
        # Sines in fp64 take many instructions: a thread computes few elements.
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
            tile: (elements of a tile, warps of a program, stages of its loop), from the plan. The
                elements are left out: the callers make block sizes of them.
        """
        _, warps, stages = tile
        sizes = dict(M=self.E.shape[2] // 2, L=self.plan.chunk, PRECISION=self.plan.precision)
        return sizes | dict(num_warps=warps, num_stages=stages, maxnreg=self.plan.registers)

    def contract(
        self, q: Tensor, k: Tensor, state: Tensor | None, channels: tuple[int, int], final: Tensor | None = None, *,
        total: bool = False, conj: bool = False,
    ) -> Tensor:  # fmt: skip
        """Runs pass 1: a_t = X^k_t q_t, the state of the keys read by each token.

        Args:
            q: Rows, [B, T, Hq, R]: q, or the gradient of o.
            k: Columns, [B, T, H, R]: k, or v.
            state: States before every segment, [B, H, S, M, P, 2], or None for zeros.
            channels: (the channel of the state at which k begins, the number of all channels P).
            final: Filled with the last state in k's channels, [B, H, M, P, 2], if it is not None.
            total: True to sum over time instead, in parts for `conj_sum` (then Hq = H).
            conj: True to return conj(a).

        Returns:
            a, [B, Hq, T, 2M] in the operands' dtype, or its conjugate. With `total`, parts of sum_t
            a_t, [B, H, n, 2M] fp32.
        """
        B, T, Hq, R = q.shape
        H = k.shape[2]
        N = self.E.shape[2]
        M = N // 2
        first, P = channels

        # Tiles: a program has BR channels and BM basis functions of the state, 2 BM BR real
        # numbers. BR is all channels of a key, except in a sum over time, which has an accumulator
        # of its own and splits the channels.
        BR = _tile_width(R)
        elements_per_basis_function = 2 * BR
        if total:
            BR = min(BR, 64)
            elements_per_basis_function = 4 * BR
        BM = _block_size(M, self.plan.contract[0] // elements_per_basis_function)
        blocks = triton.cdiv(R, BR)

        if total:
            out = torch.empty(B, H, self.segments * blocks, N, dtype=torch.float32, device=q.device)
        else:
            out = torch.empty(B, Hq, T, N, dtype=self.plan.dtype, device=q.device)
        contract_kernel[(B * Hq * self.segments * blocks * (M // BM),)](
            q, k, self.t, self.E, self.step, state, out, final, self.documents,
            T, self.segments, self.chunks, Hq, Hq // H, P, first, *_leading_strides(q), *_leading_strides(k),
            R=R, BR=BR, BM=BM, SUM=total, CONJ=conj, EVEN=self.even, **self.options(self.plan.contract),
        )  # fmt: skip
        return out

    def mix(self, a: Tensor, mixing: Tensor, conj_c: Tensor | None = None) -> tuple:
        """Computes b~ = E (W a) for every token; in the backward, also e~ and the gradient of W.

        E is the power of the decay that belongs to a token's position in its chunk.

        Args:
            a: The result of pass 1 of (q, k) as (Re | Im), [B, Hq, T, 2M].
            mixing: W, [H, 2M, 2M].
            conj_c: In the backward the conjugate of c, the result of pass 1 of (do, v), likewise;
                None in the forward.

        Returns:
            b~, [B, Hq, T, 2M]. With conj_c also e~ = E conj(W^T conj(c)), likewise, and the
            gradient of W, [H, 2M, 2M] fp32; else None and None.
        """
        B, Hq, T, N = a.shape
        H = mixing.shape[0]
        M = N // 2
        # A program computes 2 BM columns of the result (BM complex ones), with as many rows of W.
        # `programs` of them make all columns.
        BM = min(M, max(8, self.plan.mix[0] // (2 * N)))
        programs = M // BM
        chunks = triton.cdiv(T, self.plan.chunk)

        # A program of the forward has four chunks. In the backward, the programs of each span of
        # time write a part of dW, 16 M^2 bytes: there are only as many spans as fill the GPU.
        b = torch.empty_like(a)
        blocks = 4
        e = None
        parts = None
        if conj_c is not None:
            blocks = triton.cdiv(chunks, segment_count(B * Hq * programs, chunks, a.device))
            e = torch.empty_like(conj_c)
            parts = self.E.new_empty(B, H, Hq // H * triton.cdiv(chunks, blocks), N, N)
        mix_kernel[(B * Hq * triton.cdiv(chunks, blocks) * programs,)](
            a, conj_c, dense(mixing.to(self.plan.dtype)), self.E, b, e, parts, T, blocks, Hq, Hq // H,
            BM=BM, EVEN=T % self.plan.chunk == 0, **self.options(self.plan.mix),
        )  # fmt: skip
        if parts is None:
            return b, None, None
        return b, e, parts.sum((0, 2))

    def expand(
        self, b: Tensor | None, v: Tensor, state: Tensor | None, channels: tuple[int, int], out: Tensor | None,
        final: Tensor | None = None, *, mixing: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Runs pass 2 of (b~, v): o_t = Re(b_t^T X^v_t), the values' state read with weights b.

        Args:
            b: b~ = E b, [B, Hq, T, 2M], from `mix`; None for the linear readout, whose weights are
                in the tables. With `mixing` it is a, and the kernel computes b~ = E (W a).
            v: Columns, [B, T, H, D]: v, or k.
            state: States before every segment, [B, H, S, M, P, 2], or None for zeros.
            channels: (the channel of the state at which v begins, the number of all channels P).
            out: Filled with o, [B, T, Hq, D]. If it is None, only states are computed.
            final: Filled with the last state in v's channels, [B, H, M, P, 2], or None. Without
                `out` it is [B, H, S, M, P, 2], filled with the states after the segments, each
                started from zero.
            mixing: W, [H, 2M, 2M], to compute b~ in the kernel, or None.
        """
        B, T, H, D = v.shape
        N = self.E.shape[2]
        first, P = channels

        # If only states are computed, there are no query heads and no readout.
        Hq = H
        rows = b
        scores = None
        if out is not None:
            Hq = out.shape[2]
            if b is None:
                rows = self.rows
                scores = self.scores

        # Tiles: W takes space on the chip, so that a program that multiplies by it has a smaller
        # state. A program has BD channels and all basis functions.
        tile = self.plan.expand
        W = None
        if mixing is not None:
            tile = self.plan.fused or self.plan.expand
            W = dense(mixing.to(self.plan.dtype))
        BD = _block_size(min(_tile_width(D), 64), tile[0] // N)
        expand_kernel[(B * Hq * self.segments * triton.cdiv(D, BD),)](
            rows, v, scores, W, self.t_conj_T, self.E, self.step, state, out, final, self.documents,
            T, self.segments, self.chunks, Hq, Hq // H, P, first, *_leading_strides(v), *_leading_strides(out, like=v),
            D=D, BD=BD, EVEN=self.even, **self.options(tile),
        )  # fmt: skip

    def adjoint(
        self, b: Tensor | None, d_o: Tensor, costate: Tensor | None, channels: tuple[int, int], out: Tensor | None = None,
        initial: Tensor | None = None, *, v: Tensor | None = None, state: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Runs pass 3 of (b~, do), the gradient of v; and with `v` a part of that of log_decay.

        Args:
            b: b~, or e~ for the gradient of k, [B, Hq, T, 2M], from `mix`; None for the linear
                readout.
            d_o: The side of the queries, [B, T, Hq, D]: the gradient of o; or q, whose width R then
                takes the place of D.
            costate: Gradients of the states after every segment, [B, H, S, M, P, 2], or None for
                zeros.
            channels: (the channel of the state at which v begins, the number of all channels P).
            out: Filled with the gradient of v, [B, T, H, D]. If it is None, only gradients of
                states are computed.
            initial: Its channels from the first of `channels` on are filled with the gradient of
                the initial state, [B, H, M, P, 2], or None. Two calls share it. Without `out` it is
                [B, H, S, M, P, 2], filled with the gradients of the states before the segments,
                each from a gradient of zero after it.
            v: The side of the keys, [B, T, H, D]: v, or k, to compute the gradient of log_decay,
                too; or None.
            state: With `v`, the states before every segment, [B, H, S, M, P, 2], or None for zeros.

        Returns:
            With `v`, the part of the gradient of log_decay that (b~; do, v) carry, or (e~; q, k),
            as n sums over parts of the tokens and channels for `conj_sum`, [B, H, n, 2M] fp32; else
            None.
        """
        B, T, Hq, D = d_o.shape
        H, _, N = self.E.shape
        M = N // 2
        G = Hq // H
        first, P = channels
        if b is None:
            rows = self.rows
            scores = self.scores
        else:
            rows = b
            scores = None

        # Count the programs of each sequence, state head and segment. Those of pass 3 have BD
        # channels and all M basis functions.
        BD = _block_size(min(_tile_width(D), 64), self.plan.expand[0] // N)
        programs = triton.cdiv(D, BD)
        # Beside them are those of the gradient of log_decay, for BK channels and BM basis
        # functions.
        BK = min(_tile_width(D), 64, self.plan.decay // 32)
        BM = _block_size(M, self.plan.decay // (2 * BK))
        parts = None
        if v is not None:
            blocks = triton.cdiv(D, BK)
            programs += G * blocks * (M // BM)
            parts = self.E.new_empty(B, H, G * self.segments * blocks, N)
        # With documents there are too few registers to keep operands in.
        in_registers = self.plan.operands_in_registers and self.documents is None
        adjoint_kernel[(B * H * self.segments * programs,)](
            rows, d_o, v, scores, self.t_conj, self.t_conj_T, self.E, self.step, state, costate, out, initial, parts,
            self.documents, T, self.segments, self.chunks, H, P, first,
            *_leading_strides(d_o), *_leading_strides(v, like=d_o), *_leading_strides(out, like=d_o),
            D=D, G=G, BD=BD, BK=BK, BM=BM, IN_REGISTERS=in_registers, EVEN=self.even,
            **self.options(self.plan.expand),
        )  # fmt: skip
        return parts

    def states(
        self, initial: Tensor | None, *parts: Tensor, local: Tensor | None = None
    ) -> Tensor | None:
        """Computes the states before every segment.

        Args:
            initial: The state before the tokens, [B, H, M, P, 2], or None for zeros.
            *parts: k and v, or the inputs z of the linear readout, each [B, T, H, width].
            local: The result of `local_states` if it was computed before, else None.

        Returns:
            [B, H, S, M, P, 2]; None for one segment from zero.
        """
        if self.segments == 1:
            return dense(initial)
        if local is None:
            local = self.local_states(*parts)
        return self.chain(local, initial)

    def local_states(self, *parts: Tensor) -> Tensor:
        """Computes the states that the segments leave when each starts from zero.

        Args:
            *parts: k and v, or the inputs z of the linear readout, each [B, T, H, width].

        Returns:
            [B, H, S, M, P, 2].
        """
        P = sum(x.shape[3] for x in parts)
        local = self._empty_states(parts[0].shape[0], P)
        # Pass 2 without an output only computes states, each segment's from zero, and needs no
        # weights. It fills the channels of one input after the other.
        first = 0
        for x in parts:
            self.expand(b=None, v=x, state=None, channels=(first, P), out=None, final=local)
            first += x.shape[3]
        return local

    def costates(
        self,
        d_final: Tensor | None,
        *pairs: tuple[Tensor | None, Tensor, tuple[int, int]],
        exchange: Exchange | None = None,
    ) -> Callable[[], Tensor | None]:
        """Computes the gradients of the states after every segment.

        Args:
            d_final: The gradient of the final state, [B, H, M, P, 2], or None for zeros. With an
                exchange it is not used.
            *pairs: (b, d_o, channels) for each call of `adjoint` that will need the result.
            exchange: Exchanges gradients of states with other ranks, or None for a single rank.

        Returns:
            A function that waits for the exchange and returns the gradients, [B, H, S, M, P, 2].
            For one segment it returns d_final, or None.
        """
        if self.segments == 1 and exchange is None:

            def finish() -> Tensor | None:
                return dense(d_final)

            return finish

        # Pass 3 without an output: each segment's own gradient of the state before it, from a
        # gradient of zero after it.
        _, d_o, (_, P) = pairs[0]
        local = self._empty_states(d_o.shape[0], P)
        for b, d_o, channels in pairs:
            self.adjoint(b, d_o, costate=None, channels=channels, initial=local)
        # The other ranks need what all segments together add to the state before them.
        wait = None
        if exchange is not None:
            wait = exchange(self.end(local, reverse=True))

        def finish_chain() -> Tensor | None:
            start = d_final
            if wait is not None:
                start = wait()
            return self.chain(local, start, reverse=True)

        return finish_chain

    def end(self, local: Tensor, *, reverse: bool = False) -> Tensor:
        """Computes the state that all segments together leave when the first one starts from zero.

        It is the last segment's own part, and the state before that segment carried over its
        tokens. With `reverse` it does the same for gradients, from the last segment to the first
        one.

        Args:
            local: The states that the segments leave when each starts from zero, [B, H, S, M, P,
                2]. In reverse, the gradients of the states before the segments, each from zero
                after it.
            reverse: True for gradients of states.

        Returns:
            The state after the last segment, [B, H, M, P, 2]. In reverse, the gradient of the state
            before the first one.
        """
        # The index of the last segment in the direction of the chain.
        last = -1
        if reverse:
            last = 0
        # The states before every segment. For one segment they are None, and so are the powers.
        chained = self.chain(local, start=None, reverse=reverse)
        if self.power is None or chained is None:
            return local[:, :, last]

        # Carry the state before the last segment over its tokens: power[1] is Lambda^n for the n
        # tokens of the last segment, which may be shorter, and power[0] for those of any other one.
        state = torch.view_as_complex(chained[:, :, last])
        if reverse:
            step = torch.conj_physical(torch.view_as_complex(self.power[0])[:, :, None])
        else:
            step = torch.view_as_complex(self.power[1])[:, :, None]
        state = step * state

        # It passes only if the token before the segment and the segment's last token share a
        # document. Before the first segment it is document 0.
        if self.documents is not None:
            # Tokens of a segment.
            length = self.chunks * self.plan.chunk
            if reverse:
                passes = self.documents[:, length - 1] == 0
            else:
                before = self.documents[:, (self.segments - 1) * length - 1]
                passes = before == self.documents[:, -1]
            state = state * passes[:, None, None, None]
        return local[:, :, last] + torch.view_as_real(state)

    def _empty_states(self, B: int, P: int) -> Tensor:
        """Allocates a state of P channels for each segment of B sequences, [B, H, S, M, P, 2]."""
        H, _, N = self.E.shape
        return self.E.new_empty(B, H, self.segments, N // 2, P, 2)

    def chain(self, local: Tensor, start: Tensor | None, *, reverse: bool = False) -> Tensor | None:
        """Computes the states before every segment, or the gradients of those after every one.

        Args:
            local: The states that the segments leave when each starts from zero, [B, H, S, M, P,
                2]. In reverse, the gradients of the states before the segments, each from zero
                after it.
            start: The state before the first segment, [B, H, M, P, 2]. In reverse, the gradient of
                the state after the last one. None means zeros.
            reverse: True for gradients.

        Returns:
            [B, H, S, M, P, 2]; for one segment, `start` itself.
        """
        B, H, S, M, P, _ = local.shape
        if S == 1:
            return dense(start)
        out = torch.empty_like(local)
        # Complex elements of a state that a program takes through time.
        BE = 32
        chain_kernel[(B * H * triton.cdiv(M * P, BE),)](
            local, dense(start), self.power, out, self.documents, S, H, P, self.T, self.chunks * self.plan.chunk,
            M=M, BS=16, BE=BE, REVERSE=reverse, num_warps=4,
        )  # fmt: skip
        return out


def conj_sum(*parts, pairs: bool = True) -> Tensor:
    """Sums parts of a gradient over all but heads and basis functions, and conjugates.

    Args:
        *parts: One or two tensors as (Re | Im), [B, H, n, 2M] fp32. n may differ.
        pairs: True for a result of real pairs in the last axis; False for (Re | Im).

    Returns:
        [H, M, 2], or [H, 2M] without `pairs`.
    """
    x = parts[0]
    B, H, n_x, N = x.shape
    # The kernel takes two tensors. If there is one, it is passed twice, and the second time no part
    # of it is read (n_y = 0).
    y = x
    n_y = 0
    if len(parts) == 2:
        y = parts[1]
        n_y = y.shape[2]
    if pairs:
        out = x.new_empty(H, N // 2, 2)
    else:
        out = x.new_empty(H, N)
    sum_kernel[(H * N // 32,)](
        x,
        y,
        out,
        B,
        H,
        n_x,
        n_y,
        M=N // 2,
        BN=32,
        BR=32,
        PAIRS=pairs,
        num_warps=4,
    )
    return out


def aligned(x: Tensor) -> Tensor:
    """Returns x if its rows can be read 16 bytes at a time, else a copy with padded rows.

    A row is the last dimension. It can be read in this way if it is dense and starts at a multiple
    of 16 bytes, such as the rows of a projection. Rows whose width is no multiple of 16 (values
    with a column of ones) and views that start between two 16-byte words are copied. Otherwise
    every element would be one access to memory, with its address in a register (up to 2,488 bytes
    would be spilled).
    """
    # All strides but the last one must be multiples of 16. That of a dimension of size one does not
    # matter.
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
    """Allocates memory in x's shape and dtype, with rows padded to a multiple of 16 elements."""
    width = x.shape[-1]
    padded = -(-width // 16) * 16
    out = torch.empty(*x.shape[:-1], padded, dtype=x.dtype, device=x.device)
    return out[..., :width]


def _leading_strides(x: Tensor | None, like: Tensor | None = None) -> tuple[int, ...]:
    """Returns the strides of x, which has four dimensions, without the last one, which is 1.

    Args:
        x: The tensor, or None if there is none.
        like: The tensor whose strides are passed then. Strides of the same kind need no further
            compilation of the kernel.
    """
    if x is None:
        x = like
    assert x is not None
    # The stride of a dimension of size one has no effect. It is passed as 0, because another value
    # might let Triton compile the kernel again.
    return tuple(s if n > 1 else 0 for s, n in zip(x.stride()[:3], x.shape, strict=False))


def _tile_width(n: int) -> int:
    """Returns the smallest power of two that is at least n, and at least 16 for tensor cores."""
    return max(16, triton.next_power_of_2(n))


def _block_size(size: int, limit: int) -> int:
    """Returns the size of a block: `size`, at most `limit`, and at least 16 for tensor cores."""
    return max(16, min(size, limit))
