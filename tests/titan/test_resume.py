"""Runs that continue with other settings; test_topologies.py has other ranks, test_kills.py the same ranks, to the bit."""

import hashlib

import pytest

from interdomain.data import PackedDataset, TokenCorpus

pytestmark = pytest.mark.e2e


def test_a_run_goes_back_with_its_data_in_another_order(runs):
    """At the same place of the other order; the message says so, and a start without `checkpoint.load_step` is refused."""
    other = PackedDataset(TokenCorpus(runs.corpora["text"]), seq_len=64, seed=43)
    for step, samples in enumerate(runs.samples("1 other seed"), 3):
        rows = other.read_batch(range(8 * step, 8 * step + 8)).astype("int64")
        assert samples == sorted(hashlib.sha256(row.tobytes()).hexdigest() for row in rows)
    said = runs.said("1 other seed")
    assert "debug.seed: 42 -> 43" in said
    assert "another debug.seed: the data goes on after 24 samples of another order" in said


def test_a_changed_learning_rate_takes_effect_on_resume(runs):
    """The checkpoint was saved with a peak of 3e-3; the schedule goes on from its step under the new peak."""
    changed, before = (runs.seen(name)["log"][4] for name in ("1 other rate", "1 text"))
    floor = 1e-5
    assert before["lr/main"] == pytest.approx(floor + (3e-3 - floor) * 0.75)  # cos(pi / 3) = 1 / 2
    assert before["lr/ssm"] == pytest.approx(floor + (1e-3 - floor) * 0.75)
    assert changed["lr/main"] == changed["lr/ssm"] == pytest.approx(floor + (2e-4 - floor) * 0.75)
    assert changed["loss"] == pytest.approx(
        before["loss"], rel=1e-5
    )  # the step itself starts from the same weights
    assert runs.said("1 other rate").count("optimizer.lr: 0.003 -> 0.0002") == 1
