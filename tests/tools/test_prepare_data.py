"""From text to a prepared corpus: every kind of file, several processes, kills with SIGKILL, requests that cannot be met."""

import bz2
import contextlib
import errno
import gzip
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from interdomain.data import PackedDataset, TokenCorpus, load_tokenizer, read_manifest, readers, tokenize_parallel
from interdomain.data.readers import in_validation, list_files, read_documents, read_span, spans_of, stdlib_files
from interdomain.folders import kept_folder
from interdomain.tools import prepare_data, train_tokenizer

from ..common import small_tokenizer

SMALL = ["--input", "stdlib", "--max-bytes", "600000", "--vocab-size", "512"]
KINDS = ("rows.json", "rows.json.zst", "rows.jsonl", "rows.jsonl.gz", "rows.ndjson.bz2", "rows.parquet")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def error(capsys):
    """The one paragraph on stderr."""
    err = capsys.readouterr().err.strip().split("\n")[-1]
    assert err.startswith("error: ")
    return err


def decoded(corpus, split="train"):
    """The documents of a split as text."""
    corpus, tokenizer = TokenCorpus(corpus, split, verify=True), load_tokenizer(corpus)
    rows = [document.tolist() for shard in corpus.shards for document in shard]
    assert all(row[-1] == tokenizer.eos_id for row in rows)
    return [tokenizer.decode(row[:-1]) for row in rows]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.model")


@pytest.fixture
def prepare(tokenizer, tmp_path):
    def run(*inputs, out=tmp_path / "out", options=("--validation-fraction", "0"), expect=0):
        arguments = ["--input", *inputs, "--tokenizer", tokenizer, "--output", out, *options]
        assert prepare_data.main([str(argument) for argument in arguments]) == expect
        return out

    return run


@pytest.fixture(scope="module")
def texts():
    rng = random.Random(1)
    words = ["state", "kernel", "query", "naïve", "🙂", "\u2028", "0x1F", "\r\n", " ", "return self"]
    rows = [" ".join(rng.choices(words, k=rng.randrange(0, 60))) for _ in range(800)]
    return [*rows[:400], "", "one long document " * 1000, *rows[400:]]


def zstd(data):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as f:
        f.write(data)
    return sink.getvalue().to_pybytes()


@pytest.fixture(scope="module")
def sources(tmp_path_factory, texts):
    """The same documents as lines of JSON, plain and in two members of every compression, as a JSON array, and as Parquet with
    ragged row groups."""
    folder = tmp_path_factory.mktemp("sources")
    lines = [json.dumps({"text": text, "id": i}).encode() + b"\n" for i, text in enumerate(texts)]
    first, second = b"".join(lines[:400]), b"".join(lines[400:])
    (folder / "rows.jsonl").write_bytes(first + b"\n" + second)
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(first) + gzip.compress(second))
    (folder / "rows.json.zst").write_bytes(zstd(first) + zstd(second))
    (folder / "rows.ndjson.bz2").write_bytes(bz2.compress(first) + bz2.compress(second))
    (folder / "rows.json").write_text(json.dumps([json.loads(line) for line in lines], indent=1, ensure_ascii=False))
    columns = {"id": pa.array(range(len(texts))), "text": pa.array(texts, pa.large_string())}
    with pq.ParquetWriter(folder / "rows.parquet", pa.table(columns).schema) as writer:
        for start, stop in ((0, 3), (3, 3), (3, 500), (500, len(texts))):
            writer.write_table(pa.table(columns).slice(start, stop - start))
    return folder


def test_the_embedded_corpus(tmp_path, capsys):
    """Every document once, in order, in its split; the same bytes in another process; kept if it is there."""
    names = [name for name, _ in stdlib_files()]
    assert names == sorted(names)
    assert not [name for name in names if {"test", "tests", "site-packages"}.intersection(name.split("/"))]
    for folder in ("one", "again"):
        command = [sys.executable, "-m", "interdomain.tools.prepare_data", *SMALL, "--output", str(tmp_path / folder)]
        environment = {**os.environ, "PYTHONHASHSEED": str(len(folder))}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.stdout.splitlines()[-1].startswith(f"wrote {tmp_path / folder} ("), done.stderr
    corpus = tmp_path / "one"
    assert contents(corpus) == contents(tmp_path / "again")
    assert sorted(os.listdir(tmp_path)) == ["again", "one"]
    files = ["manifest.json", "tokenizer.model"]
    files += [f"{split}-00000.{ending}" for split in ("train", "validation") for ending in ("bin", "idx")]
    assert sorted(contents(corpus)) == files
    manifest = read_manifest(corpus)
    assert manifest["source"]["inputs"] == [{"stdlib": "{}.{}.{}".format(*sys.version_info)}]
    documents = list(read_documents(["stdlib"], max_bytes=600_000))
    assert 500_000 < sum(d.source_bytes for d in documents) <= 600_000
    for split in ("train", "validation"):
        assert decoded(corpus, split) == [
            d.text for d in documents if in_validation(d.text, 0.02) == (split != "train")
        ]
        read = TokenCorpus(corpus, split)
        assert manifest["totals"][split] == {"documents": read.num_documents, "tokens": read.num_tokens}
    assert PackedDataset(read, 64, seed=0, shuffle=False)[0].tolist() == read.read(0, 65).tolist()
    again = [*SMALL, "--output", str(corpus), "--skip-existing"]
    assert prepare_data.main(again) == 0
    assert capsys.readouterr().out.startswith(f"kept {corpus} (")
    assert prepare_data.main(again[:-1]) == 2
    assert "is not empty" in error(capsys)
    assert prepare_data.main([*again, "--validation-fraction", "0.1"]) == 2
    assert "validation_fraction: 0.02 there, 0.1 asked for" in error(capsys)
    assert prepare_data.main(["--verify", str(corpus)]) == 0
    shard = bytearray((corpus / "train-00000.bin").read_bytes())
    (corpus / "train-00000.bin").write_bytes(shard[:77] + bytes([shard[77] ^ 1]) + shard[78:])
    assert prepare_data.main(["--verify", str(corpus)]) == 2
    assert "train-00000.bin is damaged" in error(capsys)


def test_split_is_a_function_of_the_text():
    chosen = {text for text in map(str, range(5000)) if in_validation(text, 0.1)}
    assert chosen == {
        t for t in map(str, range(5000)) if int(hashlib.sha256(t.encode()).hexdigest(), 16) % 10_000 < 1000
    }


@pytest.mark.parametrize("span_bytes", [100, 20_000])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_every_document_once_wherever_it_is_cut(sources, texts, kind, span_bytes, monkeypatch):
    monkeypatch.setattr(readers, "SPAN_BYTES", span_bytes)
    (file,) = list_files([sources / kind])
    spans = spans_of(file, "text")
    assert [d.text for span in spans for d in read_span(span, "text")] == texts
    assert len(spans) > (100 if kind == "rows.jsonl" and span_bytes == 100 else 3 if kind == "rows.parquet" else 0)


def test_the_same_text_is_the_same_corpus_of_any_kind(sources, texts, prepare, tmp_path, monkeypatch):
    """In parts of any size. With --max-bytes, too, which cuts at the same document."""
    made = []
    for kind in KINDS:
        out = prepare(sources / kind, out=tmp_path / kind, options=("--validation-fraction", "0.1", "--workers", 1))
        made.append({name: data for name, data in contents(out).items() if name != "manifest.json"})
    assert all(files == made[0] for files in made)
    assert decoded(out, "validation") == [t for t in texts if t and in_validation(t, 0.1)]
    assert [d.text for d in read_documents([str(sources)])] == [text for _ in KINDS for text in texts if text]
    monkeypatch.setattr(readers, "SPAN_BYTES", 1000)
    monkeypatch.setattr(tokenize_parallel, "SMALLEST_PART", 5000)
    lines = np.cumsum([len(json.dumps({"text": text, "id": i})) + 1 for i, text in enumerate(texts)])
    for size in (3000, 80_000):
        options = ["--validation-fraction", 0, "--max-bytes", size]
        out = prepare(sources / "rows.jsonl", out=tmp_path / str(size), options=options)
        assert decoded(out) == [text for text in texts[: int((lines <= size).sum())] if text]


def command(sources, tokenizer, out, *options, code=""):
    """prepare_data as a process, in small parts (workers are other processes: they are handed the parts as they are)."""
    program = f"""
import sys
from interdomain.data import readers, tokenize_parallel
from interdomain.tools import prepare_data
readers.SPAN_BYTES, tokenize_parallel.SMALLEST_PART = 3000, 3000
{code}
if __name__ == "__main__":
    sys.exit(prepare_data.main(sys.argv[1:]))
"""
    given = f"--input {sources}/rows.jsonl --tokenizer {tokenizer} --output {out} --validation-fraction 0.1"
    return [sys.executable, "-c", program, *given.split(), "--shard-tokens", "10000", *map(str, options)]


SLOW = """
import os, time
real = os.replace
def slow(*args):
    time.sleep(0.01); real(*args); time.sleep(0.01)
os.replace = slow
"""


def test_killed_again_and_again_it_ends_with_the_same_bytes(sources, tokenizer, tmp_path):
    """SIGKILL until a run comes through; its workers end too; another number of them changes no byte."""
    undisturbed = command(sources, tokenizer, tmp_path / "undisturbed", "--workers", 1)
    done = subprocess.run(undisturbed, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    out, work, merged = tmp_path / "corpus", tmp_path / ".corpus.unfinished", tmp_path / ".corpus.partial"
    run = command(sources, tokenizer, out, "--workers", 2, code=SLOW)  # slow enough that a kill falls into the merge
    written = {}  # each part's record, and when it was written
    for in_merge in (False, False, True):
        before = len(list(work.glob("part-*.json")))
        with open(tmp_path / "log", "w") as log:  # not a pipe, which workers that do not end would hold open
            process = subprocess.Popen(run, stdout=log)
        while not (any(merged.glob("*.bin")) if in_merge else len(list(work.glob("part-*.json"))) > before):
            assert process.poll() is None
            time.sleep(0.005)
        with open(f"/proc/{process.pid}/task/{process.pid}/children") as f:
            children = f.read().split()
        process.send_signal(signal.SIGKILL)
        process.wait()
        found = {path: path.stat().st_mtime_ns for path in work.glob("part-*.json")}
        assert written.items() <= found.items()  # no part was done again
        written = found
        assert ("continuing an earlier run" in (tmp_path / "log").read_text()) == (before > 0)
        assert not out.exists()
        deadline = time.monotonic() + 60
        while any(running(child) for child in children):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    other_cut = command(sources, tokenizer, out, code="readers.SPAN_BYTES = 9000")
    for other, message in (
        ([*run, "--max-bytes", "9999"], "max_bytes: None there, 9999 asked for"),
        (other_cut, "parts: "),
    ):
        done = subprocess.run(other, capture_output=True, text=True)
        assert done.returncode == 2
        assert message in done.stderr
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert contents(out) == contents(tmp_path / "undisturbed")
    assert len(TokenCorpus(out).shards) > 3
    assert sorted(os.listdir(tmp_path)) == ["corpus", "log", "undisturbed"]


def running(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_two_at_once(sources, prepare, tmp_path, capsys):
    """One process at a time builds a folder; with --skip-existing the other one waits, and finds it made."""
    with contextlib.suppress(InterruptedError), kept_folder(tmp_path / "out"):
        prepare(sources, expect=2)  # flock: another opening of the folder, even by this process
        raise InterruptedError
    assert "Another process is building" in error(capsys)
    line = (
        f"-m interdomain.tools.prepare_data --max-bytes 90000 --vocab-size 400 --skip-existing --output {tmp_path}/out"
    )
    command = [sys.executable, *line.split()]
    pair = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[0].splitlines()[-1].split()[0] for process in pair]
    assert sorted(said) == ["kept", "wrote"]
    assert os.listdir(tmp_path) == ["out"]


def test_nothing_of_a_folder_is_left_out_in_silence(tmp_path, prepare, capsys):
    folder = tmp_path / "mixed"
    documents = [f"document {i}, {'words ' * (i % 7)}" for i in range(40)]
    for where in ("", ".git", "deeper"):
        (folder / where).mkdir(parents=True)
    (folder / "1.json").write_text(json.dumps([{"text": text} for text in documents[:10]]))
    rows = "".join(json.dumps({"text": text}) + "\n" for text in documents[10:37])
    (folder / "3.ndjson.bz2").write_bytes(bz2.compress(rows.encode()))
    (folder / "4.md").write_text(documents[37])
    (folder / "5.rst").write_text(documents[38])
    (folder / "6.txt").write_text("")
    (folder / "deeper" / "7.TXT.gz").write_bytes(gzip.compress(documents[39].encode()))
    for name in ("a.pdf", "b.pdf", "deeper/c.pdf", "d.csv.gz", "e.parquet.gz", "Makefile", ".git/config"):
        (folder / name).write_bytes(bytes(1000))
    (folder / "linked").symlink_to("deeper")
    (folder / "gone.txt").symlink_to("nothing")
    prepare(folder, options=["--strict"], expect=2)
    assert "3 .pdf (3.0 KB: a.pdf, b.pdf, deeper/c.pdf)" in error(capsys)
    assert os.listdir(tmp_path) == ["mixed"]
    prepare(folder)
    read, skipped, *said = capsys.readouterr().out.splitlines()
    assert read.startswith("reading 6 files (")
    assert all(f"1 {ending} (" in read for ending in (".json", ".ndjson.bz2", ".md", ".rst", ".txt.gz", ".txt"))
    assert skipped.startswith("left out 9 files (")
    assert "left out 1 document without text" in said
    manifest = read_manifest(tmp_path / "out")
    counts = {".pdf": 3, **dict.fromkeys((".csv.gz", ".parquet.gz", "no ending", "hidden"), 1)}
    counts |= {"link to a folder": 1, "not a file": 1}
    assert {kind: entry["files"] for kind, entry in manifest["left_out"].items()} == counts
    assert manifest["left_out"][".pdf"] == {"files": 3, "bytes": 3000, "names": ["a.pdf", "b.pdf", "deeper/c.pdf"]}
    assert (manifest["empty_documents"], list(manifest["splits"])) == (1, ["train"])
    assert str(tmp_path) not in (tmp_path / "out" / "manifest.json").read_text()
    assert decoded(tmp_path / "out") == documents
    # A glob names each file: what it cannot read is refused. ** goes into folders.
    prepare(folder / "*.p*", out=tmp_path / "glob", expect=2)
    assert "a.pdf is not a kind of file" in error(capsys)
    assert decoded(prepare(f"{folder}/**/[4-5]*", out=tmp_path / "glob")) == documents[37:39]


def test_a_local_folder_as_a_hugging_face_dataset(sources, texts, tokenizer, prepare, tmp_path, capsys, monkeypatch):
    (tmp_path / "set").mkdir()
    table = pq.read_table(sources / "rows.parquet")
    for i, start in enumerate((0, 300, 600)):
        pq.write_table(table.slice(start, 300), tmp_path / "set" / f"rows-{i}.parquet")
    name = f"hf:{tmp_path / 'set'}"
    assert len(spans_of(list_files([name])[0], "text")) == 3
    assert decoded(prepare(name, options=["--validation-fraction", 0, "--workers", 1])) == [t for t in texts if t]
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    for name, message in (("hf:", "is no dataset"), ("hf:HuggingFaceFW/fineweb-edu:sample-10BT", "download its files")):
        prepare(name, out=tmp_path / "none", expect=2)
        assert message in error(capsys)
    assert not (tmp_path / "none").exists()


BAD = {
    "latin.txt": (b"a\xff", "not UTF-8"),
    "row.jsonl": (b'{"text": "a"}\n' * 500 + b'{"text": 3}\n' + b'{"text": "a"}\n' * 500, "line 501: there is no text"),
    "json.jsonl": (b'{"text": "a"}\n\n{"text": \n', "line 3: this is not JSON"),
    "field.jsonl": (b'{"text": "a"}\n{"body": "b", "id": 1}\n', "line 2: .* body, id"),
    "list.jsonl": (b'["text"]\n', "line 1: .* list"),
    "deep.jsonl": (b'{"text": "a", "more": ' + b"[" * 100_000, "line 1: maximum recursion"),
    "half.jsonl": (b'{"text": "\\ud800"}\n', "half a surrogate pair"),
    "empty.jsonl": (b"", "No document"),
    "row.json": (b'[{"text": "a"}, {"text": "b"}, {"body": "c"}]', "row 3: .* body"),
    "cut.json": (b'[{"text": "a"}, {"text": "b"', "cut.json is not JSON"),
    "bad.jsonl.gz": (b"\0" * 100, "bad.jsonl.gz is damaged"),
    "bad.jsonl.zst": (b"\0" * 100, "bad.jsonl.zst is damaged"),
    "bad.jsonl.bz2": (b"\0" * 100, "bad.jsonl.bz2 is damaged"),
    "row.jsonl.gz": (gzip.compress(b'{"text": "a"}\n{"text": 3}\n'), "row.jsonl.gz, line 2"),
    "cut.jsonl.gz": (("rows.jsonl.gz", lambda data: data[:-50]), "damaged or not complete"),
    "cut.jsonl.zst": (("rows.json.zst", lambda data: data[:-5]), "damaged or not complete"),
    "cut.parquet": (("rows.parquet", lambda data: data[:-50]), "not a complete Parquet file"),
    "bad.parquet": (("rows.parquet", lambda data: data[:400] + bytes(400) + data[800:]), "bad.parquet is damaged"),
}


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_files(sources, prepare, tmp_path, capsys, monkeypatch, workers):
    monkeypatch.setattr(readers, "SPAN_BYTES", 1000)
    for name, (data, message) in BAD.items() if workers == 1 else [("row.jsonl.gz", BAD["row.jsonl.gz"])]:
        data = data if isinstance(data, bytes) else data[1]((sources / data[0]).read_bytes())
        (tmp_path / name).write_bytes(data)
        prepare(tmp_path / name, options=["--workers", workers], expect=2)
        assert re.search(message, error(capsys)), name
        (tmp_path / name).unlink()
    assert [path for path in tmp_path.iterdir() if path.name != ".out.unfinished"] == []


def test_bad_columns(prepare, tmp_path, capsys):
    pq.write_table(pa.table({"text": ["a", None], "id": [1, 2]}), tmp_path / "null.parquet")
    for field, message in (
        ("text", "row 2: there is no text"),
        ("body", "has: text, id"),
        ("id", "type int64, not text"),
    ):
        prepare(tmp_path / "null.parquet", options=["--text-field", field], expect=2)
        assert message in error(capsys)
    (tmp_path / "x.jsonl").write_text('{"body": "a\\u2028"}\n')
    options = ["--text-field", "body", "--validation-fraction", 0]
    assert decoded(prepare(tmp_path / "x.jsonl", options=options)) == ["a\u2028"]


def test_bad_requests(tmp_path, capsys):
    (tmp_path / "sub").mkdir()
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "bad.model").write_text("bad")
    for options, message in (
        ("--input {}/no.txt", "No file matches the input"),
        ("--input {}/sub", "No file matches the input"),
        ("--input {}/bad.model", "not a kind of file that is read"),
        ("--input {}/short.txt --validation-fraction 0", "cannot be trained on this text"),
        ("--workers 0", "must be at least 1"),
        ("--vocab-size 100", "too small"),
        ("--tokenizer {}/bad.model", "is not a sentencepiece model"),
        ("--tokenizer {}/bad.model --vocab-size 400", "not both"),
        ("--validation-fraction 1", "must be at least 0 and below 1"),
        ("--output {}/short.txt", "exists and is not empty"),
        ("--output {}", "is not empty"),
        ("--output {} --skip-existing", "is not a prepared corpus"),
    ):
        assert prepare_data.main(["--output", str(tmp_path / "out"), *options.format(tmp_path).split()]) == 2
        assert message in error(capsys), options
    assert sorted(os.listdir(tmp_path)) == ["bad.model", "short.txt", "sub"]


def test_a_full_disk_and_an_input_that_changes_leave_no_corpus(sources, prepare, tmp_path, capsys, monkeypatch):
    def full(f):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("interdomain.data.indexed.sync", full)
        prepare(sources, options=["--workers", 1], expect=2)
    assert "No space left on device" in error(capsys)
    assert os.listdir(tmp_path) == []
    rows, real = tmp_path / "rows.jsonl", prepare_data.encode_parts
    rows.write_text('{"text": "a"}\n' * 100)

    def truncating(*args, **options):
        os.truncate(rows, 14 * 90)  # behind a row: nothing else shows it
        return real(*args, **options)

    monkeypatch.setattr(prepare_data, "encode_parts", truncating)
    prepare(rows, expect=2)
    assert "The input changed while it was read (rows.jsonl)" in error(capsys)
    assert not (tmp_path / "out").exists()


def test_where_a_folder_appears(tmp_path, sources, prepare, capsys, monkeypatch):
    """Through a link; not in place of a mounted disk."""
    (tmp_path / "real").mkdir()
    for name in ("real", "new"):
        (tmp_path / f"to-{name}").symlink_to(name)
        prepare(sources / "rows.json", out=tmp_path / f"to-{name}")
        assert (tmp_path / name / "manifest.json").is_file()
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: os.fspath(path) == str(tmp_path / "disk"))
    prepare(sources / "rows.json", out=tmp_path / "disk", expect=2)
    assert "is where a disk is mounted" in error(capsys)


def test_train_tokenizer(tmp_path, capsys):
    out = tmp_path / "sub" / "tokenizer.model"
    options = ["--input", "stdlib", "--max-bytes", "300000", "--vocab-size", "400", "--output"]
    assert train_tokenizer.main([*options, str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"wrote {out} (vocabulary 400, ")
    assert train_tokenizer.main([*options, str(tmp_path / "again.model")]) == 0
    assert (tmp_path / "again.model").read_bytes() == out.read_bytes()
    for name, message in (("sub/tokenizer.model", "exists already"), ("x.json", "must end in .model")):
        assert train_tokenizer.main([*options, str(tmp_path / name)]) == 2
        assert message in error(capsys)
