"""`chunkwise` on CUDA: the passes of triton_passes.py put together, for both readouts.

Shapes: B batch, T time, H state heads, G query heads per state head, Hq = G H, R key features,
D value width, P channels of a state (R + D, or the width of z in the linear readout), M basis
functions, L chunk length, S segments. Derivation: docs/kernels.md.

    forward    a = contract(q, k)     o  = expand(a, v; W), or b~ = mix(a; W), o = expand(b~, v)
    backward   c = contract(do, v)    b~, e~, dW = mix(a, c; W)
               dq = expand(e~, k)
               dk = adjoint(e~, q) and dv = adjoint(b~, do),
               beside them dtheta = decay(e~; q, k) + decay(b~; do, v)

If there are too few sequences and heads to fill the GPU (`segment_count`), time is cut into
segments. A first sweep gives the state that each segment leaves by itself, an associative scan
chains them, and the passes start every segment from its true state. Backwards the same is done with
costates.

Context parallelism (`final_state` and `exchange`, as in chunkwise.py) is one more level of
segments: the state at the end of the chain is sent to other ranks, and the state that comes back
starts the chain.

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
    """Computes the scan with the query readout.

    With the key channels X^k and the value channels X^v of a token's state, its output is o =
    Re(b^T X^v), where b = W a and a = X^k q.

    Args:
        q: Query features, [B, T, Hq, R].
        k: Key features, [B, T, H, R].
        v: Values, [B, T, H, D].
        log_decay: theta = log Lambda as real pairs, [H, M, 2] fp32.
        mixing: W, [H, 2M, 2M] fp32.
        initial_state: The state before the tokens, [B, H, M, P, 2] with P = R + D channels, or a
            function that waits for it. None means zeros.
        documents: The id of each token's document, [B, T] int32, or None for one document.
        need_final: False if no final state is wanted.
        local: The states that the segments leave when each starts from zero, the second result of
            `final_state`, if it was computed before; else None.

    Returns:
        o: The outputs, [B, T, Hq, D] in v's dtype.
        final_state: The state after the tokens, [B, H, M, P, 2], or None.
        initial_state: The state before the tokens, or None.
        a: The result of pass 1, [B, Hq, T, 2M], which the backward takes.
    """
    with torch.cuda.device_of(q):
        q, k, v = (aligned(x) for x in (q, k, v))
        B, _, H, R = k.shape
        M = log_decay.shape[1]
        P = R + v.shape[3]
        launches = _launches((q, k, v), log_decay, documents)

        # The states before the segments, [B, H, S, M, P, 2]. If the state comes from another rank,
        # wait for it.
        if callable(initial_state):
            initial_state = initial_state()
        states = launches.states(initial_state, k, v, local=local)

        # Pass 1: a = X^k q. Keys are the first R of the P channels of a state, values the other
        # ones: (0, P) and (R, P) below.
        # The rows of o are padded to 16 elements, and copied without the padding at the end.
        o = padded_empty(v[:, :, :1].expand(-1, -1, q.shape[2], -1))
        final = None
        if need_final:
            final = log_decay.new_empty(B, H, M, P, 2)
        a = launches.contract(q, k, states, (0, P), final)

        # b~ = E (W a), with the power E of the decay for a token's place in its chunk, and pass 2:
        # o = Re(b^T X^v). Both are in one kernel if registers allow. Documents need more registers:
        # in one kernel, 372 bytes would be spilled (Triton 3.7.1).
        if launches.plan.fused and documents is None:
            launches.expand(a, v, states, (R, P), o, final, mixing=mixing)
        else:
            b, _, _ = launches.mix(a, mixing)
            launches.expand(b, v, states, (R, P), o, final)
        return o.contiguous(), final, initial_state, a


def scan_backward(
    d_o: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor,
    initial_state: Tensor | None, a: Tensor | None = None, *, documents: Tensor | None = None,
    exchange: Exchange | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Computes the gradients of the scan with the query readout.

    The forward is a = X^k q, b = W a and o = Re(b^T X^v) for each token. The gradient of b is c =
    X^v do (dL = Re(c^T db)), and that of a is e = conj(W^T conj(c)), likewise.

    Args:
        d_o: The gradient of o, [B, T, Hq, D].
        d_final: The gradient of the final state, [B, H, M, P, 2], or None for zeros. With an
            exchange it is not used: the exchanged gradient contains it.
        q: Query features, [B, T, Hq, R].
        k: Key features, [B, T, H, R].
        v: Values, [B, T, H, D].
        log_decay: theta = log Lambda as real pairs, [H, M, 2] fp32.
        mixing: W, [H, 2M, 2M] fp32.
        initial_state: The state before the tokens, [B, H, M, P, 2] with P = R + D channels, or None
            for zeros. With context parallelism, the state that came from the ranks before.
        a: The result of pass 1 in the forward, [B, Hq, T, 2M], or None to compute it again.
        documents: The id of each token's document, [B, T] int32, or None for one document.
        exchange: Exchanges gradients of states with other ranks, or None for a single rank.

    Returns:
        The gradients of q, k, v, log_decay, mixing and initial_state; None for a state that is not
        there.
    """
    with torch.cuda.device_of(q):
        q, k, v, d_o = (aligned(x) for x in (q, k, v, d_o))
        R = k.shape[3]
        P = R + v.shape[3]
        launches = _launches((q, k, v), log_decay, documents)
        states = launches.states(initial_state, k, v)

        # Pass 1 of (q, k) gives a, and pass 1 of (do, v) gives c. The conjugate of c is stored,
        # because dW and e = conj(W^T conj(c)) both need conj(c). Then b~ = E b, e~ = E e and dW,
        # where E is a power of the decay. `b` and `e` hold b~ and e~. `keys` and `values` are the
        # first channel of each in a state, and the number of channels.
        keys = (0, P)
        values = (R, P)
        if a is None:
            a = launches.contract(q, k, states, keys)
        else:
            a = dense(a)
        conj_c = launches.contract(d_o, v, states, values, conj=True)
        b, e, d_mixing = launches.mix(a, mixing, conj_c)
        del a, conj_c

        # dq is pass 2 of (e, k). It needs no gradient of a state: it is computed while other ranks'
        # gradients are on their way. The rows of dq, dk and dv are padded to 16 elements, and
        # copied without the padding at the end.
        dq, dk, dv = (padded_empty(x) for x in (q, k, v))
        d_initial = None
        if initial_state is not None:
            d_initial = initial_state.new_empty(initial_state.shape)
        wait = launches.costates(d_final, (e, q, keys), (b, d_o, values), exchange=exchange)
        launches.expand(e, k, states, keys, dq)

        # Pass 3 gives dk and dv, and beside them the parts of the gradient of log_decay. costates
        # are the gradients of the states after every segment.
        costates = wait()
        parts_k = launches.adjoint(e, q, costates, keys, dk, d_initial, v=k, state=states)
        parts_v = launches.adjoint(b, d_o, costates, values, dv, d_initial, v=v, state=states)
        # `conj_sum` adds up the parts over sequences, time and channels. They are derivatives g, dL
        # = Re(g dtheta); the gradient is conj(g).
        d_log_decay = conj_sum(parts_k, parts_v)
        return dq.contiguous(), dk.contiguous(), dv.contiguous(), d_log_decay, d_mixing, d_initial


def linear_forward(
    z: Tensor, log_decay: Tensor, readout: Tensor, initial_state: Start, *,
    documents: Tensor | None = None, need_final: bool = True, local: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Computes the linear scan, y = Re(w^T X_t): pass 2 with the same weights for every token.

    Args:
        z: Inputs, [B, T, H, P].
        log_decay: theta = log Lambda as real pairs, [H, M, 2] fp32.
        readout: w, [H, 2M] as (Re w | Im w).
        initial_state: The state before the tokens, [B, H, M, P, 2], or a function that waits for
            it. None means zeros.
        documents: The id of each token's document, [B, T] int32, or None for one document.
        need_final: False if no final state is wanted.
        local: The states that the segments leave when each starts from zero, the second result of
            `final_state`, if it was computed before; else None.

    Returns:
        y: The outputs, [B, T, H, P] in z's dtype.
        final_state: The state after the tokens, [B, H, M, P, 2], or None.
        initial_state: The state before the tokens, or None.
    """
    with torch.cuda.device_of(z):
        z = aligned(z)
        B, _, H, P = z.shape
        launches = _launches((z,), log_decay, documents, readout)

        # The states before the segments.
        if callable(initial_state):
            initial_state = initial_state()
        states = launches.states(initial_state, z, local=local)

        # Pass 2 with the readout's weights, which are in the tables of `launches`. The rows of y
        # are padded to 16 elements, and copied without the padding at the end.
        y = padded_empty(z)
        final = None
        if need_final:
            final = log_decay.new_empty(B, H, log_decay.shape[1], P, 2)
        launches.expand(b=None, v=z, state=states, channels=(0, P), out=y, final=final)
        return y.contiguous(), final, initial_state


def linear_backward(
    d_y: Tensor, d_final: Tensor | None, z: Tensor, log_decay: Tensor, readout: Tensor, initial_state: Tensor | None,
    *, documents: Tensor | None = None, exchange: Exchange | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Computes the gradients of the linear scan, y = Re(w^T X_t) for the state X_t of each token.

    The gradient of w is the conjugate of sum_t X_t dy_t. Pass 1, which reads the states by (dy, z),
    gives this sum. Pass 3, the transpose of the forward in time, gives dz.

    Args:
        d_y: The gradient of y, [B, T, H, P].
        d_final: The gradient of the final state, [B, H, M, P, 2], or None for zeros. With an
            exchange it is not used: the exchanged gradient contains it.
        z: Inputs, [B, T, H, P].
        log_decay: theta = log Lambda as real pairs, [H, M, 2] fp32.
        readout: w, [H, 2M] as (Re w | Im w).
        initial_state: The state before the tokens, [B, H, M, P, 2], or None for zeros. With context
            parallelism, the state that came from the ranks before.
        documents: The id of each token's document, [B, T] int32, or None for one document.
        exchange: Exchanges gradients of states with other ranks, or None for a single rank.

    Returns:
        The gradients of z, log_decay, readout and initial_state; None for a state that is not
        there.
    """
    with torch.cuda.device_of(z):
        z = aligned(z)
        d_y = aligned(d_y)
        # The first channel of z in a state, and the number of channels.
        channels = (0, z.shape[3])
        launches = _launches((z,), log_decay, documents, readout)
        states = launches.states(initial_state, z)

        # The rows of dz are padded to 16 elements, and copied without the padding at the end.
        dz = padded_empty(z)
        d_initial = None
        if initial_state is not None:
            d_initial = initial_state.new_empty(initial_state.shape)

        # costates are the gradients of the states after every segment. None: the linear readout has
        # no b~ for each token, its weights are in the tables. There is nothing to compute during
        # the exchange, so wait for it at once.
        wait = launches.costates(d_final, (None, d_y, channels), exchange=exchange)
        costates = wait()

        # Pass 3 (dz), and beside it the parts of the gradient of log_decay.
        parts = launches.adjoint(
            b=None, d_o=d_y, costate=costates, channels=channels, out=dz, initial=d_initial, v=z, state=states
        )  # fmt: skip
        # Pass 1 (the state read by dy), summed over time, gives the gradient of w. `conj_sum` adds
        # up the parts over sequences, time and channels, and conjugates: they are derivatives g, dL
        # = Re(g dw), and the gradient is conj(g).
        d_readout = conj_sum(launches.contract(d_y, z, states, channels, total=True), pairs=False)
        return dz.contiguous(), conj_sum(parts), d_readout, d_initial


def final_state(
    parts: tuple[Tensor, ...], log_decay: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Computes the state that these tokens leave when they start from zero.

    Args:
        parts: k and v, or the inputs z of the linear readout, each [B, T, H, width].
        log_decay: theta = log Lambda as real pairs, [H, M, 2] fp32.
        documents: The id of each token's document, [B, T] int32, or None for one document.

    Returns:
        The state, [B, H, M, P, 2], and the states that each segment leaves when it starts from
        zero, [B, H, S, M, P, 2]; None for one segment.
    """
    with torch.cuda.device_of(log_decay):
        launches = _launches(parts, log_decay, documents)
        local = launches.local_states(*(aligned(x) for x in parts))
        state = launches.end(local)
        if launches.segments == 1:
            return state, None
        return state, local


def segments(parts: tuple[Tensor, ...], log_decay: Tensor) -> int:
    """Returns S, the number of segments of these tokens.

    Args:
        parts: k and v, or the inputs z of the linear readout, each [B, T, H, width]; they may be
            fake.
        log_decay: theta, [H, M, 2].
    """
    # The tokens of a sequence divided by those of a segment, rounded up.
    plan, chunks = _cut(parts, log_decay)
    return -(-parts[0].shape[1] // (chunks * plan.chunk))


def _cut(inputs: tuple[Tensor, ...], log_decay: Tensor) -> tuple[Plan, int]:
    """Returns the tile sizes, and how many chunks a segment of time has.

    Args:
        inputs: q, k and v, or k and v, or z. The last one has the state heads.
        log_decay: theta, [H, M, 2].

    Returns:
        The tile sizes, and the number of chunks of a segment.
    """
    B, T, H = inputs[-1].shape[:3]
    # The width is the larger one of R and D, at most MAX_WIDTH (`triton_support.unsupported`). The
    # linear readout takes any width of z, and its tiles do not depend on it: 0 stands for it.
    width = 0
    if len(inputs) > 1:
        width = max(x.shape[3] for x in inputs)
    plan = make_plan(log_decay.device, operand_dtype(*inputs), log_decay.shape[1], width)
    # The chunks of a sequence, and then those of a segment. Both quotients are rounded up.
    chunks = -(-T // plan.chunk)
    return plan, -(-chunks // segment_count(B * H, chunks, log_decay.device))


def _launches(
    inputs: tuple[Tensor, ...], log_decay: Tensor, documents: Tensor | None,
    readout: Tensor | None = None,
) -> Launches:  # fmt: skip
    """Returns the passes over these inputs, with their tables computed.

    Args:
        inputs: q, k and v, or k and v if only the states are computed; or (z,), the inputs of the
            linear readout. Each is [B, T, heads, width].
        log_decay: theta = log Lambda as real pairs, [H, M, 2].
        documents: The id of each token's document, [B, T] int32, or None for one document.
        readout: w, [H, 2M], for the linear readout; None for the query readout.
    """
    plan, chunks = _cut(inputs, log_decay)
    return Launches.build(plan, log_decay, inputs[-1].shape[1], chunks, documents, readout)
