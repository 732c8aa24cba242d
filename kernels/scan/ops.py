"""The scan and its backward as `torch.library` ops.

torch.compile sees one node for each, and activation checkpointing one name.

    torch.ops.interdomain.scan.default            torch.ops.interdomain.linear_scan.default
    torch.ops.interdomain.scan_backward.default   torch.ops.interdomain.linear_scan_backward.default
    torch.ops.interdomain.scan_step_.default      torch.ops.interdomain.linear_step_.default
    torch.ops.interdomain.send_state.default

`backend` says which module runs (`implementation`). What is compiled, listed or checkpointed does
not change with it. The ops trust their inputs; `interdomain.scan` checks them.

Ops return a fixed number of tensors; optional outputs (no state asked for, nothing saved) are
empty.

`group` names the process group whose ranks hold shards of the sequences, "" for none. `sent` is
then the result of `send_state`, which starts the exchange and does not wait: only the scan may read
it. The state that enters this shard is an output, which the backward saves: if activation
checkpointing keeps the ops' outputs, the exchange runs once.

Shapes: B batch, T time, H state heads, Hq query heads, R key features, D value width,
P = R + D channels, M basis functions, S segments.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import chunkwise, shards
from .chunkwise import Exchange, Start
from .library import no_second_derivative, tag_caches
from .triton_support import operand_dtype

# From this many tokens on the plain form takes one head after the other on a CPU, or in float64.
BY_HEAD = 512
# The axis of the heads by the number of axes: 2 and 3 are tables, 4 tokens, 5 states.
HEAD_AXIS = {2: 0, 3: 0, 4: 2, 5: 1}
# Types of the devices that run Triton kernels. Tests add the CPU for Triton's interpreter.
KERNEL_DEVICES = ("cuda",)


def runs_as(backend: str, device: torch.device) -> str | None:
    """Returns how a backend runs on a device.

    torch.compile traces through this.

    Args:
        backend: A resolved backend.
        device: The device of the inputs.

    Returns:
        `triton` or `plain`; None if no op runs it and autograd records it.
    """
    if backend == "chunkwise" and device.type in KERNEL_DEVICES:
        return "triton"
    return "plain" if backend in ("chunkwise", "chunkwise-torch") else None


def implementation(backend: str, device: torch.device) -> ModuleType:
    """Returns the module whose functions the ops call.

    Every output is newly allocated and contiguous. The module in Triton also returns `a`, [B, Hq,
    T, 2M] in the operands' dtype, after the states, and takes it back in the backward.

    Args:
        backend: A resolved backend.
        device: The device of the inputs.
    """
    if runs_as(backend, device) == "plain":
        return chunkwise
    from . import triton_chunkwise  # when it runs: a machine without a GPU has no Triton

    return triton_chunkwise


def _call(backend: str, name: str, *args, **kw) -> tuple:
    """Calls a function of the implementation, head by head if that is faster or smaller.

    Args:
        backend: A resolved backend.
        name: The function's name.
        *args: Its tensors. The first one gives the device.
        **kw: Its other arguments.
    """
    device = args[0].device

    # An op runs below the autocast dispatch key: its fp32 products would be rounded to bf16.
    with torch.autocast(device.type, enabled=False):
        function, plain = (
            getattr(implementation(backend, device), name),
            runs_as(backend, device) == "plain",
        )
        # An exchange is for all heads together.
        exchanged = any(callable(x) for x in args) or kw.get("leave") is not None
        # float64 is the judge of other backends, also on small GPUs: it has to save memory there.
        by_head = device.type == "cpu" or args[0].dtype == torch.float64
        if plain and by_head and not exchanged and args[0].shape[:2].numel() >= BY_HEAD:
            return _by_head(function, *args, **kw)
        return function(*args, **kw)


def _by_head(function: Callable, *args: Tensor | None, **kw) -> tuple:
    """Calls `function` for each state head by itself.

    All that it computes in between stays in the processor's caches. The next head reuses the
    memory, which at the size of all heads would be new pages of the system in every call.

    Args:
        function: One of the functions of `chunkwise`.
        *args: Its tensors, which are split by heads.
        **kw: Arguments without heads.

    Returns:
        The results of all heads together.
    """
    # log_decay is the first table, and says how many heads there are.
    H = next(len(x) for x in args if x is not None and x.ndim == 3)
    outputs: list[Tensor | None] = []
    heads = ([None] * H if x is None else x.chunk(H, HEAD_AXIS[x.ndim]) for x in args)
    # Each head's results are copied to their place in those of all heads.
    for h, inputs in enumerate(zip(*heads, strict=True)):
        results = function(*inputs, **kw)
        outputs = outputs or [_times(x, H) for x in results]
        for out, x in zip(outputs, results, strict=True):
            if out is not None:
                out.chunk(H, HEAD_AXIS[out.ndim])[h].copy_(x)
    return tuple(outputs)


def _times(x: Tensor | None, H: int) -> Tensor | None:
    """Allocates memory for H tensors like x along the axis of the heads."""
    if x is None:
        return None
    shape = list(x.shape)
    shape[HEAD_AXIS[x.ndim]] *= H
    return x.new_empty(shape)


@torch.library.custom_op("interdomain::send_state", mutates_args=())
def send_state(
    parts: list[Tensor], log_decay: Tensor, backend: str, documents: Tensor | None, group: str
) -> tuple[Tensor, Tensor]:
    """Starts the exchange of the state that the shard's own tokens leave. Collective.

    Args:
        parts: k and v, or z.
        log_decay: theta, [H, M, 2].
        backend: A resolved backend.
        documents: As in the scan.
        group: Name of the process group.

    Returns:
        The message on its way, and the second result of `final_state`: the states of segments.
    """
    with torch.autocast(log_decay.device.type, enabled=False):
        local, segments = implementation(backend, log_decay.device).final_state(
            tuple(parts), log_decay, documents
        )
        return _no_none(
            shards.send(local, log_decay, parts[0].shape[1], documents, group), segments
        )


@send_state.register_fake
def _(parts, log_decay, backend, documents, group):
    (B, _, H, _), M, P = parts[0].shape, log_decay.shape[1], sum(x.shape[3] for x in parts)
    S = 1
    if runs_as(backend, log_decay.device) == "triton":
        S = implementation(backend, log_decay.device).segments(tuple(parts), log_decay)
    segments = (B, H, S, M, P, 2) if S > 1 else (0,)
    return log_decay.new_empty(shards.message(group, (B, H, M, P, 2))), log_decay.new_empty(
        segments
    )


def _received(sent: Tensor | None, state: Tensor | None, shape: tuple[int, ...]) -> Start:
    """Returns the state before the tokens: the given one, or a function that waits for it.

    Args:
        sent: The message of `send_state`, or None.
        state: The given state, or None for zeros.
        shape: The state's shape.
    """
    return state if sent is None else partial(shards.receive, sent, shape)


def _leave(
    group: str, tokens: Tensor, log_decay: Tensor, documents: Tensor | None, d_final: Tensor | None
) -> Exchange | None:
    """Returns the exchange of the backward: None without a group.

    Args:
        group: Name of the process group; "" for none.
        tokens: k or z.
        log_decay: theta, [H, M, 2].
        documents: As in the scan.
        d_final: The gradient of this shard's final state, if it was used.

    Returns:
        A function that starts the exchange and returns another one, which waits for the gradient of
        the state after this shard.
    """
    if not group:
        return None

    def leave(local: Tensor) -> Callable[[], Tensor]:
        sent = shards.send(
            local, log_decay, tokens.shape[1], documents, group, reverse=True, d_final=d_final
        )

        def wait() -> Tensor:
            after = shards.receive(sent, local.shape)
            return after if d_final is None else after + d_final

        return wait

    return leave


def _present(local: Tensor | None) -> dict[str, Tensor]:
    """Returns the states of segments as a keyword argument. Plain PyTorch has none."""
    return {} if local is None or local.numel() == 0 else {"local": local}


def _no_none(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Returns the tensors, with empty ones in place of None."""
    like = next(x for x in tensors if x is not None)
    return tuple(like.new_empty(0) if x is None else x for x in tensors)


# Query readout


def run_scan(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor, initial_state: Tensor | None,
    backend: str, save: bool = False, documents: Tensor | None = None, need_final: bool = True, group: str = "",
    sent: Tensor | None = None, local: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes the scan of `interdomain_scan`, whose inputs were checked.

    Args:
        q: As in `interdomain_scan`, and so are the next tensors.
        k: [B, T, H, R].
        v: [B, T, H, D].
        log_decay: [H, M, 2].
        mixing: [H, 2M, 2M].
        initial_state: [B, H, M, P, 2], or None for zeros.
        backend: A resolved backend.
        save: True to keep `a` for the backward.
        documents: As in `interdomain_scan`.
        need_final: False if no final state is wanted.
        group: Name of the process group; "" for none.
        sent: The message of `send_state`, with a group.
        local: The states of segments of `send_state`, with a group.

    Returns:
        o, the final state, and for the backward `a` (with `save`) and the state that enters the
        shard (with `group`).
    """
    B, _, H, R = k.shape
    start = _received(sent, initial_state, (B, H, log_decay.shape[1], R + v.shape[3], 2))
    o, final, entered, *a = _call(
        backend, "scan_forward", q, k, v, log_decay, mixing, start, documents=documents, need_final=need_final,
        **_present(local),
    )  # fmt: skip
    return _no_none(o, final, a[0] if save else None, entered if group else None)


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
    B, T, H, R = k.shape
    Hq, D, M = q.shape[2], v.shape[3], log_decay.shape[1]
    a = q.new_empty((B, Hq, T, 2 * M), dtype=operand_dtype(q, k, v)) if save else v.new_empty(0)
    final, entered = (
        log_decay.new_empty(B, H, M, R + D, 2) if x else v.new_empty(0) for x in (need_final, group)
    )
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
        d_final: The gradient of the final state, or None.
        q: As in `run_scan`, and so are the next tensors.
        k: [B, T, H, R].
        v: [B, T, H, D].
        log_decay: [H, M, 2].
        mixing: [H, 2M, 2M].
        initial_state: The state before the tokens; with a group the one that entered the shard.
        backend: A resolved backend.
        a: The result of pass 1, if it was saved.
        documents: As in `interdomain_scan`.
        group: Name of the process group; "" for none.

    Returns:
        The gradients of q, k, v, log_decay, mixing and initial_state.
    """
    inputs = q, k, v, log_decay, mixing, initial_state
    saved = {} if a is None else {"a": a}
    leave = _leave(group, k, log_decay, documents, d_final)
    return _no_none(
        *_call(
            backend,
            "scan_backward",
            d_o,
            d_final,
            *inputs,
            documents=documents,
            leave=leave,
            **saved,
        )
    )


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
    return _fake_gradients(q, k, v, log_decay, mixing, initial_state)


def _fake_gradients(*inputs: Tensor | None) -> tuple[Tensor, ...]:
    """Returns tensors in the shapes of the inputs, empty for None."""
    return _no_none(*(None if x is None else x.new_empty(x.shape) for x in inputs))


# Linear readout


def run_linear_scan(
    z: Tensor, log_decay: Tensor, readout: Tensor, initial_state: Tensor | None, backend: str,
    documents: Tensor | None = None, need_final: bool = True, group: str = "",
    sent: Tensor | None = None, local: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes the scan of `linear_scan`, whose inputs were checked.

    Args:
        z: [B, T, H, P].
        log_decay: [H, M, 2].
        readout: [H, 2M].
        initial_state: [B, H, M, P, 2], or None for zeros.
        backend: A resolved backend.
        documents: As in `run_scan`, and so are the next arguments.
        need_final: False if no final state is wanted.
        group: Name of the process group; "" for none.
        sent: The message of `send_state`.
        local: The states of segments of `send_state`.

    Returns:
        y, the final state, and the state that enters the shard (with `group`).
    """
    B, _, H, P = z.shape
    start = _received(sent, initial_state, (B, H, log_decay.shape[1], P, 2))
    y, final, entered = _call(
        backend, "linear_forward", z, log_decay, readout, start, documents=documents, need_final=need_final,
        **_present(local),
    )  # fmt: skip
    return _no_none(y, final, entered if group else None)


linear_scan = torch.library.custom_op("interdomain::linear_scan", run_linear_scan, mutates_args=())


@linear_scan.register_fake
def _(
    z, log_decay, readout, initial_state, backend, documents=None, need_final=True, group="", *sent
):
    (B, _, H, P), M = z.shape, log_decay.shape[1]
    states = (
        log_decay.new_empty(B, H, M, P, 2) if x else z.new_empty(0) for x in (need_final, group)
    )
    return z.new_empty(z.shape), *states


@torch.library.custom_op("interdomain::linear_scan_backward", mutates_args=())
def linear_scan_backward(
    d_y: Tensor, d_final: Tensor | None, z: Tensor, log_decay: Tensor, readout: Tensor, initial_state: Tensor | None,
    backend: str, documents: Tensor | None = None, group: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes the gradients of `linear_scan`.

    Args:
        d_y: The gradient of y, [B, T, H, P].
        d_final: The gradient of the final state, or None.
        z: [B, T, H, P].
        log_decay: [H, M, 2].
        readout: [H, 2M].
        initial_state: As in `scan_backward`, and so are the next arguments.
        backend: A resolved backend.
        documents: As in `interdomain_scan`.
        group: Name of the process group; "" for none.

    Returns:
        The gradients of z, log_decay, readout and initial_state.
    """
    inputs = z, log_decay, readout, initial_state
    leave = _leave(group, z, log_decay, documents, d_final)
    return _no_none(
        *_call(backend, "linear_backward", d_y, d_final, *inputs, documents=documents, leave=leave)
    )


@linear_scan_backward.register_fake
def _(d_y, d_final, z, log_decay, readout, initial_state, backend, documents=None, group=""):
    return _fake_gradients(z, log_decay, readout, initial_state)


# One token, by the fused kernels of triton_step.py: on CUDA, without gradients. An op whose name
# ends in an underscore overwrites the state, which must be contiguous.


@torch.library.custom_op("interdomain::scan_step_", mutates_args=("state",))
def scan_step_(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, mixing: Tensor, state: Tensor
) -> Tensor:
    """Computes one token of the scan, and overwrites `state`.

    Args:
        q: [B, Hq, R].
        k: [B, H, R].
        v: [B, H, D].
        decay: Lambda, [H, M, 2], from `decay_factor`.
        mixing: [H, 2M, 2M], or its upper half.
        state: [B, H, M, P, 2], contiguous.

    Returns:
        o, [B, Hq, D].
    """
    from . import triton_step

    return triton_step.scan_step(q, k, v, decay, mixing, state)


@torch.library.custom_op("interdomain::linear_step_", mutates_args=("state",))
def linear_step_(z: Tensor, decay: Tensor, readout: Tensor, state: Tensor) -> Tensor:
    """Computes one token of the linear scan, and overwrites `state`.

    Args:
        z: [B, H, P].
        decay: Lambda, [H, M, 2], from `decay_factor`.
        readout: [H, 2M].
        state: [B, H, M, P, 2], contiguous.

    Returns:
        y, [B, H, P].
    """
    from . import triton_step

    return triton_step.linear_one_step(z, decay, readout, state)


@scan_step_.register_fake
def _(q, k, v, decay, mixing, state):
    return v.new_empty(*q.shape[:2], v.shape[2])


@linear_step_.register_fake
def _(z, decay, readout, state):
    return z.new_empty(z.shape)


# Gradients


def _differentiable(op: Any, backward: Any, n: int) -> None:
    """Registers the backward of an op.

    Args:
        op: `scan` or `linear_scan`. Its arguments are n tokens, log_decay, mixing or readout, and
            initial_state; then backend and flags, which get no gradient.
        backward: The op of its gradients.
        n: The number of token tensors.
    """

    def setup(ctx, inputs, output):
        # What the backward needs: the tensors, `a` if it was saved, and the state before the
        # tokens.
        ctx.backend, *save, documents, need_final, ctx.group, _, _ = inputs[n + 3 :]
        out, final, *a, entered = output
        state = entered if ctx.group else inputs[n + 2]
        ctx.save_for_backward(
            documents, *inputs[: n + 2], state, *(x if any(save) else None for x in a)
        )
        ctx.mark_non_differentiable(*a, entered, *(() if need_final else (final,)))
        ctx.set_materialize_grads(False)
        ctx.output_shape = out.shape

    def gradient(ctx, d_out, d_final, *_):
        # Tokens, tables and the state; `a` comes after them.
        documents, *saved = ctx.saved_tensors
        tensors = saved[: n + 3]
        if d_out is None:  # only the state was used
            d_out = tensors[n - 1].new_zeros(ctx.output_shape)
        *grads, d_initial = backward(
            d_out, d_final, *tensors, ctx.backend, *saved[n + 3 :], documents, ctx.group
        )
        # The state before a shard is no input. Backend and flags have no gradient.
        d_initial = None if tensors[-1] is None or ctx.group else d_initial
        return *grads, d_initial, *(None,) * (len(ctx.needs_input_grad) - n - 3)

    op.register_autograd(gradient, setup_context=setup)
    no_second_derivative(backward)


_differentiable(scan, scan_backward, 3)
_differentiable(linear_scan, linear_scan_backward, 1)
tag_caches(__name__)
