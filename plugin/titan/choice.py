"""Which checkpoint a start continues from, without which parts of it, and what becomes of those that it passes over.

The same command starts a run many times, and what it asks for once must happen once: going back to a step
(`checkpoint.load_step`), and leaving parts of a checkpoint out (`checkpoint.exclude_from_loading`). So every checkpoint's
record says what was done before it: `branched_from`, the step last gone back to, and `started_without`, the parts left out.
"""

from pathlib import Path
from typing import NamedTuple

from interdomain.model.distributed_checkpoint import METADATA, step_of

from .host import DATALOADER, TRAIN_STATE, logger
from .whole import fault, is_finished, read_whole


class Choice(NamedTuple):
    """What a start loads."""

    step: int
    named: bool  # gone back to: no other may be taken for it, and those after it are another course
    without: list[str]  # parts that are left out
    branched_from: int | None  # what the records of the checkpoints that follow say


def steps_in(folder: Path) -> list[int]:
    """Of all checkpoints, whole or not."""
    names = folder.iterdir() if folder.is_dir() else ()
    return sorted(step for step in map(step_of, names) if step is not None)


def place(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def choose(
    folder: Path, step: int, skipped: dict[int, str], *, without: list[str], data: str | None, saving: bool
) -> Choice | None:
    """The step asked for, or the latest whole one, of all (-1) or of what followed it. None: there is nothing to load.

    Args:
        skipped: step -> what is wrong with it; damaged ones that are found to be newer are added.
        without: checkpoint.exclude_from_loading.
        data: this run's fingerprint of the data: in other data the loader begins anew once more.
        saving: False, where nothing will follow what is loaded (checkpoint.load_only).
    Raises: ValueError for what cannot be loaded, or continued.
    """
    named = step != -1 and not (saving and _went_on_from(folder, step, skipped))
    if named:
        _refuse_unless_whole(folder, step)
        choice = Choice(step, named, without, branched_from=step)
    elif (latest := _latest_whole(folder, skipped)) is None:
        return None
    else:
        record = _record(folder, latest)
        if saving:
            without = _not_yet_left_out(record, without, data, latest)
        choice = Choice(latest, named, without, record.get("branched_from"))
        if step != -1:
            _say_how_to_go_back_again(folder, step, latest)
    if saving and TRAIN_STATE in choice.without:
        raise ValueError(
            f"checkpoint.exclude_from_loading = train_state would count from step 0 again below the checkpoints in {folder}, "
            f"and every restart would begin at step {choice.step} anew. Leave train_state out of it, or start a run of its "
            f"own: another job.dump_folder, with checkpoint.initial_load_path = {place(folder, choice.step)}."
        )
    return choice


def _record(folder: Path, step: int) -> dict:
    return read_whole(place(folder, step))[1]


def _went_on_from(folder: Path, step: int, skipped: dict[int, str]) -> bool:
    """Whether the run has gone back to this step already, and saved since: the latest that is whole says so."""
    for later in reversed(steps_in(folder)):
        if later > step and later not in skipped and fault(place(folder, later)) is None:
            return _record(folder, later).get("branched_from") == step
    return False


def _say_how_to_go_back_again(folder: Path, step: int, latest: int) -> None:
    later = ", ".join(f"step-{other}" for other in steps_in(folder) if other > step)
    again = f" To go back to it once more, move {later} away first." if is_finished(place(folder, step)) else ""
    logger.warning(
        "the run has gone back to step %d (checkpoint.load_step) before: it continues from %s, to which it has got since.%s",
        step,
        place(folder, latest),
        again,
    )


def _refuse_unless_whole(folder: Path, step: int) -> None:
    if reason := fault(place(folder, step)):
        whole = ", ".join(str(s) for s in steps_in(folder) if fault(place(folder, s)) is None) or "none"
        raise ValueError(
            f"checkpoint.load_step = {step}, but {folder} has no whole checkpoint of that step; it has: "
            f"{whole}. ({reason}) Choose one of these, or -1 for the latest."
        )


def _latest_whole(folder: Path, skipped: dict[int, str]) -> int | None:
    for candidate in reversed(steps_in(folder)):
        path = place(folder, candidate)
        if not is_finished(path):
            logger.warning("SKIPPED: %s has no %s: the save of it was cut short.", path, METADATA)
            continue
        reason = skipped.get(candidate) or fault(path)
        if reason is None:
            return candidate
        logger.warning("SKIPPED: %s The checkpoint before it is used, and this one renamed.", reason)
        skipped[candidate] = reason
    if skipped:  # progress was saved once: starting over is not for a program to decide
        raise ValueError(
            f"no checkpoint in {folder} reads back whole: {' '.join(skipped.values())} Restore one of them, or "
            "move them away to start from the beginning."
        )
    return None


def _not_yet_left_out(record: dict, without: list[str], data: str | None, step: int) -> list[str]:
    """What of `without` the run has not begun anew before this checkpoint."""
    done = set(record.get("started_without", ()))
    if record.get("run", {}).get("data_fingerprint") != data:
        done.discard(DATALOADER)
    if ignored := [part for part in without if part in done]:
        logger.warning(
            "checkpoint.exclude_from_loading = %s: the run began that anew before step %d already, which is loaded with it. To "
            "begin it anew once more, name the step as well: checkpoint.load_step = %d.",
            ",".join(ignored),
            step,
            step,
        )
    return [part for part in without if part not in done]


def set_aside(folder: Path, why: str) -> Path:
    """Rename a checkpoint to `step-N.WHY`, so that neither retention nor a later save of its step touches or mixes with it."""
    aside = folder.with_name(f"{folder.name}.{why}")
    n = 1
    while aside.exists():
        n += 1
        aside = folder.with_name(f"{folder.name}.{why}-{n}")
    folder.rename(aside)
    return aside


def set_damaged_aside(folder: Path) -> None:
    logger.warning("renamed %s to %s; remove it when you have looked at it.", folder, set_aside(folder, "damaged"))


def set_later_aside(folder: Path, step: int) -> None:
    """Rename what follows a step that the run goes back to: the last checkpoint is the run's own course again."""
    later = [place(folder, other) for other in steps_in(folder) if other > step and is_finished(place(folder, other))]
    for path in later.copy():
        if reason := fault(path):
            logger.warning("SKIPPED: %s", reason)
            set_damaged_aside(path)
            later.remove(path)
        else:
            set_aside(path, "superseded")
    if later:
        logger.warning(
            "went back to step %d: the checkpoints after it in %s (%s) are renamed to step-N.superseded. Nothing of them is "
            "lost, and nothing removes them: do so when you need them no more. The same command goes on from what is saved "
            "next.",
            step,
            folder,
            ", ".join(path.name for path in later),
        )
