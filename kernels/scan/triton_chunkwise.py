"""`chunkwise` on CUDA: the passes of triton_passes.py put together, forward and backward, for both readouts.

Shapes: B batch, T time, H state heads, G query heads per state head, Hq = G H, R key features, D value width,
P = R + D channels, M basis functions, L chunk length, S segments. Derivation: kernels/README.md.

    forward    a = contract(q, k)     o  = expand(a, v; W), or b~ = mix(a; W), o = expand(b~, v)
    backward   c = contract(do, v)    b~, e~, dW = mix_backward(a, c; W)
               dq = expand(e~, k)
               dk = adjoint(e~, q) and dv = adjoint(b~, do), beside them dtheta = decay(e~; q, k) + decay(b~; do, v)

Time is cut into segments when there are too few sequences and heads to fill the GPU (`segment_count`): a first sweep
gives the state that each segment alone would leave, an associative scan chains them, and the passes start every segment
from its true state. Backwards the same with costates. `parallel` is this with every chunk a segment: nothing walks time.
Nothing uses atomics; every sum has one order.
"""

import torch
from torch import Tensor

from . import triton_launch as launch
from .triton_launch import Constant, Span, Tables
from .triton_plan import Plan, make_plan, segment_count
from .triton_support import operand_dtype


def scan_forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor, initial_state: Tensor | None,
    *, documents: Tensor | None = None, need_final: bool = True, parallel: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """-> (o [B, T, Hq, D] in v's dtype, final_state [B, H, M, P, 2] or None, a [B, Hq, T, 2M], which the backward takes)."""
    with torch.cuda.device_of(q):
        q, k, v = (launch.aligned(x) for x in (q, k, v))
        (B, _, H, R), D = k.shape, v.shape[3]
        plan, tab, span = _prepare((q, k, v), log_decay, documents, parallel)
        states = _states(plan, tab, span, (k, v), log_decay, initial_state)
        o = launch.padded_empty(v[:, :, :1].expand(-1, -1, q.shape[2], -1))
        final = log_decay.new_empty(B, H, log_decay.shape[1], R + D, 2) if need_final else None
        a = launch.contract(plan, tab, span, q, k, states, (0, R + D), final)
        if plan.fused and documents is None:  # with them, too many registers (372 bytes spilled on Triton 3.7.1)
            launch.expand(plan, tab, span, a, v, states, (R, R + D), o, final, mixing=mixing)
        else:
            launch.expand(plan, tab, span, launch.mix(plan, tab, a, mixing)[0], v, states, (R, R + D), o, final)
        return o.contiguous(), final, a


def scan_backward(
    d_o: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor,
    initial_state: Tensor | None, a: Tensor | None = None, *,
    documents: Tensor | None = None, parallel: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """-> gradients of (q, k, v, log_decay, mixing, initial_state), None for a state that is not there.

    a: as the forward returned it, or None to compute it again.
    """
    with torch.cuda.device_of(q):
        q, k, v, d_o = (launch.aligned(x) for x in (q, k, v, d_o))
        H, R, D = *k.shape[2:], v.shape[3]
        keys, values = (0, R + D), (R, R + D)
        plan, tab, span = _prepare((q, k, v), log_decay, documents, parallel)
        states = _states(plan, tab, span, (k, v), log_decay, initial_state)
        a = launch.contract(plan, tab, span, q, k, states, keys) if a is None else launch.dense(a)
        # J c is the conjugate of c: stored so, it is what dW takes and what W~ = J W^T J multiplies by W^T.
        c = launch.contract(plan, tab, span, d_o, v, states, values, conj=True)
        b, e, d_mixing = launch.mix(plan, tab, a, mixing, c)
        del a, c

        dq, dk, dv = (launch.padded_empty(x) for x in (q, k, v))
        d_initial = None if initial_state is None else initial_state.new_empty(initial_state.shape)
        pairs = ((e, q, keys), (b, d_o, values))
        costates = _costates(plan, tab, span, pairs, log_decay, d_final, H)
        launch.expand(plan, tab, span, e, k, states, keys, dq)
        parts_k = launch.adjoint(plan, tab, span, e, q, costates, keys, H, dk, d_initial, v=k, state=states)
        parts_v = launch.adjoint(plan, tab, span, b, d_o, costates, values, H, dv, d_initial, v=v, state=states)
        d_log_decay = launch.conj_sum(parts_k, parts_v)
        return dq.contiguous(), dk.contiguous(), dv.contiguous(), d_log_decay, d_mixing, d_initial


def linear_forward(
    z: Tensor, log_decay: Tensor, readout: Tensor, initial_state: Tensor | None, *,
    documents: Tensor | None = None, need_final: bool = True, parallel: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Pass 2 with the same weights for every token: -> (y [B, T, H, P] in z's dtype, final_state as above)."""
    with torch.cuda.device_of(z):
        z = launch.aligned(z)
        B, _, H, P = z.shape
        plan, tab, span = _prepare((z,), log_decay, documents, parallel, readout)
        states = _states(plan, tab, span, (z,), log_decay, initial_state)
        y = launch.padded_empty(z)
        final = log_decay.new_empty(B, H, log_decay.shape[1], P, 2) if need_final else None
        launch.expand(plan, tab, span, tab.constant, z, states, (0, P), y, final)
        return y.contiguous(), final


def linear_backward(
    d_y: Tensor, d_final: Tensor | None, z: Tensor, log_decay: Tensor, readout: Tensor, initial_state: Tensor | None,
    *, documents: Tensor | None = None, parallel: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """-> gradients of (z, log_decay, readout, initial_state). That of w is the conjugate of sum_t X_t dy_t."""
    with torch.cuda.device_of(z):
        z, d_y = launch.aligned(z), launch.aligned(d_y)
        H, P = z.shape[2:]
        plan, tab, span = _prepare((z,), log_decay, documents, parallel, readout)
        states = _states(plan, tab, span, (z,), log_decay, initial_state)
        b = tab.constant
        assert b is not None
        dz = launch.padded_empty(z)
        d_initial = None if initial_state is None else initial_state.new_empty(initial_state.shape)
        costates = _costates(plan, tab, span, ((b, d_y, (0, P)),), log_decay, d_final, H)
        parts = launch.adjoint(plan, tab, span, b, d_y, costates, (0, P), H, dz, d_initial, v=z, state=states)
        d_readout = launch.conj_sum(launch.contract(plan, tab, span, d_y, z, states, (0, P), total=True), pairs=False)
        return dz.contiguous(), launch.conj_sum(parts), d_readout, d_initial


def _prepare(
    inputs: tuple[Tensor, ...], log_decay: Tensor, documents: Tensor | None, parallel: bool,
    readout: Tensor | None = None,
) -> tuple[Plan, Tables, Span]:  # fmt: skip
    B, T, H = inputs[-1].shape[:3]  # k, v and z have the state heads
    width = 0 if len(inputs) == 1 else max(x.shape[3] for x in inputs)
    plan = make_plan(log_decay.device, operand_dtype(*inputs), log_decay.shape[1], width)
    total = -(-T // plan.chunk)
    chunks = 1 if parallel else -(-total // segment_count(B * H, total, log_decay.device))
    documents = None if documents is None else launch.dense(documents)
    span = Span(T, -(-total // chunks), chunks, documents)
    return plan, Tables.build(log_decay, plan, span, readout), span


def _states(
    plan: Plan, tab: Tables, span: Span, parts: tuple[Tensor, ...], log_decay: Tensor, initial_state: Tensor | None
) -> Tensor | None:
    """States before every segment, [B, H, S, M, P, 2]; None for one segment from zero."""
    if span.segments == 1:
        return None if initial_state is None else launch.dense(initial_state)
    B, _, H, _ = parts[0].shape
    P = sum(x.shape[3] for x in parts)
    local = log_decay.new_empty(B, H, span.segments, log_decay.shape[1], P, 2)
    first = 0
    for x in parts:
        launch.expand(plan, tab, span, None, x, None, (first, P), None, local)
        first += x.shape[3]
    return launch.chain(tab, local, initial_state, span, plan.chunk)


def _costates(
    plan: Plan, tab: Tables, span: Span, pairs: tuple[tuple[Tensor | Constant, Tensor, tuple[int, int]], ...],
    log_decay: Tensor, d_final: Tensor | None, H: int,
) -> Tensor | None:  # fmt: skip
    """Gradients of the states after every segment, [B, H, S, M, P, 2]; None for one segment and no d_final."""
    if span.segments == 1:
        return None if d_final is None else launch.dense(d_final)
    B, P = pairs[0][1].shape[0], pairs[0][2][1]
    local = log_decay.new_empty(B, H, span.segments, log_decay.shape[1], P, 2)
    for b, rows, channels in pairs:
        launch.adjoint(plan, tab, span, b, rows, None, channels, H, None, local)
    return launch.chain(tab, local, d_final, span, plan.chunk, reverse=True)
