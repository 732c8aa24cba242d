"""Writes the Python files of an exported model: what transformers runs there, without this package.

The files of `interdomain.hf` are copied: the configuration, the cache and transformers' classes.
They import the rest of the model from `plain_interdomain`. In the package that file imports it from
`interdomain.model`. In an exported model it holds the text of MODULES, without the definitions and
the methods that nothing there names.
"""

import ast
import shutil
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
PLAIN = "plain_interdomain.py"  # the file that holds the text of MODULES
# The files of this package whose definitions the model needs. Each needs only those before it.
MODULES = (
    "scan/tables.py",
    "scan/plain.py",
    "scan/step.py",
    "features/plain.py",
    "model/feature_maps.py",
    "model/settings.py",
    "model/config.py",
    "checkpoint/config_json.py",
    "model/state.py",
    "model/mixers/fixed_state_scan.py",
    "model/mixers/kernels.py",
    "model/initialize.py",
    "model/parallel.py",
    "model/layers.py",
    "model/mixers/base.py",
    "model/mixers/ssm.py",
    "model/mixers/interdomain.py",
    "model/mixers/fixed_state.py",
    "model/mixers/softmax.py",
    "model/transformer.py",
)
# Methods of an nn.Module that PyTorch calls. They are kept even if no text names them.
CALLED_BY_TORCH = {"forward", "reset_parameters", "_apply"}


def write_code(folder: Path) -> None:
    """Writes the Python files of an exported model.

    They are copies of the files `*_interdomain.py` of interdomain/hf and of its licence. Only
    plain_interdomain.py is another: it has definitions of the package where the original imports
    them.

    Args:
        folder: The exported model.
    """
    code = PACKAGE / "hf"
    for file in (*code.glob("*_interdomain.py"), code / "LICENSE"):
        shutil.copyfile(file, folder / file.name)
    # Overwrite the copy of plain_interdomain.py, which imports the package.
    (folder / PLAIN).write_text(text_of_modules())


def text_of_modules() -> str:
    """Returns the text of an exported model's plain_interdomain.py.

    It has the definitions in MODULES, files of this package, that the files `*_interdomain.py` of
    interdomain/hf use, and those that these definitions use in turn.
    """
    # Begin with the names and the attributes (".name") that stand in the files of interdomain/hf.
    texts = {name: (PACKAGE / name).read_text() for name in MODULES}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    used = set()
    for file in (PACKAGE / "hf").glob("*_interdomain.py"):
        used |= _names_used(ast.parse(file.read_text()))

    # Add the names and the attributes that the definitions of these names use, until there are no
    # more. A class counts without the methods that nobody calls.
    before = 0
    while before != len(used):
        before = len(used)
        for tree in trees.values():
            for statement in tree.body:
                if _names_defined(statement) & used:
                    for part in _needed_parts(statement, used):
                        used |= _names_used(part)

    # Write the imports from other packages, and what defines these names, file by file.
    listed = "\n".join(f"    interdomain/{name}" for name in MODULES)
    head = (
        "The model, from these files of the package interdomain, without what is not needed here."
    )
    parts = [f'"""{head}\n\n{listed}\n"""\n', *_import_lines(trees.values(), used)]
    for name, tree in trees.items():
        parts += [f"\n# ---- interdomain/{name}", *_kept_lines(texts[name], tree, used)]
    return "\n".join(parts) + "\n"


def _needed_parts(statement: ast.AST, used: set[str]) -> list[ast.AST]:
    """Returns the child nodes of a statement, without the methods of a class that are not needed.

    A method is needed if any attribute of its name is in use, if PyTorch calls it, or if Python
    does (`__init__`).

    Args:
        statement: A statement of a module, such as a class.
        used: The names in use, and the attributes in use as ".attribute" (`_names_used`).
    """
    parts = []
    for part in ast.iter_child_nodes(statement):
        if isinstance(statement, ast.ClassDef) and isinstance(part, ast.FunctionDef):
            name = part.name
            is_needed = f".{name}" in used or name in CALLED_BY_TORCH or name.startswith("__")
            if not is_needed:
                continue
        parts.append(part)
    return parts


def _names_defined(statement: ast.AST) -> set[str]:
    """Returns the names that a top-level statement of a file defines. Imports define none.

    Args:
        statement: The syntax tree of the statement.
    """
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            nodes = [node for target in targets for node in ast.walk(target)]
            return {node.id for node in nodes if isinstance(node, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.AugAssign(target=ast.Name(id=name)):
            return {name}
        # A definition under a condition, such as whether a package can be imported.
        case ast.Try(body=body) | ast.If(body=body):
            return set().union(*map(_names_defined, body))
    return set()


def _names_used(tree: ast.AST) -> set[str]:
    """Returns the names in a syntax tree, and the attributes in it as ".attribute".

    Names include those that the tree imports.
    """
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.Attribute):
            used.add(f".{node.attr}")
        elif isinstance(node, ast.alias):
            used.add(node.name)
    return used


def _import_lines(trees: Iterable[ast.Module], used: set[str]) -> list[str]:
    """Returns the lines that import the names in use from other packages, one name per line.

    Only top-level imports count. Those within a function, a `try` or an `if` are copied together
    with it.

    Args:
        trees: The syntax trees of the files whose definitions are copied.
        used: The names in use.
    """
    lines = set()
    for tree in trees:
        for statement in tree.body:
            if isinstance(statement, ast.Import):
                source = "import"
            elif isinstance(statement, ast.ImportFrom) and statement.level == 0:
                source = f"from {statement.module} import"
            else:
                # No import, or a relative one: `from .layers import`.
                continue
            # Definitions of this package stand in the same text.
            if not source.startswith("from interdomain"):
                for alias in statement.names:
                    if (alias.asname or alias.name) in used:
                        lines.add(f"{source} {ast.unparse(alias)}")
    return sorted(lines)


def _kept_lines(text: str, tree: ast.Module, used: set[str]) -> list[str]:
    """Returns the lines of a file that define names in use, with the comments above them.

    Methods that are not needed are left out (`_needed_parts`).

    Args:
        text: The contents of the file.
        tree: Its syntax tree.
        used: The names in use, and the attributes in use as ".attribute" (`_names_used`).
    """
    lines = text.splitlines()
    kept = []
    # The first line behind the last statement or member: comments above the next one begin there.
    begin = 0
    for statement in tree.body:
        if _names_defined(statement) & used:
            # A statement is kept as a whole, but a class member by member: first its head, then
            # those members that are needed.
            members = [statement]
            if isinstance(statement, ast.ClassDef):
                kept += lines[begin : statement.lineno]
                begin = statement.lineno
                members = statement.body
            # A statement is needed itself; members of a class are if they are among its parts.
            needed = [statement, *_needed_parts(statement, used)]
            for member in members:
                if member in needed:
                    kept += lines[begin : member.end_lineno]
                begin = member.end_lineno
        begin = statement.end_lineno
    return kept
