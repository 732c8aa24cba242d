"""The scan and its backward as `torch.library` ops: one node for torch.compile, one name for activation checkpointing.

    torch.ops.interdomain.scan.default            torch.ops.interdomain.linear_scan.default
    torch.ops.interdomain.scan_backward.default   torch.ops.interdomain.linear_scan_backward.default

`backend` names the implementation (`implementation`), so that further ones join the same ops: what is compiled, listed or
checkpointed does not change with the backend. The ops trust their inputs; `interdomain.scan` checks them.
A tensor that does not exist (no state asked for, frozen log_decay, nothing saved) is empty: an op returns a fixed number.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .library import differentiated_once, tag_caches
from .triton_support import operand_dtype


class Implementation(NamedTuple):
    """Signatures as in chunkwise.py; every output newly allocated and contiguous.

    saves: scan_forward returns a, [B, Hq, T, 2M] in the operands' dtype, after the state; scan_backward takes it, or
    None, as `a`.
    """

    scan_forward: Callable
    scan_backward: Callable
    linear_forward: Callable
    linear_backward: Callable
    saves: bool = False


def _written_out(module: str, saves: bool = False, **options: Any) -> Implementation:
    """The four functions of a module, which is imported when one of them runs: a machine without a GPU has no Triton."""

    def function(name: str) -> Callable:
        def run(*args, **kw):
            return getattr(importlib.import_module(module, __package__), name)(*args, **kw, **options)

        run.__name__ = name
        return run

    return Implementation._make([*map(function, Implementation._fields[:4]), saves])


_PLAIN = _written_out(".chunkwise")
IMPLEMENTATIONS = {
    "chunkwise": _PLAIN,
    "chunkwise-torch": _PLAIN,
    "sequential": _written_out(".alternatives.sequential"),
    "fft": _written_out(".alternatives.fft"),
}
TRITON = {
    "chunkwise": _written_out(".triton_chunkwise", saves=True),
    "parallel": _written_out(".triton_chunkwise", saves=True, parallel=True),
}


def implementation(backend: str, device: torch.device) -> Implementation | None:
    """What the ops run for a backend: `chunkwise` and `parallel` are Triton on CUDA. None: autograd records the backend.

    torch.compile traces through this.
    """
    return (TRITON.get(backend) if device.type == "cuda" else None) or IMPLEMENTATIONS.get(backend)


def _without_autocast(x: Tensor) -> torch.autocast:
    # An op's implementation runs below the autocast dispatch key: its fp32 products would be rounded to bf16.
    return torch.autocast(x.device.type, enabled=False)


def _forward(
    backend: str, name: str, tokens: tuple[Tensor, ...], tables, initial_state, chunk_size: int, **kw
) -> tuple:
    """-> the output, the final state (empty without need_final), and what the implementation saves."""
    forward = getattr(implementation(backend, tokens[0].device), name)
    with _without_autocast(tokens[0]):
        out, final, *saved = forward(*tokens, *tables, initial_state, chunk_size or None, **kw)
    return out, tables[0].new_empty(0) if final is None else final, *saved


def _backward(backend: str, name: str, d_out: Tensor, d_final, tokens, tables, initial_state, chunk_size, need, **kw):
    """-> gradients of tokens, tables and the initial state; empty ones where there are none."""
    backward = getattr(implementation(backend, d_out.device), name)
    with _without_autocast(d_out):
        *grads, d_initial = backward(d_out, d_final, *tokens, *tables, initial_state, chunk_size or None, need, **kw)
    d_initial = d_initial if initial_state is not None else None
    return tuple(tables[0].new_empty(0) if x is None else x for x in (*grads, d_initial))


# Query readout


@torch.library.custom_op("interdomain::scan", mutates_args=())
def scan(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor, initial_state: Tensor | None, chunk_size: int,
    backend: str, save: bool = False, documents: Tensor | None = None, need_final: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """-> o, final state, and what `save` keeps for the backward: a. chunk_size 0: the implementation's own."""
    args = (q, k, v), (log_decay, mixing), initial_state, chunk_size
    o, final, *saved = _forward(backend, "scan_forward", *args, documents=documents, need_final=need_final)
    return o, final, saved[0] if save else log_decay.new_empty(0)


@scan.register_fake
def _(q, k, v, log_decay, mixing, initial_state, chunk_size, backend, save=False, documents=None, need_final=True):
    B, T, H, R = k.shape
    Hq, D, M = q.shape[2], v.shape[3], log_decay.shape[1]
    shape, dtype = ((B, Hq, T, 2 * M), operand_dtype(q, k, v)) if save else ((0,), log_decay.dtype)
    kept = log_decay.new_empty(shape, dtype=dtype)
    return v.new_empty(B, T, Hq, D), log_decay.new_empty((B, H, M, R + D, 2) if need_final else 0), kept


@torch.library.custom_op("interdomain::scan_backward", mutates_args=())
def scan_backward(
    d_o: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor,
    initial_state: Tensor | None, chunk_size: int, backend: str, need_decay: bool, a: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    args = (q, k, v), (log_decay, mixing), initial_state, chunk_size, need_decay
    saved = {} if a is None else {"a": a}
    return _backward(backend, "scan_backward", d_o, d_final, *args, documents=documents, **saved)


@scan_backward.register_fake
def _(d_o, d_final, q, k, v, log_decay, mixing, initial_state, chunk_size, backend, need_decay, a=None, documents=None):
    dq, dk, dv, d_mixing = (x.new_empty(x.shape) for x in (q, k, v, mixing))
    return dq, dk, dv, *_fake_gradients(log_decay, need_decay, d_mixing, initial_state)


def _fake_gradients(log_decay, need_decay, d_table, initial_state):
    d_log_decay = log_decay.new_empty(log_decay.shape if need_decay else 0)
    return d_log_decay, d_table, log_decay.new_empty(0 if initial_state is None else initial_state.shape)


# Linear readout


@torch.library.custom_op("interdomain::linear_scan", mutates_args=())
def linear_scan(
    z: Tensor, log_decay: Tensor, readout: Tensor, initial_state: Tensor | None, chunk_size: int, backend: str,
    documents: Tensor | None = None, need_final: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    args = (z,), (log_decay, readout), initial_state, chunk_size
    return _forward(backend, "linear_forward", *args, documents=documents, need_final=need_final)


@linear_scan.register_fake
def _(z, log_decay, readout, initial_state, chunk_size, backend, documents=None, need_final=True):
    B, _, H, P = z.shape
    return z.new_empty(z.shape), log_decay.new_empty((B, H, log_decay.shape[1], P, 2) if need_final else 0)


@torch.library.custom_op("interdomain::linear_scan_backward", mutates_args=())
def linear_scan_backward(
    d_y: Tensor, d_final: Tensor | None, z: Tensor, log_decay: Tensor, readout: Tensor, initial_state: Tensor | None,
    chunk_size: int, backend: str, need_decay: bool, documents: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    args = (z,), (log_decay, readout), initial_state, chunk_size, need_decay
    return _backward(backend, "linear_backward", d_y, d_final, *args, documents=documents)


@linear_scan_backward.register_fake
def _(d_y, d_final, z, log_decay, readout, initial_state, chunk_size, backend, need_decay, documents=None):
    return z.new_empty(z.shape), *_fake_gradients(
        log_decay, need_decay, readout.new_empty(readout.shape), initial_state
    )


# Gradients


def _differentiable(op: Any, backward: Any, n: int) -> None:
    """Register `backward` for `op`: n tensors of tokens, log_decay, a table, the initial state; then what is no tensor."""

    def setup(ctx, inputs, output):
        ctx.chunk_size, ctx.backend, *save, documents, need_final = inputs[n + 3 :]
        out, final, *saved = output
        ctx.save_for_backward(documents, *inputs[: n + 3], *(x if any(save) else None for x in saved))
        ctx.mark_non_differentiable(*saved, *(() if need_final else (final,)))
        ctx.set_materialize_grads(False)
        ctx.output_shape = out.shape

    def gradient(ctx, d_out, d_final, *_):
        documents, *saved = ctx.saved_tensors
        tensors, need = saved[: n + 3], ctx.needs_input_grad
        if d_out is None:  # only the state was used
            d_out = tensors[n - 1].new_zeros(ctx.output_shape)
        run = ctx.chunk_size, ctx.backend, need[n], *saved[n + 3 :], documents
        grads = list(backward(d_out, d_final, *tensors, *run))
        grads[n] = grads[n] if need[n] else None
        grads[-1] = grads[-1] if tensors[-1] is not None else None
        return *grads, *(None,) * (len(need) - len(grads))

    op.register_autograd(gradient, setup_context=setup)
    differentiated_once(backward)


_differentiable(scan, scan_backward, 3)
_differentiable(linear_scan, linear_scan_backward, 1)
tag_caches(__name__)
