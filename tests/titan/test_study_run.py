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
    files = {name: tmp_path / f"{name}.toml" for name in ("calm", "disturbed")}
    for name, file in files.items():
        file.write_text(STUDY.format(tiny=TINY, folder=tmp_path / name, corpus=corpus))
    (calm,), (ours,) = (definition.read_study(file).runs for file in files.values())
    run = ["run", str(files["disturbed"])]
    killed = forks().Process(target=study.main, args=(run,))
    killed.start()
    while ours.step < 3:
        assert killed.is_alive()
        time.sleep(0.05)
    killed.kill()  # it leaves a run behind, which saves and leaves
    killed.join()
    assert study.main(["plan", str(files["disturbed"])]) == 0
    assert re.search(r"\| at step \d+ of 12 \|", capsys.readouterr().out)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    assert study.main(run) == 0
    ours.record.unlink()
    events = max((ours.folder / "curves").iterdir())
    while (
        "12" in definition.record_of(ours.folder)["curves"]["validation_metrics/loss"]
    ):  # as after a power cut
        os.truncate(events, events.stat().st_size - 200)
    assert study.main(run) == 0  # validates again
    (tmp_path / "entry.py").write_text("from interdomain.titan.entry import main\nmain()\n")
    launch(tmp_path / "log.txt", 1, tmp_path / "entry.py", calm.write_config())
    assert calm.is_finished  # which writes its record
    ours, calm = (json.loads(run.record.read_text()) for run in (ours, calm))
    assert ours["curves"] == calm["curves"]
    assert [*ours["curves"]["validation_metrics/loss"]] == ["1", "4", "8", "12"]
    assert ours["environment"]["commit"]
    files["calm"].write_text(files["calm"].read_text().replace("steps = 12", "steps = 13"))
    assert study.main(["show", str(files["calm"])]) == 2
    assert (
        "was made with other settings: training.steps 12 there, 13 here" in capsys.readouterr().err
    )
