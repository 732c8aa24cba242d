"""From text to a prepared corpus: every kind of file, several processes, kills with SIGKILL,
requests that cannot be met.
"""

import bz2
import errno
import gzip
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from interdomain.data import TokenCorpus, load_tokenizer, read_manifest, readers, tokenize_parallel
from interdomain.data.readers import (
    documents_of,
    find_inputs,
    list_spans,
    read_documents,
    stdlib_files,
)
from interdomain.tools import prepare_data

from ..common import TIMEOUT


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def decoded(corpus, split="train"):
    """Returns the documents of a split as text."""
    tokenizer = load_tokenizer(corpus)
    texts = []
    for shard in TokenCorpus(corpus, split, verify=True).shards:
        for document in shard:
            assert document[-1] == tokenizer.eos_id
            texts.append(tokenizer.decode(document.tolist()))
    return texts


ALL = ("--validation-fraction", 0)  # no document is held out


@pytest.fixture
def prepare(tokenizer, tmp_path, refused):
    """prepare(input, options, out): the corpus. With `words` it is refused with these."""

    def prepare(source, options=ALL, out=tmp_path / "out", words=None):
        argv = ["--input", source, "--tokenizer", tokenizer.path, "--output", out, *options]
        if words is None:
            assert prepare_data.main(list(map(str, argv))) == 0
        else:
            refused(prepare_data.main, argv, words)
        return out

    return prepare


@pytest.fixture
def small_parts(monkeypatch):
    """A few kB of text are read in several spans, and tokenized in several parts."""
    monkeypatch.setattr(readers, "SPAN_BYTES", 1000)
    monkeypatch.setattr(tokenize_parallel, "SMALLEST_PART", 3000)


def rows_of(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


@pytest.fixture(scope="module")
def texts():
    rng = random.Random(1)
    words = ["state", "kernel", "naïve", "🙂", "\u2028", "0x1F", "\r\n", " ", "return self"]
    rows = [" ".join(rng.choices(words, k=rng.randrange(0, 60))) for _ in range(800)]
    return [*rows[:400], "", "one long document " * 1000, *rows[400:]]


def zstd_compress(data):
    return pa.compress(data, codec="zstd", asbytes=True)


@pytest.fixture(scope="module")
def sources(tmp_path_factory, texts):
    """The same documents in five files: lines of JSON, as they are and in two members of every compression, and Parquet."""
    folder = tmp_path_factory.mktemp("sources")
    first = rows_of(texts[:400]).encode()
    second = rows_of(texts[400:]).encode()
    (folder / "rows.jsonl").write_bytes(first + b"\n" + second.rstrip())
    for name, compress in (
        ("rows.jsonl.gz", gzip.compress),
        ("rows.ndjson.bz2", bz2.compress),
        ("rows.json.zst", zstd_compress),
    ):
        (folder / name).write_bytes(compress(first) + compress(second))
    table = pa.table({"id": range(len(texts)), "text": pa.array(texts, pa.large_string())})
    with pq.ParquetWriter(folder / "rows.parquet", table.schema) as writer:
        # Row groups of 3, 0, 497 and all other rows
        for start, stop in ((0, 3), (3, 3), (3, 500), (500, len(texts))):
            writer.write_table(table.slice(start, stop - start))
    return folder


def test_the_embedded_corpus(tmp_path, capsys, refused):
    """Every document once, in order, in its split, which is a function of its text."""
    names = [name for name, _ in stdlib_files()]
    assert names == sorted(names)
    assert not re.search(r"\b(tests?|site-packages)/", " ".join(names))
    assert "encodings/utf_8.py" in names
    assert "encodings/cp1252.py" not in names  # a table of characters

    corpus = tmp_path / "corpus"
    small = ["--max-bytes", "600000", "--vocab-size", "512", "--output", str(corpus)]
    assert prepare_data.main(small) == 0
    assert f"\nwrote {corpus} (" in capsys.readouterr().out
    version = "{}.{}.{}".format(*sys.version_info)
    assert read_manifest(corpus)["source"]["inputs"] == [{"stdlib": version}]
    expected = {"train": [], "validation": []}
    size = 0
    for text in read_documents(["stdlib"], max_bytes=600_000):
        size += len(text.encode())
        held_out = int(hashlib.sha256(text.encode()).hexdigest(), 16) % 10_000 < 200
        expected["validation" if held_out else "train"].append(text)
    assert 500_000 < size <= 600_000
    for split, documents in expected.items():
        assert decoded(corpus, split) == documents
    refused(prepare_data.main, small, "is not empty")

    verify = ["--verify", str(corpus)]
    assert prepare_data.main(verify) == 0
    shard = bytearray((corpus / "train-00000.bin").read_bytes())
    shard[77] ^= 1
    (corpus / "train-00000.bin").write_bytes(shard)
    refused(prepare_data.main, verify, "train-00000.bin is damaged")


KINDS = ["rows.json.zst", "rows.jsonl", "rows.jsonl.gz", "rows.ndjson.bz2", "rows.parquet"]


def test_every_kind_makes_the_same_corpus(sources, texts, prepare, tmp_path):
    options = ("--validation-fraction", "0.1", "--workers", 1)
    corpora = []
    for kind in KINDS:
        out = prepare(sources / kind, options, tmp_path / kind)
        (out / "manifest.json").unlink()  # it names the input
        corpora.append(contents(out))
    assert corpora == [corpora[0]] * len(KINDS)
    full = [text for text in texts if text]
    assert list(read_documents([str(sources)])) == full * len(KINDS)


@pytest.mark.parametrize("span_bytes", [100, 20_000])
@pytest.mark.parametrize("kind", KINDS)
def test_every_document_is_read_once_wherever_a_file_is_cut(
    sources, texts, monkeypatch, kind, span_bytes
):
    full = [text for text in texts if text]
    monkeypatch.setattr(readers, "SPAN_BYTES", span_bytes)
    spans = list(list_spans(find_inputs([sources / kind]).files, "text"))
    # Compressed files are read whole, Parquet by row groups.
    fewest = {"rows.jsonl": 2_000 // span_bytes, "rows.parquet": 3}
    assert len(spans) > fewest.get(kind, 0)
    assert list(documents_of(spans, "text")) == full
    some = list(read_documents([sources / kind], max_bytes=span_bytes))
    assert some
    assert some == full[: len(some)]


PROGRAM = """
import os, sys, time
from interdomain.data import readers, tokenize_parallel
from interdomain.tools import prepare_data
readers.SPAN_BYTES = tokenize_parallel.SMALLEST_PART = 3000
real = os.replace
def replace_slowly(*paths):
    time.sleep(0.01)
    real(*paths)
    time.sleep(0.01)
os.replace = replace_slowly
if __name__ == "__main__":
    sys.exit(prepare_data.main(sys.argv[1:]))
"""  # small parts, and slow enough that a kill falls into the merge


def test_killed_again_and_again_it_ends_with_the_same_bytes(sources, tokenizer, tmp_path):
    """A killed run's workers end, too. The next run continues it. The number of workers changes no byte."""
    line = f"--tokenizer {tokenizer.path} --validation-fraction 0.1 --shard-tokens 10000 --output"
    run = [sys.executable, "-c", PROGRAM, "--input", sources / "rows.jsonl", *line.split()]
    assert subprocess.run([*run, tmp_path / "undisturbed", "--workers", "1"]).returncode == 0
    out = tmp_path / "corpus"
    work = tmp_path / ".corpus.unfinished"
    merged = tmp_path / ".corpus.partial"
    run += [out, "--workers", "2"]
    written = {}  # each finished shard of a part, and when it was written
    for in_merge in (False, False, True):
        before = len(list(work.glob("part-*-train.idx")))
        process = subprocess.Popen(run, stdout=subprocess.DEVNULL)
        while True:
            far_enough = len(list(work.glob("part-*-train.idx"))) > before + 3
            if in_merge:
                far_enough = any(merged.glob("*.bin"))
            if far_enough:
                break
            assert process.poll() is None
            time.sleep(0.005)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
        process.wait()
        found = {path: path.stat().st_mtime_ns for path in work.glob("part-*-train.idx")}
        assert written.items() <= found.items()  # no part was done again
        written = found
        assert not out.exists()
        deadline = time.monotonic() + TIMEOUT
        while any(running(child) for child in children):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    # The parts of the first request stay after another one that fails.
    assert subprocess.run([*run, "--text-field", "id"]).returncode == 2
    assert subprocess.run(run).returncode == 0
    assert contents(out) == contents(tmp_path / "undisturbed")
    assert len(TokenCorpus(out).shards) > 3
    assert sorted(os.listdir(tmp_path)) == ["corpus", "undisturbed"]


def running(pid):
    """Returns False for a process that only waits to be waited for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def write_texts(path, text):
    """Writes 200 documents as a file of the kind that its name says. Texts of one length make files of one size."""
    texts = [text.format(i) for i in range(200)]
    if path.suffix == ".parquet":
        table = pa.table({"text": texts})
        pq.write_table(table, path, row_group_size=30, compression=None, use_dictionary=False)
    else:
        path.write_text(rows_of(texts))


BEFORE = "document {:05} as it was"
AFTER = "Document {:05} as it is."


def stopped(*arguments):
    raise ValueError("stopped")


@pytest.mark.parametrize(
    ("name", "prefix", "options"),
    [
        ("rows.jsonl", "", ["--tokenizer"]),
        ("", "hf:", ["--tokenizer"]),
        ("rows.jsonl", "", ["--vocab-size", "300"]),
    ],
    ids=["rows", "hf", "trained"],
)
def test_after_a_correction_nothing_of_the_old_input_is_left(
    name, prefix, options, tokenizer, tmp_path, monkeypatch, small_parts
):
    """A preparation stops and continues with other inputs of the same names and sizes. It ends as one that begins."""
    same = tmp_path / "same.jsonl"
    folder = tmp_path / "set"
    folder.mkdir()
    file = folder / (name or "rows.parquet")
    if options == ["--tokenizer"]:
        options = [*options, str(tokenizer.path)]
    line = ["--input", str(same), prefix + str(folder / name), *options, "--workers=1"]

    def run(out):
        command = [*line, "--validation-fraction", "0.1", "--output", str(tmp_path / out)]
        return prepare_data.main(command)

    write_texts(same, "this stays as it is {:05}")
    write_texts(file, BEFORE)
    size = file.stat().st_size
    with monkeypatch.context() as patched:
        patched.setattr(prepare_data, "merge_parts", stopped)
        assert run("out") == 2
    write_texts(file, AFTER)
    assert file.stat().st_size == size
    assert run("out") == 0
    assert run("fresh") == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")
    assert sorted(os.listdir(tmp_path)) == ["fresh", "out", "same.jsonl", "set"]


def test_a_file_that_changes_while_it_is_read(prepare, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "SPAN_BYTES", 1000)
    rows = tmp_path / "rows.jsonl"
    write_texts(rows, BEFORE)
    reader = readers.READERS[".jsonl"]

    def changing(span, text_field):
        if span.start == 2000:
            write_texts(rows, AFTER)
        return reader.rows(span, text_field)

    with monkeypatch.context() as patched:
        patched.setitem(readers.READERS, ".jsonl", reader._replace(rows=changing))
        prepare(rows, [*ALL, "--workers", 1], words="rows.jsonl cannot be read: it has changed")
    assert decoded(prepare(rows)) == [AFTER.format(i) for i in range(200)]


def test_a_folder_has_all_files_of_known_kinds(tmp_path, prepare):
    folder = tmp_path / "mixed"
    documents = [f"document {i}" for i in range(10)]
    (folder / ".git").mkdir(parents=True)
    (folder / "deeper").mkdir()
    (folder / "0.txt").write_text("")
    (folder / "3.ndjson.bz2").write_bytes(bz2.compress(rows_of(documents[:7]).encode()))
    (folder / "4.md").write_text(documents[7])
    (folder / "5.rst").write_text(documents[8])
    (folder / "deeper" / "7.TXT.gz").write_bytes(gzip.compress(documents[9].encode()))
    for name in ("a.pdf", "deeper/c.pdf", "d.csv.gz", "Makefile", ".git/config", ".git/x.txt"):
        (folder / name).write_bytes(bytes(1000))
    (folder / "linked").symlink_to("deeper")
    (folder / "gone.txt").symlink_to("nothing")
    # The output may be a link.
    (tmp_path / "link").symlink_to("out")
    prepare(folder, out=tmp_path / "link")
    assert decoded(tmp_path / "out") == documents
    assert str(tmp_path) not in (tmp_path / "out" / "manifest.json").read_text()
    # A glob names each file, and one that cannot be read is refused. ** goes into folders.
    glob = tmp_path / "glob"
    prepare(folder / "*.p*", out=glob, words="a.pdf is not a kind of file")
    assert decoded(prepare(f"{folder}/**/[4-5]*", out=glob)) == documents[7:9]


def test_a_local_folder_as_a_hugging_face_dataset(sources, texts, prepare, tmp_path, monkeypatch):
    (tmp_path / "set").mkdir()
    table = pq.read_table(sources / "rows.parquet")
    for start in (0, 300, 600):
        pq.write_table(table.slice(start, 300), tmp_path / "set" / f"rows-{start}.parquet")
    name = f"hf:{tmp_path / 'set'}"
    assert len(list(list_spans(find_inputs([name]).files, "text"))) == 3
    assert decoded(prepare(name, [*ALL, "--workers", 1])) == [text for text in texts if text]
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    hub = "hf:HuggingFaceFW/fineweb-edu:sample-10BT"
    prepare(hub, out=tmp_path / "none", words="download its files")
    assert not (tmp_path / "none").exists()


def killed(part):
    os._exit(9)


def test_a_worker_that_is_killed(sources, prepare, monkeypatch):
    options = ("--workers", 2)
    with monkeypatch.context() as patched:
        patched.setattr(tokenize_parallel, "_work", killed)
        prepare(sources / "rows.jsonl", options, words="most likely for lack of memory")
    prepare(sources / "rows.jsonl", options)


BETWEEN_MEMBERS = bz2.compress(b'{"text": "a"}\n') + b"between" + bz2.compress(b'{"text": "b"}\n')


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("empty.jsonl", b"", "no split"),
        ("empty.jsonl.gz", b"", "empty.jsonl.gz cannot be read"),
        ("bad.jsonl.gz", b"\0" * 100, "Not a gzipped file"),
        ("between.jsonl.bz2", BETWEEN_MEMBERS, "between.jsonl.bz2 cannot be read"),
    ],
)
def test_bad_files(prepare, tmp_path, name, data, words):
    (tmp_path / name).write_bytes(data)
    prepare(tmp_path / name, ["--workers", 1], words=words)


@pytest.mark.parametrize(
    "name", ["rows.jsonl.gz", "rows.json.zst", "rows.ndjson.bz2", "rows.parquet"]
)
def test_a_file_that_was_cut(sources, prepare, tmp_path, name):
    """A worker, another process, reads it."""
    (tmp_path / name).write_bytes((sources / name).read_bytes()[:-5])
    prepare(tmp_path / name, ["--workers", 2], words=f"{name} cannot be read")


# 400 documents of which three are bad

BAD = (2, 100, 300)


def bad_rows(path):
    """Line 3 is not JSON, line 101 has no text, line 301 is not UTF-8."""
    rows = [b'{"text": "document %d"}\n' % i for i in range(400)]
    rows[2] = b"{\n"
    rows[100] = b'{"text": null}\n'
    rows[300] = b'{"text": "\xff"}\n'
    path.write_bytes(b"".join(rows))


def bad_values(path):
    values = [b"document %d" % i for i in range(400)]
    values[2] = None
    values[100] = None
    values[300] = b"\xff"
    column = pa.array(values, pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), path, row_group_size=90)


def bad_texts(path):
    path.mkdir()
    for i in range(400):
        (path / f"{i:03}.txt").write_text(f"document {i}")
    for i in BAD:
        (path / f"{i:03}.txt").write_bytes(b"\xff")


@pytest.mark.parametrize(
    ("make", "name", "places"),
    [
        (bad_rows, "rows.jsonl", ["line 3", "line 101", "line 301"]),
        (bad_values, "rows.parquet", ["row 3", "row 101", "row 301"]),
        (bad_texts, "texts", ["002.txt", "100.txt", "300.txt"]),
    ],
)
def test_bad_documents_stop_or_are_left_out_and_named(
    make, name, places, prepare, tmp_path, small_parts, capsys
):
    make(tmp_path / name)
    options = [*ALL, "--workers", 1]
    prepare(tmp_path / name, options, words=f"{places[0]}")
    capsys.readouterr()
    out = prepare(tmp_path / name, [*options, "--leave-out-bad"])
    named = [line for line in capsys.readouterr().err.splitlines() if line.startswith("left out: ")]
    assert len(named) == 3
    for line, place in zip(named, places, strict=True):
        assert re.search(rf"{place}[:,] ", line)
    assert decoded(out) == [f"document {i}" for i in range(400) if i not in BAD]


def test_columns(prepare, tmp_path):
    file = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": ["a", None], "id": [1, 2], "body": ["\u2028", "b"]}), file)
    prepare(file, words="{'text': None}")
    prepare(file, [*ALL, "--text-field", "other"], words="has: text, id, body")
    assert decoded(prepare(file, [*ALL, "--text-field", "body"])) == ["\u2028", "b"]
    # Some writers do not mark a column of strings as such.
    pq.write_table(pa.table({"text": [b"a", "ä".encode()]}), file)
    assert decoded(prepare(file, out=tmp_path / "bytes")) == ["a", "ä"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--input no.txt", "No file matches the input"),
        ("--input short.txt --validation-fraction 0", "cannot be trained on this text"),
        ("--tokenizer bad.model", "bad.model is not a tokenizer"),
        ("--validation-fraction 1", "must be at least 0 and below 1"),
        ("--max-bytes 0", "--max-bytes must be at least 1: got 0"),
        ("--synthetic mqar --tokenizer x", "--tokenizer has no effect on a corpus of"),
        ("--synthetic-items 2", "--synthetic-items has no effect on a corpus of text"),
    ],
)
def test_bad_requests(tmp_path, monkeypatch, refused, options, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "bad.model").write_text("bad")
    refused(prepare_data.main, [*options.split(), "--output", "o"], words)
    assert not (tmp_path / "o").exists()


def test_a_full_disk(sources, prepare, tmp_path, monkeypatch):
    def full(f):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("interdomain.data.indexed.sync", full)
    prepare(sources, ["--workers", 1], words="No space left on device")
    assert os.listdir(tmp_path) == [".out.unfinished"]
