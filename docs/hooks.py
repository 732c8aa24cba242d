"""mkdocs: what the site shows otherwise than GitHub."""

import ast
import dataclasses
import inspect
import json
import re
from typing import get_type_hints

from mkdocs.structure.files import File

from interdomain.titan.settings import schema

# A light and a dark picture, as GitHub shows them. The site has a switch of its own, which its theme knows by the links' ends.
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(.*?)">\s*<img alt="(.*?)" src="(.*?)">\s*</picture>'
)


def on_files(files, config):
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(notebook)
        page = notebook.src_uri.replace(".ipynb", ".md")
        files.append(
            File.generated(config, page, content=as_markdown(json.loads(notebook.content_string)))
        )


def as_markdown(notebook):
    """A notebook's cells, each with its output: text, or a picture."""
    out = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        out.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if output["output_type"] == "stream":
                out.append(f"```text\n{''.join(output['text'])}```")
            else:
                out.append(
                    f"![output](data:image/png;base64,{''.join(output['data']['image/png']).strip()})"
                )
    return "\n\n".join(out)


def on_page_markdown(markdown, **_):
    markdown = markdown.replace(".ipynb)", ".md)")
    markdown = PICTURE.sub(r"![\2](\3#only-light)\n![\2](\1#only-dark)", markdown)
    return (
        markdown.replace("<!-- settings -->", settings())
        if "<!-- settings -->" in markdown
        else markdown
    )


def settings():
    """A table for each section of the settings, as titan/settings/schema.py declares them."""
    texts = comments_of_fields(inspect.getsource(schema))
    out = []
    for section, table in get_type_hints(schema.JobConfig).items():
        title, _, text = inspect.getdoc(table).partition(": ")
        out += [
            f"### {title}\n",
            f"{text[0].upper()}{text[1:]}\n",
            "| setting | type | default | |",
            "|---|---|---|---|",
        ]
        defaults = table()
        for field in dataclasses.fields(table):
            declared = schema.SETTINGS[f"{section}.{field.name}"]
            kind = inspect.formatannotation(declared.kind)
            if declared.bound:
                kind += f", {declared.bound.description}"
            text = texts.get((table.__name__, field.name)) or schema.MIXER_HELP[field.name]
            if declared.torchtitan:
                text += f" Only our trainer has it: TorchTitan's {declared.torchtitan}."
            cells = [f"`{field.name}`", kind, f"`{getattr(defaults, field.name)!r}`", text]
            out.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        out.append("")
    return "\n".join(out)


def comments_of_fields(source):
    """{(class, field): its comment}: the lines `#:` above the field, or the comment beside it."""
    lines = source.splitlines()
    texts = {}
    for table in ast.parse(source).body:
        for field in table.body if isinstance(table, ast.ClassDef) else []:
            if not isinstance(field, ast.AnnAssign):
                continue
            first = field.lineno - 1
            above = []
            while lines[first - 1].startswith("    #: "):
                first -= 1
                above.insert(0, lines[first].strip(" #:"))
            beside = lines[field.end_lineno - 1][field.end_col_offset :]
            texts[table.name, field.target.id] = " ".join(above) or beside.strip(" #")
    return texts
