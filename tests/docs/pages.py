"""The blocks of a page, and the commands of a block."""

import itertools
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
    if page.suffix == ".ipynb":
        for cell in json.loads(page.read_text())["cells"]:
            if cell["cell_type"] == "code":
                text = "".join(cell["source"])
                found.append(Block("python", re.sub(r"(?m)^[%!].*", "", text), 1))
        return found
    text = page.read_text()
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
    begun = block.line
    text = ""
    end_of_document = None
    for number, line in enumerate(block.text.splitlines(), block.line):
        if not text:
            begun = number
        text += line
        document = re.search(r"<<'(\w+)'$", line)
        if end_of_document is None and document:
            end_of_document = document[1]
        if end_of_document is not None:
            text += "\n"
            if line == end_of_document:
                yield begun, text
                text = ""
                end_of_document = None
        elif text.endswith("\\"):
            text = text[:-1]
        elif quote_is_open(text):
            text += "\n"
        else:
            if words(text):
                yield begun, text
            text = ""
    assert not text, f"line {begun}: this command does not end"


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


def is_redirection(word: str) -> bool:
    return set(word) <= set("<>&") and word != "&" * len(word)


def program_and_arguments(command: list[str]) -> list[str]:
    """Leaves out redirections and what stands before the program: variables, `nohup`, `time`."""
    command = list(command)
    for i in reversed(range(len(command))):
        if is_redirection(command[i]):
            # The number of a stream may stand before it, and a file stands after it.
            first = i - 1 if i > 0 and command[i - 1] in ("1", "2") else i
            del command[first : i + 2]
    while command and re.match(r"\w+=|(nohup|time)$", command[0]):
        del command[0]
    return command


def simple_commands(text: str) -> Iterator[list[str]]:
    """Yields the commands that operators join, without redirections and without what stands before the program."""
    if "<<" in text:
        text = text.partition("\n")[0]
    for is_separator, group in itertools.groupby(words(text), SEPARATORS.__contains__):
        command = [] if is_separator else program_and_arguments(group)
        if command:
            yield command
