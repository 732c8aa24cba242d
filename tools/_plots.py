"""Draws curves and dots in panels, for tools that measure something along an axis.

Needs matplotlib.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# Readers tell these apart on white and on black; the first seven also colour-blind readers.
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
    "#00b894",
    "#a3195b",
    "#5cc0f0",
    "#e8a87c",
    "#6b7a1f",
    "#a596e8",
    "#51627d",
    "#2b4fd8",
)
LINES = ("-", "--", ":", "-.")
PANEL_WIDTH = 6.0  # inches
LEAST_HEIGHT = 3.0  # inches of a panel of curves
LABEL_HEIGHT = 0.24  # inches of a line of the legend, or of a dot

# Matplotlib's arguments `color` and `linestyle` of each label.
Looks = dict[str, dict[str, str]]


@dataclass(frozen=True)
class Curve:
    """A line through points.

    Attributes:
        label: The name in the legend. Curves with the same label look the same in all panels.
        x: Places of the points.
        y: Values. NaN is a gap.
        error: Half the lengths of the error bars; None draws none.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] | None = None


@dataclass(frozen=True)
class Panel:
    """Curves in one pair of axes, with the legend at their right.

    Attributes:
        title: The title above the axes.
        curves: The curves, in the order of the legend.
        x_label: The label of the x axis.
        y_label: The label of the y axis.
        log_x: True for a logarithmic x axis with a tick at each point.
        log_y: True for a logarithmic y axis, if the values are far apart.
    """

    title: str
    curves: Sequence[Curve]
    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = False

    @property
    def labels(self) -> list[str]:
        return [curve.label for curve in self.curves]

    @property
    def height(self) -> float:
        """Returns the inches that the panel needs."""
        return max(LEAST_HEIGHT, 0.6 + LABEL_HEIGHT * len(self.curves))

    def draw(self, axis: Any, looks: Looks) -> None:
        """Draws into matplotlib's axes.

        Args:
            axis: The axes.
            looks: The colour and line style of each label of the figure.
        """
        from matplotlib.ticker import NullFormatter

        # A line with points and error bars for each curve.
        ticks = set()
        for curve in self.curves:
            ticks.update(curve.x)
            axis.errorbar(
                curve.x,
                curve.y,
                yerr=curve.error,
                label=curve.label,
                marker="o",
                markersize=3,
                capsize=2,
                elinewidth=0.8,
                **looks[curve.label],
            )
        axis.set(xlabel=self.x_label, ylabel=self.y_label)
        # A tick for each point, with the number in full.
        if self.log_x:
            axis.set_xscale("log")
            axis.set_xticks(sorted(ticks), [f"{x:,}" for x in sorted(ticks)], rotation=45)
            axis.xaxis.set_minor_formatter(NullFormatter())
        if self.log_y:
            spread_values(axis, "y")
        axis.grid(visible=True, alpha=0.3, linewidth=0.5)
        axis.legend(fontsize="small", frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


class Dot(NamedTuple):
    """A value with its interval.

    Attributes:
        label: Chooses the colour.
        value: The place on the x axis.
        interval: The two ends of the bar; None draws none.
        name: The text beside the row.
    """

    label: str
    value: float
    interval: Sequence[float] | None
    name: str


@dataclass(frozen=True)
class Dots:
    """A row for each dot, the first on top.

    Attributes:
        title: The title above the axes.
        dots: The dots.
        x_label: The label of the x axis.
        log_x: True for a logarithmic x axis, if the values are far apart.
    """

    title: str
    dots: Sequence[Dot]
    x_label: str
    log_x: bool = False

    @property
    def labels(self) -> list[str]:
        return [dot.label for dot in self.dots]

    @property
    def height(self) -> float:
        """Returns the inches that the rows need, with the title and the label of the axis."""
        return 1.1 + LABEL_HEIGHT * len(self.dots)

    def draw(self, axis: Any, looks: Looks) -> None:
        """Draws into matplotlib's axes.

        Args:
            axis: The axes.
            looks: The colour and line style of each label of the figure. Dots use the colour only.
        """
        for i, dot in enumerate(self.dots):
            # The dot, its interval, and its value above it.
            colour = looks[dot.label]["color"]
            axis.plot(dot.value, i, "o", color=colour)
            if dot.interval:
                axis.plot(dot.interval, [i, i], "|-", color=colour)
            axis.annotate(
                f"{dot.value:.2f}",
                (dot.value, i),
                xytext=(0, 6),
                textcoords="offset points",
                fontsize="x-small",
                ha="center",
            )
        # The first dot is on top.
        axis.set_yticks(range(len(self.dots)), [dot.name for dot in self.dots])
        axis.set_xlabel(self.x_label, loc="right")
        axis.set_ylim(len(self.dots) - 0.4, -0.8)
        axis.margins(x=0.12)
        if self.log_x:
            spread_values(axis, "x")
        axis.grid(axis="x", alpha=0.3, linewidth=0.5)


def spread_values(axes: Any, name: str) -> None:
    """Makes an axis logarithmic if one of its values is more than twice another.

    Args:
        axes: Matplotlib's axes, with all curves or dots.
        name: The axis, "x" or "y".
    """
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    low, high = getattr(axes.dataLim, f"interval{name}")
    if high <= 2 * low:
        return
    axes.set(**{f"{name}scale": "log"})
    # Ticks at these multiples of powers of ten: an axis within one decade needs more of them.
    multiples = (1, 3) if high > 10 * low else (1, 1.5, 2, 3, 4, 5, 6, 8)
    axis = getattr(axes, f"{name}axis")
    axis.set_major_locator(LogLocator(subs=multiples))
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_formatter(NullFormatter())


def figure_of(rows: Sequence[Sequence[Panel | Dots]]) -> Any:
    """Returns a figure of rows of panels. Each row is as high as its labels need.

    Args:
        rows: The panels of each row, from the top. A panel that has no neighbour is as wide as the
            figure.
    """
    from matplotlib.figure import Figure  # not pyplot: draws without a display

    # Looks in the order in which labels come, and the heights of the rows.
    looks: Looks = {}
    heights = []
    for row in rows:
        heights.append(max(panel.height for panel in row))
        for panel in row:
            for label in panel.labels:
                # Lines are dashed when the colours run out.
                repeats, colour = divmod(len(looks), len(COLOURS))
                look = {"color": COLOURS[colour], "linestyle": LINES[repeats % len(LINES)]}
                looks.setdefault(label, look)

    # The panels on a grid.
    columns = max(len(row) for row in rows)
    size = (PANEL_WIDTH * columns, sum(heights) + 0.3)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    grid = figure.add_gridspec(len(rows), columns, height_ratios=heights)
    for i, row in enumerate(rows):
        for j, panel in enumerate(row):
            place = grid[i, j]
            if len(row) == 1:
                place = grid[i, :]
            axis = figure.add_subplot(place)
            panel.draw(axis, looks)
            axis.spines[["top", "right"]].set_visible(False)
            axis.set_title(panel.title, loc="left", fontweight="bold", fontsize="medium")
    return figure
