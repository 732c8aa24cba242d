"""Text of Debian packages of open licences: `for text in read_package("manpages", path): ...`.

`debian.toml` names each package with its version, its sha256, its licence and the files in it that are read. Manual pages
(troff), manuals of GNU info, dictionaries of dictd and plain text become documents, in the order of the files' names. A
document that is shorter than SHORTEST, or repeats an earlier one of its package, is left out.
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
JOINED = 8_000  # characters from which a document takes no further entry of a dictionary, or node of a manual

CHAPTER = re.compile(r"^(?=Chapter \d+[.:] )", re.M)
DRAWN_TABLE = re.compile(r"^[ \t]*([|│].*[|│]|[+┌├└][-=+─┬┼┴]+[+┐┤┘])\n", re.M)
# Entries of a dictionary: its own description, tables of codes and of digits, a licence.
ENTRY_LEFT_OUT = re.compile(
    r"00-database|ASCII character table|bignum|GNU Free Documentation License"
)
NODE_LEFT_OUT = re.compile(r"File: .*Node: [^,\n]*(Licen[sc]e|Copying)|[^\0]*\0\x08\[index")
NOT_PRINTED = re.compile(
    r"^\* (Menu:|.*::).*\n|\0\x08\[[^\0]*\0\x08\]", re.M
)  # in a node: menus, images

# troff, as far as these manual pages use it: an escape (a character's name is in one of the groups), a macro's argument
ESCAPE = re.compile(
    r"\\(?:f(?:\(..|\[[^]]*\]|.)|s[-+]?\d|[hvw]'[^']*'|n\(..|\*?(?:\((..)|\[([^]]*)\]|(.))|$)"
)
ARGUMENT = re.compile(r'"((?:[^"]|"")*)"?|((?:\\.|[^ ])+)')
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
}
CHARACTERS |= {
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
SKIPPED = {"TS": ".TE", "de": ".."}  # tables and definitions of macros, with their end
FONTS = {
    "B": " ",
    "I": " ",
    **dict.fromkeys(("BI", "BR", "IB", "IR", "RB", "RI", "q"), ""),
}  # between the arguments
SPACE_BEFORE = {"SH", "SS", "PP", "sp", "HP", "RS", "RE", "TP", "IP", "nf", "fi", "EX", "EE"}


def package_table() -> dict[str, dict]:
    """Packages by name: version, sha256, licence, read and leave_out (patterns of paths)."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def debian_packages(source: str) -> dict[str, Path]:
    """The checked .deb file of every package in the table, by the package's name.

    Args:
        source: `debian` for DOWNLOADS, where apt-get puts what is missing; `debian:FOLDER` for a folder of files at hand.

    Raises: ValueError if a file is missing, cannot be downloaded, or has another sha256 than the table says.
    """
    folder = Path(source.removeprefix(DEBIAN).removeprefix(":") or DOWNLOADS)
    table = package_table()
    files = {
        name: folder / f"{name}_{row['version'].replace(':', '%3a')}_all.deb"
        for name, row in table.items()
    }
    missing = [
        f"{name}={table[name]['version']}" for name, path in files.items() if not path.is_file()
    ]
    if missing and source == DEBIAN:
        _download(missing)
    elif missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} of {len(files)} packages: {' '.join(missing)}. Run `apt-get download` with these "
            f"names in that folder (on Debian 12), or give --input {DEBIAN}, which does so in {DOWNLOADS}."
        )
    for name, path in files.items():
        if (sha256 := file_sha256(path)) != table[name]["sha256"]:
            raise ValueError(
                f"{path} is damaged or another build: its sha256 is {sha256}, it should be {table[name]['sha256']}. Remove the "
                "file and start again, or put the right one in its place."
            )
    return files


def _download(packages: list[str]) -> None:
    """Puts packages (each NAME=VERSION) into DOWNLOADS. Raises ValueError with the reason that apt-get gives."""
    DOWNLOADS.mkdir(parents=True, exist_ok=True)
    print(f"downloading {len(packages)} Debian packages to {DOWNLOADS}", flush=True)
    command = ["apt-get", "download", "--quiet", *packages]
    try:
        subprocess.run(
            command,
            cwd=DOWNLOADS,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError) as e:
        reason = " ".join((getattr(e, "stderr", None) or str(e)).split())
        raise ValueError(
            f"apt-get cannot download {' '.join(packages)}: {reason}. This needs Debian 12 with its package lists (`apt-get "
            "update`). Versions that Debian has replaced since are in its archive of old packages. Put the .deb files of "
            f"all packages into a folder, and give --input {DEBIAN}:FOLDER."
        ) from e


def read_package(name: str, path: Path) -> Iterator[str]:
    """The documents of a package."""
    row = package_table()[name]
    seen = set()
    with tarfile.open(fileobj=io.BytesIO(_data_member(path.read_bytes()))) as tar:
        for member in sorted(tar.getmembers(), key=lambda member: member.name):
            file = member.name.removeprefix("./")
            if (
                not member.isfile()
                or not _matches(file, row["read"])
                or _matches(file, row.get("leave_out", []))
            ):
                continue
            content = tar.extractfile(member)
            assert content is not None  # of a file
            data = content.read()
            for text in _documents(
                file, gzip.decompress(data) if file.endswith((".gz", ".dz")) else data
            ):
                if len(text) >= SHORTEST and text not in seen:
                    seen.add(text)
                    yield text


def _matches(file: str, patterns: list[str]) -> bool:
    return any(fnmatch(file, pattern) for pattern in patterns)


def _data_member(deb: bytes) -> bytes:
    """The tar archive of a .deb file's contents. The file is an ar archive, with 60 bytes before each member."""
    at = 8
    while header := deb[at : at + 60]:
        size = int(header[48:58])
        if header.startswith(b"data.tar"):
            return deb[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    raise ValueError("this .deb file has no member data.tar")


def _documents(file: str, data: bytes) -> list[str]:
    text = DRAWN_TABLE.sub("", data.decode().replace("\xa0", " "))
    if file.endswith(".dict.dz"):  # an entry begins at a line without indentation
        documents = _joined(
            entry for entry in re.split(r"(?<=\n)(?=\S)", text) if not ENTRY_LEFT_OUT.match(entry)
        )
    elif "/info/" in file:
        nodes = [
            node
            for node in text.split("\x1f\n")
            if node.startswith("File: ") and not NODE_LEFT_OUT.match(node)
        ]
        documents = _joined(NOT_PRINTED.sub("", node.partition("\n")[2]) for node in nodes)
    else:
        documents = [man_text(text)] if "/man/" in file else CHAPTER.split(text)
    return [
        re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip("\n") + "\n"
        for text in documents
    ]


def _joined(texts: Iterable[str]) -> list[str]:
    documents = [""]
    for text in texts:
        if len(documents[-1]) >= JOINED:
            documents.append("")
        documents[-1] += text
    return documents


def man_text(source: str) -> str:
    """A manual page as text: a paragraph is one line, code keeps its lines, tables are left out."""
    parts = []
    code = False
    heading = False  # whether the next words are a line of their own
    lines = iter(source[source.find("\n.TH ") + 1 :].split("\n"))
    for line in lines:
        line = re.sub(r'\\".*', "", line)  # a comment
        macro = ""
        text = _plain(line)
        if line.startswith((".", "'")):
            macro, _, arguments = line[1:].partition(" ")
            words = [
                _plain(quoted.replace('""', '"') or bare)
                for quoted, bare in ARGUMENT.findall(arguments)
            ]
            text = FONTS.get(macro, " ").join(words)
            if macro in SKIPPED:
                next((line for line in lines if line.startswith(SKIPPED[macro])), None)
            if macro in SPACE_BEFORE or macro == "br":
                parts.append("\n" if macro == "br" else "\n\n")
            if macro in ("nf", "EX", "fi", "EE"):
                code = macro in ("nf", "EX")
            if macro == "TH":
                text = f"{words[0]}({words[1]})"
            elif macro == "IP":
                text = words[0] if words else ""
            elif macro not in (*FONTS, "SH", "SS"):
                text = ""
            heading = (
                heading
                or macro in ("TP", "TQ", "SH", "SS", "TH")
                or (macro == "IP" and len(text) > 1)
            )
        elif not code and (not line or line.startswith(" ")):
            parts.append("\n" if line else "\n\n")
        if code and macro in (*FONTS, ""):
            parts.append(text + "\n")
        elif text:
            parts.append(text + ("\n" if heading else " "))
            heading = False
    return "".join(parts)


def _plain(text: str) -> str:
    return ESCAPE.sub(lambda match: CHARACTERS.get(match[1] or match[2] or match[3], ""), text)
