"""Token shards in Megatron's `.bin/.idx` format (MMIDIDX, version 1): `IndexedDataset("data/stdlib/train-00000")`.

The same bytes as Megatron-Core, NeMo and datatrove write, so that shards travel both ways. All little-endian:

    .bin   token ids back to back, no header
    .idx   9 B magic "MMIDIDX\\0\\0" | u64 version = 1 | u8 dtype code | u64 sequences N | u64 documents + 1 = M
           | i32 length[N], in tokens | i64 offset[N], in bytes | i64 document index[M], in sequences, from 0 to N
"""

import contextlib
import errno
import hashlib
import os
import struct
from array import array
from bisect import bisect_left
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from interdomain.folders import sync, sync_path

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, documents + 1
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
U16_VOCAB = 65500  # Megatron's rule: below it u16, from it on i32

PREPARE_AGAIN = "copy the shard again from where it was made, or prepare it again"


def token_dtype(vocab_size):
    return np.dtype("<u2" if vocab_size < U16_VOCAB else "<i4")


@dataclass(frozen=True)
class ShardInfo:
    """What a manifest records of one shard."""

    name: str
    documents: int
    tokens: int
    bin_bytes: int
    bin_sha256: str
    idx_bytes: int
    idx_sha256: str

    def to_dict(self):
        return asdict(self)


def file_sha256(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


class IndexedDataset:
    """One memory-mapped shard. Opening it reads the header and compares sizes; `verify()` reads the whole index.

    Args:
        prefix: the path without `.bin` or `.idx`.
    Raises: FileNotFoundError if one of the two files is missing, ValueError if they are not a whole shard of token ids.
    """

    def __init__(self, prefix):
        self.prefix = Path(prefix)
        self.bin_path, self.idx_path = (self.prefix.with_name(self.prefix.name + s) for s in (".bin", ".idx"))
        for path, other in ((self.idx_path, self.bin_path), (self.bin_path, self.idx_path)):
            if not path.is_file():
                beside = f"{other.name} is there without it: the copy or the run that wrote it did not finish"
                raise FileNotFoundError(
                    f"Shard {self.prefix}: {path} is missing"
                    + (f" ({beside})" if other.is_file() else "")
                    + f". A shard is a .bin and an .idx file of one name; {PREPARE_AGAIN}."
                )
        self.idx_bytes, self.bin_bytes = self.idx_path.stat().st_size, self.bin_path.stat().st_size
        self._open_index()
        self._open_tokens()

    def _open_index(self):
        with open(self.idx_path, "rb") as f:
            head = f.read(HEADER.size)
        if len(head) < HEADER.size:
            raise ValueError(
                f"Shard index {self.idx_path} is truncated: its header takes {HEADER.size} bytes, the file has "
                f"{len(head)}; {PREPARE_AGAIN}."
            )
        magic, version, code, n_seq, n_doc_idx = HEADER.unpack(head)
        if magic != MAGIC or version != 1:
            raise ValueError(
                f"{self.idx_path} is not a Megatron index of version 1: it starts with {magic!r} and version "
                f"{version}, expected {MAGIC!r} and 1. Give the prefix of a .bin/.idx pair that Megatron, NeMo, "
                "datatrove or interdomain.tools.prepare_data wrote."
            )
        if code not in DTYPES or np.dtype(DTYPES[code]).kind == "f":
            found = np.dtype(DTYPES[code]).name if code in DTYPES else "no known type"
            raise ValueError(
                f"{self.idx_path} has dtype code {code} ({found}); token ids are integers, codes 1 to 5 and 8. "
                "The file is damaged or holds something other than tokens; prepare it again."
            )
        expected = HEADER.size + 12 * n_seq + 8 * n_doc_idx
        if self.idx_bytes == expected + n_seq and n_seq:
            raise NotImplementedError(
                f"{self.idx_path} is a multimodal index (one mode byte per sequence); only text shards are read. "
                "Write the text again without modes."
            )
        if self.idx_bytes != expected:
            raise ValueError(
                f"Shard index {self.idx_path} is {'truncated' if self.idx_bytes < expected else 'damaged'}: its header "
                f"({n_seq:,} sequences, {n_doc_idx:,} document entries) implies {expected:,} bytes, the file has "
                f"{self.idx_bytes:,}; {PREPARE_AGAIN}."
            )
        self.dtype = np.dtype(DTYPES[code])
        index = np.memmap(self.idx_path, dtype=np.uint8, mode="r")
        at = HEADER.size + 12 * n_seq
        # Views into the map, unaligned as the format has it: read elements and slices, never search whole arrays.
        self.lengths = index[HEADER.size : HEADER.size + 4 * n_seq].view("<i4")
        self.offsets = index[HEADER.size + 4 * n_seq : at].view("<i8")
        self.doc_idx = index[at:].view("<i8")
        if n_doc_idx == 0 or self.doc_idx[0] != 0 or self.doc_idx[-1] != n_seq:
            span = "nothing" if n_doc_idx == 0 else f"{self.doc_idx[0]} to {self.doc_idx[-1]}"
            raise ValueError(
                f"Shard index {self.idx_path} is damaged: its documents must span sequences 0 to {n_seq}, they span "
                f"{span}; {PREPARE_AGAIN}."
            )

    def _open_tokens(self):
        itemsize = self.dtype.itemsize
        expected = int(self.offsets[-1]) + int(self.lengths[-1]) * itemsize if len(self.offsets) else 0
        if self.bin_bytes != expected:
            raise ValueError(
                f"Shard {self.bin_path} is {'truncated' if self.bin_bytes < expected else 'damaged'}: "
                f"{self.idx_path.name} describes {expected:,} bytes, the file has {self.bin_bytes:,}; {PREPARE_AGAIN}."
            )
        if expected % itemsize:
            raise ValueError(f"Shard index {self.idx_path} is damaged: offsets are no multiple of {itemsize} bytes.")
        self.num_tokens = expected // itemsize
        # An empty file cannot be mapped.
        self._tokens = np.memmap(self.bin_path, dtype=self.dtype, mode="r") if expected else np.empty(0, self.dtype)

    def __len__(self):
        return len(self.doc_idx) - 1

    def __getitem__(self, document):
        """Tokens of one document, in the shard's dtype, mapped."""
        if not -len(self) <= document < len(self):
            raise IndexError(f"document {document} of {len(self)} in {self.prefix}")
        document %= len(self)
        return self.tokens(self._document_start(document), self._document_start(document + 1))

    def tokens(self, start, stop):
        """Tokens [start, stop) of the shard read as one stream, in the shard's dtype, mapped."""
        return self._tokens[start:stop]

    def document_starts(self, start, stop):
        """Positions p in [start, stop), in tokens of the shard, at which a document begins: int64, ascending.

        Raises: ValueError if the index has them in another order, which opening a shard does not look for.
        """
        # bisect: numpy's searchsorted would first copy the whole (unaligned) index.
        first, last = (bisect_left(range(len(self)), p, key=self._document_start) for p in (start, stop))
        positions = np.asarray([self._document_start(document) for document in range(first, last)], np.int64)
        if len(positions) and not (start <= positions[0] and positions[-1] < stop and (np.diff(positions) >= 0).all()):
            raise ValueError(
                f"Shard index {self.idx_path} is damaged: its documents must follow one another, and between tokens {start} "
                f"and {stop} they begin at {positions[:8].tolist()}; {PREPARE_AGAIN}."
            )
        return np.unique(positions)  # an empty document starts where the next one does

    def _document_start(self, document):
        sequence = int(self.doc_idx[document])
        return self.num_tokens if sequence >= len(self.offsets) else int(self.offsets[sequence]) // self.dtype.itemsize

    def verify(self):
        """Reads the whole index: sequences must lie back to back and documents must follow one another."""
        ends = self.offsets + self.lengths.astype(np.int64) * self.dtype.itemsize
        whole = len(ends) == 0 or (self.offsets[0] == 0 and np.array_equal(ends[:-1], self.offsets[1:]))
        if not whole or (self.lengths < 0).any() or (np.diff(self.doc_idx) < 0).any():
            raise ValueError(
                f"Shard index {self.idx_path} is damaged: its sequences must lie back to back in the .bin file, and "
                f"its documents must follow one another; {PREPARE_AGAIN}."
            )


class IndexedDatasetWriter:
    """Streams documents into `prefix.bin` and `prefix.idx`; a context manager that finalizes when its block succeeds.

    Both files carry temporary names until `finalize`, which brings them to the disk and renames them, `.idx` last: a
    killed writer leaves no shard, and the next one for the same prefix writes over those. One writer per prefix.

    Args:
        vocab_size: decides the dtype (u16 below 65,500, else i32) and refuses ids outside it.
        resume: what `save` returned to a writer that was killed since: goes on from there.
    Raises: FileExistsError if the shard is there already; OSError (a full disk, ...), after removing what was written,
        but for what was saved; ValueError if there is less than was saved.
    """

    def __init__(self, prefix, vocab_size, resume=None):
        self.prefix, self.vocab_size, self.dtype = Path(prefix), vocab_size, token_dtype(vocab_size)
        self._final = [self.prefix.with_name(self.prefix.name + s) for s in (".bin", ".idx")]
        self._partial = [path.with_name(path.name + ".partial") for path in self._final]
        self.lengths_path = self.prefix.with_name(self.prefix.name + ".lengths.partial")
        self._bin, self._saved = None, (0, 0)
        self._lengths = array("i")
        self._bin_sha256 = hashlib.sha256()
        self.num_tokens = 0  # so far
        if resume is not None:
            self._resume(*resume)
            return
        for path in self._final:
            if path.exists():
                raise FileExistsError(
                    errno.EEXIST,
                    f"{path} exists already, and shards are never overwritten; remove it, or write to another prefix",
                )
        with self._cleared_up_on_error():
            self._bin = open(self._partial[0], "wb")  # noqa: SIM115 (closed by finalize or abort)

    def _resume(self, documents, tokens):
        # Killed between its renames and its owner's note of them: back under the temporary names.
        for final, partial in zip(self._final, self._partial, strict=True):
            if final.exists():
                os.replace(final, partial)
        try:
            lengths = np.fromfile(self.lengths_path, "<i4", documents)
            self._bin = open(self._partial[0], "r+b")  # noqa: SIM115
            left = tokens * self.dtype.itemsize
            while left and (data := self._bin.read(min(left, 1 << 24))):
                self._bin_sha256.update(data)
                left -= len(data)
        except FileNotFoundError as e:
            raise ValueError(f"Shard {self.prefix} cannot be continued: {e.filename} is missing.") from e
        if left or len(lengths) != documents or int(lengths.sum(dtype=np.int64)) != tokens:
            raise ValueError(f"Shard {self.prefix} cannot be continued: it holds less than {tokens:,} tokens.")
        self._bin.truncate()
        os.truncate(self.lengths_path, 4 * documents)
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())
        self.num_tokens, self._saved = tokens, (documents, tokens)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if kind is not None:
            self.abort()
        elif self._bin is not None:
            self.finalize()

    def add_document(self, tokens):
        """Appends one document (one Megatron sequence). Ids are integers in [0, vocab_size), at least one."""
        tokens = np.asarray(tokens)
        self.add_documents(tokens, [tokens.size])

    def add_documents(self, tokens, lengths):
        """Appends documents that lie back to back in `tokens`, `lengths` tokens each."""
        tokens, lengths = np.asarray(tokens), np.asarray(lengths, np.int32)
        if not len(lengths):
            return
        if tokens.ndim != 1 or lengths.min() < 1 or tokens.dtype.kind not in "iu":
            raise ValueError(
                f"A document is a non-empty row of integer ids, got shape {tokens.shape} of {tokens.dtype}; leave "
                "empty documents out, or end each with the end-of-text id."
            )
        assert int(lengths.sum(dtype=np.int64)) == tokens.size
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            raise ValueError(
                f"A document for {self.prefix} has ids from {low} to {high}, the vocabulary has 0 to "
                f"{self.vocab_size - 1}; give the writer the vocabulary size of the tokenizer that made these ids."
            )
        data = tokens.astype(self.dtype).tobytes()
        with self._cleared_up_on_error():
            self._bin.write(data)
        self._bin_sha256.update(data)
        self._lengths.frombytes(lengths.tobytes())
        self.num_tokens += tokens.size

    def save(self):
        """Brings what is written so far to the disk; returns (documents, tokens), to resume from."""
        with self._cleared_up_on_error():
            sync(self._bin)
            with open(self.lengths_path, "ab") as f:
                f.truncate(4 * self._saved[0])
                f.write(np.frombuffer(self._lengths, np.int32)[self._saved[0] :].astype("<i4").tobytes())
                sync(f)
        self._saved = (len(self._lengths), self.num_tokens)
        return self._saved

    def finalize(self):
        """Makes the shard whole and returns its ShardInfo. What `save` wrote beside it is the caller's to remove."""
        lengths = np.frombuffer(self._lengths, np.int32) if self._lengths else np.empty(0, np.int32)
        ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        code = next(c for c, name in DTYPES.items() if np.dtype(name) == self.dtype)
        index = b"".join(
            (
                HEADER.pack(MAGIC, 1, code, len(lengths), len(lengths) + 1),
                lengths.astype("<i4").tobytes(),
                (ends - lengths * np.int64(self.dtype.itemsize)).astype("<i8").tobytes(),
                np.arange(len(lengths) + 1, dtype="<i8").tobytes(),
            )
        )
        with self._cleared_up_on_error():
            with self._bin:
                sync(self._bin)
            with open(self._partial[1], "wb") as f:
                f.write(index)
                sync(f)
            # The index last: whoever sees it sees a whole .bin.
            for partial, final in zip(self._partial, self._final, strict=True):
                os.replace(partial, final)
        self._bin = None
        sync_path(self.prefix.parent)
        return ShardInfo(
            name=self.prefix.name,
            documents=len(lengths),
            tokens=int(lengths.sum(dtype=np.int64)),
            bin_bytes=int(ends[-1]) if len(ends) else 0,
            bin_sha256=self._bin_sha256.hexdigest(),
            idx_bytes=len(index),
            idx_sha256=hashlib.sha256(index).hexdigest(),
        )

    def close(self):
        """Leaves the files as they are, for a writer that resumes."""
        if self._bin is not None:
            # Closing flushes, and on a full disk that fails once more; what was saved is on the disk.
            with contextlib.suppress(OSError):
                self._bin.close()
        self._bin = None

    def abort(self):
        """Removes everything that was written."""
        self.close()
        for path in (*self._partial, self.lengths_path):
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _cleared_up_on_error(self):
        try:
            yield
        except OSError as e:
            documents, tokens = self._saved
            if documents:
                self.close()
            else:
                self.abort()
            kept = (
                f"Its first {tokens:,} tokens are kept, and can be continued."
                if documents
                else ("Nothing of it was kept.")
            )
            raise OSError(
                e.errno,
                f"Writing shard {self.prefix} failed after {self.num_tokens:,} tokens: {e.strerror}. {kept} Check the "
                "free space and the permissions of the folder, or write to another one",
            ) from e
