"""Step times that runs have measured, beside the runs' folders: one line of JSON for each start of a run."""

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple


class Fit(NamedTuple):
    """The factor that brings estimates to what runs measured: the median of measured / estimated."""

    factor: float = 1.0
    runs: int = 0

    def __str__(self) -> str:
        if not self.runs:
            return "arithmetic, never fitted"
        return f"arithmetic x {self.factor:.3g}, fitted to {self.runs} run(s)"


def folder_of_runs(dump_folder: str) -> Path:
    """The folder that a run's own lies in, with other runs."""
    dump = Path(dump_folder)
    return dump.parent if dump.parent.name else dump


def step_times(dump_folder: str) -> Path:
    """The file that all runs beside each other share."""
    return folder_of_runs(dump_folder) / "step_times.jsonl"


def note(file: Path, record: dict[str, Any]) -> None:
    """Append a start's record: device, seconds (measured), estimate (of a device in the table, else None), and facts."""
    with open(file, "a") as f:
        f.write(json.dumps(record) + "\n")


def fit(file: Path, device: str) -> Fit:
    """The factor of a device, of all starts that have an estimate. Raises: ValueError for a damaged line."""
    records = []
    for number, line in enumerate(file.read_text().splitlines() if file.is_file() else [], 1):
        try:
            record = json.loads(line)
        except ValueError as e:
            raise ValueError(f"{file}, line {number}, is no record of a step time ({e}). Remove the line.") from e
        if record["device"] == device and record["estimate"]:
            records.append(record)
    if not records:
        return Fit()
    return Fit(statistics.median(record["seconds"] / record["estimate"] for record in records), len(records))
