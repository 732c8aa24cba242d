"""Documents to shards of token ids in several processes, in an order and in files that do not depend on how many.

The input is cut into parts of a few megabytes. Each worker encodes a part into shards of its own, which `merge_parts`
joins, in the input's order, into the shards of the corpus. A part that is complete has a record, `part-00012.json`: a
run that was killed goes on with those that have none. Until the end parts take as much room as the corpus.
"""

import concurrent.futures
import contextlib
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from interdomain.data.indexed import IndexedDataset, IndexedDatasetWriter
from interdomain.data.readers import SourceFile, Span, in_validation, read_span, spans_of
from interdomain.data.tokenizer import load_tokenizer
from interdomain.data.tokenizer_base import Tokenizer
from interdomain.folders import write_whole

SPLITS = ("train", "validation")
SMALLEST_PART, LARGEST_PART = 2_000_000, 64_000_000  # bytes on the disk
DOCUMENTS_AT_ONCE = 64


@dataclass(frozen=True)
class Encoding:
    """How a part becomes ids: a function of nothing else."""

    folder: Path  # of the parts
    tokenizer: Path
    text_field: str
    validation_fraction: float
    max_bytes: int | None  # of source, of all parts together


@dataclass(frozen=True)
class Part:
    name: str
    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return sum(span.size for span in self.spans)


def cut(files: list[SourceFile], text_field: str) -> list[Part]:
    """The input in parts: a function of the files alone. Raises ValueError for a file that cannot be read."""
    spans = [span for file in files for span in spans_of(file, text_field)]
    limit = min(LARGEST_PART, max(SMALLEST_PART, sum(span.size for span in spans) // 200))
    groups, size = [], limit
    for span in spans:
        if size + span.size > limit:
            groups.append([])
            size = 0
        groups[-1].append(span)
        size += span.size
    return [Part(f"part-{i:05d}", tuple(group)) for i, group in enumerate(groups)]


def encode_part(tokenizer: Tokenizer, encoding: Encoding, part: Part, max_bytes: int | None) -> dict:
    """Writes the part's shards, one for each split, unless an earlier run did.

    Returns: its record: source_bytes, which are more than max_bytes if the part was cut before the document that would have
        exceeded them, and empty, the number of documents without text, which are left out.
    Raises: ValueError for what is wrong with the text, naming file and line; OSError.
    """
    record = encoding.folder / f"{part.name}.json"
    if record.exists():
        return json.loads(record.read_text())
    for split, ending in itertools.product(SPLITS, (".bin", ".idx")):
        (encoding.folder / f"{part.name}-{split}{ending}").unlink(missing_ok=True)  # of a run that was killed
    source_bytes = empty = 0
    documents = (document for span in part.spans for document in read_span(span, encoding.text_field))
    with contextlib.ExitStack() as stack:
        prefixes = [encoding.folder / f"{part.name}-{split}" for split in SPLITS]
        writers = [stack.enter_context(IndexedDatasetWriter(prefix, tokenizer.vocab_size)) for prefix in prefixes]
        while batch := list(itertools.islice(documents, DOCUMENTS_AT_ONCE)):
            texts = []
            for document in batch:
                source_bytes += document.source_bytes
                if max_bytes is not None and source_bytes > max_bytes:
                    documents = iter(())
                    break
                empty += not document.text
                texts += [document.text] if document.text else []
            rows = tokenizer.encode_batch(texts, add_eos=True, num_threads=1)
            splits = [in_validation(text, encoding.validation_fraction) for text in texts]
            for split, writer in enumerate(writers):
                mine = list(itertools.compress(rows, (split == own for own in splits)))
                writer.add_documents(np.array(list(itertools.chain(*mine)), np.int32), [len(ids) for ids in mine])
    write_whole(record, json.dumps({"source_bytes": source_bytes, "empty": empty}).encode())
    return {"source_bytes": source_bytes, "empty": empty}


def encode_parts(
    parts: list[Part], encoding: Encoding, workers: int, report: Callable[[Part], object] = lambda part: None
) -> tuple[list[str], int]:
    """Encodes all parts, in this process (workers = 1) or by others, as far as `encoding.max_bytes`.

    Args:
        report: called with every part that is complete, in order.
    Returns: the names of the parts that the corpus is made of; how many documents had no text.
    Raises: as encode_part; OSError if a worker dies.
    """
    names, empty, left = [], 0, encoding.max_bytes
    with contextlib.closing(_encoded(parts, encoding, workers)) as records:
        for part, record in zip(parts, records, strict=True):
            full = left is not None and record["source_bytes"] > left
            if full and left != encoding.max_bytes:  # what the part alone does not exceed, all together do
                part = Part(f"{part.name}-cut", part.spans)
                record = encode_part(load_tokenizer(encoding.tokenizer), encoding, part, left)
            names.append(part.name)
            empty += record["empty"]
            report(part)
            if full:
                break
            left = None if left is None else left - record["source_bytes"]
    return names, empty


def _encoded(parts: list[Part], encoding: Encoding, workers: int) -> Generator[dict]:
    """The parts' records in order."""
    if workers == 1:
        tokenizer = load_tokenizer(encoding.tokenizer)
        for part in parts:
            yield encode_part(tokenizer, encoding, part, encoding.max_bytes)
        return
    # spawn: a fork would copy locks that other threads of this process hold.
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_begin_worker, initargs=(encoding,)
    )
    try:
        yield from pool.map(_work, parts)
    except BrokenProcessPool as e:
        raise OSError(
            "A worker process died, most likely because the machine ran out of memory. Give fewer --workers; the same "
            "command goes on with what is not encoded yet."
        ) from e
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker(encoding: Encoding) -> None:
    global _encoding, _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: end at once and say nothing, the parent does
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    _encoding, _tokenizer = encoding, load_tokenizer(encoding.tokenizer)


def _end_with_the_parent() -> None:
    # A parent that is killed closes nothing: its workers would wait for ever.
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _work(part: Part) -> dict:
    return encode_part(_tokenizer, _encoding, part, _encoding.max_bytes)


def merge_parts(
    source: Path, names: list[str], folder: Path, vocab_size: int, shard_tokens: int
) -> dict[str, list[dict]]:
    """The shards `train-00000`, `train-00001`, ... of every split in `folder`, from the parts in `source`.

    Returns: {split: [record of a ShardInfo, ...]}, splits without a document left out.
    """
    splits = {}
    for split in SPLITS:
        parts = (IndexedDataset(source / f"{name}-{split}") for name in names)
        if shards := _write_shards(parts, folder / split, vocab_size, shard_tokens):
            splits[split] = shards
    return splits


def _write_shards(parts: Iterable[IndexedDataset], prefix: Path, vocab_size: int, shard_tokens: int) -> list[dict]:
    shards, writer = [], None
    for part in parts:
        at = 0
        for first in range(0, len(part), 4096):
            lengths = part.lengths[first : first + 4096]
            while len(lengths):
                writer = writer or IndexedDatasetWriter(f"{prefix}-{len(shards):05d}", vocab_size)
                ends = np.cumsum(lengths, dtype=np.int64)
                # A shard is full with the document that brings it to shard_tokens.
                n = min(int(np.searchsorted(ends, shard_tokens - writer.num_tokens)) + 1, len(lengths))
                writer.add_documents(part.tokens(at, at + int(ends[n - 1])), lengths[:n])
                at, lengths = at + int(ends[n - 1]), lengths[n:]
                if writer.num_tokens >= shard_tokens:
                    shards.append(asdict(writer.finalize()))
                    writer = None
    if writer is not None:
        shards.append(asdict(writer.finalize()))
    return shards
