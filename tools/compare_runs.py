"""interdomain compare-runs outputs/125M outputs/125M-again

Compare two training runs step by step.

The first step that differs is shown. Loss, gradient norm and validation loss are compared. A run is
the folder that it wrote (job.dump_folder). The restarts of a run count as one run.

    interdomain compare-runs outputs/debug outputs/debug-2 --tolerance 1e-3 --common

Exit status: 0 no difference; 1 a difference, or one run lacks what the other has; 2 a wrong option
or file

Documentation: docs/running.md
"""

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interdomain.tools._cli import argument_parser, path_argument, user_errors
from interdomain.tools._curves import curves_of, events_folder, facts_of, read_events

# The TensorBoard tags that are compared, by the name that is printed.
COLUMNS = {
    "loss": "loss_metrics/global_avg_loss",
    "grad_norm": "grad_norm",
    "validation_loss": "validation_metrics/loss",
}
FREE_SETTINGS = ("job.dump_folder", "job.description")  # settings in which runs may differ


@dataclass
class Run:
    """A run as it is compared.

    Attributes:
        name: Its folder.
        values: The value at each step of each of COLUMNS.
        configuration: The value of each setting.
    """

    name: str
    values: dict[tuple[int, str], float]
    configuration: dict[str, Any]


def read_run(path: Path) -> Run:
    """Reads a run's folder.

    Raises:
        FileNotFoundError: The folder holds no events of a run.
    """
    events = read_events(events_folder(path))
    logged = curves_of(events)
    values = {}
    for column, tag in COLUMNS.items():
        for step, value in logged.get(tag, {}).items():
            values[step, column] = value
    configuration = {}
    # A run logs its settings by section.
    for section, fields in facts_of(events, "configuration").items():
        for name, value in fields.items():
            configuration[f"{section}.{name}"] = value
    return Run(str(path), values, configuration)


def is_same(a: float, b: float, tolerance: float) -> bool:
    """Returns True if two values differ by no more than the tolerance.

    They may also be the same infinity, or both NaN.

    Args:
        a: The value of one run.
        b: The value of the other run.
        tolerance: The largest difference, relative to the larger value. 0 asks for equal values.
    """
    if math.isnan(a) and math.isnan(b):
        return True
    return math.isclose(a, b, rel_tol=tolerance)


def differences(a: Run, b: Run) -> list[str]:
    """Returns a line for each setting that differs between runs a and b, but for FREE_SETTINGS.

    Two more lines say what only one of the runs logged.
    """
    lines = []
    for name in sorted(a.configuration | b.configuration):
        value_a = a.configuration.get(name, "(not there)")
        value_b = b.configuration.get(name, "(not there)")
        if value_a != value_b and name not in FREE_SETTINGS:
            lines.append(f"{name}  {value_a}  {value_b}")
    for run, other in ((a, b), (b, a)):
        only_here = run.values.keys() - other.values.keys()
        if only_here:
            step, column = min(only_here)
            lines.append(
                f"only {run.name} has {len(only_here):,} value(s), from {column} at step {step:,}"
            )
    return lines


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line. If `argv` is None, it is that of the process."""
    p = argument_parser(__doc__, "RUN_A RUN_B")
    for name in ("run_a", "run_b"):
        p.add_argument(
            name,
            type=path_argument,
            metavar=name.upper(),
            help="a run's folder (job.dump_folder)",
        )
    p.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="X",
        help="largest relative difference that counts as equal; 0: bitwise equal",
    )
    p.add_argument(
        "--common", action="store_true", help="ignore steps and curves that only one run has"
    )
    args = p.parse_args(argv)
    if not args.tolerance >= 0:
        raise ValueError(f"--tolerance must be at least 0: got {args.tolerance}.")
    return args


@user_errors
def main(argv: list[str] | None = None) -> int:
    """Runs the command, by default with the process's arguments. Returns the exit status."""
    args = parse(argv)
    a = read_run(args.run_a)
    b = read_run(args.run_b)
    for line in differences(a, b):
        print(line)

    # Compare all values that both have, step by step, up to the first that differs.
    shared = sorted(a.values.keys() & b.values.keys())
    if not shared:
        raise ValueError(f"{a.name} and {b.name} have no logged step in common.")
    for step, column in shared:
        value_a = a.values[step, column]
        value_b = b.values[step, column]
        if not is_same(value_a, value_b, args.tolerance):
            print(
                f"the first step that differs is {step:,}: {column} {value_a:.7g} and {value_b:.7g}"
            )
            return 1
    first, _ = shared[0]
    last, _ = shared[-1]
    how = "to the bit"
    if args.tolerance:
        how = f"within {args.tolerance:g}"
    print(f"the same {how} in what both logged, step {first:,} to {last:,}")
    return int(a.values.keys() != b.values.keys() and not args.common)


if __name__ == "__main__":
    sys.exit(main())
