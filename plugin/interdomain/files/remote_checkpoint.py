"""Checkpoints in an object store, as a run copies them to checkpoint.copy_to.

ADDRESS/step-N/      a checkpoint's files; the index `.metadata` is sent last: without it the folder is no checkpoint
ADDRESS/latest       the folder that the run copied last; later steps are of a run that went back, and count no more
ADDRESS/step-N.superseded   another checkpoint of the same step was here before
"""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from interdomain.folders import new_folder, write_whole
from interdomain.storage import RemoteFolder

from .checkpoint_index import check_lengths, read_index
from .distributed_checkpoint import METADATA, is_unfinished, read_sidecar, step_of

LATEST = "latest"
COPIED = "copied.json"  # in a folder here: the names of its files that are in the store, and at which address


def remote_steps(address: str) -> Iterator[tuple[int, RemoteFolder]]:
    """The complete checkpoints at an address, the newest first. Raises: OSError, ValueError."""
    run, latest = RemoteFolder(address), None
    with contextlib.suppress(FileNotFoundError):
        latest = step_of(run.read(LATEST).decode(errors="replace").strip())
    steps = sorted((step for name in run.folders() if (step := step_of(name)) is not None), reverse=True)
    for step in steps:
        if latest is None or step <= latest:
            folder = run / f"step-{step}"
            if METADATA in folder.sizes():
                yield step, folder


def fetch_checkpoint(address: str, parent: Path) -> Path:
    """Fetch a checkpoint (step-N), or a run's newest complete one, into a folder of its name in `parent`.

    Raises: FileNotFoundError, ValueError, OSError.
    """
    if step_of(address.rstrip("/")) is not None:
        return fetch_step(RemoteFolder(address), parent)
    for _, folder in remote_steps(address):
        return fetch_step(folder, parent)
    raise FileNotFoundError(f"{address} holds no complete checkpoint (a folder step-N with {METADATA} in it).")


def fetch_step(remote: RemoteFolder, parent: Path) -> Path:
    """Fetch one checkpoint; it appears when it is there, with shards of the right lengths. Bytes are not compared.

    Raises: ValueError for one that is not complete or damaged; OSError.
    """
    folder = parent / remote.address.rpartition("/")[2]
    if (folder / METADATA).is_file() and METADATA in copied_names(folder, remote.address):  # by an earlier start
        return folder
    if is_unfinished(folder):
        shutil.rmtree(folder)
    with new_folder(folder) as partial:
        remote.get(partial)
        try:
            check_lengths(partial, read_index(partial))
            read_sidecar(partial)
        except (FileNotFoundError, ValueError) as e:
            raise ValueError(f"{remote.address} is damaged: {e}") from e
        note_copied(partial, remote.address, {path.name for path in partial.iterdir()})
    return folder


def note_copied(folder: Path, address: str, names: set[str]) -> None:
    write_whole(folder / COPIED, (json.dumps({"address": address, "names": sorted(names)}) + "\n").encode())


def copied_names(folder: Path, address: str) -> set[str]:
    """Names of a checkpoint's files that are at an address."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        copied = json.loads((folder / COPIED).read_text())
        if copied["address"] == address:
            return {*copied["names"]}
    return set()
