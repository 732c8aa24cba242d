"""backend="sequential" against the loop over time: values, final state and every gradient.

On a machine with a GPU these tests run there. Elsewhere the last one runs this file, and that of the step, in a process of
their own under Triton's interpreter, which has to be chosen before triton is imported.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from interdomain import scan
from interdomain.scan import ops, triton_support

from .common import (
    Case,
    assert_agree,
    error,
    exact,
    gradients,
    op_inputs,
    paper_linear,
    paper_query,
    run_op,
    run_query,
)
from .common import run_linear as run_linear_case
from .test_documents import one_by_one, packed

pytest.importorskip("triton")
REPOSITORY = Path(__file__).parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
on_kernels = pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="needs a GPU or TRITON_INTERPRET=1")

QUERY = (
    Case(T=1, B=2, H=1, R=16, D=16),
    Case(T=17, H=2, G=2, R=6, D=7, readout="hermitian"),
    Case(T=63, H=1, R=16, D=17, state=False),
    Case(T=65, H=1, G=2, R=8, D=9, readout="real"),
    Case(T=10, H=1, R=96, D=96),
    Case(T=33, H=1, R=8, D=8, M=64, decay="s4d"),
    Case(T=18, H=1, R=20, D=24, M=128, decay="s4d"),
    Case(T=36, H=1, G=2, R=7, D=5, decay="strong"),
    Case(T=50, H=1, R=5, D=7, M=24, decay="weak"),
)
LINEAR = (
    Case(T=1, B=2, H=1, R=16, D=16),
    Case(T=17, H=2, R=6, D=7, state=False),
    Case(T=65, H=1, R=8, D=8, M=32),
    Case(T=10, H=1, R=96, D=97, decay="s4d"),
    Case(T=36, H=1, R=7, D=5, decay="strong"),
)
linear_or_query = pytest.mark.parametrize("linear", [False, True], ids=["query", "linear"])
BOUNDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "bfloat16"}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Uninitialised memory is NaN, and the interpreter rounds to bf16 as a GPU does."""
    if not INTERPRETED and DEVICE == "cpu":
        yield None
        return
    if INTERPRETED:
        from . import triton_interpreter

        triton_interpreter.repair(monkeypatch)
    from interdomain.scan.alternatives import sequential as triton_sequential

    def poisoned(make):
        def made(*args, **kwargs):
            x = make(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return made

    monkeypatch.setattr(scan, "_choose", lambda backend, *_: backend)  # which refuses tensors on a CPU
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    yield triton_sequential


def run(inputs, cotangents, linear=False, **kw):
    """On DEVICE: outputs and gradients, brought back."""
    inputs = {n: x.detach().to(DEVICE).requires_grad_() for n, x in inputs.items()}
    results = run_op(inputs, tuple(x.to(DEVICE) for x in cotangents), linear, backend="sequential", **kw)
    return {n: x.cpu() for n, x in results.items()}


@functools.cache
def problem(case, dtype, linear):
    inputs, cotangents = op_inputs(case, torch.float32, dtype, linear)
    return inputs, cotangents, exact(inputs, cotangents, linear)


def check(case, dtype, linear):
    inputs, cotangents, expected = problem(case, dtype, linear)
    got = run(inputs, cotangents, linear)
    tokens = {"out", "dq", "dk", "dv", "dz"}
    assert all(x.dtype == (dtype if n in tokens else torch.float32) for n, x in got.items())
    for names, bound in ((tokens, BOUNDS[dtype]), (got.keys() - tokens, "float32")):
        assert_agree(*({n: x for n, x in side.items() if n in names} for side in (got, expected)), bound)


@on_kernels
@pytest.mark.parametrize("case", QUERY, ids=str)
def test_query_readout(case):
    check(case, torch.float32, False)


@on_kernels
@pytest.mark.parametrize("case", LINEAR, ids=str)
def test_linear_readout(case):
    check(case, torch.float32, True)


@on_kernels
@linear_or_query
def test_documents(linear):
    """Documents that end anywhere between the anchors, every four tokens, and the checkpoints, every sixteen."""
    case = Case(T=50, B=2, H=1, G=1 if linear else 2, R=7, D=5)
    inputs, cotangents, _ = problem(case, torch.float32, linear)
    documents = packed(case.T, ((0, 1, 5, 16, 18, 31, 47, 48, 49), (0, 13, 22)))
    got = run(inputs, cotangents, linear, documents=documents.to(DEVICE))
    assert_agree(got, one_by_one(inputs, cotangents, documents, linear), "float32")


@on_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_inputs(dtype):
    """The tensors of tokens are rounded once, at the end; all else is fp32 as ever."""
    # s4d: outputs large enough for fp16, which has no digits left under 1e-5.
    check(Case(T=21, H=1, G=2, R=8, D=9, M=32, decay="s4d"), dtype, False)
    check(Case(T=21, H=1, R=8, D=9, M=32, decay="s4d"), dtype, True)


@on_kernels
@pytest.mark.parametrize("case", [QUERY[1], QUERY[7]], ids=str)
def test_float64_is_the_paper_s(case):
    """The same kernels in fp64, down to the gradients of dt, A and C: nothing left to hide behind rounding."""

    def on_device(fn):
        def call(*args):
            *args, state = (None if x is None else x.to(DEVICE) for x in args)
            return tuple(x.cpu() for x in fn(*args, initial_state=state, backend="sequential"))

        return call

    assert_agree(run_query(case, on_device(scan.interdomain_scan)), paper_query(case), "float64")
    assert_agree(run_linear_case(case, on_device(scan.linear_scan)), paper_linear(case), "float64")


@on_kernels
@linear_or_query
def test_states_of_the_past_at_the_decay_bound(linear, kernels):
    """Every mode at |Lambda| = 1/e, where a division costs a factor e: the gradients that read recovered states are as
    exact as the rest (measured up to 4e-6), and would not be with a checkpoint per 16 tokens alone."""
    case = Case(T=60, H=1, G=1 if linear else 2, R=8, D=8)
    inputs, cotangents = op_inputs(case, torch.float32, linear=linear)
    with torch.no_grad():
        inputs["log_decay"][..., 0] = -scan.MAX_DECAY_PER_TOKEN
    expected = exact(inputs, cotangents, linear)
    assert_agree(run(inputs, cotangents, linear), expected, "float32")

    # What the paper's rule would give: from the state after a segment back to the one after its first token.
    X = expected["state"].detach()[0, 0].float()
    theta = inputs["log_decay"].detach()[0].double()
    Lambda = torch.polar(theta[:, 0].exp(), theta[:, 1]).to(torch.complex64)[:, None]
    z = torch.randn(15, X.shape[1], dtype=torch.complex64).real
    errors = {}
    for steps in (kernels.ANCHOR - 1, kernels.SEGMENT - 1):
        forth = start = torch.view_as_complex(X)
        for t in range(steps):
            forth = Lambda * forth + z[t]
        for t in reversed(range(steps)):
            forth = (forth - z[t]) / Lambda
        errors[steps] = error(torch.view_as_real(forth), torch.view_as_real(start), "rms")
    assert errors[kernels.ANCHOR - 1] < 1e-5
    assert errors[kernels.SEGMENT - 1] > 1e-2


@on_kernels
@linear_or_query
def test_absent_cotangents_and_gradients(linear, kernels):
    """No cotangent of the state, no gradient of the decay: nothing is read that is not there, nothing else changes."""
    inputs, cotangents, _ = problem(Case(T=20, H=1, G=1 if linear else 2, R=8, D=8), torch.float32, linear)
    zero = (cotangents[0], torch.zeros_like(cotangents[1]))
    expected = exact(inputs, zero, linear)
    args = [inputs[n].detach().to(DEVICE) for n in inputs]
    backward = kernels.linear_backward if linear else kernels.scan_backward
    grads = backward(cotangents[0].to(DEVICE), None, *args, 64, False)
    got = dict(zip((f"d{n}" for n in inputs), grads, strict=True))
    assert got.pop("dlog_decay") is None
    assert_agree({n: x.cpu() for n, x in got.items()}, {n: expected[n] for n in got}, "float32")


@on_kernels
def test_strided_inputs():
    """q, k, v cut out of one projection; a cotangent that is one number, expanded."""
    inputs, cotangents, _ = problem(Case(T=20, H=2, R=6, D=6), torch.float32, False)
    cotangents = (cotangents[0][:, :1, :1, :1].expand_as(cotangents[0]), cotangents[1])
    expected = exact(inputs, cotangents)
    packed = torch.stack([inputs[n].detach() for n in "qkv"], dim=3).flatten(2)
    q, k, v = packed.unflatten(2, (2, 3, 6)).unbind(3)
    assert q.stride(1) == 36
    assert_agree(run({**inputs, "q": q, "k": k, "v": v}, cotangents), expected, "float32")
    transposed = {**inputs, "k": inputs["k"].detach().mT.contiguous().mT}
    assert_agree(run(transposed, cotangents), expected, "float32")


@on_kernels
def test_offsets_beyond_32_bits(kernels):
    """Tokens 2^25 numbers apart: the last ones lie beyond 2^31."""
    T, stride = 70, 1 << 25
    inputs, cotangents, expected = problem(Case(T=T, H=1, R=8, D=8), torch.bfloat16, False)
    inputs = {n: x.detach().to(DEVICE) for n, x in inputs.items()}
    for name in "qk":
        memory = torch.empty_strided((1, T, 1, 8), (T * stride, stride, 8, 1), dtype=torch.bfloat16, device=DEVICE)
        inputs[name] = memory.copy_(inputs[name])
    out, state = scan.interdomain_scan(**inputs, backend="sequential")
    assert_agree({"out": out.cpu()}, {"out": expected["out"]}, "bfloat16")
    assert_agree({"state": state.cpu()}, {"state": expected["state"]}, "float32")
    d_out, d_state = (x.to(DEVICE) for x in cotangents)
    dk = kernels.scan_backward(d_out, d_state, *inputs.values(), 64)[1]
    assert_agree({"dk": dk.cpu()}, {"dk": expected["dk"]}, "bfloat16")


@on_kernels
@linear_or_query
def test_runs_repeat_bit_for_bit(linear):
    case = Case(T=10, B=2, H=1, G=1 if linear else 2, R=8, D=9)
    inputs, cotangents, _ = problem(case, torch.bfloat16, linear)
    first, second = (run(inputs, cotangents, linear) for _ in range(2))
    assert all(torch.equal(first[n], second[n]) for n in first)
    fn = scan.linear_scan if linear else scan.interdomain_scan
    out, state = fn(**inputs, backend="sequential", final_state=False)
    assert state is None
    assert torch.equal(out, first["out"])


@on_kernels
@linear_or_query
def test_opcheck_and_compile(linear):
    """One node for torch.compile, forward and backward."""
    case = Case(T=5, H=1, G=1 if linear else 2, R=4, D=3, M=4)
    inputs, cotangents = op_inputs(case, torch.float32, torch.bfloat16, linear)
    inputs = {n: x.detach().to(DEVICE).requires_grad_() for n, x in inputs.items()}
    cotangents = tuple(x.to(DEVICE) for x in cotangents)
    op, backward = (ops.linear_scan, ops.linear_scan_backward) if linear else (ops.scan, ops.scan_backward)
    args = (*inputs.values(), 0, "sequential")
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op, args, test_utils=tests)
    args = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
    torch.library.opcheck(backward, (*cotangents, *args, True), test_utils=tests[::2])
    fn = functools.partial(scan.linear_scan if linear else scan.interdomain_scan, backend="sequential")
    results = []
    for call in (fn, torch.compile(fn, fullgraph=True, backend="aot_eager")):
        outputs = call(**inputs)
        results.append((*outputs, *gradients(outputs, cotangents, inputs).values()))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


# What follows needs neither a GPU nor the interpreter.


@pytest.mark.skipif(INTERPRETED, reason="the door is open there")
def test_refusals(monkeypatch):
    """An explicit backend never falls back."""
    x, theta = torch.randn(1, 5, 1, 4), -torch.rand(1, 3, 2)
    with pytest.raises(ValueError, match="is Triton on CUDA and cannot run this: the inputs are on cpu"):
        scan.linear_scan(x, theta, torch.randn(1, 6), backend="sequential")
    monkeypatch.setattr(triton_support, "_INSTALLED", False)
    with FakeTensorMode(), pytest.raises(ValueError, match=r"triton is not installed.*backend='reference'"):
        scan._choose("sequential", None, (torch.empty(1, 5, 1, 4, device="cuda"),), 3)


@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="this is that process, or there is a GPU")
def test_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [__file__, __file__.replace("sequential", "step")]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "4 skipped" in done.stdout  # this test, the refusals, and what a step does on a GPU alone (twice)
