"""One token at a time equals the scan."""

import pytest
import torch

from interdomain import scan

from .common import CASES, ON_CPU, Case, assert_agree, op_inputs, paper_linear, paper_query, run_query
from .common import run_linear as run_linear_case

SHORT = [case for case in CASES if case.T <= 70 or case.decay != "middle"]


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
