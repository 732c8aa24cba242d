"""The cases of check-kernels, the bound of each, and inputs as training starts from them.

A case is one comparison of a kernel with float64: a kind of computation at given sizes. A group is
a list of cases in cases.toml. Its cases share compiled kernels and run in one process.

Shapes: B batch, T time, H state heads, G query heads per state head, d head width (R = D = d), M
basis functions, P channels of a state (R + D, and one more in the normalised form).
"""

import math
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from interdomain import scan

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Bounds of the relative RMS error, by arithmetic. Each is at least 1.5 times the largest error over
# 20 draws of the inputs (of a layer: 8) in Triton's interpreter (tests/rehearse.py).
BOUNDS = {
    # fp32 or 3xTF32 products and fp32 sums. `reference` in fp32 multiplies the rounding of Lambda T
    # times.
    "fp32": 1e-5,
    # Computed in fp32; the result is rounded to bf16 (1.7e-3).
    "rounded": 4e-3,
    # Operands are rounded to bf16 (1.7e-3 each) at eight places in a row. fp16 is rounded to bf16
    # first.
    "bf16": 1e-2,
    # The same, with projections and input features before and after, each rounded.
    "layer": 2e-2,
    # dlog_decay in bf16: a few slow modes of one head outweigh all others, and nothing averages.
    "bf16 decay": 1.5e-2,
    # dlog_decay of a slow case. It weighs terms by their lag, the number of tokens between an input
    # and an output: a lag that is one token off in one of its sums gives 1.2e-2.
    "bf16 slow": 3e-3,
}
# Settings of a layer. The projections of these differ in convolution, RoPE, feature map and norm.
LAYERS = {
    "interdomain": {},
    "single-query": {"dual_input": False},
    "s4d": {"dual_input": False, "query_readout": False, "rope": False},
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a case: see the module's legend."""

    B: int
    T: int
    H: int = 32
    d: int = 64
    M: int = 64
    G: int = 1

    def __str__(self) -> str:
        text = f"B={self.B} T={self.T} H={self.H} d={self.d} M={self.M}"
        if self.G > 1:
            text += f" G={self.G}"
        return text


@dataclass(frozen=True)
class Case:
    """One comparison of the check.

    Attributes:
        kind: "scan", "step", "linear scan" or "linear step" (the linear readout), "layer" or "layer
            step". A step computes token by token.
        shape: The sizes.
        dtype: The dtype of the tokens' inputs, or of a layer.
        backend: The backend of the scan, or of a layer's input features.
        state: True to start from a state and return one, with their gradients; False for neither,
            as in training.
        recompute: The scan's argument.
        documents: True to pack several documents into each sequence.
        repeat: True to run twice and compare the bits.
        mode: Of a step: "" (returns a new state), "in place" (overwrites the state) or "graph" (in
            place, as a CUDA graph). Of a layer: the name of its settings in LAYERS.
        wider: Channels that v has beyond q and k: 1 for the ones column of the normalised form.
        slow: True for mixing and tokens of one sign and decays of a hundredth. Then lags add up in
            dlog_decay, and roundings do not.
    """

    kind: str
    shape: Shape
    dtype: torch.dtype = BF16
    backend: str = ""
    state: bool = True
    recompute: bool = True
    documents: bool = False
    repeat: bool = False
    mode: str = ""
    wider: int = 0
    slow: bool = False

    @property
    def sizes(self) -> str:
        """Names the sizes that kernels are compiled for, and judged by.

        T, B and the heads are left out: a kernel gets them as arguments.
        """
        return f"d={self.shape.d} M={self.shape.M} {self.dtype_name}"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def linear(self) -> bool:
        """Returns True for the linear readout."""
        return self.kind.startswith("linear")

    def bound(self, tensor: str) -> float:
        """Returns the largest relative RMS error that a result or gradient may have.

        Args:
            tensor: The name of the result, such as "out", or of the gradient, such as "dlog_decay".
        """
        if self.dtype == FP32:
            return BOUNDS["fp32"]
        if self.kind.startswith("layer"):
            return BOUNDS["layer"]
        if self.backend != "chunkwise":
            return BOUNDS["rounded"]
        if tensor != "dlog_decay":
            return BOUNDS["bf16"]
        return BOUNDS["bf16 slow" if self.slow else "bf16 decay"]

    def __str__(self) -> str:
        words = [f"{self.kind}:", self.backend, str(self.shape), self.dtype_name]
        for name in ("state", "recompute", "documents", "repeat", "mode", "wider", "slow"):
            value = getattr(self, name)
            if value != getattr(Case, name):  # the default
                words.append(f"{name}={value}")
        return " ".join(word for word in words if word)


def groups(cuda: bool) -> dict[str, list[Case]]:
    """Returns the cases by group.

    Args:
        cuda: True for a GPU. For a CPU the cases are small, and those that need a GPU are left out.
    """
    table = tomllib.loads(Path(__file__).with_name("cases.toml").read_text())
    by_group: dict[str, list[Case]] = {}
    for name, rows in table.items():
        cases = [_case(**row) for row in rows]
        if not cuda:
            cases = [_tiny(case) for case in cases if case.mode != "graph"]
        by_group[name] = cases
    return by_group


def _case(kind: str, dtype: str = "bfloat16", **row: Any) -> Case:
    """Makes a case of a row of cases.toml.

    Args:
        kind: `Case.kind`.
        dtype: Name of a dtype of torch.
        row: Sizes, and other fields of `Case`.
    """
    values = {"B": 2, "H": 4, **row}
    sizes = {}
    for field in fields(Shape):
        if field.name in values:
            sizes[field.name] = values.pop(field.name)
    return Case(kind, Shape(**sizes), getattr(torch, dtype), **values)


def _tiny(case: Case) -> Case:
    """Makes a case small enough for a CPU, in plain PyTorch.

    Head width and M are divided by 8, and the other sizes are limited.
    """
    s = case.shape
    small = Shape(
        B=min(s.B, 2), T=min(s.T, 33), H=min(s.H, 2), d=s.d // 8, M=s.M // 8, G=min(s.G, 2)
    )
    backend = "torch" if case.backend == "triton" else case.backend
    return replace(case, shape=small, backend=backend)


def initial_tables(
    H: int, M: int, *, mixed: bool = False, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws what the scan reads of the SSM parameters, at the model's initialisation.

    Delta is log-uniform in [1e-3, 1e-1], A = -1/2 + i M/pi (M/(2n+1) - 1), C and c are normal.

    Args:
        H: Number of heads.
        M: Number of basis functions.
        mixed: True to give every second head decays per token from 1e-3 to 0.3 instead, as training
            may reach them.
        seed: Seed of the draw.

    Returns:
        log_decay [H, M, 2], mixing [H, 2M, 2M] and readout [H, 2M], in float64 on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)

    def log_uniform(low: float, high: float, *shape: int) -> Tensor:
        u = torch.rand(*shape, generator=generator, dtype=torch.float64)
        return torch.exp(math.log(low) + u * math.log(high / low))

    # The SSM parameters.
    dt = log_uniform(1e-3, 1e-1, H)
    log_A_real, A_imag = (x.expand(H, M).clone() for x in scan.initial_A("s4d-inv", M))
    if mixed:
        fast = log_uniform(1e-3, 0.3, H, M) / dt[:, None]
        log_A_real[1::2] = fast.log()[1::2]
    C = torch.randn(H, M, M, 2, generator=generator, dtype=torch.float64) / M
    c = torch.randn(H, M, generator=generator, dtype=torch.float64) / M**0.5

    # The tables that follow from them.
    log_decay = scan.decay_exponent(dt, log_A_real, A_imag)
    gain = scan.input_gain(log_decay, dt)
    return log_decay, scan.mixing_matrix(gain, C), scan.readout_vector(gain, C, c)


def make_inputs(
    case: Case, device: torch.device, *, mixed: bool = False, seed: int = 0
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Draws the inputs of a scan.

    Queries have unit length, keys and values unit variance, as behind the model's norms.

    Args:
        case: The case.
        device: The numbers are drawn there. On the CPU they are the same on every x86 machine with
            AVX2.
        mixed: As in `initial_tables`.
        seed: Seed of the draw.

    Returns:
        The keyword arguments of `interdomain_scan` (of `linear_scan`, with z = [k; v], in a linear
        case), each a leaf that records gradients; and the gradients of the results `out` and
        `state`.
    """
    s = case.shape
    dtype = case.dtype
    P = 2 * s.d + case.wider
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    tables = initial_tables(s.H, s.M, mixed=mixed, seed=seed)
    log_decay, mixing, readout = (table.float().to(device) for table in tables)
    # The order of the draws is part of a case: it decides the numbers.
    if case.linear:
        inputs = {"z": normal(s.B, s.T, s.H, P).to(dtype)}
        inputs |= {"log_decay": log_decay, "readout": readout}
        d_out = normal(s.B, s.T, s.H, P).to(dtype)
    else:
        width = P - s.d  # of v
        inputs = {
            "q": normalize(normal(s.B, s.T, s.H * s.G, s.d), dim=-1).to(dtype),
            "k": normal(s.B, s.T, s.H, s.d).to(dtype),
            "v": normal(s.B, s.T, s.H, width).to(dtype),
            "log_decay": log_decay,
            "mixing": mixing,
        }
        d_out = normal(s.B, s.T, s.H * s.G, width).to(dtype)
        if case.slow:
            for name in ("q", "k", "v", "mixing"):
                inputs[name] = inputs[name].abs()
            inputs["log_decay"] = log_decay / 100
            d_out = d_out.abs()
    if case.state:
        inputs["initial_state"] = normal(s.B, s.H, s.M, P, 2)
    for x in inputs.values():
        x.requires_grad_()
    return inputs, {"out": d_out, "state": normal(s.B, s.H, s.M, P, 2)}
