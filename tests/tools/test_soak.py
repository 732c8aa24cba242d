"""The soak's reading of a run: its log while it is written, its losses as often as they were computed, its verdict."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from interdomain.model.distributed_checkpoint import write_tensors
from interdomain.tools import soak

LOG = """\
[titan] root - INFO - Training starts at step 1
[titan] root - INFO - step:  1  loss:  7.6
[titan] root - INFO - step: 12  loss:  7.1
[titan] root - WARNING - SKIPPED: run/checkpoint/step-20 has no .metadata: the save of it was cut short.
[titan] root - INFO - Training starts at step 11
[titan] root - INFO - step: 13  loss:  7.0
[titan] root - INFO - leaving after step 13 (SIGTERM): saved. The same command continues from there.
"""


def test_the_log_is_read_as_it_grows(tmp_path):
    seen = soak.Seen(tmp_path / "log.txt")
    assert seen.update().step == 0  # nothing is there yet
    half = LOG.index("step: 12") + 6  # in the middle of a number
    for text, step in ((LOG[:half], 1), (LOG, 13)):
        seen.path.write_text(text)
        assert seen.update().step == step
    assert seen.loads == [(0, 0), (12, 10)]
    assert (seen.starts, seen.cut_short, seen.left) == (2, 1, 1)


def a_run(folder, starts):
    """A run's folder: losses by start, {step: loss}, and a last checkpoint."""
    folder.mkdir()
    for i, losses in enumerate(starts):
        writer = SummaryWriter(folder / "tb" / str(i))
        for step, loss in losses.items():
            writer.add_scalar(soak.LOSS, loss, step)
        writer.close()
    seen = soak.Seen(folder / "log.txt")
    seen.path.write_text(LOG)
    return SimpleNamespace(seen=seen, commands=2)


HITS = Counter({"SIGKILL rank": 1})
WHOLE = {1: 3.0, 2: 2.5, 3: 2.25}


@pytest.mark.parametrize(
    ("starts", "differing", "equal"),
    [
        ([{1: 3.0, 2: 2.5}, {2: 2.5, 3: 2.25}], [], True),
        ([{1: 3.0, 2: 2.5}, {2: 2.5000002, 3: 2.25}], [], False),  # computed again, to another value
        ([{1: 3.0}, {3: 2.25}], [], False),  # a step is missing
        ([WHOLE], ["output.weight"], False),
    ],
)
def test_the_verdict(tmp_path, monkeypatch, starts, differing, equal):
    monkeypatch.setattr(soak, "differing_tensors", lambda *folders: (differing, 9))
    reference, ours = a_run(tmp_path / "a", [WHOLE]), a_run(tmp_path / "b", starts)
    rows, verdict = soak.compare(reference, ours, 3, HITS)
    assert verdict == equal
    assert dict(rows)["steps lost by one start"] == "2 at most, 2 in all, of 3"
    assert dict(rows)["kills"] == "1 (1 SIGKILL rank)"


def test_one_bit_of_the_optimizer_s_state_is_a_difference(tmp_path):
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 1.0 + 2**-23)):
        write_tensors(tmp_path / name, {"w": torch.ones(3), "optimizer.state.w.exp_avg": torch.tensor([0.0, value])})
    assert soak.differing_tensors(tmp_path / "a", tmp_path / "b") == ([], 2)
    assert soak.differing_tensors(tmp_path / "c", tmp_path / "b") == (["optimizer.state.w.exp_avg"], 2)


def test_nobody_is_there_to_be_killed(tmp_path):
    run = soak.Run.__new__(soak.Run)
    run.process = None
    assert not run.is_running()
    run.process = SimpleNamespace(pid=2**22 + 1, poll=lambda: None)  # above Linux's largest
    assert run.ranks() == []
    for kind in soak.KINDS:
        assert not run.disturb(kind, random.Random(0))


def test_what_cannot_be(tmp_path, capsys):
    assert soak.main(["--output", str(tmp_path)]) == 2
    assert "exists; choose a new folder" in capsys.readouterr().err
    assert soak.main(["--output", str(tmp_path / "new"), "--kills", "0"]) == 2
    capsys.readouterr()
    for flag, *value in (["--metrics.no-enable_tensorboard"], ["--checkpoint.no-enable"], ["--metrics.log_freq", "2"]):
        assert soak.main(["--output", str(tmp_path / "new"), flag, *value]) == 2
        assert f"{flag[2:].replace('no-', '')} = " in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
