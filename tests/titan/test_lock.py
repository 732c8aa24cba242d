"""One run at a time in a folder: who is refused, what is taken over, and who finds out that it lost."""

import json
import os
import time
from unittest import mock

import pytest
import torch.distributed as dist

from interdomain.titan.resume import lock
from interdomain.titan.resume.lock import LOCK_NAME, RunLock, hold_folder, owner_of, require_shared

from ..common import TIMEOUT
from .conftest import refusal
from .runs import parse


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(lock, "POLL_SECONDS", 0.005)
    monkeypatch.setattr(lock, "PATIENCE", 40)
    monkeypatch.setenv("RANK", "0")


def write_lock(folder, **changes):
    """Writes the lock of a run on another machine, and returns its path."""
    elsewhere = {"token": "another", "machine": "elsewhere", "host": "nid007", "pid": 7}
    path = folder / LOCK_NAME
    path.write_text(json.dumps(RunLock([]).record | elsewhere | changes))
    return path


def acquire(folder):
    taken = RunLock([folder])
    taken.acquire()
    assert owner_of(folder)["token"] == taken.record["token"]
    return taken


def between_polls(monkeypatch, act):
    """Calls act() in place of the wait between two polls of another run's lock."""
    sleep = time.sleep

    def wait(seconds):
        if seconds == lock.POLL_SECONDS:
            act()
        else:
            sleep(seconds)

    monkeypatch.setattr(lock, "time", mock.Mock(sleep=wait, strftime=time.strftime))


def test_a_living_owner_on_this_machine_is_not_disturbed(tmp_path, monkeypatch):
    """It touches its lock. test_kills.py has an owner that is killed, whose lock is taken over at once."""
    path = tmp_path / LOCK_NAME
    first = acquire(tmp_path)
    before = path.stat().st_mtime_ns
    deadline = time.monotonic() + TIMEOUT
    while path.stat().st_mtime_ns == before:
        assert time.monotonic() < deadline
        time.sleep(0.005)

    between_polls(monkeypatch, first.refresh)
    owner = f"process {os.getpid()} on {os.uname().nodename}"
    with pytest.raises(ValueError, match=f"in use by another run: {owner}"):
        RunLock([tmp_path]).acquire()


def test_a_silent_owner_on_another_machine_is_dead(tmp_path):
    """Its node went down. A process of the same number on this machine says nothing about it."""
    write_lock(tmp_path, pid=os.getpid())
    acquire(tmp_path)
    write_lock(tmp_path).write_text("")  # as a sudden end can leave it
    acquire(tmp_path)


def test_a_file_that_is_no_lock(tmp_path, capsys):
    """A start is refused. A run that holds the folder goes on, and leaves the file in its place."""
    first = acquire(tmp_path)
    path = tmp_path / LOCK_NAME
    path.write_bytes(b"\xff")
    first.refresh()
    first.check_held()
    first.release()
    assert f"{path} is not a lock: it holds" in refusal(capsys, hold_folder, config(tmp_path))
    assert path.read_bytes() == b"\xff"


@pytest.mark.parametrize(
    ("job", "restarts", "lives"), [("42", 2, True), ("41", 0, True), ("42", 1, False)]
)
def test_an_owner_on_another_machine(tmp_path, monkeypatch, job, restarts, lives):
    """Another process of this start, or another job, is not disturbed. An earlier start of the same job is taken over.

    That one was cut off with its node, where it may live on, and SLURM requeued the job.
    """
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    path = write_lock(tmp_path, slurm_job=job, slurm_restarts=restarts)

    def touch():
        later = path.stat().st_mtime_ns + 1
        os.utime(path, ns=(later, later))

    between_polls(monkeypatch, touch)
    if lives:
        with pytest.raises(ValueError, match=r"process 7 on nid007, since .*--job.dump_folder"):
            RunLock([tmp_path]).acquire()
    else:
        acquire(tmp_path)


def test_an_owner_that_is_about_to_end_is_waited_for(tmp_path, monkeypatch):
    between_polls(monkeypatch, write_lock(tmp_path).unlink)
    acquire(tmp_path)


def test_a_run_that_was_taken_for_dead_writes_nothing_more(tmp_path):
    first = acquire(tmp_path)
    path = write_lock(tmp_path)
    first.refresh()
    before = path.stat().st_mtime_ns
    first.refresh()
    first.release()
    assert path.stat().st_mtime_ns == before  # the other's lock is neither touched nor removed
    with pytest.raises(ValueError, match="taken over by another run"):
        first.check_held()


def config(folder, given="--checkpoint.enable"):
    return parse(f"--job.dump_folder {folder} {given}")


SAVED = "--checkpoint.enable --checkpoint.folder"
CURVES = "--metrics.enable_tensorboard --metrics.save_tb_folder"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (f"{SAVED} ../shared", f"{SAVED} ../shared/"),
        (f"{SAVED} ../shared", f"{SAVED} ../link"),
        (f"{CURVES} own", f"{SAVED} ../first/own"),
    ],
)
def test_two_runs_do_not_write_into_one_folder(tmp_path, monkeypatch, capsys, first, second):
    """Each has a folder of its own, but the second would save its checkpoints into a folder of the first."""
    (tmp_path / "link").symlink_to(tmp_path / "shared")
    owner = hold_folder(config(tmp_path / "first", first))
    between_polls(monkeypatch, owner.refresh)
    error = refusal(capsys, hold_folder, config(tmp_path / "second", second))
    assert "in use by another run" in error


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_save(tmp_path, capsys):
    """The checkpoints are to go to a disk that is not mounted."""
    (tmp_path / "checkpoint").symlink_to(tmp_path / "away")
    error = refusal(capsys, hold_folder, config(tmp_path))
    assert f"File exists: '{tmp_path}/checkpoint'" in error


@pytest.mark.parametrize("apart", ["--job.dump_folder elsewhere", f"{SAVED} mine"])
def test_a_folder_that_nodes_do_not_share(tmp_path, alone, capsys, monkeypatch, apart):
    """This process is the second of two nodes, on which the same path leads elsewhere."""
    token = hold_folder(config(tmp_path)).record["token"]

    def receive_token(objects):
        objects[0] = token

    monkeypatch.setattr(dist, "broadcast_object_list", receive_token)
    require_shared(config(tmp_path), None)
    job = config(tmp_path, f"--checkpoint.enable {apart}")
    error = refusal(capsys, require_shared, job, None)
    assert f"is not the same folder on all nodes: {os.uname().nodename} cannot see" in error
