"""Whether a checkpoint reads back whole: its index, its shards' lengths, its record."""

import json
from pathlib import Path

from interdomain.model.distributed_checkpoint import METADATA, SIDECAR, SafeReader, WrittenByNewerPyTorch, check_lengths

OF_ANY_MODEL = {"model", "size", "condition"}  # in the record of every version


def fault(folder: Path) -> str | None:
    """Why this is not a whole checkpoint, in words; None if nothing is wrong. Reads the index and no tensor.

    Raises: WrittenByNewerPyTorch, for such a checkpoint is not damaged.
    """
    try:
        read_whole(folder)
    except WrittenByNewerPyTorch:
        raise
    except ValueError as e:
        return str(e)
    return None


def is_finished(folder: Path) -> bool:
    """Whether its save came to the end: the index is written last. What is not finished was never a checkpoint."""
    return (folder / METADATA).is_file()


def read_whole(folder: Path):
    """(index, record) of a checkpoint; the record is empty where there is none.

    Raises: ValueError that names the file and what is wrong with it.
    """
    if not is_finished(folder):
        raise ValueError(f"{folder} is not a whole checkpoint: it has no {METADATA}, which is written last.")
    index = SafeReader(folder).read_metadata()
    check_lengths(folder, index)
    sidecar = folder / SIDECAR
    return index, _read_record(sidecar) if sidecar.is_file() else {}


def _read_record(sidecar: Path) -> dict:
    try:
        record = json.loads(sidecar.read_text())
    except ValueError as e:
        raise ValueError(f"{sidecar} is damaged ({e}).") from e
    if not isinstance(record, dict) or not record.keys() >= OF_ANY_MODEL:
        raise ValueError(f"{sidecar} is damaged: it does not say of what model it is.")
    return record
