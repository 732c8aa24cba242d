"""Input features: the operations between the projections and the scan, in one pass over memory.

Shapes: B batch, T time, H heads, R head_dim, E = H R channels, W convolution width, C convolved
channels and N normalised heads of a step. Derivation and bytes: docs/api/features.md. Registers:
docs/measurements.md.
"""

# Modules. plain.py is plain PyTorch. triton_*.py has the kernels for CUDA (imported when they run),
# and ops.py their `torch.library` ops. support.py says what the kernels can run. This package
# imports torch, triton and `interdomain.scan`; plugin/ may import it.

import torch
from torch import Tensor

from interdomain.scan.library import first_derivatives_only, log_once
from interdomain.scan.packing import checked_documents

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
    """Applies the operations between a projection and the scan, each only if it is asked for.

    The order is: short convolution, RoPE, SiLU with l2 norm, RMSNorm with a bias per head.

    Args:
        x: A projection's output, [B, T, E]; bf16, fp16, fp32 or fp64. Computed in fp32 (fp64) and
            rounded once.
        head_dim: R, the channels of a head.
        conv: (weight [E, 1, W] or [E, W], bias [E]) of the causal depthwise convolution (SC of
            paper eq. 10).
        past: The W - 1 inputs before x, [B, W - 1, E]. None means zeros.
        documents: The id of each token's document, [B, T] integers, if several documents are packed
            into a sequence: from 0 to 2^31 - 1, never falling along T. The convolution sees only
            its own document; `past` belongs to document 0.
        rope: (cos, sin), each [T, 1, R/2] or [B, T, 1, R/2]. The two halves of R form the pairs.
        silu: True for SiLU(x) / max(||SiLU(x)||_2, 1e-6) over R (paper eq. 10).
        norm: (scale [R], shift [H, R]) of x / sqrt(mean(x^2) + eps) * scale + shift (paper eq. 12).
        eps: The eps of the RMSNorm.
        backend: `triton` is one kernel, on CUDA only. `torch` is plain PyTorch. `auto` is `triton`
            if that can run, else `torch`. An explicit backend never falls back.
        check_documents: False leaves out the check of the values of `documents`.

    Returns:
        [B, T, H, R] in x's dtype; a view of x if nothing is asked for. Differentiable in x, conv,
        past and norm. The backward keeps only the inputs.

    Raises:
        ValueError: Shapes, dtypes, devices, backend or documents are not as above. On CUDA, and
            compiled, wrong values of `documents` fail an asynchronous assertion instead.
    """
    if x.ndim != 3 or head_dim < 1 or x.shape[2] % head_dim:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; expected [B, T, H R] with R = head_dim = {head_dim}"
        )
    _check_dtype(x.dtype)

    # Check that all tensors fit together: heads and channels of x, then one argument after the
    # other.
    B, T, E = x.shape
    R = head_dim
    H = E // R
    if T == 0:
        raise ValueError("the sequence has no token (T = 0); there must be at least one")
    W = 0
    if conv is not None:
        W = conv[0].shape[-1]
        if W == 0:
            raise ValueError("conv has no tap (W = 0); leave it out where nothing is convolved")
        weight, bias = conv
        if weight.ndim == 3:
            weight = weight.flatten(1)
        conv = (weight, bias)
        _check("conv", conv, ((E, W), (E,)), x)
    if past is not None:
        if conv is None:
            raise ValueError("past is given without conv: only the convolution looks back")
        _check("past", (past,), ((B, W - 1, E),), x)
    documents = checked_documents(documents, x, check_documents)
    if rope is not None:
        if R % 2:
            raise ValueError(f"head_dim is {R}; RoPE rotates pairs, so it must be even")
        # cos and sin have the same shape.
        _check("rope", rope, (_rope_shape(rope, B, T, R),) * 2, x)
    if norm is not None:
        _check("norm", norm, ((R,), (H, R)), x)

    # If nothing is asked for, the result is a view, [B, T, E] -> [B, T, H, R].
    backend = _choose_backend(backend, x, head_dim, W, rope)
    if not (conv or rope or norm or silu):
        return x.unflatten(-1, (H, R))

    # Run an op with a backward of its own, or plain PyTorch, which autograd records. Both choose
    # their own precision, so that autocast must not change it.
    weight, bias = conv or (None, None)
    cos, sin = rope or (None, None)
    scale, shift = norm or (None, None)
    args = (x, R, weight, bias, past, documents, cos, sin, silu, scale, shift, eps)
    with torch.autocast(x.device.type, enabled=False):
        if backend == "triton":
            first_derivatives_only(x, weight, bias, past, scale, shift)
            return ops.features(*args)
        return plain.features(*args)


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
    """Applies `input_features` to one token, for all projections of a layer at once.

    `backend` chooses between one kernel, on CUDA, and plain PyTorch. Neither records gradients.

    Args:
        x: The projections' outputs one after the other (q, k, v), [B, E] with E = H R, in a dtype
            of `input_features`. It may be OVERWRITTEN by the result.
        head_dim: R, the channels of a head.
        conv: (weight [W, C], bias [C]) of the first C channels, C a multiple of R. The weight is
            transposed; its last row is that of the token itself. conv and past are given together
            or not at all.
        past: The W - 1 inputs of these channels before x, [B, W - 1, C]. It is OVERWRITTEN with the
            last W - 1 inputs, x among them.
        rope: (cos, sin) for the first `rotated` heads, each [1, 1, R/2] or [B, 1, 1, R/2]; given if
            and only if `rotated` is above 0.
        rotated: Number of the first heads that RoPE rotates.
        silu: Number of the first heads with SiLU and the l2 norm.
        norm: (scale, shift), each [N, R], of the last N heads.
        eps: The eps of the RMSNorm.
        backend: `triton` is one kernel, on CUDA only. `torch` is plain PyTorch. `auto` is `triton`
            if that can run, else `torch`. An explicit backend never falls back.

    Returns:
        [B, H, R] in x's dtype.

    Raises:
        ValueError: Shapes, dtypes, devices or backend are not as above, the arguments do not fit
            together, or a gradient would be recorded.
    """
    weight, bias = conv or (None, None)
    cos, sin = rope or (None, None)
    scale, shift = norm or (None, None)
    tensors = (x, past, weight, bias, scale, shift, cos, sin)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise ValueError(
            "a step records no gradient: use torch.no_grad(), or input_features for one token"
        )
    _check_step(x, head_dim, conv, past, rope, rotated, silu, norm)

    # Run one kernel, or plain PyTorch. Both choose their own precision, so that autocast must not
    # change it.
    W = 0
    if weight is not None:
        W = weight.shape[0]
    args = (x, head_dim, weight, bias, past, cos, sin, rotated, silu, scale, shift, eps)
    with torch.autocast(x.device.type, enabled=False):
        if _choose_backend(backend, x, head_dim, W, rope) == "triton":
            return ops.features_step(*args)
        return plain.step(*args)


def _check_step(
    x: Tensor,
    R: int,
    conv: tuple[Tensor, Tensor] | None,
    past: Tensor | None,
    rope: tuple[Tensor, Tensor] | None,
    rotated: int,
    silu: int,
    norm: tuple[Tensor, Tensor] | None,
) -> None:
    """Checks the arguments of `input_features_step`, which have the same names; R is head_dim.

    Raises:
        ValueError: They do not fit together.
    """
    if x.ndim != 2 or x.shape[1] % R:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected [B, H R] with R = head_dim = {R}")
    _check_dtype(x.dtype)
    B = x.shape[0]
    H = x.shape[1] // R
    # The shapes of each argument. C channels are convolved, and N heads are normalised.
    C = 0
    N = 0
    if (conv is None) != (past is None):
        raise ValueError(
            "conv and past are given together or not at all: a step without a past is no step"
        )
    if conv is not None and past is not None:
        W, C = conv[0].shape
        _check("conv", conv, ((W, C), (C,)), x)
        _check("past", (past,), ((B, W - 1, C),), x)
    if norm is not None:
        N = norm[0].shape[0]
        _check("norm", norm, ((N, R), (N, R)), x)
    if rope is not None:
        # cos and sin have the same shape.
        _check("rope", rope, (_rope_shape(rope, B, 1, R),) * 2, x)

    # The numbers of heads. Each stage applies to whole heads of x, at most to all H. RoPE comes
    # with its tables, and rotates pairs.
    if (
        C % R
        or max(C // R, rotated, silu, N) > H
        or (rotated > 0) != (rope is not None)
        or (rotated and R % 2)
    ):
        raise ValueError(
            f"x holds {H} heads of {R}; asked for: convolution of {C} channels, RoPE (pairs) of {rotated} heads, SiLU of "
            f"{silu}, norm of {N}"
        )


def _rope_shape(rope: tuple[Tensor, Tensor], B: int, T: int, R: int) -> tuple[int, ...]:
    """Returns the shape that each of the two rotary tables must have.

    Args:
        rope: (cos, sin). With four axes each sequence has tables of its own, with three all share
            them.
        B: Sequences.
        T: Tokens of a sequence.
        R: Channels of a head.
    """
    if rope[0].ndim == 4:
        return (B, T, 1, R // 2)
    return (T, 1, R // 2)


def _check_dtype(dtype: torch.dtype) -> None:
    """Checks the dtype of x."""
    if dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise ValueError(f"x is {dtype}; allowed: bfloat16, float16, float32 or float64")


def _check(
    name: str, tensors: tuple[Tensor, ...], shapes: tuple[tuple[int, ...], ...], x: Tensor
) -> None:
    """Checks shapes and devices of the tensors of one argument, such as those of `conv`.

    Args:
        name: The argument's name, for the error.
        tensors: Its tensors.
        shapes: The shape that each must have.
        x: The input, whose device they must share.
    """
    for tensor, shape in zip(tensors, shapes, strict=True):
        if tensor.shape != shape:
            got = tuple(tuple(t.shape) for t in tensors)
            raise ValueError(f"{name} has shapes {got}; expected {shapes} with x {tuple(x.shape)}")
        if tensor.device != x.device:
            raise ValueError(
                f"{name} is on {tensor.device} and x on {x.device}: move them to one device"
            )


def _choose_backend(
    backend: str, x: Tensor, head_dim: int, W: int, rope: tuple[Tensor, Tensor] | None
) -> str:
    """Returns the backend that runs: the best one for `auto`, else the given one, if it can run.

    Args:
        backend: One of BACKENDS.
        x: The input.
        head_dim: R, the channels of a head.
        W: The convolution's width; 0 for none.
        rope: The rotary tables (cos, sin), or None. The kernels have no gradient for them.

    Raises:
        ValueError: There is no such backend, or an explicit one cannot run these inputs.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed: {', '.join(BACKENDS)}")
    if backend == "torch":
        return backend
    # `auto` and `triton` depend on what the kernels can run.
    gradient = rope is not None and any(table.requires_grad for table in rope)
    if backend == "auto":
        return resolve_backend(x.device, head_dim, W, dtype=x.dtype, rope_gradient=gradient)[0]
    problem = support.unsupported(x.device, x.dtype, head_dim, W, gradient)
    if problem:
        raise ValueError(
            f"backend 'triton' cannot run this: {problem}. backend='torch' can, in plain PyTorch; 'auto' takes it and logs that"
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
    """Returns the backend that `auto` runs.

    A process logs each answer for its own devices once, also if torch.compile asks.

    Args:
        device: The device of x. None means a GPU of another machine, of compute capability 8.0 or
            higher and with Triton.
        head_dim: R, the channels of a head.
        width: The width of the convolution; 0 for none.
        dtype: The dtype of x.
        rope_gradient: True if the rotary tables require a gradient.

    Returns:
        backend: `triton` or `torch`.
        description: A description of the backend, with the reason if it is not `triton`.
    """
    problem = support.unsupported(device, dtype, head_dim, width, rope_gradient)
    if problem:
        backend = "torch"
        description = f"torch (plain PyTorch): {problem}"
    else:
        backend = "triton"
        description = "triton (one kernel)"
    if device is not None:
        log_once(f"interdomain.features: backend 'auto' is {description}")
    return backend, description
