"""The scan and its backward as `torch.library` ops: one node for torch.compile, one name for activation checkpointing.

    torch.ops.interdomain.scan.default            torch.ops.interdomain.linear_scan.default
    torch.ops.interdomain.scan_backward.default   torch.ops.interdomain.linear_scan_backward.default

`backend` names the implementation (`implementation`), so that further ones join the same ops: what is compiled, listed
or checkpointed does not change with the backend. The ops trust their inputs; `interdomain.scan` is the door.
A tensor that does not exist (no state asked for, frozen log_decay, nothing saved) is empty: an op returns a fixed number.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import chunkwise, fft
from .documents import backward_by_document, forward_by_document
from .library import differentiated_once, op_name, tag_caches
from .triton_support import operand_dtype


class Implementation(NamedTuple):
    """Signatures as in chunkwise.py; every output newly allocated and contiguous.

    need_final: the forwards' keyword, True if left out; without it the final state is None.
    saves: scan_forward returns a, [B, Hq, T, 2M] in the operands' dtype, after the state; scan_backward takes it, or
    None, as `a`.
    chunk: chunk_size where the caller names none; None if that is for the implementation to choose.
    documents: takes them by that keyword; one that does not runs every document by itself.
    """

    scan_forward: Callable
    scan_backward: Callable
    linear_forward: Callable
    linear_backward: Callable
    saves: bool = False
    chunk: int | None = 64
    documents: bool = True


_PLAIN = Implementation(
    chunkwise.scan_forward, chunkwise.scan_backward, chunkwise.linear_forward, chunkwise.linear_backward
)


def _sequential(name: str) -> Callable:
    def call(*args, **kw):
        # Imported where it runs: a CPU box has no triton.
        from . import triton_sequential

        return getattr(triton_sequential, name)(*args, **kw)

    return call


IMPLEMENTATIONS = {
    "chunkwise": _PLAIN,
    "chunkwise-torch": _PLAIN,
    "sequential": Implementation(*map(_sequential, Implementation._fields[:4])),
    "fft": Implementation(
        fft.scan_forward, fft.scan_backward, fft.linear_forward, fft.linear_backward, documents=False
    ),
}


def implementation(backend: str, device: torch.device) -> Implementation:
    """`chunkwise` and `parallel` are Triton on CUDA."""
    return _triton(backend) if _is_triton(backend, device) else IMPLEMENTATIONS[backend]


# torch.compile traces through these two.
def implements(backend: str, device: torch.device) -> bool:
    """Whether the ops run this backend on that device; what they do not, autograd records."""
    return _is_triton(backend, device) or backend in IMPLEMENTATIONS


def saves(backend: str, device: torch.device) -> bool:
    return _is_triton(backend, device) or IMPLEMENTATIONS[backend].saves


def _is_triton(backend: str, device: torch.device) -> bool:
    return backend in ("chunkwise", "parallel") and device.type == "cuda"


@functools.cache
def _triton(backend: str) -> Implementation:
    # Imported where it runs: a CPU box has no triton.
    from . import triton_chunkwise as kernels

    passes = kernels.scan_forward, kernels.scan_backward, kernels.linear_forward, kernels.linear_backward
    parallel = backend == "parallel"
    return Implementation(*(functools.partial(p, parallel=parallel) for p in passes), saves=True, chunk=None)


def _without_autocast(x: Tensor) -> torch.autocast:
    # An op's implementation runs below the autocast dispatch key: its fp32 products would be rounded to bf16.
    return torch.autocast(x.device.type, enabled=False)


def _chunk(chunk_size: int, run: Implementation) -> int | None:
    return chunk_size or run.chunk


def _forward(run, forward, tokens, tables, initial_state, chunk_size, documents, need_final):
    forward = functools.partial(forward, need_final=need_final)
    args = tokens, tables, initial_state, _chunk(chunk_size, run)
    if documents is not None and not run.documents:
        return forward_by_document(forward, *args, documents)
    return forward(*tokens, *tables, *args[2:], **({} if documents is None else {"documents": documents}))


def _backward(run, backward, d_out, d_final, tokens, tables, initial_state, chunk_size, need_decay, documents):
    args = initial_state, _chunk(chunk_size, run), need_decay
    if documents is not None and not run.documents:
        return backward_by_document(backward, d_out, d_final, tokens, tables, *args, documents)
    return backward(d_out, d_final, *tokens, *tables, *args, **({} if documents is None else {"documents": documents}))


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


# Query readout


@torch.library.custom_op(
    op_name(__name__, "scan"),
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor mixing, Tensor? initial_state, int chunk_size, "
    "str backend, bool save=False, Tensor? documents=None, bool need_final=True) -> (Tensor, Tensor, Tensor)",
)
def scan(q, k, v, log_decay, mixing, initial_state, chunk_size, backend, save=False, documents=None, need_final=True):
    """-> o, final state, and what `save` keeps for the backward: a. chunk_size 0: the implementation's own."""
    run = implementation(backend, q.device)
    forward = functools.partial(run.scan_forward, save=save) if run.saves else run.scan_forward
    with _without_autocast(q):
        o, final, *kept = _forward(
            run, forward, (q, k, v), (log_decay, mixing), initial_state, chunk_size, documents, need_final
        )
    return o, _or_empty(final, log_decay), kept[0] if save else log_decay.new_empty(0)


@scan.register_fake
def _(q, k, v, log_decay, mixing, initial_state, chunk_size, backend, save=False, documents=None, need_final=True):
    B, T, H, R = k.shape
    Hq, D, M = q.shape[2], v.shape[3], log_decay.shape[1]
    shape, dtype = ((B, Hq, T, 2 * M), operand_dtype(q, k, v)) if save else ((0,), log_decay.dtype)
    kept = log_decay.new_empty(shape, dtype=dtype)
    return v.new_empty(B, T, Hq, D), log_decay.new_empty((B, H, M, R + D, 2) if need_final else 0), kept


@torch.library.custom_op(
    op_name(__name__, "scan_backward"),
    mutates_args=(),
    schema="(Tensor d_o, Tensor? d_final, Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor mixing, "
    "Tensor? initial_state, int chunk_size, str backend, bool need_decay, Tensor? a=None, "
    "Tensor? documents=None) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def scan_backward(
    d_o,
    d_final,
    q,
    k,
    v,
    log_decay,
    mixing,
    initial_state,
    chunk_size,
    backend,
    need_decay,
    a=None,
    documents=None,
):
    run = implementation(backend, q.device)
    backward = functools.partial(run.scan_backward, a=a) if run.saves else run.scan_backward
    tokens, tables = (q, k, v), (log_decay, mixing)
    with _without_autocast(q):
        dq, dk, dv, d_log_decay, d_mixing, d_initial = _backward(
            run, backward, d_o, d_final, tokens, tables, initial_state, chunk_size, need_decay, documents
        )
    d_initial = d_initial if initial_state is not None else None
    return dq, dk, dv, _or_empty(d_log_decay, log_decay), d_mixing, _or_empty(d_initial, log_decay)


@scan_backward.register_fake
def _(
    d_o,
    d_final,
    q,
    k,
    v,
    log_decay,
    mixing,
    initial_state,
    chunk_size,
    backend,
    need_decay,
    a=None,
    documents=None,
):
    return (
        *(x.new_empty(x.shape) for x in (q, k, v)),
        log_decay.new_empty(log_decay.shape if need_decay else 0),
        mixing.new_empty(mixing.shape),
        log_decay.new_empty(0 if initial_state is None else initial_state.shape),
    )


def _setup_scan(ctx, inputs, output):
    *tensors, ctx.chunk_size, ctx.backend, save, documents, need_final = inputs
    o, final, kept = output
    ctx.save_for_backward(documents, *tensors, kept if save else None)
    ctx.mark_non_differentiable(*((kept,) if need_final else (kept, final)))
    ctx.set_materialize_grads(False)
    ctx.output = o.shape, o.dtype


def _scan_gradient(ctx, d_o, d_final, *_):
    documents, q, k, v, log_decay, mixing, initial_state, a = ctx.saved_tensors
    if d_o is None:  # only the state was used
        d_o = v.new_zeros(ctx.output[0])
    need_decay = ctx.needs_input_grad[3]
    dq, dk, dv, d_log_decay, d_mixing, d_initial = scan_backward(
        *(d_o, d_final, q, k, v, log_decay, mixing, initial_state, ctx.chunk_size, ctx.backend, need_decay),
        a,
        documents,
    )
    d_log_decay = d_log_decay if need_decay else None
    d_initial = d_initial if initial_state is not None else None
    return dq, dk, dv, d_log_decay, d_mixing, d_initial, None, None, None, None, None


scan.register_autograd(_scan_gradient, setup_context=_setup_scan)
differentiated_once(scan_backward)


# Linear readout


@torch.library.custom_op(
    op_name(__name__, "linear_scan"),
    mutates_args=(),
    schema="(Tensor z, Tensor log_decay, Tensor readout, Tensor? initial_state, int chunk_size, str backend, "
    "Tensor? documents=None, bool need_final=True) -> (Tensor, Tensor)",
)
def linear_scan(z, log_decay, readout, initial_state, chunk_size, backend, documents=None, need_final=True):
    run = implementation(backend, z.device)
    tables = log_decay, readout
    with _without_autocast(z):
        y, final = _forward(run, run.linear_forward, (z,), tables, initial_state, chunk_size, documents, need_final)
    return y, _or_empty(final, log_decay)


@linear_scan.register_fake
def _(z, log_decay, readout, initial_state, chunk_size, backend, documents=None, need_final=True):
    B, _, H, P = z.shape
    return z.new_empty(z.shape), log_decay.new_empty((B, H, log_decay.shape[1], P, 2) if need_final else 0)


@torch.library.custom_op(
    op_name(__name__, "linear_scan_backward"),
    mutates_args=(),
    schema="(Tensor d_y, Tensor? d_final, Tensor z, Tensor log_decay, Tensor readout, Tensor? initial_state, "
    "int chunk_size, str backend, bool need_decay, Tensor? documents=None) -> (Tensor, Tensor, Tensor, Tensor)",
)
def linear_scan_backward(
    d_y, d_final, z, log_decay, readout, initial_state, chunk_size, backend, need_decay, documents=None
):
    run = implementation(backend, z.device)
    tables = log_decay, readout
    with _without_autocast(z):
        dz, d_log_decay, d_readout, d_initial = _backward(
            run, run.linear_backward, d_y, d_final, (z,), tables, initial_state, chunk_size, need_decay, documents
        )
    d_initial = d_initial if initial_state is not None else None
    return dz, _or_empty(d_log_decay, log_decay), d_readout, _or_empty(d_initial, log_decay)


@linear_scan_backward.register_fake
def _(d_y, d_final, z, log_decay, readout, initial_state, chunk_size, backend, need_decay, documents=None):
    return (
        z.new_empty(z.shape),
        log_decay.new_empty(log_decay.shape if need_decay else 0),
        readout.new_empty(readout.shape),
        log_decay.new_empty(0 if initial_state is None else initial_state.shape),
    )


def _setup_linear(ctx, inputs, output):
    *tensors, ctx.chunk_size, ctx.backend, documents, need_final = inputs
    ctx.save_for_backward(documents, *tensors)
    if not need_final:
        ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _linear_gradient(ctx, d_y, d_final):
    documents, z, log_decay, readout, initial_state = ctx.saved_tensors
    if d_y is None:
        d_y = torch.zeros_like(z)
    need_decay = ctx.needs_input_grad[1]
    dz, d_log_decay, d_readout, d_initial = linear_scan_backward(
        d_y, d_final, z, log_decay, readout, initial_state, ctx.chunk_size, ctx.backend, need_decay, documents
    )
    d_log_decay = d_log_decay if need_decay else None
    d_initial = d_initial if initial_state is not None else None
    return dz, d_log_decay, d_readout, d_initial, None, None, None, None


linear_scan.register_autograd(_linear_gradient, setup_context=_setup_linear)
differentiated_once(linear_scan_backward)

tag_caches(__name__)
