"""The fused step against the plain one in fp64, in place, and in a CUDA graph.

On a machine with a GPU these tests run there. Elsewhere test_interpreter.py runs this file in a process of its own.
"""

import functools

import pytest
import torch

from interdomain import scan

from .common import Case, assert_agree, op_inputs
from .devices import DEVICE, on_kernels, use_kernels

pytest.importorskip("triton")
pytestmark = on_kernels
linear_or_query = pytest.mark.parametrize("linear", [False, True], ids=["query", "linear"])
CASES = [
    (Case(T=1, B=2, R=16, D=16, readout="hermitian"), torch.float32),
    (Case(T=1, B=2, G=2, R=6, D=7, M=24, decay="strong"), torch.float64),  # masks on every side; the algebra
    (Case(T=1, B=1, G=3, R=32, D=33, M=32, decay="s4d", readout="real"), torch.bfloat16),
    (Case(T=1, B=3, R=64, D=64, M=64, decay="s4d"), torch.float16),
    (Case(T=1, B=1, G=2, R=128, D=129, M=128, decay="s4d"), torch.bfloat16),
]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    use_kernels(monkeypatch)


@torch.no_grad()
def problem(case, dtype, linear):
    """(tokens [B, T, ...] by name, tables, state) on DEVICE."""
    inputs, _ = op_inputs(case, torch.promote_types(dtype, torch.float32), dtype, linear)
    inputs = {n: x.detach().to(DEVICE) for n, x in inputs.items()}
    tokens = {n: inputs.pop(n) for n in (("z",) if linear else ("q", "k", "v"))}
    return tokens, inputs, inputs.pop("initial_state")


def at(tokens, t):
    return {n: x[:, t] for n, x in tokens.items()}


def functions(linear):
    return (scan.linear_step, scan.linear_scan) if linear else (scan.interdomain_step, scan.interdomain_scan)


@linear_or_query
@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
def test_step_is_the_plain_step(case, linear, dtype, monkeypatch):
    """New state and in place; with Lambda made beforehand; with the upper half of W, where that is all of it."""
    tokens, tables, state = problem(case, dtype, linear)
    tokens, (step, _) = at(tokens, 0), functions(linear)
    with monkeypatch.context() as patch:
        patch.setattr(scan, "_fused", lambda device: False)
        double = {n: x.double() for n, x in (tokens | tables).items()}
        out, new = step(**double, state=state.double())
    expected = {"out": out.cpu(), "state": new.cpu()}
    some = [tables, tables | {"decay": scan.decay_factor(tables["log_decay"])}]
    if not linear and case.readout == "complex":
        some.append(tables | {"mixing": tables["mixing"][:, : case.M]})
    names = {torch.float64: "float64", torch.float32: "float32"}
    for given in some:
        for inplace in (False, True):
            live = state.clone()
            out, new = step(**tokens, **given, state=live, inplace=inplace)
            assert out.dtype == dtype
            assert (new is live) == inplace
            assert inplace or torch.equal(live, state)
            assert_agree({"out": out.cpu()}, {"out": expected["out"]}, names.get(dtype, "bfloat16"))
            assert_agree({"state": new.cpu()}, {"state": expected["state"]}, names.get(state.dtype))


@linear_or_query
def test_strides(linear):
    """Tokens whose numbers do not lie side by side; a state that is a view is copied, or refused where it is overwritten."""
    tokens, tables, state = problem(Case(T=3, B=2, R=8, D=8), torch.float32, linear)
    step, _ = functions(linear)
    spread = {n: torch.stack((x, x), dim=-1)[:, 1, ..., 0] for n, x in tokens.items()}
    wide = torch.cat((state, state), dim=3)[:, :, :, :16]
    expected = step(**at(tokens, 1), **tables, state=state)
    got = step(**spread, **tables, state=wide)
    assert_agree(dict(enumerate(got)), dict(enumerate(expected)), "float32")
    with pytest.raises(ValueError, match="contiguous"):
        step(**spread, **tables, state=wide, inplace=True)


@linear_or_query
def test_autograd_and_compile(linear):
    """No kernel where a gradient is recorded, and autograd notices that a state was overwritten; one node for torch.compile."""
    tokens, tables, state = problem(Case(T=3, B=2, R=8, D=9), torch.float32, linear)
    step, run = functions(linear)
    tokens = {n: x.requires_grad_() for n, x in tokens.items()}
    assert step(**at(tokens, 0), **tables, state=state)[0].requires_grad
    out, _ = run(**tokens, **tables, initial_state=state, backend="chunkwise-torch")
    with torch.no_grad():
        expected = step(**at(tokens, 0), **tables, state=state.clone())
        step(**at(tokens, 0), **tables, state=state, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    torch._dynamo.reset()
    compiled = torch.compile(functools.partial(step, inplace=True), fullgraph=True, backend="aot_eager")
    tokens, tables, state = problem(Case(T=3, B=2, R=8, D=9), torch.float32, linear)
    got = compiled(**at(tokens, 0), **tables, state=state)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    op = torch.ops.interdomain.linear_step_ if linear else torch.ops.interdomain.scan_step_
    args = (*at(tokens, 0).values(), *tables.values(), state)
    torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor"))
