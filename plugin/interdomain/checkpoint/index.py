"""The index and the tensors of torch.distributed.checkpoint folders, read without a process group and without trusting them.

PyTorch's index is an object for each piece of each tensor: for 1.3B on 1,024 ranks 967,000, which take 3 GB and half a minute
to pass from one process to another. Here it becomes arrays: quick to check and to hand on, and each rank takes from it what its
own tensors need.
"""

import io
import itertools
import math
import pickle
import sys
import warnings
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import EnumType
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from .step_folder import METADATA

# torch.distributed.checkpoint pickles its index. These classes describe tensors and files; none of them runs anything.
_ALLOWED = {
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        *(
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
        ),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    # The plans of the ranks, which Megatron-Core keeps beside them.
    "torch.distributed.checkpoint.planner": {
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
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
    known = (
        getattr(sys.modules.get(module), name, None)
        for module, names in _ALLOWED.items()
        for name in names
    )
    classes = [x for x in known if isinstance(x, type)]
    before = [
        (x, dict(vars(x)))
        for x in [*classes, *(m for x in classes if isinstance(x, EnumType) for m in x)]
    ]
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
            raise pickle.UnpicklingError(
                f"it alters {altered[0]}, which has no place in the index of a checkpoint"
            )


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


class Index(NamedTuple):
    """The index of a checkpoint.

    entries: descriptions of all tensors and objects by name, without their pieces.
    files: names of the shards, sorted.
    pieces: int64, [pieces, 4 + 2 D]: number of the entry, number of the file, first byte, length, then the D first elements and
        the D sizes of the piece in its tensor (0 and 1 where the tensor has fewer dimensions). In the order of the bytes.
    """

    entries: dict[str, Any]
    files: list[str]
    pieces: np.ndarray


def read_index(checkpoint: Path) -> Index:
    """The index of a checkpoint, which is not trusted. Raises: FileNotFoundError, ValueError."""
    path = checkpoint / METADATA
    if not path.is_file():
        raise FileNotFoundError(
            f"{checkpoint} is not a complete checkpoint (no {METADATA}). Take another step."
        )
    data = path.read_bytes()
    try:
        with _classes_as_they_are():
            metadata = _IndexUnpickler(io.BytesIO(data)).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
            raise TypeError(f"it holds {type(metadata).__name__} and lists no tensors")
        places = metadata.storage_data.values()
        beside = all(Path(name).name == name for name in {place.relative_path for place in places})
        if not beside or any(place.offset < 0 or place.length < 0 for place in places):
            raise ValueError("it names a place that is in no shard beside it")
        return as_arrays(metadata)
    except Exception as e:  # damaged bytes can fail in any constructor that the index calls, and values may be of any type
        raise ValueError(
            f"{path} is damaged, or of a newer PyTorch than {torch.__version__} ({e}). Take another step."
        ) from e


def as_arrays(metadata: Metadata) -> Index:
    """PyTorch's form of an index as arrays. Raises: ValueError if it does not hold all of a tensor."""
    entries = metadata.state_dict_metadata
    places = metadata.storage_data
    sizes = {}
    for name, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata):
            for chunk in entry.chunks:
                sizes[name, chunk.offsets] = chunk.sizes
        else:
            sizes[name, None] = ()
    if len(sizes) != len(places):
        raise ValueError(f"it has {len(sizes)} pieces and {len(places)} places of them")

    files = sorted({place.relative_path for place in places.values()})
    entry_numbers = {name: i for i, name in enumerate(entries)}
    file_numbers = {name: i for i, name in enumerate(files)}
    pieces = []
    for key, place in places.items():
        pieces.append(
            (entry_numbers[key.fqn], file_numbers[place.relative_path], place.offset, place.length)
        )
    D = max((len(size) for size in sizes.values()), default=0)
    begin = np.zeros((len(pieces), D), np.int64)
    size = np.ones((len(pieces), D), np.int64)
    dims = np.fromiter((len(key.offset or ()) for key in places), np.int64, len(pieces))
    used = np.arange(D) < dims[:, None]
    begin[used] = list(itertools.chain.from_iterable(key.offset or () for key in places))
    size[used] = list(itertools.chain.from_iterable(sizes[key.fqn, key.offset] for key in places))
    rows = np.concatenate([np.array(pieces, np.int64).reshape(-1, 4), begin, size], axis=1)
    rows = rows[np.lexsort((rows[:, 2], rows[:, 1]))]

    # A load leaves what no shard holds as it finds it: uninitialised memory.
    elements = np.zeros(len(entries), np.int64)
    np.add.at(elements, rows[:, 0], rows[:, 4 + D :].prod(axis=1))
    without_pieces = {}
    for (name, entry), stored in zip(entries.items(), elements.tolist(), strict=True):
        if isinstance(entry, TensorStorageMetadata):
            if stored != math.prod(entry.size) or not isinstance(
                entry.properties.dtype, torch.dtype
            ):
                raise ValueError(f"no shards hold all of {name}")
            entry = replace(entry, chunks=[])
        without_pieces[name] = entry
    return Index(without_pieces, files, rows)


def check_lengths(folder: Path, index: Index) -> None:
    """Raises ValueError unless every shard that the index names is there, as long as the index says."""
    ends = np.zeros(len(index.files), np.int64)
    np.maximum.at(ends, index.pieces[:, 1], index.pieces[:, 2] + index.pieces[:, 3])
    for name, end in zip(index.files, ends.tolist(), strict=True):
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size is None or size < end:
            fault = (
                "is missing" if size is None else f"has {size:,} bytes where {end:,} are expected"
            )
            raise ValueError(f"{folder} is damaged: its shard {name} {fault}.")


def altered_entry(
    folder: Path, index: Index, part: int = 0, parts: int = 1, names: Collection[str] | None = None
) -> str | None:
    """The fault of the first entry whose bytes are not those that were saved; None if there is none.

    torch.save writes a zip archive with a CRC-32 per record, and torch.load does not look at it. Reads the `part`-th of `parts`
    runs of neighbouring entries: ranks share the work, and each opens few files. names: of these entries alone.
    """
    fqns, pieces = list(index.entries), index.pieces
    if names is not None:
        pieces = pieces[
            np.isin(pieces[:, 0], [number for number, name in enumerate(fqns) if name in names])
        ]
    mine = pieces[len(pieces) * part // parts : len(pieces) * (part + 1) // parts, :4].tolist()
    for number, rows in itertools.groupby(mine, key=lambda row: row[1]):
        file = folder / index.files[number]
        with open(file, "rb") as f:
            for entry, _, first, length in rows:
                f.seek(first)
                data = f.read(length)
                try:
                    with zipfile.ZipFile(io.BytesIO(data)) as archive:
                        packed = any(
                            info.compress_type for info in archive.infolist()
                        )  # it might grow without end
                        record = "a compressed record" if packed else archive.testzip()
                except (
                    zipfile.BadZipFile,
                    EOFError,
                    NotImplementedError,
                ) as e:  # headers are bytes too
                    record = str(e)
                if record is not None:
                    return f"{file} is damaged: the bytes of {fqns[entry]} do not match their checksum ({record})"
    return None


def check_bytes(checkpoint: Path, names: Collection[str]) -> None:
    """Raises ValueError unless the tensors of these names are stored as they were saved: torch.load does not look."""
    index = read_index(checkpoint)
    check_lengths(checkpoint, index)
    if altered := altered_entry(checkpoint, index, names=names):
        raise ValueError(f"{altered}. Take another step.")


def overlapping(index: Index, tensors: Mapping[str, Any]) -> Metadata:
    """PyTorch's form of the index, with only the pieces that these tensors overlap; of a DTensor, what is on this rank."""
    pieces = index.pieces
    D = pieces.shape[1] // 2 - 2
    # The box of each entry that this rank needs, from `low` to `high`. An empty box: this rank holds no part of the tensor.
    low = np.zeros((len(index.entries), D), np.int64)
    high = np.zeros((len(index.entries), D), np.int64)
    for number, (name, entry) in enumerate(index.entries.items()):
        if name not in tensors:
            continue
        high[number] = 1
        if isinstance(entry, TensorStorageMetadata):
            for chunk in _create_chunk_list(tensors[name]):
                dims = len(chunk.sizes)
                low[number, :dims] = chunk.offsets
                high[number, :dims] = np.add(chunk.offsets, chunk.sizes)
    number = pieces[:, 0]
    begin = pieces[:, 4 : 4 + D]
    end = begin + pieces[:, 4 + D :]
    mine = ((begin < high[number]) & (end > low[number])).all(axis=1)

    entries = {}
    for name, entry in index.entries.items():
        entries[name] = (
            replace(entry, chunks=[]) if isinstance(entry, TensorStorageMetadata) else entry
        )
    names = list(index.entries)
    places = {}
    for n, file, first, length, *box in pieces[mine].tolist():
        entry, offset = entries[names[n]], None
        if isinstance(entry, TensorStorageMetadata):
            dims = len(entry.size)
            offset = torch.Size(box[:dims])
            entry.chunks.append(ChunkStorageMetadata(offset, torch.Size(box[D : D + dims])))
        places[MetadataIndex(names[n], offset)] = _StorageInfo(index.files[file], first, length)
    return Metadata(entries, storage_data=places, storage_meta=StorageMeta())


def load_part(checkpoint: Path, index: Index, states: dict[str, Any]) -> None:
    """Load tensors and objects; of a DTensor, what is on this rank.

    Each rank plans its own load. PyTorch collects the plans of all ranks on rank 0 instead, and the ranks must agree.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled"
        )  # one process reads
        load(
            states, storage_reader=_Reader(checkpoint), planner=_PartialPlanner(index), no_dist=True
        )


class _Reader(FileSystemReader):
    """PyTorch's reader with an empty index, which `_PartialPlanner` fills."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({}, storage_data={})


class _PartialPlanner(DefaultLoadPlanner):
    """PyTorch's plan of a load, with the part of the index that this rank's tensors overlap."""

    def __init__(self, index: Index) -> None:
        super().__init__()
        self.index = index

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        # Before the reader looks at the same object.
        vars(metadata).update(vars(overlapping(self.index, self.state_dict)))

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(
            value, weights_only=True
        )  # raises for all but tensors, numbers, texts and their containers
        value.seek(0)
        super().load_bytes(read_item, value)


def tensor_index(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    """Name -> description of every tensor in a checkpoint, without reading any. Raises: FileNotFoundError, ValueError."""
    entries = read_index(checkpoint).entries
    return {
        name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
    }


def read_tensors(checkpoint: Path, names: Collection[str]) -> dict[str, Tensor]:
    """Tensors by name, from however many ranks wrote them; nothing else in the checkpoint is touched. Raises: ValueError."""
    index = read_index(checkpoint)
    tensors = {}
    for name in names:
        entry = index.entries[name]
        tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    try:
        with _system_errors():
            load_part(checkpoint, index, tensors)
    except (OSError, RuntimeError) as e:
        raise ValueError(f"{checkpoint} could not be read ({e}). Take another step.") from e
    return tensors


def write_tensors(checkpoint: Path, tensors: dict[str, Tensor]) -> None:
    """Write a checkpoint of these tensors from one process; the index comes last. Raises: OSError."""
    try:
        with _system_errors():
            save(tensors, checkpoint_id=str(checkpoint), no_dist=True)
    except OSError as e:
        raise OSError(
            f"writing {checkpoint} failed ({e}). Check the free space and the permissions."
        ) from e


@contextmanager
def _system_errors() -> Iterator[None]:
    """Raise the system's error (OSError) in place of the CheckpointException of PyTorch that hides it."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled"
        )  # one process reads
        try:
            yield
        except CheckpointException as e:  # a BaseException: it would pass every handler of errors
            first = e.failures[0][0]
            error: BaseException | None = first
            while error is not None and not isinstance(error, OSError):
                error = error.__cause__ or error.__context__
            raise OSError(str(error or repr(first))) from e
