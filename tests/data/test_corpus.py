"""Prepared folders and bare shards as one stream; what is exchanged, cut or damaged is refused by name."""

import json

import numpy as np
import pytest

from interdomain.data import IndexedDatasetWriter, TokenCorpus, load_tokenizer, read_manifest
from interdomain.data.corpus import sealed
from interdomain.data.indexed import file_sha256
from interdomain.tools.prepare_data import main


@pytest.fixture
def folder(tmp_path, model_file):
    texts = [f"document {i}: " + "words and more words " * (i % 7) for i in range(60)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    line = f"--input {tmp_path}/text.jsonl --tokenizer {model_file} --shard-tokens 700 --validation-fraction 0.2"
    assert main([*line.split(), "--output", str(tmp_path / "corpus")]) == 0
    return tmp_path / "corpus"


def test_prepared_folder(folder):
    train, validation = TokenCorpus(folder, verify=True), TokenCorpus(str(folder), "validation", verify=True)
    assert len(train.shards) > 1
    assert train.num_documents + validation.num_documents == 60
    assert (train.vocab_size, train.eos_id) == (600, 2)
    assert train.fingerprint == validation.fingerprint == file_sha256(folder / "manifest.json")
    tokenizer = load_tokenizer(train.tokenizer_path)
    stream = train.read(0, train.num_tokens)
    assert np.array_equal(stream, np.concatenate([d for shard in train.shards for d in shard]))
    assert (stream == 2).sum() == train.num_documents
    assert stream[-1] == 2
    assert train.document_starts(0, train.num_tokens).tolist() == [0, *(np.flatnonzero(stream == 2) + 1)[:-1]]
    assert tokenizer.decode(stream[: list(stream).index(2)].tolist()).startswith("document ")


def test_bare_shards(folder):
    prepared = TokenCorpus(folder)
    prefixes = [shard.prefix for shard in prepared.shards]
    n = prepared.num_tokens
    for source in (prefixes, [f"{p}.bin" for p in prefixes], f"{folder}/train-*", [f"{folder}/train-*.idx"]):
        bare = TokenCorpus(source, verify=True)
        assert np.array_equal(bare.read(0, n), prepared.read(0, n))
        assert (bare.vocab_size, bare.eos_id, bare.tokenizer_path, bare.manifest) == (None, None, None, None)
    assert TokenCorpus(prefixes[1]).read(0, 5).tolist() == prepared.shards[1].tokens(0, 5).tolist()
    assert TokenCorpus(prefixes).fingerprint != TokenCorpus(prefixes[::-1]).fingerprint
    prefixes[0].with_suffix(".bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"train-00000\.bin is missing"):
        TokenCorpus(f"{folder}/train-*")


def test_no_source(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a prepared corpus: it has no manifest"):
        TokenCorpus(tmp_path)
    with pytest.raises(FileNotFoundError, match="No shard matches"):
        TokenCorpus(f"{tmp_path}/x-*")
    with pytest.raises(FileNotFoundError, match=r"x\.idx is missing"):
        TokenCorpus(tmp_path / "x")
    with pytest.raises(ValueError, match="at least one shard"):
        TokenCorpus([])


def test_missing_split_and_wrong_vocabulary(folder):
    with pytest.raises(ValueError, match="has no split 'test', it has train, validation"):
        TokenCorpus(folder, "test")
    with pytest.raises(ValueError, match="a vocabulary of 600, not 32000"):
        TokenCorpus(folder, vocab_size=32000)


@pytest.mark.parametrize("name", ["train-00001.bin", "train-00001.idx", "tokenizer.model", "manifest.json"])
def test_missing_file(folder, name):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=name.split(".")[0]):
        TokenCorpus(folder)


def test_exchanged_shard(folder):
    (folder / "train-00001.bin").unlink()
    (folder / "train-00001.idx").unlink()
    with IndexedDatasetWriter(folder / "train-00001", 600) as writer:
        writer.add_document([1, 2])
    with pytest.raises(ValueError, match=r"train-00001\.bin has 4 bytes, the manifest .* expects"):
        TokenCorpus(folder)


def test_damage_of_equal_size_is_found_on_request(folder):
    for name in ("train-00000.bin", "train-00000.idx"):
        path = folder / name
        whole = path.read_bytes()
        at = 100 if name.endswith("bin") else 36
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        TokenCorpus(folder)
        with pytest.raises(ValueError, match=f"{name} is damaged: its sha256"):
            TokenCorpus(folder, verify=True)
        path.write_bytes(whole)
    TokenCorpus(folder, verify=True)


def test_exchanged_tokenizer(folder):
    with open(folder / "tokenizer.model", "ab") as f:
        f.write(b"\0")
    with pytest.raises(ValueError, match="is not the tokenizer that made this corpus"):
        TokenCorpus(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format_version=2), "of a corpus that this version reads"),
        (lambda m: m.update(format="other"), "of a corpus that this version reads"),
        (lambda m: m.pop("splits"), "damaged"),
        (lambda m: m.pop("tokenizer"), "damaged"),
        (lambda m: m.update(vocab_size="600"), "vocab_size and eos_id must be integers"),
        (lambda m: m["tokenizer"].update(sha256=7), "must have the tokenizer's sha256"),
        (lambda m: m.update(splits={}), "damaged"),
        (lambda m: m["splits"].update(train=[]), "shards to train on"),
        (lambda m: m["splits"]["train"][0].pop("tokens"), "damaged"),
        (lambda m: m["splits"]["train"][0].update(name="../corpus/train-00000"), "a file name has a folder in it"),
        (lambda m: m["tokenizer"].update(file="/etc/passwd"), "a file name has a folder in it"),
        (lambda m: m["splits"]["train"][0].update(tokens=1), "the manifest expects 1 in"),
    ],
)
def test_damaged_manifest(folder, change, message):
    manifest = read_manifest(folder)
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(sealed(manifest)))
    with pytest.raises(ValueError, match=message):
        TokenCorpus(folder)


@pytest.mark.parametrize("change", [lambda m: m["splits"]["train"].pop(), lambda m: m.update(eos_id=1)])
def test_an_altered_manifest_that_is_well_formed(folder, change):
    """What is left is in order: only the manifest's checksum of itself says that it is not all. An older one has none."""
    manifest = read_manifest(folder)
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="its own checksum"):
        TokenCorpus(folder)
    del manifest["sha256"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    TokenCorpus(folder, verify=True)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\udcff"])
def test_manifest_that_is_none(folder, text):
    (folder / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"manifest\.json is"):
        TokenCorpus(folder)
