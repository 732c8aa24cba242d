"""The index of a checkpoint as arrays: quick to check and to hand on, and a rank takes from it what its own tensors need.

PyTorch's index is an object for each piece of each tensor: of 1.3B on 1,024 ranks 967,000, which take 3 GB and half a minute to
pass from one process to another.
"""

import io
import itertools
import warnings
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
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

from .distributed_checkpoint import SafeReader, damaged


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
    metadata = SafeReader(checkpoint).read_metadata()
    try:
        return as_arrays(metadata)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as e:  # its values may be of any type
        raise damaged(checkpoint, e) from e


def as_arrays(metadata: Metadata) -> Index:
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    sizes = {}
    for name, entry in entries.items():
        is_tensor = isinstance(entry, TensorStorageMetadata)
        sizes |= {(name, chunk.offsets): chunk.sizes for chunk in entry.chunks} if is_tensor else {(name, None): ()}
    if len(sizes) != len(places):
        raise ValueError(f"it has {len(sizes)} pieces and {len(places)} places of them")
    files = sorted({place.relative_path for place in places.values()})
    names, numbers = ({name: i for i, name in enumerate(those)} for those in (entries, files))
    pieces = [
        (names[key.fqn], numbers[place.relative_path], place.offset, place.length) for key, place in places.items()
    ]
    D = max((len(size) for size in sizes.values()), default=0)
    begin, size = np.zeros((len(pieces), D), np.int64), np.ones((len(pieces), D), np.int64)
    dims = np.fromiter((len(key.offset or ()) for key in places), np.int64, len(pieces))
    used = np.arange(D) < dims[:, None]
    begin[used] = list(itertools.chain.from_iterable(key.offset or () for key in places))
    size[used] = list(itertools.chain.from_iterable(sizes[key.fqn, key.offset] for key in places))
    rows = np.concatenate([np.array(pieces, np.int64).reshape(-1, 4), begin, size], axis=1)
    rows = rows[np.lexsort((rows[:, 2], rows[:, 1]))]
    whole = {n: replace(e, chunks=[]) if isinstance(e, TensorStorageMetadata) else e for n, e in entries.items()}
    return Index(whole, files, rows)


def check_lengths(folder: Path, index: Index) -> None:
    """Raises ValueError unless every shard that the index names is there, as long as the index says."""
    ends = np.zeros(len(index.files), np.int64)
    np.maximum.at(ends, index.pieces[:, 1], index.pieces[:, 2] + index.pieces[:, 3])
    for name, end in zip(index.files, ends.tolist(), strict=True):
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size is None or size < end:
            fault = "is missing" if size is None else f"has {size:,} bytes where {end:,} are expected"
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
        pieces = pieces[np.isin(pieces[:, 0], [number for number, name in enumerate(fqns) if name in names])]
    mine = pieces[len(pieces) * part // parts : len(pieces) * (part + 1) // parts, :4].tolist()
    for number, rows in itertools.groupby(mine, key=lambda row: row[1]):
        file = folder / index.files[number]
        with open(file, "rb") as f:
            for entry, _, first, length in rows:
                f.seek(first)
                data = f.read(length)
                try:
                    with zipfile.ZipFile(io.BytesIO(data)) as archive:
                        packed = any(info.compress_type for info in archive.infolist())  # it might grow without end
                        record = "a compressed record" if packed else archive.testzip()
                except (zipfile.BadZipFile, EOFError, NotImplementedError) as e:  # headers are bytes too
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
    """PyTorch's form of the index, of the pieces alone that these tensors overlap: of a DTensor, what is on this rank."""
    pieces, D = index.pieces, index.pieces.shape[1] // 2 - 2
    low, high = np.zeros((2, len(index.entries), D), np.int64)  # an empty box: no tensor of this name
    for number, (name, entry) in enumerate(index.entries.items()):
        if name in tensors:
            high[number] = 1
            if isinstance(entry, TensorStorageMetadata):
                for chunk in _create_chunk_list(tensors[name]):
                    dims = len(chunk.sizes)
                    low[number, :dims] = chunk.offsets
                    high[number, :dims] = np.add(chunk.offsets, chunk.sizes)
    number, begin, size = pieces[:, 0], pieces[:, 4 : 4 + D], pieces[:, 4 + D :]
    mine = ((begin < high[number]) & (begin + size > low[number])).all(axis=1)

    names, places = list(index.entries), {}
    entries = {n: replace(e, chunks=[]) if hasattr(e, "chunks") else e for n, e in index.entries.items()}
    for n, file, first, length, *box in pieces[mine].tolist():
        entry, offset = entries[names[n]], None
        if isinstance(entry, TensorStorageMetadata):
            dims = len(entry.size)
            offset, sizes = torch.Size(box[:dims]), torch.Size(box[D : D + dims])
            entry.chunks.append(ChunkStorageMetadata(offset, sizes))
        places[MetadataIndex(names[n], offset)] = _StorageInfo(index.files[file], first, length)
    return Metadata(entries, storage_data=places, storage_meta=StorageMeta())


def load_part(checkpoint: Path, index: Index, states: dict[str, Any]) -> None:
    """Load tensors and objects, of a DTensor what is on this rank. Ranks need not agree on it, as PyTorch's own do, where
    rank 0 collects the plans of all of them."""
    reader = SafeReader(checkpoint, Metadata({}, storage_data={}))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is meant
        load(states, storage_reader=reader, planner=_PartialPlanner(index), no_dist=True)


class _PartialPlanner(DefaultLoadPlanner):
    """PyTorch's plan of a load, with the part of the index that this rank's tensors overlap."""

    def __init__(self, index: Index) -> None:
        super().__init__()
        self.index = index

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        # Before the reader looks at the same object.
        vars(metadata).update(vars(overlapping(self.index, self.state_dict)))

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # raises for all but tensors, numbers, texts and their containers
        value.seek(0)
        super().load_bytes(read_item, value)
