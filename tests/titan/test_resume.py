"""Runs that continue on other ranks, with the same batches; test_kills.py has those of the same ranks, to the bit."""

import hashlib

import pytest

from interdomain.data import PackedDataset, TokenCorpus

from .runs import assert_close_tensors, assert_same_run

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("name", "reference", "last"),
    [
        ("1 after two", "2 text", 6),
        ("4 after pipeline", "1 layers", 5),
        ("4 after context", "1 layers", 5),
    ],
)
def test_a_run_continues_on_other_ranks(runs, name, reference, last):
    """Also where they share sequences, heads or layers, before or after."""
    assert list(runs.seen(name)["log"]) == list(range(4, last + 1))
    assert_same_run(runs, name, reference)
    assert_close_tensors(runs.checkpoint(name, last), runs.checkpoint(reference, last))


def test_a_run_goes_back_with_its_data_in_another_order(runs):
    """At the same place of the other order; the message says so, and a start without `checkpoint.load_step` is refused."""
    corpus = TokenCorpus(runs.corpora["text"])
    other = PackedDataset(corpus, seq_len=64, seed=43)
    rows = [other.read_batch(range(8 * n, 8 * n + 8)) for n in (3, 4)]
    expected = [sorted(hashlib.sha256(row.tobytes()).hexdigest() for row in batch.astype("int64")) for batch in rows]
    assert runs.samples("1 other seed") == expected
    said = runs.said("1 other seed")
    assert "debug.seed: 42 -> 43" in said
    assert "another debug.seed: the data goes on after 24 samples of another order" in said


def test_a_changed_learning_rate_takes_effect_on_resume(runs):
    """The checkpoint was saved with a peak of 3e-3; the schedule goes on from its step under the new peak."""
    at_four, before = runs.seen("1 other rate")["log"][4], runs.seen("1 text")["log"][4]
    for log, peak in ((at_four, 2e-4), (before, 3e-3)):
        for group, its_peak in (("main", peak), ("ssm", min(peak, 1e-3))):
            assert log[f"lr/{group}"] == pytest.approx(1e-5 + (its_peak - 1e-5) * 0.75)  # cos(pi / 3) = 1 / 2
    assert at_four["loss"] == pytest.approx(before["loss"], rel=1e-5)  # the step itself starts from the same weights
    assert runs.said("1 other rate").count("optimizer.lr: 0.003 -> 0.0002") == 1


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("2 replicas", "1 text"),  # saved while the steps after it were computed
        ("2 context layers", "1 layers"),
        ("2 tensor layers", "1 layers"),
        ("2 pipeline layers", "1 layers"),
        ("4 replicas shards layers", "1 layers"),
    ],
)
def test_a_checkpoint_of_every_axis_holds_what_one_rank_saves(runs, name, reference):
    """By the same names, weights and optimizer state, whole: what `convert` reads and every topology continues from."""
    assert_close_tensors(runs.checkpoint(name, 3), runs.checkpoint(reference, 3))
