"""The report of a study: one HTML file without scripts or links to a network, for light and dark pages, wide and narrow."""

import io
import itertools
import os
import re
from dataclasses import replace
from html import escape
from pathlib import Path, PurePosixPath
from typing import Any

from markdown import markdown  # a dependency of TensorBoard

from interdomain.markdown import markdown_rows
from interdomain.tools._plots import figure_of, looks_of
from interdomain.tools._study import tables

STYLE = """
:root { color-scheme: light dark; --line: #8a919c55; --ground: #fff; --ink: #24292f; --link: #0b57b0 }
@media (prefers-color-scheme: dark) { :root { --ground: #0d1117; --ink: #d7dde5; --link: #7cb7ff } }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif }
a { color: var(--link) }
h1, h2 { line-height: 1.2 } h2 { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1rem }
.panels { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 30rem), 1fr)) }
.panels svg { width: 100%; height: auto }
table { border-collapse: collapse; font-size: .85rem; display: block; overflow-x: auto }
th { text-align: left; background: #8a919c18 }
th, td { white-space: nowrap; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top }
"""
INK = "text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"
GROUNDS = "figure.facecolor", "axes.facecolor", "savefig.facecolor"
ANY_INK = "#010203"  # replaced by the page's colour


def html(title: str, runs: list[tables.Run], folder: Path) -> str:
    """The page of a study's finished runs, to be written into `folder`: its links to the records are relative to it."""
    groups = tables.at_best_rates(runs)
    all_rows = tables.rows(runs)
    rates = tables.rates(runs)
    panels = tables.panels(runs)
    try:
        looks = looks_of(itertools.chain(*panels.values()))
        figures = {name: "\n".join(svg(panel, looks) for panel in drawn) for name, drawn in panels.items()}
    except ImportError:
        figures = dict.fromkeys(panels, "No figures: matplotlib is not installed.")

    tokens = sum(run.trained for run in runs)
    parts = [f"# Study {title}", f"{len(runs)} runs in {len(groups)} groups, {tokens:,} tokens in all."]
    for name in panels:
        parts += [f"## {name}", f'<div class="panels">{name}</div>']
        if name in groups:
            parts.append(table(tables.text_table([row | {"group": None} for row in all_rows if row["group"] == name])))
            if name in rates:
                parts.append(table(rates[name]))
            parts += tables.incomparable(name, groups[name])
    parts += [tables.NOTES, "## Runs", "A name leads to the run's record."]
    lines = [["run", "seed", "tokens", "best loss"]]
    for run in runs:
        # A relative path, with the characters of an address.
        address = PurePosixPath("/", os.path.relpath(run.source, folder)).as_uri().removeprefix("file:///")
        lines.append([f"[{run.name}]({address})", str(run.seed), f"{run.trained:,}", f"{run.best[1]:.4f}"])
    parts.append(table(lines))

    body = markdown("\n\n".join(parts), extensions=["tables"])
    # Markdown does not look into the figures: they take the place of their names.
    for name, figure in figures.items():
        body = body.replace(f'<div class="panels">{name}</div>', f'<div class="panels">{figure}</div>')
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'
    )


def table(cells: list[list[str]]) -> str:
    return "\n".join(markdown_rows(cells))


def svg(panel: Any, looks: dict[str, dict]) -> str:
    """A panel as an element of the page, its text and lines in the page's colour."""
    from matplotlib import rc_context

    look: Any = {"svg.fonttype": "none", "svg.hashsalt": "interdomain"}
    look |= dict.fromkeys(INK, ANY_INK)
    look |= dict.fromkeys(GROUNDS, "none")
    with rc_context(look), io.StringIO() as file:
        figure_of([[replace(panel, title="")]], looks).savefig(file, format="svg", metadata={"Date": None})
        text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return text.replace(ANY_INK, "currentColor")
