"""interdomain compare-runs outputs/125M outputs/125M-again

Compare two training runs step by step.

The first step that differs is shown. Loss, gradient norm and validation loss are compared. A run is the folder that it
wrote (job.dump_folder). The restarts of a run count as one run.

    interdomain compare-runs outputs/debug outputs/debug-2 --tolerance 1e-3 --common

Exit status: 0 no difference; 1 a difference, or one run lacks what the other has; 2 a wrong option or file

Documentation: docs/running.md
"""

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from interdomain.tools._cli import argument_parser, path_argument, user_errors
from interdomain.tools._curves import curves_of, events_folder, facts_of, read_events

COLUMNS = {  # as they are compared and printed
    "loss": "loss_metrics/global_avg_loss",
    "grad_norm": "grad_norm",
    "validation_loss": "validation_metrics/loss",
}
NOT_COMPARED = (
    "job.dump_folder",
    "job.description",
)  # settings in which runs that are the same may differ


@dataclass
class Run:
    """A run's curves {column: {step: value}} and its configuration {section.field: value}, empty where it is not stored."""

    name: str
    curves: dict[str, dict[int, float]]
    configuration: dict[str, object]

    def describe(self) -> str:
        loss = self.curves["loss"]
        return f"{self.name} (loss at {len(loss):,} steps, {min(loss):,} to {max(loss):,})"


def read_run(path: Path) -> Run:
    """Raises: FileNotFoundError, ValueError for a folder without a run's loss."""
    events = read_events(events_folder(path))
    every = curves_of(events)
    curves = {column: every[tag] for column, tag in COLUMNS.items() if tag in every}
    if "loss" not in curves:
        raise ValueError(f"{path} holds no loss: no step was logged.")
    configuration = {}
    for section, fields in facts_of(events, "configuration").items():
        for name, value in fields.items():
            configuration[f"{section}.{name}"] = value
    return Run(str(path), curves, configuration)


def relative(a: float, b: float) -> float:
    """|a - b| over the larger of the two; 0 where both are the same infinity, or both no number."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))


def settings_that_differ(a: Run, b: Run) -> list[str]:
    lines = ["configuration:"]
    for name in sorted({*a.configuration, *b.configuration} - {*NOT_COMPARED}):
        x = a.configuration.get(name, "(not there)")
        y = b.configuration.get(name, "(not there)")
        if x != y:
            lines.append(f"  {name}  {x}  {y}")
    return lines if lines[1:] else ["configuration: the same"]


def only_in_one(a: Run, b: Run) -> list[str]:
    """A line for each curve and run with steps that the other run does not have."""
    lines = []
    for run, other in ((a, b), (b, a)):
        for column, curve in run.curves.items():
            steps = curve.keys() - other.curves.get(column, {}).keys()
            if steps:
                lines.append(
                    f"{column} at {len(steps):,} step(s) from {min(steps):,} is logged in {run.name} only"
                )
    return lines


def parse(argv) -> argparse.Namespace:
    p = argument_parser(__doc__, "RUN_A RUN_B")
    p.add_argument(
        "run_a",
        type=path_argument,
        metavar="RUN_A",
        help="a run's folder (job.dump_folder)",
    )
    p.add_argument(
        "run_b",
        type=path_argument,
        metavar="RUN_B",
        help="the same",
    )
    p.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="X",
        help="largest relative difference that counts as equal; 0: equal to the last bit",
    )
    p.add_argument(
        "--common", action="store_true", help="ignore steps and curves that only one run has"
    )
    args = p.parse_args(argv)
    if not args.tolerance >= 0:
        raise ValueError(f"--tolerance must be at least 0: got {args.tolerance}.")
    return args


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    a = read_run(args.run_a)
    b = read_run(args.run_b)

    # {step: {column: relative difference}} of what both runs have.
    differences: dict[int, dict[str, float]] = {}
    columns = []
    for column in COLUMNS:
        shared = a.curves.get(column, {}).keys() & b.curves.get(column, {}).keys()
        if shared:
            columns.append(column)
        for step in shared:
            difference = relative(a.curves[column][step], b.curves[column][step])
            differences.setdefault(step, {})[column] = difference
    steps = sorted(differences)
    with_loss = [step for step in steps if "loss" in differences[step]]
    if not with_loss:
        raise ValueError(
            f"the two runs have no logged step in common: {a.describe()}; {b.describe()}."
        )

    missing = only_in_one(a, b)
    print(
        f"A  {a.describe()}", f"B  {b.describe()}", *settings_that_differ(a, b), *missing, sep="\n"
    )
    how = f"within {args.tolerance:g}" if args.tolerance else "to the bit"
    for first in steps:
        beyond = {
            column: value for column, value in differences[first].items() if value > args.tolerance
        }
        if beyond:
            for column, value in beyond.items():
                print(
                    f"{column} {a.curves[column][first]:.7g} and {b.curves[column][first]:.7g}, relative {value:.1e}"
                )
            before = sum(step < first for step in with_loss)
            names = ", ".join(beyond)
            print(
                f"the first step that differs is {first:,} ({names}); the same {how} at the {before:,} before it"
            )
            return 1
    same = f"the same {how} at {len(with_loss):,} step(s), {with_loss[0]:,} to {with_loss[-1]:,} ({', '.join(columns)})"
    if missing and not args.common:
        print(
            f"not the same: one run lacks what the other has, as said above. What both have (--common) is {same}"
        )
        return 1
    print(same)
    return 0


if __name__ == "__main__":
    sys.exit(main())
