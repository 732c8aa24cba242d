"""Precision and recomputation in the backward pass, seen inside real runs."""

import pytest
import torch

from .runs import assert_close

pytestmark = pytest.mark.e2e

# Dtypes that the scan gets: of q, k, v, and of log_decay, mixing.
SCANNED = (*3 * [torch.bfloat16], *2 * [torch.float32])


@pytest.mark.parametrize("name", ["2 products compiled", "1 bfloat16", "2 bfloat16"])
def test_the_scan_s_products_are_bfloat16_and_the_ssm_tensors_float32(runs, name):
    for seen in runs.every(name):
        assert seen["dtypes"]["scan"] == {SCANNED}
        dtypes = seen["dtypes"]["ssm"]
        assert dtypes.keys() > {"log_dt", "A_imag", "C", "mixing"}
        assert set(dtypes.values()) == {torch.float32}


def test_bfloat16_is_near_to_float32(runs):
    """If only products are bfloat16, the gradients are nearer, too."""
    exact = runs.log("1 text")[1]
    loss = runs.log("1 bfloat16")[1]["loss"]
    assert 0 < abs(loss - exact["loss"]) < 2e-3 * exact["loss"]
    products = runs.log("2 products compiled")[1]
    assert products["loss"] == pytest.approx(exact["loss"], rel=1e-4)
    assert 0 < abs(products["grad_norm"] - exact["grad_norm"]) < 0.02 * exact["grad_norm"]


def test_one_rank_rounds_as_many_do(runs):
    two = runs.log("2 bfloat16")
    for step, scalars in runs.log("1 bfloat16").items():
        assert scalars["loss"] == pytest.approx(two[step]["loss"], rel=2e-5)


@pytest.mark.parametrize(
    ("name", "reference", "calls"),
    [
        ("1 text selective", "1 text", 2),  # it saves the scan's output of two layers
        ("1 text full", "1 text", 4),
        ("1 s4d selective", "1 s4d", 2),
    ],
)
def test_checkpointing_counts_the_scans_and_changes_no_gradient(runs, name, reference, calls):
    seen = runs.seen(name)
    assert seen["calls"] == {1: calls, 2: calls}
    expected = runs.seen(reference)["gradients"]
    for gradient in expected.values():
        assert gradient.any()
    assert_close(seen["gradients"], expected, 0)
