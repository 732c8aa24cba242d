"""Inputs of the scan for the benchmarks, at the initialisation that training starts from, and what a call must cost at least.

Shapes: B batch, T time, H state heads, G query heads per state head, Hq = G H, d head width (R = D = d), M basis functions,
L chunk length.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from interdomain import scan

if TYPE_CHECKING:
    from interdomain.scan.triton_plan import Plan  # Triton need not be there

CPU = torch.device("cpu")
WIDTH = 2  # bytes of a number


@dataclass(frozen=True)
class Shape:
    B: int
    T: int
    H: int = 32
    d: int = 64
    M: int = 64
    G: int = 1

    def __str__(self) -> str:
        grouped = f" G={self.G}" if self.G > 1 else ""
        return f"B={self.B} T={self.T} H={self.H} d={self.d} M={self.M}{grouped}"

    @property
    def tokens(self) -> int:
        """Tokens times query heads."""
        return self.B * self.T * self.H * self.G


def generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def move(x, device: torch.device):
    """The same on `device`: a tensor, a dict or tuple of them, or None. Leaves that record gradients stay leaves."""
    if isinstance(x, dict):
        return {name: move(y, device) for name, y in x.items()}
    if isinstance(x, tuple):
        return tuple(move(y, device) for y in x)
    return x if x is None else x.detach().to(device).requires_grad_(x.requires_grad)


def dynamics(H: int, M: int, *, mixed: bool = False, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(log_decay [H, M, 2], mixing [H, 2M, 2M], readout [H, 2M]), float64 on the CPU, at the model's initialisation.

    Delta log-uniform in [1e-3, 1e-1], A = -1/2 + i M/pi (M/(2n+1) - 1), C and c normal. With `mixed` every second head has
    decays per token from 1e-3 to 0.3 instead, as training may reach them.
    """
    g = torch.Generator().manual_seed(seed)

    def log_uniform(low: float, high: float, *shape: int) -> Tensor:
        u = torch.rand(*shape, generator=g, dtype=torch.float64)
        return torch.exp(math.log(low) + u * math.log(high / low))

    dt = log_uniform(1e-3, 1e-1, H)
    n = torch.arange(M, dtype=torch.float64)
    log_A_real = torch.full((H, M), math.log(0.5), dtype=torch.float64)
    A_imag = (M / math.pi * (M / (2 * n + 1) - 1)).expand(H, M).clone()
    if mixed:
        log_A_real[1::2] = (log_uniform(1e-3, 0.3, H, M) / dt[:, None]).log()[1::2]
    C = torch.randn(H, M, M, 2, generator=g, dtype=torch.float64) / M
    c = torch.randn(H, M, generator=g, dtype=torch.float64) / M**0.5
    theta = scan.decay_exponent(dt, log_A_real, A_imag)
    gain = scan.input_gain(theta, dt)
    return theta, scan.mixing_matrix(gain, C), scan.readout_vector(gain, C, c)


def make_inputs(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    linear: bool = False,
    state: bool = False,
    mixed: bool = False,
    wider: int = 0,
    seed: int = 0,
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Keyword arguments of `interdomain_scan` (of `linear_scan`, z = [k; v], if `linear`), and cotangents of its results.

    device: on which the numbers are drawn, too: on the CPU they are the same on every x86 machine with AVX2.
    wider: by how many channels v is wider than q and k (z than 2 d).

    Queries have unit length, keys and values unit variance, as behind the model's norms. Every tensor is a leaf that
    records gradients.
    """
    B, T, H, d, M = shape.B, shape.T, shape.H, shape.d, shape.M
    P = 2 * d + wider
    g = generator(device, seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, device=device)

    theta, W, w = (x.float().to(device) for x in dynamics(H, M, mixed=mixed, seed=seed))
    if linear:
        inputs = {"z": normal(B, T, H, P).to(dtype), "log_decay": theta, "readout": w}
        d_out = normal(B, T, H, P).to(dtype)
    else:
        q = torch.nn.functional.normalize(normal(B, T, H * shape.G, d), dim=-1).to(dtype)
        inputs = {"q": q, "k": normal(B, T, H, d).to(dtype), "v": normal(B, T, H, P - d).to(dtype)}
        inputs |= {"log_decay": theta, "mixing": W}
        d_out = normal(*q.shape[:3], P - d).to(dtype)
    if state:
        inputs["initial_state"] = normal(B, H, M, P, 2)
    return {name: x.requires_grad_() for name, x in inputs.items()}, (d_out, normal(B, H, M, P, 2))


def make_documents(shape: Shape, device: torch.device, mean: int = 20, seed: int = 0) -> Tensor:
    """Numbers of packed documents of `mean` tokens on average, [B, T]; the first sequence continues its initial state."""
    starts = torch.rand(shape.B, shape.T, generator=generator(device, seed), device=device) < 1 / mean
    starts[0, 0] = False
    return starts.cumsum(1)


# What a call costs at least


def by_phase(forward: int, backward: int) -> dict[str, int]:
    return {"forward": forward, "backward": backward, "both": forward + backward}


def io_bytes(shape: Shape, mixer: str = "") -> dict[str, int]:
    """Every input read once and every output written once, by phase: the floor of `mixer`, whoever computes it.

    forward: q, k, v in, o out. backward: q, k, v, do in, dq, dk, dv out. `linear` has z of width 2d for q, k, v and o of that
    width, `mamba2` v alone. Gates, and what does not grow with T and H, are left out.
    """
    queries, keys = (shape.B * shape.T * heads * shape.d * WIDTH for heads in (shape.H * shape.G, shape.H))
    if mixer in ("linear", "mamba2"):
        rows = 2 * keys if mixer == "linear" else keys
        return by_phase(2 * rows, 3 * rows)
    return by_phase(2 * queries + 2 * keys, 3 * queries + 4 * keys)


def tiles(shape: Shape, device: torch.device) -> "Plan":
    """The `Plan` that bf16 inputs of this shape get on this device; on a CPU, that of sm_90."""
    from interdomain.scan.triton_plan import make_plan

    return make_plan(device, torch.bfloat16, shape.M, shape.d, None)


def pass_costs(shape: Shape, plan: "Plan") -> dict[str, tuple[int, int]]:
    """(bytes, FLOPs) of each pass of `chunkwise` over the whole problem, as `plan` launches it.

    Bytes: its own reads and writes in device memory, each once. FLOPs: those that are executed. A block of channels, D wide (a
    power of two, padded), works out its own scores; so does a block of basis functions, BM of M. Counted per token and query
    head: numbers (N = 2M of a, b~, c or e~; d of q, k, v, o or a gradient) and multiply-adds (L tokens in a chunk).
    """
    d, M, N, L = shape.d, shape.M, 2 * shape.M, plan.chunk
    full = max(16, 1 << (d - 1).bit_length())

    def values(field: tuple) -> tuple[int, int]:
        """Width of a block of channels, and how many there are."""
        D = max(16, min(full, 64, field[0] // N))
        return D, -(-d // D)

    def reading(field: tuple, more: int = 0) -> int:
        """Scores, times the values; times the table; state read and updated."""
        D, blocks = values(field)
        return blocks * (more + L * D + 2 * L * M + 4 * M * D)

    BM = max(16, min(M, plan.contract[0] // (2 * full)))
    contract = -(-M // BM) * (L * full + 2 * L * BM + 4 * BM * full)
    D = min(full, 64, plan.decay[0] // 32)
    BM = max(16, min(M, plan.decay[0] // (2 * D)))
    # Costate and its derivative are both read and updated; `held`: one more product with the identity.
    decay = -(-d // D) * -(-M // BM) * (L * D + (4 if plan.held else 2) * L * BM + 8 * BM * D)
    D, blocks = values(plan.expand)
    costs = {
        "contract": (2 * d + N, contract),
        "mix": (2 * N, 4 * M * M),  # before expand, where the two are not one
        "mix_backward": (4 * N, 12 * M * M),  # b~, e~ and dW from a and c
        "expand": (N + 2 * d, reading(plan.expand)),
        "adjoint": (N + 2 * d, reading(plan.expand)),
        "decay": (N + 2 * d, decay),
        "adjoint_decay": (N + 3 * d, reading(plan.expand) + decay),  # side by side: b~ and do are read once
        "states": (2 * d, blocks * 4 * M * D),  # sweep that finds the states before the segments, if any
        "costates": (2 * N + 2 * d, blocks * 4 * M * D),  # the same backwards
    }
    if plan.fused:
        costs["mix_expand"] = N + 2 * d, reading(plan.fused, 4 * M * M)
    return {name: (shape.tokens * WIDTH * n, 2 * shape.tokens * macs) for name, (n, macs) in costs.items()}


def segment_count(shape: Shape, device: torch.device, chunk: int = 64) -> int:
    """Into how many segments the Triton passes cut time."""
    from interdomain.scan import triton_chunkwise

    return triton_chunkwise.segment_count(shape.B * shape.H, -(-shape.T // chunk), device)


def step_passes(plan: "Plan", recompute: bool = True, cut: bool = False) -> dict[str, tuple[str, ...]]:
    """The passes of a training step by phase. With `recompute` the backward repeats contract. cut: time is cut."""
    forward = ("contract", "mix_expand") if plan.fused else ("contract", "mix", "expand")
    reverse = ("adjoint_decay",) if plan.joined else ("adjoint", "decay")
    backward = ("contract", "mix_backward", "expand", *2 * reverse, *(("contract",) if recompute else ()))
    return {
        "forward": (*forward, *(("states",) if cut else ())),
        "backward": (*backward, *(("states", "costates") if cut else ())),
    }


def chunkwise_costs(
    shape: Shape, plan: "Plan", *, recompute: bool = True, segments: int = 1
) -> tuple[dict[str, int], dict[str, int]]:
    """(bytes, FLOPs) of `chunkwise` by phase: the sum of its passes."""
    costs = pass_costs(shape, plan)
    phases = step_passes(plan, recompute, segments > 1)
    nbytes, flops = ({phase: sum(costs[n][i] for n in names) for phase, names in phases.items()} for i in (0, 1))
    return by_phase(**nbytes), by_phase(**flops)


def attention_flops(shape: Shape) -> dict[str, int]:
    """FLOPs of causal softmax attention: two products over T (T + 1) / 2 pairs forward, five backward."""
    pair = 2 * shape.B * shape.H * shape.G * (shape.T * (shape.T + 1) // 2) * shape.d
    return by_phase(2 * pair, 5 * pair)
