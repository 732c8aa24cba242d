"""One token at a time equals the scan."""

import pytest
import torch

from interdomain import scan

from .common import CASES, ON_CPU, Case, assert_agree, op_inputs, paper_linear, paper_query, run_query
from .common import run_linear as run_linear_case

SHORT = [case for case in CASES if case.T <= 70]


def steps(fn, tokens, tables, state):
    outputs = []
    for t in range(tokens[0].shape[1]):
        out, state = fn(*(x[:, t] for x in tokens), *tables, state)
        outputs.append(out)
    return torch.stack(outputs, dim=1), state


@pytest.mark.parametrize("case", SHORT, ids=str)
def test_steps_are_the_paper_s_loop(case):
    def run(q, k, v, theta, W, state):
        state = theta.new_zeros(case.B, case.H, case.M, case.R + case.D, 2) if state is None else state
        return steps(scan.interdomain_step, (q, k, v), (theta, W), state)

    def run_linear(z, theta, w, state):
        state = theta.new_zeros(case.B, case.H, case.M, case.R + case.D, 2) if state is None else state
        return steps(scan.linear_step, (z,), (theta, w), state)

    assert_agree(run_query(case, run), paper_query(case), "float64")
    assert_agree(run_linear_case(case, run_linear), paper_linear(case), "float64")


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("linear", [False, True], ids=["query", "linear"])
def test_prefill_in_pieces_then_steps(backend, linear):
    inputs, _ = op_inputs(Case(T=150, G=3), torch.float64, linear=linear)
    inputs = {n: x.detach() for n, x in inputs.items()}
    fn, step = (scan.linear_scan, scan.linear_step) if linear else (scan.interdomain_scan, scan.interdomain_step)
    whole, final = fn(**inputs, backend=backend)
    tokens = [inputs[n] for n in (("z",) if linear else ("q", "k", "v"))]
    tables = [inputs[n] for n in ("log_decay", "readout" if linear else "mixing")]
    state, outputs = inputs["initial_state"], []
    for start, stop in ((0, 1), (1, 66), (66, 130)):
        piece = [x[:, start:stop] for x in tokens]
        out, state = fn(*piece, *tables, initial_state=state, backend=backend)
        outputs.append(out)
    out, state = steps(step, [x[:, 130:] for x in tokens], tables, state)
    assert_agree({"out": torch.cat((*outputs, out), dim=1), "state": state}, {"out": whole, "state": final}, "float64")


@pytest.mark.parametrize("linear", [False, True], ids=["query", "linear"])
def test_step_keeps_its_state_in_fp32(linear):
    inputs, _ = op_inputs(Case(T=1), torch.float32, torch.bfloat16, linear)
    state = inputs.pop("initial_state").detach()
    before = state.clone()
    tokens = {n: x[:, 0] if n in ("q", "k", "v", "z") else x for n, x in inputs.items()}
    out, new = (scan.linear_step if linear else scan.interdomain_step)(**tokens, state=state)
    assert (out.dtype, new.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(state, before)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = (scan.linear_step if linear else scan.interdomain_step)(**tokens, state=state)
    assert torch.equal(out, again[0])
    assert torch.equal(new, again[1])


@pytest.mark.parametrize(
    "case",
    [
        Case(T=1, B=3, R=4, D=5),
        Case(T=1, B=2, G=3, R=7, D=4, readout="hermitian"),
        Case(T=1, G=2, M=5, readout="real"),
        Case(T=1, B=2, R=64, D=65, M=64, decay="s4d"),
    ],
    ids=str,
)
@pytest.mark.parametrize("linear", [False, True], ids=["query", "linear"])
def test_step_in_place(case, linear):
    """Over the state itself: where nothing is recorded (in other arithmetic), where something is, and compiled."""
    inputs = {n: x.detach() for n, x in op_inputs(case, torch.float64, linear=linear)[0].items()}
    inputs |= {n: x[:, 0] for n, x in inputs.items() if n in ("q", "k", "v", "z")}
    state = inputs.pop("initial_state")
    fn = scan.linear_step if linear else scan.interdomain_step
    expected = dict(zip(("out", "state"), fn(**inputs, state=state), strict=True))
    leaf = inputs | {("z" if linear else "v"): inputs["z" if linear else "v"].clone().requires_grad_()}
    torch._dynamo.reset()
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    decay = scan.decay_factor(inputs["log_decay"])
    calls = [(fn, inputs), (fn, inputs | {"decay": decay}), (fn, leaf), (compiled, inputs)]
    if not linear and case.readout == "complex":  # the upper half of W is all that this readout has
        calls.append((fn, inputs | {"mixing": inputs["mixing"][:, : case.M]}))
    for call, given in calls:
        live = state.clone()
        out, new = call(**given, state=live, inplace=True)
        assert new is live
        assert out.requires_grad == (given is leaf)
        assert_agree({"out": out, "state": live}, expected, "float64")
    with pytest.raises(ValueError, match="to be updated in place it must be contiguous"):
        fn(**inputs, state=state.mT.contiguous().mT, inplace=True)


def test_decay_is_rounded_once():
    """128 radians per token included."""
    theta = op_inputs(Case(T=1, M=64, decay="s4d"), torch.float32)[0]["log_decay"].detach()
    exact = torch.view_as_complex(theta.double()).exp()
    torch.testing.assert_close(scan.decay_factor(theta).double(), torch.view_as_real(exact), rtol=1e-7, atol=1e-9)
