"""Trains the missing runs of a study on this machine, several at a time, or submits them to SLURM.

With several runs at a time (`jobs`), each has an equal share of this machine: a part of its GPUs,
or of the CPU's cores.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from functools import partial
from typing import NamedTuple

import torch
from tqdm import tqdm

from interdomain.launcher import end_with_parent
from interdomain.titan.settings.job_config import job_config_of
from interdomain.tools._start.torchrun import CONTINUE, INTERRUPTED, handlers
from interdomain.tools._study.definition import StudyRun
from interdomain.tools.launch import check_data

LOG = "log.txt"  # the output of a run, in its folder
POLL_SECONDS = 1.0


class Running(NamedTuple):
    """A run in a process of its own.

    Attributes:
        run: The run.
        share: The number of the share of this machine that the process has, from 0.
        process: The launcher's process.
    """

    run: StudyRun
    share: int
    process: subprocess.Popen


def start(run: StudyRun, share: int, jobs: int) -> Running:
    """Starts a run on one of `jobs` shares of this machine. A run that was begun continues.

    Args:
        run: The run.
        share: The number of the share, from 0 to jobs - 1.
        jobs: The number of shares.
    """
    command = [sys.executable, "-m", "interdomain.tools.launch", str(run.write_config())]
    command += ["--site", "local"]
    if run.ranks is not None:
        command += ["--ranks", str(run.ranks)]
    with open(run.folder / LOG, "ab") as log:
        process = subprocess.Popen(
            command,
            env=environment(share, jobs, run.ranks or 1),
            stdout=log,
            stderr=log,
            # Ctrl-C is for this program, which asks its runs to save and leave.
            process_group=0,
            # If this program is killed, its runs save and leave.
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
        )
    return Running(run, share, process)


def environment(share: int, jobs: int, ranks: int) -> dict[str, str]:
    """Returns the environment of a process that has one of `jobs` shares of this machine.

    Args:
        share: The number of the share, from 0 to jobs - 1.
        jobs: The number of shares of the GPUs, or of the CPU's cores.
        ranks: The number of processes of the run, which share its cores.
    """
    # One run at a time has the whole machine.
    if jobs == 1:
        return dict(os.environ)
    if gpus := torch.cuda.device_count():
        own = range(share * gpus // jobs, (share + 1) * gpus // jobs)
        return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, own))}
    threads = max(1, len(os.sched_getaffinity(0)) // (jobs * ranks))
    return {"OMP_NUM_THREADS": str(threads), **os.environ}


def check_data_of(runs: list[StudyRun]) -> None:
    """Opens the data of every run as the run will.

    The embedded corpus is prepared if it is not there.

    Raises:
        ValueError: The data of some runs cannot be opened.
    """
    names_by_error: dict[str, list[str]] = {}
    for run in runs:
        try:
            check_data(job_config_of(run.settings))
        except (ValueError, FileNotFoundError) as e:
            names_by_error.setdefault(str(e), []).append(run.name)
    lines = []
    for error, names in names_by_error.items():
        lines.append(f"{len(names)} run(s), the first of them {names[0]}: {error}")
    if lines:
        raise ValueError("\n".join(["data cannot be read, so no run was started.", *lines]))


def run_here(missing: list[StudyRun], jobs: int) -> int:
    """Trains runs in order, `jobs` at a time.

    A run that fails is reported, and the others go on. SIGINT and SIGTERM are passed on to the
    runs, which save and leave. A second SIGINT ends them at once.

    Args:
        missing: The runs that are not finished.
        jobs: The number of runs at a time.

    Returns:
        0 if all are finished, 1 if a run failed, CONTINUE if a signal came.
    """
    # Runs that wait for a share of the machine, and runs at work.
    waiting = list(missing)
    running: list[Running] = []
    signals: list[int] = []
    failed = 0
    steps = sum(run.plan.steps for run in missing)
    saved = sum(run.step for run in missing)

    def pass_on(number, frame) -> None:
        signals.append(number)
        for one in running:
            with contextlib.suppress(ProcessLookupError):
                one.process.send_signal(number)

    with (
        handlers({signal.SIGINT: pass_on, signal.SIGTERM: pass_on}),
        tqdm(total=steps, initial=saved, unit=" steps saved", disable=None) as bar,
    ):
        while running or (waiting and not signals):
            # Start runs on the free shares of the machine.
            free = set(range(jobs)) - {one.share for one in running}
            while waiting and free and not signals:
                run = waiting.pop(0)
                running.append(start(run, free.pop(), jobs))
                bar.write(f"{run.name}: training; its output is in {run.folder / LOG}")
                bar.set_description(", ".join(one.run.name for one in running))

            # Report those that have ended.
            time.sleep(POLL_SECONDS)
            for one in list(running):
                status = one.process.poll()
                if status is None:
                    continue
                running.remove(one)
                run = one.run
                # A run is finished when its last validation is in its TensorBoard.
                if status == 0 and run.is_finished:
                    bar.write(f"{run.name}: finished, wrote {run.record}")
                elif status in (CONTINUE, INTERRUPTED):
                    bar.write(f"{run.name}: left at step {run.step}")
                else:
                    failed += 1
                    log = run.folder / LOG
                    bar.write(
                        f"{run.name}: failed with exit status {status}; its output is in {log}"
                    )
            # The bar counts the steps in checkpoints, which a restart does not repeat.
            bar.n = sum(run.step for run in missing)
            bar.refresh()
            sys.stdout.flush()  # a file or a pipe would keep the lines until the end
    if signals:
        message = (
            f"left on a signal (exit status {CONTINUE}): the same command continues the study."
        )
        print(message, file=sys.stderr)
        return CONTINUE
    if failed:
        print(f"{failed} run(s) failed, see above.", file=sys.stderr)
        return 1
    return 0


def submit(missing: list[StudyRun], study: str, command: list[str]) -> None:
    """Submits each run that is not in SLURM's queue.

    Args:
        missing: The runs that are not finished.
        study: The name of the study, with which the names of the jobs begin.
        command: sbatch, its flags and a script that takes a run's TOML file.

    Raises:
        OSError: sbatch or squeue is not there.
        ValueError: One of them fails.
    """
    # Jobs are known by their names.
    queued = _output_of(["squeue", "--me", "--noheader", "--format=%j"]).splitlines()
    sbatch, *arguments = command
    for run in missing:
        # Scripts name a job's log after it, so it must be no path.
        job = f"{study}/{run.name}".replace("/", "-")
        if job in queued:
            print(f"{run.name}: in the queue")
            continue
        answer = _output_of([sbatch, f"--job-name={job}", *arguments, str(run.write_config())])
        print(f"{run.name}: {answer.strip()}")


def _output_of(command: list[str]) -> str:
    """Runs a command and returns what it prints. Raises ValueError if the command fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(
            f"{' '.join(command)} failed with exit status {done.returncode}: {done.stderr.strip()}"
        )
    return done.stdout
