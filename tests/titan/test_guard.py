"""Steps 2, 3, 5 and 6 are not finite on rank 1 of 2 (loss, gradient, both, loss): skipped on both ranks, counted, limited."""

import math

import pytest
import torch

from interdomain.checkpoint.step_folder import read_run_record
from interdomain.titan.step.guard import StepGuard

from ..common import NothingReadBack

pytestmark = pytest.mark.e2e


def test_such_a_step_changes_neither_weights_nor_state_on_any_rank_and_is_counted(runs):
    seen, other = runs.every("2 spoiled")
    states = seen["states"]
    assert states == other["states"]
    assert states[1] == states[2] == states[3] != states[4] == states[5] == states[6]

    log = [seen["log"][step] for step in range(1, 7)]

    def column(name):
        return [row[name] for row in log]

    assert [*map(math.isfinite, column("loss"))] == [True, False, True, True, False, False]
    assert [*map(math.isfinite, column("grad_norm"))] == [True, True, False, True, False, True]
    assert column("skipped_steps/total") == [0, 1, 2, 2, 3, 4]
    assert column("skipped_steps/in_a_row") == [0, 1, 2, 0, 1, 2]
    for step, skipped in ((3, 2), (6, 4)):
        assert read_run_record(runs.checkpoint("2 spoiled", step))[1]["skipped_steps"] == skipped
    said = runs.said("2 spoiled")
    assert "1 step(s) up to step 2 were skipped, because the loss or the gradient norm" in said
    assert "The weights are those of step 4." in said

    # The schedule and the data move on.
    undisturbed = runs.seen("2 text")["log"]
    for quantity in ("lr/main", "lr/ssm", "n_tokens_seen"):
        assert column(quantity) == [undisturbed[step][quantity] for step in range(1, 7)]
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
