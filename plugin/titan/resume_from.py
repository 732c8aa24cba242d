"""Which checkpoint a start resumes from, which parts of it are excluded, and which other checkpoints are renamed.

The same command starts a run many times, and what it asks for once must happen once: going back to a step
(`checkpoint.load_step`), and excluding parts of a checkpoint (`checkpoint.exclude_from_loading`). So every checkpoint's record
says what happened before it: `branched_from`, the step that the run last went back to, and `started_without`, the parts that
were excluded.
"""

from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from interdomain.model.distributed_checkpoint import METADATA, WrittenByNewerPyTorch, finished_steps, step_of

from .host import DATALOADER, TRAIN_STATE, logger
from .integrity import Contents, is_finished, read


class Choice(NamedTuple):
    """What a start loads."""

    step: int
    goes_back: bool  # to this very step: no other may replace it, and the checkpoints after it are renamed
    excluded_parts: list[str]
    branched_from: int | None  # for the records of the checkpoints that follow


def steps_in(folder: Path) -> list[int]:
    """The steps of all checkpoints in a folder, complete or not."""
    names = folder.iterdir() if folder.is_dir() else ()
    return sorted(step for step in map(step_of, names) if step is not None)


def loads_a_model(job_config) -> bool:
    """Whether this start loads a model: then it draws no initial values. If that fails, the start ends. Collective.

    Rank 0 looks for a finished checkpoint in the run's folder, and reads none.
    """
    config = job_config.checkpoint
    if not config.enable or config.create_seed_checkpoint:
        return False
    folder = Path(job_config.job.dump_folder) / config.folder
    return on_rank_0(lambda: bool(config.initial_load_path or finished_steps(folder)))


def on_rank_0(act):
    """What `act` returns on rank 0, or the OSError or ValueError that it raises there, on every rank. Collective."""
    outcome = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = act()
        except (OSError, ValueError) as e:
            outcome[1] = e
    dist.broadcast_object_list(outcome)
    result, error = outcome
    if error is not None:
        raise error
    return result


class Candidates:
    """The checkpoints that a start may resume from, on rank 0. The index of each is read at most once: with many ranks it has
    tens of megabytes and takes seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damaged: dict[Path, str] = {}  # path -> what is wrong with it
        self._contents: dict[Path, Contents] = {}

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def read(self, path: Path) -> Contents:
        """Raises: ValueError that says what is wrong with the checkpoint; OSError."""
        if path in self.damaged:
            raise ValueError(self.damaged[path])
        if path not in self._contents:
            try:
                self._contents[path] = read(path)
            except WrittenByNewerPyTorch:
                raise
            except ValueError as e:
                if is_finished(path):
                    self.damaged[path] = str(e)
                raise
        return self._contents[path]

    def fault(self, step: int) -> str | None:
        """Why the checkpoint of this step cannot be loaded; None if nothing is wrong."""
        try:
            self.read(self.path(step))
        except WrittenByNewerPyTorch:  # no reason to take an older one
            raise
        except ValueError as e:
            return str(e)
        return None

    def choose(self, step: int, *, exclude: list[str], data: str | None, saving: bool) -> Choice | None:
        """The step asked for, or the latest complete one of all (-1) or of those saved since. None: there is none to load.

        Args:
            step: checkpoint.load_step. exclude: checkpoint.exclude_from_loading.
            data: this run's fingerprint of the data: the loader's state is excluded again where the data are others.
            saving: False where the run saves nothing (checkpoint.load_only).
        Raises: ValueError for a checkpoint that cannot be loaded or continued; OSError.
        """
        goes_back = step != -1 and not (saving and self._went_back_before(step))
        if goes_back:
            self._require(step)
            choice = Choice(step, goes_back, exclude, branched_from=step)
        elif (latest := self._latest()) is None:
            return None
        else:
            record = self.read(self.path(latest)).record
            if saving:
                exclude = _not_yet_excluded(record, exclude, data, latest)
            choice = Choice(latest, goes_back, exclude, record.get("branched_from"))
            if step != -1:
                self._say_how_to_go_back_again(step, latest)
        if saving and TRAIN_STATE in choice.excluded_parts:
            raise ValueError(
                f"checkpoint.exclude_from_loading = train_state would count from step 0 again below the checkpoints in "
                f"{self.folder}, and every restart would begin at step {choice.step} anew. Leave train_state out of it, or "
                f"start a run of its own: another job.dump_folder, with checkpoint.initial_load_path = "
                f"{self.path(choice.step)}."
            )
        return choice

    def _went_back_before(self, step: int) -> bool:
        """Whether the run has gone back to this step already, and saved since: its latest checkpoint's record tells."""
        for later in reversed(steps_in(self.folder)):
            if later > step and self.fault(later) is None:
                return self.read(self.path(later)).record.get("branched_from") == step
        return False

    def _say_how_to_go_back_again(self, step: int, latest: int) -> None:
        later = ", ".join(f"step-{other}" for other in steps_in(self.folder) if other > step)
        again = f" To go back to it once more, move {later} away first." if is_finished(self.path(step)) else ""
        logger.warning(
            "the run has gone back to step %d (checkpoint.load_step) before: it continues from %s, which it has saved since.%s",
            step,
            self.path(latest),
            again,
        )

    def _require(self, step: int) -> None:
        if reason := self.fault(step):
            whole = ", ".join(str(other) for other in steps_in(self.folder) if self.fault(other) is None) or "none"
            raise ValueError(
                f"checkpoint.load_step = {step}, but {self.folder} has no whole checkpoint of that step; it has: {whole}. "
                f"({reason}) Choose one of these, or -1 for the latest."
            )

    def _latest(self) -> int | None:
        for step in reversed(steps_in(self.folder)):
            path = self.path(step)
            if not is_finished(path):
                logger.warning("SKIPPED: %s has no %s: the save of it was cut short.", path, METADATA)
                continue
            if (reason := self.fault(step)) is None:
                return step
            logger.warning("SKIPPED: %s The checkpoint before it is used, and this one renamed.", reason)
        if self.damaged:  # starting over is not for a program to decide
            raise ValueError(
                f"no checkpoint in {self.folder} reads back whole: {' '.join(self.damaged.values())} Restore one of them, or "
                "move them away to start from the beginning."
            )
        return None

    def rename_others(self, choice: Choice, saving: bool) -> None:
        """After the choice was loaded: the damaged ones, and those after a step that the run goes back to."""
        for path in sorted(self.damaged):
            set_damaged_aside(path)
        later = [self.path(step) for step in steps_in(self.folder) if step > choice.step]
        later = [path for path in later if choice.goes_back and saving and is_finished(path)]
        for path in later:
            set_aside(path, "superseded")
        if later:
            logger.warning(
                "went back to step %d: the checkpoints after it in %s (%s) are renamed to step-N.superseded. Nothing of them "
                "is lost, and nothing removes them: do so when you need them no more. The same command goes on from what is "
                "saved next.",
                choice.step,
                self.folder,
                ", ".join(path.name for path in later),
            )


def _not_yet_excluded(record: dict, exclude: list[str], data: str | None, step: int) -> list[str]:
    """Those of `exclude` that were not excluded before this checkpoint was saved."""
    done = set(record.get("started_without", ()))
    if record.get("run", {}).get("data_fingerprint") != data:
        done.discard(DATALOADER)
    if ignored := [part for part in exclude if part in done]:
        logger.warning(
            "checkpoint.exclude_from_loading = %s: the run began that anew before step %d already, which is loaded with it. To "
            "begin it anew once more, name the step as well: checkpoint.load_step = %d.",
            ",".join(ignored),
            step,
            step,
        )
    return [part for part in exclude if part not in done]


def set_aside(folder: Path, why: str) -> Path:
    """Rename a checkpoint to `step-N.WHY`: no run loads, counts or removes it, and no later save of its step overwrites it."""
    aside = folder.with_name(f"{folder.name}.{why}")
    n = 1
    while aside.exists():
        n += 1
        aside = folder.with_name(f"{folder.name}.{why}-{n}")
    folder.rename(aside)
    return aside


def set_damaged_aside(folder: Path) -> None:
    logger.warning("renamed %s to %s; remove it when you have looked at it.", folder, set_aside(folder, "damaged"))
