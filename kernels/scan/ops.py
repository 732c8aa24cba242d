"""The scan and its backward as `torch.library` ops.

torch.compile sees one node for each, and activation checkpointing one name.

    torch.ops.interdomain.scan.default            torch.ops.interdomain.linear_scan.default
    torch.ops.interdomain.scan_backward.default   torch.ops.interdomain.linear_scan_backward.default
    torch.ops.interdomain.scan_step_.default      torch.ops.interdomain.linear_step_.default
    torch.ops.interdomain.send_state.default

`backend` says which module runs (`implementation`). What is compiled, listed or checkpointed does
not change with it. A resolved backend is never `auto`. The ops trust their inputs, which
`interdomain_scan` and `linear_scan` of the package have checked.

Ops return a fixed number of tensors; optional outputs (no state asked for, nothing saved) are
empty.

Context parallelism: `group` names the process group whose ranks share the sequences, "" for none.
`sent` is then the result of `send_state`, which starts the exchange and does not wait: only the
scan may read it. The state that enters this rank's tokens is an output, which the backward saves.
If activation checkpointing keeps the ops' outputs, the exchange runs once.

Shapes: B batch, T time, H state heads, Hq query heads, R key features, D value width,
P = R + D channels, M basis functions, S segments. log_decay is theta = log Lambda, as (Re, Im)
pairs; (Re | Im) has M real parts and then M imaginary ones.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import chunkwise, context_parallel
from .chunkwise import Exchange, Start
from .library import no_second_derivative, tag_caches
from .triton_support import operand_dtype

# Tokens of all sequences times state heads that the plain form takes at a time for each thread, on a
# CPU or in float64; at least one head. Measured on a CPU with heads of 32 and 64.
HEAD_TOKENS = 2048
# The axis of the heads by a tensor's number of axes: 2 and 3 are tables, 4 tokens, 5 states.
HEAD_AXIS = {2: 0, 3: 0, 4: 2, 5: 1}
# Types of the devices that run Triton kernels. Tests add the CPU for Triton's interpreter.
KERNEL_DEVICES = ("cuda",)


def runs_as(backend: str, device: torch.device) -> str | None:
    """Returns how a backend runs on a device.

    torch.compile traces through this.

    Args:
        backend: A resolved backend: one of `BACKENDS` of the package, but not `auto`.
        device: The device of the inputs.

    Returns:
        `triton` (an op of the Triton kernels), `plain` (an op in plain PyTorch), or None for the
        backends without an op, `fft` and `reference`, which autograd records.
    """
    if backend == "chunkwise" and device.type in KERNEL_DEVICES:
        return "triton"
    return "plain" if backend in ("chunkwise", "chunkwise-torch") else None


def implementation(backend: str, device: torch.device) -> ModuleType:
    """Returns the module whose functions the ops call: `chunkwise` or `triton_chunkwise`.

    Both have functions of the same names, whose outputs are newly allocated and contiguous. In
    `triton_chunkwise`, `scan_forward` also returns `a`, the result of pass 1, [B, Hq, T, 2M] in the
    operands' dtype, after the states, and `scan_backward` takes it back.

    Args:
        backend: A resolved backend, which runs as an op (`runs_as`).
        device: The device of the inputs.
    """
    if runs_as(backend, device) == "plain":
        return chunkwise
    # Imported only if it runs: a machine without a GPU has no Triton.
    from . import triton_chunkwise

    return triton_chunkwise


def _call(backend: str, name: str, *args, **kw) -> tuple:
    """Calls a function of the implementation, for a few heads at a time if that is faster or smaller.

    Args:
        backend: A resolved backend, which runs as an op.
        name: The function's name in `chunkwise` and `triton_chunkwise`.
        *args: Its tensors, None for those that are not there. The first one gives the device.
        **kw: Its other arguments.

    Returns:
        The function's results.
    """
    device = args[0].device
    # An op runs below the autocast dispatch key: its fp32 products would be rounded to bf16.
    with torch.autocast(device.type, enabled=False):
        function = getattr(implementation(backend, device), name)

        # Plain PyTorch takes a few heads at a time if there are many tokens, B T of them, and no
        # other ranks.
        plain = runs_as(backend, device) == "plain"
        # An exchange with other ranks is for all heads together: the state before the tokens is
        # then a function, or the backward has an exchange.
        exchanged = any(callable(x) for x in args) or kw.get("exchange") is not None
        # On a CPU it is faster. In float64, with which other backends are compared, it saves memory
        # on small GPUs.
        by_heads = device.type == "cpu" or args[0].dtype == torch.float64
        if plain and by_heads and not exchanged:
            tokens = args[0].shape[:2].numel()
            heads = max(1, HEAD_TOKENS * torch.get_num_threads() // tokens)
            return _by_heads(function, heads, *args, **kw)
        return function(*args, **kw)


def _by_heads(function: Callable, heads: int, *args: Tensor | None, **kw) -> tuple:
    """Calls `function` for a few state heads at a time.

    Intermediate results of few heads stay in the processor's caches, and the next call reuses their
    memory. Those of all heads would be so large that the system maps new pages in every call.

    Args:
        function: One of the functions of `chunkwise`.
        heads: Number of state heads of a call; the last one may have fewer.
        *args: Its tensors, which are split by heads.
        **kw: Arguments without heads.

    Returns:
        The results of all heads together.
    """
    # log_decay is the first tensor of three axes, [H, M, 2], and says how many heads there are.
    H = next(len(x) for x in args if x is not None and x.ndim == 3)
    if heads >= H:
        return function(*args, **kw)
    # Split each tensor into those of the calls.
    number = -(-H // heads)  # rounded up
    calls = []
    for x in args:
        if x is None:
            calls.append([None] * number)
        else:
            calls.append(_split_heads(x, H, heads))

    # The results are copied to their place in those of all heads, which are allocated after the
    # first call, when their shapes are known.
    outputs: list[Tensor | None] = []
    for i, inputs in enumerate(zip(*calls, strict=True)):
        results = function(*inputs, **kw)
        if not outputs:
            outputs = [_empty_for_heads(x, H, heads) for x in results]
        for out, x in zip(outputs, results, strict=True):
            if out is not None:
                _split_heads(out, H, heads)[i].copy_(x)
    return tuple(outputs)


def _split_heads(x: Tensor, H: int, heads: int) -> tuple[Tensor, ...]:
    """Splits a tensor of H state heads into those of `heads` of them each.

    A state head may have several query heads.
    """
    axis = HEAD_AXIS[x.ndim]
    return x.split(heads * x.shape[axis] // H, axis)


def _empty_for_heads(x: Tensor | None, H: int, heads: int) -> Tensor | None:
    """Allocates memory for the results of H state heads, for x like that of `heads` of them."""
    if x is None:
        return None
    shape = list(x.shape)
    axis = HEAD_AXIS[x.ndim]
    shape[axis] = shape[axis] * H // heads
    return x.new_empty(shape)


@torch.library.custom_op("interdomain::send_state", mutates_args=())
def send_state(
    parts: list[Tensor], log_decay: Tensor, backend: str, documents: Tensor | None, group: str
) -> tuple[Tensor, Tensor]:
    """Computes the state that this rank's own tokens leave, and starts to send it to other ranks.

    It is collective: every rank of the group calls it.

    Args:
        parts: k and v, or the inputs z of the linear readout, each [B, T, H, width].
        log_decay: theta = log Lambda as real pairs, [H, M, 2].
        backend: A resolved backend.
        documents: The id of each token's document, [B, T] int32, or None for one document.
        group: Name of the process group.

    Returns:
        The message that is on its way, and the states that each of the S segments of time of the
        Triton kernels leaves by itself, [B, H, S, M, P, 2], empty for one segment and in plain
        PyTorch.
    """
    with torch.autocast(log_decay.device.type, enabled=False):
        module = implementation(backend, log_decay.device)
        local, segments = module.final_state(tuple(parts), log_decay, documents)
        T = parts[0].shape[1]
        sent = context_parallel.send(local, log_decay, T, documents, group)
        return _empty_for_none(sent, segments)


@send_state.register_fake
def _(parts, log_decay, backend, documents, group):
    """Makes results of `send_state` for tracing: only shapes and dtypes count.

    Its arguments are those of `send_state`.
    """
    B, _, H, _ = parts[0].shape
    M = log_decay.shape[1]
    # P channels of a state; S segments, of which plain PyTorch has no states.
    P = sum(x.shape[3] for x in parts)
    S = 1
    if runs_as(backend, log_decay.device) == "triton":
        S = implementation(backend, log_decay.device).segments(tuple(parts), log_decay)
    segments = (0,)
    if S > 1:
        segments = (B, H, S, M, P, 2)
    message = context_parallel.message(group, (B, H, M, P, 2))
    return log_decay.new_empty(message), log_decay.new_empty(segments)


def _start_state(sent: Tensor | None, state: Tensor | None, shape: tuple[int, ...]) -> Start:
    """Returns the state before the tokens, or a function that waits for it from another rank.

    Args:
        sent: The message of `send_state`, or None.
        state: The initial state of a scan without a group, or None for zeros.
        shape: The state's shape.
    """
    if sent is None:
        return state
    return partial(context_parallel.receive, sent, shape)


def _gradient_exchange(
    group: str, tokens: Tensor, log_decay: Tensor, documents: Tensor | None, d_final: Tensor | None
) -> Exchange | None:
    """Returns the exchange of the backward: None without a group.

    Args:
        group: Name of the process group; "" for none.
        tokens: k or z.
        log_decay: theta, [H, M, 2].
        documents: The id of each token's document, [B, T] int32, or None for one document.
        d_final: The gradient of this rank's final state if its caller used that state, else None.

    Returns:
        A function that takes the gradient of the state before this rank's tokens by their own
        outputs and starts the exchange. It returns another function, which waits for the gradient
        of the state after this rank's tokens.
    """
    if not group:
        return None

    def exchange(local: Tensor) -> Callable[[], Tensor]:
        sent = context_parallel.send(
            local, log_decay, tokens.shape[1], documents, group, reverse=True, d_final=d_final
        )

        def wait() -> Tensor:
            after = context_parallel.receive(sent, local.shape)
            if d_final is None:
                return after
            return after + d_final

        return wait

    return exchange


def _segment_states(local: Tensor | None) -> dict[str, Tensor]:
    """Returns the states of segments as a keyword argument, which plain PyTorch does not take."""
    if local is None or local.numel() == 0:
        return {}
    return {"local": local}


def _empty_for_none(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Returns the tensors, with empty ones in place of None: an op cannot return None."""
    like = next(x for x in tensors if x is not None)
    outputs = []
    for x in tensors:
        if x is None:
            x = like.new_empty(0)
        outputs.append(x)
    return tuple(outputs)


# Query readout


def run_scan(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor, initial_state: Tensor | None,
    backend: str, save: bool = False, documents: Tensor | None = None, need_final: bool = True, group: str = "",
    sent: Tensor | None = None, local: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes the scan of `interdomain_scan`, whose inputs were checked.

    Args:
        q: Query features, [B, T, Hq, R].
        k: Key features, [B, T, H, R].
        v: Values, [B, T, H, D].
        log_decay: theta = log Lambda as real pairs, [H, M, 2].
        mixing: W, [H, 2M, 2M].
        initial_state: The state before the first token, [B, H, M, P, 2], or None for zeros.
        backend: A resolved backend.
        save: True to return a, the result of pass 1, for the backward.
        documents: The id of each token's document, [B, T] int32, or None for one document.
        need_final: False if no final state is wanted.
        group: Name of the process group; "" for none.
        sent: The message of `send_state`, with a group.
        local: The states of segments of `send_state`, with a group.

    Returns:
        o [B, T, Hq, D], the final state, and for the backward a (with `save`) and the state that
        entered this rank's tokens (with `group`). A tensor that is not wanted is empty.
    """
    B, _, H, R = k.shape
    start = _start_state(sent, initial_state, (B, H, log_decay.shape[1], R + v.shape[3], 2))
    # Only the form in Triton returns a, as the last result: `pass_1` has one element or none.
    o, final, entered, *pass_1 = _call(
        backend, "scan_forward", q, k, v, log_decay, mixing, start, documents=documents, need_final=need_final,
        **_segment_states(local),
    )  # fmt: skip
    a = None
    if save:
        a = pass_1[0]
    # Without a group, `entered` is the caller's own tensor, which an op must not return.
    if not group:
        entered = None
    return _empty_for_none(o, final, a, entered)


scan = torch.library.custom_op("interdomain::scan", run_scan, mutates_args=())


@scan.register_fake
def _(
    q,
    k,
    v,
    log_decay,
    mixing,
    initial_state,
    backend,
    save=False,
    documents=None,
    need_final=True,
    group="",
    *sent,
):
    """Makes results of `scan` for tracing: only shapes and dtypes count.

    Its arguments are those of `scan`; `sent` holds `sent` and `local`.
    """
    B, T, H, R = k.shape
    Hq = q.shape[2]
    D = v.shape[3]
    M = log_decay.shape[1]
    a = v.new_empty(0)
    if save:
        a = q.new_empty((B, Hq, T, 2 * M), dtype=operand_dtype(q, k, v))
    final = v.new_empty(0)
    if need_final:
        final = log_decay.new_empty(B, H, M, R + D, 2)
    entered = v.new_empty(0)
    if group:
        entered = log_decay.new_empty(B, H, M, R + D, 2)
    return v.new_empty(B, T, Hq, D), final, a, entered


@torch.library.custom_op("interdomain::scan_backward", mutates_args=())
def scan_backward(
    d_o: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor,
    initial_state: Tensor | None, backend: str, a: Tensor | None = None,
    documents: Tensor | None = None, group: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes the gradients of `scan`.

    Args:
        d_o: The gradient of o, [B, T, Hq, D].
        d_final: The gradient of the final state, [B, H, M, P, 2], or None for zeros.
        q: Query features, [B, T, Hq, R].
        k: Key features, [B, T, H, R].
        v: Values, [B, T, H, D].
        log_decay: theta = log Lambda as real pairs, [H, M, 2].
        mixing: W, [H, 2M, 2M].
        initial_state: The state before the tokens, or None; with a group, the state that entered
            this rank's tokens.
        backend: A resolved backend.
        a: The result of pass 1, [B, Hq, T, 2M], if it was saved, else None.
        documents: The id of each token's document, [B, T] int32, or None for one document.
        group: Name of the process group; "" for none.

    Returns:
        The gradients of q, k, v, log_decay, mixing and initial_state, empty for a state that is not
        there.
    """
    # Only the form in Triton takes a.
    saved = {}
    if a is not None:
        saved["a"] = a
    gradients = _call(
        backend,
        "scan_backward",
        d_o,
        d_final,
        q,
        k,
        v,
        log_decay,
        mixing,
        initial_state,
        documents=documents,
        exchange=_gradient_exchange(group, k, log_decay, documents, d_final),
        **saved,
    )
    return _empty_for_none(*gradients)


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
    backend,
    a=None,
    documents=None,
    group="",
):
    """Makes results of `scan_backward` for tracing: only shapes and dtypes count.

    Its arguments are those of `scan_backward`.
    """
    return _fake_gradients(q, k, v, log_decay, mixing, initial_state)


def _fake_gradients(*inputs: Tensor | None) -> tuple[Tensor, ...]:
    """Returns tensors in the shapes of the inputs, empty for None."""
    gradients = []
    for x in inputs:
        if x is not None:
            x = x.new_empty(x.shape)
        gradients.append(x)
    return _empty_for_none(*gradients)


# Linear readout


def run_linear_scan(
    z: Tensor, log_decay: Tensor, readout: Tensor, initial_state: Tensor | None, backend: str,
    documents: Tensor | None = None, need_final: bool = True, group: str = "",
    sent: Tensor | None = None, local: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes the scan of `linear_scan`, whose inputs were checked.

    Args:
        z: The inputs, [B, T, H, P].
        log_decay: theta = log Lambda, [H, M, 2].
        readout: w as (Re w | Im w), [H, 2M].
        initial_state: The state before the first token, [B, H, M, P, 2], or None for zeros.
        backend: A resolved backend.
        documents: The id of each token's document, [B, T] int32, or None for one document.
        need_final: False if no final state is wanted.
        group: Name of the process group; "" for none.
        sent: The message of `send_state`, with a group.
        local: The states of segments of `send_state`, with a group.

    Returns:
        y [B, T, H, P], the final state, and the state that entered this rank's tokens (with
        `group`). A tensor that is not wanted is empty.
    """
    B, _, H, P = z.shape
    start = _start_state(sent, initial_state, (B, H, log_decay.shape[1], P, 2))
    y, final, entered = _call(
        backend, "linear_forward", z, log_decay, readout, start, documents=documents, need_final=need_final,
        **_segment_states(local),
    )  # fmt: skip
    # Without a group this is the caller's own tensor, which an op must not return.
    if not group:
        entered = None
    return _empty_for_none(y, final, entered)


linear_scan = torch.library.custom_op("interdomain::linear_scan", run_linear_scan, mutates_args=())


@linear_scan.register_fake
def _(
    z, log_decay, readout, initial_state, backend, documents=None, need_final=True, group="", *sent
):
    """Makes results of `linear_scan` for tracing: only shapes and dtypes count.

    Its arguments are those of `linear_scan`.
    """
    B, _, H, P = z.shape
    M = log_decay.shape[1]
    final = z.new_empty(0)
    if need_final:
        final = log_decay.new_empty(B, H, M, P, 2)
    entered = z.new_empty(0)
    if group:
        entered = log_decay.new_empty(B, H, M, P, 2)
    return z.new_empty(z.shape), final, entered


@torch.library.custom_op("interdomain::linear_scan_backward", mutates_args=())
def linear_scan_backward(
    d_y: Tensor, d_final: Tensor | None, z: Tensor, log_decay: Tensor, readout: Tensor, initial_state: Tensor | None,
    backend: str, documents: Tensor | None = None, group: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes the gradients of `linear_scan`.

    Args:
        d_y: The gradient of y, [B, T, H, P].
        d_final: The gradient of the final state, [B, H, M, P, 2], or None for zeros.
        z: The inputs, [B, T, H, P].
        log_decay: theta = log Lambda as real pairs, [H, M, 2].
        readout: w as (Re w | Im w), [H, 2M].
        initial_state: The state before the tokens, or None; with a group, the state that entered
            this rank's tokens.
        backend: A resolved backend.
        documents: The id of each token's document, [B, T] int32, or None for one document.
        group: Name of the process group; "" for none.

    Returns:
        The gradients of z, log_decay, readout and initial_state, empty for a state that is not
        there.
    """
    gradients = _call(
        backend,
        "linear_backward",
        d_y,
        d_final,
        z,
        log_decay,
        readout,
        initial_state,
        documents=documents,
        exchange=_gradient_exchange(group, z, log_decay, documents, d_final),
    )
    return _empty_for_none(*gradients)


@linear_scan_backward.register_fake
def _(d_y, d_final, z, log_decay, readout, initial_state, backend, documents=None, group=""):
    """Makes results of `linear_scan_backward` for tracing: only shapes and dtypes count.

    Its arguments are those of `linear_scan_backward`.
    """
    return _fake_gradients(z, log_decay, readout, initial_state)


# One token, by the fused kernels of triton_step.py: on CUDA, without gradients. An op whose name
# ends in an underscore overwrites the state, which must be contiguous.


@torch.library.custom_op("interdomain::scan_step_", mutates_args=("state",))
def scan_step_(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, mixing: Tensor, state: Tensor
) -> Tensor:
    """Computes one token of the scan, and overwrites `state`.

    Args:
        q: Query features of the token, [B, Hq, R].
        k: Its key features, [B, H, R].
        v: Its values, [B, H, D].
        decay: Lambda as real pairs, [H, M, 2], from `decay_factor`.
        mixing: W, [H, 2M, 2M]; or its first M rows, [H, M, 2M], if W is [[V, -Y], [Y, V]].
        state: X before the token, [B, H, M, P, 2] with P = R + D, contiguous; overwritten.

    Returns:
        o, [B, Hq, D] in v's dtype.
    """
    # Imported only if it runs: a machine without a GPU has no Triton.
    from . import triton_step

    return triton_step.scan_step(q, k, v, decay, mixing, state)


@torch.library.custom_op("interdomain::linear_step_", mutates_args=("state",))
def linear_step_(z: Tensor, decay: Tensor, readout: Tensor, state: Tensor) -> Tensor:
    """Computes one token of the linear scan, and overwrites `state`.

    Args:
        z: The token's inputs, [B, H, P].
        decay: Lambda as real pairs, [H, M, 2], from `decay_factor`.
        readout: w as (Re w | Im w), [H, 2M].
        state: X before the token, [B, H, M, P, 2], contiguous; overwritten.

    Returns:
        y, [B, H, P] in z's dtype.
    """
    # Imported only if it runs: a machine without a GPU has no Triton.
    from . import triton_step

    return triton_step.linear_one_step(z, decay, readout, state)


@scan_step_.register_fake
def _(q, k, v, decay, mixing, state):
    """Makes results of `scan_step_` for tracing: only shapes and dtypes count.

    Its arguments are those of `scan_step_`.
    """
    return v.new_empty(*q.shape[:2], v.shape[2])


@linear_step_.register_fake
def _(z, decay, readout, state):
    """Makes results of `linear_step_` for tracing: only shapes and dtypes count.

    Its arguments are those of `linear_step_`.
    """
    return z.new_empty(z.shape)


# Gradients


def _register_backward(op: Any, backward: Any, n_tokens: int) -> None:
    """Registers `backward` as the backward of `op`, for the scan and for the linear scan.

    Args:
        op: `scan` or `linear_scan`. Its arguments are the token tensors, log_decay, mixing or
            readout, and initial_state; then backend and flags, which get no gradient.
        backward: The op of its gradients.
        n_tokens: The number of token tensors: 3 for q, k and v, 1 for z.
    """
    # The inputs that may get a gradient are the first ones: tokens, two tables and the state.
    n_inputs = n_tokens + 3

    def setup(ctx, inputs, output):
        """Saves in `ctx` what the backward needs, after a call of the op."""
        # Unpack the op's other inputs (the last two are the message and the states of segments) and
        # its results. `save` and a exist for `scan` only: the lists have one element, or none.
        ctx.backend, *save, documents, need_final, ctx.group, _, _ = inputs[n_inputs:]
        out, final, *a, entered = output

        # Save the tensors: those of the inputs, but with a group the state that entered this rank
        # in place of the initial one; and a if it was computed to be saved.
        state = inputs[n_inputs - 1]
        if ctx.group:
            state = entered
        saved_a = a
        if not any(save):
            saved_a = [None] * len(a)
        ctx.save_for_backward(documents, *inputs[: n_inputs - 1], state, *saved_a)

        # Only o, and the final state if it is wanted, have gradients.
        no_gradient = [*a, entered]
        if not need_final:
            no_gradient.append(final)
        ctx.mark_non_differentiable(*no_gradient)
        ctx.set_materialize_grads(False)
        ctx.output_shape = out.shape

    def gradient(ctx, d_out, d_final, *_):
        """Returns the gradients of the op's arguments, from those of its first two results."""
        # In the order of `save_for_backward`: tokens, tables and the state; then a, if the op has
        # it.
        documents, *saved = ctx.saved_tensors
        tensors = saved[:n_inputs]
        # d_out is None if only the final state was used. The last token tensor has its dtype.
        if d_out is None:
            d_out = tensors[n_tokens - 1].new_zeros(ctx.output_shape)
        *grads, d_initial = backward(
            d_out, d_final, *tensors, ctx.backend, *saved[n_inputs:], documents, ctx.group
        )
        # With a group, the state before the tokens (tensors[-1]) came from another rank and is no
        # input. Backend and flags have no gradient.
        if tensors[-1] is None or ctx.group:
            d_initial = None
        flags = (None,) * (len(ctx.needs_input_grad) - n_inputs)
        return *grads, d_initial, *flags

    op.register_autograd(gradient, setup_context=setup)
    no_second_derivative(backward)


_register_backward(scan, scan_backward, n_tokens=3)
_register_backward(linear_scan, linear_scan_backward, n_tokens=1)
tag_caches(__name__)
