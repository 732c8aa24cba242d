"""A study, killed: real processes, a real signal. Its record equals that of one that nobody disturbed."""

import json
import os
import re
import time

import pytest

from interdomain.tools import study
from interdomain.tools._study import definition

from ..ranks import environment, forks, launch
from .runs import TINY

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


def test_a_study_goes_on_after_any_kill(corpus, tmp_path, monkeypatch, capsys):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    for name in ("calm", "disturbed"):
        study_file = STUDY.format(tiny=TINY, folder=tmp_path / name, corpus=corpus)
        (tmp_path / f"{name}.toml").write_text(study_file)
    (calm,) = definition.read_study(tmp_path / "calm.toml").runs
    (disturbed,) = definition.read_study(tmp_path / "disturbed.toml").runs
    file = str(tmp_path / "disturbed.toml")
    command = ["run", file]

    # The killed study leaves a run behind, which saves and leaves.
    killed = forks().Process(target=study.main, args=(command,))
    killed.start()
    while disturbed.step < 3:
        assert killed.is_alive()
        time.sleep(0.05)
    killed.kill()
    killed.join()
    assert study.main(["plan", file]) == 0
    assert re.search(r"\| at step \d+ of 12 \|", capsys.readouterr().out)
    assert study.main(command) == 0

    # After a power cut the end of the curves is missing: the last step is validated again.
    disturbed.record.unlink()
    events = max((disturbed.folder / "curves").iterdir())
    while "12" in definition.record_of(disturbed.folder)["curves"]["validation_metrics/loss"]:
        os.truncate(events, events.stat().st_size - 200)
    assert study.main(command) == 0

    # The run that nobody disturbed writes its record once it is finished.
    (tmp_path / "entry.py").write_text("from interdomain.titan.entry import main\nmain()\n")
    launch(tmp_path / "log.txt", 1, tmp_path / "entry.py", calm.write_config())
    assert calm.is_finished
    expected = json.loads(calm.record.read_text())["curves"]
    record = json.loads(disturbed.record.read_text())
    assert record["curves"] == expected
    assert list(expected["validation_metrics/loss"]) == ["1", "4", "8", "12"]
    assert record["environment"]["commit"]
