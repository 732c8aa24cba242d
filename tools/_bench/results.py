"""What the benchmarks share: flags, the record of the machine, and results that grow row by row in a JSON file."""

import argparse
import datetime
import functools
import json
import re
import sys
import time
from collections.abc import Collection
from pathlib import Path

import torch

from interdomain.environment import environment
from interdomain.folders import write_whole
from interdomain.scan.triton_support import cannot_launch
from interdomain.tools import _cli
from interdomain.tools._bench import apart
from interdomain.tools._bench.timing import release
from interdomain.tools.launch import refuse_idle_gpus

CPU_LABEL = "CPU tiny mode: these figures say nothing about a GPU"
CHECK_FAILED = "THE CORRECTNESS CHECK DID NOT PASS ON THIS MACHINE: do not use these figures"
NO_FAILURE = ("passed", "beyond bounds", "not run")  # of the check in the same folder; one that was cut is 'unfinished'
RESULTS = Path("benchmarks/results/today")
NOT_RUN = apart.LATE


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR", help=_cli.RESULTS)


def add_arguments(parser: argparse.ArgumentParser, device: str = _cli.DEVICE) -> None:
    """--output, --time-limit and --device, the same in every part."""
    add_output(parser)
    parser.add_argument(
        "--time-limit", type=float, default=600, metavar="S", help="start nothing after so many seconds"
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


def choose(what: str, wanted: list[str] | None, allowed: Collection[str]) -> list[str]:
    """`wanted`, or all of `allowed` if nothing is. Raises: ValueError for a name that is not allowed."""
    if unknown := [name for name in wanted or () if name not in allowed]:
        raise ValueError(f"{what}: there is no {', '.join(unknown)}. Allowed are {', '.join(allowed)}.")
    return list(wanted or allowed)


def fill_in(args: argparse.Namespace, device: torch.device, **defaults: tuple) -> None:
    """Give the options that were left out their default. defaults: name=(on a GPU, on a CPU).

    Raises: ValueError for a number below 1.
    """
    for name, values in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, values[device.type == "cpu"])
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if isinstance(value, int) and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1: got {value}.")


class Deadline:
    """Seconds left of a time limit that began when this was made."""

    def __init__(self, seconds: float) -> None:
        self.ends = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self.ends - time.monotonic()

    @property
    def passed(self) -> bool:
        return self.left <= 0


class Report:
    """One part's results, folder/part.json, rewritten after every row: a part that is cut keeps them.

    Args:
        folder: made if it is not there.
        options: the settings that the figures depend on, as they were used.
        label: what the figures are; None: those of a GPU, or of a CPU in its tiny mode.
    Raises: FileExistsError if this part's results are there: nothing is overwritten. OSError if nothing can be written.
    """

    def __init__(self, part: str, folder: Path, device: torch.device, options: dict, label: str | None = None) -> None:
        record = environment(device)
        self.folder = folder
        self.json = self.folder / f"{part}.json"
        if self.json.exists():
            raise FileExistsError(f"{self.json} exists, and results are never overwritten. Give another --output.")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.started, self.printed, check = time.monotonic(), None, self.folder / "check.json"
        self.contents = {
            "part": part,
            "status": "unfinished",
            "label": label or (CPU_LABEL if device.type == "cpu" else f"measured on {record['GPU']}"),
            "check": json.loads(check.read_text())["status"] if check.exists() else "not run",
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": 0.0,
            "environment": record,
            "options": options,
            "notes": [],
            "tables": {},
        }
        self.write()
        print(f"== {part}: {self.contents['label']} ==", *(f"{k:>24}  {v}" for k, v in record.items()), sep="\n")
        if self.contents["check"] not in NO_FAILURE:
            self.note(CHECK_FAILED)

    def note(self, text: str) -> None:
        """A sentence below the tables."""
        self.contents["notes"].append(text)
        print(f"note: {text}", flush=True)
        self.write()

    def table(self, name: str, columns: list[str]) -> None:
        self.contents["tables"][name] = {"columns": columns, "rows": []}

    def add(self, name: str, row: dict) -> None:
        """A row of `table(name, ...)`: printed, and on the disk when this returns. What is not a column is not printed."""
        table = self.contents["tables"][name]
        table["rows"].append(row)
        head, line = markdown_rows([table["columns"], [show(row.get(c)) for c in table["columns"]]])[::2]
        print(*(() if self.printed == name else (f"\n{name}", head)), line, sep="\n", flush=True)
        self.printed = name
        self.write()

    def rows(self, name: str) -> list[dict]:
        """The rows so far; one that is changed is on the disk after `write`."""
        return self.contents["tables"][name]["rows"]

    def finish(self, status: str = "complete", said: str = "") -> None:
        """Set the status and print the last line, which says where the results are."""
        self.contents["status"] = status
        self.write()
        print(f"\n{said + '; ' if said else ''}{status}: wrote {self.json}", flush=True)

    def write(self) -> None:
        self.contents["seconds"] = round(time.monotonic() - self.started, 1)
        write_whole(self.json, (json.dumps(self.contents, indent=1) + "\n").encode())


def markdown_rows(cells: list[list[str]]) -> list[str]:
    """Lines of a table; the first row is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return [lines[0], "|---" * len(cells[0]) + "|", *lines[1:]]


def show(value: object) -> str:
    """A figure in three or four digits; what does not exist is a dash."""
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        size = abs(value)
        digits = ",.0f" if size >= 100 else ".1f" if size >= 10 else ".3f" if size >= 0.01 or not size else ".1e"
        return format(value, digits)
    if isinstance(value, int):
        return f"{value:,}"
    return " ".join(map(show, value)) if isinstance(value, list | tuple) else str(value)


def page(contents: dict) -> list[str]:
    """Lines of one tool's results: label, machine, tables, notes."""
    lines = ["", f"# {contents['part']}", "", f"**{contents['label']}.** Status: {contents['status']}."]
    facts = contents["environment"] | {f"--{name}": show(value) for name, value in contents["options"].items()}
    lines += ["", ", ".join(f"{name} {value}" for name, value in facts.items()) + "."]
    for name, table in contents["tables"].items():
        cells = [[show(row.get(c)).replace("|", "/") for c in table["columns"]] for row in table["rows"]]
        lines += ["", f"## {name}", "", *markdown_rows([table["columns"], *cells])]
    return [*lines, "", *(f"- {note}" for note in contents["notes"])]


def reason(e: BaseException) -> str:
    """An exception in one line of a table."""
    if isinstance(e, torch.OutOfMemoryError):
        return "out of memory"
    return without_paths(f"{type(e).__name__}: {' '.join(str(e).split())}")[:200]


def without_paths(text: str) -> str:
    """Absolute paths cut down to their last part: results name no folder of a machine."""
    return re.sub(r"(?<![\w.:/])/(?:[^\s/'\",:]+/)+", "", text)


def work(device: torch.device, jobs: list[list], add: apart.Add, handle: apart.Handle, **how) -> None:
    """handle(case, emit, device) for every case of `jobs`, on a GPU in processes of their own. how: as `apart.run` has it."""
    run = apart.inline if device.type == "cpu" else apart.run
    run(jobs, add, functools.partial(_on_device, device, handle), **how)


def _on_device(device: torch.device, handle: apart.Handle, case, emit) -> None:
    """Raises: RuntimeError if the GPU does not survive the case: another process takes the rest."""
    if device.index is not None:
        torch.cuda.set_device(device)  # Triton launches on the current one
    handle(case, emit, device)
    require_healthy(device, str(case))
    release(device)


def require_healthy(device: torch.device, after: str) -> None:
    """Raises: RuntimeError if the GPU no longer answers: an error that a kernel left makes every later figure worthless."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize()
        except Exception as e:
            raise RuntimeError(f"after {after} the GPU is in an error state, nothing more can run: {reason(e)}") from e


def say(text: str) -> None:
    """Progress, on standard error: a benchmark's result is its standard output."""
    print(text, file=sys.stderr, flush=True)
