"""The Python files of an exported model: what transformers runs there, without this package.

Those of `interdomain.hf` are copied: configuration, cache, and transformers' classes. They import what the model is made of
from `plain_interdomain`. In the package that file imports it from `interdomain.model`; in an exported model it is the text of
MODULES, without the definitions and methods that nothing there names.
"""

import ast
import shutil
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
    "checkpoint/config_json.py",
    "model/state.py",
    "model/mixers/fixed_state_scan.py",
    "model/mixers/kernels.py",
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
IMPORTS = """\
import hashlib
import logging
import math
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
"""
CALLED_BY_TORCH = {"forward", "reset_parameters", "_apply"}  # methods


def write_code(folder: Path) -> None:
    """Write the files of interdomain/hf and the license to a folder; PLAIN with the text of MODULES."""
    code = PACKAGE / "hf"
    for file in (*code.glob("*_interdomain.py"), code / "LICENSE"):
        shutil.copyfile(file, folder / file.name)
    (folder / PLAIN).write_text(plain())


def plain() -> str:
    """The source of the definitions in MODULES that the other files need, as one text."""
    texts = {name: (PACKAGE / name).read_text() for name in MODULES}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    used = set()
    for file in (PACKAGE / "hf").glob("*_interdomain.py"):
        used |= _uses(ast.parse(file.read_text()))

    # Take what is used, then what that uses, until there is nothing more. Methods wait for their class.
    kept: set[ast.AST] = set()
    found = True
    while found:
        found = []
        for tree in trees.values():
            found += [member for member in tree.body if _is_needed(member, used)]
            for parent in tree.body:
                if parent in kept and isinstance(parent, ast.ClassDef):
                    methods = [
                        member for member in parent.body if isinstance(member, ast.FunctionDef)
                    ]
                    found += [method for method in methods if _is_called(method.name, used)]
        found = [member for member in found if member not in kept]
        kept.update(found)
        for member in found:
            used |= _uses(member)

    listed = "\n".join(f"    interdomain/{name}" for name in MODULES)
    head = f'"""The model, from these files of the package interdomain, without what is not needed here.\n\n{listed}\n"""\n'
    parts = [head, IMPORTS]
    for name, tree in trees.items():
        lines = _lines_of(texts[name].splitlines(), tree, 0, kept)
        parts += [f"\n# ---- interdomain/{name}", *lines]
    return "\n".join(parts) + "\n"


def _is_called(method: str, used: set[str]) -> bool:
    return f".{method}" in used or method in CALLED_BY_TORCH or method.startswith("__")


def _is_needed(statement: ast.AST, used: set[str]) -> bool:
    """True if a statement at the top level of a file defines a name in use."""
    match statement:
        case (
            ast.FunctionDef(name=name)
            | ast.ClassDef(name=name)
            | ast.AnnAssign(target=ast.Name(id=name))
        ):
            return name in used
        case ast.Assign(targets=targets):
            return any(
                name.id in used
                for target in targets
                for name in ast.walk(target)
                if isinstance(name, ast.Name)
            )
        case ast.Try(body=body):
            return any(_is_needed(inner, used) for inner in body)
    return False


def _uses(tree: ast.AST) -> set[str]:
    """The names in a text, and its attributes as ".attribute". A class's methods are asked by themselves."""
    used = set()
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.Attribute):
            used.add(f".{node.attr}")
        elif isinstance(node, ast.alias):
            used.add(node.name)
        children = ast.iter_child_nodes(node)
        methods = isinstance(tree, ast.ClassDef) and node is tree
        left += [
            child for child in children if not (methods and isinstance(child, ast.FunctionDef))
        ]
    return used


def _lines_of(
    lines: list[str], parent: ast.Module | ast.ClassDef, begin: int, kept: set[ast.AST]
) -> list[str]:
    """The text of what is kept of a file or a class, from line `begin` on, each with what stands above it."""
    text = []
    for member in parent.body:
        end = member.end_lineno or 0
        if isinstance(member, ast.ClassDef) and member in kept:
            head = member.body[0].lineno - 1
            text += lines[begin:head] + _lines_of(lines, member, head, kept)
        elif member in kept or (
            isinstance(parent, ast.ClassDef) and not isinstance(member, ast.FunctionDef)
        ):
            text += lines[begin:end]
        begin = end
    return text
