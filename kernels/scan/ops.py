"""The chunkwise forms as `torch.library` ops: one node for torch.compile, one name for activation checkpointing.

    torch.ops.interdomain.scan.default            torch.ops.interdomain.linear_scan.default
    torch.ops.interdomain.scan_backward.default   torch.ops.interdomain.linear_scan_backward.default

`backend` names the implementation (`IMPLEMENTATIONS`), so that further ones join the same ops: what is compiled, listed
or checkpointed does not change with the backend. The ops trust their inputs; `interdomain.scan` is the door.
A gradient that does not exist (no initial state, frozen log_decay) is an empty tensor: an op returns a fixed number.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import chunkwise


class Implementation(NamedTuple):
    """Signatures as in chunkwise.py; every output newly allocated and contiguous."""

    scan_forward: Callable
    scan_backward: Callable
    linear_forward: Callable
    linear_backward: Callable


IMPLEMENTATIONS = {
    "chunkwise": Implementation(
        chunkwise.scan_forward, chunkwise.scan_backward, chunkwise.linear_forward, chunkwise.linear_backward
    )
}


def _without_autocast(x: Tensor) -> torch.autocast:
    # An op's implementation runs below the autocast dispatch key: its fp32 products would be rounded to bf16.
    return torch.autocast(x.device.type, enabled=False)


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


# Query readout


@torch.library.custom_op(
    "interdomain::scan",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor mixing, Tensor? initial_state, int chunk_size, "
    "str backend) -> (Tensor, Tensor)",
)
def scan(q, k, v, log_decay, mixing, initial_state, chunk_size, backend):
    with _without_autocast(q):
        forward = IMPLEMENTATIONS[backend].scan_forward
        return forward(q, k, v, log_decay, mixing, initial_state, chunk_size)


@scan.register_fake
def _(q, k, v, log_decay, mixing, initial_state, chunk_size, backend):
    B, T, H, R = k.shape
    D, M = v.shape[3], log_decay.shape[1]
    return v.new_empty(B, T, q.shape[2], D), log_decay.new_empty(B, H, M, R + D, 2)


@torch.library.custom_op(
    "interdomain::scan_backward",
    mutates_args=(),
    schema="(Tensor d_o, Tensor? d_final, Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor mixing, "
    "Tensor? initial_state, int chunk_size, str backend, bool need_decay) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def scan_backward(d_o, d_final, q, k, v, log_decay, mixing, initial_state, chunk_size, backend, need_decay):
    with _without_autocast(q):
        backward = IMPLEMENTATIONS[backend].scan_backward
        args = (q, k, v, log_decay, mixing, initial_state)
        dq, dk, dv, d_log_decay, d_mixing, d_initial = backward(d_o, d_final, *args, chunk_size, need_decay)
    d_initial = d_initial if initial_state is not None else None
    return dq, dk, dv, _or_empty(d_log_decay, log_decay), d_mixing, _or_empty(d_initial, log_decay)


@scan_backward.register_fake
def _(d_o, d_final, q, k, v, log_decay, mixing, initial_state, chunk_size, backend, need_decay):
    return (
        *(x.new_empty(x.shape) for x in (q, k, v)),
        log_decay.new_empty(log_decay.shape if need_decay else 0),
        mixing.new_empty(mixing.shape),
        log_decay.new_empty(0 if initial_state is None else initial_state.shape),
    )


def _setup_scan(ctx, inputs, output):
    *tensors, ctx.chunk_size, ctx.backend = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)
    ctx.output = output[0].shape, output[0].dtype


def _scan_gradient(ctx, d_o, d_final):
    q, k, v, log_decay, mixing, initial_state = ctx.saved_tensors
    if d_o is None:  # only the state was used
        d_o = v.new_zeros(ctx.output[0])
    need_decay = ctx.needs_input_grad[3]
    dq, dk, dv, d_log_decay, d_mixing, d_initial = scan_backward(
        d_o, d_final, q, k, v, log_decay, mixing, initial_state, ctx.chunk_size, ctx.backend, need_decay
    )
    d_log_decay = d_log_decay if need_decay else None
    d_initial = d_initial if initial_state is not None else None
    return dq, dk, dv, d_log_decay, d_mixing, d_initial, None, None


scan.register_autograd(_scan_gradient, setup_context=_setup_scan)


# Linear readout


@torch.library.custom_op(
    "interdomain::linear_scan",
    mutates_args=(),
    schema="(Tensor z, Tensor log_decay, Tensor readout, Tensor? initial_state, int chunk_size, str backend) -> "
    "(Tensor, Tensor)",
)
def linear_scan(z, log_decay, readout, initial_state, chunk_size, backend):
    with _without_autocast(z):
        return IMPLEMENTATIONS[backend].linear_forward(z, log_decay, readout, initial_state, chunk_size)


@linear_scan.register_fake
def _(z, log_decay, readout, initial_state, chunk_size, backend):
    B, _, H, P = z.shape
    return z.new_empty(z.shape), log_decay.new_empty(B, H, log_decay.shape[1], P, 2)


@torch.library.custom_op(
    "interdomain::linear_scan_backward",
    mutates_args=(),
    schema="(Tensor d_y, Tensor? d_final, Tensor z, Tensor log_decay, Tensor readout, Tensor? initial_state, "
    "int chunk_size, str backend, bool need_decay) -> (Tensor, Tensor, Tensor, Tensor)",
)
def linear_scan_backward(d_y, d_final, z, log_decay, readout, initial_state, chunk_size, backend, need_decay):
    with _without_autocast(z):
        backward = IMPLEMENTATIONS[backend].linear_backward
        dz, d_log_decay, d_readout, d_initial = backward(
            d_y, d_final, z, log_decay, readout, initial_state, chunk_size, need_decay
        )
    d_initial = d_initial if initial_state is not None else None
    return dz, _or_empty(d_log_decay, log_decay), d_readout, _or_empty(d_initial, log_decay)


@linear_scan_backward.register_fake
def _(d_y, d_final, z, log_decay, readout, initial_state, chunk_size, backend, need_decay):
    return (
        z.new_empty(z.shape),
        log_decay.new_empty(log_decay.shape if need_decay else 0),
        readout.new_empty(readout.shape),
        log_decay.new_empty(0 if initial_state is None else initial_state.shape),
    )


def _setup_linear(ctx, inputs, output):
    *tensors, ctx.chunk_size, ctx.backend = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _linear_gradient(ctx, d_y, d_final):
    z, log_decay, readout, initial_state = ctx.saved_tensors
    if d_y is None:
        d_y = torch.zeros_like(z)
    need_decay = ctx.needs_input_grad[1]
    dz, d_log_decay, d_readout, d_initial = linear_scan_backward(
        d_y, d_final, z, log_decay, readout, initial_state, ctx.chunk_size, ctx.backend, need_decay
    )
    d_log_decay = d_log_decay if need_decay else None
    d_initial = d_initial if initial_state is not None else None
    return dz, d_log_decay, d_readout, d_initial, None, None


linear_scan.register_autograd(_linear_gradient, setup_context=_setup_linear)
