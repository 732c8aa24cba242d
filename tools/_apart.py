"""Cases in processes of their own: one that crashes, hangs or takes too long loses its row, and the next one still runs.

One more process than is busy has been started and waits for cases, so that its imports cost no time. Standard library only.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

GRACE = 3.0  # seconds from SIGTERM to SIGKILL
GONE = 5.0  # seconds to wait after SIGKILL: a process inside a driver may take longer, and is left behind
POLL = 0.02

Emit = Callable[[dict], None]
Handle = Callable[[object, Emit], None]  # handle(case, emit): emit(row) for every row of a case
Add = Callable[[object, list[dict], str | None], None]


def descendants(*pids: int) -> list[int]:
    """Every process that these started, directly or not, as far as the chain of parents holds; none where there is no /proc."""
    children = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [child for pid in pids for child in children.get(pid, ())]
    for child in found:  # grows while it is walked; a number that is given anew meanwhile may close a circle
        found += [other for other in children.get(child, ()) if other not in found]
    return found


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def stop(process: subprocess.Popen | multiprocessing.Process) -> None:
    """End a process and all that it started, in other sessions too (torchrun's ranks): SIGTERM, then SIGKILL."""
    is_popen = isinstance(process, subprocess.Popen)
    family = descendants(process.pid)
    for number, seconds in (signal.SIGTERM, GRACE), (signal.SIGKILL, GONE):
        living = process.poll() is None if is_popen else process.is_alive()
        signal_all([process.pid, *family] if living else family, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds) if is_popen else process.join(seconds)
        family += descendants(*family)


class Worker:
    """A process that works through a list of cases, and the cases that it has not finished."""

    def __init__(self, handle: Handle, imports: tuple[str, ...]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, handle, imports))
        self.process.start()
        theirs.close()
        self.cases, self.rows, self.said = [], [], None

    def give(self, cases: list) -> None:
        self.cases, self.began = cases, time.monotonic()
        with contextlib.suppress(OSError):  # it is dead, as `follow` will find
            self.pipe.send(cases)

    def follow(self, add: Add, allowed: float, left: Callable[[], float]) -> bool:
        """Report the cases that are over; False when none is running any more."""
        ended = not self.process.is_alive()  # before the last rows are read
        with contextlib.suppress(EOFError, OSError):
            while self.cases and self.pipe.poll():
                kind, value = self.pipe.recv()
                if kind == "row":
                    self.rows.append(value)
                elif kind == "raised":
                    self.said = value
                else:
                    self.over(add, None)
        problem = None
        if self.cases and ended:
            problem = f"its process ended with status {self.process.exitcode}: {self.said or 'no word'}"
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


def _serve(pipe, handle: Handle, imports: tuple[str, ...]) -> None:
    for module in imports:
        importlib.import_module(module)
    with contextlib.suppress(EOFError):  # no cases come any more
        for case in pipe.recv():
            try:
                handle(case, lambda row: pipe.send(("row", row)))
            except BaseException as e:
                pipe.send(("raised", f"{type(e).__name__}: {' '.join(str(e).split())}"))
                raise
            pipe.send(("end", None))


def run(
    jobs: list[list],
    add: Add,
    handle: Handle,
    *,
    left: Callable[[], float],
    workers: int = 1,
    least: float = 20.0,
    imports: tuple[str, ...] = (),
) -> None:
    """Work through `jobs`, each a list of cases for a process of its own. Where one dies, another takes the rest.

    Args:
        add: called with the case, its rows, and why it was not finished (None if it was), when that is known.
        handle: what a process does with a case; goes there by pickle.
        left: seconds until nothing may run any more. workers: processes that work at a time.
        least: seconds; a case may take this, or four times an equal share of what is left if that is more.
        imports: modules that a process imports while it waits.
    """
    jobs, busy, spare = [list(job) for job in jobs if job], [], None
    try:
        while jobs or busy:
            if left() <= 0:
                for case in (case for job in jobs for case in job):
                    add(case, [], "not run: time limit")
                jobs = []
            while jobs and len(busy) < workers:
                busy.append(spare or Worker(handle, imports))
                busy[-1].give(jobs.pop(0))
                spare = None
            spare = spare or (Worker(handle, imports) if jobs else None)
            waiting = sum(len(cases) for cases in (*jobs, *(worker.cases for worker in busy)))
            for worker in [*busy]:
                if not worker.follow(add, max(least, 4 * workers * left() / waiting), left):
                    busy.remove(worker)
                    jobs[:0] = [worker.cases] if worker.cases else []
                    stop(worker.process)
            time.sleep(POLL)
    finally:
        for worker in (*busy, *([spare] if spare else [])):
            stop(worker.process)


def inline(jobs: list[list], add: Add, handle: Handle, *, left: Callable[[], float], **_) -> None:
    """The same in this process, for a CPU, where nothing is expected to crash."""
    for case in (case for job in jobs for case in job):
        rows, late = [], left() <= 0
        if not late:
            handle(case, rows.append)
        add(case, rows, "not run: time limit" if late else None)
