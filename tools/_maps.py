"""Pictures of maps for `inspect-model`, by matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from interdomain.model.maps import share

FEW = 40  # tokens that are written beside a map


def draw_maps(path: Path, title: str, weights: Tensor, labels: list[str]) -> None:
    """A panel per head of weights [H, T, T]: in each row the weights over the sum of their sizes, negative ones in red."""
    from matplotlib.colors import SymLogNorm

    size = 2.2
    if len(labels) <= FEW:
        size = max(size, 0.14 * len(labels))
    shares = share(weights) * weights.sign()
    figure, axes, image = _panels(shares, size, SymLogNorm(0.01, vmin=-1, vmax=1, base=10))
    if len(labels) <= FEW:
        for axis in axes:
            axis.set_xticks(range(len(labels)), labels, rotation=90, fontsize=5, parse_math=False)
            axis.set_yticks(range(len(labels)), labels, fontsize=5, parse_math=False)
    figure.suptitle(f"{title}: a row for each token, a column for each token that it reads", fontsize="medium")
    ticks = [-1, -0.1, -0.01, 0, 0.01, 0.1, 1]
    bar = figure.colorbar(image, ax=axes, shrink=0.6, ticks=ticks)
    bar.ax.set_yticklabels(map(str, ticks), fontsize="x-small")
    bar.set_label("share of the row", fontsize="x-small")
    figure.savefig(path)


def draw_pairing(path: Path, title: str, weights: Tensor) -> None:
    """A panel per head of weights [H, s, r] over the largest of the head, negative ones in red."""
    from matplotlib.colors import Normalize

    scaled = weights / weights.abs().amax((1, 2), keepdim=True)
    figure, axes, image = _panels(scaled, 2.2, Normalize(-1, 1))
    figure.supxlabel("r: how many tokens ago the value came", fontsize="small")
    figure.supylabel("s: how many tokens ago the key came", fontsize="small")
    figure.suptitle(f"{title}: weight of a value for a query that matches a key", fontsize="medium")
    figure.colorbar(image, ax=axes, shrink=0.6)
    figure.savefig(path)


def _panels(matrices: Tensor, size: float, norm: Any) -> tuple[Any, Sequence[Any], Any]:
    """A figure with a panel of `size` inches per head, four in a row. Returns: figure, axes and one of the images."""
    from matplotlib.figure import Figure  # not pyplot: draws without a display

    heads = len(matrices)
    columns = min(4, heads)
    rows = -(-heads // columns)
    figure = Figure(figsize=(size * columns + 0.8, size * rows + 0.4), dpi=110, layout="constrained")
    axes = []
    image = None
    for head, matrix in enumerate(matrices.cpu().numpy()):
        axis = figure.add_subplot(rows, columns, head + 1)
        image = axis.imshow(matrix, cmap="RdBu", norm=norm, interpolation="nearest")
        axis.set_title(f"head {head}", fontsize="small")
        axis.tick_params(labelsize=6, length=2)
        axes.append(axis)
    return figure, axes, image
