"""Two runs against each other: the first step that differs, restarts, stored curves, and what is refused."""

import json
import math
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from interdomain.tools import compare_runs

TAGS = compare_runs.COLUMNS


@pytest.fixture
def write(tmp_path):
    """write(name, first, losses, ...): a run's folder with one start, in the tags and the layout of a real one."""

    def write(name, first, losses, norm=1.0, validation=(), uid=0, **settings):
        folder = tmp_path / name / "tb"
        writer = SummaryWriter(folder, purge_step=first, filename_suffix=f".{uid}")
        for step, loss in enumerate(losses, first):
            writer.add_scalar(TAGS["loss"], loss, step)
            writer.add_scalar(TAGS["grad_norm"], norm, step)
        for step in validation:
            writer.add_scalar(TAGS["validation_loss"], 5.0, step)
        configuration = {"job": {"dump_folder": name}, "optimizer": {"lr": 1e-3, **settings}}
        writer.add_text("run/configuration", f"```\n{json.dumps(configuration, indent=2)}\n```", first)
        writer.close()
        if uid:  # TensorBoard reads in the order of the names, which are by the second
            (written,) = folder.glob(f"*.{uid}")
            written.rename(folder / f"events.out.tfevents.9{uid:09d}.host")
        return str(tmp_path / name)

    return write


def lines(capsys):
    return capsys.readouterr().out.splitlines()


def test_a_folder_above_one_run_is_that_run(write, tmp_path, capsys):
    """Its curves by tokens, and those of an earlier run in its folder, are no runs beside it."""
    run = Path(write("outputs/run", 1, [3.0, 2.5]))
    for below in ("tokens", "earlier-20260101-000000", "earlier-20260101-000000/tokens"):
        with SummaryWriter(run / "tb" / below) as writer:
            writer.add_scalar("by_tokens/loss", 1.0, 512)
    assert compare_runs.main([str(tmp_path / "outputs"), str(run)]) == 0
    assert lines(capsys)[-1].startswith("the same to the bit at 2 step(s)")


def test_the_same_run_twice(write, capsys):
    a, b = (write(name, 1, [3.0, 2.5, 2.25], validation=[3]) for name in "ab")
    assert compare_runs.main([a, b]) == 0
    *_, settings, last = lines(capsys)
    assert settings == "configuration: the same"
    assert last == "the same to the bit at 3 step(s), 1 to 3 (loss, grad_norm, validation_loss)"


def test_the_first_step_that_differs_is_named_with_its_surroundings(write, capsys):
    a = write("a", 1, [4.0] * 20)
    b = write("b", 1, [4.0] * 11 + [4.001] * 9, lr=2e-3)
    assert compare_runs.main([a, b]) == 1
    out = lines(capsys)
    assert out[2:4] == ["configuration: 1 setting(s) differ", "  optimizer.lr  0.001  0.002"]
    assert out[-1] == "the first step that differs is 12: loss by 2.5e-04; the same to the bit at the 11 before it"
    table = [line.split() for line in out if line.strip()[:1].isdigit() or ">" in line]
    assert [row[:3] for row in table if ">" in row] == [[">", "12", "4"]]
    assert [row[0] for row in table if ">" not in row] == ["9", "10", "11", "13", "14", "15"]
    assert compare_runs.main([a, b, "--tolerance", "1e-3"]) == 0


def test_a_difference_in_the_gradient_norm_alone(write, capsys):
    a, b = write("a", 1, [4.0, 3.0]), write("b", 1, [4.0, 3.0], norm=1.5)
    assert compare_runs.main([a, b]) == 1
    assert "first step that differs is 1: grad_norm by 3.3e-01" in lines(capsys)[-1]


def test_a_run_that_stopped_early_is_not_the_same(write, capsys):
    whole = write("whole", 1, [5.0, 4.0, 3.0, 2.0], validation=[1, 4])
    for name, losses, validation, lacks in (
        ("early", [5.0], [1], "3 step(s) from 2 to 4 are logged in {} only"),
        ("never validated", [5.0, 4.0, 3.0, 2.0], [], "validation_loss is logged in {} only"),
        ("validated once", [5.0, 4.0, 3.0, 2.0], [1], "validation_loss at 1 step(s) from 4 to 4 is logged in {} only"),
    ):
        other = write(name, 1, losses, validation=validation)
        for pair in ([whole, other], [other, whole]):
            assert compare_runs.main(pair) == 1
            out = lines(capsys)
            assert lacks.format(whole) in out
            assert out[-1].startswith("not the same: one run lacks what the other has")
            assert compare_runs.main([*pair, "--common"]) == 0
            out = lines(capsys)
            assert lacks.format(whole) in out
            assert out[-1].startswith(f"the same to the bit at {len(losses)} step(s), 1 to")


def test_restarts_are_one_curve(write, capsys):
    whole = write("whole", 1, [5.0, 4.0, 3.0, 2.0])
    write("restarted", 1, [5.0, 4.0, 9.0], uid=1)  # step 3 went wrong, and was run again from the checkpoint of step 2
    restarted = write("restarted", 3, [3.0, 2.0], uid=2)
    assert compare_runs.main([whole, restarted]) == 0
    assert "at 4 step(s), 1 to 4" in lines(capsys)[-1]


@pytest.mark.parametrize("ending", ["json", "csv"])
def test_a_stored_curve_stands_for_the_run(write, capsys, tmp_path, ending):
    a = write("a", 1, [1 / 3, math.pi, math.nan], validation=[1, 3])
    curve = tmp_path / "curves" / f"curve.{ending}"
    assert compare_runs.main([a, "--save-curve", str(curve)]) == 0
    assert lines(capsys)[-1] == f"wrote {curve} (3 steps: loss, grad_norm, validation_loss)"
    assert compare_runs.main([str(curve), a]) == 0
    out = lines(capsys)
    assert out[2] == ("configuration: the same" if ending == "json" else f"configuration: not stored with {curve}")
    shorter = write("b", 2, [math.pi, 1.0])
    assert compare_runs.main([shorter, str(curve)]) == 1
    out = lines(capsys)
    assert f"1 step(s) from 1 to 1 are logged in {curve} only" in out
    assert "first step that differs is 3: loss by inf" in out[-1]


def test_what_is_refused(write, capsys, tmp_path):
    a = write("a", 1, [1.0])
    far = write("b", 100, [1.0])
    (tmp_path / "empty").mkdir()
    for start in ("x", "y"):
        write(f"several/{start}", 1, [1.0])
    (tmp_path / "bad.json").write_text("[]")
    (tmp_path / "bad.csv").write_text("loss\n1.0\n")
    (tmp_path / "long.csv").write_text("step,loss\n1," + "9" * 200_000 + "\n")
    (tmp_path / "list.json").write_text('{"curves": {"loss": {"1": 2.0}}, "configuration": [1]}')
    (tmp_path / "none.csv").write_text("step,grad_norm\n1,2.0\n")
    cases = {
        (a,): "one run only",
        (a, far): "no step is logged in both",
        (a, str(tmp_path / "empty")): "holds no TensorBoard events",
        (a, str(tmp_path / "missing")): "is no folder",
        (a, str(tmp_path / "several")): "holds several runs: name one of",
        (a, str(tmp_path / "bad.json")): "is no stored curve",
        (a, str(tmp_path / "bad.csv")): "its columns must be step, loss",
        (a, str(tmp_path / "none.csv")): "holds no loss",
        (a, str(tmp_path / "long.csv")): "field larger than field limit",
        (a, str(tmp_path / "list.json")): "is no stored curve",
        (a, str(tmp_path / "missing.json")): "No such file",
        (a, a, "--tolerance", "nan"): "--tolerance must be at least 0",
        (a, "--save-curve", str(tmp_path / "curve.txt")): "must end in .json or .csv",
    }
    for argv, said in cases.items():
        assert compare_runs.main(list(argv)) == 2, argv
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert said in error, (said, error)
