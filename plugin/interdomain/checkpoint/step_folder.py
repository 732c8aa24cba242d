"""Folders of checkpoints: their names, which of them are complete, and the records that say what model they hold.

A checkpoint of this project is `step-N/` with shards, an index `.metadata` (written last: without it the folder is no
checkpoint), and beside them `interdomain.json` (SIDECAR), which says what model it is, and the tokenizer. index.py
reads the index and the tensors.
"""

import json
import re
from pathlib import Path
from typing import Any

from interdomain.folders import write_whole
from interdomain.model.config import ModelConfig

from .run_folder import checkpoints_of

SIDECAR = "interdomain.json"
DOCUMENTS = "validation-documents.json"  # {"nats": [...], "labels": [...]}, of each document of a split that has few
VALIDATION = "validation.json"  # {"step", "loss", "perplexity"[, "accuracy"]}, where the run validated after the step
KEEP = "KEEP"  # an empty file: the checkpoint is a milestone, which is never removed
TOKENIZER = "tokenizer.model"
METADATA = ".metadata"
# An empty or old file in a step folder that a run is saving or removing. A folder that has neither this file nor the index was
# put there by somebody else, such as half a copy: no run removes it or writes into it.
INCOMPLETE = ".incomplete"
SIDECAR_VERSION = 1
SIDECAR_FACTS = (
    "size",
    "condition",
    "step",
    "tokens",
    "run",
    "versions",
)  # what a model folder keeps of the record


def step_of(folder: Path | str) -> int | None:
    """The step whose checkpoint a folder is, by its name; None for any other."""
    match = re.fullmatch(r"step-(\d+)", Path(folder).name)
    return int(match.group(1)) if match else None


def step_folders(folder: Path) -> list[Path]:
    """All entries of a folder with the name of a checkpoint, whole or not, sorted by step."""
    if not folder.is_dir():
        return []
    steps = [(step, path) for path in folder.iterdir() if (step := step_of(path)) is not None]
    return [path for _, path in sorted(steps)]


def finished_steps(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder whose saves came to the end, by step: the index is written last."""
    finished = {}
    for path in step_folders(folder):
        step = step_of(path)
        if step is not None and (path / METADATA).is_file():
            finished[step] = path
    return finished


def is_unfinished(folder: Path) -> bool:
    """True for what a run left of a checkpoint, because its save or its removal was interrupted; also if nothing is in it."""
    if folder.is_symlink() or not folder.is_dir() or (folder / METADATA).is_file():
        return False
    names = {path.name for path in folder.iterdir()}
    return INCOMPLETE in names or names <= {KEEP}


def half_copies(folder: Path) -> list[Path]:
    """The step folders in a folder that hold shards or a record, but no index, and that no run is known to have left so. A
    link that leads nowhere counts, too."""
    found = []
    for path in step_folders(folder):
        if (path / METADATA).is_file() or is_unfinished(path):
            continue
        leads_nowhere = path.is_symlink() and not path.exists()
        if leads_nowhere or (path / SIDECAR).exists() or any(path.glob("*.distcp")):
            found.append(path)
    return found


def milestones(folder: Path) -> dict[int, Path]:
    """The finished checkpoints in a folder that are never removed, by step. `touch step-400/KEEP` makes one."""
    return {step: path for step, path in finished_steps(folder).items() if (path / KEEP).exists()}


def latest_checkpoint(folder: Path | str) -> Path:
    """`folder` itself if it is a checkpoint, else the newest complete `step-N` in it or in the run whose folder it is."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"There is no folder {folder}; give a checkpoint (step-N) or the folder of a run."
        )
    if (folder / METADATA).is_file() or step_of(folder) is not None:
        return folder
    steps = finished_steps(folder) | finished_steps(checkpoints_of(folder))
    if not steps:
        raise FileNotFoundError(
            f"{folder} holds no whole checkpoint (a folder step-N with {METADATA} in it)."
        )
    return steps[max(steps)]


def check_types(record: dict[str, Any], **kinds: Any) -> None:
    """Check that the values which a record has under these names are of these types. Raises: ValueError."""
    for name, kind in kinds.items():
        if name in record and not isinstance(record[name], kind):
            raise ValueError(
                f"{name} is {record[name]!r} and must be {getattr(kind, '__name__', kind)}"
            )


def write_record(folder: Path, record: dict[str, Any], tokenizer: Any) -> None:
    """Write the record and the tokenizer into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.write(folder)
    write_whole(folder / SIDECAR, (json.dumps(record, indent=2) + "\n").encode())


def record_folder(checkpoint: Path) -> Path:
    """Folder of a checkpoint's record and tokenizer: the checkpoint itself, or the run's folder if TorchTitan's own trainer
    wrote RUN/checkpoint/step-N. checkpoint.folder may be a path of several names."""
    if (checkpoint / SIDECAR).is_file():
        return checkpoint
    checkpoints = checkpoint.absolute().parent
    for run in (checkpoints, *checkpoints.parents):
        if (run / SIDECAR).is_file() and (
            run == checkpoints.parent or checkpoints_of(run) == checkpoints
        ):
            return run
    return checkpoint


def read_sidecar(checkpoint: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """(model configuration, the record that it stands in) of a checkpoint. Raises: FileNotFoundError, ValueError."""
    path = record_folder(checkpoint) / SIDECAR
    if not path.is_file():
        raise FileNotFoundError(
            f"{checkpoint} has no {SIDECAR}, which says what model it is. Copy the whole folder."
        )
    try:
        record = json.loads(path.read_text())
        if path.parent != checkpoint:  # of the run, not of a step
            step = step_of(checkpoint) or 0
            record |= {"step": step, "tokens": step * record["run"]["tokens_per_step"]}
        missing = [name for name in (*SIDECAR_FACTS, "tokenizer") if name not in record]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        if record["format_version"] != SIDECAR_VERSION:
            raise ValueError(
                f"format version {record['format_version']!r}; this program reads {SIDECAR_VERSION}"
            )
        check_types(
            record,
            run=dict,
            versions=dict,
            tokenizer=dict,
            size=str,
            condition=str,
            step=int,
            tokens=int,
        )
        return ModelConfig.from_dict(record["model"]), record
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise ValueError(
            f"{path} is damaged or of another version ({type(e).__name__}: {e})."
        ) from e
