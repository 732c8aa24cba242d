"""From text to a prepared corpus, twice; requests that cannot be met; preparations that die."""

import bz2
import errno
import gzip
import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from interdomain.data import (
    IndexedDatasetWriter,
    PackedDataset,
    TokenCorpus,
    load_tokenizer,
    preparation,
    read_manifest,
)
from interdomain.data.documents import in_validation, read_documents, stdlib_files
from interdomain.folders import new_folder
from interdomain.tools import prepare_data, train_tokenizer

SMALL = ["--input", "stdlib", "--max-bytes", "600000", "--vocab-size", "512"]


def prepare(output, *options, expect=0, small=True):
    assert prepare_data.main([*(SMALL if small else []), "--output", str(output), *map(str, options)]) == expect


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared") / "stdlib"
    prepare(folder)
    return folder


@pytest.fixture
def texts(tmp_path):
    """Rows of text, the file that holds them, and the options that read it."""
    rows = [f"row {i} " + "some words, " * (i % 5) + "\n" for i in range(50)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": row, "id": i}) + "\n\n" for i, row in enumerate(rows)))
    return rows, path


def error(capsys):
    """The one paragraph on stderr."""
    err = capsys.readouterr().err.strip().split("\n")[-1]
    assert err.startswith("error: ")
    assert "Traceback" not in err
    return err


def test_the_whole_stdlib_is_a_corpus_of_the_right_size():
    files = stdlib_files()
    names = [name for name, _ in files]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    unwanted = {"test", "tests", "idle_test", "site-packages"}
    assert not [name for name in names if unwanted.intersection(name.split("/")) or "sysconfigdata" in name]
    assert 5e6 < sum(path.stat().st_size for _, path in files) < 25e6


def test_stdlib(corpus, capsys):
    manifest = read_manifest(corpus)
    assert sorted(contents(corpus)) == [
        "manifest.json",
        "tokenizer.model",
        "train-00000.bin",
        "train-00000.idx",
        "validation-00000.bin",
        "validation-00000.idx",
    ]
    assert os.listdir(corpus.parent) == ["stdlib"]
    assert manifest["source"]["inputs"] == [{"stdlib": "{}.{}.{}".format(*sys.version_info)}]
    tokenizer = load_tokenizer(corpus)
    assert tokenizer.vocab_size == manifest["vocab_size"] == 512
    # Every document is there, once, in order, ended by EOS, in the split that its text says.
    splits = {split: TokenCorpus(corpus, split, verify=True) for split in ("train", "validation")}
    found = {s: [d.tolist() for shard in c.shards for d in shard] for s, c in splits.items()}
    documents = list(read_documents(["stdlib"], max_bytes=600_000))
    assert 500_000 < sum(d.source_bytes for d in documents) <= 600_000
    for split, rows in found.items():
        expected = [d.text for d in documents if in_validation(d.text, 0.02) == (split == "validation")]
        assert all(row[-1] == tokenizer.eos_id for row in rows)
        assert [tokenizer.decode(row[:-1]) for row in rows] == expected
    assert PackedDataset(splits["validation"], 64, seed=0, shuffle=False)[0].tolist() == found["validation"][0][:65]
    prepare(corpus, "--skip-existing")
    assert capsys.readouterr().out == (
        f"kept {corpus} ({splits['train'].num_tokens:,} training tokens, {splits['validation'].num_tokens:,} validation "
        "tokens, vocabulary 512)\n"
    )


def test_two_runs_are_byte_identical(corpus, tmp_path, capsys):
    code = "import sys; from interdomain.tools.prepare_data import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *SMALL, "--output", str(tmp_path / "again")]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines()[-1].startswith(f"wrote {tmp_path / 'again'} (")
    assert contents(tmp_path / "again") == contents(corpus)


def test_split_is_a_function_of_the_text():
    texts = [f"text {i}" for i in range(5000)]
    chosen = {text for text in texts if in_validation(text, 0.1)}
    assert 400 < len(chosen) < 600
    assert chosen <= {text for text in texts if in_validation(text, 0.2)}
    assert not any(in_validation(text, 0) for text in texts)
    assert in_validation("text 7", 0.1) == (int(hashlib.sha256(b"text 7").hexdigest(), 16) % 10_000 < 1000)


def test_local_files(tmp_path, texts, corpus, capsys):
    rows, path = texts
    (tmp_path / "a.txt").write_bytes(b"first\r\nfile \xf0\x9f\x99\x82")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.py").write_text("x = 1\n")
    (tmp_path / "empty.txt").write_text("")
    inputs = [path, f"{tmp_path}/**/[a-z]*.txt", tmp_path / "sub" / "b.py"]
    options = ["--tokenizer", corpus, "--validation-fraction", 0, "--shard-tokens", 300]
    prepare(tmp_path / "out", "--input", *inputs, *options, small=False)
    train = TokenCorpus(tmp_path / "out", verify=True)
    tokenizer = load_tokenizer(tmp_path / "out")
    found = [tokenizer.decode(d[:-1].tolist()) for shard in train.shards for d in shard]
    assert found == [*rows, "first\r\nfile 🙂", "x = 1\n"]
    assert len(train.shards) > 1
    assert all(shard.num_tokens >= 300 for shard in train.shards[:-1])
    manifest = read_manifest(tmp_path / "out")
    assert list(manifest["splits"]) == ["train"]
    assert manifest["empty_documents"] == 1
    assert "left out 1 document without text\n" in capsys.readouterr().out
    assert str(tmp_path) not in (tmp_path / "out" / "manifest.json").read_text()
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == (corpus / "tokenizer.model").read_bytes()


def test_nothing_of_a_folder_is_left_out_in_silence(tmp_path, corpus, capsys):
    folder = tmp_path / "mixed"
    documents = [f"document {i}, {'words ' * (i % 7)}" for i in range(40)]
    for where in ("", ".git", "deeper"):
        (folder / where).mkdir(parents=True)
    (folder / "1.json").write_text(json.dumps([{"text": text} for text in documents[:10]]))
    (folder / "2.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents[10:20]))
    rows = "".join(json.dumps({"text": text}) + "\n" for text in documents[20:37])
    (folder / "3.ndjson.bz2").write_bytes(bz2.compress(rows.encode()))
    (folder / "4.md").write_text(documents[37])
    (folder / "5.rst").write_text(documents[38])
    (folder / "deeper" / "6.TXT.gz").write_bytes(gzip.compress(documents[39].encode()))
    for name in ("a.pdf", "b.pdf", "deeper/c.pdf", "d.csv.gz", "e.parquet.gz", "Makefile", ".git/config"):
        (folder / name).write_bytes(bytes(1000))
    (folder / "linked").symlink_to("deeper")
    (folder / "gone.txt").symlink_to("nothing")
    options = ["--input", folder, "--tokenizer", corpus / "tokenizer.model", "--validation-fraction", 0]
    prepare(tmp_path / "out", *options, "--strict", small=False, expect=2)
    refused = error(capsys)
    assert "3 .pdf (3.0 KB: a.pdf, b.pdf, deeper/c.pdf)" in refused
    assert not (tmp_path / "out").exists()
    prepare(tmp_path / "out", *options, small=False)
    read, skipped, *_ = capsys.readouterr().out.splitlines()
    assert read.startswith("reading 6 files (")
    for said in ("2 .json (", "1 .ndjson.bz2 (", "1 .md (", "1 .rst (", "1 .txt.gz ("):
        assert said in read
    assert skipped.startswith("left out 9 files (")
    counts = {
        ".pdf": 3,
        ".csv.gz": 1,
        ".parquet.gz": 1,
        "no ending": 1,
        "hidden": 1,
        "link to a folder": 1,
        "not a file": 1,
    }
    assert all(f"{count} {kind} (" in skipped for kind, count in counts.items())
    manifest = read_manifest(tmp_path / "out")
    assert {kind: entry["files"] for kind, entry in manifest["left_out"].items()} == counts
    assert manifest["left_out"][".pdf"] == {"files": 3, "bytes": 3000, "names": ["a.pdf", "b.pdf", "deeper/c.pdf"]}
    tokenizer = load_tokenizer(corpus / "tokenizer.model")
    (shard,) = TokenCorpus(tmp_path / "out", "train").shards
    assert [tokenizer.decode(d[:-1].tolist()) for d in shard] == documents
    # A glob names each file: what it cannot read is refused, and a folder that it matches is not looked into.
    (tmp_path / "some").mkdir()
    (tmp_path / "some.txt").write_text("text")
    prepare(tmp_path / "glob", "--input", tmp_path / "some*", *options[2:], "--strict", small=False, expect=2)
    assert "1 folder (" in error(capsys)
    prepare(tmp_path / "glob", "--input", folder / "*.p*", *options[2:], small=False, expect=2)
    assert "a.pdf is not a kind of file that is read" in error(capsys)


def test_text_field_and_large_vocabulary(tmp_path, corpus):
    (tmp_path / "x.jsonl").write_text('{"content": "hello\\u2028there"}\n')
    options = ["--text-field", "content", "--tokenizer", corpus / "tokenizer.model", "--validation-fraction", 0]
    prepare(tmp_path / "out", "--input", tmp_path / "x.jsonl", *options, small=False)
    shard = TokenCorpus(tmp_path / "out").shards[0]
    assert load_tokenizer(corpus).decode(shard[0].tolist()) == "hello\u2028there"
    assert shard.dtype == np.uint16


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text": \n', "line 2, is not JSON"),
        ('{"text": "a"}\n{"body": "b", "id": 1}\n', "line 2, has no text under 'text' (it has: body, id)"),
        ('{"text": 3}\n', "line 1, has no text under 'text'"),
        ('["text"]\n', "line 1, has no text under 'text' (it has: list)"),
        ('{"text": "a", "more": ' + "[" * 100_000, "line 1, is not JSON (maximum recursion depth exceeded"),
        ('{"text": "\\ud800"}\n', "line 1, has half a surrogate pair"),
        ("", "No document of the input falls into the train split"),
    ],
)
def test_bad_rows(tmp_path, corpus, capsys, content, message):
    (tmp_path / "x.jsonl").write_text(content)
    prepare(tmp_path / "out", "--input", tmp_path / "x.jsonl", "--tokenizer", corpus, small=False, expect=2)
    assert message in error(capsys)
    assert os.listdir(tmp_path) == ["x.jsonl"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--input", "{}/no.txt"], "No file matches the input"),
        (["--input", "{}/*.md"], "No file matches the input"),
        (["--input", "{}/sub"], "No file matches the input"),
        (["--input", "{}/bad.model"], "not a kind of file that is read"),
        (["--input", "{}/x.parquet"], "x.parquet is not a whole Parquet file"),
        (["--workers", "0"], "must be at least 1"),
        (["--input", "{}/latin.txt"], "latin.txt is not UTF-8 (byte 1"),
        (["--input", "{}/short.txt", "--validation-fraction", "0"], "cannot be trained on this text"),
        (["--vocab-size", "100"], "too small"),
        (["--vocab-size", "0"], "too small"),
        (["--tokenizer", "{}/no.model"], "There is no tokenizer file"),
        (["--tokenizer", "{}/bad.model"], "is not a sentencepiece model"),
        (["--tokenizer", "{}/bad.model", "--vocab-size", "400"], "not both"),
        (["--validation-fraction", "1"], "must be at least 0 and below 1"),
        (["--max-bytes", "0"], "must be at least 1"),
        (["--max-bytes", "10"], "cannot be trained on this text"),
        (["--output", "."], "must end in the name"),
        (["--output", "{}/x.parquet"], "is a file"),
        (["--output", "{}/x.parquet/sub"], "x.parquet: File exists. Check this path"),
    ],
)
def test_bad_requests(tmp_path, capsys, options, message):
    (tmp_path / "sub").mkdir()
    (tmp_path / "x.parquet").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"a\xff")
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "bad.model").write_text("bad")
    before = sorted(os.listdir(tmp_path))
    output = [] if "--output" in options else ["--output", str(tmp_path / "out")]
    assert prepare_data.main([*output, *(option.format(tmp_path) for option in options)]) == 2
    assert message in error(capsys)
    assert sorted(os.listdir(tmp_path)) == before


def test_output_that_is_not_empty(tmp_path, corpus, capsys):
    (tmp_path / "out").mkdir()
    prepare(tmp_path / "out")  # empty is fine
    prepare(tmp_path / "out", expect=2)
    assert "is not empty, and nothing is overwritten" in error(capsys)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("years of work")
    for option in ([], ["--skip-existing"]):
        prepare(tmp_path / "other", *option, expect=2)
        assert "other" in error(capsys)
    assert os.listdir(tmp_path / "other") == ["thesis.tex"]


def test_skip_existing_takes_only_the_same_and_whole(tmp_path, capsys):
    out = tmp_path / "out"
    prepare(out, "--skip-existing")
    prepare(out, "--skip-existing")
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"kept {out} (")
    before = contents(out)
    prepare(out, "--skip-existing", "--validation-fraction", 0.1, expect=2)
    assert "validation_fraction: 0.02 there, 0.1 asked for" in error(capsys)
    assert contents(out) == before
    os.truncate(out / "validation-00000.bin", 100)
    prepare(out, "--skip-existing", expect=2)
    assert "validation-00000.bin is truncated" in error(capsys)


def test_full_disk(tmp_path, capsys, monkeypatch):
    def add_documents(self, tokens, lengths):
        with self._cleared_up_on_error():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(IndexedDatasetWriter, "add_documents", add_documents)
    prepare(tmp_path / "out", expect=2)
    message = error(capsys)
    assert "No space left on device" in message
    assert "free space" in message
    assert os.listdir(tmp_path) == []


def test_an_input_that_changes_is_no_corpus(tmp_path, texts, corpus, capsys, monkeypatch):
    _, path = texts

    def write_splits(*args, **options):
        os.truncate(path, path.read_bytes().index(b"\n", 1000) + 1)  # behind a row: nothing else shows it
        return preparation.write_splits(*args, **options)

    monkeypatch.setattr(prepare_data, "write_splits", write_splits)
    prepare(tmp_path / "out", "--input", path, "--tokenizer", corpus, small=False, expect=2)
    assert "The input changed while it was read (rows.jsonl)" in error(capsys)
    assert not (tmp_path / "out").exists()


def test_where_a_folder_appears(tmp_path, texts, corpus, capsys, monkeypatch):
    """Through a link; not in place of a mounted disk; never by clearing what somebody else's link points to."""
    options = ("--input", texts[1], "--tokenizer", corpus)
    (tmp_path / "real").mkdir()
    for name in ("real", "new"):
        (tmp_path / f"to-{name}").symlink_to(name)
        prepare(tmp_path / f"to-{name}", *options, small=False)
        assert (tmp_path / name / "manifest.json").is_file()
    with new_folder(tmp_path / "to-exports") as folder:
        (folder / "notes.txt").write_text("mine")
    (tmp_path / ".out.unfinished").symlink_to("to-exports")
    prepare(tmp_path / "out", *options, small=False, expect=2)
    assert ".out.unfinished is a link" in error(capsys)
    assert os.listdir(tmp_path / "to-exports") == ["notes.txt"]
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: os.fspath(path) == str(tmp_path / "disk"))
    prepare(tmp_path / "disk", *options, small=False, expect=2)
    assert "is where a disk is mounted" in error(capsys)


def test_a_folder_has_its_name_when_its_files_are_on_the_disk(tmp_path, monkeypatch):
    synced = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino))
    with new_folder(tmp_path / "out") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "weights").write_bytes(b"...")
    assert {path.stat().st_ino for path in (tmp_path, *(tmp_path / "out").rglob("*"))} <= synced


def test_two_at_once(tmp_path):
    """Two runs for one folder: one writes it, the other finds it made."""
    module = [sys.executable, "-m", "interdomain.tools.prepare_data"]
    command = [*module, *SMALL, "--output", str(tmp_path / "out"), "--skip-existing"]
    pair = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outs = [process.communicate() for process in pair]
    assert [process.returncode for process in pair] == [0, 0], outs
    assert os.listdir(tmp_path) == ["out"]
    TokenCorpus(tmp_path / "out", verify=True)


def test_train_tokenizer(tmp_path, capsys):
    out = tmp_path / "sub" / "tokenizer.model"
    options = ["--input", "stdlib", "--max-bytes", "300000", "--vocab-size", "400"]
    assert train_tokenizer.main([*options, "--output", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"wrote {out} (vocabulary 400, ")
    assert train_tokenizer.main([*options, "--output", str(out)]) == 2
    assert "exists already" in error(capsys)
    assert train_tokenizer.main([*options, "--output", str(tmp_path / "again.model")]) == 0
    assert (tmp_path / "again.model").read_bytes() == out.read_bytes()
    assert load_tokenizer(out).vocab_size == 400
    assert train_tokenizer.main([*options, "--output", str(tmp_path / "x.json")]) == 2
    assert "must end in .model" in error(capsys)
    assert train_tokenizer.main(["--vocab-size", "310", "--output", str(tmp_path / "y.model")]) == 2
    assert "cannot be trained on this text" in error(capsys)
    assert sorted(os.listdir(tmp_path)) == ["again.model", "sub"]
