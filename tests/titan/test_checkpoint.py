"""Whole checkpoints are found, damaged and foreign ones refused, and a full disk leaves nothing that looks whole."""

import errno
import json
import os
import shutil
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpoint import MODEL, OPTIMIZER, TRAIN_STATE, AsyncMode

from interdomain.model import build_config, meta_model
from interdomain.model.distributed_checkpoint import write_tensors
from interdomain.titan.checkpoint import SelfDescribingCheckpoints

from .conftest import refusal


def manager(folder, config=None):
    """The parts of a manager that look at folders, without a trainer."""
    config = config or build_config("debug", vocab_size=512, max_seq_len=64)
    this = SelfDescribingCheckpoints.__new__(SelfDescribingCheckpoints)
    this.enable, this.folder, this.initial_load_path, this.keep_latest_k = True, str(folder), None, 2
    this.purge_queue = SimpleNamespace(put=lambda path: shutil.rmtree(path))
    this.async_mode, this.save_future = AsyncMode.ASYNC, None
    this.states = {
        MODEL: SimpleNamespace(state_dict=meta_model(config).state_dict),
        OPTIMIZER: SimpleNamespace(guard=SimpleNamespace(skipped=4)),
        TRAIN_STATE: SimpleNamespace(step=5, ntokens_seen=0),
    }
    this.checksums, this.load_only, this.lock = True, False, None
    this.record = {"model": config.to_dict(), "run": {"tokens_per_step": 512}}
    this.close = lambda: None  # called when it is collected
    return this


def step_folder(folder, step, whole=True):
    path = folder / f"step-{step}"
    write_tensors(path, {"w": torch.arange(1000.0) + step, "b": torch.ones(3)})
    if not whole:
        (path / ".metadata").unlink()
    return path


def test_the_latest_whole_step_is_found(tmp_path):
    for step, whole in ((3, True), (9, True), (10, True), (12, False)):
        step_folder(tmp_path, step, whole)
    step_folder(tmp_path, 11).rename(tmp_path / "step-11.copy")
    assert manager(tmp_path)._find_load_step() == 10
    assert manager(tmp_path / "none")._find_load_step() == -1


def test_retention_counts_whole_steps_and_unmarks_before_it_removes(tmp_path, monkeypatch):
    for step, whole in ((1, True), (2, False), (3, True), (4, True), (9, False)):
        step_folder(tmp_path, step, whole)
    step_folder(tmp_path, 5, whole=False)  # being saved
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    this = manager(tmp_path)
    this.saving = str(tmp_path / "step-5")
    marked = []
    this.purge_queue.put = lambda path: marked.append((os.path.basename(path), os.path.exists(f"{path}/.metadata")))
    this._purge_stale_checkpoints()
    assert marked == [("step-1", False), ("step-2", False), ("step-3", False)]


def test_a_step_that_is_not_there(tmp_path, alone, capsys):
    for step, whole in ((3, True), (6, True), (7, False)):
        step_folder(tmp_path, step, whole)
    for step in (5, 7):
        error = refusal(capsys, manager(tmp_path).load, step)
        assert f"load_step = {step}" in error
        assert "it has: 3, 6" in error


def test_an_initial_checkpoint_that_is_not_there(tmp_path, alone, capsys):
    this = manager(tmp_path)
    this.initial_load_path = str(tmp_path / "nowhere")
    assert "nowhere is not a folder" in refusal(capsys, this.load)


@pytest.mark.e2e
class TestRealCheckpoint:
    @pytest.fixture
    def real(self, one, tmp_path):
        folder = one.folder / "halves" / "checkpoint" / "step-3"
        return shutil.copytree(folder, tmp_path / "step-3")

    def test_its_own_model_passes(self, real):
        assert manager(real.parent)._check(real)[1]["tokens"] == 1536

    def test_a_longer_context_is_the_same_model(self, real):
        config = build_config("debug", vocab_size=512, max_seq_len=128)
        assert manager(real.parent, config)._check(real)

    @pytest.mark.parametrize(
        ("condition", "overrides", "said"),
        [
            ("softmax", {}, "mixer.kind is interdomain there and softmax here"),
            ("interdomain-norope", {}, "mixer.rope is True there and False here"),  # the very same tensors
            ("interdomain", {"readout": "hermitian"}, "mixer.readout is complex there and hermitian here"),
            ("interdomain", {"n_layers": 2}, "n_layers is 4 there and 2 here"),
            ("s4d", {}, "mixer.dual_input is True there and False here"),
        ],
    )
    def test_another_model_is_refused(self, real, capsys, condition, overrides, said):
        config = build_config("debug", condition, **{"vocab_size": 512, **overrides})
        error = refusal(capsys, manager(real.parent, config)._check, real)
        assert (
            f"{real} is a checkpoint of another model (there: debug with vocab_size 512, max_seq_len 64, interdomain)"
            in error
        )
        assert said in error
        assert "--job.dump_folder" in error

    def test_without_a_record_the_tensors_speak(self, real, capsys):
        (real / "interdomain.json").unlink()
        assert manager(real.parent)._check(real)[1] == {}
        config = build_config("debug", vocab_size=640)
        error = refusal(capsys, manager(real.parent, config)._check, real)
        assert "tok_embeddings.weight is [512, 128] there and [640, 128] here" in error

    def test_damage_is_named(self, real, capsys):
        shard = real / "__0_0.distcp"
        size = shard.stat().st_size
        with open(shard, "ab") as f:
            f.truncate(size // 2)
        error = refusal(capsys, manager(real.parent)._check, real)
        assert f"its shard __0_0.distcp has {size // 2:,} bytes" in error
        shard.unlink()
        assert "its shard __0_0.distcp is missing" in refusal(capsys, manager(real.parent)._check, real)
        (real / ".metadata").write_bytes((real / ".metadata").read_bytes()[:100])
        assert ".metadata is damaged" in refusal(capsys, manager(real.parent)._check, real)
        (real / ".metadata").unlink()
        assert "is not a whole checkpoint" in refusal(capsys, manager(real.parent)._check, real)


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_while_the_record_is_written(tmp_path, alone, capsys, monkeypatch):
    step_folder(tmp_path, 3)
    this = manager(tmp_path)
    this.tokenizer = tmp_path / "tokenizer.model"

    def full(*_):
        raise FULL

    monkeypatch.setattr(shutil, "copyfile", full)
    error = refusal(capsys, this.dcp_save, {}, str(tmp_path / "step-5"))
    assert f"The disk is full: saving {tmp_path / 'step-5'} failed (No space left on device)" in error
    assert "The last whole checkpoint is step 3" in error
    assert not (tmp_path / "step-5").exists()


@pytest.mark.parametrize(
    "failure", [FULL, RuntimeError("writing file failed: No space left on device")], ids=["system", "hidden"]
)
def test_a_disk_that_fills_behind_an_asynchronous_save(tmp_path, alone, capsys, failure):
    this = manager(tmp_path)
    this.saving = str(step_folder(tmp_path, 5, whole=False))
    this.save_future = Future()
    this.save_future.set_exception(CheckpointException("write", {1: (failure, None)}))
    error = refusal(capsys, this._async_wait)
    assert "There is no earlier checkpoint" in error
    assert not (tmp_path / "step-5").exists()


def test_other_failures_are_not_called_a_full_disk(tmp_path, alone):
    this = manager(tmp_path)
    this.save_future = Future()
    this.save_future.set_exception(CheckpointException("write", {0: (OSError(errno.EIO, "Input/output error"), None)}))
    with pytest.raises(CheckpointException, match="Input/output error"):
        this._async_wait()


def test_a_step_is_saved_anew_from_nothing(tmp_path, alone):
    """Four ranks saved it, one saves it again: nothing of the other three may stay."""
    old = step_folder(tmp_path, 5)
    (old / "__3_0.distcp").write_bytes(b"shard")
    this = manager(tmp_path)
    this.tokenizer = tmp_path / "tokenizer.model"
    this.tokenizer.write_bytes(b"tokenizer")
    this.resumed = (3, 1000)
    this._begin(old)
    assert sorted(path.name for path in old.iterdir()) == ["interdomain.json", "tokenizer.model"]
    record = json.loads((old / "interdomain.json").read_text())
    assert (record["step"], record["tokens"], record["skipped_steps"]) == (5, 1000 + 2 * 512, 4)
