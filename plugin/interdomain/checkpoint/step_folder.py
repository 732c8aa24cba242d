"""Checkpoint folders: their names, which of them are complete, and the records that say what model they hold.

A checkpoint of this project is a folder `step-N` with the files of the ranks and an index `.metadata`. The
index is written last: without it the folder is no checkpoint. Beside them are `interdomain.json`, which says
what model it is, and the tokenizer. index.py reads the index and the tensors.
"""

import json
import re
from pathlib import Path
from typing import Any

from interdomain.data import Tokenizer
from interdomain.folders import write_atomically
from interdomain.model.config import ModelConfig

from .run_folder import checkpoints_of

RECORD_FILE = "interdomain.json"
# {"nats": [...], "labels": [...]} with one number per document, for a validation split of few documents.
DOCUMENTS = "validation-documents.json"
# {"step", "loss", "perplexity"[, "accuracy"]}, if the run validated after the step.
VALIDATION = "validation.json"
KEEP = "KEEP"  # an empty file in a milestone, a checkpoint that is never removed
TOKENIZER = "tokenizer.model"
METADATA = ".metadata"
# A file in a step folder that a run is saving or removing. A folder that has neither this file nor the index
# was put there by somebody else, such as half a copy: no run removes it or writes into it.
INCOMPLETE = ".incomplete"
RECORD_VERSION = 1
# The members of interdomain.json that an exported model keeps.
RECORD_FACTS = ("size", "condition", "step", "tokens", "run", "versions")


def step_of(folder: Path | str) -> int | None:
    """Returns the step whose checkpoint a folder is, by its name; None for other folders."""
    match = re.fullmatch(r"step-(\d+)", Path(folder).name)
    return int(match.group(1)) if match else None


def step_folders(folder: Path) -> list[Path]:
    """Returns the entries of a folder with the name of a checkpoint, complete or not, sorted by step."""
    if not folder.is_dir():
        return []
    steps = []
    for path in folder.iterdir():
        step = step_of(path)
        if step is not None:
            steps.append((step, path))
    return [path for _, path in sorted(steps)]


def finished_steps(folder: Path) -> dict[int, Path]:
    """Returns the complete checkpoints in a folder by their steps."""
    finished = {}
    for path in step_folders(folder):
        step = step_of(path)
        if step is not None and (path / METADATA).is_file():
            finished[step] = path
    return finished


def is_unfinished(folder: Path) -> bool:
    """Returns whether a folder is what a run left when its save or its removal was interrupted."""
    if folder.is_symlink() or not folder.is_dir() or (folder / METADATA).is_file():
        return False
    # A milestone's KEEP may be there before the first file of the save.
    names = {path.name for path in folder.iterdir()}
    return INCOMPLETE in names or names <= {KEEP}


def half_copies(folder: Path) -> list[Path]:
    """Returns the step folders that lack their index, though no run left them so.

    A step folder that is a link to nowhere is one of them: perhaps a disk is not mounted.
    """
    copies = []
    for path in step_folders(folder):
        if (path / METADATA).is_file() or is_unfinished(path):
            continue
        leads_nowhere = path.is_symlink() and not path.exists()
        if leads_nowhere or (path / RECORD_FILE).exists() or any(path.glob("*.distcp")):
            copies.append(path)
    return copies


def milestones(folder: Path) -> dict[int, Path]:
    """Returns the complete checkpoints that are never removed, by step. `touch step-400/KEEP` makes one."""
    return {step: path for step, path in finished_steps(folder).items() if (path / KEEP).exists()}


def latest_checkpoint(folder: Path | str) -> Path:
    """Returns `folder` itself if it is a checkpoint, else the newest complete one in it.

    Args:
        folder: A checkpoint, a folder of checkpoints, or a run's folder.

    Raises:
        FileNotFoundError: There is no such folder, or no complete checkpoint in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"There is no folder {folder}; give a checkpoint (step-N) or the folder of a run."
        )
    if (folder / METADATA).is_file() or step_of(folder) is not None:
        return folder
    # A folder of checkpoints has them itself, a run's folder in the folder that it notes.
    steps = finished_steps(folder) | finished_steps(checkpoints_of(folder))
    if not steps:
        raise FileNotFoundError(
            f"{folder} holds no whole checkpoint (a folder step-N with {METADATA} in it)."
        )
    return steps[max(steps)]


def write_record(folder: Path, record: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Writes interdomain.json and the tokenizer into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.write(folder)
    write_atomically(folder / RECORD_FILE, (json.dumps(record, indent=2) + "\n").encode())


def record_folder(checkpoint: Path) -> Path:
    """Returns the folder of a checkpoint's interdomain.json and tokenizer.

    This is the checkpoint itself. TorchTitan's own trainer writes them once into the run's folder, and the
    checkpoints into a folder in it, which may be several levels down.
    """
    if (checkpoint / RECORD_FILE).is_file():
        return checkpoint
    checkpoints = checkpoint.absolute().parent
    for run in (checkpoints, *checkpoints.parents):
        if not (run / RECORD_FILE).is_file():
            continue
        if run == checkpoints.parent or checkpoints_of(run) == checkpoints:
            return run
    return checkpoint


def read_run_record(checkpoint: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """Reads interdomain.json of a checkpoint.

    Returns:
        The model's configuration, and all of interdomain.json.

    Raises:
        FileNotFoundError: There is no interdomain.json.
        ValueError: It is damaged or of another version.
    """
    path = record_folder(checkpoint) / RECORD_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{checkpoint} has no {RECORD_FILE}, which says what model it is. Copy the whole folder."
        )
    try:
        record = json.loads(path.read_text())
        if path.parent != checkpoint:
            # A record of the run, which does not name a step.
            step = step_of(checkpoint) or 0
            record["step"] = step
            record["tokens"] = step * record["run"]["tokens_per_step"]
        if record["format_version"] != RECORD_VERSION:
            raise ValueError(
                f"format version {record['format_version']!r}; this program reads {RECORD_VERSION}"
            )
        return ModelConfig.from_dict(record["model"]), record
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(
            f"{path} is damaged or of another version ({type(e).__name__}: {e})."
        ) from e
