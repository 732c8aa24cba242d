"""study: the table of a study's runs, from what the plugin writes into their TensorBoard folders."""

import json
import math
import os
import statistics
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="the extra `train` is not installed")

from torch.utils.tensorboard import SummaryWriter

from interdomain.titan.plan.run_plan import make_plan
from interdomain.titan.settings.job_config import read_job_config
from interdomain.titan.watch.run_log import RunLog
from interdomain.tools import launch, prepare_data, study
from interdomain.tools._study import definition, tables
from interdomain.tools._study import run as _study_run
from interdomain.tools._study.tables import interval_of, perplexities

from ..common import REPOSITORY, write_program

# Validation losses by step. Nothing else is logged at the last step, 4,769. The lowest loss is not the last.
LOSSES = {
    "softmax": {1: 10.5, 2500: 3.0, 4769: 2.9},
    "interdomain": {1: 10.5, 2500: 2.75, 4769: 2.8},
    "s4d-rope": {1: 10.5, 2500: 2.5 + math.log(2), 4769: math.nan},
}
FINGERPRINTS = {"train": "b0", "validation": "b1"}


@pytest.fixture
def write(tmp_path):
    """write(name, condition, losses, flags, ...): the folder of a run that logged these validation losses.

    It logged the number of tokens at step 1 and the multiples of 10, as the trainer does.
    """

    def write(name, condition, losses, flags="", size="125M", fingerprints=FINGERPRINTS):
        config = REPOSITORY / f"train_configs/{size}.toml"
        given = f"--job.config_file {config} --data.corpus data/edu --mixer.condition {condition}"
        job = read_job_config([*given.split(), *flags.split()])
        plan = make_plan(job, 8)
        log = RunLog(tmp_path / name / "tb", plan, job, 1, fingerprints)
        for step, loss in losses.items():
            before = max(1, step - step % 10)
            log.log({"n_tokens_seen": plan.tokens_per_step * before}, before)
            log.log({"validation_metrics/loss": loss}, step)
        log.close()
        return str(tmp_path / name)

    return write


def show(output, *runs):
    """Returns the cells that `study show --output` wrote, and the page."""
    assert study.main(["show", *runs, "--output", str(output)]) == 0
    assert (output / "study.png").is_file()
    cells = json.loads((output / "study.json").read_text())["cells"]
    return cells, (output / "study.md").read_text()


def panels_of(runs):
    return tables.panels(study.shown([Path(run) for run in runs]))


def test_the_table_of_the_study(write, tmp_path):
    runs = [write(condition, condition, losses) for condition, losses in LOSSES.items()]
    # It has gone ten steps since its last validation.
    runs.append(write("large", "interdomain", {1: 10.4, 300: 2.5}, size="350M"))
    with SummaryWriter(f"{runs[-1]}/tb") as writer:
        writer.add_scalar("n_tokens_seen", 310 * 524_288, 310)
    ablation = "--mixer.c_form identity --mixer.n_basis 32"
    runs.append(write("ablated", "interdomain", {1: 4.0}, ablation))
    cells, text = show(tmp_path / "out", *runs)
    assert [(cell["group"], cell["condition"]) for cell in cells] == [
        ("125M", "interdomain"),
        ("125M", "softmax"),
        ("125M", "s4d-rope"),
        ("125M", "interdomain, n_basis 32, c_form identity"),
        ("350M", "interdomain"),
    ]
    ours, softmax, other, ablated, large = cells
    assert ours["loss"] == [2.75, None]
    assert ours["vs_softmax"] == pytest.approx(math.exp(2.75 - 2.9) - 1)
    # 6ND at 125M is in the paper's scaling figure, and vs Softmax in its mechanism cube.
    assert ours["compute"] == pytest.approx(2.031e18, rel=1e-3)
    assert ours["paper"] == 16.48
    assert ours["paper_vs_softmax"] == pytest.approx(-0.0102, abs=5e-5)
    # A loss that is not finite is not the best.
    assert other["perplexity"][0] == pytest.approx(2 * math.exp(2.5))
    # The paper has no figure of the ablation, nor of so few tokens.
    assert [cell["paper"] for cell in (softmax, ablated, large)] == [16.65, None, None]
    assert large["tokens"] == 300 * 524_288
    assert large["status"] == "unfinished, step 310 of 13,352"
    assert "| 125M | interdomain | 0.003 | 42 | 135,416,208 | 2,359,296 | 2,500,329,472 |" in text
    # The ablated run made one step, the others 4,769.
    assert [cell["vs_softmax"] for cell in (softmax, ablated, large)] == [0, None, None]
    tokens = "tokens (2,500,329,472; 524,288)"
    assert f"- 125M: runs differ in {tokens}, so no percentage compares them." in text
    assert text.count("no percentage") == 1


def test_mean_and_deviation_over_runs_that_differ_in_the_seed_alone(write, tmp_path):
    runs = [write("fast", "interdomain", {1: 4.0}, "--debug.seed 1 --optimizer.lr 6e-3")]
    for seed, loss in ((1, 2.0), (2, 2.1), (3, 2.3)):
        losses = {1: 4.0, 2500: 3.0, 4769: loss}
        runs.append(write(f"s{seed}", "interdomain", losses, f"--debug.seed {seed}"))
    (repeated, fast), text = show(tmp_path / "out", *runs)
    assert [repeated["seeds"], fast["seeds"]] == [[1, 2, 3], [1]]
    expected = [statistics.mean([2.0, 2.1, 2.3]), statistics.stdev([2.0, 2.1, 2.3])]
    assert repeated["loss"] == pytest.approx(expected)
    assert "| 8.51 ± 1.33 |" in text
    dots, panel = panels_of(runs)["125M"]
    mean, deviation = repeated["perplexity"]
    bar = [mean - deviation, mean + deviation]
    assert dots.dots[0][:3] == ("interdomain, lr 0.003", mean, bar)
    # The untrained model's validation is not in the plot.
    curve = panel.curves[0]
    assert curve.x == [2500 * 0.524288, 4769 * 0.524288]
    assert curve.y[1] == pytest.approx(mean)
    assert curve.error[1] == pytest.approx(deviation)


def test_another_optimizer_or_start_is_no_other_seed(write, tmp_path):
    start = "--checkpoint.enable --checkpoint.initial_load_path start"
    runs = [
        write("run", "softmax", {1: 4.0}),
        write("muon", "softmax", {1: 3.0}, "--optimizer.name Muon"),
        write("started", "softmax", {1: 3.0}, start),
        write("ours", "interdomain", {1: 2.0}),
    ]
    cells, text = show(tmp_path / "out", *runs)
    assert len(cells) == 4
    assert "| softmax, optimizer.name Muon, checkpoint.initial_load_path None |" in text
    assert "- 125M: several rows are of softmax, so no percentage compares them." in text


@pytest.mark.parametrize(
    ("nats", "labels"),
    [
        # The draws are over the documents that were read.
        ([[128.0, 0.0, 0.0, 0.0, 192.0]], [64, 0, 0, 0, 64]),
        # Every document of a run has the same loss. A draw takes one of the two runs twice, or both.
        ([[20.0, 40.0, 60.0], [30.0, 60.0, 90.0]], [10, 20, 30]),
    ],
    ids=["documents", "seeds"],
)
def test_an_interval_is_over_documents_and_seeds(nats, labels):
    draws = perplexities([{"nats": losses, "labels": labels} for losses in nats], 0)
    assert interval_of(draws) == pytest.approx([math.exp(2), math.exp(3)])


def test_the_fingerprint_of_the_text_counts_and_not_its_folder(write, tmp_path):
    softmax = write("softmax", "softmax", LOSSES["softmax"])
    moved = write("moved", "interdomain", LOSSES["interdomain"], "--data.corpus moved")
    (ours, _), page = show(tmp_path / "same text", softmax, moved)
    assert ours["vs_softmax"] < 0
    assert "no percentage" not in page
    flags = "--validation.tokens 4096"
    fingerprints = {"train": "b2", "validation": "b1"}
    other = write("other", "interdomain", LOSSES["interdomain"], flags, fingerprints=fingerprints)
    (ours, _), page = show(tmp_path / "other text", softmax, other)
    assert ours["vs_softmax"] is None
    assert "- 125M: runs differ in validation.tokens (4096; 4194304), so no" in page
    assert "- 125M: runs differ in the training text (b0; b2), so no" in page


STUDY = """
config = "train_configs/debug.toml"
output = "{folder}/out"
[all]
training.steps = 40
[sizes.debug]
model.flavor = "debug"
[sizes.short]
training.steps = 20
[conditions.softmax]
mixer.condition = "softmax"
[conditions."s4d, own scale"]
mixer.condition = "s4d"
mixer.linear_scale = 1
"""
RUNS = """
[[runs]]
seeds = [1, 2]
[[runs]]
sizes = ["debug"]
conditions = ["softmax"]
"""


@pytest.fixture
def described(tmp_path, monkeypatch):
    """described(old, new): the path of the study with a change to its text."""
    monkeypatch.chdir(REPOSITORY)

    def described(old="", new="", text=STUDY + RUNS):
        assert old in text
        path = tmp_path / "mine.toml"
        path.write_text(text.replace(old, new, 1).replace("{folder}", str(tmp_path)))
        return path

    return described


def runs_of(path):
    return {run.name: run for run in definition.read_study(path).runs}


def test_the_runs_of_a_study(described, capsys, refused):
    path = described()
    runs = runs_of(path)
    assert len(runs) == 2 * 2 * 2 + 1
    first = runs["debug/softmax/seed-1"]
    assert (first.plan.steps, first.plan.seed) == (40, 1)  # steps win over the file's tokens
    short = runs["short/s4d-own-scale/seed-2"]
    assert (short.plan.steps, short.plan.seed) == (20, 2)
    assert short.plan.config.mixer.linear_scale == 1
    # What ./launch.sh reads is what was planned.
    written = read_job_config(["--job.config_file", str(first.write_config())])
    assert make_plan(written, 1) == first.plan
    assert study.main(["plan", str(path), "--only", "*/seed-42"]) == 0
    row = "| debug/softmax/seed-42 | 1,377,408 | 1,024 a token | 163,840 |"
    assert row in capsys.readouterr().out
    words = "--only x matches no run. A run's name is like debug/softmax/seed-1"
    refused(study.main, ["plan", path, "--only", "x"], words)


def test_a_begun_run_with_other_settings_is_refused(described, refused):
    """Nothing is lost before the first checkpoint. tests/titan/test_study_run.py has a begun and a finished run."""
    run = runs_of(described())["debug/softmax/seed-1"]
    begun = run.write_config().read_text()
    changed = described("[sizes.debug]", "optimizer.lr = 1e-2\n[sizes.debug]")
    assert study.main(["plan", str(changed)]) == 0
    (run.folder / "checkpoint/step-20").mkdir(parents=True)
    (run.folder / "checkpoint/step-20/.metadata").touch()
    reason = "was made with other settings: optimizer.lr 0.003 there, 0.01 here"
    for command in ("plan", "run"):
        refused(study.main, [command, changed], f"{run.folder}/run.toml {reason}")
    assert (run.folder / "run.toml").read_text() == begun


def test_runs_as_jobs_of_slurm(described, tmp_path, monkeypatch, capsys):
    """Each run that is not in the queue is submitted by its own file and name. None is before there is data."""
    asked = tmp_path / "asked"
    write_program(tmp_path / "squeue", "echo mine-debug-softmax-seed-42")
    write_program(tmp_path / "sbatch", f"echo $@ >> {asked}; echo job 7")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    corpus = f"{tmp_path}/recall"
    path = described("[all]\n", f'[all]\ndata.corpus = "{corpus}"\n')
    options = ["--only", "debug/softmax/*", "--sbatch", "sbatch -N2 site.sbatch"]
    command = ["run", str(path), *options]
    assert study.main(command) == 2
    reason = f"debug/softmax/seed-1: data.corpus = '{corpus}': there is no"
    assert reason in capsys.readouterr().err
    assert not asked.exists()
    prepare = "--synthetic mqar --synthetic-examples 200 --validation-fraction 0.2 --output"
    assert prepare_data.main([*prepare.split(), corpus]) == 0
    assert study.main(command) == 0
    folder = tmp_path / "out/debug/softmax"
    assert asked.read_text().splitlines() == [
        f"--job-name=mine-debug-softmax-seed-1 -N2 site.sbatch {folder}/seed-1/run.toml",
        f"--job-name=mine-debug-softmax-seed-2 -N2 site.sbatch {folder}/seed-2/run.toml",
    ]


RECORD = """
[configuration]
[environment]
[facts]
model = "debug"
tokens = 163840
tokens_per_step = 4096
parameters = 7
state = [7, 0]
fingerprints = {}
[documents]
labels = [30, 70, 900]
[curves]
n_tokens_seen = {40 = 163840}
"""


def finish(run, loss):
    """Writes a run's record. The validation loss is the mean over three documents, and the accuracy is its inverse."""
    record = tomllib.loads(RECORD)
    record["run"] = run.labels | {"seed": run.seed}
    record["settings"] = run.settings
    record["facts"] |= {
        "condition": run.labels["condition"],
        "seed": run.seed,
        "lr": run.settings["optimizer"]["lr"],
    }
    record["documents"]["nats"] = [30 * loss + 5, 70 * loss - 6, 900 * loss + 1]
    record["curves"]["validation_metrics/loss"] = {"1": 7, "40": loss}
    record["curves"][tables.ACCURACY] = {"40": 1 / loss}
    run.record.parent.mkdir(parents=True, exist_ok=True)
    run.record.write_bytes(definition.dumped(record))


RATES = """
[rates.slow]
optimizer.lr = 1e-3
[rates.fast]
optimizer.lr = 4e-3
[[runs]]
sizes = ["debug"]
rates = ["slow", "fast"]
seeds = [1]
[[runs]]
sizes = ["debug"]
conditions = ["softmax"]
rates = ["fast"]
seeds = [2, 3]
"""


def test_the_figure_has_the_rate_with_the_most_seeds(described, refused, tmp_path):
    """The table has the other rates, too. A corpus with answers has an accuracy."""
    path = described(text=STUDY + RATES)
    losses = {("softmax", "slow"): 2.2, ("softmax", "fast"): 2.1, ("s4d, own scale", "slow"): 1.9}
    for run in runs_of(path).values():
        finish(run, losses.get((run.labels["condition"], run.labels["rate"]), 2.12))
    cells, _ = show(tmp_path / "shown", str(path))
    assert len(cells) == 4
    # The lowest perplexity comes first.
    s4d, softmax, *_ = cells
    assert (softmax["condition"], softmax["lr"]) == ("softmax", 0.004)
    assert softmax["seeds"] == [1, 2, 3]
    assert softmax["accuracy"][0] == pytest.approx(1 / 2.1)
    low, high = s4d["interval"]
    assert low < s4d["perplexity"][0] < high
    dots = panels_of([path])["debug"][0].dots
    assert [dot.name for dot in dots] == ["s4d, own scale (1)", "softmax (3)"]
    os.truncate(run.record, 90)
    refused(study.main, ["show", path], f"{run.record} is damaged")


# In place of a user, the run presses Ctrl-C again and again until it ends itself at the second signal.
PRESSES_CTRL_C = """
import os, signal, time
seen = []
def count(number, frame):
    seen.append(number)
    if len(seen) == 2:
        os._exit(130)
signal.signal(signal.SIGINT, count)
while True:
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(0.05)
"""


def test_ctrl_c_goes_on_to_the_runs(described, tmp_path, monkeypatch):
    """A run saves and leaves at the first, and ends at the second."""
    (tmp_path / "run.py").write_text(PRESSES_CTRL_C)
    write_program(tmp_path / "run", f"exec {sys.executable} {tmp_path}/run.py")
    monkeypatch.setattr(_study_run.sys, "executable", str(tmp_path / "run"))
    run = runs_of(described())["debug/softmax/seed-1"]
    assert _study_run.run_here([run], 1) == launch.CONTINUE


def test_the_committed_records_are_those_of_their_runs(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    runs = runs_of(Path("train_configs/studies/small.toml"))
    recorded = [run for run in runs.values() if run.record.is_file()]
    assert len(recorded) > 100
    for run in recorded:
        assert run.is_finished, run.name
    # The n_basis of all conditions is not for softmax.
    assert runs["0.1M/interdomain/mqar/3e-3/seed-1"].settings["mixer"]["n_basis"] == 16
    assert "n_basis" not in runs["0.1M/softmax/mqar/3e-3/seed-1"].settings["mixer"]


def test_a_study_that_cannot_be_shown_is_refused(write, described, refused):
    never = write("never", "softmax", {1: math.nan})
    refused(study.main, ["show", never], "was never validated: train with validation.enable")
    unfinished = "no run is finished. Train with: interdomain study run"
    refused(study.main, ["show", described()], unfinished)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[1, 2]", "[]", "seeds = [] names no run"),
        ("seeds", "sizse", "[[runs]] has no sizse; allowed: sizes"),
        ('ns = ["softmax"]', 'ns = ["sofmax"]', "names conditions sofmax; the file"),
        ("[all]", "[all]\ncheckpoint.folder = '{folder}'", "would write into one folder"),
        ("linear_scale", "linaer_scale", "no setting mixer.linaer_scale. Near"),
        ('"softmax"', '"softmax"\nmixer.n_basis = 8', "n_basis = 8 is not"),
    ],
)
def test_a_mistake_in_a_study_is_refused(described, refused, old, new, words):
    refused(study.main, ["plan", described(old, new)], words)
