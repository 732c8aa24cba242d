"""Raw text to documents: `for text in read_documents(["stdlib"]): ...`.

A source is `stdlib` (the sources of Python's standard library, which every machine has), `debian` (text of Debian
packages), local files, globs or folders of text, JSON lines or Parquet, or a Hugging Face dataset (`hf:NAME`). Documents
come in one fixed order. Which split a document belongs to is a function of its text alone (`in_validation`).
"""

import contextlib
import functools
import glob
import gzip
import hashlib
import io
import json
import platform
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from interdomain.data.debian import DEBIAN, debian_packages, read_package
from interdomain.data.indexed import file_sha256

STDLIB = "stdlib"
HUGGING_FACE = "hf:"
LINES = (".jsonl", ".ndjson", ".json")
ROWS = (*LINES, ".parquet")
# Not written to be read (tests, their data, editor and build leftovers), or different from one installation to the next.
STDLIB_EXCLUDED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "lib-dynload",
}
STDLIB_EXCLUDED_FILES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")
# What a data set's folder has beside its rows, in small letters: a description, which is no document.
DATASET_FILES = {
    "readme.md",
    "readme.txt",
    "readme.rst",
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
}
CODE_TABLE = re.compile(rb"^decoding_(table|map) = ", re.M)  # in 70 files of the package encodings
SPAN_BYTES = 2_000_000  # of a large file of lines
EXCERPT = 200  # characters of a row that cannot be read, to find it by
DATASET_SHARD_BYTES = (
    100_000_000  # taken for the size of one shard of a dataset on the hub, which is not known
)


@dataclass(frozen=True)
class SourceFile:
    """One file of the input, or one Hugging Face dataset (then `name` is its `hf:` name, and path and size are not known)."""

    name: str
    kind: str  # its ending before that of a compression, debian or hf: (a key of READERS)
    path: Path = Path()
    size: int = 0  # bytes on the disk
    modified: int = 0  # nanoseconds since the epoch


def _source_file(name: str, kind: str, path: Path) -> SourceFile:
    status = path.stat()
    return SourceFile(name, kind, path, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class Span:
    """The smallest part of a file that any process can read by itself: bytes of lines, a row group of Parquet, a shard of
    a dataset. Anything else is read from its start to its end."""

    file: SourceFile
    start: int = 0
    stop: int | None = None
    size: int = 0  # bytes on the disk


class BadDocument(NamedTuple):
    """A row or a text file that holds no text, or none that the tokenizer can encode.

    path: of its file; file: its name in a manifest; lines and rows count from 1.
    """

    path: str
    file: str
    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, {self.place}, cannot be read: {self.reason}"


def refuse(bad: BadDocument) -> None:
    raise ValueError(f"{bad}.")


def skip_bad(skipped: list[BadDocument], limit: int, bad: BadDocument) -> None:
    """Add a document to `skipped`. Raises ValueError that names the first one beyond the limit."""
    skipped.append(bad)
    if len(skipped) > limit:
        raise ValueError(
            f"{bad}. Correct it and start again, or repeat the command with a larger --skip-bad than {limit}: it "
            "continues, skips at most that many bad documents, and names each."
        )


def in_validation(text: str, fraction: float) -> bool:
    """Decide whether a document belongs to the validation split: sha256 of its UTF-8 text modulo 10,000, below fraction
    * 10,000.

    A function of the text alone: no seed, no position, so that adding documents moves none, and copies stay together.
    """
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big") % 10_000 < round(
        fraction * 10_000
    )


def read_documents(
    inputs: Iterable,
    text_field: str = "text",
    max_bytes: int | None = None,
    skip: Callable[[BadDocument], None] = refuse,
    convert: Callable[[str], Any] = str,
) -> Iterator[Any]:
    """Documents in a fixed order: a text file is one, so is a row of any other. Empty ones are left out.

    Args:
        text_field: the column, or the field of a JSON row, that holds the text.
        max_bytes: as `list_spans`.
        skip: called with every bad document; the default raises ValueError.
        convert: what to make of each text, for example its ids. A text of which it raises ValueError is a bad document.
    Raises: as `find_inputs` and `read_span`.
    """
    yield from documents_of(
        list_spans(find_inputs(inputs).files, text_field, max_bytes), text_field, skip, convert
    )


def documents_of(
    spans: Iterable[Span],
    text_field: str,
    skip: Callable[[BadDocument], None],
    convert: Callable[[str], Any] = str,
) -> Iterator[Any]:
    """Documents of spans as `read_documents` gives them."""
    for span in spans:
        for document in read_span(span, text_field, convert):
            if isinstance(document, BadDocument):
                skip(document)
            else:
                yield document


def stdlib_files() -> list[tuple[str, Path]]:
    """The embedded corpus: (name, path) of the standard library's source files but tables of characters, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        # config-3.11-x86_64-linux-gnu and its like describe one build.
        if STDLIB_EXCLUDED_FOLDERS.intersection(parts[:-1]) or parts[0].startswith("config-"):
            continue
        if parts[0] == "encodings" and CODE_TABLE.search(path.read_bytes()):
            continue
        if not parts[-1].startswith(STDLIB_EXCLUDED_FILES) and path.is_file():
            files.append(("/".join(parts), path))
    return sorted(files)


@dataclass(frozen=True)
class Inputs:
    """Files that inputs name. described: names and sizes for a manifest, without folders: the same on every machine."""

    files: list[SourceFile]  # in reading order: as given, each glob and folder sorted
    described: list[dict]
    left_out: int  # files in the folders that are not read


def find_inputs(inputs: Iterable) -> Inputs:
    """Raises: FileNotFoundError for an input without files, ValueError for a kind of file that is not read, and as
    `debian_packages`."""
    # The files may have changed since an earlier call of this process.
    for cache in (_parquet, _file_digest, _dataset_digest, _dataset):
        cache.cache_clear()
    files = []
    described = []
    left_out = 0
    for item in map(str, inputs):
        if item.startswith(HUGGING_FACE):
            files.append(SourceFile(item, HUGGING_FACE))
            described.append({"dataset": item.removeprefix(HUGGING_FACE)})
        elif item.partition(":")[0] == DEBIAN:
            for name, path in debian_packages(item).items():
                file = _source_file(name, DEBIAN, path)
                files.append(file)
                described.append({"file": path.name, "bytes": file.size})
        elif item == STDLIB and (modules := stdlib_files()):
            for name, path in modules:
                files.append(_source_file(name, ".py", path))
            described.append({STDLIB: platform.python_version()})
        else:
            matched, others = _matches(item)
            left_out += others
            if not matched:
                raise FileNotFoundError(
                    f"No file matches the input {item}; give {STDLIB} (if this Python has the sources of its standard "
                    f"library), {DEBIAN}, paths, folders or quoted globs of {READ}, or {HUGGING_FACE}NAME for a dataset of "
                    "the Hugging Face hub."
                )
            for name, path in matched:
                kind = _kind(path)
                if kind is None:
                    raise ValueError(
                        f"{path} is not a kind of file that is read; files are {READ}."
                    )
                file = _source_file(name, kind, path)
                files.append(file)
                described.append({"file": name, "bytes": file.size})
    return Inputs(files, described, left_out)


def _kind(path: Path) -> str | None:
    """The kind of a SourceFile, or None for a file that is not read."""
    kind = (path.with_suffix("") if path.suffix.lower() in OPENERS else path).suffix.lower()
    return kind if kind in READERS else None


def _matches(item: str) -> tuple[list[tuple[str, Path]], int]:
    """(name, path) of the files that one path, glob or folder names, sorted by name; how many others a folder holds."""
    path = Path(item)
    if path.is_dir():
        read = {}
        descriptions = []
        has_rows = False
        entries = 0
        for entry in path.rglob("*"):  # does not follow links to folders
            if entry.is_dir() and not entry.is_symlink():
                continue
            entries += 1
            name = entry.relative_to(path).as_posix()
            kind = _kind(entry)
            if not entry.is_file() or kind is None or "/." in f"/{name}":
                continue
            read[name] = entry
            if entry.name.lower() in DATASET_FILES:
                descriptions.append(name)
            elif kind in ROWS:
                has_rows = True
        if has_rows:
            for name in descriptions:
                del read[name]
        return sorted(read.items()), entries - len(read)
    if glob.has_magic(item) and not path.exists():
        paths = map(Path, sorted(glob.glob(item, recursive=True)))
        return [(p.name, p) for p in paths if not ("**" in item and p.is_dir())], 0
    return [(path.name, path)] if path.exists() else [], 0


def list_spans(
    files: list[SourceFile], text_field: str, max_bytes: int | None = None
) -> Iterator[Span]:
    """The spans of all files in order: as many whole ones as `max_bytes` of the disk hold, but at least one.

    Raises: ValueError for what can be seen without reading it all: a missing column, a dataset that is not there.
    """
    total = 0
    for file in files:
        for span in _spans(file, text_field):
            if max_bytes is not None and 0 < total > max_bytes - span.size:
                return
            total += span.size
            yield span


def _spans(file: SourceFile, text_field: str) -> list[Span]:
    if file.kind == HUGGING_FACE:
        _, stream = _dataset(file.name)
        return [Span(file, i, i + 1, DATASET_SHARD_BYTES) for i in range(stream.num_shards)]
    if file.kind == ".parquet":
        with _named(file):
            metadata = _parquet(file.path, text_field).metadata
        spans = []
        for group in range(metadata.num_row_groups):
            share = file.size * metadata.row_group(group).num_rows // max(1, metadata.num_rows)
            spans.append(Span(file, group, group + 1, share))
        return spans
    if file.path.suffix.lower() in LINES:  # not compressed
        spans = []
        for start in range(0, file.size, SPAN_BYTES):
            stop = min(start + SPAN_BYTES, file.size)
            spans.append(Span(file, start, stop, stop - start))
        return spans
    return [Span(file, size=file.size)]


def read_span(span: Span, text_field: str, convert: Callable[[str], Any] = str) -> Iterator[Any]:
    """Yields the result of `convert` for each document of a span that is not empty, and a BadDocument for a bad one.

    Raises ValueError naming a damaged file, and what is wrong; also for a file that was written to since `find_inputs`: parts
    of two versions must not be joined.
    """
    file = span.file
    reader = READERS[file.kind]
    with _named(file):
        for i, row in enumerate(reader.rows(span, text_field)):
            try:
                text = reader.text(row, text_field)
                if text:
                    yield convert(text)
            except ValueError as e:
                yield BadDocument(
                    _shown(file), file.name, reader.place(span, i), str(e).rstrip(".")
                )
        if file.kind != HUGGING_FACE and _source_file(file.name, file.kind, file.path) != file:
            raise ValueError(
                "it has changed since this command began. Start the same command again."
            )


def content_digest(span: Span) -> str:
    """SHA-256 of what a span is a function of: its place, its file's name, and bytes as they lie on the disk.

    Nothing is decompressed or parsed, so it costs little beside tokenising. Lines: only the bytes of the span's lines. Any
    other span: the whole file. Raises ValueError naming a file that cannot be read.
    """
    file = span.file
    digest = hashlib.sha256(json.dumps([file.name, file.kind, span.start, span.stop]).encode())
    with _named(file):
        if file.kind == HUGGING_FACE:
            digest.update(_dataset_digest(file.name).encode())
        elif span.stop is None or file.kind not in LINES:
            digest.update(_file_digest(file).encode())
        else:
            with open(file.path, "rb") as f:
                # `_lines` looks at the byte before the span, and reads the last line to its end.
                first = f.seek(max(span.start - 1, 0))
                digest.update(f.read(max(span.stop - 1 - first, 0)))
                digest.update(f.readline())
    return digest.hexdigest()


@functools.lru_cache(1)  # the row groups of a Parquet file follow one another
def _file_digest(file: SourceFile) -> str:
    return file_sha256(file.path)


@functools.lru_cache(1)
def _dataset_digest(name: str) -> str:
    """SHA-256 of a dataset's files; of files elsewhere, of the address and the commit or ETag by which its host knows them."""
    builder, _ = _dataset(name)
    digest = hashlib.sha256()
    for files in builder.config.data_files.values():
        for path, version in zip(files, files.origin_metadata, strict=True):
            content = file_sha256(path) if Path(path).is_file() else f"{path} {version}"
            digest.update(content.encode())
    return digest.hexdigest()


@contextlib.contextmanager
def _named(file: SourceFile) -> Iterator[None]:
    """Put the file's name before what the libraries say of it."""
    try:
        yield
    except (ValueError, OSError, EOFError, zlib.error) as e:
        raise ValueError(f"{_shown(file)} cannot be read: {e}") from e


def _shown(file: SourceFile) -> str:
    return file.name if file.kind == HUGGING_FACE else str(file.path)


def _opened(path: Path) -> IO[bytes]:
    """A file's bytes, decompressed."""
    opener = OPENERS.get(path.suffix.lower())
    if opener is None:
        return open(path, "rb")
    # The libraries read an empty file as no text, but each format has a header: a copy or a download has failed.
    if path.stat().st_size == 0:
        raise ValueError("the file is empty, which no compressed file is.")
    return opener(path)


def _open_with_arrow(path: Path, compression: str) -> IO[bytes]:
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression=compression))


def _whole_file(span: Span, _: str) -> Iterator[bytes]:
    with _opened(span.file.path) as f:
        yield f.read()


def _lines(span: Span, _: str) -> Iterator[bytes]:
    with _opened(span.file.path) as f:  # binary: lines end at \n only, not at U+2028
        at = span.start
        if at:  # the line that lies across the start belongs to the span before
            f.seek(at - 1)
            at += len(f.readline()) - 1
        while (span.stop is None or at < span.stop) and (line := f.readline()):
            at += len(line)
            yield line


def _line_text(line: bytes, text_field: str) -> str:
    if not line.strip():
        return ""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"it is not JSON ({e}): {line[:EXCERPT]!r}") from e
    return _field_text(row, text_field)


def _line_place(span: Span, i: int) -> str:
    lines_before = 0
    if span.start:
        with open(span.file.path, "rb") as f:
            while f.tell() < span.start:
                f.readline()
                lines_before += 1
    return f"line {lines_before + i + 1}"


def _parquet_rows(span: Span, text_field: str) -> Iterator[Any]:
    file = _parquet(span.file.path, text_field)
    for batch in file.iter_batches(
        512, row_groups=[span.start], columns=[text_field], use_threads=False
    ):
        yield from batch.column(0)


def _parquet_place(span: Span, i: int) -> str:
    import pyarrow.parquet

    metadata = pyarrow.parquet.read_metadata(span.file.path)
    rows_before = sum(metadata.row_group(group).num_rows for group in range(span.start))
    return f"row {rows_before + i + 1}"


@functools.lru_cache(1)  # a worker reads one file's row groups one after another
def _parquet(path: Path, text_field: str) -> Any:
    """The open file, checked to have the column."""
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path, pre_buffer=False)
    if text_field not in file.schema_arrow.names:
        has = ", ".join(file.schema_arrow.names)
        raise ValueError(
            f"there is no column {text_field!r} (it has: {has}); name the right one with --text-field."
        )
    return file


def _dataset_rows(span: Span, _: str) -> Iterator[Any]:
    _, stream = _dataset(span.file.name)
    yield from stream.shard(stream.num_shards, span.start)


def _field_text(row: object, text_field: str) -> str:
    """A row's text. Raises ValueError if there is none, or (UnicodeError) if it is not Unicode."""
    text = row.get(text_field) if isinstance(row, dict) else None
    if isinstance(text, bytes):  # a Parquet column of strings whose writer did not mark it as such
        text = text.decode()
    if not isinstance(text, str):
        raise ValueError(
            f"there is no text under {text_field!r} in the row {str(row)[:EXCERPT]}; name the right field with --text-field."
        )
    text.encode()
    return text


@functools.lru_cache(1)
def _dataset(name: str) -> tuple[Any, Any]:
    """Builder and stream of rows of `hf:NAME[@REVISION][:CONFIG[:SPLIT]]`; NAME may be a local folder. Raises ValueError."""
    import datasets

    source, _, rest = name.removeprefix(HUGGING_FACE).partition(":")
    source, _, revision = source.partition("@")
    config, _, split = rest.partition(":")
    if not source or ":" in split:
        raise ValueError(
            f"{name} is no dataset: it must read {HUGGING_FACE}NAME[@REVISION][:CONFIG[:SPLIT]]."
        )
    try:
        builder = datasets.load_dataset_builder(source, config or None, revision=revision or None)
        return builder, builder.as_streaming_dataset(split=split or "train")
    except (
        Exception
    ) as e:  # the hub's client, the HTTP library and the readers behind them each have their own
        first = str(e).strip().split("\n")[0]
        raise ValueError(
            f"The dataset {name} cannot be opened ({type(e).__name__}: {first}). Check name, configuration, split and network, "
            "or download its files and give them as --input 'folder/*.parquet'."
        ) from e


class Reader(NamedTuple):
    """How one kind of file is read.

    Attributes:
        rows: The rows of a span, as they are stored.
        text: The text of a row, under the name of the text field. Raises ValueError for a bad document.
        place: The place of row i of a span, for a message about it.
    """

    rows: Callable[[Span, str], Iterable[Any]]
    text: Callable[[Any, str], str]
    place: Callable[[Span, int], str]


OPENERS = {
    ".gz": gzip.open,
    # Not bz2.open, which takes anything behind the first stream that it cannot decompress for the end of the file.
    ".bz2": functools.partial(_open_with_arrow, compression="bz2"),
    ".zst": functools.partial(_open_with_arrow, compression="zstd"),
}
TEXT = Reader(
    _whole_file,
    lambda data, _: data.decode(),  # from bytes: reading in text mode would turn CRLF into LF
    lambda span, i: "the whole file",
)
JSON_LINES = Reader(_lines, _line_text, _line_place)
READERS = {
    **dict.fromkeys((".txt", ".py", ".md", ".rst"), TEXT),
    **dict.fromkeys(LINES, JSON_LINES),
    ".parquet": Reader(
        _parquet_rows,
        lambda value, text_field: _field_text(
            {text_field: value.as_py()}, text_field
        ),  # raises for bytes, not UTF-8
        _parquet_place,
    ),
    DEBIAN: Reader(
        lambda span, _: read_package(span.file.name, span.file.path),
        lambda text, _: text,
        lambda span, i: f"document {i + 1}",
    ),
    HUGGING_FACE: Reader(
        _dataset_rows,
        _field_text,
        lambda span, i: f"shard {span.start + 1}, row {i + 1}",
    ),
}
READ = f"{' '.join(list(READERS)[:-2])} files, all but the last also as {' '.join(OPENERS)}"
