"""The validator in one process, against the plainest computation of the same number."""

import itertools
import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from interdomain.model import Transformer, build_config, loss
from interdomain.model.loss import Head
from interdomain.titan.step.passes import Passes
from interdomain.titan.watch.validate import FixedValidator

from .conftest import synthetic
from .runs import parse

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(scope="module")
def model():
    model = Transformer(build_config("debug", n_basis=4, vocab_size=512))
    model.init_weights()
    return model


def make_validator(corpus, model=None, given=""):
    meshes = SimpleNamespace(context=None, is_first_of_sequences=True, gather_sequences=torch.clone)
    return FixedValidator(
        job=parse(f"--validation.enable {given}", corpus),
        rank=0,
        ranks=1,
        passes=Passes([model], None, meshes, torch.device("cpu"), 1),
        metrics=mock.Mock(ntokens_since_last_log=0),
        checkpoints=mock.Mock(),
    )


def validate(validator, model):
    """Validates once. Returns what was logged: the loss and other scalars."""
    validator.validate([model], 1)
    validator.metrics.log_validation.assert_called_once()
    loss, _, scalars = validator.metrics.log_validation.call_args.args
    return loss, scalars


def test_positions_reach_the_model_if_training_has_them(short, model):
    through, _ = validate(make_validator(short, model), model)
    apart = make_validator(short, model, "--data.reset_state_at_documents")
    assert validate(apart, model)[0] != through
    assert model.training


def test_the_windows_lie_evenly_over_the_split(corpus):
    """The first tokens of mixed files would be one file's."""
    validator = make_validator(corpus, None, "--validation.tokens 256")
    (inputs, _), _ = next(validator._batches())
    quarter = len(validator.dataset) / 4
    windows = validator.dataset.read_batch([0, int(quarter), int(2 * quarter)])
    assert inputs["input"].tolist() == windows[:, :-1].tolist()


@pytest.mark.parametrize("tokens", [0, 10**9])
def test_all_windows_of_the_split(corpus, tokens):
    """The split may hold less than is asked for."""
    validator = make_validator(corpus, None, f"--validation.tokens {tokens}")
    assert validator.windows == len(validator.dataset)


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


def test_losses_by_document(short, model):
    """They add up to the mean. A document's labels are those that the windows have of it."""
    validator = make_validator(short, model, "--validation.tokens 0")
    validator.validate([model], 1)
    _, mean, perplexity, _, by_document = validator.checkpoints.note_validation.call_args.args
    nats, labels = by_document
    assert perplexity == pytest.approx(math.exp(mean))
    assert sum(nats) / sum(labels) == pytest.approx(mean)

    # Each token's document has a number, over all shards.
    numbers = []
    for number, document in enumerate(itertools.chain(*validator.dataset.corpus.shards)):
        numbers += [number] * len(document)
    read = numbers[1 : 64 * len(validator.dataset) + 1]
    assert labels == [read.count(number) for number in range(len(labels))]
    assert len(labels) > 1


class Guessing(torch.nn.Module):
    """A model that knows two labels in three, and else guesses any token."""

    def __init__(self, words):
        super().__init__()
        self.words = words
        self.output = Head(words, words)
        torch.nn.init.eye_(self.output.weight)
        self.draw = torch.Generator().manual_seed(0)
        self.passes = []

    def ssm_tensors(self):
        return []

    def forward(self, tokens, labels):
        knows = torch.rand(*labels.shape, 1, generator=self.draw) < 0.67
        noise = torch.rand(*labels.shape, self.words, generator=self.draw)
        logits = noise + 2 * knows * F.one_hot(labels.clamp(min=0), self.words)
        self.passes.append((logits, labels.clone()))
        return self.output(logits, labels)


@pytest.mark.parametrize("has_answers", [True, False])
def test_loss_by_position_and_accuracy(has_answers, corpus, tmp_path, monkeypatch):
    """Each window has two answers of four tokens. The pieces in which the loss is computed cut both windows and answers."""
    monkeypatch.setattr(loss, "piece_tokens", mock.Mock(return_value=49))
    source = corpus
    words = 512
    if has_answers:
        source = synthetic(tmp_path / "copies", "selective-copying", 4, 20, length=32)
        words = 20
    model = Guessing(words)
    mean, scalars = validate(make_validator(source, model), model)

    # Loss and mistake of each token that counts, of 16 windows. Others fill up the last pass.
    logits = torch.cat([logits for logits, _ in model.passes])[:16]
    labels = torch.cat([labels for _, labels in model.passes])[:16]
    counted = labels != -100
    losses = F.cross_entropy(logits.double().mT, labels, reduction="none")
    assert mean == pytest.approx(losses[counted].mean().item(), rel=1e-6)
    if has_answers:
        is_right = logits.argmax(dim=-1) == labels
        answers = is_right[counted].view(32, 4).all(dim=1)
        accuracy = answers.float().mean().item()
        assert scalars.pop("validation_metrics/accuracy") == accuracy
        assert 0.05 < accuracy < 0.5
    expected = {}
    for first, last in [(0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, 31), (32, 63)]:
        places = slice(first, last + 1)
        values = losses[:, places][counted[:, places]]
        if len(values):
            expected[f"validation_position/{first:04d}-{last:04d}"] = values.mean().item()
    assert scalars == pytest.approx(expected, rel=1e-6)
    assert model.output.scores is None
