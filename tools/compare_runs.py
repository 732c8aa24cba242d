"""python -m interdomain.tools.compare_runs outputs/125M outputs/125M-again

Compare two runs step by step, and name the first that differs: exit status 0 if none does, 1 if one does or one run lacks what
the other has. A run is its folder (read as one curve, whatever number of restarts wrote it) or a curve that --save-curve
stored as JSON.
"""

import argparse
import json
import math
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from interdomain.folders import write_whole

from ._cli import argument_parser, user_errors
from ._curves import configuration_of, curves_of, events_folder, read_events

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
    configuration: dict[str, object] = field(default_factory=dict)

    def describe(self) -> str:
        loss = self.curves["loss"]
        return f"{self.name} (loss at {len(loss):,} steps, {min(loss):,} to {max(loss):,})"


def read_run(path: Path) -> Run:
    """A run's folder, or a stored curve (.json). Raises: FileNotFoundError, ValueError."""
    if path.suffix == ".json":
        run = _read_curve(path)
    else:
        events = read_events(events_folder(path))  # seconds, for a run of a month
        every = curves_of(events)
        curves = {column: every[tag] for column, tag in COLUMNS.items() if tag in every}
        run = Run(str(path), curves, _flat(configuration_of(events)))
    if not run.curves.get("loss"):
        raise ValueError(f"{path} holds no loss: not one step was logged.")
    return run


def save_curve(run: Run, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = {"run": run.name, "configuration": run.configuration, "curves": run.curves}
    write_whole(path, (json.dumps(stored, indent=1) + "\n").encode())


def _read_curve(path: Path) -> Run:
    try:
        stored = json.loads(path.read_text())
        curves = {
            column: {int(step): float(value) for step, value in curve.items()}
            for column, curve in stored["curves"].items()
        }
        return Run(str(path), curves, dict(stored["configuration"]))
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{path} is no stored curve ({type(e).__name__}: {e}). --save-curve {path} writes one.") from e


def _flat(configuration: dict, prefix: str = "") -> dict[str, object]:
    flat = {}
    for name, value in configuration.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def relative(a: float, b: float) -> float:
    """|a - b| over the larger of the two; 0 where both are the same infinity, or both no number."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))


@dataclass
class Comparison:
    """Of the columns and steps that both runs have. differing: relative difference by column at the first step that differs."""

    columns: list[str]
    steps: list[int]
    first: int | None
    differing: dict[str, float]


def compare(a: Run, b: Run, tolerance: float) -> Comparison:
    """Raises: ValueError where the runs share no step."""
    columns = [column for column in COLUMNS if column in a.curves and column in b.curves]
    steps = sorted(a.curves["loss"].keys() & b.curves["loss"].keys())
    if not steps:
        raise ValueError(f"no step is logged in both: {a.describe()}; {b.describe()}.")
    shared = {column: a.curves[column].keys() & b.curves[column].keys() for column in columns}
    for step in sorted(set().union(*shared.values())):
        apart = {c: relative(a.curves[c][step], b.curves[c][step]) for c in columns if step in shared[c]}
        differing = {column: size for column, size in apart.items() if size > tolerance}
        if differing:
            return Comparison(columns, steps, step, differing)
    return Comparison(columns, steps, None, {})


def settings_that_differ(a: Run, b: Run) -> str:
    names = sorted({*a.configuration, *b.configuration} - {*NOT_COMPARED})
    pairs = [(name, *(run.configuration.get(name, "(not there)") for run in (a, b))) for name in names]
    lines = [f"  {name}  {x}  {y}" for name, x, y in pairs if x != y]
    return "\n".join([f"configuration: {len(lines)} setting(s) differ" if lines else "configuration: the same", *lines])


def table(a: Run, b: Run, found: Comparison) -> str:
    """The steps around the first difference, both runs side by side."""
    steps = sorted({*found.steps, found.first})
    at = steps.index(found.first)
    header = f"{'step':>10}"
    for column in found.columns:
        header += f"{column + ' A':>20}{column + ' B':>20}{'relative':>10}"
    lines = [header]
    for step in steps[max(0, at - AROUND) : at + AROUND + 1]:
        line = f"{'> ' if step == found.first else ''}{step:,}".rjust(10)
        for column in found.columns:
            pair = [run.curves[column].get(step) for run in (a, b)]
            line += "".join(f"{'' if value is None else f'{value:.7g}':>20}" for value in pair)
            line += f"{'' if None in pair else f'{relative(*pair):.1e}':>10}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def only_in_one(a: Run, b: Run) -> list[str]:
    """What could not be compared, one line each: steps, whole curves, and steps of a curve."""
    lines = []
    for here, there in ((a, b), (b, a)):
        steps = here.curves["loss"].keys() - there.curves["loss"].keys()
        if steps:
            lines.append(f"{_span(steps)} are logged in {here.name} only")
        for column in COLUMNS:
            ours, theirs = (run.curves.get(column, {}).keys() for run in (here, there))
            if ours and not theirs:
                lines.append(f"{column} is logged in {here.name} only")
            elif alone := ours - theirs - steps:
                lines.append(f"{column} at {_span(alone)} is logged in {here.name} only")
    return lines


def _span(steps: Collection[int]) -> str:
    return f"{len(steps):,} step(s) from {min(steps):,} to {max(steps):,}"


def parse(argv) -> argparse.Namespace:
    p = argument_parser(__doc__)
    p.add_argument("run_a", type=Path, metavar="RUN_A", help="a run's folder, or a stored curve (.json)")
    p.add_argument("run_b", type=Path, nargs="?", metavar="RUN_B", help="the same; may be left out with --save-curve")
    p.add_argument(
        "--tolerance", type=float, default=0.0, metavar="X", help="relative difference that counts as none (0)"
    )
    p.add_argument("--common", action="store_true", help="compare what both runs have, though one has more")
    p.add_argument("--save-curve", type=Path, metavar="FILE", help="store RUN_A's curve, as .json")
    args = p.parse_args(argv)
    if not args.tolerance >= 0:
        raise ValueError(f"--tolerance must be at least 0: got {args.tolerance}.")
    if args.save_curve and args.save_curve.suffix != ".json":
        raise ValueError(f"--save-curve {args.save_curve}: the file's name must end in .json.")
    if args.run_b is None and args.save_curve is None:
        raise ValueError("there is one run only: name a second one, or store its curve with --save-curve FILE.")
    return args


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    a = read_run(args.run_a)
    if args.save_curve:
        save_curve(a, args.save_curve)
    if args.run_b is None:
        print(f"wrote {args.save_curve} ({len(a.curves['loss']):,} steps: {', '.join(a.curves)})")
        return 0
    b = read_run(args.run_b)
    found = compare(a, b, args.tolerance)
    print(f"A  {a.describe()}\nB  {b.describe()}")
    print(settings_that_differ(a, b))
    alone = only_in_one(a, b)
    for line in alone:
        print(line)
    how = f"within {args.tolerance:g}" if args.tolerance else "to the bit"
    said = f"at {len(found.steps):,} step(s), {found.steps[0]:,} to {found.steps[-1]:,}"
    if found.first is None:
        same = f"the same {how} {said} ({', '.join(found.columns)})"
        if alone and not args.common:
            print(f"not the same: one run lacks what the other has, as said above. What both have (--common) is {same}")
            return 1
        print(same)
        return 0
    print(f"\n{table(a, b, found)}\n")
    what = ", ".join(f"{column} by {size:.1e}" for column, size in found.differing.items())
    before = [step for step in found.steps if step < found.first]
    print(f"the first step that differs is {found.first:,}: {what}; the same {how} at the {len(before):,} before it")
    return 1


if __name__ == "__main__":
    sys.exit(main())
