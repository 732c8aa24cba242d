"""The blocks of a page, and the commands of a block."""

import json
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..common import REPOSITORY

PAGES = [
    REPOSITORY / "README.md",
    *sorted(p for end in ("md", "ipynb") for p in (REPOSITORY / "docs").rglob(f"*.{end}")),
]
FENCED = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
SEPARATORS = {"&&", "||", ";", "|", "&"}


class Block(NamedTuple):
    """Lines of a page in one language; `line` is the first one's number."""

    language: str
    text: str
    line: int

    @property
    def needs(self) -> bool:
        """True if it needs more than a small machine without a network has."""
        return self.text.startswith("# needs: ")


def blocks(page: Path) -> list[Block]:
    """In the order of the page; of a notebook its cells of code, without IPython's own commands."""
    if page.suffix == ".ipynb":
        cells = [
            cell for cell in json.loads(page.read_text())["cells"] if cell["cell_type"] == "code"
        ]
        return [
            Block("python", re.sub(r"(?m)^[%!].*", "", "".join(cell["source"])), 1)
            for cell in cells
        ]
    text = page.read_text()
    return [
        Block(fence[2], textwrap.dedent(fence[3]), text.count("\n", 0, fence.start(3)) + 1)
        for fence in FENCED.finditer(text)
    ]


def prose(page: Path) -> str:
    return "" if page.suffix == ".ipynb" else FENCED.sub("", page.read_text())


def commands(block: Block) -> Iterator[tuple[int, str]]:
    """(number of the page's line, command) of a block of bash: a line, or several by a backslash, an open quote or `<<`."""
    begun, text, until = block.line, "", None
    for number, line in enumerate(block.text.splitlines(), block.line):
        begun = begun if text else number
        text += line
        if until is None and (here := re.search(r"<<'(\w+)'$", line)):
            until = here[1]
        if until not in (None, line):
            text += "\n"
            continue
        if until:
            yield begun, text + "\n"
            text, until = "", None
            continue
        if text.endswith("\\"):
            text = text[:-1]
            continue
        try:
            if words(text):
                yield begun, text
            text = ""
        except ValueError:  # an open quote
            text += "\n"
    assert not text, f"line {begun}: this command does not end"


def words(text: str) -> list[str]:
    """Words as a shell splits them, without comments; operators are words of their own."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)


def simple_commands(text: str) -> Iterator[list[str]]:
    """The commands that operators join, without redirections and what stands before the program: settings, `nohup`, `time`."""
    command: list[str] = []
    for word in [*words(text.partition("\n")[0] if "<<" in text else text), ";"]:
        if word not in SEPARATORS:
            command.append(word)
            continue
        for i in range(len(command) - 1, -1, -1):
            if set(command[i]) & set("<>") and set(command[i]) <= set("<>&"):
                del command[i - (i > 0 and command[i - 1] in ("1", "2")) : i + 2]
        while command and (command[0] in ("nohup", "time") or re.match(r"\w+=", command[0])):
            del command[0]
        if command:
            yield command
        command = []
