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
MODULES = (  # each needs only those before it
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
CALLED_BY_TORCH = {"forward", "reset_parameters", "_apply"}  # methods of nn.Module


def write_code(folder: Path) -> None:
    """Writes the Python files of an exported model.

    They are the files `*_interdomain.py` of interdomain/hf and its licence. plain_interdomain.py
    has the text of MODULES in place of imports.
    """
    code = PACKAGE / "hf"
    for file in (*code.glob("*_interdomain.py"), code / "LICENSE"):
        shutil.copyfile(file, folder / file.name)
    (folder / PLAIN).write_text(text_of_modules())


def text_of_modules() -> str:
    """Returns the source of the definitions in MODULES that the other files need, as one text."""
    # Begin with the names in the files that are copied.
    texts = {name: (PACKAGE / name).read_text() for name in MODULES}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    used = set()
    for file in (PACKAGE / "hf").glob("*_interdomain.py"):
        used |= _uses(ast.parse(file.read_text()))

    # Add the names that the definitions of these names use, until there are no more.
    before = 0
    while before != len(used):
        before = len(used)
        for tree in trees.values():
            for statement in tree.body:
                if _defines(statement) & used:
                    for part in _parts(statement, used):
                        used |= _uses(part)

    # Write what defines these names, file by file.
    listed = "\n".join(f"    interdomain/{name}" for name in MODULES)
    head = (
        "The model, from these files of the package interdomain, without what is not needed here."
    )
    parts = [f'"""{head}\n\n{listed}\n"""\n', *_imports(trees.values(), used)]
    for name, tree in trees.items():
        parts += [f"\n# ---- interdomain/{name}", *_kept_lines(texts[name], tree, used)]
    return "\n".join(parts) + "\n"


def _parts(statement: ast.AST, used: set[str]) -> list[ast.AST]:
    """Returns the parts of a statement, without the methods of a class that are not needed.

    A method is needed if any attribute of its name is in use, if PyTorch calls it, or if Python
    does.

    Args:
        statement: A statement of a module, such as a class.
        used: The names in use, and the attributes in use as ".attribute" (`_uses`).
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


def _defines(statement: ast.AST) -> set[str]:
    """Returns the names that a top-level statement of a file defines. Imports define none."""
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
            return set().union(*map(_defines, body))
    return set()


def _uses(tree: ast.AST) -> set[str]:
    """Returns the names in a syntax tree, and the attributes in it as ".attribute"."""
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.Attribute):
            used.add(f".{node.attr}")
        elif isinstance(node, ast.alias):
            used.add(node.name)
    return used


def _imports(trees: Iterable[ast.Module], used: set[str]) -> list[str]:
    """Returns the lines that import the names in use from other packages, one name per line.

    Args:
        trees: The syntax trees of MODULES.
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
                continue
            if not source.startswith("from interdomain"):
                for alias in statement.names:
                    if (alias.asname or alias.name) in used:
                        lines.add(f"{source} {ast.unparse(alias)}")
    return sorted(lines)


def _kept_lines(text: str, tree: ast.Module, used: set[str]) -> list[str]:
    """Returns the lines of a file that define names in use, with the comments above them.

    Args:
        text: The contents of the file.
        tree: Its syntax tree.
        used: The names in use, and the attributes in use as ".attribute" (`_uses`).
    """
    lines = text.splitlines()
    kept = []
    begin = 0
    for statement in tree.body:
        if _defines(statement) & used:
            # A class is kept by its members, any other statement as a whole.
            members = [statement]
            if isinstance(statement, ast.ClassDef):
                kept += lines[begin : statement.lineno]
                begin = statement.lineno
                members = statement.body
            needed = [statement, *_parts(statement, used)]
            for member in members:
                if member in needed:
                    kept += lines[begin : member.end_lineno]
                begin = member.end_lineno
        begin = statement.end_lineno
    return kept
