"""Options that the benchmarks share, and the report that each of them writes.

A report grows row by row in a JSON file.
"""

import argparse
import datetime
import json
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from interdomain.environment import environment
from interdomain.folders import write_atomically
from interdomain.markdown import cell_text
from interdomain.scan.triton_support import cannot_launch
from interdomain.tools import _cli
from interdomain.tools._bench.pages import CHECK, read_verdicts, warnings
from interdomain.tools.launch import refuse_idle_gpus

CPU_LABEL = "CPU tiny mode: these figures say nothing about a GPU"
RESULTS = Path("benchmarks/results/today")


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds --output, --name and --device.

    Args:
        parser: The parser of a tool.
        name: The default of --name.
    """
    add_output(parser, name)
    _cli.add_device(parser)


def add_output(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds --output and --name.

    Args:
        parser: The parser of a tool.
        name: The default of --name.
    """
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
        help=f"the results are DIR/NAME.json (default: {name}), so that one folder can hold "
        "several runs of a tool",
    )


def choose_device(name: str) -> torch.device:
    """Returns the device that --device names.

    Raises:
        ValueError: The GPU is not there, PyTorch cannot use it, or nothing can be compiled for it.
    """
    if name == "auto":
        # If the driver is too old for PyTorch, the tiny mode on the CPU would pass for a check of
        # the GPU.
        refuse_idle_gpus()
    device = _cli.choose_device(name)
    problem = cannot_launch() if device.type == "cuda" else None
    if problem:
        raise ValueError(f"{problem}.")
    return device


def fill_in(args: argparse.Namespace, device: torch.device, **defaults: tuple[Any, Any]) -> None:
    """Gives options that were left out their default.

    Args:
        args: The options, changed in place.
        device: The device that the tool runs on.
        **defaults: The default of each option on a GPU, and on a CPU.

    Raises:
        ValueError: A number is below 1.
    """
    for name, (on_gpu, on_cpu) in defaults.items():
        if getattr(args, name) is None:
            default = on_cpu if device.type == "cpu" else on_gpu
            setattr(args, name, default)
    _cli.require_at_least(args, **dict.fromkeys(defaults, 1))


class Report:
    """The results of one tool, written anew after every row: a tool that is cut keeps its rows.

    Args:
        part: The name of the results. The file is FOLDER/PART.json.
        folder: Made if it is not there.
        device: The device that was measured.
        options: The settings that the figures depend on, as they were used.
        label: The kind of figures. Empty: measured on this GPU, or on a CPU in its tiny mode.
        named: True if the user named the sizes. Then figures of a CPU are measurements, too.

    Raises:
        FileExistsError: The results are there. Nothing is overwritten.
        OSError: Nothing can be written.
    """

    def __init__(
        self,
        part: str,
        folder: Path,
        device: torch.device,
        options: dict[str, Any],
        label: str = "",
        named: bool = False,
    ) -> None:
        self.folder = folder
        self.json = folder / f"{part}.json"
        self.started = time.monotonic()
        if self.json.exists():
            raise FileExistsError(
                f"{self.json} exists, and results are never overwritten. Give another --output."
            )
        folder.mkdir(parents=True, exist_ok=True)
        record = environment(device)
        verdicts = read_verdicts(folder / CHECK)
        # The label says what was measured, so that figures of a CPU do not pass for those of a GPU.
        if not label:
            label = CPU_LABEL
            if device.type != "cpu":
                label = f"measured on {record['GPU']}"
            elif named:
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

        # The log of a run says first on what it ran.
        print(f"== {part}: {label} ==")
        for name, fact in record.items():
            print(f"{name:>24}  {fact}")
        for warning in warnings(verdicts):
            self.note(warning)

    def note(self, text: str) -> None:
        """Adds a sentence below the tables."""
        self.contents["notes"].append(text)
        print(f"note: {text}", flush=True)
        self.write()

    def table(self, name: str, columns: list[str], rows: Iterable[dict] = ()) -> None:
        """Adds a table.

        Entries of a row that are no columns are kept in the file, and not shown.

        Args:
            name: The title of the table.
            columns: The entries of a row that are shown, in this order.
            rows: The rows that are known already.
        """
        self.contents["tables"][name] = {"columns": columns, "rows": list(rows)}

    def add(self, name: str, row: dict[str, Any]) -> None:
        """Adds a row to a table, prints it, and writes the file."""
        # On the console an entry that is not known is left out.
        columns = self.contents["tables"][name]["columns"]
        self.rows(name).append(row)
        filled = [column for column in columns if row.get(column) is not None]
        shown = [f"{column} {cell_text(row[column])}" for column in filled]
        print(f"{name}: {', '.join(shown)}", flush=True)
        self.write()

    def rows(self, name: str) -> list[dict]:
        """Returns the rows of a table so far.

        A row that is changed is in the file after `write`.
        """
        return self.contents["tables"][name]["rows"]

    def finish(self, status: str = "complete", counts: str = "") -> None:
        """Sets the status, and prints the last line, which says where the results are.

        Args:
            status: The status in the file.
            counts: The beginning of the last line, such as the number of measurements.
        """
        self.contents["status"] = status
        self.write()
        result = f"{counts}; {status}" if counts else status
        print(f"\n{result}: wrote {self.json}", flush=True)

    def write(self) -> None:
        """Writes the file. A process that is killed meanwhile leaves the file as it was."""
        self.contents["seconds"] = round(time.monotonic() - self.started, 1)
        text = json.dumps(self.contents, indent=1)
        write_atomically(self.json, f"{text}\n".encode())


def reason(e: BaseException) -> str:
    """Returns an exception as one line of a table.

    Args:
        e: The exception that ended a measurement.
    """
    if isinstance(e, torch.OutOfMemoryError):
        return "out of memory"
    message = " ".join(str(e).split())
    return without_paths(f"{type(e).__name__}: {message}")[:200]


def without_paths(text: str) -> str:
    """Cuts absolute paths down to their last part: results name no folder of a machine."""
    return re.sub(r"(?<![\w.:/])/(?:[^\s/'\",:]+/)+", "", text)
