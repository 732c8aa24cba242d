"""Two parameter groups by name, and the schedule step by step."""

import json
import math

import pytest
import torch
from torchtitan.components.lr_scheduler import build_lr_schedulers as titan_lr_schedulers

from interdomain.files.distributed_checkpoint import METADATA, SIDECAR
from interdomain.model import CONDITIONS, Transformer, build_config
from interdomain.titan.host import translate
from interdomain.titan.plan.parameter_groups import SSM_PARAMETER
from interdomain.titan.plan.schedule import check_jump
from interdomain.titan.settings.job_config import read_job_config
from interdomain.titan.step.optimizer import GroupedOptimizers, GroupedSchedulers

from .runs import flags


def configuration(**settings):
    return read_job_config(flags("corpus", "folder", **settings))


def optimizers(condition="interdomain", job=None, **overrides):
    model = Transformer(build_config("debug", condition, n_basis=4, vocab_size=64, **overrides))
    return model, GroupedOptimizers([model], (job or configuration()).optimizer)


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
    names = {id(p): name for name, p in model.named_parameters()}
    groups = {g["name"]: sorted(names[id(p)] for p in g["params"]) for g in container.optimizers[0].param_groups}
    per_layer = [*SSM, *([] if CONDITIONS[condition].get("query_readout") else ["ssm.c"])]
    per_layer = FIXED.get(condition, per_layer)
    expected = sorted(f"layers.{i}.attention.{name}" for i in range(4) for name in per_layer)
    everything = sorted(names.values())
    if condition == "softmax" or not per_layer:
        assert groups == {"main": everything}
    else:
        assert list(groups) == ["main", "ssm"]  # TorchTitan logs the first group's rate as "lr"
        assert groups["ssm"] == expected
        assert sorted(groups["main"] + expected) == everything


# Maps within a block: wq, wk, wv, wo; the baselines' gates wg, wa, wb and gate_down, gate_up.
MAPS = {name: ["wk", "wv", "wo"] for name in CONDITIONS if name.startswith(("dual-linear", "s4d"))} | {
    "gla": ["wq", "wk", "wv", "wo", "wg", "gate_down", "gate_up"],
    "mamba2": ["wq", "wk", "wv", "wo", "wg", "wa"],
    "deltanet": ["wq", "wk", "wv", "wo", "wb"],
    "gated-deltanet": ["wq", "wk", "wv", "wo", "wg", "wa", "wb"],
}


@pytest.mark.parametrize("condition", [*CONDITIONS, "hybrid"])
def test_the_matrices_that_muon_trains(condition):
    """And the two groups of AdamW, without them."""
    every_second = {"softmax_every": 2} if condition == "hybrid" else {}
    mixer = "interdomain" if condition == "hybrid" else condition
    model, container = optimizers(mixer, configuration(optimizer__name="Muon"), **every_second)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = {group["name"]: {names[id(p)] for p in group["params"]} for group in container.groups}
    maps = [f"attention.{name}" for name in MAPS.get(mixer, ["wq", "wk", "wv", "wo"])]
    maps += [f"feed_forward.{name}" for name in ("w1", "w2", "w3")]
    assert groups.pop("matrices") == {f"layers.{i}.{name}.weight" for i in range(4) for name in maps}
    _, plain = optimizers(mixer, **every_second)
    assert groups.get("ssm", set()) == {name for name in names.values() if SSM_PARAMETER.search(name)}
    assert {group["name"] for group in plain.groups} == groups.keys()
    adamw, muon = container.optimizers
    assert isinstance(adamw, torch.optim.AdamW)
    assert isinstance(muon, torch.optim.Muon)
    (matrices,) = muon.param_groups
    chosen = [matrices[name] for name in ("lr", "weight_decay", "momentum", "nesterov", "adjust_lr_fn")]
    assert chosen == [3e-3, 0.1, 0.95, True, "match_rms_adamw"]


def test_the_recipe_of_the_groups():
    for peak, ssm_peak in ((3e-3, 1e-3), (5e-4, 5e-4)):
        _, container = optimizers(job=configuration(optimizer__lr=peak))
        main, ssm = container.optimizers[0].param_groups
        assert isinstance(container.optimizers[0], torch.optim.AdamW)
        assert (main["lr"], ssm["lr"], main["weight_decay"], ssm["weight_decay"]) == (peak, ssm_peak, 0.1, 0.0)
        assert main["betas"] == ssm["betas"] == (0.9, 0.95)


def rates(job, steps):
    """[(main, ssm)] of every step, as the optimizer takes it."""
    _, container = optimizers(job=job)
    schedulers = GroupedSchedulers(container, job.lr_scheduler, steps)
    taken = []
    for _ in range(steps):
        container.step()
        taken.append(tuple(container.rates.values()))
        schedulers.step()
    return taken


def test_warmup_and_cosine_step_by_step():
    job = configuration(lr_scheduler__warmup_steps=4, lr_scheduler__total_steps=0)
    taken = rates(job, steps=13)
    for group, peak in enumerate((3e-3, 1e-3)):
        expected = [peak * k / 4 for k in (1, 2, 3, 4)]
        expected += [1e-5 + (peak - 1e-5) * (1 + math.cos(math.pi * k / 8)) / 2 for k in range(9)]
        assert [step[group] for step in taken] == pytest.approx(expected, rel=1e-12)
    assert taken[-1] == pytest.approx((1e-5, 1e-5), rel=1e-12)  # one floor for both groups, at the last step
    assert taken[3] == (3e-3, 1e-3)


@pytest.mark.parametrize(("decay_type", "decay_ratio"), [("linear", 0.25), ("sqrt", 0.25)])
def test_without_a_floor_the_shapes_are_torchtitans(decay_type, decay_ratio):
    settings = {"min_lr": 0.0, "total_steps": 20, "decay_type": decay_type, "decay_ratio": decay_ratio}
    job = configuration(**{f"lr_scheduler__{name}": value for name, value in settings.items()})
    taken = rates(job, steps=20)
    stand_in = torch.optim.SGD([torch.zeros(1)], lr=3e-3)
    theirs = titan_lr_schedulers([stand_in], translate(job).lr_scheduler, 20).schedulers[0].lr_lambdas[0]
    assert [main for main, _ in taken] == pytest.approx([3e-3 * theirs(step) for step in range(20)], rel=1e-12)


COSINE, CONSTANT, AT_THE_END = {}, {"lr_scheduler__decay_ratio": 0.0}, {"lr_scheduler__decay_ratio": 0.25}


@pytest.mark.parametrize(
    ("first", "then", "jumps_to"),
    [
        (COSINE, {}, "0.00169"),  # stretched: back up, half way
        (COSINE, {"lr_scheduler__total_steps": 20, "optimizer__lr": 1e-3}, None),  # the floor, on and on
        (COSINE, {"lr_scheduler__allow_jump": True}, None),
        (COSINE, CONSTANT, "0.003"),
        (CONSTANT, CONSTANT, None),
        (AT_THE_END, AT_THE_END, "0.003"),
        (AT_THE_END, {**AT_THE_END, "checkpoint__load_step": 10}, None),  # before the decay
    ],
)
def test_a_run_that_is_extended_keeps_its_learning_rate_or_is_refused(first, then, jumps_to, tmp_path, monkeypatch):
    """Twenty steps with a checkpoint every ten, and the start of a run of forty in the same folder."""
    monkeypatch.delenv("RANK", raising=False)
    always = {"lr_scheduler__warmup_steps": 2, "lr_scheduler__total_steps": 0, "checkpoint__enable": True}
    taken = rates(configuration(**always | first), 20)
    for step in (10, 20):
        folder = tmp_path / "checkpoint" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / METADATA).touch()
        record = {"step": step, "lr": taken[step - 1][0], "peak_lr": 3e-3, "run": {"planned_steps": 20}}
        (folder / SIDECAR).write_text(json.dumps(record))
    job = configuration(**always | {"training__steps": 40, "job__dump_folder": tmp_path} | then)
    if jumps_to is None:
        check_jump(job, 40, 2)
    else:
        with pytest.raises(
            ValueError, match=rf"step-20 was trained with {taken[-1][0]:.3g} at .* gives that step {jumps_to}\."
        ):
            check_jump(job, 40, 2)
