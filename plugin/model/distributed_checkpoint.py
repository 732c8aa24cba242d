"""Reading torch.distributed.checkpoint folders without a process group, without TorchTitan, and without trusting them.

A checkpoint of this project is `step-N/` with shards, an index `.metadata` (written last: without it the folder is no
checkpoint), and beside them `interdomain.json` (SIDECAR), which says what model it is, and the tokenizer.
"""

import io
import itertools
import json
import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from enum import EnumType
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from .config import ModelConfig

SIDECAR = "interdomain.json"
VALIDATION = "validation.json"  # {"step", "loss", "perplexity"}, where the run validated after the step
TOKENIZER = "tokenizer.model"
METADATA = ".metadata"
SIDECAR_VERSION = 1
SIDECAR_KINDS = {"run": dict, "versions": dict, "step": int, "tokens": int, "seq_len": int, "planned_steps": int}
SIDECAR_OF_RUN = ("seq_len", "planned_steps")  # which not every run has
SIDECAR_FACTS = ("size", "condition", "step", "tokens", "run", "versions")  # what a model folder keeps of the record

# torch.distributed.checkpoint pickles its index. These classes describe tensors and files; none of them runs anything.
_ALLOWED = {
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "Path"},
}


def _member(enum: object, name: str) -> object:
    """What `getattr` may do in an index: Python 3.11.2 (Debian 12's) pickles a member of an enum as getattr(enum, name)."""
    if not isinstance(enum, EnumType):
        raise pickle.UnpicklingError("builtins.getattr has no place in the index of a checkpoint")
    return enum[name]


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module == "torch":
            found = getattr(torch, name, None)
            if isinstance(found, torch.dtype) or found is torch.Size:
                return found
        elif name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in the index of a checkpoint")


class WrittenByNewerPyTorch(ValueError):
    """An index that this PyTorch cannot read because a newer one wrote it. Nothing is wrong with the checkpoint."""


def parse_index(data: bytes, checkpoint: Path) -> Metadata:
    """The index of a checkpoint from the bytes of its file, which are not trusted.

    Raises: ValueError, WrittenByNewerPyTorch.
    """
    try:
        metadata = _IndexUnpickler(io.BytesIO(data)).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds {type(metadata).__name__}")
        if not isinstance(metadata.state_dict_metadata, dict):
            raise TypeError("it lists no tensors")
        for place in metadata.storage_data.values():
            if Path(place.relative_path).name != place.relative_path or min(place.offset, place.length) < 0:
                raise ValueError("it names a place that is in no shard beside it")
    except Exception as e:  # damaged bytes can fail in any constructor that the index calls, and in any way
        _refuse_newer(checkpoint)
        path = checkpoint / METADATA
        raise ValueError(f"{path} is damaged or not the index of a checkpoint ({e}). Take another step.") from e
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    return metadata


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
                raise FileNotFoundError(
                    f"{self.path} is not a whole checkpoint: it has no {METADATA}, which is written last. Take another step."
                )
            self.index = parse_index(path.read_bytes(), Path(self.path))
        if self.index.storage_meta is not None:
            self.index.storage_meta.load_id = self.load_id
        return self.index


def _refuse_newer(folder: Path) -> None:
    """Raises: WrittenByNewerPyTorch if the record beside the index says so."""
    try:
        wrote = json.loads((folder / SIDECAR).read_text())["versions"]["torch"]
        there, here = (tuple(map(int, re.findall(r"\d+", v)[:3])) for v in (wrote, torch.__version__))
    except (OSError, ValueError, KeyError, TypeError):  # no record, or damaged as well
        return
    if there > here:
        raise WrittenByNewerPyTorch(
            f"{folder} was written by PyTorch {wrote}, and PyTorch {torch.__version__}, which runs here, cannot read it. It "
            f"is not damaged, and nothing of it was changed. Use PyTorch {wrote} or newer; or move this folder away, to go "
            "on without it."
        )


def step_of(folder: Path | str) -> int | None:
    """The step whose checkpoint a folder is, by its name; None for any other."""
    match = re.fullmatch(r"step-(\d+)", Path(folder).name)
    return int(match.group(1)) if match else None


def finished_steps(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder whose saves came to the end, by step: the index is written last."""
    found = folder.iterdir() if folder.is_dir() else ()
    return {step: path for path in found if (step := step_of(path)) is not None and (path / METADATA).is_file()}


def latest_checkpoint(folder: Path | str) -> Path:
    """`folder` itself if it is a checkpoint, else the newest complete `step-N` in it or in its `checkpoint/` subfolder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}; give a checkpoint (step-N) or the folder of a run.")
    if (folder / METADATA).is_file() or step_of(folder) is not None:
        return folder
    steps = finished_steps(folder) | finished_steps(folder / "checkpoint")
    if not steps:
        raise FileNotFoundError(f"{folder} holds no whole checkpoint (a folder step-N with {METADATA} in it).")
    return steps[max(steps)]


def read_sidecar(checkpoint: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """(model configuration, the record that it stands in) of a checkpoint. Raises: FileNotFoundError, ValueError."""
    path = checkpoint / SIDECAR
    if not path.is_file():
        raise FileNotFoundError(
            f"{checkpoint} has no {SIDECAR}, which says what model it holds: it was not written by this project's plugin. "
            "Train with train_configs/*.toml, or copy the whole step folder."
        )
    try:
        record = json.loads(path.read_text())
        version, model = record["format_version"], record["model"]
        missing = [name for name in (*SIDECAR_FACTS, "tokenizer") if name not in record]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        for name, kind in SIDECAR_KINDS.items():
            if name in (found := record["run"] if name in SIDECAR_OF_RUN else record) and type(found[name]) is not kind:
                raise ValueError(f"{name} is {found[name]!r}")
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{path} is damaged ({type(e).__name__}: {e}). Take another step.") from e
    if version != SIDECAR_VERSION:
        raise ValueError(
            f"{path} has format version {version!r}; this program reads {SIDECAR_VERSION}. Update one of the two."
        )
    return ModelConfig.from_dict(model), record


def tensor_index(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    """Name -> description of every tensor in a checkpoint, without reading any."""
    entries = SafeReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    for name, entry in tensors.items():
        try:
            described = isinstance(entry.properties.dtype, torch.dtype)
            covered = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            values = math.prod(entry.size)
        except Exception as e:  # likewise: what came out may be anything
            raise ValueError(f"{checkpoint / METADATA} is damaged: {name} ({e}). Take another step.") from e
        # `load` leaves what no shard holds as it finds it: uninitialised memory.
        if not described or covered != values:
            raise ValueError(
                f"{checkpoint / METADATA} is damaged: its shards hold {covered} of the {values} values of {name}. "
                "Take another step."
            )
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
        raise _unreadable(checkpoint, e) from e
    return tensors


@contextmanager
def _without_process_group() -> Iterator[None]:
    """For `load` and `save` in one process. Raises: OSError with the system's message, or the first line of PyTorch's."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is meant
        try:
            yield
        except CheckpointException as e:  # a BaseException: it would pass every handler of errors
            causes = []
            for error, _ in e.failures.values():
                link: BaseException | None = error
                while link is not None and not isinstance(link, OSError):
                    link = link.__cause__ or link.__context__
                causes.append(str(link or f"{type(error).__name__}: {error}".splitlines()[0]))
            raise OSError("; ".join(causes)) from e


def _unreadable(checkpoint: Path, cause: object) -> ValueError:
    return ValueError(
        f"{checkpoint} could not be read ({cause}): a shard is missing or damaged, or retention removed the step "
        "meanwhile (checkpoint.keep_latest_k). Take another step."
    )


def check_lengths(folder: Path, index: Metadata) -> None:
    """Raises ValueError unless every shard that the index names is there, as long as the index says."""
    ends: dict[str, int] = {}
    for place in index.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in sorted(ends.items()):
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size is None or size < end:
            found = "is missing" if size is None else f"has {size:,} bytes where {end:,} are expected"
            raise ValueError(f"{folder} is damaged: its shard {name} {found}.")


def altered_entry(
    folder: Path, index: Metadata, part: int = 0, parts: int = 1, names: Collection[str] | None = None
) -> str | None:
    """What is wrong with the first entry whose bytes are not those that were saved; None if there is none.

    torch.save writes a zip archive with a CRC-32 per record, and torch.load does not look at it. Reads the `part`-th of `parts`
    runs of neighbouring entries: ranks share the work, and each opens few files. names: of these entries alone.
    """
    places = [(entry, place) for entry, place in index.storage_data.items() if names is None or entry.fqn in names]
    places.sort(key=lambda item: (item[1].relative_path, item[1].offset))
    mine = places[len(places) * part // parts : len(places) * (part + 1) // parts]
    for name, entries in itertools.groupby(mine, key=lambda item: item[1].relative_path):
        with open(folder / name, "rb") as f:
            for entry, place in entries:
                f.seek(place.offset)
                data = f.read(place.length)
                try:
                    with zipfile.ZipFile(io.BytesIO(data)) as archive:
                        record = archive.testzip()
                except (zipfile.BadZipFile, EOFError, NotImplementedError) as e:  # headers are bytes too
                    record = str(e)
                if record is not None:
                    return (
                        f"{folder / name} is damaged: the bytes of {entry.fqn} do not match their checksum ({record})"
                    )
    return None


def check_bytes(checkpoint: Path, names: Collection[str]) -> None:
    """Raises ValueError unless the tensors of these names are stored as they were saved: torch.load does not look."""
    index = SafeReader(checkpoint).read_metadata()
    try:
        check_lengths(checkpoint, index)
        altered = altered_entry(checkpoint, index, names=names)
    except (OSError, ValueError) as e:
        raise _unreadable(checkpoint, e) from e
    if altered:
        raise _unreadable(checkpoint, altered)


def write_tensors(checkpoint: Path, tensors: dict[str, Tensor]) -> None:
    """A checkpoint of these tensors alone, as one process writes it; the index comes last. Raises OSError."""
    try:
        with _without_process_group():
            save(tensors, checkpoint_id=str(checkpoint), no_dist=True)
    except OSError as e:
        raise OSError(f"writing {checkpoint} failed ({e}). Check the free space and the permissions.") from e
