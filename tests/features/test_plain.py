# ruff: noqa: F811 (a fixture is imported)
"""The plain form against the paper's equations; refusals of `input_features`; its choice of a backend; ops without a kernel."""

import logging

import pytest
import torch

from interdomain import features
from interdomain.features import input_features

from ..scan.devices import pretend_gpu  # noqa: F401
from .common import MIXES, TOLERANCES, Case, assert_agree, literal, make, run

CASES = [
    Case(T=T, **mix) for T in (2, 9) for mix in MIXES.values()
]  # shorter than the filter, and longer
CASES += [Case(T=T, past=True, strided=True, **MIXES["k"]) for T in (1, 7)]
CASES += [
    Case(T=6, W=2, past=True, **MIXES["a"]),
    Case(T=6, W=7, **MIXES["q"]),
    Case(T=5, R=7, **MIXES["b"]),
]
CASES += [
    Case(T=T, documents=True, past=past, **MIXES["k"]) for T in (3, 9) for past in (False, True)
]
CASES += [Case(T=6, rope="rows", strided=True, **MIXES["q"])]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_by_the_letter(dtype):
    for case in CASES:
        problem = make(case, dtype)
        got = run(case, *problem, backend="torch")
        assert all(got[f"d{n}"].dtype == x.dtype for n, x in problem[0].items())
        assert got["y"].dtype == dtype
        assert_agree(got, literal(case, *problem), TOLERANCES[dtype])


def test_low_precision_parameters_and_autocast():
    """bf16 parameters, as FSDP casts them, and autocast: still one rounding at the end."""
    case = Case(T=9, **MIXES["k"])
    for parameters in (torch.float32, torch.bfloat16):
        problem = make(case, torch.bfloat16, parameters)
        expected = literal(case, *problem)
        for enabled in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                got = run(case, *problem)
            assert_agree(got, expected, TOLERANCES[torch.bfloat16])


def test_compiles_without_a_graph_break():
    case = Case(T=9, past=True, **MIXES["k"])
    problem = make(case, torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(input_features, fullgraph=True, backend="aot_eager")
    assert_agree(
        run(case, *problem, function=compiled), literal(case, *problem), TOLERANCES[torch.float32]
    )


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
        input_features(**{"x": X, "head_dim": 8, **options})


def test_auto_takes_the_kernels_on_cuda(pretend_gpu, caplog):
    x = torch.empty(2, 5, 24, device="cuda", dtype=torch.bfloat16)
    with caplog.at_level(logging.INFO):
        assert features._choose_backend("auto", x, 8, 4, None) == "triton"
        assert features._choose_backend("auto", x.double(), 8, 4, None) == "torch"
        assert features._choose_backend("auto", x.cpu(), 8, 4, None) == "torch"
    assert len(caplog.records) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(dtype=torch.float64), "float64"),
        (dict(head_dim=3), "head_dim is 3 and the Triton kernels have even ones up to 256"),
        (dict(width=5), "the convolution is 5 wide and the Triton kernels have 4 at most"),
        (dict(leaf=True), "the rotary tables require a gradient"),
    ],
)
def test_what_the_kernels_do_not_have(pretend_gpu, change, message):
    x = torch.empty(2, 5, 264, device="cuda", dtype=change.get("dtype", torch.bfloat16))
    table = torch.empty(5, 1, 4, device="cuda", requires_grad=change.get("leaf", False))
    with pytest.raises(ValueError, match=message):
        features._choose_backend(
            "triton", x, change.get("head_dim", 8), change.get("width", 4), (table, table)
        )
    assert features._choose_backend("torch", x, change.get("head_dim", 8), 4, None) == "torch"
