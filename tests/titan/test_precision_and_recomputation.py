"""Precision, compilation and recomputation in the backward pass, seen inside real runs."""

import pytest
import torch

pytestmark = pytest.mark.e2e

LAYERS = 2
# Of what the scan gets: q, k, v; log_decay, mixing.
SCANNED = (*3 * ["torch.bfloat16"], *2 * ["torch.float32"])


@pytest.mark.parametrize("name", ["2 products compiled", "1 bfloat16", "2 bfloat16"])
def test_the_scan_s_products_are_bfloat16_and_the_dynamics_float32(runs, name):
    for seen in runs.every(name):
        assert seen["dtypes"]["scan_forward"] == {SCANNED}
        (dynamics,) = seen["dtypes"]["dynamics"]
        kinds = dict(dynamics)
        assert {
            "parameter log_dt",
            "parameter log_A_real",
            "parameter A_imag",
            "parameter C",
            "output 1",
        } < kinds.keys()
        assert {*kinds.values()} == {"torch.float32"}


def test_bfloat16_is_near_to_float32(runs):
    """One rank takes the same path as many. If products alone are bfloat16, the gradients are of float32's size."""
    exact = runs.seen("1 text")["log"][1]
    one, two, products = (
        runs.seen(name)["log"] for name in ("1 bfloat16", "2 bfloat16", "2 products compiled")
    )
    for step in (1, 2):
        assert one[step]["loss"] == pytest.approx(two[step]["loss"], rel=2e-5)
    assert one[1]["loss"] == pytest.approx(exact["loss"], rel=2e-3)
    assert one[1]["loss"] != exact["loss"]
    assert products[1]["loss"] == pytest.approx(exact["loss"], rel=1e-4)
    assert products[1]["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.02)
    assert products[1]["grad_norm"] != exact["grad_norm"]


def test_generated_code_runs_whole_blocks(runs):
    """With selective checkpointing, which saves the scan."""
    seen = runs.seen("1 compiled")
    assert [(call["fullgraph"], call["backend"]) for call in seen["compiled"]] == [
        (True, "inductor")
    ] * LAYERS
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
    seen, expected = runs.seen(name), runs.seen(reference)
    assert expected["calls"][1] == LAYERS
    assert seen["calls"] == {1: calls, 2: calls}
    assert seen["gradients"].keys() == expected["gradients"].keys()
    for parameter, gradient in expected["gradients"].items():
        assert gradient.abs().max() > 0  # else all would agree
        assert torch.equal(seen["gradients"][parameter], gradient), parameter
