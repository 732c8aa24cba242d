"""Steps 2, 3 and 5 are not finite on rank 1 of 2 (loss, gradient, both): skipped on both ranks, counted, and a limit to it."""

import itertools
import math

import pytest
import torch

from interdomain.files.distributed_checkpoint import read_sidecar
from interdomain.titan.settings.schema import Optimizer
from interdomain.titan.step.optimizer import GroupedOptimizers

from ..common import NothingReadBack

pytestmark = pytest.mark.e2e


def test_such_a_step_changes_neither_weights_nor_state_on_any_rank_and_is_counted(two):
    for rank in (0, 1):
        states = two.seen("spoiled", rank)["states"]
        assert {step for step in range(2, 7) if states[step] != states[step - 1]} == {4, 6}
        assert states == two.seen("spoiled", 0)["states"]
    log = two.seen("spoiled")["log"]
    finite = {step: (math.isfinite(log[step]["loss"]), math.isfinite(log[step]["grad_norm"])) for step in log}
    both = (True, True)
    assert finite == {1: both, 2: (False, True), 3: (True, False), 4: both, 5: (False, False), 6: both}
    assert [log[step]["skipped_steps/total"] for step in range(1, 7)] == [0, 1, 2, 2, 3, 3]
    assert [log[step]["skipped_steps/in_a_row"] for step in range(1, 7)] == [0, 1, 2, 0, 1, 0]
    folder = two.folder / "spoiled" / "checkpoint"
    assert [read_sidecar(folder / f"step-{step}")[1]["skipped_steps"] for step in (3, 6)] == [2, 3]
    # The schedule and the data move on.
    undisturbed = two.seen("interdomain")["log"]
    for step in range(1, 7):
        for quantity in ("lr/main", "lr/ssm", "n_tokens_seen"):
            assert log[step][quantity] == undisturbed[step][quantity]
    assert two.samples("spoiled") == two.samples("interdomain")


def test_repeated_it_ends_the_run(two):
    """With the optimizer that decides on the host."""
    seen = two.seen("given up")
    assert list(seen["log"]) == [1, 2, 3, 4]
    assert seen["states"][4] == seen["states"][2] != seen["states"][1]
    assert "error: the last 2 steps up to step 4 were skipped: loss nan, gradient norm " in two.output


def test_a_run_that_ends_with_skipped_steps_says_so(two):
    """And weights that are not finite are never saved."""
    assert "the last 1 step(s) up to step 6 were skipped" in two.output
    assert not (two.folder / "not finite" / "checkpoint").exists()
    assert "error: the weights are not finite, so " in two.output


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
