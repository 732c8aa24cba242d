"""A run whose saves take milliseconds: TorchTitan's checkpoint manager, as the plugin extends it, over a small module."""

import functools
import json
import os

import pytest
import torch

from interdomain.titan.host import translate
from interdomain.titan.plan.run_plan import make_plan
from interdomain.titan.resume.checkpoint import SelfDescribingCheckpoints, describe_run
from interdomain.titan.step.guard import StepGuard

from .runs import parse

SHARD = "__0_0.distcp"
RECORD = "interdomain.json"
FLAGS = "--checkpoint.enable --checkpoint.interval 1 --training.steps 100"


class State:
    """Stands for an optimizer, a loader, a schedule or a trainer. Its state is one number, the step."""

    def __init__(self):
        self.step = 0
        self.step_guard = StepGuard()
        self.rates = {}

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


class SmallTokenizer:
    file = "tokenizer.model"
    sha256 = ""
    vocab_size = 512

    def write(self, folder):
        (folder / self.file).write_bytes(b"tokenizer")


class Run:
    """A checkpoint manager and what it saves. All weights of step N are N.

    Args:
        folder: The run's folder.
        given: Flags of the run.
        fingerprints: Fingerprints of the texts in the run's record.
    """

    def __init__(self, folder, given="", **fingerprints):
        job = parse(f"--job.dump_folder {folder} {FLAGS} {given}")
        plan = make_plan(job, 1)
        tokenizer = SmallTokenizer()
        record = describe_run(plan, job, {}, tokenizer)
        self.model = torch.nn.Linear(300, 7)
        self.trainer = State()
        self.optimizers = State()
        self.dataloader = State()
        self.schedulers = State()
        self.manager = SelfDescribingCheckpoints(
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            dataloader=self.dataloader,
            model_parts=[self.model],
            states={"train_state": self.trainer},
            checkpoint_config=translate(job).checkpoint,
            base_folder=str(folder),
            record=record | {"fingerprints": fingerprints},
            tokenizer=tokenizer,
            milestones=plan.milestones,
            lock=None,
        )

    def save(self, *steps):
        for step in steps:
            for state in (self.trainer, self.optimizers, self.dataloader, self.schedulers):
                state.step = step
            for p in self.model.parameters():
                torch.nn.init.constant_(p, step)
            self.manager.save(step)
        self.manager.close()

    def load(self, step=-1):
        """Loads a checkpoint. Returns its step, which all weights and all other state must show, or None."""
        loaded = self.manager.load(step)
        self.manager.close()
        if not loaded:
            return None
        weights = torch.nn.utils.parameters_to_vector(self.model.parameters())
        assert weights.unique().tolist() == [self.trainer.step]
        assert self.optimizers.step == self.dataloader.step == self.trainer.step
        assert self.schedulers.step == self.trainer.step
        return self.trainer.step


@pytest.fixture
def new(alone, tmp_path):
    """new(flags): a run in the folder, as a process that starts makes it."""
    return functools.partial(Run, tmp_path / "run")


@pytest.fixture
def folder(new, tmp_path):
    """A folder with checkpoints of steps 1, 2 and 3."""
    new().save(1, 2, 3)
    return tmp_path / "run" / "checkpoint"


def names(folder):
    return sorted(os.listdir(folder))


def record(folder, step):
    return json.loads((folder / f"step-{step}" / RECORD).read_text())


def write_record(step, **changes):
    """Changes values of a checkpoint's record."""
    path = step / RECORD
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# How a checkpoint may be damaged.


def cut(path, by):
    os.truncate(path, path.stat().st_size - by)


def cut_index(step):
    cut(step / ".metadata", 50)


def cut_record(step):
    cut(step / RECORD, 10)


def cut_shard(step):
    cut(step / SHARD, 1)


def remove_shard(step):
    (step / SHARD).unlink()


def alter_shard(step):
    """Overwrites 16 bytes in the middle of a checkpoint's shard."""
    data = bytearray((step / SHARD).read_bytes())
    middle = len(data) // 2
    data[middle : middle + 16] = b"\xff" * 16
    (step / SHARD).write_bytes(data)
