"""A split of a prepared corpus as one stream of tokens: `TokenCorpus("data/stdlib", "train").read(0, 4097)`.

A prepared corpus is a folder: shards `train-00000.bin/.idx`, ..., `validation-00000.bin/.idx`, ..., the tokenizer that
made them, and `manifest.json`:

    {"format": "interdomain-corpus", "format_version": 1,
     "tokenizer": {"file": "tokenizer.model", "sha256": ...}, "vocab_size": 2048, "eos_id": 2,
     "source": {...},             what was asked for: options, and the inputs' names and sizes
     "skipped": [{"file": ..., "place": ..., "reason": ...}],    only if bad documents were skipped
     "answers": {"example_tokens": 256, "per_example": 32},      only of a corpus whose loss is that of its answers
     "splits": {"train": [{"name": "train-00000", "documents": ..., "tokens": ...,
                           "bin_bytes": ..., "bin_sha256": ..., "idx_bytes": ..., "idx_sha256": ...}, ...],
                "validation": [...]}}

A corpus with answers consists of examples of one length, with the same number of answer tokens in each. Its splits
`train-answers` and `validation-answers` have one number for every token of `train` and `validation`: 1 for an answer, else 0.

Bare shards of Megatron, NeMo or datatrove are read as well, by prefix or glob; they say nothing of the tokenizer, so the
caller gives the vocabulary size.
"""

import glob
import hashlib
import itertools
import json
import os
import re
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from interdomain.data.indexed import IndexedDataset, file_sha256

MANIFEST = "manifest.json"
ANSWERS = "-answers"  # after a split's name: the split of its marks
NAMED = 20  # files of a corpus that `sources` names
FORMAT = "interdomain-corpus"
FORMAT_VERSION = 1


def read_manifest(folder: Path | str) -> dict:
    """The checked manifest of a prepared corpus, as a dict: tokenizer, vocabulary size, splits with their shards.

    Raises:
        FileNotFoundError: `folder` is no prepared corpus.
        ValueError: its manifest is damaged or of another version.
    """
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} is not a prepared corpus: it has no {MANIFEST}. Make one with "
            f"`interdomain prepare-data --output {folder}`, or give the prefixes of .bin/.idx shards instead of a folder."
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = (manifest["format"], manifest["format_version"])
        if version != (FORMAT, FORMAT_VERSION):
            raise ValueError(
                f"format and version are {version}, this version reads {(FORMAT, FORMAT_VERSION)}"
            )
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(
            f"{path} is damaged or of another version ({e}); prepare the corpus again."
        ) from e
    return manifest


def sources(source: dict) -> dict[str, list[str]]:
    """A manifest's field "source" for a run's record.

    Returns: `sources`, each as a phrase, and `datasets`, the names of those of the Hugging Face hub.
    """
    if "synthetic" in source:
        options = [f"{name} {value}" for name, value in source.items() if name != "synthetic"]
        return {
            "sources": [f"synthetic {source['synthetic']} ({', '.join(options)})"],
            "datasets": [],
        }
    phrases = []
    datasets = []
    files = []
    for item in source.get("inputs", []):
        if "dataset" in item:
            phrases.append(f"{item['dataset']} (Hugging Face hub)")
            datasets.append(re.split("[@:]", item["dataset"])[0])
        elif "stdlib" in item:
            phrases.append(f"Python {item['stdlib']}'s standard library")
        else:
            files.append(item)
    if len(files) > NAMED:
        size = sum(item["bytes"] for item in files)
        phrases.append(
            f"{len(files):,} files, {files[0]['file']} to {files[-1]['file']} ({size / 1e6:,.1f} MB)"
        )
    else:
        phrases += [f"{item['file']} ({item['bytes'] / 1e6:,.1f} MB)" for item in files]
    if phrases and source.get("max_bytes"):
        phrases.append(f"of these the first {source['max_bytes']:,} bytes")
    return {"sources": phrases, "datasets": list(dict.fromkeys(datasets))}


def _prefixes(source: str) -> list[str]:
    """The prefixes of bare shards, sorted; `.bin` and `.idx` endings are dropped."""
    stem = source.removesuffix(".bin").removesuffix(".idx")
    if not glob.has_magic(stem):
        return [stem]
    # Either file of a pair names the shard, so that one whose .bin is missing is reported and not skipped.
    files = glob.glob(f"{stem}.bin", recursive=True) + glob.glob(f"{stem}.idx", recursive=True)
    if not files:
        raise FileNotFoundError(
            f"No shard matches {source}; expected files like {stem}.bin and {stem}.idx."
        )
    return sorted({file[:-4] for file in files})


class Answers(NamedTuple):
    """Marks of the tokens of a split that are answers: `marks` is 1 there. Every example_tokens tokens hold per_example
    of them."""

    marks: "TokenCorpus"
    example_tokens: int
    per_example: int


class TokenCorpus:
    """The documents of one split, in shard order, as one virtual stream of token ids.

    Args:
        source: folder of a prepared corpus, or a prefix or a glob of bare .bin/.idx shards.
        split: name of a split in the manifest. Bare shards are whatever split the caller takes them for.
        vocab_size: of bare shards, the bound that ids are checked against while reading. A manifest has its own.
        verify: read everything and compare checksums. Sizes are always compared.

    Attributes:
        num_tokens, num_documents: of the split.
        fingerprint: sha256 of the manifest; of bare shards, of their names, sizes and index heads.
        answers: which tokens are answers; None if the corpus records none.
        source: what the corpus was made of, as its manifest has it; empty for bare shards.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is truncated or was exchanged.
    """

    def __init__(
        self,
        source: str | os.PathLike,
        split: str = "train",
        vocab_size: int | None = None,
        verify: bool = False,
    ) -> None:
        self.split = split
        self.vocab_size = vocab_size
        self.source = {}
        self.answers: Answers | None = None
        if os.path.isdir(source):
            self.shards = self._open_folder(Path(source), verify)
        else:
            self.shards = [IndexedDataset(prefix) for prefix in _prefixes(os.fspath(source))]
            self.fingerprint = self._bare_fingerprint()
        if verify:
            for shard in self.shards:
                shard.verify()
        self._starts = [0, *itertools.accumulate(shard.num_tokens for shard in self.shards)]
        self.num_tokens = self._starts[-1]
        self._first_documents = [0, *itertools.accumulate(map(len, self.shards))]
        self.num_documents = self._first_documents[-1]

    def _open_folder(self, folder: Path, verify: bool) -> list[IndexedDataset]:
        manifest = read_manifest(folder)
        self.fingerprint = file_sha256(folder / MANIFEST)
        self.vocab_size = manifest["vocab_size"]
        self.source = manifest.get("source", {})
        if "answers" in manifest and not self.split.endswith(ANSWERS):
            marks = TokenCorpus(folder, self.split + ANSWERS, verify=verify)
            self.answers = Answers(marks, **manifest["answers"])
        if not manifest["splits"].get(self.split):
            raise ValueError(
                f"{folder} has no split {self.split!r}, it has {', '.join(manifest['splits'])}. Name one of these, or "
                "prepare the corpus with a larger --validation-fraction."
            )
        records = manifest["splits"][self.split]
        shards = [IndexedDataset(folder / record["name"]) for record in records]
        tokenizer = manifest["tokenizer"]
        files = [(folder / tokenizer["file"], None, tokenizer["sha256"], True)]
        for shard, record in zip(shards, records, strict=True):
            files.append((shard.bin_path, record["bin_bytes"], record["bin_sha256"], verify))
            files.append((shard.idx_path, record["idx_bytes"], record["idx_sha256"], verify))
        for path, size, sha256, read in files:
            same_size = size is None or path.stat().st_size == size
            if not same_size or (read and file_sha256(path) != sha256):
                raise ValueError(
                    f"{path} is damaged or was replaced: it differs from the manifest of {folder}. Copy the folder "
                    "again, or prepare the corpus again."
                )
        return shards

    def _bare_fingerprint(self) -> str:
        digest = hashlib.sha256()
        for shard in self.shards:
            with open(shard.idx_path, "rb") as f:
                head = f.read(65536)
            digest.update(
                f"{shard.prefix.name}:{shard.bin_bytes}:{shard.idx_bytes}:".encode() + head
            )
        return digest.hexdigest()

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(number of the shard, start, stop within it) for every shard that [start, stop) touches."""
        assert 0 <= start <= stop <= self.num_tokens
        number = bisect_right(self._starts, start) - 1
        while start < stop:
            first = self._starts[number]
            end = min(stop, self._starts[number + 1])
            if start < end:
                yield number, start - first, end - first
            start = end
            number += 1

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream, int64, a copy. Raises ValueError for an id outside the vocabulary."""
        out = np.empty(stop - start, np.int64)
        filled = 0
        for number, first, last in self._parts(start, stop):
            shard = self.shards[number]
            out[filled : filled + last - first] = shard.tokens(first, last)
            filled += last - first
        if len(out) and (
            out.min() < 0 or (self.vocab_size is not None and out.max() >= self.vocab_size)
        ):
            raise ValueError(
                f"Token ids from {out.min()} to {out.max()} at tokens {start} to {stop} of split {self.split!r} "
                f"({shard.prefix}), the vocabulary has 0 to {(self.vocab_size or 0) - 1}: a damaged shard, or one made "
                "with another tokenizer. Prepare it again, or give the vocabulary size of the tokenizer that made it."
            )
        return out

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Positions p in [start, stop) of the stream at which a document begins: int64, ascending."""
        starts = [np.empty(0, np.int64)]
        for number, first, last in self._parts(start, stop):
            starts.append(self.shards[number].document_starts(first, last) + self._starts[number])
        return np.concatenate(starts)

    def documents(self, start: int, stop: int) -> np.ndarray:
        """The number in the split of the document of each token [start, stop) of the stream, int64."""
        numbers = []
        for shard, first, last in self._parts(start, stop):
            numbers.append(self.shards[shard].documents(first, last) + self._first_documents[shard])
        return np.concatenate(numbers)
