"""Every backend against the paper's loop: values, final state and every gradient, down to dt, A, C and the state."""

import pytest
import torch

from interdomain import scan

from .common import (
    CASES,
    RUNNABLE,
    WRITTEN_OUT,
    Case,
    assert_agree,
    exact,
    op_inputs,
    paper_linear,
    paper_query,
    run_linear,
    run_op,
    run_query,
)

linear_or_query = pytest.mark.parametrize("linear", [False, True], ids=["query", "linear"])


def check(case, linear, backend, chunk_size=None):
    fn, run, paper = (
        (scan.linear_scan, run_linear, paper_linear) if linear else (scan.interdomain_scan, run_query, paper_query)
    )

    def call(*args):
        return fn(*args[:-1], initial_state=args[-1], backend=backend, chunk_size=chunk_size)

    assert_agree(run(case, call), paper(case), "float64")


@pytest.mark.parametrize("backend", RUNNABLE)
@pytest.mark.parametrize("case", CASES, ids=str)
@linear_or_query
def test_every_backend_is_the_paper_s(linear, case, backend):
    check(case, linear, backend)


@pytest.mark.parametrize("chunk_size", [1, 7, 32])
@linear_or_query
def test_chunk_size_does_not_change_the_function(linear, chunk_size):
    check(CASES[5], linear, "chunkwise", chunk_size)


@linear_or_query
@pytest.mark.parametrize("backend", RUNNABLE)
@pytest.mark.parametrize("decay", ["s4d", "strong", "weak"])
def test_float32(decay, backend, linear):
    case = Case(T=129, R=16, D=16, M=64 if decay == "s4d" else 16, decay=decay)
    inputs, cotangents = op_inputs(case, torch.float32, linear=linear)
    assert_agree(run_op(inputs, cotangents, linear, backend=backend), exact(inputs, cotangents, linear), "float32")


@linear_or_query
@pytest.mark.parametrize("chunk_size", [63, 64])
def test_float32_at_the_decay_bound(chunk_size, linear):
    """Every mode at |Lambda| = 1/e: the tables of a chunk span e^-32 to e^32."""
    inputs, cotangents = op_inputs(Case(T=300, R=8, D=8), torch.float32, linear=linear)
    with torch.no_grad():
        inputs["log_decay"][..., 0] = -scan.MAX_DECAY_PER_TOKEN
    got = run_op(inputs, cotangents, linear, backend="chunkwise", chunk_size=chunk_size)
    assert_agree(got, exact(inputs, cotangents, linear), "float32")


@linear_or_query
@pytest.mark.parametrize("backend", RUNNABLE)
def test_half_precision_inputs(backend, linear):
    dtype = torch.bfloat16
    case = Case(T=130, G=3, R=16, D=16, M=32, decay="s4d")
    inputs, cotangents = op_inputs(case, torch.float32, dtype, linear)
    got, expected = run_op(inputs, cotangents, linear, backend=backend), exact(inputs, cotangents, linear)
    assert got["out"].dtype == dtype
    assert got["state"].dtype == torch.float32
    rounded = {n for n, x in got.items() if x.dtype == dtype}
    assert rounded == ({"out", "dz"} if linear else {"out", "dq", "dk", "dv"})
    assert_agree({n: got[n] for n in rounded}, {n: expected[n] for n in rounded}, "bfloat16")
    if backend in (*WRITTEN_OUT, "reference"):  # what stays in fp32 never passes through the input's dtype
        rest = got.keys() - rounded
        assert_agree({n: got[n] for n in rest}, {n: expected[n] for n in rest}, "float32")


@linear_or_query
@pytest.mark.parametrize("backend", RUNNABLE)
def test_gradcheck(backend, linear):
    inputs, _ = op_inputs(Case(T=5, B=1, H=1, G=2, R=2, D=1, M=2), torch.float64, linear=linear)
    fn = scan.linear_scan if linear else scan.interdomain_scan
    names = list(inputs)

    def call(*tensors):
        return fn(**dict(zip(names, tensors, strict=True)), backend=backend, chunk_size=2)

    assert torch.autograd.gradcheck(call, tuple(inputs.values()))


@linear_or_query
@pytest.mark.parametrize("backend", RUNNABLE)
@pytest.mark.parametrize("t", [1, 64])
def test_causality(backend, linear, t):
    """Changing tokens from t on leaves the outputs before t alone, and those outputs send no gradient to them."""
    inputs, cotangents = op_inputs(Case(T=130), torch.float64, linear=linear)
    fn = scan.linear_scan if linear else scan.interdomain_scan
    out, _ = fn(**inputs, backend=backend)
    tokens = [n for n in ("q", "k", "v", "z") if n in inputs]
    grads = torch.autograd.grad((out * cotangents[0])[:, :t].sum(), [inputs[n] for n in tokens])
    changed = {n: x.detach().clone() for n, x in inputs.items()}
    for n in tokens:
        changed[n][:, t:] = 3 - changed[n][:, t:]
    other, _ = fn(**changed, backend=backend)
    if backend == "fft":  # the transform mixes all of time: causal up to rounding
        torch.testing.assert_close(other[:, :t], out[:, :t], rtol=0, atol=1e-12)
        assert all(g[:, t:].abs().max() < 1e-12 for g in grads)
    else:
        assert torch.equal(other[:, :t], out[:, :t])
        assert all(torch.count_nonzero(g[:, t:]) == 0 for g in grads)
    assert not torch.equal(other[:, t:], out[:, t:])
    assert all(g[:, :t].abs().max() > 0 for g in grads)


@linear_or_query
@pytest.mark.parametrize("T", [1, 64, 130])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("backend", WRITTEN_OUT)
def test_every_byte_is_written(backend, T, linear, state, poisoned_memory):
    inputs, cotangents = op_inputs(Case(T=T, G=3, R=5, D=3, state=state), torch.float32, linear=linear)
    results = run_op(inputs, cotangents, linear, backend=backend)
    assert torch.isnan(torch.empty(3)).all()
    assert all(torch.isfinite(x).all() for x in results.values())


@pytest.mark.parametrize("backend", WRITTEN_OUT)
def test_strided_inputs(backend):
    """q, k, v cut out of one projection, as the model makes them."""
    case = Case(T=70, H=2, G=1, R=6, D=6)
    inputs, cotangents = op_inputs(case, torch.float64)
    packed = torch.stack([inputs[n].detach() for n in "qkv"], dim=3).flatten(2).requires_grad_()
    q, k, v = packed.unflatten(2, (2, 3, 6)).unbind(3)
    rest = {n: x for n, x in inputs.items() if n not in "qkv"}
    got = run_op({"q": q, "k": k, "v": v, **rest}, cotangents, backend=backend)
    expanded = (cotangents[0][:, :1, :1, :1].expand_as(cotangents[0]), cotangents[1])
    assert_agree(got, exact(inputs, cotangents), "float64")
    got = run_op({"q": q, "k": k, "v": v, **rest}, expanded, backend=backend)
    assert_agree(got, exact(inputs, expanded), "float64")


@pytest.mark.parametrize("backend", WRITTEN_OUT)
def test_grouped_heads_equal_repeated_states(backend):
    case = Case(T=70, G=3)
    inputs, _ = op_inputs(case, torch.float64)
    repeated = {
        n: x if n == "q" else x.repeat_interleave(3, dim={"k": 2, "v": 2, "initial_state": 1}.get(n, 0))
        for n, x in inputs.items()
    }
    grouped, _ = scan.interdomain_scan(**inputs, backend=backend)
    expected, _ = scan.interdomain_scan(**repeated, backend=backend)
    torch.testing.assert_close(grouped, expected, rtol=1e-12, atol=1e-12)
