"""The paper's study of length, for `evaluate --perplexity paper`: its corpora, fetched once, and its figures (docs/length.md).

The paper does not say which documents of its corpora it read. Here: of each corpus the first documents of a data set of the
Hugging Face hub, a fixed revision, each text once, until they have `CORPUS_BYTES`.
"""

import json
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from interdomain.data.indexed import file_sha256
from interdomain.data.readers import HUGGING_FACE, read_documents
from interdomain.folders import new_folder

NAME = "paper"
SOURCES = "sources.json"
CORPUS_BYTES = 10_000_000
LENGTHS = (4096, 8192, 14_336)
CONDITIONS = ("softmax", "interdomain", "s4d")
SIZE = "1.3B"


class Source(NamedTuple):
    """A data set of the hub: id@revision[:configuration[:split]], and the column with the text."""

    dataset: str
    field: str


# The revisions are the newest that archived pages of the hub and public code name. No fetch of them has been run.
_LONGBENCH = "Xnhyacinth/LongBench@2e9ade51ebf45d98942056c0716234f9d5d257d5"  # as lm-evaluation-harness reads it
_CODEPARROT = "codeparrot/codeparrot-clean-valid@4db92d2ec0c1b4c41eeb439cfae16854511d9dcd"
CORPORA = {
    "PG19": Source("emozilla/pg19-test@c5e39bf32e33f9111323aa68d7d9000d22722035::test", "text"),
    "CodeParrot": Source(f"{_CODEPARROT}::train", "content"),
    "GovReport": Source(f"{_LONGBENCH}:gov_report:test", "context"),
    "Qasper": Source(f"{_LONGBENCH}:qasper:test", "context"),
    "QMSum": Source(f"{_LONGBENCH}:qmsum:test", "context"),
    "NarrativeQA": Source(f"{_LONGBENCH}:narrativeqa:test", "context"),
}
MEAN = f"mean of {len(CORPORA) - 1}"
IN_MEAN = [name for name in CORPORA if name != "NarrativeQA"]
# Perplexities of the paper's 1.3B models, by condition at 4 K, 8 K and 14 K: the mean (its table of length extrapolation), and
# by corpus (the appendix's). Each mean is the arithmetic mean of its five rows, to the last digit.
PAPER: dict[str, dict[str, tuple[float, float, float]]] = {
    "PG19": dict(softmax=(16.34, 26.78, 70.95), interdomain=(15.86, 15.73, 15.94), s4d=(19.96, 19.75, 19.66)),
    "CodeParrot": dict(softmax=(12.13, 22.23, 74.85), interdomain=(17.62, 17.31, 17.48), s4d=(53.10, 52.44, 52.16)),
    "GovReport": dict(softmax=(7.33, 12.20, 31.76), interdomain=(7.36, 7.27, 7.29), s4d=(9.19, 9.07, 9.01)),
    "Qasper": dict(softmax=(14.43, 22.94, 60.08), interdomain=(15.75, 15.52, 15.63), s4d=(23.53, 23.22, 23.13)),
    "QMSum": dict(softmax=(13.74, 18.57, 41.96), interdomain=(15.20, 14.88, 14.94), s4d=(30.44, 29.97, 29.80)),
    "NarrativeQA": dict(softmax=(21.28, 34.36, 92.75), interdomain=(22.85, 22.67, 22.99), s4d=(36.83, 36.42, 36.26)),
    MEAN: dict(softmax=(12.79, 20.54, 55.92), interdomain=(14.36, 14.14, 14.26), s4d=(27.24, 26.89, 26.75)),
}


def fetch(folder: Path) -> None:
    """Fetch all corpora, a file of JSON lines each, and record their sources. Raises: ValueError, FileExistsError."""
    with new_folder(folder) as new:
        record = {name: _fetch(source, new / f"{name}.jsonl") for name, source in CORPORA.items()}
        (new / SOURCES).write_text(json.dumps(record, indent=1) + "\n")


def _fetch(source: Source, file: Path) -> dict:
    """One corpus's row of the record."""
    seen, size = set(), 0
    documents = read_documents([HUGGING_FACE + source.dataset], source.field)
    with file.open("w") as f, tqdm(total=CORPUS_BYTES, desc=file.stem, unit="B", unit_scale=True, disable=None) as bar:
        for text in documents:  # LongBench has a text once for every question about it
            if text not in seen:
                seen.add(text)
                f.write(json.dumps({"text": text}) + "\n")
                size += len(text.encode())
                bar.update(size - bar.n)
            if size >= CORPUS_BYTES:
                break
    return {"dataset": source.dataset, "documents": len(seen), "bytes": size, "sha256": file_sha256(file)}


def read_record(folder: Path) -> dict[str, dict]:
    """{corpus: its row}. Raises: FileNotFoundError for corpora that are not there, ValueError for changed ones."""
    if not (folder / SOURCES).is_file():
        raise FileNotFoundError(
            f"{folder} does not hold the paper's corpora (no {SOURCES}). Run `interdomain evaluate --fetch "
            f"--perplexity {NAME} --corpora {folder}` where there is a network, and copy the folder here."
        )
    record = json.loads((folder / SOURCES).read_text())
    for name, row in record.items():
        file = folder / f"{name}.jsonl"
        if not file.is_file() or file_sha256(file) != row["sha256"]:
            raise ValueError(f"{file} has changed since it was fetched. Remove {folder} and fetch the corpora again.")
    return record
