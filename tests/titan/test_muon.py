"""Muon on every axis: bitwise PyTorch's own on whole tensors, given the same gradients (losses: test_topologies.py)."""

import math

import pytest
import torch

from interdomain.titan.plan.parameter_groups import group_of

from .runs import RUNS, assert_same_tensors, tensors_of

pytestmark = pytest.mark.e2e
NAMES = [name for name, given in RUNS.items() if given.get("of") == ["1 muon", 3]]
MOMENTS = {"Muon": ["momentum_buffer"], "AdamW": ["step", "exp_avg", "exp_avg_sq"]}


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_bitwise_pytorchs_own(runs, name):
    """It starts from one rank's checkpoint of step 3, with the gradients that this topology has in step 4."""
    before = tensors_of(runs.checkpoint("1 muon", 3))
    after = tensors_of(runs.checkpoint(name, 4))
    log = runs.seen(name)["log"][4]
    matrices = 0
    for parameter, gradient in runs.whole(name, "gradients").items():
        p = torch.nn.Parameter(before[parameter])
        p.grad = gradient
        group = group_of(parameter, p, "Muon")
        lr = log[f"lr/{group}"]
        if group == "matrices":
            matrices += 1
            optimizer = torch.optim.Muon(
                [p], lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
            )
        else:
            decay = 0.0 if group == "ssm" else 0.1
            optimizer = torch.optim.AdamW(
                [p], lr=lr, weight_decay=decay, betas=(0.9, 0.95), fused=True
            )
        for moment in MOMENTS[type(optimizer).__name__]:
            saved = before[f"optimizer.state.{parameter}.{moment}"]
            optimizer.state[p][moment] = saved.clone()
        optimizer.step()
        assert torch.equal(p.data, after[parameter]), parameter
        for moment, value in optimizer.state[p].items():
            saved = after[f"optimizer.state.{parameter}.{moment}"]
            assert torch.equal(value, saved), f"{moment} of {parameter}"
    assert matrices == 2 * 7


def test_a_run_continues_on_the_same_ranks_with_the_same_bits(runs):
    assert_same_tensors(runs.checkpoint("1 muon again", 5), runs.checkpoint("1 muon", 5))


def test_a_skipped_step_changes_nothing(runs):
    seen = runs.seen("2 spoiled muon")
    states = seen["states"]
    assert states[1] == states[2] == states[3] != states[4]
    assert math.isfinite(seen["log"][4]["loss"])


def test_the_state_of_another_optimizer_is_refused(runs):
    message = "has the optimizer state of AdamW, which Muon cannot"
    assert message in runs.said("1 muon of adamw")
