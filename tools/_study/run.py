"""Training a study's missing runs: on this machine, several at a time if asked, or as SLURM jobs."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from typing import NamedTuple

import torch
from tqdm import tqdm

from interdomain.launcher import end_with_parent
from interdomain.titan.data.folders import folders_of
from interdomain.titan.settings.job_config import job_config_of
from interdomain.tools._start.torchrun import CONTINUE, INTERRUPTED, command_here, handlers
from interdomain.tools._study.definition import StudyRun
from interdomain.tools.launch import check_data

LOG = "log.txt"  # in a run's folder: what it printed
SECONDS = 1.0  # between looks at the runs


class Running(NamedTuple):
    """A run in a process of its own, on one of several equal shares of this machine."""

    run: StudyRun
    share: int
    process: subprocess.Popen


def start(run: StudyRun, share: int, jobs: int) -> Running:
    ranks = run.ranks or 1
    command = [
        sys.executable,
        "-m",
        "interdomain.tools.launch",
        str(run.write_config()),
        "--site",
        "local",
    ]
    if run.ranks is not None:
        command += ["--ranks", str(ranks)]
    with open(run.folder / LOG, "ab") as log:
        process = subprocess.Popen(
            command,
            env=environment(share, jobs, ranks),
            stdout=log,
            stderr=log,
            process_group=0,  # of its own: Ctrl-C is for this program, which asks its runs to save and leave
            preexec_fn=partial(end_with_parent, signal.SIGTERM),  # saves and leaves
        )
    return Running(run, share, process)


def environment(share: int, jobs: int, ranks: int) -> dict[str, str]:
    """Environment of a process that has one of `jobs` shares of the GPUs, or of the CPU's cores."""
    if jobs == 1:
        return dict(os.environ)
    if gpus := torch.cuda.device_count():
        own = range(share * gpus // jobs, (share + 1) * gpus // jobs)
        return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, own))}
    threads = max(1, len(os.sched_getaffinity(0)) // (jobs * ranks))
    return {"OMP_NUM_THREADS": str(threads), **os.environ}


def require_data(missing: list[StudyRun], corpora: dict[str, str]) -> None:
    """Opens the data of every run as the run will, and prepares the embedded corpus if it is not there.

    Args:
        corpora: The study's, which give the commands that make what is missing.
    Raises:
        ValueError: The data of some runs cannot be opened.
    """
    errors: dict[str, list[str]] = {}  # with the names of their runs
    commands: dict[str, None] = {}  # each of them once
    for run in missing:
        job = job_config_of(run.settings)
        try:
            check_data(job)
        except (ValueError, FileNotFoundError) as e:
            errors.setdefault(str(e), []).append(run.name)
            for corpus in [*folders_of(job.data.corpus), job.data.validation_corpus]:
                if corpus in corpora and not os.path.exists(corpus):
                    prepare = [
                        *command_here("prepare-data"),
                        *shlex.split(corpora[corpus]),
                        "--output",
                        corpus,
                    ]
                    commands[shlex.join(prepare)] = None
    if errors:
        lines = ["data cannot be read, so no run was started."]
        for error, names in errors.items():
            lines.append(f"{len(names)} run(s), the first of them {names[0]}: {error}")
        if commands:
            lines += ["This makes what is missing:", *commands]
        raise ValueError("\n".join(lines))


def run_here(missing: list[StudyRun], jobs: int) -> int:
    """Trains runs in order, `jobs` at a time. A run that was begun goes on from its last checkpoint.

    A run that fails is reported, and the others go on. SIGINT and SIGTERM go on to the runs: they save and leave; a second
    SIGINT ends them at once.

    Returns:
        0; 1 if a run failed; CONTINUE if they were asked to leave.
    """
    waiting = list(missing)
    running: list[Running] = []
    failed = 0
    signals: list[int] = []
    total = sum(run.plan.steps for run in missing)
    bar = tqdm(
        total=total, unit=" steps saved", disable=None, initial=sum(run.step for run in missing)
    )

    def pass_on(number, frame):
        signals.append(number)
        for one in running:
            with contextlib.suppress(ProcessLookupError):
                one.process.send_signal(number)

    with handlers({signal.SIGINT: pass_on, signal.SIGTERM: pass_on}), bar:
        while running or (waiting and not signals):
            # Start runs on the free shares of the machine.
            free = set(range(jobs)) - {one.share for one in running}
            while waiting and free and not signals:
                running.append(start(waiting.pop(0), free.pop(), jobs))
                bar.set_description(", ".join(one.run.name for one in running))

            # Report those that ended.
            time.sleep(SECONDS)
            for one in list(running):
                code = one.process.poll()
                if code is None:
                    continue
                running.remove(one)
                run = one.run
                vars(run).pop("is_finished", None)  # it was not when it began
                if code == 0 and run.is_finished:
                    bar.write(f"{run.name}: finished, wrote {run.record}")
                elif code in (CONTINUE, INTERRUPTED):
                    bar.write(f"{run.name}: left at step {run.step}")
                else:
                    failed += 1
                    bar.write(
                        f"{run.name}: failed with exit status {code}; its output is in {run.folder / LOG}"
                    )
            bar.n = sum(run.step for run in missing)
            bar.refresh()
    if signals:
        print(
            f"left on a signal (exit status {CONTINUE}): the same command continues the study.",
            file=sys.stderr,
        )
        return CONTINUE
    if failed:
        print(f"{failed} run(s) failed, as said above.", file=sys.stderr)
        return 1
    return 0


def submit(missing: list[StudyRun], study: str, command: list[str]) -> None:
    """Submits each run that is not in SLURM's queue.

    Args:
        command: sbatch, its flags and a script that takes a run's TOML file.
    Raises:
        OSError: sbatch or squeue is not there.
        ValueError: One of them fails.
    """
    queued = _output_of(["squeue", "--me", "--noheader", "--format=%j"]).splitlines()
    for run in missing:
        job = f"{study}/{run.name}"
        if job in queued:
            print(f"{run.name}: in the queue")
            continue
        answer = _output_of(
            [command[0], f"--job-name={job}", *command[1:], str(run.write_config())]
        )
        print(f"{run.name}: {answer.strip()}")


def _output_of(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(
            f"{' '.join(command)} failed with exit status {done.returncode}: {done.stderr.strip()}"
        )
    return done.stdout
