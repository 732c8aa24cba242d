"""The batch script of tools/sites under real SLURM: lost nodes and time limits. Minutes each, and asked for:

INTERDOMAIN_CLUSTER=1 ./launch.sh test tests/cluster -n 0

cluster.sh makes the cluster. It needs root, and Debian's slurm-wlm, munge and iproute2.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from interdomain.tools import compare_runs
from interdomain.tools._start import slurm

from ..common import REPOSITORY, TIMEOUT

pytestmark = pytest.mark.skipif(
    os.environ.get("INTERDOMAIN_CLUSTER") != "1",
    reason="minutes, as root: by request, with INTERDOMAIN_CLUSTER=1",
)
SCRIPT = Path(__file__).with_name("cluster.sh")
IDLE_NODES = "sinfo --noheader --states=idle"
FLAGS = (
    "--ranks 1 --training.tokens 0 --training.local_batch_size 1 --training.global_batch_size 2 --checkpoint.interval 10 "
    "--lr_scheduler.warmup_tokens 4096 --validation.freq 1000 --validation.tokens 4096"
)


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory):
    """Three nodes that run under one slurmctld."""
    folder = tmp_path_factory.mktemp("cluster")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLUSTER", str(folder))
        patch.setenv("SLURM_CONF", f"{folder}/slurm.conf")
        patch.setenv("INTERDOMAIN_PYTHON", sys.executable)
        try:
            call(f"{SCRIPT} start")
            wait_for(" 3 ", IDLE_NODES, 60)
            yield
        finally:
            call(f"{SCRIPT} stop")


def call(command):
    """Returns what the command prints."""
    done = subprocess.run(shlex.split(command), text=True, capture_output=True)
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


def wait_for(pattern, command, seconds):
    """Repeats the command until it prints the pattern. Returns the last place, or its group."""
    end = time.monotonic() + seconds
    while not (found := re.findall(pattern, call(command))):
        assert time.monotonic() < end, f"waited {seconds} s for {pattern!r} of {command}"
        time.sleep(0.5)
    return found[-1]


class Job:
    """A run of two nodes in the queue, by the script that users copy."""

    def __init__(self, folder, steps, minutes=30):
        self.folder = folder
        self.run = folder / "run"
        self.log = folder / "log.txt"
        folder.mkdir()
        self.log.touch()
        script = (slurm.SITES / "requeue.sbatch").read_text()
        script = script.replace("#SBATCH --gpus-per-node=4\n", "")
        command = f"train_configs/debug.toml {FLAGS} --training.steps {steps}"
        command += f" --job.dump_folder {self.run}"
        (folder / "job.sbatch").write_text(script)
        # The options of the command win over those of the script.
        options = f"--nodes=2 --time={minutes} --signal=USR1@60 --output={self.log}"
        submit = f"sbatch --parsable --chdir={REPOSITORY} {options} {folder}/job.sbatch {command}"
        self.number = call(submit).strip()

    def until_saved(self, step, seconds):
        wait_for(".", f"find {self.folder} -path *step-{step}/.metadata", seconds)

    def until_logged(self, pattern, seconds):
        """Returns the step that the log names last in this pattern."""
        return int(wait_for(pattern, f"cat {self.log}", seconds))

    def until(self, state, seconds=400):
        command = f"squeue --noheader --states=all --jobs={self.number} --format=%T"
        wait_for(state, command, seconds)

    def start_again(self):
        """A job that was put back in the queue waits for two minutes, as SLURM has it."""
        self.until("PENDING")
        time.sleep(2)  # slurmd refuses to start a job in the second in which it ended
        call(f"scontrol update job={self.number} StartTime=now")


def test_lost_nodes_change_no_bit(tmp_path):
    """One run loses its second node, then its first."""
    job = Job(tmp_path / "disturbed", steps=60)
    for step, loses_first in ((20, False), (40, True)):
        job.until_saved(step, TIMEOUT)
        first = json.loads((job.run / "run.lock").read_text())["host"]
        lost = first
        if not loses_first:
            nodes = call(f"squeue --noheader --jobs={job.number} --format=%N").strip()
            names = call(f"scontrol show hostnames {nodes}").split()
            names.remove(first)
            lost = names[0]
        call(f"{SCRIPT} power-off {lost}")
        job.start_again()  # on the two that are left
        job.until("RUNNING", 60)
        call(f"{SCRIPT} boot {lost}")
        wait_for(" 1 ", IDLE_NODES, 60)
    undisturbed = Job(tmp_path / "undisturbed", steps=60)
    job.until("COMPLETED")
    undisturbed.until("COMPLETED")
    assert compare_runs.main([str(job.run), str(undisturbed.run)]) == 0


def test_a_time_limit_puts_the_run_back_in_the_queue(tmp_path):
    """The time limit is three minutes, of which the last is for saving. Then the user cancels the run: it saves again."""
    job = Job(tmp_path / "limited", steps=5000, minutes=3)
    first = job.until_logged(r"leaving after step (\d+) \(SIGUSR1.*\): saved", 400)
    job.until_saved(first, 1)
    job.start_again()
    job.until_logged(rf"Training starts at step ({first + 1})\b", 150)
    job.until_saved(first // 10 * 10 + 10, 60)
    call(f"scancel {job.number}")
    job.until("CANCELLED", 60)
    last = job.until_logged(r"leaving after step (\d+) ", 1)
    assert last > first
    job.until_saved(last, 1)
