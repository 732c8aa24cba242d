"""Whether a checkpoint reads back whole: its index, its shards' lengths, its record; and every byte, by its checksums."""

import io
import itertools
import json
import zipfile
from pathlib import Path

from interdomain.model.distributed_checkpoint import METADATA, SIDECAR, SafeReader


def fault(folder: Path) -> str | None:
    """Why this is not a whole checkpoint, in words; None if nothing is wrong. Reads the index and no tensor."""
    try:
        read_whole(folder)
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
    _check_lengths(folder, index)
    sidecar = folder / SIDECAR
    try:
        record = json.loads(sidecar.read_text()) if sidecar.is_file() else {}
    except ValueError as e:
        raise ValueError(f"{sidecar} is damaged ({e}).") from e
    return index, record


def _check_lengths(folder: Path, index) -> None:
    """Every shard that the index names must be there, as long as the index says."""
    ends: dict[str, int] = {}
    for place in index.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in sorted(ends.items()):
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size is None or size < end:
            found = "is missing" if size is None else f"has {size:,} bytes where {end:,} are expected"
            raise ValueError(f"{folder} is damaged: its shard {name} {found}.")


def altered_entry(folder: Path, index, part: int = 0, parts: int = 1) -> str | None:
    """The first entry whose bytes are not those that were saved, in words; None if there is none.

    torch.save writes a zip archive with a CRC-32 per record, and torch.load does not look at it. Reads the `part`-th of `parts`
    runs of neighbouring entries: ranks share the work, and each opens few files.
    """
    places = sorted(index.storage_data.items(), key=lambda item: (item[1].relative_path, item[1].offset))
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
