"""Input features: what stands between the projections and the scan, in one pass over memory. This file is its only door.

Shapes: B batch, T time, H heads, R head_dim, E = H R channels, W convolution width.
Derivation, bytes and budget: kernels/README.md.
"""

import functools
from contextlib import nullcontext

import torch
from torch import Tensor

from interdomain.scan.documents import check_numbers
from interdomain.scan.library import call, log_once

from . import ops, plain, support

__all__ = ["BACKENDS", "input_features", "input_features_step", "resolve_backend"]

BACKENDS = ("auto", "triton", "torch")


def input_features(
    x: Tensor,
    head_dim: int,
    *,
    conv: tuple[Tensor, Tensor] | None = None,
    past: Tensor | None = None,
    documents: Tensor | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    silu: bool = False,
    norm: tuple[Tensor, Tensor] | None = None,
    eps: float = 1e-5,
    backend: str = "auto",
    check_documents: bool = True,
) -> Tensor:
    """Short convolution, RoPE, SiLU with l2 norm, RMSNorm with a bias per head: each if asked for, in this order.

    Args:
        x: a projection's output, [B, T, E]; bf16, fp16, fp32 or fp64. Computed in fp32 (fp64) and rounded once.
        conv: (weight [E, 1, W] or [E, W], bias [E]), causal and depthwise (SC of paper eq. 10).
        past: the W - 1 inputs before x, [B, W - 1, E]; None for zeros.
        documents: [B, T] integers, where several documents are packed into a sequence: the number of each token's document,
            from 0 to 2^31 - 1, never falling along T. The convolution sees its own document alone; `past` is of document 0.
        rope: (cos, sin), each [T, 1, R/2] or [B, T, 1, R/2]; the halves of R form the pairs.
        silu: SiLU(x) / max(||SiLU(x)||_2, 1e-6) over R (paper eq. 10).
        norm: (scale [R], shift [H, R]) of x / sqrt(mean(x^2) + eps) * scale + shift (paper eq. 12).
        backend: `triton` is one kernel, on CUDA only; `torch` plain PyTorch; `auto` is `triton` where that can run, else
            `torch`. An explicit one never falls back.
        check_documents: as in the scan.
    Returns: [B, T, H, R] in x's dtype, a view of x if nothing is asked for. Differentiable in x, conv, past and norm, for
        which only the inputs are kept.
    Raises: ValueError if shapes, dtypes, devices, backend or documents are not as above (documents as in the scan).
    """
    if x.ndim != 3 or head_dim < 1 or x.shape[2] % head_dim:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected [B, T, H R] with R = head_dim = {head_dim}")
    _check_dtype(x.dtype)
    B, T, E = x.shape
    H, R = E // head_dim, head_dim
    if T == 0:
        raise ValueError("the sequence has no token (T = 0); there must be at least one")
    W = 0
    if conv is not None:
        W = conv[0].shape[-1]
        if W == 0:
            raise ValueError("conv has no tap (W = 0); leave it out where nothing is convolved")
        conv = conv[0].flatten(1) if conv[0].ndim == 3 else conv[0], conv[1]
        _check("conv", conv, ((E, W), (E,)), x)
    if past is not None:
        if conv is None:
            raise ValueError("past is given without conv: only the convolution looks back")
        _check("past", (past,), ((B, W - 1, E),), x)
    if documents is not None:
        if tuple(documents.shape) != (B, T) or documents.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"documents is {documents.dtype} of shape {tuple(documents.shape)}; expected int32 or int64 of shape "
                f"[B, T] = {(B, T)}: the number of each token's document"
            )
        _check("documents", (documents,), ((B, T),), x)
        if check_documents:
            check_numbers(documents)
    if rope is not None:
        if R % 2:
            raise ValueError(f"head_dim is {R}; RoPE rotates pairs, so it must be even")
        rows = (B,) if rope[0].ndim == 4 else ()
        _check("rope", rope, ((*rows, T, 1, R // 2),) * 2, x)
    if norm is not None:
        _check("norm", norm, ((R,), (H, R)), x)
    backend = _choose(backend, x, head_dim, W, rope)
    if not (conv or rope or norm or silu):
        return x.unflatten(-1, (H, R))
    args = x, R, *(conv or (None, None)), past, documents, *(rope or (None, None)), silu, *(norm or (None, None)), eps
    with torch.autocast(x.device.type, enabled=False):
        return call(ops.features, *args) if backend == "triton" else plain.features(*args)


def input_features_step(
    x: Tensor,
    head_dim: int,
    *,
    conv: tuple[Tensor, Tensor] | None = None,
    past: Tensor | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    rotated: int = 0,
    silu: int = 0,
    norm: tuple[Tensor, Tensor] | None = None,
    eps: float = 1e-5,
    backend: str = "auto",
) -> Tensor:
    """`input_features` of one token for all projections of a layer at once, without gradients: one kernel on CUDA.

    Args:
        x: the projections' outputs one after the other (q, k, v), [B, E] with E = H R; may be OVERWRITTEN by what is returned.
        conv: (weight [W, C], bias [C]) of the first C channels; the weight transposed, its last row that of the token itself.
        past: their W - 1 inputs before x, [B, W - 1, C], OVERWRITTEN with the last W - 1, x among them.
        rope: (cos, sin) for the first `rotated` heads, each [1, 1, R/2] or [B, 1, 1, R/2].
        silu: how many of the first heads have SiLU and the l2 norm.
        norm: (scale, shift), each [N, R], of the last N heads.
        backend: as there.
    Returns: [B, H, R] in x's dtype. Raises: ValueError as there, and where a gradient would be recorded.
    """
    given = x, past, *(conv or (None, None)), *(norm or (None, None)), *(rope or (None, None))
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
        raise ValueError("a step records no gradient: use torch.no_grad(), or input_features for one token")
    check = _check_step if torch.compiler.is_compiling() else _check_step_once
    check(head_dim, rotated, silu, x.dtype, tuple([None if t is None else (t.shape, t.device) for t in given]))
    W = 0 if conv is None else conv[0].shape[0]
    fused = _choose(backend, x, head_dim, W, rope) == "triton"
    args = (
        x,
        head_dim,
        *(conv or (None, None)),
        past,
        *(rope or (None, None)),
        rotated,
        silu,
        *(norm or (None, None)),
        eps,
    )
    device = x.device.type
    # Entering a context that changes nothing would cost a CPU as much as several of the operations.
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
        return call(ops.features_step, *args) if fused else plain.step(*args)


def _check_step(R: int, rotated: int, silu: int, dtype: torch.dtype, given: tuple) -> None:
    """given: (shape, device) of x, past, the convolution's weight and bias, the norm's scale and shift, cos, sin; or None."""
    x, past, weight, bias, scale, shift, cos, sin = given
    if len(x[0]) != 2 or x[0][1] % R:
        raise ValueError(f"x has shape {tuple(x[0])}; expected [B, H R] with R = head_dim = {R}")
    _check_dtype(dtype)
    B, H = x[0][0], x[0][1] // R
    if (weight is None) != (past is None):
        raise ValueError("conv and past are given together or not at all: a step without a past is no step")
    C = N = 0
    expected = {}
    if weight is not None:
        W, C = weight[0]
        expected["conv"] = (weight, (W, C)), (bias, (C,))
        expected["past"] = ((past, (B, W - 1, C)),)
    if scale is not None:
        N = scale[0][0]
        expected["norm"] = (scale, (N, R)), (shift, (N, R))
    if cos is not None:
        shape = *((B,) if len(cos[0]) == 4 else ()), 1, 1, R // 2
        expected["rope"] = (cos, shape), (sin, shape)
    for name, tensors in expected.items():
        if any(got[0] != shape for got, shape in tensors):
            got, wanted = tuple(tuple(t[0]) for t, _ in tensors), tuple(shape for _, shape in tensors)
            raise ValueError(f"{name} has shapes {got}; expected {wanted} with x {tuple(x[0])}")
        for got, _ in tensors:
            if got[1] != x[1]:
                raise ValueError(f"{name} is on {got[1]} and x on {x[1]}: move them to one device")
    if C % R or max(C // R, rotated, silu, N) > H or (rotated > 0) != (cos is not None) or (rotated and R % 2):
        raise ValueError(
            f"x holds {H} heads of {R}; asked for: convolution of {C} channels, RoPE (pairs) of {rotated} heads, SiLU of "
            f"{silu}, norm of {N}"
        )


# What was in order is in order, and at one token on a CPU the look costs as much as several of the operations.
_check_step_once = functools.lru_cache(256)(_check_step)


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise ValueError(f"x is {dtype}; allowed: bfloat16, float16, float32 or float64")


def _check(name: str, tensors: tuple[Tensor, ...], shapes: tuple[tuple[int, ...], ...], x: Tensor) -> None:
    for tensor, shape in zip(tensors, shapes, strict=True):
        if tensor.shape != shape:
            got = tuple(tuple(t.shape) for t in tensors)
            raise ValueError(f"{name} has shapes {got}; expected {shapes} with x {tuple(x.shape)}")
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device} and x on {x.device}: move them to one device")


def _choose(backend: str, x: Tensor, head_dim: int, W: int, rope: tuple[Tensor, Tensor] | None) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed: {', '.join(BACKENDS)}")
    if backend == "torch":
        return backend
    gradient = rope is not None and any(table.requires_grad for table in rope)
    if backend == "auto":
        return resolve_backend(x.device, head_dim, W, dtype=x.dtype, rope_gradient=gradient)[0]
    problem = support.unsupported(x.device, x.dtype, head_dim, W, gradient)
    if problem:
        raise ValueError(
            f"backend 'triton' cannot run this: {problem}. backend='torch' can, in plain PyTorch; 'auto' takes it by "
            "itself and says so"
        )
    return backend


def resolve_backend(
    device: torch.device | None,
    head_dim: int,
    width: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    rope_gradient: bool = False,
) -> tuple[str, str]:
    """What `backend="auto"` runs, and the same in words: as `interdomain.scan.resolve_backend`, logged likewise.

    width: of the convolution, 0 for none. rope_gradient: whether the rotary tables require one.
    """
    problem = support.unsupported(device, dtype, head_dim, width, rope_gradient)
    chosen, said = ("torch", f"torch (plain PyTorch): {problem}") if problem else ("triton", "triton (one kernel)")
    if device is not None:
        log_once(f"interdomain.features: backend 'auto' is {said}")
    return chosen, said
