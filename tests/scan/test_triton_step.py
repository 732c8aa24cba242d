"""The fused step against step.py in fp64, against the scan, and against itself in place.

On a machine with a GPU these tests run there. Elsewhere test_triton_sequential.py runs them, in a process of its own under
Triton's interpreter, which has to be chosen before triton is imported.
"""

import functools
import os

import pytest
import torch

from interdomain import scan
from interdomain.scan import step, triton_support

from .common import Case, assert_agree, op_inputs

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
on_kernels = pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="needs a GPU or TRITON_INTERPRET=1")

CASES = (
    Case(T=1, B=2, R=16, D=16, readout="hermitian"),
    Case(T=1, B=2, G=2, R=6, D=7, M=24, decay="strong"),
    Case(T=1, B=1, G=3, R=32, D=33, M=32, decay="s4d", readout="real"),
    Case(T=1, B=3, R=64, D=64, M=64, decay="s4d"),
    Case(T=1, B=1, R=96, D=97, M=64, decay="s4d"),
    Case(T=1, B=1, G=2, R=128, D=129, M=128, decay="s4d"),
)
BOUNDS = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "bfloat16"}
# fp64 for the algebra, fp16 where the outputs are large enough for it.
ALL = [(case, dtype) for case in CASES for dtype in (torch.float32, torch.bfloat16)]
ALL += [(CASES[1], torch.float64), (CASES[3], torch.float16)]
linear_or_query = pytest.mark.parametrize("linear", [False, True], ids=["query", "linear"])


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Uninitialised memory is NaN, and the interpreter rounds to bf16 as a GPU does."""
    if not INTERPRETED and DEVICE == "cpu":
        yield None
        return
    if INTERPRETED:
        from . import triton_interpreter

        triton_interpreter.repair(monkeypatch)
    from interdomain.scan import triton_step

    def poisoned(make):
        def made(*args, **kwargs):
            x = make(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    yield triton_step


def problem(case, dtype, linear, tables=torch.float32):
    """(tokens [B, T, ...], (decay, mixing or readout), state) on DEVICE."""
    inputs, _ = op_inputs(case, tables, dtype, linear)
    inputs = {n: x.detach().to(DEVICE) for n, x in inputs.items()}
    state = inputs.pop("initial_state")
    tokens = [inputs.pop(n) for n in (("z",) if linear else ("q", "k", "v"))]
    theta, table = inputs.values()
    return tokens, [scan.decay_factor(theta), table], state


def upper(case, tables):
    """W in half, where that is all of it."""
    return [tables[0], tables[1][:, : case.M]] if case.readout == "complex" else tables


def functions(kernels, linear):
    """The fused step, over a copy of the state or in place, and the plain one."""
    fused = kernels.linear_one_step if linear else kernels.scan_step

    def run(*inputs, inplace=False):
        state = inputs[-1] if inplace else inputs[-1].clone(memory_format=torch.contiguous_format)
        return fused(*inputs[:-1], state), state

    return run, step.linear_one_step if linear else step.scan_step


def compare(got, expected, dtype):
    assert got[0].dtype == dtype
    assert_agree({"out": got[0].cpu()}, {"out": expected[0].cpu()}, BOUNDS[dtype])
    assert_agree({"state": got[1].cpu()}, {"state": expected[1].cpu()}, BOUNDS.get(got[1].dtype))


@on_kernels
@linear_or_query
@pytest.mark.parametrize(("case", "dtype"), ALL, ids=str)
def test_step_is_step_py(case, linear, dtype, kernels):
    tokens, tables, state = problem(case, dtype, linear, torch.promote_types(dtype, torch.float32))
    before = state.clone()
    fused, plain = functions(kernels, linear)
    expected = plain(*(x[:, 0].double() for x in tokens), *(x.double() for x in tables), state.double())
    for some in (tables, tables if linear else upper(case, tables)):
        got = fused(*(x[:, 0] for x in tokens), *some, state)
        assert torch.equal(state, before)
        compare(got, expected, dtype)


@on_kernels
@linear_or_query
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chained_steps_are_the_scan(linear, dtype, kernels):
    """In place, and not; from the state of a prefill to the state of the scan."""
    case = Case(T=6, B=2, G=1 if linear else 2, R=8, D=9, M=16)
    tokens, tables, state = problem(case, dtype, linear)
    fused, _ = functions(kernels, linear)
    whole = scan.linear_scan if linear else scan.interdomain_scan
    double = {n: x.detach().to(DEVICE).double() for n, x in op_inputs(case, torch.float32, dtype, linear)[0].items()}
    expected = whole(**double, backend="reference")
    chained, inplace, outputs = state, state.clone(), []
    address = inplace.data_ptr()
    for t in range(case.T):
        token = [x[:, t] for x in tokens]
        out, chained = fused(*token, *tables, chained)
        again, inplace = fused(*token, *tables, inplace, inplace=True)
        assert torch.equal(out, again)
        assert torch.equal(chained, inplace)
        assert inplace.data_ptr() == address
        outputs.append(out)
    compare((torch.stack(outputs, dim=1), chained), expected, dtype)


@on_kernels
@linear_or_query
def test_strides(linear, kernels):
    """Tokens cut out of a projection; a state that is a view is copied, or refused where it should be overwritten."""
    case = Case(T=3, B=2, R=8, D=8)
    tokens, tables, state = problem(case, torch.float32, linear)
    fused, plain = functions(kernels, linear)
    packed = [torch.stack((x, x), dim=-1)[:, 1, ..., 0] for x in tokens]  # last stride 2
    wide = torch.cat((state, state), dim=3)[:, :, :, :16]
    expected = plain(*(x[:, 1] for x in tokens), *tables, state)
    for inputs in ([x[:, 1] for x in tokens], packed):
        got = fused(*inputs, *tables, wide)
        assert_agree(dict(enumerate(got)), dict(enumerate(expected)), "float32")
    with pytest.raises(ValueError, match="to be updated in place it must be contiguous"):
        (scan.linear_step if linear else scan.interdomain_step)(*packed, *tables, wide, inplace=True)


@on_kernels
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@linear_or_query
def test_cuda_graph(linear, kernels):
    """Captured once, replayed: the state moves on in place, without the host."""
    case = Case(T=8, B=2, G=1 if linear else 2, R=64, D=64, M=64)
    tokens, tables, state = problem(case, torch.bfloat16, linear)
    fused, _ = functions(kernels, linear)
    static = [x[:, 0].clone() for x in tokens]
    live = state.clone()
    fused(*static, *tables, live.clone(), inplace=True)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = fused(*static, *tables, live, inplace=True)
    for t in range(case.T):
        for x, token in zip(static, tokens, strict=True):
            x.copy_(token[:, t])
        graph.replay()
        out, state = fused(*(x[:, t] for x in tokens), *tables, state)
        assert torch.equal(captured, out)
        assert torch.equal(live, state)


@on_kernels
@linear_or_query
@pytest.mark.parametrize("inplace", [False, True], ids=["new", "inplace"])
def test_door_ops_and_compile(linear, inplace, kernels, monkeypatch):
    """The public functions take the kernels where no gradient is recorded; one node each for torch.compile."""
    torch._dynamo.reset()  # other tests compile the same functions, and there is a limit
    monkeypatch.setattr(scan, "_fused", lambda device: True)
    case = Case(T=1, B=2, G=1 if linear else 2, R=8, D=9)
    tokens, tables, state = problem(case, torch.bfloat16, linear)
    theta = op_inputs(case, torch.float32, linear=linear)[0]["log_decay"].detach().to(DEVICE)
    tokens = [x[:, 0] for x in tokens]
    fused, _ = functions(kernels, linear)
    expected = fused(*tokens, *tables, state)
    op = (torch.ops.interdomain.linear_step_ if linear else torch.ops.interdomain.scan_step_).default
    torch.library.opcheck(op, (*tokens, *tables, state.clone()), test_utils=("test_schema", "test_faketensor"))
    step = functools.partial(scan.linear_step if linear else scan.interdomain_step, inplace=inplace)
    for call in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        for decay in (None, tables[0]):
            live = state.clone()
            out, new = call(*tokens, theta, tables[1], live, decay=decay)
            assert torch.equal(out, expected[0])
            assert torch.equal(new, expected[1])
            assert torch.equal(live, expected[1] if inplace else state)
    recorded = [x.clone().requires_grad_() for x in tokens]
    assert step(*recorded, theta, tables[1], state.clone())[0].requires_grad
    with torch.no_grad():
        assert torch.equal(step(*recorded, theta, tables[1], state.clone())[0], expected[0])


@on_kernels
@linear_or_query
def test_autograd_notices_that_a_state_was_overwritten(linear, kernels, monkeypatch):
    monkeypatch.setattr(scan, "_fused", lambda device: True)
    inputs, _ = op_inputs(Case(T=3, B=2, R=8, D=9), torch.float32, linear=linear)
    inputs = {n: x.detach().to(DEVICE).requires_grad_() for n, x in inputs.items()}
    live = inputs.pop("initial_state").detach()
    run, step = (scan.linear_scan, scan.linear_step) if linear else (scan.interdomain_scan, scan.interdomain_step)
    out, _ = run(**inputs, initial_state=live, backend="chunkwise-torch")
    token = {n: x[:, 0] if n in "qkvz" else x for n, x in inputs.items()}
    with torch.no_grad():
        step(**token, state=live, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    with torch.inference_mode():
        step(**token, state=live.clone(), inplace=True)


# What follows needs neither a GPU nor the interpreter.


def test_the_kernels_run_on_cuda(monkeypatch):
    monkeypatch.setattr(triton_support, "_has_bf16_tensor_cores", lambda index: True)
    assert scan._fused(torch.device("cuda"))
    assert not scan._fused(torch.device("cpu"))
    monkeypatch.setattr(triton_support, "_INSTALLED", False)
    assert not scan._fused(torch.device("cuda"))


@pytest.mark.parametrize("M", [1, 2, 4, 24, 64, 256])
@pytest.mark.parametrize("width", [1, 2, 3, 8, 64, 129, 256])
def test_no_warp_holds_a_copy_of_another_s_numbers(width, M):
    """It would load them when the other one may have stored: the state is updated in place. Interpreters run one after one."""
    from interdomain.scan import triton_step

    for tiles in (triton_step.contract_tiles(width, M), *(triton_step.expand_tiles(n, width, M) for n in (1, 4096))):
        numbers = 2 * tiles["BM"] * tiles.get("BC", tiles.get("BD"))
        assert tiles["num_warps"] in (1, 2, 4)
        assert tiles["num_warps"] == 1 or numbers >= 32 * tiles["num_warps"]
