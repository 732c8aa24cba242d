"""The Triton kernels of `chunkwise` and `parallel` against the fp64 loop over time: values, final state and every gradient.

On a machine with a GPU these tests run there. Elsewhere the last one runs this file again in a process of its own, under
Triton's interpreter, which has to be chosen before triton is imported.
"""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from interdomain import scan
from interdomain.scan import ops, triton_plan

from .common import Case, error, exact, gradients, op_inputs, run_op
from .test_documents import one_by_one, packed

pytest.importorskip("triton")
REPOSITORY = Path(__file__).parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
on_kernels = pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="needs a GPU or TRITON_INTERPRET=1")

# Relative RMS error against the fp64 loop on the same rounded inputs.
TOLERANCES = {
    torch.float32: 1e-5,  # 3xTF32 products (fp32 in the interpreter: 3.2e-7), fp32 sums
    # Operands rounded to bf16 (1.7e-3 each) at eight places in a row, from q k^T to o; sums in fp32. Measured 4.8e-3.
    torch.bfloat16: 6e-3,
}
# All modes at |Lambda| = 1/e: an output is its own token and little else, summed over modes that cancel more or less.
# Over seeds the bf16 error of o runs from 3.5e-3 to 1.4e-2, that of fp32 stays below 6e-7.
AT_THE_BOUND = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """`chunkwise` and `parallel` are the Triton forms, and uninitialised memory is NaN."""
    if not (INTERPRETED or DEVICE == "cuda"):
        yield None
        return
    if INTERPRETED:
        from . import triton_interpreter

        triton_interpreter.repair(monkeypatch)
    from interdomain.scan import triton_chunkwise

    for backend in ("chunkwise", "parallel"):
        monkeypatch.setitem(ops.IMPLEMENTATIONS, backend, ops.TRITON[backend])

    def poisoned(make):
        def made(*args, **kwargs):
            x = make(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    yield triton_chunkwise


def to_device(inputs, cotangents):
    inputs = {n: x.detach().to(DEVICE).requires_grad_() for n, x in inputs.items()}
    return inputs, tuple(x.to(DEVICE) for x in cotangents)


@functools.cache
def problem(case, dtype, linear, at_the_bound=False):
    inputs, cotangents = op_inputs(case, torch.float32, dtype, linear)
    if at_the_bound:
        with torch.no_grad():
            inputs["log_decay"][..., 0] = -scan.MAX_DECAY_PER_TOKEN
    return inputs, cotangents, exact(inputs, cotangents, linear)


def errors(case, dtype, linear=False, at_the_bound=False, backend="chunkwise", **kwargs):
    inputs, cotangents, expected = problem(case, dtype, linear, at_the_bound)
    inputs, cotangents = to_device(inputs, cotangents)
    got = run_op(inputs, cotangents, linear, backend=backend, **kwargs)
    assert got.keys() == expected.keys()
    tokens = {"out", "dq", "dk", "dv", "dz"}
    assert all(x.dtype == (dtype if n in tokens else torch.float32) for n, x in got.items())
    return {n: error(got[n].cpu(), expected[n], "rms") for n in expected}


def check(case, dtype, linear=False, at_the_bound=False, bounds=TOLERANCES, **kwargs):
    found, bound = (
        errors(case, dtype, linear, at_the_bound, **kwargs),
        (AT_THE_BOUND if at_the_bound else bounds)[dtype],
    )
    assert all(e < bound for e in found.values()), f"beyond {bound:.0e}: {found}"


QUERY = (
    Case(T=1, B=2, H=1, R=16, D=16),
    Case(T=17, H=2, G=2, R=16, D=16),
    Case(T=63, H=1, R=16, D=17, readout="hermitian", state=False),
    Case(T=65, B=2, H=1, G=2, R=16, D=17, readout="real"),
    Case(T=128, H=1, G=2, R=16, D=16),  # whole chunks, and widths that fill their tiles
    Case(T=130, H=2, R=16, D=16, decay="weak"),
    Case(T=20, H=1, R=96, D=96),
    Case(T=70, H=1, R=40, D=70, M=64, decay="s4d"),
    Case(T=20, H=1, R=32, D=24, M=128, decay="s4d"),
)
LINEAR = (
    Case(T=1, B=2, H=1, R=16, D=16),
    Case(T=63, H=2, R=16, D=17, state=False),
    Case(T=130, H=1, R=16, D=16, M=32),
    Case(T=20, H=1, R=96, D=96, decay="s4d", M=64),
)
DTYPES = (torch.float32, torch.bfloat16)


@on_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", QUERY, ids=str)
def test_query_readout(case, dtype):
    check(case, dtype)


@on_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", LINEAR, ids=str)
def test_linear_readout(case, dtype):
    check(case, dtype, linear=True)


@on_kernels
@pytest.mark.parametrize("linear", [False, True], ids=["query", "linear"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_at_the_decay_bound(dtype, linear):
    """Tables span |Lambda|^-32 to |Lambda|^32; what lies above the diagonal holds up to e^63 and must not be read."""
    check(Case(T=130, H=1, G=1 if linear else 2, R=16, D=16, M=32), dtype, linear, at_the_bound=True, chunk_size=64)


@on_kernels
@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_chunk_size_does_not_change_the_function(chunk_size):
    check(QUERY[3], torch.float32, chunk_size=chunk_size)
    check(LINEAR[1], torch.float32, linear=True, chunk_size=chunk_size)


@on_kernels
@pytest.mark.parametrize("state", [False, True], ids=["zeros", "state"])
@pytest.mark.parametrize("linear", [False, True], ids=["query", "linear"])
@pytest.mark.parametrize("segments", [2, 3])
def test_segments(segments, linear, state, kernels, monkeypatch):
    """Two segments of whole chunks, which take no masks along time; three, the last one shorter and ragged."""
    monkeypatch.setattr(kernels, "segment_count", lambda *args: segments)
    case = Case(T=64 if segments == 2 else 70, H=1, G=1 if linear else 2, R=16, D=17, state=state)
    for dtype in DTYPES if segments == 3 else DTYPES[:1]:
        check(case, dtype, linear, chunk_size=16)


PARALLEL = ((Case(T=17, B=2, H=1, R=16, D=16), None), (Case(T=40, H=2, G=2, R=16, D=17), 16))  # one chunk, three


@on_kernels
@pytest.mark.parametrize("linear", [False, True], ids=["query", "linear"])
@pytest.mark.parametrize(("case", "chunk_size"), PARALLEL, ids=str)
def test_parallel(case, chunk_size, linear):
    if linear:
        case = dataclasses.replace(case, G=1)
    for dtype in DTYPES[:1] if linear else DTYPES:
        check(case, dtype, linear, backend="parallel", chunk_size=chunk_size)


@on_kernels
@pytest.mark.parametrize(
    ("how", "linear"),
    [("one segment", False), ("one segment", True), ("three segments", False), ("parallel", False), ("parallel", True)],
)
def test_documents(how, linear, kernels, monkeypatch):
    """Documents that end within chunks, with them, and with segments (every 32 tokens of three)."""
    if how == "three segments":
        monkeypatch.setattr(kernels, "segment_count", lambda *args: 3)
    backend = "parallel" if how == "parallel" else "chunkwise"
    case = Case(T=70, B=2, H=1, G=1 if linear else 2, R=16, D=17)
    documents = packed(case.T)
    for dtype in DTYPES if how == "one segment" and not linear else DTYPES[:1]:
        inputs, cotangents, _ = problem(case, dtype, linear)
        expected = one_by_one(inputs, cotangents, documents, linear)
        inputs, cotangents = to_device(inputs, cotangents)
        settings = dict(backend=backend, chunk_size=16, documents=documents.to(DEVICE))
        got = run_op(inputs, cotangents, linear, **settings)
        errors = {n: error(got[n].cpu(), expected[n], "rms") for n in expected}
        assert all(e < TOLERANCES[dtype] for e in errors.values()), errors


@on_kernels
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("start", [False, True], ids=["zeros", "start"])
def test_states_between_segments(reverse, start, kernels):
    """The associative scan against the recurrence that it stands for: more than the 16 segments that it takes at once."""
    g = torch.Generator().manual_seed(0)
    span, chunk, H, M, P = kernels.Span(T=19 * 32 + 5, segments=20, chunks=2), 16, 2, 16, 7
    theta = torch.stack((-torch.rand(H, M, generator=g) * 0.05, 3 * torch.randn(H, M, generator=g)), dim=-1)
    local = torch.randn(2, H, 20, M, P, 2, generator=g)
    first = torch.randn(2, H, M, P, 2, generator=g) if start else None
    exact = [torch.zeros(2, H, M, P) + 0j if first is None else torch.view_as_complex(first.double())]
    log_decay = torch.view_as_complex(theta.double())[..., None]
    for i in range(19):
        s = 19 - i if reverse else i
        step = (log_decay * (5 if s == 19 else 32)).exp()
        exact.append((step.conj() if reverse else step) * exact[-1] + torch.view_as_complex(local[:, :, s].double()))
    expected = torch.view_as_real(torch.stack(exact[::-1] if reverse else exact, dim=2).resolve_conj())
    on = [None if x is None else x.to(DEVICE) for x in (local, first)]
    plan = kernels.make_plan(torch.device(DEVICE), torch.float32, M, 16, chunk)
    tables = kernels.launch.Tables.build(theta.to(DEVICE), plan, span)
    assert error(kernels.launch.chain(tables, *on, span, chunk, reverse=reverse).cpu(), expected, "rms") < 1e-6


@on_kernels
@pytest.mark.parametrize("linear", [False, True], ids=["query", "linear"])
def test_final_state_without_a_cotangent(linear):
    """The cotangent of an unused state is no tensor at all; no program may read one."""
    case = Case(T=40, H=1, R=16, D=16)
    inputs, cotangents, _ = problem(case, torch.float32, linear)
    zero = (cotangents[0], torch.zeros_like(cotangents[1]))
    expected = exact(inputs, zero, linear)
    inputs, cotangents = to_device(inputs, cotangents)
    fn = scan.linear_scan if linear else scan.interdomain_scan
    out, _ = fn(**inputs, backend="chunkwise")
    got = gradients((out,), cotangents[:1], inputs)
    assert all(error(got[n].cpu(), expected[n], "rms") < TOLERANCES[torch.float32] for n in got)
    alone, none = fn(**inputs, backend="chunkwise", final_state=False)
    assert none is None
    assert torch.equal(alone, out)


@on_kernels
@pytest.mark.parametrize("dtypes", [(torch.float16,) * 3, (torch.bfloat16, torch.float32, torch.float16)], ids=str)
def test_other_dtypes(dtypes):
    """fp16 is computed in bf16; one fp32 input makes it fp32. o follows v."""
    case = Case(T=40, H=1, G=2, R=16, D=16)
    inputs, cotangents = op_inputs(case, torch.float32)
    for name, dtype in zip("qkv", dtypes, strict=True):
        inputs[name] = inputs[name].detach().to(dtype).requires_grad_()
    cotangents = (cotangents[0].to(dtypes[2]), cotangents[1])
    expected = exact(inputs, cotangents)
    got = run_op(*to_device(inputs, cotangents), backend="chunkwise")
    assert got["out"].dtype == dtypes[2]
    errors = {n: error(got[n].cpu(), expected[n], "rms") for n in expected}
    assert all(e < TOLERANCES[torch.bfloat16] for e in errors.values()), errors


@on_kernels
def test_strided_inputs():
    """q, k, v cut out of one projection; a cotangent that is one number, expanded; views that start one element in."""
    inputs, cotangents, _ = problem(Case(T=40, B=2, H=2, R=16, D=16), torch.float32, False)
    cotangents = (cotangents[0][:, :1, :1, :1].expand_as(cotangents[0]), cotangents[1])
    expected = exact(inputs, cotangents)
    inputs, cotangents = to_device(inputs, cotangents)
    packed = torch.stack([inputs[n].detach() for n in "qkv"], dim=3).flatten(2).requires_grad_()
    q, k, v = packed.unflatten(2, (2, 3, 16)).unbind(3)
    assert q.stride(1) == 96
    got = run_op({**inputs, "q": q, "k": k, "v": v}, cotangents, backend="chunkwise")
    assert all(error(got[n].cpu(), expected[n], "rms") < TOLERANCES[torch.float32] for n in expected)
    one_in = {n: torch.cat((x.new_zeros(1), x.detach().flatten()))[1:].view(x.shape) for n, x in inputs.items()}
    assert all(x.data_ptr() % 16 for x in one_in.values())
    got = run_op({n: x.requires_grad_() for n, x in one_in.items()}, cotangents, backend="chunkwise")
    assert all(error(got[n].cpu(), expected[n], "rms") < TOLERANCES[torch.float32] for n in expected)
    state = inputs["initial_state"].detach()
    transposed = {
        **inputs,
        "k": inputs["k"].detach().mT.contiguous().mT.requires_grad_(),
        "initial_state": state.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(),
    }
    assert transposed["k"].stride(-1) != 1
    assert not transposed["initial_state"].is_contiguous()
    got = run_op(transposed, cotangents, backend="chunkwise")
    assert all(error(got[n].cpu(), expected[n], "rms") < TOLERANCES[torch.float32] for n in expected)


@on_kernels
def test_a_strided_state_of_the_linear_readout():
    inputs, cotangents, expected = problem(Case(T=40, B=2, H=2, R=16, D=16), torch.float32, True)
    inputs, cotangents = to_device(inputs, cotangents)
    state = inputs["initial_state"].detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    got = run_op({**inputs, "initial_state": state}, cotangents, linear=True, backend="chunkwise")
    assert all(error(got[n].cpu(), expected[n], "rms") < TOLERANCES[torch.float32] for n in expected)


@on_kernels
def test_offsets_beyond_32_bits():
    """Tokens 2^24 numbers apart: the last one lies beyond 2^31."""
    T, stride = 140, 1 << 24
    inputs, _, expected = problem(Case(T=T, H=1, R=16, D=16), torch.bfloat16, False)
    memory = torch.empty_strided((1, T, 1, 16), (T * stride, stride, 16, 1), dtype=torch.bfloat16, device=DEVICE)
    inputs, _ = to_device(inputs, ())
    o, state = scan.interdomain_scan(**{**inputs, "k": memory.copy_(inputs["k"])}, backend="chunkwise")
    assert error(o.cpu(), expected["out"], "rms") < TOLERANCES[torch.bfloat16]
    assert error(state.cpu(), expected["state"], "rms") < TOLERANCES[torch.bfloat16]


@on_kernels
@pytest.mark.parametrize(("M", "T", "G"), [(16, 40, 2), (128, 20, 1)])
def test_recompute_is_a_matter_of_memory_only(M, T, G, kernels, monkeypatch):
    """Right with packed documents, in segments, at the largest M; the same bits; a is all that is kept beside the inputs."""
    monkeypatch.setattr(kernels, "segment_count", lambda *args: 3)
    case, documents = Case(T=T, H=1, G=G, R=16, D=16, M=M), packed(T)[:1]
    inputs, cotangents, _ = problem(case, torch.bfloat16, False)
    expected = one_by_one(inputs, cotangents, documents)
    inputs, cotangents = to_device(inputs, cotangents)
    settings = dict(backend="chunkwise", chunk_size=16, documents=documents.to(DEVICE))
    calls, results, contract = [], [], kernels.launch.contract
    monkeypatch.setattr(kernels.launch, "contract", lambda *args, **kw: calls.append(args) or contract(*args, **kw))
    for recompute in (True, False):
        saved = []
        calls.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x) or x, lambda x: x):
            out, state = scan.interdomain_scan(**inputs, recompute=recompute, **settings)
        results.append({"out": out, "state": state, **gradients((out, state), cotangents, inputs)})
        assert len(calls) == (3 if recompute else 2)
        given = {x.data_ptr() for x in (*inputs.values(), settings["documents"])}
        extra = [(x.dtype, tuple(x.shape)) for x in saved if x.data_ptr() not in given]
        assert extra == ([] if recompute else [(torch.bfloat16, (1, G, T, 2 * M))])
    errors = {n: error(results[1][n].cpu(), expected[n], "rms") for n in expected}
    assert all(e < TOLERANCES[torch.bfloat16] for e in errors.values()), errors
    assert all(torch.equal(results[0][n], results[1][n]) for n in expected)


@on_kernels
def test_w_in_a_pass_of_its_own(kernels, monkeypatch):
    """Where `expand` has no room for W, `mix` rounds the same numbers."""
    inputs, _ = to_device(*problem(Case(T=70, B=2, H=1, G=2, R=16, D=40), torch.bfloat16, False)[:2])
    results, plans, mix = [], [], kernels.launch.mix
    for fused in ((4096, 4, 2), None):
        monkeypatch.setattr(kernels.launch, "mix", lambda *args, f=fused: plans.append(f) or mix(*args))
        monkeypatch.setattr(kernels, "make_plan", lambda *args, f=fused: triton_plan.make_plan(*args)._replace(fused=f))
        with torch.no_grad():
            results.append(scan.interdomain_scan(**inputs, backend="chunkwise"))
    assert plans == [None]
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@on_kernels
def test_decay_in_a_launch_of_its_own(kernels, monkeypatch):
    """Where adjoint and decay take other stages, each goes by itself and rounds the same numbers. Query heads share states,
    two segments, programs that share channels and modes."""
    inputs, cotangents = to_device(*problem(Case(T=140, H=1, G=2, R=16, D=20, M=32), torch.bfloat16, False)[:2])
    monkeypatch.setattr(kernels, "segment_count", lambda *args: 2)
    results, joined = [], []
    for stages in (2, 3):
        tiles = {"decay": (512, 4, stages)}
        monkeypatch.setattr(kernels, "make_plan", lambda *args, t=tiles: triton_plan.make_plan(*args)._replace(**t))
        joined.append(kernels.make_plan(torch.device(DEVICE), torch.bfloat16, 32, 20, 64).joined)
        results.append(run_op(inputs, cotangents, False, backend="chunkwise", chunk_size=64))
    assert joined == [True, False]
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])


@on_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_of_w_in_parts(dtype, kernels, monkeypatch):
    """Programs that share a head, some by its tokens (the last with fewer), some by columns of W: no part is lost or twice."""
    g, (B, H, G, T, M) = torch.Generator().manual_seed(0), (2, 2, 2, 100, 64)
    monkeypatch.setattr(kernels.launch, "segment_count", lambda *args: 3)
    log_decay = -0.01 * torch.rand(H, M, 2, generator=g)
    W = torch.randn(H, 2 * M, 2 * M, generator=g)
    a, c = (torch.randn(B, H * G, T, 2 * M, generator=g).to(dtype) for _ in range(2))
    plan = kernels.make_plan(torch.device(DEVICE), dtype, M, 16, 16)
    tables = kernels.launch.Tables.build(log_decay.to(DEVICE), plan)
    *_, got = kernels.launch.mix_backward(plan, tables, a.to(DEVICE), c.to(DEVICE), W.to(DEVICE))
    a, c = (x.double().view(B, H, G, T, 2 * M) for x in (a, c))
    assert error(got.cpu(), torch.einsum("bhgtn,bhgtm->hnm", c, a), "rms") < 1e-6


@on_kernels
@pytest.mark.parametrize("linear", [False, True], ids=["query", "linear"])
def test_runs_repeat_bit_for_bit(linear):
    case = Case(T=70, H=2, G=1 if linear else 2, R=16, D=16)
    inputs, cotangents = to_device(*problem(case, torch.bfloat16, linear)[:2])
    first, second = (run_op(inputs, cotangents, linear, backend="chunkwise") for _ in range(2))
    assert all(torch.equal(first[n], second[n]) for n in first)


@on_kernels
@pytest.mark.parametrize("save", [False, True])
def test_opcheck(save):
    case = Case(T=20, H=1, G=2, R=16, D=16, state=save)
    inputs, (d_out, d_state) = to_device(*op_inputs(case, torch.float32, torch.bfloat16))
    args = (*inputs.values(), *(() if save else (None,)), 0, "chunkwise")
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.scan, (*args, save), test_utils=tests)
    args = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
    kept = ops.scan(*args, save)[2] if save else None
    torch.library.opcheck(ops.scan_backward, (d_out, d_state, *args, True, kept), test_utils=tests[::2])


@on_kernels
@pytest.mark.parametrize("recompute", [False, True])
def test_compiles_without_a_graph_break(recompute):
    inputs, cotangents = to_device(*op_inputs(Case(T=20, H=1, G=2, R=16, D=16), torch.float32))
    run = functools.partial(scan.interdomain_scan, backend="chunkwise", recompute=recompute)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    results = []
    for fn in (compiled, run):
        outputs = fn(**inputs)
        results.append((*outputs, *gradients(outputs, cotangents, inputs).values()))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="this is that process, or there is a GPU")
def test_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    options = ["-m", "not gpu", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", "-q", *options, __file__]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout.replace("1 skipped", "")  # only this test
