"""The life of a run of two ranks: kills, a step that is not finite, milestones, and a watcher beside it.

Real processes, real signals (disturbed.py). It validates after every step, so that it is also killed right before a
validation. It ends with the same bits and curves as the run that nobody disturbed, and with no validation missing.
"""

import json
import os
import re
from types import SimpleNamespace
from unittest import mock

import pytest

from interdomain.checkpoint.step_folder import (
    VALIDATION,
    finished_steps,
    milestones,
    read_run_record,
)
from interdomain.titan.resume.lock import LOCK_NAME
from interdomain.tools import watch
from interdomain.tools._curves import read_curves, read_events
from interdomain.tools._start.torchrun import CONTINUE

from ..common import REPOSITORY
from ..ranks import forks
from .runs import TABLES, assert_same_tensors, flags, run_disturbed, settings_of

pytestmark = pytest.mark.e2e

README = str(REPOSITORY / "README.md")
# What the watcher computes of each milestone.
EVALUATION = ["--perplexity", README, "--packed", "--lengths", "64", "--limit", "2"]
SETTINGS = settings_of({"like": ["story"]}, TABLES["groups"])


def watch_beside(run):
    with mock.patch.object(watch, "POLL_SECONDS", 0.2):
        assert watch.main([str(run), *EVALUATION]) == 0


def start(folder, corpus, *starts):
    """Starts torchrun. Returns its exit status, its output, and what is in the run's folder after it."""
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"starts": starts, "spoil": {"5": "gradient"}}))
    run = folder / "run"
    arguments = flags(corpus, run, **SETTINGS)
    status, said = run_disturbed(plan, len(starts) - 1, *arguments)
    saved = finished_steps(run / "checkpoint")
    return SimpleNamespace(
        status=status,
        said=said,
        loaded=re.findall("Loading the checkpoint from .*(step-.)", said),
        has_lock=(run / LOCK_NAME).exists(),
        saved=set(saved),
        validated={step for step, path in saved.items() if (path / VALIDATION).exists()},
    )


@pytest.fixture(scope="module")
def story(tmp_path_factory, corpus):
    """Three starts of one run."""
    folder = tmp_path_factory.mktemp("kills")
    run = folder / "run"
    run.mkdir()
    watcher = forks().Process(target=watch_beside, args=(run,))
    watcher.start()

    # One torchrun, which restarts the ranks after the kill. The second of them leaves on a signal.
    kill = ["finish", 2, 0, "SIGKILL", "rank"]
    leave = ["step", 4, 1, "SIGTERM", "rank"]
    killed_ranks = start(folder, corpus, kill, leave)
    # The newest checkpoint is damaged, and torchrun is killed after the last step's save.
    shard = run / "checkpoint" / "step-5" / "__1_0.distcp"
    os.truncate(shard, shard.stat().st_size - 1)
    killed_torchrun = start(folder, corpus, ["validate", 6, 0, "SIGKILL", "agent"])
    last = start(folder, corpus, None)

    watcher.join()
    assert watcher.exitcode == 0
    return SimpleNamespace(
        folder=run, killed_ranks=killed_ranks, killed_torchrun=killed_torchrun, last=last
    )


def test_killed_ranks_come_back_and_leave_on_a_signal_to_one_of_them(story):
    """They come back from the last complete checkpoint: of step 2 only shards were written."""
    first = story.killed_ranks
    assert first.loaded == ["step-1"]
    assert first.status == CONTINUE  # torchrun's own status is 0: it has seen all ranks end well
    assert "leaving after step 5 (a signal to another rank): saved" in first.said
    assert first.saved == {2, 4, 5}  # the milestones, and beside them the latest two
    assert not first.has_lock


def test_a_damaged_checkpoint_is_skipped_and_ranks_do_not_outlive_torchrun(story):
    second = story.killed_torchrun
    assert "step-5 is damaged: its shard __1_0.distcp has" in second.said
    assert second.loaded[-1] == "step-4"
    assert (story.folder / "checkpoint" / "step-5.damaged").is_dir()
    assert second.status not in (0, CONTINUE)
    # Nobody was left to release the lock, and the next start does not wait for it.
    assert second.has_lock
    assert "is held by" not in story.last.said
    assert not story.last.has_lock


def test_the_same_command_brings_it_to_its_end_and_no_validation_is_missing(story):
    assert 6 in story.killed_torchrun.saved - story.killed_torchrun.validated
    last = story.last
    assert last.status == 0
    assert last.loaded[0] == "step-6"
    assert "NO STEP IS TAKEN: the run continues from step 6, and training.steps = 6" in last.said
    assert "step 6 was saved and not validated: validating it now" in last.said
    assert last.validated == last.saved == {2, 4, 5, 6}
    losses = read_curves(story.folder / "tb")["validation_metrics/loss"]
    assert list(losses) == [1, 2, 3, 4, 5, 6]
    result = json.loads((story.folder / "checkpoint" / "step-6" / VALIDATION).read_text())
    assert result["loss"] == pytest.approx(losses[6], rel=1e-6)


def test_it_ends_with_the_bits_and_curves_of_the_undisturbed_run(story, runs):
    """Each curve is one, although steps ran again. The milestones of the other run are evaluated after its end."""
    undisturbed = runs.at("2 story")
    assert watch.main([str(undisturbed), *EVALUATION, "--once"]) == 0
    disturbed = story.folder / "checkpoint"
    reference = undisturbed / "checkpoint"
    assert_same_tensors(disturbed / "step-6", reference / "step-6")
    record = read_run_record(disturbed / "step-6")[1]
    assert record["tokens"] == 3072
    assert record["skipped_steps"] == 1
    assert set(milestones(disturbed)) == set(milestones(reference)) == {2, 4, 6}

    perplexity = f"perplexity/{README}/64"
    for events, tag in [("tb", "loss_metrics/global_avg_loss"), ("tb/evaluation", perplexity)]:
        curve = read_events(story.folder / events).Scalars(tag)
        expected = read_events(undisturbed / events).Scalars(tag)
        assert [point.step for point in curve] == [point.step for point in expected]
        assert [point.value for point in curve] == [point.value for point in expected]
