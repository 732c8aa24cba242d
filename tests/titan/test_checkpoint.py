# ruff: noqa: F811 (fixtures are imported)
"""Saving, loading, and damaged checkpoints: real saves of a small module.

A damaged or half-written checkpoint is never resumed from and never costs an older one.
"""

import errno
import os
import shutil
import subprocess
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from interdomain.checkpoint.index import find_damage, read_index
from interdomain.checkpoint.step_folder import finished_steps, half_copies, milestones
from interdomain.titan.resume.lock import RunLock
from interdomain.titan.resume.resume_from import check_resume_of_torchtitan

from ..common import REPOSITORY, TIMEOUT, bytes_in
from ..docs.pages import blocks
from .conftest import refusal
from .runs import parse
from .small_run import (  # noqa: F401
    Run,
    alter_shard,
    cut_index,
    cut_record,
    cut_shard,
    folder,
    names,
    new,
    record,
    remove_shard,
    write_record,
)
from .test_lock import write_lock

DAMAGE = {
    cut_index: ".metadata is damaged",
    remove_shard: "its shard __0_0.distcp is missing",
    cut_shard: "its shard __0_0.distcp has",
    alter_shard: "are not as they were saved",
    cut_record: "interdomain.json is damaged",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(new, folder, caplog, damage):
    damage(folder / "step-3")
    assert new().load() == 2
    assert DAMAGE[damage] in caplog.text
    assert caplog.text.count("SKIPPED") == 1
    assert names(folder) == ["step-1", "step-2", "step-3.damaged"]


def test_a_checkpoint_of_a_newer_pytorch_is_refused_and_stays(new, folder, capsys):
    write_record(folder / "step-3", versions={"torch": "99.0.1+cu999"})
    (folder / "step-3" / ".metadata").write_bytes(b"of another kind")
    error = refusal(capsys, new().load)
    assert f"was written by PyTorch 99.0.1, and PyTorch {torch.__version__} cannot read it" in error
    assert names(folder) == ["step-1", "step-2", "step-3"]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(new, folder, capsys):
    cut_shard(folder / "step-3")
    alter_shard(folder / "step-2")
    assert new().load() == 1

    # A damaged checkpoint does not overwrite one that was set aside before.
    new().save(2)
    cut_shard(folder / "step-2")
    assert new().load() == 1
    damaged = ["step-2.damaged", "step-2.damaged-2", "step-3.damaged"]
    assert names(folder) == ["step-1", *damaged]

    # A second try does not start over, either.
    remove_shard(folder / "step-1")
    for _ in range(2):
        assert "no complete checkpoint is left" in refusal(capsys, new().load)


def test_one_of_five_ranks_finds_the_damage(folder):
    """The ranks share the reading: each checks its own part, and no part is left out."""
    step = folder / "step-3"
    alter_shard(step)
    index = read_index(step)
    found = [find_damage(step, index, rank, 5) for rank in range(5)]
    assert found.count(None) == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        # Both models have the very same tensors.
        ("--mixer.condition interdomain-norope", ", interdomain there and debug with "),
        ("--training.global_batch_size 16", "set training.global_batch_size = 8)"),
        ("--data.reset_state_at_documents", "_documents = False, and here it is True"),
    ],
)
def test_another_run_is_refused_before_its_tensors_are_read(new, folder, capsys, given, message):
    error = refusal(capsys, new(given).load)
    assert str(folder / "step-3") in error
    assert message in error


def test_a_longer_context_is_the_same_model(new, folder):
    longer = "--training.seq_len 128 --training.global_batch_size 4 --training.local_batch_size 4"
    assert new(longer).load() == 3


def test_two_runs_that_share_a_checkpoint_folder_are_told_apart(alone, tmp_path, capsys):
    """Their settings are the same. The folder in the record tells whose a checkpoint is."""
    first = tmp_path / "first"
    second = tmp_path / "second"
    shared = tmp_path / "shared"
    given = f"--checkpoint.folder {shared}"
    Run(first, given).save(4, 5)
    cut_shard(shared / "step-4")
    before = bytes_in(shared)
    assert f"another run, whose folder is {first}" in refusal(capsys, Run(second, given).load)
    assert bytes_in(shared) == before  # a damaged checkpoint of the other run is not renamed
    assert Run(first, given).load() == 5

    # A run whose folder was renamed continues, if the old name is a link to the new one.
    second.mkdir()
    first.symlink_to(second)
    assert Run(second, given).load() == 5


def test_a_resume_lists_every_setting_that_changed(new, folder, caplog):
    """Paths, logging, saving and the ranks' batch are not listed. Other data is recorded, too."""
    new(train="text", validation="old").save(4)
    given = """
        --metrics.log_freq 7 --training.local_batch_size 4 --data.corpus moved
        --optimizer.lr 9e-3 --training.precision bf16 --validation.tokens 2000
    """
    run = new(given, train="new", validation="old")
    assert run.load() == 4
    assert run.manager.record["run"]["earlier_data"] == [{"ends": 4}]
    messages = [entry.getMessage() for entry in caplog.records]
    (warning,) = [message for message in messages if "saved with other settings" in message]
    assert warning.splitlines()[1:] == [
        "  optimizer.lr: 0.003 -> 0.009",
        "  training.precision: float32 -> bf16",
        "  validation.tokens: 1000 -> 2000",
        "  fingerprint of the train text: text -> new",
    ]


def test_a_record_of_an_older_version_is_read(new, folder, caplog):
    """Settings and counts that no longer exist are passed over."""
    configuration = record(folder, 3)["configuration"]
    configuration["training"]["spike_deviations"] = 6.0
    write_record(folder / "step-3", configuration=configuration, skipped_steps=2, spike_steps=[2])
    run = new()
    assert run.load() == 3
    assert run.optimizers.step_guard.state_dict()["skipped_steps"] == 2
    assert "settings" not in caplog.text


@pytest.fixture
def from_step_2(folder, tmp_path):
    """Flags of a run that starts from another's checkpoint. Its own folder holds only the remains of a save."""
    (tmp_path / "other" / "step-5").mkdir(parents=True)
    initial = f"--checkpoint.initial_load_path {folder}/step-2"
    return f"--checkpoint.folder {tmp_path}/other {initial}"


def test_a_run_starts_from_the_weights_of_an_initial_checkpoint(new, from_step_2):
    given = f"{from_step_2} --training.global_batch_size 16"
    run = new(given)
    assert run.manager.load()
    assert run.model.weight.unique().item() == 2
    assert run.trainer.step == 0
    run.save(1)
    resumed = new(given)
    assert resumed.load() == 1
    assert resumed.manager.record["run"]["started_from"]["step"] == 2


def test_a_run_loads_all_of_an_initial_checkpoint_but_what_is_excluded(new, from_step_2):
    excluded = "--checkpoint.exclude_from_loading dataloader"
    given = f"{from_step_2} --checkpoint.no-initial_load_model_only {excluded}"
    run = new(given)
    assert run.manager.load()
    assert run.trainer.step == run.optimizers.step == 2
    assert run.dataloader.step == 0
    assert "started_from" not in run.manager.record["run"]  # the same run continues

    # From its own checkpoint it loads all parts.
    run.save(3)
    assert new(given).load() == 3


def test_no_code_in_a_checkpoint_runs(new, folder, tmp_path):
    class Planted:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "planted"),)

    run = new()

    def planted_state():
        return {"step": Planted()}

    run.dataloader.state_dict = planted_state
    run.save(4)
    with pytest.raises(BaseException, match="mkdir"):
        new().load()
    assert not (tmp_path / "planted").exists()


# Half a copy


def copy_visible(source, target):
    """Copies what `cp source/* target/` copies: no hidden file."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(".*"))


def test_half_a_copy_stops_a_start_from_zero(new, folder, tmp_path, capsys):
    """Beside a complete checkpoint a half copy is passed over, and nothing of it is lost."""
    moved = tmp_path / "moved"
    copy_visible(folder / "step-3", moved / "step-3")
    (moved / "step-3" / "KEEP").touch()
    half = bytes_in(moved / "step-3")
    given = f"--checkpoint.folder {moved} --checkpoint.keep_latest_k 2"
    for initial in ("", f" --checkpoint.initial_load_path {folder}/step-1"):
        error = refusal(capsys, new(given + initial).load)
        assert f"{moved} holds step-3 without .metadata" in error
    assert bytes_in(moved / "step-3") == half

    shutil.copytree(folder / "step-1", moved / "step-1")
    run = new(given)
    assert run.manager.load()
    run.save(2, 3, 4, 5)
    # The new checkpoint of step 3 has the mark KEEP of the one that was set aside.
    assert sorted(finished_steps(moved)) == [3, 4, 5]
    assert bytes_in(moved / "step-3.superseded") == half


def test_an_interrupted_first_save_stops_nothing(new, tmp_path, monkeypatch):
    """A later save of the same step uses its folder again."""
    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriter, "finish", mock.Mock(side_effect=ZeroDivisionError))
        with pytest.raises(CheckpointException):
            new().save(4)
    folder = tmp_path / "run" / "checkpoint"
    assert list(folder.glob("step-4/*.distcp"))
    assert half_copies(folder) == []
    run = new()
    assert run.load() is None
    run.save(4)
    assert names(folder) == ["step-4"]
    assert new().load() == 4


def test_the_mark_of_an_unfinished_save_is_removed_last(new, folder, monkeypatch):
    """After a kill in a removal, the next start knows by the mark that the run itself left the rest."""
    step = folder / "step-3"
    (step / ".metadata").rename(step / ".incomplete")
    unlink = mock.Mock(wraps=os.unlink)
    monkeypatch.setattr(os, "unlink", unlink)
    files = names(step)
    new().save(3)
    removed = [os.path.basename(call.args[0]) for call in unlink.call_args_list]
    last = removed.index(".incomplete")
    assert sorted(removed[: last + 1]) == files


# Going back


def test_the_step_that_was_asked_for_is_not_replaced(new, folder, capsys):
    alter_shard(folder / "step-2")
    assert "are not as they were saved" in refusal(capsys, new().load, 2)
    assert "There are: 1, 2, 3" in refusal(capsys, new().load, 4)
    assert names(folder) == ["step-1", "step-2", "step-3"]


def test_a_run_that_went_back_continues_from_what_it_saved_since(new, folder, caplog):
    def start(step, *saved, given=""):
        """Starts with checkpoint.load_step, saves, and returns the step that the start loaded."""
        run = new(given)
        loaded = run.load(step)
        run.save(*saved)
        return loaded

    assert start(1) == 1
    assert names(folder) == ["step-1", "step-2.superseded", "step-3.superseded"]
    assert start(1, 2, 3) == 1  # the start before saved nothing: this one goes back, too
    assert record(folder, 3)["branched_from"] == 1
    assert start(1, 4) == 3
    assert f"continuing from {folder / 'step-3'}, which it saved since" in caplog.text
    assert start(-1, 5) == 4
    assert start(1) == 5
    assert start(4, 5) == 4  # it goes back to another step
    assert start(1, 2) == 1  # it last went back to step 4, so this is another course
    assert {"step-2.superseded-2", "step-5.superseded-2"} <= set(names(folder))

    # With another seed the run goes back once more.
    assert start(1, 2, given="--debug.seed 43") == 1
    assert start(1, given="--debug.seed 43") == 2


# Copying


STAND_INS = r"""
aws() {  # s3 sync FROM TO [--exclude NAME], where s3://bucket is the folder $BUCKET
    local from=$3 to=$BUCKET/${4#s3://bucket/} file name
    mkdir -p "$to"
    for file in "$from"/* "$from"/.[!.]*; do
        name=${file##*/}
        if [ -f "$file" ] && [ "$name" != "${6-}" ] && ! cmp -s "$file" "$to/$name"; then
            cp "$file" "$to/$name"
            echo "${to##*/}/$name" >> "$BUCKET/sent"
        fi
    done
}
sleep() {  # Ends the loop before its third round. After the first, the run validates.
    if [ -f "$BUCKET/sent" ]; then
        [ ! -f "$RUN/step-3/validation.json" ] && echo '{}' > "$RUN/step-3/validation.json"
    fi
}
"""


def test_the_lines_of_the_docs_that_copy_to_an_object_store(folder, tmp_path):
    """Two rounds copy the checkpoints, with a validation between them. An unfinished save is not copied."""
    (folder / "step-2" / ".metadata").rename(folder / "step-2" / ".incomplete")
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    page = [block.text for block in blocks(REPOSITORY / "docs/clusters.md")]
    scripts = [text for text in page if "aws s3 sync" in text]
    script = scripts[0].replace("outputs/125M/checkpoint", "$RUN")
    script = script.replace("s3://bucket/runs/125M", "s3://bucket")
    environment = os.environ | {"BUCKET": str(bucket), "RUN": str(folder)}
    command = ["bash", "-eu", "-c", STAND_INS + script]
    subprocess.run(command, env=environment, timeout=TIMEOUT, check=True)
    assert names(bucket) == ["sent", "step-1", "step-3"]
    sent = (bucket / "sent").read_text().splitlines()
    assert sent[-2:] == ["step-3/.metadata", "step-3/validation.json"]
    assert bytes_in(bucket / "step-3") == bytes_in(folder / "step-3")


# Saving


def test_retention_removes_only_what_the_run_wrote(new, folder, tmp_path):
    # A link to an archive, half a copy, another run's checkpoint, and a folder of a person's notes.
    (folder / "step-0").symlink_to(shutil.copytree(folder / "step-2", tmp_path / "archive"))
    copy_visible(folder / "step-2", folder / "step-4")
    shutil.copytree(folder / "step-2", folder / "step-5")
    write_record(folder / "step-5", folder="/another/run")
    (folder / "step-6" / "notes").mkdir(parents=True)
    # The remains of an interrupted save of another run, and of this run.
    for step in (folder / "step-8", folder / "step-7"):
        copy_visible(folder / "step-2", step)
        (step / ".incomplete").touch()
    write_record(folder / "step-8", folder="/another/run")
    # A step later than all that are saved.
    (folder / "step-19").mkdir()

    new("--checkpoint.keep_latest_k 2").save(9, 10, 11)
    others = ["step-0", "step-19", "step-4", "step-5", "step-6", "step-8"]
    assert names(folder) == sorted([*others, "step-10", "step-11"])
    assert (folder / "step-0").is_symlink()
    for name in ("step-4", "step-5", "step-8"):
        assert (folder / name / "__0_0.distcp").exists()
    assert (tmp_path / "archive" / ".metadata").exists()


def test_a_linked_checkpoint_is_read_and_never_written(new, folder, tmp_path):
    archive = (folder / "step-3").rename(tmp_path / "archive")
    (folder / "step-3").symlink_to(archive)
    before = bytes_in(archive)
    run = new()
    assert run.load() == 3
    assert not run.manager.lacks_validation(3)
    run.manager.note_validation(3, 1.0, 2.7, None, None)
    new().save(3)
    assert bytes_in(archive) == before
    assert not (folder / "step-3").is_symlink()
    assert (folder / "step-3.superseded").resolve() == archive


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_milestones_are_saved_and_stay(new, folder, mode):
    """Milestones of the settings are saved whatever the interval. A user names others while the run trains."""

    def train(given, *steps):
        run = new(f"--checkpoint.keep_latest_k 2 --checkpoint.async_mode {mode} {given}")
        run.manager.load()
        run.save(*steps)
        run.manager._async_wait()

    (folder / "step-1" / "KEEP").touch()
    train("--checkpoint.interval 2 --checkpoint.keep_steps 4 7", 4, 5, 6, 7)
    assert set(finished_steps(folder)) == {1, 4, 6, 7}
    assert set(milestones(folder)) == {1, 4, 7}

    # A restart names none, and a user names the step that is saved next.
    (folder / "step-8").mkdir()
    (folder / "step-8" / "KEEP").touch()
    train("", 8, 9, 10, 11)
    assert set(finished_steps(folder)) == {1, 4, 7, 8, 10, 11}

    # A run that goes back keeps the later milestones under their other name.
    assert new().load(4) == 4
    assert (folder / "step-7.superseded" / "KEEP").exists()
    assert set(milestones(folder)) == {1, 4}


def test_save_now_returns_once_the_step_is_on_the_disk(new, folder):
    run = new("--checkpoint.async_mode async --checkpoint.interval 4")
    run.save(4)
    assert run.manager.save_now(4)
    assert run.manager.save_future is None  # the asynchronous save has ended
    run.save(7)  # this step is not due
    assert set(finished_steps(folder)) == {1, 2, 3, 4}
    assert run.manager.save_now(7)
    assert new().load() == 7


def test_a_run_whose_folder_was_taken_over_saves_nothing(new, folder, tmp_path, capsys):
    run = new()
    run.manager.lock = RunLock([tmp_path / "run"])
    run.manager.lock.acquire()
    write_lock(tmp_path / "run")
    assert "was taken over by another run" in refusal(capsys, run.save, 4)
    assert names(folder) == ["step-1", "step-2", "step-3"]


def test_a_full_disk_is_explained_and_leaves_nothing_half_written(new, folder, capsys, monkeypatch):
    """PyTorch's error hides the system's in an asynchronous save. test_launch.py fills a disk under a synchronous one."""
    error = RuntimeError(f"writing failed: {os.strerror(errno.ENOSPC)}")
    monkeypatch.setattr(FileSystemWriter, "finish", mock.Mock(side_effect=error))
    run = new("--checkpoint.async_mode async")
    run.save(5)
    printed = refusal(capsys, run.manager._async_wait)
    paragraph = f"The disk is full: saving {folder / 'step-5'} failed (No space left on device)"
    assert paragraph in printed
    assert names(folder) == ["step-1", "step-2", "step-3"]


def save_only_weights(run, step):
    """Saves a checkpoint as TorchTitan's trainer may save its last one."""
    run.manager.last_save_model_only = True
    run.manager.save(step, last_step=True)


def test_a_run_does_not_continue_from_weights_only(new, folder, capsys):
    save_only_weights(new(), 4)
    error = refusal(capsys, new().load)
    assert f"{folder / 'step-4'} holds only weights" in error
    assert "To continue from step 3: --checkpoint.load_step 3. To start another run" in error


def test_torchtitans_trainer_does_not_continue_from_weights_only(new, tmp_path):
    folder = tmp_path / "run" / "checkpoint"
    save_only_weights(new(), 4)
    with pytest.raises(ValueError, match=r"step-4 holds only weights .* continues\. To start anot"):
        check_resume_of_torchtitan(parse().checkpoint, folder)
    new().save(3)
    with pytest.raises(ValueError, match=r"continues\. To continue from step 3"):
        check_resume_of_torchtitan(parse().checkpoint, folder)
    check_resume_of_torchtitan(parse("--checkpoint.load_step 3").checkpoint, folder)

    # An exported model is the latest.
    (folder / "step-6").mkdir()
    (folder / "step-6" / "model.safetensors.index.json").touch()
    with pytest.raises(ValueError, match="step-6 holds only weights"):
        check_resume_of_torchtitan(parse().checkpoint, folder)

    # Another run's weights, in a new folder.
    initial = f"--checkpoint.initial_load_path {folder / 'step-4'}"
    elsewhere = tmp_path / "elsewhere"
    check_resume_of_torchtitan(parse(initial).checkpoint, elsewhere)
    given = f"{initial} --checkpoint.no-initial_load_model_only"
    with pytest.raises(ValueError, match=r"continues\. To start from the weights"):
        check_resume_of_torchtitan(parse(given).checkpoint, elsewhere)
