# ruff: noqa: F811 (a fixture is imported)
"""The plain form against the paper's equations; refusals of `input_features`; its choice of a backend; ops without a kernel."""

import pytest
import torch

from interdomain import features
from interdomain.features import input_features

from ..scan.common import assert_within, saved_tensors
from ..scan.devices import pretend_gpu  # noqa: F401
from .common import CASES, MIXES, TOLERANCES, Case, literal, make, run, run_forward

K = MIXES["k"]
PLAIN_CASES = [
    *(case for case, _ in CASES),
    Case(T=2, W=7, past=True, **MIXES["q"]),
    Case(T=5, R=7, **MIXES["b"]),
]


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [
        (torch.float64, False),
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
        (torch.float16, True),
    ],
    ids=str,
)
def test_by_the_letter(dtype, autocast):
    """Without autocast parameters have the dtype of activations, as FSDP casts them, and else full precision.

    Low precision is rounded once, at the end.
    """
    parameters = torch.promote_types(dtype, torch.float32) if autocast else dtype
    for case in PLAIN_CASES:
        leaves, rope, dy = make(case, dtype, parameters)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            got = run(case, leaves, rope, dy, backend="torch")
        assert got["y"].dtype == dtype
        for name, leaf in leaves.items():
            assert got[f"d{name}"].dtype == leaf.dtype
        assert_within(got, literal(case, leaves, rope, dy), TOLERANCES[dtype])


def test_autograd_keeps_only_the_inputs():
    """The intermediate results are computed again in the backward."""
    case = Case(T=9, past=True, **K)
    leaves, rope, dy = make(case, torch.float32)
    with saved_tensors() as saved:
        run(case, leaves, rope, dy, backend="torch")
    kept = {x.data_ptr() for x in saved if x.numel() >= leaves["x"].numel()}
    assert kept == {leaves["x"].data_ptr()}


def test_derivatives_of_other_kinds():
    """Forward mode, torch.func and second derivatives, which the kernels do not have."""
    case = Case(T=3, **K)
    leaves, rope, _ = make(case)

    def value(x):
        return run_forward(case, leaves | {"x": x}, rope).sin().sum()

    x = leaves["x"]
    assert torch.autograd.gradgradcheck(value, x)
    expected = torch.func.grad(value)(x.detach())
    _, tangent = torch.func.jvp(value, (x.detach(),), (expected,))
    torch.testing.assert_close(tangent, expected.square().sum())


X = torch.zeros(2, 5, 24)
TABLE = torch.zeros(5, 1, 4)
CONV = torch.zeros(24, 1, 4), torch.zeros(24)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(x=X[0]), r"x has shape \(5, 24\); expected \[B, T, H R\] with R = head_dim = 8"),
        (
            dict(conv=(torch.zeros(23, 1, 4), CONV[1])),
            r"conv has shapes .* expected \(\(24, 4\), \(24,\)\)",
        ),
        (dict(past=X[:, :3]), "past is given without conv"),
        (
            dict(documents=X[..., 0]),
            r"documents is torch.float32 of shape \(2, 5\); expected int32 or int64",
        ),
        (
            dict(rope=(TABLE, TABLE[:3])),
            r"rope has shapes .* expected \(\(5, 1, 4\), \(5, 1, 4\)\)",
        ),
        (dict(head_dim=3, rope=(TABLE, TABLE)), "head_dim is 3; RoPE rotates pairs"),
        (
            dict(norm=(torch.zeros(8), torch.zeros(2, 8))),
            r"norm has shapes .* expected \(\(8,\), \(3, 8\)\)",
        ),
        (dict(backend="fast"), "backend is 'fast'; allowed: auto, triton, torch"),
        (dict(backend="triton"), "cannot run this: the input is on cpu"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        input_features(**{"x": X, "head_dim": 8} | options)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "width", "table_gradient", "message"),
    [
        (torch.float64, 8, 4, False, "float64"),
        (torch.bfloat16, 3, 4, False, "head_dim is 3 and the .* have even ones up to 256"),
        (torch.bfloat16, 8, 5, False, "the convolution is 5 wide and the .* have 4 at most"),
        (torch.bfloat16, 8, 4, True, "the rotary tables require a gradient"),
        (torch.bfloat16, 8, 4, False, None),
    ],
)
def test_auto_takes_the_kernels_if_they_have_it(
    pretend_gpu, dtype, head_dim, width, table_gradient, message
):
    x = torch.empty(2, 5, 264, device="cuda", dtype=dtype)
    table = torch.empty(5, 1, 4, device="cuda", requires_grad=table_gradient)
    arguments = x, head_dim, width, (table, table)
    if message is None:
        assert features._choose_backend("auto", *arguments) == "triton"
        return
    assert features._choose_backend("auto", *arguments) == "torch"
    with pytest.raises(ValueError, match=message):
        features._choose_backend("triton", *arguments)
