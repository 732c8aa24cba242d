"""Steps 2, 3, 5 and 6 are not finite on rank 1 of 2 (loss, gradient, both, loss): skipped on both ranks, counted, limited."""

import math

import pytest

from interdomain.checkpoint.step_folder import read_run_record

pytestmark = pytest.mark.e2e


def test_a_skipped_step_changes_neither_weights_nor_state_on_any_rank_and_is_counted(runs):
    seen, other = runs.every("2 spoiled")
    states = seen["states"]
    assert states == other["states"]
    assert states[1] == states[2] == states[3] != states[4] == states[5] == states[6]

    # Whether loss and gradient norm are finite, steps skipped in all and in a row.
    expected = {
        1: (True, True, 0, 0),
        2: (False, True, 1, 1),
        3: (True, False, 2, 2),
        4: (True, True, 2, 0),
        5: (False, False, 3, 1),
        6: (False, True, 4, 2),
    }
    undisturbed = runs.log("2 text")
    for step, scalars in seen["log"].items():
        finite = (math.isfinite(scalars["loss"]), math.isfinite(scalars["grad_norm"]))
        counts = (scalars["skipped_steps/total"], scalars["skipped_steps/in_a_row"])
        assert finite + counts == expected[step], step
        # The schedule and the data move on.
        for quantity in ("lr/main", "lr/ssm", "n_tokens_seen"):
            assert scalars[quantity] == undisturbed[step][quantity]
    assert runs.samples("2 spoiled") == runs.samples("2 text")

    assert read_run_record(runs.checkpoint("2 spoiled", 6))[1]["skipped_steps"] == 4
    said = runs.said("2 spoiled")
    assert "1 step(s) up to step 2 were skipped, because the loss or the gradient norm" in said
    assert "The weights are those of step 4." in said


def test_several_skipped_steps_in_a_row_end_the_run(runs):
    """The optimizer is one that decides on the host."""
    seen = runs.seen("2 given up")
    assert list(seen["log"]) == [1, 2, 3, 4]
    assert seen["states"][4] == seen["states"][2] != seen["states"][1]
    message = "error: the last 2 steps up to step 4 were skipped: loss nan, gradient norm "
    assert message in runs.said("2 given up")


def test_weights_that_are_not_finite_are_never_saved(runs):
    assert "error: the weights are not finite, so " in runs.said("2 not finite")
    assert not list(runs.at("2 not finite").glob("checkpoint/step-*"))
