"""Muon on every axis: bitwise PyTorch's own on whole tensors, given the same gradients (losses: test_topologies.py)."""

import math

import pytest
import torch

from interdomain.titan.plan.parameter_groups import group_of

from .runs import RUNS, tensors_of

pytestmark = pytest.mark.e2e
NAMES = [name for name, given in RUNS.items() if given.get("of") == ["1 muon", 3]]
DECAY = {"main": 0.1, "ssm": 0.0}


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_bitwise_pytorchs_own(runs, name):
    """It starts from one rank's checkpoint of step 3, with the gradients that this topology has in step 4."""
    before = tensors_of(runs.checkpoint("1 muon", 3))
    after = tensors_of(runs.checkpoint(name, 4))
    log = runs.log(name)[4]
    assert log["lr/matrices"] == log["lr/main"]
    groups = []
    for parameter, gradient in runs.whole(name, "gradients").items():
        p = torch.nn.Parameter(before[parameter])
        p.grad = gradient
        group = group_of(parameter, p, "Muon")
        groups.append(group)
        lr = log[f"lr/{group}"]
        if group == "matrices":
            optimizer = torch.optim.Muon(
                [p], lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
            )
        else:
            optimizer = torch.optim.AdamW([p], lr=lr, betas=(0.9, 0.95), eps=1e-3, fused=True)
            optimizer.param_groups[0]["weight_decay"] = DECAY[group]
        prefix = f"optimizer.state.{parameter}."
        moments = [key for key in before if key.startswith(prefix)]
        for key in moments:
            optimizer.state[p][key.removeprefix(prefix)] = before[key].clone()
        optimizer.step()
        assert torch.equal(p.data, after[parameter]), parameter
        for key in moments:
            assert torch.equal(optimizer.state[p][key.removeprefix(prefix)], after[key]), key
    assert groups.count("matrices") == 2 * 7


def test_a_skipped_step_changes_nothing(runs):
    seen = runs.seen("2 spoiled muon")
    states = seen["states"]
    assert states[1] == states[2] == states[3] != states[4]
    assert math.isfinite(seen["log"][4]["loss"])


def test_the_state_of_another_optimizer_is_refused(runs):
    message = "has the optimizer state of AdamW, which Muon cannot"
    assert message in runs.said("1 muon of adamw")
