"""Parts that the benchmarks share: flags, the record of the machine, and results that grow row by row in a JSON file."""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import itertools
import json
import math
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from interdomain.environment import environment
from interdomain.folders import write_whole
from interdomain.markdown import cell_text, markdown_rows
from interdomain.scan.triton_support import cannot_launch
from interdomain.tools import _cli
from interdomain.tools._bench.pages import CHECK, read_verdicts, warnings
from interdomain.tools._bench.timing import release
from interdomain.tools.launch import refuse_idle_gpus

CPU_LABEL = "CPU tiny mode: these figures say nothing about a GPU"
RESULTS = Path("benchmarks/results/today")
CASE_SECONDS = 60.0  # that a case may take on a GPU, compilation included
HANG_SECONDS = 25.0  # that it may run after its last compilation: then it hangs


@dataclasses.dataclass
class Compilations:
    """How many Triton kernels a process compiled, and how many it read from the cache on the disk."""

    compiled: int = 0
    read: int = 0

    def __str__(self) -> str:
        return f"{self.compiled} kernels compiled, {self.read} read from the cache"


COUNTS = Compilations()  # of this process, from `count_compilations` on


def count_compilations() -> Compilations:
    """Counts for as long as the process lives. Returns: COUNTS, which stay 0 without Triton."""

    def add(*, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            COUNTS.read += 1
        else:
            COUNTS.compiled += 1

    with contextlib.suppress(ImportError):
        from triton import knobs

        knobs.compilation.listener = add
    return COUNTS


def add_arguments(parser: argparse.ArgumentParser, name: str, device: str = _cli.DEVICE) -> None:
    """Add --output, --name and --device, which every tool has. name: the default of --name."""
    parser.add_argument(
        "--output",
        type=_cli.path_argument,
        default=RESULTS,
        metavar="DIR",
        help=_cli.RESULTS,
    )
    parser.add_argument(
        "--name",
        default=name,
        help=f"the results are DIR/NAME.json (default: {name}), so that one folder can hold several runs of a tool",
    )
    _cli.add_device(parser, device)


def choose_device(name: str) -> torch.device:
    """Raises: ValueError for a GPU that is not there, that PyTorch cannot use, or for which nothing can be compiled."""
    if name == "auto":
        refuse_idle_gpus()  # the driver may be too old: the CPU's tiny mode would pass for its check
    device = _cli.choose_device(name)
    if device.type == "cuda" and (problem := cannot_launch()):
        raise ValueError(f"{problem}.")
    return device


def choose(option: str, wanted: Collection[str] | None, allowed: Collection[str]) -> list[str]:
    """`wanted`, or all of `allowed` if nothing is. Raises: ValueError for a name that is not allowed."""
    if unknown := [name for name in wanted or () if name not in allowed]:
        raise ValueError(
            f"{option}: there is no {', '.join(unknown)}. Allowed are {', '.join(allowed)}."
        )
    return list(wanted or allowed)


def fill_in(args: argparse.Namespace, device: torch.device, **defaults: tuple) -> None:
    """Give the options that were left out their default, name=(on a GPU, on a CPU). Raises: ValueError for a number below 1."""
    for name, values in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, values[device.type == "cpu"])
    _cli.require_at_least(args, **dict.fromkeys(defaults, 1))


class Report:
    """One part's results, folder/part.json, rewritten after every row: a part that is cut keeps them.

    Args:
        folder: made if it is not there.
        options: the settings that the figures depend on, as they were used.
        label: what the figures are; None: those of a GPU, or of a CPU in its tiny mode.
        named: True for sizes that the user named: then the figures of a CPU are those of a CPU.
    Raises: FileExistsError if this part's results are there: nothing is overwritten. OSError if nothing can be written.
    """

    def __init__(
        self,
        part: str,
        folder: Path,
        device: torch.device,
        options: dict,
        label: str = "",
        named: bool = False,
    ) -> None:
        self.folder = folder
        self.json = folder / f"{part}.json"
        self.started = time.monotonic()
        self.printed = None
        if self.json.exists():
            raise FileExistsError(
                f"{self.json} exists, and results are never overwritten. Give another --output."
            )
        folder.mkdir(parents=True, exist_ok=True)
        record = environment(device)
        verdicts = read_verdicts(folder / CHECK)
        if not label:
            label = f"measured on {record['GPU']}" if device.type != "cpu" else CPU_LABEL
            if device.type == "cpu" and named:
                label = f"measured on a CPU, {torch.get_num_threads()} thread(s)"
        self.contents: dict[str, Any] = {
            "part": part,
            "status": "unfinished",
            "label": label,
            "check": verdicts or "not run",
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": 0.0,
            "environment": record,
            "options": options,
            "notes": [],
            "tables": {},
        }
        self.write()
        print(f"== {part}: {label} ==")
        for name, fact in record.items():
            print(f"{name:>24}  {fact}")
        for warning in warnings(verdicts):
            self.note(warning)

    def note(self, text: str) -> None:
        """A sentence below the tables."""
        self.contents["notes"].append(text)
        print(f"note: {text}", flush=True)
        self.write()

    def table(self, name: str, columns: list[str], rows: Iterable[dict] = ()) -> None:
        self.contents["tables"][name] = {"columns": columns, "rows": list(rows)}

    def add(self, name: str, row: dict) -> None:
        """A row of `table(name, ...)`: printed, and on the disk when this returns. What is not a column is not printed."""
        table = self.contents["tables"][name]
        table["rows"].append(row)
        head, _, line = markdown_rows(
            [table["columns"], [cell_text(row.get(column)) for column in table["columns"]]]
        )
        if self.printed != name:
            print(f"\n{name}", head, sep="\n")
            self.printed = name
        print(line, flush=True)
        self.write()

    def rows(self, name: str) -> list[dict]:
        """The rows so far; one that is changed is on the disk after `write`."""
        return self.contents["tables"][name]["rows"]

    def finish(self, status: str = "complete", counts: str = "") -> None:
        """Set the status and print the last line, which says where the results are."""
        self.contents["status"] = status
        self.write()
        words = f"{counts}; {status}" if counts else status
        print(f"\n{words}: wrote {self.json}", flush=True)

    def write(self) -> None:
        self.contents["seconds"] = round(time.monotonic() - self.started, 1)
        write_whole(self.json, (json.dumps(self.contents, indent=1) + "\n").encode())


def compilations_of(rows: Iterable[dict]) -> str:
    """How many kernels the cases of these rows compiled, and read from the cache on the disk."""
    compiled = sum(row.get("compiled", 0) for row in rows)
    read = sum(row.get("read", 0) for row in rows)
    return str(Compilations(compiled, read))


def reason(e: BaseException) -> str:
    """An exception in one line of a table."""
    if isinstance(e, torch.OutOfMemoryError):
        return "out of memory"
    return without_paths(f"{type(e).__name__}: {' '.join(str(e).split())}")[:200]


def without_paths(text: str) -> str:
    """Absolute paths cut down to their last part: results name no folder of a machine."""
    return re.sub(r"(?<![\w.:/])/(?:[^\s/'\",:]+/)+", "", text)


def work(
    device: torch.device,
    groups: list[list],
    function: Callable[[Any, torch.device], dict],
    add: Callable[[Any, dict | str], None],
    workers: int = 1,
) -> None:
    """add(case, function(case, device)) for every case; of a case that was lost, add(case, why).

    On a GPU every group has a process of its own, `workers` of them at a time. A case that crashes, hangs or leaves the GPU
    in an error state loses its row alone: a new process takes the rest of its group.
    """
    if device.type == "cpu":  # where nothing is expected to crash
        for case in itertools.chain.from_iterable(groups):
            add(case, function(case, device))
        return
    lock = threading.Lock()

    def add_locked(case: Any, row: dict | str) -> None:
        with lock:
            add(case, row)

    run = functools.partial(
        run_apart, function=functools.partial(_on_device, device, function), add=add_locked
    )
    with ThreadPoolExecutor(workers) as threads:
        list(threads.map(run, groups))


def run_apart(
    cases: list, function: Callable[[Any], dict], add: Callable[[Any, dict | str], None]
) -> None:
    """The cases of one group in a process, and in a new one after each that was lost."""
    context = multiprocessing.get_context("spawn")  # a process with a CUDA context cannot be forked
    # Seconds at which the case last began to run without compiling; infinite while it compiles.
    running_since = context.Value("d")
    pool, process = None, 0
    for case in cases:
        if pool is None:
            pool = ProcessPoolExecutor(1, context, _report_compilations, (running_since,))
            process = pool.submit(_ready, function).result()
        try:
            running_since.value = (
                time.monotonic()
            )  # before the case begins, which may compile at once
            row = _result(pool.submit(function, case), running_since)
        except Exception as e:
            row = str(e) if isinstance(e, TimeoutError) else reason(e)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            pool.shutdown(wait=False)
            pool = None
        add(case, row)
    if pool is not None:
        pool.shutdown()


def _report_compilations(running_since: Any) -> None:
    """Keep `running_since` up to date, by Triton's hooks around each compilation, and count the compilations."""
    count_compilations()

    def set_to(seconds: Callable[[], float]) -> Callable:
        def hook(**_) -> None:
            running_since.value = seconds()

        return hook

    with contextlib.suppress(ImportError):  # no Triton, nothing to compile
        from triton import knobs

        knobs.runtime.jit_cache_hook = set_to(lambda: math.inf)
        knobs.runtime.jit_post_compile_hook = set_to(time.monotonic)


def _result(future: Future, running_since: Any) -> dict:
    """Raises: TimeoutError for a case that hangs or takes too long, and what the case raises."""
    started = time.monotonic()
    while not wait([future], timeout=0.5).done:
        now = time.monotonic()
        if now - running_since.value > HANG_SECONDS:
            raise TimeoutError(f"cut: it hung for {HANG_SECONDS:.0f} s")
        if now - started > CASE_SECONDS:
            raise TimeoutError(f"cut after {CASE_SECONDS:.0f} s")
    return future.result()


def _ready(function: Callable) -> int:
    """The process's number, once it has imported what `function` needs."""
    return os.getpid()


def _on_device(
    device: torch.device, function: Callable[[Any, torch.device], dict], case: Any
) -> dict:
    """Raises: RuntimeError if the GPU does not survive the case: a new process takes the rest."""
    if device.index is not None:
        torch.cuda.set_device(device)  # Triton launches on the current one
    before = dataclasses.replace(COUNTS)
    row = function(case, device)
    row |= {"compiled": COUNTS.compiled - before.compiled, "read": COUNTS.read - before.read}
    require_healthy(device, str(case))
    release(device)
    return row


def require_healthy(device: torch.device, after: str) -> None:
    """Raises: RuntimeError if the GPU no longer answers: an error that a kernel left makes every later figure worthless."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize()
        except Exception as e:
            raise RuntimeError(
                f"after {after} the GPU is in an error state, nothing more can run: {reason(e)}"
            ) from e
