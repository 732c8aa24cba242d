"""From text to a prepared corpus: every kind of file, several processes, kills with SIGKILL,
requests that cannot be met.
"""

import bz2
import contextlib
import errno
import functools
import gzip
import hashlib
import json
import os
import random
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
    """The documents of a split as text."""
    tokenizer = load_tokenizer(corpus)
    texts = []
    for shard in TokenCorpus(corpus, split, verify=True).shards:
        for document in shard:
            assert document[-1] == tokenizer.eos_id
            texts.append(tokenizer.decode(document.tolist()))
    return texts


@pytest.fixture
def prepare(tokenizer, tmp_path, refused):
    """prepare(*inputs, options=, out=) -> the corpus; with `words` it is refused with these."""

    def prepare(*inputs, out=tmp_path / "out", options=("--validation-fraction", 0), words=None):
        arguments = ["--input", *inputs, "--tokenizer", tokenizer.path, "--output", out, *options]
        if words:
            refused(prepare_data.main, arguments, *words)
        else:
            assert prepare_data.main([str(argument) for argument in arguments]) == 0
        return out

    return prepare


@pytest.fixture(scope="module")
def texts():
    rng = random.Random(1)
    words = ["state", "kernel", "naïve", "🙂", "\u2028", "0x1F", "\r\n", " ", "return self"]
    rows = [" ".join(rng.choices(words, k=rng.randrange(0, 60))) for _ in range(800)]
    return [*rows[:400], "", "one long document " * 1000, *rows[400:]]


@pytest.fixture(scope="module")
def sources(tmp_path_factory, texts):
    """The same documents as lines of JSON, plain and in two members of every compression, and as Parquet with ragged row
    groups."""
    folder = tmp_path_factory.mktemp("sources")
    lines = [json.dumps({"text": text, "id": i}).encode() + b"\n" for i, text in enumerate(texts)]
    first = b"".join(lines[:400])
    second = b"".join(lines[400:])
    (folder / "rows.jsonl").write_bytes(first + b"\n" + second.rstrip())
    zstd = functools.partial(pa.compress, codec="zstd", asbytes=True)
    for name, compress in (
        ("rows.jsonl.gz", gzip.compress),
        ("rows.ndjson.bz2", bz2.compress),
        ("rows.json.zst", zstd),
    ):
        (folder / name).write_bytes(compress(first) + compress(second))
    columns = {"id": pa.array(range(len(texts))), "text": pa.array(texts, pa.large_string())}
    with pq.ParquetWriter(folder / "rows.parquet", pa.table(columns).schema) as writer:
        for start, stop in ((0, 3), (3, 3), (3, 500), (500, len(texts))):
            writer.write_table(pa.table(columns).slice(start, stop - start))
    return folder


def test_the_embedded_corpus(tmp_path, capsys, refused):
    """Every document once, in order, in its split, which is a function of its text."""
    names = [name for name, _ in stdlib_files()]
    assert names == sorted(names)
    folders = {folder for name in names for folder in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages"}
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


def test_every_kind_gives_every_document_once_wherever_it_is_cut(
    sources, texts, prepare, tmp_path, monkeypatch
):
    full = [text for text in texts if text]
    made = []
    kinds = ("rows.json.zst", "rows.jsonl", "rows.jsonl.gz", "rows.ndjson.bz2", "rows.parquet")
    for kind in kinds:
        options = ("--validation-fraction", "0.1", "--workers", 1)
        out = prepare(sources / kind, out=tmp_path / kind, options=options)
        (out / "manifest.json").unlink()
        made.append(contents(out))
        for span_bytes in (100, 20_000):
            monkeypatch.setattr(readers, "SPAN_BYTES", span_bytes)
            spans = list(list_spans(find_inputs([sources / kind]).files, "text"))
            assert list(documents_of(spans, "text")) == full
            assert len(spans) > {"rows.jsonl": 2_000 // span_bytes, "rows.parquet": 3}.get(kind, 0)
            some = list(read_documents([sources / kind], max_bytes=span_bytes))
            assert some == full[: len(some)] != []
    assert all(files == made[0] for files in made)
    assert list(read_documents([str(sources)])) == full * len(kinds)


PROGRAM = """
import os, sys, time
from interdomain.data import readers, tokenize_parallel
from interdomain.tools import prepare_data
readers.SPAN_BYTES = tokenize_parallel.SMALLEST_PART = 3000
real = os.replace
os.replace = lambda *paths: (time.sleep(0.01), real(*paths), time.sleep(0.01))
if __name__ == "__main__":
    sys.exit(prepare_data.main(sys.argv[1:]))
"""  # small parts, and slow enough that a kill falls into the merge


def test_killed_again_and_again_it_ends_with_the_same_bytes(sources, tokenizer, tmp_path):
    """SIGKILL until a run comes through; its workers end too; another number of them changes no
    byte.
    """
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
    """Not one that only waits to be waited for."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def write_texts(path, text):
    """200 documents as a file of the kind that its name says; as many bytes for as many characters."""
    texts = [text.format(i) for i in range(200)]
    if path.suffix == ".parquet":
        table = pa.table({"text": texts})
        pq.write_table(table, path, row_group_size=30, compression=None, use_dictionary=False)
    else:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


BEFORE = "document {:05} as it was"
AFTER = "Document {:05} as it is."


def stopped(*arguments):
    raise ValueError("stopped")


@pytest.mark.parametrize(
    ("kind", "trained"), [("rows.jsonl", False), ("hf", False), ("rows.jsonl", True)]
)
def test_after_a_correction_nothing_of_the_old_input_is_left(
    kind, trained, tokenizer, tmp_path, monkeypatch
):
    """A preparation that stopped, and continues with inputs of the same names and sizes, ends as
    one that begins.
    """
    monkeypatch.setattr(readers, "SPAN_BYTES", 1000)
    monkeypatch.setattr(tokenize_parallel, "SMALLEST_PART", 3000)
    same = tmp_path / "same.jsonl"
    file = tmp_path / "set" / ("rows.parquet" if kind == "hf" else kind)
    file.parent.mkdir()
    source = f"hf:{file.parent}" if kind == "hf" else str(file)
    options = ["--vocab-size", "300"] if trained else ["--tokenizer", str(tokenizer.path)]
    line = ["--input", str(same), source, *options, "--validation-fraction", "0.1", "--workers=1"]

    def run(out):
        return prepare_data.main([*line, "--output", str(tmp_path / out)])

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

    options = ["--validation-fraction", 0, "--workers", 1]
    with monkeypatch.context() as patched:
        patched.setitem(readers.READERS, ".jsonl", reader._replace(rows=changing))
        prepare(rows, options=options, words=["rows.jsonl cannot be read: it has changed"])
    assert decoded(prepare(rows)) == [AFTER.format(i) for i in range(200)]


def test_a_folder_has_all_files_of_known_kinds_and_a_glob_names_what_is_read(tmp_path, prepare):
    folder = tmp_path / "mixed"
    documents = [f"document {i}, {'words ' * (i % 7)}" for i in range(30)]
    for where in (".git", "deeper"):
        (folder / where).mkdir(parents=True)
    rows = "".join(json.dumps({"text": text}) + "\n" for text in documents[:27])
    (folder / "0.txt").write_text("")
    (folder / "3.ndjson.bz2").write_bytes(bz2.compress(rows.encode()))
    (folder / "4.md").write_text(documents[27])
    (folder / "5.rst").write_text(documents[28])
    (folder / "deeper" / "7.TXT.gz").write_bytes(gzip.compress(documents[29].encode()))
    for name in ("a.pdf", "deeper/c.pdf", "d.csv.gz", "Makefile", ".git/config", ".git/x.txt"):
        (folder / name).write_bytes(bytes(1000))
    (folder / "linked").symlink_to("deeper")
    (folder / "gone.txt").symlink_to("nothing")
    (tmp_path / "link").symlink_to("out")
    prepare(folder, out=tmp_path / "link")
    assert decoded(tmp_path / "out") == documents
    assert str(tmp_path) not in (tmp_path / "out" / "manifest.json").read_text()
    # A glob names each file: what it cannot read is refused. ** goes into folders.
    prepare(folder / "*.p*", out=tmp_path / "glob", words=["a.pdf is not a kind of file"])
    assert decoded(prepare(f"{folder}/**/[4-5]*", out=tmp_path / "glob")) == documents[27:29]


def test_a_local_folder_as_a_hugging_face_dataset(sources, texts, prepare, tmp_path, monkeypatch):
    (tmp_path / "set").mkdir()
    table = pq.read_table(sources / "rows.parquet")
    for i, start in enumerate((0, 300, 600)):
        pq.write_table(table.slice(start, 300), tmp_path / "set" / f"rows-{i}.parquet")
    name = f"hf:{tmp_path / 'set'}"
    assert len(list(list_spans(find_inputs([name]).files, "text"))) == 3
    options = ["--validation-fraction", 0, "--workers", 1]
    assert decoded(prepare(name, options=options)) == [text for text in texts if text]
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    hub = "hf:HuggingFaceFW/fineweb-edu:sample-10BT"
    prepare(hub, out=tmp_path / "none", words=["download its files"])
    assert not (tmp_path / "none").exists()


def killed(part):
    os._exit(9)


def test_a_worker_that_is_killed(sources, prepare, monkeypatch):
    options = ("--workers", 2)
    with monkeypatch.context() as patched:
        patched.setattr(tokenize_parallel, "_work", killed)
        prepare(sources / "rows.jsonl", options=options, words=["most likely for lack of memory"])
    prepare(sources / "rows.jsonl", options=options)


ROW = b'{"text": "a"}\n'
BAD_FILES = {
    "empty.jsonl": (b"", "no split"),
    "bad.jsonl.gz": (b"\0" * 100, "Not a gzipped file"),
    "between.jsonl.bz2": (
        bz2.compress(ROW) + b"between" + bz2.compress(ROW),
        "between.jsonl.bz2 cannot be read",
    ),
    "0.jsonl.gz": (b"", "0.jsonl.gz cannot be read"),
}


def test_bad_files(sources, prepare, tmp_path):
    """In this process, and one of them in a worker."""
    bad = dict(BAD_FILES)
    for name in ("rows.jsonl.gz", "rows.json.zst", "rows.ndjson.bz2", "rows.parquet"):
        bad[name] = ((sources / name).read_bytes()[:-5], f"{name} cannot be read")
    for name, (data, message) in bad.items():
        (tmp_path / name).write_bytes(data)
        workers = 2 if name == "bad.jsonl.gz" else 1
        prepare(tmp_path / name, options=["--workers", workers], words=[message])


def bad_rows(path):
    """400 documents, of which three are bad: the third is no row, the 101st has no text, the 301st
    is not UTF-8.
    """
    rows = [json.dumps({"text": f"document {i}"}).encode() + b"\n" for i in range(400)]
    rows[2] = b"{\n"
    rows[100] = b'{"text": null}\n'
    rows[300] = b'{"text": "\xff"}\n'
    path.write_bytes(b"".join(rows))


def bad_values(path):
    values = [b"document %d" % i for i in range(400)]
    values[2] = values[100] = None
    values[300] = b"\xff"
    column = pa.array(values, pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), path, row_group_size=90)


def bad_texts(path):
    path.mkdir()
    for i in range(400):
        data = b"\xff" if i in (2, 100, 300) else b"document %d" % i
        (path / f"{i:03}.txt").write_bytes(data)


@pytest.mark.parametrize(
    ("make", "name", "places"),
    [
        (bad_rows, "rows.jsonl", ["line 3", "line 101", "line 301"]),
        (bad_values, "rows.parquet", ["row 3", "row 101", "row 301"]),
        (bad_texts, "texts", ["002.txt", "100.txt", "300.txt"]),
    ],
)
def test_bad_documents_stop_or_are_left_out_and_named(
    make, name, places, prepare, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(readers, "SPAN_BYTES", 1000)
    monkeypatch.setattr(tokenize_parallel, "SMALLEST_PART", 3000)
    make(tmp_path / name)
    options = ["--validation-fraction", 0, "--workers", 1]
    prepare(tmp_path / name, options=options, words=["cannot be read: ", places[0]])
    capsys.readouterr()
    out = prepare(tmp_path / name, options=[*options, "--leave-out-bad"])
    named = [line for line in capsys.readouterr().err.splitlines() if line.startswith("left out: ")]
    assert len(named) == 3
    for place in places:
        assert any(f"{place}: " in line or f"{place}, " in line for line in named), place
    assert decoded(out) == [f"document {i}" for i in range(400) if i not in (2, 100, 300)]


def test_training_the_tokenizer_gives_the_reader_s_own_error(tmp_path, refused):
    bad_rows(tmp_path / "rows.jsonl")
    line = f"--input {tmp_path}/rows.jsonl --vocab-size 280 --output {tmp_path}/out"
    words = "rows.jsonl cannot be read: line 3: it is not JSON"
    refused(prepare_data.main, line.split(), words)
    assert prepare_data.main([*line.split(), "--leave-out-bad"]) == 0


def test_columns(prepare, tmp_path):
    columns = {"text": ["a", None], "id": [1, 2], "body": ["\u2028", "b"]}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    options = ["--validation-fraction", 0, "--text-field"]
    for field, message in (("text", "{'text': None}"), ("other", "has: text, id, body")):
        prepare(tmp_path / "x.parquet", options=[*options, field], words=[message])
    assert decoded(prepare(tmp_path / "x.parquet", options=[*options, "body"])) == ["\u2028", "b"]
    # Some writers do not mark a column of strings as such.
    pq.write_table(pa.table({"text": [b"a", "ä".encode()]}), tmp_path / "bytes.parquet")
    assert decoded(prepare(tmp_path / "bytes.parquet", out=tmp_path / "bytes")) == ["a", "ä"]


def test_bad_requests(tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "bad.model").write_text("bad")
    for options, words in (
        ("--output o --input no.txt", "No file matches the input"),
        ("--output o --input short.txt --validation-fraction 0", "cannot be trained on this text"),
        ("--output o --max-bytes 10000 --vocab-size 100", "required_chars. 100 vs 3"),
        ("--output o --tokenizer bad.model", "bad.model is not a tokenizer"),
        ("--output o --validation-fraction 1", "must be at least 0 and below 1"),
        ("--output o --max-bytes 0", "--max-bytes must be at least 1: got 0"),
        ("--output short.txt", "exists and is not empty"),
        ("--output o --synthetic mqar --tokenizer x", "--tokenizer has no effect on a corpus of"),
        ("--output o --synthetic-items 2", "--synthetic-items has no effect on a corpus of text"),
    ):
        refused(prepare_data.main, options.split(), words)
    assert not (tmp_path / "o").exists()


def test_a_full_disk(sources, prepare, tmp_path, monkeypatch):
    def full(f):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("interdomain.data.indexed.sync", full)
    prepare(sources, options=["--workers", 1], words=["No space left on device"])
    assert os.listdir(tmp_path) == [".out.unfinished"]
