"""Documents to shards of token ids in several processes, in an order and in files that do not depend on how many.

The input is cut into parts of a few megabytes. Each worker encodes a part into two shards of its own, one for each split.
`merge_parts` joins these, in the input's order, into the shards of the corpus. A shard's index appears last, and its name
holds a digest of all that determines it, so a run that was killed, or corrected, goes on with the parts that are still right.
Until the end parts take as much room as the corpus.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import importlib.metadata
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Generator, Iterable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from interdomain.data.indexed import IndexedDataset, IndexedDatasetWriter, ShardWriter
from interdomain.data.readers import (
    BadDocument,
    Span,
    content_digest,
    documents_of,
    in_validation,
    skip_bad,
)
from interdomain.data.tokenizer import Tokenizer, load_tokenizer
from interdomain.folders import write_whole

SPLITS = ("train", "validation")
# Bytes on the disk.
SMALLEST_PART = 2_000_000
LARGEST_PART = 64_000_000
DOCUMENTS_AT_ONCE = 64


@dataclass(frozen=True)
class Encoding:
    """Settings that decide how a part becomes ids. skip_bad: how many bad documents the part may have."""

    folder: Path  # of the parts
    tokenizer: Path
    text_field: str
    validation_fraction: float
    skip_bad: int


@dataclass(frozen=True)
class Part:
    name: str
    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return sum(span.size for span in self.spans)


class EncodedPart(NamedTuple):
    """The shards of a part, and what was left out of them."""

    part: Part
    prefixes: list[Path]  # path prefixes of the shards, in the order of SPLITS
    skipped: list[BadDocument]
    kept: bool  # an earlier run made them


def cut(spans: list[Span]) -> list[Part]:
    """The input in parts: a function of the spans alone."""
    limit = min(LARGEST_PART, max(SMALLEST_PART, sum(span.size for span in spans) // 200))
    groups = []
    size = 0
    for span in spans:
        if not groups or size + span.size > limit:
            groups.append([])
            size = 0
        groups[-1].append(span)
        size += span.size
    return [Part(f"part-{i:05d}", tuple(group)) for i, group in enumerate(groups)]


def digest_of(settings: list, spans: Iterable[Span]) -> str:
    """The first 128 bits of a SHA-256 of settings and of the contents of spans, in hexadecimal."""
    digest = hashlib.sha256(json.dumps(settings).encode())
    for span in spans:
        digest.update(content_digest(span).encode())
    return digest.hexdigest()[:32]


def encode_part(tokenizer: Tokenizer, encoding: Encoding, part: Part) -> EncodedPart:
    """Writes the part's shards, unless an earlier run made the same.

    Raises: ValueError for a bad document beyond encoding.skip_bad, naming file and row, and for a damaged file; OSError.
    """
    # All that the shards are a function of: settings, tokenizer, its library, and the input's bytes.
    library = importlib.metadata.version(tokenizer.library)
    settings = [
        encoding.text_field,
        encoding.validation_fraction,
        tokenizer.sha256,
        tokenizer.library,
        library,
    ]
    stem = f"{part.name}-{digest_of(settings, part.spans)}"
    prefixes = [encoding.folder / f"{stem}-{split}" for split in SPLITS]
    skipped_file = encoding.folder / f"{stem}-skipped.json"
    if all(prefix.with_suffix(".idx").exists() for prefix in prefixes):
        before = json.loads(skipped_file.read_text()) if skipped_file.exists() else []
        return EncodedPart(part, prefixes, [BadDocument(*bad) for bad in before], kept=True)
    skipped: list[BadDocument] = []
    skip = functools.partial(skip_bad, skipped, encoding.skip_bad)

    def encode(text: str) -> tuple[list[int], bool]:
        return tokenizer.encode(text, add_eos=True), in_validation(
            text, encoding.validation_fraction
        )

    documents = documents_of(part.spans, encoding.text_field, skip, encode)
    with contextlib.ExitStack() as stack:
        skipped_file.unlink(missing_ok=True)
        writers = []
        for prefix in prefixes:
            prefix.with_suffix(".idx").unlink(missing_ok=True)  # of a run that was killed
            writers.append(stack.enter_context(IndexedDatasetWriter(prefix, tokenizer.vocab_size)))
        while batch := list(itertools.islice(documents, DOCUMENTS_AT_ONCE)):
            for split, writer in enumerate(writers):
                tokens = []
                lengths = []
                for ids, validation in batch:
                    if split == validation:
                        tokens += ids
                        lengths.append(len(ids))
                writer.add_documents(np.array(tokens, np.int32), lengths)
        if skipped:
            write_whole(skipped_file, json.dumps(skipped).encode())
    return EncodedPart(part, prefixes, skipped, kept=False)


def encode_parts(
    parts: list[Part], encoding: Encoding, workers: int
) -> Generator[EncodedPart, None, None]:
    """Encodes all parts, in this process (workers = 1) or by others. Yields each when it is complete, in order.

    Raises: as encode_part; ValueError if a worker dies (of too little memory).
    """
    if workers == 1:
        tokenizer = load_tokenizer(encoding.tokenizer)
        for part in parts:
            yield encode_part(tokenizer, encoding, part)
        return
    # spawn: a fork would copy locks that other threads of this process hold.
    pool = concurrent.futures.ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("spawn"),
        initializer=_begin_worker,
        initargs=(encoding,),
    )
    try:
        yield from pool.map(_work, parts)
    except BrokenProcessPool as e:
        raise ValueError(
            "a worker was ended from outside, most likely for lack of memory. The same command continues; --workers 1 takes "
            "the least memory."
        ) from e
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker(encoding: Encoding) -> None:
    global _encoding, _tokenizer
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # Ctrl-C: end at once and say nothing, the parent does
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    _encoding = encoding
    _tokenizer = load_tokenizer(encoding.tokenizer)


def _end_with_the_parent() -> None:
    # A parent that is killed closes nothing: its workers would wait for ever.
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _work(part: Part) -> EncodedPart:
    return encode_part(_tokenizer, _encoding, part)


def merge_parts(parts: list[EncodedPart], folder: Path, vocab_size: int, shard_tokens: int) -> dict:
    """The shards `train-00000`, `train-00001`, ... of every split in `folder`, from the parts.

    Returns: {split: [a manifest's record of each shard]}, splits without a document left out.
    """
    splits = {}
    for i, split in enumerate(SPLITS):
        shards = ShardWriter(folder / split, vocab_size, shard_tokens)
        for part in parts:
            encoded = IndexedDataset(part.prefixes[i])
            at = 0
            for first in range(0, len(encoded), 4096):
                lengths = encoded.lengths[first : first + 4096]
                stop = at + int(lengths.sum(dtype=np.int64))
                shards.add_documents(encoded.tokens(at, stop), lengths)
                at = stop
        splits[split] = shards.close()
    return {split: shards for split, shards in splits.items() if shards}
