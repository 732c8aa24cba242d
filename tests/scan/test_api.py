"""Validation, backend choice and logging of interdomain.scan."""

import logging

import pytest
import torch

from interdomain import scan
from interdomain.scan import library

from .common import Case, op_inputs, part_of_time, run_scan, run_step

QUERY, _ = op_inputs(Case(T=5, B=2, H=2, G=3, R=4, D=3, M=6), torch.float32)
LINEAR, _ = op_inputs(Case(T=5, B=2, H=2, R=4, D=3, M=6), torch.float32, linear=True)
STEP = part_of_time(QUERY, 0)
STEP["state"] = STEP.pop("initial_state")
DOCUMENTS = torch.zeros(2, 5, dtype=torch.int32)
ONE_FAST_MODE = QUERY["log_decay"].detach().clone()
ONE_FAST_MODE[1, 3, 0] = -1.37

# Arguments that replace good ones, and the error.
SCAN_ERRORS = [
    (
        {"backend": "cuda"},
        "backend is 'cuda'; allowed: auto, chunkwise, chunkwise-torch, fft, reference",
    ),
    ({"k": torch.zeros(2, 5, 8)}, r"k has shape \(2, 5, 8\); expected \[B, T, H, R\]"),
    ({"q": torch.zeros(2, 5, 5, 4)}, "Hq a multiple of the 2 heads"),
    ({"log_decay": torch.zeros(3, 6, 2)}, "log_decay has shape .* `decay_exponent` builds it"),
    (
        {"log_decay": ONE_FAST_MODE},
        r"real part of -1\.37 per token; 'chunkwise' takes -1\.36 and above in torch\.float32.*'fft' take any",
    ),
    ({"mixing": torch.zeros(2, 6, 6)}, r"mixing has shape \(2, 6, 6\); expected \(2, 12, 12\)"),
    (
        {"initial_state": torch.zeros(2, 2, 6, 6, 2)},
        r"initial_state has shape .* expected \(2, 2, 6, 7, 2\)",
    ),
    (
        {"q": torch.zeros(2, 5, 6, 4, dtype=torch.float64)},
        "k is torch.float32; allowed .*: torch.float64",
    ),
    ({"mixing": torch.zeros(2, 12, 12, device="meta")}, "mixing is on meta; .* is on cpu"),
    ({"k": torch.zeros(2, 0, 2, 4)}, r"k has shape \(2, 0, 2, 4\); .* at least one of each"),
    ({"documents": DOCUMENTS[:, 1:]}, r"int32 or int64 of shape \[B, T\] = \(2, 5\)"),
    ({"documents": DOCUMENTS.to("meta")}, "documents is on meta and k .* on cpu"),
    ({"group": "ranks"}, "initial_state with a group"),
    ({"group": "ranks", "initial_state": None, "backend": "fft"}, "fft.*'chunkwise' does"),
]
STEP_ERRORS = [
    ({"k": QUERY["k"]}, "a step has no time axis"),
    ({"state": None}, r"no state to go on from: give one, \[2, 2, 6, 7, 2\]"),
]


@pytest.mark.parametrize(("change", "message"), SCAN_ERRORS)
def test_errors_of_the_scan(change, message):
    with pytest.raises(ValueError, match=message):
        run_scan(**QUERY | change)


def test_errors_of_the_linear_scan():
    with pytest.raises(ValueError, match=r"readout has shape \(2, 6\); expected \(2, 12\)"):
        run_scan(**LINEAR | {"readout": torch.zeros(2, 6)})


@pytest.mark.parametrize(("change", "message"), STEP_ERRORS)
def test_errors_of_the_step(change, message):
    with pytest.raises(ValueError, match=message):
        run_step(**STEP | change)


def test_auto_is_chunkwise_and_says_so_once(caplog):
    library._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="interdomain.scan"):
        o, _ = scan.interdomain_scan(**QUERY)
        scan.interdomain_scan(**QUERY)
    assert caplog.messages == [
        "interdomain.scan: backend 'auto' is chunkwise (plain PyTorch on cpu)"
    ]
    assert torch.equal(o, scan.interdomain_scan(**QUERY, backend="chunkwise")[0])
