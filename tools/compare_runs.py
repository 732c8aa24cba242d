"""interdomain compare-runs outputs/125M outputs/125M-again

Compare two training runs step by step.

The first step that differs is shown. Loss, gradient norm and validation loss are compared. A run is its folder, or a
file that --save-curve wrote. The restarts of a run count as one run.

    interdomain compare-runs outputs/debug --save-curve outputs/debug-curve.json
    interdomain compare-runs outputs/debug outputs/debug-curve.json --tolerance 1e-3 --common

Exit status: 0 no difference; 1 a difference, or one run lacks what the other has; 2 a wrong option or file

Documentation: docs/running.md
"""

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from interdomain.folders import write_whole
from interdomain.tools._cli import argument_parser, path_argument, user_errors
from interdomain.tools._curves import curves_of, events_folder, facts_of, read_events

COLUMNS = {  # as they are compared, stored and printed
    "loss": "loss_metrics/global_avg_loss",
    "grad_norm": "grad_norm",
    "validation_loss": "validation_metrics/loss",
}
NOT_COMPARED = ("job.dump_folder", "job.description")  # settings in which runs that are the same may differ
AROUND = 3  # steps of the table before and after the first difference


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
    """A run's folder, or a stored curve (.json). Raises: FileNotFoundError, ValueError."""
    if path.suffix == ".json":
        try:
            stored = json.loads(path.read_text())
            curves = {c: {int(step): x for step, x in curve.items()} for c, curve in stored["curves"].items()}
            run = Run(str(path), curves, stored["configuration"])
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"{path} is not a curve that --save-curve wrote ({e}).") from e
    else:
        events = read_events(events_folder(path))  # seconds, for a run of a month
        every, sections = curves_of(events), facts_of(events, "configuration")
        curves = {column: every[tag] for column, tag in COLUMNS.items() if tag in every}
        flat = {f"{section}.{name}": x for section, fields in sections.items() for name, x in fields.items()}
        run = Run(str(path), curves, flat)
    if not run.curves.get("loss"):
        raise ValueError(f"{path} holds no loss: no step was logged.")
    return run


def relative(a: float, b: float) -> float:
    """|a - b| over the larger of the two; 0 where both are the same infinity, or both no number."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))


def compare(a: Run, b: Run, tolerance: float) -> dict[int, dict[str, float]]:
    """{step: {column: relative difference, 0 for one within the tolerance}} of what both runs have, in the order of steps."""
    differences: dict[int, dict[str, float]] = {}
    for column in [column for column in COLUMNS if column in a.curves and column in b.curves]:
        for step in a.curves[column].keys() & b.curves[column].keys():
            apart = relative(a.curves[column][step], b.curves[column][step])
            differences.setdefault(step, {})[column] = apart if apart > tolerance else 0.0
    return dict(sorted(differences.items()))


def settings_that_differ(a: Run, b: Run) -> list[str]:
    lines = []
    for name in sorted({*a.configuration, *b.configuration} - {*NOT_COMPARED}):
        x, y = (run.configuration.get(name, "(not there)") for run in (a, b))
        lines += [f"  {name}  {x}  {y}"] if x != y else []
    return [f"configuration: {len(lines)} setting(s) differ" if lines else "configuration: the same", *lines]


def only_in_one(a: Run, b: Run) -> list[str]:
    """Differences that could not be compared, one line each."""
    lines = []
    for here, there in ((a, b), (b, a)):
        for column, curve in here.curves.items():
            if alone := curve.keys() - there.curves.get(column, {}).keys():
                steps = f"{len(alone):,} step(s) from {min(alone):,} to {max(alone):,}"
                lines.append(f"{column} at {steps} is logged in {here.name} only")
    return lines


def table(a: Run, b: Run, differences: dict[int, dict[str, float]], columns: list[str], first: int) -> str:
    """The steps around the first difference, both runs side by side."""
    steps = list(differences)
    at = steps.index(first)
    lines = [f"{'step':>10}" + "".join(f"{column + ' A':>20}{column + ' B':>20}{'relative':>10}" for column in columns)]
    for step in steps[max(0, at - AROUND) : at + AROUND + 1]:
        line = f"{'> ' if step == first else ''}{step:,}".rjust(10)
        for column in columns:
            if column in differences[step]:
                x, y = a.curves[column][step], b.curves[column][step]
                line += f"{x:>20.7g}{y:>20.7g}{relative(x, y):>10.1e}"
            else:
                line += " " * 50
        lines.append(line.rstrip())
    return "\n".join(lines)


def parse(argv) -> argparse.Namespace:
    p = argument_parser(__doc__, "RUN_A [RUN_B]")
    p.add_argument(
        "run_a", type=path_argument, metavar="RUN_A", help="a run's folder (job.dump_folder), or a stored curve (.json)"
    )
    p.add_argument(
        "run_b", type=path_argument, nargs="?", metavar="RUN_B", help="the same; may be left out with --save-curve"
    )
    text = "largest relative difference that counts as equal; 0: equal to the last bit"
    p.add_argument("--tolerance", type=float, default=0.0, metavar="X", help=text)
    p.add_argument("--common", action="store_true", help="ignore steps and curves that only one run has")
    p.add_argument("--save-curve", type=path_argument, metavar="FILE.json", help="store RUN_A's curves in this file")
    args = p.parse_args(argv)
    if not args.tolerance >= 0:
        raise ValueError(f"--tolerance must be at least 0: got {args.tolerance}.")
    if args.run_b is None and args.save_curve is None:
        raise ValueError(
            "only one run was given. Give a second one, or --save-curve FILE.json to store this one's curve."
        )
    return args


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    a = read_run(args.run_a)
    if args.save_curve:
        args.save_curve.parent.mkdir(parents=True, exist_ok=True)
        write_whole(args.save_curve, (json.dumps(asdict(a), indent=1) + "\n").encode())
    if args.run_b is None:
        print(f"wrote {args.save_curve} ({len(a.curves['loss']):,} steps: {', '.join(a.curves)})")
        return 0
    b = read_run(args.run_b)
    differences = compare(a, b, args.tolerance)
    steps = [step for step, apart in differences.items() if "loss" in apart]
    if not steps:
        raise ValueError(f"the two runs have no logged step in common: {a.describe()}; {b.describe()}.")
    alone = only_in_one(a, b)
    print(f"A  {a.describe()}", f"B  {b.describe()}", *settings_that_differ(a, b), *alone, sep="\n")
    how = f"within {args.tolerance:g}" if args.tolerance else "to the bit"
    columns = [column for column in COLUMNS if any(column in apart for apart in differences.values())]
    first = next((step for step, apart in differences.items() if any(apart.values())), None)
    if first is not None:
        print(f"\n{table(a, b, differences, columns, first)}\n")
        names = ", ".join(f"{column} by {apart:.1e}" for column, apart in differences[first].items() if apart)
        before = sum(step < first for step in steps)
        print(f"the first step that differs is {first:,}: {names}; the same {how} at the {before:,} before it")
        return 1
    same = f"the same {how} at {len(steps):,} step(s), {steps[0]:,} to {steps[-1]:,} ({', '.join(columns)})"
    if alone and not args.common:
        print(f"not the same: one run lacks what the other has, as said above. What both have (--common) is {same}")
        return 1
    print(same)
    return 0


if __name__ == "__main__":
    sys.exit(main())
