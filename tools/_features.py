"""The input features (`interdomain.features`) for check_kernels and bench_kernels: inputs as the mixers have them.

Shapes: B batch, T time, H heads, d head width, E = H d channels of a projection.
"""

import torch
from torch import Tensor

from interdomain.features import input_features, input_features_step
from interdomain.model.layers import rope_tables

from ._problems import CPU, Shape, generator, make_documents, move

COLUMNS = ["out", "dx", "dweight", "dbias", "dpast", "dscale", "dshift"]
STEP_COLUMNS = ["out", "past"]
# Stages that each projection of the mixers goes through; a and b are the single input's.
STAGES = {
    "query": ("conv", "rope", "silu"),
    "key": ("conv", "rope", "silu", "norm"),
    "value": ("norm",),
    "a": ("conv", "rope", "norm"),
    "b": ("conv", "norm"),
}
CONV_WIDTH, ROPE_THETA = 4, 10_000.0


def make(kind: str, shape: Shape, dtype: torch.dtype, device: torch.device, *, past: bool = False, seed: int = 0):
    """(leaves by name, rotary tables or None, d_out): x [B, T, E] and the parameters that this projection has, in dtype."""
    B, T, H, d = shape.B, shape.T, shape.H, shape.d
    g = generator(device, seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, device=device).to(dtype)

    leaves, rope = {"x": normal(B, T, H * d)}, None
    if "conv" in STAGES[kind]:
        leaves |= {"weight": 0.5 * normal(H * d, 1, CONV_WIDTH), "bias": 0.5 * normal(H * d)}
        if past:
            leaves["past"] = normal(B, CONV_WIDTH - 1, H * d)
    if "rope" in STAGES[kind]:
        rope = _rope(T, d, device)
    if "norm" in STAGES[kind]:
        leaves |= {"scale": 1 + 0.1 * normal(d), "shift": 0.1 * normal(H, d)}
    return {name: x.requires_grad_() for name, x in leaves.items()}, rope, normal(B, T, H, d)


def _rope(T: int, d: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return rope_tables(torch.arange(T, device=device), d, ROPE_THETA)


def run(
    kind: str, leaves: dict[str, Tensor], rope, head_dim: int, backend: str, documents: Tensor | None = None
) -> Tensor:
    """`input_features` with the stages of this projection: [B, T, H, d]."""
    pairs = {"conv": ("weight", "bias"), "norm": ("scale", "shift")}
    given = {name: tuple(leaves[n] for n in pair) for name, pair in pairs.items() if name in STAGES[kind]}
    given |= {"past": leaves.get("past"), "rope": rope, "silu": "silu" in STAGES[kind], "documents": documents}
    return input_features(leaves["x"], head_dim, **given, backend=backend)


def results(case, device: torch.device, seed: int) -> tuple[dict, dict, dict | None]:
    """Of a `Case`: (outputs and gradients by name, the same in float64 by plain PyTorch, and a second run or None).

    Drawn on the CPU: the same numbers whatever the GPU.
    """
    kind, shape = case.mode, case.shape
    leaves, rope, d_out = move(make(kind, shape, case.dtype, CPU, past=case.state, seed=seed), device)
    documents = make_documents(shape, CPU, seed=seed).to(device) if case.documents else None

    def once(leaves, rope, d_out, backend):
        out = run(kind, leaves, rope, shape.d, backend, documents)
        grads = torch.autograd.grad(out, list(leaves.values()), d_out)
        return {"out": out, **{f"d{n}": g for n, g in zip(leaves, grads, strict=True)}}

    got = once(leaves, rope, d_out, case.backend)
    again = once(leaves, rope, d_out, case.backend) if case.repeat else None
    double = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    return got, once(double, rope and tuple(x.double() for x in rope), d_out.double(), "torch"), again


def step_results(case, device: torch.device, seed: int) -> tuple[dict, dict, None]:
    """T tokens of a layer of interdomain heads one by one: (outputs and what remains of the past, the same in float64 by plain
    PyTorch, None). q, k and v lie side by side: the first two are convolved, turned and mapped, the last two normed."""
    shape, dtype = case.shape, case.dtype
    B, T, H, d = shape.B, shape.T, shape.H, shape.d
    g = generator(CPU, seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g).to(dtype).to(device)

    x, past = normal(B, T, 3 * H * d), normal(B, CONV_WIDTH - 1, 2 * H * d)
    conv = 0.5 * normal(CONV_WIDTH, 2 * H * d), 0.5 * normal(2 * H * d)
    norm = 1 + 0.1 * normal(2 * H, d), 0.1 * normal(2 * H, d)
    rope = move(_rope(T, d, CPU), device)

    def once(backend: str, convert) -> dict[str, Tensor]:
        tokens, window, turns = convert(x).clone(), convert(past).clone(), [convert(table) for table in rope]
        given = dict(conv=tuple(map(convert, conv)), norm=tuple(map(convert, norm)), past=window)
        given |= dict(rotated=2 * H, silu=2 * H, backend=backend)
        steps = [
            input_features_step(tokens[:, t], d, rope=tuple(table[t : t + 1] for table in turns), **given)
            for t in range(T)
        ]
        return {"out": torch.stack(steps, dim=1), "past": window}

    return once(case.backend, lambda x: x), once("torch", torch.Tensor.double), None
