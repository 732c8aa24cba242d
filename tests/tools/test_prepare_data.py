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
import shutil
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

from ..common import TIMEOUT, bytes_in


def decoded(corpus, split="train"):
    """Returns the documents of a split as text."""
    tokenizer = load_tokenizer(corpus)
    texts = []
    for shard in TokenCorpus(corpus, split, verify=True).shards:
        for document in shard:
            assert document[-1] == tokenizer.eos_id
            texts.append(tokenizer.decode(document.tolist()))
    return texts


ALL = ("--validation-fraction", 0, "--workers", 1)  # no document is held out


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
    texts = [" ".join(rng.choices(words, k=rng.randrange(1, 60))) for _ in range(800)]
    return [*texts, "one long document " * 1000]


def zstd_compress(data):
    return pa.compress(data, codec="zstd", asbytes=True)


@pytest.fixture(scope="module")
def sources(tmp_path_factory, texts):
    """The same documents in five files: lines of JSON, as they are and in two members of every compression, and Parquet."""
    folder = tmp_path_factory.mktemp("sources")
    first = rows_of([*texts[:400], ""]).encode()
    second = rows_of(texts[400:]).encode()
    (folder / "rows.jsonl").write_bytes(first + b"\n" + second.rstrip())
    for name, compress in (
        ("rows.jsonl.gz", gzip.compress),
        ("rows.ndjson.bz2", bz2.compress),
        ("rows.json.zst", zstd_compress),
    ):
        (folder / name).write_bytes(compress(first) + compress(second))
    column = pa.array(["", *texts], pa.large_string())
    table = pa.table({"text": column})
    pq.write_table(table, folder / "rows.parquet", row_group_size=197)
    return folder


def test_the_embedded_corpus(tmp_path, refused):
    """Every document once, in order, in its split, which is a function of its text."""
    names = [name for name, _ in stdlib_files()]
    assert names == sorted(names)
    assert not re.search(r"\b(tests?|site-packages)/", " ".join(names))
    assert "encodings/utf_8.py" in names
    assert "encodings/cp1252.py" not in names  # a table of characters

    corpus = tmp_path / "corpus"
    request = f"--max-bytes 600000 --vocab-size 512 --output {corpus}".split()
    assert prepare_data.main(request) == 0
    version = "{}.{}.{}".format(*sys.version_info)
    assert read_manifest(corpus)["source"]["inputs"] == [{"stdlib": version}]
    documents = {"train": [], "validation": []}
    texts = list(read_documents(["stdlib"], max_bytes=600_000))
    assert 500_000 < len("".join(texts).encode()) <= 600_000
    for text in texts:
        digest = hashlib.sha256(text.encode()).hexdigest()
        split = "validation" if int(digest, 16) % 10_000 < 200 else "train"
        documents[split].append(text)
    for split, texts in documents.items():
        assert decoded(corpus, split) == texts
    refused(prepare_data.main, request, "is not empty")

    verify = ["--verify", str(corpus)]
    assert prepare_data.main(verify) == 0
    shard = bytearray((corpus / "train-00000.bin").read_bytes())
    shard[77] ^= 1
    (corpus / "train-00000.bin").write_bytes(shard)
    refused(prepare_data.main, verify, "train-00000.bin is damaged")


KINDS = ["rows.json.zst", "rows.jsonl", "rows.jsonl.gz", "rows.ndjson.bz2", "rows.parquet"]


@pytest.mark.parametrize("span_bytes", [100, 20_000])
@pytest.mark.parametrize("kind", KINDS)
def test_every_document_is_read_once_wherever_a_file_is_cut(
    sources, texts, monkeypatch, kind, span_bytes
):
    monkeypatch.setattr(readers, "SPAN_BYTES", span_bytes)
    spans = list(list_spans(find_inputs([sources / kind]).files, "text"))
    # Compressed files are read whole, Parquet by row groups.
    fewest = {"rows.jsonl": 2_000 // span_bytes, "rows.parquet": 3}
    assert len(spans) > fewest.get(kind, 0)
    assert list(documents_of(spans, "text")) == texts
    some = list(read_documents([sources / kind], max_bytes=span_bytes))
    assert some
    assert some == texts[: len(some)]


PROGRAM = """
import os, sys, time
from interdomain.data import readers, tokenize_parallel
from interdomain.tools import _progress, prepare_data
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
    source = f"--input {sources}/rows.jsonl --tokenizer {tokenizer.path}"
    options = f"{source} --validation-fraction 0.1 --shard-tokens 10000 --output"
    run = [sys.executable, "-c", PROGRAM, *options.split()]
    undisturbed = [*run, tmp_path / "undisturbed", "--workers", "1"]
    assert subprocess.run(undisturbed).returncode == 0
    out = tmp_path / "corpus"
    work = tmp_path / ".corpus.unfinished"
    run += [out, "--workers", "2"]
    finished = {}  # each shard of a part, and when it was written
    for killed_in in ("tokenizing", "tokenizing", "merging"):
        process = subprocess.Popen(run, stdout=subprocess.PIPE)
        while True:
            if killed_in == "tokenizing":
                reached = len(list(work.glob("part-*-train.idx"))) > len(finished) + 3
            else:
                reached = any((tmp_path / ".corpus.partial").glob("*.bin"))
            if reached:
                break
            assert process.poll() is None
            time.sleep(0.005)
        process.kill()
        process.communicate(timeout=TIMEOUT)  # the workers hold the pipe: it ends when none is left
        found = {path: path.stat().st_mtime_ns for path in work.glob("part-*-train.idx")}
        assert finished.items() <= found.items()  # no part was done again
        finished = found
        assert not out.exists()
    # The parts of the first request stay after another one that fails.
    assert subprocess.run([*run, "--text-field", "id"]).returncode == 2
    assert subprocess.run(run).returncode == 0
    assert bytes_in(out) == bytes_in(tmp_path / "undisturbed")
    assert sorted(os.listdir(tmp_path)) == ["corpus", "undisturbed"]


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
    ("file", "source", "options"),
    [
        ("set/rows.jsonl", "set/rows.jsonl", "--tokenizer tokenizer.model"),
        ("set/rows.parquet", "hf:set", "--tokenizer tokenizer.model"),
        ("set/rows.jsonl", "set/rows.jsonl", "--vocab-size 300"),
    ],
    ids=["rows", "hf", "trained"],
)
def test_after_a_correction_nothing_of_the_old_input_is_left(
    file, source, options, tokenizer, tmp_path, monkeypatch, small_parts
):
    """A preparation stops and continues with other inputs of the same names and sizes. It ends as one that begins."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(tokenizer.path, "tokenizer.model")
    os.mkdir("set")
    command = f"--input same.jsonl {source} {options} --workers 1 --validation-fraction 0.1"

    def run(out):
        return prepare_data.main([*command.split(), "--output", out])

    write_texts(Path("same.jsonl"), "this stays as it is {:05}")
    write_texts(Path(file), BEFORE)
    with monkeypatch.context() as patched:
        patched.setattr(prepare_data, "merge_parts", stopped)
        assert run("out") == 2
    write_texts(Path(file), AFTER)
    assert run("out") == 0
    assert run("fresh") == 0
    assert bytes_in(Path("out")) == bytes_in(Path("fresh"))


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
        prepare(rows, words="rows.jsonl cannot be read: it has changed")
    assert decoded(prepare(rows)) == [AFTER.format(i) for i in range(200)]


def test_a_folder_has_all_files_of_known_kinds(tmp_path, prepare):
    """Files of other kinds, hidden folders and links to folders are left out."""
    folder = tmp_path / "mixed"
    (folder / ".git").mkdir(parents=True)
    (folder / "deeper").mkdir()
    for name in ("0.txt", "a.pdf", "deeper/c.csv.gz", ".git/x.txt"):
        (folder / name).touch()
    (folder / "3.ndjson.bz2").write_bytes(bz2.compress(rows_of(["a", "b"]).encode()))
    (folder / "4.md").write_text("c")
    (folder / "deeper/7.TXT.gz").write_bytes(gzip.compress(b"d"))
    (folder / "linked").symlink_to("deeper")
    (folder / "gone.txt").symlink_to("nothing")
    # The output may be a link.
    (tmp_path / "link").symlink_to("out")
    prepare(folder, out=tmp_path / "link")
    assert decoded(tmp_path / "out") == ["a", "b", "c", "d"]
    assert str(tmp_path) not in (tmp_path / "out/manifest.json").read_text()
    # A glob names each file, and one that cannot be read is refused.
    prepare(folder / "*.p*", out=tmp_path / "glob", words="a.pdf is not a kind of file")


def test_a_local_folder_as_a_hugging_face_dataset(sources, texts, prepare, tmp_path, monkeypatch):
    (tmp_path / "set").mkdir()
    table = pq.read_table(sources / "rows.parquet")
    for start in (0, 300, 600):
        pq.write_table(table.slice(start, 300), tmp_path / "set" / f"rows-{start}.parquet")
    name = f"hf:{tmp_path}/set"
    assert decoded(prepare(name)) == texts
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    hub = "hf:HuggingFaceFW/fineweb-edu:sample-10BT"
    prepare(hub, out=tmp_path / "none", words="download its files")
    assert not (tmp_path / "none").exists()


def killed(part):
    os._exit(9)


def test_a_worker_that_is_killed(sources, prepare, monkeypatch):
    monkeypatch.setattr(tokenize_parallel, "_work", killed)
    options = ("--workers", 2)
    prepare(sources / "rows.jsonl", options, words="most likely for lack of memory")


BETWEEN_MEMBERS = bz2.compress(b'{"text": "a"}\n') + b"between" + bz2.compress(b'{"text": "b"}\n')


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("empty.jsonl", b"", "no split"),
        ("bad.jsonl.gz", b"\0" * 100, "Not a gzipped file"),
        ("between.jsonl.bz2", BETWEEN_MEMBERS, "between.jsonl.bz2 cannot be read"),
    ],
)
def test_bad_files(prepare, tmp_path, name, data, words):
    (tmp_path / name).write_bytes(data)
    prepare(tmp_path / name, words=words)


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("rows.jsonl.gz", 2),  # another process reads it
        ("rows.json.zst", 1),
        ("rows.ndjson.bz2", 1),
        ("rows.parquet", 1),
    ],
)
def test_a_file_that_was_cut(sources, prepare, tmp_path, name, workers):
    (tmp_path / name).write_bytes((sources / name).read_bytes()[:-5])
    prepare(tmp_path / name, ["--workers", workers], words=f"{name} cannot be read")


def test_bad_documents_stop_or_are_left_out_and_named(prepare, tmp_path, small_parts, capsys):
    folder = tmp_path / "bad"
    folder.mkdir()
    rows = [b'{"text": "document %d"}\n' % i for i in range(400)]
    rows[2] = b"{\n"
    rows[100] = b'{"text": null}\n'
    rows[300] = b'{"text": "\xff"}\n'
    (folder / "a.jsonl").write_bytes(b"".join(rows))
    values = [b"document %d" % i for i in range(400)]
    values[2] = None
    values[100] = None
    values[300] = b"\xff"
    column = pa.array(values, pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), folder / "b.parquet", row_group_size=90)
    (folder / "c.txt").write_bytes(b"\xff")

    prepare(folder / "a.jsonl", words="line 3")
    prepare(folder / "b.parquet", words="row 3")
    prepare(folder / "c.txt", words="c.txt")
    out = prepare(folder, [*ALL, "--leave-out-bad"])
    printed = capsys.readouterr().err
    named = re.findall(r"^left out: .*/(\w\.\w+, \w+ \d+):", printed, re.MULTILINE)
    assert named == [
        "a.jsonl, line 3",
        "a.jsonl, line 101",
        "a.jsonl, line 301",
        "b.parquet, row 3",
        "b.parquet, row 101",
        "b.parquet, row 301",
        "c.txt, document 1",
    ]
    good = [f"document {i}" for i in range(400) if i not in (2, 100, 300)]
    assert decoded(out) == good + good


def test_columns(prepare, tmp_path):
    file = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": ["a", None], "id": [1, 2], "body": ["\u2028", "b"]}), file)
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
        ("--max-bytes 0", "--max-bytes must be at least 1: got 0"),
        ("--synthetic mqar --tokenizer x", "--tokenizer has no effect on a corpus of"),
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
    prepare(sources, words="No space left on device")
    assert os.listdir(tmp_path) == [".out.unfinished"]
