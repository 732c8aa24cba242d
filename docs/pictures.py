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
from matplotlib.figure import Figure

from interdomain.tools._plots import figure_of
from interdomain.tools._study.tables import panels as panels_of
from interdomain.tools.study import shown

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "docs" / "pictures"
STUDY = ROOT / "train_configs" / "studies" / "small.toml"
CPU = ROOT / "benchmarks" / "results" / "2026-11-24-cpu" / "float32-1-thread" / "kernels.json"
CONTEXT = ROOT / "benchmarks" / "results" / "2026-11-26-cpu-context"
MIXERS = ["softmax", "s4d", "gla", "mamba2", "gated-deltanet", "interdomain", "interdomain-norope"]
MIXERS += ["interdomain-paired", "interdomain-paired, c_scale 0.0147", "interdomain-paired, c_scale 0.0295"]
BLUE, ORANGE, GREEN, PINK, GREY = "#3b82c4", "#d9730d", "#1a9873", "#c4679f", "#8a919c"
THEMES = {"light": "#24292f", "dark": "#d7dde5"}  # of text and lines
INK = "text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color"
GROUNDS = "figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor"
LOOK = {"svg.hashsalt": "interdomain", "font.size": 9, "grid.color": GREY, "grid.alpha": 0.3, "grid.linewidth": 0.5}
LOOK |= {"axes.spines.top": False, "axes.spines.right": False}


def study(path: Path) -> None:
    """Every condition at its best rate: perplexity on text; accuracy on recall and copying, and by tokens."""
    panels = panels_of(shown([STUDY]))
    figure_of([panels[group][:2] for group in ("1.4M text", "0.1M mqar", "0.1M copying")]).savefig(path)


def result(path: Path) -> None:
    """Perplexity on text and accuracy on recall, each condition at the best of three rates."""
    panels = panels_of([run for run in shown([STUDY]) if run.labels["condition"] in MIXERS])
    titles = {"1.4M text": "text, 1.4 M parameters", "0.1M mqar": "recall, 0.14 M parameters"}
    figure_of([[replace(panels[group][0], title=title) for group, title in titles.items()]]).savefig(path)


def cpu(path: Path) -> None:
    """Time of the scan and of PyTorch's attention by length, forward and backward, on one thread of a CPU."""
    tables = json.loads(CPU.read_text())["tables"]
    lengths = [int(re.findall(r"T=(\d+)", name)[0]) for name in tables]
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axis = figure.subplots()
    for mixer, label, colour in (
        ("sdpa-flash", "softmax attention (PyTorch)", GREY),
        ("chunkwise", "interdomain (chunkwise)", BLUE),
    ):
        rows = [row for table in tables.values() for row in table["rows"] if row["mixer"] == mixer]
        axis.plot(lengths, [row["both ms"] for row in rows], "o-", color=colour, markersize=4, label=label)
        for length, row in zip(lengths, rows, strict=True):
            if mixer == "chunkwise":  # the ratio below its point
                place = dict(xytext=(4, -11), textcoords="offset points", fontsize=8, color=colour)
                axis.annotate(f"{row['of best attention']:.2f}", (length, row["both ms"]), **place)
    axis.set(xscale="log", yscale="log", xlabel="tokens in the sequence", ylabel="ms, forward and backward")
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axis.set_yticks(ticks := [10, 100, 1000, 10_000], [f"{tick:,}" for tick in ticks])
    axis.minorticks_off()
    axis.grid()
    axis.legend(frameon=False)
    figure.supxlabel("numbers: our time over attention's", fontsize=8)
    figure.savefig(path)


def context(path: Path) -> None:
    """Seconds of a training step by length, the sequence over two processes."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axis = figure.subplots()
    for mixer, colour in (("softmax", GREY), ("interdomain", BLUE)):
        tables = json.loads((CONTEXT / mixer / "training.json").read_text())["tables"]
        rows = [
            (re.findall(r"x ([\d,]+) ", name)[0].replace(",", ""), table["rows"][0]) for name, table in tables.items()
        ]
        points = [(int(tokens), row["ms a step"] / 1e3) for tokens, row in rows if "ms a step" in row]
        axis.plot(*zip(*points, strict=True), "o-", color=colour, markersize=4, label=mixer)
    lengths = [4096, 16_384, 65_536, 262_144]
    axis.set(xscale="log", yscale="log", xlabel="tokens in the sequence", ylabel="seconds of a training step")
    axis.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths])
    axis.set_yticks(ticks := [1, 3, 10, 30, 100], [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.grid()
    axis.legend(frameon=False)
    figure.savefig(path)


def main() -> int:
    os.environ["SOURCE_DATE_EPOCH"] = "0"  # the date in an SVG: the same bytes each time
    for draw, (theme, ink) in itertools.product((result, study, cpu, context), THEMES.items()):
        path = OUTPUT / f"{draw.__name__}-{theme}.svg"
        with rc_context(LOOK | dict.fromkeys(INK, ink) | dict.fromkeys(GROUNDS, "none")):
            draw(path)
        path.write_text(" ".join(path.read_text().split()) + "\n")  # matplotlib writes a line for every point
        print(f"wrote {path.relative_to(ROOT)} ({path.stat().st_size / 1e3:,.0f} kB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
