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

MILESTONES = (100, 200, 400)

# Each watcher is a fork of one process that has imported everything. The file seen-N has what watcher N evaluated, and what
# it printed at last.
DRIVER = """
import contextlib, functools, gc, json, os, signal, sys
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
        return watch.main(argv.split())

gc.freeze()  # what was imported stays
# Reading the harness's own tasks takes it seconds. test_evaluate.py has them.
lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
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
    """A folder and how each watcher ended. The run saves steps 100 to 200, and later 400, its last."""
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
    text.write_text(TEXTS[0])
    with SummaryWriter(run / "tb") as writer:
        writer.add_scalar("loss", 2.0, 1)

    def save(*steps):
        return {f"{later}/step-{step}": f"{run}/checkpoint/step-{step}" for step in steps}

    of_both = f"{run} --include-path {tasks} --tasks choice --perplexity {text} --lengths 60"
    commands = [
        (of_both, {"waiting": save(100, 150, 200), "corpus step-200": {"the watcher": None}}),
        (of_both, {"waiting": save(400)}),
        (f"{of_both} --once", {}),
        (f"{of_both} --once --limit 1", {}),
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
    assert evaluated(second) == [*both(200), "waiting", *both(400)]
    assert again == 0, third
    assert not evaluated(third)
    assert not list((path / "run").glob(".watch*/*"))
    for step in (*MILESTONES, 150):
        results = path / f"run/checkpoint/step-{step}/evaluation.json"
        assert results.exists() == (step in MILESTONES), step


@HARNESS
def test_the_curves_are_the_results(ran):
    """The curves are those of `evaluate`. They stand beside the training's, which keep their folder."""
    run = ran[0] / "run"
    curves = read_curves(run / "tb/evaluation")
    accuracy = curves.pop("tasks/choice/acc")
    perplexity = curves.pop(f"perplexity/{ran[0]}/text.md/60")
    assert not curves
    for step in MILESTONES:
        found = read_results(run / f"checkpoint/step-{step}")
        assert (found["step"], found["tokens"]) == (step, 2048 * step)
        assert accuracy[step] == found["tasks"]["results"]["choice"]["acc"]["value"]
        assert perplexity[step] == pytest.approx(found["perplexity"][0]["perplexity"], rel=1e-6)
    assert len(set(perplexity.values())) == len(MILESTONES)
    assert read_curves(run / "tb") == {"loss": {1: 2.0}}


@HARNESS
def test_a_bad_request_is_refused_before_anything_is_evaluated(ran, refused, tmp_path):
    path, (*_, (limited, options)) = ran
    assert limited == 2
    assert "Give the same options, or remove the results." in options[-1]
    assert not evaluated(options)
    request = ["--perplexity", path / "text.md", "--once"]
    with resumable_folder(path / "run/watch"):
        refused(watch.main, [path / "run", *request], "another watcher evaluates")
    shutil.copytree(path / "run/checkpoint/step-150", tmp_path / "checkpoint/step-150")
    refused(watch.main, [tmp_path, *request], "holds no milestone")
