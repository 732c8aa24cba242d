"""Every backend against the paper's loop: values, final state and every gradient, down to dt, A, C and the state."""

import pytest
import torch

from interdomain import scan
from interdomain.scan import chunkwise_layout

from .common import (
    BACKENDS,
    CASES,
    Case,
    assert_agree,
    error,
    exact,
    function,
    linear_or_query,
    op_inputs,
    paper,
    run_case,
    run_op,
)
from .devices import poison

every_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Memory that a backend does not write reads as NaN."""
    poison(monkeypatch)
    assert torch.isnan(torch.empty(3)).all()


def check(case, linear, backend):
    def call(*args):
        return function(linear)(*args[:-1], initial_state=args[-1], backend=backend)

    assert_agree(run_case(case, linear, call), paper(case, linear), "float64")


@every_backend
@pytest.mark.parametrize("case", CASES, ids=str)
@linear_or_query
def test_every_backend_is_the_paper_s(linear, case, backend):
    check(case, linear, backend)


BOUND = -scan.MAX_DECAY_PER_TOKEN
# Backend, problem, decay of every mode if set, tokens of a chunk.
FLOAT32 = [
    *((backend, Case(T=129, R=16, D=16, M=64, decay="s4d"), None, 64) for backend in BACKENDS),
    ("chunkwise", Case(T=129, R=16, D=16, decay="weak"), None, 64),
    # Every mode at |Lambda| = 1/e: the tables of a chunk span e^-32 to e^32.
    *(("chunkwise", Case(T=300, R=8, D=8), BOUND, chunk) for chunk in (63, 64)),
    # At 1e-6 nothing is forgotten: every kernel is a tone of 1024 tokens, and a gradient of theta sums lags up to T.
    ("fft", Case(T=1024, H=1, G=2, R=2, D=3, M=3), -1e-6, 64),
    # As fast as `chunkwise` takes, and faster.
    ("chunkwise", Case(T=129, R=8, D=8), -1.36, 64),
    *(("fft", Case(T=257, H=1, G=2, R=2, D=3, M=3), decay, 64) for decay in (BOUND, -10.0)),
]


@linear_or_query
@pytest.mark.parametrize(("backend", "case", "decay", "chunk"), FLOAT32, ids=str)
def test_float32(backend, case, decay, chunk, linear, monkeypatch):
    monkeypatch.setattr(chunkwise_layout, "CHUNK", chunk)
    inputs, cotangents = op_inputs(case, torch.float32, linear=linear)
    if decay is not None:
        with torch.no_grad():
            inputs["log_decay"][..., 0] = decay
    got, expected = (
        run_op(inputs, cotangents, linear, backend=backend),
        exact(inputs, cotangents, linear),
    )
    assert_agree(got, expected, "float32")
    if backend == "fft":  # measured: 3e-7, and 1e-6 in dw at the bound
        assert max(error(got[n], expected[n], "rms") for n in got) < 2e-6


def test_the_final_state_of_fft_takes_no_rounding_from_the_transforms():
    """An outlier at the start is long forgotten by the fast modes; the error of a transform stays as large as it was."""
    inputs, _ = op_inputs(Case(T=257, R=4, D=4, M=8, state=False), torch.float32)
    with torch.no_grad():
        inputs["log_decay"][..., 0] = -0.2
        inputs["k"][:, 5] *= 1e6
    _, state = scan.interdomain_scan(**inputs, backend="fft")
    _, expected = scan.interdomain_scan(
        **{n: x.double() for n, x in inputs.items()}, backend="reference"
    )
    assert error(state, expected, "rms") < 1e-6


@linear_or_query
@every_backend
def test_half_precision_inputs(backend, linear):
    """Tensors in the inputs' dtype are rounded once; no other tensor passes through that dtype."""
    dtype = torch.bfloat16
    case = Case(T=70, G=3, R=16, D=16, M=32, decay="s4d")
    inputs, cotangents = op_inputs(case, torch.float32, dtype, linear)
    got, expected = (
        run_op(inputs, cotangents, linear, backend=backend),
        exact(inputs, cotangents, linear),
    )
    rounded = {n for n, x in got.items() if x.dtype == dtype}
    assert rounded == ({"out", "dz"} if linear else {"out", "dq", "dk", "dv"})
    for names, tolerance in ((rounded, "bfloat16"), (got.keys() - rounded, "float32")):
        assert_agree({n: got[n] for n in names}, {n: expected[n] for n in names}, tolerance)
