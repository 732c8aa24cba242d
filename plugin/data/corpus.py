"""A split of a prepared corpus as one stream of tokens: `TokenCorpus("data/stdlib", "train").read(0, 4097)`.

A prepared corpus is a folder: shards `train-00000.bin/.idx`, ..., `validation-00000.bin/.idx`, ..., the tokenizer that
made them, and `manifest.json`:

    {"format": "interdomain-corpus", "format_version": 1,
     "tokenizer": {"file": "tokenizer.model", "sha256": ...}, "vocab_size": 2048, "eos_id": 2,
     "source": {...},             what was asked for: options, and the inputs' names and sizes
     "left_out": {...},           files of the input's folders that were not read, by ending: number, bytes, some names
     "splits": {"train": [{"name": "train-00000", "documents": ..., "tokens": ...,
                           "bin_bytes": ..., "bin_sha256": ..., "idx_bytes": ..., "idx_sha256": ...}, ...],
                "validation": [...]},
     "sha256": ...}               of all the rest; corpora of older versions have none

Bare shards of Megatron, NeMo or datatrove are read as well, by prefix, list of prefixes or glob; they say nothing of
the tokenizer, so the caller gives the vocabulary size.
"""

import glob
import hashlib
import json
import os
from bisect import bisect_right
from pathlib import Path

import numpy as np

from interdomain.data.indexed import IndexedDataset, file_sha256

MANIFEST = "manifest.json"
FORMAT, FORMAT_VERSION = "interdomain-corpus", 1
SHARD_FIELDS = {"name": str, "documents": int, "tokens": int, "bin_bytes": int, "idx_bytes": int}
SHARD_FIELDS |= {"bin_sha256": str, "idx_sha256": str}


def sealed(manifest):
    """The manifest with a checksum of itself, which `read_manifest` compares."""
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    return rest | {"sha256": hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}


def read_manifest(folder):
    """The checked manifest of a prepared corpus.

    Raises: FileNotFoundError if `folder` is no prepared corpus, ValueError if its manifest is damaged or of another
    version.
    """
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} is not a prepared corpus: it has no {MANIFEST}. Make one with `python -m "
            f"interdomain.tools.prepare_data --output {folder}`, or give the prefixes of .bin/.idx shards instead of a "
            "folder."
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{path} is damaged, it is not JSON ({e}); prepare the corpus again.") from e
    found = (manifest.get("format"), manifest.get("format_version")) if isinstance(manifest, dict) else None
    if found != (FORMAT, FORMAT_VERSION):
        raise ValueError(
            f"{path} is not the manifest of a corpus that this version reads: format and version are {found}, expected "
            f"{(FORMAT, FORMAT_VERSION)}; prepare the corpus again."
        )
    try:
        names = [manifest["tokenizer"]["file"]]
        for shards in manifest["splits"].values():
            for shard in shards:
                names.append(shard["name"])
                whole = all(type(shard[field]) is kind for field, kind in SHARD_FIELDS.items())
                if not whole or set(shard) != set(SHARD_FIELDS):
                    raise ValueError(f"shard {shard['name']} has wrong fields")
        if "sha256" in manifest and sealed(manifest) != manifest:
            raise ValueError("it is not what its own checksum is of")
        if not all(type(manifest[field]) is int for field in ("vocab_size", "eos_id")):
            raise ValueError("vocab_size and eos_id must be integers")
        if type(manifest["tokenizer"]["sha256"]) is not str or not manifest["splits"]["train"]:
            raise ValueError("it must have the tokenizer's sha256 and shards to train on")
        # Plain names: a manifest from elsewhere must not point outside its folder.
        if any(Path(name).name != name for name in names):
            raise ValueError("a file name has a folder in it")
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        raise ValueError(f"{path} is damaged ({type(e).__name__}: {e}); prepare the corpus again.") from e
    return manifest


def _prefixes(source):
    """Shard prefixes in reading order: a list's own order, each glob sorted; `.bin` and `.idx` endings are dropped."""
    prefixes = []
    for item in [source] if isinstance(source, str | os.PathLike) else source:
        text = os.fspath(item)
        if glob.has_magic(text):
            stem = text.removesuffix(".bin").removesuffix(".idx")
            # Either file of a pair names the shard, so that one whose .bin is missing is reported and not skipped.
            found = {match[:-4] for ending in (".bin", ".idx") for match in glob.glob(stem + ending, recursive=True)}
            if not found:
                raise FileNotFoundError(f"No shard matches {text}; expected files like {stem}.bin and {stem}.idx.")
            prefixes += sorted(found)
        else:
            prefixes.append(text.removesuffix(".bin").removesuffix(".idx"))
    if not prefixes:
        raise ValueError("A corpus needs at least one shard, got an empty list; give prefixes of .bin/.idx pairs.")
    return prefixes


class TokenCorpus:
    """The documents of one split, in shard order, as one virtual stream of token ids.

    Args:
        source: folder of a prepared corpus, or a prefix, a glob, or a list of either, of bare .bin/.idx shards.
        split: name of a split in the manifest; bare shards are whatever split the caller takes them for.
        vocab_size: for bare shards, the bound that ids are checked against while reading; a manifest brings its own.
        verify: read everything and compare checksums. Sizes are always compared.
    Attributes: num_tokens, num_documents, vocab_size and eos_id (None if unknown), tokenizer_path (None if bare),
        fingerprint (sha256 of the manifest; of bare shards, of their names, sizes and index heads).
    Raises: FileNotFoundError, ValueError: a missing, truncated or exchanged file.
    """

    def __init__(self, source, split="train", *, vocab_size=None, verify=False):
        self.split, self.vocab_size, self.eos_id, self.tokenizer_path = split, vocab_size, None, None
        self.manifest = None
        if isinstance(source, str | os.PathLike) and os.path.isdir(source):
            self._open_folder(Path(source), verify)
        else:
            self.shards = [IndexedDataset(prefix) for prefix in _prefixes(source)]
            self.fingerprint = self._bare_fingerprint()
        if verify:
            for shard in self.shards:
                shard.verify()
        self._starts = [0]
        for shard in self.shards:
            self._starts.append(self._starts[-1] + shard.num_tokens)
        self.num_tokens = self._starts[-1]
        self.num_documents = sum(len(shard) for shard in self.shards)

    def _open_folder(self, folder, verify):
        self.manifest = manifest = read_manifest(folder)
        self.fingerprint = file_sha256(folder / MANIFEST)
        if self.vocab_size not in (None, manifest["vocab_size"]):
            raise ValueError(
                f"{folder} was made with a vocabulary of {manifest['vocab_size']}, not {self.vocab_size}; leave "
                "vocab_size out for a prepared corpus."
            )
        self.vocab_size, self.eos_id = manifest["vocab_size"], manifest["eos_id"]
        self.tokenizer_path = folder / manifest["tokenizer"]["file"]
        if not self.tokenizer_path.is_file():
            raise FileNotFoundError(
                f"{folder} lacks its tokenizer {self.tokenizer_path.name}; copy the whole folder again."
            )
        found = file_sha256(self.tokenizer_path)
        if found != manifest["tokenizer"]["sha256"]:
            raise ValueError(
                f"{self.tokenizer_path} is not the tokenizer that made this corpus: sha256 {found[:16]}..., the "
                f"manifest has {manifest['tokenizer']['sha256'][:16]}...; put the right file back or prepare the "
                "corpus again."
            )
        shards = manifest["splits"].get(self.split)
        if not shards:
            raise ValueError(
                f"{folder} has no split {self.split!r}, it has {', '.join(manifest['splits'])}. Name one of these, or "
                "prepare the corpus with a larger --validation-fraction."
            )
        self.shards = []
        for record in shards:
            shard = IndexedDataset(folder / record["name"])
            for field, path, size in (
                ("bin", shard.bin_path, shard.bin_bytes),
                ("idx", shard.idx_path, shard.idx_bytes),
            ):
                if size != record[f"{field}_bytes"]:
                    raise ValueError(
                        f"{path} has {size:,} bytes, the manifest of {folder} expects {record[f'{field}_bytes']:,}: it "
                        "was exchanged or cut; copy the folder again or prepare it again."
                    )
                if verify and (found := file_sha256(path)) != record[f"{field}_sha256"]:
                    raise ValueError(
                        f"{path} is damaged: its sha256 is {found[:16]}..., the manifest of {folder} expects "
                        f"{record[f'{field}_sha256'][:16]}...; copy the folder again or prepare it again."
                    )
            if (shard.num_tokens, len(shard)) != (record["tokens"], record["documents"]):
                raise ValueError(
                    f"{shard.prefix} holds {shard.num_tokens:,} tokens in {len(shard):,} documents, the manifest "
                    f"expects {record['tokens']:,} in {record['documents']:,}; prepare the corpus again."
                )
            self.shards.append(shard)

    def _bare_fingerprint(self):
        digest = hashlib.sha256()
        for shard in self.shards:
            with open(shard.idx_path, "rb") as f:
                head = f.read(65536)
            digest.update(f"{shard.prefix.name}:{shard.bin_bytes}:{shard.idx_bytes}:".encode() + head)
        return digest.hexdigest()

    def _parts(self, start, stop):
        """(shard, its place in the stream, start, stop within it) for every shard that [start, stop) touches."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens [{start}, {stop}) of a stream of {self.num_tokens}")
        i = bisect_right(self._starts, start) - 1
        while start < stop:
            base, end = self._starts[i], min(stop, self._starts[i + 1])
            if start < end:
                yield self.shards[i], base, start - base, end - base
            start, i = max(start, end), i + 1

    def read(self, start, stop):
        """Tokens [start, stop) of the stream, int64, a copy. Raises ValueError at an id outside the vocabulary."""
        out = np.empty(stop - start, np.int64)
        for shard, base, a, b in self._parts(start, stop):
            out[base + a - start : base + b - start] = shard.tokens(a, b)
        if len(out) and (out.min() < 0 or (self.vocab_size is not None and out.max() >= self.vocab_size)):
            names = ", ".join(str(part[0].prefix) for part in self._parts(start, stop))
            raise ValueError(
                f"Token ids from {out.min()} to {out.max()} at tokens {start} to {stop} of split {self.split!r} "
                f"({names}), the vocabulary has 0 to {(self.vocab_size or 0) - 1}: a damaged shard, or one made with "
                "another tokenizer. Prepare it again, or give the vocabulary size of the tokenizer that made it."
            )
        return out

    def document_starts(self, start, stop):
        """Positions p in [start, stop) of the stream at which a document begins: int64, ascending."""
        parts = [shard.document_starts(a, b) + base for shard, base, a, b in self._parts(start, stop)]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)
