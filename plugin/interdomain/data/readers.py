"""Reads raw text as documents: `for text in read_documents(["stdlib"]): ...`.

An input is `stdlib` (the sources of Python's standard library, which every machine has), `debian`
(text of Debian packages), a local file, glob or folder of text, JSON lines or Parquet, or a Hugging
Face dataset (`hf:NAME`).

`find_inputs` lists the files. `list_spans` cuts them into spans, which several processes can read.
`documents_of` reads the documents of spans, always in the same order. The split of a document
depends only on its text (`in_validation`).
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
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from interdomain.data.debian import DEBIAN, debian_packages, read_package

STDLIB = "stdlib"
HUGGING_FACE = "hf:"
TEXT = (".txt", ".py", ".md", ".rst")
JSON_LINES = (".jsonl", ".ndjson", ".json")
PARQUET = ".parquet"
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}  # pyarrow's names
FILE_KINDS = (
    ".txt .py .md .rst .jsonl .ndjson .json .parquet files, all but the last also as .gz .bz2 .zst"
)

# Folders and files of the standard library that are tests, build leftovers, or different on each
# installation.
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
CODE_TABLE = re.compile(rb"^decoding_(table|map) = ", re.M)  # in 70 files of the package encodings

SPAN_BYTES = 2_000_000  # size of a span of JSON lines
DATASET_SPAN_BYTES = 100_000_000  # assumed size of a span of a dataset on the hub
EXCERPT = 200  # characters, or bytes, of a bad row that its error message shows


@dataclass(frozen=True)
class SourceFile:
    """One file of the input, or one Hugging Face dataset.

    Attributes:
        name: Name in the manifest, which is the same on every machine.
        kind: A key of READERS: the ending before that of a compression, `debian` or `hf:`.
        path: Where the file is. For a dataset `hf:NAME...`, as the user wrote it.
        size: Bytes on the disk. 0 for a dataset, whose size is not known.
        version: Changes with the contents: the time of the last write; for a dataset, the commit on
            the hub.
    """

    name: str
    kind: str
    path: Path
    size: int = 0
    version: str = ""


def _source_file(name: str, kind: str, path: Path) -> SourceFile:
    """Describes a file as it is now, with its size and the time of its last write."""
    status = path.stat()
    return SourceFile(name, kind, path, status.st_size, str(status.st_mtime_ns))


@dataclass(frozen=True)
class Span:
    """The smallest piece of a file that a process can read without the rest of it.

    Attributes:
        file: The file.
        start: First byte of JSON lines that are not compressed. For Parquet the number of a row
            group, for a dataset the number of a file. Otherwise 0.
        stop: End of the bytes of JSON lines that are not compressed. Otherwise None.
        size: Bytes on the disk, exact or estimated.
    """

    file: SourceFile
    start: int = 0
    stop: int | None = None
    size: int = 0


def in_validation(text: str, fraction: float) -> bool:
    """Decides whether a document belongs to the validation split.

    The rule is: SHA-256 of the UTF-8 text, modulo 10,000, is below 10,000 * `fraction`. It uses no
    seed and no position, so that new documents move no old ones, and copies of a document are in
    the same split.
    """
    number = int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")
    return number % 10_000 < round(fraction * 10_000)


def read_documents(
    inputs: Iterable,
    text_field: str = "text",
    max_bytes: int | None = None,
    convert: Callable[[str], Any] = str,
) -> Iterator[Any]:
    """Yields the documents of inputs in a fixed order.

    Args:
        inputs: What to read, as for `find_inputs`.
        text_field: Column, or field of a JSON row, that holds the text.
        max_bytes: Read about this many bytes on the disk (`list_spans`). None: read all.
        convert: Makes something of a text, for example its ids.

    Raises:
        FileNotFoundError: An input names no file.
        ValueError: An input is of another kind, or a file or a document is damaged.
    """
    spans = list_spans(find_inputs(inputs).files, text_field, max_bytes)
    yield from documents_of(spans, text_field, convert)


def documents_of(
    spans: Iterable[Span],
    text_field: str,
    convert: Callable[[str], Any] = str,
    leave_out_bad: bool = False,
) -> Iterator[Any]:
    """Yields `convert(text)` for every document that is not empty.

    A text file is one document. Of all other kinds, a row is one.

    Args:
        spans: Spans from `list_spans`.
        text_field: Column, or field of a JSON row, that holds the text.
        convert: Makes something of a text, for example its ids. A text is bad if `convert` raises
            ValueError.
        leave_out_bad: Print bad documents to standard error and go on. Otherwise the first one
            raises.

    Raises:
        ValueError: A document is bad, a file is damaged, or a file changed since `find_inputs`. The
            message names it.
    """
    for span in spans:
        file = span.file
        reader = READERS[file.kind]
        # An error outside of the inner `try` means that the file is damaged: the rows after it
        # cannot be found.
        with _file_named_in_errors(file):
            for i, row in enumerate(reader.rows(span, text_field)):
                try:
                    text = reader.text(row, text_field)
                    if not text:
                        continue
                    document = convert(text)
                except ValueError as e:
                    problem = f"{_place(span, i)}: {e}"
                    if not leave_out_bad:
                        raise ValueError(problem) from e
                    print(f"left out: {file.path}, {problem}", file=sys.stderr)
                    continue
                # Outside of `try`, because errors of the caller are not errors of the document.
                yield document
            # Pieces of two versions of a file must not be joined.
            if file.kind != HUGGING_FACE and _source_file(file.name, file.kind, file.path) != file:
                raise ValueError(
                    "it has changed since this command began. Start the same command again."
                )


def stdlib_files() -> list[tuple[str, Path]]:
    """Returns the embedded corpus as (name, path), sorted by name.

    It is the source code of Python's standard library, without tables of characters.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in root.rglob("*.py"):
        folders = path.relative_to(root).parts[:-1]
        if STDLIB_EXCLUDED_FOLDERS.intersection(folders):
            continue
        # config-3.11-x86_64-linux-gnu and its like describe one build.
        if folders and folders[0].startswith("config-"):
            continue
        if folders and folders[0] == "encodings" and CODE_TABLE.search(path.read_bytes()):
            continue
        if not path.name.startswith(STDLIB_EXCLUDED_FILES) and path.is_file():
            files.append(("/".join((*folders, path.name)), path))
    return sorted(files)


class Inputs(NamedTuple):
    """The files that inputs name.

    Attributes:
        files: The files in reading order: inputs as the user gave them, each glob and folder sorted
            by name.
        described: Their description in the manifest. It has no folders, so it is the same on every
            machine.
    """

    files: list[SourceFile]
    described: list[dict]


def find_inputs(inputs: Iterable) -> Inputs:
    """Lists the files that inputs name.

    Args:
        inputs: `stdlib`, `debian`, `debian:FOLDER`, `hf:NAME[@REVISION][:CONFIG[:SPLIT]]`, paths,
            folders and globs.

    Raises:
        FileNotFoundError: An input names no file.
        ValueError: A file is of another kind, a dataset cannot be opened, or a Debian package is
            not the right one.
    """
    _dataset.cache_clear()  # datasets may have changed since an earlier call in this process
    files = []
    described = []
    for item in map(str, inputs):
        if item.startswith(HUGGING_FACE):
            builder, _ = _dataset(item)
            name = item.removeprefix(HUGGING_FACE)
            files.append(SourceFile(name, HUGGING_FACE, Path(item), version=str(builder.hash)))
            described.append({"dataset": name})
        elif item == STDLIB:
            for name, path in stdlib_files():
                files.append(_source_file(name, ".py", path))
            described.append({STDLIB: platform.python_version()})
        elif item.partition(":")[0] == DEBIAN:
            for path in debian_packages(item):
                file = _source_file(path.name, DEBIAN, path)
                files.append(file)
                described.append({"file": file.name, "bytes": file.size})
        else:
            for file in _local_files(item):
                files.append(file)
                described.append({"file": file.name, "bytes": file.size})
    return Inputs(files, described)


def _local_files(item: str) -> list[SourceFile]:
    """The files that a path, a glob or a folder names, sorted by name.

    A folder's hidden files, and files of other kinds, are left out.

    Args:
        item: A path, a glob or a folder, as the user wrote it.
    """
    folder = Path(item)
    named = []  # (name in the manifest, path)
    if folder.is_dir():
        for path in folder.rglob("*"):  # does not follow links to folders
            name = path.relative_to(folder).as_posix()
            is_hidden = "/." in f"/{name}"
            if path.is_file() and _kind(path) and not is_hidden:
                named.append((name, path))
        named.sort()
    elif folder.exists():
        named.append((folder.name, folder))
    else:
        for match in sorted(glob.glob(item, recursive=True)):
            path = Path(match)
            if path.is_file():  # a glob may match folders, too
                named.append((path.name, path))
    if not named:
        raise FileNotFoundError(
            f"No file matches the input {item}; give {STDLIB}, {DEBIAN}, paths, folders or quoted globs of {FILE_KINDS}, "
            f"or {HUGGING_FACE}NAME for a dataset of the Hugging Face hub."
        )
    files = []
    for name, path in named:
        kind = _kind(path)
        if kind is None:
            raise ValueError(f"{path} is not a kind of file that is read; files are {FILE_KINDS}.")
        files.append(_source_file(name, kind, path))
    return files


def _kind(path: Path) -> str | None:
    """The kind of a file: `.jsonl` for `a.jsonl.gz`, None for a file that is not read."""
    if path.suffix.lower() in COMPRESSIONS:
        path = path.with_suffix("")
    kind = path.suffix.lower()
    if kind in READERS:
        return kind
    return None


def list_spans(
    files: list[SourceFile], text_field: str, max_bytes: int | None = None
) -> Iterator[Span]:
    """Yields the spans of all files, in order.

    Args:
        files: Files from `find_inputs`.
        text_field: Column that Parquet files must have.
        max_bytes: Stop before the span with which their sizes would exceed this. The first span
            always comes.

    Raises:
        ValueError: A Parquet file lacks the column.
    """
    total = 0
    for file in files:
        for span in _spans(file, text_field):
            if max_bytes is not None and total > 0 and total + span.size > max_bytes:
                return
            total += span.size
            yield span


def _spans(file: SourceFile, text_field: str) -> list[Span]:
    """Returns the spans of one file.

    Datasets of the Hugging Face hub, Parquet files and JSON lines can be read from several places.
    Any other file is one span.

    Args:
        file: A file from `find_inputs`.
        text_field: Column that Parquet files must have.
    """
    spans = []
    if file.kind == HUGGING_FACE:
        _, rows = _dataset(str(file.path))
        for i in range(rows.num_shards):
            spans.append(Span(file, start=i, size=DATASET_SPAN_BYTES))
    elif file.kind == PARQUET:
        with _file_named_in_errors(file):
            metadata = _open_parquet(file.path, text_field).metadata
        for group in range(metadata.num_row_groups):
            # The size is the row group's share of the rows.
            size = file.size * metadata.row_group(group).num_rows // max(1, metadata.num_rows)
            spans.append(Span(file, start=group, size=size))
    elif file.path.suffix.lower() in JSON_LINES:  # not compressed, so any byte can be read
        for start in range(0, file.size, SPAN_BYTES):
            stop = min(start + SPAN_BYTES, file.size)
            spans.append(Span(file, start=start, stop=stop, size=stop - start))
    else:
        spans.append(Span(file, size=file.size))
    return spans


@contextlib.contextmanager
def _file_named_in_errors(file: SourceFile) -> Iterator[None]:
    """Puts the file's name before the messages of the libraries that read it, as a ValueError."""
    try:
        yield
    except (ValueError, OSError, EOFError, zlib.error) as e:
        raise ValueError(f"{file.path} cannot be read: {e}") from e


def _place(span: Span, i: int) -> str:
    """Says where row `i` of a span stands in its file, for an error message.

    `i` counts from 0. Lines and rows in the message count from 1.

    Args:
        span: A span of the file.
        i: Number of the row in the span.
    """
    path = span.file.path
    if span.file.kind in JSON_LINES:
        # Count the lines of the spans before this one. This is done for bad documents only.
        lines_before = 0
        if span.start > 0:
            with open(path, "rb") as f:
                while f.tell() < span.start:
                    f.readline()
                    lines_before += 1
        return f"line {lines_before + i + 1}"
    if span.file.kind == PARQUET:
        metadata = _open_parquet(path).metadata
        rows_before = 0
        for group in range(span.start):
            rows_before += metadata.row_group(group).num_rows
        return f"row {rows_before + i + 1}"
    if span.file.kind == HUGGING_FACE:
        return f"row {i + 1} of the dataset's file {span.start + 1}"
    return f"document {i + 1}"


def open_decompressed(path: Path) -> IO[bytes] | gzip.GzipFile:
    """Opens a file for its bytes. Decompresses it if its name ends in one of COMPRESSIONS."""
    ending = path.suffix.lower()
    if ending not in COMPRESSIONS:
        return open(path, "rb")
    # The libraries read an empty file as no text, but each format has a header: a copy or a
    # download has failed.
    if path.stat().st_size == 0:
        raise ValueError("the file is empty, which no compressed file is.")
    if ending == ".gz":
        return gzip.open(path)
    # Not bz2.open: where it cannot decompress what follows the first stream, it reports the end of
    # the file.
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression=COMPRESSIONS[ending]))


def _whole_file(span: Span, text_field: str) -> Iterator[bytes]:
    """Yields the decompressed bytes of a file. `text_field` is ignored."""
    with open_decompressed(span.file.path) as f:
        yield f.read()


def _decoded(data: bytes, text_field: str) -> str:
    return data.decode()  # text mode would turn CRLF into LF


def _lines(span: Span, text_field: str) -> Iterator[bytes]:
    """The lines that begin in the span, as bytes: text mode would also end lines at U+2028.

    Args:
        span: A span of JSON lines.
        text_field: Ignored: lines are not parsed here.
    """
    with open_decompressed(span.file.path) as f:
        position = span.start
        if position > 0:
            # A line that lies across the start belongs to the span before.
            f.seek(position - 1)
            position += len(f.readline()) - 1
        while span.stop is None or position < span.stop:
            line = f.readline()
            if not line:
                break
            position += len(line)
            yield line


def _line_text(line: bytes, text_field: str) -> str:
    """Returns the text under `text_field` in a JSON line; empty for an empty line."""
    if not line.strip():
        return ""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"it is not JSON ({e}): {line[:EXCERPT]!r}") from e
    return row_text(row, text_field)


def row_text(row: object, text_field: str) -> str:
    """Returns the text of a row.

    Args:
        row: A dict; other objects are bad rows.
        text_field: Key of the text.

    Raises:
        ValueError: There is no text, or it is not Unicode.
    """
    text = None
    if isinstance(row, dict):
        text = row.get(text_field)
    if isinstance(text, bytes):  # some writers of Parquet do not mark a column of strings as such
        text = text.decode()
    if not isinstance(text, str):
        raise ValueError(
            f"there is no text under {text_field!r} in the row {str(row)[:EXCERPT]}; name the right field with --text-field."
        )
    text.encode()  # raises for half of a surrogate pair
    return text


def _open_parquet(path: Path, text_field: str | None = None) -> Any:
    """Opens a Parquet file, and checks that it has the column `text_field`.

    Args:
        path: The file.
        text_field: The column. None: do not check.
    """
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path, pre_buffer=False)
    columns = file.schema_arrow.names
    if text_field is not None and text_field not in columns:
        raise ValueError(
            f"there is no column {text_field!r} (it has: {', '.join(columns)}); name the right one with --text-field."
        )
    return file


def _parquet_rows(span: Span, text_field: str) -> Iterator[Any]:
    """Yields the values of the column `text_field` in a row group, which is the span."""
    batches = _open_parquet(span.file.path, text_field).iter_batches(
        512,
        row_groups=[span.start],
        columns=[text_field],
        use_threads=False,
    )
    for batch in batches:
        yield from batch.column(0)


def _parquet_text(value: Any, text_field: str) -> str:
    return row_text({text_field: value.as_py()}, text_field)  # as_py decodes UTF-8


@functools.lru_cache(1)
def _dataset(name: str) -> tuple[Any, Any]:
    """Opens `hf:NAME[@REVISION][:CONFIG[:SPLIT]]`; NAME may be a local folder.

    Returns:
        The builder and the stream of rows, objects of the `datasets` library. Its "shards" are the
        dataset's files.

    Raises:
        ValueError: The dataset cannot be opened.
    """
    import datasets

    # Take the name apart, and let the library fill in what is not given.
    source, _, rest = name.removeprefix(HUGGING_FACE).partition(":")
    source, _, revision = source.partition("@")
    config, _, split = rest.partition(":")
    try:
        builder = datasets.load_dataset_builder(source, config or None, revision=revision or None)
        return builder, builder.as_streaming_dataset(split=split or "train")
    except (
        Exception
    ) as e:  # the hub's client, the HTTP library and the readers have errors of their own
        raise ValueError(
            f"The dataset {name} cannot be opened ({type(e).__name__}: {e}). Check name, configuration, split and "
            "network, or download its files and give them as --input 'folder/*.parquet'."
        ) from e


def _dataset_rows(span: Span, text_field: str) -> Iterator[Any]:
    """Yields the rows of one file of a dataset, which is the span. `text_field` is ignored."""
    _, rows = _dataset(str(span.file.path))
    yield from rows.shard(rows.num_shards, span.start)


def _package_documents(span: Span, text_field: str) -> Iterator[str]:
    return read_package(span.file.path)


def _unchanged(text: str, text_field: str) -> str:
    return text


class Reader(NamedTuple):
    """Two functions that read one kind of file. Both get the name of the text field.

    Attributes:
        rows: Yields the rows of a span, as the file stores them.
        text: Returns the text of a row. Raises ValueError for a bad document.
    """

    rows: Callable[[Span, str], Iterable[Any]]
    text: Callable[[Any, str], str]


# The reader of each kind of SourceFile. `_spans` and `_place` know more about some of them.
READERS = {
    **dict.fromkeys(TEXT, Reader(_whole_file, _decoded)),
    **dict.fromkeys(JSON_LINES, Reader(_lines, _line_text)),
    PARQUET: Reader(_parquet_rows, _parquet_text),
    DEBIAN: Reader(_package_documents, _unchanged),
    HUGGING_FACE: Reader(_dataset_rows, row_text),
}
