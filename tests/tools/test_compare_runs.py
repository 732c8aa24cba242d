"""Two runs against each other: the first step that differs, restarts, and what is refused."""

import json
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
    """write(name, first, losses, ...): a run's folder with one start, in the tags and the layout of a real one."""

    def write(name, first, losses, norm=1.0, validation=(), **settings):
        writer = SummaryWriter(tmp_path / name / "tb", purge_step=first)
        for step, loss in enumerate(losses, first):
            writer.add_scalar(TAGS["loss"], loss, step)
            writer.add_scalar(TAGS["grad_norm"], norm, step)
        for step in validation:
            writer.add_scalar(TAGS["validation_loss"], 5.0, step)
        configuration = {"job": {"dump_folder": name}, "optimizer": {"lr": 1e-3, **settings}}
        writer.add_text(
            "run/configuration", f"```\n{json.dumps(configuration, indent=2)}\n```", first
        )
        writer.close()
        return str(tmp_path / name)

    return write


@pytest.fixture
def compare(capsys):
    """compare(*argv) -> (exit status, lines printed)."""

    def compare(*argv):
        status = compare_runs.main(list(map(str, argv)))
        return status, capsys.readouterr().out.splitlines()

    return compare


def test_the_same_run_twice(write, compare):
    a, b = (write(name, 1, [3.0, 2.5, 2.25], validation=[3]) for name in "ab")
    (Path(a) / "tb").rename(Path(a) / "curves")
    note_folders(Path(a), "checkpoint", "curves")
    for below in (
        "tokens",
        "earlier-20260101-000000",
    ):  # a run's curves by tokens, and those of an earlier run
        with SummaryWriter(Path(b) / "tb" / below) as writer:
            writer.add_scalar(TAGS["loss"], 1.0, 512)
    status, out = compare(a, b)
    assert (status, out[-2]) == (0, "configuration: the same")
    assert out[-1] == "the same to the bit at 3 step(s), 1 to 3 (loss, grad_norm, validation_loss)"


def test_the_first_step_that_differs_is_named(write, compare):
    a = write("a", 1, [4.0] * 20)
    b = write("b", 1, [4.0] * 11 + [4.001] * 9, lr=2e-3)
    status, out = compare(a, b)
    assert out[2:4] == ["configuration:", "  optimizer.lr  0.001  0.002"]
    assert out[-2:] == [
        "loss 4 and 4.001, relative 2.5e-04",
        "the first step that differs is 12 (loss); the same to the bit at the 11 before it",
    ]
    assert (status, compare(a, b, "--tolerance", "1e-3")[0]) == (1, 0)
    status, out = compare(a, write("c", 1, [4.0] * 20, norm=1.5))
    assert out[-2] == "grad_norm 1 and 1.5, relative 3.3e-01"


def test_a_run_that_stopped_early_is_not_the_same(write, compare):
    longer = write("longer", 1, [5.0, 4.0, 3.0, 2.0], validation=[1, 4])
    other = write("early", 1, [5.0])
    for pair in ([longer, other], [other, longer]):
        status, out = compare(*pair)
        assert status == 1
        assert f"loss at 3 step(s) from 2 is logged in {longer} only" in out
        assert f"validation_loss at 2 step(s) from 1 is logged in {longer} only" in out
        assert compare(*pair, "--common")[0] == 0


def test_restarts_are_one_curve(write, compare):
    a = write("a", 1, [5.0, 4.0, 3.0, 2.0])
    write(
        "restarted", 1, [5.0, 4.0, 9.0]
    )  # step 3 went wrong, and was run again from the checkpoint of step 2
    time.sleep(1)  # TensorBoard names a start's file by the second
    status, out = compare(a, write("restarted", 3, [3.0, 2.0]))
    assert status == 0
    assert "at 4 step(s), 1 to 4" in out[-1]


def test_values_that_are_no_numbers(write, compare):
    """The same ones are equal; a number is infinitely far from them."""
    a = write("a", 1, [1.0, math.nan, math.nan])
    assert compare(a, write("same", 1, [1.0, math.nan, math.nan]))[0] == 0
    status, out = compare(a, write("other", 1, [1.0, math.nan, 1.0]))
    assert status == 1
    assert "that differs is 3 (loss)" in out[-1]


def test_what_is_refused(write, refused, tmp_path):
    a, far = write("a", 1, [1.0]), write("b", 100, [1.0])
    (tmp_path / "empty").mkdir()
    for argv, words in (
        ([a, far], "no logged step in common"),
        ([a, tmp_path / "empty"], "no TensorBoard events"),
        ([a, a, "--save-curve", tmp_path / "curve.json"], "was removed"),
        ([a, a, "--tolerance", "nan"], "--tolerance"),
    ):
        refused(compare_runs.main, argv, words)
