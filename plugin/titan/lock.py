"""One run at a time in a folder: `run.lock` names the run that trains there, which touches the file as long as it lives.

A start takes a lock over at once if its process is gone from this machine, and otherwise after a minute in which nobody touched
it, or if an earlier start of the same SLURM job holds it (its node may be cut off). A run whose lock was taken over ends before
it writes a checkpoint. No kernel lock: on shared file systems those hold within one node only, do not exist, or outlive a node.
"""

import atexit
import contextlib
import json
import os
import secrets
import threading
import time
from pathlib import Path

import torch.distributed as dist

from .errors import one_paragraph
from .host import logger

NAME = "run.lock"
BEAT_SECONDS = 10.0
LOOK_SECONDS = 1.0
# Looks, not seconds: where the file system stands still, looking takes long, and nobody can touch the file.
SILENCE = 60  # looks without a beat: the holder is dead
PATIENCE = 60  # looks, after which a beat means that the holder is not about to end


class FolderLock:
    """Holds `folder` from `acquire` to `release`. Attributes: lost, why it is another run's now; None while it is ours."""

    def __init__(self, folder: Path | str) -> None:
        self.folder, self.path = folder, Path(folder) / NAME
        self.lost: str | None = None
        self.ended = threading.Event()
        self.beats = threading.Thread(target=self._keep_beating, name="lock", daemon=True)
        pid = os.getpid()
        self.record = {
            **{"token": secrets.token_hex(8), "pid": pid, "began": _began(pid), "machine": _machine()},
            **{"host": os.uname().nodename, "slurm_job": os.environ.get("SLURM_JOB_ID", "")},
            "slurm_restarts": int(os.environ.get("SLURM_RESTART_COUNT") or 0),  # how often it was requeued
            "since": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        }

    def acquire(self) -> None:
        """Raises: ValueError that names a holder that lives on, or says why the folder cannot be written to."""
        try:
            self._wait_for_holder()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write()
        except OSError as e:
            raise ValueError(f"{self.folder} cannot be written to ({e}): give a folder in which a run can save.") from e
        self.beats.start()
        atexit.register(self.release)

    def _wait_for_holder(self) -> None:
        found, looks, silence = self._look(), 0, 0
        while found is not None and not _is_gone(found[0]) and silence < SILENCE:
            if looks == 0:
                logger.warning("%s is held by %s: waiting a minute for it to end.", self.folder, _named(found[0]))
            time.sleep(LOOK_SECONDS)
            before, found = found, self._look()
            looks, silence = looks + 1, silence + 1 if found == before else 0
            if found is not None and silence == 0 and looks >= PATIENCE:
                job, restarts = (self.record[name] for name in ("slurm_job", "slurm_restarts"))
                if job and found[0].get("slurm_job") == job and found[0].get("slurm_restarts", 0) < restarts:
                    logger.warning("taking %s over from an earlier start of this SLURM job.", self.folder)
                    return
                raise ValueError(
                    f"{self.folder} is held by another run that is alive: {_named(found[0])}. Two runs would overwrite each "
                    "other's checkpoints. Wait for its end, or give this one a folder of its own with --job.dump_folder."
                )

    def _look(self) -> tuple[dict, int] | None:
        """(the holder's record, when it was last touched); None where there is no holder."""
        try:
            with open(self.path) as f:  # opened anew each time: NFS looks at the server then
                touched, text = os.fstat(f.fileno()).st_mtime_ns, f.read()
        except FileNotFoundError:
            return None
        try:
            return dict(json.loads(text)), touched
        except (TypeError, ValueError):
            return {}, touched

    def _write(self) -> None:
        partial = self.path.with_name(f"{NAME}.{self.record['token']}")  # another's, at the same moment, has its own
        partial.write_text(json.dumps(self.record) + "\n")
        os.replace(partial, self.path)

    def _keep_beating(self) -> None:
        while not self.ended.wait(BEAT_SECONDS) and self.lost is None:
            self.beat()

    def beat(self) -> None:
        """Touch the lock, or note that it is another's."""
        with contextlib.suppress(OSError):  # a file system that is away comes back, or fails the next save
            found = self._look()
            if found is None:  # removed by hand
                self._write()
            elif found[0].get("token") == self.record["token"]:
                os.utime(self.path)
            else:
                self.lost = (
                    f"{self.folder} was taken over by another run, {_named(found[0])}: this one gave no sign of life for a "
                    "minute, or both began together. It ends here and writes nothing more."
                )

    def require(self) -> None:
        """Raises: ValueError if another run has taken the folder over."""
        if self.lost is not None:
            raise ValueError(self.lost)

    def release(self) -> None:
        self.ended.set()
        if self.beats.is_alive():
            self.beats.join()
        with contextlib.suppress(OSError):
            if self._holder() == self.record["token"]:
                self.path.unlink()

    def _holder(self) -> str | None:
        found = self._look()
        return found and found[0].get("token")

    def is_seen(self, token: str) -> bool:
        """Whether the lock of this token is in the folder; it may take a network a moment."""
        for _ in range(10):
            if self._holder() == token:
                return True
            time.sleep(LOOK_SECONDS)
        return False


@one_paragraph
def hold_folder(job_config) -> FolderLock | None:
    """The lock of the run's folder, held by rank 0. None on other ranks, and for a run that writes nothing there."""
    if not (_saves(job_config) or job_config.metrics.enable_tensorboard) or int(os.environ["RANK"]):
        return None
    lock = FolderLock(_folder(job_config))
    lock.acquire()
    return lock


def _saves(job_config) -> bool:
    return job_config.checkpoint.enable and not job_config.checkpoint.load_only


def _folder(job_config) -> str:
    """job.dump_folder, or that of the checkpoints where it lies elsewhere (an absolute checkpoint.folder, a link)."""
    dump = job_config.job.dump_folder
    checkpoints = os.path.join(dump, job_config.checkpoint.folder)
    inside = Path(os.path.realpath(checkpoints)).is_relative_to(os.path.realpath(dump))
    return dump if inside or not _saves(job_config) else checkpoints


@one_paragraph
def require_shared(job_config, lock: FolderLock | None) -> None:
    """Refuse a folder that nodes do not share: a checkpoint would be spread over their disks, and never load. Collective."""
    if int(os.environ["WORLD_SIZE"]) <= int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])):
        return  # one node
    token = [lock and lock.record["token"]]
    dist.broadcast_object_list(token)
    if token[0] is None:
        return
    folder, blind = _folder(job_config), [None] * dist.get_world_size()
    sees = os.environ.get("LOCAL_RANK", "0") != "0" or FolderLock(folder).is_seen(
        token[0]
    )  # one rank of each node looks
    dist.all_gather_object(blind, None if sees else os.uname().nodename)
    if hosts := ", ".join(filter(None, blind)):
        raise ValueError(
            f"{folder} is not the same folder on all nodes: {hosts} cannot see what the first node wrote there. Give one on a "
            "file system that they share."
        )


def _named(record: dict) -> str:
    if not record:
        return f"somebody ({NAME} cannot be read)"
    job = f", SLURM job {record['slurm_job']}" if record.get("slurm_job") else ""
    return f"process {record.get('pid')} on {record.get('host')}{job}, since {record.get('since')}"


def _is_gone(record: dict) -> bool:
    """Whether the holder was a process of this machine that is no more (or this one, at an earlier run)."""
    if not record.get("machine") or record["machine"] != _machine():
        return False
    return record["pid"] == os.getpid() or _began(record["pid"]) != record["began"]


def _machine() -> str:
    """One boot of one machine, and the container in it that has process numbers of its own; "" where Linux does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _began(pid: int) -> int | None:
    """When a process began, in the kernel's ticks: numbers are used again. None where there is none, or only its remains."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])
