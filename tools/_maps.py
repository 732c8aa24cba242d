"""Pictures of maps for `inspect-model`, by matplotlib."""

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
    norm = SymLogNorm(0.01, vmin=-1, vmax=1, base=10)
    figure = _panels(
        f"{title}: share of each column's token in each row's",
        share(weights) * weights.sign(),
        size,
        norm,
    )
    if len(labels) <= FEW:
        for axis in figure.axes[:-1]:
            axis.set_xticks(range(len(labels)), labels, rotation=90, fontsize=5, parse_math=False)
            axis.set_yticks(range(len(labels)), labels, fontsize=5, parse_math=False)
    figure.savefig(path)


def draw_pairing(path: Path, title: str, weights: Tensor) -> None:
    """A panel per head of weights [H, s, r] over the largest of the head, negative ones in red."""
    from matplotlib.colors import Normalize

    scaled = weights / weights.abs().amax((1, 2), keepdim=True)
    figure = _panels(
        f"{title}: weight of a value for a query that matches a key", scaled, 2.2, Normalize(-1, 1)
    )
    figure.supxlabel("r: how many tokens ago the value came", fontsize="small")
    figure.supylabel("s: how many tokens ago the key came", fontsize="small")
    figure.savefig(path)


def _panels(title: str, matrices: Tensor, size: float, norm: Any) -> Any:
    """A figure with a panel of `size` inches per head, four in a row, and a colour bar as its last axis."""
    from matplotlib.figure import Figure  # not pyplot: draws without a display

    heads = len(matrices)
    columns = min(4, heads)
    rows = -(-heads // columns)
    figure = Figure(
        figsize=(size * columns + 0.8, size * rows + 0.4), dpi=110, layout="constrained"
    )
    image: Any = None
    for head, matrix in enumerate(matrices.cpu().numpy()):
        axis = figure.add_subplot(rows, columns, head + 1)
        image = axis.imshow(matrix, cmap="RdBu", norm=norm, interpolation="nearest")
        axis.set_title(f"head {head}", fontsize="small")
        axis.tick_params(labelsize=6, length=2)
    figure.suptitle(title, fontsize="medium")
    figure.colorbar(image, ax=figure.axes, shrink=0.6)
    return figure
