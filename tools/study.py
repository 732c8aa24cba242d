"""python -m interdomain.tools.study run train_configs/studies/small.toml

Train, continue and show a study: every run of a TOML file of sizes, conditions, settings and seeds (format: tools/_study.py).

plan STUDY.toml prints the runs, what they cost and what is missing. run STUDY.toml trains what is missing; after any kill the
same command goes on from the last checkpoints. show STUDY.toml prints the table of what is there, and with --output draws it;
it takes folders of single runs (job.dump_folder) too, finished or not.
"""

import argparse
import fnmatch
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from interdomain.folders import require_empty

from . import _study_tables
from ._bench import markdown_rows
from ._cli import argument_parser, user_errors
from ._plots import draw
from ._study import Study, read_study, record_of
from ._study_run import run_here, submit


def parse(argv) -> argparse.Namespace:
    p = argument_parser(__doc__)
    commands = p.add_subparsers(dest="command", required=True, metavar="plan|run|show")
    for name, what in (("plan", "print the runs and what is missing"), ("run", "train what is missing")):
        of = commands.add_parser(name, help=what, allow_abbrev=False)
        of.add_argument("study", type=Path, metavar="STUDY.toml")
        of.add_argument("--only", default="*", metavar="PATTERN", help="runs whose name fits, such as '*/seed-1'")
    run = commands.choices["run"]
    where = run.add_mutually_exclusive_group()
    where.add_argument(
        "--jobs", type=int, default=1, help="runs at a time, each on its share of this machine's GPUs or cores"
    )
    what = "submit each run instead: the command that its TOML file is put behind, such as 'sbatch tools/sites/requeue.sbatch'"
    where.add_argument("--sbatch", metavar="COMMAND", help=what)
    show = commands.add_parser("show", help="print the table of what is there", allow_abbrev=False)
    show.add_argument("runs", nargs="+", type=Path, metavar="STUDY.toml|RUN", help="a study, or folders of runs")
    show.add_argument("--output", type=Path, metavar="DIR", help="a new folder for study.md, study.json and study.png")
    args = p.parse_args(argv)
    if args.command == "run" and args.jobs < 1:
        raise ValueError(f"--jobs must be at least 1: got {args.jobs}.")
    return args


def chosen(args: argparse.Namespace) -> Study:
    study = read_study(args.study)
    runs = [run for run in study.runs if fnmatch.fnmatch(run.name, args.only)]
    if not runs:
        raise ValueError(f"--only {args.only} fits none of the runs, such as {study.runs[0].name}.")
    return Study(study.name, runs)


def plan(study: Study) -> str:
    """The runs as a table, and what is missing."""
    lines, tokens, flops = [["run", "parameters", "state", "tokens", "FLOPs", "is"]], [0, 0], [0.0, 0.0]
    for run in study.runs:
        of, finished = run.plan, run.is_finished
        cost, state = of.flops_per_token * of.tokens, _study_tables.state_in_words(*of.state)
        is_ = "finished" if finished else f"at step {run.step:,} of {of.steps:,}" if run.step else "not begun"
        lines.append([run.name, f"{of.n_params:,}", state, f"{of.tokens:,}", f"{cost:.3g}", is_])
        tokens[finished] += of.tokens
        flops[finished] += cost
    missing = len(study.missing())
    total = f"{len(study.runs)} runs, {missing} missing: {tokens[0]:,} of {sum(tokens):,} tokens"
    return "\n".join([*markdown_rows(lines), "", f"{total}, {flops[0]:.3g} of {sum(flops):.3g} FLOPs"])


def shown(paths: list[Path]) -> list[_study_tables.Run]:
    """Raises: ValueError for a study without a finished run, and for a folder that holds no run."""
    found = []
    for path in paths:
        if path.suffix != ".toml":
            found.append(_study_tables.Run.of(str(path), record_of(path)))
            continue
        done = [run for run in read_study(path).runs if run.is_finished]
        if not done:
            raise ValueError(f"{path}: no run is finished. Train them: python -m interdomain.tools.study run {path}")
        found += [_study_tables.Run.of(run.name, json.loads(run.record.read_text())) for run in done]
    return found


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    if args.command == "plan":
        print(plan(chosen(args)))
        return 0
    if args.command == "run":
        study = chosen(args)
        for run in study.runs:  # refuses before anything is trained
            run.plan  # noqa: B018
        if 0 < (gpus := torch.cuda.device_count()) < args.jobs:
            raise ValueError(
                f"--jobs {args.jobs} on {gpus} GPU(s): each run needs one of its own. Give {gpus} or fewer."
            )
        if args.sbatch:
            submit(study.missing(), study.name, shlex.split(args.sbatch))
            return 0
        code = run_here(study.missing(), args.jobs)
        if not code:
            print(f"all runs are finished: python -m interdomain.tools.study show {args.study}")
        return code
    if args.output:
        require_empty(args.output)
    runs = shown(args.runs)
    text = _study_tables.page(runs)
    print(text, end="")
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        contents = {"cells": _study_tables.rows(runs), "runs": [asdict(run) for run in runs]}
        (args.output / "study.json").write_text(json.dumps(contents, indent=1) + "\n")
        (args.output / "study.md").write_text(text)
        drawn = draw(args.output / "study.png", _study_tables.panels(runs))
        print(f"wrote {args.output}" + ("" if drawn else ", without a figure: matplotlib is not installed"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
