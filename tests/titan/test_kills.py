"""The life of a run of two ranks: kills, a step that is not finite, milestones, and a watcher beside it.

Real processes, real signals (disturbed.py). It validates after every step, so that it is also killed right before a
validation, and ends with the same bits and curves as the run that nobody disturbed, and with no validation missing.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from interdomain.checkpoint.step_folder import (
    VALIDATION,
    finished_steps,
    milestones,
    read_run_record,
)
from interdomain.titan.resume.lock import NAME
from interdomain.tools import watch
from interdomain.tools._curves import read_curves, read_events
from interdomain.tools._start.torchrun import CONTINUE

from ..common import REPOSITORY
from ..ranks import forks
from .runs import assert_same_tensors, flags, run_disturbed

pytestmark = pytest.mark.e2e

STARTS = [
    [
        ["finish", 2, 0, "SIGKILL", "rank"],
        ["step", 4, 1, "SIGTERM", "rank"],
    ],  # one torchrun, which restarts the ranks
    [["validate", 6, 0, "SIGKILL", "agent"]],  # after the save of the last step
    [None],
]


def watching(run):
    """The watcher's command line."""
    corpus = [
        "--perplexity",
        str(REPOSITORY / "README.md"),
        "--packed",
        "--lengths",
        "64",
        "--limit",
        "2",
    ]
    return [str(run), *corpus]


def watch_beside(arguments):
    watch.LOOK_SECONDS = 0.2
    assert watch.main(arguments) == 0


@pytest.fixture(scope="module")
def story(tmp_path_factory, corpus):
    """Record of each start of torchrun: its exit status, its output, and the files in the checkpoint folder after it."""
    folder = tmp_path_factory.mktemp("kills")
    run, plan = folder / "run", folder / "plan.json"
    given = "--checkpoint.enable --checkpoint.keep_steps 2 4 --checkpoint.interval 1 --checkpoint.keep_latest_k 2"
    given += " --validation.enable --validation.freq 1 --validation.tokens 128"
    given += " --training.local_batch_size 4 --metrics.enable_tensorboard"
    run.mkdir()
    watcher = forks().Process(target=watch_beside, args=(watching(run),))
    watcher.start()
    chapters = []
    for starts in STARTS:
        if len(chapters) == 1:  # the newest was complete when the run left
            shard = run / "checkpoint" / "step-5" / "__1_0.distcp"
            os.truncate(shard, shard.stat().st_size - 1)
        plan.write_text(json.dumps({"starts": starts, "spoil": {"5": "gradient"}}))
        status, said = run_disturbed(plan, len(starts) - 1, *flags(corpus, run), *given.split())
        found = finished_steps(run / "checkpoint")
        chapter = SimpleNamespace(
            status=status, said=said, held=(run / NAME).exists(), found={*found}
        )
        chapter.validated = {step for step, path in found.items() if (path / VALIDATION).exists()}
        chapters.append(chapter)
    watcher.join()
    assert watcher.exitcode == 0
    return SimpleNamespace(chapters=chapters, folder=run)


@pytest.fixture(scope="module")
def undisturbed(runs):
    """The folder of the run that nobody disturbed, and whose milestones are evaluated after its end."""
    folder = runs.at("2 story")
    assert watch.main([*watching(folder), "--once"]) == 0
    return folder


def loaded(chapter):
    lines = chapter.said.splitlines()
    return [Path(line.rstrip(".")).name for line in lines if "Loading the checkpoint from" in line]


def test_killed_ranks_come_back_from_the_last_complete_checkpoint_and_leave_on_a_signal_to_one(
    story,
):
    chapter = story.chapters[0]
    assert loaded(chapter) == ["step-1"]  # of 2 only shards were written
    assert chapter.status == CONTINUE  # where torchrun's own is 0: it has seen all ranks end well
    assert (
        "leaving after step 5 (a signal to another rank): saved. The same command continues"
        in chapter.said
    )
    assert chapter.found == {2, 4, 5}  # the milestones, and beside them the latest two


def test_a_damaged_checkpoint_is_skipped_and_ranks_do_not_outlive_torchrun(story):
    chapter = story.chapters[1]
    assert "step-5 is damaged: its shard __1_0.distcp has" in chapter.said
    assert loaded(chapter) == ["step-4"]
    assert (story.folder / "checkpoint" / "step-5.damaged").is_dir()
    assert chapter.status not in (0, CONTINUE)
    assert [chapter.held for chapter in story.chapters] == [
        False,
        True,
        False,
    ]  # nobody was left to release it
    assert not any("is held by" in chapter.said for chapter in story.chapters)


def test_the_same_command_brings_it_to_its_end_and_no_validation_is_missing(story):
    before, after = story.chapters[1:]
    assert (after.status, loaded(after)) == (0, ["step-6"])
    assert "NO STEP IS TAKEN: the run continues from step 6, and training.steps = 6" in after.said
    assert not any("NO STEP IS TAKEN" in chapter.said for chapter in story.chapters[:2])
    assert 6 in before.found - before.validated
    assert "step 6 was saved and not validated: validating it now" in after.said
    assert after.validated == after.found == {2, 4, 5, 6}
    curves = read_curves(story.folder / "tb")
    drawn = curves["validation_metrics/loss"]
    assert sorted(drawn) == sorted(curves["grad_norm"]) == [1, 2, 3, 4, 5, 6]
    last = json.loads((story.folder / "checkpoint" / "step-6" / VALIDATION).read_text())
    assert (last["step"], last["loss"]) == (6, pytest.approx(drawn[6], rel=1e-6))


def test_it_ends_with_the_bits_of_the_undisturbed_run(story, undisturbed):
    ours, theirs = (folder / "checkpoint" / "step-6" for folder in (story.folder, undisturbed))
    record = read_run_record(ours)[1]
    assert (record["tokens"], record["skipped_steps"]) == (3072, 1)
    assert {*milestones(ours.parent)} == {*milestones(theirs.parent)} == {2, 4, 6}
    assert_same_tensors(ours, theirs)


@pytest.mark.parametrize(
    ("folder", "tag"),
    [
        ("tb", "loss_metrics/global_avg_loss"),
        ("tb/evaluation", f"perplexity/{REPOSITORY / 'README.md'}/64"),
    ],
)
def test_its_curves_are_those_of_the_undisturbed_run(story, undisturbed, folder, tag):
    """One curve, although steps ran again."""
    ours, theirs = (read_events(run / folder).Scalars(tag) for run in (story.folder, undisturbed))
    assert [(event.step, event.value) for event in ours] == [
        (event.step, event.value) for event in theirs
    ]
