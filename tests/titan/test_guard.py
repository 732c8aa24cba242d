"""Steps 2, 3, 5 and 6 are not finite on rank 1 of 2 (loss, gradient, both, loss): skipped on both ranks, counted, limited.
Steps 5 and 7 of another run are spikes of that rank's loss."""

import json
import math
import shutil

import numpy as np
import pytest
import torch

from interdomain.files.distributed_checkpoint import read_sidecar
from interdomain.titan.resume.rewind import rewind
from interdomain.titan.settings.job_config import read_job_config
from interdomain.titan.step.guard import WINDOW, Guard

from ..common import NothingReadBack
from .runs import SAVED, steps

pytestmark = pytest.mark.e2e


def test_such_a_step_changes_neither_weights_nor_state_on_any_rank_and_is_counted(runs):
    for rank in (0, 1):
        states = runs.seen("2 spoiled", rank)["states"]
        assert {step for step in range(2, 7) if states[step] != states[step - 1]} == {4}
        assert states == runs.seen("2 spoiled", 0)["states"]
    log = runs.seen("2 spoiled")["log"]
    finite = {step: (math.isfinite(log[step]["loss"]), math.isfinite(log[step]["grad_norm"])) for step in log}
    both = (True, True)
    assert finite == {1: both, 2: (False, True), 3: (True, False), 4: both, 5: (False, False), 6: (False, True)}
    assert [log[step]["skipped_steps/total"] for step in range(1, 7)] == [0, 1, 2, 2, 3, 4]
    assert [log[step]["skipped_steps/in_a_row"] for step in range(1, 7)] == [0, 1, 2, 0, 1, 2]
    assert [read_sidecar(runs.checkpoint("2 spoiled", step))[1]["skipped_steps"] for step in (3, 6)] == [2, 4]
    assert "the last 2 step(s) up to step 6 were skipped" in runs.said("2 spoiled")
    # The schedule and the data move on.
    undisturbed = runs.seen("2 text")["log"]
    for step in range(1, 7):
        for quantity in ("lr/main", "lr/ssm", "n_tokens_seen"):
            assert log[step][quantity] == undisturbed[step][quantity]
    assert runs.samples("2 spoiled") == runs.samples("2 text")


@pytest.mark.parametrize("deviations", [0.0, 3.0])
def test_the_window_against_numpy(alone, deviations):
    """400 steps of falling losses with spikes up and down, and with a step that is not finite before the window is full. A
    guard that is saved as JSON and loaded judges as one that runs through."""
    draw = np.random.default_rng(1)
    values = np.stack([3 + 4 * np.exp(-np.arange(400) / 20), np.ones(400)]) + 0.1 * draw.standard_normal((2, 400))
    rises = {20: (0, 2.0), 150: (0, 2.0), 151: (1, 5.0), 160: (0, -2.0), 300: (1, 0.6), 390: (1, -0.9)}
    for step, (row, rise) in rises.items():
        values[row, step - 1] += rise
    values[1, 30] = math.inf
    guard, window, spikes, bad = Guard(), [], [], []
    for step in range(1, 401):
        loss, norm = values[:, step - 1].astype(np.float32)
        if step in (100, 250):
            state, guard = json.loads(json.dumps(guard.state_dict())), Guard()
            guard.load_state_dict(state)
        guard.deviations = deviations
        last = np.array(window[-WINDOW:])
        judged = deviations and len(window) >= WINDOW and math.isfinite(norm)
        spike = judged and (np.array([loss, norm]) > last.mean(0) + deviations * last.std(0, ddof=1)).any()
        loss, norm = torch.tensor(loss), torch.tensor(norm)
        with NothingReadBack():
            skip, asked, mean = guard.verdict(loss, norm, False, step)
        assert (skip.item(), asked.item(), mean.item()) == (float(spike or step == 31), 0.0, loss), step
        spikes += [step] if spike else []
        bad += [step] if skip else []
        window += [] if skip else [(loss.item(), norm.item())]
    assert {150, 151, 300} <= {*spikes} if deviations else not spikes
    assert not {20, 160, 390} & {*spikes}
    assert guard.spike_steps == spikes
    assert guard.scalars() == {
        "skipped_steps/total": len(bad),
        "skipped_steps/not_finite": 1,
        "skipped_steps/spikes": len(spikes),
        "skipped_steps/in_a_row": 0,
    }


def test_a_spike_is_skipped_on_all_ranks_and_on_resume(runs):
    """The same after a resume between the window's steps and the spike: the state of every step, and what is recorded."""
    states = runs.seen("2 spiked")["states"]
    assert states == runs.seen("2 spiked", 1)["states"]
    assert [step for step in range(2, 8) if states[step] == states[step - 1]] == [5, 7]
    log, resumed = runs.seen("2 spiked")["log"], runs.seen("2 after a spike")
    assert [log[step]["skipped_steps/spikes"] for step in range(4, 8)] == [0, 1, 1, 2]
    assert log[7]["skipped_steps/not_finite"] == 0
    assert resumed["states"] == {step: states[step] for step in (4, 5, 6)}
    records = [read_sidecar(runs.checkpoint(name, 6))[1] for name in ("2 spiked", "2 after a spike")]
    assert records[0]["spike_steps"] == [5]
    for name in ("skipped_steps", "spikes", "spike_steps", "recent_losses", "recent_grad_norms"):
        assert records[1][name] == records[0][name], name


def test_after_so_many_it_ends_and_goes_back_without_their_data(runs):
    """From the last milestone, the same in one start as in two: the command, run again, continues."""
    at, states = runs.at("2 spiked"), {}
    assert "error: 2 spikes of the loss or the gradient norm were skipped, at steps 5, 7 (" in runs.said("2 spiked")
    for name, *lengths in (("2 rewound", 5), ("2 rewound twice", 4, 5)):
        shutil.copytree(at, runs.folder / name)
        for n in lengths:
            start = f"{name} to {n}"
            runs.add(start, **SAVED | steps(n), window=3, training__spike_deviations=50.0, probes=["states"])
            args = runs.jobs[start]["args"]
            args[args.index(str(runs.folder / start))] = str(runs.folder / name)
            back, words = rewind(read_job_config(args), dry_run=False)
            assert back == ["--checkpoint.load_step", "3", "--data.leave_out", "5", "7"]
            assert ("chosen by an earlier start" in words) == (n > lengths[0])
            args += back
            states |= {start: runs.seen(start)["states"]}
        assert (runs.folder / name / "checkpoint" / "step-6.superseded").is_dir()
    assert list(states["2 rewound to 5"]) == [4, 5]
    assert list(states["2 rewound twice to 5"]) == [5]
    assert states["2 rewound to 5"][5] == states["2 rewound twice to 5"][5]
    spiked = runs.samples("2 spiked")
    assert runs.samples("2 rewound to 5") == [spiked[4 - 1], spiked[6 - 1]]


def test_repeated_it_ends_the_run(runs):
    """With the optimizer that decides on the host."""
    seen = runs.seen("2 given up")
    assert list(seen["log"]) == [1, 2, 3, 4]
    assert seen["states"][4] == seen["states"][2] != seen["states"][1]
    assert "error: the last 2 steps up to step 4 were skipped: loss nan, gradient norm " in runs.said("2 given up")


def test_weights_that_are_not_finite_are_never_saved(runs):
    assert "error: the weights are not finite, so " in runs.said("2 not finite")
    assert not [*(runs.at("2 not finite") / "checkpoint").glob("step-*")]
