"""The scan: a complex-diagonal recurrence with a query-conditioned or a linear readout.

Shapes: B batch, T time, H state heads, Hq = G H query heads, R key features, D value width, P = R +
D channels of a state, M basis functions. Query heads h G to h G + G - 1 read state head h (grouped
KV); states are never repeated. Complex numbers are real pairs in the last axis. Derivation,
notation, backends and tolerances: docs/kernels.md.
"""

# Modules. reference.py is what tests compare all others with. chunkwise*.py is plain PyTorch, and
# triton_*.py has the kernels for CUDA (imported when they run); ops.py makes `torch.library` ops of
# the two. fft.py is plain PyTorch that autograd records. step.py computes one token. plain.py is
# for exported models and graphs. tables.py computes W, readouts and powers of the decay. packing.py
# is for packed documents, context_parallel.py for sequences on several ranks. This package imports
# torch and triton, nothing else.

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import fft, ops, reference, step, triton_support
from .library import first_derivatives_only, log_once, only_values
from .packing import checked_documents
from .step import decay_factor
from .tables import (
    CHUNK,
    MAX_DECAY_PER_TOKEN,
    READOUTS,
    decay_exponent,
    initial_A,
    input_gain,
    mixing_matrix,
    powers,
    readout_vector,
)

__all__ = [
    "BACKENDS",
    "CHUNK",
    "INTERFACE",
    "MAX_DECAY_PER_TOKEN",
    "READOUTS",
    "SentState",
    "decay_exponent",
    "decay_factor",
    "initial_A",
    "input_gain",
    "interdomain_scan",
    "interdomain_step",
    "linear_scan",
    "linear_step",
    "mixing_matrix",
    "powers",
    "readout_vector",
    "resolve_backend",
    "send_state",
]

# The version of the functions that exported models call here and in interdomain.features. Raise it,
# and the one in mixers/kernels.py, with every change of their arguments, layouts or results.
INTERFACE = 1
BACKENDS = ("auto", "chunkwise", "chunkwise-torch", "fft", "reference")

# Backends that autograd records, because no op runs them (`ops.runs_as`).
_RECORDED = {
    "fft": (fft.scan_fft, fft.linear_fft),
    "reference": (reference.scan_reference, reference.linear_reference),
}


class SentState(NamedTuple):
    """The state of this rank's tokens on its way to the other ranks, from `send_state`.

    `interdomain_scan` or `linear_scan` of the same tokens takes it as its `group`. Nothing else may
    read it.

    Attributes:
        group: Name of the process group.
        message: The result of `context_parallel.send`.
        local: The states that the segments of the Triton kernels leave when each starts from zero;
            empty in plain PyTorch.
    """

    group: str
    message: Tensor
    local: Tensor


def interdomain_scan(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor, *, initial_state: Tensor | None = None,
    documents: Tensor | None = None, final_state: bool = True, backend: str = "auto", recompute: bool = True,
    check_documents: bool = True, group: str | SentState = "",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Reads a complex-diagonal recurrence through each token's query (paper eqs. 11 and 13).

    X_t = Lambda X_(t-1) + [k_t; v_t]^T is the state, with Lambda = exp(log_decay). The output is
    o_t = Re(q_t^T U_t^T Gamma_t), where W holds the matrices that turn X_t into U_t and Gamma_t.

    Args:
        q: Query features, [B, T, Hq, R]. bf16, fp16 or fp32, computed in fp32; or fp64, then all
            tensors are. If q, k and v are half precision, `chunkwise` on CUDA multiplies in bf16
            and sums in fp32. It has no fp64 there.
        k: Key features, [B, T, H, R].
        v: Values, [B, T, H, D].
        log_decay: theta = log Lambda per token, [H, M, 2] as (real < 0, imaginary in radians),
            fp32. Real parts are expected in [-MAX_DECAY_PER_TOKEN, 0), which `decay_exponent`
            guarantees. On a CPU the backend `chunkwise` refuses real parts below -1.36 (fp64: -11).
            Elsewhere, and compiled, it returns wrong results or NaN for them, because the host does
            not wait for the values of log_decay.
        mixing: W, [H, 2M, 2M], from `mixing_matrix`, in log_decay's dtype.
        initial_state: X before the first token (unit gain), [B, H, M, R + D, 2] in log_decay's
            dtype. None means zeros.
        documents: The id of each token's document, [B, T] integers, if sequences hold several
            packed documents: from 0 to 2^31 - 1, never falling along T. A state stops at the end of
            its document. The initial state belongs to document 0, which need not be there, and the
            final one to the last token's document. None means one document. Values must be finite:
            a mask of zeros keeps documents apart, and 0 times NaN is NaN, so one such value spoils
            other documents of its sequence.
        final_state: False if only o is wanted, as in training. Then no final state is written.
        backend: One of BACKENDS. `chunkwise` is Triton on CUDA and plain PyTorch elsewhere. The
            others are plain PyTorch everywhere; `reference` is the paper's sequential scan. `auto`
            is `chunkwise`, or `chunkwise-torch` for what the Triton kernels lack. An explicit
            backend never falls back.
        recompute: False saves the result of pass 1 for the backward of `chunkwise` on CUDA: 2M
            values per token and query head (256 bytes in bf16 at M = 64). True computes it again.
            Results are bitwise identical.
        check_documents: False leaves out the check of the values of `documents` (about five small
            operations).
        group: Name of a process group for context parallelism; "" for none. Each of its ranks, in
            order, has T consecutive tokens of the same sequences. Results are those of the whole
            sequences. Document 0, or everything without documents, goes on from the rank before.
            Gradients of log_decay and mixing are this rank's part, to be summed over ranks. Every
            rank must run the forward and the backward. With a group there is no initial_state, and
            the backend is `chunkwise` or `chunkwise-torch`. It may also be the result of
            `send_state` for k and v: computations after that call, such as that of q, hide the
            exchange.

    Returns:
        o: Outputs, [B, T, Hq, D] in v's dtype, differentiable in every tensor.
        state: X after the last token, as initial_state, differentiable too. None without
            `final_state`.

    Raises:
        ValueError: Shapes, dtypes, devices, backend, documents or group are not as above. On CUDA,
            and compiled, wrong values of `documents` fail an asynchronous assertion instead.
        NotImplementedError: A derivative of `chunkwise` by forward mode or torch.func, or a second
            one.
    """
    # Check that the inputs fit together.
    B, T, H, R = _sizes("k", k, "B", "T", "H", "R")
    D = v.shape[-1]
    M = _basis_size(log_decay, H)
    _check_shape("v", v, (B, T, H, D))
    _check_query(q, (B, T), H, R)
    _check_shape("mixing", mixing, (H, 2 * M, 2 * M))
    _check_shape("initial_state", initial_state, (B, H, M, R + D, 2))
    _check_tensors(
        {"q": q, "k": k, "v": v},
        {"log_decay": log_decay, "mixing": mixing, "initial_state": initial_state},
    )
    documents = checked_documents(documents, k, check_documents)

    # Choose the backend, and how it runs on this device: "triton" or "plain" (an op), or None.
    backend = _choose_backend(backend, (q, k, v), M)
    _check_group(group, backend, k.device, initial_state)
    inputs = q, k, v, log_decay, mixing, initial_state
    runs_as = ops.runs_as(backend, k.device)
    if runs_as is None:
        # Plain PyTorch, which autograd records.
        scan_recorded, _ = _RECORDED[backend]
        with torch.autocast(k.device.type, enabled=False):
            o, final = scan_recorded(*inputs, documents)
    else:
        # An op with a backward of its own. If only values are wanted, its function is called
        # directly. `save` keeps the result of pass 1 for the backward.
        _check_decay(log_decay)
        first_derivatives_only(*inputs)
        save = not recompute and torch.is_grad_enabled() and runs_as == "triton"
        run = ops.scan
        if runs_as == "plain" and only_values(*inputs):
            run = ops.run_scan
        # With a group, the state of k and v is on its way to the other ranks; `local` are the
        # states of segments that were computed for it.
        group_name, message, local = _sent_state(group, (k, v), log_decay, backend, documents)
        if triton_support.operand_dtype(q, k, v) != triton_support.operand_dtype(k, v):
            # The states of segments are of no use: with q, the operands have another dtype, and the
            # segments another length.
            local = None
        o, final, *_ = run(
            *inputs, backend, save, documents, final_state, group_name, message, local
        )
    if not final_state:
        return o, None
    return o, final


def linear_scan(
    z: Tensor, log_decay: Tensor, readout: Tensor, *, initial_state: Tensor | None = None,
    documents: Tensor | None = None, final_state: bool = True, backend: str = "auto", check_documents: bool = True,
    group: str | SentState = "",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Reads the same recurrence through fixed weights (the linear readout of S4D).

    y_t = Re(sum_m w_m X_t[m]): one convolution per head, the same for all channels.

    Args:
        z: Inputs, [B, T, H, P], in the dtypes of q in `interdomain_scan`.
        log_decay: theta, [H, M, 2], as in `interdomain_scan`.
        readout: w, [H, 2M] as (Re w | Im w), from `readout_vector`.
        initial_state: X before the first token, [B, H, M, P, 2]. None means zeros.
        documents: The id of each token's document, [B, T] integers, as in `interdomain_scan`. None
            means one document.
        final_state: False if only y is wanted, as in training. Then no final state is written.
        backend: One of BACKENDS, as in `interdomain_scan`.
        check_documents: False leaves out the check of the values of `documents`.
        group: Name of a process group for context parallelism, "" for none, or the result of
            `send_state` for z; as in `interdomain_scan`.

    Returns:
        y: Outputs, [B, T, H, P] in z's dtype.
        state: X after the last token, as initial_state. None without `final_state`.

    Raises:
        ValueError: Shapes, dtypes, devices, backend, documents or group are not as above. On CUDA,
            and compiled, wrong values of `documents` fail an asynchronous assertion instead.
        NotImplementedError: A derivative of `chunkwise` by forward mode or torch.func, or a second
            one.
    """
    # Check that the inputs fit together.
    B, _, H, P = _sizes("z", z, "B", "T", "H", "P")
    M = _basis_size(log_decay, H)
    _check_shape("readout", readout, (H, 2 * M))
    _check_shape("initial_state", initial_state, (B, H, M, P, 2))
    _check_tensors(
        {"z": z}, {"log_decay": log_decay, "readout": readout, "initial_state": initial_state}
    )
    documents = checked_documents(documents, z, check_documents)

    # Choose the backend, and how it runs on this device: "triton" or "plain" (an op), or None.
    backend = _choose_backend(backend, (z,), M)
    _check_group(group, backend, z.device, initial_state)
    inputs = z, log_decay, readout, initial_state
    runs_as = ops.runs_as(backend, z.device)
    if runs_as is None:
        # Plain PyTorch, which autograd records.
        _, linear_recorded = _RECORDED[backend]
        with torch.autocast(z.device.type, enabled=False):
            y, final = linear_recorded(*inputs, documents)
    else:
        # An op with a backward of its own. If only values are wanted, its function is called
        # directly. With a group, the state of z is on its way to the other ranks.
        _check_decay(log_decay)
        first_derivatives_only(*inputs)
        run = ops.linear_scan
        if runs_as == "plain" and only_values(*inputs):
            run = ops.run_linear_scan
        sent = _sent_state(group, (z,), log_decay, backend, documents)
        y, final, _ = run(*inputs, backend, documents, final_state, *sent)
    if not final_state:
        return y, None
    return y, final


def send_state(
    *parts: Tensor, log_decay: Tensor, group: str, documents: Tensor | None = None, backend: str = "auto",
    check_documents: bool = True,
) -> SentState:  # fmt: skip
    """Starts the exchange of states between ranks, ahead of the scan that needs it.

    It is for context parallelism, and collective: every rank of the group calls it. No gradient
    goes through this function: the scan computes all gradients.

    Args:
        *parts: k and v of `interdomain_scan`, or z of `linear_scan`.
        log_decay: theta = log Lambda as real pairs, [H, M, 2], the same as in the call of the scan.
        group: Name of the process group.
        documents: The id of each token's document, the same as in the call of the scan.
        backend: One of BACKENDS, the same as in the call of the scan.
        check_documents: False leaves out the check of the values of `documents`.

    Returns:
        The state on its way, which the scan takes as its `group`.

    Raises:
        ValueError: Shapes, dtypes, devices, backend, documents or group are not as in the scan.
    """
    # Check that the inputs fit together. parts[0] is k or z, and parts[1], if it is there, v.
    B, T, H, _ = _sizes("k or z", parts[0], "B", "T", "H", "R")
    for x in parts[1:]:
        _check_shape("v", x, (B, T, H, x.shape[-1]))
    M = _basis_size(log_decay, H)
    _check_tensors({"k or z": parts[0], "v": parts[-1]}, {"log_decay": log_decay})
    documents = checked_documents(documents, parts[0], check_documents)
    backend = _choose_backend(backend, parts, M)
    _check_group(group, backend, log_decay.device, None)

    # The scan's own op computes the gradients of the exchange.
    values = [x.detach() for x in parts]
    message, local = ops.send_state(values, log_decay.detach(), backend, documents, group)
    return SentState(group, message, local)


def _sent_state(
    group: str | SentState,
    parts: tuple[Tensor, ...],
    log_decay: Tensor,
    backend: str,
    documents: Tensor | None,
) -> tuple[Any, Any, Any]:
    """Returns the state on its way to other ranks, which it starts if `send_state` has not.

    Args:
        group: The scan's argument: a name, "" or the result of `send_state`.
        parts: k and v, or z.
        log_decay: theta, [H, M, 2].
        backend: The resolved backend.
        documents: The checked documents.

    Returns:
        The last arguments of an op: the group's name, the message on its way and the states of
        segments; ("", None, None) without a group.
    """
    if isinstance(group, str) and group:
        return send_state(
            *parts,
            log_decay=log_decay,
            group=group,
            documents=documents,
            backend=backend,
            check_documents=False,
        )
    if not group:
        return "", None, None
    return group


def interdomain_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor, state: Tensor, *,
    decay: Tensor | None = None, inplace: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes one token of `interdomain_scan`.

    On CUDA these are two fused kernels if no gradient is recorded; otherwise it is plain PyTorch.

    Args:
        q: Query features, [B, Hq, R].
        k: Key features, [B, H, R].
        v: Values, [B, H, D].
        log_decay: theta, [H, M, 2], as in `interdomain_scan`.
        mixing: W, [H, 2M, 2M]. Or its upper half, [H, M, 2M] = [V | -Y] for W = [[V, -Y], [Y, V]],
            which only the readout `complex` has: half the bytes.
        state: X before the token, [B, H, M, R + D, 2], from the scan; zeros at the start of a
            sequence.
        decay: `decay_factor(log_decay)`, to compute it once for many steps. None computes it here.
        inplace: True to write the new state over `state`, which must be contiguous; for CUDA
            graphs.

    Returns:
        o: The output, [B, Hq, D] in v's dtype.
        state: The new state. Without `inplace` the one given is not changed.

    Raises:
        ValueError: Shapes, dtypes or devices are not as above, or there is no state.
    """
    B, H, R = _sizes("k", k, "B", "H", "R")
    D = v.shape[-1]
    M = _basis_size(log_decay, H)
    _check_shape("v", v, (B, H, D))
    _check_query(q, (B,), H, R)
    if mixing.shape != (H, M, 2 * M):
        _check_shape("mixing", mixing, (H, 2 * M, 2 * M))
    tokens = {"q": q, "k": k, "v": v}
    tables = {"log_decay": log_decay, "decay": decay, "mixing": mixing}
    return _step(
        step.scan_step, ops.scan_step_, tokens, tables, state, (B, H, M, R + D, 2), inplace
    )


def linear_step(
    z: Tensor,
    log_decay: Tensor,
    readout: Tensor,
    state: Tensor,
    *,
    decay: Tensor | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes one token of `linear_scan`.

    On CUDA this is one fused kernel if no gradient is recorded; otherwise it is plain PyTorch.

    Args:
        z: Inputs, [B, H, P].
        log_decay: theta = log Lambda as real pairs, [H, M, 2], as in `interdomain_scan`.
        readout: w, [H, 2M] as (Re w | Im w), from `readout_vector`.
        state: X before the token, [B, H, M, P, 2], from the scan; zeros at the start of a sequence.
        decay: `decay_factor(log_decay)`, to compute it once for many steps. None computes it here.
        inplace: True to write the new state over `state`, which must be contiguous; for CUDA
            graphs.

    Returns:
        y: The output, [B, H, P] in z's dtype.
        state: The new state. Without `inplace` the one given is not changed.

    Raises:
        ValueError: Shapes, dtypes or devices are not as above, or there is no state.
    """
    B, H, P = _sizes("z", z, "B", "H", "P")
    M = _basis_size(log_decay, H)
    _check_shape("readout", readout, (H, 2 * M))
    tables = {"log_decay": log_decay, "decay": decay, "readout": readout}
    return _step(
        step.linear_one_step, ops.linear_step_, {"z": z}, tables, state, (B, H, M, P, 2), inplace
    )


def _step(
    plain: Callable,
    fused: Callable,
    tokens: dict,
    tables: dict,
    state: Tensor,
    shape: tuple[int, ...],
    inplace: bool,
) -> tuple[Tensor, Tensor]:
    """Checks the tensors of a step, and runs it: on Triton kernels if they can, else in PyTorch.

    A step is the scan of one token.

    Args:
        plain: The step in plain PyTorch; it overwrites the state.
        fused: The op of the Triton kernels, called in the same way.
        tokens: The tensors of the token by name.
        tables: log_decay, decay and the mixing matrix or readout vector, by name and in this order.
        state: The state before the token.
        shape: The shape that the state must have.
        inplace: True to write the new state over `state`.

    Returns:
        The output, and the new state.

    Raises:
        ValueError: There is no state, or a tensor has another shape, dtype or device than expected.
    """
    if state is None:
        raise ValueError(
            f"a step has no state to go on from: give one, {list(shape)}; zeros where a sequence begins"
        )
    _check_shape("state", state, shape)
    _check_tensors(tokens, {**tables, "state": state})
    log_decay, decay, table = tables.values()
    _check_shape("decay", decay, log_decay.shape)
    if inplace and not state.is_contiguous():
        raise ValueError(
            f"state has strides {state.stride()}; to be updated in place it must be contiguous"
        )

    # Products stay in the tensors' own precision.
    with torch.autocast(state.device.type, enabled=False):
        if decay is None:
            decay = decay_factor(log_decay)
        args = *tokens.values(), decay, table

        # The kernels run on a GPU if no gradient is recorded, else plain PyTorch.
        run = plain
        recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (*args, state))
        on_gpu = state.device.type in ops.KERNEL_DEVICES
        if on_gpu and triton_support.missing(state.device) is None and not recorded:
            first_derivatives_only(*args, state)
            run = fused

        # Both overwrite the state that they are called with: without `inplace`, a copy.
        new = state
        if not inplace:
            new = state.clone(memory_format=torch.contiguous_format)
        return run(*args, new), new


def resolve_backend(
    device: torch.device | None, M: int, width: int, *, dtype: torch.dtype = torch.bfloat16
) -> tuple[str, str]:
    """Returns the backend that `auto` runs, for `interdomain_scan` and for `linear_scan`.

    A process logs each answer for its own devices once, also if torch.compile asks.

    Args:
        device: The device of the inputs. None means a GPU of another machine, of compute capability
            8.0 or higher and with Triton.
        M: Number of basis functions.
        width: The larger of the widths of keys (R) and values (D) of a head; 0 for `linear_scan`,
            which takes every width.
        dtype: float64 if any of q, k, v is, else float32 if any is, else bfloat16.

    Returns:
        backend: `chunkwise` or `chunkwise-torch`.
        description: A description of the backend, with the reason if the Triton kernels do not run.
    """
    # `chunkwise` is the Triton kernels on a GPU, and plain PyTorch on other devices. Plain PyTorch
    # on a GPU has a name of its own, for inputs that the kernels do not take.
    backend = "chunkwise"
    description = "chunkwise (Triton kernels)"
    if device is not None and device.type not in ops.KERNEL_DEVICES:
        description = f"chunkwise (plain PyTorch on {device.type})"
    elif problem := triton_support.unsupported(device, dtype, M, width):
        backend = "chunkwise-torch"
        description = f"chunkwise-torch (plain PyTorch): {problem}"
    if device is not None:
        log_once(f"interdomain.scan: backend 'auto' is {description}")
    return backend, description


def _choose_backend(backend: str, inputs: tuple[Tensor, ...], M: int) -> str:
    """Returns the backend that runs: the best one for `auto`, else the given one, if it can run.

    Args:
        backend: One of BACKENDS, the argument of a scan.
        inputs: The tokens: q, k and v, or k and v, or z.
        M: Number of basis functions.

    Raises:
        ValueError: There is no such backend, or an explicit one cannot run these inputs.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed: {', '.join(BACKENDS)}")
    device = inputs[0].device
    dtype = triton_support.operand_dtype(*inputs)
    # The larger of the widths of keys and values. The linear readout, which has one input, takes
    # every width.
    width = 0
    if len(inputs) > 1:
        width = max(x.shape[-1] for x in inputs)
    if backend == "auto":
        return resolve_backend(device, M, width, dtype=dtype)[0]
    if ops.runs_as(backend, device) == "triton":
        problem = triton_support.unsupported(device, dtype, M, width)
        if problem:
            raise ValueError(
                f"backend {backend!r} cannot run this on CUDA: {problem}. backend='chunkwise-torch' can, in plain PyTorch; "
                "'auto' takes it and logs that"
            )
    return backend


def _check_group(
    group: str | SentState, backend: str, device: torch.device, initial_state: Tensor | None
) -> None:
    """Checks the argument `group` of a scan against its backend and its initial state.

    Args:
        group: A name, "" for none, or the result of `send_state`.
        backend: The resolved backend.
        device: The device of the inputs.
        initial_state: The scan's initial state, or None.
    """
    if group and initial_state is not None:
        raise ValueError(
            "initial_state with a group: the state comes from the ranks before this one; give None"
        )
    if group and ops.runs_as(backend, device) is None:
        raise ValueError(
            f"backend {backend!r} takes no group on {device.type}: 'chunkwise' does, and 'chunkwise-torch'"
        )


def _basis_size(log_decay: Tensor, H: int) -> int:
    """Checks the shape of log_decay, [H, M, 2], for H state heads. Returns M."""
    if log_decay.ndim != 3 or log_decay.shape[0] != H or log_decay.shape[2] != 2:
        raise ValueError(
            f"log_decay has shape {tuple(log_decay.shape)}; expected [H, M, 2] with H = {H}, "
            "the heads of k and v (or z); `decay_exponent` builds it"
        )
    if log_decay.shape[1] == 0:
        raise ValueError(
            f"log_decay has shape {tuple(log_decay.shape)}: M = 0; there must be at least one basis function"
        )
    return log_decay.shape[1]


def _check_decay(log_decay: Tensor) -> None:
    """Checks that powers of the decay over a chunk do not underflow.

    It reads values only if nothing has to wait for them: in eager mode on a CPU. NaN passes.

    Args:
        log_decay: log Lambda, [..., 2]: the real part, which is log |Lambda|, and the imaginary part.

    Raises:
        ValueError: |Lambda|^CHUNK is too small for the dtype. A chunk has CHUNK tokens.
    """
    if torch.compiler.is_compiling() or log_decay.device.type != "cpu":
        return
    # Fake tensors have no values, and tensors within vmap have no single ones.
    if (
        type(log_decay) not in (Tensor, torch.nn.Parameter)
        or torch._C._are_functorch_transforms_active()
    ):
        return
    dtype = log_decay.dtype
    fastest = min(log_decay.detach()[..., 0].flatten().tolist())
    # The smallest number that the dtype holds to full precision is the least |Lambda|^CHUNK.
    limit = math.log(torch.finfo(dtype).tiny) / CHUNK
    if fastest < limit:
        raise ValueError(
            f"log_decay has a real part of {fastest:.3g} per token; 'chunkwise' takes {limit:.3g} and above in {dtype}: "
            f"over a chunk of {CHUNK} tokens the powers of faster decays underflow. `decay_exponent` stays at "
            f"-{MAX_DECAY_PER_TOKEN:.0f} and above; backend='reference' and 'fft' take any decay"
        )


def _sizes(name: str, x: Tensor, *axes: str) -> torch.Size:
    """Checks the number of axes of an input. Returns its shape.

    Args:
        name: The argument's name, for the error.
        x: The tensor.
        *axes: The names of its axes.
    """
    if x.ndim != len(axes):
        step = ": a step has no time axis"
        if "T" in axes:
            step = ""
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected [{', '.join(axes)}]{step}")
    if 0 in x.shape:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; there must be at least one of each of {', '.join(axes)}"
        )
    return x.shape


def _check_shape(name: str, x: Tensor | None, expected: tuple[int, ...]) -> None:
    """Checks the shape of the argument `name`; None passes."""
    if x is not None and x.shape != expected:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; expected {tuple(expected)} from k and log_decay (or z)"
        )


def _check_query(q: Tensor, leading: tuple[int, ...], H: int, R: int) -> None:
    """Checks the shape of q, [*leading, Hq, R] with Hq a multiple of H.

    Args:
        q: Query features.
        leading: (B, T), or (B,) for a step.
        H: State heads.
        R: Key features.
    """
    if (
        q.ndim != len(leading) + 2
        or q.shape[:-2] != leading
        or q.shape[-1] != R
        or not q.shape[-2]
        or q.shape[-2] % H
    ):
        expected = ", ".join(str(n) for n in leading)
        raise ValueError(
            f"q has shape {tuple(q.shape)}; expected [{expected}, Hq, {R}] "
            f"with Hq a multiple of the {H} heads of k and v"
        )


def _check_tensors(inputs: dict[str, Tensor], tables: dict[str, Tensor | None]) -> None:
    """Checks dtypes and devices: fp32 tables with inputs of lower precision or fp32, or all fp64.

    Args:
        inputs: Tokens by name.
        tables: Tables and states by name; None is left out.
    """
    token_dtypes = (torch.bfloat16, torch.float16, torch.float32)
    table_dtypes = (torch.float32,)
    if any(x.dtype == torch.float64 for x in inputs.values()):
        token_dtypes = (torch.float64,)
        table_dtypes = (torch.float64,)
    device = next(iter(inputs.values())).device
    for name, x in (inputs | tables).items():
        # Decays, W and states stay in full precision.
        allowed = token_dtypes
        if name in tables:
            allowed = table_dtypes
        if x is not None and x.dtype not in allowed:
            raise ValueError(
                f"{name} is {x.dtype}; allowed with these inputs: {', '.join(map(str, allowed))} (or float64 for every tensor)"
            )
        if x is not None and x.device != device:
            raise ValueError(
                f"{name} is on {x.device}; the first input is on {device}: move them to one device"
            )
