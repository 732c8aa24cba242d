"""How many steps a run has, how many of them warm up, and the learning rate of each."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from interdomain.model.distributed_checkpoint import SIDECAR, finished_steps

DEFAULT_STEPS, DEFAULT_WARMUP_STEPS = 10_000, 200  # TorchTitan's, where neither steps nor tokens are set
WARMUP_SHARE = 10  # a file's warmup that is longer than the schedule becomes this part of it
JUMP = 2  # factor between two learning rates of one step that is taken for a mistake


class Length(NamedTuple):
    steps: int
    warmup_steps: int
    shortened: str  # how the warmup was shortened, in words; empty: it was not


def run_length(job_config, tokens_per_step: int) -> Length:
    """Steps and warmup of a run. Raises: ValueError for a schedule that cannot be."""
    training, schedule = job_config.training, job_config.lr_scheduler
    steps = training.steps
    if training.tokens:
        if steps is not None:
            raise ValueError(
                f"training.tokens = {training.tokens:,} and training.steps = {steps:,} are both set. Train by steps "
                "with --training.tokens 0, or drop training.steps."
            )
        steps = math.ceil(training.tokens / tokens_per_step)
    elif steps is None:
        steps = DEFAULT_STEPS
    if steps < 1:
        raise ValueError(f"the run has {steps} steps; set training.steps or training.tokens to a positive number.")
    warmup = schedule.warmup_steps
    if schedule.warmup_tokens:
        if warmup is not None:
            raise ValueError(
                f"lr_scheduler.warmup_tokens = {schedule.warmup_tokens:,} and lr_scheduler.warmup_steps = {warmup:,} are "
                "both set. Warm up by steps with --lr_scheduler.warmup_tokens 0, or drop lr_scheduler.warmup_steps."
            )
        warmup = round(schedule.warmup_tokens / tokens_per_step)
    elif warmup is None:
        warmup = DEFAULT_WARMUP_STEPS
    _refuse_floor(job_config)
    total = schedule.total_steps or steps
    if total < steps and not (schedule.min_lr or schedule.min_lr_factor) and schedule.decay_ratio != 0:
        raise ValueError(
            f"the schedule ends at lr_scheduler.total_steps = {total:,}, before the run's last step {steps:,}, and there is no "
            "floor: the learning rate would be 0 from there on. Set lr_scheduler.min_lr, or total_steps to the number of "
            "steps or more, or leave it out."
        )
    shortened = ""
    if warmup > total:
        if {"lr_scheduler.warmup_steps", "lr_scheduler.warmup_tokens"} & getattr(job_config, "given", set()):
            raise ValueError(
                f"the warmup of {warmup:,} steps is longer than the schedule of {total:,} steps. Shorten "
                "lr_scheduler.warmup_tokens (or warmup_steps; 0 for none), or train longer."
            )
        shortened = f"SHORTENED from {warmup:,} steps, which is longer than the schedule of {total:,}, to a tenth of it"
        warmup = total // WARMUP_SHARE
    return Length(steps, warmup, shortened)


def _refuse_floor(job_config) -> None:
    schedule = job_config.lr_scheduler
    if schedule.min_lr and schedule.min_lr_factor:
        raise ValueError(
            f"lr_scheduler.min_lr = {schedule.min_lr:g} and min_lr_factor = {schedule.min_lr_factor:g} are both set. Give "
            "the floor as a learning rate (min_lr, one for both groups) or as a fraction of each peak (min_lr_factor)."
        )
    lowest_peak = min(job_config.optimizer.lr, job_config.optimizer.ssm_lr)
    if schedule.min_lr > lowest_peak:
        raise ValueError(
            f"lr_scheduler.min_lr = {schedule.min_lr:g} is above the peak learning rate {lowest_peak:g} "
            "(the smaller of optimizer.lr and optimizer.ssm_lr)."
        )


def multiple_of_peak(config, peak: float, *, steps: int, warmup: int) -> Callable[[int], float]:
    """step (0-based) -> multiple of the peak rate: TorchTitan's shapes, and the floor exactly at the schedule's last step.

    TorchTitan reaches its floor one step after the last, lest that one be wasted on a rate of 0; so it is here where the
    floor is 0. With `min_lr`, every group ends at that rate; else at `min_lr_factor` of its own peak.
    """
    floor = config.min_lr / peak if config.min_lr else config.min_lr_factor
    total = config.total_steps or steps
    last = total - 1 if floor else total
    decay = max(0, last - warmup)
    if config.decay_ratio is not None:
        decay = min(decay, round(total * config.decay_ratio))
    shape = {
        "linear": lambda progress: 1 - progress,
        "sqrt": lambda progress: 1 - math.sqrt(progress),
        "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    }[config.decay_type]

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, max(0.0, (step - last + decay) / decay)) if decay else 0.0
        return floor + (1 - floor) * shape(progress)

    return factor


def refuse_jump(job_config, steps: int, warmup: int) -> None:
    """Refuse to continue a checkpoint whose learning rate is not what this schedule gives its step.

    A decayed cosine that is stretched would do so: the rate would be back near its peak. Rank 0 looks, before anything is
    built.
    Raises: ValueError with both rates.
    """
    folder = _continued(job_config)
    try:
        record = json.loads((folder / SIDECAR).read_text()) if folder else {}
    except (OSError, ValueError):  # what is damaged is refused, or passed over, when it is loaded
        return
    if "lr" not in record:
        return
    # With the checkpoint's own peak: another optimizer.lr is what was asked for.
    schedule, step, trained, peak = job_config.lr_scheduler, record["step"], record["lr"], record["peak_lr"]
    here = peak * multiple_of_peak(schedule, peak, steps=steps, warmup=warmup)(step - 1)
    if max(here, trained) <= JUMP * min(here, trained):
        return
    floor = schedule.min_lr or schedule.min_lr_factor
    stay = f"set --lr_scheduler.total_steps {record['run']['planned_steps']}" if floor else "set lr_scheduler.min_lr"
    raise ValueError(
        f"the learning rate would jump: {folder} was trained with {trained:.3g} at step {step:,}, and this run's schedule "
        f"of {schedule.total_steps or steps:,} steps gives that step {here:.3g}. To train on at the rate that the run ended "
        f"with, {stay}. For runs that can be extended, train with a constant rate (lr_scheduler.decay_ratio = 0) or with a "
        "decay at the end (decay_ratio = 0.2), and go back to a checkpoint before the decay (checkpoint.load_step). If the "
        "jump is wanted, add --lr_scheduler.allow_jump."
    )


def _continued(job_config) -> Path | None:
    """The checkpoint that this start will continue with its schedule."""
    checkpoint = job_config.checkpoint
    wanted = checkpoint.enable and not checkpoint.load_only and not job_config.lr_scheduler.allow_jump
    if not wanted or "lr_scheduler" in checkpoint.exclude_from_loading or os.environ.get("RANK", "0") != "0":
        return None
    found = finished_steps(Path(job_config.job.dump_folder) / checkpoint.folder)
    if found:
        return found.get(checkpoint.load_step, found[max(found)])
    if checkpoint.initial_load_path and not checkpoint.initial_load_model_only:
        return Path(checkpoint.initial_load_path)
    return None
