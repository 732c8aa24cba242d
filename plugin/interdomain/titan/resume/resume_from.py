"""The choice of the checkpoint that a start resumes from: is it complete, and does it hold this model? No tensor is read here.

A run that went back to a step (`checkpoint.load_step`) writes this step, `branched_from`, into the record of every checkpoint
that it saves from then on. So a restart of the same command continues from what was saved since, and does not go back again;
one with another seed (`debug.seed`) does.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from interdomain.checkpoint.index import Index, check_lengths, read_index
from interdomain.checkpoint.run_folder import checkpoints_of
from interdomain.checkpoint.step_folder import (
    METADATA,
    finished_steps,
    half_copies,
    latest_checkpoint,
    read_sidecar,
    step_folders,
    step_of,
)
from interdomain.model import ModelConfig, cell_of
from interdomain.model.config import MIXER_SETTINGS, MODEL_SETTINGS

from ..errors import user_errors
from ..host import DATALOADER, LR_SCHEDULER, OPTIMIZER, TRAIN_STATE, logger
from ..settings.job_config import pairs
from ..settings.rules import reads_n_basis
from ..settings.schema import SETTINGS, JobConfig, Resume

OTHER_STATE = tuple(f"{part}." for part in (OPTIMIZER, LR_SCHEDULER, DATALOADER, TRAIN_STATE))
REFUSED = [name for name, setting in SETTINGS.items() if setting.resume is Resume.REFUSED]


class ResumePoint(NamedTuple):
    """The checkpoint that a start loads."""

    folder: Path
    files: Index  # tensors, and where they lie in the checkpoint's files
    record: dict  # the file interdomain.json
    source: Literal[
        "latest", "load_step", "initial"
    ]  # "latest": where it is damaged, an older one replaces it
    branched_from: int | None = None  # for the records of the checkpoints that follow


def on_rank_0(act: Callable[[], Any]) -> Any:
    """The result of `act` on rank 0, or the OSError or ValueError that it raises there, on every rank. Collective."""
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
    """True if this start loads a model, and so draws no initial values. If finding out fails, the start ends. Collective."""
    config = job.checkpoint
    if not config.enable:
        return False
    folder = Path(job.job.dump_folder) / config.folder
    return on_rank_0(lambda: bool(config.initial_load_path or finished_steps(folder)))


def find_resume_point(
    folder: Path, step: int, initial: str | None, run: dict
) -> ResumePoint | None:
    """Find the latest complete checkpoint, or that of a step, or the initial one; None: there is none. On rank 0.

    A run that went back to the step before, and saved since, continues from its latest. Damaged checkpoints are renamed.

    Args:
        step: checkpoint.load_step (-1: the latest).
        initial: checkpoint.initial_load_path.
        run: This run's record.
    Raises:
        ValueError: A checkpoint cannot be loaded.
        OSError: A file cannot be read.
    """
    if run.get("folder"):
        check_other_runs(folder, run["folder"])
    latest = _latest(folder, above=step)
    went_back_before = (
        latest is not None
        and latest.branched_from == step
        and latest.record["run"].get("seed")
        == run["run"]["seed"]  # with another seed it goes back once more
    )
    if step != -1 and not went_back_before:
        steps = finished_steps(folder)
        if step not in steps:
            others = ", ".join(map(str, sorted(steps))) or "none"
            raise ValueError(
                f"checkpoint.load_step = {step} is no complete checkpoint of {folder}. There are: {others}."
            )
        return ResumePoint(steps[step], *_read_checked(steps[step]), "load_step", step)
    if latest is None:
        if not initial:
            return None
        start = latest_checkpoint(initial)
        return ResumePoint(start, *_read_checked(start), "initial")
    latest_step = step_of(latest.folder) or 0
    for path in half_copies(folder):
        if (step_of(path) or 0) > latest_step:
            logger.warning("%s is passed over: it has no %s, the index", path, METADATA)
    if step != -1:
        logger.warning(
            "the run went back to step %d before: continuing from %s, which it saved since. To go back once more, move the "
            "checkpoints after step %d away.",
            *(step, latest.folder, step),
        )
    return latest


def check_other_runs(folder: Path, own: str) -> None:
    """Checks that no other run saves its checkpoints in this folder.

    Checkpoints of other runs within the run's own folder were put there for this run, also if its folder was renamed, unless
    the other run's folder names this place.

    Args:
        folder: Folder of the checkpoints.
        own: This run's folder, without links.

    Raises:
        ValueError: A checkpoint is another run's.
    """
    is_inside = folder.resolve().is_relative_to(own)
    for path in step_folders(folder):
        try:
            other = read_sidecar(path)[1].get("folder")
        except (
            OSError,
            ValueError,
        ):  # no record, or a damaged one: the other checkpoints say whose they are
            continue
        # A link at the old place of a renamed folder leads to the new one.
        if other is None or str(Path(other).resolve()) == own:
            continue
        if not is_inside or checkpoints_of(Path(other)).resolve() == folder.resolve():
            raise ValueError(
                f"{path} is a checkpoint of another run, whose folder is {other} (this run's is {own}). Give each run a "
                f"checkpoint.folder of its own, or continue that run with --job.dump_folder {other}. If that is the old name "
                f"of this run's folder, make a link there: ln -s {own} {other}"
            )


def _latest(folder: Path, above: int) -> ResumePoint | None:
    """The latest complete checkpoint after a step (-1: of all)."""
    for step, path in sorted(finished_steps(folder).items(), reverse=True):
        if step > above:
            try:
                index, record = _read_checked(path)
                return ResumePoint(path, index, record, "latest", record.get("branched_from"))
            except ValueError as e:
                _check_version(path)
                set_damaged_aside(path, str(e))
    if above == -1:
        # Starting over is not for a program to decide.
        damaged = [*folder.glob("step-*.damaged*"), *folder.glob("step-*.superseded*")]
        if damaged:
            names = ", ".join(sorted(path.name for path in damaged))
            raise ValueError(
                f"no complete checkpoint is left in {folder}, only {names}. Restore one of them, or move them away to start "
                "from the beginning."
            )
        check_half_copies(folder)
    return None


def check_half_copies(folder: Path) -> None:
    """Raises: ValueError if a start from this folder would begin at step 1 beside checkpoints that lack their index."""
    copies = half_copies(folder)
    if copies and not finished_steps(folder):
        names = ", ".join(path.name for path in copies)
        raise ValueError(
            f"{folder} holds {names} without {METADATA}, the index of a checkpoint (`cp step-N/*` leaves this hidden file "
            "behind), and no complete checkpoint. Copy the index from where the rest came from, or the whole folder. To start "
            f"from the beginning, move {names} away."
        )


def _check_version(folder: Path) -> None:
    """Raises: ValueError if a later PyTorch wrote this checkpoint: that it cannot be read here is no damage."""
    try:
        wrote = read_sidecar(folder)[1]["versions"]["torch"].partition("+")[0]
    except (OSError, ValueError, KeyError):
        return
    if torch.__version__ < wrote:
        raise ValueError(
            f"{folder} was written by PyTorch {wrote}, and PyTorch {torch.__version__} cannot read it. Start with {wrote} or "
            "later, or move the folder away to continue from an earlier step."
        )


def _read_checked(folder: Path) -> tuple[Index, dict]:
    """A checkpoint's index and record, after a check of its files and their lengths. Raises: ValueError; OSError."""
    index = read_index(folder)
    check_lengths(folder, index)
    return index, read_sidecar(folder)[1]


def set_aside(folder: Path, why: str) -> Path:
    """Rename a checkpoint to `step-N.WHY`: no run loads, counts or removes it, and no later save of its step overwrites it."""
    aside = folder.with_name(f"{folder.name}.{why}")
    n = 2
    while os.path.lexists(aside):
        aside = folder.with_name(f"{folder.name}.{why}-{n}")
        n += 1
    return folder.rename(aside)


def set_damaged_aside(folder: Path, reason: str) -> None:
    """Rename a damaged checkpoint. On rank 0."""
    logger.warning("SKIPPED, and renamed to %s: %s", set_aside(folder, "damaged").name, reason)


def set_later_aside(folder: Path, step: int) -> None:
    """Rename the checkpoints after the step that a run has gone back to. On rank 0."""
    for later, path in sorted(finished_steps(folder).items()):
        if later > step:
            logger.warning(
                "went back to step %d: renamed %s to %s",
                step,
                path,
                set_aside(path, "superseded").name,
            )


@user_errors
def require_same_run(
    point: ResumePoint, run: dict, tensors: dict, *, batch: bool, optimizer: bool = False
) -> None:
    """Refuse a checkpoint of a model that computes something else, or with another number of tokens per step.

    Args:
        run: This run's record.
        tensors: The whole model's state dict.
        batch: Whether the tokens per step matter.
        optimizer: Whether the optimizer's state is loaded.
    Raises:
        ValueError: The checkpoint is of another run.
    """
    record = point.record
    before = settings_of(record)
    now = settings_of(run)
    for name in REFUSED:
        if before and point.source != "initial" and before[name] != now[name]:
            raise ValueError(
                f"{point.folder} was trained with {name} = {before[name]}, and here it is {now[name]}: the model would compute "
                "something else. Restore the setting, or start another run from these weights: --job.dump_folder FOLDER "
                f"--checkpoint.initial_load_path {point.folder}."
            )
    name_before = before.get("optimizer.name", "AdamW")
    name_now = now.get("optimizer.name", "AdamW")
    if optimizer and (name_before == "Muon") != (name_now == "Muon"):
        raise ValueError(
            f"{point.folder} has the optimizer state of {name_before}, of which {name_now} cannot go on. Restore "
            f"optimizer.name = {name_before}, or start another run with new state: --job.dump_folder FOLDER "
            f"--checkpoint.initial_load_path {point.folder} (with --checkpoint.no-initial_load_model_only and "
            "--checkpoint.exclude_from_loading optimizer it keeps step, schedule and data)."
        )
    # Settings that make another model of the same tensors. The context length does not.
    compared = []
    model_before = ModelConfig.from_dict(record["model"])
    model_now = ModelConfig.from_dict(run["model"])
    for name in MODEL_SETTINGS:
        if name != "max_seq_len":
            compared.append((name, getattr(model_before, name), getattr(model_now, name)))
    if len(model_before.mixers) == len(model_now.mixers):
        for mixer_before, mixer_now in zip(model_before.mixers, model_now.mixers, strict=True):
            has_basis = reads_n_basis(
                {"condition": mixer_now.kind, "state_heads": mixer_now.state_heads}
            )
            for name in MIXER_SETTINGS:
                if name != "n_basis" or has_basis:
                    compared.append(
                        (f"mixer.{name}", getattr(mixer_before, name), getattr(mixer_now, name))
                    )
    else:
        conditions = (
            cell_of(model, record["size"]).condition for model in (model_before, model_now)
        )
        compared.append(("mixer.layers", *conditions))
    if batch:
        compared.append(
            (
                "tokens_per_step",
                record["run"].get("tokens_per_step", 0),
                run["run"]["tokens_per_step"],
            )
        )
    entries = point.files.entries.items()
    there = {
        name: list(getattr(entry, "size", ()))
        for name, entry in entries
        if not name.startswith(OTHER_STATE)
    }
    here = {name: list(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(there | here):
        compared.append((name, there.get(name, "missing"), here.get(name, "missing")))
    differences = [
        f"{name} is {old} there and {new} here" for name, old, new in compared if old != new
    ]
    if differences:
        raise ValueError(
            f"{point.folder} is a checkpoint of another run ({record['condition']}, {record['size']}): "
            f"{'; '.join(differences[:3])}. Restore the settings that it was made with, or give this run a folder of its own "
            "with --job.dump_folder."
        )
    if (batch or optimizer) and not any(name.startswith(OTHER_STATE) for name, _ in entries):
        raise ValueError(
            f"{point.folder} holds the weights alone (checkpoint.last_save_model_only of TorchTitan's trainer, or a seed "
            "checkpoint), which no run continues. Choose an earlier checkpoint (checkpoint.load_step), or start another run "
            f"from them: --job.dump_folder FOLDER --checkpoint.initial_load_path {point.folder}."
        )


def settings_of(record: dict) -> dict[str, Any]:
    """The settings of a run's record, by name; empty if the record is older than its entry "configuration".

    A setting that is newer than the record has its default, and one that is gone is passed over.
    """
    if "configuration" not in record:
        return {}
    recorded = dict(pairs(record["configuration"]))
    settings = {name: recorded.get(name, default) for name, default in pairs(JobConfig().to_dict())}
    for split, fingerprint in record.get("fingerprints", {}).items():
        settings[f"fingerprint of the {split} text"] = fingerprint
    return settings


def warn_of_changes(point: ResumePoint, run: dict) -> None:
    """Log the settings in which this run differs from the checkpoint that it continues, in one warning. On rank 0."""
    before = settings_of(point.record)
    if not before:
        logger.warning(
            "%s does not record its settings: they are not compared with this run's", point.folder
        )
        return
    changes = ""
    for name, value in settings_of(run).items():
        is_compared = (
            name not in SETTINGS or SETTINGS[name].resume is Resume.WARNED
        )  # the others are fingerprints
        if is_compared and name in before and before[name] != value:
            changes += f"\n  {name}: {before[name]} -> {value}"
    if changes:
        logger.warning("%s was saved with other settings (there -> here):%s", point.folder, changes)
