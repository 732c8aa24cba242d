"""Inputs of the scan for the benchmarks, at the initialisation that training starts from, and what a call must cost at least.

Shapes: B batch, T time, H state heads, G query heads per state head, Hq = G H, d head width (R = D = d), M basis functions,
L chunk length.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from interdomain import scan

CPU = torch.device("cpu")


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


def io_bytes(shape: Shape, mixer: str = "", width: int = 2) -> dict[str, int]:
    """Every input read once and every output written once, by phase: the floor of `mixer`, whoever computes it.

    forward: q, k, v in, o out. backward: q, k, v, do in, dq, dk, dv out. `linear` has z of width 2d for q, k, v and o of that
    width, `mamba2` v alone. Gates, and what does not grow with T and H, are left out. `width`: bytes of a number.
    """
    queries, keys = (shape.B * shape.T * heads * shape.d * width for heads in (shape.H * shape.G, shape.H))
    forward, backward = 2 * queries + 2 * keys, 3 * queries + 4 * keys
    if mixer in ("linear", "mamba2"):
        rows = 2 * keys if mixer == "linear" else keys
        forward, backward = 2 * rows, 3 * rows
    return {"forward": forward, "backward": backward, "both": forward + backward}


def tiles(shape: Shape, device: torch.device):
    """The `Plan` that bf16 inputs of this shape get on this device; on a CPU, that of sm_90."""
    from interdomain.scan.triton_plan import make_plan

    return make_plan(device, torch.bfloat16, shape.M, shape.d, None)


def pass_costs(shape: Shape, plan, width: int = 2) -> dict[str, tuple[int, int]]:
    """(bytes, FLOPs) of each pass of `chunkwise` over the whole problem, as `plan` launches it.

    Bytes: its own reads and writes in device memory, each once. FLOPs: those that are executed. A block of channels,
    D wide (a power of two, padded), works out its own scores; so does a block of basis functions, BM of M. Per token and
    query head, N = 2M numbers of a, b~, c or e~ and d of q, k, v, o or a gradient, L tokens in a chunk:

        pass           numbers in + out  multiply-adds of a block, times blocks
        contract       2 d + N           L D + 2 L BM + 4 BM D   scores; times the table; state read and updated
        mix_expand     N + 2 d           4 M^2 + 2 L M + L D + 4 M D
        mix_backward   4 N               12 M^2                  b~, e~ and dW from a and c
        expand         N + 2 d           2 L M + L D + 4 M D
        adjoint_decay  N + 3 d           those of the next two   the programs of both side by side: b~ and do are read once
        adjoint        N + 2 d           2 L M + L D + 4 M D     by itself, where the two are not one or decay is not asked for
        decay          N + 2 d           L D + 2 L BM + 8 BM D   by itself; costate and its derivative, each read and updated;
                                                                 `held`: 2 L BM more, a product with the identity
        mix            2 N               4 M^2                   before expand, where the two are not one
        states         2 d               4 M D                   sweep that finds the states before the segments, if any
        costates       2 N + 2 d         4 M D                   the same backwards
    """
    d, M, N, L = shape.d, shape.M, 2 * shape.M, plan.chunk
    full = max(16, 1 << (d - 1).bit_length())

    def block(limit: int, numbers: int) -> int:
        return max(16, min(limit, numbers))

    def values(field) -> tuple[int, int]:
        """Width of a block of channels, and how many there are."""
        D = block(min(full, 64), field[0] // N)
        return D, -(-d // D)

    def reading(field, more: int = 0) -> int:
        D, blocks = values(field)
        return blocks * (more + 2 * L * M + L * D + 4 * M * D)

    BM = block(M, plan.contract[0] // (2 * full))
    contract = -(-M // BM) * (L * full + 2 * L * BM + 4 * BM * full)
    D = min(full, 64, plan.decay[0] // 32)
    BM = block(M, plan.decay[0] // (2 * D))
    decay = -(-d // D) * -(-M // BM) * (L * D + (4 if plan.held else 2) * L * BM + 8 * BM * D)
    D, blocks = values(plan.expand)
    costs = {
        "contract": (2 * d + N, contract),
        "mix_backward": (4 * N, 12 * M * M),
        "expand": (N + 2 * d, reading(plan.expand)),
        "adjoint_decay": (N + 3 * d, reading(plan.expand) + decay),
        "adjoint": (N + 2 * d, reading(plan.expand)),
        "decay": (N + 2 * d, decay),
        "mix": (2 * N, 4 * M * M),
        "states": (2 * d, blocks * 4 * M * D),
        "costates": (2 * N + 2 * d, blocks * 4 * M * D),
    }
    if plan.fused:
        costs["mix_expand"] = (N + 2 * d, reading(plan.fused, 4 * M * M))
    return {name: (shape.tokens * width * n, 2 * shape.tokens * macs) for name, (n, macs) in costs.items()}


def segments(shape: Shape, device: torch.device) -> int:
    """Into how many segments `chunkwise` cuts time on this device; 1 on a CPU, where it is plain PyTorch."""
    return segment_count(shape, device) if device.type == "cuda" else 1


def segment_count(shape: Shape, device: torch.device, chunk: int = 64) -> int:
    """The same of the Triton passes, wherever they run."""
    from interdomain.scan import triton_chunkwise

    return triton_chunkwise.segment_count(shape.B * shape.H, -(-shape.T // chunk), device)


def forward_passes(plan) -> tuple[str, ...]:
    return ("contract", "mix_expand") if plan.fused else ("contract", "mix", "expand")


def backward_passes(plan) -> tuple[str, ...]:
    reverse = ("adjoint_decay",) if plan.joined else ("adjoint", "decay")
    return ("contract", "mix_backward", "expand", *2 * reverse)


def chunkwise_costs(
    shape: Shape, plan, *, recompute: bool = True, segments: int = 1, width: int = 2
) -> dict[str, tuple[int, int]]:
    """(bytes, FLOPs) of `chunkwise` by phase: the sum of its passes. With `recompute` the backward repeats contract."""
    costs = pass_costs(shape, plan, width)
    sweep, back = (("states",), ("costates",)) if segments > 1 else ((), ())
    again = ("contract",) if recompute else ()
    phases = {
        "forward": forward_passes(plan) + sweep,
        "backward": backward_passes(plan) + again + sweep + back,
    }
    total = {phase: tuple(sum(costs[name][i] for name in names) for i in (0, 1)) for phase, names in phases.items()}
    return total | {"both": tuple(map(sum, zip(*total.values(), strict=True)))}


def attention_flops(shape: Shape) -> dict[str, int]:
    """FLOPs of causal softmax attention: two products over T (T + 1) / 2 pairs forward, five backward."""
    pair = 2 * shape.B * shape.H * shape.G * (shape.T * (shape.T + 1) // 2) * shape.d
    return {"forward": 2 * pair, "backward": 5 * pair, "both": 7 * pair}


def step_bytes(B: int, H: int, d: int, M: int, width: int = 2) -> int:
    """One token of one layer: the state read and written (fp32 pairs), half of W once for the batch, q, k, v in and o out."""
    return B * H * (2 * 4 * 2 * M * 2 * d + 4 * d * width) + H * 4 * M * 2 * M


def attention_step_bytes(B: int, H: int, d: int, length: int, width: int = 2) -> int:
    """One token of softmax attention against a cache of `length` tokens: keys and values read, one of each written, q, o."""
    return B * H * d * width * (2 * length + 2 + 2)
