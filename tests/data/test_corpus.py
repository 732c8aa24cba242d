"""Prepared folders and bare shards as one stream; what is exchanged, cut or damaged is refused."""

import copy
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
    stream = train.read(0, train.num_tokens)
    assert np.array_equal(stream, np.concatenate([d for shard in train.shards for d in shard]))
    assert (stream == 2).sum() == train.num_documents
    assert train.document_starts(0, train.num_tokens).tolist() == [0, *(np.flatnonzero(stream == 2) + 1)[:-1]]
    text = load_tokenizer(train.tokenizer_path).decode(stream[: list(stream).index(2)].tolist())
    assert text.startswith("document ")


def test_bare_shards(folder):
    prepared = TokenCorpus(folder)
    prefixes = [shard.prefix for shard in prepared.shards]
    n = prepared.num_tokens
    for source in (prefixes, [f"{p}.bin" for p in prefixes], f"{folder}/train-*", [f"{folder}/train-*.idx"]):
        bare = TokenCorpus(source, verify=True)
        assert np.array_equal(bare.read(0, n), prepared.read(0, n))
        assert (bare.vocab_size, bare.eos_id, bare.tokenizer_path) == (None, None, None)
    assert TokenCorpus(prefixes[1]).read(0, 5).tolist() == prepared.shards[1].tokens(0, 5).tolist()
    assert TokenCorpus(prefixes).fingerprint != TokenCorpus(prefixes[::-1]).fingerprint
    prefixes[0].with_suffix(".bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"train-00000\.bin is missing"):
        TokenCorpus(f"{folder}/train-*")


def test_what_is_no_corpus(folder, tmp_path):
    for source, message in ((tmp_path, "manifest"), (f"{tmp_path}/x-*", "No shard"), (tmp_path / "x", r"x\.idx")):
        with pytest.raises(FileNotFoundError, match=message):
            TokenCorpus(source)
    for source, options, message in (
        ([], {}, "at least one shard"),
        (folder, {"split": "test"}, "train, validation"),
        (folder, {"vocab_size": 32000}, "a vocabulary of 600"),
    ):
        with pytest.raises(ValueError, match=message):
            TokenCorpus(source, **options)


def test_missing_files(folder):
    for name in ("train-00001.bin", "train-00001.idx", "tokenizer.model", "manifest.json"):
        data = (folder / name).read_bytes()
        (folder / name).unlink()
        with pytest.raises(FileNotFoundError, match=name.split(".")[0]):
            TokenCorpus(folder)
        (folder / name).write_bytes(data)


def test_exchanged_files(folder):
    for ending in ("bin", "idx"):
        (folder / f"train-00001.{ending}").unlink()
    with IndexedDatasetWriter(folder / "train-00001", 600) as writer:
        writer.add_document([1, 2])
    with pytest.raises(ValueError, match=r"train-00001\.bin was exchanged"):
        TokenCorpus(folder)
    with open(folder / "tokenizer.model", "ab") as f:
        f.write(b"\0")
    with pytest.raises(ValueError, match="is not the tokenizer that made this corpus"):
        TokenCorpus(folder)


def test_damage_of_equal_size_is_found_on_request(folder):
    for name in ("train-00000.bin", "train-00000.idx"):
        path = folder / name
        data = path.read_bytes()
        at = 100 if name.endswith("bin") else 36
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        TokenCorpus(folder)
        with pytest.raises(ValueError, match=f"{name} is damaged"):
            TokenCorpus(folder, verify=True)
        path.write_bytes(data)
    TokenCorpus(folder, verify=True)


def test_a_damaged_manifest(folder):
    manifest = read_manifest(folder)
    for change in (
        lambda m: m.update(format_version=2),
        lambda m: m.pop("splits"),
        lambda m: m.update(vocab_size="600"),
        lambda m: m["tokenizer"].update(sha256=7),
        lambda m: m["splits"].update(train=[]),
        lambda m: m["splits"]["train"][0].pop("tokens"),
        lambda m: m["splits"]["train"][0].update(tokens=1),
        lambda m: m["splits"]["train"][0].update(name="../corpus/train-00000"),
        lambda m: m["tokenizer"].update(file="/etc/passwd"),
    ):
        changed = copy.deepcopy(manifest)
        change(changed)
        (folder / "manifest.json").write_text(json.dumps(sealed(changed)))
        with pytest.raises(ValueError, match=r"damaged|not the tokenizer|exchanged"):
            TokenCorpus(folder)
    for text in ("", "{", "[]", "null", "\udcff"):
        (folder / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(ValueError, match=r"manifest\.json is"):
            TokenCorpus(folder)


def test_an_altered_manifest_that_is_well_formed(folder):
    """What is left is in order: only the manifest's checksum of itself says that it is not all. An older one has none."""
    manifest = read_manifest(folder)
    manifest["splits"]["train"].pop()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="its own checksum"):
        TokenCorpus(folder)
    del manifest["sha256"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    TokenCorpus(folder, verify=True)
