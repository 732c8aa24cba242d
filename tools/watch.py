"""interdomain watch outputs/125M --tasks paper

Evaluate a run's milestones while it trains.

A milestone is a checkpoint that is kept for good (checkpoint.keep_every, or a file step-N/KEEP).
Each new one is converted and evaluated as `convert` and `evaluate` do. Results are
step-N/evaluation.json and curves in the run's TensorBoard. What is there is not evaluated again: a
watcher that was killed goes on, and one that starts after the run takes all milestones. It ends
after the run's last step.

    interdomain watch outputs/125M --tasks commonsense --device cuda:1 --dtype bfloat16
    interdomain watch outputs/debug --perplexity README.md --packed --lengths 256 512 --once

Documentation: docs/evaluation.md
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from interdomain.checkpoint import step_folder as checkpoints
from interdomain.checkpoint.event_files import open_events
from interdomain.checkpoint.run_folder import checkpoints_of, events_of
from interdomain.folders import resumable_folder, write_atomically
from interdomain.tools import _cli, convert, evaluate
from interdomain.tools._evaluate import harness, task_table

POLL_SECONDS = 30  # between two looks for new milestones
RESULTS = "evaluation.json"  # the results of a milestone, in its folder
CURVES = "evaluation"  # a folder in the run's folder of events


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line. If `argv` is None, it is that of the process."""
    p = _cli.argument_parser(__doc__, "RUN")
    p.add_argument(
        "run",
        type=_cli.path_argument,
        metavar="RUN",
        help="a run's folder (job.dump_folder); before the options, some of which take several words",
    )
    p.add_argument(
        "--once",
        action="store_true",
        help="evaluate the milestones (checkpoints that are kept for good) that are there, and end",
    )
    evaluate.add_options(p)
    p.set_defaults(device="cpu")  # the run has the GPUs
    return p.parse_args(argv)


def watch(args: argparse.Namespace, work: Path) -> None:
    """Evaluates the milestones of a run until it has ended, or with --once those that are there.

    Args:
        args: The options, after `evaluate.check_options`.
        work: A folder for temporary files.
    """
    results: dict[int, dict[str, Any]] = {}  # by step
    while True:
        # The folder is read anew: a run that begins after the watcher writes only then where its
        # checkpoints are.
        folder = checkpoints_of(args.run)
        milestones = checkpoints.milestones(folder)
        for step in sorted(milestones.keys() - results.keys()):
            file = milestones[step] / RESULTS
            if file.is_file():
                results[step] = read_results(file, args)
            else:
                results[step] = evaluate_milestone(milestones[step], args, work)
            # After each milestone: the next one may fail.
            draw(results, events_of(args.run) / CURVES)
        # The run's record says how many steps it was planned to have.
        last = max(results, default=None)
        if args.once or (last and results[last]["planned_steps"] == last):
            break
        time.sleep(POLL_SECONDS)
    if not results:
        raise ValueError(
            f"{folder} holds no milestone. Set checkpoint.keep_every, or make one of a checkpoint that is there: "
            f"touch {folder}/step-N/{checkpoints.KEEP}"
        )
    print(f"the curves of {len(results)} milestone(s) are in {events_of(args.run) / CURVES}")


def read_results(file: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Reads the results of a milestone.

    Args:
        file: The file of the results.
        args: The options of `watch`.

    Raises:
        ValueError: They were made with other options, and curves would mix the two.
    """
    results = json.loads(file.read_text())
    made_with = results["options"]
    asked = evaluate.options_of(args)
    # By default the model sees as many tokens as in training, which is the same for all milestones.
    if args.max_length:
        asked["max_length"] = args.max_length
    for name, option in asked.items():
        if made_with.get(name) != option:
            raise ValueError(
                f"{file} has {name} {made_with.get(name)}, and asked for is {option}. Give the same options, or remove "
                "the results."
            )
    return results


def evaluate_milestone(milestone: Path, args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Converts and evaluates a milestone, and writes the results.

    Args:
        milestone: The folder of the checkpoint, where the results are written.
        args: The options of `watch`.
        work: A folder for temporary files.

    Returns:
        The results.
    """
    with tempfile.TemporaryDirectory(dir=work) as temporary:
        folder = Path(temporary) / milestone.name
        convert.to_folder(
            milestone, folder, convert.parse([str(milestone), "--output", str(folder)])
        )
        args.folders = [str(folder)]
        contents = evaluate.evaluate_folders(args, Path(temporary) / "results")
    # Keep what identifies and explains the figures. The temporary folder's name says nothing.
    for row in contents["perplexity"]:
        del row["folder"]
    _, record = checkpoints.read_run_record(milestone)  # the checkpoint's interdomain.json
    results = {
        "step": record["step"],
        "tokens": record["tokens"],
        "planned_steps": record["run"].get("planned_steps"),
        "options": contents["options"],
        "environment": contents["environment"],
        "tasks": contents["tasks"].get(str(folder), {}),
        "perplexity": contents["perplexity"],
    }
    write_atomically(milestone / RESULTS, (json.dumps(results, indent=1) + "\n").encode())
    figures = ", ".join(f"{tag} {value:.4g}" for tag, value in scalars(results).items())
    print(f"{milestone.name}: {figures}", flush=True)
    return results


def draw(results: dict[int, dict[str, Any]], folder: Path) -> None:
    """Draws all results into the run's TensorBoard, in place of what was drawn before.

    They have a folder of their own: TensorBoard reads the files of a folder one after the other,
    and would read no more of the training's file after a newer one.

    Args:
        results: The results of each step.
        folder: The folder of the events.
    """
    with open_events(folder, first_step=0) as writer:
        for step in sorted(results):
            for tag, value in scalars(results[step]).items():
                writer.add_scalar(tag, value, step)


def scalars(results: dict[str, Any]) -> dict[str, float]:
    """Returns the values of a milestone's results by tag.

    The averages of the paper's groups of tasks are among them.

    Args:
        results: The contents of the milestone's file of results.
    """
    values = {}
    # Averages have no metric in their tags.
    averages = {average["name"] for average in task_table.PAPER["averages"].values()}
    tasks = task_table.with_averages(results["tasks"].get("results", {}))
    for (task, metric), measured in tasks.items():
        tag = f"tasks/{task}"
        if task not in averages:
            tag += f"/{metric}"
        values[tag] = measured["value"]
    for row in results["perplexity"]:
        values[f"perplexity/{row['corpus']}/{row['length']}"] = row["perplexity"]
    return values


@_cli.user_errors
def main(argv: list[str] | None = None) -> int:
    """Runs the command, by default with the process's arguments. Returns the exit status."""
    args = parse(argv)
    evaluate.check_options(args)
    if not args.run.is_dir():
        raise FileNotFoundError(
            f"There is no folder {args.run}; give the folder of a run that has begun."
        )
    # Read the data once, so that an error appears now and not after hours.
    evaluate.corpora_of(args)
    if args.names:
        harness.load_tasks(args.tasks, args.include_path)
    # The folder of temporary files is locked, so that a run has one watcher.
    try:
        with resumable_folder(args.run / "watch") as work:
            for remains in work.iterdir():  # of a watcher that was killed
                shutil.rmtree(remains)
            watch(args, work)
    except BlockingIOError as e:
        raise ValueError(f"another watcher evaluates {args.run}: end it first.") from e
    except KeyboardInterrupt:
        print("ended by Ctrl-C; the same command goes on", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
