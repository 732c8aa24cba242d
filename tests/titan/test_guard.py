"""Steps 2, 3, 5 and 6 are not finite on rank 1 of 2 (loss, gradient, both, loss): skipped on both ranks, counted, limited."""

import itertools
import math

import pytest
import torch

from interdomain.files.distributed_checkpoint import read_sidecar
from interdomain.titan.settings.schema import Optimizer
from interdomain.titan.step.optimizer import GroupedOptimizers

from ..common import NothingReadBack

pytestmark = pytest.mark.e2e


def test_such_a_step_changes_neither_weights_nor_state_on_any_rank_and_is_counted(runs):
    for rank in (0, 1):
        states = runs.seen("2 spoiled", rank)["states"]
        assert {step for step in range(2, 7) if states[step] != states[step - 1]} == {4}
        assert states == runs.seen("2 spoiled", 0)["states"]
    log = runs.seen("2 spoiled")["log"]
    finite = {step: (math.isfinite(log[step]["loss"]), math.isfinite(log[step]["grad_norm"])) for step in log}
    both = (True, True)
    assert finite == {1: both, 2: (False, True), 3: (True, False), 4: both, 5: (False, False), 6: (False, True)}
    assert [log[step]["skipped_steps/total"] for step in range(1, 7)] == [0, 1, 2, 2, 3, 4]
    assert [log[step]["skipped_steps/in_a_row"] for step in range(1, 7)] == [0, 1, 2, 0, 1, 2]
    assert [read_sidecar(runs.checkpoint("2 spoiled", step))[1]["skipped_steps"] for step in (3, 6)] == [2, 4]
    assert "the last 2 step(s) up to step 6 were skipped" in runs.said("2 spoiled")
    # The schedule and the data move on.
    undisturbed = runs.seen("2 text")["log"]
    for step in range(1, 7):
        for quantity in ("lr/main", "lr/ssm", "n_tokens_seen"):
            assert log[step][quantity] == undisturbed[step][quantity]
    assert runs.samples("2 spoiled") == runs.samples("2 text")


def test_repeated_it_ends_the_run(runs):
    """With the optimizer that decides on the host."""
    seen = runs.seen("2 given up")
    assert list(seen["log"]) == [1, 2, 3, 4]
    assert seen["states"][4] == seen["states"][2] != seen["states"][1]
    assert "error: the last 2 steps up to step 4 were skipped: loss nan, gradient norm " in runs.said("2 given up")


def test_weights_that_are_not_finite_are_never_saved(runs):
    assert "error: the weights are not finite, so " in runs.said("2 not finite")
    assert not (runs.at("2 not finite") / "checkpoint").exists()


def test_the_decision_stays_on_the_device(alone):
    """On CUDA one value read by the host would make every step wait for the whole backward pass."""
    model = torch.nn.Linear(3, 3)
    optimizers = GroupedOptimizers([model], Optimizer(lr=0.1))
    weights = [model.weight.detach().clone()]
    for norm in (1.0, math.nan, 1.0):
        for p in model.parameters():
            p.grad = torch.full_like(p, norm)
        loss, norm = torch.tensor(1.0), torch.tensor(norm)
        with NothingReadBack():
            skip, _ = optimizers.guard.verdict(loss, norm, asked=False)
            optimizers.step(skip)
        weights.append(model.weight.detach().clone())
    assert [torch.equal(a, b) for a, b in itertools.pairwise(weights)] == [False, True, False]
    assert optimizers.guard.skipped == 1
