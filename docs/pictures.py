"""python docs/pictures.py mixer packages study

Draw the pictures of README.md and docs/ into docs/pictures, each in a light and a dark version (NAME-light.*, NAME-dark.*):

    mixer        the data flow of the mixer, and how it is computed
    packages     which package imports which, from the rule that tests/test_repository.py checks
    study        the result of the small study
    kernel       the error of equation 9 by number of basis functions (docs/kernel-view.md)
    map          attention maps of one layer; needs --model, an exported folder
    tensorboard  the page Custom Scalars; needs --run, a run's folder, and chromium on PATH

Without names: the first four. Needs matplotlib; `./launch.sh test` installs it.
"""

import argparse
import ast
import functools
import itertools
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from matplotlib import rc_context, rcParams
from matplotlib.colors import LinearSegmentedColormap, SymLogNorm, to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from PIL import Image

from interdomain.files.pretrained import load_pretrained
from interdomain.tools import inspect_model as inspect
from interdomain.tools import kernel_view
from interdomain.tools._inspect.maps import read_layers, share
from interdomain.tools._plots import Curve, Panel, draw
from interdomain.tools._study.definition import VALIDATION
from interdomain.tools._study.tables import ACCURACY, cells_of
from interdomain.tools.study import shown

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "docs" / "pictures"
STUDY = ROOT / "train_configs" / "studies" / "small.toml"
TEXT = "def read(path, names):\n    for name in names:\n        print(path, name)"
BLUE, ORANGE, GREEN, PINK, GREY = "#3b82c4", "#d9730d", "#1a9873", "#c4679f", "#8a919c"
THEMES = {"light": "#24292f", "dark": "#d7dde5"}  # of text and lines
MAP = ["#7a0f1d", "#d9535a", "#ffffff", "#5aa0dc", "#123f75"], ["#ffc4c0", "#c2404a", "#161b22", "#2f74b5", "#b9dcff"]
INK = "text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color"
GROUNDS = "figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor"


@contextmanager
def themed(theme: str) -> Iterator[None]:
    """matplotlib in a theme's colours, without a background, and with the same bytes each time."""
    os.environ["SOURCE_DATE_EPOCH"] = "0"  # the date in an SVG
    colours = dict.fromkeys(INK, THEMES[theme]) | dict.fromkeys(GROUNDS, "none") | {"grid.color": GREY}
    with rc_context({**colours, "svg.hashsalt": "interdomain", "font.size": 9}):
        yield


def canvas(width: float, height: float):
    """A figure, and axes in points of the screen: 122 to the inch."""
    figure = Figure(figsize=(width / 122, height / 122))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, width), ylim=(0, height))
    axis.set_axis_off()
    return figure, axis


def box(axis, x: float, y: float, w: float, h: float, text: str, colour: str = GREY, size: float = 9) -> None:
    """Around its middle (x, y)."""
    shape = FancyBboxPatch((x - w / 2, y - h / 2), w, h, boxstyle="round,pad=0,rounding_size=6", mutation_aspect=1)
    shape.set(facecolor=to_rgba(colour, 0.16), edgecolor=colour, linewidth=1.2)
    axis.add_patch(shape)
    axis.text(x, y, text, ha="center", va="center", fontsize=size, linespacing=1.35)


def arrow(axis, *points: tuple[float, float]) -> None:
    """Along points, with its head at the last."""
    for (x0, y0), (x1, y1) in itertools.pairwise(points[:-1]):
        axis.plot([x0, x1], [y0, y1], color=rcParams["text.color"], linewidth=1, solid_capstyle="round")
    style = dict(arrowstyle="-|>,head_width=0.22,head_length=0.4", color=rcParams["text.color"], linewidth=1)
    axis.annotate("", points[-1], points[-2], arrowprops=style | dict(shrinkA=0, shrinkB=0))


def note(axis, x: float, y: float, text: str, **how) -> None:
    axis.text(x, y, text, fontsize=8, va="center", **how)


# The mixer


def mixer(path: Path) -> None:
    figure, axis = canvas(1000, 560)
    _what_it_computes(axis)
    axis.plot([15, 985], [232, 232], color=GREY, linewidth=0.6, linestyle=(0, (4, 4)))
    _how_it_is_computed(axis)
    figure.savefig(path)


def _what_it_computes(axis) -> None:
    axis.text(15, 538, "What the mixer computes", fontsize=11, fontweight="bold", va="center")
    note(axis, 985, 538, "B batch, T tokens, H heads, R features, D values, M basis functions", ha="right")
    box(axis, 42, 356, 74, 44, "x\n[B, T, dim]", size=7.5)
    for name, y in {"q": 488, "k": 412, "v": 300}.items():
        arrow(axis, (42, 378 if y > 356 else 334), (42, y), (84, y))
        box(axis, 102, y, 36, 36, f"$W_{name}$", BLUE, 10)
        steps = [("conv\nwidth 4", 164, 64), ("RoPE", 231, 46), ("SiLU,\nunit length", 314, 96)] if name != "v" else []
        steps += [("RMSNorm\n+ bias", 412, 76)] if name != "q" else []
        end = 120
        for text, x, w in steps:
            arrow(axis, (end, y), (x - w / 2, y))
            box(axis, x, y, w, 42, text, GREEN, 8)
            end = x + w / 2
        if name == "q":
            arrow(axis, (end, y), (858, y), (858, 395))
            note(axis, 470, 502, "$q_t$   [B, T, H, R]")
        else:
            middle = 380 if name == "k" else 332
            arrow(axis, (end, y), (469, y), (469, middle), (489, middle))
            note(axis, 464, y + (14 if name == "k" else -15), f"${name}_t$   [B, T, H, {'R' if name == 'k' else 'D'}]")
    state = "$z_t = [k_t; v_t]$\n$x_t = \\Lambda\\, x_{t-1} + \\beta\\, z_t^T$\nM $\\times$ (R + D), complex"
    box(axis, 574, 356, 170, 108, f"recurrence, per head\n{state}", ORANGE, 8.5)
    arrow(axis, (659, 356), (674, 356))
    text = "$[U_t, \\Gamma_t] = C\\, x_t$\n$U_t$: M $\\times$ R\n$\\Gamma_t$: M $\\times$ D"
    box(axis, 727, 356, 106, 82, text, ORANGE, 8.5)
    arrow(axis, (780, 356), (794, 356))
    box(axis, 858, 356, 128, 78, "readout\n$o_t = \\mathrm{Re}(q_t^T U_t^T \\Gamma_t)$\n[B, T, H, D]", PINK, 8.5)
    arrow(axis, (922, 356), (936, 356))
    box(axis, 957, 356, 42, 36, "$W_o$", BLUE, 10)
    arrow(axis, (957, 338), (957, 312))
    note(axis, 985, 300, "[B, T, dim]", ha="right")
    note(axis, 464, 256, "The state $x_t$ has the same size after any number of tokens.")


def _how_it_is_computed(axis) -> None:
    axis.text(15, 204, "How it is computed", fontsize=11, fontweight="bold", va="center")
    text = "With $x = \\beta X$:   $q^T U^T \\Gamma = (C\\beta\\, X^k q)^T (C\\beta\\, X^v) = b^T X^v$"
    note(axis, 985, 204, text, ha="right")
    y = 118
    note(axis, 90, y + 16, "$q_t,\\ k_t$", ha="right")
    arrow(axis, (98, y + 16), (160, y + 16))
    note(axis, 90, y - 24, "$v_t$", ha="right")
    arrow(axis, (98, y - 24), (128, y - 24), (128, 48), (700, 48), (700, y - 43))
    box(
        axis,
        260,
        y,
        200,
        86,
        "pass 1: linear attention\n$X^k_t = \\Lambda X^k_{t-1} + k_t^T$\n$a_t = X^k_t\\, q_t$",
        ORANGE,
    )
    arrow(axis, (360, y), (420, y))
    note(axis, 390, y + 12, "$a_t$: 2M", ha="center")
    box(axis, 480, y, 120, 58, "$b_t = W a_t$\nreal, 2M $\\times$ 2M", PINK)
    arrow(axis, (540, y), (600, y))
    note(axis, 570, y + 12, "$b_t$: 2M", ha="center")
    text = "pass 2: linear attention\n$X^v_t = \\Lambda X^v_{t-1} + v_t^T$\n$o_t = \\mathrm{Re}(b_t^T X^v_t)$"
    box(axis, 700, y, 200, 86, text, ORANGE)
    arrow(axis, (800, y), (850, y))
    note(axis, 858, y, "$o_t$   [B, T, H, D]")
    note(axis, 480, 174, "$W$: from $C$ and $\\beta$, once per step", ha="center")
    arrow(axis, (480, 164), (480, 147))
    text = (
        "Inside a chunk of 64 tokens: matrix products. Between chunks: the state. $U$ and $\\Gamma$ are never formed."
    )
    note(axis, 500, 20, text, ha="center")


# The packages

PLACES = {  # middle, and what it is for
    "tools": (500, 413, "every command:\nprepare data, launch, convert, evaluate, study"),
    "hf": (125, 307, "the model in transformers,\nalone in an exported folder"),
    "megatron": (375, 307, "the mixer in\nMegatron-Core's models"),
    "titan": (625, 307, "training under TorchTitan:\nthe main way"),
    "model": (500, 207, "mixers, the decoder, states,\ngeneration, checkpoints"),
    "environment": (872, 207, "machine and versions\nof a result"),
    "features": (335, 117, "conv, RoPE, SiLU, norm\nin one pass"),
    "data": (665, 117, "shards, tokenizers,\nsamples and their order"),
    "scan": (335, 37, "the recurrence: reference,\nPyTorch and Triton"),
    "folders": (665, 37, "files that appear\ncomplete or not at all"),
}
COLOURS = {"scan": ORANGE, "features": ORANGE, "model": BLUE, "data": GREEN, "tools": PINK}


def imports() -> dict[str, set[str]]:
    """Direct imports between our packages, without those that others already bring."""
    tree = ast.parse((ROOT / "tests" / "test_repository.py").read_text())
    rule = next(n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "ALLOWED")
    allowed = eval(compile(ast.Expression(rule), "ALLOWED", "eval"))
    of = {name: {n.partition(".")[2] for n in found if n.startswith("interdomain.")} for name, found in allowed.items()}
    return {name: found - set().union(*(of[other] for other in found)) for name, found in of.items()}


def packages(path: Path) -> None:
    figure, axis = canvas(1000, 470)
    note(axis, 15, 452, "An arrow: imports. None goes up.")
    note(axis, 15, 434, "Left out: imports that others imply.")
    for name, found in imports().items():
        x0, y0, _ = PLACES[name]
        for other in sorted(found):
            x1, y1, _ = PLACES[other]
            side = 0.3 * (x1 - x0) if y0 - y1 < 150 else 0
            arrow(axis, (x0 + side, y0 - 32), (x1 - max(-80, min(side, 80)), y1 + 32))
    for name, (x, y, purpose) in PLACES.items():
        box(axis, x, y, 340 if name == "tools" else 212, 64, "", COLOURS.get(name, GREY))
        axis.text(x, y + 19, name, fontsize=10, fontweight="bold", ha="center", va="center")
        axis.text(x, y - 9, purpose, fontsize=8, ha="center", va="center", linespacing=1.3)
    figure.savefig(path)


# The study

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
    groups = {group[-1]: cells for group, cells in cells_of(shown([STUDY])).items()}
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
    axis.grid(axis="x", alpha=0.3, linewidth=0.5)
    axis.spines[["top", "right"]].set_visible(False)


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
    axis.grid(alpha=0.3, linewidth=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=7.5, frameon=False, handlelength=3, loc="center left", bbox_to_anchor=(1, 0.5))


# From tools


@functools.cache
def _errors() -> list[Panel]:
    return [
        Panel(kind, [Curve(name, list(y), list(y.values())) for name, y in bases.items()], "M", "error", True, True)
        for kind, bases in kernel_view.errors(256).items()
    ]


def kernel(path: Path) -> None:
    draw(path, _errors())


def attention_map(path: Path, folder: Path, layer: int, heads: list[int]) -> None:
    """As `inspect` draws maps, in a theme's colours."""
    model, tokenizer = load_pretrained(folder, dtype=torch.float64)
    ids, labels = inspect.tokens_of(argparse.Namespace(text=TEXT, max_tokens=64), tokenizer)
    weights = read_layers(model, torch.tensor(ids), [layer])[layer].weights
    shares = (share(weights) * weights.sign()).masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), torch.nan)
    colours = LinearSegmentedColormap.from_list("map", MAP[THEMES["dark"] == rcParams["text.color"]])
    rows = -(-len(heads) // 2)
    figure = Figure(figsize=(7.6, 3.3 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, 2, squeeze=False, sharex=True, sharey=True)
    norm, ticks = SymLogNorm(0.01, vmin=-1, vmax=1, base=10), [-1, -0.1, -0.01, 0, 0.01, 0.1, 1]
    for axis, head in zip(axes.flat, heads, strict=True):
        image = axis.imshow(shares[head].numpy(), cmap=colours, norm=norm, interpolation="none")
        axis.set_title(f"layer {layer}, head {head}", fontsize=9)
        axis.tick_params(length=2)
        axis.set_xticks(range(len(labels)), labels, rotation=90, fontsize=7, parse_math=False)
        axis.set_yticks(range(len(labels)), labels, fontsize=7, parse_math=False)
    bar = figure.colorbar(image, ax=axes, shrink=0.5, ticks=ticks)
    bar.ax.set_yticklabels(map(str, ticks), fontsize=7)
    bar.set_label("weight, share of the row", fontsize=8)
    figure.supxlabel("a row: a token that reads; a column: a token that is read", fontsize=8)
    figure.savefig(path)


def tensorboard(path: Path, run: Path) -> None:
    """A screenshot of TensorBoard's page Custom Scalars."""
    if not (browser := shutil.which("chromium") or shutil.which("google-chrome")):
        raise SystemExit("error: chromium is not on PATH. Install it (Debian: apt-get install chromium).")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = f"-m tensorboard.main --host 127.0.0.1 --port {port} --samples_per_plugin scalars=100000".split()
    server = subprocess.Popen([sys.executable, *command, "--logdir", run / "tb"], stderr=subprocess.DEVNULL)
    page, dark = f"http://127.0.0.1:{port}/", path.stem.endswith("dark")
    try:
        while not _runs(page):
            time.sleep(0.5)
        with tempfile.TemporaryDirectory() as folder:
            picture = Path(folder) / "page.png"
            flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1110,720"]
            flags += [f"--user-data-dir={folder}/profile", f"--blink-settings=preferredColorScheme={int(not dark)}"]
            flags += ["--virtual-time-budget=20000", f"--screenshot={picture}"]
            address = f"{page}?darkMode={str(dark).lower()}#custom_scalars&_smoothingWeight=0"
            subprocess.run([browser, *flags, address], check=True, stderr=subprocess.DEVNULL, timeout=180)
            Image.open(picture).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    finally:
        server.terminate()
        server.wait()


def _runs(page: str) -> list[str]:
    """The runs that TensorBoard has read so far."""
    try:
        return json.load(urllib.request.urlopen(page + "data/runs"))
    except OSError:
        return []


# The command


def main(argv=None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, metavar="FOLDER", help="for map: made by interdomain convert")
    p.add_argument("--layer", type=int, default=1, help="for map (default: 1)")
    p.add_argument("--heads", type=int, nargs="+", default=[0, 1, 2, 3], help="for map (default: 0 1 2 3)")
    p.add_argument("--run", type=Path, metavar="FOLDER", help="for tensorboard: a run's job.dump_folder")
    drawn: dict[str, Callable[[Path], None]] = {
        "mixer": mixer,
        "packages": packages,
        "study": study,
        "kernel": kernel,
        "map": lambda path: attention_map(path, args.model, args.layer, args.heads),
        "tensorboard": lambda path: tensorboard(path, args.run),
    }
    p.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(drawn)}; default: the first four")
    args = p.parse_args(argv)
    if unknown := [name for name in args.names if name not in drawn]:
        p.error(f"no picture is called {', '.join(unknown)}; there are {', '.join(drawn)}")
    if ("map" in args.names and not args.model) or ("tensorboard" in args.names and not args.run):
        p.error("map needs --model, tensorboard needs --run")
    OUTPUT.mkdir(exist_ok=True)
    for name in args.names or list(drawn)[:4]:
        for theme in THEMES:
            path = OUTPUT / f"{name}-{theme}.{'png' if name == 'tensorboard' else 'svg'}"
            with themed(theme):
                drawn[name](path)
            if path.suffix == ".svg":  # matplotlib writes a line for every point
                path.write_text(" ".join(path.read_text().split()) + "\n")
            print(f"wrote {path.relative_to(ROOT)} ({path.stat().st_size / 1e3:,.0f} kB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
