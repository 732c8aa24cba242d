"""interdomain study run train_configs/studies/small.toml

Train and compare the runs of a study.

A study is a TOML file of model sizes, conditions, settings, learning rates and seeds. `plan` prints
its runs and what they cost. `run` trains those that are not finished. If it is killed, the same
command continues. `show` prints a table of the finished runs. `study COMMAND --help` lists a
command's options.

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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

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

# The parts of a study are imported late: they need TorchTitan, of the extra `train`, and `main`
# says so if it is missing.
if TYPE_CHECKING:
    from interdomain.tools._study.definition import Study
    from interdomain.tools._study.tables import Run

RUN_STATUS = "Exit status: 0 all finished; 1 a run failed; 2 a wrong option or file; 75 left on a signal: run it again."


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line. If `argv` is None, it is that of the process."""
    p = argument_parser(__doc__, "plan|run|show")
    commands = p.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands", prog=p.prog
    )

    def add_command(name: str, summary: str, more: str = "") -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=summary,
            description=f"{summary}. {more}",
            formatter_class=Help,
            allow_abbrev=False,
        )

    plan = add_command("plan", "Print the runs, what they cost, and which are not finished")
    run = add_command("run", "Train the runs that are not finished", RUN_STATUS)
    show = add_command("show", "Print a table of the finished runs of a study, or of single runs")
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
            help="only runs whose name matches, such as '*/seed-1'",
        )
    # Where the runs are trained: on this machine or by SLURM.
    place = run.add_mutually_exclusive_group()
    place.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="runs to train at a time, at least 1; they share the GPUs (or cores) of this machine",
    )
    place.add_argument(
        "--sbatch",
        metavar="COMMAND",
        help="submit each run to SLURM instead, by this command and the run's file, as 'sbatch mine.sbatch' with your copy of "
        "tools/sites/requeue.sbatch",
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
        help=f"{OUTPUT}: study.md, study.json and study.png",
    )
    args = p.parse_args(argv)
    if args.command == "run":
        require_at_least(args, jobs=1)
    return args


def read_chosen(args: argparse.Namespace) -> "Study":
    """Reads the study, with the runs that --only names.

    Args:
        args: The options `study` and `only`.
    """
    from interdomain.tools._study.definition import read_study

    study = read_study(args.study)
    runs = [run for run in study.runs if fnmatch.fnmatch(run.name, args.only)]
    if not runs:
        raise ValueError(
            f"--only {args.only} matches no run. A run's name is like {study.runs[0].name}."
        )
    return replace(study, runs=runs)


def plan(study: "Study") -> str:
    """Returns a table of the runs, and how much is missing.

    Args:
        study: The study with the runs to list.
    """
    from interdomain.tools._study.tables import describe_state

    cells = [["run", "parameters", "state", "tokens", "FLOPs", "is"]]
    missing = 0
    tokens = 0
    flops = 0.0
    for run in study.runs:
        plan = run.plan
        status = "finished"
        if not run.is_finished:
            status = "not begun"
            if run.step:
                status = f"at step {run.step:,} of {plan.steps:,}"
            missing += 1
            tokens += plan.tokens
            flops += plan.flops
        state = describe_state(*plan.state)
        cost = [f"{plan.n_params:,}", state, f"{plan.tokens:,}", f"{plan.flops:.3g}"]
        cells.append([run.name, *cost, status])
    total = f"{len(study.runs)} runs, {missing} missing: {tokens:,} tokens, {flops:.3g} FLOPs"
    return "\n".join([*markdown_rows(cells), "", total])


def run(args: argparse.Namespace) -> int:
    """Trains the runs that are not finished, or submits them.

    Args:
        args: The options of `study run`.

    Returns:
        The exit status.
    """
    from interdomain.tools._study.run import check_data_of, run_here, submit

    # Each run at a time needs a GPU of its own. Without GPUs the runs share the cores.
    gpus = torch.cuda.device_count()
    if 0 < gpus < args.jobs:
        raise ValueError(
            f"--jobs {args.jobs} is more than the {gpus} GPU(s) of this machine, and each run needs its own."
        )
    study = read_chosen(args)
    for planned in study.runs:
        _ = planned.plan  # raises an error for wrong settings before anything is trained
    # Finished runs have a record, and are not trained again.
    missing = study.missing()
    if missing:
        check_data_of(missing)
        if args.sbatch:
            submit(missing, study.name, shlex.split(args.sbatch))
            return 0
        status = run_here(missing, args.jobs)
        if status:
            return status
    print(f"all runs are finished: interdomain study show {args.study}")
    return 0


def shown(paths: list[Path]) -> "list[Run]":
    """Reads the finished runs of studies, and single runs.

    Args:
        paths: TOML files of studies, and folders of runs.

    Raises:
        ValueError: A study has no finished run, or a folder holds no run.
    """
    from interdomain.tools._study.definition import read_record, read_study, record_of
    from interdomain.tools._study.tables import Run

    runs = []
    for path in paths:
        # The folder of a run: its TensorBoard events take the place of a record.
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
    """Prints the table of runs, and writes the report if there is an `output`.

    Args:
        paths: TOML files of studies, and folders of runs.
        output: The folder of the report; None writes none.
    """
    from interdomain.tools._study import tables

    # Refuse a full folder before the records are read, which takes a while.
    if output:
        require_empty(output)
    runs = shown(paths)
    groups = tables.arms_of(runs)
    text = tables.page(groups)
    print(text, end="")
    if not output:
        return
    # Draw first: an installation without matplotlib writes nothing.
    figure = figure_of(list(tables.panels(runs).values()))
    output.mkdir(parents=True, exist_ok=True)
    (output / "study.json").write_text(json.dumps({"cells": tables.rows(groups)}, indent=1) + "\n")
    (output / "study.md").write_text(text)
    figure.savefig(output / "study.png")
    print(f"wrote {output}")


@user_errors
def main(argv: list[str] | None = None) -> int:
    """Runs the command, by default with the process's arguments. Returns the exit status."""
    args = parse(argv)
    if args.command == "run":
        return run(args)
    if args.command == "plan":
        print(plan(read_chosen(args)))
    else:
        show(args.runs, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
