"""One run of two ranks, disturbed seven times and never lost: real processes, real signals (disturbed.py).

It validates after every step, so that it also leaves right after a validation and is killed right before one, and ends with
the same bits as the run that nobody disturbed, and with no validation missing.
"""

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from interdomain.model.distributed_checkpoint import VALIDATION, read_sidecar, read_tensors, tensor_index
from interdomain.titan.lock import NAME
from interdomain.tools import _torchrun
from interdomain.tools._curves import read_curves
from interdomain.tools._torchrun import CONTINUE

from .conftest import HERE, TIMEOUT, environment, flags, torchrun_command

pytestmark = pytest.mark.e2e

EVERY = ["--checkpoint.interval", "1"]
STARTS = [
    # One torchrun, which restarts the ranks three times.
    [
        {"flags": [*EVERY, "--checkpoint.async_mode", "async"], "at": ["finish", 2], "rank": 0, "signal": "SIGKILL"},
        {"flags": EVERY, "at": ["write", 3], "rank": 1, "signal": "SIGKILL"},
        {"at": ["validate", 3], "rank": 0, "signal": "SIGKILL"},
        {"at": ["step", 4], "rank": 1, "signal": "SIGTERM", "times": 2},
    ],
    # What a scheduler sends before the time limit, more than once; torchrun gets SIGTERM for it, once.
    [{"at": ["step", 4], "rank": 0, "signal": "SIGUSR1", "times": 3, "to": "launcher"}],
    # After the save of the last step.
    [{"at": ["validate", 6], "rank": 0, "signal": "SIGKILL", "to": "agent"}],
    [{}],
]


@pytest.fixture(scope="module")
def story(tmp_path_factory, corpus):
    """What each start of torchrun did: its exit status, what it said, and what lay in the checkpoint folder after it."""
    folder = tmp_path_factory.mktemp("kills")
    checkpoints = folder / "run" / "checkpoint"
    chapters = []
    for i, plan in enumerate(STARTS):
        if i == 1:  # the newest was complete when the run left
            shard = checkpoints / "step-5" / "__1_0.distcp"
            os.truncate(shard, shard.stat().st_size - 1)
        (folder / f"plan{i}.json").write_text(json.dumps(plan))
        log = folder / f"log{i}.txt"
        settings = {"training__local_batch_size": 4, "checkpoint__enable": True, "metrics__enable_tensorboard": True}
        settings |= {"validation__enable": True, "validation__freq": 1, "validation__tokens": 128}
        program = [f"--max-restarts={len(plan) - 1}", "--local-ranks-filter=0", HERE / "disturbed.py"]
        program += [folder / f"plan{i}.json", *flags(corpus, folder / "run", **settings)]
        to_log = ["timeout", "--foreground", "-s", "KILL", TIMEOUT, "sh", "-c", 'exec "$@" > "$0" 2>&1', log]
        command = [*map(str, to_log), *torchrun_command(2, *program, forked=True)]
        status = _torchrun.run(command, _torchrun.ELASTIC | environment() | {"LAUNCHER": str(os.getpid())})
        orphans = remaining(folder / f"plan{i}.json")
        found = {path.name for path in checkpoints.iterdir() if (path / ".metadata").is_file()}
        measured = {path.parent.name for path in checkpoints.glob(f"*/{VALIDATION}")}
        seen = {"found": found, "measured": measured, "held": (folder / "run" / NAME).exists()}
        chapters.append(SimpleNamespace(status=status, said=log.read_text(), orphans=orphans, **seen))
    return SimpleNamespace(chapters=chapters, checkpoints=checkpoints)


def remaining(word):
    """Processes with this word on their command line, after the moment that a signal takes."""
    for _ in range(50):
        mine = [p.parent.name for p in Path("/proc").glob("[0-9]*/cmdline") if str(word).encode() in contents(p)]
        if not mine:
            break
        time.sleep(0.1)
    for pid in mine:
        os.kill(int(pid), signal.SIGKILL)
    return mine


def contents(path):
    try:
        return path.read_bytes()
    except OSError:  # it is gone
        return b""


def loaded(said):
    return [Path(line.rstrip(".")).name for line in said.splitlines() if "Loading the checkpoint from" in line]


def test_killed_ranks_come_back_from_the_last_complete_checkpoint_and_leave_on_a_signal_to_one(story):
    chapter = story.chapters[0]
    assert loaded(chapter.said) == ["step-1", "step-2", "step-3"]  # of 2, then of 3, only shards were written at first
    for step in (2, 3):
        assert f"step-{step} has no .metadata: the save of it was cut short." in chapter.said
    assert "step 3 was saved and not validated: validating it now" in chapter.said
    assert chapter.status == CONTINUE  # where torchrun's own is 0: it has seen all ranks end well
    assert "ChildFailedError" not in chapter.said
    assert "leaving after step 5 (a signal to another rank): saved. The same command continues" in chapter.said
    assert chapter.found == {"step-1", "step-2", "step-3", "step-5"}


def test_a_damaged_checkpoint_is_skipped_and_a_signal_to_the_launcher_makes_all_save_and_leave(story):
    chapter, killed = story.chapters[1:3]
    assert "step-5 is damaged: its shard __1_0.distcp has" in chapter.said
    assert loaded(chapter.said) == ["step-3"]
    assert "step-5.damaged" in chapter.found
    assert chapter.status == CONTINUE
    # torchrun tells the ranks in step 4, each at its own moment.
    left = next(step for step in (4, 5) if f"leaving after step {step} (SIGTERM): saved" in chapter.said)
    assert f"step-{left}" in chapter.found
    assert loaded(killed.said) == [f"step-{left}"]


def test_ranks_do_not_outlive_torchrun_and_the_folder_is_never_waited_for(story):
    assert story.chapters[2].status not in (0, CONTINUE)
    assert [c.orphans for c in story.chapters] == [[]] * 4
    assert [c.held for c in story.chapters] == [False, False, True, False]  # the third: nobody was left to release it
    assert not any("is held by" in c.said for c in story.chapters)


def test_the_same_command_brings_it_to_its_end_and_no_validation_is_missing(story):
    before, after = story.chapters[2:]
    assert (after.status, loaded(after.said)) == (0, ["step-6"])
    assert "step-6" in before.found - before.measured
    assert "step 6 was saved and not validated: validating it now" in after.said
    assert after.measured == after.found - {"step-5.damaged"}
    curves = read_curves(story.checkpoints.parent / "tb")
    drawn = curves["validation_metrics/loss"]
    assert sorted(drawn) == sorted(curves["grad_norm"]) == [1, 2, 3, 4, 5, 6]
    last = json.loads((story.checkpoints / "step-6" / VALIDATION).read_text())
    assert (last["step"], last["loss"]) == (6, pytest.approx(drawn[6], rel=1e-6))


def test_it_ends_with_the_bits_of_the_undisturbed_run(story, two):
    ours, reference = story.checkpoints / "step-6", two.folder / "interdomain" / "checkpoint" / "step-6"
    index = tensor_index(reference)
    assert tensor_index(ours).keys() == index.keys()
    record = read_sidecar(ours)[1]
    assert (record["tokens"], record["skipped_steps"]) == (3072, 0)
    ours, reference = (read_tensors(folder, list(index), index) for folder in (ours, reference))
    assert not [name for name in index if not torch.equal(ours[name], reference[name])]
