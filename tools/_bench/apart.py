"""Cases in processes of their own: one that crashes, hangs or takes too long loses its row, and the others still run."""

import itertools
import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Callable

Emit = Callable[[dict], None]
Handle = Callable[[object, Emit], None]  # handle(case, emit): emit(row) for every row of a case
Add = Callable[[object, list[dict], str | None], None]
LATE = "not run: time limit"
GONE = 5.0  # seconds to wait after SIGKILL: a process inside a driver may take longer, and is left behind
CONTEXT = multiprocessing.get_context("spawn")  # a process with a CUDA context cannot be forked


class Worker:
    """A process that works through a list of cases, and the cases that it has not finished."""

    def __init__(self, handle: Handle, cases: list, allowed: float) -> None:
        self.pipe, theirs = CONTEXT.Pipe(duplex=False)
        self.process = CONTEXT.Process(target=_serve, args=(theirs, handle, cases), daemon=True)
        self.process.start()
        theirs.close()
        self.cases, self.rows, self.allowed = list(cases), [], allowed
        self.began = time.monotonic()

    def follow(self, add: Add, left: float) -> bool:
        """Report the cases that are over; False when this process works no more."""
        try:
            while self.cases and self.pipe.poll():
                row, problem = self.pipe.recv()
                if row is not None:
                    self.rows.append(row)
                    continue
                self.over(add, problem)
                if problem:
                    return False
        except (EOFError, OSError):
            self.process.join(GONE)
            self.over(add, f"its process ended with status {self.process.exitcode}")
            return False
        taken = time.monotonic() - self.began
        if self.cases and (left <= 0 or taken > self.allowed):
            self.over(add, "cut by the time limit" if left <= 0 else f"cut after {taken:.0f} s")
            return False
        return bool(self.cases)

    def over(self, add: Add, problem: str | None) -> None:
        add(self.cases.pop(0), self.rows, problem)
        self.rows, self.began = [], time.monotonic()

    def stop(self) -> None:
        self.process.kill()
        self.process.join(GONE)


def _serve(pipe, handle: Handle, cases: list) -> None:
    """Send (row, None) for a row and (None, None) after a case; (None, why) for an exception, which ends the process."""
    for case in cases:
        try:
            handle(case, lambda row: pipe.send((row, None)))
        except BaseException as e:
            pipe.send((None, f"{type(e).__name__}: {' '.join(str(e).split())}"))
            raise
        pipe.send((None, None))


def run(jobs: list[list], add: Add, handle: Handle, *, deadline, workers: int = 1, least: float = 20.0) -> None:
    """Work through `jobs`, each a list of cases for a process of its own. Where one dies, another takes the rest.

    Args:
        add: called with the case, its rows, and why it was not finished (None if it was).
        handle: what a process does with a case; goes there by pickle.
        deadline: deadline.left are the seconds until nothing may run any more. workers: processes that work at a time.
        least: seconds; a case may take this, or a third of what is left if that is more.
    """
    jobs, busy = [list(job) for job in jobs if job], []
    try:
        while jobs or busy:
            while jobs and deadline.left > 0 and len(busy) < workers:
                busy.append(Worker(handle, jobs.pop(0), max(least, deadline.left / 3)))
            if deadline.left <= 0:
                for case in itertools.chain.from_iterable(jobs):
                    add(case, [], LATE)
                jobs = []
            multiprocessing.connection.wait([worker.pipe for worker in busy], timeout=0.1)
            for worker in [*busy]:
                if not worker.follow(add, deadline.left):
                    worker.stop()
                    busy.remove(worker)
                    jobs[:0] = [worker.cases] if worker.cases else []
    finally:
        for worker in busy:
            worker.stop()


def inline(jobs: list[list], add: Add, handle: Handle, *, deadline, **_) -> None:
    """The same in this process, for a CPU, where nothing is expected to crash."""
    for case in itertools.chain.from_iterable(jobs):
        rows, late = [], deadline.left <= 0
        if not late:
            handle(case, rows.append)
        add(case, rows, LATE if late else None)
