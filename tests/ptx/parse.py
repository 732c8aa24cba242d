"""PTX as text -> parameters, registers and basic blocks of its one entry (PTX ISA: Syntax, Directives)."""

import re
from typing import NamedTuple


class Instruction(NamedTuple):
    guard: str  # "", "%p1" or "!%p1"
    name: str  # the opcode up to the first point
    modifiers: list[str]  # what comes after it
    operands: tuple[str, ...]  # as they are written; a vector or an address is one
    line: int  # of the PTX
    source: str  # file:line:column of the kernel

    def __str__(self):
        opcode = ".".join([self.name, *self.modifiers])
        return f"{opcode} {', '.join(self.operands)[:80]}; PTX line {self.line}, {self.source}"


class Kernel(NamedTuple):
    name: str
    threads: int  # of a program
    parameters: list[str]
    constants: dict[str, bytes]  # tables in global memory
    predicates: set[str]  # prefixes of predicate registers
    blocks: list[list[Instruction]]  # a branch ends a block
    labels: dict[str, int]  # the block that begins there


INSTRUCTION = re.compile(r"(?:@(!?%\w+)\s+)?([\w.:]+)\s*(.*)", re.DOTALL)
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")


def parse_instruction(text, line, source) -> Instruction:
    match = INSTRUCTION.fullmatch(text)
    assert match is not None, text
    guard, opcode, rest = match.groups(default="")
    name, *modifiers = opcode.split(".")
    operands = tuple(x.strip() for x in OPERAND.findall(rest))
    return Instruction(guard, name, modifiers, operands, line, source)


def parse(ptx: str) -> Kernel:
    entry = re.search(r"\.visible \.entry (\w+)\((.*?)\)\s*(.*?)\{", ptx, re.DOTALL)
    assert entry is not None
    name, declarations, directives = entry.groups()
    threads = int(re.findall(r"\.reqntid (\d+)", directives)[0])
    parameters = re.findall(r"\.param \.\w+[^,]*?(\w+)\s*(?:,|$)", declarations)
    constants = {}
    for table, data in re.findall(r"\.global [^;=]*?\.b8 ([\w$]+)\[\d+\] = \{(.*?)\};", ptx):
        constants[table] = bytes(int(number) for number in data.split(","))
    predicates = set()
    blocks = [[]]
    labels = {}
    for line, source, text in _statements(ptx, entry.end()):
        if text.startswith(("$L__tmp", "$L__func")):  # labels for debuggers
            continue
        if text.endswith(":"):
            if blocks[-1]:
                blocks.append([])
            labels[text[:-1]] = len(blocks) - 1
        elif text.startswith(".reg .pred"):
            for register in text.removeprefix(".reg .pred").split(","):
                predicates.add(register.split("<")[0].strip())
        elif not text.startswith("."):
            # Other directives declare registers and local memory, or are for debuggers.
            instruction = parse_instruction(text, line, source)
            blocks[-1].append(instruction)
            if instruction.name in ("bra", "ret"):
                blocks.append([])
    return Kernel(name, threads, parameters, constants, predicates, blocks, labels)


def _statements(ptx: str, start: int):
    """Yields (line, source, text) of every statement and label up to the entry's last brace."""
    depth = 1
    source = ""
    pending = ""
    first = 0
    for line, text in enumerate(ptx[start:].split("\n"), ptx.count("\n", 0, start) + 1):
        text, _, comment = text.partition("//")
        text = text.strip()
        if re.match(r"\.loc\s", text):
            source = comment.strip()
        elif re.fullmatch(r"[\w$]+:", text):
            yield line, source, text
        else:
            depth += text.count("{") - text.count("}")
            if not pending:
                first = line
            *complete, pending = f"{pending} {text}".split(";")
            for statement in complete:
                # Braces of a scope come first; a vector's come later.
                statement = statement.lstrip("{} \t").rstrip()
                if statement:
                    yield first, source, statement
            pending = pending.strip()
            if depth == 0:
                return
