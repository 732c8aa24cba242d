"""One run at a time in a folder: who is refused, what is taken over, and who finds out that it lost."""

import json
import os
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from interdomain.checkpoint.run_folder import checkpoints_of, events_of
from interdomain.checkpoint.step_folder import RECORD_FACTS, RECORD_FILE
from interdomain.model import build_config
from interdomain.titan.resume import lock
from interdomain.titan.resume.lock import NAME, RunLock, hold_folder, owner_of, require_shared

from ..common import TIMEOUT
from .conftest import refusal
from .runs import parse

ELSEWHERE = {
    "token": "another",
    "machine": "elsewhere",
    "host": "nid007",
    "pid": 7,
    "slurm_job": "42",
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, value in (("HEARTBEAT_SECONDS", 0.02), ("POLL_SECONDS", 0.005), ("PATIENCE", 40)):
        monkeypatch.setattr(lock, name, value)
    monkeypatch.setenv("RANK", "0")


def held(folder, **changes):
    """A lock in the folder, of a holder elsewhere. Returns its path."""
    path = folder / NAME
    path.write_text(json.dumps(RunLock([]).record | ELSEWHERE | changes))
    return path


def acquire(folder):
    taken = RunLock([folder])
    taken.acquire()
    assert owner_of(folder)["token"] == taken.record["token"]
    return taken


def between_looks(monkeypatch, act):
    """act() in place of the wait between two looks at another's lock."""
    sleep = time.sleep

    def wait(seconds):
        if seconds == lock.HEARTBEAT_SECONDS:
            sleep(seconds)
        else:
            act()

    replaced = SimpleNamespace(sleep=wait, strftime=time.strftime)
    monkeypatch.setattr(lock, "time", replaced)


def until(condition):
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_living_holder_on_this_machine(tmp_path, monkeypatch):
    """It touches its lock; test_kills.py has one that is killed, whose lock is taken over at once."""
    acquire(tmp_path)
    path = tmp_path / NAME
    seen = path.stat().st_mtime_ns
    between_looks(monkeypatch, lambda: until(lambda: path.stat().st_mtime_ns > seen))
    with pytest.raises(
        ValueError, match=f"in use by another run: process {os.getpid()} on {os.uname().nodename}"
    ):
        RunLock([tmp_path]).acquire()


def test_a_silent_holder_elsewhere_is_dead(tmp_path):
    """Its node went down: nothing can be asked of it. This machine's process numbers say nothing of it."""
    held(tmp_path, pid=os.getpid())
    acquire(tmp_path)
    held(tmp_path).write_text("")  # as a sudden end can leave it
    acquire(tmp_path)


def test_a_file_that_is_no_lock(tmp_path, capsys):
    """A start is refused in words. A run that holds the folder goes on, and leaves the file where it is."""
    first, path = acquire(tmp_path), tmp_path / NAME
    path.write_bytes(b"\xff")
    first.refresh()
    first.check_held()
    first.release()
    assert f"{path} is not a lock: it holds" in refusal(capsys, hold_folder, config(tmp_path))
    assert path.read_bytes() == b"\xff"


@pytest.mark.parametrize(
    ("job", "restarts", "beats", "taken"),
    [("42", 1, 40, True), ("42", 2, 40, False), ("41", 0, 40, False), ("41", 0, 5, True)],
    ids=["earlier start", "same start", "another job", "about to end"],
)
def test_a_living_holder_elsewhere(tmp_path, monkeypatch, job, restarts, beats, taken):
    """Refused, but for an earlier start of the same SLURM job: cut off with its node it beats on, and the job was requeued. One
    that is about to end is waited for."""
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    path = held(tmp_path, slurm_job=job, slurm_restarts=restarts)
    left = [*range(1, beats + 1)]

    def beat():
        """Between our looks it touches its lock, so often, and then releases it."""
        if left:
            os.utime(path, ns=(left[0], left.pop(0)))
        else:
            path.unlink(missing_ok=True)

    between_looks(monkeypatch, beat)
    if taken:
        acquire(tmp_path)
        return
    with pytest.raises(
        ValueError, match=r"another run: process 7 on nid007, since .*--job.dump_folder"
    ):
        RunLock([tmp_path]).acquire()


def test_a_run_that_was_taken_for_dead_writes_nothing_more(tmp_path):
    first, path = acquire(tmp_path), tmp_path / NAME
    os.utime(path, ns=(1, 1))
    until(lambda: path.stat().st_mtime_ns > 1)  # it beats
    held(tmp_path)
    until(lambda: first.lost)
    touched = path.stat().st_mtime_ns
    first.release()
    assert path.stat().st_mtime_ns == touched  # the other's: neither touched nor removed
    path.unlink()
    first.refresh()
    with pytest.raises(ValueError, match="taken over by another run"):
        first.check_held()


def config(folder, given="--checkpoint.enable"):
    return parse(f"--job.dump_folder {folder} {given}")


DRAWN = "--metrics.enable_tensorboard"


@pytest.mark.parametrize(
    ("given", "rank", "holds"),
    [
        ("--checkpoint.enable", 0, True),
        ("--checkpoint.enable", 1, False),
        ("", 0, False),
        (DRAWN, 0, True),
    ],
)
def test_who_holds_a_lock(tmp_path, monkeypatch, given, rank, holds):
    monkeypatch.setenv("RANK", str(rank))
    assert (
        bool(hold_folder(config(tmp_path / "run", given)))
        == (tmp_path / "run" / NAME).exists()
        == holds
    )


SAVED = "--checkpoint.enable --checkpoint.folder"
CURVES = f"{DRAWN} --metrics.save_tb_folder"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (f"{SAVED} ../shared/a", f"{SAVED} ../shared/a/"),
        (f"{SAVED} ../shared/a", f"{SAVED} link"),
        (f"{SAVED} own", f"{SAVED} ../first/own"),
        (f"{CURVES} ../shared/a", f"{CURVES} ../shared/a"),
        (f"{CURVES} own", f"{SAVED} ../first/own"),
    ],
    ids=["checkpoints", "through a link", "inside the first", "curves", "checkpoints into curves"],
)
def test_two_runs_do_not_write_into_one_folder(tmp_path, monkeypatch, capsys, first, second):
    """Each has a folder of its own, but the second's checkpoints or curves would go where the first one's go."""
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "link").symlink_to(tmp_path / "shared" / "a")
    holder = hold_folder(config(tmp_path / "first", first))
    between_looks(monkeypatch, holder.refresh)
    assert "in use by another run" in refusal(
        capsys, hold_folder, config(tmp_path / "second", second)
    )


def test_a_lost_run_is_waited_for_once(tmp_path, monkeypatch):
    """A minute, and not a minute in each of its folders."""
    for folder in ("", "checkpoint", "tb"):
        (tmp_path / folder).mkdir(exist_ok=True)
        held(tmp_path / folder)
    looks = []
    between_looks(monkeypatch, lambda: looks.append(1))
    assert hold_folder(config(tmp_path, f"--checkpoint.enable {DRAWN}"))
    assert len(looks) == lock.PATIENCE


def test_the_tools_find_what_a_run_wrote(tmp_path):
    """By the names of its last start, also outside of its folder; without a note, of an earlier version, by the defaults."""
    run = tmp_path / "run"
    assert (checkpoints_of(run), events_of(run)) == (run / "checkpoint", run / "tb")
    for checkpoints, curves in (("ck", "curves"), (tmp_path / "elsewhere", "tb")):
        hold_folder(config(run, f"{SAVED} {checkpoints} {CURVES} {curves}")).release()
        assert (checkpoints_of(run), events_of(run)) == (run / checkpoints, run / curves)


def test_a_refused_start_does_not_lead_the_tools_to_another_run(tmp_path, capsys):
    run = tmp_path / "run"
    hold_folder(config(run)).release()
    step = tmp_path / "others" / "step-4"
    step.mkdir(parents=True)
    record = {
        "format_version": 1,
        "model": build_config("debug").to_dict(),
        "folder": str(tmp_path / "other"),
    }
    record |= {name: {} for name in (*RECORD_FACTS, "tokenizer")}
    record |= {"step": 4, "tokens": 0, "size": "debug", "condition": "softmax"}
    (step / RECORD_FILE).write_text(json.dumps(record))
    assert "of another run" in refusal(capsys, hold_folder, config(run, f"{SAVED} {step.parent}"))
    assert checkpoints_of(run) == run / "checkpoint"


def test_checkpoints_that_could_not_be_written(tmp_path, capsys):
    """They are refused before the first save, for one on a disk that is away."""
    (tmp_path / "checkpoint").symlink_to(tmp_path / "away")
    error = refusal(capsys, hold_folder, config(tmp_path))
    assert f"File exists: '{tmp_path}/checkpoint'" in error


def test_a_folder_that_nodes_do_not_share(tmp_path, alone, capsys, monkeypatch):
    """This process as the second of two nodes, where the same path leads elsewhere."""
    token = hold_folder(config(tmp_path)).record["token"]
    elsewhere = config(tmp_path / "elsewhere")
    require_shared(elsewhere, None)  # nobody holds a lock
    monkeypatch.setattr(dist, "broadcast_object_list", lambda said: said.__setitem__(0, token))
    require_shared(config(tmp_path), None)
    apart = config(tmp_path, f"{SAVED} {tmp_path / 'mine'}")
    assert f"{tmp_path / 'mine'} is not the same folder" in refusal(
        capsys, require_shared, apart, None
    )
    error = refusal(capsys, require_shared, elsewhere, None)
    assert f"is not the same folder on all nodes: {os.uname().nodename} cannot see" in error
