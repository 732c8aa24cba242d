"""study: the table of a study's runs, from what the plugin writes into their TensorBoard folders."""

import itertools
import json
import math
import os
import statistics
import sys
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

from ..common import REPOSITORY

# By step, as runs validate: the last step, 4,769, is none at which anything else is logged. The lowest is not the last.
LOSSES = {
    "softmax": {1: 10.5, 2500: 3.0, 4769: 2.9},
    "interdomain": {1: 10.5, 2500: 2.75, 4769: 2.8},
    "s4d-rope": {1: 10.5, 2500: 2.5 + math.log(2), 4769: math.nan},
}

FINGERPRINTS = {"train": "b0", "validation": "b1"}


@pytest.fixture
def write(tmp_path):
    """write(name, condition, losses, *flags, size=, first=): a start of a run that logged these validation losses, and the
    number of tokens at step 1 and the multiples of 10, as the trainer does."""

    def write(name, condition, losses, *flags, size="125M", first=1, fingerprints=FINGERPRINTS):
        given = [
            "--job.config_file",
            str(REPOSITORY / f"train_configs/{size}.toml"),
            "--mixer.condition",
            condition,
        ]
        job = read_job_config([*given, "--data.corpus", "data/edu", *flags])
        plan = make_plan(job, 8)
        log = RunLog(tmp_path / name / "tb", plan, job, first, fingerprints)
        for step in sorted({first, *losses, *(step - step % 10 for step in losses if step > 10)}):
            if step == 1 or step % 10 == 0:
                log.log({"n_tokens_seen": plan.tokens_per_step * step}, step)
            if step in losses:
                log.log({"validation_metrics/loss": losses[step]}, step)
        log.close()
        return str(tmp_path / name)

    return write


def shown(folder, *runs):
    """The cells as `study show --output` wrote them, and what it printed."""
    assert study.main(["show", *runs, "--output", str(folder)]) == 0
    return json.loads((folder / "study.json").read_text())["cells"], (
        folder / "study.md"
    ).read_text()


def test_the_table_of_the_study(write, tmp_path, capsys):
    runs = [write(condition, condition, losses) for condition, losses in LOSSES.items()]
    runs.append(write("large", "interdomain", {1: 10.4, 300: 2.5}, size="350M"))
    runs.append(
        write(
            "ablated",
            "interdomain",
            {1: 4.0},
            "--mixer.c_form",
            "identity",
            "--mixer.n_basis",
            "32",
        )
    )
    cells, text = shown(tmp_path / "out", *runs)
    assert [(cell["group"], cell["condition"]) for cell in cells] == [
        *(("125M", condition) for condition in ("interdomain", "softmax", "s4d-rope")),
        ("125M", "interdomain, n_basis 32, c_form identity"),
        ("350M", "interdomain"),
    ]
    ours, softmax, other, ablated, large = cells
    assert ours["loss"] == [2.75, None]
    assert ours["vs_softmax"] == pytest.approx(math.exp(2.75 - 2.9) - 1)
    # The paper's figures: 6ND at 125M is its scaling figure's, and vs Softmax its mechanism cube's.
    assert ours["compute"] == pytest.approx(2.031e18, rel=1e-3)
    assert ours["paper"] == 16.48
    assert ours["paper_vs_softmax"] == pytest.approx(-0.0102, abs=5e-5)
    assert other["perplexity"][0] == pytest.approx(
        2 * math.exp(2.5)
    )  # what is not finite is no best
    assert softmax["vs_softmax"] == 0
    assert large["vs_softmax"] is None
    assert ablated["paper"] is None  # not the paper's cell
    assert capsys.readouterr().out.startswith(text)
    assert "| 125M | interdomain | 0.003 | 42 | 135,416,208 | 2,359,296 | 2,500,329,472 |" in text
    # One step against 4,769.
    assert ablated["vs_softmax"] is None
    assert (
        "- 125M: runs differ in tokens (2,500,329,472; 524,288), so no percentage compares them."
        in text
    )
    assert text.count("no percentage") == 1
    panels = tables.panels(study.shown([Path(run) for run in runs]))
    assert [*panels] == ["125M", "350M"]
    # The last validation is in the plot, that of the untrained model is not.
    assert panels["125M"][1].curves[0].x == [2500 * 0.524288, 4769 * 0.524288]


def test_mean_and_deviation_over_runs_that_differ_in_the_seed_alone(write, tmp_path):
    losses = {"1": 2.0, "2": 2.1, "3": 2.3}
    runs = [
        write(f"s{seed}", "interdomain", {1: 4.0, 2500: 3.0, 4769: loss}, "--debug.seed", seed)
        for seed, loss in losses.items()
    ]
    runs.append(
        write("fast", "interdomain", {1: 4.0}, "--debug.seed", "1", "--optimizer.lr", "6e-3")
    )
    (repeated, fast), text = shown(tmp_path / "out", *runs)
    assert "| 125M | interdomain | 0.003 | 1, 2, 3 |" in text
    assert "| 8.51 ± 1.33 |" in text
    assert (repeated["seeds"], fast["seeds"]) == ([1, 2, 3], [1])
    assert repeated["loss"] == pytest.approx(
        [statistics.mean(losses.values()), statistics.stdev(losses.values())]
    )
    ((dots, panel),) = tables.panels(study.shown([Path(run) for run in runs])).values()
    mean, deviation = repeated["perplexity"]
    assert dots.dots[0][:3] == ("interdomain, lr 0.003", mean, [mean - deviation, mean + deviation])
    assert (panel.curves[0].y[1], panel.curves[0].error[1]) == pytest.approx((mean, deviation))


def test_another_optimizer_or_start_is_no_other_seed(write, tmp_path):
    start = ("--checkpoint.enable", "--checkpoint.initial_load_path", "start")
    others = {"muon": ("--optimizer.name", "Muon"), "started": start}
    runs = [
        write("run", "softmax", {1: 4.0}),
        *(write(name, "softmax", {1: 3.0}, *f) for name, f in others.items()),
    ]
    runs.append(write("ours", "interdomain", {1: 2.0}))
    cells, text = shown(tmp_path / "out", *runs)
    assert [cell["seeds"] for cell in cells] == [[42]] * 4
    assert "| softmax, optimizer.name Muon, checkpoint.initial_load_path None |" in text
    assert "- 125M: several rows are of softmax, so no percentage compares them." in text


@pytest.mark.parametrize(
    ("nats", "labels", "ends"),
    [
        # Over the documents that were read.
        ([[128.0, 0.0, 0.0, 0.0, 192.0]], [64, 0, 0, 0, 64], (2, 3)),
        # Over the seeds: every document of a run has the same loss. A draw takes one of the runs twice, or both.
        ([[20.0, 40.0, 60.0], [30.0, 60.0, 90.0]], [10, 20, 30], (2, 3)),
    ],
)
def test_an_interval_is_over_documents_and_seeds(nats, labels, ends):
    draws = perplexities([{"nats": losses, "labels": labels} for losses in nats], 0)
    assert interval_of(draws) == pytest.approx([math.exp(end) for end in ends])


@pytest.mark.parametrize(
    ("fingerprints", "flags", "reasons"),
    [
        (FINGERPRINTS, ["--data.corpus", "moved"], []),
        (
            FINGERPRINTS | {"train": "b2"},
            ["--validation.tokens", "4096"],
            ["validation.tokens (4096; 4194304)", "the training text (b0; b2)"],
        ),
    ],
)
def test_runs_on_other_text_are_not_compared(
    write, tmp_path, monkeypatch, fingerprints, flags, reasons
):
    """The text counts, by its fingerprint, not the folder. Here without a figure."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    runs = [
        write("softmax", "softmax", LOSSES["softmax"]),
        write("ours", "interdomain", LOSSES["interdomain"], *flags, fingerprints=fingerprints),
    ]
    cells, page = shown(tmp_path / "shown", *runs)
    assert [cell["vs_softmax"] is None for cell in cells] == [bool(reasons), False]
    lines = [
        f"- 125M: runs differ in {reason}, so no percentage compares them." for reason in reasons
    ]
    assert [line for line in page.splitlines() if "no percentage" in line] == lines


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
[[runs]]
seeds = [1, 2]
[[runs]]
sizes = ["debug"]
conditions = ["softmax"]
"""


def test_home_and_variables_in_the_paths_of_a_study(described, tmp_path, monkeypatch):
    """Of its folders and its runs' settings, which stay in the run's file as they were written."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    text = STUDY.replace("{folder}/out", "~/out").replace(
        "[all]", '[all]\ndata.corpus = "~/recall"'
    )
    run = definition.read_study(Path(described(text))).runs[0]
    assert run.folder == tmp_path / "home/out" / run.name
    assert run.record == tmp_path / "home/out/records" / f"{run.name}.json"
    assert run.settings["data"]["corpus"] == "~/recall"


@pytest.fixture
def described(tmp_path, monkeypatch):
    """described(text) -> its path, with the folder that the text names."""
    monkeypatch.chdir(REPOSITORY)
    numbers = itertools.count()

    def described(text=STUDY):
        path = tmp_path / f"mine{next(numbers) or ''}.toml"
        path.write_text(text.replace("{folder}", str(tmp_path)))
        return str(path)

    return described


def test_the_runs_of_a_study(described, capsys):
    runs = {run.name: run for run in definition.read_study(Path(described())).runs}
    assert len(runs) == 2 * 2 * 2 + 1
    assert list(runs)[::4] == [
        "debug/softmax/seed-1",
        "debug/softmax/seed-2",
        "debug/softmax/seed-42",
    ]
    first = runs["debug/softmax/seed-1"].plan
    short = runs["short/s4d-own-scale/seed-2"].plan
    assert (first.steps, first.seed, short.seed) == (
        40,
        1,
        2,
    )  # steps of the study win over the file's tokens
    assert short.steps == 20
    assert short.config.mixer.linear_scale == 1
    file = runs["debug/softmax/seed-1"].write_config()  # what ./launch.sh reads is what was planned
    again = make_plan(read_job_config(["--job.config_file", str(file)]), 1)
    assert (again.steps, again.tokens, again.seed, again.config) == (
        40,
        first.tokens,
        1,
        first.config,
    )
    assert study.main(["plan", described(), "--only", "*/seed-42"]) == 0
    assert (
        "| debug/softmax/seed-42 | 1,377,408 | 1,024 a token | 163,840 |" in capsys.readouterr().out
    )


def test_a_begun_run_with_other_settings_is_refused(described, refused, capsys):
    """tests/titan/test_study_run.py has a finished one. Before the first checkpoint nothing is lost."""
    study_file, changed = (
        described(),
        described(STUDY.replace("[sizes.debug]", "optimizer.lr = 1e-2\n[sizes.debug]")),
    )
    run = {run.name: run for run in definition.read_study(Path(study_file)).runs}[
        "debug/softmax/seed-1"
    ]
    begun = run.write_config().read_text()
    assert study.main(["plan", changed]) == 0
    (run.folder / "checkpoint/step-20").mkdir(parents=True)
    (run.folder / "checkpoint/step-20/.metadata").touch()
    for command in ("plan", "run"):
        words = f"{run.folder}/run.toml was made with other settings: optimizer.lr 0.003 there, 0.01 here"
        refused(study.main, [command, changed], words)
    assert (run.folder / "run.toml").read_text() == begun
    assert study.main(["plan", study_file, "--only", run.name]) == 0
    assert "| at step 20 of 40 |" in capsys.readouterr().out


def test_runs_as_jobs_of_slurm(described, tmp_path, monkeypatch, capsys):
    """Those that are not in the queue, each by its own file and name; none before there is data."""
    (tmp_path / "bin").mkdir()
    scripts = {
        "squeue": "echo mine/debug/softmax/seed-42",
        "sbatch": f'echo "$@" >> {tmp_path}/asked; echo job 7',
    }
    for name, script in scripts.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    corpus = f"{tmp_path}/recall"
    study_file = described(STUDY.replace("[all]\n", f'[all]\ndata.corpus = "{corpus}"\n'))
    command = [
        "run",
        study_file,
        "--only",
        "debug/softmax/*",
        "--sbatch",
        "sbatch --nodes=2 site.sbatch",
    ]
    assert study.main(command) == 2
    assert (
        f"3 run(s), the first of them debug/softmax/seed-1: data.corpus = '{corpus}': there is no"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "asked").exists()
    options = "--synthetic mqar --synthetic-examples 200 --validation-fraction 0.2 --output"
    assert prepare_data.main([*options.split(), corpus]) == 0
    assert study.main(command) == 0
    folder = tmp_path / "out/debug/softmax"
    assert (tmp_path / "asked").read_text().splitlines() == [
        f"--job-name=mine/debug/softmax/seed-{seed} --nodes=2 site.sbatch {folder}/seed-{seed}/run.toml"
        for seed in (1, 2)
    ]
    assert "debug/softmax/seed-42: in the queue" in capsys.readouterr().out


def finish(run, loss, accuracy=None):
    """Write a run's record. The validation loss is the mean over three documents."""
    facts = dict(
        model="debug",
        condition=run.labels["condition"],
        seed=run.seed,
        lr=run.settings["optimizer"]["lr"],
    )
    facts |= dict(tokens=163840, parameters=7, state=[7, 0], fingerprints={}, tokens_per_step=4096)
    curves = {"validation_metrics/loss": {"1": 7, "40": loss}, "n_tokens_seen": {"40": 163840}}
    if accuracy is not None:
        curves[tables.ACCURACY] = {"1": 0.0, "40": accuracy}
    documents = dict(nats=[30 * loss + 5, 70 * loss - 6, 900 * loss + 1], labels=[30, 70, 900])
    record = dict(
        run=run.labels | {"seed": run.seed},
        settings=run.settings,
        facts=facts,
        configuration={},
        environment={},
    )
    run.record.parent.mkdir(parents=True, exist_ok=True)
    run.record.write_bytes(definition.dumped(record | dict(documents=documents, curves=curves)))


RATES = (
    STUDY.partition("[[runs]]")[0]
    + """
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
)


def test_the_figure_has_the_rate_with_the_most_seeds(described, refused, tmp_path):
    """The table has the others, too."""
    path = Path(described(RATES))
    losses = {("softmax", "slow"): 2.2, ("softmax", "fast"): 2.1, ("s4d, own scale", "slow"): 1.9}
    runs = definition.read_study(path).runs
    for run in runs:
        labels = run.labels["condition"], run.labels["rate"]
        finish(run, losses.get(labels, 2.12))
    cells, _ = shown(tmp_path / "shown", str(path))
    ours = {(cell["condition"], cell["lr"]): cell for cell in cells}
    s4d = ours["s4d, own scale", 0.001]
    assert ours["softmax", 0.004]["seeds"] == [1, 2, 3]
    assert s4d["interval"][0] < s4d["perplexity"][0] < s4d["interval"][1]
    (dots, *_) = tables.panels(study.shown([path]))["debug"]
    assert [dot.name for dot in dots.dots] == ["s4d, own scale (1)", "softmax (3)"]
    file = run.record
    text = file.read_text()
    file.write_text(text[:90])
    refused(study.main, ["show", str(path)], f"{file} is damaged")
    for run in definition.read_study(
        Path(described(RATES.replace("{folder}/out", "{folder}/answers")))
    ).runs:
        finish(run, 2.0, accuracy=0.75)
    cells, _ = shown(tmp_path / "shown answers", str(tmp_path / "mine1.toml"))
    assert [cell["accuracy"][0] for cell in cells] == [0.75] * 4


def test_ctrl_c_goes_on_to_the_runs(described, tmp_path, monkeypatch, capsys):
    """Each time: a run saves and leaves at the first, and ends at the second. Here the run presses it, in place of a user."""
    press = "while True: os.kill(os.getppid(), signal.SIGINT); time.sleep(0.05)"
    count = "seen = []\nsignal.signal(signal.SIGINT, lambda *_: seen.append(1) or seen[1:] and os._exit(130))"
    (tmp_path / "run").write_text(
        f"#!{sys.executable}\nimport os, signal, time\n{count}\n{press}\n"
    )
    (tmp_path / "run").chmod(0o755)
    monkeypatch.setattr(_study_run.sys, "executable", str(tmp_path / "run"))
    (one, *_) = definition.read_study(Path(described())).runs
    assert _study_run.run_here([one], 1) == launch.CONTINUE
    assert f"{one.name}: left at step 0" in capsys.readouterr().out


def test_an_n_basis_of_all_conditions_is_not_for_softmax(monkeypatch):
    """The committed records stay those of their runs."""
    monkeypatch.chdir(REPOSITORY)
    runs = [
        run
        for run in definition.read_study(Path("train_configs/studies/small.toml")).runs
        if run.record.is_file()
    ]
    assert len(runs) > 100
    assert all(run.is_finished for run in runs)
    recall = {run.labels["condition"]: run for run in runs if run.labels["setting"] == "mqar"}
    n_basis = {condition: run.settings["mixer"].get("n_basis") for condition, run in recall.items()}
    assert n_basis.pop("softmax") is None
    assert {*n_basis.values()} == {16}


def test_what_is_refused(write, described, tmp_path, refused):
    with SummaryWriter(str(tmp_path / "other" / "tb")) as writer:
        writer.add_scalar("loss", 1.0, 1)

    def changed(old, new):
        return described(STUDY.replace(old, new))

    for argv, words in (
        (["show", "no such run", "--output", tmp_path], "exists and is not empty"),
        (["show", tmp_path / "other"], "holds no run of this project"),
        (
            ["show", write("never", "softmax", {1: math.nan})],
            "was never validated: train with validation.enable",
        ),
        (["show", described()], "no run is finished. Train with: interdomain study run"),
        (
            ["plan", described(), "--only", "x"],
            "--only x matches no run. A run's name is like debug/softmax/seed-1",
        ),
        (
            ["plan", described("sizes.debug.model.flavor = 'debug'")],
            "there are no conditions: add a table",
        ),
        (["plan", changed("[1, 2]", "[]")], "seeds = [] names no run"),
        (
            ["plan", changed("training.steps = 20", "tokens_per_parameter = 2")],
            "tokens_per_parameter was removed",
        ),
        (["plan", changed("seeds", "sizse")], "[[runs]] has no sizse; allowed: sizes"),
        (
            ["plan", changed('ns = ["softmax"]', 'ns = ["sofmax"]')],
            "names conditions sofmax; the file",
        ),
        (["plan", changed("[all]", "[corpora]\n[all]")], "there is no corpora in a study"),
        (
            ["plan", changed("[all]", f"[all]\ncheckpoint.folder = '{tmp_path}'")],
            "would write into one folder",
        ),
        (
            ["plan", changed("[all]", "[all]\nmetrics.save_tb_folder = '../tb'")],
            "would write into one folder",
        ),
        (["plan", changed("linear_scale", "linaer_scale")], "no setting mixer.linaer_scale. Near"),
        (
            ["plan", changed('condition = "softmax"', 'condition = "softmax"\nmixer.n_basis = 8')],
            "n_basis = 8 is not",
        ),
        (
            ["run", changed("linear_scale = 1", "normalize = true")],
            "own-scale/seed-1: mixer.normalize = True is not",
        ),
    ):
        refused(study.main, argv, words)
