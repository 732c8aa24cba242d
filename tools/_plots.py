"""Curves and dots in panels, for the tools that measure something along an axis; needs matplotlib."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Told apart on white and on black, beside each other too; the first seven also by colour-blind readers.
COLOURS = (
    *("#3b82c4", "#e06a0d", "#15803d", "#c93ad6", "#8a919c", "#c2a008", "#7c3aed"),
    *("#d6202f", "#17a2b8", "#9c5b33", "#7fb83a", "#f2789f"),
)


@dataclass(frozen=True)
class Curve:
    label: str
    x: Sequence[float]
    y: Sequence[float | None]  # None is a gap
    error: Sequence[float | None] | None = None  # of y, drawn as bars


@dataclass(frozen=True)
class Panel:
    title: str
    curves: Sequence[Curve]
    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = False

    @property
    def labels(self) -> list[str]:
        return [curve.label for curve in self.curves]

    def draw(self, axis: Any, looks: dict[str, dict]) -> None:
        """Curves, and beside them their names, in the order in which the curves end."""
        for curve in sorted(self.curves, key=lambda curve: -next((y for y in reversed(curve.y) if y is not None), 0)):
            y, error = ([math.nan if v is None else v for v in of] for of in (curve.y, curve.error or ()))
            look = dict(marker="o", markersize=3, linewidth=1.5, capsize=2, elinewidth=0.8) | looks[curve.label]
            axis.errorbar(curve.x, y, yerr=error or None, label=curve.label, **look)
        axis.set(xlabel=self.x_label, ylabel=self.y_label)
        if self.log_x:
            ticks = sorted({x for curve in self.curves for x in curve.x})
            axis.set_xscale("log", base=2)
            axis.set_xticks(ticks, [f"{x:,.4g}" if x < 1e4 else f"{x:,.0f}" for x in ticks], rotation=45)
        if self.log_y:
            axis.set_yscale("log")
            low, high = axis.get_ylim()
            wide = itertools.product(range(-3, 12), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8))
            ticks = [tick for power, digit in wide if low <= (tick := digit * 10.0**power) <= high]
            axis.set_yticks(ticks := ticks[:: 1 + len(ticks) // 10], [f"{tick:,.4g}" for tick in ticks])
            axis.minorticks_off()
        axis.grid(visible=True, alpha=0.3, linewidth=0.5)
        place = dict(loc="center left", bbox_to_anchor=(1, 0.5))
        axis.legend(fontsize="small", frameon=False, handlelength=1.8, **place)


@dataclass(frozen=True)
class Dots:
    """A value of each label, the best on top. dots: (label, value, its interval); a row is named by its entry of names."""

    title: str
    dots: Sequence[tuple[str, float, tuple[float, float] | None]]
    names: Sequence[str]
    x_label: str

    @property
    def labels(self) -> list[str]:
        return [label for label, _, _ in self.dots]

    def draw(self, axis: Any, looks: dict[str, dict]) -> None:
        for i, (label, value, interval) in enumerate(self.dots):
            look = dict(color=looks[label]["color"], markersize=6)
            axis.plot(value, i, "o", **look)
            axis.plot(interval or [], [i, i] if interval else [], "|-", **look)
            place = dict(xytext=(0, 6), textcoords="offset points", fontsize="x-small", ha="center")
            axis.annotate(f"{value:.2f}", (value, i), **place)
        axis.set_yticks(range(len(self.names)), self.names)
        axis.set_xlabel(self.x_label, loc="right")
        axis.set_ylim(len(self.names) - 0.4, -0.8)
        axis.margins(x=0.12)
        axis.grid(axis="x", alpha=0.3, linewidth=0.5)


def looks_of(panels: Iterable[Panel | Dots]) -> dict[str, dict]:
    """Colour and line of each label: the same in all panels; beyond the colours there are, dashes."""
    labels = dict.fromkeys(label for panel in panels for label in panel.labels)
    pairs = itertools.product(("-", "--", ":", "-."), COLOURS)
    return {label: dict(color=colour, linestyle=line) for label, (line, colour) in zip(labels, pairs, strict=False)}


def figure_of(rows: Sequence[Sequence[Panel | Dots]], looks: dict[str, dict] | None = None):
    """A figure of rows of panels, each row as high as its names need."""
    from matplotlib.figure import Figure  # not pyplot: draws without a display

    looks = looks or looks_of(itertools.chain(*rows))
    heights = [max(3.0, 0.6 + 0.24 * max(len(panel.labels) for panel in row)) for row in rows]
    width = 5.2 + 0.06 * max(0, max(map(len, looks)) - 20)  # names stand beside the curves
    figure = Figure(figsize=(width * max(map(len, rows)), sum(heights) + 0.3), dpi=150, layout="constrained")
    grid = figure.add_gridspec(len(rows), max(map(len, rows)), height_ratios=heights)
    for i, row in enumerate(rows):
        for j, panel in enumerate(row):
            axis = figure.add_subplot(grid[i, j])
            panel.draw(axis, looks)
            axis.spines[["top", "right"]].set_visible(False)
            axis.set_title(panel.title, loc="left", fontweight="bold", fontsize="medium")
    return figure


def draw(path: Path | str, panels: Sequence[Panel]) -> Path | None:
    """One image of all panels, two side by side. Returns: the path, or None where matplotlib is not installed."""
    try:
        figure = figure_of([panels[i : i + 2] for i in range(0, len(panels), 2)])
    except ImportError:
        return None
    figure.savefig(path)
    return Path(path)
