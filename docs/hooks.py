"""mkdocs: what the site shows otherwise than GitHub."""

import ast
import dataclasses
import inspect
import json
import re

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
        files.append(File.generated(config, page, content=as_markdown(json.loads(notebook.content_string))))


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
                out.append(f"![output](data:image/png;base64,{''.join(output['data']['image/png']).strip()})")
    return "\n\n".join(out)


def on_page_markdown(markdown, **_):
    markdown = markdown.replace(".ipynb)", ".md)")
    markdown = PICTURE.sub(r"![\2](\3#only-light)\n![\2](\1#only-dark)", markdown)
    return markdown.replace("<!-- settings -->", settings()) if "<!-- settings -->" in markdown else markdown


def settings():
    """A table per section of titan/settings/schema.py: its fields, with the comments above (`#:`) or beside them, and those
    that are made of `MixerConfig` and `Execution`."""
    source = inspect.getsource(schema)
    lines, sections = source.splitlines(), {n.name: n for n in ast.parse(source).body if isinstance(n, ast.ClassDef)}
    out = []
    for section in sections.pop("JobConfig").body[1:-1]:
        fields = sections[section.annotation.id]
        title, _, text = ast.get_docstring(fields).partition(": ")
        out += [f"### {title}\n\n{text[0].upper()}{text[1:]}\n", "| setting | type | default | |", "|---|---|---|---|"]
        for field in fields.body[1:]:
            above = first = field.lineno - 1
            while lines[above - 1].startswith("    #: "):
                above -= 1
            beside = re.findall(r"  # (.*)| None  # (.*)", "\n".join(lines[first : field.end_lineno]))
            text = " ".join(line.strip(" #:") for line in lines[above:first]) or "".join(map("".join, beside))
            kind, default = (ast.unparse(x) for x in (field.annotation, field.value))
            out.append(row(field.target.id, kind, "[]" if default.startswith("field(") else default, text))
        for made in dataclasses.fields(getattr(schema, fields.name))[len(fields.body) - 1 :]:
            kind, *_, flag = made.type.__origin__, *made.type.__metadata__
            out.append(row(made.name, inspect.formatannotation(kind), repr(made.default), flag.help))
        out.append("")
    return "\n".join(out)


def row(name, kind, default, text):
    text = text.replace("|", "\\|")
    return f"| `{name}` | `{kind}` | `{default}` | {text} |"
