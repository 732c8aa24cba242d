"""The cases of check_kernels, the bound of each, and inputs at the initialisation that training starts from.

Shapes: B batch, T time, H state heads, G query heads per state head, d head width (R = D = d), M basis functions.
"""

import math
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from interdomain import scan

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Relative RMS error, by arithmetic: at least 1.5 times the worst over 20 draws of the inputs (a layer: 8) in the interpreter
# (tests/rehearse.py).
BOUNDS = {
    "fp32": 1e-5,  # fp32 or 3xTF32 products, fp32 sums; `reference` in fp32 multiplies Lambda's rounding T times
    "rounded": 4e-3,  # computed in fp32, the result rounded to bf16 (1.7e-3)
    "bf16": 1e-2,  # operands rounded to bf16 (1.7e-3 each) at eight places in a row; fp16 is rounded to bf16 first
    "layer": 2e-2,  # the same with projections and input features before and after, each rounded
    "bf16 decay": 1.5e-2,  # dlog_decay then: a few slow modes of one head outweigh all others, and nothing averages
    "bf16 slow": 3e-3,  # dlog_decay of a slow case: a lag that is one token off in one of its sums is 1.2e-2
}
STEPS = 4  # tokens of a case of a step
DEFAULTS = {  # by kind of case
    "scan": {"backend": "chunkwise", "T": 257},
    "linear scan": {"backend": "chunkwise", "T": 257},
    "step": {"T": STEPS},
    "linear step": {"T": STEPS},
    "layer": {"backend": "triton", "T": 130},
    "layer step": {"backend": "triton", "T": STEPS},
}
LAYERS = {  # settings of the layer; their projections differ in convolution, RoPE, feature map and norm
    "interdomain": {},
    "single-query": {"dual_input": False},
    "s4d": {"dual_input": False, "query_readout": False, "rope": False},
}


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


@dataclass(frozen=True)
class Case:
    kind: str  # scan, step, or linear and one of them (the linear readout); layer, layer step
    shape: Shape
    dtype: torch.dtype = BF16
    backend: str = ""  # of the scan; of a layer's input features
    state: bool = True  # start from a state and return one, with their gradients; or neither, as training does
    recompute: bool = True
    documents: bool = False  # several packed into each sequence
    repeat: bool = False  # run twice and compare bits
    mode: str = ""  # of the steps: "", "in place", "graph"; of a layer: which of LAYERS
    wider: int = 0  # channels that v has beyond q and k: the ones of the normalised form
    slow: bool = False  # W and tokens of one sign, theta a hundredth: lags add up in dlog_decay, and roundings do not

    @property
    def sizes(self) -> str:
        """What kernels are compiled for, and judged by. (T, B and the heads are numbers that a kernel is called with.)"""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"d={self.shape.d} M={self.shape.M} {dtype}"

    @property
    def linear(self) -> bool:
        return self.kind.startswith("linear")

    @property
    def arithmetic(self) -> str:
        if self.dtype == FP32 or self.kind.startswith("layer"):
            return "fp32" if self.dtype == FP32 else "layer"
        return "bf16" if self.backend == "chunkwise" else "rounded"

    def bound(self, tensor: str) -> float:
        if (self.arithmetic, tensor) == ("bf16", "dlog_decay"):
            return BOUNDS["bf16 slow" if self.slow else "bf16 decay"]
        return BOUNDS[self.arithmetic]

    def __str__(self) -> str:
        words = [
            f"{self.kind}:",
            self.backend,
            str(self.shape),
            str(self.dtype).removeprefix("torch."),
        ]
        for field in fields(self)[4:]:
            value = getattr(self, field.name)
            if field.name != "repeat" and value != field.default:
                words.append(f"{field.name}={value}")
        return " ".join(filter(None, words))


def groups(cuda: bool) -> dict[str, list[Case]]:
    """Cases by group. On the CPU the same, at sizes for seconds, without what only a GPU has."""
    table = tomllib.loads(Path(__file__).with_name("cases.toml").read_text())
    every = {name: [_case(**row) for row in rows] for name, rows in table.items()}
    if cuda:
        return every
    return {
        name: [_tiny(case) for case in cases if case.mode != "graph"]
        for name, cases in every.items()
    }


def _case(kind: str, dtype: str = "bfloat16", **row: Any) -> Case:
    values = {"B": 2, "H": 4, **DEFAULTS[kind], **row}
    sizes = {name: values.pop(name) for name in ("B", "T", "H", "d", "M", "G") if name in values}
    return Case(kind, Shape(**sizes), getattr(torch, dtype), **values)


def _tiny(case: Case) -> Case:
    s = case.shape
    small = Shape(
        B=min(s.B, 2), T=min(s.T, 33), H=min(s.H, 2), d=s.d // 8, M=s.M // 8, G=min(s.G, 2)
    )
    backend = "torch" if case.backend == "triton" else case.backend
    return replace(case, shape=small, backend=backend)


def convert(tree: Any, **to: Any) -> Any:
    """Tensors in dicts and tuples, each by `Tensor.to(**to)`. Leaves that record gradients stay leaves."""
    return tree_map_only(
        Tensor, lambda x: x.detach().to(**to).requires_grad_(x.requires_grad), tree
    )


def dynamics(
    H: int, M: int, *, mixed: bool = False, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """(log_decay [H, M, 2], mixing [H, 2M, 2M], readout [H, 2M]), float64 on the CPU, at the model's initialisation.

    Delta log-uniform in [1e-3, 1e-1], A = -1/2 + i M/pi (M/(2n+1) - 1), C and c normal. With `mixed` every second head has
    decays per token from 1e-3 to 0.3 instead, as training may reach them.
    """
    g = torch.Generator().manual_seed(seed)

    def log_uniform(low: float, high: float, *shape: int) -> Tensor:
        u = torch.rand(*shape, generator=g, dtype=torch.float64)
        return torch.exp(math.log(low) + u * math.log(high / low))

    dt = log_uniform(1e-3, 1e-1, H)
    log_A_real, A_imag = (x.expand(H, M).clone() for x in scan.initial_A("s4d-inv", M))
    if mixed:
        log_A_real[1::2] = (log_uniform(1e-3, 0.3, H, M) / dt[:, None]).log()[1::2]
    C = torch.randn(H, M, M, 2, generator=g, dtype=torch.float64) / M
    c = torch.randn(H, M, generator=g, dtype=torch.float64) / M**0.5
    theta = scan.decay_exponent(dt, log_A_real, A_imag)
    gain = scan.input_gain(theta, dt)
    return theta, scan.mixing_matrix(gain, C), scan.readout_vector(gain, C, c)


def make_inputs(
    case: Case, device: torch.device, *, mixed: bool = False, seed: int = 0
) -> tuple[dict, tuple]:
    """Keyword arguments of `interdomain_scan` (of `linear_scan`, z = [k; v]), and cotangents of its results.

    The numbers are drawn on `device`: on the CPU they are the same on every x86 machine with AVX2. Queries have unit length,
    keys and values unit variance, as behind the model's norms. Every tensor is a leaf that records gradients.
    """
    s = case.shape
    dtype = case.dtype
    P = 2 * s.d + case.wider
    g = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, device=device)

    theta, W, w = (x.float().to(device) for x in dynamics(s.H, s.M, mixed=mixed, seed=seed))
    if case.linear:
        inputs = {"z": normal(s.B, s.T, s.H, P).to(dtype), "log_decay": theta, "readout": w}
        d_out = normal(s.B, s.T, s.H, P).to(dtype)
    else:
        q = torch.nn.functional.normalize(normal(s.B, s.T, s.H * s.G, s.d), dim=-1).to(dtype)
        inputs = {
            "q": q,
            "k": normal(s.B, s.T, s.H, s.d).to(dtype),
            "v": normal(s.B, s.T, s.H, P - s.d).to(dtype),
        }
        inputs |= {"log_decay": theta, "mixing": W}
        d_out = normal(*q.shape[:3], P - s.d).to(dtype)
        if case.slow:
            inputs |= {n: inputs[n].abs() for n in ("q", "k", "v", "mixing")} | {
                "log_decay": theta / 100
            }
            d_out = d_out.abs()
    if case.state:
        inputs["initial_state"] = normal(s.B, s.H, s.M, P, 2)
    return {name: x.requires_grad_() for name, x in inputs.items()}, (
        d_out,
        normal(s.B, s.H, s.M, P, 2),
    )
