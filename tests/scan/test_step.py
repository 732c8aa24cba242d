"""One token at a time equals the scan.

The kernels are checked on a GPU, or by test_triton_gpu.py in a process of its own.
"""

import pytest
import torch

from interdomain import scan
from interdomain.scan import ops

from .common import (
    CASES,
    TOKENS,
    Case,
    as_float64,
    assert_agree,
    assert_equal,
    linear_or_query,
    op_inputs,
    paper,
    part_of_time,
    run_case,
    run_step,
)
from .devices import DEVICE, on_kernels, use_kernels

FP32, FP64 = torch.float32, torch.float64


@linear_or_query
@pytest.mark.parametrize("case", [case for case in CASES if case.T <= 70], ids=str)
def test_steps_are_the_paper_s_loop(case, linear):
    def run(**inputs):
        state = inputs.pop("initial_state", None)
        if state is None:
            state = torch.zeros(case.B, case.H, case.M, case.R + case.D, 2, dtype=FP64)
        outputs = []
        for t in range(case.T):
            out, state = run_step(**part_of_time(inputs, t), state=state)
            outputs.append(out)
        return torch.stack(outputs, dim=1), state

    assert_agree(run_case(case, linear, run), paper(case, linear), "float64")


def problem(case, dtype, linear, device="cpu"):
    """Returns the arguments of a step, which require no gradient."""
    wide = torch.promote_types(dtype, FP32)
    inputs, _ = op_inputs(case, wide, dtype, linear, device)
    inputs = {name: x.detach() for name, x in part_of_time(inputs, 0).items()}
    inputs["state"] = inputs.pop("initial_state")
    return inputs


@pytest.fixture(params=["plain", pytest.param("triton", marks=on_kernels)])
def backend(request, monkeypatch):
    if request.param == "triton":
        use_kernels(monkeypatch)
    else:
        monkeypatch.setattr(ops, "KERNEL_DEVICES", ())


STEPS = [
    (Case(T=1, B=2, R=16, D=16, readout="hermitian"), FP32),
    # Masks on every side; the algebra.
    (Case(T=1, B=2, G=2, R=6, D=7, M=24, decay="strong"), FP64),
    (Case(T=1, B=2, H=1, R=64, D=64, M=64, decay="s4d"), torch.float16),
    (Case(T=1, H=1, G=2, R=128, D=129, M=128, decay="s4d"), torch.bfloat16),
]
BOUNDS = {FP64: "float64", FP32: "float32", torch.float16: "bfloat16", torch.bfloat16: "bfloat16"}


@linear_or_query
@pytest.mark.parametrize(("case", "dtype"), STEPS, ids=str)
def test_step_is_the_recorded_one_in_fp64(case, linear, dtype, backend):
    """New state and in place; with Lambda made beforehand; with the upper half of W, where that is all of it.

    Autocast changes nothing.
    """
    inputs = problem(case, dtype, linear, DEVICE)
    # Where a gradient is recorded, neither kernels nor the arithmetic in place run.
    expected_out, expected_state = run_step(**as_float64(inputs))
    decay = scan.decay_factor(inputs["log_decay"])
    recorded = inputs | {"log_decay": inputs["log_decay"].clone().requires_grad_()}
    calls = [(inputs, False), (inputs | {"decay": decay}, True), (recorded, True)]
    if not linear and case.readout == "complex":
        calls.append((inputs | {"mixing": inputs["mixing"][:, : case.M]}, True))
    for arguments, inplace in calls:
        live = inputs["state"].clone()
        with torch.autocast(DEVICE, torch.bfloat16):
            out, state = run_step(**arguments | {"state": live}, inplace=inplace)
        assert out.dtype == dtype
        assert (state is live) == inplace
        assert inplace or torch.equal(live, inputs["state"])
        assert out.requires_grad == (arguments is recorded)
        assert_agree({"out": out}, {"out": expected_out}, BOUNDS[dtype])
        assert_agree({"state": state}, {"state": expected_state}, BOUNDS[state.dtype])


@linear_or_query
def test_strides(linear, backend):
    """Tokens whose numbers do not lie side by side; a state that is a view is copied, or refused where it is overwritten."""
    inputs = problem(Case(T=1, B=2, R=8, D=8), FP32, linear, DEVICE)
    spread = {}
    for name, x in inputs.items():
        spread[name] = x.repeat_interleave(2, dim=-1)[..., ::2] if name in TOKENS else x
    state = inputs["state"]
    spread["state"] = torch.cat((state, state), dim=3)[:, :, :, :16]
    torch.testing.assert_close(run_step(**spread), run_step(**inputs))
    with pytest.raises(ValueError, match="to be updated in place it must be contiguous"):
        run_step(**spread, inplace=True)


@linear_or_query
def test_compiled(linear):
    inputs = problem(Case(T=1, B=2, G=3, R=7, D=4), FP64, linear)
    expected = run_step(**inputs)
    torch._dynamo.reset()
    compiled = torch.compile(run_step, fullgraph=True, backend="aot_eager")
    out, state = compiled(**inputs, inplace=True)
    assert state is inputs["state"]
    torch.testing.assert_close((out, state), expected, rtol=1e-10, atol=1e-10)


@on_kernels
@linear_or_query
def test_triton_autograd_and_opcheck(linear, monkeypatch):
    """No kernel where a gradient is recorded; to overwrite the state later does not change it."""
    use_kernels(monkeypatch)
    inputs = problem(Case(T=1, B=2, R=8, D=9), FP32, linear, DEVICE)
    before = inputs["state"].clone()
    theta = inputs["log_decay"].clone().requires_grad_()
    out, _ = run_step(**inputs | {"log_decay": theta})
    run_step(**inputs, inplace=True)
    (gradient,) = torch.autograd.grad(out.sum(), theta)
    out, _ = run_step(**inputs | {"log_decay": theta, "state": before})
    (expected,) = torch.autograd.grad(out.sum(), theta)
    assert expected.any()
    assert_equal(gradient, expected)
    op = torch.ops.interdomain.linear_step_ if linear else torch.ops.interdomain.scan_step_
    args = tuple((inputs | {"state": before}).values())
    torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor"))
