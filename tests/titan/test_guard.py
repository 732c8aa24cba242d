"""Steps 2, 3, 5 and 6 are not finite on rank 1 of 2 (loss, gradient, both, loss): skipped on both ranks, counted, limited."""

import math

import pytest
import torch

from interdomain.checkpoint.step_folder import read_sidecar
from interdomain.titan.step.guard import StepGuard

from ..common import NothingReadBack

pytestmark = pytest.mark.e2e


def test_such_a_step_changes_neither_weights_nor_state_on_any_rank_and_is_counted(runs):
    seen, other = runs.every("2 spoiled")
    assert seen["states"] == other["states"]
    assert [step for step in range(2, 7) if seen["states"][step] != seen["states"][step - 1]] == [4]
    log = [seen["log"][step] for step in range(1, 7)]
    assert [math.isfinite(row["loss"]) for row in log] == [True, False, True, True, False, False]
    assert [math.isfinite(row["grad_norm"]) for row in log] == [
        True,
        True,
        False,
        True,
        False,
        True,
    ]
    assert [row["skipped_steps/total"] for row in log] == [0, 1, 2, 2, 3, 4]
    assert [row["skipped_steps/in_a_row"] for row in log] == [0, 1, 2, 0, 1, 2]
    assert [
        read_sidecar(runs.checkpoint("2 spoiled", step))[1]["skipped_steps"] for step in (3, 6)
    ] == [2, 4]
    said = runs.said("2 spoiled")
    assert "up to step 2: 1 step(s) were skipped that were not finite" in said
    assert "the last 2 step(s) up to step 6 were skipped" in said
    # The schedule and the data move on.
    undisturbed = runs.seen("2 text")["log"]
    for quantity in ("lr/main", "lr/ssm", "n_tokens_seen"):
        assert [row[quantity] for row in log] == [
            undisturbed[step][quantity] for step in range(1, 7)
        ]
    assert runs.samples("2 spoiled") == runs.samples("2 text")


def test_it_is_counted_without_reading_anything_back(alone):
    """A loss, then a norm, that is not finite, in a run that had skipped three steps before it was resumed."""
    guard = StepGuard()
    guard.load_state_dict({"skipped_steps": 3, "skipped_in_a_row": 0})
    steps = [
        (3.0, 1.0, 0.0, [3, 0]),
        (math.nan, 1.0, 1.0, [4, 1]),
        (3.0, math.inf, 1.0, [5, 2]),
        (3.0, 1.0, 0.0, [5, 0]),
    ]
    for loss, norm, skip, counts in steps:
        loss, norm = torch.tensor(loss), torch.tensor(norm)
        with NothingReadBack():
            decision = guard.decide(loss, norm, stop_requested=bool(skip))
        assert decision.skip == decision.stop == skip
        torch.testing.assert_close(decision.loss, loss, equal_nan=True)
        assert [*guard.scalars().values()] == counts
    assert guard.state_dict() == {"skipped_steps": 5, "skipped_in_a_row": 0}


def test_repeated_it_ends_the_run(runs):
    """With the optimizer that decides on the host."""
    seen = runs.seen("2 given up")
    assert list(seen["log"]) == [1, 2, 3, 4]
    assert seen["states"][4] == seen["states"][2] != seen["states"][1]
    assert (
        "error: the last 2 steps up to step 4 were skipped: loss nan, gradient norm "
        in runs.said("2 given up")
    )


def test_weights_that_are_not_finite_are_never_saved(runs):
    assert "error: the weights are not finite, so " in runs.said("2 not finite")
    assert not [*(runs.at("2 not finite") / "checkpoint").glob("step-*")]
