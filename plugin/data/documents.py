"""Where documents come from: `for document in read_documents(["stdlib"]): document.text`.

A source is `stdlib` (the sources of Python's standard library, which every machine has) or local text and JSON-lines
files. Documents come in one fixed order, and which split one belongs to is a function of its text alone
(`in_validation`).
"""

import glob
import hashlib
import json
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

STDLIB = "stdlib"
TEXT_SUFFIXES = (".txt", ".py", ".md")
# Not written to be read (tests, their data, editor and build leftovers), or different from one installation to the
# next.
STDLIB_EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
STDLIB_EXCLUDED_FILES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class Document:
    name: str
    text: str
    source_bytes: int  # for progress and --max-bytes: what it takes in its file


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


def list_files(inputs):
    """(name, path) of every file of `inputs` in reading order: as given, each glob sorted.

    Raises: FileNotFoundError for a file or glob without files, ValueError for a kind of file that is not read.
    """
    files = []
    for item in inputs:
        if item == STDLIB:
            files += stdlib_files()
            continue
        found = sorted(glob.glob(item, recursive=True)) if glob.has_magic(item) else [item]
        found = [Path(path) for path in found if not (glob.has_magic(item) and Path(path).is_dir())]
        if not found or not found[0].exists():
            raise FileNotFoundError(
                f"No file matches the input {item}; give {STDLIB}, or paths or quoted globs of "
                f"{', '.join(TEXT_SUFFIXES)} and .jsonl files."
            )
        for path in found:
            if path.is_dir() or path.suffix not in (*TEXT_SUFFIXES, ".jsonl"):
                raise ValueError(
                    f"{path} is {'a folder' if path.is_dir() else 'not a kind of file that is read'}; inputs are "
                    f"{STDLIB} and {', '.join(TEXT_SUFFIXES)} and .jsonl files. For a folder give a glob like "
                    f"'{path}/**/*.txt'."
                )
            files.append((path.name, path))
    if not files:
        raise FileNotFoundError(
            f"The inputs {', '.join(inputs)} hold no files. A Python without its standard library's sources (zipped or "
            "stripped) cannot give the embedded corpus; give text files instead."
        )
    return files


def describe_inputs(inputs):
    """What a manifest records of the inputs: names and sizes, no folders, so that it is the same on every machine."""
    described = []
    for item in inputs:
        if item == STDLIB:
            described.append({"stdlib": platform.python_version()})
        else:
            described += [{"file": name, "bytes": path.stat().st_size} for name, path in list_files([item])]
    return described


def read_documents(inputs, text_field="text", max_bytes=None):
    """Documents in a fixed order: a text file is one, a row of a .jsonl file is one. Empty ones are left out.

    Args:
        text_field: where a JSON row keeps its text.
        max_bytes: stop before the document that would exceed this many bytes of source; None for all.
    Raises: ValueError naming file and line for text that is not UTF-8 or rows that hold no text. Files of the standard
        library that are not UTF-8 are left out.
    """
    total = 0
    for name, path, from_stdlib in [(*file, item == STDLIB) for item in inputs for file in list_files([item])]:
        documents = _json_rows(path, text_field) if path.suffix == ".jsonl" else _text_file(name, path, from_stdlib)
        for document in documents:
            total += document.source_bytes
            if max_bytes is not None and total > max_bytes:
                return
            if document.text:
                yield document


def _text_file(name, path, skip_undecodable):
    data = path.read_bytes()
    try:
        # From bytes: reading in text mode would turn CRLF into LF.
        yield Document(name, data.decode(), len(data))
    except UnicodeDecodeError as e:
        if not skip_undecodable:
            raise ValueError(f"{path} is not UTF-8 (byte {e.start}: {e.reason}); convert it, or leave it out.") from e


def _json_rows(path, text_field):
    with open(path, "rb") as f:  # binary: lines end at \n only, not at U+2028
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as e:
                raise ValueError(f"{path}, line {number}, is not JSON ({e}); repair it or leave the file out.") from e
            text = row.get(text_field) if isinstance(row, dict) else None
            if not isinstance(text, str):
                fields = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                raise ValueError(
                    f"{path}, line {number}, has no text under {text_field!r} (it has: {fields}); name the right field "
                    "with --text-field."
                )
            try:
                text.encode()
            except UnicodeEncodeError as e:
                raise ValueError(
                    f"{path}, line {number}, has half a surrogate pair in its text; repair the row."
                ) from e
            yield Document(f"{path.name}:{number}", text, len(line))
