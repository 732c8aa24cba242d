"""Two runs against each other: the first step that differs, restarts, and what is refused."""

import math
import time
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from interdomain.checkpoint.run_folder import note_folders
from interdomain.tools import compare_runs

TAGS = compare_runs.COLUMNS


@pytest.fixture
def write(tmp_path):
    """write(name, losses, first, ...): a run's folder with one start, in the tags and the layout of a real one."""

    def write(name, losses, first=1, norm=1.0, validation=(), lr=1e-3):
        configuration = f'{{"job": {{"dump_folder": "{name}"}}, "optimizer": {{"lr": {lr}}}}}'
        with SummaryWriter(tmp_path / name / "tb", purge_step=first) as writer:
            for step, loss in enumerate(losses, first):
                writer.add_scalar(TAGS["loss"], loss, step)
                writer.add_scalar(TAGS["grad_norm"], norm, step)
            for step in validation:
                writer.add_scalar(TAGS["validation_loss"], 5.0, step)
            writer.add_text("run/configuration", f"```\n{configuration}\n```", first)
        return str(tmp_path / name)

    return write


@pytest.fixture
def compare(capsys):
    """compare(*argv): the exit status, and the lines printed."""

    def compare(*argv):
        status = compare_runs.main(list(argv))
        return status, capsys.readouterr().out.splitlines()

    return compare


def test_the_same_run_twice(write, compare, tmp_path):
    """One run has its curves in another folder. The other also has curves by tokens, and those of an earlier run."""
    a = write("a", [3.0, math.nan, 2.25], validation=[3])
    b = write("b", [3.0, math.nan, 2.25], validation=[3])
    (tmp_path / "a/tb").rename(tmp_path / "a/curves")
    note_folders(Path(a), "checkpoint", "curves")
    for name in ("tokens", "earlier-20260101-000000"):
        with SummaryWriter(tmp_path / "b/tb" / name) as writer:
            writer.add_scalar(TAGS["loss"], 1.0, 512)
    assert compare(a, b) == (0, ["the same to the bit in what both logged, step 1 to 3"])


def test_the_first_step_that_differs_is_named(write, compare):
    a = write("a", [4.0] * 20)
    b = write("b", [4.0] * 11 + [4.001] * 9, lr=2e-3)
    status, out = compare(a, b)
    assert status == 1
    assert out == [
        "optimizer.lr  0.001  0.002",
        "the first step that differs is 12: loss 4 and 4.001",
    ]
    assert compare(a, b, "--tolerance", "1e-3")[0] == 0
    _, out = compare(a, write("c", [4.0] * 20, norm=math.nan))
    assert out[-1] == "the first step that differs is 1: grad_norm 1 and nan"


def test_a_run_that_stopped_early_is_not_the_same(write, compare):
    longer = write("longer", [5.0, 4.0, 3.0, 2.0], validation=[1, 4])
    early = write("early", [5.0])
    expected = [f"only {longer} has 8 value(s), from validation_loss at step 1"]
    for pair in ([longer, early], [early, longer]):
        status, out = compare(*pair)
        assert (status, out[:1]) == (1, expected)
        assert compare(*pair, "--common")[0] == 0


def test_restarts_are_one_curve(write, compare):
    """Step 3 went wrong, and was run again from the checkpoint of step 2."""
    a = write("a", [5.0, 4.0, 3.0, 2.0])
    write("restarted", [5.0, 4.0, 9.0])
    time.sleep(1)  # TensorBoard names a start's file by the second
    _, out = compare(a, write("restarted", [3.0, 2.0], first=3))
    assert out == ["the same to the bit in what both logged, step 1 to 4"]


def test_bad_requests(write, refused, tmp_path):
    a = write("a", [1.0])
    later = write("later", [1.0], first=100)
    refused(compare_runs.main, [a, later], "no logged step in common")
    refused(compare_runs.main, [a, tmp_path], "no TensorBoard events")
