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
    ({"backend": "cuda"}, "backend is 'cuda'; allowed: auto, chunkwise, chunkwise-torch, fft, reference"),
    ({"k": zeros(2, 5, 8)}, r"k has shape \(2, 5, 8\); expected \[B, T, H, R\]"),
    ({"v": zeros(2, 4, 2, 3)}, r"v has shape \(2, 4, 2, 3\); expected \(2, 5, 2, 3\)"),
    ({"q": zeros(2, 5, 5, 4)}, "Hq a multiple of the 2 heads"),
    ({"log_decay": zeros(3, 6, 2)}, "log_decay has shape .* `decay_exponent` builds it"),
    (
        {"log_decay": zeros(2, 0, 2), "mixing": zeros(2, 0, 0)},
        r"log_decay has shape \(2, 0, 2\): M = 0; there must be at least one",
    ),
    (
        {"log_decay": FAST},
        r"real part of -1\.37 per token; 'chunkwise' takes -1\.36 and above in torch\.float32.*'fft' take any",
    ),
    ({"mixing": zeros(2, 6, 6)}, r"mixing has shape \(2, 6, 6\); expected \(2, 12, 12\)"),
    ({"initial_state": zeros(2, 2, 6, 6, 2)}, r"initial_state has shape .* expected \(2, 2, 6, 7, 2\)"),
    ({"q": zeros(2, 5, 6, 4, dtype=torch.int32)}, "q is torch.int32; allowed .* torch.float16, torch.float32"),
    ({"q": zeros(2, 5, 6, 4, dtype=torch.float64)}, "k is torch.float32; allowed .*: torch.float64"),
    ({"log_decay": zeros(2, 6, 2, dtype=torch.bfloat16)}, "log_decay is torch.bfloat16; allowed .*: torch.float32"),
    ({"mixing": zeros(2, 12, 12, device="meta")}, "mixing is on meta; the first input is on cpu"),
    ({n: QUERY[n][:, :0] for n in "qkv"}, r"k has shape \(2, 0, 2, 4\); there must be at least one of each"),
]
LINEAR_ERRORS = [
    ({"z": zeros(2, 5, 7)}, r"expected \[B, T, H, P\]"),
    ({"readout": zeros(2, 6)}, r"readout has shape \(2, 6\); expected \(2, 12\)"),
    ({"log_decay": FAST}, r"real part of -1\.37 per token"),
    ({"initial_state": zeros(2, 2, 6, 6, 2)}, "initial_state has shape"),
]
STEP_ERRORS = [
    ({"k": QUERY["k"]}, "a step has no time axis"),
    ({"state": STEP["state"][:1]}, "state has shape"),
    ({"state": None}, r"no state to go on from: give one, \[2, 2, 6, 7, 2\]"),
    ({"state": STEP["state"].double()}, r"state is torch\.float64"),
    ({"mixing": QUERY["mixing"][:, :5]}, r"mixing has shape \(2, 5, 12\); expected \(2, 12, 12\)"),
    ({"decay": QUERY["log_decay"][:1]}, r"decay has shape \(1, 6, 2\); expected \(2, 6, 2\)"),
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


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_auto_is_chunkwise_and_says_so_once(caplog, compiled):
    run = scan.interdomain_scan
    run = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    library._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="interdomain.scan"):
        results = [run(**QUERY)[0] for _ in range(2)]
        scan.linear_scan(**LINEAR, backend="fft")
    line = "interdomain.scan: backend 'auto' is chunkwise (plain PyTorch on cpu)"
    assert [r.getMessage() for r in caplog.records] == [line]
    assert torch.equal(results[0], scan.interdomain_scan(**QUERY, backend="chunkwise")[0])


def test_activations_may_differ_in_dtype():
    """Under autocast some come out of a matmul (bf16), some out of a norm (fp32); o follows v."""
    inputs = {**QUERY, "q": QUERY["q"].bfloat16(), "v": QUERY["v"].half()}
    for backend in scan.BACKENDS:
        o, _ = scan.interdomain_scan(**inputs, backend=backend)
        assert o.dtype == torch.float16
        torch.testing.assert_close(o.float(), scan.interdomain_scan(**QUERY)[0], rtol=3e-2, atol=1e-6)
