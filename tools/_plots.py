"""Curves and dots in panels, for the tools that measure something along an axis; needs matplotlib."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# Told apart on white and on black, beside each other too; the first seven also by colour-blind readers.
COLOURS = (
    "#3b82c4",
    "#e06a0d",
    "#15803d",
    "#c93ad6",
    "#8a919c",
    "#c2a008",
    "#7c3aed",
    "#d6202f",
    "#17a2b8",
    "#9c5b33",
    "#7fb83a",
    "#f2789f",
)


@dataclass(frozen=True)
class Curve:
    """NaN in y is a gap; error: drawn as bars."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] | None = None


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
        """Draws the curves, and beside them their names in the order in which the curves end."""
        from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

        def last(curve: Curve) -> float:
            return next((y for y in reversed(curve.y) if not math.isnan(y)), 0.0)

        for curve in sorted(self.curves, key=last, reverse=True):
            look = (
                dict(marker="o", markersize=3, linewidth=1.5, capsize=2, elinewidth=0.8)
                | looks[curve.label]
            )
            axis.errorbar(curve.x, curve.y, yerr=curve.error, label=curve.label, **look)
        axis.set(xlabel=self.x_label, ylabel=self.y_label)
        if self.log_x:
            ticks = sorted({x for curve in self.curves for x in curve.x})
            axis.set_xscale("log", base=2)
            axis.set_xticks(
                ticks, [f"{x:,.0f}" if x >= 1e4 else f"{x:,.4g}" for x in ticks], rotation=45
            )
        if self.log_y:
            axis.set_yscale("log")
            low, high = axis.get_ylim()
            subs = (1, 1.5, 2, 3, 4, 5, 6, 8) if high < 10 * low else (1, 3)
            axis.yaxis.set_major_locator(LogLocator(subs=subs))
            axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
            axis.yaxis.set_minor_formatter(NullFormatter())
        axis.grid(visible=True, alpha=0.3, linewidth=0.5)
        axis.legend(
            fontsize="small",
            frameon=False,
            handlelength=1.8,
            loc="center left",
            bbox_to_anchor=(1, 0.5),
        )


class Dot(NamedTuple):
    """A value with its interval. label: chooses the colour; name: what stands beside it."""

    label: str
    value: float
    interval: Sequence[float] | None
    name: str


@dataclass(frozen=True)
class Dots:
    """A row for each dot, the first on top."""

    title: str
    dots: Sequence[Dot]
    x_label: str

    @property
    def labels(self) -> list[str]:
        return [dot.label for dot in self.dots]

    def draw(self, axis: Any, looks: dict[str, dict]) -> None:
        for i, dot in enumerate(self.dots):
            colour = looks[dot.label]["color"]
            axis.plot(dot.value, i, "o", color=colour, markersize=6)
            if dot.interval:
                axis.plot(dot.interval, [i, i], "|-", color=colour, markersize=6)
            place = dict(xytext=(0, 6), textcoords="offset points", fontsize="x-small", ha="center")
            axis.annotate(f"{dot.value:.2f}", (dot.value, i), **place)
        axis.set_yticks(range(len(self.dots)), [dot.name for dot in self.dots])
        axis.set_xlabel(self.x_label, loc="right")
        axis.set_ylim(len(self.dots) - 0.4, -0.8)
        axis.margins(x=0.12)
        axis.grid(axis="x", alpha=0.3, linewidth=0.5)


def figure_of(rows: Sequence[Sequence[Panel | Dots]]):
    """A figure of rows of panels, each row as high as its names need."""
    from matplotlib.figure import Figure  # not pyplot: draws without a display

    # The colour and line of a label are the same in all panels. Lines are dashed when the colours run out.
    labels = dict.fromkeys(label for row in rows for panel in row for label in panel.labels)
    looks = {}
    for i, label in enumerate(labels):
        line = ("-", "--", ":", "-.")[i // len(COLOURS) % 4]
        looks[label] = dict(color=COLOURS[i % len(COLOURS)], linestyle=line)
    columns = max(len(row) for row in rows)
    heights = [max(3.0, 0.6 + 0.24 * max(len(panel.labels) for panel in row)) for row in rows]
    longest_name = max(len(label) for label in looks)  # names stand beside the curves
    width = 5.2 + 0.06 * max(0, longest_name - 20)
    figure = Figure(figsize=(width * columns, sum(heights) + 0.3), dpi=150, layout="constrained")
    grid = figure.add_gridspec(len(rows), columns, height_ratios=heights)
    for i, row in enumerate(rows):
        for j, panel in enumerate(row):
            axis = figure.add_subplot(grid[i, j])
            panel.draw(axis, looks)
            axis.spines[["top", "right"]].set_visible(False)
            axis.set_title(panel.title, loc="left", fontweight="bold", fontsize="medium")
    return figure
