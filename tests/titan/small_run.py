"""A run whose saves take milliseconds: TorchTitan's checkpoint manager, as the plugin extends it, over a small module."""

import functools
import json
import os
from pathlib import Path

import pytest
import torch

from interdomain.checkpoint.step_folder import RECORD_FACTS
from interdomain.model import build_config
from interdomain.titan.host import translate
from interdomain.titan.resume.checkpoint import SelfDescribingCheckpoints
from interdomain.titan.settings.job_config import read_job_config
from interdomain.titan.step.guard import StepGuard

from .runs import TINY

SHARD = "__0_0.distcp"
RECORD = "interdomain.json"


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
    def write(self, folder):
        (folder / "tokenizer.model").write_bytes(b"tokenizer")


class Run:
    """A checkpoint manager and what it saves. All weights of step N are N.

    Args:
        folder: The run's folder.
        model: The model's configuration in the run's record.
        flags: The run's flags.
        fingerprints: Fingerprints of the texts in the run's record.
        at: Another folder for the checkpoints.
        settings: Settings of [checkpoint].
    """

    def __init__(
        self,
        folder,
        model=None,
        tokens_per_step=512,
        flags=(),
        fingerprints=None,
        milestones=(),
        at=None,
        **settings,
    ):
        job = read_job_config(["--job.config_file", str(TINY), *flags])
        config = translate(job).checkpoint
        vars(config).update({"enable": True, "interval": 1, **settings})

        record = {name: {} for name in (*RECORD_FACTS, "tokenizer")}
        record["format_version"] = 1
        record["model"] = (model or build_config("debug")).to_dict()
        record["size"] = "debug"
        record["condition"] = "interdomain"
        record["configuration"] = job.to_dict()
        record["fingerprints"] = fingerprints or {}
        record["run"] = {
            "seed": job.debug.seed,
            "tokens_per_step": tokens_per_step,
            "planned_steps": 100,
        }

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
            checkpoint_config=config,
            base_folder=str(folder),
            record=record,
            tokenizer=SmallTokenizer(),
            milestones=milestones,
            lock=None,
        )
        if at:
            self.manager.folder = str(at)

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
    """new(...): a run in the folder, as a process that starts makes it."""
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


def shorten(path: Path, by=1):
    os.truncate(path, path.stat().st_size - by)


def alter_shard(step):
    """Inverts 16 bytes in the middle of a checkpoint's shard."""
    data = bytearray((step / SHARD).read_bytes())
    middle = len(data) // 2
    for place in range(middle, middle + 16):
        data[place] = 255 - data[place]
    (step / SHARD).write_bytes(data)


# How a checkpoint may be damaged, and what is said of it.
DAMAGE = {
    "index cut": ".metadata is damaged",
    "shard gone": "its shard __0_0.distcp is missing",
    "shard short": "its shard __0_0.distcp has",
    "shard altered": "are not as they were saved",
    "record cut": "interdomain.json is damaged",
}


def damage(step, kind):
    if kind == "index cut":
        shorten(step / ".metadata", 50)
    elif kind == "shard gone":
        (step / SHARD).unlink()
    elif kind == "shard short":
        shorten(step / SHARD)
    elif kind == "shard altered":
        alter_shard(step)
    elif kind == "record cut":
        shorten(step / RECORD, 10)
