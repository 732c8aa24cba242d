"""The blocks of a page, and the commands of a block."""

import json
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..common import REPOSITORY

DOCS = REPOSITORY / "docs"
PAGES = [REPOSITORY / "README.md", *sorted(DOCS.rglob("*.md")), *sorted(DOCS.rglob("*.ipynb"))]
FENCED = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
REDIRECTION = re.compile(r"[12]?(<<|>>|>&|<|>) *\S+")
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
    """Returns the blocks in the order of the page. Those of a notebook are its cells, without IPython's own commands."""
    found = []
    text = page.read_text()
    if page.suffix == ".ipynb":
        for cell in json.loads(text)["cells"]:
            if cell["cell_type"] == "code":
                source = "".join(cell["source"])
                found.append(Block("python", re.sub(r"(?m)^[%!].*", "", source), 1))
        return found
    for fence in FENCED.finditer(text):
        line = text.count("\n", 0, fence.start(3)) + 1
        found.append(Block(fence[2], textwrap.dedent(fence[3]), line))
    return found


def prose(page: Path) -> str:
    return "" if page.suffix == ".ipynb" else FENCED.sub("", page.read_text())


def commands(block: Block) -> Iterator[tuple[int, str]]:
    """Yields the commands of a block of bash, each with the number of its first line on the page.

    A command is a line, or several by a backslash, an open quote or `<<'WORD'`.
    """
    lines = enumerate(block.text.splitlines(), block.line)
    for number, text in lines:
        document = re.search(r"<<'(\w+)'$", text)
        if document:
            while not text.endswith(f"\n{document[1]}"):
                text += "\n" + next(lines)[1]
        while text.endswith("\\"):
            text = text[:-1] + next(lines)[1]
        while quote_is_open(text):
            text += "\n" + next(lines)[1]
        if words(text):
            yield number, text


def quote_is_open(text: str) -> bool:
    try:
        words(text)
    except ValueError:
        return True
    return False


def words(text: str) -> list[str]:
    """Words as a shell splits them, without comments; operators are words of their own."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)


def simple_commands(text: str) -> Iterator[list[str]]:
    """Yields the commands that operators join, without redirections and without the variables before the program."""
    if "<<" in text:
        text = text.partition("\n")[0]
    command = []
    for word in [*words(REDIRECTION.sub("", text)), ";"]:
        if word in SEPARATORS:
            if command:
                yield command
            command = []
        elif command or not re.match(r"\w+=", word):
            command.append(word)
