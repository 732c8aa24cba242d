"""A run whose saves take milliseconds: TorchTitan's checkpoint manager, as the plugin extends it, over a small module."""

import json
from types import SimpleNamespace

import pytest
import torch

from interdomain.checkpoint.step_folder import RECORD_FACTS
from interdomain.model import build_config
from interdomain.titan.host import translate
from interdomain.titan.resume.checkpoint import SelfDescribingCheckpoints
from interdomain.titan.settings.job_config import read_job_config
from interdomain.titan.step.guard import StepGuard

from .runs import TINY


class State:
    """An optimizer, a loader, a schedule, a trainer: one number each, equal to the step."""

    def __init__(self):
        self.step, self.step_guard, self.rates = 0, StepGuard(), {}

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


class Run:
    """A manager and what it saves: the weights of step N are all N.

    flags, fingerprints: of the record. at: another folder of checkpoints. settings: of [checkpoint].
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
        self.model, self.trainer = torch.nn.Linear(300, 7), State()
        self.others = {name: State() for name in ("optimizers", "lr_schedulers", "dataloader")}
        record = {name: {} for name in (*RECORD_FACTS, "tokenizer")} | {
            "size": "debug",
            "condition": "interdomain",
        }
        record |= {"format_version": 1, "model": (model or build_config("debug")).to_dict()}
        record |= {"configuration": job.to_dict(), "fingerprints": fingerprints or {}}
        self.manager = SelfDescribingCheckpoints(
            **self.others,
            model_parts=[self.model],
            states={"train_state": self.trainer},
            checkpoint_config=config,
            base_folder=str(folder),
            record={
                **record,
                "run": {
                    "seed": job.debug.seed,
                    "tokens_per_step": tokens_per_step,
                    "planned_steps": 100,
                },
            },
            tokenizer=SimpleNamespace(
                write=lambda folder: (folder / "tokenizer.model").write_bytes(b"tokenizer")
            ),
            milestones=milestones,
            lock=None,
        )
        if at:
            self.manager.folder = str(at)

    def save(self, *steps):
        for step in steps:
            for state in (self.trainer, *self.others.values()):
                state.step = step
            with torch.no_grad():
                for p in self.model.parameters():
                    p.fill_(step)
            self.manager.save(step)
        self.manager.close()

    def load(self, step=-1):
        """The step that was loaded: weights and all other state are of it."""
        loaded = self.manager.load(step)
        self.manager.close()
        (weights,) = (
            {value for p in self.model.parameters() for value in p.unique().tolist()}
            if loaded
            else (None,)
        )
        assert not loaded or {state.step for state in (self.trainer, *self.others.values())} == {
            weights
        }
        return weights


@pytest.fixture
def new(alone, tmp_path):
    """A run in the folder, as a process that starts makes it."""
    return lambda **settings: Run(tmp_path / "run", **settings)


@pytest.fixture
def folder(new, tmp_path):
    """Checkpoints of steps 1, 2 and 3."""
    new().save(1, 2, 3)
    return tmp_path / "run" / "checkpoint"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def record(folder, step):
    return json.loads((folder / f"step-{step}" / "interdomain.json").read_text())


def write_record(step, **changes):
    """Change a checkpoint's record. None leaves a value out."""
    path = step / "interdomain.json"
    changed = json.loads(path.read_text()) | changes
    path.write_text(
        json.dumps({name: value for name, value in changed.items() if value is not None})
    )


def shorten(path, by=1):
    with open(path, "ab") as f:
        f.truncate(path.stat().st_size - by)


def alter(path, at):
    data = bytearray(path.read_bytes())
    place = int(at * len(data))
    data[place : place + 16] = bytes(255 - byte for byte in data[place : place + 16])
    path.write_bytes(data)


SHARD = "__0_0.distcp"
DAMAGE = {
    "index cut": (lambda step: shorten(step / ".metadata", 50), ".metadata is damaged"),
    "shard gone": (lambda step: (step / SHARD).unlink(), "its shard __0_0.distcp is missing"),
    "shard short": (lambda step: shorten(step / SHARD), "its shard __0_0.distcp has"),
    "shard altered": (lambda step: alter(step / SHARD, 0.5), "do not match their checksum"),
    "record cut": (
        lambda step: shorten(step / "interdomain.json", 10),
        "interdomain.json is damaged",
    ),
}


def damage(step, kind):
    DAMAGE[kind][0](step)
