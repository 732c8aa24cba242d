"""The choice of the checkpoint that a start resumes from, and checks that it fits this run.

No tensor is read here. A run that goes back to a step (`checkpoint.load_step`) writes this step,
`branched_from`, into the record of every checkpoint that it saves from then on. A restart of the
same command therefore continues from what was saved since, and does not go back again. A restart
with another seed (`debug.seed`) goes back once more.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from interdomain.checkpoint.index import Index, check_lengths, read_index
from interdomain.checkpoint.pretrained import INDEX
from interdomain.checkpoint.run_folder import checkpoints_of
from interdomain.checkpoint.step_folder import (
    METADATA,
    finished_steps,
    half_copies,
    latest_checkpoint,
    read_run_record,
    step_folders,
    step_of,
)
from interdomain.model import ModelConfig, cell_of

from ..errors import user_errors
from ..host import logger
from ..settings.job_config import pairs
from ..settings.schema import PARTS, SETTINGS, Checkpoint, JobConfig, Resume

# Beginnings of the names of a checkpoint's entries that are no weights.
OTHER_STATE = tuple(f"{part}." for part in PARTS)


class ResumePoint(NamedTuple):
    """The checkpoint that a start loads.

    Attributes:
        folder: Folder of the checkpoint.
        files: The checkpoint's index: its tensors, and their places in the files.
        record: The contents of interdomain.json.
        source: "latest", "load_step" (checkpoint.load_step) or "initial"
            (checkpoint.initial_load_path). If the latest checkpoint is damaged, an older one
            replaces it.
        branched_from: The step that the run went back to. The next checkpoints record it.
    """

    folder: Path
    files: Index
    record: dict
    source: Literal["latest", "load_step", "initial"]
    branched_from: int | None = None


def on_rank_0(act: Callable[[], Any]) -> Any:
    """Calls `act` on rank 0 and returns its result on every rank. Collective.

    Args:
        act: A function without arguments. Its result must be picklable.

    Raises:
        OSError, ValueError: `act` raised it on rank 0; it is raised on every rank.
    """
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [act()]
        except (OSError, ValueError) as e:
            outcome = [e]
    dist.broadcast_object_list(outcome)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


@user_errors
def loads_a_model(job: JobConfig) -> bool:
    """Returns whether this start loads a model, and so draws no initial values. Collective.

    Args:
        job: The configuration of the run.
    """
    config = job.checkpoint
    if not config.enable:
        return False
    folder = Path(job.job.dump_folder) / config.folder
    return on_rank_0(lambda: bool(config.initial_load_path or finished_steps(folder)))


def find_resume_point(
    folder: Path, step: int, initial: str | None, run: dict
) -> ResumePoint | None:
    """Finds the checkpoint that a start loads. Called on rank 0.

    A run that went back to `step` before, and saved since, continues from its latest checkpoint.
    Damaged checkpoints are renamed.

    Args:
        folder: Folder of the run's checkpoints.
        step: checkpoint.load_step (-1: the latest).
        initial: checkpoint.initial_load_path.
        run: This run's record.

    Returns:
        The checkpoint to load, or None if the run starts from the beginning.

    Raises:
        ValueError: A checkpoint cannot be loaded.
        OSError: A file cannot be read.
    """
    if run.get("folder"):
        check_other_runs(folder, run["folder"])

    # Go back, unless an earlier start of the same command went back to this step already.
    latest = _latest(folder, above=step)
    went_back_before = (
        latest is not None
        and latest.branched_from == step
        and latest.record["run"].get("seed") == run["run"]["seed"]
    )
    if step != -1 and not went_back_before:
        steps = finished_steps(folder)
        if step not in steps:
            others = ", ".join(map(str, sorted(steps))) or "none"
            raise ValueError(
                f"checkpoint.load_step = {step} is no complete checkpoint of {folder}. There are: "
                f"{others}."
            )
        return ResumePoint(steps[step], *_read_checked(steps[step]), "load_step", step)

    # Start from another run's checkpoint, or from the beginning.
    if latest is None:
        if not initial:
            return None
        start = latest_checkpoint(initial)
        return ResumePoint(start, *_read_checked(start), "initial")

    # Continue from the latest checkpoint.
    if step != -1:
        logger.warning(
            "the run went back to step %d before: continuing from %s, which it saved since. To go "
            "back once more, move the checkpoints after step %d away.",
            step,
            latest.folder,
            step,
        )
    return latest


def check_other_runs(folder: Path, own: str) -> None:
    """Checks that no other run saves its checkpoints in this folder.

    A user may copy checkpoints of another run into this run's folder, or rename this run's folder.
    A checkpoint there is refused only if the other run still saves into the same place.

    Args:
        folder: Folder of the checkpoints.
        own: This run's folder, without links.

    Raises:
        ValueError: A checkpoint is another run's.
    """
    is_inside = folder.resolve().is_relative_to(own)
    for path in step_folders(folder):
        try:
            other = read_run_record(path)[1].get("folder")
        except (OSError, ValueError):
            continue  # no record, or a damaged one: the other checkpoints name their run
        # A link at the old place of a renamed folder leads to the new one.
        if other is None or str(Path(other).resolve()) == own:
            continue
        # A copy within this run's folder is allowed if the other run saves elsewhere.
        if not is_inside or checkpoints_of(Path(other)).resolve() == folder.resolve():
            raise ValueError(
                f"{path} is a checkpoint of another run, whose folder is {other} (this run's is "
                f"{own}). Give each run a checkpoint.folder of its own, or continue that run with "
                f"--job.dump_folder {other}. If that is the old name of this run's folder, make a "
                f"link there: ln -s {own} {other}"
            )


def _latest(folder: Path, above: int) -> ResumePoint | None:
    """Returns the latest complete checkpoint after a step, and renames damaged ones.

    Args:
        folder: Folder of the run's checkpoints.
        above: Only later steps are looked at. -1: all.
    """
    for step, path in sorted(finished_steps(folder).items(), reverse=True):
        if step > above:
            try:
                index, record = _read_checked(path)
                return ResumePoint(path, index, record, "latest", record.get("branched_from"))
            except ValueError as e:
                _check_version(path)
                set_damaged_aside(path, str(e))

    # A run that had checkpoints must not start from the beginning unless its user says so.
    if above == -1:
        damaged = [*folder.glob("step-*.damaged*"), *folder.glob("step-*.superseded*")]
        if damaged:
            names = ", ".join(sorted(path.name for path in damaged))
            raise ValueError(
                f"no complete checkpoint is left in {folder}, only {names}. Restore one of them, or "
                "move them away to start from the beginning."
            )
        check_half_copies(folder)
    return None


def check_half_copies(folder: Path) -> None:
    """Checks that a start would not begin at step 1 beside copies that lack their index.

    Args:
        folder: Folder of the run's checkpoints.

    Raises:
        ValueError: There are such copies, and no complete checkpoint.
    """
    copies = half_copies(folder)
    if copies and not finished_steps(folder):
        names = ", ".join(path.name for path in copies)
        raise ValueError(
            f"{folder} holds {names} without {METADATA}, the index of a checkpoint (`cp step-N/*` "
            "leaves this hidden file behind), and no complete checkpoint. Copy the index from where "
            f"the rest came from, or the whole folder. To start from the beginning, move {names} away."
        )


def _check_version(folder: Path) -> None:
    """Raises a ValueError if a later PyTorch wrote this checkpoint: it may not be damaged.

    Args:
        folder: Folder of a checkpoint that cannot be read.
    """
    try:
        wrote = read_run_record(folder)[1]["versions"]["torch"].partition("+")[0]
    except (OSError, ValueError, KeyError):
        return
    if torch.__version__ < wrote:
        raise ValueError(
            f"{folder} was written by PyTorch {wrote}, and PyTorch {torch.__version__} cannot read "
            f"it. Start with {wrote} or later, or move the folder away to continue from an earlier "
            "step."
        )


def _read_checked(folder: Path) -> tuple[Index, dict]:
    """Returns a checkpoint's index and record, after a check that its files have their lengths."""
    index = read_index(folder)
    check_lengths(folder, index)
    return index, read_run_record(folder)[1]


def set_aside(folder: Path, why: str) -> Path:
    """Renames a checkpoint, so that no run loads, counts, removes or overwrites it.

    Args:
        folder: Folder of the checkpoint, step-N.
        why: The ending of the new name, `damaged` or `superseded`: step-N.damaged.

    Returns:
        The new path.
    """
    aside = folder.with_name(f"{folder.name}.{why}")
    n = 2
    while os.path.lexists(aside):
        aside = folder.with_name(f"{folder.name}.{why}-{n}")
        n += 1
    return folder.rename(aside)


def set_damaged_aside(folder: Path, reason: str) -> None:
    """Renames a damaged checkpoint. Called on rank 0.

    Args:
        folder: Folder of the checkpoint.
        reason: What is damaged, for the log.
    """
    logger.warning("SKIPPED, and renamed to %s: %s", set_aside(folder, "damaged").name, reason)


def set_later_aside(folder: Path, step: int) -> None:
    """Renames the checkpoints after the step that a run has gone back to. Called on rank 0.

    Args:
        folder: Folder of the run's checkpoints.
        step: The step that the run has gone back to.
    """
    for later, path in sorted(finished_steps(folder).items()):
        if later > step:
            new = set_aside(path, "superseded").name
            logger.warning("went back to step %d: renamed %s to %s", step, path, new)


@user_errors
def require_same_run(
    point: ResumePoint, run: dict, *, batch: bool, optimizer: bool = False
) -> None:
    """Checks that a checkpoint is of this model and, if the run continues it, of this batch.

    Args:
        point: The checkpoint, from `find_resume_point`.
        run: This run's record.
        batch: Whether the tokens per step must be the same.
        optimizer: Whether the optimizer's state is loaded.

    Raises:
        SystemExit: The checkpoint is of another run. The reason is printed.
    """
    record = point.record
    to_start_anew = _to_start_anew(point.folder)

    # Settings that change what the model computes.
    before = settings_of(record)
    now = settings_of(run)
    if before and point.source != "initial":
        for name, setting in SETTINGS.items():
            if setting.resume is Resume.REFUSED and before[name] != now[name]:
                raise ValueError(
                    f"{point.folder} was trained with {name} = {before[name]}, and here it is "
                    f"{now[name]}: the model would compute something else. Restore the setting, or "
                    f"{to_start_anew}."
                )

    # The optimizer's state.
    name_before = before.get("optimizer.name", "AdamW")
    name_now = now.get("optimizer.name", "AdamW")
    if optimizer and (name_before == "Muon") != (name_now == "Muon"):
        raise ValueError(
            f"{point.folder} has the optimizer state of {name_before}, which {name_now} cannot "
            f"continue. Restore optimizer.name = {name_before}, or {to_start_anew} (with "
            "--checkpoint.no-initial_load_model_only and --checkpoint.exclude_from_loading optimizer "
            "it keeps step, schedule and data)."
        )

    # The model and the batch. A longer context is the same model.
    differences = []
    model = ModelConfig.from_dict(run["model"])
    model_before = ModelConfig.from_dict(record["model"])
    if replace(model_before, max_seq_len=model.max_seq_len) != model:
        size = record["size"]
        differences.append(
            f"the model is {cell_of(model_before, size)} there and {cell_of(model, size)} here"
        )
    tokens_before = record["run"].get("tokens_per_step", 0)
    tokens = run["run"]["tokens_per_step"]
    if batch and tokens_before != tokens:
        differences.append(
            f"tokens_per_step is {tokens_before} there and {tokens} here (for the same on any number "
            f"of ranks set training.global_batch_size = {tokens_before // run['run']['seq_len']})"
        )
    if differences:
        raise ValueError(
            f"{point.folder} is a checkpoint of another run ({record['condition']}, "
            f"{record['size']}): {'; '.join(differences)}. Restore the settings that it was made "
            "with, or give this run a folder of its own with --job.dump_folder."
        )
    # A run continues from optimizer state, schedule, position in the data and step, too.
    if (batch or optimizer) and not _has_other_state(point.files):
        raise ValueError(_only_weights(point.folder, point.source == "initial"))


def check_resume_of_torchtitan(config: Checkpoint, folder: Path) -> None:
    """Checks that TorchTitan's own trainer will not continue from a checkpoint of weights only.

    Args:
        config: The section [checkpoint].
        folder: Folder of the run's checkpoints.

    Raises:
        ValueError: It would. The message says which checkpoint it is, and what to do.
    """
    # Without that folder TorchTitan loads another run's checkpoint.
    is_initial = not folder.exists()
    checkpoint = None
    if is_initial and config.initial_load_path and not config.initial_load_model_only:
        checkpoint = Path(config.initial_load_path)
    # Otherwise it loads the step that the user chose, or the latest one, which may be an exported
    # model (checkpoint.last_save_in_hf).
    saved = finished_steps(folder)
    for path in folder.glob(f"step-*/{INDEX}"):
        step = step_of(path.parent)
        if step is not None:
            saved[step] = path.parent
    step = config.load_step
    if step == -1:
        step = max(saved, default=0)
    # Of step 0, a seed checkpoint, it takes only the weights.
    if step in saved and step > 0:
        checkpoint = saved[step]

    if checkpoint is None or set(config.exclude_from_loading) == set(PARTS):
        return
    only_weights = (checkpoint / INDEX).is_file()
    if (checkpoint / METADATA).is_file():
        only_weights = not _has_other_state(read_index(checkpoint))
    if only_weights:
        raise ValueError(_only_weights(checkpoint, is_initial))


def _has_other_state(files: Index) -> bool:
    """Returns whether a checkpoint has more than weights: what a run needs to continue."""
    return any(name.startswith(OTHER_STATE) for name in files.entries)


def _only_weights(folder: Path, is_initial: bool) -> str:
    """Returns the error for a run that would continue from a checkpoint of weights only.

    Args:
        folder: Folder of the checkpoint.
        is_initial: Whether it is checkpoint.initial_load_path.
    """
    problem = (
        f"{folder} holds only weights (checkpoint.last_save_model_only of TorchTitan's trainer, or a "
        "seed checkpoint), which no run continues."
    )
    if is_initial:
        return f"{problem} To start from the weights: --checkpoint.initial_load_model_only."
    last = step_of(folder)
    earlier = []
    for step, path in finished_steps(folder.parent).items():
        if last is not None and step < last and _has_other_state(read_index(path)):
            earlier.append(step)
    if earlier:
        step = max(earlier)
        problem += f" To continue from step {step}: --checkpoint.load_step {step}."
    to_start_anew = _to_start_anew(folder)
    if not (folder / METADATA).is_file():
        to_start_anew += " --checkpoint.initial_load_in_hf"
    return f"{problem} To {to_start_anew}."


def _to_start_anew(folder: Path) -> str:
    """Returns what to do to start another run from the weights of a checkpoint."""
    return (
        "start another run from these weights: --job.dump_folder FOLDER "
        f"--checkpoint.initial_load_path {folder}"
    )


def settings_of(record: dict) -> dict[str, Any]:
    """Returns the settings of a run's record by name.

    There are none in a record that is older than its entry "configuration".

    A setting that is newer than the record has its default. A setting that was removed is left out.

    Args:
        record: The contents of interdomain.json.
    """
    if "configuration" not in record:
        return {}
    recorded = dict(pairs(record["configuration"]))
    settings = {name: recorded.get(name, default) for name, default in pairs(JobConfig().to_dict())}
    for split, fingerprint in record.get("fingerprints", {}).items():
        settings[f"fingerprint of the {split} text"] = fingerprint
    return settings


def warn_of_changes(point: ResumePoint, run: dict) -> None:
    """Logs the settings in which this run differs from the checkpoint. Called on rank 0.

    Args:
        point: The checkpoint that the run continues.
        run: This run's record.
    """
    before = settings_of(point.record)
    if not before:
        logger.warning(
            "%s does not record its settings: they are not compared with this run's", point.folder
        )
        return
    changes = ""
    for name, value in settings_of(run).items():
        # Names that are no settings are fingerprints, which are compared, too.
        is_compared = name not in SETTINGS or SETTINGS[name].resume is Resume.WARNED
        if is_compared and name in before and before[name] != value:
            changes += f"\n  {name}: {before[name]} -> {value}"
    if changes:
        logger.warning("%s was saved with other settings (there -> here):%s", point.folder, changes)
