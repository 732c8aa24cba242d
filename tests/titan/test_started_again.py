# ruff: noqa: F811 (fixtures are imported)
"""What a command asks for once happens once, however often it is started again; real saves of a small module."""

import json
import logging
import shutil
from types import SimpleNamespace

import pytest

from .conftest import refusal
from .test_damaged_checkpoints import DAMAGE, folder, names, new  # noqa: F401, fixtures

DATA = {"exclude_from_loading": ["dataloader"]}


def start(new, step=-1, save=(), data="a", **settings):
    """A start of the command that saves these steps and ends. Returns (the step it began at, the loader's state there)."""
    run = new(**settings)
    run.manager.record["run"]["data_fingerprint"] = data
    run.manager.load(step)
    began = run.trainer.step, run.others["dataloader"].value
    for later in save:
        run.save(later)
    run.manager.close()
    return began


def record(folder, step):
    return json.loads((folder / f"step-{step}" / "interdomain.json").read_text())


def test_data_that_was_begun_anew_goes_on(new, folder, caplog):
    assert start(new, save=[4], **DATA) == (3, 0)
    assert record(folder, 4)["started_without"] == ["dataloader"]
    assert start(new, save=[5], **DATA) == (4, 4)
    assert "checkpoint.exclude_from_loading = dataloader: the run began that anew before step 4 already" in caplog.text
    assert start(new, **DATA) == (5, 5)


def test_it_is_begun_anew_where_nothing_was_saved_since(new, folder):
    assert [start(new, **DATA), start(new, **DATA)] == [(3, 0), (3, 0)]


def test_it_is_begun_anew_in_other_data_or_by_name_or_by_a_later_command(new, folder):
    start(new, save=[4], **DATA)
    assert start(new, **DATA, data="b") == (4, 0)
    assert start(new, step=4, **DATA) == (4, 0)
    assert start(new, **DATA, load_only=True) == (4, 0)  # of which nothing follows
    assert start(new, save=[5]) == (4, 4)  # without it
    assert start(new, **DATA) == (5, 0)


def test_each_part_for_itself(new, folder):
    start(new, save=[4], **DATA)
    run = new(exclude_from_loading=["dataloader", "optimizer"])
    run.manager.record["run"]["data_fingerprint"] = "a"
    run.manager.load()
    assert (run.others["dataloader"].value, run.others["optimizers"].value) == (4, 0)


def test_a_run_that_began_under_the_flag_goes_on(new):
    assert start(new, save=[1], **DATA) == (0, 0)
    assert start(new, **DATA) == (1, 1)


def test_a_run_does_not_count_from_0_above_its_own_checkpoints(new, folder, capsys):
    error = refusal(capsys, start, new, exclude_from_loading=["train_state"])
    assert "every restart would begin at step 3 anew" in error
    assert f"checkpoint.initial_load_path = {folder / 'step-3'}" in error
    assert start(new, exclude_from_loading=["train_state"], load_only=True) == (0, 3)


def test_a_run_that_went_back_goes_on_from_what_it_saved_since(new, folder, caplog):
    assert start(new, step=1) == (1, 1)
    assert names(folder) == ["step-1", "step-2.superseded", "step-3.superseded"]
    assert "went back to step 1: the checkpoints after it" in caplog.text
    assert "(step-2, step-3) are renamed to step-N.superseded. Nothing of them is lost" in caplog.text
    assert start(new, step=1, save=[2, 3]) == (1, 1)  # ended before a save: the same again
    assert record(folder, 3)["branched_from"] == 1
    assert start(new, step=1, save=[4]) == (3, 3)
    assert f"it continues from {folder / 'step-3'}, which it has saved since" in caplog.text
    assert "To go back to it once more, move step-2, step-3 away first." in caplog.text
    assert start(new, save=[5]) == (4, 4)  # without naming it, the same course
    assert start(new, step=1) == (5, 5)


def test_retention_may_remove_the_step_itself(new, folder, caplog):
    start(new, step=1, save=[2, 3], keep_latest_k=2)
    assert names(folder) == ["step-2", "step-2.superseded", "step-3", "step-3.superseded"]
    caplog.clear()
    assert start(new, step=1) == (3, 3)
    assert "which it has saved since." in caplog.text
    assert "once more" not in caplog.text  # there is nothing to go back to


def test_back_again_further_and_once_more_on_purpose(new, folder):
    start(new, step=2, save=[3, 4])
    assert start(new, step=3, save=[4]) == (3, 3)  # to another step
    assert start(new, step=3, save=[5]) == (4, 4)
    assert start(new, step=2, save=[3]) == (2, 2)  # to the first, for the run's last course is another
    assert {"step-4.superseded", "step-4.superseded-2", "step-5.superseded"} <= {*names(folder)}
    shutil.rmtree(folder / "step-3")
    assert start(new, step=2) == (2, 2)


@pytest.mark.parametrize("kind", ["shard short", "shard altered"])
def test_a_damaged_one_is_skipped_there_too(new, folder, kind):
    start(new, step=1, save=[2, 3])
    DAMAGE[kind][0](folder / "step-3")
    assert start(new, step=1) == (2, 2)
    assert "step-3.damaged" in names(folder)
    DAMAGE[kind][0](folder / "step-2")
    assert start(new, step=1) == (1, 1)  # all of that course: back to where it began
    assert "step-2.damaged" in names(folder)


def test_going_back_and_leaving_out_happen_together(new, folder):
    assert start(new, step=1, save=[2], **DATA) == (1, 0)
    assert start(new, step=1, save=[3], **DATA) == (2, 2)
    assert start(new, step=2, **DATA) == (2, 0)


def test_a_run_that_saves_nothing_loads_what_it_was_told_and_renames_nothing(new, folder, caplog):
    caplog.set_level(logging.WARNING)
    start(new, step=1, save=[2])
    before = names(folder)
    assert start(new, step=1, load_only=True) == (1, 1)
    assert names(folder) == before


def of_tokens(run, per_step, planned):
    run.manager.record["run"] |= {"tokens_per_step": per_step, "planned_steps": planned}
    return run


def test_steps_of_another_number_of_tokens_are_counted_on(new, folder, caplog):
    run = of_tokens(new(), 1024, planned=5)
    run.load()
    assert run.trainer.metrics_processor.resumed == run.manager.resumed == (3, 3 * 512)
    assert "of 512 tokens, this run's are of 1024" in caplog.text
    assert f"ends with step 5, after {3 * 512 + 2 * 1024} tokens in all" in caplog.text
    run.save(4)
    assert record(folder, 4)["tokens"] == 3 * 512 + 1024


def test_a_run_that_would_be_over_at_once(new, folder, caplog, capsys):
    """By tokens, with twice the batch: what is planned are half as many steps, of which as many are done."""
    error = refusal(capsys, of_tokens(new(), 1024, planned=3).load)
    assert "of step 3, of 512 tokens each, and this run of 3 steps of 1,024 tokens" in error
    assert "nothing is left" not in caplog.text
    assert of_tokens(new(), 512, planned=3).load() == 3  # finished: started again by a scheduler
    assert "nothing is left to train: the checkpoint is of step 3, and the run of 3 steps" in caplog.text


def test_a_missed_validation_is_tried_once(new, folder):
    """Else no start would get beyond it."""
    claims = []
    for _ in range(2):
        run = new()
        run.manager.load()
        claims.append(run.manager.claim_validation(3))
        run.manager.close()
    assert claims == [True, False]
    run.manager.note_validation(2, 2.0, 7.39)
    assert json.loads((folder / "step-2" / "validation.json").read_text()) == {
        "step": 2,
        "loss": 2.0,
        "perplexity": 7.39,
    }
    assert [new().manager.claim_validation(step) for step in (2, 1, 7)] == [False, True, False]  # 7: there is none
    assert not new(load_only=True).manager.claim_validation(1)


def test_a_run_that_lost_its_folder_notes_nothing(new, folder):
    run = new()
    run.manager.lock = SimpleNamespace(lost="another run's", release=lambda: None)
    run.manager.note_validation(3, 2.0, 7.39)
    assert not (folder / "step-3" / "validation.json").exists()
