"""Documents to shards of token ids in several processes, in an order and in files that do not depend on how many.

Workers read and encode pieces of the input; this process puts their results back in order, writes every split as one
stream of documents into shards, and notes in `journal.json` how far it came. A run that was killed goes on from there:
the shards that it ends with are those of one that was not.
"""

import concurrent.futures
import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from interdomain.data.documents import in_validation
from interdomain.data.indexed import IndexedDatasetWriter, token_dtype
from interdomain.data.pieces import PIECE_BYTES, READ_BYTES, cut, read_piece
from interdomain.data.tokenizer import TOKENIZER_FILES, load_tokenizer
from interdomain.folders import write_whole

SPLITS = ("train", "validation")
JOURNAL = "journal.json"
JOURNAL_SECONDS = 20.0  # at most this much work, and a piece, is done again after a kill
DOCUMENTS_AT_ONCE = 64


@dataclass(frozen=True)
class Encoding:
    """How a worker turns a piece into ids: a function of nothing else."""

    tokenizer: str
    text_field: str
    validation_fraction: float


@dataclass(frozen=True)
class Encoded:
    """One piece's documents in order; an empty one has length 0."""

    tokens: np.ndarray  # of all documents, back to back, in the shards' dtype
    lengths: np.ndarray  # [documents] int32, EOS included
    splits: np.ndarray  # [documents] uint8, index into SPLITS
    source_bytes: np.ndarray  # [documents] int64
    size: int
    after: tuple[int, int]

    def first(self, n):
        end = int(self.lengths[:n].sum(dtype=np.int64))
        parts = (self.lengths[:n], self.splits[:n], self.source_bytes[:n])
        return Encoded(self.tokens[:end], *parts, self.size, self.after)


def encode_piece(tokenizer, encoding, piece, num_threads=1):
    """Raises ValueError for what is wrong with the text, naming file and line."""
    dtype, rows, splits, source_bytes = token_dtype(tokenizer.vocab_size), [], [], []
    documents = read_piece(piece, encoding.text_field)
    while batch := list(itertools.islice(documents, DOCUMENTS_AT_ONCE)):
        encoded = tokenizer.encode_batch([d.text for d in batch], add_eos=True, num_threads=num_threads)
        for document, ids in zip(batch, encoded, strict=True):
            rows.append(np.array(ids if document.text else [], dtype))
            splits.append(in_validation(document.text, encoding.validation_fraction))
            source_bytes.append(document.source_bytes)
    return Encoded(
        np.concatenate(rows) if rows else np.empty(0, dtype),
        np.array([len(row) for row in rows], np.int32),
        np.array(splits, np.uint8),
        np.array(source_bytes, np.int64),
        piece.size,
        piece.after,
    )


# Several processes


def encode_all(pieces, encoding, workers):
    """Encoded pieces in the order of `pieces`, encoded by this process (workers = 1, every core) or by others.

    A few pieces per worker are on their way at any time, so memory does not grow with the input.

    Raises: OSError if a worker dies.
    """
    if workers == 1:
        tokenizer = load_tokenizer(encoding.tokenizer)
        for piece in pieces:
            yield encode_piece(tokenizer, encoding, piece)
        return
    # spawn: a fork would copy locks that other threads of this process hold.
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_begin_worker, initargs=(encoding,)
    )
    waiting, pieces = deque(), iter(pieces)
    try:
        for piece in itertools.chain(itertools.islice(pieces, 2 * workers), pieces):
            waiting.append(pool.submit(_work, piece))
            if len(waiting) >= 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as e:
        raise OSError(
            "A worker process died, most likely because the machine ran out of memory. Give fewer --workers; the same "
            f"command goes on from its journal, which is written every {JOURNAL_SECONDS:g} s."
        ) from e
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _begin_worker(encoding):
    global _encoding, _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    _encoding, _tokenizer = encoding, load_tokenizer(encoding.tokenizer)


def _end_with_the_parent():
    # A parent that is killed closes nothing: its workers would wait for ever.
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _work(piece):
    return encode_piece(_tokenizer, _encoding, piece)


# Shards and journal


class SplitWriter:
    """Documents of one split into shards `train-00000`, `train-00001`, ...; a new one begins when the last is full."""

    def __init__(self, folder, split, vocab_size, shard_tokens, state=None):
        self.folder, self.split, self.vocab_size, self.shard_tokens = folder, split, vocab_size, shard_tokens
        self.shards, self._writer = [], None  # records of ShardInfo
        if state is not None:
            self.shards = state["shards"]
            if state["open"] is not None:
                self._writer = IndexedDatasetWriter(self._prefix(), vocab_size, resume=state["open"])

    def _prefix(self):
        return self.folder / f"{self.split}-{len(self.shards):05d}"

    def add(self, tokens, lengths):
        """Documents back to back. A shard is full with the document that brings it to `shard_tokens`."""
        while len(lengths):
            if self._writer is None:
                self._writer = IndexedDatasetWriter(self._prefix(), self.vocab_size)
            ends = np.cumsum(lengths, dtype=np.int64)
            n = int(np.searchsorted(ends, self.shard_tokens - self._writer.num_tokens)) + 1
            n = min(n, len(lengths))
            self._writer.add_documents(tokens[: ends[n - 1]], lengths[:n])
            tokens, lengths = tokens[ends[n - 1] :], lengths[n:]
            if self._writer.num_tokens >= self.shard_tokens:
                self.finalize()

    def finalize(self):
        if self._writer is not None:
            self.shards.append(self._writer.finalize().to_dict())
            self._writer = None

    def save(self):
        return {"shards": self.shards, "open": self._writer.save() if self._writer is not None else None}

    def close(self):
        if self._writer is not None:
            self._writer.close()


@dataclass
class Journal:
    """How far a preparation came, and of what. `splits` is what SplitWriter.save returned; `empty` counts documents without
    text, which are left out."""

    request: dict
    cuts: list  # positions mean nothing to a version that cuts otherwise
    after: tuple[int, int] = (0, 0)
    source_bytes: int = 0
    size: int = 0
    splits: dict | None = None
    empty: int = 0

    CUTS: ClassVar = [1, PIECE_BYTES, READ_BYTES]

    @classmethod
    def begin(cls, request):
        return cls(request, cls.CUTS)

    @classmethod
    def read(cls, folder):
        """The journal in `folder`, or None."""
        try:
            return cls(**json.loads((folder / JOURNAL).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as e:
            raise ValueError(
                f"{folder / JOURNAL} is damaged ({e}): the preparation that it describes cannot be continued. Pass "
                "--restart to begin anew."
            ) from e

    def differences(self, request):
        """What this preparation was asked for and `request` is not, in words; empty if it can be continued."""
        if self.cuts != self.CUTS:
            return ["it was begun by another version"]
        return [
            f"{k}: {self.request.get(k)} there, {v} asked for" for k, v in request.items() if self.request.get(k) != v
        ]

    def write(self, folder):
        write_whole(folder / JOURNAL, json.dumps(self.__dict__).encode())
        # What finished shards needed while they were open.
        wanted = {f"{s}-{len(state['shards']):05d}.lengths.partial" for s, state in (self.splits or {}).items()}
        for path in folder.glob("*.lengths.partial"):
            if path.name not in wanted:
                path.unlink()

    def clear(self, folder):
        """Removes what was begun after the journal was written."""
        wanted = {JOURNAL}
        for split, state in (self.splits or {}).items():
            for shard in state["shards"]:
                wanted |= {f"{shard['name']}.bin", f"{shard['name']}.idx"}
            if state["open"] is not None:
                prefix = f"{split}-{len(state['shards']):05d}"
                wanted |= {prefix + s for s in (".bin", ".idx", ".bin.partial", ".idx.partial", ".lengths.partial")}
        for path in folder.iterdir():
            if path.name not in wanted and path.name not in TOKENIZER_FILES:
                path.unlink()


def write_splits(folder, journal, files, encoding, *, shard_tokens, workers, max_bytes=None, report=lambda *_: None):
    """Encodes everything from `journal` on into shards in `folder`.

    Args:
        report: called with (bytes on the disk, bytes of source, tokens) of every piece.
    Returns: {split: [record of a ShardInfo, ...]}, splits without a document left out.
    """
    tokenizer = load_tokenizer(encoding.tokenizer)
    journal.clear(folder)
    states = journal.splits or dict.fromkeys(SPLITS)
    with contextlib.ExitStack() as stack:
        writers = [SplitWriter(folder, s, tokenizer.vocab_size, shard_tokens, states[s]) for s in SPLITS]
        for writer in writers:
            stack.callback(writer.close)
        pieces = cut(files, encoding.text_field, tuple(journal.after))
        results = stack.enter_context(contextlib.closing(encode_all(pieces, encoding, workers)))
        saved = time.monotonic()
        for encoded in results:
            total = journal.source_bytes + np.cumsum(encoded.source_bytes)
            full = max_bytes is not None and len(total) and total[-1] > max_bytes
            if full:
                encoded = encoded.first(int(np.searchsorted(total, max_bytes, side="right")))
            for i, writer in enumerate(writers):
                mine = encoded.splits == i
                tokens = encoded.tokens[np.repeat(mine, encoded.lengths)]
                writer.add(tokens, encoded.lengths[mine & (encoded.lengths > 0)])
            journal.empty += int((encoded.lengths == 0).sum())
            read = int(encoded.source_bytes.sum())
            report(encoded.size, read, len(encoded.tokens))
            if full:
                break
            journal.after, journal.source_bytes, journal.size = (
                encoded.after,
                journal.source_bytes + read,
                journal.size + encoded.size,
            )
            if time.monotonic() - saved >= JOURNAL_SECONDS:
                journal.splits = {writer.split: writer.save() for writer in writers}
                journal.write(folder)
                saved = time.monotonic()
        for writer in writers:
            writer.finalize()
    return {writer.split: writer.shards for writer in writers if writer.shards}
