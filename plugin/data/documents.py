"""Where documents come from: `for document in read_documents(["stdlib"]): document.text`.

A source is `stdlib` (the sources of Python's standard library, which every machine has), local files, globs or folders
of text, JSON or Parquet, or a Hugging Face dataset (`hf:NAME`). Documents come in one fixed order, cut into
pieces that any process can read by itself (`interdomain.data.pieces`). Which split a document belongs to is a function
of its text alone (`in_validation`).
"""

import glob
import hashlib
import os
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

STDLIB = "stdlib"
HUGGING_FACE = "hf:"
COMPRESSIONS = (".gz", ".bz2", ".zst")
KINDS = {  # by ending, before that of a compression
    **dict.fromkeys((".txt", ".py", ".md", ".rst"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "lines"),
    ".json": "json",  # an array of rows, or lines, as C4 calls them
    ".parquet": "parquet",
}
READ = f"{' '.join(KINDS)} files, all but the last also as {' '.join(COMPRESSIONS)}"
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
    kind: str  # text, lines, json, parquet or hugging face
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


def _ending(path):
    """(".jsonl", ".gz") of rows.jsonl.gz, (".jsonl", "") of rows.jsonl."""
    name = path.name.lower()
    compression = next((c for c in COMPRESSIONS if name.endswith(c)), "")
    return Path(name.removesuffix(compression)).suffix, compression


def _kind(path):
    """The kind of a SourceFile, or None for a file that is not read."""
    plain, compression = _ending(path)
    return None if plain == ".parquet" and compression else KINDS.get(plain)


def _inside(folder):
    """[(name, path, why it is left out or None)] of everything in a folder and its folders, sorted by name.

    Raises: OSError for a folder that cannot be listed.
    """

    def refuse(error):
        raise error

    found = []
    for where, folders, files in os.walk(folder, onerror=refuse):
        links = [name for name in folders if os.path.islink(os.path.join(where, name))]  # not followed
        for path in (Path(where, name) for name in (*files, *links)):
            name = path.relative_to(folder)
            why = None
            if any(part.startswith(".") for part in name.parts):
                why = "hidden"
            elif not path.is_file():
                why = "link to a folder" if path.is_dir() else "not a file"
            elif _kind(path) is None:
                why = "".join(_ending(path)) or "no ending"
            found.append((name.as_posix(), path, why))
    return sorted(found, key=lambda entry: entry[:2])


def _matches(item):
    """[(name, path, why it is left out or None)] of what one path, glob or folder names."""
    path = Path(item)
    if path.is_dir():
        return _inside(path)
    if glob.has_magic(item) and not path.exists():
        paths = [Path(path) for path in sorted(glob.glob(item, recursive=True))]
        # ** matches folders beside what is in them.
        return [(p.name, p, "folder" if p.is_dir() else None) for p in paths if not (p.is_dir() and "**" in item)]
    return [(path.name, path, None)] if path.exists() else []


def left_out(inputs):
    """What stands in the folders among `inputs` and is not read: {ending or reason: [(name, bytes), ...]}."""
    found = {}
    for item in map(str, inputs):
        if item != STDLIB and not item.startswith(HUGGING_FACE):
            for name, path, why in _matches(item):
                if why:
                    found.setdefault(why, []).append((name, path.lstat().st_size))
    return found


def read_in(files):
    """What is read, in the form of `left_out`."""
    found = {}
    for file in files:
        found.setdefault("".join(_ending(file.path)) if file.path else file.name, []).append((file.name, file.size))
    return found


def tally(found, names=0):
    """`left_out` or `read_in` in words, the most bytes first, with so many names of each kind."""

    def size_of(files):
        size = sum(size for _, size in files)
        return f"{size / 1e6:,.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} KB"

    kinds = []
    for kind, files in sorted(found.items(), key=lambda entry: -sum(size for _, size in entry[1])):
        some = ", ".join(name for name, _ in files[:names]) + (", ..." if len(files) > names > 0 else "")
        kinds.append(f"{len(files):,} {kind} ({size_of(files)}{': ' * bool(some)}{some})")
    every = [file for files in found.values() for file in files]
    return f"{len(every):,} file{'s' * (len(every) > 1)} ({size_of(every)}): {', '.join(kinds)}"


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
        found = [(name, path) for name, path, why in _matches(item) if not why]
        if not found:
            raise FileNotFoundError(
                f"No file matches the input {item}; give {STDLIB}, or paths, folders or quoted globs of {READ}, or "
                f"{HUGGING_FACE}NAME for a dataset of the Hugging Face hub."
            )
        for name, path in found:
            kind = _kind(path)
            if kind is None:
                raise ValueError(
                    f"{path} is not a kind of file that is read; inputs are {STDLIB}, files, folders and globs of {READ}, "
                    f"and {HUGGING_FACE}NAME."
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
