"""watch: a milestone is evaluated once, however often the watcher is killed and whatever the run does meanwhile."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from interdomain.checkpoint.run_folder import note_folders
from interdomain.checkpoint.step_folder import KEEP
from interdomain.folders import resumable_folder
from interdomain.tools import watch
from interdomain.tools._curves import read_curves

from .checkpoints import small_model, write_checkpoint
from .test_evaluate import HARNESS, write_task

# Forks of one process that has imported everything, a watcher each. `seen` has what each evaluated, and what it said at last.
DRIVER = """
import contextlib, gc, json, os, signal, sys
import lm_eval.models.huggingface, lm_eval.tasks, torch.utils.tensorboard, interdomain.hf
from pathlib import Path
from types import SimpleNamespace
from interdomain.tools import evaluate, watch
from interdomain.tools._evaluate import harness

def child(argv, acts, seen):
    # acts: what the run does meanwhile, {what is evaluated: {path: its new path, or null for SIGKILL}}.
    def act(key):
        seen.write(key + "\\n"); seen.flush()
        for old, new in acts.get(key, {}).items():
            os.rename(old, new) if new else os.kill(os.getpid(), signal.SIGKILL)
    def noting(function, kind, folder_of):
        def noted(*args, **named):
            act(f"{kind} {folder_of(args).name}")
            return function(*args, **named)
        return noted
    harness.evaluate_folder = noting(harness.evaluate_folder, "task", lambda args: args[0])
    evaluate.run_perplexity = noting(evaluate.run_perplexity, "corpus", lambda args: args[1].path)
    watch.time = SimpleNamespace(sleep=lambda seconds: act("waiting"))
    with contextlib.redirect_stderr(seen), contextlib.redirect_stdout(seen):
        return watch.main(argv)

gc.freeze()  # what was imported stays
said = []
for i, (argv, acts) in enumerate(json.loads(sys.argv[1])):
    if not (pid := os.fork()):
        with open(f"seen-{i}", "w") as seen:
            status = child(argv, acts, seen)
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    said.append((status, Path(f"seen-{i}").read_text().splitlines()))
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory, tokenizer):
    """(folder, what the watchers said): a run saves steps 100 to 200, then 300 and 400, its last."""
    pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    path = tmp_path_factory.mktemp("watch")
    run = path / "run"
    later = path / "later"
    tasks = path / "tasks"
    text = path / "text.md"
    for step in (100, 150, 200, 300, 400):
        model = small_model()
        with torch.no_grad():
            model.norm.weight.mul_(1 + step / 500)
        checkpoint = write_checkpoint(later, model, tokenizer, step)
        if step != 150:
            (checkpoint / KEEP).touch()
    (run / "checkpoint").mkdir(parents=True)
    tasks.mkdir()
    choice = dict(
        doc_to_text="{{q}}", doc_to_target="{{a}}", target_delimiter="", doc_to_choice="{{c}}"
    )
    rows = [{"q": "def f(", "c": ["x):", "  ", "self, y"], "a": 0}]
    write_task(tasks, "choice", "multiple_choice", rows, ["acc"], **choice)
    write_task(
        tasks, "gone", "multiple_choice", rows, ["acc"], dataset_path="nobody/nothing", **choice
    )
    text.write_text("def f(x):\n    return x\n" * 30)
    with SummaryWriter(run / "tb") as writer:
        writer.add_scalar("loss", 2.0, 1)

    def save(*steps):
        return {
            str(later / f"step-{step}"): str(run / "checkpoint" / f"step-{step}") for step in steps
        }

    of_task = [str(run), "--include-path", str(tasks), "--tasks"]
    asked = [*of_task, "choice", "--perplexity", str(text), "--lengths", "60", "30"]
    commands = [
        (asked, {"waiting": save(100, 150, 200), "corpus step-200": {"the watcher": None}}),
        (asked, {"waiting": save(300, 400)}),
        ([*asked, "--once"], {}),
        ([*asked, "--once", "--limit", "1"], {}),
        ([*of_task, "choice", "gone"], {}),
    ]
    environment = {
        "HF_HOME": str(path / "home"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(commands)],
        capture_output=True,
        text=True,
        cwd=path,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return path, json.loads(done.stdout.splitlines()[-1])


def evaluated(said):
    return [line for line in said if line.startswith(("task ", "corpus ", "waiting"))]


@HARNESS
def test_a_killed_watcher_goes_on_and_repeats_nothing(ran):
    path, ((killed, first), (ended, second), (again, third), *_) = ran
    assert killed == -9
    assert evaluated(first) == [
        "waiting",
        "task step-100",
        "corpus step-100",
        "task step-200",
        "corpus step-200",
    ]
    assert ended == 0, second
    assert evaluated(second) == [
        *("task step-200", "corpus step-200", "waiting"),
        *("task step-300", "corpus step-300", "task step-400", "corpus step-400"),
    ]
    assert (again, evaluated(third)) == (0, [])
    assert not [*(path / "run").glob(".watch*/*")]
    results = (path / "run" / "checkpoint").glob("*/evaluation.json")
    assert {file.parent.name for file in results} == {
        f"step-{step}" for step in (100, 200, 300, 400)
    }


@HARNESS
def test_the_curves_are_the_results(ran):
    """Those of `evaluate`, which made them, beside the training's, which keep their folder."""
    path, run = ran[0], ran[0] / "run"
    curves = read_curves(run / "tb" / "evaluation")
    text = path / "text.md"
    assert curves.keys() == {
        "tasks/choice/acc",
        *(f"perplexity/{text}/{length}" for length in (30, 60)),
    }
    for step in (100, 200, 300, 400):
        found = json.loads((run / "checkpoint" / f"step-{step}" / "evaluation.json").read_text())
        assert (found["step"], found["tokens"]) == (step, 2048 * step)
        assert (
            curves["tasks/choice/acc"][step] == found["tasks"]["results"]["choice"]["acc"]["value"]
        )
        for row in found["perplexity"]:
            assert curves[f"perplexity/{text}/{row['length']}"][step] == pytest.approx(
                row["perplexity"], rel=1e-6
            )
    assert len({*curves[f"perplexity/{text}/60"].values()}) == 4
    assert read_curves(run / "tb") == {"loss": {1: 2.0}}


@HARNESS
def test_what_cannot_be_is_refused_before_anything_is_evaluated(ran, refused, tmp_path):
    path, (*_, (limited, options), (lacking, gone)) = ran
    assert (limited, lacking) == (2, 2)
    assert "Give the same options, or remove the results." in options[-1]
    assert "the data of gone cannot be read" in gone[-1]
    assert not evaluated(options + gone)
    text = ["--perplexity", path / "text.md", "--lengths", 60, "--once"]
    with resumable_folder(path / "run" / "watch"):
        refused(watch.main, [path / "run", *text], "another watcher evaluates")
    refused(watch.main, [path / "nowhere", *text], "There is no folder")
    shutil.copytree(path / "run" / "checkpoint" / "step-150", tmp_path / "checkpoint" / "step-150")
    refused(watch.main, [tmp_path, *text], "holds no milestone", "step-N/KEEP")
    note_folders(tmp_path, "ck", "curves")
    refused(watch.main, [tmp_path, *text], f"{tmp_path / 'ck'} holds no milestone")
