"""Processes of their own for what may crash, hang or take too long: such an end loses one case, and the next one still runs.

`run` hands lists of cases to workers, one after another; `serve` is the worker's side and writes every row to a file at once.
The next worker is started ahead and waits for its cases, so that its imports cost no time. Standard library only.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

GRACE = 3.0  # seconds from SIGTERM to SIGKILL
GONE = 5.0  # seconds to wait after SIGKILL: a process inside a driver may take longer, and is left behind
POLL = 0.02


def descendants(*pids: int) -> list[int]:
    """Every process that these started, directly or not, as far as the chain of parents holds; none where there is no /proc."""
    children = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [child for pid in pids for child in children.get(pid, ())]
    for child in found:  # grows while it is walked
        found += children.get(child, ())
    return found


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def stop(process: subprocess.Popen, grace: float | None = None) -> None:
    """End a process and all that it started, in other sessions too (torchrun's ranks): SIGTERM, after `grace` s SIGKILL."""
    family = [process.pid, *descendants(process.pid)]
    if process.poll() is None:
        signal_all(family, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE if grace is None else grace)
    living = [pid for pid in family[process.poll() is not None :] if Path(f"/proc/{pid}").exists()]
    signal_all([*living, *descendants(*living)], signal.SIGKILL)
    if process.poll() is None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GONE)


class Worker:
    """A started process of `serve`, its lines and its last words."""

    def __init__(self, command: list[str], folder: str) -> None:
        self.lines = tempfile.NamedTemporaryFile("w+", dir=folder, suffix=".jsonl")  # noqa: SIM115 (closed by `end`)
        self.log = tempfile.TemporaryFile("w+", dir=folder, errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*command, self.lines.name], stdin=subprocess.PIPE, stdout=self.log, stderr=self.log, start_new_session=True
        )
        self.rest = ""

    def give(self, cases: list) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is dead, as `news` will find
            self.process.stdin.write(json.dumps(cases).encode() + b"\n")
            self.process.stdin.close()

    def news(self) -> list[dict]:
        *lines, self.rest = (self.rest + self.lines.read()).split("\n")
        return [json.loads(line) for line in lines]

    def last_words(self) -> str:
        self.log.seek(0)
        said = [line for line in self.log.read().splitlines() if line.strip()]
        return said[-1].strip() if said else "no word"

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        stop(self.process)
        self.lines.close()
        self.log.close()


def run(
    command: list[str],
    jobs: list[list],
    add: Callable[[object, list[dict], str | None], None],
    *,
    left: Callable[[], float],
    least: float = 20.0,
) -> None:
    """Work through `jobs`, each a list of cases (JSON) for a process of its own. Where one dies, another takes the rest.

    Args:
        command: starts a worker that calls `serve` with the file named by one more argument.
        add: called with the case, its rows, and why it did not come to its end (None if it did), when that is known.
        left: seconds until nothing may run any more.
        least: seconds; a case may take this, or four times an equal share of what is left if that is more.
    """
    jobs = [list(job) for job in jobs if job]
    with tempfile.TemporaryDirectory() as folder:
        spare = None
        try:
            while jobs:
                cases = jobs.pop(0)
                if left() <= 0:
                    for case in cases:
                        add(case, [], "not run: time limit")
                    continue
                worker = spare or Worker(command, folder)
                worker.give(cases)
                spare = Worker(command, folder) if jobs else None
                waiting = len(cases) + sum(map(len, jobs))
                try:
                    done = follow(worker, cases, add, lambda n=waiting: max(least, 4 * left() / n), left)
                finally:
                    worker.end()
                if done < len(cases):
                    jobs.insert(0, cases[done:])
        finally:
            if spare:
                spare.end()


def follow(worker: Worker, cases: list, add, limit: Callable[[], float], left: Callable[[], float]) -> int:
    """How many cases are over: all, or up to the one that the worker did not survive."""
    done, rows, began, allowed = 0, [], time.monotonic(), limit()
    while done < len(cases):
        ended = worker.process.poll() is not None  # before the last lines are read
        for line in worker.news():
            if "row" in line:
                rows.append(line["row"])
            else:
                add(cases[done], rows, None)
                done, rows, began, allowed = done + 1, [], time.monotonic(), limit()
        if done == len(cases):
            break
        problem = None
        if ended:
            problem = f"its process ended with status {worker.process.returncode}: {worker.last_words()}"
        elif left() <= 0:
            problem = "cut by the time limit"
        elif time.monotonic() - began > allowed:
            problem = f"cut after {allowed:.0f} s"
        if problem:
            add(cases[done], rows, problem)
            return done + 1
        time.sleep(POLL)
    return done


def serve(file: str, handle: Callable[[object, Callable[[dict], None]], None]) -> int:
    """The worker: handle(case, emit) for every case that standard input names; emit(row) is on the disk when it returns."""
    with open(file, "a") as out:

        def tell(line: dict) -> None:
            out.write(json.dumps(line) + "\n")
            out.flush()

        for case in json.loads(sys.stdin.readline() or "[]"):
            handle(case, lambda row: tell({"row": row}))
            tell({"end": case})
    return 0


def inline(jobs: list[list], add, handle, *, left: Callable[[], float]) -> None:
    """The same in this process, where nothing can crash: on a CPU."""
    for case in (case for job in jobs for case in job):
        rows = []
        if left() > 0:
            handle(case, rows.append)
            add(case, rows, None)
        else:
            add(case, rows, "not run: time limit")
