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
        curves: The value of each of COLUMNS at each step.
        configuration: The value of each setting. Empty if the run did not log them.
    """

    name: str
    curves: dict[str, dict[int, float]]
    configuration: dict[str, Any]

    def describe(self) -> str:
        loss = self.curves["loss"]
        return f"{self.name} (loss at {len(loss):,} steps, {min(loss):,} to {max(loss):,})"


def read_run(path: Path) -> Run:
    """Reads a run's folder.

    Raises:
        FileNotFoundError, ValueError: The folder holds no loss of a run.
    """
    events = read_events(events_folder(path))
    logged = curves_of(events)
    curves = {column: logged.get(tag, {}) for column, tag in COLUMNS.items()}
    if not curves["loss"]:
        raise ValueError(f"{path} holds no loss: no step was logged.")
    configuration = {}
    # A run logs its settings by section.
    for section, fields in facts_of(events, "configuration").items():
        for name, value in fields.items():
            configuration[f"{section}.{name}"] = value
    return Run(str(path), curves, configuration)


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


def settings_that_differ(a: Run, b: Run) -> list[str]:
    """Returns a line for each setting that differs between runs a and b, below a title.

    FREE_SETTINGS are left out.
    """
    lines = []
    for name in sorted(a.configuration | b.configuration):
        value_a = a.configuration.get(name, "(not there)")
        value_b = b.configuration.get(name, "(not there)")
        if value_a != value_b and name not in FREE_SETTINGS:
            lines.append(f"  {name}  {value_a}  {value_b}")
    if not lines:
        return ["configuration: the same"]
    return ["configuration:", *lines]


def only_in_one(a: Run, b: Run) -> list[str]:
    """Returns a line for each curve of run a or b with steps that the other run does not have."""
    lines = []
    for run, other in ((a, b), (b, a)):
        for column, curve in run.curves.items():
            steps = curve.keys() - other.curves[column].keys()
            if steps:
                lines.append(
                    f"{column} at {len(steps):,} step(s) from {min(steps):,} is logged in {run.name} only"
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
    loss_steps = sorted(a.curves["loss"].keys() & b.curves["loss"].keys())
    if not loss_steps:
        raise ValueError(
            f"the two runs have no logged step in common: {a.describe()}; {b.describe()}."
        )

    # The two runs, and what only one of them has.
    missing = only_in_one(a, b)
    lines = [f"A  {a.describe()}", f"B  {b.describe()}", *settings_that_differ(a, b), *missing]
    print("\n".join(lines))

    # Compare all values that both have, step by step, up to the first that differs. The counts that
    # are printed are those of steps with a logged loss.
    steps_by_column = {}
    for column in COLUMNS:
        steps_by_column[column] = a.curves[column].keys() & b.curves[column].keys()
    how = "to the bit"
    if args.tolerance:
        how = f"within {args.tolerance:g}"
    for step in sorted(set().union(*steps_by_column.values())):
        beyond = []
        for column, steps in steps_by_column.items():
            if step in steps:
                value_a = a.curves[column][step]
                value_b = b.curves[column][step]
                if not is_same(value_a, value_b, args.tolerance):
                    beyond.append(column)
                    difference = abs(value_a - value_b) / max(abs(value_a), abs(value_b))
                    print(f"{column} {value_a:.7g} and {value_b:.7g}, relative {difference:.1e}")
        if beyond:
            before = sum(earlier < step for earlier in loss_steps)
            print(
                f"the first step that differs is {step:,} ({', '.join(beyond)}); the same {how} at the {before:,} before it"
            )
            return 1

    # No step differs.
    compared = [column for column, steps in steps_by_column.items() if steps]
    steps = f"{len(loss_steps):,} step(s), {loss_steps[0]:,} to {loss_steps[-1]:,}"
    same = f"the same {how} at {steps} ({', '.join(compared)})"
    if missing and not args.common:
        print(
            f"not the same: one run lacks what the other has, see above. What both have (--common) is {same}"
        )
        return 1
    print(same)
    return 0


if __name__ == "__main__":
    sys.exit(main())
