"""The launcher's line in a SLURM allocation of two nodes: real processes of this machine (slurm_stand_in.py)."""

import re
import signal
import subprocess
import sys

import pytest

from interdomain.tools import compare_runs, launch

from .. import slurm_stand_in
from .conftest import TINY, environment, flags

pytestmark = pytest.mark.e2e


def test_two_nodes_train_as_one_machine_and_leave_on_the_signal(tmp_path, monkeypatch, corpus, two, capsys):
    """Two torchrun agents of one rank each, against two ranks; and the time limit's SIGUSR1 on its way to the ranks."""
    slurm_stand_in.allocations(tmp_path, monkeypatch)("localhost", "localhost")
    nodes, said = tmp_path / "nodes", ""
    settings = {"training__local_batch_size": 4, "training__steps": 200}
    settings |= {"checkpoint__enable": True, "checkpoint__interval": 200, "metrics__enable_tensorboard": True}
    _, _, *ours = flags(corpus, nodes, **settings)  # the launcher says itself which file
    command = [sys.executable, "-m", "interdomain.tools.launch", TINY, *ours, "--ranks", "1", "--max-restarts", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([str(part) for part in command], env=environment(), **pipes) as running:
        for line in running.stdout:
            said += line
            if re.search(r"step: +4 ", line):
                running.send_signal(signal.SIGUSR1)
    assert running.returncode == launch.CONTINUE, said[-5000:]
    left = int(re.search(r"leaving after step (\d+) \(SIG", said)[1])
    assert (nodes / "checkpoint" / f"step-{left}" / ".metadata").is_file()
    assert said.count("step:  1 ") == 1  # one node speaks for all
    assert compare_runs.main(["--common", str(nodes), str(two.folder / "interdomain")]) == 0, capsys.readouterr().out
    assert "the same to the bit at" in capsys.readouterr().out
