"""The validator in one process, against the plainest computation of the same number."""

import math
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torchtitan.components.loss import cross_entropy_loss

from interdomain.model import Transformer, build_config
from interdomain.titan.corpora import open_dataset
from interdomain.titan.preemption import SIGNALS, Preemption
from interdomain.titan.settings import read_job_config
from interdomain.titan.trainer import InterdomainTrainer
from interdomain.titan.validate import build_validator

from .conftest import flags

WINDOWS = 16  # of 64 tokens: validation.tokens = 1,000, rounded up


@pytest.fixture(scope="module")
def model():
    model = Transformer(build_config("debug", n_basis=4, vocab_size=512))
    model.init_weights()
    return model


class Recorder:
    ntokens_since_last_log = 0

    def __init__(self):
        self.losses, self.extra = [], []

    def log_validation(self, loss, step, extra_metrics):
        self.losses.append(loss)
        self.extra.append(extra_metrics)


def validator(corpus, rank=0, ranks=1, **settings):
    job = read_job_config(flags(corpus, "folder", validation__enable=True, **settings))
    return build_validator(
        job_config=job,
        dp_world_size=ranks,
        dp_rank=rank,
        parallel_dims=SimpleNamespace(get_optional_mesh=lambda name: None),
        loss_fn=cross_entropy_loss,
        metrics_processor=Recorder(),
        checkpoints=SimpleNamespace(note_validation=lambda *seen: None),
    )


@torch.no_grad()
def plain_mean(model, corpus, windows):
    dataset = open_dataset(read_job_config(flags(corpus, "folder")), "validation")
    rows = torch.from_numpy(dataset.read_batch(range(windows)))
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1).double(), rows[:, 1:].flatten()).item()


def test_the_mean_over_the_tokens_and_the_same_every_time(corpus, model):
    validating = validator(corpus)
    assert [len(labels) for _, labels in validating._batches()] == [3] * 6  # the last is filled up, with ignored labels
    for step in (1, 2):
        validating.validate([model], step)
    first, second = validating.metrics_processor.losses
    assert first == second
    assert first == pytest.approx(plain_mean(model, corpus, WINDOWS), rel=1e-6)
    assert validating.metrics_processor.extra[0].keys() == {f"mixer/layer_{i:02d}/readout_rms" for i in range(4)}
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_positions_reach_the_model_if_training_has_them(corpus, model):
    apart, through = validator(corpus, data__reset_state_at_documents=True), validator(corpus)
    for inputs, _ in apart._batches():
        assert inputs["positions"].shape == inputs["input"].shape
    for validating in (apart, through):
        validating.validate([model], 1)
    assert apart.metrics_processor.losses != through.metrics_processor.losses


@pytest.mark.parametrize("ranks", [2, 5])
def test_ranks_share_every_window_once_and_make_as_many_passes(corpus, ranks):
    whole = torch.cat([labels for _, labels in validator(corpus)._batches()])
    shares = [list(validator(corpus, rank, ranks)._batches()) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    real = torch.cat([labels for share in shares for _, labels in share])
    real = real[(real != -100).all(1)]
    assert len(real) == WINDOWS
    assert {tuple(row.tolist()) for row in real} == {tuple(row.tolist()) for row in whole[:WINDOWS]}


def test_all_of_the_split_where_it_holds_less_than_is_asked(corpus, model):
    windows = len(open_dataset(read_job_config(flags(corpus, "folder")), "validation"))
    for tokens in (0, 10**9):
        assert validator(corpus, validation__tokens=tokens).windows == windows


@pytest.mark.parametrize(("freq", "expected"), [(4, [1, 4, 6]), (3, [1, 3, 6]), (100, [1, 6])])
def test_the_steps_that_validate(corpus, freq, expected):
    validating = validator(corpus, validation__freq=freq)
    assert [step for step in range(1, 7) if validating.should_validate(step)] == expected


DUE = {"validation__freq": 3, "validation__local_batch_size": 8}  # of 6 steps; training's batches


@pytest.mark.parametrize(
    ("step", "lacking", "settings", "made_up"),
    [
        (3, True, DUE, True),
        (3, False, DUE, False),
        (2, True, DUE, False),
        (0, True, DUE, False),
        (3, True, {**DUE, "compile__enable": True}, True),
        # Compiled for one shape first, and then for any: the steps that follow would not be those without the restart.
        (3, True, {**DUE, "compile__enable": True, "validation__local_batch_size": 4}, False),
        (6, True, {**DUE, "compile__enable": True, "validation__local_batch_size": 4}, True),
    ],
)
def test_a_saved_step_that_lacks_its_validation_gets_it(corpus, model, step, lacking, settings, made_up, caplog):
    validating, noted = validator(corpus, validation__tokens=64, **settings), []
    validating.checkpoints.claim_validation = lambda at: lacking
    validating.checkpoints.note_validation = lambda *seen: noted.append(seen)
    validating.make_up([model], step)
    losses = validating.metrics_processor.losses
    assert noted == [(step, loss, pytest.approx(math.exp(loss))) for loss in losses]
    assert len(losses) == made_up
    shape_forbids = (step, settings["validation__local_batch_size"]) == (3, 4)
    assert ("step 3 was saved and not validated, and is not now: with compile.enable" in caplog.text) == shape_forbids


def test_a_signal_meanwhile_is_answered_after_the_first_step(alone, monkeypatch):
    """It does not end the rank: all ranks leave together."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    this = InterdomainTrainer.__new__(InterdomainTrainer)
    this.alone, this.step, this.model_parts, this.device = False, 3, [], torch.device("cpu")
    this.job_config = SimpleNamespace(validation=SimpleNamespace(enable=True), training=SimpleNamespace(steps=6))
    this.checkpointer = SimpleNamespace(require_folder=lambda: None)
    this.preemption = Preemption()
    this.validator = SimpleNamespace(make_up=lambda *_: os.kill(os.getpid(), signal.SIGUSR1))
    try:
        assert this.should_continue_training()
        assert not this.preemption.agreed()
        this.preemption.cast(torch.zeros(()))  # the first step's, in which nobody is asked
        assert this.preemption.agreed()
        this.preemption.cast(torch.zeros(()))
        assert not this.preemption.agreed()
    finally:
        del this.checkpointer
        for number, handler in before.items():
            signal.signal(number, handler)
