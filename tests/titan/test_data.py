"""The loader's order and state, and what a damaged or unfit corpus gets."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from interdomain.checkpoint.step_folder import read_run_record
from interdomain.data import (
    IndexedDatasetWriter,
    MixtureDataset,
    PackedDataset,
    TokenCorpus,
    read_manifest,
)
from interdomain.titan.data.dataloader import PackedLoader, open_data
from interdomain.titan.errors import user_errors
from interdomain.titan.plan.run_plan import make_plan
from interdomain.titan.settings.job_config import read_job_config
from interdomain.titan.watch.validate import FixedValidator

from .conftest import refusal
from .runs import flags


def parse(corpus, **settings):
    return read_job_config(flags(corpus, "folder", **{"training__local_batch_size": 4, **settings}))


def build(job):
    """Opens the data as the trainer does, and returns the loader."""
    plan = user_errors(make_plan)(job, 1)
    return open_data(job, plan, 0, 1)[1]


def build_validator(job):
    passes = SimpleNamespace(micro_batches_at_once=1)
    return FixedValidator(job=job, rank=0, ranks=1, passes=passes, metrics=None, checkpoints=None)


def packed(corpus, split="train"):
    return PackedDataset(TokenCorpus(corpus, split), seq_len=64, seed=42)


def take(loader, n):
    batches = iter(loader)
    return [next(batches) for _ in range(n)]


def take_rows(loader, n):
    """Returns the inputs of n batches, [n * B, T]."""
    return torch.cat([inputs["input"] for inputs, _ in take(loader, n)])


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("ranks", "prefetch"), [(1, 0), (1, 3), (2, 2), (4, 1)])
def test_a_state_continues_on_any_number_of_ranks(corpus, mixed, ranks, prefetch):
    dataset = packed(corpus)
    if mixed:
        dataset = MixtureDataset([dataset, packed(corpus, "validation")], [0.7, 0.3])
    in_order = take_rows(PackedLoader(dataset, 4, rank=0, ranks=1), 6)
    saved = PackedLoader(dataset, 4, rank=0, ranks=1)
    take(saved, 2)
    state = saved.state_dict()
    assert state["consumed_samples"] == 8

    # A micro-batch of all ranks has the next 2 * ranks samples, two for each rank.
    rows = []
    for rank in range(ranks):
        loader = PackedLoader(dataset, 2, rank=rank, ranks=ranks, prefetch=prefetch)
        loader.load_state_dict(state)
        rows.append(take_rows(loader, 8 // ranks).view(8 // ranks, 2, 64))
        assert loader.state_dict() == state | {"consumed_samples": 24}
    assert torch.equal(torch.stack(rows, dim=1).view(16, 64), in_order[8:])


def test_other_data_begins_where_a_run_left_the_old(corpus, caplog):
    """A corpus that was read before continues where it was left, also after several changes."""
    validation = f"{corpus}/validation-00000"

    def read_on(dataset, state, steps):
        """Returns the samples of some steps of 4, and the state after them."""
        loader = PackedLoader(dataset, 4, rank=0, ranks=1)
        if state:
            loader.load_state_dict(state)
        rows = take_rows(loader, steps).tolist()
        return sorted(rows), loader.state_dict()

    def mixed():
        return MixtureDataset([packed(corpus), packed(validation)], [3, 1])

    def samples(folder, indices):
        return packed(folder).read_batch(indices)[:, :-1].tolist()

    _, state = read_on(packed(corpus), None, 3)
    assert json.loads(state["made_of"]) == packed(corpus).made_of

    read, state = read_on(mixed(), state, 1)
    assert read == sorted(samples(corpus, range(12, 15)) + samples(validation, [0]))
    assert "THE DATA CHANGES after 12 samples" in caplog.text

    caplog.clear()
    read, state = read_on(mixed(), state, 1)
    assert read == sorted(samples(corpus, range(15, 18)) + samples(validation, [1]))
    assert "THE DATA CHANGES" not in caplog.text

    read, state = read_on(packed(validation), state, 1)
    assert read == sorted(samples(validation, range(2, 6)))
    read, state = read_on(packed(corpus), state, 1)
    assert read == sorted(samples(corpus, range(18, 22)))
    assert state["consumed_samples"] == 28


@pytest.fixture
def copy(corpus, tmp_path):
    """The same text as another corpus."""
    folder = shutil.copytree(corpus, tmp_path / "copy")
    manifest = read_manifest(folder) | {"source": "another"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def mixture(corpora, weights, **settings):
    return parse(",".join(map(str, corpora)), data__weights=weights, **settings)


@pytest.mark.parametrize(("setting", "value"), [("training.seq_len", 32), ("debug.seed", 43)])
def test_another_length_or_seed_is_no_continuation(corpus, copy, alone, capsys, setting, value):
    state = build(mixture([corpus, copy], [1, 2])).state_dict()
    job = mixture([corpus, copy], [1, 2], **{setting.replace(".", "__"): value})
    error = refusal(capsys, build(job).load_state_dict, state)
    assert f"was made with another {setting}" in error
    assert "exclude_from_loading dataloader" in error


def test_weights_in_the_same_proportion_are_the_same_data(corpus, copy, alone, caplog):
    state = build(mixture([corpus, copy], [1, 2])).state_dict()
    build(mixture([corpus, copy], [10, 20])).load_state_dict(state)
    assert "THE DATA CHANGES" not in caplog.text
    build(mixture([corpus, copy], [2, 1])).load_state_dict(state)
    assert "THE DATA CHANGES" in caplog.text


@pytest.mark.e2e
def test_a_run_that_continues_with_another_mixture(runs, corpus):
    """It says so, and records the old data."""
    runs.add(
        "1 other mixture",
        checkpoint__enable=True,
        data__corpus=f"{corpus},{corpus}/validation-00000",
        data__weights=[3, 1],
        training__steps=4,
        of=("2 text", 3),
    )
    said = runs.said("1 other mixture")
    assert "THE DATA CHANGES after 24 samples" in said
    assert "fingerprint of the train text: " in said
    before = read_run_record(runs.checkpoint("2 text", 3))[1]["run"]
    after = read_run_record(runs.checkpoint("1 other mixture", 4))[1]["run"]
    (earlier,) = after["earlier_data"]
    assert earlier["ends"] == 3
    assert earlier["corpora"] == before["corpora"]
    assert earlier["data_fingerprint"] == before["data_fingerprint"] != after["data_fingerprint"]
    assert [corpus["name"] for corpus in after["corpora"]] == ["tiny", "validation-00000"]


def test_mixtures_that_cannot_be(corpus, pairs, alone, capsys):
    answers = mixture([pairs, pairs], [1.0, 1.0], model__vocab_size=8)
    assert "cannot be part of a mixture" in refusal(capsys, build, answers)
    one_weight = mixture([corpus, corpus], [1.0])
    assert "A mixture of 2 corpora needs 2 weights" in refusal(capsys, build, one_weight)


@pytest.mark.parametrize("batch", [1, 4])
def test_the_labels_of_a_corpus_with_answers(pairs, alone, batch):
    """A label counts if its key came before. With B = 1 inputs and labels could be views of one memory."""
    loader = build(parse(pairs, model__vocab_size=8, training__local_batch_size=batch))
    for inputs, labels in take(loader, 20):
        for tokens, row in zip(inputs["input"].tolist(), labels.tolist(), strict=True):
            expected = [-100] * 64
            # The keys are 0 and 1. The last two tokens are the last value and EOS.
            for t in range(62):
                if tokens[t] < 2 and tokens[t] in tokens[:t]:
                    expected[t] = tokens[t + 1]
            assert expected.count(-100) == 64 - 29
            assert row == expected


def test_an_id_outside_the_vocabulary_ends_the_run_when_it_is_read(corpus, tmp_path, alone, capsys):
    with IndexedDatasetWriter(tmp_path / "shard", 600) as writer:
        writer.add_document([1, 2, 599] * 40)
    loader = build(parse(tmp_path / "shard", data__tokenizer=corpus / "tokenizer.model"))
    with pytest.raises(SystemExit):
        take(loader, 1)
    assert "599" in capsys.readouterr().err


def test_the_vocabulary_of_the_model_is_the_tokenizers_or_larger(corpus, alone, capsys):
    assert "vocab_size is 256" in refusal(capsys, build, parse(corpus, model__vocab_size=256))
    _, labels = take(build(parse(corpus, model__vocab_size=640)), 1)[0]
    assert labels.max() < 512


def test_another_tokenizer_than_the_corpus_was_made_with(corpus, tmp_path, alone, capsys):
    # An empty extra field: still a model, of other bytes.
    model = (corpus / "tokenizer.model").read_bytes() + b"\xd2\x3e\x00"
    (tmp_path / "other.model").write_bytes(model)
    error = refusal(capsys, build, parse(corpus, data__tokenizer=tmp_path / "other.model"))
    assert "is not the tokenizer that made data.corpus" in error


def test_what_data_needs(corpus, alone, capsys, tmp_path):
    assert "data.corpus is not set" in refusal(capsys, build, parse(""))
    error = refusal(capsys, build, parse(tmp_path / "nowhere"))
    assert f"{tmp_path / 'nowhere'}" in error
    assert "interdomain prepare-data" in error

    # A shard has neither tokenizer nor validation split.
    shard = corpus / "train-00000"
    assert "data.tokenizer" in refusal(capsys, build, parse(shard))
    given = {"data__tokenizer": corpus / "tokenizer.model", "validation__enable": True}
    error = refusal(capsys, build_validator, parse(shard, **given))
    assert "data.validation_corpus" in error
    job = parse(shard, **given, data__validation_corpus=corpus / "validation-00000")
    assert build_validator(job).windows == 16

    # The split is shorter than one sequence.
    job = parse(corpus, validation__enable=True, validation__seq_len=100_000)
    assert "100,001" in refusal(capsys, build_validator, job)
