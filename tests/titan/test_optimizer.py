"""Two parameter groups by name, and the schedule step by step."""

import math

import pytest
import torch
from torchtitan.components.lr_scheduler import build_lr_schedulers

from interdomain.model import CONDITIONS, Transformer, build_config
from interdomain.titan.host import translate
from interdomain.titan.step.optimizer import GroupedOptimizers, GroupedSchedulers

from .runs import parse


def make_optimizers(condition="interdomain", given=""):
    model = Transformer(build_config("debug", condition, n_basis=4, vocab_size=64))
    return model, GroupedOptimizers([model], parse(given).optimizer)


def groups_of(condition, given=""):
    """Returns {group: names of its parameters}."""
    model, optimizers = make_optimizers(condition, given)
    names = {p: name for name, p in model.named_parameters()}
    groups = {}
    for group in optimizers.groups:
        groups[group["name"]] = {names[p] for p in group["params"]}
    assert sum(map(len, groups.values())) == len(names)
    return groups


def in_layers(part, names):
    """Returns the names of parameters in all four layers."""
    return {f"layers.{i}.{part}.{name}" for i in range(4) for name in names}


# As the paper lists them: scales and biases of the two input norms, dt, A (two), C, and c if it is read.
QUERY_READOUT = [
    "k_norm.bias",
    "k_norm.weight",
    "v_norm.bias",
    "v_norm.weight",
    "ssm.A_imag",
    "ssm.C",
    "ssm.log_A_real",
    "ssm.log_dt",
]
# Conditions without a recurrence of ours. The authors of the baselines with a fixed state leave
# these parameters without weight decay.
OTHERS = {
    "softmax": [],
    "gla": [],
    "deltanet": [],
    "gated-deltanet": ["ssm.A_log", "ssm.dt_bias"],
    "mamba2": ["ssm.A_log", "ssm.D", "ssm.dt_bias"],
}


# Maps within a block, besides wq, wk, wv and wo: gates of the baselines.
GATES = {
    "gla": ["wg.weight", "gate_down.weight", "gate_up.weight"],
    "mamba2": ["wg.weight", "wa.weight"],
    "deltanet": ["wb.weight"],
    "gated-deltanet": ["wg.weight", "wa.weight", "wb.weight"],
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_the_groups_of_every_condition(condition):
    """TorchTitan logs the rate of the first group as "lr". Muon takes its matrices out of that group."""
    per_layer = QUERY_READOUT
    if condition in OTHERS:
        per_layer = OTHERS[condition]
    elif not CONDITIONS[condition].get("query_readout"):
        per_layer = [*QUERY_READOUT, "ssm.c"]
    maps = ["wk.weight", "wv.weight", "wo.weight", *GATES.get(condition, [])]
    if not condition.startswith(("dual-linear", "s4d")):
        maps.append("wq.weight")
    matrices = in_layers("attention", maps)
    matrices |= in_layers("feed_forward", ["w1.weight", "w2.weight", "w3.weight"])

    groups = groups_of(condition)
    assert next(iter(groups)) == "main"
    assert groups.get("ssm", set()) == in_layers("attention", per_layer)
    groups["main"] -= matrices
    groups["matrices"] = matrices
    assert groups_of(condition, "--optimizer.name Muon") == groups


def rates_of(given, steps):
    """Returns the learning rates of every step by group."""
    _, container = make_optimizers(given=given)
    schedulers = GroupedSchedulers(container, parse(given).lr_scheduler, steps)
    rates = {"main": [], "ssm": []}
    for _ in range(steps):
        container.step()
        for group, rate in container.rates.items():
            rates[group].append(rate)
        schedulers.step()
    return rates


def test_warmup_and_cosine_step_by_step():
    rates = rates_of("--lr_scheduler.warmup_steps 4 --lr_scheduler.total_steps 0", 13)
    for group, peak in (("main", 3e-3), ("ssm", 1e-3)):
        warmup = [peak * k / 4 for k in (1, 2, 3, 4)]
        cosine = [1e-5 + (peak - 1e-5) * (1 + math.cos(math.pi * k / 8)) / 2 for k in range(9)]
        assert rates[group] == pytest.approx(warmup + cosine, rel=1e-12)


@pytest.mark.parametrize("decay_type", ["linear", "sqrt"])
def test_without_a_floor_the_shapes_are_torchtitans(decay_type):
    given = f"--lr_scheduler.decay_type {decay_type} --lr_scheduler.decay_ratio 0.25"
    given += " --lr_scheduler.min_lr 0 --lr_scheduler.total_steps 20"
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=3e-3)
    config = translate(parse(given)).lr_scheduler
    (scheduler,) = build_lr_schedulers([optimizer], config, 20).schedulers
    factor = scheduler.lr_lambdas[0]
    expected = [3e-3 * factor(step) for step in range(20)]
    assert rates_of(given, 20)["main"] == pytest.approx(expected, rel=1e-12)
