# ruff: noqa: F811 (fixtures are imported)
"""Saving, loading, and damaged checkpoints: real saves of a small module.

A damaged or half-written checkpoint is never resumed from and never costs an older one.
"""

import contextlib
import errno
import json
import os
import shutil
import subprocess
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from interdomain.checkpoint.index import altered_entry, read_index
from interdomain.checkpoint.step_folder import finished_steps, half_copies, milestones
from interdomain.model import build_config
from interdomain.titan.resume.lock import LOCK_NAME, RunLock
from interdomain.titan.resume.resume_from import OTHER_STATE, ResumePoint, require_same_run

from ..common import REPOSITORY, TIMEOUT
from ..docs.pages import blocks
from .conftest import refusal
from .small_run import DAMAGE, alter, damage, folder, names, new, record, write_record  # noqa: F401


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(new, folder, caplog, kind):
    damage(folder / "step-3", kind)
    assert new().load() == 2
    assert DAMAGE[kind][1] in caplog.text
    assert caplog.text.count("SKIPPED") == 1
    assert names(folder) == ["step-1", "step-2", "step-3.damaged"]


def test_one_of_a_newer_pytorch_is_refused_and_stays(new, folder, capsys):
    write_record(folder / "step-3", versions={"torch": "99.0.1+cu999"})
    (folder / "step-3" / ".metadata").write_bytes(b"of another kind")
    error = refusal(capsys, new().load)
    assert f"was written by PyTorch 99.0.1, and PyTorch {torch.__version__} cannot read it" in error
    assert names(folder) == ["step-1", "step-2", "step-3"]


def test_several_in_a_row_until_none_is_left(new, folder, capsys):
    """Nothing that was set aside is overwritten, the remains of a save are passed over, and a run does not start over, but
    where nothing was lost: its first save of all was cut short."""
    (folder / "step-9").mkdir()
    damage(folder / "step-3", "shard short")
    damage(folder / "step-2", "shard altered")
    assert new().load() == 1
    new().save(2)
    damage(folder / "step-2", "shard short")
    assert new().load() == 1
    assert names(folder) == [
        "step-1",
        "step-2.damaged",
        "step-2.damaged-2",
        "step-3.damaged",
        "step-9",
    ]
    damage(folder / "step-1", "shard gone")
    for _ in range(2):  # nor at the second try
        assert "no complete checkpoint is left" in refusal(capsys, new().load)
    for path in folder.glob("*.damaged*"):
        shutil.rmtree(path)
    assert new().load() is None


def test_ranks_share_the_reading_and_miss_nothing(folder):
    step = folder / "step-3"
    index = read_index(step)
    assert not any(altered_entry(step, index, rank, 5) for rank in range(5))
    alter(step / "__0_0.distcp", 0.5)
    assert len([rank for rank in range(5) if altered_entry(step, index, rank, 5)]) == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"model": build_config("debug", softmax_every=2)},
            "the model is debug, interdomain there and debug, interdomain, softmax_every 2 here",
        ),
        # The very same tensors.
        (
            {"model": build_config("debug", "interdomain-norope")},
            "debug, interdomain there and debug, interdomain-norope here",
        ),
        ({"tokens_per_step": 1024}, "tokens_per_step is 512 there and 1024 here"),
    ],
)
def test_another_run_is_refused_before_its_tensors_are_read(new, folder, capsys, settings, said):
    error = refusal(capsys, new(**settings).load)
    assert f"{folder / 'step-3'} is a checkpoint of another run (interdomain, debug)" in error
    assert said in error


def test_a_longer_context_is_the_same_model(new, folder):
    assert new(model=build_config("debug", max_seq_len=128)).load() == 3


def test_checkpoints_of_another_run_outside_of_this_one_s_folder(new, tmp_path, capsys):
    """Two runs of the same settings, whose checkpoint.folder is the same place: told apart by their folders in the record."""

    def start(name, checkpoints):
        run = new(at=checkpoints)
        run.manager.record["folder"] = str(tmp_path / name)
        run.manager.run_folders = {str(tmp_path / name), None}
        return run

    shared = tmp_path / "shared"
    start("first", shared).save(4, 5)
    damage(shared / "step-4", "shard short")
    before = bytes_in(shared)
    error = refusal(capsys, start("second", shared).load)
    assert (
        f"{shared / 'step-4'} is a checkpoint of another run, whose folder is {tmp_path / 'first'}"
        in error
    )
    assert bytes_in(shared) == before  # not even a damaged one is renamed
    assert start("first", shared).load() == 5
    (tmp_path / "second").mkdir()
    (tmp_path / "first").symlink_to(tmp_path / "second")  # a folder that was renamed
    assert start("second", shared).load() == 5
    own = shutil.copytree(shared, tmp_path / "third" / "checkpoint")  # put there for this run
    assert start("third", own).load() == 5


def test_a_resume_lists_every_setting_that_changed(new, folder, caplog):
    """Once, without folders, logging, saving and what is the ranks' affair."""
    assert new(interval=7).load() == 3
    assert "was saved with other settings" not in caplog.text
    free = "--job.dump_folder elsewhere --metrics.log_freq 7 --training.local_batch_size 4 "
    free += "--parallelism.tensor_parallel_degree 2 --data.corpus moved "
    recipe = "--optimizer.lr 9e-3 --training.precision bf16 --validation.tokens 2000"
    new(fingerprints={"train": "text", "validation": "old"}).save(4)
    assert (
        new(
            flags=(free + recipe).split(), fingerprints={"train": "text", "validation": "new"}
        ).load()
        == 4
    )
    (warning,) = [
        r.getMessage() for r in caplog.records if "was saved with other settings" in r.getMessage()
    ]
    assert warning.splitlines()[1:] == [
        "  optimizer.lr: 0.003 -> 0.009",
        "  training.precision: float32 -> bf16",
        "  validation.tokens: 1000 -> 2000",
        "  fingerprint of the validation text: old -> new",
    ]


RESET = ["--data.reset_state_at_documents"]


def test_a_setting_that_changes_the_function_is_refused(new, folder, capsys):
    error = refusal(capsys, new(flags=RESET).load)
    assert "was trained with data.reset_state_at_documents = False, and here it is True" in error


def test_a_record_of_another_version(new, folder, caplog):
    """One that names settings which are gone loads in silence. One without settings, as older versions wrote it, says so."""
    configuration = record(folder, 3)["configuration"]
    configuration["training"] |= {"spike_deviations": 6.0, "max_spikes": 3}
    configuration["checkpoint"]["copy_to"] = ""
    counts = {"skipped_steps": 2, "skipped_in_a_row": 0}
    gone = {"spikes": 1, "spike_steps": [2], "recent_losses": [3.0]}
    write_record(folder / "step-3", configuration=configuration, **counts, **gone)
    run = new()
    assert run.load() == 3
    assert run.others["optimizers"].step_guard.state_dict() == counts
    assert "settings" not in caplog.text
    write_record(folder / "step-3", configuration=None)
    assert new(flags=RESET).load() == 3
    assert "does not record its settings" in caplog.text


@pytest.fixture
def other(tmp_path):
    """The folder of a run that starts from another's checkpoint: it holds only the remains of a save."""
    (tmp_path / "other" / "step-5").mkdir(parents=True)
    return tmp_path / "other"


def test_weights_of_an_initial_checkpoint(new, folder, other):
    given = {"at": other, "initial_load_path": str(folder / "step-2"), "tokens_per_step": 1024}
    run = new(**given)
    assert run.manager.load()
    assert (run.model.weight.unique().item(), run.trainer.step) == (2, 0)
    run.save(1)
    assert record(other, 1)["run"]["started_from"]["step"] == 2
    onward = new(**given)
    assert onward.load() == 1
    assert onward.manager.record["run"]["started_from"]["step"] == 2  # a resumed run knows, too


def test_all_of_an_initial_checkpoint_but_what_is_excluded(new, folder, other, capsys):
    given = {"initial_load_model_only": False, "exclude_from_loading": ["dataloader"]}
    given |= {"at": other, "initial_load_path": str(folder / "step-2")}
    run = new(**given)
    assert run.manager.load()
    assert (run.trainer.step, run.others["optimizers"].step, run.others["dataloader"].step) == (
        2,
        2,
        0,
    )
    assert "started_from" not in run.manager.record["run"]  # the same run goes on
    run.save(3)
    assert new(**given).load() == 3  # its own, with all parts
    shutil.rmtree(other / "step-3")
    damage(folder / "step-2", "shard short")
    assert "its shard" in refusal(capsys, new(**given).load)
    assert "nowhere" in refusal(capsys, new(at=other, initial_load_path="nowhere").load)
    assert names(folder) == ["step-1", "step-2", "step-3"]


def test_no_code_in_a_checkpoint_runs(new, folder, tmp_path):
    class Planted:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "planted"),)

    run = new()
    run.others["dataloader"].state_dict = lambda: {"step": Planted()}
    run.save(4)
    with pytest.raises(BaseException, match="mkdir"):
        new().load()
    assert not (tmp_path / "planted").exists()


# Half a copy


def copy_visible(source, target):
    """What `cp source/* target/` copies: no hidden file."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(".*"))


def bytes_in(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("lost", ["*.json", "*.distcp"])
def test_half_a_copy_stops_a_start_from_zero(new, folder, tmp_path, capsys, lost):
    """Also a start from an initial checkpoint. Beside a complete one it is passed over, and nothing of it is lost."""
    moved = tmp_path / "moved" / "checkpoint"
    for step in ("step-2", "step-3"):
        copy_visible(folder / step, moved / step)
        (moved / step / "KEEP").touch()
        for path in (moved / step).glob(lost):
            path.unlink()
    before = bytes_in(moved)
    for initial in ("", str(folder / "step-1")):
        error = refusal(capsys, new(at=moved, initial_load_path=initial).load)
        assert f"{moved} holds step-2, step-3 without .metadata" in error
    assert bytes_in(moved) == before
    shutil.copytree(folder / "step-1", moved / "step-1")
    run = new(at=moved, keep_latest_k=2)
    assert run.manager.load()
    run.save(2, 3, 4, 5)
    assert {*finished_steps(moved)} == {
        2,
        3,
        4,
        5,
    }  # each aside's new name has its KEEP: milestones
    now = bytes_in(moved)
    assert all(now[name.replace("/", ".superseded/", 1)] == data for name, data in before.items())


def test_a_link_that_leads_nowhere_stops_a_start_from_zero(new, tmp_path, capsys):
    """The disk that holds the checkpoint is away."""
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "step-4").symlink_to(tmp_path / "not mounted")
    assert "step-4 without .metadata" in refusal(capsys, new(at=tmp_path / "checkpoint").load)


def test_what_an_interrupted_save_left_stops_nothing(new, tmp_path, monkeypatch):
    """Not even of a run's first save; and its place is used again."""
    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriter, "finish", lambda *_: 1 / 0)
        with pytest.raises(CheckpointException):
            new().save(4)
    folder = tmp_path / "run" / "checkpoint"
    assert [*(folder / "step-4").glob("*.distcp")]
    assert half_copies(folder) == []
    run = new()
    assert run.manager.load() is False
    run.save(4)
    assert names(folder) == ["step-4"]
    assert new().load() == 4


@pytest.mark.parametrize("removed", range(5))
def test_what_a_kill_leaves_of_a_removal_is_known_as_the_run_s_own(
    new, folder, monkeypatch, removed
):
    """A save that was interrupted is removed by the next save of its step, which is interrupted after each of its files."""
    (folder / "step-3" / ".metadata").rename(folder / "step-3" / ".incomplete")
    left = [None] * removed
    scandir, unlink = os.scandir, os.unlink

    def unlink_some(*args, **kwargs):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        unlink(*args, **kwargs)

    @contextlib.contextmanager
    def sorted_entries(path):
        with scandir(path) as entries:
            yield iter(sorted(entries, key=lambda entry: entry.name))

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(os, "unlink", unlink_some)
        patch.setattr(os, "scandir", sorted_entries)
        new().save(3)
    assert half_copies(folder) == []


# Going back


def test_the_step_that_was_asked_for_is_not_replaced(new, folder, capsys):
    damage(folder / "step-3", "shard short")
    damage(folder / "step-2", "shard altered")
    (folder / "step-3").rename(folder / "step-4")
    assert "do not match their checksum" in refusal(capsys, new().load, 2)
    assert "There are: 1, 2" in refusal(capsys, new().load, 3)
    assert names(folder) == ["step-1", "step-2", "step-4.damaged"]


def test_a_run_that_went_back_goes_on_from_what_it_saved_since(new, folder, caplog):
    def start(step, *save, **settings):
        run = new(**settings)
        run.manager.load(step)
        began = run.trainer.step
        run.save(*save)
        return began

    assert start(1) == 1
    assert names(folder) == ["step-1", "step-2.superseded", "step-3.superseded"]
    assert start(1, 2, 3) == 1  # ended before a save: the same again
    assert record(folder, 3)["branched_from"] == 1
    assert start(1, 4) == 3
    assert f"continuing from {folder / 'step-3'}, which it saved since" in caplog.text
    assert start(-1, 5) == 4  # without naming it, the same course
    assert start(1) == 5
    assert start(4, 5) == 4  # to another step
    assert start(1, 2) == 1  # to the first, for the run's last course is another
    other_seed = {"flags": ["--debug.seed", "43"]}
    assert start(1, 2, **other_seed) == 1  # once more, with the data in another order
    assert start(1, **other_seed) == 2
    damage(folder / "step-2", "shard altered")
    assert start(1, **other_seed) == 1  # all of that course is damaged: back to where it began
    assert {
        "step-2.damaged",
        "step-3.superseded-2",
        "step-5.superseded-2",
        "step-2.superseded-2",
    } <= {*names(folder)}


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


def test_the_lines_of_docs_that_copy_to_an_object_store(new, folder, tmp_path):
    """Two rounds, with a validation between them. An unfinished save is not copied. A run continues from the copy."""
    (folder / "step-2" / ".metadata").rename(folder / "step-2" / ".incomplete")
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    copy, _ = [
        block.text
        for block in blocks(REPOSITORY / "docs/clusters.md")
        if "aws s3 sync" in block.text
    ]
    script = copy.replace("outputs/125M/checkpoint", "$RUN").replace(
        "s3://bucket/runs/125M", "s3://bucket"
    )
    environment = os.environ | {"BUCKET": str(bucket), "RUN": str(folder)}
    subprocess.run(
        ["bash", "-eu", "-c", STAND_INS + script], env=environment, timeout=TIMEOUT, check=True
    )
    sent = (bucket / "sent").read_text().splitlines()
    assert {path.partition("/")[0] for path in sent} == {"step-1", "step-3"}
    assert sent[-2:] == ["step-3/.metadata", "step-3/validation.json"]
    assert bytes_in(bucket / "step-3") == bytes_in(folder / "step-3")
    shutil.rmtree(folder)
    shutil.copytree(bucket / "step-3", folder / "step-3")
    assert new().load() == 3


# Saving


def test_retention_removes_only_what_the_run_wrote(new, folder, tmp_path):
    """No link, no folder that another run or a person put there, nothing later than what is saved. What interrupted saves and
    removals left goes."""
    archive = shutil.copytree(folder / "step-2", tmp_path / "archive")
    (folder / "step-0").symlink_to(archive)
    copy_visible(folder / "step-2", folder / "step-4")
    shutil.copytree(folder / "step-2", folder / "step-5")
    (folder / "step-6").mkdir()
    (folder / "step-6" / "notes.txt").write_text("not a checkpoint")
    for name in ("step-7", "step-8"):
        copy_visible(folder / "step-2", folder / name)
        (folder / name / ".incomplete").touch()
    for name in ("step-5", "step-8"):
        write_record(folder / name, folder="/another/run")
    for name in ("step-2.damaged", "step-19"):
        (folder / name).mkdir()
    others = ("step-0", "step-4", "step-5", "step-6", "step-8", "step-2.damaged", "step-19")
    before = {name: bytes_in(folder / name) for name in others}
    new(keep_latest_k=2).save(9, 10, 11)
    assert names(folder) == sorted([*others, "step-10", "step-11"])
    assert {name: bytes_in(folder / name) for name in others} == before
    assert (folder / "step-0").is_symlink()


def test_a_removal_begins_with_the_index(new, folder, monkeypatch):
    """A checkpoint of which a part is gone does not look whole."""
    run = new(keep_latest_k=2)
    monkeypatch.setattr(run.manager.purge_queue, "put", lambda path: None)
    run.manager.purge_thread = None
    run.save(4)
    assert {*finished_steps(folder)} == {3, 4}
    assert names(folder) == ["step-1", "step-2", "step-3", "step-4"]


def test_a_linked_checkpoint_is_read_and_never_written(new, folder, tmp_path):
    archive = tmp_path / "archive" / "step-3"
    archive.parent.mkdir()
    (folder / "step-3").rename(archive)
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
    """Those of the settings, whatever the interval; one that a user names while the run goes on; after a restart that names
    none. One of which a save left remains alone is saved anew."""

    def train(*steps, **settings):
        run = new(keep_latest_k=2, async_mode=mode, **settings)
        run.manager.load()
        run.save(*steps)
        run.manager._async_wait()

    def name_a_milestone(step):
        (folder / f"step-{step}").mkdir(exist_ok=True)
        (folder / f"step-{step}" / "KEEP").touch()

    name_a_milestone(5)
    name_a_milestone(1)
    train(4, 5, 6, 7, interval=2, milestones={4, 7})
    assert {*finished_steps(folder)} == {1, 4, 6, 7}
    assert {*milestones(folder)} == {1, 4, 7}
    assert not (folder / "step-5").exists()  # remains are no checkpoint
    name_a_milestone(8)  # the one that is being saved
    train(8, 9, 10, 11)
    assert {*finished_steps(folder)} == {1, 4, 7, 8, 10, 11}
    assert new().load(4) == 4
    assert (folder / "step-7.superseded" / "KEEP").exists()
    assert {*milestones(folder)} == {1, 4}


def test_a_step_is_saved_anew_from_nothing(new, folder):
    """Four ranks saved it, one saves it again: nothing of the other three stays."""
    (folder / "step-3" / "__3_0.distcp").write_bytes(b"shard")
    run = new()
    state = {"skipped_steps": 4, "skipped_in_a_row": 1}
    run.others["optimizers"].step_guard.load_state_dict(state)
    run.save(3)
    assert names(folder / "step-3") == [
        ".metadata",
        "__0_0.distcp",
        "interdomain.json",
        "tokenizer.model",
    ]
    assert record(folder, 3).items() >= {"step": 3, "tokens": 3 * 512, "skipped_steps": 4}.items()
    again = new()
    again.load()
    assert again.others["optimizers"].step_guard.state_dict() == state


def test_now_means_on_the_disk(new, folder):
    """Where nothing is saved yet, and where an asynchronous save is under way."""
    run = new(async_mode="async", interval=4)
    run.save(4)
    assert run.manager.save_now(4)
    assert run.manager.save_future is None
    run.save(7)  # not due
    assert {*finished_steps(folder)} == {1, 2, 3, 4}
    assert run.manager.save_now(7)
    assert new().load() == 7
    assert new(enable=False).manager.save_now(8) is False


def test_a_run_whose_folder_was_taken_over_saves_nothing(new, folder, tmp_path, capsys):
    lock = RunLock([tmp_path / "run"])
    lock.acquire()
    (tmp_path / "run" / LOCK_NAME).write_text(json.dumps(lock.record | {"token": "another"}))
    run = new()
    run.manager.lock = lock
    assert "was taken over by another run" in refusal(capsys, run.save, 4)
    assert names(folder) == ["step-1", "step-2", "step-3"]


def test_a_full_disk_is_explained_and_leaves_nothing_half_written(new, folder, capsys):
    """In an asynchronous save PyTorch's own error hides the system's; test_launch.py fills a disk under a synchronous one."""
    run = new(async_mode="async")
    run.save(5)
    run.manager.save_future.result()  # else it may still write when its folder is removed
    run.manager.save_future = Future()
    hidden = RuntimeError(f"writing failed: {os.strerror(errno.ENOSPC)}")
    run.manager.save_future.set_exception(CheckpointException("write", {1: (hidden, None)}))
    error = refusal(capsys, run.manager._async_wait)
    assert f"The disk is full: saving {folder / 'step-5'} failed (No space left on device)" in error
    assert names(folder) == ["step-1", "step-2", "step-3"]


def test_weights_alone_are_not_continued(new, folder, capsys):
    """TorchTitan's trainer can save them, and `convert` makes them, of a run that trained nothing."""
    manager = new().manager
    entries = read_index(folder / "step-3").entries.items()
    weights = SimpleNamespace(
        entries={name: entry for name, entry in entries if not name.startswith(OTHER_STATE)}
    )
    for trained, said in (
        ({}, "holds only weights"),
        ({"run": {"started_from": {}}}, "tokens_per_step is 0 there"),
    ):
        point = ResumePoint(folder / "step-3", weights, record(folder, 3) | trained, "latest")
        assert said in refusal(capsys, require_same_run, point, manager.record, batch=True)
