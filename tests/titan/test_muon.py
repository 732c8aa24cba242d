"""Muon on every axis: to the bit PyTorch's own on whole tensors, given the same gradients; and what it refuses."""

import math

import pytest
import torch

from interdomain.files.checkpoint_index import read_tensors, tensor_index
from interdomain.titan.plan.parameter_groups import group_of
from interdomain.titan.plan.run_plan import make_plan
from interdomain.titan.settings.job_config import read_job_config

from .runs import MUON_AXES, assert_same_run, assert_same_tensors, flags

e2e = pytest.mark.e2e
NAMES = ["1 muon again", *(f"2 {axis} muon" for axis in MUON_AXES), "4 tensor context muon"]


def saved(folder):
    return read_tensors(folder, list(tensor_index(folder)))


@e2e
@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_pytorchs_own_to_the_bit(runs, name):
    """From one rank's checkpoint of step 3, with the gradients that this topology has in step 4."""
    before, after = saved(runs.checkpoint("1 muon", 3)), saved(runs.checkpoint(name, 4))
    gradients, log = runs.whole(name, "gradients"), runs.seen(name)["log"][4]
    assert len(gradients) > 20
    matrices = 0
    for parameter, gradient in gradients.items():
        p = torch.nn.Parameter(before[parameter])
        p.grad, group = gradient, group_of(parameter, p, "Muon")
        options = {"lr": log[f"lr/{group}"], "weight_decay": 0.0 if group == "ssm" else 0.1}
        if group == "matrices":
            optimizer, matrices = torch.optim.Muon([p], **options, adjust_lr_fn="match_rms_adamw"), matrices + 1
        else:
            optimizer = torch.optim.AdamW([p], **options, betas=(0.9, 0.95), fused=True)
        moments = ["momentum_buffer"] if group == "matrices" else ["step", "exp_avg", "exp_avg_sq"]
        optimizer.state[p] = {each: before[f"optimizer.state.{parameter}.{each}"].clone() for each in moments}
        optimizer.step()
        assert torch.equal(p.data, after[parameter]), parameter
        for each in moments:
            assert torch.equal(optimizer.state[p][each], after[f"optimizer.state.{parameter}.{each}"]), parameter
    assert matrices == 2 * 7


@e2e
@pytest.mark.parametrize("name", NAMES[1:])
def test_a_run_continues_on_other_ranks(runs, name):
    """Losses agree to 1e-5, norms less: after a difference of 1e-7 bfloat16 rounds some numbers of Newton-Schulz otherwise."""
    assert_same_run(runs, name, "1 muon", tolerance=2e-4)
    for step, log in runs.seen(name)["log"].items():
        assert log["loss"] == pytest.approx(runs.seen("1 muon")["log"][step]["loss"], rel=1e-5)


@e2e
def test_a_run_continues_on_the_same_ranks_to_the_bit(runs):
    assert_same_tensors(*(runs.checkpoint(name, 5) for name in ("1 muon again", "1 muon")))


@e2e
def test_a_skipped_step_changes_nothing(runs):
    states = runs.seen("2 spoiled muon")["states"]
    assert states[1] == states[2] == states[3] != states[4]
    assert math.isfinite(runs.seen("2 spoiled muon")["log"][4]["loss"])


@e2e
def test_the_state_of_another_optimizer_is_refused(runs):
    error = runs.said("1 muon of adamw")
    assert "has the optimizer state of AdamW, of which Muon cannot go on" in error


def test_settings_that_muon_refuses():
    for settings, words in (
        ({"optimizer__momentum": 0.9}, "optimizer.momentum = 0.9 has no effect with AdamW"),
        ({"optimizer__name": "Muon", "training__enable_cpu_offload": True}, "would compute Newton-Schulz"),
    ):
        with pytest.raises(ValueError, match=words):
            make_plan(read_job_config(flags("corpus", "folder", **settings)), 1)
