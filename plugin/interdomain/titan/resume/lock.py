"""One run at a time in a folder: `run.lock` names the run that writes there, which touches the file as long as it lives.

A run holds every folder that it writes to, with one token: its own, that of the checkpoints and that of the TensorBoard events.
The last two may lie elsewhere, where another run could write, too.

A start takes the lock over at once if the holder's process is gone from this machine, or if the holder was an earlier start of
the same SLURM job; otherwise after a minute in which nobody touched it. A run whose lock was taken over ends before it writes
a checkpoint. No kernel lock: on shared file systems those hold within one node only, do not exist, or outlive a node.
"""

import atexit
import contextlib
import json
import os
import secrets
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from interdomain.checkpoint.run_folder import note_folders

from ..errors import user_errors
from ..host import logger
from ..settings.schema import JobConfig
from .resume_from import check_other_runs

NAME = "run.lock"
HEARTBEAT_SECONDS = 10.0
POLL_SECONDS = 1.0
# Polls, not seconds: on a stalled file system each poll blocks, and the owner cannot refresh the lock either.
PATIENCE = 60
RECORD = (
    "token",
    "pid",
    "host",
    "machine",
    "since",
    "slurm_job",
    "slurm_restarts",
)  # the entries of a lock


class FolderLock:
    """Holds `folder` from `acquire` to `release`.

    Args:
        token: Names the run.

    Attributes:
        lost: Whether the folder is another run's now.
    """

    def __init__(self, folder: Path | str, token: str | None = None) -> None:
        self.folder = folder
        self.path = Path(folder) / NAME
        self.lost = False
        # One boot of one machine, and the container in it that has process numbers of its own.
        machine = (
            Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            + " "
            + os.readlink("/proc/self/ns/pid")
        )
        self.record = {
            "token": token or secrets.token_hex(8),
            "pid": os.getpid(),
            "host": os.uname().nodename,
            "machine": machine,
            "since": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
            "slurm_job": os.environ.get("SLURM_JOB_ID"),
            "slurm_restarts": int(
                os.environ.get("SLURM_RESTART_COUNT") or 0
            ),  # how often the job was requeued
        }

    def acquire(self, ended: set[str] | None = None) -> None:
        """Take the folder.

        Args:
            ended: Tokens of runs that are known to have ended. That of a holder which was silent for a minute is added.

        Raises:
            ValueError: The holder lives on, or the file is no lock.
        """
        self._wait_for_holder(set() if ended is None else ended)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError as e:
            raise ValueError(
                f"{self.folder} is not a folder: it is a file, or a link to a place that is not there, such as a disk that is "
                "not mounted. Mount that, or name another folder."
            ) from e
        partial = self.path.with_name(
            f"{NAME}.{self.record['token']}"
        )  # another's, at the same moment, has its own
        partial.write_text(json.dumps(self.record) + "\n")
        os.replace(partial, self.path)
        threading.Thread(target=self._heartbeat, daemon=True).start()
        atexit.register(self.release)

    def _wait_for_holder(self, ended: set[str]) -> None:
        first = self.holder()
        if not first or first["token"] in ended or self._has_ended(first):
            return
        name = "process {pid} on {host}, since {since}".format_map(first)
        logger.warning("%s is held by %s: waiting a minute for it to end.", self.folder, name)
        holder = first
        for _ in range(PATIENCE):
            time.sleep(POLL_SECONDS)
            holder = self.holder()
            if not holder or self._has_ended(holder):
                return
        if holder != first:
            raise ValueError(
                f"{self.folder} is in use by another run: {name}. Wait until that run ends, or give this run other folders "
                "(--job.dump_folder; checkpoint.folder and metrics.save_tb_folder, if they lie elsewhere)."
            )
        ended.add(first["token"])

    def _has_ended(self, holder: dict) -> bool:
        """True if the holder's process is gone, or the scheduler has put this start in its place (its node may be cut off)."""
        if holder["machine"] == self.record["machine"]:
            return not Path(f"/proc/{holder['pid']}").exists()
        requeued = holder["slurm_restarts"] < self.record["slurm_restarts"]
        return requeued and holder["slurm_job"] == self.record["slurm_job"]

    def holder(self) -> dict:
        """The holder's record, and when it was last `touched`; empty where there is no holder.

        Raises: ValueError for a file that is no lock.
        """
        try:
            with open(self.path, "rb") as f:  # opened anew: NFS asks the server then
                text = f.read()
                touched = os.fstat(f.fileno()).st_mtime_ns
        except FileNotFoundError:
            return {}
        if not text:  # a sudden end can leave an empty file
            return {}
        try:
            record = json.loads(text)
            return {name: record[name] for name in RECORD} | {"touched": touched}
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(
                f"{self.path} is not a lock of this version: it holds {text[:60]!r}. If no run trains in {self.folder}, remove "
                "that file. Else give this run another folder with --job.dump_folder."
            ) from e

    def _heartbeat(self) -> None:
        while not self.lost:
            time.sleep(HEARTBEAT_SECONDS)
            self.refresh()

    def refresh(self) -> None:
        """Touch the lock, or note that it is another's."""
        # A file system that is away comes back, or fails the next save. A file that is no lock names no other run.
        with contextlib.suppress(OSError, ValueError):
            self.lost |= self.holder().get("token", self.record["token"]) != self.record["token"]
            if not self.lost:
                os.utime(self.path)

    def check_held(self) -> None:
        """Raises: ValueError if another run has taken the folder over."""
        if self.lost:
            raise ValueError(
                f"{self.folder} was taken over by another run ({NAME} names it), because this run did not respond for a minute "
                "or both started together. This run ends here."
            )

    def release(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self.holder().get("token") == self.record["token"]:
                self.path.unlink()


class RunLock:
    """The locks of all folders that a run writes to, with one token.

    Raises:
        ValueError, OSError: As `FolderLock.acquire`. The folders that were taken by then are released at the exit.
    """

    def __init__(self, folders: list[Path]) -> None:
        self.token = secrets.token_hex(8)
        self.locks = [FolderLock(folder, self.token) for folder in folders]
        ended: set[str] = set()  # a lost node's run is waited for once, and not in each folder
        for lock in self.locks:
            lock.acquire(ended)

    def refresh(self) -> None:
        for lock in self.locks:
            lock.refresh()

    def check_held(self) -> None:
        """Raises: ValueError if another run has taken a folder over."""
        for lock in self.locks:
            lock.check_held()

    def release(self) -> None:
        for lock in self.locks:
            lock.release()


def written_folders(job: JobConfig) -> list[Path]:
    """The folders that a run writes to, each once; none for a run that writes nothing."""
    run = Path(job.job.dump_folder)
    folders = []
    if job.checkpoint.enable:
        folders += [run, run / job.checkpoint.folder]
    if job.metrics.enable_tensorboard:
        folders += [run, run / job.metrics.save_tb_folder]
    if job.metrics.enable_wandb:
        folders.append(run)
    by_place: dict[Path, Path] = {}
    for folder in folders:
        by_place.setdefault(folder.resolve(), folder)
    return list(by_place.values())


@user_errors
def hold_folder(job: JobConfig) -> RunLock | None:
    """The lock of the run's folders, held by rank 0. None on other ranks, and for a run that writes nothing."""
    folders = written_folders(job)
    if not folders or int(os.environ["RANK"]):
        return None
    lock = RunLock(
        folders
    )  # it writes: folders that cannot be written are refused now, and not at the first save
    run = Path(job.job.dump_folder)
    checkpoints = job.checkpoint.folder
    if job.checkpoint.enable:
        # Before the note: the tools must not take another run's checkpoints for this run's.
        check_other_runs(run / checkpoints, str(run.resolve()))
    note_folders(run, checkpoints, job.metrics.save_tb_folder)
    return lock


@user_errors
def require_shared(job: JobConfig, lock: RunLock | None) -> None:
    """Refuse folders that nodes do not share: a checkpoint would be spread over their disks, and never load. Collective."""
    # Every rank looks for rank 0's token in the locks.
    token = [lock and lock.token]
    dist.broadcast_object_list(token)
    hidden: list[Path] = []
    if token[0] is not None:
        hidden = written_folders(job)
    for _ in range(10):  # a network may take a moment
        hidden = [
            folder for folder in hidden if FolderLock(folder).holder().get("token") != token[0]
        ]
        if not hidden:
            break
        time.sleep(POLL_SECONDS)

    # All ranks learn which hosts see another folder.
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, (os.uname().nodename, hidden))
    folders = [folder for _, hidden in by_rank for folder in hidden]
    if folders:
        hosts = sorted({host for host, hidden in by_rank if hidden})
        raise ValueError(
            f"{folders[0]} is not the same folder on all nodes: {', '.join(hosts)} cannot see what the first node wrote there. "
            "Choose a folder on a file system that all nodes share."
        )
