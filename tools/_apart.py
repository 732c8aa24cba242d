"""Cases in processes of their own: one that crashes, hangs or takes too long loses its row, and the next one still runs.

`run` hands lists of cases to worker processes; `serve` is the worker's side and writes every row to a file at once. One worker
more than is busy has been started and waits, so that its imports cost no time. Standard library only.
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

Add = Callable[[object, list[dict], str | None], None]


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


def stop(process: subprocess.Popen) -> None:
    """End a process and all that it started, in other sessions too (torchrun's ranks): SIGTERM, then SIGKILL."""
    family = descendants(process.pid)
    if process.poll() is None:
        signal_all([process.pid, *family], signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    signal_all([*family, *descendants(*family, process.pid)], signal.SIGKILL)
    if process.poll() is None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GONE)


class Worker:
    """A process of `serve`, and the cases that it has not finished."""

    def __init__(self, command: list[str], folder: str) -> None:
        self.lines = tempfile.NamedTemporaryFile("w+", dir=folder, suffix=".jsonl")  # noqa: SIM115 (closed by `end`)
        self.log = tempfile.TemporaryFile("w+", dir=folder, errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*command, self.lines.name], stdin=subprocess.PIPE, stdout=self.log, stderr=self.log, start_new_session=True
        )
        self.cases, self.rows, self.rest = [], [], ""

    def give(self, cases: list) -> None:
        self.cases, self.began = cases, time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # it is dead, as `follow` will find
            self.process.stdin.write(json.dumps(cases).encode() + b"\n")
            self.process.stdin.close()

    def follow(self, add: Add, allowed: float, left: Callable[[], float]) -> bool:
        """Report the cases that are over; False when none is running any more."""
        ended = self.process.poll() is not None  # before the last lines are read
        *lines, self.rest = (self.rest + self.lines.read()).split("\n")
        for line in map(json.loads, lines):
            if "row" in line:
                self.rows.append(line["row"])
            else:
                self.over(add, None)
        problem = None
        if self.cases and ended:
            self.log.seek(0)
            said = [line for line in self.log.read().splitlines() if line.strip()]
            problem = (
                f"its process ended with status {self.process.returncode}: {said[-1].strip() if said else 'no word'}"
            )
        elif self.cases and left() <= 0:
            problem = "cut by the time limit"
        elif self.cases and time.monotonic() - self.began > allowed:
            problem = f"cut after {time.monotonic() - self.began:.0f} s"
        if problem:
            self.over(add, problem)
        return bool(self.cases) and not problem

    def over(self, add: Add, problem: str | None) -> None:
        case, *self.cases = self.cases
        add(case, self.rows, problem)
        self.rows, self.began = [], time.monotonic()

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        stop(self.process)
        self.lines.close()
        self.log.close()


def run(
    command: list[str],
    jobs: list[list],
    add: Add,
    *,
    left: Callable[[], float],
    workers: int = 1,
    least: float = 20.0,
) -> None:
    """Work through `jobs`, each a list of cases (JSON) for a process of its own. Where one dies, another takes the rest.

    Args:
        command: starts a worker that calls `serve` with the file named by one more argument.
        add: called with the case, its rows, and why it was not finished (None if it was), when that is known.
        left: seconds until nothing may run any more. workers: processes that work at a time.
        least: seconds; a case may take this, or four times an equal share of what is left if that is more.
    """
    jobs = [list(job) for job in jobs if job]
    busy, spare = [], None
    with tempfile.TemporaryDirectory() as folder:
        try:
            while jobs or busy:
                if left() <= 0:
                    for case in (case for job in jobs for case in job):
                        add(case, [], "not run: time limit")
                    jobs = []
                while jobs and len(busy) < workers:
                    busy.append(spare or Worker(command, folder))
                    busy[-1].give(jobs.pop(0))
                    spare = None
                spare = spare or (Worker(command, folder) if jobs else None)
                waiting = sum(len(cases) for cases in (*jobs, *(worker.cases for worker in busy)))
                for worker in [*busy]:
                    if not worker.follow(add, max(least, 4 * workers * left() / waiting), left):
                        busy.remove(worker)
                        jobs[:0] = [worker.cases] if worker.cases else []
                        worker.end()
                time.sleep(POLL)
        finally:
            for worker in (*busy, *([spare] if spare else [])):
                worker.end()


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


def inline(jobs: list[list], add: Add, handle: Callable, *, left: Callable[[], float]) -> None:
    """The same in this process, for a CPU, where nothing is expected to crash."""
    for case in (case for job in jobs for case in job):
        rows = []
        if left() > 0:
            handle(case, rows.append)
        add(case, rows, None if left() > 0 or rows else "not run: time limit")
