"""Prepared folders and bare shards as one stream; exchanged, cut or damaged files are refused."""

import shutil

import numpy as np
import pytest

from interdomain.data import TokenCorpus, documents_in, load_tokenizer
from interdomain.data.indexed import file_sha256
from interdomain.tools.prepare_data import main

from ..common import write_rows
from .common import write_shard


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, files):
    """A prepared corpus of 60 documents in several shards, which no test changes."""
    path = tmp_path_factory.mktemp("prepared")
    rows = []
    for i in range(60):
        rows.append({"text": f"document {i}: " + "words and more words " * (i % 7)})
    write_rows(path / "text.jsonl", rows)
    line = f"--input {path}/text.jsonl --tokenizer {files['sentencepiece']} --shard-tokens 700"
    line += f" --validation-fraction 0.2 --output {path}/corpus"
    assert main(line.split()) == 0
    return path / "corpus"


@pytest.fixture
def folder(tmp_path, prepared):
    return shutil.copytree(prepared, tmp_path / "corpus")


def test_a_prepared_folder_and_its_bare_shards(prepared):
    train = TokenCorpus(prepared, verify=True)
    validation = TokenCorpus(str(prepared), "validation", verify=True)
    assert len(train.shards) > 1
    assert sum(len(shard) for shard in train.shards + validation.shards) == 60
    assert train.fingerprint == validation.fingerprint == file_sha256(prepared / "manifest.json")
    assert train.vocab_size == 600
    n = train.num_tokens
    stream = train.read(0, n)
    documents = [document for shard in train.shards for document in shard]
    assert np.array_equal(stream, np.concatenate(documents))
    lengths = np.diff(train.document_starts(0, n), append=n)
    assert lengths.tolist() == [len(document) for document in documents]
    for glob in (f"{prepared}/train-*", f"{prepared}/train-*.idx"):
        bare = TokenCorpus(glob, verify=True)
        assert np.array_equal(bare.read(0, n), stream)
        assert bare.vocab_size is None
    first = TokenCorpus(prepared / "train-00000.bin")
    assert np.array_equal(first.read(0, first.num_tokens), stream[: first.num_tokens])


@pytest.mark.parametrize(
    ("documents", "begin", "end"),
    [
        ([[1, 50, 2], [1, 60, 70, 2]], [1], [2]),
        ([[50], [60, 70]], [], []),
    ],
)
def test_how_documents_begin_and_end(prepared, tmp_path, files, documents, begin, end):
    """BOS is 1 and EOS is 2. A prepared corpus has EOS; shards from elsewhere are looked at."""
    tokenizer = load_tokenizer(files["sentencepiece"])
    corpus = TokenCorpus(prepared)
    assert documents_in([corpus], tokenizer).to_dict() == {"begin": [], "end": [2]}
    write_shard(tmp_path / "other", documents)
    other = TokenCorpus(tmp_path / "other")
    assert documents_in([other], tokenizer).to_dict() == {"begin": begin, "end": end}
    assert documents_in([corpus, other], tokenizer) is None
    write_shard(tmp_path / "mixed", [[1, 50, 2], [60, 2]])
    mixed = TokenCorpus(tmp_path / "mixed")
    assert documents_in([mixed], tokenizer) is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "manifest"),
        ("x-*", "No shard"),
        ("x", r"x\.idx"),
    ],
)
def test_no_corpus_is_found(tmp_path, source, message):
    with pytest.raises(FileNotFoundError, match=message):
        TokenCorpus(tmp_path / source)


def test_an_unknown_split_is_refused(prepared):
    with pytest.raises(ValueError, match="train, validation"):
        TokenCorpus(prepared, "test")


@pytest.mark.parametrize("name", ["train-00001.idx", "tokenizer.model", "manifest.json"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        TokenCorpus(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"manifest\.json is damaged"),
        ('{"format": "interdomain-corpus", "format_version": 2}', "format and version"),
    ],
)
def test_a_wrong_manifest_is_refused(folder, text, message):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        TokenCorpus(folder)


@pytest.mark.parametrize("name", ["train-00000.bin", "train-00000.idx"])
def test_damage_of_equal_size_is_found_by_verification(folder, name):
    data = bytearray((folder / name).read_bytes())
    data[36] ^= 1
    (folder / name).write_bytes(data)
    TokenCorpus(folder)
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        TokenCorpus(folder, verify=True)


def test_exchanged_files_are_refused(folder):
    (folder / "train-00001.idx").unlink()
    write_shard(folder / "train-00001", [[1, 2]])
    with pytest.raises(ValueError, match=r"train-00001\.bin is damaged or was replaced"):
        TokenCorpus(folder)
    (folder / "tokenizer.model").write_bytes(b"another")
    with pytest.raises(ValueError, match=r"tokenizer\.model is damaged or was replaced"):
        TokenCorpus(folder)
