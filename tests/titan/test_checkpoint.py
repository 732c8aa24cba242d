# ruff: noqa: F811 (fixtures are imported)
"""What is saved, what is loaded, and what happens to damaged checkpoints: real saves of a small module.

A damaged or half-written checkpoint is never resumed from and never costs an older one.
"""

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import Future

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpoint import CheckpointManager

from interdomain.model import build_config
from interdomain.model.distributed_checkpoint import altered_entry, finished_steps, parse_index
from interdomain.titan import resume_from
from interdomain.titan.integrity import read_checked
from interdomain.titan.lock import FolderLock

from .conftest import refusal
from .small_run import DAMAGE, alter, folder, names, new, record, shorten  # noqa: F401


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(new, folder, caplog, kind):
    damage, said = DAMAGE[kind]
    damage(folder / "step-3")
    with caplog.at_level(logging.WARNING):
        assert new(checksums=kind != "only reading finds it").load() == 2
    assert said in caplog.text
    assert caplog.text.count("SKIPPED") == 1
    assert names(folder) == ["step-1", "step-2", "step-3.damaged"]


def test_several_in_a_row_and_every_index_read_once(new, folder, monkeypatch):
    """The checksums of step 2 are found to be wrong only after it was chosen."""
    reads = []
    monkeypatch.setattr(resume_from, "read_checked", lambda path: reads.append(path.name) or read_checked(path))
    DAMAGE["shard short"][0](folder / "step-3")
    DAMAGE["shard altered"][0](folder / "step-2")
    assert new().load() == 1
    assert reads == ["step-3", "step-2", "step-1"]
    new().save(2).manager.close()
    DAMAGE["shard short"][0](folder / "step-2")
    assert new().load() == 1  # and once more: nothing that was set aside is overwritten
    assert names(folder) == ["step-1", "step-2.damaged", "step-2.damaged-2", "step-3.damaged"]


def test_a_save_that_was_cut_short_is_left_where_it_is(new, folder, caplog):
    (folder / "step-3" / ".metadata").unlink()
    assert new().load() == 2
    assert f"SKIPPED: {folder / 'step-3'} has no .metadata" in caplog.text
    assert names(folder) == ["step-1", "step-2", "step-3"]
    for step in (1, 2):
        (folder / f"step-{step}" / ".metadata").unlink()
    assert new().load() is None  # the first save of all: nothing was lost


def test_a_run_does_not_start_over_where_all_are_damaged(new, folder, capsys):
    for step in (1, 2, 3):
        DAMAGE["shard short"][0](folder / f"step-{step}")
    for _ in range(2):  # nor at the second try
        assert "no complete checkpoint is left" in refusal(capsys, new().load)


@pytest.mark.parametrize("ranks", [1, 5])
def test_ranks_share_the_reading_and_miss_nothing(folder, ranks):
    index = parse_index(read_checked(folder / "step-3")[0], folder / "step-3")
    assert not any(altered_entry(folder / "step-3", index, rank, ranks) for rank in range(ranks))
    alter(folder / "step-3" / "__0_0.distcp", 0.5)
    found = [altered_entry(folder / "step-3", index, rank, ranks) for rank in range(ranks)]
    assert len(list(filter(None, found))) == 1


def test_the_step_that_was_asked_for_is_not_replaced(new, folder, capsys):
    shorten(folder / "step-3" / "__0_0.distcp", 1)
    alter(folder / "step-2" / "__0_0.distcp", 0.5)
    for step, said in (
        (3, "its shard __0_0.distcp has"),
        (2, "do not match their checksum"),
        (5, "There are: 1, 2, 3"),
    ):
        error = refusal(capsys, new(load_only=True).load, step)
        assert said in error
    assert names(folder) == ["step-1", "step-2", "step-3"]


def test_another_model_is_refused_before_its_tensors_are_read(new, folder, capsys):
    softmax = build_config("debug", "softmax")
    norope = build_config("debug", "interdomain-norope")  # the very same tensors
    for settings, said in (
        ({"model": softmax}, "mixer.kind is interdomain there and softmax here"),
        ({"model": norope}, "mixer.rope is True there and False here"),
        ({"width": 8}, "weight is [7, 300] there and [8, 300] here"),
    ):
        error = refusal(capsys, new(**settings).load)
        assert f"{folder / 'step-3'} is a checkpoint of another model (there: debug" in error
        assert said in error
    assert new(model=build_config("debug", max_seq_len=128)).load() == 3  # a longer context is the same model
    (folder / "step-3" / "interdomain.json").unlink()
    assert "[8, 300] here" in refusal(capsys, new(width=8).load)


def test_an_initial_checkpoint(new, folder, tmp_path, capsys):
    """Loaded where the run's own folder holds only the remains of a save."""
    (tmp_path / "other" / "step-5").mkdir(parents=True)

    def load(initial):
        run = new(initial_load_path=str(initial), initial_load_model_only=False)
        run.manager.folder = str(tmp_path / "other")
        return run.load()

    assert load(folder / "step-2") == 2
    shorten(folder / "step-2" / "__0_0.distcp", 1)
    assert "its shard" in refusal(capsys, load, folder / "step-2")
    assert "is not a folder" in refusal(capsys, load, "nowhere")
    assert names(folder) == ["step-1", "step-2", "step-3"]


# Saving


def test_retention_counts_finished_steps_and_reads_no_index(new, folder, monkeypatch):
    shorten(folder / "step-2" / "__0_0.distcp", 1)
    shorten(folder / "step-3" / ".metadata", 20)
    (folder / "step-9").mkdir()  # later than what is saved: none of its business
    run = new(keep_latest_k=2)
    run.manager.load()
    (folder / "step-2").mkdir()  # the remains of a save
    monkeypatch.setattr(resume_from, "read_checked", lambda path: pytest.fail(f"{path} was read"))
    removed, remove = [], run.manager.purge_queue.put

    def put(path):
        if isinstance(path, str):
            removed.append((os.path.basename(path), os.path.exists(f"{path}/.metadata")))
        remove(path)

    run.manager.purge_queue.put = put
    run.save(4, 5).manager.close()
    assert removed == [("step-2", False), ("step-1", False)]  # without its index before it is removed
    assert names(folder) == ["step-2.damaged", "step-3.damaged", "step-4", "step-5", "step-9"]


def test_a_step_is_saved_anew_from_nothing(new, folder, monkeypatch):
    """Four ranks saved it, one saves it again: nothing of the other three stays, and a kill meanwhile leaves no half."""
    (folder / "step-3" / "__3_0.distcp").write_bytes(b"shard")
    indexed, remove = [], shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path: (indexed.append((path / ".metadata").exists()), remove(path)))
    run = new()
    run.others["optimizers"].guard.skipped = 4
    run.manager.resumed = (1, 1000)
    run.save(3).manager.close()
    assert names(folder / "step-3") == [".metadata", "__0_0.distcp", "interdomain.json", "tokenizer.model"]
    assert [record(folder, 3)[name] for name in ("step", "tokens", "skipped_steps")] == [3, 1000 + 2 * 512, 4]
    assert set(finished_steps(folder)) == {1, 2, 3}
    assert indexed == [False]


@pytest.mark.parametrize("ended", [None, EOFError("its process is gone"), CheckpointException("write", {})])
def test_now_means_on_the_disk(new, folder, caplog, ended, monkeypatch):
    """Where nothing is saved yet, where an asynchronous save is under way, and where the signal has ended that."""
    run = new(async_mode="async", interval=4).save(4)
    if ended:
        run.manager._async_wait()
        (folder / "step-4" / ".metadata").unlink()
        run.manager.save_future = Future()
        run.manager.save_future.set_exception(ended)
    assert run.manager.save_now(4)
    assert ("that was under way failed" in caplog.text) == bool(ended)
    assert run.manager.save_future is None
    run.save(7)  # not due
    assert names(folder)[-1] == "step-4"
    assert run.manager.save_now(7)
    run.manager.close()
    assert new().load() == 7
    assert new(load_only=True).manager.save_now(8) is False


def test_all_ranks_save_anew_where_one_failed(new, folder, monkeypatch):
    run = new(async_mode="async").save(4)
    run.manager._async_wait()
    (folder / "step-4" / ".metadata").unlink()
    with monkeypatch.context() as others:
        others.setattr(dist, "all_gather_object", lambda found, own: found.__setitem__(slice(None), [own, True]))
        assert run.manager.save_now(4)
    run.manager.close()
    assert new().load() == 4


def test_a_run_that_leaves_at_once_does_not_touch_what_it_loaded(new, folder):
    run = new()
    run.manager.load()
    before = (folder / "step-3" / ".metadata").stat().st_mtime_ns
    assert run.manager.save_now(3)
    assert (folder / "step-3" / ".metadata").stat().st_mtime_ns == before


def test_a_run_whose_folder_was_taken_over_saves_nothing(new, folder, tmp_path, capsys):
    run, holder = new(), FolderLock(tmp_path / "run")
    run.manager.lock = holder
    holder.path.write_text("{}")  # another's
    assert "was taken over by another run" in refusal(capsys, run.save, 4)
    assert names(folder) == ["step-1", "step-2", "step-3"]
    assert "was taken over" in refusal(capsys, run.manager.require_folder)
    run.manager.note_validation(3, 2.0, 7.39)
    assert not (folder / "step-3" / "validation.json").exists()


def test_a_process_that_saves_survives_the_schedulers_signal(new, folder, monkeypatch):
    def in_a_process(*args, **kwargs):
        program = "import os, signal; os.kill(os.getpid(), signal.SIGUSR1)"
        assert subprocess.run([sys.executable, "-c", program]).returncode == 0

    monkeypatch.setattr(CheckpointManager, "dcp_save", in_a_process)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    new().save(4).manager.close()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("failure", [FULL, RuntimeError("writing failed: No space left on device"), None])
def test_a_full_disk_is_explained_and_leaves_nothing_half_written(new, folder, capsys, failure):
    """Behind an asynchronous save, where the system's error may be hidden; and (None) while the record is written."""
    run = new(async_mode="async")
    if failure:
        run.save(5).manager._async_wait()
        run.manager.save_future = Future()
        run.manager.save_future.set_exception(CheckpointException("write", {1: (failure, None)}))
        error = refusal(capsys, run.manager._async_wait)
    else:
        run.manager.tokenizer.write = lambda folder: (_ for _ in ()).throw(FULL)
        error = refusal(capsys, run.save, 5)
    assert f"The disk is full: saving {folder / 'step-5'} failed (No space left on device)" in error
    assert names(folder) == ["step-1", "step-2", "step-3"]
    run.manager.save_future = Future()
    run.manager.save_future.set_exception(CheckpointException("write", {0: (OSError(errno.EIO, "broken"), None)}))
    with pytest.raises(CheckpointException, match="broken"):  # other failures are not called a full disk
        run.manager._async_wait()
