"""Curves in panels as a PNG, for the tools that measure something along an axis; needs matplotlib."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, which stay apart for colour-blind readers and in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#F0E442")


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


def draw(path: Path | str, panels: Sequence[Panel]) -> Path | None:
    """One image of all panels, two side by side, a curve of the same label in the same colour everywhere.

    Returns: the path, or None where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # not pyplot: draws without a display
        from matplotlib.ticker import LogFormatter
    except ImportError:
        return None
    rows, columns = -(-len(panels) // 2), min(2, len(panels))
    figure = Figure(figsize=(5.2 * columns, 3.6 * rows), dpi=150, layout="constrained")
    labels = list(dict.fromkeys(curve.label for panel in panels for curve in panel.curves))
    for i, panel in enumerate(panels):
        axis = figure.add_subplot(rows, columns, i + 1)
        for curve in panel.curves:
            again, i_colour = divmod(labels.index(curve.label), len(COLOURS))
            look: dict[str, Any] = dict(color=COLOURS[i_colour], marker="os"[again % 2], markersize=4)
            look["linestyle"] = ("-", "--")[again % 2]
            y, error = ([math.nan if v is None else v for v in of] for of in (curve.y, curve.error or ()))
            axis.errorbar(curve.x, y, yerr=error or None, label=curve.label, linewidth=1.5, capsize=2, **look)
        axis.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        if panel.log_x:
            ticks = sorted({x for curve in panel.curves for x in curve.x})
            axis.set_xscale("log", base=2)
            axis.set_xticks(ticks, [f"{x:,.4g}" if x < 1e4 else f"{x:,.0f}" for x in ticks])
        if panel.log_y:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter(LogFormatter())  # 20, where the default writes 2 x 10^1
            axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
        axis.grid(visible=True, which="both", alpha=0.3, linewidth=0.5)
        axis.legend(fontsize="small")
    figure.savefig(path)
    return Path(path)
