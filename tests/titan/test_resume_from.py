# ruff: noqa: F811 (fixtures are imported)
"""The same command, started again: what it asks for once happens once (going back to a step, leaving out a part)."""

import json

from .conftest import refusal
from .small_run import DAMAGE, folder, names, new, record  # noqa: F401


def start(new, step=-1, save=(), **settings):
    """A start of the command that saves these steps and ends. Returns (the step it began at, the loader's state there)."""
    run = new(**settings)
    run.manager.load(step)
    began = run.trainer.step, run.others["dataloader"].value
    run.save(*save).manager.close()
    return began


DATA = {"exclude_from_loading": ["dataloader"]}
OTHER_DATA = {"run": {"data_fingerprint": "b"}}


def test_data_that_was_begun_anew_goes_on(new, folder, caplog):
    assert [start(new, **DATA), start(new, save=[4], **DATA)] == [(3, 0), (3, 0)]
    assert record(folder, 4)["started_without"] == ["dataloader"]
    assert start(new, save=[5], **DATA) == (4, 4)
    assert "the run began without it before step-4" in caplog.text
    assert start(new, **DATA, **OTHER_DATA) == (5, 0)
    assert start(new, step=5, **DATA) == (5, 0)
    assert start(new, **DATA, load_only=True) == (5, 0)  # nothing follows
    assert start(new, save=[6]) == (5, 5)  # without it
    assert start(new, **DATA) == (6, 0)


def test_a_run_does_not_count_from_0_above_its_own_checkpoints(new, folder, capsys):
    error = refusal(capsys, start, new, exclude_from_loading=["train_state"])
    assert f"checkpoint.initial_load_path = {folder / 'step-3'}" in error
    assert start(new, exclude_from_loading=["train_state"], load_only=True) == (0, 3)


def test_a_run_that_went_back_goes_on_from_what_it_saved_since(new, folder, caplog):
    assert start(new, step=1, load_only=True) == (1, 1)
    assert names(folder) == ["step-1", "step-2", "step-3"]  # a run that saves nothing renames nothing
    assert start(new, step=1) == (1, 1)
    assert names(folder) == ["step-1", "step-2.superseded", "step-3.superseded"]
    assert "renamed step-2, step-3 to step-N.superseded" in caplog.text
    assert start(new, step=1, save=[2, 3], **DATA) == (1, 0)  # ended before a save: the same again
    assert record(folder, 3)["branched_from"] == 1
    assert start(new, step=1, save=[4], **DATA) == (3, 3)
    assert f"continues from {folder / 'step-3'}, which it saved since" in caplog.text
    assert start(new, save=[5]) == (4, 4)  # without naming it, the same course
    assert start(new, step=1) == (5, 5)
    assert start(new, step=4, save=[5]) == (4, 4)  # to another step
    assert start(new, step=1, save=[2], keep_latest_k=2) == (1, 1)  # to the first, for the run's last course is another
    DAMAGE["shard altered"][0](folder / "step-2")
    assert start(new, step=1) == (1, 1)  # all of that course is damaged: back to where it began
    assert {"step-2.damaged", "step-3.superseded-2", "step-5.superseded-2"} <= {*names(folder)}


def test_steps_of_another_number_of_tokens_are_counted_on(new, folder, caplog, capsys):
    twice = {"tokens_per_step": 1024}
    run = new(run=twice | {"planned_steps": 5})
    run.load()
    assert run.trainer.metrics_processor.resumed == run.manager.resumed == (3, 3 * 512)
    assert "of 512 tokens each, and this run's are of 1024" in caplog.text
    run.save(4)
    assert record(folder, 4)["tokens"] == 3 * 512 + 1024
    error = refusal(capsys, new(run={"planned_steps": 4}).load)  # half the batch: a run that would be over at once
    assert "nothing would be trained" in error
    assert new(run=twice | {"planned_steps": 4}).load() == 4  # finished, and started again by a scheduler
    assert "nothing is left to train: 4 of 4 steps are done" in caplog.text


def test_a_missed_validation_is_tried_once(new, folder):
    """Else no start would get beyond it."""
    assert [new().manager.claim_validation(3) for _ in range(2)] == [True, False]
    new().manager.note_validation(2, 2.0, 7.39)
    noted = json.loads((folder / "step-2" / "validation.json").read_text())
    assert noted == {"step": 2, "loss": 2.0, "perplexity": 7.39}
    assert [new().manager.claim_validation(step) for step in (2, 1, 7)] == [False, True, False]  # 7: there is none
    assert not new(load_only=True).manager.claim_validation(1)
