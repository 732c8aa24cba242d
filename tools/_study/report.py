"""The report of a study: one HTML file without scripts or links to a network, for light and dark pages, wide and narrow."""

import io
import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path, PurePosixPath
from typing import Any

from interdomain.tools._plots import figure_of, looks_of
from interdomain.tools._study import tables

STYLE = """
:root { color-scheme: light dark; --line: #8a919c55; --ground: #fff; --ink: #24292f; --shade: #8a919c18; --link: #0b57b0 }
@media (prefers-color-scheme: dark) { :root { --ground: #0d1117; --ink: #d7dde5; --link: #7cb7ff } }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif }
a { color: var(--link) }
h1, h2 { line-height: 1.2 } h2 { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1rem }
.panels { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 30rem), 1fr)) }
.panels svg { width: 100%; height: auto }
.scroll { overflow-x: auto; margin: 1rem 0 }
table { border-collapse: collapse; font-size: .85rem }
th { text-align: left; background: linear-gradient(var(--shade), var(--shade)), var(--ground) }
th, td { white-space: nowrap; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top }
td:first-child, th:first-child { position: sticky; left: 0 } td:first-child { background: var(--ground) }
dt { font-weight: 600; margin-top: .6rem } dd { margin: 0 0 0 1rem; overflow-wrap: anywhere }
.notes, dl { font-size: .85rem } summary { cursor: pointer }
"""
INK = "text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"
ANY_INK = "#010203"  # replaced by the page's colour


class Link(str):
    """A cell of a table as HTML."""


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls where the page is narrower."""

    def cell(text: str) -> str:
        return f"<td>{text if isinstance(text, Link) else escape(str(text))}</td>"

    lines = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"]
    lines += ["<tr>" + "".join(map(cell, row)) + "</tr>" for row in rows]
    return '<div class="scroll"><table>\n' + "\n".join(lines) + "\n</table></div>"


def svg(panel: Any, looks: dict[str, dict]) -> str:
    """A panel as an element of the page, its text and lines in the page's colour."""
    from matplotlib import rc_context

    look: Any = dict.fromkeys(INK, ANY_INK) | {"svg.fonttype": "none", "svg.hashsalt": "interdomain"}
    look |= dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none")
    with rc_context(look), io.StringIO() as file:
        figure_of([[replace(panel, title="")]], looks).savefig(file, format="svg", metadata={"Date": None})
        text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return text.replace(ANY_INK, "currentColor")


def html(title: str, runs: list[tables.Run], folder: Path) -> str:
    """The page of a study's finished runs, written into `folder`: from there its links lead to the records."""
    groups, all_rows, panels = tables.at_best_rates(runs), tables.rows(runs), tables.panels(runs)
    parts = [f"<h1>Study {escape(title)}</h1>", f"<p>{_sentence(runs, groups)}</p>"]
    try:
        looks = looks_of(itertools.chain(*panels.values()))
        figures = {name: "\n".join(svg(panel, looks) for panel in drawn) for name, drawn in panels.items()}
    except ImportError:
        figures = dict.fromkeys(panels, "<p>No figures: matplotlib is not installed.</p>")
    names = {" ".join(group): group for group in groups}
    for name, figure in figures.items():
        parts += [f"<h2>{escape(name)}</h2>", f'<div class="panels">{figure}</div>']
        if name in names:
            group = names[name]
            of_group = [row | {"group": None} for row in all_rows if row["group"] == name]
            parts.append(html_table(*tables.cells_as_text(of_group)))
            if rates := tables.rates(runs).get(group):
                parts.append(html_table(rates[0], rates[1:]))
            parts += [f"<p>{escape(line)}</p>" for line in tables.incomparable(group, groups[group])]
    parts.append(f'<p class="notes">{escape(tables.NOTES)}</p>')
    parts += ["<h2>Settings</h2>", "<p>Of each group, and of its cells where they differ:</p>", *_settings(groups)]
    parts.append("<h2>Machines</h2>")
    machines = list(dict.fromkeys(tuple(run.environment.items()) for run in runs))
    facts = list(dict.fromkeys(name for machine in machines for name, _ in machine))
    counts = [sum(tuple(run.environment.items()) == machine for run in runs) for machine in machines]
    cells = [[str(i), str(n), *(str(dict(machine).get(name, "-")) for name in facts)]
             for i, (machine, n) in enumerate(zip(machines, counts, strict=True), 1)]  # fmt: skip
    parts.append(html_table(("machine", "runs", *facts), cells))
    parts += ["<h2>Runs</h2>", "<p>A name leads to the run's record.</p>"]
    cells = []
    for run in runs:
        # As a path from here, its characters written as in an address.
        where = PurePosixPath("/", os.path.relpath(run.source, folder)).as_uri().removeprefix("file:///")
        machine = machines.index(tuple(run.environment.items())) + 1
        link = Link(f'<a href="{escape(where)}">{escape(run.name)}</a>')
        best, last = run.best[1], [*run.curves[tables.VALIDATION].values()][-1]
        cells.append([link, str(run.seed), f"{run.trained:,}", f"{best:.4f}", f"{last:.4f}", str(machine)])
    parts.append(html_table(("run", "seed", "tokens", "best loss", "last loss", "machine"), cells))
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>\n' + "\n".join(
        [*parts, "</body></html>\n"]
    )


def _sentence(runs: list[tables.Run], groups: dict) -> str:
    cells, tokens = sum(map(len, groups.values())), sum(run.trained for run in runs)
    return f"{len(runs)} runs, {tokens:,} tokens in all. {cells} cells in {len(groups)} groups, each compared within itself."


def _settings(groups: dict[tuple[str, ...], list[tables.Cell]]) -> list[str]:
    """Lists of the settings of each group and cell, without those that all share, which come last. No folders, no seeds."""
    by_cell: dict[tuple[str, str], dict[str, Any]] = {}
    for group, cells in groups.items():
        for cell in cells:
            sections = cell.runs[0].configuration.items()
            settings = {f"{section}.{name}": x for section, values in sections for name, x in values.items()}
            seedless = {n: x for n, x in settings.items() if n != "debug.seed" and not n.startswith("job.")}
            by_cell[" ".join(group), cell.label] = seedless

    def shared(cells: list[dict[str, Any]]) -> dict[str, Any]:
        return {n: x for n, x in cells[0].items() if all(cell.get(n) == x for cell in cells)}

    def written(settings: dict[str, Any], without: dict[str, Any]) -> str:
        return escape(", ".join(f"{n} = {x}" for n, x in settings.items() if n not in without and x is not None)) or "-"

    of_all, lines = shared([*by_cell.values()]), []
    for name in map(" ".join, groups):
        cells = {label: settings for (group, label), settings in by_cell.items() if group == name}
        of_group = shared([*cells.values()])
        lines.append(f"<dl><dt>{escape(name)}</dt><dd>{written(of_group, of_all)}</dd>")
        for label, settings in cells.items() if len(cells) > 1 else ():
            lines.append(f"<dd>{escape(label)}: {written(settings, of_group)}</dd>")
        lines.append("</dl>")
    return [*lines, f"<details><summary>All runs</summary><p class=notes>{written(of_all, {})}</p></details>"]
