"""Prepared folders and bare shards as one stream; what is exchanged, cut or damaged is refused."""

import json

import numpy as np
import pytest

from interdomain.data import IndexedDatasetWriter, TokenCorpus, documents_in, load_tokenizer
from interdomain.data.corpus import sources
from interdomain.data.indexed import file_sha256
from interdomain.tools.prepare_data import main


@pytest.fixture
def folder(tmp_path, files):
    texts = [f"document {i}: " + "words and more words " * (i % 7) for i in range(60)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    line = f"--input {tmp_path}/text.jsonl --tokenizer {files['sentencepiece']} --shard-tokens 700"
    assert (
        main([*line.split(), "--validation-fraction", "0.2", "--output", str(tmp_path / "corpus")])
        == 0
    )
    return tmp_path / "corpus"


def test_a_prepared_folder_and_its_shards_alone(folder):
    prepared = TokenCorpus(folder, verify=True)
    validation = TokenCorpus(str(folder), "validation", verify=True)
    prefixes = [shard.prefix for shard in prepared.shards]
    assert len(prefixes) > 1
    assert sum(len(shard) for corpus in (prepared, validation) for shard in corpus.shards) == 60
    assert prepared.fingerprint == validation.fingerprint == file_sha256(folder / "manifest.json")
    n = prepared.num_tokens
    stream = prepared.read(0, n)
    assert np.array_equal(stream, np.concatenate([d for shard in prepared.shards for d in shard]))
    assert prepared.document_starts(0, n).tolist() == [0, *(np.flatnonzero(stream == 2) + 1)[:-1]]
    for glob in (f"{folder}/train-*", f"{folder}/train-*.idx"):
        bare = TokenCorpus(glob, verify=True)
        assert np.array_equal(bare.read(0, n), stream)
        assert bare.vocab_size is None
    assert prepared.vocab_size == 600
    first = TokenCorpus(f"{prefixes[0]}.bin")
    assert np.array_equal(first.read(0, first.num_tokens), stream[: first.num_tokens])
    prefixes[0].with_suffix(".bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"train-00000\.bin is missing"):
        TokenCorpus(f"{folder}/train-*")


def test_how_documents_begin_and_end(folder, tmp_path, files):
    """In a prepared corpus, and in shards that something else made; BOS is 1 and EOS is 2."""
    tokenizer = load_tokenizer(files["sentencepiece"])
    assert documents_in([TokenCorpus(folder)], tokenizer).to_dict() == {"begin": [], "end": [2]}
    cases = {
        "both": ([[1, 50, 2], [1, 60, 70, 2]], {"begin": [1], "end": [2]}),
        "plain": ([[50], [60, 70]], {"begin": [], "end": []}),
        "mixed": ([[1, 50, 2], [60, 2]], None),
    }
    for name, (documents, wanted) in cases.items():
        with IndexedDatasetWriter(tmp_path / name, 600) as writer:
            for document in documents:
                writer.add_document(document)
        found = documents_in([TokenCorpus(tmp_path / name)], tokenizer)
        assert (found and found.to_dict()) == wanted
    both = [TokenCorpus(tmp_path / name) for name in ("both", "plain")]
    assert documents_in(both, tokenizer) is None


def test_sources_of_a_manifest():
    """Each as a phrase, and the names of the hub's data sets without revision and split; many files
    are counted.
    """
    hub = {"dataset": "HuggingFaceFW/fineweb-edu@main:sample-10BT:train"}
    file = {"file": "00.jsonl", "bytes": 1_500_000}
    found = sources({"inputs": [{"stdlib": "3.11.2"}, hub, file], "max_bytes": 2_000})
    assert found["datasets"] == ["HuggingFaceFW/fineweb-edu"]
    assert len(found["sources"]) == 4
    assert sources({"inputs": [file] * 21})["sources"] == [
        "21 files, 00.jsonl to 00.jsonl (31.5 MB)"
    ]
    assert sources({"synthetic": "mqar", "items": 8, "seed": 0})["sources"] == [
        "synthetic mqar (items 8, seed 0)"
    ]


def test_what_is_no_corpus(folder, tmp_path):
    for source, message in (
        (tmp_path, "manifest"),
        (f"{tmp_path}/x-*", "No shard"),
        (tmp_path / "x", r"x\.idx"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            TokenCorpus(source)
    with pytest.raises(ValueError, match="train, validation"):
        TokenCorpus(folder, "test")
    for name in ("train-00001.idx", "tokenizer.model", "manifest.json"):
        (folder / name).rename(tmp_path / "away")
        with pytest.raises(FileNotFoundError, match=name):
            TokenCorpus(folder)
        (tmp_path / "away").rename(folder / name)
    for text, message in (
        ("{", r"manifest\.json is damaged"),
        ('{"format": "interdomain-corpus", "format_version": 2}', "format and version"),
    ):
        (folder / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            TokenCorpus(folder)


def test_exchanged_files_are_refused_and_damage_of_equal_size_on_request(folder):
    for name, at in (("train-00000.bin", 100), ("train-00000.idx", 36)):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        TokenCorpus(folder)
        with pytest.raises(ValueError, match=f"{name} is damaged"):
            TokenCorpus(folder, verify=True)
        (folder / name).write_bytes(data)
    (folder / "train-00001.idx").unlink()
    with IndexedDatasetWriter(folder / "train-00001", 600) as writer:
        writer.add_document([1, 2])
    with pytest.raises(ValueError, match=r"train-00001\.bin is damaged or was replaced"):
        TokenCorpus(folder)
    with open(folder / "tokenizer.model", "ab") as f:
        f.write(b"\0")
    with pytest.raises(ValueError, match=r"tokenizer\.model is damaged or was replaced"):
        TokenCorpus(folder)
