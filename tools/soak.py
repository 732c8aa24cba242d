"""python -m interdomain.tools.soak --kills 20 --output outputs/soak

Train one run twice, once undisturbed and once killed at random moments, and compare: the final checkpoints to the bit, and
every loss of the curve wherever it was computed, and computed again. Kills are real: SIGKILL to a rank (torchrun restarts
the ranks) or to torchrun (the same command is started again), SIGTERM to torchrun or SIGUSR1 to a rank (the run saves and
leaves). Other flags go to TorchTitan (--checkpoint.async_mode disabled). Exit status 0: equal; 1: not.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from interdomain.outcome import OUTCOME

from . import launch
from ._cli import argument_parser, user_errors
from ._supervise import ELASTIC

KINDS = ("SIGKILL rank", "SIGKILL torchrun", "SIGTERM torchrun", "SIGUSR1 rank")
LOSS = "loss_metrics/global_avg_loss"
POLL_SECONDS = 0.02
EARLY = 0.25  # of the kills come at a random moment of a start, before its first step
SILENCE_SECONDS = 300  # no new step for so long: it hangs
# What is compared stands there: the last checkpoint, and the loss of every step.
NEEDED = {
    "checkpoint.enable": True,
    "checkpoint.load_only": False,
    "checkpoint.folder": "checkpoint",
    "metrics.enable_tensorboard": True,
    "metrics.save_tb_folder": "tb",
    "metrics.log_freq": 1,
}


@dataclass
class Seen:
    """A run's log, as far as it is written: torchrun's restarts and those of the command append to one."""

    path: Path
    read: int = 0
    step: int = 0  # the last one logged
    starts: int = 0  # of the ranks
    loads: list[tuple[int, int]] = field(default_factory=list)  # (last step logged before, step continued from)
    cut_short: int = 0  # saves that a kill ended
    left: int = 0  # times that the run saved and left

    def update(self) -> "Seen":
        text = self.path.read_bytes()[self.read :] if self.path.exists() else b""
        text = text[: text.rfind(b"\n") + 1]
        self.read += len(text)
        for line in text.decode(errors="replace").splitlines():
            if found := re.search(r"INFO - Training starts at step (\d+)", line):
                self.starts += 1
                self.loads.append((self.step, int(found[1]) - 1))
            elif found := re.search(r"INFO - step:\s*(\d+) ", line):
                self.step = int(found[1])
            self.cut_short += "was cut short" in line
            self.left += "INFO - leaving after step" in line
        return self


class Run:
    """One run in a folder: started again, by the same command, whenever torchrun is gone before the end."""

    def __init__(self, folder: Path, args, flags: list[str]) -> None:
        flags = [*flags, "--job.dump_folder", str(folder)]
        self.command = launch.torchrun_command(args.config, flags, args.ranks, launch.MAX_RESTARTS)
        self.environment = {**ELASTIC, **launch.environment(args.ranks)}
        folder.mkdir(parents=True)
        self.seen = Seen(folder / "log.txt")
        self.process, self.commands, self.outcome = None, 0, None

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        if self.outcome:
            self.outcome.cleanup()  # as the launcher does: ranks that were only beginning end by it
        self.outcome = tempfile.TemporaryDirectory(prefix="interdomain-")
        environment = {**self.environment, OUTCOME: str(Path(self.outcome.name) / "outcome")}
        with open(self.seen.path, "ab") as log:
            self.process = subprocess.Popen(self.command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        self.commands += 1

    def ranks(self) -> list[int]:
        """Process ids of torchrun's children."""
        try:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        except OSError:
            return []
        return [int(pid) for pid in children.split()]

    def disturb(self, kind: str, choose: random.Random) -> bool:
        """Send it. False: whom it was meant for is not there."""
        name, to = kind.split()
        pids = [self.process.pid] if to == "torchrun" else self.ranks()
        if not self.is_running() or not pids:
            return False
        try:
            os.kill(choose.choice(pids), getattr(signal, name))
        except ProcessLookupError:
            return False
        return True

    def stop(self) -> None:
        if self.is_running():
            self.process.kill()  # its ranks end with it
            self.process.wait()


def undisturbed(run: Run, steps: int) -> None:
    with tqdm(total=steps, desc="undisturbed", unit="step") as bar:
        run.start()
        while run.is_running():
            bar.update(run.seen.update().step - bar.n)
            time.sleep(POLL_SECONDS)
    if run.process.returncode:
        raise ValueError(f"the undisturbed run ended with exit status {run.process.returncode}; see {run.seen.path}.")


def disturbed(run: Run, steps: int, kills: int, choose: random.Random) -> Counter:
    """Kinds of the kills that hit. They come after steps drawn from the whole run, or in a start, a random time later."""
    hits = Counter()
    with tqdm(total=kills, desc="disturbed", unit="kill") as bar:
        for moment in sorted(choose.uniform(1, 0.95 * steps) for _ in range(kills)):
            kind, early = choose.choice(KINDS), choose.random() < EARLY
            keep_running(run, 0 if early else moment)
            time.sleep(choose.uniform(0, 8.0 if early else 1.0))
            while not run.disturb(kind, choose):  # it is between two starts
                keep_running(run, 0)
                time.sleep(POLL_SECONDS)
            hits[kind] += 1
            bar.update(1)
            bar.set_postfix_str(f"step {run.seen.update().step}, {kind}")
        keep_running(run, steps)
        run.process.wait()
    return hits


def keep_running(run: Run, step: float) -> None:
    """Start the run again whenever it has ended, until it has logged this step and runs or has come to its end."""
    last, since = -1, time.monotonic()
    while not (run.seen.update().step >= step and run.process is not None and (step or run.is_running())):
        if not run.is_running():
            run.start()
        if run.seen.step != last:
            last, since = run.seen.step, time.monotonic()
        if time.monotonic() - since > SILENCE_SECONDS:
            raise ValueError(f"no new step for {SILENCE_SECONDS} s; see {run.seen.path}.")
        time.sleep(POLL_SECONDS)


def differing_tensors(ours: Path, reference: Path) -> tuple[list[str], int]:
    """(names of the tensors that are not the same to the bit, how many were compared): weights and optimizer state."""
    import torch

    from interdomain.model.distributed_checkpoint import read_tensors, tensor_index

    index = tensor_index(reference)
    if tensor_index(ours).keys() != index.keys():
        return ["their names differ"], len(index)
    ours, reference = (read_tensors(folder, list(index), index) for folder in (ours, reference))
    return [name for name in index if not torch.equal(ours[name], reference[name])], len(index)


def losses(folder: Path) -> list[tuple[int, float]]:
    """(step, loss) as often as it was computed, by every start of a run; what a kill left unwritten is missing."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    found = []
    for file in sorted((folder / "tb").rglob("events.out.tfevents.*")):
        for event in EventFileLoader(str(file)).Load():
            found += [(event.step, make_ndarray(v.tensor).item()) for v in event.summary.value if v.tag == LOSS]
    return found


def compare(reference: Run, ours: Run, steps: int, hits: Counter) -> tuple[list[tuple[str, str]], bool]:
    """(rows of the table, whether everything is equal)."""
    folders = [run.seen.path.parent for run in (ours, reference)]
    differing, tensors = differing_tensors(*(folder / "checkpoint" / f"step-{steps}" for folder in folders))
    curve, expected = losses(folders[0]), dict(losses(folders[1]))
    wrong = sorted({step for step, loss in curve if loss != expected[step]})
    seen = ours.seen.update()
    lost = [before - continued for before, continued in seen.loads]
    equal = not differing and not wrong and {step for step, _ in curve} == set(expected) == set(range(1, steps + 1))
    rows = [
        ("kills", f"{hits.total()} ({', '.join(f'{n} {kind}' for kind, n in sorted(hits.items()))})"),
        ("starts", f"of the command {ours.commands}, of the ranks as far as the first step {seen.starts}"),
        ("saved and left on a signal", str(seen.left)),
        ("saves cut short, and skipped", str(seen.cut_short)),
        ("steps lost by one start", f"{max(lost)} at most, {sum(lost)} in all, of {steps}"),
        ("final tensors that differ", f"{len(differing)} of {tensors} {' '.join(differing[:3])}".rstrip()),
        ("losses that differ", f"{len(wrong)} of {len(curve)}, {len(curve) - len(expected)} of them computed again"),
    ]
    return rows, equal


def require_comparable(job, steps: int) -> None:
    """Raises: ValueError for a setting under which there would be nothing to compare, or not where it is looked for."""
    from interdomain.titan.settings import value_of

    for setting, needed in {**NEEDED, "training.steps": steps}.items():
        if (value := value_of(job, setting)) != needed:
            raise ValueError(
                f"{setting} = {value!r}: the soak compares the last checkpoint and the loss of every step, and needs "
                f"{needed!r} there. Leave it out (--steps sets the number of steps)."
            )


def parse(argv) -> tuple[argparse.Namespace, list[str]]:
    p = argument_parser(__doc__)
    p.add_argument("--kills", type=int, default=20, help="default 20")
    p.add_argument("--steps", type=int, default=400, help="of the run (default 400)")
    p.add_argument("--interval", type=int, default=10, help="steps between checkpoints (default 10)")
    p.add_argument("--seed", type=int, default=0, help="of the moments and kinds (default 0)")
    p.add_argument("--ranks", type=int, default=launch.CPU_RANKS, help=f"default {launch.CPU_RANKS}")
    p.add_argument("--config", default=launch.DEFAULT_CONFIG, help=f"default {launch.DEFAULT_CONFIG}")
    p.add_argument("--output", type=Path, required=True, help="a new folder for the two runs")
    return p.parse_known_args(argv)


@user_errors
def main(argv=None) -> int:
    args, flags = parse(argv)
    if min(args.kills, args.steps, args.interval, args.ranks) < 1:
        raise ValueError("--kills, --steps, --interval and --ranks must be at least 1.")
    if args.output.exists():
        raise ValueError(f"{args.output} exists; choose a new folder.")
    # Small steps, each of them logged: the point is the moments between them.
    flags = [
        *("--training.tokens", "0", "--training.steps", str(args.steps), "--training.seq_len", "64"),
        *("--lr_scheduler.warmup_tokens", "0", "--lr_scheduler.warmup_steps", "10", "--validation.no-enable"),
        *("--training.local_batch_size", "4", "--training.global_batch_size", str(4 * args.ranks)),
        *("--checkpoint.interval", str(args.interval), "--checkpoint.async_mode", "async"),
        *("--metrics.log_freq", "1", "--metrics.disable_color_printing"),
        *flags,
    ]
    job = launch.job_config(args.config, flags)
    require_comparable(job, args.steps)
    print(f"data: {launch.check_data(job)}", flush=True)
    runs = [Run(args.output / name, args, flags) for name in ("undisturbed", "disturbed")]
    reference, ours = runs
    began = time.monotonic()
    try:
        undisturbed(reference, args.steps)
        alone = time.monotonic() - began
        hits = disturbed(ours, args.steps, args.kills, random.Random(args.seed))
    finally:
        for run in runs:
            run.stop()
    rows, equal = compare(reference, ours, args.steps, hits)
    rows.append(("seconds", f"{time.monotonic() - began - alone:.0f}, undisturbed {alone:.0f}"))
    for name, value in rows:
        print(f"{name:>30}  {value}")
    print("equal: the final checkpoint and every loss" if equal else f"NOT EQUAL; the logs are in {args.output}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
