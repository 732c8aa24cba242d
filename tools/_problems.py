"""Inputs of the scan for the benchmarks, at the initialisation that training starts from; the bytes and FLOPs of a call.

Shapes: B batch, T time, H state heads, G query heads per state head, Hq = G H, d head width (R = D = d), M basis functions.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from interdomain import scan

CPU = torch.device("cpu")
WIDTH, CHUNK = 2, 64  # bytes of a number; tokens


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


def io_bytes(shape: Shape, mixer: str = "") -> tuple[int, int]:
    """Bytes of (forward, backward) of `mixer`: every input read once and every output written once.

    forward: q, k, v in, o out. backward: q, k, v, do in, dq, dk, dv out. `linear` has z of width 2d for q, k, v and o of that
    width, `mamba2` v alone, the features three projections. Gates, and what does not grow with T and H, are left out.
    """
    queries, keys = (shape.B * shape.T * heads * shape.d * WIDTH for heads in (shape.H * shape.G, shape.H))
    rows = {"linear": 2 * keys, "mamba2": keys, "features": 3 * keys, "features-torch": 3 * keys}.get(mixer)
    return (2 * rows, 3 * rows) if rows else (2 * queries + 2 * keys, 3 * queries + 4 * keys)


def attention_flops(shape: Shape) -> tuple[int, int]:
    """FLOPs of (forward, backward): two products over T (T + 1) / 2 pairs, and five."""
    pair = shape.tokens * (shape.T + 1) * shape.d
    return 2 * pair, 5 * pair


def pass_costs(shape: Shape) -> dict[str, tuple[int, int]]:
    """{pass of `chunkwise`: (bytes, FLOPs)} over all tokens: its reads and writes, each once, and the products of the algebra.

    Counted per token and query head: numbers (N = 2M of a, b~, c or e~; d of q, k, v, o or a gradient) and multiply-adds.
    What a pass does twice, for blocks of channels or of basis functions, and padding are not counted.
    """
    d, M, N = shape.d, shape.M, 2 * shape.M
    state = 4 * M * d  # read or updated
    read, W = CHUNK * d + CHUNK * N + state, N * N  # scores, times the values, state; one product by W
    costs = {
        "contract": (2 * d + N, read),
        "mix": (2 * N, W),
        "mix_expand": (N + 2 * d, W + read),
        "mix_backward": (4 * N, 3 * W),  # b~, e~ and dW from a and c
        "expand": (N + 2 * d, read),
        "adjoint": (N + 2 * d, read),
        "decay": (N + 2 * d, read + state),  # the costate and its derivative
        "adjoint_decay": (N + 3 * d, 2 * read + state),
        "states": (2 * d, state),  # the sweep that finds the states before the segments
        "costates": (2 * N + 2 * d, state),  # the same backwards
    }
    return {name: (shape.tokens * WIDTH * n, 2 * shape.tokens * macs) for name, (n, macs) in costs.items()}


def chunkwise_flops(shape: Shape) -> tuple[int, int]:
    """FLOPs of (forward, backward) as plugin/model/flops.py counts them: nothing is done twice."""
    costs = pass_costs(shape)
    forward = costs["contract"][1] + costs["mix_expand"][1]
    return forward, 2 * forward
