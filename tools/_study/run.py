"""Training a study's missing runs: on this machine, several at a time if asked, or as SLURM jobs."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from functools import partial

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


class Running:
    """A run in a process of its own, on one of `jobs` equal shares of this machine."""

    def __init__(self, run: StudyRun, share: int, jobs: int) -> None:
        self.run, self.share = run, share
        config = run.write_config()
        command = [sys.executable, "-m", "interdomain.tools.launch", str(config), "--site", "local"]
        command += [] if run.ranks is None else ["--ranks", str(run.ranks)]
        self.log = open(run.folder / LOG, "ab")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            env=environment(share, jobs, run.ranks or 1),
            stdout=self.log,
            stderr=self.log,
            process_group=0,  # of its own: Ctrl-C is for this program, which asks its runs to save and leave
            preexec_fn=partial(end_with_parent, signal.SIGTERM),  # saves and leaves
        )


def environment(share: int, jobs: int, ranks: int) -> dict[str, str]:
    """Environment of a process that has one of `jobs` shares of the GPUs, or of the CPU's cores."""
    if jobs == 1:
        return dict(os.environ)
    if gpus := torch.cuda.device_count():
        share_of_gpus = range(share * gpus // jobs, (share + 1) * gpus // jobs)
        return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, share_of_gpus))}
    threads = max(1, len(os.sched_getaffinity(0)) // (jobs * ranks))
    return {"OMP_NUM_THREADS": str(threads), **os.environ}


def require_data(missing: list[StudyRun], corpora: dict[str, str]) -> None:
    """Open the data of every run as the run will, and prepare the embedded corpus if it is not there.

    corpora: of a study. Raises: ValueError with the runs whose data cannot be opened, and the commands that make it.
    """
    errors: dict[str, list[str]] = {}  # with the names of their runs
    commands: dict[str, None] = {}
    for run in missing:
        job = job_config_of(run.settings)
        try:
            check_data(job)
        except (ValueError, FileNotFoundError) as e:
            errors.setdefault(str(e), []).append(run.name)
            for corpus in [*folders_of(job.data.corpus), job.data.validation_corpus]:
                if corpus in corpora and not os.path.exists(corpus):
                    prepare = [*command_here("prepare-data"), *shlex.split(corpora[corpus])]
                    commands[shlex.join([*prepare, "--output", corpus])] = None
    if errors:
        lines = [f"{len(names)} run(s), the first of them {names[0]}: {error}" for error, names in errors.items()]
        lines += ["This makes what is missing:", *commands] if commands else []
        raise ValueError("\n".join(["data cannot be read, so no run was started.", *lines]))


def run_here(missing: list[StudyRun], jobs: int) -> int:
    """Train `missing` in order, `jobs` at a time; a run that was begun goes on from its last checkpoint.

    A run that fails is reported, and the others go on. SIGINT and SIGTERM go on to the runs: they save and leave; a second
    SIGINT ends them at once.
    Returns: 0, 1 if a run failed, CONTINUE if they were asked to leave.
    """
    waiting, running, failed, asked = list(missing), [], [], []
    total, saved = sum(run.plan.steps for run in missing), sum(run.step for run in missing)
    bar = tqdm(total=total, unit=" steps saved", disable=None, initial=saved)

    def leave(number, frame):
        asked.append(number)
        for one in running:
            with contextlib.suppress(ProcessLookupError):
                one.process.send_signal(number)

    with handlers({signal.SIGINT: leave, signal.SIGTERM: leave}), bar:
        while running or (waiting and not asked):
            free = set(range(jobs)) - {one.share for one in running}
            while waiting and free and not asked:
                running.append(Running(waiting.pop(0), free.pop(), jobs))
                bar.set_description(", ".join(one.run.name for one in running))
            time.sleep(SECONDS)
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                one.log.close()
                words, bad = outcome(one)
                failed += bad
                bar.write(f"{one.run.name}: {words}")
            bar.n = sum(run.step for run in missing)
            bar.refresh()
    if asked:
        print(f"left on a signal (exit status {CONTINUE}): the same command continues the study.", file=sys.stderr)
        return CONTINUE
    for run in failed:
        print(f"failed: {run.name}; its output is in {run.folder / LOG}", file=sys.stderr)
    return int(bool(failed))


def outcome(one: Running) -> tuple[str, list[StudyRun]]:
    """(how a run ended, itself in a list if it failed)."""
    run, code = one.run, one.process.returncode
    vars(run).pop("is_finished", None)  # it was not, when it began
    if code == 0 and run.is_finished:
        return f"finished, wrote {run.record}", []
    if code in (CONTINUE, INTERRUPTED):
        return f"left at step {run.step}", []
    return f"failed with exit status {code}", [run]


def submit(missing: list[StudyRun], study: str, command: list[str]) -> None:
    """Submit each run that is not in the queue. command: sbatch, its flags and a script that takes a run's TOML file.

    Raises: OSError where sbatch or squeue cannot be run; ValueError where one fails.
    """
    queued = set(_output_of(["squeue", "--me", "--noheader", "--format=%j"]).splitlines())
    for run in missing:
        job = f"{study}/{run.name}"
        if job in queued:
            print(f"{run.name}: in the queue")
            continue
        answer = _output_of([command[0], f"--job-name={job}", *command[1:], str(run.write_config())])
        print(f"{run.name}: {answer.strip()}")


def _output_of(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{' '.join(command)} failed with exit status {done.returncode}: {done.stderr.strip()}")
    return done.stdout
