"""A run of an earlier version continues with the same losses, converts and is evaluated.

run_of_939f98b.tar.xz was written by commit 939f98b on two ranks: its TOML, its corpus, the checkpoint of step 3, and what it
measured up to step 6, after a checkpoint that nothing interrupted.
"""

import json
import shutil
import tarfile

import pytest

from interdomain.tools import convert, evaluate

from .conftest import HERE, Runs

SIZE = {"model__dim": 16, "model__n_layers": 1, "model__n_heads": 2, "mixer__n_basis": 4}


def test_an_old_run_continues_converts_and_is_evaluated(tmp_path, launch):
    with tarfile.open(HERE / "run_of_939f98b.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    old = tmp_path / "old_run"
    measured = json.loads((old / "curves.json").read_text())

    run = shutil.copytree(old / "checkpoint", tmp_path / "run" / "checkpoint").parent
    runs = Runs(2, tmp_path, old / "corpus", launch)
    enabled = {"checkpoint__enable": True, "validation__enable": True}
    runs.add("run", folder=run, toml=old / "run.toml", training__local_batch_size=2, **SIZE, **enabled)
    seen = runs.start().seen("run")
    assert list(seen["log"]) == [4, 5, 6]
    for step, log in seen["log"].items():
        assert log["loss"] == pytest.approx(measured["loss_metrics/global_avg_loss"][str(step)], rel=1e-6)
        assert log["grad_norm"] == pytest.approx(measured["grad_norm"][str(step)], rel=1e-5)
    assert seen["validation"][6]["loss"] == pytest.approx(measured["validation_metrics/loss"]["6"], rel=1e-6)

    folder, results = tmp_path / "exported", tmp_path / "results"
    assert convert.main([str(old / "checkpoint" / "step-3"), "--output", str(folder)]) == 0
    corpus = ["--perplexity", str(old / "corpus"), "--packed", "--lengths", "64"]
    assert evaluate.main([str(folder), *corpus, "--output", str(results)]) == 0
    (row,) = json.loads((results / "evaluation.json").read_text())["perplexity"]
    assert row["perplexity"] == pytest.approx(
        measured["evaluate --perplexity --packed --lengths 64, of step 3"], rel=1e-6
    )
