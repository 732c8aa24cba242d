"""From the rows that bench_inference measures to tables in the paper's shape, the paper's figures beside them, and plots."""

import statistics

from . import _inference_paper as paper
from ._bench import show
from ._plots import Curve, Panel
from ._timing import ratio

DECODE = ["path", "B", "prefix", "ms a step", "tokens/s", "MB", "floor ms", "of floor", "remark"]
SUMMARY = [
    *("model", "softmax eager ms", "fastest softmax ms", "which", "max-fit", "interdomain eager ms", "interdomain ms"),
    *("max-fit interdomain", "speedup", "graph over eager softmax", "flat", "growth of softmax", "of floor"),
    *("paper: softmax eager ms", "paper: interdomain graph ms", "paper: speedup over eager", "paper: max-fit"),
]
MEMORY = [
    *("prompt", "softmax whole GiB", "softmax chunked GiB", "interdomain whole GiB", "interdomain chunked GiB"),
    *("paper: softmax GB", "paper: interdomain whole GB", "paper: chunked GB"),
]
SPEED = ["prompt", "softmax whole", "softmax chunked", "interdomain whole", "interdomain chunked"]
TARGETS = ["target", "bound", "measured", "met"]
LONG_PROMPT_GIB = 5.0


def fastest(rows: list[dict], kind: str, size: str, batch: int, prefix: int) -> dict | None:
    """Of all ways of decoding with one kind of model, the row with the least time."""
    ran = [
        row
        for row in rows
        if (row["size"], row["B"], row["prefix"]) == (size, batch, prefix)
        and row["path"].startswith(f"{kind},")
        and "ms a step" in row
    ]
    return min(ran, key=lambda row: row["ms a step"], default=None)


def speedup(rows: list[dict], size: str, batch: int, prefix: int) -> float | None:
    """The fastest softmax's time over the fastest interdomain's."""
    ours, softmax = (fastest(rows, kind, size, batch, prefix) for kind in ("interdomain", "softmax"))
    return ratio(softmax and softmax["ms a step"], ours and ours["ms a step"])


def of_path(rows: list[dict], path: str, size: str, batch: int) -> dict[int, float]:
    """prefix -> ms a step, where it ran."""
    return {
        row["prefix"]: row["ms a step"]
        for row in sorted(rows, key=lambda row: row["prefix"])
        if (row["size"], row["B"], row["path"]) == (size, batch, path) and "ms a step" in row
    }


def summary_row(rows: list[dict], flats: dict, size: str, batch: int) -> dict:
    """A row of the paper's decode tables: ranges over the prefixes that fitted, and two ratios of medians.

    "speedup" is the fastest of either kind, where both fitted; "graph over eager softmax" what the paper calls speedup: each
    median over what that path fitted.
    """
    prefixes = sorted({row["prefix"] for row in rows if (row["size"], row["B"]) == (size, batch)})
    ours, softmax = (
        {p: row for p in prefixes if (row := fastest(rows, kind, size, batch, p))}
        for kind in ("interdomain", "softmax")
    )
    both = [p for p in prefixes if p in ours and p in softmax]
    medians = [statistics.median(found[p]["ms a step"] for p in both) if both else None for found in (softmax, ours)]
    times = [row["ms a step"] for row in softmax.values()]
    eager, graph = (of_path(rows, path, size, batch).values() for path in ("softmax, eager", "interdomain, graph"))
    row = {
        "model": f"{size}, B={batch}",
        "softmax eager ms": span(eager),
        "fastest softmax ms": span(times),
        "which": "; ".join(dict.fromkeys(row["path"].removeprefix("softmax, ") for row in softmax.values())) or None,
        "max-fit": max(softmax, default=None),
        "interdomain eager ms": span(of_path(rows, "interdomain, eager", size, batch).values()),
        "interdomain ms": span(row["ms a step"] for row in ours.values()),
        "max-fit interdomain": max(ours, default=None),
        "speedup": ratio(*medians),
        "graph over eager softmax": ratio(*(statistics.median(ms) if ms else None for ms in (eager, graph))),
        "flat": flats.get((size, batch), {}).get("flat"),
        "growth of softmax": max(times) / min(times) if times else None,
        "of floor": min((row["of floor"] for row in ours.values()), default=None),
    }
    theirs = paper.SIZES.get(batch, {}).get(size) or (paper.SUMMARY.get(batch) if size == "1.3B" else None)
    if theirs:
        fits = theirs.fits or (paper.SUMMARY[batch].fits if size == "1.3B" else None)
        row |= {
            "paper: softmax eager ms": span(theirs.softmax),
            "paper: interdomain graph ms": span(theirs.graphed),
            "paper: speedup over eager": theirs.speedup,
            "paper: max-fit": fits and f"{fits[0]:,} and {fits[1]:,}",
        }
    return row


def span(values) -> str | None:
    """least-most, in the digits of `show`."""
    values = sorted(values)
    if not values:
        return None
    low, high = show(values[0]), show(values[-1])
    return low if low == high else f"{low} to {high}"


def memory_row(cell: tuple[int, int], figures: dict[str, dict]) -> dict:
    """GiB of every way of reading a prompt, or why there is none, and the paper's GB."""
    row = _prompt_row(cell, figures, "GiB", " GiB")
    if cell in paper.MEMORY:
        row |= {c: "OOM" if x is None else x for c, x in zip(MEMORY[5:], paper.MEMORY[cell], strict=True)}
    return row | {"figures": figures}


def speed_row(cell: tuple[int, int], figures: dict[str, dict]) -> dict:
    return _prompt_row(cell, figures, "tokens/s")


def _prompt_row(cell: tuple[int, int], figures: dict[str, dict], figure: str, unit: str = "") -> dict:
    row = {"prompt": f"B={cell[0]}, {cell[1]:,} tokens"}
    return row | {f"{way}{unit}": found.get(figure, found.get("remark")) for way, found in figures.items()}


# The project's targets, for the 1.3B model on a GPU, and for decoding on a CPU


def targets(rows: list[dict], flats: dict, memory: dict, long_prompt: tuple[int, int]) -> list[dict]:
    """(target, bound, measured, met) of issue and README; what was not measured says so."""
    size = "1.3B"
    found = [
        _at_least(
            f"fastest softmax over interdomain, B={batch}, prefix {prefix:,}", bound, speedup(rows, size, batch, prefix)
        )
        for batch, prefix, bound in ((1, 4096, 1.1), (1, 16_384, 1.8), (64, 4096, 4.0))
    ]
    spread = [flat["flat"] for (name, _), flat in flats.items() if name == size]
    found.append(
        _at_most("interdomain, most over least time of all prefixes, worst batch", 1.01, max(spread, default=None))
    )
    ours = fastest(rows, "interdomain", size, 64, 4096)
    found.append(_at_least("interdomain, bandwidth floor over time, B=64", 0.7, ours and ours["of floor"]))
    for cell in paper.MEMORY:
        figures = memory.get((size, *cell), {})
        softmax = [f["GiB"] for way, f in figures.items() if way.startswith("softmax") and "GiB" in f]
        ours = figures.get("interdomain chunked", {}).get("GiB")
        name = f"interdomain chunked over softmax (the lesser), peak memory, B={cell[0]}, {cell[1]:,} tokens"
        found.append(_at_most(name, 1.0, ratio(ours, min(softmax, default=None))))
    ours = memory.get((size, *long_prompt), {}).get("interdomain chunked", {}).get("GiB")
    found.append(
        _at_most(f"GiB at the peak of reading {long_prompt[1]:,} tokens, B={long_prompt[0]}", LONG_PROMPT_GIB, ours)
    )
    return found


def cpu_targets(rows: list[dict]) -> list[dict]:
    """No slower than softmax with its cache at prefix 512, or the prefixes that were asked for."""
    cells = dict.fromkeys((row["size"], row["B"], row["prefix"]) for row in rows)
    return [
        _at_least(
            f"fastest softmax over interdomain, {size}, B={batch}, prefix {prefix:,}",
            1.0,
            speedup(rows, size, batch, prefix),
        )
        for size, batch, prefix in cells
    ]


def _at_least(name: str, bound: float, got: float | None) -> dict:
    return _target(name, f"at least {bound:g}", got, got is not None and got >= bound)


def _at_most(name: str, bound: float, got: float | None) -> dict:
    return _target(name, f"at most {bound:g}", got, got is not None and got <= bound)


def _target(name: str, bound: str, got: float | None, met: bool) -> dict:
    return {"target": name, "bound": bound, "measured": got, "met": "not measured" if got is None else met}


# Plots


def panels(rows: list[dict], size: str) -> list[Panel]:
    """Decode time over prefix, a panel per batch as in the paper's figure; at 1.3B with the paper's curves."""
    found = []
    for batch in sorted({row["B"] for row in rows if row["size"] == size}):
        paths = dict.fromkeys(row["path"] for row in rows if (row["size"], row["B"]) == (size, batch))
        curves = []
        for path in paths:
            ms = of_path(rows, path, size, batch)
            if ms:
                curves.append(Curve(path, list(ms), list(ms.values())))
        if size == "1.3B":
            curves += [
                Curve(f"RTX 6000 Ada (paper): {path}", paper.PREFIXES[: len(ms)], ms)
                for path, ms in paper.CURVES.get(batch, {}).items()
                if path != "interdomain, eager"
            ]
        if curves:
            found.append(Panel(f"{size}, B = {batch}", curves, "prefix (tokens)", "ms a step", log_x=True, log_y=True))
    return found
