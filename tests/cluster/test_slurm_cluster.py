"""The batch script of tools/sites under real SLURM: time limits, lost nodes and cut-off ones. Minutes each, and asked for:

INTERDOMAIN_CLUSTER=1 ./launch.sh test tests/cluster -n 0
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from interdomain.tools import _slurm, compare_runs

from ..common import TIMEOUT
from .nodes import Cluster, missing

ROOT = Path(__file__).parents[2]
ASKED = os.environ.get("INTERDOMAIN_CLUSTER") == "1"
pytestmark = [
    pytest.mark.skipif(not ASKED, reason="starts a SLURM cluster: minutes, as root, with INTERDOMAIN_CLUSTER=1"),
    pytest.mark.skipif(ASKED and missing() is not None, reason=str(missing())),
]
FLAGS = (
    "--ranks 1 --training.tokens 0 --training.local_batch_size 1 --training.global_batch_size 2 --checkpoint.interval 10 "
    "--lr_scheduler.warmup_tokens 4096 --validation.freq 1000 --validation.tokens 4096"
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


class Job:
    """A run of two nodes in the queue, by the script that users copy."""

    def __init__(self, cluster: Cluster, folder: Path, steps: int, minutes: int = 30, nodes: str | None = None) -> None:
        self.cluster, self.run, self.log = cluster, folder / "run", folder / "log.txt"
        script = (_slurm.SITES / "requeue.sbatch").read_text()
        flags = f"{FLAGS} --training.steps {steps} --job.dump_folder {self.run}"
        for pattern, replacement in (
            (r"#SBATCH --gpus-per-node=.*\n", f"#SBATCH --nodelist={nodes}\n" if nodes else ""),
            (r"(#SBATCH --nodes)=.*", r"\1=2"),
            (r"(#SBATCH --time)=.*", rf"\1={minutes}"),
            (r"(#SBATCH --signal=USR1)@.*", r"\1@60"),
            (r"(#SBATCH --output)=.*", rf"\1={self.log}"),
            (r"train_configs/1.3B.toml (.*)", rf"train_configs/debug.toml \1 {flags}"),
        ):
            script, found = re.subn(pattern, replacement, script)
            assert found == 1, pattern
        (folder / "job.sbatch").write_text(script)
        cluster.environment["INTERDOMAIN_PYTHON"] = sys.executable
        self.number = cluster.call("sbatch", "--parsable", f"--chdir={ROOT}", folder / "job.sbatch").strip()

    def said(self, pattern: str) -> list[str]:
        return re.findall(pattern, self.log.read_text()) if self.log.is_file() else []

    def until_saved(self, step: int) -> None:
        done = self.run / f"checkpoint/step-{step}/.metadata"
        self.cluster.wait(done.is_file, TIMEOUT, f"{done}; see {self.log}")

    def until(self, state: str, seconds: int = 300) -> None:
        self.cluster.wait(
            lambda: self.cluster.job(self.number).get("JobState") == state, seconds, f"{state}; see {self.log}"
        )

    def first_node(self) -> str:
        return json.loads((self.run / "run.lock").read_text())["host"]


@pytest.fixture
def submit(cluster, tmp_path):
    jobs = []

    def submit(name: str, **settings) -> Job:
        (tmp_path / name).mkdir()
        jobs.append(Job(cluster, tmp_path / name, **settings))
        return jobs[-1]

    yield submit
    for job in jobs:
        if cluster.job(job.number).get("JobState") not in ("COMPLETED", "CANCELLED", "FAILED"):
            cluster.call("scancel", "--full", job.number)
    shutil.rmtree(tmp_path, ignore_errors=True)


def test_lost_and_cut_off_nodes_change_no_bit(cluster, submit):
    """One run loses its second node, then its first, then has its first cut off while its processes live on."""
    job = submit("disturbed", steps=80)
    job.until_saved(20)
    (second,) = {"node1", "node2"} - {job.first_node()}
    for step, disturb, node in (
        (20, cluster.power_off, lambda: second),
        (40, cluster.power_off, job.first_node),
        (60, cluster.unplug, job.first_node),
    ):
        job.until_saved(step)
        disturb(lost := node())
        cluster.start_now(job.number)  # on the two that are left
        cluster.wait(lambda: cluster.job(job.number).get("JobState") == "RUNNING", 60, "the next start")
        if lost in cluster.nodes:  # it stays cut off, to the end of the run
            continue
        cluster.boot(lost)
        cluster.wait(lambda: cluster.states().count("down*") == 0, 60, f"{lost} to come back")
    job.until("COMPLETED", 400)
    cluster.plug_in(lost)
    assert not job.said("is held by")  # an earlier start of this job is not waited for
    assert not (job.run / "run.lock").exists()
    cluster.wait(lambda: cluster.states().count("idle") == 3, 120, "all nodes to be idle")
    undisturbed = submit("undisturbed", steps=80)
    undisturbed.until("COMPLETED", 400)
    assert compare_runs.main([str(job.run), str(undisturbed.run)]) == 0


def test_a_time_limit_puts_the_run_back_in_the_queue(cluster, submit):
    """Of three minutes, of which the last is for saving; then the user cancels it, and it saves once more."""
    job = submit("limited", steps=5000, minutes=3)
    left = r"leaving after step (\d+) \(SIGUSR1\): saved"
    cluster.wait(lambda: job.said(left), 400, f"the signal; see {job.log}")
    (first,) = [int(step) for step in job.said(left)]
    assert (job.run / f"checkpoint/step-{first}/.metadata").is_file()
    cluster.start_now(job.number)
    cluster.wait(lambda: job.said(rf"Training starts at step {first + 1}\b"), 150, f"the second start; see {job.log}")
    cluster.call("scancel", job.number)
    cluster.wait(lambda: not (job.run / "run.lock").exists(), 60, "the run to end")
    last = int(job.said(r"leaving after step (\d+) ")[-1])
    assert last > first
    assert (job.run / f"checkpoint/step-{last}/.metadata").is_file()


def test_a_node_whose_torchrun_is_killed_is_left_to_the_queue(cluster, submit):
    """The other node is given three minutes; then the job, which had saved something new, is requeued."""
    job = submit("killed", steps=60)
    job.until_saved(20)
    (second,) = {"node1", "node2"} - {job.first_node()}
    assert cluster.kill(second, "torch.distributed.run")
    cluster.start_now(job.number)
    job.until("COMPLETED", 600)
    assert job.said(r"the run failed \(exit status \d+\) after it had saved step \d+: leaving with exit status 75")
    assert (job.run / "checkpoint/step-60/.metadata").is_file()
