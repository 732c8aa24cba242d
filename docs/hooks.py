"""mkdocs: links that show mkdocstrings the repository's folders as `interdomain`, and the settings of a run as tables."""

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def on_startup(command, dirty):
    subprocess.run([ROOT / ".ci" / "links"], check=True)


def on_page_markdown(markdown, **_):
    return markdown.replace("<!-- settings -->", settings()) if "<!-- settings -->" in markdown else markdown


def settings():
    """A table per section of plugin/titan/schema.py: its fields, with the comments above (`#:`) or beside them."""
    source = (ROOT / "plugin" / "titan" / "schema.py").read_text()
    lines, sections = source.splitlines(), {n.name: n for n in ast.parse(source).body if isinstance(n, ast.ClassDef)}
    out = []
    for section in sections.pop("JobConfig").body[1:-1]:
        fields = sections[section.annotation.id]
        title, _, words = ast.get_docstring(fields).partition(": ")
        out += [
            f"### {title}",
            "",
            words[0].upper() + words[1:],
            "",
            "| setting | type | default | |",
            "|---|---|---|---|",
        ]
        for field in fields.body[1:]:
            above = first = field.lineno - 1
            while lines[above - 1].startswith("    #: "):
                above -= 1
            beside = re.findall(r"  # (.*)| None  # (.*)", "\n".join(lines[first : field.end_lineno]))
            text = " ".join(line.strip(" #:") for line in lines[above:first]) or "".join(map("".join, beside))
            kind, default = (ast.unparse(x) for x in (field.annotation, field.value))
            default = "[]" if default.startswith("field(") else default
            cells = (f"`{field.target.id}`", f"`{kind}`", f"`{default}`", text.replace("|", "\\|"))
            out.append("| " + " | ".join(cells) + " |")
        out.append("")
    return "\n".join(out)
