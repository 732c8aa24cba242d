"""Two parameter groups by name, and the schedule step by step."""

import math

import pytest
import torch
from torchtitan.components.lr_scheduler import build_lr_schedulers as titan_lr_schedulers

from interdomain.model import CONDITIONS, Transformer, build_config
from interdomain.titan.optimizer import build_lr_schedulers, build_optimizers
from interdomain.titan.settings import read_job_config

from .conftest import flags


def configuration(**settings):
    return read_job_config(flags("corpus", "folder", **settings))


def optimizers(condition="interdomain", job=None, **overrides):
    model = Transformer(build_config("debug", condition, n_basis=4, vocab_size=64, **overrides))
    return model, build_optimizers([model], (job or configuration()).optimizer)


def groups_by_name(model, container):
    """{group name: (group, names of its parameters)}"""
    names = {id(p): name for name, p in model.named_parameters()}
    (optimizer,) = container.optimizers
    return {g["name"]: (g, sorted(names[id(p)] for p in g["params"])) for g in optimizer.param_groups}


# Per layer, as the paper lists them: scales and biases of the two input norms, Delta, A (two), C, and c where it is read.
SSM = [
    "k_norm.bias",
    "k_norm.weight",
    "ssm.A_imag",
    "ssm.C",
    "ssm.log_A_real",
    "ssm.log_dt",
    "v_norm.bias",
    "v_norm.weight",
]


@pytest.mark.parametrize("condition", [name for name in CONDITIONS if name != "softmax"])
def test_the_ssm_group_of_every_condition(condition):
    model, container = optimizers(condition)
    groups = groups_by_name(model, container)
    assert list(groups) == ["main", "ssm"]  # TorchTitan logs the first group's rate as "lr"
    per_layer = [*SSM, *([] if CONDITIONS[condition]["query_readout"] else ["ssm.c"])]
    assert groups["ssm"][1] == sorted(f"layers.{i}.attention.{name}" for i in range(4) for name in per_layer)
    assert sorted(groups["main"][1] + groups["ssm"][1]) == sorted(name for name, _ in model.named_parameters())


def test_softmax_has_one_group():
    model, container = optimizers("softmax")
    groups = groups_by_name(model, container)
    assert list(groups) == ["main"]
    assert len(groups["main"][1]) == len(list(model.parameters()))


def test_random_features_have_no_input_norm_to_group():
    model, container = optimizers(feature_map="rff", c_form="identity")
    names = groups_by_name(model, container)["ssm"][1]
    assert names == sorted(
        f"layers.{i}.attention.ssm.{n}" for i in range(4) for n in ("A_imag", "log_A_real", "log_dt")
    )


@pytest.mark.parametrize(("peak", "ssm_peak"), [(3e-3, 1e-3), (1.5e-3, 1e-3), (1e-3, 1e-3), (5e-4, 5e-4)])
def test_the_recipe_of_the_groups(peak, ssm_peak):
    _, container = optimizers(job=configuration(optimizer__lr=peak))
    main, ssm = container.optimizers[0].param_groups
    assert isinstance(container.optimizers[0], torch.optim.AdamW)
    assert (main["lr"], ssm["lr"]) == (peak, ssm_peak)
    assert (main["weight_decay"], ssm["weight_decay"]) == (0.1, 0.0)
    assert main["betas"] == ssm["betas"] == (0.9, 0.95)


def rates(job, steps):
    """[(main, ssm)] of every step, as the optimizer takes it."""
    _, container = optimizers(job=job)
    schedulers = build_lr_schedulers(container, job.lr_scheduler, steps)
    taken = []
    for _ in range(steps):
        container.step()
        taken.append(tuple(container.rates.values()))
        schedulers.step()
    return taken


def test_warmup_and_cosine_step_by_step():
    job = configuration(lr_scheduler__warmup_steps=4, lr_scheduler__total_steps=None)
    taken = rates(job, steps=13)
    for group, peak in enumerate((3e-3, 1e-3)):
        expected = [peak * k / 4 for k in (1, 2, 3, 4)]
        expected += [1e-5 + (peak - 1e-5) * (1 + math.cos(math.pi * k / 8)) / 2 for k in range(9)]
        assert [step[group] for step in taken] == pytest.approx(expected, rel=1e-12)
    assert taken[-1] == pytest.approx((1e-5, 1e-5), rel=1e-12)  # one floor for both groups, at the last step
    assert taken[3] == (3e-3, 1e-3)


@pytest.mark.parametrize("decay_type", ["linear", "sqrt", "cosine"])
@pytest.mark.parametrize("decay_ratio", [None, 0.25])
def test_without_a_floor_the_shapes_are_torchtitans(decay_type, decay_ratio):
    settings = {"lr_scheduler__decay_type": decay_type, "lr_scheduler__min_lr": 0.0, "lr_scheduler__total_steps": 20}
    if decay_ratio:
        settings["lr_scheduler__decay_ratio"] = decay_ratio
    job = configuration(**settings)
    taken = rates(job, steps=20)
    stand_in = torch.optim.SGD([torch.zeros(1)], lr=3e-3)
    theirs = titan_lr_schedulers([stand_in], job.lr_scheduler, 20).schedulers[0].lr_lambdas[0]
    assert [main for main, _ in taken] == pytest.approx([3e-3 * theirs(step) for step in range(20)], rel=1e-12)


def test_the_schedule_continues_under_the_new_configuration():
    def build(peak):
        job = configuration(optimizer__lr=peak, lr_scheduler__total_steps=None)
        _, container = optimizers(job=job)
        return container, build_lr_schedulers(container, job.lr_scheduler, 9)

    old, old_schedule = build(3e-3)
    for _ in range(5):
        old.step()
        old_schedule.step()
    assert old_schedule.state_dict() == {"last_epoch": 5}  # nothing of the old rates travels
    new, new_schedule = build(2e-4)
    new_schedule.load_state_dict(
        old_schedule.state_dict()
    )  # torch.distributed.checkpoint loads it before the optimizer
    new.load_state_dict(old.state_dict())
    main, ssm = new.optimizers[0].param_groups
    expected = 1e-5 + (2e-4 - 1e-5) * (1 + math.cos(math.pi * 3 / 6)) / 2
    assert main["lr"] == pytest.approx(expected, rel=1e-12)
    assert ssm["lr"] == pytest.approx(expected, rel=1e-12)
    assert (main["weight_decay"], ssm["weight_decay"]) == (0.1, 0.0)
