"""A study, killed: a real signal to processes that are forks. Its record equals that of one that nobody disturbed."""

import json
import os
import re
import sys
import time
from types import SimpleNamespace
from unittest import mock

import pytest

from interdomain.tools import launch, study
from interdomain.tools._start import torchrun
from interdomain.tools._study import definition, run

from ..common import REPOSITORY
from ..ranks import forks
from ..ranks import launch as launch_ranks
from .runs import TINY, Forked

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
STUDY = """
config = "{tiny}"
output = "{folder}"
ranks = 1
[all]
data.corpus = "{corpus}"
training.steps = 12
validation.enable = true
validation.freq = 4
validation.tokens = 64
checkpoint.enable = true
checkpoint.interval = 1
checkpoint.folder = "ck"
metrics.enable_tensorboard = true
metrics.save_tb_folder = "curves"
[sizes.tiny]
[conditions.interdomain]
[[runs]]
seeds = [7]
"""


# A rank of a run; 0: no signal.
RANK = [str(REPOSITORY / "tests/docs/rank.py"), "0"]


class Torchrun(Forked):
    """subprocess.Popen of torchrun."""

    def __init__(self, command, env, preexec_fn):
        module = command.index("interdomain.titan.entry")
        command[module - 1 : module + 1] = ["--run-path", "--start-method=fork", *RANK]
        super().__init__(command[3:], env, preexec_fn)


class Launcher:
    """subprocess.Popen of the launcher."""

    def __init__(self, command, stdout, preexec_fn, **options):
        self.pid = os.fork()
        if not self.pid:
            preexec_fn()
            for stream in (1, 2):
                os.dup2(stdout.fileno(), stream)
            torchrun.subprocess = SimpleNamespace(Popen=Torchrun)
            os._exit(launch.main(command[3:]))

    def poll(self):
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None


def run_study(file):
    with mock.patch.object(run, "subprocess", SimpleNamespace(Popen=Launcher)):
        sys.exit(study.main(["run", file]))


def start(file):
    process = forks().Process(target=run_study, args=(file,))
    process.start()
    return process


def finish(file):
    process = start(file)
    process.join()
    assert process.exitcode == 0


def test_a_study_goes_on_after_any_kill(corpus, tmp_path, capsys):
    for name in ("calm", "disturbed"):
        study_file = STUDY.format(tiny=TINY, folder=tmp_path / name, corpus=corpus)
        (tmp_path / f"{name}.toml").write_text(study_file)
    (calm,) = definition.read_study(tmp_path / "calm.toml").runs
    (disturbed,) = definition.read_study(tmp_path / "disturbed.toml").runs
    file = str(tmp_path / "disturbed.toml")

    # The killed study leaves a run behind, which saves and leaves.
    killed = start(file)
    while disturbed.step < 3:
        assert killed.is_alive()
        time.sleep(0.05)
    killed.kill()
    killed.join()
    assert study.main(["plan", file]) == 0
    assert re.search(r"\| at step \d+ of 12 \|", capsys.readouterr().out)
    finish(file)

    # After a power cut the end of the curves is missing: the last step is validated again.
    disturbed.record.unlink()
    events = max((disturbed.folder / "curves").iterdir())
    while "12" in definition.record_of(disturbed.folder)["curves"]["validation_metrics/loss"]:
        os.truncate(events, events.stat().st_size - 200)
    finish(file)

    # The run that nobody disturbed writes its record once it is finished.
    launch_ranks(tmp_path / "log.txt", 1, *RANK, calm.write_config())
    assert calm.is_finished
    expected = json.loads(calm.record.read_text())["curves"]
    record = json.loads(disturbed.record.read_text())
    assert record["curves"] == expected
    assert list(expected["validation_metrics/loss"]) == ["1", "4", "8", "12"]
    assert record["environment"]["commit"]
