"""A checkpoint that does not read back whole is skipped, loudly, for the one before it; real saves of a small module."""

import json
import logging
import signal
import subprocess
import sys
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpoint import AsyncMode, CheckpointManager

from interdomain.model import build_config
from interdomain.model.distributed_checkpoint import altered_entry, finished_steps
from interdomain.titan import checkpoint, resume_from
from interdomain.titan.checkpoint import SelfDescribingCheckpoints
from interdomain.titan.guard import Guard
from interdomain.titan.host import translate
from interdomain.titan.integrity import read
from interdomain.titan.lock import FolderLock
from interdomain.titan.settings import read_job_config

from .conftest import TINY, refusal


class State:
    """An optimizer, a loader, a schedule: one number each, equal to the step."""

    def __init__(self):
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Trainer(State):
    step = ntokens_seen = 0

    def __init__(self):
        self.metrics_processor = SimpleNamespace()

    def state_dict(self):
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state):
        self.step = state["step"]


class Run:
    """A manager and what it saves: the weights of step N are all N."""

    def __init__(self, folder, tokenizer, **settings):
        config = translate(read_job_config(["--job.config_file", str(TINY)])).checkpoint
        config.enable, config.interval = True, 1
        for name, value in settings.items():
            setattr(config, name, value)
        self.model, self.trainer = torch.nn.Linear(300, 7), Trainer()
        self.others = {name: State() for name in ("optimizers", "lr_schedulers", "dataloader")}
        self.others["optimizers"].guard = Guard()
        self.manager = SelfDescribingCheckpoints(
            **self.others,
            model_parts=[self.model],
            states={"train_state": self.trainer},
            checkpoint_config=config,
            base_folder=str(folder),
            record={
                **{"model": build_config("debug").to_dict(), "size": "debug", "condition": "interdomain"},
                "run": {"tokens_per_step": 512, "planned_steps": 100},
            },
            tokenizer=tokenizer,
            lock=None,
        )

    def set(self, step):
        self.trainer.step = step
        for state in self.others.values():
            state.value = step
        with torch.no_grad():
            for p in self.model.parameters():
                p.fill_(step)

    def save(self, step):
        self.set(step)
        self.manager.save(step)
        return self

    def load(self, step=-1):
        loaded = self.manager.load(step)
        self.manager.close()
        (weights,) = {value for p in self.model.parameters() for value in p.unique().tolist()} if loaded else (None,)
        assert not loaded or {state.value for state in self.others.values()} == {weights} == {self.trainer.step}
        return weights


@pytest.fixture
def new(alone, tmp_path):
    """A run in the folder, as a process that starts makes it."""
    tokenizer = SimpleNamespace(write=lambda folder: (folder / "tokenizer.model").write_bytes(b"tokenizer"))
    return lambda **settings: Run(tmp_path / "run", tokenizer, **settings)


@pytest.fixture
def folder(new, tmp_path):
    """Checkpoints of steps 1, 2 and 3."""
    run = new()
    for step in (1, 2, 3):
        run.save(step)
    run.manager.close()
    return tmp_path / "run" / "checkpoint"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def shorten(path, by):
    with open(path, "ab") as f:
        f.truncate(path.stat().st_size - by)


def alter(path, at):
    data = bytearray(path.read_bytes())
    place = int(at * len(data))
    data[place : place + 16] = bytes(255 - byte for byte in data[place : place + 16])
    path.write_bytes(data)


DAMAGE = {
    "index cut": (lambda f: shorten(f / ".metadata", 50), ".metadata is damaged"),
    "index of garbage": (lambda f: (f / ".metadata").write_bytes(b"\x80\x04garbage"), ".metadata is damaged"),
    "index empty": (lambda f: (f / ".metadata").write_bytes(b""), ".metadata is damaged"),
    "shard gone": (lambda f: (f / "__0_0.distcp").unlink(), "its shard __0_0.distcp is missing"),
    "shard short": (lambda f: shorten(f / "__0_0.distcp", 1), "its shard __0_0.distcp has"),
    "shard empty": (lambda f: (f / "__0_0.distcp").write_bytes(b""), "its shard __0_0.distcp has 0 bytes"),
    "shard altered": (lambda f: alter(f / "__0_0.distcp", 0.5), "do not match their checksum"),
    "record cut": (lambda f: shorten(f / "interdomain.json", 10), "interdomain.json is damaged"),
    "record of nothing": (lambda f: (f / "interdomain.json").write_text("[]"), "interdomain.json is damaged"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_one_before_is_loaded(new, folder, caplog, kind):
    damage, said = DAMAGE[kind]
    damage(folder / "step-3")
    with caplog.at_level(logging.WARNING):
        assert new().load() == 2
    assert said in caplog.text
    assert f"SKIPPED: {folder / 'step-3'}" in caplog.text
    assert names(folder) == ["step-1", "step-2", "step-3.damaged"]


def test_how_far_a_run_got(folder, tmp_path):
    """As the launcher asks, which reads no index: what is set aside, half deleted or not a step does not count."""
    assert set(finished_steps(folder)) == {1, 2, 3}
    (folder / "step-3").rename(folder / "step-3.damaged")
    (folder / "step-2" / ".metadata").unlink()
    (folder / "step-x").mkdir()
    assert finished_steps(folder) == {1: folder / "step-1"}
    assert finished_steps(tmp_path / "nothing") == {}


def test_a_save_that_was_cut_short_is_left_where_it_is(new, folder, caplog):
    (folder / "step-3" / ".metadata").unlink()
    assert new().load() == 2
    assert f"SKIPPED: {folder / 'step-3'} has no .metadata" in caplog.text
    assert names(folder) == ["step-1", "step-2", "step-3"]


def test_several_in_a_row(new, folder, monkeypatch):
    """Every index is read once, though the checksums of step 2 are found to be wrong only after it was chosen."""
    reads = []
    monkeypatch.setattr(resume_from, "read", lambda path: reads.append(path.name) or read(path))
    DAMAGE["shard short"][0](folder / "step-3")
    DAMAGE["shard altered"][0](folder / "step-2")
    assert new().load() == 1
    assert names(folder) == ["step-1", "step-2.damaged", "step-3.damaged"]
    assert reads == ["step-3", "step-2", "step-1"]


def test_what_only_reading_finds(new, folder, caplog):
    """Without checksums, the first bytes of an entry: torch cannot read it at all."""
    alter(folder / "step-3" / "__0_0.distcp", 0)
    assert new(checksums=False).load() == 2
    assert "could not be read (rank 0: " in caplog.text
    assert names(folder) == ["step-1", "step-2", "step-3.damaged"]


@pytest.mark.parametrize("ranks", [1, 2, 5, 100])
def test_ranks_share_the_reading_and_miss_nothing(folder, ranks):
    index = read(folder / "step-3").index
    assert not any(altered_entry(folder / "step-3", index, rank, ranks) for rank in range(ranks))
    for at in (0.4, 0.5, 0.6):
        alter(folder / "step-3" / "__0_0.distcp", at)
        found = [altered_entry(folder / "step-3", index, rank, ranks) for rank in range(ranks)]
        assert len(list(filter(None, found))) == 1, at
        alter(folder / "step-3" / "__0_0.distcp", at)  # back


def test_the_step_is_saved_again_apart_from_what_was_there(new, folder):
    alter(folder / "step-3" / "__0_0.distcp", 0.5)
    damaged = (folder / "step-3" / "__0_0.distcp").read_bytes()
    run = new()
    run.manager.load()
    run.save(3).manager.close()
    assert (folder / "step-3.damaged" / "__0_0.distcp").read_bytes() == damaged
    assert new().load() == 3
    shorten(folder / "step-3" / "__0_0.distcp", 1)  # and once more: nothing that was set aside is overwritten
    assert new().load() == 2
    assert names(folder) == ["step-1", "step-2", "step-3.damaged", "step-3.damaged-2"]


def test_a_damaged_step_that_was_not_looked_at_is_set_aside_by_the_next_save(new, folder):
    run = new()
    assert run.load() == 3
    shorten(folder / "step-3" / "__0_0.distcp", 1)
    run.save(3).manager.close()
    assert names(folder) == ["step-1", "step-2", "step-3", "step-3.damaged"]


def test_the_step_that_was_asked_for_is_not_replaced(new, folder, capsys):
    shorten(folder / "step-3" / "__0_0.distcp", 1)
    error = refusal(capsys, new().load, 3)
    assert "checkpoint.load_step = 3, but" in error
    assert "it has: 1, 2." in error
    assert "its shard __0_0.distcp has" in error
    alter(folder / "step-2" / "__0_0.distcp", 0.5)
    assert "do not match their checksum" in refusal(capsys, new().load, 2)
    assert names(folder) == ["step-1", "step-2", "step-3"]


def test_a_run_does_not_start_over_where_it_had_come_far(new, folder, capsys):
    for step in (1, 2, 3):
        shorten(folder / f"step-{step}" / "__0_0.distcp", 1)
    for _ in range(2):  # nor at the second try
        error = refusal(capsys, new().load)
        assert f"no checkpoint in {folder} reads back whole" in error
        assert names(folder) == ["step-1", "step-2", "step-3"]


def test_the_first_save_that_was_cut_short_is_no_progress(new, folder):
    for step in (1, 2, 3):
        (folder / f"step-{step}" / ".metadata").unlink()
    assert new().load() is None


def test_retention_does_not_count_the_damaged(new, folder):
    shorten(folder / "step-2" / "__0_0.distcp", 1)
    shorten(folder / "step-3" / ".metadata", 20)
    run = new(keep_latest_k=2)
    run.manager.load()
    run.save(4).manager.close()
    assert names(folder) == ["step-1", "step-2.damaged", "step-3.damaged", "step-4"]


def test_retention_reads_no_index(new, folder, monkeypatch):
    """An index of many ranks takes rank 0 seconds, in which all wait."""
    run = new(keep_latest_k=3)
    run.manager.load()
    monkeypatch.setattr(resume_from, "read", lambda path: pytest.fail(f"{path} was read"))
    for step in (4, 5, 6):
        run.save(step)
    run.manager.close()
    assert names(folder) == ["step-4", "step-5", "step-6"]


def test_an_asynchronous_save_is_whole_before_it_counts(new, folder, monkeypatch):
    """Neither its index nor the word of the manager before the data are on the disk."""
    run = new(async_mode="async")
    assert run.manager.async_mode == AsyncMode.ASYNC
    run.save(4)
    assert run.manager.save_now(4)  # waits for what is pending, and saves nothing twice
    assert run.manager.save_future is None
    run.manager.close()
    assert new().load() == 4


def test_now_means_on_the_disk(new, folder):
    run = new(interval=100)
    run.set(7)
    assert run.manager.save_now(7)
    run.manager.close()
    assert new().load() == 7
    assert new(load_only=True).manager.save_now(8) is False


@pytest.mark.parametrize("ended", [EOFError("its process is gone"), CheckpointException("write", {})])
def test_now_even_where_the_save_under_way_failed(new, folder, caplog, ended):
    """The signal that asks the run to leave has ended the process that wrote."""
    run = new(async_mode="async").save(4)
    run.manager._async_wait()
    (folder / "step-4" / ".metadata").unlink()
    run.manager.save_future = Future()
    run.manager.save_future.set_exception(ended)
    assert run.manager.save_now(4)
    assert f"the save of {folder / 'step-4'} that was under way failed" in caplog.text
    run.manager.close()
    assert new().load() == 4


def test_all_ranks_save_anew_where_one_failed(new, folder, monkeypatch):
    run = new(async_mode="async").save(4)
    run.manager._async_wait()
    (folder / "step-4" / ".metadata").unlink()
    with monkeypatch.context() as others:
        others.setattr(dist, "all_gather_object", lambda found, own: found.__setitem__(slice(None), [own, True]))
        assert run.manager.save_now(4)
    run.manager.close()
    assert new().load() == 4


def test_a_run_whose_folder_was_taken_over_saves_nothing(new, folder, tmp_path, capsys):
    run, holder = new(), FolderLock(tmp_path / "run")
    run.manager.lock = holder
    holder.path.write_text("{}")  # another's
    run.manager.require_folder()  # not looked at since
    error = refusal(capsys, run.save, 4)
    assert f"job.dump_folder = {tmp_path / 'run'} was taken over by another run" in error
    assert names(folder) == ["step-1", "step-2", "step-3"]
    assert "was taken over" in refusal(capsys, run.manager.require_folder)


def test_a_process_that_saves_survives_the_schedulers_signal(new, folder, monkeypatch):
    def in_a_process(*args, **kwargs):
        program = "import os, signal; os.kill(os.getpid(), signal.SIGUSR1)"
        assert subprocess.run([sys.executable, "-c", program]).returncode == 0

    monkeypatch.setattr(CheckpointManager, "dcp_save", in_a_process)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    new().save(4).manager.close()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_all_ranks_hear_what_rank_0_met(alone):
    def fail():
        raise PermissionError("no")

    with pytest.raises(PermissionError, match="no"):
        checkpoint.on_rank_0(fail)


@pytest.mark.parametrize("settings", [{"step": -1}, {"step": 2}, {"step": 3}])
def test_what_a_newer_pytorch_wrote_is_refused_and_left_alone(new, folder, capsys, settings):
    """Of the newest checkpoint, whose index has a class that this PyTorch does not have."""
    index, record = (folder / "step-3" / name for name in (".metadata", "interdomain.json"))
    index.write_bytes(index.read_bytes().replace(b"TensorProperties", b"TensorPropertieZ"))
    record.write_text(json.dumps(json.loads(record.read_text()) | {"versions": {"torch": "99.1.0+cu990"}}))
    error = refusal(capsys, new().load, **settings)
    assert f"{folder / 'step-3'} was written by PyTorch 99.1.0+cu990, and PyTorch {torch.__version__}, which" in error
    assert names(folder) == ["step-1", "step-2", "step-3"]
