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

POLL_SECONDS = 30
RESULTS = "evaluation.json"  # the results of a milestone, in its folder
CURVES = "evaluation"  # a folder in the run's folder of events


def parse(argv: list[str] | None) -> argparse.Namespace:
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
    """Evaluates the milestones of a run.

    Attributes:
        evaluated: The number of milestones that this watcher evaluated.
        drawn: The values by tag of each step whose results are in the run's TensorBoard.
    """

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        """Makes a watcher.

        Args:
            args: The options of `watch`, after `evaluate.check_options`.
            work: A folder for temporary files.
        """
        self.args = args
        self.work = work
        self.evaluated = 0
        self.drawn: dict[int, dict[str, float]] = {}

    def run(self) -> str:
        """Evaluates milestones until the run has ended.

        Returns:
            A sentence about what was done.
        """
        while not self.poll() and not self.args.once:
            time.sleep(POLL_SECONDS)
        if not self.drawn:
            folder = checkpoints_of(self.args.run)
            raise ValueError(
                f"{folder} holds no milestone. Set checkpoint.keep_every, or make one of a checkpoint that is there: "
                f"touch {folder}/step-N/{checkpoints.KEEP}"
            )
        curves = events_of(self.args.run) / CURVES
        return f"evaluated {self.evaluated} milestone(s); the curves of {len(self.drawn)} are in {curves}"

    def poll(self) -> bool:
        """Evaluates the milestones that have no results yet.

        Returns:
            True if the last milestone is the run's last step.
        """
        # The folder is read anew: a run that begins after the watcher writes only then where its checkpoints are.
        milestones = checkpoints.milestones(checkpoints_of(self.args.run))
        results = {}
        for step, milestone in milestones.items():
            if (milestone / RESULTS).is_file():
                results[step] = self.read(milestone / RESULTS)
        self.draw(results)
        # Evaluate the others, the oldest first.
        for step, milestone in sorted(milestones.items()):
            if step not in results:
                results[step] = self.evaluate(milestone)
                self.draw(results)
        # The run's record says how many steps it was planned to have.
        last = max(milestones, default=None)
        return last in results and results[last]["planned_steps"] == last

    def read(self, file: Path) -> dict[str, Any]:
        """Reads the results of a milestone.

        Raises:
            ValueError: They were made with other options, and curves would mix the two.
        """
        results = json.loads(file.read_text())
        made_with = results["options"]
        asked = evaluate.options_of(self.args)
        # By default the model sees as many tokens as in training, which is the same for all milestones.
        if self.args.max_length:
            asked["max_length"] = self.args.max_length
        for name, option in asked.items():
            if made_with.get(name) != option:
                raise ValueError(
                    f"{file} has {name} {made_with.get(name)}, and asked for is {option}. Give the same options, or remove "
                    "the results."
                )
        return results

    def evaluate(self, milestone: Path) -> dict[str, Any]:
        """Converts a milestone as `convert` does, evaluates it as `evaluate` does, and writes the results.

        Returns:
            The results.
        """
        with tempfile.TemporaryDirectory(dir=self.work) as temporary:
            folder = Path(temporary) / milestone.name
            options = convert.parse([str(milestone), "--output", str(folder)])
            convert.to_folder(milestone, folder, options)
            self.args.folders = [str(folder)]
            output = Path(temporary) / "results"
            contents = evaluate.evaluate_folders(self.args, output)
        # Keep what identifies and explains the figures. The temporary folder's name says nothing.
        for row in contents["perplexity"]:
            del row["folder"]
        record = checkpoints.read_run_record(milestone)[1]
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
        self.evaluated += 1
        figures = ", ".join(f"{tag} {value:.4g}" for tag, value in scalars(results).items())
        print(f"{milestone.name}: {figures}", flush=True)
        return results

    def draw(self, results: dict[int, dict[str, Any]]) -> None:
        """Draws all results into the run's TensorBoard, in place of what was drawn before.

        They have a folder of their own: TensorBoard reads the files of a folder one after the other, and
        would read no more of the training's file after a newer one.

        Args:
            results: The results of each step.
        """
        curves = {step: scalars(results[step]) for step in sorted(results)}
        if curves == self.drawn:
            return
        with open_events(events_of(self.args.run) / CURVES, first_step=0) as writer:
            for step, values in curves.items():
                for tag, value in values.items():
                    writer.add_scalar(tag, value, step)
        self.drawn = curves


def scalars(results: dict[str, Any]) -> dict[str, float]:
    """The values of a milestone's results by tag, with the averages of the paper's groups of tasks."""
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
            print(Watcher(args, work).run())
    except BlockingIOError as e:
        raise ValueError(f"another watcher evaluates {args.run}: end it first.") from e
    except KeyboardInterrupt:
        print("ended by Ctrl-C; the same command goes on", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
