"""A study, disturbed twice: real processes, real signals. Its record equals that of one that nobody disturbed."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from interdomain.model.distributed_checkpoint import finished_steps
from interdomain.tools import _study, study
from interdomain.tools._torchrun import CONTINUE

from ..common import REPOSITORY, TIMEOUT
from .conftest import TINY, environment

pytestmark = pytest.mark.e2e
STUDY = """
config = "{tiny}"
output = "{folder}"
ranks = 1
[all]
data.corpus = "{corpus}"
training.steps = 20
validation.enable = true
validation.freq = 5
validation.tokens = 64
checkpoint.enable = true
checkpoint.interval = 1
metrics.enable_tensorboard = true
[sizes.tiny]
[conditions.interdomain]
[[runs]]
seeds = [7]
"""


def start(file):
    command = [sys.executable, "-m", "interdomain.tools.study", "run", str(file)]
    return subprocess.Popen(command, env=environment(), cwd=REPOSITORY)


def stop(process, number, checkpoints, steps):
    """Send a signal once there are so many steps more than before."""
    before = max(finished_steps(checkpoints), default=0)
    while max(finished_steps(checkpoints), default=0) < before + steps:
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, number)
    return process.wait(TIMEOUT)


def test_a_study_goes_on_after_any_kill(corpus, launch, tmp_path, capsys):
    files = {name: tmp_path / f"{name}.toml" for name in ("calm", "disturbed")}
    for name, file in files.items():
        file.write_text(STUDY.format(tiny=TINY, folder=tmp_path / name, corpus=corpus))
    (calm,), (ours,) = (_study.read_study(file).runs for file in files.values())
    # Killed, it leaves a run behind, which saves and leaves.
    assert stop(start(files["disturbed"]), signal.SIGKILL, ours.folder / "checkpoint", 2) == -signal.SIGKILL
    assert stop(start(files["disturbed"]), signal.SIGTERM, ours.folder / "checkpoint", 3) == CONTINUE
    assert study.main(["plan", str(files["disturbed"])]) == 0
    assert f"at step {ours.step} of 20 |" in capsys.readouterr().out
    assert start(files["disturbed"]).wait(TIMEOUT) == 0
    (tmp_path / "entry.py").write_text("from interdomain.titan.entry import main\nmain()\n")
    launch(1, tmp_path / "entry.py", calm.write_config())
    assert calm.is_finished  # which writes its record
    ours, calm = (json.loads(run.record.read_text()) for run in (ours, calm))
    assert ours["curves"] == calm["curves"]
    assert [*ours["curves"]["validation_metrics/loss"]] == ["1", "5", "10", "15", "20"]
    assert ours["environment"]["commit"]
    files["calm"].write_text(files["calm"].read_text().replace("steps = 20", "steps = 21"))
    assert study.main(["show", str(files["calm"])]) == 2
    assert "is of other settings than the study's now: training.steps 20 there, 21 here" in capsys.readouterr().err
