"""Validation, backend choice and logging of interdomain.scan."""

import logging

import pytest
import torch

from interdomain import scan
from interdomain.scan import library

from .common import Case, op_inputs

QUERY, _ = op_inputs(Case(T=5, B=2, H=2, G=3, R=4, D=3, M=6), torch.float32)
LINEAR, _ = op_inputs(Case(T=5, B=2, H=2, R=4, D=3, M=6), torch.float32, linear=True)
STEP = {n: x[:, 0] if n in "qkv" else x for n, x in QUERY.items() if n != "initial_state"}
STEP["state"] = QUERY["initial_state"]


def zeros(*shape, **kwargs):
    return torch.zeros(*shape, **kwargs)


FAST = torch.cat((QUERY["log_decay"].detach()[:, :5], torch.full((2, 1, 2), -1.37)), dim=1)
QUERY_ERRORS = [
    (
        {"backend": "cuda"},
        "backend is 'cuda'; allowed: auto, chunkwise, chunkwise-torch, fft, reference",
    ),
    ({"k": zeros(2, 5, 8)}, r"k has shape \(2, 5, 8\); expected \[B, T, H, R\]"),
    ({"v": zeros(2, 4, 2, 3)}, r"v has shape \(2, 4, 2, 3\); expected \(2, 5, 2, 3\)"),
    ({"q": zeros(2, 5, 5, 4)}, "Hq a multiple of the 2 heads"),
    ({"log_decay": zeros(3, 6, 2)}, "log_decay has shape .* `decay_exponent` builds it"),
    (
        {"log_decay": FAST},
        r"real part of -1\.37 per token; 'chunkwise' takes -1\.36 and above in torch\.float32.*'fft' take any",
    ),
    ({"mixing": zeros(2, 6, 6)}, r"mixing has shape \(2, 6, 6\); expected \(2, 12, 12\)"),
    (
        {"initial_state": zeros(2, 2, 6, 6, 2)},
        r"initial_state has shape .* expected \(2, 2, 6, 7, 2\)",
    ),
    (
        {"q": zeros(2, 5, 6, 4, dtype=torch.float64)},
        "k is torch.float32; allowed .*: torch.float64",
    ),
    ({"mixing": zeros(2, 12, 12, device="meta")}, "mixing is on meta; the first input is on cpu"),
    (
        {n: QUERY[n][:, :0] for n in "qkv"},
        r"k has shape \(2, 0, 2, 4\); there must be at least one of each",
    ),
]
LINEAR_ERRORS = [
    ({"z": zeros(2, 5, 7)}, r"expected \[B, T, H, P\]"),
    ({"readout": zeros(2, 6)}, r"readout has shape \(2, 6\); expected \(2, 12\)"),
]
STEP_ERRORS = [
    ({"k": QUERY["k"]}, "a step has no time axis"),
    ({"state": None}, r"no state to go on from: give one, \[2, 2, 6, 7, 2\]"),
    ({"state": STEP["state"].double()}, r"state is torch\.float64"),
    ({"mixing": QUERY["mixing"][:, :5]}, r"mixing has shape \(2, 5, 12\); expected \(2, 12, 12\)"),
]
TABLES = [
    (scan.interdomain_scan, QUERY, QUERY_ERRORS),
    (scan.linear_scan, LINEAR, LINEAR_ERRORS),
    (scan.interdomain_step, STEP, STEP_ERRORS),
]


@pytest.mark.parametrize(
    ("function", "inputs", "change", "message"),
    [(function, inputs, *error) for function, inputs, errors in TABLES for error in errors],
)
def test_errors(function, inputs, change, message):
    with pytest.raises(ValueError, match=message):
        function(**{**inputs, **change})


def test_auto_is_chunkwise_and_says_so_once(caplog):
    library._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="interdomain.scan"):
        o, _ = scan.interdomain_scan(**QUERY)
        scan.interdomain_scan(**QUERY)
    assert [r.getMessage() for r in caplog.records] == [
        "interdomain.scan: backend 'auto' is chunkwise (plain PyTorch on cpu)"
    ]
    assert torch.equal(o, scan.interdomain_scan(**QUERY, backend="chunkwise")[0])
