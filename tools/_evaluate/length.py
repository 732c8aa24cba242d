"""Fetches the corpora of the paper's study of length, for `evaluate --perplexity paper`.

docs/evaluation.md describes the study. The paper does not say which documents it read. Here each corpus
is the first `CORPUS_BYTES` of a data set of the Hugging Face hub at a fixed revision, each text
once.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from interdomain.data.indexed import file_sha256
from interdomain.data.readers import HUGGING_FACE, read_documents
from interdomain.folders import new_folder
from interdomain.tools._progress import progress_bar

NAME = "paper"  # what --perplexity takes
SOURCES = "sources.json"
CORPUS_BYTES = 10_000_000  # of UTF-8 text


class Source(NamedTuple):
    """A data set of the hub.

    Attributes:
        dataset: ID@REVISION[:CONFIGURATION[:SPLIT]].
        field: The column with the text.
    """

    dataset: str
    field: str


# The revisions are the newest that archived pages of the hub and public code name. No fetch of them
# has been run. LongBench is the copy that lm-evaluation-harness reads.
_LONGBENCH = "Xnhyacinth/LongBench@2e9ade51ebf45d98942056c0716234f9d5d257d5"
_CODEPARROT = "codeparrot/codeparrot-clean-valid@4db92d2ec0c1b4c41eeb439cfae16854511d9dcd"
CORPORA = {
    "PG19": Source("emozilla/pg19-test@c5e39bf32e33f9111323aa68d7d9000d22722035::test", "text"),
    "CodeParrot": Source(f"{_CODEPARROT}::train", "content"),
    "GovReport": Source(f"{_LONGBENCH}:gov_report:test", "context"),
    "Qasper": Source(f"{_LONGBENCH}:qasper:test", "context"),
    "QMSum": Source(f"{_LONGBENCH}:qmsum:test", "context"),
    "NarrativeQA": Source(f"{_LONGBENCH}:narrativeqa:test", "context"),
}
MEAN = "mean of 5"  # the title of the paper's mean
# The corpora that this mean is over.
IN_MEAN = [name for name in CORPORA if name != "NarrativeQA"]

Record = dict[str, dict[str, Any]]  # dataset, documents, bytes and sha256 of each corpus


def fetch(folder: Path) -> None:
    """Fetches all corpora into a new folder: a file of JSON lines each, and the record of all.

    Raises:
        ValueError: A data set cannot be read.
        FileExistsError: The folder holds something.
    """
    record = {}
    with new_folder(folder) as new:
        for name, source in CORPORA.items():
            record[name] = _fetch_corpus(source, new / f"{name}.jsonl")
        (new / SOURCES).write_text(json.dumps(record, indent=1) + "\n")


def _fetch_corpus(source: Source, file: Path) -> dict[str, Any]:
    """Writes one corpus to a file. Returns its row of the record.

    Args:
        source: The data set and its column.
        file: The file of JSON lines to write.
    """
    texts = set()
    size = 0
    documents = read_documents([HUGGING_FACE + source.dataset], source.field)
    with (
        file.open("w") as f,
        progress_bar(total=CORPUS_BYTES, desc=file.stem, unit="B", unit_scale=True) as bar,
    ):
        for text in documents:
            # LongBench repeats a text for every question about it.
            if text not in texts:
                texts.add(text)
                f.write(json.dumps({"text": text}) + "\n")
                size += len(text.encode())
                bar.update(size - bar.n)
            if size >= CORPUS_BYTES:
                break
    return {
        "dataset": source.dataset,
        "documents": len(texts),
        "bytes": size,
        "sha256": file_sha256(file),
    }


def read_record(folder: Path) -> Record:
    """Reads the record of the fetched corpora, and checks their files against it.

    Args:
        folder: The folder that `fetch` wrote.

    Raises:
        FileNotFoundError: The corpora are not there.
        ValueError: A file has changed.
    """
    if not (folder / SOURCES).is_file():
        raise FileNotFoundError(
            f"{folder} does not hold the paper's corpora (no {SOURCES}). Run `interdomain evaluate --fetch "
            f"--perplexity {NAME} --corpora {folder}` where there is a network, and copy the folder here."
        )
    # The corpora may have been copied from another machine.
    record = json.loads((folder / SOURCES).read_text())
    for name, row in record.items():
        file = folder / f"{name}.jsonl"
        if not file.is_file() or file_sha256(file) != row["sha256"]:
            raise ValueError(
                f"{file} has changed since it was fetched. Remove {folder} and fetch the corpora again."
            )
    return record
