"""Reads one split of a prepared corpus as one stream of tokens.

    TokenCorpus("data/stdlib", "train").read(0, 4097)

A prepared corpus is a folder with the shards `train-00000.bin/.idx`, ... and
`validation-00000.bin/.idx`, ..., the tokenizer that made them, and `manifest.json`:

    {"format": "interdomain-corpus", "format_version": 1,
     "tokenizer": {"file": "tokenizer.model", "sha256": ...}, "vocab_size": 2048, "eos_id": 2,
     "source": {...},             options of prepare-data, and names and sizes of its inputs
     "answers": {"example_tokens": 256, "per_example": 32},      if only answers count in the loss
     "splits": {"train": [{"name": "train-00000", "documents": ..., "tokens": ...,
                           "bin_bytes": ..., "bin_sha256": ...,
                           "idx_bytes": ..., "idx_sha256": ...}, ...],
                "validation": [...]}}

A corpus with answers consists of examples of one length, with the same number of answer tokens in
each. Its splits `train-answers` and `validation-answers` have one number for every token of `train`
and `validation`: 1 for an answer, else 0.

Bare shards of Megatron, NeMo or datatrove are read as well, by prefix or glob. They do not record a
tokenizer, so the caller gives the vocabulary size.
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
MAX_NAMED = 20  # files that `sources` names one by one
FORMAT = "interdomain-corpus"
FORMAT_VERSION = 1


def read_manifest(folder: Path | str) -> dict:
    """Returns the manifest of a prepared corpus.

    Raises:
        FileNotFoundError: `folder` is not a prepared corpus.
        ValueError: The manifest is damaged or of another version.
    """
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} is not a prepared corpus: it has no {MANIFEST}. Make one with "
            f"`interdomain prepare-data --output {folder}`, or give the prefixes of .bin/.idx shards instead of a folder."
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{path} is damaged ({e}); prepare the corpus again.") from e
    version = (manifest["format"], manifest["format_version"])
    if version != (FORMAT, FORMAT_VERSION):
        raise ValueError(
            f"{path} has format and version {version}, this version reads {(FORMAT, FORMAT_VERSION)}; prepare the corpus again."
        )
    return manifest


def sources(source: dict) -> dict[str, list[str]]:
    """Describes what a corpus was made of, for a run's record.

    Args:
        source: The manifest's field "source".

    Returns:
        `sources`: a phrase for each source; `datasets`: the names of those on the Hugging Face hub.
    """
    if "synthetic" in source:
        options = [f"{name} {value}" for name, value in source.items() if name != "synthetic"]
        phrase = f"synthetic {source['synthetic']} ({', '.join(options)})"
        return {"sources": [phrase], "datasets": []}
    # Inputs are datasets of the hub, the standard library, and files.
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
    # Many files are counted, few are named.
    if len(files) > MAX_NAMED:
        first = files[0]["file"]
        last = files[-1]["file"]
        megabytes = sum(item["bytes"] for item in files) / 1e6
        phrases.append(f"{len(files):,} files, {first} to {last} ({megabytes:,.1f} MB)")
    else:
        for item in files:
            megabytes = item["bytes"] / 1e6
            phrases.append(f"{item['file']} ({megabytes:,.1f} MB)")
    if phrases and source.get("max_bytes"):
        phrases.append(f"of these the first {source['max_bytes']:,} bytes")
    return {"sources": phrases, "datasets": list(dict.fromkeys(datasets))}


def _prefixes(source: str) -> list[str]:
    """Returns the path prefixes of bare shards, sorted.

    Args:
        source: A prefix or a glob, with or without the ending `.bin` or `.idx`.
    """
    stem = source.removesuffix(".bin").removesuffix(".idx")
    if not glob.has_magic(stem):
        return [stem]
    # Either file of a pair names the shard, so that a shard whose .bin is missing is reported and
    # not left out.
    files = [
        *glob.glob(f"{stem}.bin", recursive=True),
        *glob.glob(f"{stem}.idx", recursive=True),
    ]
    if not files:
        raise FileNotFoundError(
            f"No shard matches {source}; expected files like {stem}.bin and {stem}.idx."
        )
    return sorted({file[:-4] for file in files})


class Answers(NamedTuple):
    """The answer tokens of a split.

    Attributes:
        marks: A corpus with one number for every token of the split: 1 for an answer, else 0.
        example_tokens: Tokens of an example.
        per_example: Answer tokens of an example.
    """

    marks: "TokenCorpus"
    example_tokens: int
    per_example: int


class TokenCorpus:
    """The documents of one split, in the order of its shards, as one virtual stream of token ids.

    Args:
        source: Folder of a prepared corpus, or a prefix or a glob of bare .bin/.idx shards.
        split: Name of a split in the manifest. For bare shards, any name; it enters the fingerprint
            of their samples.
        vocab_size: Bound of the ids of bare shards. A prepared corpus has its own.
        verify: Read everything and compare checksums. Sizes are always compared.

    Attributes:
        shards: The shards, in order.
        num_tokens: Tokens of the split.
        num_documents: Documents of the split.
        fingerprint: sha256 of the manifest; of bare shards, sha256 of their names, sizes and the
            beginnings of their indexes.
        answers: The answer tokens. None if all tokens count.
        source: The manifest's field "source". Empty for bare shards.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is truncated or was replaced.
    """

    def __init__(
        self,
        source: str | os.PathLike,
        split: str = "train",
        vocab_size: int | None = None,
        verify: bool = False,
    ) -> None:
        """Opens the shards of a split, and checks their sizes."""
        self.split = split
        self.vocab_size = vocab_size
        self.source = {}
        self.answers: Answers | None = None
        # A folder is a prepared corpus, anything else names bare shards.
        if os.path.isdir(source):
            self.shards = self._open_folder(Path(source), verify)
        else:
            self.shards = [IndexedDataset(prefix) for prefix in _prefixes(os.fspath(source))]
            self.fingerprint = self._bare_fingerprint()
        if verify:
            for shard in self.shards:
                shard.verify()
        # The first token and the first document of each shard in the stream, and the totals at the
        # end.
        self._starts = [0, *itertools.accumulate(shard.num_tokens for shard in self.shards)]
        self._first_documents = [0, *itertools.accumulate(map(len, self.shards))]
        self.num_tokens = self._starts[-1]
        self.num_documents = self._first_documents[-1]

    def _open_folder(self, folder: Path, verify: bool) -> list[IndexedDataset]:
        """Opens the shards of a prepared corpus, and sets the attributes that its manifest has."""
        manifest = read_manifest(folder)
        self.fingerprint = file_sha256(folder / MANIFEST)
        self.vocab_size = manifest["vocab_size"]
        self.source = manifest.get("source", {})
        if self.split not in manifest["splits"]:
            names = ", ".join(manifest["splits"])
            raise ValueError(
                f"{folder} has no split {self.split!r}, it has {names}. Name one of these, or prepare the corpus with a larger "
                "--validation-fraction."
            )
        if "answers" in manifest and not self.split.endswith(ANSWERS):
            marks = TokenCorpus(folder, self.split + ANSWERS, verify=verify)
            self.answers = Answers(marks, **manifest["answers"])

        # A run must not train on files that are not those of the manifest. The tokenizer is small
        # enough to be read each time.
        tokenizer = manifest["tokenizer"]
        if file_sha256(folder / tokenizer["file"]) != tokenizer["sha256"]:
            raise self._replaced(folder / tokenizer["file"])
        shards = []
        for record in manifest["splits"][self.split]:
            shard = IndexedDataset(folder / record["name"])
            shards.append(shard)
            for path, kind in ((shard.bin_path, "bin"), (shard.idx_path, "idx")):
                if path.stat().st_size != record[f"{kind}_bytes"]:
                    raise self._replaced(path)
                if verify and file_sha256(path) != record[f"{kind}_sha256"]:
                    raise self._replaced(path)
        return shards

    @staticmethod
    def _replaced(path: Path) -> ValueError:
        """Returns the error for a file that differs from the manifest."""
        return ValueError(
            f"{path} is damaged or was replaced: it differs from the manifest. Copy the folder again, or prepare the corpus "
            "again."
        )

    def _bare_fingerprint(self) -> str:
        """Returns the fingerprint of shards without a manifest.

        Reading every token would take too long. Two texts of the same sizes nearly always differ
        in the lengths of their documents, which the index begins with.
        """
        digest = hashlib.sha256()
        for shard in self.shards:
            description = f"{shard.prefix.name}:{shard.bin_bytes}:{shard.idx_bytes}:"
            digest.update(description.encode())
            with open(shard.idx_path, "rb") as f:
                digest.update(f.read(65536))  # about 16,000 lengths
        return digest.hexdigest()

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yields (number, start, stop within it) of every shard that tokens [start, stop) touch."""
        assert 0 <= start <= stop <= self.num_tokens
        number = bisect_right(self._starts, start) - 1
        while start < stop:
            first = self._starts[number]
            end = min(stop, self._starts[number + 1])
            if start < end:  # not an empty shard
                yield number, start - first, end - first
            start = end
            number += 1

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns a copy of the tokens [start, stop) of the stream, int64.

        Raises:
            ValueError: An id is outside the vocabulary.
        """
        # Copy the pieces of all shards that [start, stop) touches.
        out = np.empty(stop - start, np.int64)
        filled = 0
        for number, first, last in self._pieces(start, stop):
            size = last - first
            out[filled : filled + size] = self.shards[number].tokens(first, last)
            filled += size
        # An id without a row in the embedding would crash a GPU without a message.
        too_large = self.vocab_size is not None and (out >= self.vocab_size).any()
        if too_large or (out < 0).any():
            raise ValueError(
                f"Tokens {start} to {stop} of split {self.split!r} have ids from {out.min()} to {out.max()}, the vocabulary "
                f"has {self.vocab_size}: a damaged shard, or one made with another tokenizer. Prepare it again, or give the "
                "vocabulary size of the tokenizer that made it."
            )
        return out

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Returns the positions in [start, stop) at which a document begins: int64, ascending."""
        starts = [np.empty(0, np.int64)]
        for number, first, last in self._pieces(start, stop):
            in_shard = self.shards[number].document_starts(first, last)
            starts.append(in_shard + self._starts[number])
        return np.concatenate(starts)

    def documents(self, start: int, stop: int) -> np.ndarray:
        """Returns the number of the document of each token [start, stop), int64."""
        numbers = []
        for number, first, last in self._pieces(start, stop):
            in_shard = self.shards[number].documents(first, last)
            numbers.append(in_shard + self._first_documents[number])
        return np.concatenate(numbers)
