"""Whether a checkpoint is complete: its index, the lengths of its shards, its record. No tensor is read."""

import json
from pathlib import Path
from typing import NamedTuple

from torch.distributed.checkpoint.metadata import Metadata

from interdomain.model.distributed_checkpoint import METADATA, SIDECAR, check_lengths, parse_index

OF_ANY_MODEL = {"model", "size", "condition"}  # in the record of every version


class Contents(NamedTuple):
    """What a start needs to know of a checkpoint before it reads tensors."""

    data: bytes  # the file of the index
    index: Metadata
    record: dict  # empty where there is none


def is_finished(folder: Path) -> bool:
    """Whether its save came to the end: the index is written last. What is not finished was never a checkpoint."""
    return (folder / METADATA).is_file()


def read(folder: Path) -> Contents:
    """Raises: ValueError that names the file and what is wrong with it; WrittenByNewerPyTorch; OSError."""
    if not is_finished(folder):
        raise ValueError(f"{folder} is not a whole checkpoint: it has no {METADATA}, which is written last.")
    data = (folder / METADATA).read_bytes()
    index = parse_index(data, folder)
    check_lengths(folder, index)
    sidecar = folder / SIDECAR
    return Contents(data, index, _read_record(sidecar) if sidecar.is_file() else {})


def _read_record(sidecar: Path) -> dict:
    try:
        record = json.loads(sidecar.read_text())
    except ValueError as e:
        raise ValueError(f"{sidecar} is damaged ({e}).") from e
    if not isinstance(record, dict) or not record.keys() >= OF_ANY_MODEL:
        raise ValueError(f"{sidecar} is damaged: it does not say of what model it is.")
    return record
