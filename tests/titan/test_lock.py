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


@pytest.fixture
def child():
    """child(act): what a forked process did with `act` before it waited for its end; its process id."""
    children = []

    def child(act):
        ready, said = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                act()
                os.write(said, b"x")
                signal.pause()
            finally:
                os._exit(1)
        children.append(pid)
        os.close(said)
        assert os.read(ready, 1) == b"x"
        os.close(ready)
        return pid

    yield child
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def at_once(monkeypatch):
    monkeypatch.setattr(lock, "time", SimpleNamespace(strftime=time.strftime, sleep=lambda _: pytest.fail("waited")))


def test_a_folder_is_held_and_left(tmp_path, acquired, monkeypatch):
    at_once(monkeypatch)
    holder = acquired()
    record = json.loads((tmp_path / NAME).read_text())
    assert (record["pid"], record["host"]) == (os.getpid(), os.uname().nodename)
    holder.release()
    assert list(tmp_path.iterdir()) == []
    assert "lock" not in [thread.name for thread in threading.enumerate()]


def test_two_runs_of_one_machine(tmp_path, child):
    """The first lives: the second is refused, by name. It is killed: the next takes over at once."""
    pid = child(lambda: FolderLock(tmp_path).acquire())
    with pytest.raises(ValueError, match=f"held by another run that is alive: process {pid} on {os.uname().nodename}"):
        FolderLock(tmp_path).acquire()
    assert json.loads((tmp_path / NAME).read_text())["pid"] == pid


def test_a_killed_holder_is_followed_at_once(tmp_path, child, acquired, monkeypatch):
    """Even where nobody has waited for it yet: a zombie holds nothing."""
    pid = child(lambda: FolderLock(tmp_path).acquire())
    os.kill(pid, signal.SIGKILL)
    while lock._began(pid) is not None:
        time.sleep(0.001)
    at_once(monkeypatch)
    acquired()
    assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("change", [{"pid": 2**30}, {"began": 1}], ids=["no such process", "another of that number"])
def test_a_process_that_is_gone(held, child, acquired, monkeypatch, change):
    pid = child(lambda: None)
    held(**{"pid": pid, "began": lock._began(pid)} | change)
    at_once(monkeypatch)
    acquired()


ELSEWHERE = {"machine": "elsewhere", "host": "nid007", "slurm_job": "42"}


@pytest.mark.parametrize("content", [None, "", "[1]"], ids=["another machine", "empty", "garbage"])
def test_a_silent_holder_elsewhere_is_dead(held, acquired, caplog, content):
    """Its node went down: nothing can be asked of it. This machine's process numbers say nothing of it."""
    path = held(**ELSEWHERE, pid=2**30)
    if content is not None:
        path.write_text(content)
    acquired()
    holder = "process 1073741824 on nid007, SLURM job 42" if content is None else "somebody (run.lock cannot be read)"
    assert f"is held by {holder}" in caplog.text
    assert json.loads(path.read_text())["pid"] == os.getpid()


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


def test_a_holder_elsewhere_that_lives_is_named(tmp_path, held):
    thread = beating(held(**ELSEWHERE), 0.8)
    with pytest.raises(ValueError, match=r"alive: process .* on nid007, SLURM job 42, since .*--job.dump_folder"):
        FolderLock(tmp_path).acquire()
    thread.join()


@pytest.mark.parametrize(
    ("job", "restarts", "taken"),
    [("42", 1, True), ("42", 2, False), ("41", 0, False)],
    ids=["earlier", "this", "another job"],
)
def test_a_start_that_slurm_gave_up_loses_the_folder(tmp_path, held, monkeypatch, caplog, job, restarts, taken):
    """Cut off with its node, it beats on; the job came back from the queue. Two runs of one start are a mistake of the user."""
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    path = held(**ELSEWHERE | {"slurm_job": job, "slurm_restarts": restarts})
    thread = beating(path, 0.8)
    later = FolderLock(tmp_path)
    if taken:
        later.acquire()
        assert "taking" in caplog.text
        assert json.loads(path.read_text())["token"] == later.record["token"]
    else:
        with pytest.raises(ValueError, match="held by another run that is alive"):
            later.acquire()
    thread.join()
    later.release()


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "dies"])
def test_a_holder_that_is_about_to_end_is_waited_for(held, acquired, leaves):
    path = held(**ELSEWHERE)
    thread = beating(path, 0.1, then=path.unlink if leaves else lambda: None)
    acquired()
    thread.join()


def test_a_run_that_was_taken_for_dead_writes_nothing_more(tmp_path, acquired, held):
    first = acquired()
    first.require()
    path = held(**ELSEWHERE)
    deadline = time.monotonic() + 5
    while first.lost is None and time.monotonic() < deadline:
        time.sleep(0.005)
    with pytest.raises(ValueError, match=r"taken over by another run, process .* on nid007"):
        first.require()
    touched = path.stat().st_mtime_ns
    first.release()
    assert path.stat().st_mtime_ns == touched  # the other's: neither touched nor removed


def test_of_two_that_begin_together_one_goes_on(tmp_path):
    both, together = [FolderLock(tmp_path) for _ in range(2)], threading.Barrier(2)

    def begin(each):
        together.wait()
        each.acquire()

    threads = [threading.Thread(target=begin, args=(each,)) for each in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in both:
        each.beat()
    assert [each.lost is None for each in both].count(True) == 1
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    for each in both:
        each.release()
    assert list(tmp_path.iterdir()) == []


def test_it_beats_and_puts_back_what_was_removed(tmp_path, acquired):
    holder = acquired()
    path = tmp_path / NAME
    for change in (lambda: os.utime(path, ns=(1, 1)), path.unlink):
        change()
        deadline = time.monotonic() + 5
        while not (path.exists() and path.stat().st_mtime_ns > 1) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert path.stat().st_mtime_ns > 1
    holder.require()


def test_a_file_system_that_is_away_is_no_loss(tmp_path, acquired, monkeypatch):
    holder = acquired()

    def away(*_, **__):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(lock.os, "utime", away)
    holder.beat()
    holder.require()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"dump_folder = .*file cannot be written to \(.*give a folder"):
        FolderLock(tmp_path / "file").acquire()


def config(folder, save=True, load_only=False, draw=False, checkpoints="checkpoint"):
    return SimpleNamespace(
        job=SimpleNamespace(dump_folder=str(folder)),
        checkpoint=SimpleNamespace(enable=save, load_only=load_only, folder=str(checkpoints)),
        metrics=SimpleNamespace(enable_tensorboard=draw),
    )


@pytest.mark.parametrize(
    ("settings", "rank", "holds"),
    [
        ({}, 0, True),
        ({}, 1, False),
        ({"save": False}, 0, False),
        ({"load_only": True}, 0, False),
        ({"save": False, "draw": True}, 0, True),
    ],
)
def test_who_holds(tmp_path, monkeypatch, settings, rank, holds):
    monkeypatch.setenv("RANK", str(rank))
    held = hold_folder(config(tmp_path / "run", **settings))
    assert (held is not None) == holds == (tmp_path / "run").exists()
    if held:
        held.release()


@pytest.mark.parametrize("linked", [False, True])
def test_checkpoints_outside_of_the_folder_are_held_too(linked, tmp_path, monkeypatch):
    """Two runs that have only them in common would write over each other's."""
    monkeypatch.setenv("RANK", "0")
    place = common = tmp_path / "common"
    common.mkdir()
    if linked:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "checkpoint").symlink_to(common)
        place = "checkpoint"
    held = hold_folder(config(tmp_path / "run", checkpoints=place))
    assert (common / NAME).exists()
    assert (tmp_path / "run" / NAME).exists()
    held.beat()
    held.require()
    (common / NAME).write_text('{"token": "another", "pid": 1}')
    held.beat()
    with pytest.raises(ValueError, match=r"^checkpoint.folder = .* was taken over by another run"):
        held.require()


def test_a_folder_that_nodes_do_not_share(tmp_path, acquired, alone, capsys, monkeypatch):
    """This process as the second of two nodes, where the same path leads elsewhere."""
    first = acquired()
    there = config(tmp_path / "elsewhere")
    monkeypatch.setenv("WORLD_SIZE", "1")
    require_shared(there, None)  # one node: nothing to compare
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(dist, "broadcast_object_list", lambda said: said.__setitem__(0, first.record["token"]))
    require_shared(config(tmp_path), None)
    error = refusal(capsys, require_shared, there, None)
    assert f"is not the same folder on all nodes: {os.uname().nodename} cannot see" in error
    monkeypatch.setenv("LOCAL_RANK", "1")
    require_shared(there, None)  # another of this node speaks
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(dist, "broadcast_object_list", lambda said: None)
    require_shared(there, None)  # a run that writes nothing
