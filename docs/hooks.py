"""Hooks of mkdocs, for what the site shows otherwise than GitHub.

These are notebooks, pairs of pictures, formulas, and the table of settings.
"""

import ast
import dataclasses
import inspect
import json
import re
from html import unescape
from typing import Any, get_type_hints

from latex2mathml.converter import convert
from mkdocs.structure.files import File

from interdomain.markdown import markdown_rows
from interdomain.titan.settings import schema

# A light and a dark picture, as GitHub shows them. The site has a switch of its own, which its
# theme knows by the links' ends.
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(.*?)">\s*'
    r'<img alt="(.*?)" src="(.*?)">\s*</picture>'
)
# TeX in the elements in which pymdownx.arithmatex puts it: \( a formula in a line \), or
# \[ one in lines of its own \].
FORMULA = re.compile(r'(?<=class="arithmatex">)\\([(\[])(.*?)\\[)\]](?=</)', re.DOTALL)
# TeX that GitHub renders and latex2mathml does not know, and what it knows in its place.
KNOWN_TO_CONVERTER = {"{aligned}": "{align*}", r"\arg": r"\mathrm{arg}"}
# A page that has this mark gets the table of all settings in its place.
SETTINGS_MARK = "<!-- settings -->"


def on_files(files: Any, config: Any) -> None:
    """Replaces each notebook by a page. mkdocs calls this when it has listed the files of the site.

    Args:
        files: mkdocs' list of all files, changed in place.
        config: mkdocs' configuration.
    """
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            page = file.src_uri.replace(".ipynb", ".md")
            content = as_markdown(json.loads(file.content_string))
            files.remove(file)
            files.append(File.generated(config, page, content=content))


def as_markdown(notebook: dict[str, Any]) -> str:
    """Returns a notebook's cells as Markdown, each with its output: text, or a picture.

    Args:
        notebook: The contents of an .ipynb file.
    """
    blocks = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            source = f"```python\n{source}\n```"
        blocks.append(source)
        # A cell prints text or shows a picture.
        for output in cell.get("outputs", ()):
            if output["output_type"] == "stream":
                text = "".join(output["text"])
                blocks.append(f"```text\n{text}```")
            else:
                png = "".join(output["data"]["image/png"]).strip()
                blocks.append(f"![output](data:image/png;base64,{png})")
    return "\n\n".join(blocks)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Changes links to notebooks and pairs of pictures, and fills in the settings.

    mkdocs calls this for each page before it is rendered.

    Args:
        markdown: The text of the page.
    """
    markdown = markdown.replace(".ipynb)", ".md)")
    markdown = PICTURE.sub(r"![\2](\3#only-light)\n![\2](\1#only-dark)", markdown)
    if SETTINGS_MARK in markdown:
        markdown = markdown.replace(SETTINGS_MARK, settings())
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Replaces TeX by MathML, which browsers set without a script or a network.

    mkdocs calls this for each page.

    Args:
        html: The page's content.
    """
    return FORMULA.sub(as_mathml, html)


def as_mathml(formula: re.Match[str]) -> str:
    """Returns a formula as MathML. `formula` is a match of FORMULA."""
    display = "block" if formula[1] == "[" else "inline"
    tex = unescape(formula[2])
    for name, known in KNOWN_TO_CONVERTER.items():
        tex = tex.replace(name, known)
    return convert(tex, display=display)


def settings() -> str:
    """Returns a table for each section of the settings that titan/settings/schema.py declares."""
    comments = comments_of_fields(inspect.getsource(schema))
    lines = []
    for section, table in get_type_hints(schema.JobConfig).items():
        # The docstring of a section begins with its title.
        title, _, text = str(inspect.getdoc(table)).partition(": ")
        text = text[0].upper() + text[1:]
        lines += [f"### {title}\n", f"{text}\n"]
        cells = [["setting", "type", "default", ""]]
        defaults = table()
        for field in dataclasses.fields(table):
            # Type, default and meaning of a setting.
            declared = schema.SETTINGS[f"{section}.{field.name}"]
            kind = inspect.formatannotation(declared.kind)
            if declared.bound:
                kind += f", {declared.bound.description}"
            text = comments.get((table.__name__, field.name)) or schema.MIXER_HELP[field.name]
            if declared.torchtitan:
                text += f" Only our trainer has it: TorchTitan's {declared.torchtitan}."
            default = getattr(defaults, field.name)
            cells.append([f"`{field.name}`", kind, f"`{default!r}`", text])
        lines += [*markdown_rows(cells), ""]
    return "\n".join(lines)


def comments_of_fields(source: str) -> dict[tuple[str, str], str]:
    """Returns the comment of each field, by (class, field).

    It is in the lines `#:` above the field, or beside it.

    Args:
        source: The text of a module with dataclasses.
    """
    lines = source.splitlines()
    comments = {}
    for table in ast.parse(source).body:
        if not isinstance(table, ast.ClassDef):
            continue
        for field in table.body:
            if not isinstance(field, ast.AnnAssign):
                continue
            # Lines above the field, from the last one upwards.
            above = []
            first = field.lineno - 1
            while lines[first - 1].startswith("    #: "):
                first -= 1
                above.insert(0, lines[first].strip(" #:"))
            declaration = "\n".join(lines[field.lineno - 1 : field.end_lineno])
            beside = re.findall("  # (.*)", declaration)
            comments[table.name, ast.unparse(field.target)] = " ".join(above or beside)
    return comments
