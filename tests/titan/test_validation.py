"""The validator in one process, against the plainest computation of the same number."""

import itertools
import math
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


def whole_sequences(scores):
    return scores


def make_validator(corpus, model=None, given="", rank=0, ranks=1):
    meshes = SimpleNamespace(
        context=None, is_first_of_sequences=True, gather_sequences=whole_sequences
    )
    return FixedValidator(
        job=parse(f"--validation.enable {given}", corpus),
        rank=rank,
        ranks=ranks,
        passes=Passes([model], None, meshes, torch.device("cpu"), 1),
        metrics=Mock(ntokens_since_last_log=0),
        checkpoints=Mock(),
    )


def logged(validator):
    """Returns loss, step and other scalars of the only validation that was logged."""
    validator.metrics.log_validation.assert_called_once()
    return validator.metrics.log_validation.call_args.args


def test_positions_reach_the_model_if_training_has_them(corpus, model):
    losses = set()
    for flag in ("--data.reset_state_at_documents", "--data.no-reset_state_at_documents"):
        validator = make_validator(corpus, model, f"--validation.tokens 0 {flag}")
        validator.validate([model], 1)
        losses.add(logged(validator)[0])
    assert len(losses) == 2
    assert model.training


def labels_of(validator):
    """Returns the labels of each pass."""
    passes = []
    for (inputs, labels), _ in validator._batches():
        assert (inputs["input"] >= 0).all()  # windows that fill up the last pass keep their inputs
        passes.append(labels)
    return passes


@pytest.mark.parametrize(("ranks", "batch", "windows"), [(5, 3, 16), (2, 1, 17)])
def test_ranks_share_every_window_once_and_make_as_many_passes(corpus, ranks, batch, windows):
    """The last passes are filled up with windows without labels."""
    given = f"--validation.local_batch_size {batch} --validation.tokens {64 * windows}"
    by_rank = [labels_of(make_validator(corpus, None, given, rank, ranks)) for rank in range(ranks)]
    assert len(set(map(len, by_rank))) == 1
    labels = torch.cat(list(itertools.chain.from_iterable(by_rank)))
    counted = labels[(labels != -100).all(1)]
    expected = torch.cat(labels_of(make_validator(corpus, None, given)))[:windows]
    assert sorted(counted.tolist()) == sorted(expected.tolist())


def test_the_windows_lie_evenly_over_the_split(corpus):
    """The first tokens of mixed files would be one file's."""
    dataset = open_dataset(parse(corpus=corpus), "validation")
    batches = make_validator(corpus, None, "--validation.tokens 256")._batches()
    (inputs, _), _ = next(batches)
    quarters = [0, len(dataset) // 4, 2 * len(dataset) // 4]
    assert inputs["input"].tolist() == dataset.read_batch(quarters)[:, :-1].tolist()


@pytest.mark.parametrize("tokens", [0, 10**9])
def test_all_windows_of_the_split(corpus, tokens):
    """The split may hold less than is asked for."""
    windows = len(open_dataset(parse(corpus=corpus), "validation"))
    assert make_validator(corpus, None, f"--validation.tokens {tokens}").windows == windows


@pytest.mark.parametrize(
    ("step", "missed", "flag", "validated"),
    [
        (3, True, "--compile.no-enable", True),
        (3, False, "--compile.no-enable", False),
        (2, True, "--compile.no-enable", False),
        # Code is compiled for one shape first, and then for any: the next steps would differ.
        (3, True, "--compile.enable", False),
        (6, True, "--compile.enable", True),
    ],
)
def test_a_saved_step_that_lacks_its_validation_gets_it(
    corpus, model, step, missed, flag, validated
):
    given = f"--validation.tokens 64 --validation.freq 3 {flag}"
    validator = make_validator(corpus, model, given)
    validator.checkpoints.lacks_validation.return_value = missed
    validator.run_missed_validation([model], step)
    assert validator.checkpoints.note_validation.called == validated


def test_losses_by_document(corpus, model):
    """They add up to the mean. A document's labels are those that the windows have of it."""
    validator = make_validator(corpus, model, "--validation.tokens 0")
    validator.validate([model], 1)
    result = validator.checkpoints.note_validation.call_args.args
    _, mean, perplexity, _, (nats, labels) = result
    assert perplexity == pytest.approx(math.exp(mean))
    assert sum(nats) / sum(labels) == pytest.approx(mean)

    # The number of each token's document, over all shards.
    documents = []
    number = 0
    for shard in validator.dataset.corpus.shards:
        for i in range(len(shard)):
            documents += [number] * len(shard[i])
            number += 1
    read = documents[1 : 64 * len(validator.dataset) + 1]
    assert labels == [read.count(i) for i in range(number)]
    assert number > 1


class Guessing(torch.nn.Module):
    """A model that favours the next token two times in three, and else any token."""

    def __init__(self, words):
        super().__init__()
        self.words = words
        self.output = Head(words, words)
        torch.nn.init.eye_(self.output.weight)
        self.draw = torch.Generator().manual_seed(0)
        self.logits = []
        self.labels = []

    def ssm_tensors(self):
        return []

    def forward(self, tokens, labels):
        knows = torch.rand(tokens.shape, generator=self.draw) < 0.67
        others = torch.randint(self.words, tokens.shape, generator=self.draw)
        guesses = torch.where(knows, tokens.roll(-1, dims=1), others)
        noise = torch.rand(*tokens.shape, self.words, generator=self.draw)
        logits = noise + 2 * F.one_hot(guesses, self.words)
        self.logits += logits
        self.labels += labels
        return self.output(logits, labels)


def losses_and_answers(model):
    """Computes (position, loss) of every label and whether each answer is right, one token after the other."""
    losses = []
    answers = []
    for logits, labels in zip(model.logits, model.labels, strict=True):
        before = -100
        for t, label in enumerate(labels.tolist()):
            if label != -100:
                losses.append((t, F.cross_entropy(logits[t].double(), labels[t]).item()))
                if before == -100:
                    answers.append(True)
                if logits[t].argmax() != label:
                    answers[-1] = False
            before = label
    return losses, answers


def mean_of(losses, first, last):
    """Returns the mean loss at positions from `first` to `last`, or None if none has a label."""
    values = [value for t, value in losses if first <= t <= last]
    if not values:
        return None
    return sum(values) / len(values)


@pytest.mark.parametrize("kind", ["selective-copying", None])
def test_loss_by_position_and_accuracy(kind, corpus, tmp_path, monkeypatch):
    """Answers have four tokens. The pieces in which the loss is computed cut both windows and answers."""

    def piece_tokens(vocab_size):
        return 49

    monkeypatch.setattr(loss, "piece_tokens", piece_tokens)
    if kind:
        source = synthetic(tmp_path / "copies", kind, 4, 20, length=32)
        model = Guessing(20)
        labels_per_window = 8
    else:
        source = corpus
        model = Guessing(512)
        labels_per_window = 64
    validator = make_validator(source, model)
    validator.validate([model], 1)
    mean, _, scalars = logged(validator)
    losses, answers = losses_and_answers(model)
    assert len(losses) == WINDOWS * labels_per_window
    assert mean == pytest.approx(mean_of(losses, 0, 63), rel=1e-6)
    if kind:
        assert len(answers) == WINDOWS * 2
        accuracy = scalars.pop("validation_metrics/accuracy")
        assert accuracy == sum(answers) / len(answers)
        assert 0.05 < accuracy < 0.5
    expected = {}
    for first, last in [(0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, 31), (32, 63)]:
        value = mean_of(losses, first, last)
        if value is not None:
            expected[f"validation_position/{first:04d}-{last:04d}"] = value
    assert scalars == pytest.approx(expected, rel=1e-6)
    assert model.output.scores is None
