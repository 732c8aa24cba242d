"""The fused step against the plain one in fp64, and in place.

On a machine with a GPU these tests run there. Elsewhere test_triton_gpu.py runs this file in a process of its own.
"""

import pytest
import torch

from interdomain import scan
from interdomain.scan import ops

from .common import Case, assert_agree, linear_or_query, op_inputs, step_of
from .devices import DEVICE, on_kernels, use_kernels

pytest.importorskip("triton")
pytestmark = on_kernels


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    use_kernels(monkeypatch)


@torch.no_grad()
def problem(case, dtype, linear):
    """(tokens by name, tables, state) on DEVICE."""
    inputs, _ = op_inputs(case, torch.promote_types(dtype, torch.float32), dtype, linear)
    inputs = {n: x.detach().to(DEVICE) for n, x in inputs.items()}
    tokens = {n: inputs.pop(n)[:, 0] for n in (("z",) if linear else ("q", "k", "v"))}
    return tokens, inputs, inputs.pop("initial_state")


@linear_or_query
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case(T=1, B=2, R=16, D=16, readout="hermitian"), torch.float32),
        (
            Case(T=1, B=2, G=2, R=6, D=7, M=24, decay="strong"),
            torch.float64,
        ),  # masks on every side; the algebra
        (Case(T=1, B=2, H=1, R=64, D=64, M=64, decay="s4d"), torch.float16),
        (Case(T=1, H=1, G=2, R=128, D=129, M=128, decay="s4d"), torch.bfloat16),
    ],
    ids=str,
)
def test_step_is_the_plain_step(case, linear, dtype, monkeypatch):
    """New state and in place; with Lambda made beforehand; with the upper half of W, where that is all of it."""
    (tokens, tables, state), step = problem(case, dtype, linear), step_of(linear)
    with monkeypatch.context() as patch:
        patch.setattr(ops, "KERNEL_DEVICES", ())
        out, new = step(
            **{n: x.double() for n, x in (tokens | tables).items()}, state=state.double()
        )
    calls = [(tables, False), (tables | {"decay": scan.decay_factor(tables["log_decay"])}, True)]
    if not linear and case.readout == "complex":
        calls.append((tables | {"mixing": tables["mixing"][:, : case.M]}, True))
    names = {torch.float64: "float64", torch.float32: "float32"}
    for arguments, inplace in calls:
        live = state.clone()
        got, after = step(**tokens, **arguments, state=live, inplace=inplace)
        assert got.dtype == dtype
        assert (after is live) == inplace
        assert inplace or torch.equal(live, state)
        assert_agree({"out": got.cpu()}, {"out": out.cpu()}, names.get(dtype, "bfloat16"))
        assert_agree({"state": after.cpu()}, {"state": new.cpu()}, names[state.dtype])


@linear_or_query
def test_strides(linear):
    """Tokens whose numbers do not lie side by side; a state that is a view is copied, or refused where it is overwritten."""
    (tokens, tables, state), step = (
        problem(Case(T=1, B=2, R=8, D=8), torch.float32, linear),
        step_of(linear),
    )
    spread = {n: torch.stack((x, x), dim=-1)[..., 0] for n, x in tokens.items()}
    wide = torch.cat((state, state), dim=3)[:, :, :, :16]
    expected = step(**tokens, **tables, state=state)
    got = step(**spread, **tables, state=wide)
    assert_agree(dict(enumerate(got)), dict(enumerate(expected)), "float32")
    with pytest.raises(ValueError, match="contiguous"):
        step(**spread, **tables, state=wide, inplace=True)


@linear_or_query
def test_autograd_and_opcheck(linear):
    """No kernel where a gradient is recorded; to overwrite the state later does not change it."""
    (tokens, tables, state), step = (
        problem(Case(T=1, B=2, R=8, D=9), torch.float32, linear),
        step_of(linear),
    )
    before = state.clone()
    recorded = tables | {"log_decay": tables["log_decay"].clone().requires_grad_()}
    out, _ = step(**tokens, **recorded, state=state)
    assert out.requires_grad
    step(**tokens, **tables, state=state, inplace=True)
    (gradient,) = torch.autograd.grad(out.sum(), recorded["log_decay"])
    (wanted,) = torch.autograd.grad(
        step(**tokens, **recorded, state=before)[0].sum(), recorded["log_decay"]
    )
    assert wanted.any()
    assert torch.equal(gradient, wanted)
    op = torch.ops.interdomain.linear_step_ if linear else torch.ops.interdomain.scan_step_
    args = (*tokens.values(), *tables.values(), before)
    torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor"))
