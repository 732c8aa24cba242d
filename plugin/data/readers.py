"""Raw text to documents: `for document in read_documents(["stdlib"]): document.text`.

A source is `stdlib` (the sources of Python's standard library, which every machine has), local files, globs or folders
of text, JSON or Parquet, or a Hugging Face dataset (`hf:NAME`). Documents come in one fixed order. Which split a
document belongs to is a function of its text alone (`in_validation`).

These are not datatrove's readers: theirs skip a row that they cannot read, with a line in the log, where a corpus of
known contents must stop and name the file and the line (and they are a wheel of 17 MB with eight requirements).
Decompression is the standard library's and pyarrow's, which also reads Parquet; the hub is read by `datasets`.
"""

import bz2
import contextlib
import functools
import glob
import gzip
import hashlib
import io
import json
import os
import platform
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

STDLIB = "stdlib"
HUGGING_FACE = "hf:"
COMPRESSIONS = (".gz", ".bz2", ".zst")
KINDS = {  # by ending, before that of a compression
    **dict.fromkeys((".txt", ".py", ".md", ".rst"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "lines"),
    ".json": "json",  # an array of rows, or lines, as C4 calls them
    ".parquet": "parquet",
}
READ = f"{' '.join(KINDS)} files, all but the last also as {' '.join(COMPRESSIONS)}"
# Not written to be read (tests, their data, editor and build leftovers), or different from one installation to the next.
STDLIB_EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
STDLIB_EXCLUDED_FILES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")
SPAN_BYTES = 2_000_000  # of a large file of lines
DATASET_SHARD_BYTES = 100_000_000  # taken for the size of one shard of a dataset on the hub, which is not known

FilesByKind = dict[str, list[tuple[str, int]]]  # {ending or reason: [(name, bytes), ...]}


@dataclass(frozen=True)
class Document:
    text: str
    source_bytes: int  # for --max-bytes: what it takes in its file, decompressed


@dataclass(frozen=True)
class SourceFile:
    """One file of the input, or one Hugging Face dataset (then `path` is None and `name` is its `hf:` name)."""

    name: str
    path: Path | None
    kind: str  # stdlib, text, lines, json, parquet or dataset

    @property
    def size(self) -> int:
        """Bytes on the disk; 0 for a dataset that is not on it."""
        return self.path.stat().st_size if self.path else 0


@dataclass(frozen=True)
class Span:
    """The smallest part of a file that any process can read by itself: bytes of lines, a row group of Parquet, a shard of
    a dataset. Anything else is read from its start to its end."""

    file: SourceFile
    start: int = 0
    stop: int | None = None
    size: int = 0  # bytes on the disk, for progress


def in_validation(text: str, fraction: float) -> bool:
    """Whether a document belongs to the validation split: sha256 of its UTF-8 text modulo 10,000, below fraction * 10,000.

    A function of the text alone: no seed, no position, so that adding documents moves none, and copies stay together.
    """
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big") % 10_000 < round(fraction * 10_000)


def read_documents(inputs: Iterable, text_field: str = "text", max_bytes: int | None = None) -> Iterator[Document]:
    """Documents in a fixed order: a text file is one, so is a row of any other. Empty ones are left out.

    Args:
        text_field: the column, or the field of a JSON row, that holds the text.
        max_bytes: stop before the document that would exceed this many bytes of source; None for all.
    Raises: ValueError naming file and line for text that is not UTF-8 or rows that hold no text. Files of the standard
        library that are not UTF-8 are left out.
    """
    total = 0
    for file in list_files(inputs):
        for document in read_span(Span(file), text_field):
            total += document.source_bytes
            if max_bytes is not None and total > max_bytes:
                return
            if document.text:
                yield document


# Which files


def stdlib_files() -> list[tuple[str, Path]]:
    """The embedded corpus: (name, path) of the standard library's source files, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        # config-3.11-x86_64-linux-gnu and its like describe one build.
        if STDLIB_EXCLUDED_FOLDERS.intersection(parts[:-1]) or parts[0].startswith("config-"):
            continue
        if not parts[-1].startswith(STDLIB_EXCLUDED_FILES) and path.is_file():
            files.append(("/".join(parts), path))
    return sorted(files)


@dataclass(frozen=True)
class Inputs:
    """What some inputs name. described: the inputs' names and sizes for a manifest, no folders, so that it is the same on
    every machine."""

    files: list[SourceFile]  # in reading order: as given, each glob and folder sorted
    left_out: FilesByKind  # what stands in the folders and is not read
    described: list[dict]


def find_inputs(inputs: Iterable) -> Inputs:
    """Raises: FileNotFoundError for an input without files, ValueError for a kind of file that is not read."""
    found = Inputs([], {}, [])
    for item in map(str, inputs):
        before = len(found.files)
        if item == STDLIB:
            found.files.extend(SourceFile(name, path, STDLIB) for name, path in stdlib_files())
            found.described.append({STDLIB: platform.python_version()})
        elif item.startswith(HUGGING_FACE):
            found.files.append(SourceFile(item, None, "dataset"))
            found.described.append({"dataset": item.removeprefix(HUGGING_FACE)})
        else:
            for name, path, why in _matches(item):
                if why:
                    found.left_out.setdefault(why, []).append((name, path.lstat().st_size))
                    continue
                kind = _kind(path)
                if kind is None:
                    raise ValueError(f"{path} is not a kind of file that is read; files are {READ}.")
                found.files.append(SourceFile(name, path, kind))
                found.described.append({"file": name, "bytes": found.files[-1].size})
        if len(found.files) == before:
            raise FileNotFoundError(
                f"No file matches the input {item}; give {STDLIB} (if this Python has the sources of its standard library), or "
                f"paths, folders or quoted globs of {READ}, or {HUGGING_FACE}NAME for a dataset of the Hugging Face hub."
            )
    return found


def list_files(inputs: Iterable) -> list[SourceFile]:
    """The files that `inputs` name. Raises: as find_inputs."""
    return find_inputs(inputs).files


def tally(found: FilesByKind | list[SourceFile], names: int = 0) -> str:
    """What is left out or read, in words: the most bytes first, with so many names of each kind."""
    if isinstance(found, list):
        files, found = found, {}
        for file in files:
            found.setdefault("".join(_ending(file.path)) if file.path else file.name, []).append((file.name, file.size))

    def size_of(files: list[tuple[str, int]]) -> int:
        return sum(size for _, size in files)

    def say(size: int) -> str:
        return f"{size / 1e6:,.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} KB"

    kinds = []
    for kind, files in sorted(found.items(), key=lambda entry: -size_of(entry[1])):
        some = ", ".join(name for name, _ in files[:names]) + (", ..." if len(files) > names > 0 else "")
        kinds.append(f"{len(files):,} {kind} ({say(size_of(files))}{': ' * bool(some)}{some})")
    every = [file for files in found.values() for file in files]
    return f"{len(every):,} file{'s' * (len(every) > 1)} ({say(size_of(every))}): {', '.join(kinds)}"


def _ending(path: Path) -> tuple[str, str]:
    """(".jsonl", ".gz") of rows.jsonl.gz, (".jsonl", "") of rows.jsonl."""
    name = path.name.lower()
    compression = next((c for c in COMPRESSIONS if name.endswith(c)), "")
    return Path(name.removesuffix(compression)).suffix, compression


def _kind(path: Path) -> str | None:
    """The kind of a SourceFile, or None for a file that is not read."""
    plain, compression = _ending(path)
    return None if plain == ".parquet" and compression else KINDS.get(plain)


def _matches(item: str) -> list[tuple[str, Path, str | None]]:
    """[(name, path, why it is left out or None)] of what one path, glob or folder names, sorted by name.

    Raises: OSError for a folder that cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise error

    def left_out(name: str, path: Path) -> str | None:
        if any(part.startswith(".") for part in name.split("/")):
            return "hidden"
        if not path.is_file():
            return "link to a folder" if path.is_dir() else "not a file"
        return None if _kind(path) else "".join(_ending(path)) or "no ending"

    path = Path(item)
    if path.is_dir():
        found = []
        for where, folders, files in os.walk(path, onerror=refuse):
            links = [name for name in folders if os.path.islink(os.path.join(where, name))]  # not followed
            found += [Path(where, name) for name in (*files, *links)]
        named = sorted((p.relative_to(path).as_posix(), p) for p in found)
        return [(name, p, left_out(name, p)) for name, p in named]
    if glob.has_magic(item) and not path.exists():
        paths = [Path(path) for path in sorted(glob.glob(item, recursive=True))]
        # ** matches folders beside what is in them.
        return [(p.name, p, "folder" if p.is_dir() else None) for p in paths if not (p.is_dir() and "**" in item)]
    return [(path.name, path, None)] if path.exists() else []


# Reading them


def spans_of(file: SourceFile, text_field: str) -> list[Span]:
    """A file's spans in order.

    Raises: ValueError for what can be seen without reading it all: a missing column or library, a dataset that is not there.
    """
    if file.kind == "dataset":
        shards = open_stream(file.name).num_shards
        return [Span(file, i, i + 1, DATASET_SHARD_BYTES) for i in range(shards)]
    assert file.path is not None
    if file.kind == "parquet":
        metadata = _parquet(file.path, text_field).metadata
        rows = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
        return [Span(file, g, g + 1, file.size * n // max(1, sum(rows))) for g, n in enumerate(rows)]
    if file.kind == "lines" and not _ending(file.path)[1]:
        starts = range(0, file.size, SPAN_BYTES)
        return [Span(file, a, min(a + SPAN_BYTES, file.size), min(SPAN_BYTES, file.size - a)) for a in starts]
    if _ending(file.path)[1] == ".zst":
        _pyarrow(file.path)
    return [Span(file, size=file.size)]


def read_span(span: Span, text_field: str) -> Iterator[Document]:
    """The documents of a span, empty ones included. Raises ValueError naming file and line, and what is wrong there."""
    readers = {"lines": _read_lines, "json": _read_json, "parquet": _read_parquet, "dataset": _read_dataset}
    return readers.get(span.file.kind, _read_text)(span, text_field)


def _read_text(span: Span, _: str) -> Iterator[Document]:
    with _opened(span.file.path) as f:
        data = f.read()
    try:
        yield Document(data.decode(), len(data))  # from bytes: reading in text mode would turn CRLF into LF
    except UnicodeDecodeError as e:
        if span.file.kind != "stdlib":
            where = f"{span.file.path} is not UTF-8 (byte {e.start}: {e.reason})"
            raise ValueError(f"{where}; convert it, or leave it out.") from e


def _read_lines(span: Span, text_field: str) -> Iterator[Document]:
    with _opened(span.file.path) as f:  # binary: lines end at \n only, not at U+2028
        at = span.start
        if at:  # the line that lies across the start belongs to the span before
            f.seek(at - 1)
            at += len(f.readline()) - 1
        while (span.stop is None or at < span.stop) and (line := f.readline()):
            if line.strip():
                try:
                    document = _document(json.loads(line), text_field, len(line))
                except (ValueError, RecursionError) as e:
                    why = f"this is not JSON ({e.msg}); repair it." if isinstance(e, json.JSONDecodeError) else e
                    raise ValueError(f"{span.file.path}, line {_line_number(span.file.path, at)}: {why}") from e
                yield document
            at += len(line)


def _read_json(span: Span, text_field: str) -> Iterator[Document]:
    """Lines, or an array of rows, which is held in memory as it is."""
    path = span.file.path
    with _opened(path) as f:
        first = next((line.lstrip() for line in f if line.strip()), b"")
    if not first.startswith(b"["):
        yield from _read_lines(span, text_field)
        return
    with _opened(path) as f:
        data = f.read()
    try:
        rows = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} is not JSON ({e}); repair it or leave the file out.") from e
    yield from _documents(rows, text_field, f"{path}")


def _read_parquet(span: Span, text_field: str) -> Iterator[Document]:
    import pyarrow

    path = span.file.path
    file = _parquet(path, text_field)
    before = sum(file.metadata.row_group(g).num_rows for g in range(span.start))
    groups = range(span.start, file.num_row_groups if span.stop is None else span.stop)
    batches = file.iter_batches(batch_size=512, row_groups=groups, columns=[text_field], use_threads=False)
    rows = ({text_field: text} for batch in batches for text in batch.column(0).to_pylist())
    try:
        yield from _documents(rows, text_field, f"{path}", before)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as e:
        raise ValueError(f"{path} is damaged ({e}); copy it again.") from e


def _read_dataset(span: Span, text_field: str) -> Iterator[Document]:
    dataset = open_stream(span.file.name)
    if span.stop is not None:
        dataset = dataset.shard(dataset.num_shards, span.start)
    return _documents(dataset, text_field, f"{span.file.name}, shard {span.start}")


def _documents(rows: Iterable, text_field: str, where: str, before: int = 0) -> Iterator[Document]:
    for number, row in enumerate(rows, before + 1):
        try:
            document = _document(row, text_field)
        except ValueError as e:
            raise ValueError(f"{where}, row {number}: {e}") from e
        yield document


def _document(row: object, text_field: str, source_bytes: int | None = None) -> Document:
    text = row.get(text_field) if isinstance(row, dict) else None
    if not isinstance(text, str):
        found = f"fields are {', '.join(map(str, row))}" if isinstance(row, dict) else f"row is a {type(row).__name__}"
        raise ValueError(
            f"there is no text under {text_field!r} (the {found}); name the right field with --text-field."
        )
    try:
        size = len(text.encode())
    except UnicodeEncodeError as e:
        raise ValueError("the text holds half a surrogate pair; repair the row.") from e
    return Document(text, size if source_bytes is None else source_bytes)


@contextlib.contextmanager
def _opened(path: Path | None) -> Iterator[IO[bytes]]:
    """A file's bytes, decompressed. Raises ValueError where a compressed one is damaged."""
    assert path is not None
    compression = _ending(path)[1]
    if compression == ".zst":
        f: Any = io.BufferedReader(_pyarrow(path).input_stream(str(path), compression="zstd"))
    else:
        f = {".gz": gzip.open, ".bz2": bz2.open}.get(compression, open)(path, "rb")
    try:
        with f:
            yield f
    except (EOFError, zlib.error, OSError) as e:
        if not compression:
            raise
        raise ValueError(f"{path} is damaged or not complete ({e}); copy it again.") from e


def _line_number(path: Path | None, at: int) -> int:
    """The number of the line that begins at byte `at`, for messages alone."""
    number = 1
    with _opened(path) as f:
        while at > 0 and (block := f.read(min(at, 1 << 24))):
            number, at = number + block.count(b"\n"), at - len(block)
    return number


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as e:
        raise ValueError(f"{path} is read by the pyarrow library: pip install pyarrow, or convert the file.") from e
    return pyarrow


@functools.lru_cache(1)  # a worker reads one file's row groups one after another
def _parquet(path: Path, text_field: str) -> Any:
    """The open file, its text column checked."""
    pyarrow = _pyarrow(path)
    try:
        file = pyarrow.parquet.ParquetFile(path, pre_buffer=False)
    except pyarrow.ArrowException as e:
        raise ValueError(f"{path} is not a complete Parquet file ({e}); copy it again.") from e
    schema = file.schema_arrow
    if text_field not in schema.names:
        has = ", ".join(schema.names)
        raise ValueError(f"{path} has no column {text_field!r} (it has: {has}); name the right one with --text-field.")
    kind = schema.field(text_field).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise ValueError(
            f"{path}: the column {text_field!r} is of type {kind}, not text; name another with --text-field."
        )
    return file


@functools.lru_cache(1)
def open_stream(name: str) -> Any:
    """`[hf:]NAME[@REVISION][:CONFIG[:SPLIT]]`, opened for streaming. NAME may be a local folder. Raises ValueError."""
    try:
        import datasets
    except ImportError as e:
        raise ValueError(f"{name} needs the datasets library: pip install datasets, or give local files.") from e
    source, *rest = name.removeprefix(HUGGING_FACE).split(":")
    source, _, revision = source.partition("@")
    config, split = [*rest, None, None][:2]
    if not source or len(rest) > 2:
        raise ValueError(f"{name} is no dataset: it must read {HUGGING_FACE}NAME[@REVISION][:CONFIG[:SPLIT]].")
    try:
        return datasets.load_dataset(
            source, config or None, split=split or "train", revision=revision or None, streaming=True
        )
    # The hub's client, the HTTP library and the readers behind them each have exceptions of their own.
    except Exception as e:
        first = str(e).strip().split("\n")[0]
        raise ValueError(
            f"The dataset {name} cannot be opened ({type(e).__name__}: {first}). It is read over the network, or from a "
            "local folder of that name: check name, configuration and split, or download its files and give them as "
            "--input 'folder/*.parquet'."
        ) from e
