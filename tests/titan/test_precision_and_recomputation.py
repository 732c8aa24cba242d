"""What is float32, what is compiled, and what the backward pass computes again, seen inside real runs."""

import pytest
import torch

pytestmark = pytest.mark.e2e

LAYERS = 4
FLOAT32, BFLOAT16 = "torch.float32", "torch.bfloat16"


def test_products_alone_are_bfloat16(two):
    """Compiled. What the scan gets is the products'; the parameters, and so the gradients' norm, are float32, near to
    float32's."""
    seen, exact = two.seen("products compiled"), two.seen("interdomain")
    assert seen["dtypes"]["scan_forward"] == {(BFLOAT16, BFLOAT16, BFLOAT16, FLOAT32, FLOAT32)}
    (kinds,) = seen["dtypes"]["dynamics"]
    assert set(dict(kinds).values()) == {FLOAT32}
    assert seen["log"][1]["loss"] == pytest.approx(exact["log"][1]["loss"], rel=1e-4)
    assert seen["log"][1]["grad_norm"] == pytest.approx(exact["log"][1]["grad_norm"], rel=0.02)
    assert seen["log"][1]["grad_norm"] != exact["log"][1]["grad_norm"]


@pytest.mark.parametrize("ranks", ["one", "two"])
def test_dynamics_stay_float32_under_bfloat16(ranks, request):
    runs = request.getfixturevalue(ranks)
    for rank in range(runs.ranks):
        dtypes = runs.seen("bfloat16", rank)["dtypes"]
        # q, k, v; log_decay, mixing.
        assert dtypes["scan_forward"] == {(BFLOAT16, BFLOAT16, BFLOAT16, FLOAT32, FLOAT32)}
        (seen,) = dtypes["dynamics"]
        kinds = dict(seen)
        assert kinds.keys() > {*(f"parameter {name}" for name in ("log_dt", "log_A_real", "A_imag", "C")), "output 1"}
        assert set(kinds.values()) == {FLOAT32}


def test_bfloat16_is_bfloat16_on_one_rank_as_on_two(one, two):
    """One rank takes the same path as many: their losses agree far below what bfloat16 changes."""
    ours, others = one.seen("bfloat16")["log"], two.seen("bfloat16")["log"]
    exact = one.seen("interdomain")["log"]
    for step in (1, 2):
        assert ours[step]["loss"] == pytest.approx(others[step]["loss"], rel=2e-5)
    assert ours[1]["loss"] != exact[1]["loss"]
    assert ours[1]["loss"] == pytest.approx(exact[1]["loss"], rel=2e-3)


@pytest.mark.parametrize(("fixture", "backend"), [("one", "inductor"), ("two", "aot_eager")])
def test_compiled_blocks_compute_the_same(one, fixture, backend, request):
    """With selective checkpointing, which saves the scan."""
    runs, reference = request.getfixturevalue(fixture).seen("compiled"), one.seen("interdomain")
    assert [(call["fullgraph"], call["backend"]) for call in runs["compiled"]] == [(True, backend)] * LAYERS
    assert {step: n for step, n in runs["calls"].items() if step != "validation"} == dict.fromkeys((1, 2, 3), LAYERS)
    for step, log in runs["log"].items():
        for quantity in ("loss", "grad_norm"):
            assert log[quantity] == pytest.approx(reference["log"][step][quantity], rel=1e-4)
    assert fixture == "one" or runs["validation"].keys() >= {1, 3}
    for step, validation in runs["validation"].items():
        assert validation["loss"] == pytest.approx(reference["validation"][step]["loss"], rel=1e-4)


@pytest.mark.parametrize("condition", ["interdomain", "s4d"])
def test_checkpointing_counts_the_scans(one, condition):
    calls = {mode: one.seen(f"{condition} {mode}")["calls"] for mode in ("none", "selective", "full")}
    assert calls["none"] == {1: LAYERS, 2: LAYERS}
    assert calls["selective"] == {1: LAYERS, 2: LAYERS}  # saved, not computed again
    assert calls["full"] == {1: 2 * LAYERS, 2: 2 * LAYERS}


@pytest.mark.parametrize("condition", ["interdomain", "s4d"])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_checkpointing_changes_no_gradient(one, condition, mode):
    reference = one.seen(f"{condition} none")["gradients"]
    ours = one.seen(f"{condition} {mode}")["gradients"]
    assert ours.keys() == reference.keys()
    assert all(reference[name].abs().max() > 0 for name in reference)  # a gradient that is not there would agree, too
    assert [name for name in reference if not torch.equal(ours[name], reference[name])] == []
