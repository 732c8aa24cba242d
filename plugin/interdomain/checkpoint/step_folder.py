"""Checkpoint folders: their names, which of them are complete, and the records of their models.

A checkpoint of this project is a folder `step-N` with the files of the ranks and an index
`.metadata`. The index is written last: without it the folder is no checkpoint. Beside them are
`interdomain.json`, which says what model it is, and the tokenizer. index.py reads the index and the
tensors.
"""

import json
import re
from pathlib import Path
from typing import Any

from interdomain.data import Tokenizer
from interdomain.folders import write_atomically
from interdomain.model.config import ModelConfig

from .run_folder import checkpoints_of

RECORD_FILE = "interdomain.json"  # the run's record, beside each checkpoint
# {"nats": [...], "labels": [...]} with one number per document, for a validation split of few
# documents.
DOCUMENTS = "validation-documents.json"
# {"step", "loss", "perplexity"[, "accuracy"]}, if the run validated after the step.
VALIDATION = "validation.json"
KEEP = "KEEP"  # an empty file in a milestone, a checkpoint that is never removed
TOKENIZER = "tokenizer.model"
METADATA = ".metadata"  # PyTorch's index of a checkpoint, which is written last
# A file in a step folder that a run is saving or removing. A folder that has neither this file nor
# the index was put there by somebody else, such as half a copy: no run removes it or writes into
# it.
INCOMPLETE = ".incomplete"
RECORD_VERSION = 1  # `format_version` in interdomain.json
# The members of interdomain.json that an exported model keeps.
RECORD_FACTS = ("size", "condition", "step", "tokens", "run", "versions")


def step_of(folder: Path | str) -> int | None:
    """Returns N for a folder that is named step-N, None for any other name."""
    match = re.fullmatch(r"step-(\d+)", Path(folder).name)
    return int(match.group(1)) if match else None


def step_folders(folder: Path) -> list[Path]:
    """Returns the entries of a folder that are named step-N, sorted by N.

    They may be complete checkpoints or not. The list is empty if there is no such folder.
    """
    if not folder.is_dir():
        return []
    steps = []
    for path in folder.iterdir():
        step = step_of(path)
        if step is not None:
            steps.append((step, path))
    return [path for _, path in sorted(steps)]


def finished_steps(folder: Path) -> dict[int, Path]:
    """Returns the complete checkpoints in a folder by their steps: those that have an index."""
    finished = {}
    for path in step_folders(folder):
        step = step_of(path)
        if step is not None and (path / METADATA).is_file():
            finished[step] = path
    return finished


def is_unfinished(folder: Path) -> bool:
    """Returns whether a folder is what a run left when its save or its removal was interrupted.

    Such a folder has no index `.metadata`. It has the file `.incomplete`, which a run puts there
    while it saves or removes a checkpoint; or it is empty but for the file KEEP.

    Args:
        folder: A folder that is named step-N.
    """
    if folder.is_symlink() or not folder.is_dir() or (folder / METADATA).is_file():
        return False
    # KEEP, which marks a checkpoint that is never removed, may be there before the save begins.
    names = {path.name for path in folder.iterdir()}
    return INCOMPLETE in names or names <= {KEEP}


def half_copies(folder: Path) -> list[Path]:
    """Returns the checkpoints that somebody seems to have copied only in part.

    Such a folder step-N has an interdomain.json or a rank's file (*.distcp), but no index
    `.metadata`. A save or a removal that was interrupted leaves such folders, too: these have the
    file `.incomplete`, and are left out. A link step-N that leads nowhere counts as half a copy:
    perhaps a disk is not mounted.

    Args:
        folder: The folder of a run's checkpoints.
    """
    copies = []
    for path in step_folders(folder):
        # Leave out complete checkpoints, and what a run left that was interrupted.
        if (path / METADATA).is_file() or is_unfinished(path):
            continue
        leads_nowhere = path.is_symlink() and not path.exists()
        if leads_nowhere or (path / RECORD_FILE).exists() or any(path.glob("*.distcp")):
            copies.append(path)
    return copies


def milestones(folder: Path) -> dict[int, Path]:
    """Returns the milestones by step: the complete checkpoints that are never removed.

    They have an empty file KEEP: `touch step-400/KEEP` makes a milestone of step 400.

    Args:
        folder: The folder of a run's checkpoints.
    """
    return {step: path for step, path in finished_steps(folder).items() if (path / KEEP).exists()}


def latest_checkpoint(folder: Path | str) -> Path:
    """Returns `folder` itself if it is a checkpoint, else the newest complete one in it.

    Args:
        folder: A checkpoint, a folder of checkpoints, or a run's folder. A folder that is named
            step-N is returned even if it is not complete: reading it then says what is missing.

    Raises:
        FileNotFoundError: There is no such folder, or no complete checkpoint in it.
        ValueError: The folder's folders.json, which says where a run's checkpoints are, is damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"There is no folder {folder}; give a checkpoint (step-N) or the folder of a run."
        )
    if (folder / METADATA).is_file() or step_of(folder) is not None:
        return folder
    # A folder of checkpoints has them itself. A run has them in the folder that its folders.json
    # names, by default `checkpoint`.
    steps = finished_steps(folder) | finished_steps(checkpoints_of(folder))
    if not steps:
        raise FileNotFoundError(
            f"{folder} holds no whole checkpoint (a folder step-N with {METADATA} in it)."
        )
    return steps[max(steps)]


def write_record(folder: Path, record: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Writes interdomain.json and the tokenizer into a folder, which is made if it is not there.

    Args:
        folder: The checkpoint. Under TorchTitan's own trainer it is the run's folder, which has one
            record for all its checkpoints.
        record: The contents of interdomain.json.
        tokenizer: The model's tokenizer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.write(folder)
    write_atomically(folder / RECORD_FILE, (json.dumps(record, indent=2) + "\n").encode())


def record_folder(checkpoint: Path) -> Path:
    """Returns the folder of a checkpoint's interdomain.json and tokenizer.

    This is the checkpoint itself, or the run's folder: a run of TorchTitan's own trainer has them
    once for all its checkpoints, which may be several levels down. If neither has an
    interdomain.json, this is the checkpoint.

    Args:
        checkpoint: The checkpoint, a folder that is named step-N.

    Raises:
        ValueError: The folders.json of a run's folder is damaged.
    """
    if (checkpoint / RECORD_FILE).is_file():
        return checkpoint
    checkpoints = checkpoint.absolute().parent
    for run in (checkpoints, *checkpoints.parents):
        if not (run / RECORD_FILE).is_file():
            continue
        # By default the run's folder is the one above the folder of checkpoints. Else the run's
        # folders.json says which folder has its checkpoints.
        if run == checkpoints.parent or checkpoints_of(run) == checkpoints:
            return run
    return checkpoint


def read_run_record(checkpoint: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """Reads interdomain.json of a checkpoint.

    Args:
        checkpoint: The checkpoint, a folder that is named step-N.

    Returns:
        The model's configuration, and all of interdomain.json.

    Raises:
        FileNotFoundError: There is no interdomain.json.
        ValueError: It or the run's folders.json is damaged, or it is of another version.
    """
    path = record_folder(checkpoint) / RECORD_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{checkpoint} has no {RECORD_FILE}, which says what model it is. Copy the whole folder."
        )
    try:
        record = json.loads(path.read_text())
        if path.parent != checkpoint:
            # A record for all checkpoints of the run. It does not say at which step this one is.
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
