"""Every backend against the paper's loop: values, final state and every gradient, down to dt, A, C and the state."""

import functools

import pytest
import torch

from interdomain import scan
from interdomain.scan import chunkwise_layout

from .common import (
    BACKENDS,
    CASES,
    Case,
    as_float64,
    assert_agree,
    error,
    exact,
    linear_or_query,
    op_inputs,
    paper,
    results,
    run_case,
    run_scan,
)
from .devices import poison

every_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Memory that a backend does not write reads as NaN."""
    poison(monkeypatch)
    assert torch.isnan(torch.empty(3)).all()


@every_backend
@pytest.mark.parametrize("case", CASES, ids=str)
@linear_or_query
def test_every_backend_is_the_paper_s(linear, case, backend):
    got = run_case(case, linear, functools.partial(run_scan, backend=backend))
    assert_agree(got, paper(case, linear), "float64")


BOUND = -scan.MAX_DECAY_PER_TOKEN
FP32, BF16 = torch.float32, torch.bfloat16
S4D = Case(T=129, R=16, D=16, M=64, decay="s4d")
GROUPED = Case(T=70, G=3, R=16, D=16, M=32, decay="s4d")
NARROW = Case(T=257, H=1, G=2, R=2, D=3, M=3)
# Backend, problem, decay of every mode if set, tokens of a chunk, dtype of activations.
ROUNDED = [
    ("chunkwise", S4D, None, 64, FP32),
    ("fft", S4D, None, 64, FP32),
    ("reference", S4D, None, 64, FP32),
    ("chunkwise", GROUPED, None, 64, BF16),
    ("fft", GROUPED, None, 64, BF16),
    ("reference", GROUPED, None, 64, BF16),
    ("chunkwise", Case(T=129, R=16, D=16, decay="weak"), None, 64, FP32),
    # Every mode at |Lambda| = 1/e: the tables of a chunk span e^-32 to e^32.
    ("chunkwise", Case(T=300, R=8, D=8), BOUND, 63, FP32),
    ("chunkwise", Case(T=300, R=8, D=8), BOUND, 64, FP32),
    # At 1e-6 nothing is forgotten: every kernel is a tone of 1024 tokens, and a gradient of theta sums lags up to T.
    ("fft", Case(T=1024, H=1, G=2, R=2, D=3, M=3), -1e-6, 64, FP32),
    # As fast as `chunkwise` takes, where tables span e^-44 to e^45, and faster.
    ("chunkwise", Case(T=129, R=8, D=8), -1.36, 64, FP32),
    ("fft", NARROW, BOUND, 64, FP32),
    ("fft", NARROW, -10.0, 64, FP32),
]


@linear_or_query
@pytest.mark.parametrize(("backend", "case", "decay", "chunk", "dtype"), ROUNDED, ids=str)
def test_rounding(backend, case, decay, chunk, dtype, linear, monkeypatch):
    """All is computed in fp32, also under autocast, and no product of `chunkwise` overflows with large inputs.

    Tensors in the inputs' dtype are rounded once.
    """
    monkeypatch.setattr(chunkwise_layout, "CHUNK", chunk)
    inputs, cotangents = op_inputs(case, FP32, dtype, linear)
    if decay is not None:
        inputs["log_decay"].data[..., 0] = decay
    if backend == "chunkwise":
        inputs["z" if linear else "k"].data *= 1e5
    with torch.autocast("cpu", dtype=BF16):
        with torch.device("meta"):
            outputs = run_scan(**inputs, backend=backend)
        if backend == "chunkwise":
            got = results(outputs, cotangents, inputs)
    # PyTorch asks for a backward outside of autocast, which only ops need not have.
    if backend != "chunkwise":
        got = results(outputs, cotangents, inputs)
    expected = exact(inputs, cotangents)
    for name, x in got.items():
        tokens = name in ("out", "dq", "dk", "dv", "dz")
        assert x.dtype == (dtype if tokens else FP32)
        tolerance = "float32" if x.dtype == FP32 else "bfloat16"
        assert_agree({name: x}, {name: expected[name]}, tolerance)


def test_the_final_state_of_fft_takes_no_rounding_from_the_transforms():
    """An outlier at the start is long forgotten by the fast modes; the error of a transform stays as large as it was."""
    inputs, _ = op_inputs(Case(T=257, R=4, D=4, M=8, state=False), torch.float32)
    inputs["log_decay"].data[..., 0] = -0.2
    inputs["k"].data[:, 5] *= 1e6
    _, state = run_scan(**inputs, backend="fft")
    _, expected = run_scan(**as_float64(inputs), backend="reference")
    assert error(state, expected) < 1e-6
