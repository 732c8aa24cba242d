"""study: the table of a study's runs, from what the plugin writes into their TensorBoard folders."""

import json
import math
import statistics
import time
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="the extra `train` is not installed")

from torch.utils.tensorboard import SummaryWriter

from interdomain.titan.plan import make_plan
from interdomain.titan.run_log import RunLog
from interdomain.titan.settings import read_job_config
from interdomain.tools import study

from ..common import REPOSITORY

# By step, as runs validate: the last step, 4,769, is none at which anything else is logged. The lowest is not the last.
LOSSES = {
    "softmax": {1: 10.5, 2500: 3.0, 4769: 2.9},
    "interdomain": {1: 10.5, 2500: 2.75, 4769: 2.8},
    "s4d-rope": {1: 10.5, 2500: 2.5 + math.log(2), 4769: math.nan},
}


@pytest.fixture
def write(tmp_path):
    """write(name, condition, losses, *flags, size=, first=): a start of a run that logged these validation losses, and the
    number of tokens at step 1 and the multiples of 10, as the trainer does."""

    def write(name, condition, losses, *flags, size="125M", first=1):
        given = ["--job.config_file", str(REPOSITORY / f"train_configs/{size}.toml"), "--mixer.condition", condition]
        job = read_job_config([*given, "--data.corpus", "data/edu", *flags])
        plan = make_plan(job, 8)
        log = RunLog(tmp_path / name / "tb", plan, job, first)
        for step in sorted({first, *losses, *(step - step % 10 for step in losses if step > 10)}):
            if step == 1 or step % 10 == 0:
                log.log({"n_tokens_seen": plan.tokens_per_step * step}, step)
            if step in losses:
                log.log({"validation_metrics/loss": losses[step]}, step)
        log.close()
        return str(tmp_path / name)

    return write


def test_the_table_of_the_study(write, tmp_path, capsys):
    runs = [write(condition, condition, losses) for condition, losses in LOSSES.items()]
    runs.append(write("large", "interdomain", {1: 10.4, 300: 2.5}, size="350M"))
    runs.append(write("ablated", "interdomain", {1: 4.0}, "--mixer.c_form", "identity", "--mixer.n_basis", "32"))
    assert study.main(["show", *runs, "--output", str(tmp_path / "out")]) == 0
    rows = json.loads((tmp_path / "out" / "study.json").read_text())["rows"]
    assert [(row["size"], row["condition"]) for row in rows] == [
        *(("125M", condition) for condition in ("interdomain", "softmax", "s4d-rope")),
        ("125M", "interdomain, n_basis 32, c_form identity"),
        ("350M", "interdomain"),
    ]
    ours, softmax, other, ablated, large = rows
    assert ablated["paper: perplexity"] is None  # not the paper's cell
    assert (ours["best step"], ours["best loss"], softmax["best step"], softmax["vs softmax"]) == (2500, 2.75, 4769, 0)
    assert ours["vs softmax"] == pytest.approx(math.exp(2.75 - 2.9) - 1)
    # The paper's figures: 6ND at 125M is its scaling figure's, and vs Softmax its mechanism cube's.
    assert ours["6ND"] == pytest.approx(2.031e18, rel=1e-3)
    assert (ours["paper: perplexity"], round(100 * ours["paper: vs softmax"], 2)) == (16.48, -1.02)
    assert round(100 * other["paper: vs softmax"], 1) == 18.7  # it has 18.79, from losses with more digits
    assert other["perplexity"] == pytest.approx(2 * math.exp(2.5))  # what is not finite is no best
    assert large["vs softmax"] is None
    assert large["of planned"] < 0.05
    said, text = capsys.readouterr().out, (tmp_path / "out" / "study.md").read_text()
    assert said.startswith(text)
    assert "| 125M | interdomain | 0.003 | 42 | 135,416,208 | 2,500,329,472 | 100.0% |" in text
    assert "differs" not in text
    _, small, _ = study.panels([study.read_run(Path(run)) for run in runs])  # the last validation is in the plot
    assert small.curves[0].x == [step * 0.524288 for step in LOSSES["interdomain"]]
    assert "study.png" in {path.name for path in (tmp_path / "out").iterdir()} or "without a figure" in said


def test_an_extended_run_is_measured_by_its_last_plan(write):
    write("run", "interdomain", {1: 10.5, 4769: 2.8})
    time.sleep(1)  # TensorBoard names a start's file by the second
    run = write("run", "interdomain", {7154: 2.7}, "--training.tokens", "5_000_000_000", first=4770)
    assert study.read_run(Path(run)).row["of planned"] == pytest.approx(0.75, abs=1e-3)


def test_mean_and_deviation_over_runs_that_differ_in_the_seed_alone(write, capsys):
    losses = {"1": 2.0, "2": 2.1, "3": 2.3}
    runs = [write(f"s{seed}", "interdomain", {1: loss}, "--debug.seed", seed) for seed, loss in losses.items()]
    runs.append(write("fast", "interdomain", {1: 1.9}, "--debug.seed", "1", "--optimizer.lr", "6e-3"))
    assert study.main(["show", *runs]) == 0
    assert "| 125M | interdomain | 0.003 | 1, 2, 3 | 8.51 | 1.33 |" in capsys.readouterr().out
    (repeated,) = study.repetitions([study.read_run(Path(run)) for run in runs])
    perplexities = [math.exp(loss) for loss in losses.values()]
    assert repeated["mean perplexity"] == pytest.approx(statistics.mean(perplexities))
    assert repeated["deviation"] == pytest.approx(statistics.stdev(perplexities))


def test_runs_that_were_not_validated_on_the_same_text(write, capsys):
    whole = write("whole", "interdomain", LOSSES["interdomain"])
    assert study.main(["show", whole, write("other", "softmax", {1: 10.0}, "--validation.tokens", "4096")]) == 0
    assert "- 125M: validation.tokens differs (" in capsys.readouterr().out


def test_what_is_refused(write, tmp_path, capsys):
    with SummaryWriter(str(tmp_path / "other" / "tb")) as writer:
        writer.add_scalar("loss", 1.0, 1)
    for argv, words in (
        (["no such run", "--output", str(tmp_path)], "exists and is not empty"),
        ([str(tmp_path / "other")], "holds no run of this project's plugin"),
        ([str(tmp_path / "nowhere")], "nowhere holds no TensorBoard events. Give a run's folder"),
        ([write("never", "softmax", {1: math.nan})], "was never validated: train with validation.enable = true"),
    ):
        assert study.main(argv) == 2
        assert words in capsys.readouterr().err
