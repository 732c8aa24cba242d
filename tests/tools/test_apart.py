"""Cases in processes of their own: a crash, an abort, a hang and a cut each lose one row."""

import multiprocessing
import os
import signal
import subprocess
import time

import pytest

from interdomain.tools import _apart


def handle(case, emit):
    name, number = case
    if name == "raises" and number == 1:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if name == "aborts" and number == 1:
        emit({"ms": -1})
        os.abort()
    if name == "exits":
        os._exit(7)
    if name == "sleeps" and number == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    emit({"ms": number, "pid": os.getpid()})


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(_apart, "GRACE", 0.2)


def test_every_kind_of_end_loses_one_row():
    """A case that raises, one that aborts, one that sleeps and ignores SIGTERM, one that exits; and cases that are well."""
    names = ("raises", "aborts", "sleeps", "fine")
    jobs = [[[name, number] for number in range(3)] for name in names] + [[["exits", 0]], [["last", 0]]]
    found = {}

    def add(case, rows, problem):
        found[tuple(case)] = rows, problem

    ends = time.monotonic() + 60
    left = lambda: min(0.2, ends - time.monotonic())  # noqa: E731
    _apart.run(jobs, add, handle, left=left, workers=2, least=8.0)
    assert not multiprocessing.active_children()
    assert found.keys() == {tuple(case) for job in jobs for case in job}
    lost = {case: problem for case, (_, problem) in found.items() if problem}
    said = "its process ended with status"
    assert lost == {
        ("raises", 1): f"{said} 1: RuntimeError: CUDA error: an illegal memory access was encountered",
        ("aborts", 1): f"{said} -6: no word",
        ("sleeps", 1): lost["sleeps", 1],
        ("exits", 0): f"{said} 7: no word",
    }
    assert lost["sleeps", 1].startswith("cut after ")
    assert found["aborts", 1][0] == [{"ms": -1}]  # what was measured before stays
    assert all(rows[0]["ms"] == case[1] for case, (rows, problem) in found.items() if not problem)
    process = {case: rows[0]["pid"] for case, (rows, problem) in found.items() if not problem}
    assert process["fine", 0] == process["fine", 1] == process["fine", 2] != process["last", 0]
    assert process["raises", 0] != process["raises", 2]


def test_the_deadline_cuts_one_case_and_names_the_others():
    found = {}
    jobs = [[["fine", 0], ["sleeps", 1], ["fine", 2]], [["fine", 3]]]
    add = lambda case, rows, problem: found.update({case[1]: (len(rows), problem)})  # noqa: E731
    began = time.monotonic()
    left = lambda: 60.0 if 0 not in found else began - 1 - time.monotonic()  # noqa: E731
    _apart.run(jobs, add, handle, left=left)
    late = (0, "not run: time limit")
    assert found == {0: (1, None), 1: (0, "cut by the time limit"), 2: late, 3: late}


def test_a_process_is_ended_with_all_that_it_started():
    """torchrun starts its ranks in sessions of their own: a signal to its group does not reach them."""
    tree = "setsid sleep 98765 & setsid sh -c 'trap \"\" TERM; sleep 98765; sleep 98765' & wait"
    process = subprocess.Popen(["sh", "-c", tree])
    while len(family := _apart.descendants(process.pid)) < 3:
        time.sleep(0.02)
    _apart.stop(process)
    assert process.poll() is not None
    ends = time.monotonic() + 5
    while alive := [pid for pid in family if _alive(pid)]:  # SIGKILL takes a moment
        assert time.monotonic() < ends, alive


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
