"""Whether a checkpoint is complete: its index, the lengths of its shards, its record. No tensor is read."""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata

from interdomain.model.distributed_checkpoint import METADATA, SIDECAR, check_lengths, parse_index

OF_ANY_MODEL = {"model", "size", "condition"}  # in the record of every version


class Contents(NamedTuple):
    """What a start needs to know of a checkpoint before it reads tensors."""

    data: bytes  # the file of the index
    index: Metadata
    record: dict  # empty where there is none


class NewerFormat(ValueError):
    """A checkpoint that is not damaged: a newer PyTorch wrote it."""


def is_finished(folder: Path) -> bool:
    """Whether its save came to the end: the index is written last. What is not finished was never a checkpoint."""
    return (folder / METADATA).is_file()


def read(folder: Path) -> Contents:
    """Raises: ValueError that names the file and what is wrong with it; NewerFormat; OSError."""
    if not is_finished(folder):
        raise ValueError(f"{folder} is not a whole checkpoint: it has no {METADATA}, which is written last.")
    sidecar = folder / SIDECAR
    record = _read_record(sidecar) if sidecar.is_file() else {}
    data = (folder / METADATA).read_bytes()
    try:
        index = parse_index(data, folder)
    except ValueError as e:
        there = record.get("versions", {}).get("torch", "0")
        if _release(there) > _release(torch.__version__):
            raise NewerFormat(
                f"{folder} was written by PyTorch {there}, and this is PyTorch {torch.__version__}, which cannot read its "
                f"index ({e}). Install PyTorch {there} or newer. The checkpoint is left as it is."
            ) from e
        raise
    check_lengths(folder, index)
    return Contents(data, index, record)


def _release(version: str) -> tuple[int, ...]:
    """(2, 13) of "2.13.0+cpu"."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _read_record(sidecar: Path) -> dict:
    try:
        record = json.loads(sidecar.read_text())
    except ValueError as e:
        raise ValueError(f"{sidecar} is damaged ({e}).") from e
    if not isinstance(record, dict) or not record.keys() >= OF_ANY_MODEL:
        raise ValueError(f"{sidecar} is damaged: it does not say of what model it is.")
    return record
