"""Reads and writes shards of tokens in Megatron's format (MMIDIDX, version 1).

    IndexedDataset("data/stdlib/train-00000")[0]

A shard is two files, with the same bytes as Megatron-Core, NeMo and datatrove write. All numbers
are little-endian:

    .bin   token ids back to back, no header
    .idx   9 B magic "MMIDIDX\\0\\0" | u64 version = 1 | u8 dtype code
           | u64 sequences N | u64 documents + 1 = M
           | i32 length[N], in tokens | i64 offset[N], in bytes
           | i64 document index[M], in sequences, from 0 to N
"""

import contextlib
import hashlib
import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from interdomain.folders import sync, write_atomically

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, documents + 1
# NumPy's name of the dtype that each code in the header means. Codes 6 and 7 are floating point.
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
CODE_I32 = 4
CODE_U16 = 8
U16_VOCAB = 65500  # Megatron's rule: ids of a smaller vocabulary are stored as u16, others as i32


def file_sha256(path: Path | str) -> str:
    """Returns the SHA-256 of a file's contents, in hexadecimal."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def shard_files(prefix: Path | str) -> tuple[Path, Path]:
    """Returns the .bin and the .idx file of a shard."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


class IndexedDataset:
    """One memory-mapped shard: `dataset[i]` is document i, `len(dataset)` the number of documents.

    Opening it reads the header and compares sizes. `verify()` reads the whole index.

    Args:
        prefix: Path without `.bin` or `.idx`.

    Attributes:
        num_tokens: Tokens of the shard.
        dtype: Their dtype in the file.
        lengths: Tokens of each sequence, mapped. A document is one sequence or several.
        offsets: First byte of each sequence, mapped.
        doc_idx: First sequence of each document, and at the end the number of sequences, mapped.

    Raises:
        FileNotFoundError: One of the two files is missing.
        ValueError: The files are not a complete shard of token ids.
    """

    def __init__(self, prefix: Path | str) -> None:
        """Maps the files of the shard, and checks that they are complete."""
        self.prefix = Path(prefix)
        self.bin_path, self.idx_path = shard_files(prefix)
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                raise FileNotFoundError(
                    f"Shard {self.prefix}: {path} is missing. A shard is a .bin and an .idx file of one name; copy both, or "
                    "prepare them again."
                )
        self.idx_bytes = self.idx_path.stat().st_size
        self.bin_bytes = self.bin_path.stat().st_size
        self._open_index()
        # The tokens must end where the last sequence ends.
        itemsize = self.dtype.itemsize
        expected = 0
        if len(self.offsets):
            expected = int(self.offsets[-1]) + int(self.lengths[-1]) * itemsize
        if self.bin_bytes != expected or expected % itemsize:
            raise self._damaged(
                f"describes {expected:,} bytes of tokens, {self.bin_path} has {self.bin_bytes:,}"
            )
        self.num_tokens = expected // itemsize
        self._tokens = np.empty(0, self.dtype)
        if expected:  # an empty file cannot be mapped
            self._tokens = np.memmap(self.bin_path, dtype=self.dtype, mode="r")

    def _damaged(self, why: str) -> ValueError:
        """Returns the error for a damaged index. `why` comes after "Shard index FILE" in it."""
        return ValueError(
            f"Shard index {self.idx_path} {why}: the shard is truncated or damaged. Copy it again from where it was made, "
            "or prepare it again."
        )

    def _open_index(self) -> None:
        """Maps the index, and checks that it is complete."""
        with open(self.idx_path, "rb") as f:
            head = f.read(HEADER.size)
        magic, version, code, n_seq, n_doc_idx = HEADER.unpack(head.ljust(HEADER.size, b"\0"))
        if magic != MAGIC or version != 1:
            raise ValueError(
                f"{self.idx_path} is not a Megatron index of version 1: it starts with {magic!r} and version {version}. Give "
                "the prefix of a .bin/.idx pair that Megatron, NeMo, datatrove or `interdomain prepare-data` wrote."
            )
        if code not in DTYPES:
            raise self._damaged(
                f"has dtype code {code}, token ids are integers, codes 1 to 5 and 8"
            )
        # A sequence has an i32 length and an i64 offset, and a document an i64 index.
        expected = HEADER.size + 12 * n_seq + 8 * n_doc_idx
        if (
            self.idx_bytes != expected
        ):  # also of a multimodal index, which has one byte more per sequence
            raise self._damaged(
                f"has {self.idx_bytes:,} bytes, its header ({n_seq:,} sequences) implies {expected:,}"
            )
        self.dtype = np.dtype(DTYPES[code])
        index = np.memmap(self.idx_path, dtype=np.uint8, mode="r")
        at = HEADER.size + 12 * n_seq
        # Views into the map, unaligned as the format has it: read elements and slices, never search
        # them as arrays.
        self.lengths = index[HEADER.size : HEADER.size + 4 * n_seq].view("<i4")
        self.offsets = index[HEADER.size + 4 * n_seq : at].view("<i8")
        self.doc_idx = index[at:].view("<i8")
        if n_doc_idx == 0 or self.doc_idx[0] != 0 or self.doc_idx[-1] != n_seq:
            raise self._damaged(f"has documents that do not span its {n_seq:,} sequences")

    def __len__(self) -> int:
        return len(self.doc_idx) - 1

    def __getitem__(self, document: int) -> np.ndarray:
        """Returns the tokens of one document, counted from 0, in the shard's dtype, mapped."""
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} of {len(self)} in {self.prefix}")
        return self.tokens(self._document_start(document), self._document_start(document + 1))

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Returns the tokens [start, stop) of the shard, in the shard's dtype, mapped.

        Args:
            start: Position of the first token in the shard.
            stop: Position after the last one.
        """
        return self._tokens[start:stop]

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Returns the positions in [start, stop) at which a document begins: int64, ascending."""
        # bisect, because numpy's searchsorted would first copy all of the (unaligned) index.
        documents = range(len(self))
        first = bisect_left(documents, start, key=self._document_start)
        last = bisect_left(documents, stop, key=self._document_start)
        # unique: an empty document starts where the next one does.
        return np.unique(
            [self._document_start(document) for document in range(first, last)]
        ).astype(np.int64)

    def documents(self, start: int, stop: int) -> np.ndarray:
        """Returns for each token [start, stop) of the shard the number of its document, int64."""
        documents = range(len(self))
        first = bisect_right(documents, start, key=self._document_start) - 1
        last = bisect_right(documents, stop - 1, key=self._document_start) - 1
        ends = [min(self._document_start(i + 1), stop) for i in range(first, last + 1)]
        return np.repeat(np.arange(first, last + 1), np.diff([start, *ends]))

    def _document_start(self, document: int) -> int:
        """Position of a document's first token in the shard."""
        sequence = int(self.doc_idx[document])
        if sequence >= len(self.offsets):
            return self.num_tokens
        return int(self.offsets[sequence]) // self.dtype.itemsize

    def verify(self) -> None:
        """Reads the whole index. Opening compares sizes only.

        Raises:
            ValueError: Sequences do not lie back to back, or documents are in another order.
        """
        ends = self.offsets + self.lengths.astype(np.int64) * self.dtype.itemsize
        back_to_back = len(ends) == 0 or (
            self.offsets[0] == 0 and np.array_equal(ends[:-1], self.offsets[1:])
        )
        if not back_to_back or (self.lengths < 0).any() or (np.diff(self.doc_idx) < 0).any():
            raise self._damaged(
                "has sequences that do not lie back to back, or documents in another order"
            )


class IndexedDatasetWriter:
    """Writes documents to `prefix.bin` and `prefix.idx`.

    It is a context manager, which finalizes the shard if its block succeeds.
    The index appears last and complete. Files of a killed writer have no index, so they are not a
    shard, and the next writer of the same prefix overwrites them.

    Attributes:
        num_tokens: Tokens so far.
    """

    def __init__(self, prefix: Path | str, vocab_size: int, code: int | None = None) -> None:
        """Opens the .bin file.

        Args:
            prefix: Path without `.bin` or `.idx`.
            vocab_size: Bound of the ids. It decides the dtype: u16 below 65,500, else i32.
            code: Code of another dtype in DTYPES.

        Raises:
            FileExistsError: The shard exists.
        """
        self.prefix = Path(prefix)
        self.vocab_size = vocab_size
        self._bin_path, self._idx_path = shard_files(prefix)
        if self._idx_path.exists():
            raise FileExistsError(
                f"{self._idx_path} exists, and shards are never overwritten; remove it first."
            )
        if code is None:
            code = CODE_U16 if vocab_size < U16_VOCAB else CODE_I32
        self._code = code
        self._dtype = np.dtype(DTYPES[self._code])
        self._lengths = array("i")  # tokens of each document
        self._bin_sha256 = hashlib.sha256()
        self._bin = open(self._bin_path, "wb")  # noqa: SIM115 (closed by finalize, or after an error)
        self.num_tokens = 0

    def __enter__(self) -> "IndexedDatasetWriter":
        return self

    def __exit__(self, *error: object) -> None:
        """Finalizes the shard. If the block raised an error, removes what was written."""
        if error[0] is not None:
            # Closing flushes, which fails once more on a full disk.
            with contextlib.suppress(OSError):
                self._bin.close()
            self._bin_path.unlink(missing_ok=True)
        elif not self._bin.closed:
            self.finalize()

    def add_document(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Appends one document (one Megatron sequence).

        Args:
            tokens: At least one id; integers in [0, vocab_size).

        Raises:
            ValueError: An id is outside the vocabulary, or there is none.
        """
        tokens = np.asarray(tokens)
        self.add_documents(tokens, [tokens.size])

    def add_documents(self, tokens: np.ndarray, lengths: Sequence[int] | np.ndarray) -> None:
        """Appends several documents at once.

        Args:
            tokens: The documents back to back, integers in [0, vocab_size).
            lengths: Tokens of each document, at least one. Their sum is the size of `tokens`.

        Raises:
            ValueError: An id is outside the vocabulary, or a document is empty.
        """
        lengths = np.asarray(lengths, np.int32)
        assert int(lengths.sum(dtype=np.int64)) == tokens.size
        if not len(lengths):
            return
        are_ids = tokens.ndim == 1 and lengths.min() > 0 and tokens.dtype.kind in "iu"
        if not are_ids or not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            raise ValueError(
                f"A document for {self.prefix} must be a non-empty row of ids from 0 to {self.vocab_size - 1}. Leave empty "
                "documents out, and give the writer the vocabulary size of the tokenizer that made the ids."
            )
        data = tokens.astype(self._dtype).tobytes()
        self._bin.write(data)
        self._bin_sha256.update(data)
        self._lengths.frombytes(lengths.tobytes())
        self.num_tokens += tokens.size

    def finalize(self) -> dict:
        """Flushes both files to the disk, the index last. Returns the record for a manifest."""
        lengths = np.array(self._lengths, np.int32)
        ends = np.cumsum(lengths, dtype=np.int64) * self._dtype.itemsize
        index = b"".join(
            (
                HEADER.pack(MAGIC, 1, self._code, len(lengths), len(lengths) + 1),
                lengths.astype("<i4").tobytes(),
                (ends - lengths * np.int64(self._dtype.itemsize)).astype("<i8").tobytes(),
                np.arange(len(lengths) + 1, dtype="<i8").tobytes(),
            )
        )
        with self._bin:
            sync(self._bin)
        write_atomically(self._idx_path, index)
        return {
            "name": self.prefix.name,
            "documents": len(lengths),
            "tokens": self.num_tokens,
            "bin_bytes": self.num_tokens * self._dtype.itemsize,
            "bin_sha256": self._bin_sha256.hexdigest(),
            "idx_bytes": len(index),
            "idx_sha256": hashlib.sha256(index).hexdigest(),
        }


class ShardWriter:
    """Writes documents to the shards `prefix-00000`, `prefix-00001`, ...

    Args:
        prefix: Path without the number.
        vocab_size: Bound of the ids. It decides the dtype: u16 below 65,500, else i32.
        shard_tokens: A shard is full with the document that brings it to this size.
        code: Code of another dtype in DTYPES.
    """

    def __init__(
        self, prefix: Path, vocab_size: int, shard_tokens: int, code: int | None = None
    ) -> None:
        """Prepares to write. The first shard is opened with the first documents."""
        self.prefix = prefix
        self.shard_tokens = shard_tokens
        self.options = (vocab_size, code)
        self.records: list[dict] = []
        self.writer: IndexedDatasetWriter | None = None

    def add_documents(self, tokens: np.ndarray, lengths: Sequence[int] | np.ndarray) -> None:
        """Appends documents, and begins a new shard when one is full.

        Args:
            tokens: The documents back to back, integers in [0, vocab_size).
            lengths: Tokens of each document, at least one. Their sum is the size of `tokens`.

        Raises:
            ValueError: An id is outside the vocabulary, or a document is empty.
        """
        while len(lengths):
            # Write the documents that fill this shard, or all that are left, and go on with the
            # rest.
            self.writer = self.writer or IndexedDatasetWriter(
                f"{self.prefix}-{len(self.records):05d}", *self.options
            )
            ends = np.cumsum(lengths, dtype=np.int64)
            n = min(
                int(np.searchsorted(ends, self.shard_tokens - self.writer.num_tokens)) + 1,
                len(lengths),
            )
            self.writer.add_documents(tokens[: ends[n - 1]], lengths[:n])
            tokens = tokens[ends[n - 1] :]
            lengths = lengths[n:]
            if self.writer.num_tokens >= self.shard_tokens:
                self.close()

    def close(self) -> list[dict]:
        """Completes the last shard. Returns a manifest's record of each shard."""
        if self.writer is not None:
            self.records.append(self.writer.finalize())
            self.writer = None
        return self.records
