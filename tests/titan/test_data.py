"""The loader's order and state, and what a damaged or unfit corpus gets."""

from functools import partial
from types import SimpleNamespace

import pytest

from interdomain.data import IndexedDatasetWriter, MixtureDataset, PackedDataset, TokenCorpus
from interdomain.titan.data.dataloader import PackedLoader, open_data
from interdomain.titan.errors import user_errors
from interdomain.titan.plan.run_plan import make_plan
from interdomain.titan.watch.validate import FixedValidator
from interdomain.tools import launch

from .conftest import refusal
from .runs import parse


def build(corpus, given=""):
    """Opens the data as the trainer does, and returns the loader."""
    job = parse(given, corpus)
    plan = user_errors(make_plan)(job, 1)
    return open_data(job, plan, 0, 1)[1]


def build_validator(corpus, given):
    job = parse(f"--validation.enable {given}", corpus)
    passes = SimpleNamespace(micro_batches_at_once=1)
    return FixedValidator(job=job, rank=0, ranks=1, passes=passes, metrics=None, checkpoints=None)


def packed(corpus, split="train"):
    return PackedDataset(TokenCorpus(corpus, split), seq_len=64, seed=42)


def take(loader, n):
    batches = iter(loader)
    return [next(batches) for _ in range(n)]


def test_the_launcher_warns_of_data_that_are_read_often(corpus, capsys):
    job = parse("", corpus)
    samples = len(packed(corpus))
    assert launch.check_data(job, samples=round(2.5 * samples)).endswith(", for 2.50 epochs")
    assert capsys.readouterr().err == ""
    launch.check_data(job, samples=9 * samples)
    assert "reads its data for 9.00 epochs" in capsys.readouterr().err


def test_other_data_begins_where_a_run_left_the_old(corpus, caplog):
    """A corpus that was read before continues where it was left, also after several changes."""
    text = partial(packed, corpus)
    other = partial(packed, f"{corpus}/validation-00000")

    def mixture():
        return MixtureDataset([text(), other()], [3, 1])

    # Each start reads some steps of four samples, and leaves its state to the next.
    state = None
    read = []
    for open_dataset, steps in ((text, 3), (mixture, 1), (mixture, 1), (other, 1), (text, 1)):
        loader = PackedLoader(open_dataset(), 4, rank=0, ranks=1)
        if state:
            loader.load_state_dict(state)
        rows = []
        for inputs, _ in take(loader, steps):
            rows += inputs["input"].tolist()
        read.append(sorted(rows))
        state = loader.state_dict()

    def samples(dataset, *indices):
        return dataset().read_batch(indices)[:, :-1].tolist()

    assert read == [
        sorted(samples(text, *range(12))),
        sorted(samples(text, 12, 13, 14) + samples(other, 0)),
        sorted(samples(text, 15, 16, 17) + samples(other, 1)),
        sorted(samples(other, 2, 3, 4, 5)),
        sorted(samples(text, 18, 19, 20, 21)),
    ]
    assert state["consumed_samples"] == 28
    assert "THE DATA CHANGES after 12 samples" in caplog.text
    assert caplog.text.count("THE DATA CHANGES") == 3


@pytest.fixture
def two(corpus):
    """Returns data.corpus of a mixture."""
    return f"{corpus},{corpus}/validation-00000"


@pytest.mark.parametrize(("setting", "value"), [("training.seq_len", 32), ("debug.seed", 43)])
def test_another_length_or_seed_is_no_continuation(two, alone, capsys, setting, value):
    weights = "--data.weights 1 2"
    state = build(two, weights).state_dict()
    changed = build(two, f"{weights} --{setting} {value}")
    error = refusal(capsys, changed.load_state_dict, state)
    assert f"was made with another {setting}" in error
    assert "exclude_from_loading dataloader" in error


def test_weights_in_the_same_proportion_are_the_same_data(two, alone, caplog):
    state = build(two, "--data.weights 1 2").state_dict()
    build(two, "--data.weights 10 20").load_state_dict(state)
    assert "THE DATA CHANGES" not in caplog.text
    build(two, "--data.weights 2 1").load_state_dict(state)
    assert "THE DATA CHANGES" in caplog.text


def test_mixtures_that_cannot_be(two, pairs, alone, capsys):
    answers = "--data.weights 1 1 --model.vocab_size 8"
    error = refusal(capsys, build, f"{pairs},{pairs}", answers)
    assert "cannot be part of a mixture" in error
    error = refusal(capsys, build, two, "--data.weights 1")
    assert "A mixture of 2 corpora needs 2 weights" in error


def test_an_id_outside_the_vocabulary_ends_the_run_when_it_is_read(corpus, tmp_path, alone, capsys):
    with IndexedDatasetWriter(tmp_path / "shard", 600) as writer:
        writer.add_document([1, 2, 599] * 40)
    loader = build(tmp_path / "shard", f"--data.tokenizer {corpus}/tokenizer.model")
    assert "599" in refusal(capsys, take, loader, 1)


def test_the_vocabulary_of_the_model_is_the_tokenizers_or_larger(corpus, alone, capsys):
    assert "vocab_size is 256" in refusal(capsys, build, corpus, "--model.vocab_size 256")
    _, labels = take(build(corpus, "--model.vocab_size 640"), 1)[0]
    assert labels.max() < 512


def test_another_tokenizer_than_the_corpus_was_made_with(corpus, tmp_path, alone, capsys):
    # An empty extra field: still a model, of other bytes.
    model = (corpus / "tokenizer.model").read_bytes() + b"\xd2\x3e\x00"
    (tmp_path / "other.model").write_bytes(model)
    error = refusal(capsys, build, corpus, f"--data.tokenizer {tmp_path}/other.model")
    assert "is not the tokenizer that made data.corpus" in error


def test_what_data_needs(corpus, alone, capsys):
    assert "data.corpus is not set" in refusal(capsys, build, "")
    error = refusal(capsys, build, "/nowhere")
    assert "/nowhere" in error
    assert "interdomain prepare-data" in error

    # A shard has neither tokenizer nor validation split.
    shard = corpus / "train-00000"
    assert "data.tokenizer" in refusal(capsys, build, shard)
    given = f"--data.tokenizer {corpus}/tokenizer.model"
    assert "data.validation_corpus" in refusal(capsys, build_validator, shard, given)
    given += f" --data.validation_corpus {corpus}/validation-00000"
    assert build_validator(shard, given).windows == 16

    # The split is shorter than one sequence.
    error = refusal(capsys, build_validator, corpus, "--validation.seq_len 100000")
    assert "100,001" in error
