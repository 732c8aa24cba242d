"""The cases of check_kernels, the bound of each, and inputs at the initialisation that training starts from.

Shapes: B batch, T time, H state heads, G query heads per state head, d head width (R = D = d), M basis functions.
"""

import math
from dataclasses import dataclass, fields, replace
from functools import partial
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
        words = [f"{self.kind}:", self.backend, str(self.shape), str(self.dtype).removeprefix("torch.")]
        more = [f for f in fields(self)[4:] if f.name != "repeat" and getattr(self, f.name) != f.default]
        return " ".join([word for word in words if word] + [f"{f.name}={getattr(self, f.name)}" for f in more])


def _case(backend: str = "chunkwise", kind: str = "scan", **kw) -> Case:
    shape = {k: kw.pop(k) for k in ("B", "T", "H", "d", "M", "G") if k in kw}
    return Case(kind, Shape(**({"B": 2, "T": 257, "H": 4} | shape)), backend=backend, **kw)


def groups(cuda: bool) -> dict[str, list[Case]]:
    """Cases by group; a group shares compiled kernels and runs in one process. Those that compile longest come first.

    On the CPU the same, at sizes for seconds, without what only a GPU has.
    """
    q, lin = _case, partial(_case, kind="linear scan")
    step, lin_step = (partial(_case, "", kind, T=STEPS) for kind in ("step", "linear step"))
    layer, layer_step = (partial(_case, "triton", kind, T=130) for kind in ("layer", "layer step"))

    def layer_cases(mode: str) -> list[Case]:
        wide = layer(mode=mode, dtype=FP32, d=96, T=65, H=2)
        return [layer(mode=mode, repeat=True), wide, layer_step(mode=mode, T=STEPS)]

    every = {f"layer-{mode}": layer_cases(mode) for mode in LAYERS}
    every["layer-interdomain"] += [
        layer(mode="interdomain", documents=True),
        layer_step(mode="interdomain", dtype=FP32, T=STEPS, d=96, B=19, H=5),
    ]
    every |= {
        "documents": [
            *(q(documents=True, repeat=True, T=130), q(documents=True, dtype=FP32, H=2, G=2, T=70)),
            *(lin(documents=True, T=130), q(documents=True, M=128, T=70)),
            q(B=1, H=32, T=32_768, documents=True, state=False),
        ],
        "chunkwise-fp32": [
            *(q(dtype=FP32, repeat=True, T=70), q(dtype=FP32, recompute=False, state=False, T=63)),
            q(dtype=FP32, M=128, T=33),
        ],
        "chunkwise-M128": [q(M=128, repeat=True, T=130)],
        "chunkwise": [
            *(q(repeat=True), q(recompute=False, repeat=True), q(T=1, B=4, H=8), q(T=256, state=False, repeat=True)),
            *(q(T=65, G=4, repeat=True), q(T=128, state=False, slow=True)),
        ],
        "chunkwise-linear": [
            *(lin(repeat=True), lin(dtype=FP32, T=130), lin(d=96, T=63, state=False)),
            lin(B=1, T=70_001),
        ],
        "chunkwise-d96": [q(d=96, repeat=True), q(d=96, dtype=FP32, T=70, state=False)],
        "chunkwise-wider": [q(wider=1, T=130, repeat=True), q(wider=1, d=96, T=63, state=False)],
        "chunkwise-long": [
            q(B=1, H=32, T=32_768, state=False, repeat=True),  # several segments in flight
            q(B=1, T=70_001),  # beyond 65,536, and ragged
        ],
        "chunkwise-M16-M32": [q(M=16, T=130, H=8), q(M=32, T=130)],
        # Converted tiles are transposed in registers, which Triton has got wrong on Hopper.
        "chunkwise-fp16": [q(dtype=FP16, T=130, repeat=True), lin(dtype=FP16, T=130)],
        "plain": [
            *(q("fft", repeat=True, T=130), q("fft", G=2, d=96, T=63, state=False), lin("fft", dtype=FP32, T=257)),
            *(q("chunkwise-torch", repeat=True), q("chunkwise-torch", dtype=FP32, G=2, d=96, T=130)),
            *(lin("chunkwise-torch", T=130), lin("chunkwise-torch", dtype=FP32, T=65)),
            *(q("reference", dtype=FP32, T=63), lin("reference", dtype=FP32, T=63)),
        ],
        "step": [
            *(step(), step(mode="in place"), step(mode="graph"), step(dtype=FP32, G=4, H=2, B=40), step(d=96, wider=1)),
            *(lin_step(), lin_step(mode="in place"), lin_step(mode="graph", dtype=FP32, d=96)),
        ],
    }
    if cuda:
        return every
    return {name: [_tiny(case) for case in cases if case.mode != "graph"] for name, cases in every.items()}


def _tiny(case: Case) -> Case:
    s = case.shape
    small = Shape(B=min(s.B, 2), T=min(s.T, 33), H=min(s.H, 2), d=s.d // 8, M=s.M // 8, G=min(s.G, 2))
    backend = "torch" if case.backend == "triton" else case.backend
    return replace(case, shape=small, backend=backend)


def convert(tree: Any, **to: Any) -> Any:
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
    log_A_real, A_imag = (x.expand(H, M).clone() for x in scan.initial_A("s4d-inv", M))
    if mixed:
        log_A_real[1::2] = (log_uniform(1e-3, 0.3, H, M) / dt[:, None]).log()[1::2]
    C = torch.randn(H, M, M, 2, generator=g, dtype=torch.float64) / M
    c = torch.randn(H, M, generator=g, dtype=torch.float64) / M**0.5
    theta = scan.decay_exponent(dt, log_A_real, A_imag)
    gain = scan.input_gain(theta, dt)
    return theta, scan.mixing_matrix(gain, C), scan.readout_vector(gain, C, c)


def make_inputs(case: Case, device: torch.device, *, mixed: bool = False, seed: int = 0) -> tuple[dict, tuple]:
    """Keyword arguments of `interdomain_scan` (of `linear_scan`, z = [k; v]), and cotangents of its results.

    The numbers are drawn on `device`: on the CPU they are the same on every x86 machine with AVX2. Queries have unit length,
    keys and values unit variance, as behind the model's norms. Every tensor is a leaf that records gradients.
    """
    s, dtype, P = case.shape, case.dtype, 2 * case.shape.d + case.wider
    g = torch.Generator(device).manual_seed(seed)

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
        if case.slow:
            inputs |= {n: inputs[n].abs() for n in ("q", "k", "v", "mixing")} | {"log_decay": theta / 100}
            d_out = d_out.abs()
    if case.state:
        inputs["initial_state"] = normal(s.B, s.H, s.M, P, 2)
    return {name: x.requires_grad_() for name, x in inputs.items()}, (d_out, normal(s.B, s.H, s.M, P, 2))
