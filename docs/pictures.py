"""python docs/pictures.py

Draw the result of the small study (docs/study.md), the scan's time on a CPU (docs/benchmarks.md) and long sequences over two
processes (docs/parallelism.md) into docs/pictures, each in a light and a dark version, such as study-light.svg and
study-dark.svg. Needs matplotlib; `./launch.sh test` installs it.
"""

import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from interdomain.tools._study.definition import VALIDATION
from interdomain.tools._study.tables import ACCURACY, at_best_rates
from interdomain.tools.study import shown

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "docs" / "pictures"
STUDY = ROOT / "train_configs" / "studies" / "small.toml"
CPU = ROOT / "benchmarks" / "results" / "2026-11-24-cpu" / "float32-1-thread" / "kernels.json"
CONTEXT = ROOT / "benchmarks" / "results" / "2026-11-26-cpu-context"
BLUE, ORANGE, GREEN, PINK, GREY = "#3b82c4", "#d9730d", "#1a9873", "#c4679f", "#8a919c"
THEMES = {"light": "#24292f", "dark": "#d7dde5"}  # of text and lines
INK = "text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color"
GROUNDS = "figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor"
LOOK = {"svg.hashsalt": "interdomain", "font.size": 9, "grid.color": GREY, "grid.alpha": 0.3, "grid.linewidth": 0.5}
LOOK |= {"axes.spines.top": False, "axes.spines.right": False}


FAMILIES = {  # colour and line of a condition
    "softmax": (GREY, "-"),
    "interdomain": (BLUE, "-"),
    "interdomain-norope": (BLUE, "--"),
    "single-query": (BLUE, ":"),
    "interdomain, S4D's scale": (BLUE, "-."),
    "hybrid": (PINK, "-"),
    "s4d": (ORANGE, "-"),
    "dual-linear": (ORANGE, "--"),
    "s4d, linear_scale 0.7071": (ORANGE, "-."),
    "gla": (GREEN, "--"),
    "gated-deltanet": (GREEN, "-"),
}


def study(path: Path) -> None:
    """Validation perplexity and accuracy, by condition and by tokens."""
    groups = {group[-1]: cells for group, cells in at_best_rates(shown([STUDY])).items()}
    rows = {
        "text": (VALIDATION, lambda cell: cell.perplexity, "validation perplexity (less is better)"),
        "mqar": (ACCURACY, lambda cell: cell.last(ACCURACY), "accuracy on associative recall (more is better)"),
        "mqar, three times as long": (ACCURACY, lambda cell: cell.last(ACCURACY), "accuracy, three times as long"),
    }
    figure = Figure(figsize=(9.2, 3.6 * len(rows) + 0.3), layout="constrained")
    axes = figure.subplots(len(rows), 2)
    for (setting, (tag, value, label)), (dots, curves) in zip(rows.items(), axes, strict=True):
        cells = sorted(groups[setting], key=lambda cell: value(cell)[0], reverse=setting == "text")
        _dots(dots, cells, value, label)
        _curves(curves, cells, tag)
    figure.supxlabel("number in brackets: seeds; bars: standard deviation over seeds", fontsize=8)
    figure.savefig(path)


def _dots(axis, cells: list, value: Callable, label: str) -> None:
    for i, cell in enumerate(cells):
        mean, deviation = value(cell)
        axis.errorbar(mean, i, xerr=deviation or None, fmt="o", color=FAMILIES[cell.label][0], markersize=6, capsize=3)
        axis.annotate(f"{mean:.2f}", (mean, i), (0, 6), textcoords="offset points", fontsize=7, ha="center")
    axis.set_yticks(range(len(cells)), [f"{cell.label} ({len(cell.runs)})" for cell in cells])
    axis.set(xlabel=label, ylim=(-0.6, len(cells) - 0.2))
    axis.margins(x=0.12)
    axis.grid(axis="x")


def _curves(axis, cells: list, tag: str) -> None:
    for cell in reversed(cells):
        points = [*cell.curve(tag).items()][1:]  # the first is of the untrained model
        y = [math.exp(mean) if tag == VALIDATION else mean for _, (mean, _) in points]
        colour, line = FAMILIES[cell.label]
        axis.plot([n / 1e6 for n, _ in points], y, line, color=colour, linewidth=1.5, label=cell.label)
    if tag == VALIDATION:
        axis.set_yscale("log")
        low, high = axis.get_ylim()
        ticks = [tick for tick in (8, 10, 12, 15, 20, 25, 30, 40, 50, 70) if low <= tick <= high]
        axis.set_yticks(ticks, map(str, ticks))
        axis.minorticks_off()
    axis.set(xlabel="tokens (millions)", ylabel="validation perplexity" if tag == VALIDATION else "accuracy")
    axis.grid()
    axis.legend(fontsize=7.5, frameon=False, handlelength=3, loc="center left", bbox_to_anchor=(1, 0.5))


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
    for mixer in ("softmax", "interdomain"):
        tables = json.loads((CONTEXT / mixer / "training.json").read_text())["tables"]
        rows = [
            (re.findall(r"x ([\d,]+) ", name)[0].replace(",", ""), table["rows"][0]) for name, table in tables.items()
        ]
        points = [(int(tokens), row["ms a step"] / 1e3) for tokens, row in rows if "ms a step" in row]
        axis.plot(*zip(*points, strict=True), "o-", color=FAMILIES[mixer][0], markersize=4, label=mixer)
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
    for draw, (theme, ink) in itertools.product((study, cpu, context), THEMES.items()):
        path = OUTPUT / f"{draw.__name__}-{theme}.svg"
        with rc_context(LOOK | dict.fromkeys(INK, ink) | dict.fromkeys(GROUNDS, "none")):
            draw(path)
        path.write_text(" ".join(path.read_text().split()) + "\n")  # matplotlib writes a line for every point
        print(f"wrote {path.relative_to(ROOT)} ({path.stat().st_size / 1e3:,.0f} kB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
