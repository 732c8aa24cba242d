"""Precision, compilation and recomputation in the backward pass, seen inside real runs."""

import pytest
import torch

from .runs import largest_difference

pytestmark = pytest.mark.e2e

LAYERS = 2
# Dtypes that the scan gets: of q, k, v, and of log_decay, mixing.
SCANNED = (*3 * ["torch.bfloat16"], *2 * ["torch.float32"])


@pytest.mark.parametrize("name", ["2 products compiled", "1 bfloat16", "2 bfloat16"])
def test_the_scan_s_products_are_bfloat16_and_the_ssm_tensors_float32(runs, name):
    for seen in runs.every(name):
        assert seen["dtypes"]["scan_forward"] == {SCANNED}
        dtypes = seen["dtypes"]["ssm"]
        assert {"parameter log_dt", "parameter A_imag", "parameter C", "output 1"} < dtypes.keys()
        assert set(dtypes.values()) == {"torch.float32"}


def test_bfloat16_is_near_to_float32(runs):
    """If only products are bfloat16, the gradients are nearer, too."""
    exact = runs.seen("1 text")["log"][1]
    rounded = runs.seen("1 bfloat16")["log"][1]
    assert rounded["loss"] == pytest.approx(exact["loss"], rel=2e-3)
    assert rounded["loss"] != exact["loss"]
    products = runs.seen("2 products compiled")["log"][1]
    assert products["loss"] == pytest.approx(exact["loss"], rel=1e-4)
    assert products["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.02)
    assert products["grad_norm"] != exact["grad_norm"]


def test_one_rank_rounds_as_many_do(runs):
    two = runs.seen("2 bfloat16")["log"]
    for step, scalars in runs.seen("1 bfloat16")["log"].items():
        assert scalars["loss"] == pytest.approx(two[step]["loss"], rel=2e-5)


def test_generated_code_runs_whole_blocks(runs):
    """Selective checkpointing saves the scan: it runs once."""
    seen = runs.seen("1 compiled")
    compiled = [(call["fullgraph"], call["backend"]) for call in seen["compiled"]]
    assert compiled == [(True, "inductor")] * LAYERS
    assert seen["calls"] == {1: LAYERS, 2: LAYERS}


@pytest.mark.parametrize(
    ("name", "reference", "calls"),
    [
        ("1 text selective", "1 text", LAYERS),  # it saves the scan's output
        ("1 text full", "1 text", 2 * LAYERS),
        ("1 s4d selective", "1 s4d", LAYERS),
    ],
)
def test_checkpointing_counts_the_scans_and_changes_no_gradient(runs, name, reference, calls):
    seen = runs.seen(name)
    assert seen["calls"] == {1: calls, 2: calls}
    expected = runs.seen(reference)["gradients"]
    assert seen["gradients"].keys() == expected.keys()
    for parameter, gradient in seen["gradients"].items():
        assert gradient.any(), parameter
        message = largest_difference(parameter, gradient, expected[parameter])
        assert torch.equal(gradient, expected[parameter]), message
