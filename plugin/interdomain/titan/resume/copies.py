"""Copies of a run's checkpoints in an object store (checkpoint.copy_to): made beside the training, and fetched by a start whose
folder has none.

A thread of rank 0 sends every finished checkpoint, the newest first. What was sent is noted in the checkpoint's folder
(`copied.json`), so a later start goes on where this one ended. No failure ends a run: it is logged, and tried again. The run
deletes nothing in the store.
"""

import contextlib
import os
import threading
from pathlib import Path

from interdomain.files.distributed_checkpoint import INCOMPLETE, METADATA, finished_steps
from interdomain.files.remote_checkpoint import COPIED, LATEST, copied_names, fetch_step, note_copied, remote_steps
from interdomain.storage import AT_ONCE, RemoteFolder

from ..host import logger
from .lock import RunLock

LOOK_SECONDS = 10.0
LONGEST_WAIT = 600.0  # between two tries


class Copies:
    """The copies of the checkpoints in `folder` at `address`. lock: of the run's folder; once it is lost, nothing is sent."""

    def __init__(self, folder: Path, address: str, lock: RunLock | None) -> None:
        self.folder, self.address, self.lock = folder, address, lock
        self.tried: set[int] = set()  # steps that were fetched: what turned out to be damaged is not fetched again
        self.sending: Path | None = None
        self.removal = threading.Lock()
        self.ending, self.abandoned, self.wake = False, False, threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    # Fetching

    def fetch(self, wanted: int = -1) -> None:
        """Fetch the checkpoint of a step, or the newest that can be fetched (-1).

        Raises: ValueError if the store has checkpoints, but none of them is complete; OSError.
        """
        damaged = None
        for step, remote in remote_steps(self.address):
            if step not in self.tried and wanted in (-1, step):
                logger.info("%s has no checkpoint to continue from: fetching %s", self.folder, remote.address)
                self.tried.add(step)
                try:
                    fetch_step(remote, self.folder)
                    return
                except ValueError as e:
                    logger.warning("SKIPPED: %s", e)
                    damaged = e
        if damaged:
            raise ValueError(f"no checkpoint at {self.address} can be loaded. The last one tried: {damaged}")
        store = RemoteFolder(self.address)
        if wanted == -1 and not self.tried and LATEST in store.sizes():
            raise ValueError(
                f"{self.address}/{LATEST} names a checkpoint, and none there is complete. Restore one, or remove that file to "
                "start from the beginning."
            )
        # Now rather than at the first checkpoint: is there a bucket, and may this run write to it?
        store.write("copied-from.txt", f"{os.uname().nodename}:{self.folder.absolute()}\n".encode())

    # Sending

    def start(self) -> None:
        if self.thread.ident is None:
            self.thread.start()

    def end(self) -> None:
        """Send what is left, and end the thread."""
        self.ending = True
        self.wake.set()

    def finish(self, seconds: int) -> None:
        """Wait for the copies, at most so many seconds, and log what is missing."""
        self.end()
        self.thread.join(1)
        if self.thread.is_alive():
            logger.info("waiting up to %d s until all checkpoints are at %s", seconds, self.address)
            self.thread.join(seconds)
        self.abandoned = True
        if left := ", ".join(folder.name for folder in self._left()):
            logger.warning("not at %s: %s. The next start of this run copies what is still here.", self.address, left)

    def release(self, folder: Path) -> bool:
        """True, and the checkpoint's index is gone, unless the checkpoint is being sent: for the removal of old ones."""
        with self.removal:
            if folder == self.sending:
                return False
            with contextlib.suppress(FileNotFoundError):
                (folder / METADATA).rename(folder / INCOMPLETE)
            return True

    def _run(self) -> None:
        wait = LOOK_SECONDS
        while True:
            try:
                while left := self._left():
                    self._send(left[0])
                if self.ending:
                    return
                wait = LOOK_SECONDS
            except Exception as e:  # of whatever kind: the run goes on
                logger.warning("copying a checkpoint failed, and is tried again in %d s: %s", wait, e)
                if self.abandoned:
                    return
            if self.wake.wait(wait):
                self.wake.clear()
                wait = LOOK_SECONDS
            else:
                wait = min(2 * wait, LONGEST_WAIT)

    def _left(self) -> list[Path]:
        """The finished checkpoints of which a file is not in the store, the newest first."""
        if self.lock and self.lock.lost:
            return []
        newest_first = sorted(finished_steps(self.folder).items(), reverse=True)
        return [folder for _, folder in newest_first if _names(folder) - self._copied(folder)]

    def _copied(self, folder: Path) -> set[str]:
        return copied_names(folder, (RemoteFolder(self.address) / folder.name).address)

    def _send(self, folder: Path) -> None:
        with self.removal:
            if not (folder / METADATA).is_file():  # removed before it could be sent
                return
            self.sending = folder
        try:
            self._send_files(folder, RemoteFolder(self.address) / folder.name)
        finally:
            self.sending = None

    def _send_files(self, folder: Path, remote: RemoteFolder) -> None:
        copied = self._copied(folder) & _names(folder)
        if not copied:
            self._make_room(remote)
        names = sorted(_names(folder) - copied - {METADATA})
        for i in range(0, len(names), AT_ONCE):
            remote.put(folder, names[i : i + AT_ONCE])
            copied |= {*names[i : i + AT_ONCE]}
            note_copied(folder, remote.address, copied)
        if METADATA in copied:
            return
        there = remote.sizes()
        if wrong := [name for name in copied if there.get(name) != (folder / name).stat().st_size]:
            (folder / COPIED).unlink()
            raise OSError(f"{remote.address} lacks {wrong[0]}, which was sent before")
        remote.put(folder, [METADATA])
        steps = finished_steps(self.folder).items()
        newest = max(step for step, path in steps if path == folder or METADATA in self._copied(path))
        RemoteFolder(self.address).write(LATEST, f"step-{newest}\n".encode())
        note_copied(folder, remote.address, copied | {METADATA})  # last: until then a later start does the rest
        logger.info("copied %s to %s", folder, remote.address)

    def _make_room(self, remote: RemoteFolder) -> None:
        """Rename a checkpoint that is there: of a run that went back, or of another one. Remains of a copy are removed."""
        if METADATA not in remote.sizes():
            remote.remove()
            return
        name = remote.address.rpartition("/")[2]
        aside, others, n = f"{name}.superseded", RemoteFolder(self.address).folders(), 1
        while aside in others:
            n += 1
            aside = f"{name}.superseded-{n}"
        remote.rename(aside)
        logger.warning("%s was another checkpoint of this step: renamed to %s", remote.address, aside)


def _names(folder: Path) -> set[str]:
    """Names of the files of a checkpoint; none if it was removed meanwhile."""
    with contextlib.suppress(OSError):
        return {x.name for x in folder.iterdir() if x.is_file() and x.name != COPIED and x.suffix != ".partial"}
    return set()
