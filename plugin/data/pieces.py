"""Input files cut into pieces of a few megabytes: `for piece in cut(list_files(["rows.parquet"])): read_piece(piece)`.

Where the cuts lie depends on the files alone. A piece names bytes, rows or files that any process can read by itself;
what only one process can read (a compressed stream, a dataset from a network) is read by the one that cuts and travels
in the piece. `piece.after` is where to go on: a run that was killed cuts again from there.
"""

import bz2
import codecs
import functools
import io
import itertools
import json
import re
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

from interdomain.data.documents import COMPRESSIONS, HUGGING_FACE, Document

PIECE_BYTES = 2_000_000  # of text, about; a function of nothing, or shards would depend on it
ARRAY_BYTES = 1 << 20  # of a JSON array at once, or more where one row is longer
READ_BYTES = 1 << 12  # of a compressed file at once: 4 bytes of zstd may hold 128 KB


@dataclass(frozen=True)
class Piece:
    """Consecutive documents of the input. What stands in `start` and `stop` depends on `kind`."""

    kind: str  # text, lines, parquet or rows
    paths: tuple[Path, ...]
    start: int = 0  # lines: a byte; parquet: a row of the file; rows and lines in `data`: the first one's number - 1
    stop: int = 0
    groups: tuple[int, int, int] = (0, 0, 0)  # parquet: row groups [first, last), and the first one's first row
    data: object = None  # lines: bytes; rows (of an array or a dataset): texts
    lenient: bool = False  # text that is not UTF-8 is left out
    size: int = 0  # bytes on the disk that it accounts for
    after: tuple[int, int] = (0, 0)  # (file, pieces of it) that come before what follows this piece


def cut(files, text_field="text", begin=(0, 0)):
    """The pieces of `files` in order, from position `begin`. Lazy: nothing but the next piece is read.

    Raises: ValueError naming a file that cannot be read.
    """
    i, skip = begin
    while i < len(files):
        file = files[i]
        if file.kind == "text":
            piece = _text_piece(files, i)
            yield piece
            i, skip = piece.after[0], 0
            continue
        pieces = {
            "lines": _line_pieces,
            "json": _json_pieces,
            "parquet": _parquet_pieces,
            "hugging face": _dataset_pieces,
        }
        for n, piece in enumerate(pieces[file.kind](file, text_field, skip), skip + 1):
            yield replace(piece, after=(i, n))
        i, skip = i + 1, 0


def check_files(files, text_field):
    """Raises ValueError, before anything is made, for what can be seen without reading all: columns, missing libraries."""
    for file in files:
        if file.kind == "parquet":
            _parquet(file.path, text_field)
        elif file.kind == "hugging face":
            open_stream(file.name)
        elif file.path.name.lower().endswith(".zst"):
            _zstandard(file.path)


def read_piece(piece, text_field="text"):
    """The Documents of a piece, empty ones included."""
    read = {"text": _read_text, "lines": _read_lines, "parquet": _read_parquet, "rows": _read_rows}[piece.kind]
    return read(piece, text_field)


# Text files: one document each, as many together as fill a piece


def _text_piece(files, i):
    paths, size, first = [], 0, files[i]
    while i < len(files) and (files[i].kind, files[i].from_stdlib) == ("text", first.from_stdlib):
        own = files[i].size
        if paths and size + own > PIECE_BYTES:
            break
        paths.append(files[i].path)
        size, i = size + own, i + 1
    return Piece("text", tuple(paths), lenient=first.from_stdlib, size=size, after=(i, 0))


def _read_text(piece, _):
    for path in piece.paths:
        with open(path, "rb") as f:
            data = b"".join(_blocks(path, f))
        try:
            # From bytes: reading in text mode would turn CRLF into LF.
            yield Document(data.decode(), len(data))
        except UnicodeDecodeError as e:
            if not piece.lenient:
                raise ValueError(
                    f"{path} is not UTF-8 (byte {e.start}: {e.reason}); convert it, or leave it out."
                ) from e


# Compressed files


def _is_compressed(path):
    return path.name.lower().endswith(COMPRESSIONS)


def _blocks(path, f):
    """A file's bytes, decompressed, block by block."""
    return _decompressed(path, f) if _is_compressed(path) else iter(lambda: f.read(ARRAY_BYTES), b"")


# JSON


def _line_pieces(file, _, skip):
    path = file.path
    if _is_compressed(path):
        yield from itertools.islice(_compressed_pieces(path), skip, None)
        return
    for start in range(skip * PIECE_BYTES, file.size, PIECE_BYTES):
        stop = min(start + PIECE_BYTES, file.size)
        yield Piece("lines", (path,), start, stop, size=stop - start)


def _zstandard(path):
    try:
        import zstandard
    except ImportError as e:
        raise ValueError(f"{path} is compressed with zstd: pip install zstandard, or decompress it first.") from e
    return zstandard


def _decompressed(path, f):
    """Blocks of the decompressed stream: of one or several members, whichever compression it is."""
    if path.name.lower().endswith(".zst"):
        zstandard = _zstandard(path)
        make, error = lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError
    elif path.name.lower().endswith(".bz2"):
        make, error = bz2.BZ2Decompressor, OSError
    else:
        make, error = lambda: zlib.decompressobj(wbits=31), zlib.error
    member = None
    try:
        while block := f.read(READ_BYTES):
            while block:
                member = make() if member is None else member
                yield member.decompress(block)
                block = member.unused_data if member.eof else b""
                member = None if member.eof else member
    except error as e:
        raise ValueError(f"{path} is damaged ({e}); copy it again.") from e
    if member is not None:
        raise ValueError(f"{path} is truncated: its compressed stream ends in the middle; copy it again.")


def _compressed_pieces(path):
    """Whole lines of a stream, decompressed here: nobody can begin in its middle."""
    with open(path, "rb") as f:
        held, size, line, told = [], 0, 0, 0
        for block in itertools.chain(_decompressed(path, f), [None]):
            if block is not None:
                held.append(block)
                size += len(block)
                if size < PIECE_BYTES or b"\n" not in block:  # a long line is looked through once
                    continue
            data = b"".join(held)
            end = len(data) if block is None else data.rfind(b"\n") + 1
            if end:
                yield Piece("lines", (path,), start=line, data=data[:end], size=f.tell() - told)
                line, told = line + data.count(b"\n", 0, end), f.tell()
            held, size = [data[end:]], len(data) - end


def _read_lines(piece, text_field):
    (path,) = piece.paths
    if piece.data is not None:
        for number, line in enumerate(io.BytesIO(piece.data), piece.start + 1):
            yield from _row(line, text_field, path, lambda number=number: number)
        return
    with open(path, "rb") as f:  # binary: lines end at \n only, not at U+2028
        at = piece.start
        if at:  # the line that lies across the start belongs to the piece before
            f.seek(at - 1)
            at += len(f.readline(piece.stop - at + 1)) - 1  # no further: the line may be longer than many pieces
        while at < piece.stop and (line := f.readline()):
            yield from _row(line, text_field, path, lambda at=at: _line_number(path, at))
            at += len(line)


def _json_pieces(file, text_field, skip):
    """Of an array of rows, or of lines."""
    path = file.path
    with open(path, "rb") as f:
        first = next(filter(None, (block.lstrip() for block in _blocks(path, f))), b"")
        if first[:1] != b"[":
            yield from _line_pieces(file, text_field, skip)
            return
        f.seek(0)
        yield from _row_pieces(path, _array_rows(path, f), text_field, skip, f.tell)


_SPACE = re.compile(r"[ \t\n\r]*")


def _array_rows(path, f):
    """The elements of a JSON array, parsed here as far as the file is read: nobody can begin in its middle."""
    decode, utf8 = json.JSONDecoder().raw_decode, codecs.getincrementaldecoder("utf-8")()
    text, held, size, number = "", [], 0, 1
    before = "["  # what stands before the next element
    try:
        for block in itertools.chain(_blocks(path, f), [b""]):
            held.append(block)
            size += len(block)
            if block and size < max(ARRAY_BYTES, len(text)):  # what did not end yet is parsed again: not too often
                continue
            text, at = text + utf8.decode(b"".join(held), final=not block), 0
            held, size = [], 0
            while before:
                start = _SPACE.match(text, at).end()
                mark = text[start : start + 1]
                first = _SPACE.match(text, start + 1).end()
                if mark == "]" and before == ",":
                    before, at = "", start + 1
                elif mark == before == "[" and text[first : first + 1] == "]":
                    before, at = "", first + 1
                elif mark not in ("", before):
                    raise json.JSONDecodeError(f"{mark} stands where {before} should", text, start)
                else:
                    try:
                        row, at = decode(text, first)
                    except (ValueError, RecursionError):
                        if not block:
                            raise
                        break  # it goes on in the next block
                    yield row
                    before, number = ",", number + 1
            text = text[at:]
            if not before and text.strip():
                raise json.JSONDecodeError("the array ends before the file does", text, 0)
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is not UTF-8 ({e.reason}); convert it, or leave it out.") from e
    except (json.JSONDecodeError, RecursionError) as e:
        why = getattr(e, "msg", e)  # without its position, which is not the file's
        raise ValueError(f"{path}, row {number}, is not JSON ({why}); repair it or leave the file out.") from e


def _line_number(path, at):
    """The number of the line that begins at byte `at`, counted from the file's start: for messages alone."""
    number = 1
    with open(path, "rb") as f:
        while at > 0 and (block := f.read(min(at, READ_BYTES))):
            number, at = number + block.count(b"\n"), at - len(block)
    return number


def _row(line, text_field, path, number):
    if not line.strip():
        return
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}, line {number()}, is not JSON ({e}); repair it or leave the file out.") from e
    text = row.get(text_field) if isinstance(row, dict) else None
    if not isinstance(text, str):
        fields = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(
            f"{path}, line {number()}, has no text under {text_field!r} (it has: {fields}); name the right field with "
            "--text-field."
        )
    yield _document(text, len(line), lambda: f"{path}, line {number()},")


def _document(text, source_bytes, where):
    try:
        size = len(text.encode())
    except UnicodeEncodeError as e:
        raise ValueError(f"{where()} has half a surrogate pair in its text; repair the row.") from e
    return Document(text, size if source_bytes is None else source_bytes)


# Parquet


@functools.lru_cache(1)  # a worker reads one file's pieces one after another
def _parquet(path, text_field):
    """The open file, its text column checked."""
    try:
        import pyarrow.parquet
    except ImportError as e:
        raise ValueError(f"{path} is a Parquet file: pip install pyarrow, or give JSON lines.") from e
    try:
        file = pyarrow.parquet.ParquetFile(path, pre_buffer=False)
    except pyarrow.ArrowException as e:
        raise ValueError(f"{path} is not a whole Parquet file ({e}); copy it again.") from e
    schema = file.schema_arrow
    if text_field not in schema.names:
        raise ValueError(
            f"{path} has no column {text_field!r} (it has: {', '.join(schema.names)}); name the right one with "
            "--text-field."
        )
    kind = schema.field(text_field).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise ValueError(
            f"{path}: the column {text_field!r} is of type {kind}, not text; name another with --text-field."
        )
    return file


def _parquet_pieces(file, text_field, skip):
    """Runs of whole row groups, or rows of one that is large."""
    metadata = _parquet(file.path, text_field).metadata
    names = [metadata.schema.column(c).path for c in range(metadata.num_columns)]
    column, share = names.index(text_field), file.size / max(1, metadata.num_rows)
    sizes = [
        (metadata.row_group(g).num_rows, metadata.row_group(g).column(column)) for g in range(metadata.num_row_groups)
    ]
    sizes = [(rows, chunk.total_uncompressed_size) for rows, chunk in sizes]

    def pieces():
        g = first_row = 0
        while g < len(sizes):
            rows, size = sizes[g]
            last = g + 1
            while last < len(sizes) and size + sizes[last][1] <= PIECE_BYTES:
                rows, size, last = rows + sizes[last][0], size + sizes[last][1], last + 1
            step = max(1, -(-rows // max(1, -(-size // PIECE_BYTES))))
            for start in range(first_row, first_row + rows, step):
                stop = min(start + step, first_row + rows)
                span = (g, last, first_row)
                yield Piece("parquet", (file.path,), start, stop, span, size=round((stop - start) * share))
            g, first_row = last, first_row + rows

    yield from itertools.islice(pieces(), skip, None)


# Of the last piece that this process read: {row groups: (row, the batch that begins there, those behind it)}. Row groups
# can be read from their first row only, and many a writer makes one of a whole file.
_begun = {}


def _read_parquet(piece, text_field):
    import pyarrow

    (path,) = piece.paths
    first, last, row = piece.groups
    key = path, text_field, piece.groups
    try:
        at, batch, batches = _begun.pop(key, (row, None, None))
        _begun.clear()
        if batches is None or at > piece.start:
            batches = _parquet(path, text_field).iter_batches(
                batch_size=512, row_groups=range(first, last), columns=[text_field], use_threads=False
            )
            at, batch = row, next(batches, None)
        while batch is not None:
            begin, end = max(piece.start - at, 0), min(piece.stop - at, len(batch))
            if begin < end:
                texts = batch.column(0).slice(begin, end - begin).to_pylist()
                yield from _texts(texts, at + begin, path, text_field)
            if at + len(batch) >= piece.stop:
                _begun[key] = at, batch, batches
                return
            at, batch = at + len(batch), next(batches, None)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as e:
        raise ValueError(f"{path} is damaged ({e}); copy it again.") from e


def _texts(texts, first, path, text_field):
    for number, text in enumerate(texts, first + 1):
        if not isinstance(text, str):
            raise ValueError(
                f"{path}, row {number}, has no text under {text_field!r} (it holds {type(text).__name__}); repair the "
                "row, or name another field with --text-field."
            )
        yield _document(text, None, lambda number=number: f"{path}, row {number},")


# Hugging Face datasets, streamed


def open_stream(name):
    """`[hf:]NAME[@REVISION][:CONFIG[:SPLIT]]`, opened for streaming. NAME may be a local folder."""
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


def _dataset_pieces(file, text_field, skip):
    return _row_pieces(file.name, iter(open_stream(file.name)), text_field, skip)


# Rows that only the process that cuts can read: of a dataset, of a JSON array


def _row_pieces(name, rows, text_field, skip, tell=lambda: 0):
    """`tell`: how many bytes of the disk were read."""
    size, texts, number, pieces, told = 0, [], 0, 0, 0
    for row in itertools.chain(rows, [_END]):
        if texts and (row is _END or size >= PIECE_BYTES):
            pieces += 1
            if pieces > skip:
                yield Piece("rows", (Path(name),), start=number - len(texts), data=texts, size=tell() - told)
            texts, size, told = [], 0, tell()
        if row is _END:
            return
        if not isinstance(row, dict) or text_field not in row:
            has = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(
                f"{name}, row {number + 1}, has no field {text_field!r} (it has: {has}); name the right one with --text-field."
            )
        texts.append(row[text_field])
        number, size = number + 1, size + (len(texts[-1]) if isinstance(texts[-1], str) else 0)


_END = object()


def _read_rows(piece, text_field):
    return _texts(piece.data, piece.start, piece.paths[0], text_field)
