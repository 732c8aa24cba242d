"""The loader's order and state, and what a damaged or unfit corpus gets."""

import json
import shutil
import threading
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

from ..common import TIMEOUT
from .conftest import refusal
from .runs import flags

VALIDATOR = {
    "rank": 0,
    "ranks": 1,
    "passes": SimpleNamespace(micro_batches_at_once=1),
    "metrics": None,
    "checkpoints": None,
}


def parse(corpus, **settings):
    return read_job_config(flags(corpus, "folder", **{"training__local_batch_size": 4, **settings}))


def build(job):
    """Open the data as the trainer does."""
    return open_data(job, user_errors(make_plan)(job, 1), 0, 1)[1]


def packed(corpus, split="train"):
    return PackedDataset(TokenCorpus(corpus, split), seq_len=64, seed=42)


def take(loader, n):
    batches = iter(loader)
    return [next(batches) for _ in range(n)]


@pytest.mark.parametrize("mixed", [False, True])
def test_a_state_continues_on_any_number_of_ranks(corpus, mixed):
    dataset = packed(corpus)
    if mixed:
        dataset = MixtureDataset([dataset, packed(corpus, "validation")], [0.7, 0.3])
    single = PackedLoader(dataset, 4, rank=0, ranks=1)
    rows = [row for inputs, _ in take(single, 6) for row in inputs["input"]]  # 24 samples in order
    saved = PackedLoader(dataset, 4, rank=0, ranks=1)
    take(saved, 2)
    state = saved.state_dict()
    assert state["consumed_samples"] == 8
    for ranks, prefetch in ((1, 0), (1, 3), (2, 2), (4, 0), (4, 1)):
        loaders = [
            PackedLoader(dataset, 2, rank=rank, ranks=ranks, prefetch=prefetch)
            for rank in range(ranks)
        ]
        for loader in loaders:
            loader.load_state_dict(state)
        steps = [take(loader, 8 // ranks) for loader in loaders]  # 16 samples on every topology
        order = [
            row
            for step in zip(*steps, strict=True)
            for inputs, _ in step
            for row in inputs["input"]
        ]
        assert torch.equal(torch.stack(order), torch.stack(rows[8:24]))
        for loader in loaders:
            assert loader.state_dict() == state | {"consumed_samples": 24}


def test_other_data_begins_where_a_run_left_the_old(corpus, caplog):
    """A corpus that was read before goes on where it was left, also after several changes and resumes."""
    train = packed(corpus)
    other = packed(f"{corpus}/validation-00000")

    def resumed(dataset, state=None, steps=1):
        """The state after some steps of 4 samples, and the samples."""
        loader = PackedLoader(dataset, 4, rank=0, ranks=1)
        if state:
            loader.load_state_dict(state)
        read = (
            torch.cat([inputs["input"] for inputs, _ in take(loader, steps)])
            if steps
            else torch.empty(0)
        )
        state = loader.state_dict()
        train.first = other.first = 0
        return state, read.tolist()

    def samples(dataset, indices):
        return dataset.read_batch(indices)[:, :-1].tolist()

    state, _ = resumed(train, steps=3)
    assert json.loads(state["made_of"]) == train.made_of
    mixed = MixtureDataset([train, other], [3, 1])
    state, read = resumed(mixed, state)
    assert sorted(read) == sorted(samples(train, range(12, 15)) + samples(other, [0]))
    assert "THE DATA CHANGES after 12 samples" in caplog.text

    caplog.clear()
    state, read = resumed(mixed, state)
    assert sorted(read) == sorted(samples(train, range(15, 18)) + samples(other, [1]))
    assert "THE DATA CHANGES" not in caplog.text

    state, _ = resumed(other, state, steps=0)
    state, read = resumed(train, state)
    assert state["consumed_samples"] == 24
    assert read == samples(train, range(18, 22))


def test_another_length_or_seed_is_no_continuation(corpus, tmp_path, alone, capsys, caplog):
    """Named by the setting that differs. Weights in the same proportion are the same data."""
    again = shutil.copytree(corpus, tmp_path / "copy")
    manifest = again / "manifest.json"
    manifest.write_text(json.dumps(read_manifest(again) | {"source": "another"}))
    state = build(mixture([corpus, again], [1, 2])).state_dict()
    for setting, value in (("training.seq_len", 32), ("debug.seed", 43)):
        job = mixture([corpus, again], [1, 2], **{setting.replace(".", "__"): value})
        error = refusal(capsys, build(job).load_state_dict, state)
        assert f"was made with another {setting}" in error
        assert "exclude_from_loading dataloader" in error
    build(mixture([corpus, again], [10, 20])).load_state_dict(state)
    assert "THE DATA CHANGES" not in caplog.text
    for job in (mixture([corpus, again], [2, 1]), mixture([corpus, corpus], [1, 2])):
        caplog.clear()
        build(job).load_state_dict(state)
        assert "THE DATA CHANGES" in caplog.text


@pytest.mark.e2e
def test_a_run_that_continues_with_another_mixture(runs, corpus):
    """It says so, and records the old data."""
    others = {"data__corpus": f"{corpus},{corpus}/validation-00000", "data__weights": [3, 1]}
    runs.add(
        "1 other mixture", checkpoint__enable=True, **others, training__steps=4, of=("2 text", 3)
    )
    said = runs.said("1 other mixture")
    assert "THE DATA CHANGES after 24 samples" in said
    assert "fingerprint of the train text: " in said
    before = read_run_record(runs.checkpoint("2 text", 3))[1]["run"]
    after = read_run_record(runs.checkpoint("1 other mixture", 4))[1]["run"]
    (earlier,) = after["earlier_data"]
    assert earlier == {
        "ends": 3,
        "data_fingerprint": before["data_fingerprint"],
        "corpora": before["corpora"],
    }
    assert after["data_fingerprint"] != before["data_fingerprint"]
    assert [corpus["name"] for corpus in after["corpora"]] == ["tiny", "validation-00000"]


def mixture(corpora, weights, **settings):
    named = [str(corpus) for corpus in corpora]
    return parse(corpora[0], **settings).changed({"data.corpus": named, "data.weights": weights})


def test_a_mixture_on_the_command_line(corpus, tmp_path, alone, caplog):
    again = shutil.copytree(corpus, tmp_path / "copy")
    job = parse(f"{corpus},{again}", data__weights=[0.75, 0.25])
    with caplog.at_level("INFO"):
        loader = build(job)
    assert f"{again} for " in caplog.text
    assert [loader.dataset.locate(g)[0] for g in range(8)].count(1) == 2
    assert (
        loader.dataset.fingerprint
        == build(mixture([corpus, again], [0.75, 0.25])).dataset.fingerprint
    )
    validation = FixedValidator(job=job, **VALIDATOR)
    assert (validation.windows, len(validation.dataset.datasets)) == (16, 2)


def test_mixtures_that_cannot_be(corpus, pairs, alone, capsys):
    answers = mixture([pairs, pairs], [1.0, 1.0], model__vocab_size=8)
    for job, message in (
        (answers, "cannot be part of a mixture"),
        (mixture([corpus, corpus], [1.0]), "A mixture of 2 corpora needs 2 weights"),
        (mixture([corpus, ""], [1.0, 1.0]), "data.corpus is not set"),
    ):
        assert message in refusal(capsys, build, job)


def test_reading_ahead(corpus):
    """A thread reads `prefetch` batches ahead; the state counts what was handed out."""
    dataset = packed(corpus)
    read = []
    one_more = threading.Semaphore(0)
    real = dataset.read_batch
    dataset.read_batch = lambda indices: (
        (read.append(list(indices)), one_more.release()) and real(indices)
    )
    loader = PackedLoader(dataset, 2, rank=0, ranks=1, prefetch=3)
    batches = iter(loader)
    next(batches)
    assert all(one_more.acquire(timeout=TIMEOUT) for _ in range(4))
    assert read[:4] == [[2 * i, 2 * i + 1] for i in range(4)]  # one handed out, three ready
    assert loader.state_dict()["consumed_samples"] == 2
    batches.close()


@pytest.mark.parametrize("batch", [1, 4])
def test_the_labels_of_a_corpus_with_answers(pairs, alone, batch):
    """A label counts where its key came before, and nowhere else; EOS is none. At B = 1 inputs and labels could be views of one
    memory."""
    loader = build(parse(pairs, model__vocab_size=8, training__local_batch_size=batch))
    for inputs, labels in take(loader, 20):
        for tokens, row in zip(inputs["input"].tolist(), labels.tolist(), strict=True):
            wanted = []
            for t, token in enumerate(tokens):
                is_answer = token < 2 and token in tokens[:t] and t < 62  # keys are 0 and 1
                wanted.append(tokens[t + 1] if is_answer else -100)
            assert len(wanted) - wanted.count(-100) == 29
            assert row == wanted


def test_an_id_outside_the_vocabulary_ends_the_run_when_it_is_read(corpus, tmp_path, alone, capsys):
    with IndexedDatasetWriter(tmp_path / "shard", 600) as writer:
        writer.add_document([1, 2, 599] * 40)
    loader = build(parse(tmp_path / "shard", data__tokenizer=corpus / "tokenizer.model"))
    with pytest.raises(SystemExit):
        take(loader, 1)
    assert "599" in capsys.readouterr().err


def test_the_vocabulary_of_the_model_is_the_tokenizers_or_larger(corpus, alone, capsys):
    assert "vocab_size is 256" in refusal(capsys, build, parse(corpus, model__vocab_size=256))
    job = parse(corpus, model__vocab_size=640)
    assert take(build(job), 1)[0][1].max() < 512
    assert make_plan(job, 1).config.vocab_size == 640


def test_another_tokenizer_than_the_corpus_was_made_with(corpus, tmp_path, alone, capsys):
    other = tmp_path / "other.model"
    shutil.copy(corpus / "tokenizer.model", other)
    with open(other, "ab") as f:
        f.write(b"\xd2\x3e\x00")  # an empty extra field: still a model, of other bytes
    error = refusal(capsys, build, parse(corpus, data__tokenizer=other))
    assert "is not the tokenizer that made data.corpus" in error


def test_what_data_needs(corpus, alone, capsys, tmp_path):
    assert "data.corpus is not set" in refusal(capsys, build, parse(""))
    for missing in (
        tmp_path / "nowhere",
        tmp_path,
    ):  # not there at all, and a folder that is no corpus
        error = refusal(capsys, build, parse(missing))
        assert str(missing) in error
        assert "interdomain prepare-data" in error
    assert "data.tokenizer" in refusal(capsys, build, parse(corpus / "train-00000"))
    job = parse(
        corpus / "train-00000", data__tokenizer=corpus / "tokenizer.model", validation__enable=True
    )
    assert "data.validation_corpus" in refusal(capsys, FixedValidator, job=job, **VALIDATOR)
    job = job.changed({"data.validation_corpus": str(corpus / "validation-00000")})
    assert FixedValidator(job=job, **VALIDATOR).windows == 16
    job = parse(corpus, validation__enable=True, validation__seq_len=100_000)
    error = refusal(capsys, FixedValidator, job=job, **VALIDATOR)
    assert "100,001" in error
