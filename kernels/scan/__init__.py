"""The scan: a complex-diagonal recurrence with a query-conditioned or a linear readout. This file is its only door.

Shapes: B batch, T time, H state heads, Hq = G H query heads, R key features, D value width, P = R + D channels, M basis
functions. Query heads h G .. h G + G - 1 read state head h (grouped KV); states are never repeated.
Derivation, notation, backends and tolerances: kernels/README.md.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from . import ops, parallel, reference, step, triton_support
from .documents import check_numbers
from .library import call, log_once
from .step import decay_factor
from .tables import (
    MAX_DECAY_PER_TOKEN,
    READOUTS,
    decay_exponent,
    input_gain,
    mixing_matrix,
    powers,
    readout_vector,
)

__all__ = [
    "BACKENDS",
    "MAX_DECAY_PER_TOKEN",
    "READOUTS",
    "decay_exponent",
    "decay_factor",
    "input_gain",
    "interdomain_scan",
    "interdomain_step",
    "linear_scan",
    "linear_step",
    "mixing_matrix",
    "powers",
    "readout_vector",
    "resolve_backend",
]

BACKENDS = ("auto", "chunkwise", "chunkwise-torch", "sequential", "parallel", "fft", "reference")

# Backends that autograd records where the ops do not run them (`ops.implements`).
_RECORDED = {
    "parallel": (parallel.scan_parallel, parallel.linear_parallel),
    "reference": (reference.scan_reference, reference.linear_reference),
}
# With the decay bounded at one e-fold per token, the tables of 64 tokens span e^-32 to e^32. Those of 128 tokens span
# e^-64 to e^64: finite in fp32, but small values times e^-64 fall among the denormals (measured: 2e-2 error in o).
_MAX_CHUNK = 64


def interdomain_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    mixing: Tensor,
    *,
    initial_state: Tensor | None = None,
    documents: Tensor | None = None,
    final_state: bool = True,
    backend: str = "auto",
    chunk_size: int | None = None,
    recompute: bool = True,
    check_documents: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Query-conditioned readout o_t = Re(q_t^T U_t^T Gamma_t) of the recurrence X_t = Lambda X_(t-1) + [k_t; v_t]^T.

    Args:
        q: [B, T, Hq, R]; k: [B, T, H, R]; v: [B, T, H, D]. bf16, fp16 or fp32, computed in fp32; or all fp64. On CUDA
            `chunkwise` and `parallel` multiply in bf16 where all three are half precision, sum in fp32, and have no fp64.
        log_decay: theta = log Lambda per token, [H, M, 2] as (real < 0, imag), fp32 (fp64 with fp64 inputs). Real
            parts are expected in [-MAX_DECAY_PER_TOKEN, 0), which `decay_exponent` guarantees; values are not checked.
        mixing: W, [H, 2M, 2M], from `mixing_matrix`, in log_decay's dtype.
        initial_state: X before the first token (unit gain), [B, H, M, R + D, 2] in log_decay's dtype; None for zeros.
        documents: [B, T] integers, where several documents are packed into a sequence: the number of each token's
            document, from 0 to 2^31 - 1, never falling along T. A state stops at the end of its document; the initial state is
            that of document 0, which need not be there, and the final one that of the last token's. None: one sequence.
        final_state: False where only o is wanted, as in training: no final state is written, none is kept by activation
            checkpointing, and None is returned in its place.
        backend: one of BACKENDS. `chunkwise` and `parallel` are Triton on CUDA and plain PyTorch elsewhere,
            `chunkwise-torch` plain PyTorch everywhere; `sequential` is the recurrence in Triton, on CUDA only. `auto` is
            `chunkwise`, or `chunkwise-torch` for what the Triton kernels do not have; an explicit one never falls back.
        chunk_size: tokens per chunk, 1 to 64 (in Triton 16, 32 or 64, as far as the tables fit); None for the default. Other
            backends ignore it.
        recompute: False keeps a for the backward of `chunkwise` and `parallel` on CUDA, 2M numbers per token and query head
            (256 bytes in bf16 at M = 64), and saves computing it twice. Results and gradients are the same, bit for bit.
        check_documents: False leaves out the check of the numbers (some five small operations) where a caller has counted them.
    Returns: (o [B, T, Hq, D] in v's dtype, the final state in initial_state's form), differentiable in every argument.
    Raises: ValueError if shapes, dtypes, devices, backend, chunk_size or documents are not as above (on CUDA, and compiled,
        wrong numbers of documents fail an asynchronous assertion); NotImplementedError for forward-mode differentiation of a
        backend other than `reference`.
    """
    if k.ndim != 4:
        raise ValueError(f"k has shape {tuple(k.shape)}; expected [B, T, H, R]")
    B, T, H, R = k.shape
    if v.ndim != 4:
        raise ValueError(f"v has shape {tuple(v.shape)}; expected [B, T, H, D] = [{B}, {T}, {H}, D]")
    D, M = v.shape[3], _basis_size(log_decay, H)
    _check_sizes(T=T, B=B, H=H, R=R, D=D, M=M)
    _check_shape("v", v, (B, T, H, D))
    _check_query(q, (B, T), H, R)
    _check_shape("mixing", mixing, (H, 2 * M, 2 * M))
    if initial_state is not None:
        _check_shape("initial_state", initial_state, (B, H, M, R + D, 2))
    _check_tensors({"q": q, "k": k, "v": v}, {"log_decay": log_decay, "mixing": mixing, "initial_state": initial_state})
    documents = _numbers(documents, k, check_documents)
    backend = _choose(backend, chunk_size, (q, k, v), M)
    if ops.implements(backend, k.device):
        save = not recompute and torch.is_grad_enabled() and ops.saves(backend, k.device)
        args = q, k, v, log_decay, mixing, initial_state, chunk_size or 0, backend, save, documents, final_state
        o, final, _ = call(ops.scan, *args)
    else:
        with torch.autocast(k.device.type, enabled=False):
            o, final = _RECORDED[backend][0](q, k, v, log_decay, mixing, initial_state, documents)
    return o, final if final_state else None


def linear_scan(
    z: Tensor,
    log_decay: Tensor,
    readout: Tensor,
    *,
    initial_state: Tensor | None = None,
    documents: Tensor | None = None,
    final_state: bool = True,
    backend: str = "auto",
    chunk_size: int | None = None,
    check_documents: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Linear readout y_t = Re(sum_m w_m X_t[m]) of the same recurrence: per head, one convolution for all channels.

    Args:
        z: [B, T, H, P], dtypes as in `interdomain_scan`.
        log_decay: [H, M, 2]. readout: w, [H, 2M] as (Re w | Im w), from `readout_vector`.
        initial_state: [B, H, M, P, 2] or None. documents, final_state, backend, chunk_size, check_documents: as in
            `interdomain_scan`.
    Returns: (y [B, T, H, P] in z's dtype, the final state). Raises: ValueError as there.
    """
    if z.ndim != 4:
        raise ValueError(f"z has shape {tuple(z.shape)}; expected [B, T, H, P]")
    B, T, H, P = z.shape
    M = _basis_size(log_decay, H)
    _check_sizes(T=T, B=B, H=H, P=P, M=M)
    _check_shape("readout", readout, (H, 2 * M))
    if initial_state is not None:
        _check_shape("initial_state", initial_state, (B, H, M, P, 2))
    _check_tensors({"z": z}, {"log_decay": log_decay, "readout": readout, "initial_state": initial_state})
    documents = _numbers(documents, z, check_documents)
    backend = _choose(backend, chunk_size, (z,), M)
    if ops.implements(backend, z.device):
        args = z, log_decay, readout, initial_state, chunk_size or 0, backend, documents, final_state
        y, final = call(ops.linear_scan, *args)
    else:
        with torch.autocast(z.device.type, enabled=False):
            y, final = _RECORDED[backend][1](z, log_decay, readout, initial_state, documents)
    return y, final if final_state else None


def interdomain_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    mixing: Tensor,
    state: Tensor,
    *,
    decay: Tensor | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token of `interdomain_scan`: fused kernels on CUDA where no gradient is recorded, else plain PyTorch.

    Args:
        q: [B, Hq, R]; k: [B, H, R]; v: [B, H, D]; state: [B, H, M, R + D, 2], from the scan or zeros (None is refused).
        mixing: W, [H, 2M, 2M], or its upper half [H, M, 2M] = [V | -Y] where W = [[V, -Y], [Y, V]], as the readout `complex`
            (and no other) has it: half the bytes.
        decay: `decay_factor(log_decay)`, to compute it once for many steps; None: computed here.
        inplace: write the new state over `state`, which must be contiguous, and return that; for CUDA graphs.
    Returns: (o [B, Hq, D] in v's dtype, new state; without `inplace` the one passed in is left as it was).
    """
    if k.ndim != 3:
        raise ValueError(f"k has shape {tuple(k.shape)}; expected [B, H, R]: a step has no time axis")
    B, H, R = k.shape
    if v.ndim != 3:
        raise ValueError(f"v has shape {tuple(v.shape)}; expected [B, H, D] = [{B}, {H}, D]")
    D, M = v.shape[2], _basis_size(log_decay, H)
    _check_shape("v", v, (B, H, D))
    _check_query(q, (B,), H, R)
    if mixing.shape != (H, M, 2 * M):
        _check_shape("mixing", mixing, (H, 2 * M, 2 * M))
    return _step(step.INTERDOMAIN, (q, k, v), log_decay, decay, mixing, state, (B, H, M, R + D, 2), inplace)


def linear_step(
    z: Tensor,
    log_decay: Tensor,
    readout: Tensor,
    state: Tensor,
    *,
    decay: Tensor | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token of `linear_scan`: z [B, H, P], state [B, H, M, P, 2] -> (y [B, H, P], new state); see the step above."""
    if z.ndim != 3:
        raise ValueError(f"z has shape {tuple(z.shape)}; expected [B, H, P]: a step has no time axis")
    B, H, P = z.shape
    M = _basis_size(log_decay, H)
    _check_shape("readout", readout, (H, 2 * M))
    return _step(step.LINEAR, (z,), log_decay, decay, readout, state, (B, H, M, P, 2), inplace)


def _step(
    forms: step.Forms,
    token: tuple[Tensor, ...],
    log_decay: Tensor,
    decay: Tensor | None,
    table: Tensor,
    state: Tensor,
    shape: tuple[int, ...],
    inplace: bool,
) -> tuple[Tensor, Tensor]:
    if state is None:
        raise ValueError(f"a step has no state to go on from: give one, {list(shape)}; zeros where a sequence begins")
    _check_shape("state", state, shape)
    tables = {"log_decay": log_decay, "decay": decay, forms.table: table, "state": state}
    _check_tensors(dict(zip(forms.token, token, strict=True)), tables)
    if decay is not None:
        _check_shape("decay", decay, log_decay.shape)
    if inplace:
        _check_in_place(state)
    device = state.device
    # Entering a context that changes nothing would cost a CPU as much as one of the products.
    aside = torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()
    with aside:
        args = *token, decay_factor(log_decay) if decay is None else decay, table, state
        recorded = torch.is_grad_enabled() and any(x.requires_grad for x in args)
        if _fused(device) and not recorded:  # the kernels record no gradient
            return (call(forms.fused_, *args), state) if inplace else call(forms.fused, *args)
        out, new = forms.plain(*args)
        return out, state.copy_(new) if inplace else new


def resolve_backend(
    device: torch.device | None,
    M: int,
    width: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    chunk_size: int | None = None,
) -> tuple[str, str]:
    """What `backend="auto"` runs, and the same in words, with the reason where it is not the Triton kernels.

    A process logs each answer for a device of its own once, also where torch.compile asks.

    Args:
        device: None for a GPU of another machine, of compute capability 8.0 or higher and with Triton.
        width: the larger of R and D; 0 for the linear readout, which takes every width.
        dtype: float64 if any of q, k, v is, else float32 if any is, else bfloat16.
    """
    chosen, said = "chunkwise", "chunkwise (Triton kernels)"
    if device is not None and device.type != "cuda":
        said = f"chunkwise (plain PyTorch on {device.type})"
    elif problem := triton_support.unsupported(device, dtype, M, width, chunk_size):
        chosen, said = "chunkwise-torch", f"chunkwise-torch (plain PyTorch): {problem}"
    if device is not None:
        log_once(f"interdomain.scan: backend 'auto' is {said}")
    return chosen, said


def _fused(device: torch.device) -> bool:
    return device.type == "cuda" and triton_support.missing(device) is None


def _choose(backend: str, chunk_size: int | None, inputs: tuple[Tensor, ...], M: int) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed: {', '.join(BACKENDS)}")
    if chunk_size is not None and not 1 <= chunk_size <= _MAX_CHUNK:
        raise ValueError(f"chunk_size is {chunk_size}; allowed: 1 to {_MAX_CHUNK}")
    device = inputs[0].device.type
    if backend == "sequential":
        problem = triton_support.missing(inputs[0].device) if device == "cuda" else f"the inputs are on {device}"
        if problem:
            raise ValueError(
                f"backend 'sequential' is Triton on CUDA and cannot run this: {problem}. backend='reference' is the same "
                "loop in plain PyTorch"
            )
    if backend not in ("auto", "chunkwise", "parallel"):
        return backend
    double = any(x.dtype == torch.float64 for x in inputs)
    dtype = torch.float64 if double else triton_support.operand_dtype(*inputs)
    width = max(x.shape[-1] for x in inputs) if len(inputs) > 1 else 0
    if backend == "auto":
        return resolve_backend(inputs[0].device, M, width, dtype=dtype, chunk_size=chunk_size)[0]
    problem = None
    if device == "cuda":
        problem = triton_support.unsupported(inputs[0].device, dtype, M, width, chunk_size)
    if problem:
        raise ValueError(
            f"backend {backend!r} cannot run this on CUDA: {problem}. backend='chunkwise-torch' can, in plain PyTorch; "
            "'auto' takes it by itself and says so"
        )
    return backend


def _basis_size(log_decay: Tensor, H: int) -> int:
    if log_decay.ndim != 3 or log_decay.shape[0] != H or log_decay.shape[2] != 2:
        raise ValueError(
            f"log_decay has shape {tuple(log_decay.shape)}; expected [H, M, 2] with H = {H}, "
            "the heads of k and v (or z); `decay_exponent` builds it"
        )
    return log_decay.shape[1]


def _numbers(documents: Tensor | None, k: Tensor, check: bool) -> Tensor | None:
    if documents is None:
        return None
    if tuple(documents.shape) != tuple(k.shape[:2]) or documents.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"documents is {documents.dtype} of shape {tuple(documents.shape)}; expected int32 or int64 of shape [B, T] = "
            f"{tuple(k.shape[:2])}: the number of each token's document"
        )
    if documents.device != k.device:
        raise ValueError(f"documents is on {documents.device} and k (or z) on {k.device}; move one of them")
    if check:
        check_numbers(documents)
    return documents.to(torch.int32).contiguous()


def _check_shape(name: str, x: Tensor, expected: tuple[int, ...]) -> None:
    if x.shape != expected:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {tuple(expected)} from k and log_decay (or z)")


def _check_query(q: Tensor, leading: tuple[int, ...], H: int, R: int) -> None:
    if q.ndim != len(leading) + 2 or q.shape[:-2] != leading or q.shape[-1] != R or not q.shape[-2] or q.shape[-2] % H:
        expected = ", ".join(str(n) for n in leading)
        raise ValueError(
            f"q has shape {tuple(q.shape)}; expected [{expected}, Hq, {R}] "
            f"with Hq a multiple of the {H} heads of k and v"
        )


def _check_sizes(**sizes: int) -> None:
    names = {"T": "token", "B": "sequence", "H": "head of k and v (or z)", "M": "basis function"}
    for name, size in sizes.items():
        if size == 0:
            raise ValueError(f"there is no {names.get(name, 'channel')} ({name} = 0); a scan needs at least one")


def _check_in_place(state: Tensor) -> None:
    if not state.is_contiguous():
        raise ValueError(f"state has strides {state.stride()}; to be updated in place it must be contiguous")


def _check_tensors(inputs: dict[str, Tensor], tables: dict[str, Tensor | None]) -> None:
    """Dtypes and devices: activations low precision or fp32 with fp32 tables, or everything fp64."""
    every = [x for x in (*inputs.values(), *tables.values()) if x is not None]
    if {x.dtype for x in every} in ({torch.float32}, {torch.float64}) and len({x.device for x in every}) == 1:
        return  # nearly all there is to do in a step on a CPU, where this counts
    double = any(x.dtype == torch.float64 for x in inputs.values())
    allowed = (torch.float64,) if double else (torch.bfloat16, torch.float16, torch.float32)
    table_dtype = torch.float64 if double else torch.float32
    device = next(iter(inputs.values())).device
    for name, x in inputs.items():
        if x.dtype not in allowed:
            raise ValueError(f"{name} is {x.dtype}; allowed: bfloat16, float16 or float32, or float64 for every tensor")
    for name, x in tables.items():
        if x is not None and x.dtype != table_dtype:
            raise ValueError(
                f"{name} is {x.dtype}; expected {table_dtype} with these inputs: "
                "decays, W and states stay in full precision"
            )
    for name, x in (*inputs.items(), *tables.items()):
        if x is not None and x.device != device:
            raise ValueError(f"{name} is on {x.device}; the first input is on {device}: move them to one device")
