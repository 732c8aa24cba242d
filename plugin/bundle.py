"""The code of an exported folder: this package's own modules as flat files, which is all that transformers copies.

transformers finds further files by the text of their imports, one folder deep, `from .name import x` alone; and it takes every
import outside of `try` for a requirement. So `interdomain.scan.ops` becomes interdomain_scan_ops.py, imports change to that
form, and nothing else does.
"""

import ast
import importlib.util
from pathlib import Path

from interdomain import __version__

ENTRY = "interdomain.hf.modeling"
NAMES = {ENTRY: "modeling_interdomain", "interdomain.hf.configuration": "configuration_interdomain"}
AUTO_MAP = {
    "AutoConfig": "configuration_interdomain.InterdomainConfig",
    "AutoModelForCausalLM": "modeling_interdomain.InterdomainForCausalLM",
}
OPTIONAL = ("triton",)  # the code runs without
MODULE = "this_module"  # the name under which a file exports itself, for those that import it as a module
EXPORT = f'\n\n{MODULE} = __import__("sys").modules[__name__]\n'


def write_code(folder: Path | str) -> dict[str, str]:
    """Write the files into `folder`. Returns the `auto_map` of its config.json, by which transformers finds them."""
    for name, text in bundled().items():
        (Path(folder) / name).write_text(text, encoding="utf-8")
    return AUTO_MAP


def bundled() -> dict[str, str]:
    """{file name: contents} of all that `AutoModelForCausalLM` needs."""
    texts, whole, waiting = {}, set(), {ENTRY}
    while waiting:
        module = waiting.pop()
        texts[module], imported = _rewritten(module)
        whole |= {target for target, name in imported if name == MODULE}
        waiting |= {target for target, _ in imported} - texts.keys()
    headers = {
        module: f"# Written by interdomain {__version__} from {module}: edit that, not this.\n" for module in texts
    }
    files = {
        flat_name(module): headers[module] + text + (EXPORT if module in whole else "")
        for module, text in texts.items()
    }
    named = "".join(f"    from .{name} import {MODULE}\n" for name in sorted(files) if name not in NAMES.values())
    files[NAMES[ENTRY]] += (
        f"\nif False:  # transformers 4 copies the files that this one names, and no further\n{named}"
    )
    return {f"{name}.py": text for name, text in files.items()}


def flat_name(module: str) -> str:
    return NAMES.get(module) or module.replace(".", "_")


def _source(module: str) -> Path | None:
    """The file of a module of ours, of which none is imported; None if there is no such module."""
    package, inner = module.split(".")[:2], module.split(".")[2:]
    spec = importlib.util.find_spec(".".join(package))
    if spec is None or not inner:
        return spec and Path(spec.origin)
    path = Path(spec.origin).parent.joinpath(*inner).with_suffix(".py")
    return path if spec.submodule_search_locations and path.is_file() else None


def _rewritten(module: str) -> tuple[str, set[tuple[str, str]]]:
    """(a module's text with its imports made flat, what these import as (module, name in it))."""
    path = _source(module)
    text = path.read_text(encoding="utf-8")
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    lines, imported = text.splitlines(), set()
    nodes = list(ast.walk(ast.parse(text)))
    tried = {child for node in nodes if isinstance(node, ast.Try) for child in node.body}
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in sorted(imports, key=lambda node: -node.lineno):
        written = _flat(node, package, imported, node in tried)
        lines[node.lineno - 1 : node.end_lineno] = [" " * node.col_offset + line for line in written]
    return "\n".join(lines) + "\n", imported


def _flat(node: ast.Import | ast.ImportFrom, package: str, imported: set[tuple[str, str]], tried: bool) -> list[str]:
    """The lines that take the place of an import. tried: it stands in a `try` already."""
    start = (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
    if isinstance(node, ast.ImportFrom) and node.level:
        parents = package.split(".")
        start = ".".join(filter(None, (*parents[: len(parents) + 1 - node.level], start)))
    if start.partition(".")[0] in OPTIONAL and not tried:
        return ["try:", f"    {ast.unparse(node)}", "except ImportError:", "    raise"]
    if start.partition(".")[0] != "interdomain":
        return [ast.unparse(node)]
    if isinstance(node, ast.Import):
        raise NotImplementedError(f"{ast.unparse(node)} in {package}: an exported folder needs `from ... import`.")
    by_file = {}
    for alias in node.names:
        whole = _source(f"{start}.{alias.name}") is not None
        target, name = (f"{start}.{alias.name}", MODULE) if whole else (start, alias.name)
        imported.add((target, name))
        known_as = alias.asname or alias.name
        by_file.setdefault(flat_name(target), []).append(name if name == known_as else f"{name} as {known_as}")
    return [f"from .{file} import {', '.join(names)}" for file, names in by_file.items()]
