"""Text of Debian packages of open licences: `for text in read_package("manpages", path): ...`.

`debian.toml` names each package with its version, its sha256, its licence and the files in it that
are read. Manual pages (troff), manuals of GNU info, dictionaries of dictd and plain text become
documents, in the order of the files' names. A document is left out if it has less than SHORTEST
characters, or repeats an earlier one of its package.
"""

import gzip
import io
import re
import subprocess
import tarfile
import tomllib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

from interdomain.data.indexed import file_sha256

DEBIAN = "debian"
DOWNLOADS = Path("data/debian-packages")
SHORTEST = 500  # characters of a document
# Characters at which a document takes no further entry of a dictionary, or node of a manual.
JOINED = 8_000

CHAPTER = re.compile(r"^(?=Chapter \d+[.:] )", re.M)
DRAWN_TABLE = re.compile(r"^[ \t]*([|│].*[|│]|[+┌├└][-=+─┬┼┴]+[+┐┤┘])\n", re.M)
# Entries of a dictionary that are no text: its own description, tables of codes and of digits, a
# licence.
ENTRY_LEFT_OUT = re.compile(
    r"00-database|ASCII character table|bignum|GNU Free Documentation License"
)
# Nodes of a manual that are no text: licences and indexes.
NODE_LEFT_OUT = re.compile(r"File: .*Node: [^,\n]*(Licen[sc]e|Copying)|[^\0]*\0\x08\[index")
# Menus and images inside a node.
NOT_PRINTED = re.compile(r"^\* (Menu:|.*::).*\n|\0\x08\[[^\0]*\0\x08\]", re.M)

# The part of troff that the manual pages use. An escape sequence; one of its groups is the name of
# a character.
ESCAPE = re.compile(
    r"\\(?:f(?:\(..|\[[^]]*\]|.)|s[-+]?\d|[hvw]'[^']*'|n\(..|\*?(?:\((..)|\[([^]]*)\]|(.))|$)"
)
COMMENT = re.compile(r'\\".*')
# An argument of a macro, in quotes or bare.
ARGUMENT = re.compile(r'"((?:[^"]|"")*)"?|((?:\\.|[^ ])+)')
# Names of characters.
CHARACTERS = {
    "-": "-",
    "e": "\\",
    "\\": "\\",
    " ": " ",
    "~": " ",
    "0": " ",
    "`": "`",
    "'": "'",
    "aq": "'",
    "dq": '"',
    "lq": '"',
    "rq": '"',
    "bu": "*",
    "em": "--",
    "en": "-",
    "ha": "^",
    "ti": "~",
    "ga": "`",
    "+-": "+/-",
}
# Tables and definitions of macros, which are left out, with the line that ends them.
LEFT_OUT = {"TS": ".TE", "de": ".."}
# Macros of fonts. Those of one font put spaces between their arguments, the others alternate fonts
# without spaces.
ONE_FONT = ("B", "I")
FONTS = (*ONE_FONT, "BI", "BR", "IB", "IR", "RB", "RI", "q")
STARTS_PARAGRAPH = {"SH", "SS", "PP", "sp", "HP", "RS", "RE", "TP", "IP", "nf", "fi", "EX", "EE"}
STARTS_CODE = ("nf", "EX")
ENDS_CODE = ("fi", "EE")
HEADS_LINE = ("TP", "TQ", "SH", "SS", "TH")  # the next text is a line of its own


def package_table() -> dict[str, dict]:
    """Returns the table of packages by name, see debian.toml."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def debian_packages(source: str) -> list[Path]:
    """Finds the .deb file of every package in the table, and checks it.

    Args:
        source: `debian` for the folder DOWNLOADS, into which apt-get downloads missing files;
            `debian:FOLDER` for a folder that has all files.

    Returns:
        The paths of the files, in the order of the table.

    Raises:
        FileNotFoundError: A file is missing, and apt-get did not download it.
        ValueError: The sha256 of a file is not that of the table.
    """
    folder = Path(source.removeprefix(DEBIAN).removeprefix(":") or DOWNLOADS)
    files = []
    missing = []
    for name, row in package_table().items():
        # apt-get escapes the colon of a version in the file's name.
        version = row["version"].replace(":", "%3a")
        path = folder / f"{name}_{version}_all.deb"
        files.append((path, row["sha256"]))
        if not path.is_file():
            missing.append(f"{name}={row['version']}")

    if missing and source == DEBIAN:
        print(f"downloading {len(missing)} Debian packages to {folder}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        # It prints its own errors. If it fails, files are missing below.
        subprocess.run(["apt-get", "download", "--quiet", *missing], cwd=folder)

    for path, expected in files:
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing. On Debian 12 `apt-get download {' '.join(missing)}` gets what is missing, after `apt-get "
                "update`. If Debian has replaced a version, put the file from its archive of old packages there."
            )
        sha256 = file_sha256(path)
        if sha256 != expected:
            raise ValueError(
                f"{path} is damaged or another build: its sha256 is {sha256}, it should be {expected}. Remove the file and "
                "start again, or put the right one in its place."
            )
    return [path for path, _ in files]


def read_package(path: Path) -> Iterator[str]:
    """Yields the documents of a package in the table.

    Args:
        path: Its .deb file, `NAME_VERSION_all.deb`.
    """
    row = package_table()[path.name.partition("_")[0]]
    seen = set()
    with tarfile.open(fileobj=io.BytesIO(_data_member(path.read_bytes()))) as tar:
        for member in sorted(tar.getmembers(), key=lambda member: member.name):
            file = member.name.removeprefix("./")
            if not member.isfile() or not _matches(file, row["read"]):
                continue
            if _matches(file, row.get("leave_out", [])):
                continue
            content = tar.extractfile(member)
            assert content is not None  # the member is a file
            data = content.read()
            # dictd's .dz files are gzip files with an index.
            if file.endswith((".gz", ".dz")):
                data = gzip.decompress(data)
            for text in _documents(file, data):
                if len(text) >= SHORTEST and text not in seen:
                    seen.add(text)
                    yield text


def _matches(file: str, patterns: list[str]) -> bool:
    """Returns True if the path of a file in a package matches one of the shell patterns."""
    return any(fnmatch(file, pattern) for pattern in patterns)


def _data_member(deb: bytes) -> bytes:
    """Returns the tar archive with a package's contents.

    A .deb file is an ar archive: 8 bytes, then members. Each has a header of 60 bytes, its size at
    byte 48, and begins at an even position.

    Args:
        deb: Contents of the .deb file.
    """
    position = 8
    while position < len(deb):
        header = deb[position : position + 60]
        start = position + 60
        size = int(header[48:58])
        if header.startswith(b"data.tar"):
            return deb[start : start + size]
        position = start + size + size % 2
    raise ValueError("this .deb file has no member data.tar")


def _documents(file: str, data: bytes) -> list[str]:
    """Returns the documents of one file of a package, by the kind of the file.

    Args:
        file: Path of the file in the package. Its ending or folder says of which kind it is.
        data: Contents of the file, decompressed.
    """
    text = DRAWN_TABLE.sub("", data.decode().replace("\xa0", " "))
    if file.endswith(".dict.dz"):
        # An entry of a dictionary begins at a line without indentation.
        entries = re.split(r"(?<=\n)(?=\S)", text)
        documents = _joined(entry for entry in entries if not ENTRY_LEFT_OUT.match(entry))
    elif "/info/" in file:
        # A manual of GNU info consists of nodes. The first line of a node has its name and its
        # neighbours.
        bodies = []
        for node in text.split("\x1f\n"):
            if node.startswith("File: ") and not NODE_LEFT_OUT.match(node):
                bodies.append(NOT_PRINTED.sub("", node.partition("\n")[2]))
        documents = _joined(bodies)
    elif "/man/" in file:
        documents = [man_text(text)]
    else:
        documents = CHAPTER.split(text)
    # No spaces at the ends of lines, and at most one empty line between two others.
    trimmed = []
    for text in documents:
        text = re.sub(r"[ \t]+\n", "\n", text)
        text = re.sub(r"\n{3,}", "\n\n", text)
        trimmed.append(text.strip("\n") + "\n")
    return trimmed


def _joined(texts: Iterable[str]) -> list[str]:
    """Joins neighbouring texts into documents of JOINED characters or little more.

    Args:
        texts: Texts that are too short for a document of their own.
    """
    documents = [""]
    for text in texts:
        if len(documents[-1]) >= JOINED:
            documents.append("")
        documents[-1] += text
    return documents


def man_text(source: str) -> str:
    """Returns the text of a manual page in troff.

    A paragraph becomes one line. Code keeps its lines. Tables are left out.

    Args:
        source: The page, in troff.
    """
    parts = []
    in_code = False
    # True if the next text is a line of its own: a heading, or the word that a paragraph explains.
    heads_line = False
    # A page begins with its title, .TH. Before it stand comments and definitions.
    begin = source.find("\n.TH ") + 1
    lines = iter(source[begin:].split("\n"))
    for line in lines:
        line = COMMENT.sub("", line)
        macro = ""
        text = _plain(line)
        if line.startswith((".", "'")):
            macro, _, rest = line[1:].partition(" ")
            arguments = []
            for quoted, bare in ARGUMENT.findall(rest):
                arguments.append(_plain(quoted.replace('""', '"') or bare))

            # Macros that change what follows.
            if macro in LEFT_OUT:
                for skipped in lines:
                    if skipped.startswith(LEFT_OUT[macro]):
                        break
            if macro == "br":
                parts.append("\n")
            if macro in STARTS_PARAGRAPH:
                parts.append("\n\n")
            if macro in STARTS_CODE:
                in_code = True
            if macro in ENDS_CODE:
                in_code = False

            # The text of the macro itself. Most have none.
            text = ""
            if macro == "TH":
                text = f"{arguments[0]}({arguments[1]})"
            elif macro == "IP" and arguments:
                text = arguments[0]
            elif macro in (*ONE_FONT, "SH", "SS"):
                text = " ".join(arguments)
            elif macro in FONTS:
                text = "".join(arguments)
            if macro in HEADS_LINE or (macro == "IP" and len(text) > 1):
                heads_line = True
        elif not in_code and not line:
            parts.append("\n\n")
        elif not in_code and line.startswith(" "):
            parts.append("\n")

        if in_code and (macro in FONTS or not macro):
            parts.append(text + "\n")
        elif text and heads_line:
            parts.append(text + "\n")
            heads_line = False
        elif text:
            parts.append(text + " ")
    return "".join(parts)


def _plain(text: str) -> str:
    """Replaces troff's escape sequences by the characters they stand for, or by nothing."""

    def character(escape: re.Match) -> str:
        name = escape[1] or escape[2] or escape[3]
        return CHARACTERS.get(name, "")

    return ESCAPE.sub(character, text)
