"""The Python files of an exported model: what transformers runs there, without this package.

Those of `interdomain.hf` are copied: configuration, cache, and transformers' classes. They import what the model is made of
from `plain_interdomain`. In the package that file imports it from `interdomain.model`; in an exported model it is the text of
MODULES, without the definitions and methods that nothing there names.
"""

import ast
import copy
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
PLAIN = "plain_interdomain.py"
MODULES = (  # each needs only what stands before it
    "scan/tables.py",
    "scan/plain.py",
    "scan/step.py",
    "features/plain.py",
    "model/feature_maps.py",
    "model/settings.py",
    "model/config.py",
    "files/config_json.py",
    "model/recomputation.py",
    "model/state.py",
    "model/mixers/fixed_state_scan.py",
    "model/kernels.py",
    "model/initialize.py",
    "model/shard.py",
    "model/layers.py",
    "model/mixers/base.py",
    "model/mixers/ssm.py",
    "model/mixers/interdomain.py",
    "model/mixers/fixed_state.py",
    "model/mixers/softmax.py",
    "model/transformer.py",
)
CALLED_BY_TORCH = {"forward", "reset_parameters", "_apply"}  # methods


def write_code(folder: Path) -> None:
    """Write the files of interdomain/hf and the license to a folder; PLAIN with the text of MODULES."""
    code = PACKAGE / "hf"
    for file in (*code.glob("*_interdomain.py"), code / "LICENSE"):
        shutil.copyfile(file, folder / file.name)
    (folder / PLAIN).write_text(plain())


def plain() -> str:
    """What the other files need of MODULES, as one text."""
    trees = {name: ast.parse((PACKAGE / name).read_text()) for name in MODULES}
    used = set()
    for file in (PACKAGE / "hf").glob("*_interdomain.py"):
        used |= _uses(ast.parse(file.read_text()))
    kept: set[ast.stmt] = set()
    found = True
    while found:
        found = []
        for tree in trees.values():
            for statement in tree.body:
                if statement not in kept and used & _defined(statement):
                    found.append(statement)
                elif statement in kept:
                    found += [m for m in _methods(statement) if m not in kept and _is_called(m.name, used)]
        kept.update(found)
        for statement in found:
            used |= _uses(statement)

    names = [
        name for tree in trees.values() for statement in tree.body if statement in kept for name in _defined(statement)
    ]
    twice = {name for name in names if names.count(name) > 1 and name != "HAS_PACKAGE"}
    assert not twice, f"two files define {twice}: one text cannot have both"
    listed = "\n".join(f"    interdomain/{name}" for name in MODULES)
    head = (
        f'"""The model, from these files of the package interdomain, without what is not needed here.\n\n{listed}\n"""'
    )
    parts = [head, _imports(trees.values(), used)]
    for name, tree in trees.items():
        text = "\n\n\n".join(_source((PACKAGE / name).read_text().splitlines(), tree, kept))
        parts.append(f"# ---- interdomain/{name}\n\n{text}")
    return "\n\n".join(parts) + "\n"


def _methods(statement: ast.AST) -> list[ast.FunctionDef]:
    members = statement.body if isinstance(statement, ast.ClassDef) else []
    return [member for member in members if isinstance(member, ast.FunctionDef)]


def _defined(statement: ast.stmt) -> set[str]:
    """The names that a top-level statement defines."""
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
        case ast.Assign(targets=targets):
            return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
        case ast.Try(body=body):
            return {name for inner in body for name in _defined(inner)}
    return set()


def _is_called(method: str, used: set[str]) -> bool:
    return f".{method}" in used or method in CALLED_BY_TORCH or method.startswith("__")


def _uses(tree: ast.AST) -> set[str]:
    """The names in a text, and its attributes as ".attribute"; without those in the methods of a class."""
    skipped = {id(node) for method in _methods(tree) for node in ast.walk(method)}
    used = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.Attribute):
            used.add(f".{node.attr}")
        elif isinstance(node, ast.ImportFrom):
            used.update(alias.name for alias in node.names)
    return used


def _imports(trees: Iterable[ast.Module], used: set[str]) -> str:
    """Statements that import what is used from other projects."""
    lines = set()
    for statement in (statement for tree in trees for statement in tree.body):
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        if isinstance(statement, ast.ImportFrom) and (
            statement.level or (statement.module or "").startswith("interdomain")
        ):
            continue
        for alias in statement.names:
            if (alias.asname or alias.name) in used:
                one = copy.copy(statement)
                one.names = [alias]
                lines.add(ast.unparse(one))
    return "\n".join(sorted(lines, key=lambda line: (line.startswith("from"), line)))


def _source(lines: list[str], tree: ast.Module, kept: set[ast.stmt]) -> Iterator[str]:
    """The legend of shapes, and the text of each statement that is kept, with the comment above it."""

    def begin(statement: ast.stmt) -> int:
        decorators = getattr(statement, "decorator_list", [])
        first = min([statement.lineno, *(decorator.lineno for decorator in decorators)]) - 1
        while lines[first - 1].lstrip().startswith("#"):
            first -= 1
        return first

    for i, line in enumerate(lines):
        if line.startswith("# Shapes"):
            end = next(j for j in range(i, len(lines)) if not lines[j].startswith("#"))
            yield "\n".join(lines[i:end])
    for statement in tree.body:
        if statement in kept:
            dropped = {
                i
                for method in _methods(statement)
                if method not in kept
                for i in range(begin(method), (method.end_lineno or 0) + 1)
            }
            span = range(begin(statement), statement.end_lineno or 0)
            yield "\n".join(lines[i] for i in span if i not in dropped).rstrip()
