"""Training straight from a dataset: a local folder stands for the hub, which no test speaks to."""

import json

import pytest
import torch

from interdomain.data import load_tokenizer
from interdomain.data.readers import read_documents

from .conftest import refusal
from .test_data import VALIDATOR, FixedValidator, build, parse, take

pq = pytest.importorskip("pyarrow.parquet", reason="the extra `data` is not installed")
import pyarrow as pa  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four files of Parquet, so that ranks can share them."""
    path = tmp_path_factory.mktemp("hub") / "Dataset"
    path.mkdir()
    texts = list(read_documents(["stdlib"], max_bytes=300_000))
    for i in range(4):
        pq.write_table(pa.table({"text": texts[i::4]}), path / f"part-{i}.parquet")
    return path


def streamed(folder, corpus, **settings):
    given = {"data__stream": folder, "data__tokenizer": corpus / "tokenizer.model", **settings}
    return parse("", **given)


def test_documents_end_in_eos_and_begin_with_nothing(folder, corpus, alone):
    (inputs, labels) = take(build(streamed(folder, corpus)), 1)[0]
    assert inputs["input"].shape == labels.shape == (4, 64)
    tokenizer = load_tokenizer(corpus)
    text = pq.read_table(folder / "part-0.parquet").column("text")[0].as_py()
    wanted = tokenizer.encode(text, add_eos=True)
    found = torch.cat([inputs["input"][0], labels[0, -1:]]).tolist()
    n = min(len(wanted), 65)
    assert found[:n] == wanted[:n]


def test_a_stream_continues_where_it_stopped_and_not_otherwise(folder, corpus, alone, capsys):
    every = take(build(streamed(folder, corpus)), 12)
    first = build(streamed(folder, corpus))
    take(first, 5)
    state = json.loads(json.dumps(first.state_dict()))  # text and numbers: nothing that would be unpickled
    rest = build(streamed(folder, corpus))
    rest.load_state_dict(state)
    for (a, b), (c, d) in zip(take(rest, 7), every[5:], strict=True):
        assert torch.equal(a["input"], c["input"])
        assert torch.equal(b, d)
    error = refusal(capsys, rest.load_state_dict, {**state, "ranks": 2})
    assert "on 2 rank(s), this run streams" in error
    assert "interdomain.tools.prepare_data" in error
    other = build(streamed(folder, corpus, training__seq_len=32))
    assert "cannot be continued otherwise" in refusal(capsys, other.load_state_dict, state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data__corpus": "somewhere"}, "Leave out data.corpus"),
        ({"data__reset_state_at_documents": True}, "data.weights and data.reset_state"),
        ({"data__tokenizer": ""}, "it needs data.tokenizer"),
        ({"validation__enable": True}, "data.validation_corpus where validation.enable"),
        ({"data__stream": "no/such-folder:x:y:z"}, "is no dataset: it must read"),
    ],
)
def test_what_a_stream_cannot_be(folder, corpus, alone, capsys, settings, message):
    assert message in refusal(capsys, build, streamed(folder, corpus, **settings))


def test_validation_on_a_prepared_corpus(folder, corpus, alone):
    job = streamed(folder, corpus, validation__enable=True, data__validation_corpus=corpus)
    build(job)
    assert FixedValidator(job_config=job, **VALIDATOR).windows == 16


RANKS = """
import hashlib, sys, torch.distributed as dist
from interdomain.data import load_tokenizer
from interdomain.titan.dataloader import StreamLoader
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
def loader():
    tokenizer = load_tokenizer(sys.argv[2])
    return StreamLoader(sys.argv[1], tokenizer, seq_len=64, local_batch=2, rank=rank, ranks=ranks)
def take(loader, n):
    batches = iter(loader)
    return [hashlib.sha256(next(batches)[0]["input"].numpy().tobytes()).hexdigest() for _ in range(n)]
whole, first, rest = take(loader(), 6), loader(), loader()
assert take(first, 2) == whole[:2]
rest.load_state_dict(first.state_dict())
assert take(rest, 4) == whole[2:]
seen = [None] * ranks
dist.all_gather_object(seen, (whole, first.state_dict()))
assert not set(seen[0][0]) & set(seen[1][0])
assert seen[0][1] == seen[1][1]
dist.destroy_process_group()
"""


def test_two_ranks_read_different_documents_and_continue(folder, corpus, launch, tmp_path):
    (tmp_path / "ranks.py").write_text(RANKS)
    launch(2, tmp_path / "ranks.py", folder, corpus / "tokenizer.model")
