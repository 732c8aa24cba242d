"""Muon on every axis: to the bit PyTorch's own on whole tensors, given the same gradients (losses: test_topologies.py)."""

import math

import pytest
import torch

from interdomain.checkpoint.index import read_tensors, tensor_index
from interdomain.titan.plan.parameter_groups import group_of

from .runs import RUNS, assert_same_tensors

pytestmark = pytest.mark.e2e
NAMES = [name for name, given in RUNS.items() if given.get("of") == ["1 muon", 3]]


def saved(folder):
    return read_tensors(folder, list(tensor_index(folder)))


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_pytorchs_own_to_the_bit(runs, name):
    """From one rank's checkpoint of step 3, with the gradients that this topology has in step 4."""
    before = saved(runs.checkpoint("1 muon", 3))
    after = saved(runs.checkpoint(name, 4))
    log = runs.seen(name)["log"][4]
    matrices = 0
    for parameter, gradient in runs.whole(name, "gradients").items():
        p = torch.nn.Parameter(before[parameter])
        p.grad = gradient
        group = group_of(parameter, p, "Muon")
        options = {"lr": log[f"lr/{group}"], "weight_decay": 0.0 if group == "ssm" else 0.1}
        if group == "matrices":
            matrices += 1
            optimizer = torch.optim.Muon([p], **options, adjust_lr_fn="match_rms_adamw")
            moments = ["momentum_buffer"]
        else:
            optimizer = torch.optim.AdamW([p], **options, betas=(0.9, 0.95), fused=True)
            moments = ["step", "exp_avg", "exp_avg_sq"]
        state = f"optimizer.state.{parameter}"
        optimizer.state[p] = {each: before[f"{state}.{each}"].clone() for each in moments}
        optimizer.step()
        assert torch.equal(p.data, after[parameter]), parameter
        for each in moments:
            assert torch.equal(optimizer.state[p][each], after[f"{state}.{each}"]), parameter
    assert matrices == 2 * 7


def test_a_run_continues_on_the_same_ranks_to_the_bit(runs):
    assert_same_tensors(runs.checkpoint("1 muon again", 5), runs.checkpoint("1 muon", 5))


def test_a_skipped_step_changes_nothing(runs):
    seen = runs.seen("2 spoiled muon")
    states = seen["states"]
    assert states[1] == states[2] == states[3] != states[4]
    assert math.isfinite(seen["log"][4]["loss"])


def test_the_state_of_another_optimizer_is_refused(runs):
    error = runs.said("1 muon of adamw")
    assert "has the optimizer state of AdamW, which Muon cannot continue" in error
