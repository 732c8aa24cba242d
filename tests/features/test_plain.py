# ruff: noqa: F811 (a fixture is imported)
"""The plain form against the paper's equations; refusals of `input_features`; its choice of a backend; ops without a kernel."""

import logging

import pytest
import torch

from interdomain import features
from interdomain.features import input_features

from ..scan.common import assert_within, saved_tensors
from ..scan.devices import pretend_gpu  # noqa: F401
from .common import MIXES, TOLERANCES, Case, literal, make, run, run_forward

K = MIXES["k"]
CASES = [Case(T=2, **mix) for mix in MIXES.values()]  # shorter than the filter
CASES += [Case(T=9, **mix) for mix in MIXES.values()]
CASES += [
    Case(T=1, past=True, strided=True, **K),
    Case(T=7, past=True, strided=True, **K),
    Case(T=6, W=2, past=True, **MIXES["a"]),
    Case(T=6, W=7, **MIXES["q"]),
    Case(T=5, R=7, **MIXES["b"]),
    Case(T=3, documents=True, **K),
    Case(T=9, documents=True, **K),
    Case(T=3, documents=True, past=True, **K),
    Case(T=9, documents=True, past=True, **K),
    Case(T=6, rope="rows", strided=True, **MIXES["q"]),
]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_by_the_letter(dtype):
    for case in CASES:
        leaves, rope, dy = make(case, dtype)
        got = run(case, leaves, rope, dy, backend="torch")
        assert got["y"].dtype == dtype
        for name, leaf in leaves.items():
            assert got[f"d{name}"].dtype == leaf.dtype
        assert_within(got, literal(case, leaves, rope, dy), TOLERANCES[dtype])


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_parameters_and_autocast(parameters):
    """bf16 parameters, as FSDP casts them, and autocast: still one rounding at the end."""
    case = Case(T=9, **K)
    problem = make(case, torch.bfloat16, parameters)
    expected = literal(case, *problem)
    assert_within(run(case, *problem), expected, TOLERANCES[torch.bfloat16])
    with torch.autocast("cpu", torch.bfloat16):
        got = run(case, *problem)
    assert_within(got, expected, TOLERANCES[torch.bfloat16])


def test_autograd_keeps_only_the_inputs():
    """The intermediate results are computed again in the backward."""
    case = Case(T=9, past=True, **K)
    leaves, rope, dy = make(case, torch.float32)
    with saved_tensors() as saved:
        run(case, leaves, rope, dy, backend="torch")
    inputs = {x.untyped_storage().data_ptr() for x in (*leaves.values(), *rope)}
    kept = {x.untyped_storage().data_ptr() for x in saved if x.numel() >= leaves["x"].numel()}
    assert kept <= inputs


def test_derivatives_of_other_kinds():
    """torch.func, forward mode and second derivatives, which the kernels do not have."""
    case = Case(T=3, **K)
    leaves, rope, dy = make(case)

    def value(x):
        return (run_forward(case, leaves | {"x": x}, rope) * dy).sum()

    x = leaves["x"].detach()
    direction = torch.randn_like(x)
    (expected,) = torch.autograd.grad(value(leaves["x"]), leaves["x"])
    torch.testing.assert_close(torch.func.grad(value)(x), expected)
    _, tangent = torch.func.jvp(value, (x,), (direction,))
    torch.testing.assert_close(tangent, (expected * direction).sum())
    assert torch.autograd.gradgradcheck(value, leaves["x"])


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
            dict(conv=CONV, past=X[:, :4]),
            r"past has shapes \(\(2, 4, 24\),\); expected \(\(2, 3, 24\),\)",
        ),
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


def test_auto_takes_the_kernels_on_cuda(pretend_gpu, caplog):
    x = torch.empty(2, 5, 24, device="cuda", dtype=torch.bfloat16)
    with caplog.at_level(logging.INFO):
        assert features._choose_backend("auto", x, 8, 4, None) == "triton"
        assert features._choose_backend("auto", x.double(), 8, 4, None) == "torch"
        assert features._choose_backend("auto", x.cpu(), 8, 4, None) == "torch"
    assert len(caplog.records) == 3


@pytest.mark.parametrize(
    ("dtype", "head_dim", "width", "table_gradient", "message"),
    [
        (torch.float64, 8, 4, False, "float64"),
        (torch.bfloat16, 3, 4, False, "head_dim is 3 and the .* have even ones up to 256"),
        (torch.bfloat16, 8, 5, False, "the convolution is 5 wide and the .* have 4 at most"),
        (torch.bfloat16, 8, 4, True, "the rotary tables require a gradient"),
    ],
)
def test_what_the_kernels_do_not_have(pretend_gpu, dtype, head_dim, width, table_gradient, message):
    x = torch.empty(2, 5, 264, device="cuda", dtype=dtype)
    table = torch.empty(5, 1, 4, device="cuda", requires_grad=table_gradient)
    with pytest.raises(ValueError, match=message):
        features._choose_backend("triton", x, head_dim, width, (table, table))
    assert features._choose_backend("torch", x, head_dim, width, None) == "torch"
