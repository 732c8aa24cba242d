"""python docs/annotated.py

Draw the pictures of docs/annotated.md into docs/pictures, from the page's own Python: its blocks run first, in one namespace.
Needs matplotlib; `./launch.sh test` installs it.
"""

import itertools
import os
import re
import sys
from types import SimpleNamespace

import torch
from matplotlib import rc_context
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from pictures import BLUE, GREEN, GREY, GROUNDS, INK, LOOK, ORANGE, OUTPUT, PINK, ROOT, THEMES

PAGE = ROOT / "docs" / "annotated.md"
COLOURS = BLUE, ORANGE, GREEN, PINK
# Zero is transparent: one map of colours for a light and a dark page.
SIGNED = LinearSegmentedColormap.from_list("signed", [ORANGE, ORANGE + "00", BLUE + "00", BLUE])
SMALL = {"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}  # letters as text
TOKENS = 0, 5, 10, 15, 19
VALUES = dict(xlabel="angle of the key", ylabel="value", ylim=(-0.4, 3.9))


def of_the_page() -> SimpleNamespace:
    """The names that the page's blocks define. The block that reads a trained model is left out."""
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        if "exports/" not in block:
            exec(block, names)
    return SimpleNamespace(**names)


def points(axis, page) -> None:
    axis.plot(page.angle, page.v, "o", color=GREY, markersize=3.5)
    axis.set(**VALUES)


def mean(page, figure) -> None:
    left, right = figure.subplots(1, 2)
    points(left, page)
    left.plot(page.asked, page.mean, color=BLUE)
    one = 70
    left.plot(page.asked[one], page.mean[one], "s", color=ORANGE)
    left.annotate("one query", (page.asked[one], page.mean[one]), (4, -14), textcoords="offset points", color=ORANGE)
    left.set(title="softmax attention over twenty tokens")
    right.bar(range(page.N), page.kernel[one] / page.kernel[one].sum(), color=ORANGE)
    right.set(title="this query's weights", xlabel="token", ylabel="share", xticks=TOKENS)


def features(page, figure) -> None:
    left, right = figure.subplots(1, 2)
    at = len(page.asked) // 2  # the query at angle 0
    gaussian = (-(page.q - page.q[at]).square().sum(1) / 8**0.5).exp()
    left.plot(page.asked, gaussian, color=GREY, label="kernel")
    left.plot(page.asked, page.fq @ page.fq[at], color=BLUE, label="256 features")
    left.set(title="kernel of two angles", xlabel="angle between query and key")
    points(right, page)
    right.plot(page.asked, page.mean, color=GREY, label="equation 1")
    right.plot(page.asked, page.mean_4, color=BLUE, label="equation 4")
    right.set(title="answers")
    for axis in (left, right):
        axis.legend(frameon=False)


def basis(page, figure) -> None:
    left, right = figure.subplots(1, 2)
    _, waves, C = page.basis(4)
    for axis, functions, title in ((left, waves * page.N, "waves"), (right, waves @ C.T, "made orthonormal by C")):
        for m, colour in enumerate(COLOURS):
            axis.plot(functions[:, m].real, "o-", color=colour, markersize=2.5, linewidth=1, label=f"m = {m}")
        axis.set(title=f"{title} (real part)", xlabel="token", xticks=TOKENS)
    right.set(ylim=(-0.4, 0.6))
    right.legend(frameon=False, ncols=2)


def fit(page, figure) -> None:
    for (M, error), frame in zip(page.errors.items(), figure.subfigures(2, 3).flat, strict=True):
        top, bottom = frame.subplots(2, 1)
        frame.suptitle(f"M = {M}   (error {error:.2g})", fontsize=10)
        _, waves, C = page.basis(M)
        phi = waves @ C.T
        kept = (phi.conj() @ (phi.T @ page.v.to(phi.dtype))).real
        top.plot(page.v, "o", color=GREY, markersize=3.5)
        top.plot(kept, color=GREEN)
        top.set(xlabel="token", ylabel="value", ylim=VALUES["ylim"], xticks=TOKENS)
        points(bottom, page)
        bottom.plot(page.asked, page.mean_4, color=GREY, linewidth=1)
        bottom.plot(page.asked, page.equation_9(M), color=BLUE)


def recurrence(page, figure) -> None:
    left, right = figure.subplots(1, 2)
    log_decay, *_ = page.basis(8)
    decay = torch.view_as_complex(page.powers(log_decay, page.lag.clamp(min=0).flatten())).view(page.N, page.N, -1)
    state = (decay * page.lag.ge(0)[..., None] * page.v).sum(1)
    for m, colour in enumerate(COLOURS):
        left.plot(state[:, m].real, "o-", color=colour, markersize=2.5, linewidth=1, label=f"m = {m}")
    left.set(title="state of the values (real part)", xlabel="token", xticks=TOKENS)
    left.legend(frameon=False)
    points(right, page)
    answers = page.paper_scan(
        page.every, page.fk[None, :, None], page.v[None, :, None], page.dt, page.A, page.C[None], **page.ratio
    )[0]
    for tokens, colour in zip((20, 10, 5), (BLUE, ORANGE, PINK), strict=True):
        known = page.asked <= page.angle[:tokens].max()  # beyond the keys so far there is nothing to average
        right.plot(page.asked[known], answers[0, tokens - 1, known], color=colour, label=f"after {tokens} tokens")
    right.set(title="answers, M = 8")
    right.legend(frameon=False)


def passes(page, figure) -> None:
    def pairs(x):
        return torch.cat([x.real, x.imag], dim=1)

    frames = (
        (r"1. scores $q_i \cdot k_j$", page.scores, "key j", "query i"),
        (r"2. decay $\Lambda^{i-j}$, m = 2", page.decay[:, :, 2].real.tril(), "key j", "query i"),
        ("3. first pass: a", pairs(page.a), "coefficient (real | imaginary)", "query i"),
        ("4. W", page.W[0], "of a", "of b"),
        ("5. second pass: D", page.D, "value j", "query i"),
        ("6. chunks of 5 tokens", page.D, "value j", "query i"),
    )
    for (title, matrix, x, y), frame in zip(frames, figure.subfigures(2, 3).flat, strict=True):
        axis = frame.subplots()
        largest = matrix.abs().max().item()
        axis.imshow(matrix, cmap=SIGNED, vmin=-largest, vmax=largest, interpolation="nearest", aspect="auto")
        x_ticks, y_ticks = (TOKENS if n == page.N else range(0, n, 4) for n in reversed(matrix.shape))
        axis.set(title=title, xlabel=x, ylabel=y, xticks=x_ticks, yticks=y_ticks)
        for side in axis.spines.values():
            side.set_visible(True)
    for begin in range(0, page.N, 5):  # of the last frame
        axis.add_patch(Rectangle((begin - 0.5, begin - 0.5), 5, 5, fill=False, edgecolor=GREEN, linewidth=1.5))
        axis.add_patch(Rectangle((-0.5, begin - 0.5), begin, 5, facecolor=GREY, alpha=0.25, edgecolor=GREY))


DRAWINGS = {  # inches; the sliders of site.css need frames of 3 x 3.7
    mean: (7.6, 2.9),
    features: (7.6, 2.9),
    basis: (7.6, 2.9),
    fit: (9, 7.4),
    recurrence: (7.6, 2.9),
    passes: (9, 7.4),
}


def main() -> int:
    os.environ["SOURCE_DATE_EPOCH"] = "0"  # the date in an SVG: the same bytes each time
    page = of_the_page()
    for (draw, size), (theme, ink) in itertools.product(DRAWINGS.items(), THEMES.items()):
        path = OUTPUT / f"annotated-{draw.__name__}-{theme}.svg"
        with rc_context(LOOK | SMALL | dict.fromkeys(INK, ink) | dict.fromkeys(GROUNDS, "none")):
            figure = Figure(figsize=size, layout="constrained")
            draw(page, figure)
            figure.savefig(path)
        text = re.sub(r"(\.\d\d)\d{2,}", r"\1", path.read_text())  # a hundredth of a point is enough
        path.write_text(" ".join(text.split()) + "\n")
        print(f"wrote {path.relative_to(ROOT)} ({path.stat().st_size / 1e3:,.0f} kB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
