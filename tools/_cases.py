"""The cases of check_kernels, and the bound of each."""

from dataclasses import dataclass, replace
from functools import partial

import torch

from . import _features
from ._problems import Shape

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Relative RMS error, by arithmetic: at least 1.5 times the worst over 20 draws of the inputs in Triton's interpreter
# (tests/rehearse.py; the table is kernels/ERRORS.md).
BOUNDS = {
    "fp32": 1e-5,  # fp32 or 3xTF32 products, fp32 sums; `reference` in fp32 multiplies Lambda's rounding T times
    "rounded": 4e-3,  # computed in fp32, the result rounded to bf16 (1.7e-3)
    "bf16": 1e-2,  # operands rounded to bf16 (1.7e-3 each) at eight places in a row; fp16 is rounded to bf16 first
    "bf16 decay": 1.5e-2,  # dlog_decay then: a few slow modes of one head outweigh all others, and nothing averages
}


def bound(arithmetic: str, tensor: str) -> float:
    """Of one tensor. arithmetic: fp32, rounded or bf16."""
    return BOUNDS["bf16 decay" if (arithmetic, tensor) == ("bf16", "dlog_decay") else arithmetic]


STEPS = 4  # tokens of a case of a step

COLUMNS = {
    "scan": ["out", "state", "dq", "dk", "dv", "dlog_decay", "dmixing", "dinitial_state"],
    "linear scan": ["out", "state", "dz", "dlog_decay", "dreadout", "dinitial_state"],
    "step": ["out", "state"],
    "features": _features.COLUMNS,
    "features step": _features.STEP_COLUMNS,
}


@dataclass(frozen=True)
class Case:
    kind: str  # a key of COLUMNS
    shape: Shape
    dtype: torch.dtype = BF16
    backend: str = "chunkwise"
    # Start from a state and return one, with their gradients, or neither, as training does; features: from past inputs.
    state: bool = True
    recompute: bool = True
    documents: bool = False  # several packed into each sequence
    repeat: bool = False  # run twice and compare bits
    mode: str = ""  # of the steps: "", "in place", "graph"; of the features: which projection
    linear: bool = False  # of the steps
    half: bool = False  # of the steps: W by its upper half and Lambda made beforehand, as a model has them
    wider: int = 0  # channels that v has beyond q and k: the ones of the normalised form

    @property
    def arithmetic(self) -> str:
        if self.dtype == FP32:
            return "fp32"
        products = self.kind in ("scan", "linear scan") and self.backend in ("chunkwise", "parallel")
        return "bf16" if products else "rounded"

    def __str__(self) -> str:
        what = self.backend if self.kind != "step" else "linear" if self.linear else "query"
        words = {
            what: True,
            str(self.shape): True,
            str(self.dtype).removeprefix("torch."): True,
            self.mode: self.mode,
            "no state": not self.state and self.kind != "step",
            "kept": not self.recompute,
            "documents": self.documents,
            "half of W": self.half,
            f"v wider by {self.wider}": self.wider,
        }
        return " ".join(word for word, there in words.items() if there)


def _case(backend: str = "chunkwise", kind: str = "scan", **kw) -> Case:
    shape = {k: kw.pop(k) for k in ("B", "T", "H", "d", "M", "G") if k in kw}
    return Case(kind, Shape(**({"B": 2, "T": 257, "H": 4} | shape)), backend=backend, **kw)


def groups(cuda: bool) -> dict[str, list[Case]]:
    """Cases by group; a group shares compiled kernels and runs in one process. Those that compile longest come first.

    On the CPU the same, at sizes for seconds, without what only a GPU has.
    """
    q, lin = _case, partial(_case, kind="linear scan")
    features, features_step = partial(_case, kind="features"), partial(_case, kind="features step", T=STEPS)
    step = partial(_case, kind="step", T=STEPS)
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
        "sequential": [
            *(q("sequential", repeat=True, T=40, H=2), q("sequential", dtype=FP32, G=2, d=96, T=33, H=2)),
            *(q("sequential", documents=True, T=40, H=2), lin("sequential", documents=True, T=40, H=2)),
            *(lin("sequential", repeat=True, T=40, H=2), lin("sequential", dtype=FP32, state=False, T=33)),
        ],
        "chunkwise-linear": [
            *(lin(repeat=True), lin(dtype=FP32, T=130), lin(d=96, T=63, state=False)),
            lin(B=1, T=70_001),
        ],
        "chunkwise-d96": [q(d=96, repeat=True), q(d=96, dtype=FP32, T=70, state=False)],
        "chunkwise-wider": [q(wider=1, T=130, repeat=True), q(wider=1, d=96, T=63, state=False)],
        "parallel-fp32": [q("parallel", dtype=FP32, H=2, T=70), lin("parallel", dtype=FP32, H=2, state=False, T=70)],
        "parallel": [
            *(q("parallel", repeat=True, T=130, H=2), q("parallel", G=2, d=96, T=63)),
            lin("parallel", repeat=True, T=130, H=2),
        ],
        "chunkwise-long": [
            q(B=1, H=32, T=32_768, state=False, repeat=True),  # several segments in flight
            q(B=1, T=70_001),  # beyond 65,536, and ragged
        ],
        "chunkwise-M16-M32": [q(M=16, T=130, H=8), q(M=32, T=130)],
        # Converted tiles are transposed in registers, which Triton has got wrong on Hopper.
        "chunkwise-fp16": [q(dtype=FP16, T=130, repeat=True), lin(dtype=FP16, T=130)],
        "fft": [
            *(q("fft", repeat=True, T=130), q("fft", dtype=FP32, T=257), q("fft", G=2, d=96, T=63, state=False)),
            *(lin("fft", T=130), lin("fft", dtype=FP32, T=257, state=False)),
        ],
        "chunkwise-torch": [
            *(q("chunkwise-torch", repeat=True), q("chunkwise-torch", dtype=FP32, G=2, d=96, T=130)),
            *(lin("chunkwise-torch", T=130), lin("chunkwise-torch", dtype=FP32, T=65)),
        ],
        "reference": [q("reference", dtype=FP32, T=63), lin("reference", dtype=FP32, T=63)],
        "features": [
            *(features("triton", mode=mode, repeat=True) for mode in _features.STAGES),
            *(features("triton", mode=mode, dtype=FP32, d=96, T=65) for mode in ("query", "key", "value")),
            *(features("triton", mode="key", state=False, T=1, B=16), features("triton", mode="key", B=1, T=70_001)),
            *(features("triton", mode=mode, documents=True) for mode in ("query", "key")),
            *(features("torch", mode="key", documents=True), features("torch", mode="a", dtype=FP32)),
        ],
        "step": [
            *(step(), step(mode="in place"), step(mode="graph"), step(dtype=FP32, G=4, H=2), step(d=96, B=3, H=5)),
            *(step(half=True, mode=mode) for mode in ("", "in place", "graph")),
            *(step(half=True, dtype=FP32, G=4, H=2, B=40), step(half=True, d=96, wider=1)),
            *(step(linear=True), step(linear=True, mode="in place"), step(linear=True, mode="graph", dtype=FP32, d=96)),
            *(features_step("triton"), features_step("triton", B=1), features_step("torch")),
            features_step("triton", dtype=FP32, d=96, B=19, H=5),
        ],
    }
    if cuda:
        return every
    return {
        name: [_tiny(c) for c in cases if c.mode != "graph" and c.backend != "triton"] for name, cases in every.items()
    }


def _tiny(case: Case) -> Case:
    s = case.shape
    small = Shape(B=min(s.B, 2), T=min(s.T, 33), H=min(s.H, 2), d=s.d // 8, M=s.M // 8, G=min(s.G, 2))
    return replace(case, shape=small)
