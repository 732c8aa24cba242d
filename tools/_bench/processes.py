"""Runs cases in processes of their own, and counts the kernels that Triton compiles there.

A kernel that crashes or hangs ends the process of its case, and not the tool. A case is one
measurement or comparison of a tool, of any type that can be pickled; its row is the dict that the
tool's table shows.
"""

import contextlib
import dataclasses
import functools
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from typing import Any

import torch

from interdomain.tools._bench.results import reason
from interdomain.tools._bench.timing import release

CASE_SECONDS = 60.0  # the longest that a case may take on a GPU, compilation included
HANG_SECONDS = 25.0  # the longest that it may run after its last compilation; after that it hangs

Case = Any
# A function that takes a case, and its row or the reason why it has none.
Add = Callable[[Case, dict | str], None]


@dataclasses.dataclass
class Compilations:
    """Numbers of Triton kernels that were compiled, and that were read from the disk's cache."""

    compiled: int = 0
    read: int = 0

    def __str__(self) -> str:
        return f"{self.compiled} kernels compiled, {self.read} read from the cache"


COUNTS = Compilations()  # of this process, from the call of `count_compilations` on


def count_compilations() -> Compilations:
    """Counts from now on for as long as the process lives.

    Returns:
        COUNTS, which stay 0 without Triton.
    """

    def count(*, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            COUNTS.read += 1
        else:
            COUNTS.compiled += 1

    with contextlib.suppress(ImportError):
        from triton import knobs

        knobs.compilation.listener = count
    return COUNTS


def compilations_of(rows: Iterable[dict]) -> Compilations:
    """Returns how many kernels the cases compiled, and how many they read from the disk's cache.

    Args:
        rows: The rows of the cases.
    """
    total = Compilations()
    for row in rows:
        total.compiled += row.get("compiled", 0)
        total.read += row.get("read", 0)
    return total


def run_cases(
    device: torch.device,
    groups: list[list],
    function: Callable[[Case, torch.device], dict],
    add: Add,
    workers: int = 1,
) -> None:
    """Runs function(case, device) for every case, and hands its row to `add`.

    A case that raises has no row. On a GPU every group has a process of its own. If a case crashes,
    hangs or leaves the GPU in an error state, too, only its row is lost, and a new process takes
    the rest of its group.

    Args:
        device: The device that the cases run on.
        groups: Cases that share a process.
        function: A function that another process can import.
        add: Called for each case when it has ended, one call at a time.
        workers: The number of processes at a time.
    """
    if device.type == "cpu":
        # Nothing is expected to crash.
        for group in groups:
            for case in group:
                row = attempt(functools.partial(function, case, device), device, str(case))
                add(case, row)
        return

    # A thread for each process at work.
    lock = threading.Lock()

    def add_locked(case: Case, row: dict | str) -> None:
        with lock:
            add(case, row)

    def run_group(group: list) -> None:
        _run_group(group, functools.partial(_run_on_device, device, function), add_locked)

    with ThreadPoolExecutor(workers) as threads:
        list(threads.map(run_group, groups))


def _run_group(cases: list, function: Callable[[Case], dict | str], add: Add) -> None:
    """Runs the cases of one group in a process, and in a new one after each case that was lost.

    Args:
        cases: The cases of the group.
        function: Runs a case in the process.
        add: Called for each case when it has ended.
    """
    context = multiprocessing.get_context("spawn")  # a process with a CUDA context cannot be forked
    # Seconds of the monotonic clock at which the case last began to run without compiling; infinite
    # while it compiles. Both processes see it.
    running_since = context.Value("d")
    pool = None
    process = 0
    for case in cases:
        if pool is None:
            pool = ProcessPoolExecutor(1, context, _report_compilations, (running_since,))
            # The time of a case begins after the imports.
            process = pool.submit(_process_id, function).result()
        try:
            # Before the case begins, because it may compile at once.
            running_since.value = time.monotonic()
            row = _wait_for(pool.submit(function, case), running_since)
        except Exception as e:
            # The process may be at work still, or be of no use any more.
            row = str(e) if isinstance(e, TimeoutError) else reason(e)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            pool.shutdown(wait=False)
            pool = None
        add(case, row)
    if pool is not None:
        pool.shutdown()


def _process_id(function: Callable) -> int:
    """Returns the id of the process that runs this.

    Args:
        function: Unused. To unpickle it, the process imports what it needs, before a case's time
            begins.
    """
    return os.getpid()


def _report_compilations(running_since: Any) -> None:
    """Counts the compilations of this process, and keeps `running_since` up to date.

    Triton calls a hook before and after each compilation.

    Args:
        running_since: A number in shared memory: the seconds of the monotonic clock at which the
            case began to run without compiling; infinite while it compiles.
    """
    count_compilations()

    def begins(**_: Any) -> None:
        running_since.value = math.inf

    def ends(**_: Any) -> None:
        running_since.value = time.monotonic()

    with contextlib.suppress(ImportError):
        from triton import knobs

        knobs.runtime.jit_cache_hook = begins
        knobs.runtime.jit_post_compile_hook = ends


def _wait_for(future: Future, running_since: Any) -> dict | str:
    """Waits for the row of a case.

    Args:
        future: The case in its process.
        running_since: The shared number that `_report_compilations` keeps up to date.

    Raises:
        TimeoutError: The case hangs or takes too long.
        Exception: The process crashed, or the GPU did not survive.
    """
    started = time.monotonic()
    while not wait([future], timeout=0.5).done:
        now = time.monotonic()
        if now - running_since.value > HANG_SECONDS:
            raise TimeoutError(f"cut: it hung for {HANG_SECONDS:.0f} s")
        if now - started > CASE_SECONDS:
            raise TimeoutError(f"cut after {CASE_SECONDS:.0f} s")
    return future.result()


def _run_on_device(
    device: torch.device, function: Callable[[Case, torch.device], dict], case: Case
) -> dict | str:
    """Runs a case in this process.

    Args:
        device: The device that the case runs on.
        function: Computes the row of the case.
        case: The case.

    Returns:
        Its row, with the numbers of kernels that it compiled and read, or the reason why it has
        none.

    Raises:
        RuntimeError: The GPU does not survive the case.
    """
    if device.index is not None:
        torch.cuda.set_device(device)  # Triton launches on the current one
    before = dataclasses.replace(COUNTS)
    row = attempt(functools.partial(function, case, device), device, str(case))
    if isinstance(row, dict):
        row["compiled"] = COUNTS.compiled - before.compiled
        row["read"] = COUNTS.read - before.read
    return row


def attempt(run: Callable[[], dict], device: torch.device, name: str) -> dict | str:
    """Returns the row of a measurement, or the reason why it has none: out of memory is a result.

    Args:
        run: The measurement.
        device: The device that it uses.
        name: The measurement's name, for an error.

    Raises:
        RuntimeError: The GPU no longer answers: an error that a kernel left makes every later
            figure worthless.
    """
    try:
        row = run()
    except Exception as e:
        row = reason(e)
    if device.type == "cuda":
        try:
            torch.cuda.synchronize()
        except Exception as e:
            raise RuntimeError(
                f"after {name} the GPU is in an error state, nothing more can run: {reason(e)}"
            ) from e
        release(device)
    return row
