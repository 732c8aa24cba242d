"""Inputs of the scan for the benchmarks, at the initialisation that training starts from.

Shapes: B batch, T time, H state heads, G query heads per state head, Hq = G H, d head width (R = D = d), M basis functions.
"""

import math

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from interdomain import scan

from ._cases import Case, Shape

CPU = torch.device("cpu")


def generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def convert(tree, **to):
    """Tensors in dicts and tuples, each by `Tensor.to(**to)`. Leaves that record gradients stay leaves."""
    return tree_map_only(Tensor, lambda x: x.detach().to(**to).requires_grad_(x.requires_grad), tree)


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
    case: Case, device: torch.device, *, mixed: bool = False, seed: int = 0
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Keyword arguments of `interdomain_scan` (of `linear_scan`, z = [k; v]), and cotangents of its results.

    device: on which the numbers are drawn, too: on the CPU they are the same on every x86 machine with AVX2.

    Queries have unit length, keys and values unit variance, as behind the model's norms. Every tensor is a leaf that
    records gradients.
    """
    s, dtype, P = case.shape, case.dtype, 2 * case.shape.d + case.wider
    g = generator(device, seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, device=device)

    theta, W, w = (x.float().to(device) for x in dynamics(s.H, s.M, mixed=mixed, seed=seed))
    if case.linear:
        inputs = {"z": normal(s.B, s.T, s.H, P).to(dtype), "log_decay": theta, "readout": w}
        d_out = normal(s.B, s.T, s.H, P).to(dtype)
    else:
        q = torch.nn.functional.normalize(normal(s.B, s.T, s.H * s.G, s.d), dim=-1).to(dtype)
        inputs = {"q": q, "k": normal(s.B, s.T, s.H, s.d).to(dtype), "v": normal(s.B, s.T, s.H, P - s.d).to(dtype)}
        inputs |= {"log_decay": theta, "mixing": W}
        d_out = normal(*q.shape[:3], P - s.d).to(dtype)
    if case.state:
        inputs["initial_state"] = normal(s.B, s.H, s.M, P, 2)
    return {name: x.requires_grad_() for name, x in inputs.items()}, (d_out, normal(s.B, s.H, s.M, P, 2))


def make_documents(shape: Shape, device: torch.device, mean: int = 20, seed: int = 0) -> Tensor:
    """Numbers of packed documents of `mean` tokens on average, [B, T]; the first sequence continues its initial state."""
    starts = torch.rand(shape.B, shape.T, generator=generator(device, seed), device=device) < 1 / mean
    starts[0, 0] = False
    return starts.cumsum(1)
