"""How many steps a run has, how many of them warm up, and the learning rate of each."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from interdomain.model.distributed_checkpoint import SIDECAR, finished_steps

from .schema import JobConfig

DEFAULT_STEPS, DEFAULT_WARMUP_STEPS = 10_000, 200  # TorchTitan's, where neither steps nor tokens are set
WARMUP_SHARE = 10  # a file's warmup that is longer than the schedule becomes this part of it
JUMP = 2  # factor between two learning rates of one step that is taken for a mistake


class Length(NamedTuple):
    steps: int
    warmup_steps: int
    shortened: str  # how the warmup was shortened, in words; empty: it was not


def run_length(job_config: JobConfig, tokens_per_step: int) -> Length:
    """Steps and warmup of a run. Raises: ValueError for a schedule that cannot be."""
    training, schedule = job_config.training, job_config.lr_scheduler
    steps = _in_steps("training", "steps", training, DEFAULT_STEPS, lambda n: math.ceil(n / tokens_per_step))
    warmup = _in_steps(
        "lr_scheduler", "warmup_steps", schedule, DEFAULT_WARMUP_STEPS, lambda n: round(n / tokens_per_step)
    )
    lowest_peak = min(job_config.optimizer.lr, job_config.optimizer.ssm_lr)
    if schedule.min_lr > lowest_peak:
        raise ValueError(
            f"lr_scheduler.min_lr = {schedule.min_lr:g} is above the peak learning rate {lowest_peak:g} "
            "(the smaller of optimizer.lr and optimizer.ssm_lr)."
        )
    total = schedule.total_steps or steps
    if total < steps and not schedule.min_lr and schedule.decay_ratio != 0:
        raise ValueError(
            f"the schedule ends at lr_scheduler.total_steps = {total:,}, before the run's last step {steps:,}, and there is no "
            "floor: the learning rate would be 0 from there on. Set lr_scheduler.min_lr, or total_steps to the number of "
            "steps or more, or leave it out."
        )
    if warmup <= total:
        return Length(steps, warmup, "")
    if {"lr_scheduler.warmup_steps", "lr_scheduler.warmup_tokens"} & job_config.given:
        raise ValueError(
            f"the warmup of {warmup:,} steps is longer than the schedule of {total:,} steps. Shorten "
            "lr_scheduler.warmup_tokens (or warmup_steps; 0 for none), or train longer."
        )
    shortened = f"SHORTENED from {warmup:,} steps, which is longer than the schedule of {total:,}, to a tenth of it"
    return Length(steps, total // WARMUP_SHARE, shortened)


def _in_steps(section: str, name: str, settings: Any, default: int, in_steps: Callable[[int], int]) -> int:
    """A length that a file gives in steps (field `name`) or in tokens, as steps."""
    in_tokens = name.replace("steps", "tokens")
    steps, tokens = getattr(settings, name), getattr(settings, in_tokens)
    if tokens and steps is not None:
        raise ValueError(
            f"{section}.{in_tokens} = {tokens:,} and {section}.{name} = {steps:,} are both set. Count steps with "
            f"--{section}.{in_tokens} 0, or drop {section}.{name}."
        )
    return in_steps(tokens) if tokens else default if steps is None else steps


def multiple_of_peak(config: Any, peak: float, *, steps: int, warmup: int) -> Callable[[int], float]:
    """step (0-based) -> multiple of the peak rate: TorchTitan's shapes, and the floor exactly at the schedule's last step.

    Where the floor is 0, it is reached one step after the last, as TorchTitan does: no step is wasted on a rate of 0.

    Args:
        config: settings [lr_scheduler].
    """
    floor = config.min_lr / peak
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


def refuse_jump(job_config: JobConfig, steps: int, warmup: int) -> None:
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
    planned = record["run"]["planned_steps"]
    stay = f"set --lr_scheduler.total_steps {planned}" if schedule.min_lr else "set lr_scheduler.min_lr"
    raise ValueError(
        f"the learning rate would jump: {folder} was trained with {trained:.3g} at step {step:,}, and this run's schedule "
        f"of {schedule.total_steps or steps:,} steps gives that step {here:.3g}. To train on at the rate that the run ended "
        f"with, {stay}. For runs that can be extended, train with a constant rate (lr_scheduler.decay_ratio = 0) or with a "
        "decay at the end (decay_ratio = 0.2), and go back to a checkpoint before the decay (checkpoint.load_step). If the "
        "jump is wanted, add --lr_scheduler.allow_jump."
    )


def _continued(job_config: JobConfig) -> Path | None:
    """The checkpoint that this start will continue with its schedule."""
    checkpoint = job_config.checkpoint
    if not checkpoint.enable or job_config.lr_scheduler.allow_jump or os.environ.get("RANK", "0") != "0":
        return None
    found = finished_steps(Path(job_config.job.dump_folder) / checkpoint.folder)
    if found:
        return found.get(checkpoint.load_step, found[max(found)])
    whole = not checkpoint.initial_load_model_only and "lr_scheduler" not in checkpoint.exclude_from_loading
    if checkpoint.initial_load_path and whole:
        return Path(checkpoint.initial_load_path)
    return None
