"""interdomain watch outputs/125M --tasks paper

Evaluate a run's milestones while it trains.

Each new milestone (checkpoint.keep_every, or a file step-N/KEEP) is converted and evaluated as `convert` and `evaluate` do.
Results are step-N/evaluation.json and curves in the run's TensorBoard. What is there is not evaluated again: a watcher
that was killed goes on, and one that starts after the run takes all milestones. It ends after the run's last step.

    interdomain watch outputs/125M --tasks commonsense --device cuda:1 --dtype bfloat16
    interdomain watch outputs/debug --perplexity README.md --packed --lengths 256 512 --once

Documentation: docs/evaluation.md
"""

import argparse
import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from interdomain.checkpoint import step_folder as checkpoints
from interdomain.checkpoint.event_files import open_events
from interdomain.checkpoint.run_folder import checkpoints_of, events_of
from interdomain.folders import kept_folder, write_whole
from interdomain.tools import _cli, convert, evaluate
from interdomain.tools._evaluate import harness, task_table

LOOK_SECONDS = 30
RESULTS = "evaluation.json"  # beside a milestone
CURVES = "evaluation"  # beside the run's events


def parse(argv) -> argparse.Namespace:
    p = _cli.argument_parser(__doc__, "RUN")
    p.add_argument(
        "run",
        type=_cli.path_argument,
        metavar="RUN",
        help="a run's folder (job.dump_folder); before all options",
    )
    p.add_argument(
        "--once", action="store_true", help="evaluate the milestones that are there, and end"
    )
    evaluate.add_options(p)
    p.set_defaults(device="cpu")  # the run has the GPUs
    return p.parse_args(argv)


class Watcher:
    """Evaluates a run's milestones.

    Args:
        names: Of tasks.
        work: A folder for what is removed again.
    """

    def __init__(self, args: argparse.Namespace, names: list[str], work: Path) -> None:
        self.args = args
        self.names = names
        self.work = work
        self.evaluated = 0
        self.drawn: dict[int, dict[str, float]] = {}

    def run(self) -> str:
        """Evaluates milestones until the run is at its end. Returns: a sentence about what was done."""
        while not self.look() and not self.args.once:
            time.sleep(LOOK_SECONDS)
        if not self.drawn:
            folder = checkpoints_of(self.args.run)
            raise ValueError(
                f"{folder} holds no milestone. Set checkpoint.keep_every, or make one of a checkpoint that is there: "
                f"touch {folder}/step-N/{checkpoints.KEEP}"
            )
        curves = events_of(self.args.run) / CURVES
        return f"evaluated {self.evaluated} milestone(s); the curves of {len(self.drawn)} are in {curves}"

    def look(self) -> bool:
        """Evaluates the milestones that are there. Returns: True if the last one is the run's last step."""
        # A run that begins after the watcher says only then where its checkpoints are.
        milestones = checkpoints.milestones(checkpoints_of(self.args.run))
        results = {}
        for step, milestone in milestones.items():
            with contextlib.suppress(
                FileNotFoundError
            ):  # it is not evaluated yet, or was set aside meanwhile
                results[step] = self.read(milestone / RESULTS)
        self.draw(results)
        for step, milestone in sorted(milestones.items()):
            if step not in results:
                found = self.evaluate(milestone)
                if found is not None:
                    results[step] = found
                    self.draw(results)
        last = max(milestones, default=None)
        if last not in results:
            return False
        return results[last]["planned_steps"] == last

    def read(self, file: Path) -> dict:
        """Results of a milestone. Raises: ValueError if they were made with other options."""
        try:
            found = json.loads(file.read_text())
            options = found["options"]
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(
                f"{file} is damaged ({e}). Remove it: the milestone is then evaluated again."
            ) from e
        asked = evaluate.options_of(self.args, self.names)
        if self.args.max_length:
            asked["max_length"] = self.args.max_length
        for name, option in asked.items():
            if options.get(name) != option:
                there = f"{file} has {name} {options.get(name)}, and asked for is {option}"
                raise ValueError(f"{there}. Give the same options, or remove the results.")
        return found

    def evaluate(self, milestone: Path) -> dict | None:
        """Evaluates a milestone and writes its results beside it. Returns: None if it went away meanwhile."""
        inode = milestone.stat().st_ino  # a rename keeps it
        try:
            with tempfile.TemporaryDirectory(dir=self.work) as temporary:
                folder = Path(temporary) / milestone.name
                convert.to_folder(
                    milestone, folder, convert.parse([str(milestone), "--output", str(folder)])
                )
                self.args.folders = [str(folder)]
                contents = evaluate.evaluate_folders(
                    self.args, self.names, Path(temporary) / "results"
                )
            record = checkpoints.read_sidecar(milestone)[1]
            found = {
                "step": record["step"],
                "tokens": record["tokens"],
                "planned_steps": record["run"].get("planned_steps"),
                "options": contents["options"],
                "environment": contents["environment"],
                "tasks": contents["tasks"].get(str(folder), {}),
                "perplexity": contents["perplexity"],
            }
            for row in found["perplexity"]:
                del row["folder"]
            if milestone.stat().st_ino != inode:
                raise FileNotFoundError("it was renamed or removed while it was evaluated")
            write_whole(milestone / RESULTS, (json.dumps(found, indent=1) + "\n").encode())
        except (OSError, ValueError) as e:
            # A milestone may be set aside at any time (.superseded, .damaged), or removed.
            if milestone.exists() and milestone.stat().st_ino == inode:
                raise
            print(f"{milestone.name} is passed over: {e}", flush=True)
            return None
        self.evaluated += 1
        figures = ", ".join(f"{tag} {value:.4g}" for tag, value in scalars(found).items())
        print(f"{milestone.name}: {figures}", flush=True)
        return found

    def draw(self, results: dict[int, dict]) -> None:
        """Draws all results by step into the run's TensorBoard, in place of what was drawn before.

        They have a folder of their own: TensorBoard reads the files of a folder one after the other, and after this one would
        read no more of the training's.
        """
        curves = {step: scalars(results[step]) for step in sorted(results)}
        if curves == self.drawn:
            return
        with open_events(events_of(self.args.run) / CURVES, first_step=0) as writer:
            for step, values in curves.items():
                for tag, value in values.items():
                    writer.add_scalar(tag, value, step)
        self.drawn = curves


def scalars(results: dict) -> dict[str, float]:
    """{tag: value} of a milestone's results, and averages of the paper's groups of tasks."""
    values = {}
    by_task = results["tasks"].get("results", {})
    for task, metrics in by_task.items():
        for metric, measured in metrics.items():
            values[f"tasks/{task}/{metric}"] = measured["value"]
    for group, average in task_table.PAPER["averages"].items():
        mean = task_table.mean_of(by_task, group)
        if mean is not None:
            values[f"tasks/{average['name']}"] = mean["value"]
    for row in results["perplexity"]:
        values[f"perplexity/{row['corpus']}/{row['length']}"] = row["perplexity"]
    return values


@_cli.user_errors
def main(argv=None) -> int:
    args = parse(argv)
    names = evaluate.check_options(args)
    if not args.run.is_dir():
        raise FileNotFoundError(
            f"There is no folder {args.run}; give the folder of a run that has begun."
        )
    # What cannot be had is an error now, not after hours.
    evaluate.corpora_of(args)
    if names:
        harness.load_tasks(args.tasks, args.include_path)
    try:
        with kept_folder(args.run / "watch") as work:
            for remains in work.iterdir():  # of a watcher that was killed
                shutil.rmtree(remains)
            print(Watcher(args, names, work).run())
    except BlockingIOError as e:
        raise ValueError(f"another watcher evaluates {args.run}: end it first.") from e
    except KeyboardInterrupt:
        print("ended by Ctrl-C; the same command goes on", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
