"""python docs/pictures.py

Draw the results of the small study (README.md, docs/study.md), the scan's time on a CPU (docs/benchmarks.md) and long
sequences over two processes (docs/parallelism.md) into docs/pictures, each in a light and a dark version, such as
study-light.svg and study-dark.svg. Needs matplotlib; `./launch.sh test` installs it.
"""

import itertools
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

from matplotlib import rc_context

from interdomain.tools._plots import Curve, Panel, figure_of
from interdomain.tools._study.tables import panels as panels_of
from interdomain.tools.study import shown

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "docs" / "pictures"
STUDY = ROOT / "train_configs" / "studies" / "small.toml"
CPU = ROOT / "benchmarks" / "results" / "2026-11-24-cpu" / "float32-1-thread" / "kernels.json"
CONTEXT = ROOT / "benchmarks" / "results" / "2026-11-26-cpu-context"
MIXERS = [
    "softmax",
    "s4d",
    "gla",
    "mamba2",
    "gated-deltanet",
    "interdomain",
    "interdomain-norope",
    "interdomain-paired",
    "interdomain-paired, c_scale 0.0147",
    "interdomain-paired, c_scale 0.0295",
]
THEMES = {"light": "#24292f", "dark": "#d7dde5"}  # of text and lines
INK = (
    "text.color",
    "axes.labelcolor",
    "axes.edgecolor",
    "axes.titlecolor",
    "xtick.color",
    "ytick.color",
)
GROUNDS = "figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor"


def study(path: Path) -> None:
    """Every condition at its best rate: perplexity on text; accuracy on recall and copying, and by tokens."""
    panels = panels_of(shown([STUDY]))
    figure_of([panels[group][:2] for group in ("1.4M text", "0.1M mqar", "0.1M copying")]).savefig(
        path
    )


def result(path: Path) -> None:
    """Perplexity on text and accuracy on recall, each condition at the best of three rates."""
    panels = panels_of([run for run in shown([STUDY]) if run.labels["condition"] in MIXERS])
    titles = {"1.4M text": "text, 1.4 M parameters", "0.1M mqar": "recall, 0.14 M parameters"}
    figure_of(
        [[replace(panels[group][0], title=title) for group, title in titles.items()]]
    ).savefig(path)


def cpu(path: Path) -> None:
    """Time of the scan and of PyTorch's attention by length, forward and backward, on one thread of a CPU."""
    tables = json.loads(CPU.read_text())["tables"]
    lengths = [int(re.findall(r"T=(\d+)", name)[0]) for name in tables]
    curves = []
    for mixer, label in (
        ("sdpa-flash", "softmax attention (PyTorch)"),
        ("chunkwise", "interdomain (chunkwise)"),
    ):
        rows = [row for table in tables.values() for row in table["rows"] if row["mixer"] == mixer]
        curves.append(Curve(label, lengths, [row["both ms"] for row in rows]))
    by_length(path, curves, "ms, forward and backward")


def context(path: Path) -> None:
    """Seconds of a training step by length, the sequence over two processes."""
    curves = []
    for mixer in ("softmax", "interdomain"):
        lengths = []
        seconds = []
        for name, table in json.loads((CONTEXT / mixer / "training.json").read_text())[
            "tables"
        ].items():
            if "ms a step" in table["rows"][0]:
                lengths.append(int(re.findall(r"x ([\d,]+) ", name)[0].replace(",", "")))
                seconds.append(table["rows"][0]["ms a step"] / 1e3)
        curves.append(Curve(mixer, lengths, seconds))
    by_length(path, curves, "seconds of a training step")


def by_length(path: Path, curves: list[Curve], y_label: str) -> None:
    figure_of(
        [[Panel("", curves, "tokens in the sequence", y_label, log_x=True, log_y=True)]]
    ).savefig(path)


def main() -> int:
    os.environ["SOURCE_DATE_EPOCH"] = "0"  # the date in an SVG: the same bytes each time
    look = {"svg.hashsalt": "interdomain", "font.size": 9} | dict.fromkeys(GROUNDS, "none")
    for draw, (theme, ink) in itertools.product((result, study, cpu, context), THEMES.items()):
        path = OUTPUT / f"{draw.__name__}-{theme}.svg"
        with rc_context(look | dict.fromkeys(INK, ink)):
            draw(path)
        path.write_text(
            " ".join(path.read_text().split()) + "\n"
        )  # matplotlib writes a line for every point
        print(f"wrote {path.relative_to(ROOT)} ({path.stat().st_size / 1e3:,.0f} kB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
