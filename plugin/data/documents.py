"""Where documents come from: `for document in read_documents(["stdlib"]): document.text`.

A source is `stdlib` (the sources of Python's standard library, which every machine has), local files, globs or folders
of text, JSON lines or Parquet, or a Hugging Face dataset (`hf:NAME`). Documents come in one fixed order, cut into
pieces that any process can read by itself (`interdomain.data.pieces`). Which split a document belongs to is a function
of its text alone (`in_validation`).
"""

import glob
import hashlib
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

STDLIB = "stdlib"
HUGGING_FACE = "hf:"
TEXT_SUFFIXES = (".txt", ".py", ".md")
LINE_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst")  # the last two: C4's names for lines
PARQUET_SUFFIX = ".parquet"
SUFFIXES = (*TEXT_SUFFIXES, *LINE_SUFFIXES, PARQUET_SUFFIX)
# Not written to be read (tests, their data, editor and build leftovers), or different from one installation to the
# next.
STDLIB_EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
STDLIB_EXCLUDED_FILES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class Document:
    text: str
    source_bytes: int  # for progress and --max-bytes: what it takes in its file, decompressed


@dataclass(frozen=True)
class SourceFile:
    """One file of the input, or one Hugging Face dataset (then `path` is None and `name` is its `hf:` name)."""

    name: str
    path: Path | None
    kind: str  # text, lines, parquet or hugging face
    from_stdlib: bool = False

    @property
    def size(self):
        """Bytes on the disk; 0 for a dataset that is not on it."""
        return self.path.stat().st_size if self.path else 0


def in_validation(text, fraction):
    """Whether a document belongs to the validation split: sha256 of its UTF-8 text, modulo 10,000, below fraction *
    10,000.

    A function of the text alone: no seed, no position, so that adding documents moves none, and copies stay together.
    """
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big") % 10_000 < round(fraction * 10_000)


def stdlib_files():
    """The embedded corpus: (name, path) of the standard library's source files, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        # config-3.11-x86_64-linux-gnu and its like describe one build.
        if STDLIB_EXCLUDED_FOLDERS.intersection(parts[:-1]) or parts[0].startswith("config-"):
            continue
        if not parts[-1].startswith(STDLIB_EXCLUDED_FILES) and path.is_file():
            files.append(("/".join(parts), path))
    return sorted(files)


def _kind(path):
    name = path.name.lower()
    if name.endswith(LINE_SUFFIXES):
        return "lines"
    if name.endswith(PARQUET_SUFFIX):
        return "parquet"
    return "text" if name.endswith(TEXT_SUFFIXES) else None


def _matches(item):
    """(name, path) of the files that one path, glob or folder names. A folder gives every file in it that can be read."""
    if glob.has_magic(item) and not Path(item).exists():
        paths = [Path(path) for path in sorted(glob.glob(item, recursive=True))]
        return [(path.name, path) for path in paths if not path.is_dir()]
    path = Path(item)
    if not path.is_dir():
        return [(path.name, path)] if path.exists() else []
    inside = [p for p in path.rglob("*") if _kind(p) and p.is_file()]
    hidden = [p for p in inside if any(part.startswith(".") for part in p.relative_to(path).parts)]
    return sorted((p.relative_to(path).as_posix(), p) for p in inside if p not in hidden)


def list_files(inputs):
    """The SourceFiles of `inputs` in reading order: as given, each glob and folder sorted.

    Raises: FileNotFoundError for an input without files, ValueError for a kind of file that is not read.
    """
    files = []
    for item in map(str, inputs):
        if item == STDLIB:
            files += [SourceFile(name, path, "text", from_stdlib=True) for name, path in stdlib_files()]
            continue
        if item.startswith(HUGGING_FACE):
            files.append(SourceFile(item, None, "hugging face"))
            continue
        found = _matches(item)
        if not found:
            raise FileNotFoundError(
                f"No file matches the input {item}; give {STDLIB}, or paths, folders or quoted globs of "
                f"{', '.join(SUFFIXES)} files, or {HUGGING_FACE}NAME for a dataset of the Hugging Face hub."
            )
        for name, path in found:
            kind = _kind(path)
            if kind is None:
                raise ValueError(
                    f"{path} is not a kind of file that is read; inputs are {STDLIB}, files, folders and globs of "
                    f"{', '.join(SUFFIXES)}, and {HUGGING_FACE}NAME."
                )
            files.append(SourceFile(name, path, kind))
    if not files:
        raise FileNotFoundError(
            f"The inputs {', '.join(map(str, inputs))} hold no files. A Python without its standard library's sources "
            "(zipped or stripped) cannot give the embedded corpus; give text files instead."
        )
    return files


def describe_inputs(inputs):
    """What a manifest records of the inputs: names and sizes, no folders, so that it is the same on every machine."""
    described = []
    for item in map(str, inputs):
        if item == STDLIB:
            described.append({"stdlib": platform.python_version()})
        elif item.startswith(HUGGING_FACE):
            described.append({"dataset": item.removeprefix(HUGGING_FACE)})
        else:
            described += [{"file": file.name, "bytes": file.size} for file in list_files([item])]
    return described


def read_documents(inputs, text_field="text", max_bytes=None):
    """Documents in a fixed order: a text file is one, so is a row of any other. Empty ones are left out.

    Args:
        text_field: the column, or the field of a JSON row, that holds the text.
        max_bytes: stop before the document that would exceed this many bytes of source; None for all.
    Raises: ValueError naming file and line for text that is not UTF-8 or rows that hold no text. Files of the standard
        library that are not UTF-8 are left out.
    """
    from interdomain.data.pieces import cut, read_piece

    total = 0
    for piece in cut(list_files(inputs), text_field):
        for document in read_piece(piece, text_field):
            total += document.source_bytes
            if max_bytes is not None and total > max_bytes:
                return
            if document.text:
                yield document
