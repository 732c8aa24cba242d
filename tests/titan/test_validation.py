"""The validator in one process, against the plainest computation of the same number."""

import math
import random
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.nn import functional as F

from interdomain.model import Transformer, build_config, loss
from interdomain.model.loss import Head
from interdomain.titan.data.folders import open_dataset
from interdomain.titan.step.passes import Passes
from interdomain.titan.watch.validate import FixedValidator

from .conftest import synthetic
from .runs import parse

pytestmark = pytest.mark.usefixtures("alone")

WINDOWS = 16  # of 64 tokens: validation.tokens = 1,000, rounded up


@pytest.fixture(scope="module")
def model():
    model = Transformer(build_config("debug", n_basis=4, vocab_size=512))
    model.init_weights()
    return model


def validator(corpus, model=None, given="", rank=0, ranks=1):
    meshes = SimpleNamespace(context=None, is_first_of_sequences=True, gather_sequences=lambda x: x)
    return FixedValidator(
        job=parse(f"--validation.enable {given}", corpus),
        rank=rank,
        ranks=ranks,
        passes=Passes([model], None, meshes, torch.device("cpu"), 1),
        metrics=Mock(ntokens_since_last_log=0),
        checkpoints=Mock(),
    )


def logged(validating):
    """Loss, step and further scalars of the one validation that was logged."""
    validating.metrics.log_validation.assert_called_once()
    return validating.metrics.log_validation.call_args.args


def test_positions_reach_the_model_if_training_has_them(corpus, model):
    every = "--validation.tokens 0"
    apart = validator(corpus, model, f"{every} --data.reset_state_at_documents")
    through = validator(corpus, model, every)
    apart.validate([model], 1)
    through.validate([model], 1)
    assert logged(apart)[0] != logged(through)[0]
    assert model.training


@pytest.mark.parametrize(("ranks", "batch", "odd"), [(5, 3, 0), (2, 1, 1)])
def test_ranks_share_every_window_once_and_make_as_many_passes(corpus, ranks, batch, odd):
    """Windows that fill up the last pass keep their inputs, for -100 is no token, and have no labels."""
    windows = WINDOWS + odd
    given = f"--validation.local_batch_size {batch} --validation.tokens {64 * windows}"
    every = torch.cat([labels for (_, labels), _ in validator(corpus, None, given)._batches()])
    shares = [[*validator(corpus, None, given, rank, ranks)._batches()] for rank in range(ranks)]
    passes = [one for share in shares for (one, _) in share]
    assert len(passes) == ranks * len(shares[0])
    assert all((inputs["input"] >= 0).all() for inputs, _ in passes)
    labels = torch.cat([labels for _, labels in passes])
    real = labels[(labels != -100).all(1)]
    assert sorted(real.tolist()) == sorted(every[:windows].tolist())


def test_the_windows_lie_evenly_over_the_split(corpus):
    """The first tokens of mixed files would be one file's."""
    dataset = open_dataset(parse(corpus=corpus), "validation")
    (inputs, _), _ = next(iter(validator(corpus, None, "--validation.tokens 256")._batches()))
    begins = [i * len(dataset) // 4 for i in range(3)]
    assert inputs["input"].tolist() == dataset.read_batch(begins)[:, :-1].tolist()


@pytest.mark.parametrize("tokens", [0, 10**9])
def test_all_windows_of_the_split(corpus, tokens):
    """Also where it holds less than is asked."""
    windows = len(open_dataset(parse(corpus=corpus), "validation"))
    assert validator(corpus, None, f"--validation.tokens {tokens}").windows == windows


@pytest.mark.parametrize(
    ("step", "missed", "flag", "validated"),
    [
        (3, True, "--compile.no-enable", True),
        (3, False, "--compile.no-enable", False),
        (2, True, "--compile.no-enable", False),
        # Compiled for one shape first, and then for any: the steps that follow would differ.
        (3, True, "--compile.enable", False),
        (6, True, "--compile.enable", True),
    ],
)
def test_a_saved_step_that_lacks_its_validation_gets_it(
    corpus, model, step, missed, flag, validated
):
    validating = validator(corpus, model, f"--validation.tokens 64 --validation.freq 3 {flag}")
    validating.checkpoints.lacks_validation.return_value = missed
    validating.run_missed_validation([model], step)
    assert validating.checkpoints.note_validation.called == validated
    if validated:
        mean = logged(validating)[0]
        noted = validating.checkpoints.note_validation.call_args.args
        assert noted[:4] == (step, mean, pytest.approx(math.exp(mean)), None)


def test_losses_by_document(corpus, model):
    """Over the ranks they add up to the mean, and a document's labels are those that the windows have of it."""
    validating = validator(corpus, model, "--validation.tokens 0")
    validating.validate([model], 1)
    _, mean, _, _, (nats, labels) = validating.checkpoints.note_validation.call_args.args
    assert sum(nats) / sum(labels) == pytest.approx(mean)
    stream = []
    documents = 0
    for shard in validating.dataset.corpus.shards:
        for i in range(len(shard)):
            stream += [documents] * len(shard[i])
            documents += 1
    read = stream[1 : len(validating.dataset) * 64 + 1]
    assert labels == [read.count(document) for document in range(documents)]
    assert documents > 1


class Guessing(torch.nn.Module):
    """A model that knows the next token two times in three, and else takes one of these words for it."""

    def __init__(self, words):
        super().__init__()
        self.words = words
        self.output = Head(words, words)
        self.draw = random.Random(0)
        torch.nn.init.eye_(self.output.weight)
        self.seen = []

    def ssm_tensors(self):
        return []

    def forward(self, tokens, labels):
        following = tokens.roll(-1, dims=1).tolist()
        guessed = [
            [t if self.draw.random() < 0.67 else self.draw.randrange(self.words) for t in row]
            for row in following
        ]
        logits = torch.rand(*tokens.shape, self.words) + 2 * F.one_hot(
            torch.tensor(guessed), self.words
        )
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
    mean, _, found = logged(validating)
    expected = {}
    for first in (0, 1, 2, 4, 8, 16, 32):
        last = max(0, 2 * first - 1)
        if values := [value for t, value in losses if first <= t <= last]:
            expected[f"validation_position/{first:04d}-{last:04d}"] = pytest.approx(
                sum(values) / len(values), rel=1e-6
            )
    if kind:
        assert len(right) == WINDOWS * 2
        expected["validation_metrics/accuracy"] = sum(right) / len(right)
        assert 0.05 < sum(right) / len(right) < 0.5
    assert found == expected
    assert mean == pytest.approx(sum(value for _, value in losses) / len(losses), rel=1e-6)
    assert len(losses) == WINDOWS * (8 if kind else 64)
    assert model.output.scores is None
