"""`chunkwise` on CUDA: the passes of triton_passes.py put together, for both readouts.

Shapes: B batch, T time, H state heads, G query heads per state head, Hq = G H, R key features,
D value width, P = R + D channels, M basis functions, L chunk length, S segments. Derivation:
docs/kernels.md.

    forward    a = contract(q, k)     o  = expand(a, v; W), or b~ = mix(a; W), o = expand(b~, v)
    backward   c = contract(do, v)    b~, e~, dW = mix_backward(a, c; W)
               dq = expand(e~, k)
               dk = adjoint(e~, q) and dv = adjoint(b~, do),
               beside them dtheta = decay(e~; q, k) + decay(b~; do, v)

If there are too few sequences and heads to fill the GPU (`segment_count`), time is cut into
segments. A first sweep gives the state that each segment alone would leave, an associative scan
chains them, and the passes start every segment from its true state. Backwards the same is done with
costates.

A shard of longer sequences (`final_state`, `leave`, as in chunkwise.py) is one more level of
segments: the end of the chain is handed over, and the state that comes back starts it.

Nothing uses atomics; every sum has one order.
"""

import torch
from torch import Tensor

from .chunkwise import Exchange, Start
from .triton_launch import Launches, aligned, conj_sum, dense, padded_empty
from .triton_plan import Plan, make_plan, segment_count
from .triton_support import operand_dtype


def scan_forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor, initial_state: Start, *,
    documents: Tensor | None = None, need_final: bool = True, local: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    """Computes the scan.

    Args:
        q: [B, T, Hq, R].
        k: [B, T, H, R].
        v: [B, T, H, D].
        log_decay: theta, [H, M, 2].
        mixing: W, [H, 2M, 2M].
        initial_state: The state before the tokens, or a function that waits for it.
        documents: The document of each token, [B, T] int32, or None.
        need_final: False if no final state is wanted.
        local: The second result of `final_state`, if it was computed before.

    Returns:
        o: [B, T, Hq, D] in v's dtype.
        final_state: [B, H, M, P, 2], or None.
        initial_state: The state before the tokens, or None.
        a: The result of pass 1, [B, Hq, T, 2M], which the backward takes.
    """
    with torch.cuda.device_of(q):
        # The states before the segments.
        q, k, v = (aligned(x) for x in (q, k, v))
        (B, _, H, R), P = k.shape, k.shape[3] + v.shape[3]
        launches = _launches((q, k, v), log_decay, documents)
        initial_state = initial_state() if callable(initial_state) else initial_state
        states = launches.states(initial_state, k, v, local=local)
        # Pass 1, W and pass 2.
        o = padded_empty(v[:, :, :1].expand(-1, -1, q.shape[2], -1))
        final = log_decay.new_empty(B, H, log_decay.shape[1], P, 2) if need_final else None
        a = launches.contract(q, k, states, (0, P), final)
        # Documents need more registers: fused, 372 bytes are spilled (Triton 3.7.1).
        if launches.plan.fused and documents is None:
            launches.expand(a, v, states, (R, P), o, final, mixing=mixing)
        else:
            launches.expand(launches.mix(a, mixing)[0], v, states, (R, P), o, final)
        return o.contiguous(), final, initial_state, a


def scan_backward(
    d_o: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor,
    initial_state: Tensor | None, a: Tensor | None = None, *, documents: Tensor | None = None,
    leave: Exchange | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Computes the gradients of the scan.

    Args:
        d_o: The gradient of o, [B, T, Hq, D].
        d_final: The gradient of the final state, or None.
        q: [B, T, Hq, R].
        k: [B, T, H, R].
        v: [B, T, H, D].
        log_decay: theta, [H, M, 2].
        mixing: W, [H, 2M, 2M].
        initial_state: The state before the tokens, or None. With `leave`, the state that entered
            the shard.
        a: The result of pass 1, or None to compute it again.
        documents: The document of each token, [B, T] int32, or None.
        leave: The exchange with other ranks, or None.

    Returns:
        The gradients of q, k, v, log_decay, mixing and initial_state; None for a state that is not
        there.
    """
    with torch.cuda.device_of(q):
        # Pass 1 of the forward, and of the gradient of o.
        q, k, v, d_o = (aligned(x) for x in (q, k, v, d_o))
        P = k.shape[3] + v.shape[3]
        keys, values = (0, P), (k.shape[3], P)
        launches = _launches((q, k, v), log_decay, documents)
        states = launches.states(initial_state, k, v)
        a = launches.contract(q, k, states, keys) if a is None else dense(a)
        # J c is the conjugate of c: stored so, it is what dW takes and what W~ = J W^T J multiplies
        # by W^T.
        c = launches.contract(d_o, v, states, values, conj=True)
        b, e, d_mixing = launches.mix(a, mixing, c)
        del a, c

        # Pass 2 gives the gradient of q, and pass 3 the others.
        dq, dk, dv = (padded_empty(x) for x in (q, k, v))
        d_initial = None if initial_state is None else initial_state.new_empty(initial_state.shape)
        costates = launches.costates(d_final, (e, q, keys), (b, d_o, values), leave=leave)
        launches.expand(e, k, states, keys, dq)  # while other ranks' gradients are on their way
        costates = costates()
        parts_k = launches.adjoint(e, q, costates, keys, dk, d_initial, v=k, state=states)
        parts_v = launches.adjoint(b, d_o, costates, values, dv, d_initial, v=v, state=states)
        d_log_decay = conj_sum(parts_k, parts_v)
        return dq.contiguous(), dk.contiguous(), dv.contiguous(), d_log_decay, d_mixing, d_initial


def linear_forward(
    z: Tensor, log_decay: Tensor, readout: Tensor, initial_state: Start, *,
    documents: Tensor | None = None, need_final: bool = True, local: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Computes the linear scan: pass 2 with the same weights for every token.

    Args:
        z: [B, T, H, P].
        log_decay: theta, [H, M, 2].
        readout: w, [H, 2M] as (Re w | Im w).
        initial_state: As in `scan_forward`, and so are the next arguments.
        documents: The document of each token, [B, T] int32, or None.
        need_final: False if no final state is wanted.
        local: The second result of `final_state`, if it was computed before.

    Returns:
        y: [B, T, H, P] in z's dtype.
        final_state: As in `scan_forward`.
        initial_state: As in `scan_forward`.
    """
    with torch.cuda.device_of(z):
        z = aligned(z)
        B, _, H, P = z.shape
        launches = _launches((z,), log_decay, documents, readout)
        initial_state = initial_state() if callable(initial_state) else initial_state
        states = launches.states(initial_state, z, local=local)
        y = padded_empty(z)
        final = log_decay.new_empty(B, H, log_decay.shape[1], P, 2) if need_final else None
        launches.expand(None, z, states, (0, P), y, final)
        return y.contiguous(), final, initial_state


def linear_backward(
    d_y: Tensor, d_final: Tensor | None, z: Tensor, log_decay: Tensor, readout: Tensor, initial_state: Tensor | None,
    *, documents: Tensor | None = None, leave: Exchange | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Computes the gradients of the linear scan.

    The gradient of w is the conjugate of sum_t X_t dy_t.

    Args:
        d_y: The gradient of y, [B, T, H, P].
        d_final: The gradient of the final state, or None.
        z: [B, T, H, P].
        log_decay: theta, [H, M, 2].
        readout: w, [H, 2M] as (Re w | Im w).
        initial_state: As in `scan_backward`.
        documents: The document of each token, [B, T] int32, or None.
        leave: The exchange with other ranks, or None.

    Returns:
        The gradients of z, log_decay, readout and initial_state.
    """
    with torch.cuda.device_of(z):
        z, d_y = aligned(z), aligned(d_y)
        channels = (0, z.shape[3])
        launches = _launches((z,), log_decay, documents, readout)
        states = launches.states(initial_state, z)
        dz = padded_empty(z)
        d_initial = None if initial_state is None else initial_state.new_empty(initial_state.shape)
        costates = launches.costates(d_final, (None, d_y, channels), leave=leave)()
        parts = launches.adjoint(None, d_y, costates, channels, dz, d_initial, v=z, state=states)
        d_readout = conj_sum(launches.contract(d_y, z, states, channels, total=True), pairs=False)
        return dz.contiguous(), conj_sum(parts), d_readout, d_initial


def final_state(
    parts: tuple[Tensor, ...], log_decay: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Computes the state that these tokens alone leave.

    Args:
        parts: k and v, or z.
        log_decay: theta, [H, M, 2].
        documents: As in `scan_forward`.

    Returns:
        The state, [B, H, M, P, 2], and those of each segment alone, [B, H, S, M, P, 2]; None for
        one segment.
    """
    with torch.cuda.device_of(log_decay):
        launches = _launches(parts, log_decay, documents)
        local = launches.local_states(*(aligned(x) for x in parts))
        return launches.end(local), local if launches.segments > 1 else None


def segments(parts: tuple[Tensor, ...], log_decay: Tensor) -> int:
    """Returns S, the number of segments of these tokens.

    Args:
        parts: k and v, or z; they may be fake.
        log_decay: theta, [H, M, 2].
    """
    plan, chunks = _cut(parts, log_decay)
    return -(-parts[0].shape[1] // (chunks * plan.chunk))


def _cut(inputs: tuple[Tensor, ...], log_decay: Tensor) -> tuple[Plan, int]:
    """Returns tile sizes, and the number of chunks of a segment."""
    B, T, H = inputs[-1].shape[:3]  # k, v and z have the state heads
    width = 0 if len(inputs) == 1 else max(x.shape[3] for x in inputs)
    plan = make_plan(log_decay.device, operand_dtype(*inputs), log_decay.shape[1], width)
    total = -(-T // plan.chunk)
    return plan, -(-total // segment_count(B * H, total, log_decay.device))


def _launches(
    inputs: tuple[Tensor, ...], log_decay: Tensor, documents: Tensor | None,
    readout: Tensor | None = None,
) -> Launches:  # fmt: skip
    """Returns the passes over these inputs.

    Args:
        inputs: q, k and v, or k and v, or z.
        log_decay: theta, [H, M, 2].
        documents: As in `scan_forward`.
        readout: w, [H, 2M], for the linear readout.
    """
    plan, chunks = _cut(inputs, log_decay)
    return Launches.build(plan, log_decay, inputs[-1].shape[1], chunks, documents, readout)
