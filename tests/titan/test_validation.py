"""The validator in one process, against the plainest computation of the same number."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from interdomain.model import Transformer, build_config, loss
from interdomain.model.loss import Head
from interdomain.titan.data.folders import open_dataset
from interdomain.titan.settings.job_config import read_job_config
from interdomain.titan.step.passes import Passes
from interdomain.titan.watch.validate import FixedValidator

from .conftest import synthetic
from .runs import flags

pytestmark = pytest.mark.usefixtures("alone")

WINDOWS = 16  # of 64 tokens: validation.tokens = 1,000, rounded up


@pytest.fixture(scope="module")
def model():
    model = Transformer(build_config("debug", n_basis=4, vocab_size=512))
    model.init_weights()
    return model


class Recorder:
    ntokens_since_last_log = 0

    def __init__(self):
        self.losses = []
        self.scalars = []

    def log_validation(self, loss, step, scalars):
        self.losses.append(loss)
        self.scalars.append(scalars)


def validator(corpus, model=None, rank=0, ranks=1, **settings):
    job = read_job_config(flags(corpus, "folder", validation__enable=True, **settings))
    meshes = SimpleNamespace(context=None, first_of_sequences=True, gather_sequences=lambda x: x)
    return FixedValidator(
        job=job,
        rank=rank,
        ranks=ranks,
        passes=Passes([model], None, meshes, torch.device("cpu"), 1),
        metrics=Recorder(),
        checkpoints=SimpleNamespace(note_validation=lambda *seen: None),
    )


def test_positions_reach_the_model_if_training_has_them(corpus, model):
    every = {"validation__tokens": 0}
    apart, through = (
        validator(corpus, model, data__reset_state_at_documents=reset, **every) for reset in (True, False)
    )
    for validating in (apart, through):
        validating.validate([model], 1)
    assert apart.metrics.losses != through.metrics.losses
    assert model.training


@pytest.mark.parametrize(("ranks", "batch", "odd"), [(5, 3, 0), (2, 1, 1)])
def test_ranks_share_every_window_once_and_make_as_many_passes(corpus, ranks, batch, odd):
    """Windows that fill up the last pass keep their inputs, for -100 is no token, and have no labels."""
    settings = {"validation__local_batch_size": batch, "validation__tokens": 64 * (WINDOWS + odd)}
    every = torch.cat([labels for (_, labels), _ in validator(corpus, **settings)._batches()])
    shares = [list(validator(corpus, None, rank, ranks, **settings)._batches()) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    assert all((inputs["input"] >= 0).all() for share in shares for (inputs, _), _ in share)
    real = torch.cat([labels for share in shares for (_, labels), _ in share])
    real = real[(real != -100).all(1)]
    assert len(real) == WINDOWS + odd
    assert {tuple(row.tolist()) for row in real} == {tuple(row.tolist()) for row in every[: WINDOWS + odd]}


def test_the_windows_lie_evenly_over_the_split(corpus):
    """The first tokens of mixed files would be one file's."""
    dataset = open_dataset(read_job_config(flags(corpus, "folder")), "validation")
    inputs = torch.cat([inputs["input"] for (inputs, _), _ in validator(corpus, validation__tokens=4 * 64)._batches()])
    begins = [i * len(dataset) // 4 for i in range(4)]
    assert begins[-1] >= len(dataset) // 2
    assert inputs[:4].tolist() == dataset.read_batch(begins)[:, :-1].tolist()


def test_no_more_windows_than_the_split_has(corpus):
    windows = len(open_dataset(read_job_config(flags(corpus, "folder")), "validation"))
    for tokens in (0, 10**9):  # all of the split, also where it holds less than is asked
        assert validator(corpus, validation__tokens=tokens).windows == windows


@pytest.mark.parametrize(
    ("step", "missed", "compiled", "validated"),
    [
        (3, True, False, True),
        (3, False, False, False),
        (2, True, False, False),
        # Compiled for one shape first, and then for any: the steps that follow would not be those without the restart.
        (3, True, True, False),
        (6, True, True, True),
    ],
)
def test_a_saved_step_that_lacks_its_validation_gets_it(corpus, model, step, missed, compiled, validated, caplog):
    settings = {"validation__tokens": 64, "validation__freq": 3, "compile__enable": compiled}
    validating = validator(corpus, model, **settings)
    noted = []
    validating.checkpoints.lacks_validation = lambda at: missed
    validating.checkpoints.note_validation = lambda *seen: noted.append(seen)
    validating.run_missed_validation([model], step)
    expected = [(step, loss, pytest.approx(math.exp(loss)), None) for loss in validating.metrics.losses]
    assert [seen[:4] for seen in noted] == expected
    assert len(noted) == validated


def test_losses_by_document(corpus, model):
    """Over the ranks they add up to the mean, and a document's labels are those that the windows have of it."""
    noted = []
    validating = validator(corpus, model, validation__tokens=0)
    validating.checkpoints.note_validation = lambda *seen: noted.append(seen)
    validating.validate([model], 1)
    (_, mean, _, _, (nats, labels)) = noted[0]
    dataset = validating.dataset
    assert sum(nats) / sum(labels) == pytest.approx(mean)
    lengths = [
        len(document) for shard in dataset.corpus.shards for document in map(shard.__getitem__, range(len(shard)))
    ]
    stream = [number for number, length in enumerate(lengths) for _ in range(length)][1 : len(dataset) * 64 + 1]
    assert labels == [stream.count(number) for number in range(len(lengths))]
    assert len(labels) > 1


class Guessing(torch.nn.Module):
    """A model that knows the next token two times in three, and else takes one of these words for it."""

    def __init__(self, words):
        super().__init__()
        self.words = words
        self.output = Head(words, words)
        self.draw = random.Random(0)
        torch.nn.init.eye_(self.output.weight)
        self.seen = []

    def dynamics(self):
        return []

    def forward(self, tokens, labels):
        following = tokens.roll(-1, dims=1).tolist()
        guessed = [
            [t if self.draw.random() < 0.67 else self.draw.randrange(self.words) for t in row] for row in following
        ]
        logits = torch.rand(*tokens.shape, self.words) + 2 * F.one_hot(torch.tensor(guessed), self.words)
        self.seen += zip(logits, labels, strict=True)
        return self.output(logits, labels)


def by_hand(seen):
    """[(position, loss) of every label], [whether each answer is right] from the logits of all tokens, one after the other."""
    losses = []
    right = []
    for logits, labels in seen:
        run = None
        for t, label in enumerate(labels.tolist()):
            if label == -100:
                run = None
                continue
            losses.append((t, -logits[t].double().log_softmax(-1)[label].item()))
            if run is None:
                right.append(run := [])
            run.append(logits[t].argmax().item() == label)
    return losses, [all(run) for run in right]


@pytest.mark.parametrize("kind", ["selective-copying", None])
def test_loss_by_position_and_accuracy(kind, corpus, tmp_path, monkeypatch):
    """Answers of four tokens; a corpus without answers. By pieces that cut both windows and answers."""
    monkeypatch.setattr(loss, "piece_tokens", lambda vocab_size: 49)
    source = synthetic(tmp_path / "copies", kind, 4, 20, length=32) if kind else corpus
    model = Guessing(20 if kind else 512)
    validating = validator(source, model)
    validating.validate([model], 1)
    losses, right = by_hand(model.seen)
    (found,) = validating.metrics.scalars
    expected = {}
    accuracy = found.pop("validation_metrics/accuracy", None)
    for first in (0, 1, 2, 4, 8, 16, 32):
        last = max(0, 2 * first - 1)
        if values := [value for t, value in losses if first <= t <= last]:
            expected[f"validation_position/{first:04d}-{last:04d}"] = pytest.approx(sum(values) / len(values), rel=1e-6)
    assert found == expected
    assert validating.metrics.losses == [pytest.approx(sum(value for _, value in losses) / len(losses), rel=1e-6)]
    assert len(losses) == WINDOWS * (8 if kind else 64)
    assert model.output.scores is None
    if kind:
        assert len(right) == WINDOWS * 2
        assert accuracy == sum(right) / len(right)
        assert 0.05 < accuracy < 0.5
    else:
        assert accuracy is None
