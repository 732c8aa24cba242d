"""The steps of a run, of its warmup and its milestones, and the learning rate of each."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

from interdomain.checkpoint.step_folder import SIDECAR, finished_steps

from ..host import logger
from ..settings.schema import Checkpoint, JobConfig, LRScheduler, Training

JUMP = 2  # factor between two learning rates of one step that is taken for a mistake


def run_length(training: Training, schedule: LRScheduler, tokens_per_step: int) -> tuple[int, int]:
    """(steps, warmup steps) of a run. A warmup that is longer than the schedule becomes a tenth of it."""
    steps, warmup = training.steps, schedule.warmup_steps
    if training.tokens:
        steps = math.ceil(training.tokens / tokens_per_step)
    if schedule.warmup_tokens:
        warmup = round(schedule.warmup_tokens / tokens_per_step)
    total = schedule.total_steps or steps
    if warmup > total:
        logger.warning(
            "the warmup of %d steps is longer than the schedule: shortened to %d steps",
            warmup,
            total // 10,
        )
        warmup = total // 10
    return steps, warmup


def milestone_steps(checkpoint: Checkpoint, steps: int, tokens_per_step: int) -> frozenset[int]:
    """The steps of a run whose checkpoints are never removed: those that [checkpoint] names, and the last one.

    None for a run that saves nothing.
    """
    if not checkpoint.enable:
        return frozenset()
    every = checkpoint.keep_every
    if checkpoint.keep_every_tokens:
        every = max(1, round(checkpoint.keep_every_tokens / tokens_per_step))
    named = {steps, *checkpoint.keep_steps}
    if every:
        named.update(range(every, steps, every))
    return frozenset(step for step in named if step <= steps)


def multiple_of_peak(
    config: LRScheduler, peak: float, *, steps: int, warmup: int
) -> Callable[[int], float]:
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


def check_jump(job: JobConfig, steps: int, warmup: int) -> None:
    """Refuse to continue a checkpoint whose learning rate is not what this schedule gives its step.

    A decayed cosine that is stretched would do so: the rate would be back near its peak. Rank 0 looks, before anything is
    built.
    Raises: ValueError with both rates.
    """
    checkpoint, schedule = job.checkpoint, job.lr_scheduler
    if not checkpoint.enable or schedule.allow_jump or os.environ.get("RANK", "0") != "0":
        return
    saved = finished_steps(Path(job.job.dump_folder) / checkpoint.folder)
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
