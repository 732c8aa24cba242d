"""The loader's order and state, and what a damaged or unfit corpus gets."""

import json
import shutil
import threading
import time

import numpy as np
import pytest
import torch

from interdomain.data import IndexedDatasetWriter, MixtureDataset, PackedDataset, TokenCorpus, read_manifest
from interdomain.data.corpus import sealed
from interdomain.titan.data import PackedLoader, build_dataloader, build_tokenizer
from interdomain.titan.errors import one_paragraph
from interdomain.titan.plan import make_plan
from interdomain.titan.settings import read_job_config
from interdomain.titan.validate import build_validator
from interdomain.tools import prepare_data

from .conftest import TINY, flags, refusal

VALIDATOR = {"dp_world_size": 1, "dp_rank": 0, "parallel_dims": None, "loss_fn": None, "metrics_processor": None}
VALIDATOR["checkpoints"] = None


def parse(corpus, **settings):
    return read_job_config(flags(corpus, "folder", **{"training__local_batch_size": 4, **settings}))


def build(job):
    """As the trainer does."""
    plan = one_paragraph(make_plan)(job, 1)
    return build_dataloader(plan=plan, rank=0, tokenizer=build_tokenizer(job), job_config=job)


def take(loader, n):
    batches = iter(loader)
    return [next(batches) for _ in range(n)]


def test_labels_are_the_next_tokens(corpus, alone):
    (inputs, labels) = take(build(parse(corpus)), 1)[0]
    assert inputs["input"].shape == labels.shape == (4, 64)
    assert inputs["input"].dtype == labels.dtype == torch.int64
    assert torch.equal(inputs["input"][:, 1:], labels[:, :-1])


@pytest.mark.parametrize("mixed", [False, True])
def test_a_state_continues_on_any_number_of_ranks(corpus, mixed):
    parts = [PackedDataset(TokenCorpus(corpus, split), seq_len=64, seed=42) for split in ("train", "validation")]
    dataset = MixtureDataset(parts, [0.7, 0.3]) if mixed else parts[0]
    single = PackedLoader(dataset, local_batch=4, rank=0, ranks=1)
    rows = [row for inputs, _ in take(single, 6) for row in inputs["input"]]  # 24 samples in order
    saved = PackedLoader(dataset, local_batch=4, rank=0, ranks=1)
    take(saved, 2)
    state = saved.state_dict()
    assert state["consumed_samples"] == 8
    for ranks, prefetch in ((1, 0), (1, 3), (2, 2), (4, 0), (4, 1)):
        settings = {"local_batch": 2, "ranks": ranks, "prefetch": prefetch}
        loaders = [PackedLoader(dataset, rank=rank, **settings) for rank in range(ranks)]
        for loader in loaders:
            loader.load_state_dict(state)
        steps = [take(loader, 8 // ranks) for loader in loaders]  # 16 samples on every topology
        order = [row for step in zip(*steps, strict=True) for inputs, _ in step for row in inputs["input"]]
        assert torch.equal(torch.stack(order), torch.stack(rows[8:24]))
        assert {tuple(loader.state_dict().items()) for loader in loaders} == {
            (("consumed_samples", 24), *list(state.items())[1:])
        }


def test_other_data_is_no_continuation(corpus, capsys):
    tokens = TokenCorpus(corpus)
    state = PackedLoader(PackedDataset(tokens, seq_len=64, seed=42), local_batch=1, rank=0, ranks=1).state_dict()
    for seq_len, seed, cause in ((32, 42, "by training.seq_len:"), (64, 43, "by debug.seed:")):
        other = PackedLoader(PackedDataset(tokens, seq_len=seq_len, seed=seed), local_batch=1, rank=0, ranks=1)
        error = refusal(capsys, other.load_state_dict, state)
        assert cause in error
        assert "exclude_from_loading dataloader" in error


def test_other_weights_and_corpora_are_named_as_the_cause(corpus, tmp_path, alone, capsys):
    again = copied(corpus, tmp_path)
    manifest = again / "manifest.json"
    manifest.write_text(json.dumps(sealed(read_manifest(again) | {"source": "another"})))
    state = build(mixture([corpus, again], [1, 2])).state_dict()
    other = build(mixture([corpus, again], [2, 1]))
    assert "other data, by data.weights:" in refusal(capsys, other.load_state_dict, state)
    other = build(mixture([corpus, corpus], [1, 2]))
    assert "other data, by data.corpus (other files, or prepared again):" in refusal(
        capsys, other.load_state_dict, state
    )
    build(mixture([corpus, again], [10, 20])).load_state_dict(state)


def mixture(corpora, weights, **settings):
    job = parse(corpora[0], **settings)
    job.data.corpus, job.data.weights = [str(corpus) for corpus in corpora], weights
    return job


def test_a_mixture_on_the_command_line_and_in_toml(corpus, tmp_path, alone, caplog):
    again = copied(corpus, tmp_path)
    arguments = flags(corpus, "folder")
    at = arguments.index("--data.corpus") + 1
    arguments[at : at + 1] = [f"{corpus},{again}", "--data.weights", "0.75", "0.25"]
    with caplog.at_level("INFO"):
        loader = build(read_job_config(arguments))
    assert f"{again} for " in caplog.text
    assert [loader.dataset.locate(g)[0] for g in range(8)].count(1) == 2
    toml = tmp_path / "mixed.toml"
    text = TINY.read_text() + f'\n[data]\ncorpus = ["{corpus}", "{again}"]\nweights = [0.75, 0.25]\n'
    toml.write_text(text)
    job = read_job_config(["--job.config_file", str(toml)])
    assert build(job).dataset.fingerprint == loader.dataset.fingerprint
    validation = build_validator(job_config=job, **VALIDATOR)
    assert (validation.windows, len(validation.dataset.datasets)) == (16, 2)


def test_mixtures_that_cannot_be(corpus, tmp_path, alone, capsys):
    assert "2 corpora and data.weights 1 weights" in refusal(capsys, build, mixture([corpus, corpus], [1.0]))
    assert "for one corpus" in refusal(capsys, build, mixture([corpus], [1.0, 2.0]))
    assert "must be a positive number" in refusal(capsys, build, mixture([corpus, corpus], [1.0, 0.0]))
    assert "no such folder" in refusal(capsys, build, mixture([corpus, tmp_path / "none"], [1.0, 1.0]))
    assert "data.corpus is not set" in refusal(capsys, build, mixture([corpus, ""], [1.0, 1.0]))
    other = tmp_path / "other"
    options = ["--input", "stdlib", "--max-bytes", "100000", "--vocab-size", "400", "--validation-fraction", "0"]
    assert prepare_data.main([*options, "--output", str(other)]) == 0
    error = refusal(capsys, build, mixture([corpus, other], [1.0, 1.0]))
    assert "is not the tokenizer that made data.corpus" in error


def test_reading_ahead(corpus):
    """The thread reads `prefetch` batches ahead and no more, and it ends with its iterator."""
    dataset = PackedDataset(TokenCorpus(corpus), seq_len=64, seed=42)
    read, real = [], dataset.read_batch

    def slow(indices):
        time.sleep(0.01)
        read.append(list(indices))
        return real(indices)

    dataset.read_batch = slow
    loader = PackedLoader(dataset, local_batch=2, rank=0, ranks=1, prefetch=3)
    batches = iter(loader)
    first = next(batches)
    assert torch.equal(first[0]["input"], torch.from_numpy(real([0, 1]))[:, :-1])
    deadline = time.monotonic() + 10
    while len(read) < 5 and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.1)
    assert read == [[2 * i, 2 * i + 1] for i in range(5)]  # one handed out, three ready, one in its hands
    next(batches)
    assert loader.state_dict()["consumed_samples"] == 4
    batches.close()
    assert "data" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_positions_beside_the_tokens(corpus, alone, prefetch):
    loader = build(parse(corpus, data__reset_state_at_documents=True, data__prefetch=prefetch))
    for inputs, _ in take(loader, 30):
        assert list(inputs) == ["input", "positions"]
        assert inputs["positions"].dtype == torch.int32
        assert inputs["positions"].shape == inputs["input"].shape
        for tokens, positions in zip(inputs["input"].numpy(), inputs["positions"].numpy(), strict=True):
            starts = np.flatnonzero(positions == 0)[1:]
            # A document begins after EOS, and nowhere else.
            assert starts.tolist() == (np.flatnonzero(tokens[:-1] == 2) + 1).tolist()
            assert (np.diff(positions)[np.flatnonzero(np.diff(positions) != 1)] <= 0).all()
    assert list(take(build(parse(corpus)), 1)[0][0]) == ["input"]


def test_a_prefetch_that_cannot_be(corpus, alone, capsys):
    assert "data.prefetch must be at least 0: got -1" in refusal(capsys, build, parse(corpus, data__prefetch=-1))


def copied(corpus, folder):
    shutil.copytree(corpus, folder / "copy")
    return folder / "copy"


def test_a_missing_shard(corpus, tmp_path, alone, capsys):
    broken = copied(corpus, tmp_path)
    (broken / "train-00000.bin").unlink()
    assert "train-00000.bin" in refusal(capsys, build, parse(broken))


def test_a_truncated_shard(corpus, tmp_path, alone, capsys):
    broken = copied(corpus, tmp_path)
    shard = broken / "train-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    error = refusal(capsys, build, parse(broken))
    assert "train-00000" in error
    assert "is truncated" in error
    assert "prepare it again" in error


def test_a_missing_index(corpus, tmp_path, alone, capsys):
    broken = copied(corpus, tmp_path)
    (broken / "train-00000.idx").unlink()
    assert "train-00000.idx" in refusal(capsys, build, parse(broken))


def test_an_id_outside_the_vocabulary_ends_the_run_when_it_is_read(corpus, tmp_path, alone, capsys):
    with IndexedDatasetWriter(tmp_path / "shard", 600) as writer:
        writer.add_document([1, 2, 599] * 40)
        writer.finalize()
    loader = build(parse(tmp_path / "shard", data__tokenizer=corpus / "tokenizer.model"))
    error = refusal(capsys, take, loader, 1)
    assert "599" in error
    assert "0 to 511" in error


def test_a_tokenizer_that_does_not_fit_the_model(corpus, alone, capsys):
    error = refusal(capsys, build, parse(corpus, model__vocab_size=256))
    assert "512" in error
    assert "256" in error
    assert "model.vocab_size" in error


def test_a_larger_vocabulary_than_the_tokenizers_is_padding(corpus, alone):
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


def test_no_corpus(alone, capsys, tmp_path):
    assert "data.corpus is not set" in refusal(capsys, build, parse(""))
    for missing in (tmp_path / "nowhere", tmp_path):  # not there at all, and a folder that is no corpus
        error = refusal(capsys, build, parse(missing))
        assert str(missing) in error
        assert "interdomain.tools.prepare_data" in error


def test_bare_shards_need_a_tokenizer(corpus, alone, capsys):
    assert "data.tokenizer" in refusal(capsys, build, parse(corpus / "train-00000"))


def test_training_shards_are_not_validated_on(corpus, alone, capsys):
    job = parse(corpus / "train-00000", data__tokenizer=corpus / "tokenizer.model", validation__enable=True)
    assert "data.validation_corpus" in refusal(capsys, build_validator, job_config=job, **VALIDATOR)
    job.data.validation_corpus = str(corpus / "validation-00000")
    assert build_validator(job_config=job, **VALIDATOR).windows == 16


def test_a_validation_split_shorter_than_its_sequence(corpus, alone, capsys):
    job = parse(corpus, validation__enable=True, validation__seq_len=100_000)
    error = refusal(capsys, build_validator, job_config=job, **VALIDATOR)
    assert "validation" in error
    assert "100,001" in error
