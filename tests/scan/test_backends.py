"""Every backend against the paper's loop: values, final state and every gradient, down to dt, A, C and the state."""

import pytest
import torch

from interdomain import scan
from interdomain.scan import chunkwise

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


def check(case, linear, backend):
    def call(*args):
        return function(linear)(*args[:-1], initial_state=args[-1], backend=backend)

    assert_agree(run_case(case, linear, call), paper(case, linear), "float64")


@every_backend
@pytest.mark.parametrize("case", CASES, ids=str)
@linear_or_query
def test_every_backend_is_the_paper_s(linear, case, backend):
    check(case, linear, backend)


@pytest.mark.parametrize("chunk", [1, 7, 32])
@linear_or_query
def test_the_chunk_does_not_change_the_function(linear, chunk, monkeypatch):
    monkeypatch.setattr(chunkwise, "CHUNK", chunk)
    check(CASES[5], linear, "chunkwise")


@linear_or_query
@every_backend
@pytest.mark.parametrize("decay", ["s4d", "strong", "weak"])
def test_float32(decay, backend, linear):
    case = Case(T=129, R=16, D=16, M=64 if decay == "s4d" else 16, decay=decay)
    inputs, cotangents = op_inputs(case, torch.float32, linear=linear)
    assert_agree(run_op(inputs, cotangents, linear, backend=backend), exact(inputs, cotangents, linear), "float32")


@linear_or_query
@pytest.mark.parametrize("chunk", [63, 64])
def test_float32_at_the_decay_bound(chunk, linear, monkeypatch):
    """Every mode at |Lambda| = 1/e: the tables of a chunk span e^-32 to e^32."""
    monkeypatch.setattr(chunkwise, "CHUNK", chunk)
    inputs, cotangents = op_inputs(Case(T=300, R=8, D=8), torch.float32, linear=linear)
    with torch.no_grad():
        inputs["log_decay"][..., 0] = -scan.MAX_DECAY_PER_TOKEN
    got = run_op(inputs, cotangents, linear, backend="chunkwise")
    assert_agree(got, exact(inputs, cotangents, linear), "float32")


@linear_or_query
@pytest.mark.parametrize(("T", "decay"), [(2048, -1e-6), (257, -scan.MAX_DECAY_PER_TOKEN)], ids=["slow", "bound"])
def test_fft_in_float32_at_both_ends_of_the_decay(T, decay, linear):
    """At 1e-6 nothing is forgotten: every kernel is a tone of 2048 tokens, and a gradient of theta sums lags up to T."""
    inputs, cotangents = op_inputs(Case(T=T, H=1, G=2, R=2, D=3, M=3), torch.float32, linear=linear)
    with torch.no_grad():
        inputs["log_decay"][..., 0] = decay
    got, expected = run_op(inputs, cotangents, linear, backend="fft"), exact(inputs, cotangents, linear)
    assert_agree(got, expected, "float32")
    assert max(error(got[n], expected[n], "rms") for n in got) < 2e-6  # measured: 3e-7, and 1e-6 in dw at the bound


def test_the_final_state_of_fft_takes_no_rounding_from_the_transforms():
    """An outlier at the start is long forgotten by the fast modes; the error of a transform stays as large as it was."""
    inputs, _ = op_inputs(Case(T=257, R=4, D=4, M=8, state=False), torch.float32)
    with torch.no_grad():
        inputs["log_decay"][..., 0] = -0.2
        inputs["k"][:, 5] *= 1e6
    _, state = scan.interdomain_scan(**inputs, backend="fft")
    _, expected = scan.interdomain_scan(**{n: x.double() for n, x in inputs.items()}, backend="reference")
    assert error(state, expected, "rms") < 1e-6


@linear_or_query
@every_backend
def test_half_precision_inputs(backend, linear):
    """What is returned in the inputs' dtype is rounded once; the rest never passes through it."""
    dtype = torch.bfloat16
    case = Case(T=130, G=3, R=16, D=16, M=32, decay="s4d")
    inputs, cotangents = op_inputs(case, torch.float32, dtype, linear)
    got, expected = run_op(inputs, cotangents, linear, backend=backend), exact(inputs, cotangents, linear)
    rounded = {n for n, x in got.items() if x.dtype == dtype}
    assert rounded == ({"out", "dz"} if linear else {"out", "dq", "dk", "dv"})
    assert_agree({n: got[n] for n in rounded}, {n: expected[n] for n in rounded}, "bfloat16")
    rest = got.keys() - rounded
    assert_agree({n: got[n] for n in rest}, {n: expected[n] for n in rest}, "float32")


@linear_or_query
@every_backend
def test_gradcheck(backend, linear, monkeypatch):
    monkeypatch.setattr(chunkwise, "CHUNK", 2)
    inputs, _ = op_inputs(Case(T=5, B=1, H=1, G=2, R=2, D=1, M=2), torch.float64, linear=linear)

    def call(*tensors):
        return function(linear)(**dict(zip(inputs, tensors, strict=True)), backend=backend)

    assert torch.autograd.gradcheck(call, tuple(inputs.values()))


@linear_or_query
@every_backend
def test_causality(backend, linear):
    """Changing tokens from 64 on leaves the outputs before alone, and those outputs send no gradient to them."""
    t = 64
    inputs, cotangents = op_inputs(Case(T=130), torch.float64, linear=linear)
    out, _ = function(linear)(**inputs, backend=backend)
    tokens = [n for n in ("q", "k", "v", "z") if n in inputs]
    grads = torch.autograd.grad((out * cotangents[0])[:, :t].sum(), [inputs[n] for n in tokens])
    changed = {n: x.detach().clone() for n, x in inputs.items()}
    for n in tokens:
        changed[n][:, t:] = 3 - changed[n][:, t:]
    other, _ = function(linear)(**changed, backend=backend)
    bound = 1e-12 if backend == "fft" else 0  # the transform mixes all of time: causal up to rounding
    torch.testing.assert_close(other[:, :t], out[:, :t], rtol=0, atol=bound)
    assert all(g[:, t:].abs().max() <= bound for g in grads)
    assert not torch.equal(other[:, t:], out[:, t:])
    assert all(g[:, :t].abs().max() > 0 for g in grads)


@linear_or_query
@pytest.mark.parametrize(("T", "state"), [(1, True), (64, False), (130, True)])
def test_every_byte_is_written(T, linear, state, monkeypatch):
    poison(monkeypatch)
    inputs, cotangents = op_inputs(Case(T=T, G=3, R=5, D=3, state=state), torch.float32, linear=linear)
    results = run_op(inputs, cotangents, linear, backend="chunkwise")
    assert torch.isnan(torch.empty(3)).all()
    assert all(torch.isfinite(x).all() for x in results.values())


def test_strided_inputs():
    """q, k, v cut out of one projection, as the model makes them; a cotangent that is one number."""
    inputs, cotangents = op_inputs(Case(T=70, H=2, G=1, R=6, D=6), torch.float64)
    packed = torch.stack([inputs[n].detach() for n in "qkv"], dim=3).flatten(2).requires_grad_()
    views = dict(zip("qkv", packed.unflatten(2, (2, 3, 6)).unbind(3), strict=True))
    for first in (cotangents[0], cotangents[0][:, :1, :1, :1].expand_as(cotangents[0])):
        given = first, cotangents[1]
        assert_agree(run_op(inputs | views, given, backend="chunkwise"), exact(inputs, given), "float64")
