"""Cases in processes of their own: a crash, an abort, a hang and a cut each lose one row."""

import multiprocessing
import os
import time
from types import SimpleNamespace

from interdomain.tools._bench import apart


def handle(case, emit):
    name, number = case
    if name == "raises" and number == 1:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if name == "aborts" and number == 1:
        emit({"ms": -1})
        os.abort()
    if name == "sleeps" and number == 1:
        time.sleep(600)
    emit({"ms": number, "pid": os.getpid()})


def test_every_kind_of_end_loses_one_row():
    jobs = [[(name, number) for number in range(3)] for name in ("raises", "aborts", "sleeps", "fine")]
    found = {}

    def add(case, rows, problem):
        found[case] = rows, problem

    apart.run(jobs, add, handle, deadline=SimpleNamespace(left=0.1), workers=2, least=8.0)
    assert not multiprocessing.active_children()
    assert found.keys() == {case for job in jobs for case in job}
    lost = {case: problem for case, (_, problem) in found.items() if problem}
    assert lost == {
        ("raises", 1): "RuntimeError: CUDA error: an illegal memory access was encountered",
        ("aborts", 1): "its process ended with status -6",
        ("sleeps", 1): lost["sleeps", 1],
    }
    assert lost["sleeps", 1].startswith("cut after ")
    assert found["aborts", 1][0] == [{"ms": -1}]  # what was measured before stays
    assert all(rows[0]["ms"] == case[1] for case, (rows, problem) in found.items() if not problem)
    process = {case: rows[0]["pid"] for case, (rows, problem) in found.items() if not problem}
    assert process["fine", 0] == process["fine", 2]
    assert process["raises", 0] != process["raises", 2]


def test_the_deadline_cuts_one_case_and_names_the_others():
    found, deadline = {}, SimpleNamespace(left=60)
    jobs = [[("fine", 0), ("sleeps", 1), ("fine", 2)], [("fine", 3)]]

    def add(case, rows, problem):
        found[case[1]] = len(rows), problem
        deadline.left = 0  # after the first

    apart.run(jobs, add, handle, deadline=deadline)
    late = (0, "not run: time limit")
    assert found == {0: (1, None), 1: (0, "cut by the time limit"), 2: late, 3: late}
