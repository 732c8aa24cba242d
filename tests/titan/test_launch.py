"""The entry point as users start it: what it writes and says, and how it ends on a signal and on a full disk.

Two nodes of a SLURM allocation: real processes of this machine (slurm_stand_in.py), two torchrun agents of one rank each.
"""

import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from interdomain.tools import compare_runs, launch

from .. import slurm_stand_in
from ..common import REPOSITORY
from ..ranks import environment
from .runs import TINY, flags, run_disturbed

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# A run with everything on.
FLAGS = """
    --checkpoint.enable --validation.enable --metrics.enable_tensorboard
    --training.local_batch_size 4 --training.steps 200 --checkpoint.interval 200
    --metrics.no-disable_color_printing --ranks 1 --max-restarts 0
"""


def test_two_nodes_train_as_one_machine_and_leave_on_the_signal(corpus, runs, tmp_path, capsys):
    """The run gets the time limit's SIGUSR1 after step 6."""
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "interdomain.tools.launch", str(TINY), *FLAGS.split()]
    command += ["--job.dump_folder", str(folder), "--data.corpus", str(corpus)]
    said = ""
    with pytest.MonkeyPatch.context() as patch:
        end_time = str(int(time.time()) + 86400)
        slurm = slurm_stand_in.allocations(tmp_path, patch)
        slurm("localhost", "localhost", JOB_END_TIME=end_time)
        with subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as running:
            for line in running.stdout:
                said += line
                if re.search(r"step: +6 ", line):
                    running.send_signal(signal.SIGUSR1)
    assert running.returncode == launch.CONTINUE, said[-5000:]
    leaving = r"leaving after step (\d+) \(SIGUSR1, \d+ s before the job's time limit\)"
    left = int(re.search(leaving, said)[1])
    # It is said at once, and not only when a long step is over.
    at_once = said.index("SIGUSR1: leaving after the next step")
    assert at_once < said.index("leaving after step")
    assert (folder / "checkpoint" / f"step-{left}" / ".metadata").is_file()
    assert len(re.findall(r"(?<!validate )step:  1 ", said)) == 1  # one node speaks for all
    assert "Traceback" not in said
    compare_runs.main(["--common", str(folder), str(runs.at("2 text"))])
    assert "the same to the bit in what both logged" in capsys.readouterr().out


def test_a_full_disk_ends_the_run_and_leaves_the_checkpoint_before(corpus, runs, tmp_path):
    """A limit on the size of files stands for the disk: each rank's shard is larger, everything else is smaller.

    The run ends with one paragraph from rank 0, and the only traceback is torchrun's own.
    """
    before = tmp_path / "checkpoint" / "step-3"
    limit = 1_000_000
    shutil.copytree(runs.checkpoint("2 text", 3), before)
    assert min(path.stat().st_size for path in before.glob("*.distcp")) > limit
    plan = tmp_path / "plan.json"
    plan.write_text('{"starts": [null]}')  # a refusal is not tried again
    settings = {"training__local_batch_size": 4, "checkpoint__interval": 1}
    arguments = flags(corpus, tmp_path, checkpoint__enable=True, **settings)
    status, said = run_disturbed(plan, 1, *arguments, largest=limit)
    assert status == launch.torchrun.REFUSED
    assert "Training starts at step 4" in said
    assert said.count("\nerror: ") == 1
    ours = said.partition("ChildFailedError")[0]
    paragraph = ours.partition("\nerror: ")[2]
    for part in ("disk is full: saving", "step-4 failed (unexpected pos)", "checkpoint is step 3"):
        assert part in paragraph
    assert not re.search('^ *File ".*interdomain/titan', ours, re.MULTILINE)
    assert [path.name for path in (tmp_path / "checkpoint").glob("step-*")] == ["step-3"]
