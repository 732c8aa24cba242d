"""Draws attention maps and pairings for `inspect-model`, by matplotlib.

A map has the weight of each token's value in each token's output. A pairing (docs/evaluation.md) says
which value a query reads that matches a key.

Shapes: H heads, T tokens of the text, s and r lags in tokens.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from interdomain.model.maps import share

FEW = 40  # up to this many tokens are written beside a map
SMALL = 2.2  # inches of a panel
LARGE = 5.6  # inches of a panel with tokens beside it; FEW tokens have a line each


def draw_maps(path: Path, title: str, weights: Tensor, labels: list[str]) -> None:
    """Draws a panel per head: each weight as its share of its row, negative ones in red.

    Args:
        path: The PNG to write.
        title: The title of the picture.
        weights: The maps, [H, T, T].
        labels: The texts of the T tokens.
    """
    # matplotlib is optional, and imported when a picture is drawn.
    from matplotlib.colors import SymLogNorm

    # `share` divides |w| by the sum of |w| over the row. The colours are linear up to a share of
    # 0.01, and logarithmic above.
    shares = share(weights) * weights.sign()
    norm = SymLogNorm(0.01, vmin=-1, vmax=1, base=10)
    text = f"{title}: share of each column's token in each row's output"
    # The texts of few tokens stand beside the maps, which are larger then.
    if len(labels) > FEW:
        figure = _panels(text, shares, SMALL, 4, norm)
    else:
        figure = _panels(text, shares, LARGE, 2, norm)
        for axis in figure.axes[:-1]:  # the last is the colour bar
            axis.set_xticks(range(len(labels)), labels, rotation=90, fontsize=8, parse_math=False)
            axis.set_yticks(range(len(labels)), labels, fontsize=8, parse_math=False)
    figure.savefig(path)


def draw_pairing(path: Path, title: str, weights: Tensor) -> None:
    """Draws a panel per head: each weight over the largest of its head, negative ones in red.

    Args:
        path: The PNG to write.
        title: The title of the picture.
        weights: The weights of `model.pairing`, [H, s, r].
    """
    from matplotlib.colors import Normalize

    scaled = weights / weights.abs().amax((1, 2), keepdim=True)
    text = f"{title}: weight of a value for a query that matches a key"
    figure = _panels(text, scaled, SMALL, 4, Normalize(-1, 1))
    figure.supxlabel("r: how many tokens ago the value came", fontsize="small")
    figure.supylabel("s: how many tokens ago the key came", fontsize="small")
    figure.savefig(path)


def _panels(title: str, matrices: Tensor, size: float, columns: int, norm: Any) -> Any:
    """Makes a figure with a panel per head, and a colour bar as its last axes.

    Args:
        title: The title of the figure.
        matrices: The values, [H, rows, columns].
        size: The size of a panel in inches.
        columns: The most panels in a row.
        norm: Matplotlib's map of values to colours.
    """
    from matplotlib.figure import Figure  # not pyplot: draws without a display

    columns = min(columns, len(matrices))
    rows = -(-len(matrices) // columns)
    figsize = (size * columns + 0.8, size * rows + 0.4)
    figure = Figure(figsize=figsize, dpi=110, layout="constrained")
    # All heads have the same colours, which one bar explains.
    image: Any = None
    for head, matrix in enumerate(matrices.cpu().numpy()):
        axis = figure.add_subplot(rows, columns, head + 1)
        image = axis.imshow(matrix, cmap="RdBu", norm=norm, interpolation="nearest")
        axis.set_title(f"head {head}", fontsize="small")
        axis.tick_params(labelsize=6, length=2)
    figure.suptitle(title, fontsize="medium")
    figure.colorbar(image, ax=figure.axes, shrink=0.6)
    return figure
