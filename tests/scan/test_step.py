"""One token at a time equals the scan."""

import pytest
import torch

from interdomain import scan

from .common import CASES, Case, assert_agree, linear_or_query, op_inputs, paper, run_case, step_of


def steps(linear, tokens, tables, state):
    outputs = []
    for t in range(tokens[0].shape[1]):
        out, state = step_of(linear)(*(x[:, t] for x in tokens), *tables, state)
        outputs.append(out)
    return torch.stack(outputs, dim=1), state


@linear_or_query
@pytest.mark.parametrize("case", [case for case in CASES if case.T <= 70], ids=str)
def test_steps_are_the_paper_s_loop(case, linear):
    def run(*args):
        *tokens, theta, table, state = args
        state = (
            theta.new_zeros(case.B, case.H, case.M, case.R + case.D, 2) if state is None else state
        )
        return steps(linear, tokens, (theta, table), state)

    assert_agree(run_case(case, linear, run), paper(case, linear), "float64")


@linear_or_query
def test_step_keeps_its_state_in_fp32(linear):
    """Under autocast, too; and the state that it was given stays."""
    inputs, _ = op_inputs(Case(T=1), torch.float32, torch.bfloat16, linear)
    state = inputs.pop("initial_state").detach()
    before = state.clone()
    tokens = {n: x[:, 0] if n in ("q", "k", "v", "z") else x for n, x in inputs.items()}
    expected = step_of(linear)(**tokens, state=state)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, new = step_of(linear)(**tokens, state=state)
    assert (out.dtype, new.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(state, before)
    assert torch.equal(out, expected[0])
    assert torch.equal(new, expected[1])


@linear_or_query
def test_step_in_place(linear):
    """Over the state itself: where nothing is recorded (in other arithmetic), where something is, and compiled."""
    case = Case(T=1, B=2, G=3, R=7, D=4)
    inputs = {n: x.detach() for n, x in op_inputs(case, torch.float64, linear=linear)[0].items()}
    inputs |= {n: x[:, 0] for n, x in inputs.items() if n in ("q", "k", "v", "z")}
    state, fn = inputs.pop("initial_state"), step_of(linear)
    expected = dict(zip(("out", "state"), fn(**inputs, state=state), strict=True))
    last = "z" if linear else "v"
    leaf = inputs | {last: inputs[last].clone().requires_grad_()}
    torch._dynamo.reset()
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    calls = [
        (fn, inputs),
        (fn, inputs | {"decay": scan.decay_factor(inputs["log_decay"])}),
        (fn, leaf),
        (compiled, inputs),
    ]
    if not linear:  # the upper half of W is all that the readout `complex` has
        calls.append((fn, inputs | {"mixing": inputs["mixing"][:, : case.M]}))
    for call, arguments in calls:
        live = state.clone()
        out, new = call(**arguments, state=live, inplace=True)
        assert new is live
        assert out.requires_grad == (arguments is leaf)
        assert_agree({"out": out, "state": live}, expected, "float64")
    with pytest.raises(ValueError, match="to be updated in place it must be contiguous"):
        fn(**inputs, state=state.mT.contiguous().mT, inplace=True)


def test_decay_is_rounded_once():
    """128 radians per token included."""
    theta = op_inputs(Case(T=1, M=64, decay="s4d"), torch.float32)[0]["log_decay"].detach()
    exact = torch.view_as_complex(theta.double()).exp()
    torch.testing.assert_close(
        scan.decay_factor(theta).double(), torch.view_as_real(exact), rtol=1e-7, atol=1e-9
    )
