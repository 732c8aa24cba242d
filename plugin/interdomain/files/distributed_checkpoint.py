"""Reading torch.distributed.checkpoint folders without a process group, without TorchTitan, and without trusting them.

A checkpoint of this project is `step-N/` with shards, an index `.metadata` (written last: without it the folder is no
checkpoint), and beside them `interdomain.json` (SIDECAR), which says what model it is, and the tokenizer.
"""

import io
import json
import math
import pickle
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import EnumType
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

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
SIDECAR_FACTS = ("size", "condition", "step", "tokens", "run", "versions")  # what a model folder keeps of the record

# torch.distributed.checkpoint pickles its index. These classes describe tensors and files; none of them runs anything.
_ALLOWED = {
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    # The plans of the ranks, which Megatron-Core keeps beside them.
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "Path"},
}


def _member(enum: object, name: str) -> object:
    """Refuse `getattr` in an index, but for members of an enum: Python 3.11.2 (Debian 12's) pickles a member of an enum
    as getattr(enum, name)."""
    if not isinstance(enum, EnumType):
        raise pickle.UnpicklingError("builtins.getattr has no place in the index of a checkpoint")
    return enum[name]


@contextmanager
def _classes_as_they_are() -> Iterator[None]:
    """Context in which an index may set nothing on the classes and members that it names: BUILD takes whatever is there.

    Raises: pickle.UnpicklingError, and all is as before.
    """
    known = (getattr(sys.modules.get(module), name, None) for module, names in _ALLOWED.items() for name in names)
    classes = [x for x in known if isinstance(x, type)]
    before = [(x, dict(vars(x))) for x in [*classes, *(m for x in classes if isinstance(x, EnumType) for m in x)]]
    bases, altered = [x.__bases__ for x in classes], []
    try:
        yield
    finally:
        for x, was in zip(classes, bases, strict=True):
            if x.__bases__ != was:
                x.__bases__ = was
                altered.append(x)
        for x, was in before:
            for name in vars(x).keys() | was.keys():
                if name not in was:
                    delattr(x, name)
                elif vars(x).get(name) is not was[name]:
                    setattr(x, name, was[name])
                else:
                    continue
                altered.append(x)
        if altered:
            raise pickle.UnpicklingError(f"it alters {altered[0]}, which has no place in the index of a checkpoint")


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module == "torch":
            value = getattr(torch, name, None)
            if isinstance(value, torch.dtype) or value is torch.Size:
                return value
        elif name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in the index of a checkpoint")


def parse_index(data: bytes, checkpoint: Path) -> Metadata:
    """The index of a checkpoint from the bytes of its file, which are not trusted. Raises: ValueError."""
    try:
        with _classes_as_they_are():
            metadata = _IndexUnpickler(io.BytesIO(data)).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
            raise TypeError(f"it holds {type(metadata).__name__} and lists no tensors")
        places = metadata.storage_data.values()
        beside = all(Path(name).name == name for name in {place.relative_path for place in places})
        if not beside or any(place.offset < 0 or place.length < 0 for place in places):
            raise ValueError("it names a place that is in no shard beside it")
    except Exception as e:  # damaged bytes can fail in any constructor that the index calls, and in any way
        raise damaged(checkpoint, e) from e
    return metadata


def damaged(checkpoint: Path, e: Exception) -> ValueError:
    why = f"{checkpoint / METADATA} is damaged, or of a newer PyTorch than {torch.__version__} ({e})."
    return ValueError(f"{why} Take another step.")


class SafeReader(FileSystemReader):
    """FileSystemReader whose index may hold descriptions of tensors only. Tensors themselves load with weights_only=True.

    index: parsed already; the file is not read then.
    """

    def __init__(self, checkpoint: Path, index: Metadata | None = None) -> None:
        super().__init__(checkpoint)
        self.index = index

    def read_metadata(self, *args, **kwargs) -> Metadata:
        if self.index is None:
            path = Path(self.path) / METADATA
            if not path.is_file():
                raise FileNotFoundError(f"{self.path} is not a complete checkpoint (no {METADATA}). Take another step.")
            self.index = parse_index(path.read_bytes(), Path(self.path))
        return self.index


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
    steps = {step_of(path): path for path in step_folders(folder) if (path / METADATA).is_file()}
    return {step: path for step, path in steps.items() if step is not None}


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
        raise FileNotFoundError(f"There is no folder {folder}; give a checkpoint (step-N) or the folder of a run.")
    if (folder / METADATA).is_file() or step_of(folder) is not None:
        return folder
    steps = finished_steps(folder) | finished_steps(checkpoints_of(folder))
    if not steps:
        raise FileNotFoundError(f"{folder} holds no whole checkpoint (a folder step-N with {METADATA} in it).")
    return steps[max(steps)]


def check_types(record: dict[str, Any], **kinds: Any) -> None:
    """Check that the values which a record has under these names are of these types. Raises: ValueError."""
    for name, kind in kinds.items():
        if name in record and not isinstance(record[name], kind):
            raise ValueError(f"{name} is {record[name]!r} and must be {getattr(kind, '__name__', kind)}")


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
        if (run / SIDECAR).is_file() and (run == checkpoints.parent or checkpoints_of(run) == checkpoints):
            return run
    return checkpoint


def read_sidecar(checkpoint: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """(model configuration, the record that it stands in) of a checkpoint. Raises: FileNotFoundError, ValueError."""
    path = record_folder(checkpoint) / SIDECAR
    if not path.is_file():
        raise FileNotFoundError(f"{checkpoint} has no {SIDECAR}, which says what model it is. Copy the whole folder.")
    try:
        record = json.loads(path.read_text())
        if path.parent != checkpoint:  # of the run, not of a step
            step = step_of(checkpoint) or 0
            record |= {"step": step, "tokens": step * record["run"]["tokens_per_step"]}
        missing = [name for name in (*SIDECAR_FACTS, "tokenizer") if name not in record]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        if record["format_version"] != SIDECAR_VERSION:
            raise ValueError(f"format version {record['format_version']!r}; this program reads {SIDECAR_VERSION}")
        check_types(record, run=dict, versions=dict, tokenizer=dict, size=str, condition=str, step=int, tokens=int)
        return ModelConfig.from_dict(record["model"]), record
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise ValueError(f"{path} is damaged or of another version ({type(e).__name__}: {e}).") from e


def tensor_index(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    """Name -> description of every tensor in a checkpoint, without reading any."""
    entries = SafeReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    for name, entry in tensors.items():
        try:
            # `load` leaves what no shard holds as it finds it: uninitialised memory.
            complete = sum(math.prod(chunk.sizes) for chunk in entry.chunks) == math.prod(entry.size)
            complete = complete and isinstance(entry.properties.dtype, torch.dtype)
        except Exception:  # what came out of the index may be anything
            complete = False
        if not complete:
            raise ValueError(f"{checkpoint / METADATA} is damaged: no shards hold all of {name}. Take another step.")
    return tensors


def read_tensors(checkpoint: Path, names: list[str], index: dict[str, TensorStorageMetadata]) -> dict[str, Tensor]:
    """Tensors by name, from however many ranks wrote them; nothing else in the checkpoint is touched. Raises: ValueError."""
    reader = SafeReader(checkpoint)
    reader.read_metadata()  # for its own error: `load` would put its own around it
    tensors = {name: torch.empty(index[name].size, dtype=index[name].properties.dtype) for name in names}
    try:
        with _without_process_group():
            load(tensors, storage_reader=reader, no_dist=True)
    except (OSError, RuntimeError) as e:
        raise ValueError(f"{checkpoint} could not be read ({e}). Take another step.") from e
    return tensors


@contextmanager
def _without_process_group() -> Iterator[None]:
    """Context for `load` and `save` in one process. Raises: OSError."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is meant
        try:
            yield
        except CheckpointException as e:  # a BaseException: it would pass every handler of errors
            error: BaseException | None = e.failures[0][0]
            while error is not None and not isinstance(error, OSError):  # PyTorch's own stand around the system's
                error = error.__cause__ or error.__context__
            raise OSError(str(error or repr(e.failures[0][0]))) from e


def write_tensors(checkpoint: Path, tensors: dict[str, Tensor]) -> None:
    """A checkpoint of these tensors alone, as one process writes it; the index comes last. Raises OSError."""
    try:
        with _without_process_group():
            save(tensors, checkpoint_id=str(checkpoint), no_dist=True)
    except OSError as e:
        raise OSError(f"writing {checkpoint} failed ({e}). Check the free space and the permissions.") from e
