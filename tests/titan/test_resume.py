"""Runs that continue with other settings; test_topologies.py has other ranks, test_kills.py the same ranks, bitwise."""

import hashlib

import pytest

from interdomain.data import PackedDataset, TokenCorpus

pytestmark = pytest.mark.e2e


def test_a_run_goes_back_with_another_order_and_learning_rate(runs):
    """It continues at the same place of the other order, and on its schedule under the new peak."""
    other = PackedDataset(TokenCorpus(runs.corpora["text"]), seq_len=64, seed=43)
    samples = runs.samples("1 changed")
    assert list(samples) == [4, 5]
    for step, hashes in samples.items():
        rows = other.read_batch(range(8 * step - 8, 8 * step)).astype("int64")
        assert hashes == sorted(hashlib.sha256(row.tobytes()).hexdigest() for row in rows)

    # Step 4 is the second of four that decay to 1e-5: (1 + cos(pi / 3)) / 2 = 0.75.
    for name, peak in (("1 text", 3e-3), ("1 changed", 2e-4)):
        scalars = runs.log(name)[4]
        assert scalars["lr/main"] == pytest.approx(1e-5 + 0.75 * (peak - 1e-5))
    assert scalars["lr/ssm"] == scalars["lr/main"]

    said = runs.said("1 changed")
    assert "another debug.seed: the data goes on after 24 samples of another order" in said
    for change in ("debug.seed: 42 -> 43", "optimizer.lr: 0.003 -> 0.0002"):
        assert said.count(change) == 1
