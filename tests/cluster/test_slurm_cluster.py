"""The batch script of tools/sites under real SLURM: lost nodes and time limits. Minutes each, and asked for:

INTERDOMAIN_CLUSTER=1 ./launch.sh test tests/cluster -n 0
"""

import json
import os
import re
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from interdomain.tools import compare_runs
from interdomain.tools._start import slurm

from ..common import REPOSITORY, TIMEOUT
from .nodes import Cluster

pytestmark = pytest.mark.skipif(
    os.environ.get("INTERDOMAIN_CLUSTER") != "1",
    reason="minutes, as root: by request, with INTERDOMAIN_CLUSTER=1",
)
FLAGS = (
    "--ranks 1 --training.tokens 0 --training.local_batch_size 1 --training.global_batch_size 2 --checkpoint.interval 10 "
    "--lr_scheduler.warmup_tokens 4096 --validation.freq 1000 --validation.tokens 4096"
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    cluster.environment["INTERDOMAIN_PYTHON"] = sys.executable
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


class Job:
    """A run of two nodes in the queue, by the script that users copy."""

    def __init__(self, cluster: Cluster, folder: Path, steps: int, minutes: int = 30) -> None:
        self.cluster = cluster
        self.run = folder / "run"
        self.log = folder / "log.txt"
        folder.mkdir()
        script = (slurm.SITES / "requeue.sbatch").read_text()
        script = script.replace("#SBATCH --gpus-per-node=4\n", "")
        command = f"train_configs/debug.toml {FLAGS} --training.steps {steps}"
        command += f" --job.dump_folder {self.run}"
        (folder / "job.sbatch").write_text(script)
        # The options of the command win over those of the script.
        options = f"--nodes=2 --time={minutes} --signal=USR1@60 --output={self.log}"
        submit = f"sbatch --parsable --chdir={REPOSITORY} {options} {folder}/job.sbatch {command}"
        self.number = cluster.call(submit).strip()

    def has_ended(self) -> bool:
        return not (self.run / "run.lock").exists()

    def saved(self, step: int) -> bool:
        return (self.run / f"checkpoint/step-{step}/.metadata").is_file()

    def steps(self, pattern: str) -> list[str]:
        return re.findall(pattern, self.log.read_text()) if self.log.is_file() else []

    def until_logged(self, pattern: str, seconds: int) -> int:
        """Returns the step that the log names last in this pattern."""
        self.cluster.wait(partial(self.steps, pattern), seconds, f"{pattern!r} in {self.log}")
        return int(self.steps(pattern)[-1])

    def until(self, state: str, seconds: int = 400) -> None:
        command = f"squeue --noheader --states=all --jobs={self.number} --format=%T"

        def is_in_state() -> bool:
            return self.cluster.call(command).strip() == state

        self.cluster.wait(is_in_state, seconds, f"{state}; see {self.log}")

    def start_again(self) -> None:
        """A job that was put back in the queue waits for two minutes, as SLURM has it."""
        self.until("PENDING")
        time.sleep(2)  # slurmd refuses to start a job in the second in which it ended
        self.cluster.call(f"scontrol update job={self.number} StartTime=now")


def test_lost_nodes_change_no_bit(cluster, tmp_path):
    """One run loses its second node, then its first."""
    job = Job(cluster, tmp_path / "disturbed", steps=60)
    for step, loses_first in ((20, False), (40, True)):
        cluster.wait(partial(job.saved, step), TIMEOUT, f"step {step}; see {job.log}")
        first = json.loads((job.run / "run.lock").read_text())["host"]
        lost = first
        if not loses_first:
            nodes = cluster.call(f"squeue --noheader --jobs={job.number} --format=%N").strip()
            names = cluster.call(f"scontrol show hostnames {nodes}").split()
            names.remove(first)
            lost = names[0]
        cluster.power_off(lost)
        job.start_again()  # on the two that are left
        job.until("RUNNING", 60)
        cluster.boot(lost)
        cluster.wait(cluster.is_up, 60, f"{lost} to come back")
    undisturbed = Job(cluster, tmp_path / "undisturbed", steps=60)
    job.until("COMPLETED")
    undisturbed.until("COMPLETED")
    assert compare_runs.main([str(job.run), str(undisturbed.run)]) == 0


def test_a_time_limit_puts_the_run_back_in_the_queue(cluster, tmp_path):
    """The time limit is three minutes, of which the last is for saving. Then the user cancels the run: it saves again."""
    job = Job(cluster, tmp_path / "limited", steps=5000, minutes=3)
    first = job.until_logged(r"leaving after step (\d+) \(SIGUSR1.*\): saved", 400)
    assert job.saved(first)
    job.start_again()
    job.until_logged(rf"Training starts at step ({first + 1})\b", 150)
    following = first // 10 * 10 + 10
    cluster.wait(partial(job.saved, following), 60, f"step {following}")
    cluster.call(f"scancel {job.number}")
    cluster.wait(job.has_ended, 60, "the run to end")
    last = job.until_logged(r"leaving after step (\d+) ", 1)
    assert last > first
    assert job.saved(last)
