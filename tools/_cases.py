"""The cases of check_kernels, and the bound of each.

Shapes: B batch, T time, H state heads, G query heads per state head, d head width (R = D = d), M basis functions.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Relative RMS error, by arithmetic: at least 1.5 times the worst over 20 draws of the inputs in Triton's interpreter
# (tests/rehearse.py; the table is kernels/ERRORS.md).
BOUNDS = {
    "fp32": 1e-5,  # fp32 or 3xTF32 products, fp32 sums; `reference` in fp32 multiplies Lambda's rounding T times
    "rounded": 4e-3,  # computed in fp32, the result rounded to bf16 (1.7e-3)
    "bf16": 1e-2,  # operands rounded to bf16 (1.7e-3 each) at eight places in a row; fp16 is rounded to bf16 first
    "layer": 1.5e-2,  # the same with projections and input features before and after, each rounded
    "bf16 decay": 1.5e-2,  # dlog_decay then: a few slow modes of one head outweigh all others, and nothing averages
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
    chunk_size: int | None = None
    documents: bool = False  # several packed into each sequence
    repeat: bool = False  # run twice and compare bits
    mode: str = ""  # of the steps: "", "in place", "graph"; of a layer: which of LAYERS
    wider: int = 0  # channels that v has beyond q and k: the ones of the normalised form

    @property
    def linear(self) -> bool:
        return self.kind.startswith("linear")

    @property
    def arithmetic(self) -> str:
        if self.dtype == FP32 or self.kind.startswith("layer"):
            return "fp32" if self.dtype == FP32 else "layer"
        return "bf16" if self.backend in ("chunkwise", "parallel") else "rounded"

    def bound(self, tensor: str) -> float:
        return BOUNDS["bf16 decay" if (self.arithmetic, tensor) == ("bf16", "dlog_decay") else self.arithmetic]

    def __str__(self) -> str:
        words = {
            "no state": not self.state,
            "kept": not self.recompute,
            f"chunk {self.chunk_size}": self.chunk_size,
            "documents": self.documents,
            f"v wider by {self.wider}": self.wider,
        }
        first = [f"{self.kind}:", self.backend, str(self.shape), str(self.dtype).removeprefix("torch."), self.mode]
        return " ".join([word for word in first if word] + [word for word, there in words.items() if there])


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
    every = {
        "documents": [
            *(q(documents=True, repeat=True, T=130), q(documents=True, dtype=FP32, H=2, G=2, T=70)),
            *(lin(documents=True, T=130), q("parallel", documents=True, T=130, H=2), q(documents=True, M=128, T=70)),
            q(B=1, H=32, T=32_768, documents=True, state=False),
        ],
        "chunkwise-fp32": [
            *(q(dtype=FP32, repeat=True, T=70), q(dtype=FP32, recompute=False, state=False, T=63)),
            q(dtype=FP32, M=128, T=33),
        ],
        "chunkwise-M128": [q(M=128, repeat=True, T=130)],
        "chunkwise": [
            *(q(repeat=True), q(recompute=False, repeat=True), q(T=1, B=4, H=8), q(T=256, state=False, repeat=True)),
            q(T=65, G=4, repeat=True),
        ],
        "chunkwise-linear": [
            *(lin(repeat=True), lin(dtype=FP32, T=130), lin(d=96, T=63, state=False)),
            lin(B=1, T=70_001),
        ],
        "chunkwise-d96": [q(d=96, repeat=True), q(d=96, dtype=FP32, T=70, state=False)],
        "chunkwise-wider": [q(wider=1, T=130, repeat=True), q(wider=1, d=96, T=63, state=False)],
        "parallel": [
            *(q("parallel", repeat=True, T=130, H=2), q("parallel", G=2, d=96, T=63)),
            *(lin("parallel", repeat=True, T=130, H=2), q("parallel", dtype=FP32, H=2, T=70)),
            lin("parallel", dtype=FP32, H=2, state=False, T=70),
        ],
        "chunkwise-long": [
            q(B=1, H=32, T=32_768, state=False, repeat=True),  # several segments in flight
            q(B=1, T=70_001),  # beyond 65,536, and ragged
        ],
        "chunkwise-M16-M32": [q(M=16, T=130, H=8), q(M=32, T=130)],
        # Converted tiles are transposed in registers, which Triton has got wrong on Hopper.
        "chunkwise-fp16": [q(dtype=FP16, T=130, repeat=True), lin(dtype=FP16, T=130)],
        "chunkwise-chunk32": [q(chunk_size=32, T=130, repeat=True)],
        "plain": [
            *(q("fft", repeat=True, T=130), q("fft", G=2, d=96, T=63, state=False), lin("fft", dtype=FP32, T=257)),
            *(q("chunkwise-torch", repeat=True), q("chunkwise-torch", dtype=FP32, G=2, d=96, T=130)),
            *(lin("chunkwise-torch", T=130), lin("chunkwise-torch", dtype=FP32, T=65)),
            *(q("reference", dtype=FP32, T=63), lin("reference", dtype=FP32, T=63)),
        ],
        "layer": [
            *(layer(mode=mode, repeat=True) for mode in LAYERS),
            *(layer(mode=mode, dtype=FP32, d=96, T=65, H=2) for mode in LAYERS),
            *(layer(mode="interdomain", documents=True), layer(mode="interdomain", T=1, B=16)),
            *(layer_step(mode=mode, T=STEPS) for mode in LAYERS),
            layer_step(mode="interdomain", dtype=FP32, T=STEPS, d=96, B=19, H=5),
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
    return replace(case, shape=small, backend=backend, chunk_size=case.chunk_size and 8)
