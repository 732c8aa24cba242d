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
    assert_within,
    error,
    exact,
    linear_or_query,
    op_inputs,
    paper,
    run_case,
    run_op,
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
S4D = Case(T=129, R=16, D=16, M=64, decay="s4d")
NARROW = Case(T=257, H=1, G=2, R=2, D=3, M=3)
# Backend, problem, decay of every mode if set, tokens of a chunk.
FLOAT32 = [
    ("chunkwise", S4D, None, 64),
    ("fft", S4D, None, 64),
    ("reference", S4D, None, 64),
    ("chunkwise", Case(T=129, R=16, D=16, decay="weak"), None, 64),
    # Every mode at |Lambda| = 1/e: the tables of a chunk span e^-32 to e^32.
    ("chunkwise", Case(T=300, R=8, D=8), BOUND, 63),
    ("chunkwise", Case(T=300, R=8, D=8), BOUND, 64),
    # At 1e-6 nothing is forgotten: every kernel is a tone of 1024 tokens, and a gradient of theta sums lags up to T.
    ("fft", Case(T=1024, H=1, G=2, R=2, D=3, M=3), -1e-6, 64),
    # As fast as `chunkwise` takes, and faster.
    ("chunkwise", Case(T=129, R=8, D=8), -1.36, 64),
    ("fft", NARROW, BOUND, 64),
    ("fft", NARROW, -10.0, 64),
]


@linear_or_query
@pytest.mark.parametrize(("backend", "case", "decay", "chunk"), FLOAT32, ids=str)
def test_float32(backend, case, decay, chunk, linear, monkeypatch):
    monkeypatch.setattr(chunkwise_layout, "CHUNK", chunk)
    inputs, cotangents = op_inputs(case, torch.float32, linear=linear)
    if decay is not None:
        inputs["log_decay"].data[..., 0] = decay
    got = run_op(inputs, cotangents, backend=backend)
    assert_agree(got, exact(inputs, cotangents), "float32")


@linear_or_query
def test_no_gradient_overflows_at_the_fastest_decay(linear):
    """Tables of a chunk span e^-44 to e^45 there, so the order of products matters in float32."""
    inputs, cotangents = op_inputs(Case(T=129, R=8, D=8), torch.float32, linear=linear)
    inputs["log_decay"].data[..., 0] = -1.36
    inputs["z" if linear else "k"].data *= 1e5
    got = run_op(inputs, cotangents, backend="chunkwise")
    assert_agree(got, exact(inputs, cotangents), "float32")


def test_the_final_state_of_fft_takes_no_rounding_from_the_transforms():
    """An outlier at the start is long forgotten by the fast modes; the error of a transform stays as large as it was."""
    inputs, _ = op_inputs(Case(T=257, R=4, D=4, M=8, state=False), torch.float32)
    inputs["log_decay"].data[..., 0] = -0.2
    inputs["k"].data[:, 5] *= 1e6
    _, state = run_scan(**inputs, backend="fft")
    _, expected = run_scan(**as_float64(inputs), backend="reference")
    assert error(state, expected) < 1e-6


@linear_or_query
@every_backend
def test_half_precision_inputs(backend, linear):
    """Tensors in the inputs' dtype are rounded once; no other tensor passes through that dtype."""
    case = Case(T=70, G=3, R=16, D=16, M=32, decay="s4d")
    inputs, cotangents = op_inputs(case, torch.float32, torch.bfloat16, linear)
    got = run_op(inputs, cotangents, backend=backend)
    expected = exact(inputs, cotangents)
    rounded = {name for name, x in got.items() if x.dtype == torch.bfloat16}
    assert rounded in ({"out", "dz"}, {"out", "dq", "dk", "dv"})
    for name, x in got.items():
        tolerance = "bfloat16" if name in rounded else "float32"
        assert_agree({name: x}, {name: expected[name]}, tolerance)
