"""Runs that continue with other settings; test_topologies.py has other ranks, test_kills.py the same ranks, bitwise."""

import hashlib

import pytest

from interdomain.data import PackedDataset, TokenCorpus

pytestmark = pytest.mark.e2e


def test_a_run_goes_back_with_its_data_in_another_order(runs):
    """It continues at the same place of the other order, and says so."""
    other = PackedDataset(TokenCorpus(runs.corpora["text"]), seq_len=64, seed=43)
    samples = runs.samples("1 other seed")
    assert list(samples) == [4, 5]
    for step, hashes in samples.items():
        rows = other.read_batch(range(8 * step - 8, 8 * step)).astype("int64")
        assert hashes == sorted(hashlib.sha256(row.tobytes()).hexdigest() for row in rows)
    said = runs.said("1 other seed")
    assert "debug.seed: 42 -> 43" in said
    assert "another debug.seed: the data goes on after 24 samples of another order" in said


def test_a_changed_learning_rate_takes_effect_on_resume(runs):
    """The schedule goes on from its step under the new peak: cos(pi / 3) = 1 / 2. The loss is still the same."""
    changed = runs.seen("1 other rate")["log"][4]
    expected = 1e-5 + 0.75 * (2e-4 - 1e-5)
    assert changed["lr/main"] == pytest.approx(expected)
    assert changed["lr/ssm"] == pytest.approx(expected)
    before = runs.seen("1 text")["log"][4]
    assert before["lr/main"] == pytest.approx(1e-5 + 0.75 * (3e-3 - 1e-5))
    assert changed["loss"] == pytest.approx(before["loss"], rel=1e-5)
    assert runs.said("1 other rate").count("optimizer.lr: 0.003 -> 0.0002") == 1
