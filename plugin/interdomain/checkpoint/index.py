"""Reads the index and the tensors of torch.distributed.checkpoint folders, without trusting them.

A checkpoint is a folder of files, each with pieces of tensors that one rank wrote, and an index of
the pieces. No process group is needed to read it. PyTorch's index has a Python object for each
piece: 967,000 for 1.3B on 1,024 ranks, which take 3 GB and half a minute to send from one rank to
another. Here the index becomes arrays, and each rank turns back only the pieces that its own
tensors need.
"""

import io
import itertools
import math
import pickle
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from .step_folder import METADATA

# Said at each load and save of one process, such as all of these.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

# What a pickled index may refer to: these types themselves, PyTorch's dtypes, and descriptions in
# place of everything in these modules.
_ALLOWED_TYPES = {("torch", "Size"): torch.Size, ("collections", "OrderedDict"): OrderedDict}
_DESCRIBED_MODULES = {
    "torch.serialization",
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    # Megatron-Core keeps the ranks' plans in the index.
    "torch.distributed.checkpoint.planner",
    "pathlib",
    "pathlib._local",
}


class Index(NamedTuple):
    """The index of a checkpoint.

    Attributes:
        entries: The description of each tensor and object by its name, without the pieces.
        files: The names of the files that hold the pieces, sorted.
        pieces: A structured array of int64, with one row per piece, in the order of the bytes:
            `entry`: number of the entry in `entries`; `file`: number of the file in `files`;
            `first_byte`: position of the piece in the file; `length`: number of bytes;
            `begin` [D] and `size` [D]: first element and extent of the piece in its tensor. D is the
            largest number of dimensions; for a tensor with fewer, `begin` ends with zeros and `size`
            with ones.
    """

    entries: dict[str, Any]
    files: list[str]
    pieces: np.ndarray


class _Description:
    """An object of a pickled index: attributes only, whichever class the index names."""

    def __new__(cls, *args: Any) -> "_Description":
        # Unpickling calls this class in place of the one that the index names. The arguments are
        # ignored: they belong to paths and to members of enums, which nobody needs.
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        # Unpickling calls this with the attributes of the object that was pickled.
        if isinstance(state, tuple):
            # TensorProperties pickles a tuple, whose first member is the dtype.
            self.dtype = state[0]
        else:
            self.__dict__.update(state)


class _IndexUnpickler(pickle.Unpickler):
    """Unpickles an index without importing, calling or changing anything that it names."""

    def find_class(self, module: str, name: str) -> Any:
        # The unpickler asks for each name in the index, and calls what this returns: a harmless
        # type, or a class of descriptions in place of PyTorch's. Any other name is an error.
        if (module, name) in _ALLOWED_TYPES:
            return _ALLOWED_TYPES[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        # Python 3.11.2 pickles a member of an enum as getattr(enum, name).
        if module in _DESCRIBED_MODULES or (module, name) == ("builtins", "getattr"):
            # A new class each time: an index that sets its attributes changes nothing else.
            return type(name, (_Description,), {})
        raise pickle.UnpicklingError(f"{module}.{name} has no place in the index of a checkpoint")


def read_index(checkpoint: Path) -> Index:
    """Reads the index of a checkpoint, which is not trusted: nothing that it names is imported.

    Args:
        checkpoint: The folder of the checkpoint.

    Raises:
        FileNotFoundError: The folder has no index: its save was interrupted, or is going on.
        ValueError: The index is damaged, or does not describe every tensor completely.
    """
    path = checkpoint / METADATA
    if not path.is_file():
        raise FileNotFoundError(
            f"{checkpoint} is not a complete checkpoint (no {METADATA}). Take another step."
        )
    data = path.read_bytes()
    try:
        return as_arrays(_IndexUnpickler(io.BytesIO(data)).load())
    except Exception as e:  # Damaged bytes fail anywhere, and values may be of any type.
        raise ValueError(
            f"{path} is damaged, or of a newer PyTorch than {torch.__version__} ({e}). "
            "Take another step."
        ) from e


def as_arrays(metadata: Any) -> Index:
    """Converts PyTorch's index of a checkpoint to arrays, and checks that it is complete.

    Args:
        metadata: The index as `read_index` unpickles it: an object with the attributes of PyTorch's
            class `Metadata`, whose values may be of any type if the file is damaged.

    Returns:
        The names of tensors and files, and an array with one row per piece of a tensor. `Index`
        describes its columns.

    Raises:
        ValueError: Pieces of a tensor or their places are missing, or a place is not in a file of
            the checkpoint's folder.
        AttributeError, KeyError, TypeError: The index is damaged in another way.
    """
    # The tensors and objects by name, and the place of each of their pieces in the files.
    described = metadata.state_dict_metadata
    places = metadata.storage_data

    # The size of each piece, by its entry and its offset. An object, such as the step of a
    # scheduler, is one piece without an offset.
    sizes = {}
    for name, entry in described.items():
        if hasattr(entry, "chunks"):
            for chunk in entry.chunks:
                sizes[name, chunk.offsets] = chunk.sizes
        else:
            sizes[name, None] = ()
    if len(sizes) != len(places):
        raise ValueError(f"it has {len(sizes)} pieces and {len(places)} places of them")
    files = sorted({place.relative_path for place in places.values()})
    if any(Path(file).name != file for file in files):
        raise ValueError("it names a place that is in no shard beside it")

    # One row per piece. D is the largest number of dimensions. For a tensor with fewer, `begin` is
    # filled up with zeros and `size` with ones, which leave the number of its elements as it is.
    entry_numbers = {name: number for number, name in enumerate(described)}
    file_numbers = {name: number for number, name in enumerate(files)}
    D = max(map(len, sizes.values()), default=0)
    rows = []
    for key, place in places.items():
        # A place's key has the entry's name (`fqn`), and for a tensor the offset of the piece.
        offset = getattr(key, "offset", None)
        size = sizes[key.fqn, offset]
        begin = offset or ()
        if place.offset < 0 or place.length < 0:
            raise ValueError("it names a place that is in no shard beside it")
        row = (
            entry_numbers[key.fqn],
            file_numbers[place.relative_path],
            place.offset,
            place.length,
            (*begin, *[0] * (D - len(begin))),
            (*size, *[1] * (D - len(size))),
        )
        rows.append(row)
    number_columns = [(name, np.int64) for name in ("entry", "file", "first_byte", "length")]
    box_columns = [(name, np.int64, (D,)) for name in ("begin", "size")]
    pieces = np.array(rows, dtype=[*number_columns, *box_columns])
    # Sort by file, and in a file by position. The last key of lexsort counts first.
    pieces = pieces[np.lexsort((pieces["first_byte"], pieces["file"]))]

    # Every element must be stored: a load would leave the others as uninitialised memory. Count the
    # stored elements of each entry.
    stored = np.zeros(len(described), np.int64)
    np.add.at(stored, pieces["entry"], pieces["size"].prod(axis=1))
    entries = {}
    for (name, entry), elements in zip(described.items(), stored.tolist(), strict=True):
        entries[name] = BytesStorageMetadata()
        if hasattr(entry, "chunks"):
            dtype = entry.properties.dtype
            if elements != math.prod(entry.size) or not isinstance(dtype, torch.dtype):
                raise ValueError(f"no shards hold all of {name}")
            size = torch.Size(entry.size)
            # Without chunks: they are PyTorch's objects for the pieces, which the array now has.
            entries[name] = TensorStorageMetadata(TensorProperties(dtype), size, chunks=[])
    return Index(entries, files, pieces)


def check_lengths(folder: Path, index: Index) -> None:
    """Checks that each file of a checkpoint exists and is at least as long as the index says.

    Args:
        folder: The checkpoint.
        index: Its index.

    Raises:
        ValueError: A file is missing or too short.
    """
    # The position behind the last byte of each file's pieces: the largest end of any of them.
    ends = np.zeros(len(index.files), np.int64)
    np.maximum.at(ends, index.pieces["file"], index.pieces["first_byte"] + index.pieces["length"])
    for name, end in zip(index.files, ends.tolist(), strict=True):
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{folder} is damaged: its shard {name} is missing.")
        size = file.stat().st_size
        if size < end:
            raise ValueError(
                f"{folder} is damaged: its shard {name} has {size:,} bytes where {end:,} are expected."
            )


def find_damage(
    folder: Path, index: Index, part: int = 0, parts: int = 1, names: Collection[str] | None = None
) -> str | None:
    """Looks for bytes of a checkpoint that differ from what was saved.

    torch.save writes each piece as a zip archive with a CRC-32 per record, which torch.load does
    not compare.

    Args:
        folder: The checkpoint.
        index: Its index.
        part: The rank that calls, from 0 to parts - 1. Each rank reads its own run of neighbouring
            pieces, so that it opens few files.
        parts: The number of ranks that share the work.
        names: The tensors and objects to look at, by name; None for all.

    Returns:
        A sentence about the first piece whose bytes do not match their checksum, are no zip
        archive, or are compressed, which torch.save never does; None if there is none.

    Raises:
        FileNotFoundError: A file with a piece is missing.
    """
    # The pieces that this rank reads. They are sorted by file, so that neighbours share one.
    fqns = list(index.entries)
    pieces = index.pieces
    if names is not None:
        numbers = [number for number, name in enumerate(fqns) if name in names]
        pieces = pieces[np.isin(pieces["entry"], numbers)]
    own = pieces[len(pieces) * part // parts : len(pieces) * (part + 1) // parts]
    for file_number, rows in itertools.groupby(own, key=lambda piece: piece["file"]):
        file = folder / index.files[file_number]
        with open(file, "rb") as f:
            for piece in rows:
                f.seek(piece["first_byte"])
                fault = _archive_fault(f.read(piece["length"]))
                if fault is not None:
                    name = fqns[piece["entry"]]
                    return f"{file} is damaged: the bytes of {name} are not as they were saved ({fault})"
    return None


def _archive_fault(data: bytes) -> str | None:
    """Returns what is wrong with a zip archive, or None if nothing is.

    It is the name of the first record whose checksum differs, or what Python says of the headers.

    Args:
        data: The bytes of the archive.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            # torch.save does not compress, and a compressed record may be of any size.
            if any(info.compress_type for info in archive.infolist()):
                return "a compressed record"
            return archive.testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as e:  # headers are damaged, too
        return str(e)


def check_bytes(checkpoint: Path, names: Collection[str]) -> None:
    """Checks that tensors are stored as they were saved, and that no file is cut off.

    Args:
        checkpoint: The folder of the checkpoint.
        names: The names of the tensors whose bytes are compared with their checksums.

    Raises:
        FileNotFoundError: The folder is not a complete checkpoint.
        ValueError: The index, a file's length or the bytes of a tensor are damaged.
    """
    index = read_index(checkpoint)
    check_lengths(checkpoint, index)
    if damage := find_damage(checkpoint, index, names=names):
        raise ValueError(f"{damage}. Take another step.")


def as_metadata(index: Index, tensors: Mapping[str, Any]) -> Metadata:
    """Converts an index back to PyTorch's, with only the pieces that some tensors need.

    Args:
        index: The index of the checkpoint.
        tensors: Tensors and objects to load, by name. Only this rank's part of a DTensor counts.

    Returns:
        PyTorch's index. It lists all tensors of the checkpoint, and those pieces that overlap this
        rank's part of `tensors`.
    """
    # The box of each entry that this rank needs: D first elements in `low`, and D ends in `high`,
    # as an array's row has D numbers for any tensor (`Index`). The box is empty if this rank needs
    # nothing of the entry.
    D = index.pieces["begin"].shape[1]
    low = np.zeros((len(index.entries), D), np.int64)
    high = np.zeros((len(index.entries), D), np.int64)
    entries = {}
    for number, (name, entry) in enumerate(index.entries.items()):
        is_tensor = isinstance(entry, TensorStorageMetadata)
        if is_tensor:
            entry = replace(entry, chunks=[])  # the pieces are added to it below
        entries[name] = entry
        if name in tensors:
            # An object is one element in each of the D dimensions. A tensor is one element in the
            # dimensions that it does not have.
            high[number] = 1
            # PyTorch's description of this rank's part: one chunk, or none.
            for chunk in _create_chunk_list(tensors[name]) if is_tensor else ():
                dims = len(chunk.sizes)
                low[number, :dims] = chunk.offsets
                high[number, :dims] = np.add(chunk.offsets, chunk.sizes)

    # Choose the pieces that overlap the box of their entry in every dimension.
    begin = index.pieces["begin"]
    end = begin + index.pieces["size"]
    entry_number = index.pieces["entry"]
    overlaps = ((begin < high[entry_number]) & (end > low[entry_number])).all(axis=1)

    # Describe them as PyTorch does.
    names = list(index.entries)
    places = {}
    for piece in index.pieces[overlaps]:
        name = names[piece["entry"]]
        entry = entries[name]
        offset = None
        if isinstance(entry, TensorStorageMetadata):
            dims = len(entry.size)
            offset = torch.Size(piece["begin"][:dims].tolist())
            size = torch.Size(piece["size"][:dims].tolist())
            entry.chunks.append(ChunkStorageMetadata(offset, size))
        file = index.files[piece["file"]]
        places[MetadataIndex(name, offset)] = _StorageInfo(
            file, int(piece["first_byte"]), int(piece["length"])
        )
    return Metadata(entries, storage_data=places, storage_meta=StorageMeta())


class _ReaderWithoutIndex(FileSystemReader):
    """PyTorch's reader with an empty index, which `_PartialPlanner` fills."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        # PyTorch would unpickle the index here. `_PartialPlanner.set_up_planner` fills this one.
        return Metadata({}, storage_data={})


class _PartialPlanner(DefaultLoadPlanner):
    """PyTorch's plan of a load, with the part of the index that this rank's tensors overlap.

    Args:
        index: The index of the checkpoint.
    """

    def __init__(self, index: Index) -> None:
        super().__init__()
        self.index = index

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Prepares a load. PyTorch calls this before it plans what to read.

        Args:
            state_dict: The tensors and objects to load, by name.
            metadata: The reader's index, which is empty so far. It is filled in place, because the
                reader is given the same object after this call.
            is_coordinator: PyTorch's argument, which is only passed on.
        """
        super().set_up_planner(state_dict, metadata, is_coordinator)
        # PyTorch's planner has flattened `state_dict` into self.state_dict. Only the pieces that
        # this rank's tensors overlap become objects of PyTorch.
        vars(metadata).update(vars(as_metadata(self.index, self.state_dict)))

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Loads an object, which is not trusted.

        Args:
            read_item: PyTorch's description of what to read.
            value: The bytes of the object.

        Raises:
            pickle.UnpicklingError: It is not made of tensors, numbers, texts and their containers.
        """
        # PyTorch's planner unpickles objects without weights_only. This load before it fails for
        # contents that could run code.
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


def load_part(checkpoint: Path, index: Index, states: dict[str, Any]) -> None:
    """Loads tensors and objects from a checkpoint; this rank's part of each DTensor.

    Each rank plans its own load. PyTorch would collect the plans of all ranks on rank 0, and wait
    for all.

    Args:
        checkpoint: The folder of the checkpoint.
        index: Its index.
        states: What to load, by name. The contents of tensors are overwritten, and objects are
            replaced by those of the checkpoint.

    Raises:
        CheckpointException: The checkpoint could not be read. This is a BaseException.
    """
    planner = _PartialPlanner(index)
    load(states, storage_reader=_ReaderWithoutIndex(checkpoint), planner=planner, no_dist=True)


def tensor_index(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    """Returns the description of every tensor in a checkpoint by its name, without reading any.

    A description has the tensor's size and dtype, and no chunks.

    Args:
        checkpoint: The folder of the checkpoint.

    Raises:
        FileNotFoundError: The folder has no index.
        ValueError: The index is damaged.
    """
    tensors = {}
    for name, entry in read_index(checkpoint).entries.items():
        if isinstance(entry, TensorStorageMetadata):
            tensors[name] = entry
    return tensors


def read_tensors(checkpoint: Path, names: Collection[str]) -> dict[str, Tensor]:
    """Reads tensors by name to the CPU, from however many ranks wrote them. Nothing else is read.

    Args:
        checkpoint: The folder of the checkpoint.
        names: The names of the tensors.

    Raises:
        FileNotFoundError: The folder has no index, so it is not a complete checkpoint.
        ValueError: A tensor is missing, or the index or a tensor is damaged.
    """
    # Make an empty tensor for each name, and load the contents into it.
    index = read_index(checkpoint)
    tensors = {}
    for name in names:
        if name not in index.entries:
            raise ValueError(f"{checkpoint} has no tensor {name}. Take another step.")
        entry = index.entries[name]
        tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    try:
        with _failures_as_oserror():
            load_part(checkpoint, index, tensors)
    except (OSError, RuntimeError) as e:
        raise ValueError(f"{checkpoint} could not be read ({e}). Take another step.") from e
    return tensors


def write_tensors(checkpoint: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a checkpoint of these tensors from one process. The index comes last.

    Args:
        checkpoint: The folder of the checkpoint.
        tensors: The tensors by name.

    Raises:
        OSError: The disk is full, or the folder cannot be written.
    """
    try:
        with _failures_as_oserror():
            save(tensors, checkpoint_id=str(checkpoint), no_dist=True)
    except OSError as e:
        raise OSError(
            f"writing {checkpoint} failed ({e}). Check the free space and the permissions."
        ) from e


@contextmanager
def _failures_as_oserror() -> Iterator[None]:
    """Context in which an OSError takes the place of CheckpointException.

    PyTorch's exception is a BaseException, which would pass every `except Exception`.
    """
    try:
        yield
    except CheckpointException as e:
        # The exception of the only rank, 0, and its traceback. If an error of the operating system
        # caused it, that one's text says more.
        failure = e.failures[0][0]
        error: BaseException | None = failure
        while error is not None and not isinstance(error, OSError):
            error = error.__context__
        raise OSError(str(error or failure)) from e
