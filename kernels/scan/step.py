"""One token at a time: O(M (R + D) + M^2) work per head, and no position anywhere (the recurrence is time-invariant).

Shapes: B batch, H state heads, Hq = G H query heads, R key features, D value width, P = R + D channels,
M basis functions. decay: Lambda, [H, M, 2]. mixing: W, [H, 2M, 2M], or its upper half [H, M, 2M] (see `interdomain_step`).

`scan_step` and `linear_one_step` are plain PyTorch, differentiable: real arithmetic on pairs, so that inductor fuses it. Those
whose name ends in an underscore overwrite the state, on a CPU, and record no gradient. The ops further down are the fused
kernels of triton_step.py, for CUDA and without gradients.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .library import op_name, tag_caches
from .tables import powers


def decay_factor(log_decay: Tensor) -> Tensor:
    """Lambda = exp(log_decay) per token, both [H, M, 2]."""
    one = torch.ones(1, device=log_decay.device)  # made there: a copy from the host would break CUDA-graph capture
    return powers(log_decay, one)[:, 0]


def scan_step(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, mixing: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    dtype, R, M = decay.dtype, q.shape[-1], decay.shape[1]
    X_re, X_im = _advanced(torch.cat((k.to(dtype), v.to(dtype)), dim=-1), decay, state)
    q = q.to(dtype).unflatten(1, (k.shape[1], -1))  # [B, H, G, R]
    a_re, a_im = q @ X_re[..., :R].mT, q @ X_im[..., :R].mT  # [B, H, G, M]
    b = torch.cat((a_re, a_im), dim=-1) @ mixing.mT
    if mixing.shape[1] == M:
        b = torch.cat((b, torch.cat((a_im, -a_re), dim=-1) @ mixing.mT), dim=-1)
    o = b[..., :M] @ X_re[..., R:] - b[..., M:] @ X_im[..., R:]
    return o.flatten(1, 2).to(v.dtype), torch.stack((X_re, X_im), dim=-1)


def linear_one_step(z: Tensor, decay: Tensor, readout: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    M = decay.shape[1]
    X_re, X_im = _advanced(z.to(decay.dtype), decay, state)
    y = (readout[:, :M, None] * X_re - readout[:, M:, None] * X_im).sum(-2)
    return y.to(z.dtype), torch.stack((X_re, X_im), dim=-1)


def _advanced(z: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Lambda X + z^T; z [B, H, P], state [B, H, M, P, 2]."""
    decay_re, decay_im = decay[:, :, None].unbind(-1)  # [H, M, 1]
    X_re, X_im = state.unbind(-1)
    return decay_re * X_re - decay_im * X_im + z[:, :, None, :], decay_re * X_im + decay_im * X_re


class InPlace:
    """The step over one state, in place, on a CPU: complex where that is one pass, and products of rows with the pairs as they
    lie in memory. All views and buffers are made once: at one sequence a view costs as much as an operation.

    Args:
        q, k, v: where the token stands at every step; for the linear readout q is None and z is k and v, one after the other.
            Channels of the state beyond theirs are always one.
    """

    @torch.inference_mode(False)  # buffers of an inference mode could not be written outside of it
    @torch.no_grad()
    def __init__(self, decay: Tensor, table: Tensor, state: Tensor, q: Tensor | None, k: Tensor, v: Tensor) -> None:
        B, H, M, P, _ = state.shape
        R, D = k.shape[2], v.shape[2]
        self.state = state
        self.decay = torch.view_as_complex(decay.contiguous())[:, :, None]
        self.z = state.new_zeros(B, H, 1, P, 2)  # real: the imaginary parts stay zero
        channels = self.z[:, :, 0, :, 0]
        channels[:, :, R + D :] = 1
        self.moves = (channels[:, :, :R], k), (channels[:, :, R : R + D], v)
        pairs, self.mixing = state.view(B * H, M, 2 * P), None
        read = pairs if q is None else pairs[..., 2 * R :]
        self.values, width = read, read.shape[2] // 2
        products = [()] * B
        if q is None:
            self.b = table.view(H, 2, M).expand(B, H, 2, M).reshape(B * H, 2, M)
        else:
            self._prepare_query(B, H, M, q, table)
            products = zip(*(x.split(H) for x in (self.q, pairs[..., : 2 * R].mT, self.a)), strict=True)
        # A sequence after the other: its state stays in the cache from one pass to the next.
        self.sequences = list(zip(torch.view_as_complex(state), state, self.z, products, strict=True))
        self.o = state.new_empty(B * H, self.b.shape[1], 2 * width)
        re, im = self.o.view(B, -1, 2, width, 2).unbind(2)
        self.re, self.im, self.dtype = re[..., 0], im[..., 1], v.dtype

    def _prepare_query(self, B: int, H: int, M: int, q: Tensor, table: Tensor) -> None:
        """Buffers q, a = q X_k^T and b = a W^T: as rows where W lies in memory by columns, else as W times columns."""
        (_, Hq, R), new = q.shape, self.state.new_empty
        G = Hq // H
        # Rows of q whose products with pairs are Re a, Im a, for W, and Im a, -Re a, with which its upper half gives the
        # lower one: [q, 0], [0, q], [0, q], [-q, 0].
        n = 4 if table.shape[1] == M else 2
        self.query, self.a = q, new(B * H, G * n, M)
        self.q = self.state.new_zeros(B * H, G * n, 2 * R)
        rows = self.q.view(B, Hq, n, R, 2)
        self.first, self.middle = rows[:, :, 0, :, 0], rows[:, :, 1:3, :, 1]
        self.last = rows[:, :, 3, :, 0] if n == 4 else None
        # By head, for W: at one sequence, or of one head, in the same memory.
        self.a_from = self.a.view(B, H, -1).transpose(0, 1)
        rows, N = B * G * n // 2, table.shape[1]
        a = self.a_from.reshape(H, rows, 2 * M)
        if table.mT.is_contiguous():
            b = new(H, rows, N)
            self.mixing = a, table.mT, b
        else:
            b = new(H, N, rows).mT
            self.mixing = table, a.mT, b.mT
        self.b_from = b.view(H, B, G * n // 2, -1, M).transpose(0, 1)  # [B, H, G or 2 G, 2 or 1, M]
        self.b = self.b_from.reshape(B * H, 2 * G, M)
        self.a_into = None if a.data_ptr() == self.a.data_ptr() else a.view(self.a_from.shape)
        self.b_into = None if b.data_ptr() == self.b.data_ptr() else self.b.view(self.b_from.shape)

    def __call__(self) -> Tensor:
        """Re(b^T X) after the token, [B, Hq, D] (or [B, H, P])."""
        for channels, token in self.moves:
            channels.copy_(token)
        if self.mixing is not None:
            self.first.copy_(self.query)
            self.middle.copy_(self.query[:, :, None])
            if self.last is not None:
                torch.neg(self.first, out=self.last)
        for X, pairs, z, product in self.sequences:
            X.mul_(self.decay)
            pairs.add_(z)
            if product:
                q, keys, a = product
                torch.bmm(q, keys, out=a)
        if self.mixing is not None:
            if self.a_into is not None:
                self.a_into.copy_(self.a_from)
            left, right, out = self.mixing
            torch.bmm(left, right, out=out)
            if self.b_into is not None:
                self.b_into.copy_(self.b_from)
        torch.bmm(self.b, self.values, out=self.o)
        return (self.re - self.im).to(self.dtype)


def scan_step_(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, mixing: Tensor, state: Tensor) -> Tensor:
    return InPlace(decay, mixing, state, q, k, v)()


def linear_one_step_(z: Tensor, decay: Tensor, readout: Tensor, state: Tensor) -> Tensor:
    return InPlace(decay, readout, state, None, z[..., :0], z)()


# The fused kernels as ops: torch.compile sees one node, and triton is imported where they run. The names that end in an
# underscore overwrite the state.


@torch.library.custom_op(
    op_name(__name__, "scan_step"),
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor mixing, Tensor state) -> (Tensor, Tensor)",
)
def fused_scan_step(q, k, v, decay, mixing, state):
    from . import triton_step

    return triton_step.scan_step(q, k, v, decay, mixing, state)


@torch.library.custom_op(
    op_name(__name__, "scan_step_"),
    mutates_args=("state",),
    schema="(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor mixing, Tensor(a!) state) -> Tensor",
)
def fused_scan_step_(q, k, v, decay, mixing, state):
    from . import triton_step

    return triton_step.scan_step(q, k, v, decay, mixing, state, inplace=True)[0]


@torch.library.custom_op(
    op_name(__name__, "linear_step"),
    mutates_args=(),
    schema="(Tensor z, Tensor decay, Tensor readout, Tensor state) -> (Tensor, Tensor)",
)
def fused_linear_step(z, decay, readout, state):
    from . import triton_step

    return triton_step.linear_one_step(z, decay, readout, state)


@torch.library.custom_op(
    op_name(__name__, "linear_step_"),
    mutates_args=("state",),
    schema="(Tensor z, Tensor decay, Tensor readout, Tensor(a!) state) -> Tensor",
)
def fused_linear_step_(z, decay, readout, state):
    from . import triton_step

    return triton_step.linear_one_step(z, decay, readout, state, inplace=True)[0]


@fused_scan_step_.register_fake
def _(q, k, v, decay, mixing, state):
    return v.new_empty(*q.shape[:2], v.shape[2])


@fused_scan_step.register_fake
def _(q, k, v, decay, mixing, state):
    return v.new_empty(*q.shape[:2], v.shape[2]), state.new_empty(state.shape)


@fused_linear_step_.register_fake
def _(z, decay, readout, state):
    return z.new_empty(z.shape)


@fused_linear_step.register_fake
def _(z, decay, readout, state):
    return z.new_empty(z.shape), state.new_empty(state.shape)


class Forms(NamedTuple):
    """The names of a step's inputs, and the ways to compute it: plain PyTorch and fused kernels, an underscore for in place."""

    token: tuple[str, ...]
    table: str
    plain: Callable
    plain_: Callable
    fused: Callable
    fused_: Callable


INTERDOMAIN = Forms(("q", "k", "v"), "mixing", scan_step, scan_step_, fused_scan_step, fused_scan_step_)
LINEAR = Forms(("z",), "readout", linear_one_step, linear_one_step_, fused_linear_step, fused_linear_step_)

tag_caches(__name__)
