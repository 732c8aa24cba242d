"""One run at a time in a folder: the file `run.lock` names the run that writes there.

The run sets the file's time to the present as long as it lives.

A run locks every folder that it writes to, with one token: its own folder, that of the checkpoints
and that of the TensorBoard events. The last two may lie elsewhere, where another run could write,
too.

A start takes a lock over at once if the owner's process is gone from this machine, or if the owner
was an earlier start of the same SLURM job. Otherwise it takes the lock over after a minute in which
nobody touched it. A run that lost its lock ends before it writes a checkpoint. The lock is no
kernel lock: on shared file systems those work within one node only, do not exist, or outlive a
node.
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

LOCK_NAME = "run.lock"
# Seconds between two heartbeats: the owner sets the lock file's time to the present.
HEARTBEAT_SECONDS = 10.0
POLL_SECONDS = 1.0  # seconds between two polls of a waiting start
# Polls without a heartbeat after which the owner counts as dead. Count polls, not seconds: on a
# stalled file system each poll blocks, and the owner cannot refresh the lock either.
PATIENCE = 60


class RunLock:
    """The locks of all folders that a run writes to, owned from `acquire` to `release`.

    Args:
        folders: The folders.

    Attributes:
        held: The folders that were acquired.
        lost: A folder that another run has taken over, if there is one.
        record: The contents of the lock files: token, process and machine of the run.
    """

    def __init__(self, folders: list[Path]) -> None:
        """Describes this process, so that another start can tell whether it lives on."""
        self.folders = folders
        self.held: list[Path] = []
        self.lost: Path | None = None
        # A process number is valid within one boot of a machine and one namespace (a container has
        # its own).
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        self.record = {
            "token": secrets.token_hex(8),
            "pid": os.getpid(),
            "host": os.uname().nodename,
            "machine": f"{boot} {namespace}",
            "since": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
            "slurm_job": os.environ.get("SLURM_JOB_ID"),
            "slurm_restarts": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
        }

    def acquire(self) -> None:
        """Takes the folders, and keeps touching their locks from a thread.

        Raises:
            ValueError: The owner of a folder lives on, or a lock's file is no lock.
            OSError: A folder cannot be written.
        """
        # Folders that were taken before an error are released when the process exits.
        atexit.register(self.release)
        threading.Thread(target=self._heartbeat, daemon=True).start()
        ended = {self.record["token"]}  # two paths may lead to one folder
        for folder in self.folders:
            self._wait_for_owner(folder, ended)
            folder.mkdir(parents=True, exist_ok=True)
            # The file appears whole. Two starts at the same moment write different partial files.
            partial = folder / f"{LOCK_NAME}.{self.record['token']}"
            partial.write_text(json.dumps(self.record) + "\n")
            os.replace(partial, folder / LOCK_NAME)
            self.held.append(folder)

    def _wait_for_owner(self, folder: Path, ended: set[str]) -> None:
        """Returns once no living run owns the folder.

        Args:
            folder: The folder to wait for.
            ended: Tokens of runs that have ended. The token of an owner that is silent for a minute
                is added, so that a lost node's run is waited for once, and not in each folder.
        """
        first = owner_of(folder)
        if not first or first["token"] in ended or self._has_ended(first):
            return
        name = f"process {first['pid']} on {first['host']}, since {first['since']}"
        logger.warning("%s is held by %s: waiting a minute for it to end.", folder, name)
        owner = first
        for _ in range(PATIENCE):
            time.sleep(POLL_SECONDS)
            owner = owner_of(folder)
            if not owner or self._has_ended(owner):
                return
        if owner != first:
            raise ValueError(
                f"{folder} is in use by another run: {name}. Wait until that run ends, or give this "
                "run other folders (--job.dump_folder; checkpoint.folder and "
                "metrics.save_tb_folder, if they lie elsewhere)."
            )
        ended.add(first["token"])

    def _has_ended(self, owner: dict) -> bool:
        """Returns whether the owner's process is gone, or SLURM started this one in its place.

        Args:
            owner: The record of the owner, from `owner_of`.
        """
        # Only within one boot and one container does a process number name the same process.
        if owner["machine"] == self.record["machine"]:
            return not Path(f"/proc/{owner['pid']}").exists()
        # SLURM requeues a job whose node is cut off. The old start may still be alive there.
        requeued = owner["slurm_restarts"] < self.record["slurm_restarts"]
        return requeued and owner["slurm_job"] == self.record["slurm_job"]

    def _heartbeat(self) -> None:
        while self.lost is None:
            time.sleep(HEARTBEAT_SECONDS)
            self.refresh()

    def refresh(self) -> None:
        """Touches the locks, or notes that another run owns a folder."""
        token = self.record["token"]
        for folder in self.held:
            # A file system that is away comes back, or fails the next save. A file that is no lock
            # names no other run.
            with contextlib.suppress(OSError, ValueError):
                if owner_of(folder).get("token", token) != token:
                    self.lost = folder
                else:
                    os.utime(folder / LOCK_NAME)

    def check_held(self) -> None:
        """Checks that this run owned its folders when `refresh` last looked, some seconds ago.

        Raises:
            ValueError: Another run has taken one over.
        """
        if self.lost is not None:
            raise ValueError(
                f"{self.lost} was taken over by another run ({LOCK_NAME} names it), because this run did "
                "not respond for a minute, both started together, or SLURM requeued this job. This run "
                "ends here."
            )

    def release(self) -> None:
        """Removes the locks that this run still owns."""
        for folder in self.held:
            with contextlib.suppress(OSError, ValueError):
                if owner_of(folder).get("token") == self.record["token"]:
                    (folder / LOCK_NAME).unlink()


def owner_of(folder: Path) -> dict:
    """Returns the record of a folder's owner, and the time `touched` of its last heartbeat.

    It is empty if nobody owns the folder.

    Args:
        folder: A folder that a run may have locked.

    Raises:
        ValueError: The file is no lock.
    """
    path = folder / LOCK_NAME
    try:
        with open(path, "rb") as f:  # opening makes NFS ask the server
            text = f.read()
            touched = os.fstat(f.fileno()).st_mtime_ns
    except FileNotFoundError:
        return {}
    if not text:  # a machine that went down can leave an empty file
        return {}
    try:
        return json.loads(text) | {"touched": touched}
    except ValueError as e:
        raise ValueError(
            f"{path} is not a lock: it holds {text[:60]!r}. If no run trains in {folder}, remove that "
            "file. Else give this run another folder with --job.dump_folder."
        ) from e


def written_folders(job: JobConfig) -> list[Path]:
    """Returns the folders that a run writes to. One may be listed several times."""
    run = Path(job.job.dump_folder)
    folders = []
    if job.checkpoint.enable:
        folders += [run, run / job.checkpoint.folder]
    if job.metrics.enable_tensorboard:
        folders += [run, run / job.metrics.save_tb_folder]
    if job.metrics.enable_wandb:
        folders.append(run)
    return folders


@user_errors
def hold_folder(job: JobConfig) -> RunLock | None:
    """Locks the run's folders on rank 0, and writes their names into its folders.json.

    Commands such as `interdomain convert` find the checkpoints by this file. A folder that cannot
    be written is refused here, and not at the first save.

    Args:
        job: The configuration of the run.

    Returns:
        The lock. None on other ranks, and for a run that writes nothing.

    Raises:
        SystemExit: Another run owns a folder, or it cannot be written. The reason is printed.
    """
    folders = written_folders(job)
    if not folders or int(os.environ["RANK"]):
        return None
    lock = RunLock(folders)
    lock.acquire()
    run = Path(job.job.dump_folder)
    checkpoints = job.checkpoint.folder
    # This check comes before the note: the tools must not take another run's checkpoints for this
    # run's.
    if job.checkpoint.enable:
        check_other_runs(run / checkpoints, str(run.resolve()))
    note_folders(run, checkpoints, job.metrics.save_tb_folder)
    return lock


@user_errors
def require_shared(job: JobConfig, lock: RunLock | None) -> None:
    """Checks that all nodes share the run's folders. Collective.

    Otherwise a checkpoint would be spread over the nodes' disks, and never load.

    Args:
        job: The configuration of the run.
        lock: The lock of the run's folders, on rank 0.
    """
    # Every rank looks for rank 0's token in the locks. A network file system may take a moment to
    # show them.
    token = [lock and lock.record["token"]]
    dist.broadcast_object_list(token)
    unseen = written_folders(job)
    for _ in range(10):
        unseen = [folder for folder in unseen if owner_of(folder).get("token") != token[0]]
        if not unseen:
            break
        time.sleep(POLL_SECONDS)

    # All ranks learn which hosts do not see them.
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, (os.uname().nodename, unseen))
    folders: list[Path] = []
    hosts = set()
    for host, unseen in by_rank:
        folders += unseen
        if unseen:
            hosts.add(host)
    if folders:
        raise ValueError(
            f"{folders[0]} is not the same folder on all nodes: {', '.join(sorted(hosts))} cannot see "
            "what the first node wrote there. Choose a folder on a file system that all nodes share."
        )
