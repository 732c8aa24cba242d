"""One run at a time in a folder: who is refused, what is taken over, and who finds out that it lost."""

import json
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from interdomain.titan import lock
from interdomain.titan.lock import NAME, FolderLock, hold_folder, require_shared

from .conftest import refusal

ELSEWHERE = {"machine": "elsewhere", "host": "nid007", "slurm_job": "42", "pid": 2**30}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, value in (("BEAT_SECONDS", 0.02), ("LOOK_SECONDS", 0.005), ("SILENCE", 60), ("PATIENCE", 40)):
        monkeypatch.setattr(lock, name, value)


@pytest.fixture
def held(tmp_path):
    """held(**changes): a lock in the folder, of a holder that differs in these fields from this process. Returns its path."""

    def held(**changes):
        path = tmp_path / NAME
        path.write_text(json.dumps(FolderLock(tmp_path).record | {"token": "another"} | changes))
        return path

    return held


@pytest.fixture
def acquired(tmp_path):
    """acquired(): a lock of the folder, as a run takes it; released after the test."""
    taken = []

    def acquired():
        taken.append(FolderLock(tmp_path))
        taken[-1].acquire()
        return taken[-1]

    yield acquired
    for each in taken:
        each.release()


def holder(path):
    return json.loads((path / NAME).read_text())["pid"]


def beating(path, seconds, then=lambda: None):
    """Another machine's run, seen from here: it touches the lock for so long."""

    def beat():
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            os.utime(path)
            time.sleep(0.02)
        then()

    thread = threading.Thread(target=beat)
    thread.start()
    return thread


def until(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_two_processes_of_one_machine(tmp_path, acquired, monkeypatch):
    """The first lives: the second is refused. It is killed: the next takes over at once, though nobody has waited for it."""
    ready, said = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            FolderLock(tmp_path).acquire()
            os.write(said, b"x")
            time.sleep(30)  # it ends by itself where the test fails
        finally:
            os._exit(1)
    os.read(ready, 1)
    with pytest.raises(ValueError, match=f"held by another run that is alive: process {pid} on {os.uname().nodename}"):
        FolderLock(tmp_path).acquire()
    assert holder(tmp_path) == pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: lock._began(pid) is None)
    monkeypatch.setattr(lock, "time", SimpleNamespace(strftime=time.strftime, sleep=lambda _: pytest.fail("waited")))
    ours = acquired()
    os.waitpid(pid, 0)
    assert holder(tmp_path) == os.getpid()
    ours.release()
    assert list(tmp_path.iterdir()) == []
    assert "lock" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(
    "change", [{"pid": 2**30}, {"pid": 1, "began": 1}], ids=["no process", "another of that number"]
)
def test_a_process_that_is_gone(held, acquired, monkeypatch, change):
    held(**change)
    monkeypatch.setattr(lock, "time", SimpleNamespace(strftime=time.strftime, sleep=lambda _: pytest.fail("waited")))
    acquired()


@pytest.mark.parametrize("content", [None, "", "[1]"], ids=["another machine", "empty", "garbage"])
def test_a_silent_holder_elsewhere_is_dead(held, acquired, caplog, content, tmp_path):
    """Its node went down: nothing can be asked of it. This machine's process numbers say nothing of it."""
    path = held(**ELSEWHERE)
    if content is not None:
        path.write_text(content)
    acquired()
    assert ("process 1073741824 on nid007, SLURM job 42" if content is None else "somebody") in caplog.text
    assert holder(tmp_path) == os.getpid()


@pytest.mark.parametrize(
    ("job", "restarts", "taken"),
    [("42", 1, True), ("42", 2, False), ("41", 0, False)],
    ids=["earlier start", "same start", "another job"],
)
def test_a_living_holder_elsewhere(tmp_path, held, acquired, monkeypatch, job, restarts, taken):
    """Refused, but for an earlier start of the same SLURM job: cut off with its node it beats on, and the job was requeued."""
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    thread = beating(held(**ELSEWHERE | {"slurm_job": job, "slurm_restarts": restarts}), 0.8)
    if taken:
        acquired()
        assert holder(tmp_path) == os.getpid()
    else:
        with pytest.raises(ValueError, match=r"alive: process .* on nid007, SLURM job 4\d, since .*--job.dump_folder"):
            FolderLock(tmp_path).acquire()
    thread.join()


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "dies"])
def test_a_holder_that_is_about_to_end_is_waited_for(held, acquired, leaves):
    path = held(**ELSEWHERE)
    thread = beating(path, 0.1, then=path.unlink if leaves else lambda: None)
    acquired()
    thread.join()


def test_a_run_that_was_taken_for_dead_writes_nothing_more(acquired, held):
    first = acquired()
    first.require()
    path = held(**ELSEWHERE)
    until(lambda: first.lost)
    with pytest.raises(ValueError, match=r"taken over by another run, process .* on nid007"):
        first.require()
    touched = path.stat().st_mtime_ns
    first.release()
    assert path.stat().st_mtime_ns == touched  # the other's: neither touched nor removed


def test_of_two_that_begin_together_one_goes_on(tmp_path):
    both, together = [FolderLock(tmp_path) for _ in range(2)], threading.Barrier(2)
    threads = [threading.Thread(target=lambda each=each: (together.wait(), each.acquire())) for each in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in both:
        each.beat()
    assert [each.lost is None for each in both].count(True) == 1
    for each in both:
        each.release()
    assert list(tmp_path.iterdir()) == []


def test_it_beats_and_puts_back_what_was_removed(tmp_path, acquired, monkeypatch):
    ours, path = acquired(), tmp_path / NAME
    for change in (lambda: os.utime(path, ns=(1, 1)), path.unlink):
        change()
        until(lambda: path.exists() and path.stat().st_mtime_ns > 1)
    monkeypatch.setattr(lock.os, "utime", lambda *_: (_ for _ in ()).throw(OSError(116, "Stale file handle")))
    ours.beat()  # a file system that is away is no loss
    ours.require()


def config(folder, save=True, load_only=False, draw=False, checkpoints="checkpoint"):
    return SimpleNamespace(
        job=SimpleNamespace(dump_folder=str(folder)),
        checkpoint=SimpleNamespace(enable=save, load_only=load_only, folder=str(checkpoints)),
        metrics=SimpleNamespace(enable_tensorboard=draw),
    )


@pytest.mark.parametrize(
    ("settings", "rank", "holds"),
    [
        ({}, 0, "run"),
        ({}, 1, None),
        ({"load_only": True}, 0, None),
        ({"save": False, "draw": True}, 0, "run"),
        ({"checkpoints": "../common"}, 0, "common"),  # two runs that have only them in common
    ],
)
def test_who_holds_what(tmp_path, monkeypatch, settings, rank, holds):
    monkeypatch.setenv("RANK", str(rank))
    ours = hold_folder(config(tmp_path / "run", **settings))
    assert [path.parent.name for path in tmp_path.glob(f"*/{NAME}")] == ([holds] if holds else [])
    if ours:
        ours.release()


def test_folders_that_cannot_be_written_or_that_nodes_do_not_share(tmp_path, acquired, alone, capsys, monkeypatch):
    """This process as the second of two nodes, where the same path leads elsewhere."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file cannot be written to \(.*give a folder"):
        FolderLock(tmp_path / "file").acquire()
    token, there = acquired().record["token"], config(tmp_path / "elsewhere")
    monkeypatch.setenv("WORLD_SIZE", "1")
    require_shared(there, None)  # one node: nothing to compare
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(dist, "broadcast_object_list", lambda said: said.__setitem__(0, token))
    require_shared(config(tmp_path), None)
    error = refusal(capsys, require_shared, there, None)
    assert f"is not the same folder on all nodes: {os.uname().nodename} cannot see" in error
    monkeypatch.setenv("LOCAL_RANK", "1")
    require_shared(there, None)  # another rank of this node looks
