"""Many files of every kind, several processes, kills with SIGKILL, and what a whole corpus says of itself."""

import bz2
import contextlib
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest

from interdomain.data import TokenCorpus, load_tokenizer, pieces, read_manifest
from interdomain.data.documents import in_validation, list_files, read_documents
from interdomain.tools import prepare_data

from ..common import small_tokenizer
from .test_prepare_data import contents, error

pa = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
zstandard = pytest.importorskip("zstandard", reason="the extra `data` is not installed")
import pyarrow.parquet as pq  # noqa: E402


@pytest.fixture(scope="module")
def texts():
    rng = random.Random(1)
    words = ["state", "kernel", "query", "naïve", "🙂", "\u2028", "0x1F", "\r\n", " ", "return self"]
    rows = [" ".join(rng.choices(words, k=rng.randrange(0, 60))) for _ in range(800)]
    return [*rows[:400], "", "one long document " * 1000, *rows[400:]]


@pytest.fixture(scope="module")
def sources(tmp_path_factory, texts):
    """The same documents as lines of JSON, plain and in two members of every compression, as a JSON array, and as Parquet with
    ragged row groups."""
    folder = tmp_path_factory.mktemp("sources")
    lines = [json.dumps({"text": text, "id": i}).encode() + b"\n" for i, text in enumerate(texts)]
    first, second = b"".join(lines[:400]), b"".join(lines[400:])
    (folder / "rows.jsonl").write_bytes(first + b"\n" + second)
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(first) + gzip.compress(second))
    pack = zstandard.ZstdCompressor().compress
    (folder / "rows.json.zst").write_bytes(pack(first) + pack(second))
    (folder / "rows.ndjson.bz2").write_bytes(bz2.compress(first) + bz2.compress(second))
    (folder / "rows.json").write_text(json.dumps([json.loads(line) for line in lines], indent=1, ensure_ascii=False))
    columns = {"id": pa.array(range(len(texts))), "text": pa.array(texts, pa.large_string())}
    with pq.ParquetWriter(folder / "rows.parquet", pa.table(columns).schema) as writer:
        for start, stop in ((0, 3), (3, 3), (3, 500), (500, len(texts))):
            writer.write_table(pa.table(columns).slice(start, stop - start))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.model")


KINDS = ("rows.json", "rows.json.zst", "rows.jsonl", "rows.jsonl.gz", "rows.ndjson.bz2", "rows.parquet")


@pytest.mark.parametrize("piece_bytes", [700, 20_000, 10_000_000])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_every_document_once_wherever_it_is_cut(sources, texts, kind, piece_bytes, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(pieces, "READ_BYTES", 256)
    monkeypatch.setattr(pieces, "ARRAY_BYTES", 256)
    files = list_files([sources / kind])
    found = list(pieces.cut(files))
    at_once = kind.endswith((".zst", ".bz2"))  # they give 128 kB or more
    assert len(found) > (50 if piece_bytes == 700 and not at_once else 0)
    assert [d.text for piece in found for d in pieces.read_piece(piece)] == texts
    assert abs(sum(piece.size for piece in found) - files[0].size) <= len(found)
    # Whoever begins after a piece reads exactly the ones that follow it.
    for i in range(0, len(found), max(1, len(found) // 7)):
        assert list(pieces.cut(files, begin=found[i].after)) == found[i + 1 :]


def test_what_is_large_inside_is_not_read_again_for_every_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
    # A line of many pieces: those in its middle look no further than their own end.
    text = "a long line " * 20_000
    (tmp_path / "line.jsonl").write_text(f'{{"text": "{text}"}}\n{{"text": "b"}}\n')
    (tmp_path / "line.jsonl.gz").write_bytes(gzip.compress((tmp_path / "line.jsonl").read_bytes()))
    found = list(pieces.cut(list_files([tmp_path / "line.jsonl"])))
    tracemalloc.start()
    assert [d for piece in found[1:-1] for d in pieces.read_piece(piece)] == []
    assert tracemalloc.get_traced_memory()[1] < len(text) / 2
    tracemalloc.stop()
    for name in ("line.jsonl", "line.jsonl.gz"):
        found = pieces.cut(list_files([tmp_path / name]))
        assert [d.text for piece in found for d in pieces.read_piece(piece)] == [text, "b"]
    # A row group of many pieces is gone through once.
    pq.write_table(pa.table({"text": [f"row {i}" * 20 for i in range(3000)]}), tmp_path / "rows.parquet")
    found = list(pieces.cut(list_files([tmp_path / "rows.parquet"])))
    opened, real = [], pq.ParquetFile.iter_batches
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *a, **k: opened.append(a) or real(*a, **k))
    texts = [[d.text for d in pieces.read_piece(piece)] for piece in found]
    assert [text for piece in texts for text in piece] == [f"row {i}" * 20 for i in range(3000)]
    assert (len(opened), len({piece.groups for piece in found})) == (1, 1) < (len(found), 2)
    assert [d.text for d in pieces.read_piece(found[1])] == texts[1]  # one that lies before: again from the start


def test_a_small_file_of_much_text_is_many_pieces(tmp_path):
    row = b'{"text": "a row that is repeated"}\n'
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(row * (16_000_000 // len(row))))
    found = list(pieces.cut(list_files([tmp_path / "rows.jsonl.gz"])))
    assert max(len(piece.data) for piece in found) < 4 * pieces.PIECE_BYTES
    assert sum(len(piece.data) for piece in found) == 16_000_000 // len(row) * len(row)


def test_the_same_text_is_the_same_corpus_of_any_kind(sources, texts, tokenizer, tmp_path):
    """Sizes differ by kind, so --max-bytes is left out; a folder gives its files in order, each with its documents."""
    made = []
    for kind in KINDS:
        out = tmp_path / kind
        arguments = ["--input", str(sources / kind), "--tokenizer", str(tokenizer), "--output", str(out)]
        assert prepare_data.main([*arguments, "--validation-fraction", "0.1"]) == 0
        made.append({name: data for name, data in contents(out).items() if name != "manifest.json"})
    assert all(files == made[0] for files in made)
    assert [d.text for d in read_documents([str(sources)])] == [text for _ in KINDS for text in texts if text]
    corpus = TokenCorpus(tmp_path / "rows.parquet", "validation")
    decode = load_tokenizer(tokenizer).decode
    assert [decode(d[:-1].tolist()) for d in corpus.shards[0]] == [t for t in texts if t and in_validation(t, 0.1)]


def command(sources, tokenizer, out, *options, code=""):
    """prepare_data as a process, on small pieces (workers are other processes: they are handed the pieces as they are)."""
    program = f"""
import sys
from interdomain.data import pieces, preparation
from interdomain.tools import prepare_data
pieces.PIECE_BYTES = 3000
preparation.JOURNAL_SECONDS = 0.02
{code}
if __name__ == "__main__":
    sys.exit(prepare_data.main(sys.argv[1:]))
"""
    given = [
        "--input",
        str(sources),
        "--tokenizer",
        str(tokenizer),
        "--output",
        str(out),
        "--validation-fraction",
        "0.1",
    ]
    return [sys.executable, "-c", program, *given, "--shard-tokens", "10000", *map(str, options)]


@pytest.fixture(scope="module")
def whole(sources, tokenizer, tmp_path_factory):
    """What an uninterrupted run in one process makes."""
    out = tmp_path_factory.mktemp("whole") / "corpus"
    done = subprocess.run(command(sources, tokenizer, out, "--workers", 1), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(" tokens/s)\n")
    return out


def test_the_number_of_workers_changes_no_byte(sources, tokenizer, whole, tmp_path):
    done = subprocess.run(command(sources, tokenizer, tmp_path / "a", "--workers", 3), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "a") == contents(whole)
    assert len(TokenCorpus(whole).shards) > 3


def progress(journal):
    return json.loads(journal.read_text())["source_bytes"] if journal.exists() else 0


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_again_and_again_it_ends_with_the_same_bytes(sources, tokenizer, whole, tmp_path, workers):
    """SIGKILL at random moments (in the middle of writes, renames and journals), until a run comes through."""
    rng, out = random.Random(workers), tmp_path / "corpus"
    # Slow enough that a kill falls somewhere; the delays are at every write, rename and journal.
    slow = """
import os, time
def slowed(f, seconds):
    def wrapped(*args, **kwargs):
        time.sleep(seconds); result = f(*args, **kwargs); time.sleep(seconds); return result
    return wrapped
os.replace = slowed(os.replace, 0.002)
preparation.IndexedDatasetWriter.add_documents = slowed(preparation.IndexedDatasetWriter.add_documents, 0.001)
"""
    continued = kills = 0
    while kills < 3:
        process = subprocess.Popen(
            command(sources, tokenizer, out, "--workers", workers, code=slow), stderr=subprocess.PIPE, text=True
        )
        journal = tmp_path / ".corpus.unfinished" / "journal.json"
        before = progress(journal)
        while process.poll() is None and progress(journal) <= before:
            time.sleep(0.005)
        time.sleep(rng.uniform(0.02, 0.2))
        process.send_signal(signal.SIGKILL)
        said = process.communicate()[1]
        assert process.returncode == -signal.SIGKILL, said
        continued += "continuing after" in said
        kills += 1
        assert not out.exists()
    assert continued == 2
    done = subprocess.run(command(sources, tokenizer, out, "--workers", workers), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "continuing after" in done.stderr
    assert contents(out) == contents(whole)
    assert os.listdir(tmp_path) == ["corpus"]


def test_workers_of_a_killed_run_end_too(sources, tokenizer, tmp_path):
    code = "import time\npreparation.PIECE_BYTES = 3000\nreal = preparation.SplitWriter.add\n"
    code += "def add(self, *args):\n    time.sleep(0.5); real(self, *args)\npreparation.SplitWriter.add = add\n"
    process = subprocess.Popen(
        command(sources, tokenizer, tmp_path / "a", "--workers", 2, code=code), stderr=subprocess.DEVNULL
    )
    while not list(tmp_path.glob(".a.unfinished/train-*.partial")):
        assert process.poll() is None
        time.sleep(0.02)
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as f:
        children = f.read().split()
    assert len(children) >= 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    for _ in range(200):
        alive = [child for child in children if os.path.exists(f"/proc/{child}") and _state(child) != "Z"]
        if not alive:
            break
        time.sleep(0.05)
    assert not alive


def _state(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def unfinished(sources, tokenizer, out):
    """A preparation that failed in its middle, with work to continue."""
    fail = "\nreal = preparation.SplitWriter.add\nn = 0\ndef add(self, *args):\n    global n; n += 1\n"
    fail += "    if n > 40: raise OSError(28, 'No space left on device')\n    real(self, *args)\n"
    fail += "preparation.SplitWriter.add = add\n"
    done = subprocess.run(command(sources, tokenizer, out, code=fail), capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().split("\n")[-1].startswith("error: ")


def test_an_unfinished_preparation_of_another_request(sources, tokenizer, whole, tmp_path):
    out = tmp_path / "corpus"
    unfinished(sources, tokenizer, out)
    assert os.listdir(tmp_path) == [".corpus.unfinished"]
    done = subprocess.run(command(sources, tokenizer, out, "--text-field", "id"), capture_output=True, text=True)
    assert done.returncode == 2
    assert "is of type int64, not text" in done.stderr
    done = subprocess.run(command(sources, tokenizer, out, "--max-bytes", "100000"), capture_output=True, text=True)
    assert done.returncode == 2
    assert "unfinished preparation of another request (max_bytes: None there, 100000 asked for)" in done.stderr
    assert "--restart" in done.stderr
    done = subprocess.run(command(sources, tokenizer, out, "--restart"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "continuing" not in done.stderr
    assert contents(out) == contents(whole)


def test_a_corpus_that_another_process_prepares(sources, tokenizer, tmp_path, capsys):
    from interdomain.folders import kept_folder

    arguments = ["--input", str(sources), "--tokenizer", str(tokenizer), "--output", str(tmp_path / "out")]
    with contextlib.suppress(InterruptedError), kept_folder(tmp_path / "out"):
        assert prepare_data.main(arguments) == 2  # flock: another opening of the folder, even by this process
        raise InterruptedError
    assert "Another process is building" in error(capsys)
    assert prepare_data.main(arguments) == 0


def test_the_manifest_and_verify(whole, tmp_path, capsys):
    manifest = read_manifest(whole)
    for split in ("train", "validation"):
        corpus = TokenCorpus(whole, split, verify=True)
        assert manifest["totals"][split] == {"documents": corpus.num_documents, "tokens": corpus.num_tokens}
    assert prepare_data.main(["--verify", str(whole)]) == 0
    assert capsys.readouterr().out.startswith(f"verified {whole} (")
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, data in contents(whole).items():
        (copy / name).write_bytes(data)
    shard = bytearray((copy / "train-00001.bin").read_bytes())
    shard[77] ^= 1
    (copy / "train-00001.bin").write_bytes(shard)
    assert prepare_data.main(["--verify", str(copy)]) == 2
    assert "train-00001.bin is damaged" in error(capsys)
    assert prepare_data.main(["--verify", str(tmp_path)]) == 2
    assert "is not a prepared corpus" in error(capsys)


def test_adding_and_reordering_files_moves_no_document_to_another_split(sources, tokenizer, texts, tmp_path):
    (tmp_path / "more.txt").write_text("another document")
    inputs = [str(tmp_path / "more.txt"), str(sources / "rows.parquet")]
    arguments = ["--tokenizer", str(tokenizer), "--validation-fraction", "0.1", "--output", str(tmp_path / "out")]
    assert prepare_data.main(["--input", *inputs, *arguments]) == 0
    decode = load_tokenizer(tokenizer).decode
    corpus = TokenCorpus(tmp_path / "out", "validation")
    found = {decode(d[:-1].tolist()) for shard in corpus.shards for d in shard}
    assert found - {"another document"} == {t for t in texts if t and in_validation(t, 0.1)}


def test_a_local_folder_as_a_hugging_face_dataset(sources, texts, tokenizer, tmp_path, monkeypatch, capsys):
    pytest.importorskip("datasets", reason="the extra `data` is not installed")
    (tmp_path / "set").mkdir()
    os.link(sources / "rows.parquet", tmp_path / "set" / "rows.parquet")
    monkeypatch.setattr(pieces, "PIECE_BYTES", 3000)
    assert [d.text for d in read_documents([f"hf:{tmp_path / 'set'}"])] == [t for t in texts if t]
    files = list_files([f"hf:{tmp_path / 'set'}"])
    found = list(pieces.cut(files))
    assert list(pieces.cut(files, begin=found[4].after)) == found[5:]
    for name, message in (("hf:", "is no dataset: it must read"), (f"hf:{tmp_path}/none", "cannot be opened")):
        arguments = ["--input", name, "--tokenizer", str(tokenizer), "--output", str(tmp_path / "out")]
        assert prepare_data.main(arguments) == 2
        assert message in error(capsys)


def test_a_dataset_without_a_network(tokenizer, tmp_path):
    pytest.importorskip("datasets", reason="the extra `data` is not installed")
    arguments = ["--input", "hf:HuggingFaceFW/fineweb-edu:sample-10BT", "--tokenizer", str(tokenizer)]
    done = subprocess.run(
        [sys.executable, "-m", "interdomain.tools.prepare_data", *arguments, "--output", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")},
    )
    assert done.returncode == 2
    last = done.stderr.strip().split("\n")[-1]
    assert last.startswith("error: The dataset hf:HuggingFaceFW/fineweb-edu:sample-10BT cannot be opened")
    assert "download its files" in last
    assert not (tmp_path / "out").exists()


def damage(sources, folder):
    gz, zst, parquet = ((sources / name).read_bytes() for name in ("rows.jsonl.gz", "rows.json.zst", "rows.parquet"))
    (folder / "cut.jsonl.gz").write_bytes(gz[:-50])
    (folder / "cut.jsonl.zst").write_bytes(zst[:-50])
    (folder / "bad.jsonl.gz").write_bytes(b"\0" * 100)
    (folder / "bad.jsonl.zst").write_bytes(b"\0" * 100)
    (folder / "cut.parquet").write_bytes(parquet[:-50])
    (folder / "bad.parquet").write_bytes(parquet[:400] + bytes(400) + parquet[800:])
    (folder / "null.parquet").write_bytes(b"")
    pq.write_table(pa.table({"text": ["a", None]}), folder / "null.parquet")
    (folder / "row.jsonl").write_text('{"text": "a"}\n' * 500 + '{"text": 3}\n' + '{"text": "a"}\n' * 500)
    (folder / "bad.jsonl.bz2").write_bytes(b"\0" * 100)
    (folder / "row.json").write_text('[{"text": "a"}, {"text": "b"}, {"body": "c"}]')
    (folder / "cut.json").write_text('[{"text": "a"}, {"text": "b"')
    (folder / "open.json").write_text('[{"text": "a"}, {"text": "b"}')
    (folder / "two.json").write_text('[{"text": "a"}] [{"text": "b"}]')
    (folder / "comma.json").write_text('[{"text": "a"} {"text": "b"}]')
    (folder / "row.jsonl.gz").write_bytes(gzip.compress((folder / "row.jsonl").read_bytes()))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cut.jsonl.gz", "cut.jsonl.gz is truncated"),
        ("cut.jsonl.zst", "cut.jsonl.zst is truncated"),
        ("bad.jsonl.gz", "bad.jsonl.gz is damaged"),
        ("bad.jsonl.zst", "bad.jsonl.zst is damaged"),
        ("bad.jsonl.bz2", "bad.jsonl.bz2 is damaged"),
        ("row.json", "row.json, row 3, has no field 'text' (it has: body)"),
        ("cut.json", "cut.json, row 2, is not JSON"),
        ("open.json", "open.json, row 3, is not JSON"),
        ("two.json", "the array ends before the file does"),
        ("comma.json", "row 2, is not JSON ({ stands where , should)"),
        ("cut.parquet", "cut.parquet is not a whole Parquet file"),
        ("bad.parquet", "bad.parquet is damaged"),
        ("null.parquet", "null.parquet, row 2, has no text under 'text'"),
        ("row.jsonl", "row.jsonl, line 501, has no text under 'text'"),
        ("row.jsonl.gz", "row.jsonl.gz, line 501, has no text under 'text'"),
    ],
)
def test_bad_files(sources, tokenizer, tmp_path, capsys, monkeypatch, name, message):
    damage(sources, tmp_path)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
    arguments = ["--input", str(tmp_path / name), "--tokenizer", str(tokenizer), "--output", str(tmp_path / "out")]
    assert prepare_data.main([*arguments, "--workers", "1"]) == 2
    assert message in error(capsys)
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_an_error_in_a_worker_is_one_paragraph(sources, tokenizer, tmp_path, capsys):
    damage(sources, tmp_path)
    arguments = ["--input", str(tmp_path / "row.jsonl"), "--tokenizer", str(tokenizer)]
    assert prepare_data.main([*arguments, "--output", str(tmp_path / "out"), "--workers", "2"]) == 2
    assert "line 501" in error(capsys)


def test_max_bytes_cuts_at_the_same_document_with_any_pieces(sources, tokenizer, texts, tmp_path, monkeypatch):
    made = []
    for piece_bytes in (1000, 1 << 20):
        monkeypatch.setattr(pieces, "PIECE_BYTES", piece_bytes)
        out = tmp_path / str(piece_bytes)
        arguments = ["--input", str(sources / "rows.parquet"), "--tokenizer", str(tokenizer), "--output", str(out)]
        assert prepare_data.main([*arguments, "--max-bytes", "50000", "--workers", "1"]) == 0
        made.append(contents(out))
    assert made[0] == made[1]
    sizes = np.cumsum([len(text.encode()) for text in texts])
    corpora = [TokenCorpus(tmp_path / "1000", split) for split in ("train", "validation")]
    kept = texts[: int((sizes <= 50_000).sum())]
    assert sum(corpus.num_documents for corpus in corpora) == len([text for text in kept if text])
