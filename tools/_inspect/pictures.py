"""Pictures for `inspect-model`, of matplotlib."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interdomain.model.maps import share
from interdomain.tools._plots import COLOURS

FEW = 40  # tokens that are written beside a map


def _figure(width: float, height: float):
    from matplotlib.figure import Figure  # not pyplot: draws without a display

    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def draw_maps(path: Path, title: str, weights: Tensor, labels: list[str]) -> None:
    """A panel per head of weights [H, T, T]: in each row the weights over the sum of their sizes, negative ones in red."""
    from matplotlib.colors import SymLogNorm

    H, T, columns = len(weights), len(labels), min(4, len(weights))
    size = 2.2 if T > FEW else max(2.2, 0.14 * T)
    figure = _figure(size * columns + 0.8, size * -(-H // columns) + 0.4)
    axes = figure.subplots(-(-H // columns), columns, squeeze=False)
    shares = (share(weights) * weights.sign()).cpu().numpy()
    scale, images = SymLogNorm(0.01, vmin=-1, vmax=1, base=10), []
    for head, axis in enumerate(axes.flat):
        if head >= H:
            axis.set_axis_off()
            continue
        images.append(axis.imshow(shares[head], cmap="RdBu", norm=scale, interpolation="nearest"))
        axis.set_title(f"head {head}", fontsize="small")
        axis.tick_params(labelsize=6, length=2)
        if T <= FEW:
            axis.set_xticks(range(T), labels, rotation=90, fontsize=5, parse_math=False)
            axis.set_yticks(range(T), labels, fontsize=5, parse_math=False)
    figure.suptitle(f"{title}: a row for each token, a column for each token that it reads", fontsize="medium")
    ticks = [-1, -0.1, -0.01, 0, 0.01, 0.1, 1]
    bar = figure.colorbar(images[0], ax=axes, shrink=0.6, ticks=ticks)
    bar.ax.set_yticklabels(map(str, ticks), fontsize="x-small")
    bar.set_label("share of the row", fontsize="x-small")
    figure.savefig(path)


def draw_pairing(path: Path, title: str, weights: Tensor) -> None:
    """A panel per head of weights [H, s, r] over the largest of the head, negative ones in red."""
    columns = min(4, len(weights))
    figure = _figure(2.2 * columns + 0.8, 2.4 * -(-len(weights) // columns) + 0.4)
    axes = figure.subplots(-(-len(weights) // columns), columns, squeeze=False)
    scaled = (weights / weights.abs().amax((1, 2), keepdim=True)).cpu().numpy()
    for axis in axes.flat[len(weights) :]:
        axis.set_axis_off()
    for head, (axis, values) in enumerate(zip(axes.flat, scaled, strict=False)):
        image = axis.imshow(values, cmap="RdBu", vmin=-1, vmax=1, interpolation="nearest")
        axis.set_title(f"head {head}", fontsize="small")
        axis.tick_params(labelsize=6, length=2)
    figure.supxlabel("r: how many tokens ago the value came", fontsize="small")
    figure.supylabel("s: how many tokens ago the key came", fontsize="small")
    figure.suptitle(f"{title}: weight of a value for a query that matches a key", fontsize="medium")
    figure.colorbar(image, ax=axes, shrink=0.6)
    figure.savefig(path)


def draw_kernels(path: Path, title: str, kernels: Tensor) -> None:
    """Draw the linear readout's weight of a token by how many tokens ago it came: kernels [H, T], a line per head."""
    figure = _figure(6, 3.2)
    axis = figure.subplots()
    for head, kernel in enumerate(kernels.cpu().numpy()):
        look: Any = dict(
            color=COLOURS[head % len(COLOURS)], linestyle="-" if head < len(COLOURS) else "--", linewidth=1
        )
        axis.plot(kernel, label=f"head {head}" if head < 2 * len(COLOURS) else None, **look)
    axis.set(title=f"{title}: kernel of the linear readout", xlabel="lag (tokens)", ylabel="weight")
    axis.grid(visible=True, alpha=0.3, linewidth=0.5)
    axis.legend(fontsize="xx-small", frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path)


def draw_timescales(path: Path, timescales: dict[int, Tensor]) -> None:
    """Histograms of the modes' timescales [H, M] in tokens, by layer."""
    logs = [t.double().log10().flatten().cpu() for t in timescales.values()]
    low = math.floor(min(x.min().item() for x in logs))
    high = max(low + 1, math.ceil(max(x.max().item() for x in logs)))
    edges = torch.linspace(low, high, 12 * (high - low) + 1, dtype=torch.float64)
    rows = torch.stack([torch.histogram(x, edges)[0] / len(x) for x in logs]).numpy()
    figure = _figure(6, 1.6 + 0.22 * len(rows))
    axis = figure.subplots()
    image = axis.pcolormesh(10 ** edges.numpy(), np.arange(len(rows) + 1) - 0.5, rows, cmap="Blues")
    medians = [t.median().item() for t in timescales.values()]
    axis.plot(medians, range(len(rows)), "o", color=COLOURS[1], markersize=4, label="median")
    axis.set_xscale("log")
    axis.set_yticks(range(len(rows)), [f"layer {i}" for i in timescales], fontsize="x-small")
    axis.set(xlabel="timescale (tokens)", title="timescales of the modes")
    axis.invert_yaxis()
    axis.legend(fontsize="x-small", frameon=False, loc="lower right", bbox_to_anchor=(1, 1))
    figure.colorbar(image, ax=axis).set_label("share of the layer's modes", fontsize="x-small")
    figure.savefig(path)
