"""One run at a time in a folder: `run.lock` names the one that trains there, which touches the file as long as it lives.

Whoever finds a lock takes it over at once where its process is gone from this machine, and watches it otherwise. One that
nobody touches belongs to the dead, however they died; so nothing that is left behind keeps a run waiting for longer than a
minute. A run that was taken for dead (suspended, cut off from the file system), or that took an unheld folder at the same
moment as another, finds the other's name in the file and ends before it writes a checkpoint. So does an earlier start of the
same SLURM job, which SLURM had given up (its node was cut off, say) before it put the job back in the queue: it may live, and
wait for the ranks of nodes that are gone, but the folder is the later start's.

Files alone, because kernel locks hold within one node only on some shared file systems, do not exist on others, and outlive a
node that went down on a few. Nobody's clock is compared with anybody else's.
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
    """Holds `folder` from `acquire` to `release`. Attributes: lost, why it is another run's now; None while it is ours.

    Args:
        setting: which names the folder.
    """

    def __init__(self, folder, setting: str = "job.dump_folder") -> None:
        self.folder, self.setting, self.path = folder, setting, Path(folder) / NAME
        self.lost: str | None = None
        self.ended = threading.Event()
        self.beats = threading.Thread(target=self._keep_beating, name="lock", daemon=True)
        pid = os.getpid()
        self.record = {
            **{"token": secrets.token_hex(8), "pid": pid, "began": _began(pid), "machine": _machine()},
            **{"host": os.uname().nodename, "slurm_job": os.environ.get("SLURM_JOB_ID", "")},
            # How often the job had been put back in the queue.
            "slurm_restarts": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
            "since": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        }

    def acquire(self) -> None:
        """Raises: ValueError that names the holder, if it lives on; or what is wrong with the folder."""
        try:
            self._wait_for_holder()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write()
        except OSError as e:
            raise ValueError(
                f"{self.setting} = {self.folder} cannot be written to ({e}): give a folder in which a run can save."
            ) from e
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
                if self._is_given_up(found[0]):
                    logger.warning("taking %s over from an earlier start of this SLURM job.", self.folder)
                    return
                raise ValueError(
                    f"{self.setting} = {self.folder} is held by another run that is alive: {_named(found[0])}. Two in one "
                    "folder would write over each other's checkpoints. End that one, or wait for its end, or give this one "
                    f"a folder of its own with --{self.setting}."
                )

    def _is_given_up(self, record: dict) -> bool:
        """Whether the holder is an earlier start of our own SLURM job."""
        ours = self.record
        return bool(ours["slurm_job"]) and (
            record.get("slurm_job") == ours["slurm_job"] and record.get("slurm_restarts", 0) < ours["slurm_restarts"]
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
            elif self._is_ours(found[0]):
                os.utime(self.path)
            else:
                self.lost = (
                    f"{self.setting} = {self.folder} was taken over by another run, {_named(found[0])}: this one had given no "
                    "sign of life for a minute (was it suspended, or cut off from the file system?), or both began "
                    "together. It ends here and writes nothing more."
                )

    def require(self) -> None:
        """Raises: ValueError if another run has taken the folder over."""
        if self.lost is not None:
            raise ValueError(self.lost)

    def is_seen(self, token: str) -> bool:
        """Whether the file here is the one of this token; it may take a network a moment."""
        for _ in range(10):
            found = self._look()
            if found is not None and found[0].get("token") == token:
                return True
            time.sleep(LOOK_SECONDS)
        return False

    def _is_ours(self, record: dict) -> bool:
        return record.get("token") == self.record["token"]

    def release(self) -> None:
        self.ended.set()
        with contextlib.suppress(RuntimeError):  # it never began
            self.beats.join()
        with contextlib.suppress(OSError):
            found = self._look()
            if found is not None and self._is_ours(found[0]):
                self.path.unlink()


@one_paragraph
def hold_folder(job_config) -> FolderLock | None:
    """The lock of the run's folder, held by rank 0. None on other ranks, and for a run that writes nothing there.

    Where checkpoints lie outside of job.dump_folder (an absolute checkpoint.folder, a link), both are held: the lock is theirs.
    """
    if not (_saves(job_config) or job_config.metrics.enable_tensorboard) or int(os.environ["RANK"]):
        return None
    for place in dict.fromkeys(((job_config.job.dump_folder, "job.dump_folder"), _place(job_config))):
        lock = FolderLock(*place)
        lock.acquire()
    return lock


def _saves(job_config) -> bool:
    return job_config.checkpoint.enable and not job_config.checkpoint.load_only


def _place(job_config) -> tuple[str, str]:
    """(the folder whose lock counts, the setting that names it)"""
    dump = job_config.job.dump_folder
    checkpoints = os.path.join(dump, job_config.checkpoint.folder)
    if not _saves(job_config) or Path(os.path.realpath(checkpoints)).is_relative_to(os.path.realpath(dump)):
        return dump, "job.dump_folder"
    return checkpoints, "checkpoint.folder"


@one_paragraph
def require_shared(job_config, lock: FolderLock | None) -> None:
    """Refuse a folder that nodes do not share: a checkpoint would be spread over their disks, and never load. Collective."""
    if int(os.environ["WORLD_SIZE"]) <= int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])):
        return  # one node
    token = [lock and lock.record["token"]]
    dist.broadcast_object_list(token)
    if token[0] is None:
        return
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"  # one of each node
    folder, setting = _place(job_config)
    sees = not speaks or FolderLock(folder).is_seen(token[0])
    blind = [None] * dist.get_world_size()
    dist.all_gather_object(blind, None if sees else os.uname().nodename)
    if hosts := ", ".join(filter(None, blind)):
        raise ValueError(
            f"{setting} = {folder} is not the same folder on all nodes: {hosts} cannot see what the "
            "first node wrote there. Give one on a file system that they share."
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
    """One boot of one machine, and within it what has process numbers of its own (a container); "" where Linux does not say."""
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
