"""Text of Debian packages: documents of .deb files, their check against the table, and apt-get."""

import functools
import gzip
import hashlib
import io
import shutil
import tarfile

import pytest

from interdomain.data import debian, read_manifest
from interdomain.data.readers import read_documents
from interdomain.tools import prepare_data

from ..common import write_program

PAGE = r'''.\" A comment.
.de XX
not printed
..
.TH open 2 2023\-02\-05 "Linux man-pages"
.SH NAME
open, creat \- open a \fIfile\fP \" a comment
.SH SYNOPSIS
.nf
.BI "int open(const char *" path ", int " flags );
.PP
.B "    if (fd == \-1)"
.fi
.SH DESCRIPTION
See
.BR creat (2)
and \(lqthe
.I file
table\(rq.
.TP
.BR O_CREAT " (\fBflag\fP)"
Creates \[dq]it\[dq].
.IP """\f(CWa\en\fR""" 4
One item.
.IP \(bu 3
Another.
.TS
l l.
left	out
.TE
.PP
The
end.
'''

PAGE_TEXT = """open(2)

NAME
open, creat - open a file

SYNOPSIS

int open(const char *path, int flags);

    if (fd == -1)

DESCRIPTION
See creat(2) and "the file table".

O_CREAT (flag)
Creates "it".

"a\\n"
One item.

* Another.

The end.
"""


def sentences(name, count=20):
    return "".join(f"This is line {i} of {name}, a text of some length.\n" for i in range(count))


NODE = "\x1f\nFile: x.info,  Node: "
INFO = f"""This is x.info, produced by makeinfo.

{NODE}Start,  Up: Top

* Menu:

* Start::   The start
{sentences("start")}{NODE}Concept Index,  Up: Top

\0\b[index\0\b]
* Menu:

* a: b.
{NODE}GNU Free Documentation License,  Up: Top

{sentences("a licence")}{NODE}End,  Up: Top

{sentences("end")}\x1f
End
"""
ENTRIES = [f"word {i}\n   {'meaning, ' * 59}meaning\n" for i in range(20)]
FILES = {
    "usr/share/man/man2/open.2.gz": gzip.compress(PAGE.encode()),
    "usr/share/man/man2/creat.2.gz": gzip.compress(b".so man2/open.2\n"),
    "usr/share/man/man7/ascii.7.gz": gzip.compress((".TH ascii 7\n" + sentences("codes")).encode()),
    "usr/share/info/x.info.gz": gzip.compress(INFO.encode()),
    "usr/share/dictd/x.dict.dz": gzip.compress(
        f"00-database-info\n   {sentences('info')}".replace("\nThis", "\n   This").encode()
        + "\n".join(ENTRIES).encode()
        + b"\nASCII character table\n   0 NUL\n"
    ),
    "usr/share/doc/x/book.txt": (
        f"Chapter 1. One\nSee Chapter 2.\n{sentences('one')}+--+--+\n| a|b |\n+--+--+\nChapter 2: Two\n{sentences('two')}"
    ).encode(),
    "usr/share/doc/x/copy.txt": f"Chapter 2: Two\n{sentences('two')}".encode(),
    "usr/share/doc/x/short.txt": b"Too short.\n",
    "usr/share/doc/x/changelog.gz": gzip.compress(sentences("changes").encode()),
}


def deb(files, compression="xz"):
    """A .deb file: an ar archive with a member of odd length before the data."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=f"w:{compression}") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("./usr/share/doc/x/link.txt")
        link.type = tarfile.SYMTYPE
        link.linkname = "book.txt"
        tar.addfile(link)
    archive = b"!<arch>\n"
    for name, content in (
        ("debian-binary", b"2.0\n"),
        ("control.tar", b"odd"),
        (f"data.tar.{compression}", data.getvalue()),
    ):
        header = f"{name:16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n"
        archive += header.encode() + content
        archive += b"\n" * (len(content) % 2)
    return archive


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder with the .deb files of two packages, which make up the table."""
    folder = tmp_path / "debs"
    folder.mkdir()
    table = {}
    for name, version, file, files in (
        ("x-doc", "2:1.0-1", "x-doc_2%3a1.0-1_all.deb", FILES),
        ("y-doc", "3", "y-doc_3_all.deb", {"usr/share/doc/y/y": sentences("y").encode()}),
    ):
        content = deb(files)
        (folder / file).write_bytes(content)
        table[name] = {
            "version": version,
            "sha256": hashlib.sha256(content).hexdigest(),
            "read": ["usr/share/man/*", "usr/share/info/*", "*.dict.dz", "usr/share/doc/[xy]/*"],
            "leave_out": ["*/ascii.7.gz", "*/changelog.gz"],
        }
    monkeypatch.setattr(debian, "package_table", functools.partial(dict, table))
    monkeypatch.setattr(debian, "SHORTEST", len(PAGE_TEXT))
    return folder


def test_the_documents_of_a_package(packages, tmp_path):
    documents = list(read_documents([f"debian:{packages}"]))
    entries, more_entries, chapter, second, manual, page, other = documents
    assert f"{entries}\n{more_entries}" == "\n".join(ENTRIES)
    assert len(entries) - len(ENTRIES[0]) < debian.JOINED <= len(entries) + 1
    assert chapter == f"Chapter 1. One\nSee Chapter 2.\n{sentences('one')}"
    assert second == f"Chapter 2: Two\n{sentences('two')}"  # and not once more from copy.txt
    assert manual == f"{sentences('start')}\n{sentences('end')}"
    assert page == PAGE_TEXT
    assert other == sentences("y")
    # Another compression, and another order of the files.
    (tmp_path / "x-doc_other.deb").write_bytes(deb(dict(reversed(FILES.items())), "gz"))
    assert list(debian.read_package(tmp_path / "x-doc_other.deb")) == documents[:-1]


def test_a_corpus_of_files_at_hand(packages, tmp_path, capsys):
    """Files that are not exactly those of the table are refused."""
    line = f"--input debian:{packages} --vocab-size 340 --validation-fraction 0 --output {tmp_path}"
    assert prepare_data.main(f"{line}/corpus".split()) == 0
    x_doc, y_doc = sorted(packages.iterdir())
    manifest = read_manifest(tmp_path / "corpus")
    assert manifest["source"]["inputs"] == [
        {"file": x_doc.name, "bytes": x_doc.stat().st_size},
        {"file": y_doc.name, "bytes": y_doc.stat().st_size},
    ]
    assert [shard["documents"] for shard in manifest["splits"]["train"]] == [7]
    y_doc.write_bytes(y_doc.read_bytes() + b"\n")
    assert prepare_data.main(f"{line}/damaged".split()) == 2
    assert f"{y_doc} is damaged or another build" in capsys.readouterr().err


def test_apt_get_downloads_only_what_is_missing(packages, tmp_path, monkeypatch, capfd):
    """A stand-in for apt-get fails, as for a version that Debian has replaced; then it works."""
    folder = tmp_path / "bin"
    folder.mkdir()
    apt_get = folder / "apt-get"
    write_program(apt_get, "echo \"E: Version '3' was not found\" >&2; exit 100")
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.chdir(folder)
    debian.DOWNLOADS.mkdir(parents=True)
    shutil.copy(packages / "y-doc_3_all.deb", debian.DOWNLOADS)
    with pytest.raises(FileNotFoundError, match=r"x-doc_.* is missing.*archive of old packages"):
        debian.debian_packages("debian")
    assert "E: Version '3' was not found" in capfd.readouterr().err
    write_program(apt_get, f'echo "$@" >> {tmp_path}/calls; cp {packages}/x-doc* .')
    for _ in range(2):
        assert len(list(read_documents(["debian"]))) == 7
    assert (tmp_path / "calls").read_text() == "download --quiet x-doc=2:1.0-1\n"
