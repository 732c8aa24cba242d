"""Precision, compilation and recomputation in the backward pass, seen inside real runs."""

import pytest
import torch

from .runs import assert_same_run

pytestmark = pytest.mark.e2e

LAYERS = 2
FLOAT32, BFLOAT16 = "torch.float32", "torch.bfloat16"


def test_products_alone_are_bfloat16(runs):
    """Compiled. What the scan gets is the products'; the parameters, and so the gradients' norm, are float32, near to
    float32's."""
    seen, exact = runs.seen("2 products compiled"), runs.seen("2 text")
    assert seen["dtypes"]["scan_forward"] == {(BFLOAT16, BFLOAT16, BFLOAT16, FLOAT32, FLOAT32)}
    (kinds,) = seen["dtypes"]["dynamics"]
    assert set(dict(kinds).values()) == {FLOAT32}
    assert seen["log"][1]["loss"] == pytest.approx(exact["log"][1]["loss"], rel=1e-4)
    assert seen["log"][1]["grad_norm"] == pytest.approx(exact["log"][1]["grad_norm"], rel=0.02)
    assert seen["log"][1]["grad_norm"] != exact["log"][1]["grad_norm"]


def test_dynamics_stay_float32_under_bfloat16_on_one_rank_as_on_two(runs):
    """One rank takes the same path as many: their losses agree far below what bfloat16 changes."""
    for seen in (*runs.every("1 bfloat16"), *runs.every("2 bfloat16")):
        # q, k, v; log_decay, mixing.
        assert seen["dtypes"]["scan_forward"] == {(BFLOAT16, BFLOAT16, BFLOAT16, FLOAT32, FLOAT32)}
        (dynamics,) = seen["dtypes"]["dynamics"]
        kinds = dict(dynamics)
        assert kinds.keys() > {*(f"parameter {name}" for name in ("log_dt", "log_A_real", "A_imag", "C")), "output 1"}
        assert set(kinds.values()) == {FLOAT32}
    ours, others, exact = (runs.seen(name)["log"] for name in ("1 bfloat16", "2 bfloat16", "1 text"))
    for step in (1, 2):
        assert ours[step]["loss"] == pytest.approx(others[step]["loss"], rel=2e-5)
    assert ours[1]["loss"] != exact[1]["loss"]
    assert ours[1]["loss"] == pytest.approx(exact[1]["loss"], rel=2e-3)


def test_generated_code_computes_the_same(runs):
    """With selective checkpointing, which saves the scan."""
    seen = runs.seen("1 compiled")
    assert [(call["fullgraph"], call["backend"]) for call in seen["compiled"]] == [(True, "inductor")] * LAYERS
    assert seen["calls"] == dict.fromkeys((1, 2), LAYERS)
    assert_same_run(runs, "1 compiled", "1 text", tolerance=1e-4)


@pytest.mark.parametrize("name", ["text", "s4d"])
def test_checkpointing_counts_the_scans_and_changes_no_gradient(runs, name):
    reference = runs.seen(f"1 {name}")
    assert reference["calls"][1] == LAYERS
    assert all(gradient.abs().max() > 0 for gradient in reference["gradients"].values())  # else all would agree
    for mode, calls in {"selective": LAYERS, **({"full": 2 * LAYERS} if name == "text" else {})}.items():
        seen = runs.seen(f"1 {name} {mode}")
        assert seen["calls"] == dict.fromkeys((1, 2), calls)  # selective saves the scan's output
        assert seen["gradients"].keys() == reference["gradients"].keys()
        assert not [n for n, x in reference["gradients"].items() if not torch.equal(seen["gradients"][n], x)]
