"""Encodes documents in several processes; order and bytes of the result do not depend on how many.

The input is cut into parts of a few megabytes. A process encodes a part into two pairs of .bin and
.idx files, one for each split. `merge_parts` joins these, in the input's order, into the shards of
the corpus.

The index of a pair appears last, and its name has a digest of everything that determines the pair.
So a preparation that was killed, or whose input was corrected, continues with the parts that are
still right. An input file is known by its name, size and time of the last write. Until the end,
parts need as much disk space as the corpus.
"""

import concurrent.futures
import contextlib
import hashlib
import importlib.metadata
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Generator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from interdomain.data.indexed import IndexedDataset, IndexedDatasetWriter, ShardWriter
from interdomain.data.readers import Span, documents_of, in_validation
from interdomain.data.tokenizer import Tokenizer, load_tokenizer

SPLITS = ("train", "validation")
# Parts of a corpus of middle size: enough to keep many processes busy to the end.
PARTS = 200
# Bytes of a part's input on the disk.
SMALLEST_PART = 2_000_000
LARGEST_PART = 64_000_000
MERGED_AT_ONCE = 4096  # documents


@dataclass(frozen=True)
class Encoding:
    """Settings that decide how parts are encoded.

    Attributes:
        folder: Where the files of the parts go.
        tokenizer: Path of the tokenizer.
        text_field: Column, or field of a JSON row, that holds the text.
        leave_out_bad: Print bad documents to standard error and go on, instead of failing.
        validation_fraction: Share of the documents in the validation split.
    """

    folder: Path
    tokenizer: Path
    text_field: str
    leave_out_bad: bool
    validation_fraction: float


@dataclass(frozen=True)
class Part:
    """A piece of the input that one process encodes."""

    name: str
    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return sum(span.size for span in self.spans)


def cut(spans: list[Span]) -> list[Part]:
    """Groups neighbouring spans into PARTS parts, or into more or fewer to limit their size.

    A span is never cut. So a part may be larger than LARGEST_PART if its span is.

    Args:
        spans: The spans of the whole input, in order.
    """
    total = sum(span.size for span in spans)
    limit = min(LARGEST_PART, max(SMALLEST_PART, total // PARTS))
    # A group has one span, or all the next ones that together do not exceed the limit.
    groups = []
    size = 0
    for span in spans:
        if not groups or size + span.size > limit:
            groups.append([])
            size = 0
        groups[-1].append(span)
        size += span.size
    parts = []
    for i, group in enumerate(groups):
        parts.append(Part(f"part-{i:05d}", tuple(group)))
    return parts


def encode_part(tokenizer: Tokenizer, encoding: Encoding, part: Part) -> list[Path]:
    """Writes the .bin and .idx files of a part, unless an earlier preparation wrote the same.

    Args:
        tokenizer: The tokenizer that `encoding` names, opened.
        encoding: Settings that decide how a part is encoded.
        part: A part from `cut`.

    Returns:
        Their path prefixes, in the order of SPLITS.

    Raises:
        ValueError: A document is bad, or a file is damaged or was changed.
    """
    # Everything that decides the bytes: input, settings, tokenizer and its library.
    causes = (
        part.spans,
        encoding.text_field,
        encoding.leave_out_bad,
        encoding.validation_fraction,
        tokenizer.sha256,
        tokenizer.library,
        importlib.metadata.version(tokenizer.library),
    )
    digest = hashlib.sha256(repr(causes).encode()).hexdigest()
    stem = f"{part.name}-{digest[:32]}"
    prefixes = [encoding.folder / f"{stem}-{split}" for split in SPLITS]
    indexes = [prefix.with_suffix(".idx") for prefix in prefixes]
    if all(index.exists() for index in indexes):
        return prefixes

    def encode(text: str) -> tuple[list[int], bool]:
        ids = tokenizer.encode(text, add_eos=True)
        return ids, in_validation(text, encoding.validation_fraction)

    # If an error occurs, the writers remove their files.
    with contextlib.ExitStack() as stack:
        writers = []
        for prefix, index in zip(prefixes, indexes, strict=True):
            index.unlink(missing_ok=True)  # a killed preparation may have written one of the two
            writers.append(stack.enter_context(IndexedDatasetWriter(prefix, tokenizer.vocab_size)))
        train, validation = writers
        for ids, is_validation in documents_of(
            part.spans, encoding.text_field, encode, encoding.leave_out_bad
        ):
            if is_validation:
                validation.add_document(ids)
            else:
                train.add_document(ids)
    return prefixes


def encode_parts(
    parts: list[Part], encoding: Encoding, workers: int
) -> Generator[list[Path], None, None]:
    """Encodes all parts. Yields the path prefixes of each in order (see `encode_part`).

    Args:
        parts: Parts from `cut`.
        encoding: Settings for all of them.
        workers: Number of processes. 1 encodes in this process.

    Raises:
        ValueError: A document is bad, a file is damaged or was changed, or a worker was killed.
    """
    if workers == 1:
        tokenizer = load_tokenizer(encoding.tokenizer)
        for part in parts:
            yield encode_part(tokenizer, encoding, part)
        return
    # Not fork, which would copy locks that other threads of this process hold.
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(
        workers,
        context,
        initializer=_begin_worker,
        initargs=(encoding,),
    )
    # `map` keeps the order of the parts, whichever is ready first.
    try:
        yield from pool.map(_work, parts)
    except BrokenProcessPool as e:
        raise ValueError(
            "a worker was killed, most likely for lack of memory. The same command continues; --workers 1 takes the least "
            "memory."
        ) from e
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker(encoding: Encoding) -> None:
    """Runs once in each worker process, before `_work`.

    Args:
        encoding: Settings for all parts.
    """
    global _encoding, _tokenizer
    # Ctrl-C ends a worker at once and without a message; the parent reports it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    _encoding = encoding
    _tokenizer = load_tokenizer(encoding.tokenizer)


def _end_with_the_parent() -> None:
    """Ends this worker when its parent process has ended. Runs in a thread."""
    # A parent that is killed does not close its pool: the workers would wait for ever.
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _work(part: Part) -> list[Path]:
    return encode_part(_tokenizer, _encoding, part)


def merge_parts(
    parts: list[list[Path]], folder: Path, vocab_size: int, shard_tokens: int
) -> dict[str, list[dict]]:
    """Joins parts into the shards `train-00000`, `train-00001`, ... of each split.

    Args:
        parts: Path prefixes of each part, from `encode_part`.
        folder: Where to write the shards.
        vocab_size: Vocabulary size of the tokenizer.
        shard_tokens: Size of a shard.

    Returns:
        A manifest's records of the shards by split, without empty splits.
    """
    splits = {}
    for i, split in enumerate(SPLITS):
        writer = ShardWriter(folder / split, vocab_size, shard_tokens)
        for prefixes in parts:
            encoded = IndexedDataset(prefixes[i])
            # A part may be larger than the memory, so copy some documents at a time.
            start = 0
            for first in range(0, len(encoded), MERGED_AT_ONCE):
                lengths = encoded.lengths[first : first + MERGED_AT_ONCE]
                stop = start + int(lengths.sum(dtype=np.int64))
                writer.add_documents(encoded.tokens(start, stop), lengths)
                start = stop
        shards = writer.close()
        if shards:
            splits[split] = shards
    return splits
