"""The steps of a run, of its warmup and its milestones, and the learning rate of each."""

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from interdomain.files.distributed_checkpoint import SIDECAR, finished_steps

from ..host import logger
from ..settings.schema import JobConfig

JUMP = 2  # factor between two learning rates of one step that is taken for a mistake


def first_steps(job_config: JobConfig, tokens_per_step: Sequence[int]) -> list[int]:
    """The steps before each data stage, from their tokens per step.

    Raises: ValueError for a stage that does not begin after the one before it.
    """
    begins, trained = [0], 0
    for number, (table, each) in enumerate(zip(job_config.data.stages, tokens_per_step, strict=False), 1):
        steps = round((table["at_tokens"] - trained) / each)
        if steps < 1:
            raise ValueError(
                f"table {number} of [[data.stages]]: at_tokens = {table['at_tokens']:,} leaves the stage before it no step: "
                f"that begins at {trained:,} tokens and has {each:,} in a step. Give the tables in order, a step or more apart."
            )
        begins.append(begins[-1] + steps)
        trained += steps * each
    return begins


def steps_of(tokens: int, begins: Sequence[int], tokens_per_step: Sequence[int]) -> float:
    """Steps that train so many tokens. begins: steps before each data stage."""
    for begin, end, each in zip(begins, [*begins[1:], math.inf], tokens_per_step, strict=True):
        if begin + tokens / each <= end:
            return begin + tokens / each
        tokens -= int(end - begin) * each
    raise AssertionError("the last stage has no end")


def run_length(job_config: JobConfig, begins: Sequence[int], tokens_per_step: Sequence[int]) -> tuple[int, int]:
    """(steps, warmup steps) of a run. A warmup that is longer than the schedule becomes a tenth of it.

    begins: steps before each data stage.
    Raises: ValueError for a schedule that cannot be.
    """
    training, schedule = job_config.training, job_config.lr_scheduler
    length, warmup = (steps_of(n, begins, tokens_per_step) for n in (training.tokens, schedule.warmup_tokens))
    steps = math.ceil(length) if training.tokens else training.steps
    warmup = round(warmup) if schedule.warmup_tokens else schedule.warmup_steps
    if begins[-1] >= steps:
        raise ValueError(
            f"table {len(begins) - 1} of [[data.stages]] begins after step {begins[-1]:,}, and the run ends with step "
            f"{steps:,}. Set a smaller at_tokens, or a longer run (training.tokens, training.steps)."
        )
    lowest_peak = min(job_config.optimizer.lr, job_config.optimizer.ssm_lr)
    if schedule.min_lr > lowest_peak:
        raise ValueError(
            f"lr_scheduler.min_lr = {schedule.min_lr:g} is above the peak learning rate {lowest_peak:g} "
            "(the smaller of optimizer.lr and optimizer.ssm_lr)."
        )
    total = schedule.total_steps or steps
    if total < steps and not schedule.min_lr and schedule.decay_ratio:
        raise ValueError(
            f"the schedule ends at lr_scheduler.total_steps = {total:,}, before the run's last step {steps:,}, and there is no "
            "floor: the learning rate would be 0 from there on. Set lr_scheduler.min_lr, or total_steps to the number of "
            "steps or more, or leave it out."
        )
    if warmup > total:
        logger.warning("the warmup of %d steps is longer than the schedule: shortened to %d steps", warmup, total // 10)
        warmup = total // 10
    return steps, warmup


def milestone_steps(
    job_config: JobConfig, steps: int, begins: Sequence[int], tokens_per_step: Sequence[int]
) -> frozenset[int]:
    """The steps of a run whose checkpoints are never removed: those that [checkpoint] names, and the last one of each data
    stage, from which the run can be trained on in another way. None for a run that saves nothing.

    begins: steps before each data stage.
    """
    checkpoint = job_config.checkpoint
    if not checkpoint.enable:
        return frozenset()
    every, tokens, named = checkpoint.keep_every, checkpoint.keep_every_tokens, {*checkpoint.keep_steps}
    if every and not tokens:
        named |= {*range(every, steps, every)}
    for begin, end, each in zip(begins, [*begins[1:], steps], tokens_per_step, strict=True):
        named |= {end, *(range(begin, end, max(1, round(tokens / each))) if tokens else ())}
    return frozenset(step for step in named if 0 < step <= steps)


def multiple_of_peak(config: Any, peak: float, *, steps: int, warmup: int) -> Callable[[int], float]:
    """step (0-based) -> multiple of the peak rate: TorchTitan's shapes, and the floor exactly at the schedule's last step.

    Where the floor is 0, it is reached one step after the last, as TorchTitan does: no step is wasted on a rate of 0.
    config: settings [lr_scheduler].
    """
    floor = config.min_lr / peak
    total = config.total_steps or steps
    last = total - 1 if floor else total
    decay = min(max(0, last - warmup), round(total * config.decay_ratio))
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
    checkpoint, schedule = job_config.checkpoint, job_config.lr_scheduler
    if not checkpoint.enable or schedule.allow_jump or os.environ.get("RANK", "0") != "0":
        return
    saved = finished_steps(Path(job_config.job.dump_folder) / checkpoint.folder)
    if not saved:
        return
    folder = saved.get(checkpoint.load_step, saved[max(saved)])
    try:
        record = json.loads((folder / SIDECAR).read_text())
    except (OSError, ValueError):  # what is damaged is refused, or passed over, when it is loaded
        return
    if "lr" not in record:
        return
    # With the checkpoint's own peak: another optimizer.lr is what was asked for.
    step, trained, peak = record["step"], record["lr"], record["peak_lr"]
    here = peak * multiple_of_peak(schedule, peak, steps=steps, warmup=warmup)(step - 1)
    if max(here, trained) > JUMP * min(here, trained):
        planned = record["run"]["planned_steps"]
        stay = f"lr_scheduler.total_steps = {planned}" if schedule.min_lr else "lr_scheduler.min_lr"
        raise ValueError(
            f"the learning rate would jump: {folder} was trained with {trained:.3g} at step {step:,}, and this run's schedule "
            f"of {schedule.total_steps or steps:,} steps gives that step {here:.3g}. To train on at the last rate, set "
            f"{stay}. For runs that can be extended, set lr_scheduler.decay_ratio (0: constant; 0.2: a decay at the "
            "end) and go back to a checkpoint before the decay (checkpoint.load_step). If the jump is wanted, add "
            "--lr_scheduler.allow_jump."
        )
