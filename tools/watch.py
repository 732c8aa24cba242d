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
import hashlib
import json
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from interdomain.environment import environment, versions
from interdomain.files import distributed_checkpoint as checkpoints
from interdomain.files.checkpoint import open_checkpoint
from interdomain.files.event_files import open_events
from interdomain.files.run_folder import checkpoints_of, events_of
from interdomain.folders import kept_folder, write_whole
from interdomain.tools import _cli, convert, evaluate
from interdomain.tools._bench import results
from interdomain.tools._bench.timing import release
from interdomain.tools._evaluate import harness, task_table

LOOK_SECONDS = 30


def parse(argv) -> argparse.Namespace:
    p = _cli.argument_parser(__doc__, "RUN")
    p.add_argument(
        "run", type=_cli.path_argument, metavar="RUN", help="a run's folder (job.dump_folder); before all options"
    )
    p.add_argument("--once", action="store_true", help="evaluate the milestones that are there, and end")
    text = "keep each milestone's standalone folder, DIR/step-N (default: it is removed after its evaluation)"
    p.add_argument("--exports", type=_cli.path_argument, metavar="DIR", help=text)
    text = "name of the results, evaluation-NAME: for the same milestones with other options, also at the same time"
    p.add_argument("--name", metavar="NAME", help=f"{text} (default: the results are called evaluation)")
    evaluate.add_options(p)
    p.set_defaults(device="cpu")  # the run has the GPUs
    args = p.parse_args(argv)
    if args.name is not None and not re.fullmatch(r"[\w.-]+", args.name):
        raise ValueError(f"--name is {args.name!r}; give letters, digits, dots and dashes.")
    return args


class Watcher:
    """Evaluates a run's milestones.

    Args:
        names: of tasks. corpora: {corpus: its files}. work: a folder for what is removed again.
    """

    data: tuple[dict, dict] | None = None  # `read_data`, with the tokenizer of the run's first checkpoint
    count = 0  # of the milestones that were evaluated

    def __init__(self, args, names: list[str], corpora: dict[str, str], device: torch.device, work: Path) -> None:
        self.args, self.names, self.corpora, self.device, self.work = args, names, corpora, device, work
        self.title = "-".join(filter(None, ("evaluation", args.name)))
        self.machine = environment(device) | versions(evaluate.PACKAGES)
        self.drawn: dict[int, dict[str, float]] = {}
        self.asked: dict[str, dict[str, dict]] = {}  # kind -> task or corpus -> options that change its figures

    @property
    def folder(self) -> Path:
        """The folder of the run's checkpoints. A run that begins after the watcher says only then where it is."""
        return checkpoints_of(self.args.run)

    @property
    def events(self) -> Path:
        return events_of(self.args.run) / self.title

    def has_data(self) -> bool:
        """Read the data of tasks and corpora, if the run has a checkpoint with its tokenizer. Raises: as `read_data`."""
        if self.data is None and (steps := checkpoints.finished_steps(self.folder)):
            tokenizer = open_checkpoint(steps[max(steps)])[1]
            _, spans = self.data = evaluate.read_data(self.args, self.names, self.corpora, tokenizer)
            of_tasks = {name: getattr(self.args, name) for name in ("dtype", "limit", "max_length")}
            of_text = {"dtype": self.args.dtype, "lengths": sorted(set(self.args.lengths))}
            text = {corpus: hashlib.sha256(used.tobytes()).hexdigest()[:16] for corpus, used in spans.items()}
            self.asked["tasks"] = dict.fromkeys(self.names, of_tasks)
            self.asked["perplexity"] = {corpus: of_text | {"text": digest} for corpus, digest in text.items()}
        return self.data is not None

    def run(self) -> str:
        """Evaluate milestones until the run is at its end. Returns: what was done, in words."""
        if not self.has_data() and self.names:  # what cannot be had is an error now, not after hours
            harness.load_tasks(self.args.tasks, self.args.include_path)
        while not self.look() and not self.args.once:
            time.sleep(LOOK_SECONDS)
        if not self.drawn:
            raise ValueError(
                f"{self.folder} holds no milestone. Set checkpoint.keep_every, or make one of a checkpoint that is there: "
                f"touch {self.folder}/step-N/{checkpoints.KEEP}"
            )
        return f"evaluated {self.count} milestone(s); the curves of {len(self.drawn)} are in {self.events}"

    def look(self) -> bool:
        """Evaluate the milestones that are there. True: the last one is the run's last step."""
        there, found, ended = sorted(checkpoints.milestones(self.folder).items()), {}, False
        if not self.has_data() or not there:
            return False
        for step, path in there:
            with unless_gone(path):
                found[step] = self.read(path)
        self.draw(found)
        for step, path in there:
            ended = False
            with unless_gone(path):
                found[step] = self.evaluate_missing(path)
                self.draw(found)
                ended = step == checkpoints.read_sidecar(path)[1]["run"].get("planned_steps")
        return ended

    def read(self, milestone: Path) -> dict:
        """The results beside a milestone. Raises: ValueError for those with other options than were asked for."""
        file = milestone / f"{self.title}.json"
        if not file.is_file():
            return {"tasks": {}, "perplexity": {}}
        try:
            found = json.loads(file.read_text())
            there = [(found[kind][name]["options"], kind, name) for kind, name in self.each() if name in found[kind]]
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(f"{file} is damaged ({e}). Remove it: the milestone is then evaluated again.") from e
        for options, kind, name in there:
            if options != (asked := self.asked[kind][name]):
                raise ValueError(
                    f"{file} has {name} with {options}, and asked for is {asked}. Give the same options, or another --name."
                )
        return found

    def each(self) -> list[tuple[str, str]]:
        """(kind, name) of all tasks and corpora."""
        return [(kind, name) for kind, names in self.asked.items() for name in names]

    def evaluate_missing(self, milestone: Path) -> dict:
        """Evaluate what is missing of a milestone's results, and write these after each task and each corpus. Returns: all."""
        args, before = self.args, identity(milestone)
        found = self.read(milestone)
        missing = [(kind, name) for kind, name in self.each() if name not in found[kind]]
        if not missing:
            return found
        with tempfile.TemporaryDirectory(dir=self.work) as temporary:
            folder = self.export(milestone, args.exports or Path(temporary))
            how = dict(max_length=args.max_length or folder.config.max_seq_len, batch_size=args.batch_size)
            how |= dict(dtype=args.dtype, limit=args.limit)
            found |= {name: folder.record["facts"][name] for name in ("step", "tokens")}
            for kind, name, out in self.measure(folder, missing, how):
                release(self.device)
                if identity(milestone) != before:
                    raise FileNotFoundError("it was renamed or removed while it was evaluated")
                found[kind][name] = out | {"options": self.asked[kind][name], "environment": self.machine}
                write_whole(milestone / f"{self.title}.json", (json.dumps(found, indent=1) + "\n").encode())
                figures = scalars({kind: {name: out}}).items()
                print(f"{milestone.name}: {', '.join(f'{tag} {value:.4g}' for tag, value in figures)}", flush=True)
        self.count += 1
        return found

    def measure(
        self, folder: evaluate.Folder, missing: list[tuple[str, str]], how: dict
    ) -> Iterator[tuple[str, str, dict]]:
        """(kind, name, results) of tasks and corpora, one after the other. how: options of `harness.evaluate_folder`."""
        assert self.data is not None
        tasks, spans = self.data
        if asked := {name: tasks[name] for kind, name in missing if kind == "tasks"}:
            for name, out in harness.evaluate_folder(folder.path, asked, folder.tokenizer, self.device, **how):
                yield "tasks", name, out
        for name in (name for kind, name in missing if kind == "perplexity"):
            rows = evaluate.run_perplexity(self.args, folder, {name: spans[name]}, self.device)
            yield "perplexity", name, {"rows": rows}

    def export(self, milestone: Path, place: Path) -> evaluate.Folder:
        """The milestone's standalone folder, in `place`. Raises: ValueError for one that is there and not of this milestone."""
        folder = place / milestone.name
        options = convert.parse([str(milestone), "--output", str(folder)])
        if folder.exists():
            try:
                convert.check_folder(folder, open_checkpoint(milestone)[0], options)
            except ValueError as e:
                raise ValueError(f"{folder} is there, and is not made of {milestone}. Give another --exports.") from e
        else:
            convert.to_folder(milestone, folder, options)
        return evaluate.open_folder(str(folder))

    def draw(self, found: dict[int, dict]) -> None:
        """Draw all results by step into the run's TensorBoard, in the place of what was drawn before.

        In a folder of their own: TensorBoard reads the files of a folder one after the other, and after this one would read no
        more of the training's.
        """
        curves = {step: values for step, results in sorted(found.items()) if (values := scalars(results))}
        if curves == self.drawn:
            return
        with open_events(self.events, first_step=0) as writer:
            for step, values in curves.items():
                for tag, value in values.items():
                    writer.add_scalar(tag, value, step)
        self.drawn = curves


def identity(folder: Path) -> tuple[int, int] | None:
    """Device and inode of a folder, which a rename keeps. None: there is no folder."""
    try:
        status = folder.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


@contextlib.contextmanager
def unless_gone(milestone: Path) -> Iterator[None]:
    """A milestone that is renamed (.superseded, .damaged) or removed meanwhile is passed over, whatever error that made."""
    before = identity(milestone)
    try:
        yield
    except (OSError, ValueError) as e:
        if before and before == identity(milestone):
            raise
        print(f"{milestone.name} is passed over: {e}", flush=True)


def scalars(results: dict) -> dict[str, float]:
    """{tag: value} of a milestone's results, and averages of the paper's groups of tasks."""
    values, by_task = {}, {}
    for out in results.get("tasks", {}).values():
        by_task |= out["results"]
    for task, metrics in by_task.items():
        values |= {f"tasks/{task}/{metric}": x["value"] for metric, x in metrics.items()}
    for name, (group, _) in task_table.AVERAGES.items():
        if mean := task_table.average(by_task, group):
            values[f"tasks/{name}"] = mean["value"]
    for corpus, out in results.get("perplexity", {}).items():
        for row in out["rows"]:
            values[f"perplexity/{corpus}/{row['length']}"] = row["perplexity"]
    return values


@_cli.user_errors
def main(argv=None) -> int:
    args = parse(argv)
    names, corpora = evaluate.check_options(args), evaluate.corpora_of(args)[0]
    device = results.choose_device(args.device)
    if not args.run.is_dir():
        raise FileNotFoundError(f"There is no folder {args.run}; give the folder of a run that has begun.")
    with contextlib.ExitStack() as stack:
        try:
            work = stack.enter_context(kept_folder(args.run / "-".join(filter(None, ("watch", args.name)))))
        except BlockingIOError as e:
            raise ValueError(f"another watcher evaluates {args.run}: end it, or give this one another --name.") from e
        for remains in work.iterdir():  # of a watcher that was killed
            shutil.rmtree(remains)
        try:
            print(Watcher(args, names, corpora, device, work).run())
        except KeyboardInterrupt:
            print("ended by Ctrl-C; the same command goes on", file=sys.stderr)
            return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
