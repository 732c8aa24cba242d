"""interdomain study run train_configs/studies/small.toml

Train and compare the runs of a study.

A study is a TOML file of model sizes, conditions, settings, learning rates and seeds. `plan` prints its runs and what they
cost. `run` trains those that are not finished. If it is killed, the same command continues. `show` prints a table of the
finished runs. `study COMMAND --help` lists a command's options.

    interdomain study plan train_configs/studies/small.toml
    interdomain study show train_configs/studies/small.toml --output outputs/small-study
    interdomain study run train_configs/studies/small.toml --only '*/seed-1' --jobs 2

Documentation: docs/study.md
"""

import argparse
import fnmatch
import json
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from interdomain.folders import require_empty
from interdomain.markdown import markdown_rows
from interdomain.tools._cli import (
    OUTPUT,
    Help,
    argument_parser,
    path_argument,
    require_at_least,
    user_errors,
)
from interdomain.tools._plots import figure_of

# Imported late: the parts of a study need TorchTitan, of the extra `train`, and `main` says so where it lacks.
if TYPE_CHECKING:
    from interdomain.tools._study.definition import Study
    from interdomain.tools._study.tables import Run


def parse(argv) -> argparse.Namespace:
    p = argument_parser(__doc__, "plan|run|show")
    commands = p.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands", prog=p.prog
    )

    def add(name: str, text: str, arguments: str, more: str = "") -> argparse.ArgumentParser:
        how: Any = dict(
            usage=f"%(prog)s {arguments} [OPTIONS]", formatter_class=Help, allow_abbrev=False
        )
        return commands.add_parser(name, help=text, description=f"{text}.{more}", **how)

    plan = add("plan", "Print the runs, what they cost, and which are not finished", "STUDY.toml")
    more = " Exit status: 0 all finished; 1 a run failed; 2 a wrong option or file; 75 left on a signal: run it again."
    run = add("run", "Train the runs that are not finished", "STUDY.toml", more)
    for command in (plan, run):
        command.add_argument(
            "study",
            type=path_argument,
            metavar="STUDY.toml",
            help="the study's file (format: docs/study.md)",
        )
        command.add_argument(
            "--only",
            default="*",
            metavar="PATTERN",
            help="only runs of such a name, as '*/seed-1'",
        )
    where = run.add_mutually_exclusive_group()
    where.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="runs to train at a time, at least 1; they share the GPUs (or cores) of this machine",
    )
    where.add_argument(
        "--sbatch",
        metavar="COMMAND",
        help="submit each run to SLURM instead, by this command and the run's file, as 'sbatch tools/sites/requeue.sbatch'",
    )
    show = add(
        "show",
        "Print a table of the finished runs of a study, or of single runs",
        "STUDY.toml|RUN [...]",
    )
    show.add_argument(
        "runs",
        nargs="+",
        type=path_argument,
        metavar="STUDY.toml|RUN",
        help="a study's file, or the folder of a run (job.dump_folder), finished or not",
    )
    show.add_argument(
        "--output",
        type=path_argument,
        metavar="DIR",
        help=f"{OUTPUT}: study.md, study.json and (with matplotlib) study.png",
    )
    args = p.parse_args(argv)
    if args.command == "run":
        require_at_least(args, jobs=1)
    return args


def chosen(args: argparse.Namespace) -> "Study":
    """The study with the runs that --only names."""
    from interdomain.tools._study.definition import read_study

    study = read_study(args.study)
    runs = [run for run in study.runs if fnmatch.fnmatch(run.name, args.only)]
    if not runs:
        raise ValueError(
            f"--only {args.only} matches no run. A run's name is like {study.runs[0].name}."
        )
    return replace(study, runs=runs)


def plan(study: "Study") -> str:
    """The runs as a table, and what is missing."""
    from interdomain.tools._study.tables import describe_state

    lines = [["run", "parameters", "state", "tokens", "FLOPs", "is"]]
    for run in study.runs:
        plan = run.plan
        status = "not begun"
        if run.is_finished:
            status = "finished"
        elif run.step:
            status = f"at step {run.step:,} of {plan.steps:,}"
        state = describe_state(*plan.state)
        lines.append(
            [run.name, f"{plan.n_params:,}", state, f"{plan.tokens:,}", f"{plan.flops:.3g}", status]
        )
    missing = study.missing()
    tokens = sum(run.plan.tokens for run in missing)
    flops = sum(run.plan.flops for run in missing)
    page = [*markdown_rows(lines), ""]
    page.append(
        f"{len(study.runs)} runs, {len(missing)} missing: {tokens:,} tokens, {flops:.3g} FLOPs"
    )
    if study.waiting:
        known = "known when its runs at all rates are finished"
        page.append(f"{study.waiting} more at the best rate of their condition, {known}")
    return "\n".join(page)


def run(args: argparse.Namespace) -> int:
    """Trains what is missing, or submits it. Returns: the exit status."""
    from interdomain.tools._study.run import require_data, run_here, submit

    study = chosen(args)
    for one in study.runs:
        _ = one.plan  # refuses before anything is trained
    gpus = torch.cuda.device_count()
    if 0 < gpus < args.jobs:
        raise ValueError(
            f"--jobs {args.jobs} is more than the {gpus} GPU(s) here, and each run needs its own."
        )
    while missing := study.missing():
        require_data(missing, study.corpora)
        if args.sbatch:
            submit(missing, study.name, shlex.split(args.sbatch))
            return 0
        if code := run_here(missing, args.jobs):
            return code
        study = chosen(args)  # with the runs at the best rates
    print(f"all runs are finished: interdomain study show {args.study}")
    return 0


def shown(paths: list[Path]) -> "list[Run]":
    """Raises: ValueError for a study without a finished run, and for a folder that holds no run."""
    from interdomain.tools._study.definition import read_record, read_study, record_of
    from interdomain.tools._study.tables import Run

    runs = []
    for path in paths:
        if path.suffix != ".toml":
            runs.append(Run.of(str(path), record_of(path)))
            continue
        finished = [run for run in read_study(path).runs if run.is_finished]
        if not finished:
            raise ValueError(
                f"{path}: no run is finished. Train with: interdomain study run {path}"
            )
        runs += [Run.of(run.name, read_record(run.record)) for run in finished]
    return runs


def show(paths: list[Path], output: Path | None) -> None:
    """Prints the table of runs, and writes the report if there is an `output`."""
    from interdomain.tools._study import tables

    if output:
        require_empty(output)
    runs = shown(paths)
    groups = tables.cells_of(runs)
    text = tables.page(groups)
    print(text, end="")
    if not output:
        return
    output.mkdir(parents=True, exist_ok=True)
    contents = {"cells": tables.rows(groups), "runs": [asdict(run) for run in runs]}
    (output / "study.json").write_text(json.dumps(contents, indent=1) + "\n")
    (output / "study.md").write_text(text)
    try:
        figure_of([panels[:2] for panels in tables.panels(runs).values()]).savefig(
            output / "study.png"
        )
        print(f"wrote {output}")
    except ImportError:
        print(f"wrote {output}, without a figure: matplotlib is not installed")


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    if args.command == "run":
        return run(args)
    if args.command == "plan":
        print(plan(chosen(args)))
    else:
        show(args.runs, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
