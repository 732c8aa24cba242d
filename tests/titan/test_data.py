"""The loader's order and state, and what a damaged or unfit corpus gets."""

import shutil

import torch
from torchtitan.config import ConfigManager

from interdomain.data import IndexedDatasetWriter, PackedDataset, TokenCorpus
from interdomain.titan.data import PackedLoader, build_dataloader, build_tokenizer
from interdomain.titan.plan import make_plan
from interdomain.titan.validate import build_validator

from .conftest import flags, refusal


def parse(corpus, **settings):
    return ConfigManager().parse_args(flags(corpus, "folder", **{"training__local_batch_size": 4, **settings}))


def build(job):
    """The hooks in TorchTitan's order."""
    tokenizer = build_tokenizer(job)
    return build_dataloader(dp_world_size=1, dp_rank=0, tokenizer=tokenizer, job_config=job)


def take(loader, n):
    batches = iter(loader)
    return [next(batches) for _ in range(n)]


def test_labels_are_the_next_tokens(corpus, alone):
    (inputs, labels) = take(build(parse(corpus)), 1)[0]
    assert inputs["input"].shape == labels.shape == (4, 64)
    assert inputs["input"].dtype == labels.dtype == torch.int64
    assert torch.equal(inputs["input"][:, 1:], labels[:, :-1])


def test_a_state_continues_on_any_number_of_ranks(corpus):
    dataset = PackedDataset(TokenCorpus(corpus), seq_len=64, seed=42)
    single = PackedLoader(dataset, local_batch=4, rank=0, ranks=1)
    rows = [row for inputs, _ in take(single, 6) for row in inputs["input"]]  # 24 samples in order
    saved = PackedLoader(dataset, local_batch=4, rank=0, ranks=1)
    take(saved, 2)
    state = saved.state_dict()
    assert state["consumed_samples"] == 8
    for ranks in (1, 2, 4):
        loaders = [PackedLoader(dataset, local_batch=2, rank=rank, ranks=ranks) for rank in range(ranks)]
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
    for seq_len, seed in ((32, 42), (64, 43)):
        other = PackedLoader(PackedDataset(tokens, seq_len=seq_len, seed=seed), local_batch=1, rank=0, ranks=1)
        error = refusal(capsys, other.load_state_dict, state)
        assert "training.seq_len and debug.seed" in error
        assert "exclude_from_loading dataloader" in error


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
    arguments = {"dp_world_size": 1, "dp_rank": 0, "parallel_dims": None, "loss_fn": None, "metrics_processor": None}
    assert "data.validation_corpus" in refusal(capsys, build_validator, job_config=job, **arguments)
    job.data.validation_corpus = str(corpus / "validation-00000")
    assert build_validator(job_config=job, **arguments).windows == 16


def test_a_validation_split_shorter_than_its_sequence(corpus, alone, capsys):
    job = parse(corpus, validation__enable=True, validation__seq_len=100_000)
    arguments = {"dp_world_size": 1, "dp_rank": 0, "parallel_dims": None, "loss_fn": None, "metrics_processor": None}
    error = refusal(capsys, build_validator, job_config=job, **arguments)
    assert "validation" in error
    assert "100,001" in error
