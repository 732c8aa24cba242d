"""The steps of a run, of its warmup and of its milestones, and the learning rate of each step."""

import math
from collections.abc import Callable

from ..host import logger
from ..settings.schema import Checkpoint, LRScheduler, Training


def run_length(training: Training, schedule: LRScheduler, tokens_per_step: int) -> tuple[int, int]:
    """Returns the steps of a run and those of its warmup.

    A warmup that is longer than the schedule is shortened to a tenth of the schedule.

    Args:
        training: Settings [training].
        schedule: Settings [lr_scheduler].
        tokens_per_step: Tokens of a step on all ranks.
    """
    steps = training.steps
    if training.tokens:
        steps = math.ceil(training.tokens / tokens_per_step)
    warmup = schedule.warmup_steps
    if schedule.warmup_tokens:
        warmup = round(schedule.warmup_tokens / tokens_per_step)
    total = schedule.total_steps or steps
    if warmup > total:
        logger.warning(
            "the warmup of %d steps is longer than the schedule of %d: it is shortened to a tenth "
            "of the schedule, %d steps",
            warmup,
            total,
            total // 10,
        )
        warmup = total // 10
    return steps, warmup


def milestone_steps(checkpoint: Checkpoint, steps: int, tokens_per_step: int) -> frozenset[int]:
    """Returns the steps whose checkpoints are never removed: those of [checkpoint], and the last.

    There are none in a run that saves nothing.

    Args:
        checkpoint: Settings [checkpoint].
        steps: Steps of the run.
        tokens_per_step: Tokens of a step on all ranks.
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
    """Returns a function from a step (0-based) to the learning rate divided by the peak rate.

    The shapes are TorchTitan's. A floor (`min_lr`) is reached exactly at the schedule's last step.
    A floor of 0 is reached one step later, as in TorchTitan, so that no step is wasted on a rate of
    0.

    Args:
        config: Settings [lr_scheduler].
        peak: Peak learning rate of the parameter group.
        steps: Steps of the run.
        warmup: Steps of the linear warmup.
    """
    floor = config.min_lr / peak
    total = config.total_steps or steps
    last = total
    if floor:
        last = total - 1
    # The decay is the last share of the schedule, and begins after the warmup at the earliest.
    decay = min(max(0, last - warmup), round(total * config.decay_ratio))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        # Share of the decay that is done.
        progress = 0.0
        if decay:
            progress = min(1.0, max(0.0, (step - last + decay) / decay))
        if config.decay_type == "linear":
            shape = 1 - progress
        elif config.decay_type == "sqrt":
            shape = 1 - math.sqrt(progress)
        else:
            shape = 0.5 * (1 + math.cos(math.pi * progress))
        return floor + (1 - floor) * shape

    return factor
