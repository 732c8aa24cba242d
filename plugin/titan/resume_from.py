"""Which checkpoint a start resumes from, which parts of it are not loaded, and which other checkpoints are renamed.

The same command starts a run many times, and what it asks for once must happen once: going back to a step
(`checkpoint.load_step`), and excluding parts of a checkpoint (`checkpoint.exclude_from_loading`). So every checkpoint's record
says what happened before it: `branched_from`, the step that the run last went back to, and `started_without`, the parts that
were excluded.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from interdomain.model.distributed_checkpoint import METADATA, finished_steps, step_of

from .host import DATALOADER, TRAIN_STATE, logger
from .integrity import is_finished, read_checked


class ResumePoint(NamedTuple):
    """The checkpoint that a start loads."""

    folder: Path
    index: bytes  # the file .metadata
    record: dict  # the file interdomain.json; {} where there is none
    excluded_parts: list[str]
    branched_from: int | None = None  # for the records of the checkpoints that follow
    goes_back: bool = False  # to this step: the checkpoints after it are renamed
    latest: bool = False  # where it cannot be read, an older one may replace it


def all_steps(folder: Path) -> list[int]:
    """The steps of all checkpoints in a folder, complete or not."""
    names = folder.iterdir() if folder.is_dir() else ()
    return sorted(step for step in map(step_of, names) if step is not None)


def loads_a_model(job_config) -> bool:
    """Whether this start loads a model: then it draws no initial values. If that fails, the start ends. Collective."""
    config = job_config.checkpoint
    if not config.enable:
        return False
    folder = Path(job_config.job.dump_folder) / config.folder
    return on_rank_0(lambda: bool(config.initial_load_path or finished_steps(folder)))


def on_rank_0(act: Callable[[], Any]) -> Any:
    """What `act` returns on rank 0, or the OSError or ValueError that it raises there, on every rank. Collective."""
    result, error = None, None
    if dist.get_rank() == 0:
        try:
            result = act()
        except (OSError, ValueError) as e:
            error = e
    outcome = [result, error]
    dist.broadcast_object_list(outcome)
    result, error = outcome
    if error is not None:
        raise error
    return result


def find_resume_point(
    folder: Path, step: int, *, initial: str | None, exclude: list[str], data: str | None, saving: bool
) -> ResumePoint | None:
    """The checkpoint of this step, or the latest complete one (-1), or the initial one. On rank 0; an index is read once.

    A run that went back to the step before, and saved since, continues from its latest. Damaged checkpoints are renamed.

    Args:
        step: checkpoint.load_step. initial: checkpoint.initial_load_path. exclude: checkpoint.exclude_from_loading.
        data: this run's fingerprint of the data: the loader's state is excluded again where the data are others.
        saving: False where the run saves nothing (checkpoint.load_only).
    Returns: None where there is none.
    Raises: ValueError for a checkpoint that cannot be loaded or continued; OSError.
    """
    latest = _latest(folder, above=step) if saving or step == -1 else None
    if step != -1 and (latest is None or latest.record.get("branched_from") != step):
        path = folder / f"step-{step}"
        if not is_finished(path):
            others = ", ".join(map(str, sorted(finished_steps(folder)))) or "none"
            raise ValueError(f"checkpoint.load_step = {step}: {path} is no complete checkpoint. There are: {others}.")
        point = ResumePoint(path, *read_checked(path), exclude, step, goes_back=True)
    elif latest is None:
        if not initial:
            return None
        if not Path(initial).is_dir():
            raise FileNotFoundError(
                f"checkpoint.initial_load_path = {initial} is not a folder. Give a checkpoint (step-N)."
            )
        return ResumePoint(Path(initial), *read_checked(Path(initial)), exclude)
    else:
        excluded = _not_yet_excluded(latest, exclude, data) if saving else exclude
        point = latest._replace(excluded_parts=excluded, branched_from=latest.record.get("branched_from"))
        if step != -1:
            logger.warning(
                "the run went back to step %d (checkpoint.load_step) before, and continues from %s, which it saved since. To "
                "go back once more, move the checkpoints after step %d away.",
                *(step, point.folder, step),
            )
    if saving and TRAIN_STATE in point.excluded_parts:
        raise ValueError(
            "checkpoint.exclude_from_loading = train_state would count from step 0 again, below the checkpoints in "
            f"{folder}. Start a run of its own: another job.dump_folder, checkpoint.initial_load_path = {point.folder}."
        )
    return point


def _latest(folder: Path, above: int) -> ResumePoint | None:
    """The latest complete checkpoint after a step (-1: of all)."""
    for step in reversed([step for step in all_steps(folder) if step > above]):
        path = folder / f"step-{step}"
        if not is_finished(path):
            logger.warning("SKIPPED: %s has no %s: the save of it was cut short.", path, METADATA)
            continue
        try:
            return ResumePoint(path, *read_checked(path), [], latest=True)
        except ValueError as e:
            set_damaged_aside(path, str(e))
    damaged = sorted(path.name for path in folder.glob("step-*.damaged*"))
    if damaged and above == -1:  # starting over is not for a program to decide
        raise ValueError(
            f"no complete checkpoint is left in {folder}, only {', '.join(damaged)}. Restore one of them, or move them away "
            "to start from the beginning."
        )
    return None


def _not_yet_excluded(latest: ResumePoint, exclude: list[str], data: str | None) -> list[str]:
    """Those of `exclude` that were not excluded before this checkpoint was saved."""
    done = set(latest.record.get("started_without", ()))
    if latest.record.get("run", {}).get("data_fingerprint") != data:
        done.discard(DATALOADER)
    if ignored := [part for part in exclude if part in done]:
        logger.warning(
            "checkpoint.exclude_from_loading = %s: the run began without it before %s, which is loaded with it. To begin "
            "without it once more, set checkpoint.load_step as well.",
            *(",".join(ignored), latest.folder.name),
        )
    return [part for part in exclude if part not in done]


def set_aside(folder: Path, why: str) -> Path:
    """Rename a checkpoint to `step-N.WHY`: no run loads, counts or removes it, and no later save of its step overwrites it."""
    aside, n = folder.with_name(f"{folder.name}.{why}"), 1
    while aside.exists():
        n += 1
        aside = folder.with_name(f"{folder.name}.{why}-{n}")
    return folder.rename(aside)


def set_damaged_aside(folder: Path, reason: str) -> None:
    """On rank 0."""
    logger.warning("SKIPPED, and renamed to %s: %s", set_aside(folder, "damaged").name, reason)


def set_later_aside(folder: Path) -> None:
    """After a run has gone back to this checkpoint: rename those after it. On rank 0."""
    step = step_of(folder)
    later = [path for other, path in sorted(finished_steps(folder.parent).items()) if step is not None and other > step]
    for path in later:
        set_aside(path, "superseded")
    if later:
        names = ", ".join(path.name for path in later)
        logger.warning("went back to step %d: renamed %s to step-N.superseded. Nothing removes them.", step, names)
