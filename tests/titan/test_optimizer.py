"""Two parameter groups by name, and the schedule step by step."""

import math

import pytest
import torch
from torchtitan.components.lr_scheduler import build_lr_schedulers as titan_lr_schedulers

from interdomain.model import CONDITIONS, Transformer, build_config
from interdomain.titan.host import translate
from interdomain.titan.step.optimizer import GroupedOptimizers, GroupedSchedulers

from .runs import parse


def optimizers(condition="interdomain", given="", **overrides):
    model = Transformer(build_config("debug", condition, n_basis=4, vocab_size=64, **overrides))
    return model, GroupedOptimizers([model], parse(given).optimizer)


def groups_of(model, container):
    """{group: the names of its parameters}."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {group["name"]: {names[id(p)] for p in group["params"]} for group in container.groups}


# Per layer, as the paper lists them: scales and biases of the two input norms, Delta, A (two), C, and c where it is read.
NORMS = ["k_norm.bias", "k_norm.weight", "v_norm.bias", "v_norm.weight"]
SSM = [*NORMS, "ssm.A_imag", "ssm.C", "ssm.log_A_real", "ssm.log_dt"]

# Of the baselines with a fixed state: those whose authors leave them without weight decay.
FIXED = {
    "gla": [],
    "deltanet": [],
    "gated-deltanet": ["ssm.A_log", "ssm.dt_bias"],
    "mamba2": ["ssm.A_log", "ssm.D", "ssm.dt_bias"],
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_the_ssm_group_of_every_condition(condition):
    model, container = optimizers(condition)
    groups = groups_of(model, container)
    per_layer = [*SSM, "ssm.c"]
    if CONDITIONS[condition].get("query_readout"):
        per_layer = SSM
    if condition == "softmax":
        per_layer = []
    per_layer = FIXED.get(condition, per_layer)
    expected = {f"layers.{i}.attention.{name}" for i in range(4) for name in per_layer}
    assert [*groups] == (
        ["main", "ssm"] if expected else ["main"]
    )  # TorchTitan logs the first group's rate as "lr"
    assert groups.get("ssm", set()) == expected
    assert groups["main"] == {name for name, _ in model.named_parameters()} - expected


# Maps within a block: wq, wk, wv, wo; the baselines' gates wg, wa, wb and gate_down, gate_up.
MAPS = {
    name: ["wk", "wv", "wo"] for name in CONDITIONS if name.startswith(("dual-linear", "s4d"))
} | {
    "gla": ["wq", "wk", "wv", "wo", "wg", "gate_down", "gate_up"],
    "mamba2": ["wq", "wk", "wv", "wo", "wg", "wa"],
    "deltanet": ["wq", "wk", "wv", "wo", "wb"],
    "gated-deltanet": ["wq", "wk", "wv", "wo", "wg", "wa", "wb"],
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_the_matrices_that_muon_trains(condition):
    """And the two groups of AdamW, without them."""
    model, container = optimizers(condition, "--optimizer.name Muon")
    groups = groups_of(model, container)
    maps = [f"attention.{name}" for name in MAPS.get(condition, ["wq", "wk", "wv", "wo"])]
    maps += [f"feed_forward.{name}" for name in ("w1", "w2", "w3")]
    matrices = {f"layers.{i}.{name}.weight" for i in range(4) for name in maps}
    assert groups.pop("matrices") == matrices
    groups["main"] |= matrices
    assert groups == groups_of(*optimizers(condition))


def test_the_recipe_of_muon():
    _, container = optimizers(given="--optimizer.name Muon")
    adamw, muon = container.optimizers
    assert isinstance(adamw, torch.optim.AdamW)
    assert isinstance(muon, torch.optim.Muon)
    (matrices,) = muon.param_groups
    recipe = {
        "lr": 3e-3,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
        "adjust_lr_fn": "match_rms_adamw",
    }
    assert matrices.items() >= recipe.items()


@pytest.mark.parametrize(("peak", "ssm_peak"), [(3e-3, 1e-3), (5e-4, 5e-4)])
def test_the_recipe_of_the_groups(peak, ssm_peak):
    _, container = optimizers(given=f"--optimizer.lr {peak}")
    (adamw,) = container.optimizers
    assert isinstance(adamw, torch.optim.AdamW)
    main, ssm = adamw.param_groups
    assert (main["lr"], main["weight_decay"], main["betas"]) == (peak, 0.1, (0.9, 0.95))
    assert (ssm["lr"], ssm["weight_decay"], ssm["betas"]) == (ssm_peak, 0.0, (0.9, 0.95))


def rates(given, steps):
    """[(main, ssm)] of every step, as the optimizer takes it."""
    _, container = optimizers(given=given)
    schedulers = GroupedSchedulers(container, parse(given).lr_scheduler, steps)
    taken = []
    for _ in range(steps):
        container.step()
        taken.append(tuple(container.rates.values()))
        schedulers.step()
    return taken


def test_warmup_and_cosine_step_by_step():
    taken = rates("--lr_scheduler.warmup_steps 4 --lr_scheduler.total_steps 0", steps=13)
    for group, peak in enumerate((3e-3, 1e-3)):
        expected = [peak * k / 4 for k in (1, 2, 3, 4)]
        expected += [1e-5 + (peak - 1e-5) * (1 + math.cos(math.pi * k / 8)) / 2 for k in range(9)]
        assert [step[group] for step in taken] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("decay_type", ["linear", "sqrt"])
def test_without_a_floor_the_shapes_are_torchtitans(decay_type):
    shape = f"--lr_scheduler.decay_type {decay_type} --lr_scheduler.decay_ratio 0.25"
    given = f"{shape} --lr_scheduler.min_lr 0 --lr_scheduler.total_steps 20"
    stand_in = torch.optim.SGD([torch.zeros(1)], lr=3e-3)
    theirs = (
        titan_lr_schedulers([stand_in], translate(parse(given)).lr_scheduler, 20)
        .schedulers[0]
        .lr_lambdas[0]
    )
    expected = [3e-3 * theirs(step) for step in range(20)]
    assert [main for main, _ in rates(given, 20)] == pytest.approx(expected, rel=1e-12)
