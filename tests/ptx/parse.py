"""PTX as text -> parameters, registers and basic blocks of its one entry (PTX ISA: Syntax, Directives)."""

import re
from typing import NamedTuple


class Instruction(NamedTuple):
    guard: str  # "", "%p1" or "!%p1"
    opcode: str
    operands: tuple[str, ...]  # as they are written; a vector or an address is one
    line: int  # of the PTX
    source: str  # file:line:column of the kernel

    def __str__(self):
        return f"{self.opcode} {', '.join(self.operands)[:80]}; PTX line {self.line}, {self.source}"


class Kernel(NamedTuple):
    name: str
    threads: int  # of a program
    parameters: list[str]
    constants: dict[str, bytes]  # tables in global memory
    predicates: set[str]  # prefixes of predicate registers
    blocks: list[list[Instruction]]  # a branch ends a block
    labels: dict[str, int]  # the block that begins there


def parse(ptx: str) -> Kernel:
    entry = re.search(r"\.visible \.entry (\w+)\((.*?)\)\s*(.*?)\{", ptx, re.DOTALL)
    assert entry is not None
    constants = {
        name: bytes(map(int, data.split(",")))
        for name, data in re.findall(r"\.global [^;=]*?\.b8 ([\w$]+)\[\d+\] = \{(.*?)\};", ptx)
    }
    predicates, blocks, labels = set(), [[]], {}
    for line, source, text in _statements(ptx, entry.end()):
        if text.endswith(":"):
            if text.startswith(("$L__tmp", "$L__func")):  # for debuggers
                continue
            if blocks[-1]:
                blocks.append([])
            labels[text[:-1]] = len(blocks) - 1
        elif text.startswith(".reg .pred"):
            predicates |= {
                name.split("<")[0].strip() for name in text.removeprefix(".reg .pred").split(",")
            }
        elif not text.startswith(
            "."
        ):  # other directives declare registers and local memory, or are for debuggers
            guard, opcode, operands = re.fullmatch(
                r"(?:@(!?%\w+)\s+)?([\w.:]+)\s*(.*)", text, re.DOTALL
            ).groups()
            operands = tuple(
                x.strip() for x in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", operands)
            )
            blocks[-1].append(Instruction(guard or "", opcode, operands, line, source))
            if opcode.split(".")[0] in ("bra", "ret"):
                blocks.append([])
    threads = int(re.search(r"\.reqntid (\d+)", entry.group(3)).group(1))
    parameters = re.findall(r"\.param \.\w+[^,]*?(\w+)\s*(?:,|$)", entry.group(2))
    return Kernel(entry.group(1), threads, parameters, constants, predicates, blocks, labels)


def _statements(ptx: str, start: int):
    """(line, source, text) of every statement and label up to the entry's last brace."""
    depth, source, pending, at = 1, "", "", 0
    for line, text in enumerate(ptx[start:].split("\n"), ptx.count("\n", 0, start) + 1):
        text, _, comment = text.partition("//")
        text = text.strip()
        if re.match(r"\.loc\s", text):
            source = comment.strip()
        elif re.fullmatch(r"[\w$]+:", text):
            yield line, source, text
        else:
            depth += text.count("{") - text.count("}")
            at = at if pending else line
            *complete, pending = f"{pending} {text}".split(";")
            for statement in complete:
                statement = re.sub(
                    r"^[\s{}]+", "", statement
                ).strip()  # braces of a scope; a vector's come later
                if statement:
                    yield at, source, statement
            pending = pending.strip()
            if depth == 0:
                return
