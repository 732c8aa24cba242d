"""watch: a milestone is evaluated once, however often the watcher is killed and whatever the run does meanwhile."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from interdomain.checkpoint.step_folder import KEEP
from interdomain.folders import resumable_folder
from interdomain.tools import watch
from interdomain.tools._curves import read_curves

from .checkpoints import small_model, write_checkpoint
from .test_evaluate import HARNESS, TEXTS, read_results, write_task

MILESTONES = (100, 200, 300, 400)

# Each watcher is a fork of one process that has imported everything. The file seen-N has what watcher N evaluated, and what
# it printed at last.
DRIVER = """
import contextlib, gc, json, os, signal, sys
import lm_eval.models.huggingface, lm_eval.tasks, torch.utils.tensorboard, interdomain.hf
from pathlib import Path
from types import SimpleNamespace
from interdomain.tools import evaluate, watch
from interdomain.tools._evaluate import harness

def child(argv, acts, seen):
    # acts: what happens meanwhile, {what is evaluated: {path: its new path, or null for SIGKILL}}.
    def act(what):
        seen.write(what + "\\n")
        seen.flush()
        for old, new in acts.get(what, {}).items():
            if new is None:
                os.kill(os.getpid(), signal.SIGKILL)
            os.rename(old, new)
    def evaluate_folder(folder, *args, **named):
        act(f"task {folder.name}")
        return run_tasks(folder, *args, **named)
    def run_perplexity(args, folder, *more, **named):
        act(f"corpus {folder.path.name}")
        return measure(args, folder, *more, **named)
    def sleep(seconds):
        act("waiting")
    run_tasks, harness.evaluate_folder = harness.evaluate_folder, evaluate_folder
    measure, evaluate.run_perplexity = evaluate.run_perplexity, run_perplexity
    watch.time = SimpleNamespace(sleep=sleep)
    with contextlib.redirect_stderr(seen), contextlib.redirect_stdout(seen):
        return watch.main(argv)

gc.freeze()  # what was imported stays
ends = []
for i, (argv, acts) in enumerate(json.loads(sys.argv[1])):
    if not (pid := os.fork()):
        with open(f"seen-{i}", "w") as seen:
            status = child(argv, acts, seen)
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    ends.append((status, Path(f"seen-{i}").read_text().splitlines()))
print(json.dumps(ends))
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory, tokenizer):
    """A folder and how each watcher ended. The run saves steps 100 to 200, and later 300 and 400, its last."""
    pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    path = tmp_path_factory.mktemp("watch")
    run = path / "run"
    later = path / "later"
    tasks = path / "tasks"
    text = path / "text.md"
    for step in (*MILESTONES, 150):
        model = small_model()
        with torch.no_grad():
            model.norm.weight.mul_(1 + step / 500)
        checkpoint = write_checkpoint(later, model, tokenizer, step)
        if step in MILESTONES:
            (checkpoint / KEEP).touch()
    (run / "checkpoint").mkdir(parents=True)
    tasks.mkdir()
    write_task(tasks, "choice")
    write_task(tasks, "gone", dataset_path="nobody/nothing")
    text.write_text(TEXTS[0])
    with SummaryWriter(run / "tb") as writer:
        writer.add_scalar("loss", 2.0, 1)

    def save(*steps):
        names = [f"step-{step}" for step in steps]
        return {str(later / name): str(run / "checkpoint" / name) for name in names}

    of_task = [str(run), "--include-path", str(tasks), "--tasks"]
    asked = [*of_task, "choice", "--perplexity", str(text), "--lengths", "60", "30"]
    commands = [
        (asked, {"waiting": save(100, 150, 200), "corpus step-200": {"the watcher": None}}),
        (asked, {"waiting": save(300, 400)}),
        ([*asked, "--once"], {}),
        ([*asked, "--once", "--limit", "1"], {}),
        ([*of_task, "choice", "gone"], {}),
    ]
    environment = {**os.environ, "HF_HOME": str(path / "home"), "HF_HUB_OFFLINE": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", DRIVER, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=path, env=environment)
    assert done.returncode == 0, done.stderr
    return path, json.loads(done.stdout.splitlines()[-1])


def evaluated(lines):
    return [line for line in lines if line.startswith(("task ", "corpus ", "waiting"))]


def both(step):
    return [f"task step-{step}", f"corpus step-{step}"]


@HARNESS
def test_a_killed_watcher_goes_on_and_repeats_nothing(ran):
    path, ((killed, first), (ended, second), (again, third), *_) = ran
    assert killed == -9
    assert evaluated(first) == ["waiting", *both(100), *both(200)]
    assert ended == 0, second
    assert evaluated(second) == [*both(200), "waiting", *both(300), *both(400)]
    assert (again, evaluated(third)) == (0, [])
    assert list((path / "run").glob(".watch*/*")) == []
    results = (path / "run" / "checkpoint").glob("*/evaluation.json")
    steps = [file.parent.name for file in results]
    assert sorted(steps) == ["step-100", "step-200", "step-300", "step-400"]


@HARNESS
def test_the_curves_are_the_results(ran):
    """The curves are those of `evaluate`. They stand beside the training's, which keep their folder."""
    path, _ = ran
    run = path / "run"
    curves = read_curves(run / "tb" / "evaluation")
    corpus = f"perplexity/{path / 'text.md'}"
    assert curves.keys() == {"tasks/choice/acc", f"{corpus}/30", f"{corpus}/60"}
    for step in MILESTONES:
        found = read_results(run / "checkpoint" / f"step-{step}")
        assert (found["step"], found["tokens"]) == (step, 2048 * step)
        accuracy = found["tasks"]["results"]["choice"]["acc"]["value"]
        assert curves["tasks/choice/acc"][step] == accuracy
        for row in found["perplexity"]:
            logged = curves[f"{corpus}/{row['length']}"][step]
            assert logged == pytest.approx(row["perplexity"], rel=1e-6)
    assert len(set(curves[f"{corpus}/60"].values())) == 4
    assert read_curves(run / "tb") == {"loss": {1: 2.0}}


@HARNESS
def test_a_bad_request_is_refused_before_anything_is_evaluated(ran, refused, tmp_path):
    path, (*_, (limited, options), (lacking, gone)) = ran
    assert (limited, lacking) == (2, 2)
    assert "Give the same options, or remove the results." in options[-1]
    assert "the data of gone cannot be read" in gone[-1]
    assert not evaluated(options + gone)
    text = ["--perplexity", path / "text.md", "--lengths", 60, "--once"]
    with resumable_folder(path / "run" / "watch"):
        refused(watch.main, [path / "run", *text], "another watcher evaluates")
    shutil.copytree(path / "run" / "checkpoint" / "step-150", tmp_path / "checkpoint" / "step-150")
    refused(watch.main, [tmp_path, *text], "holds no milestone", "step-N/KEEP")
