"""python -m interdomain.tools.bench_inference --output benchmarks/results/today

Time inference as in the paper's appendix: a decode step of the whole model over batch and prefix, interdomain and softmax,
eager and in CUDA graphs; the four sizes; peak memory and speed of reading a prompt; beside the least that each must move, and
the paper's figures. Weights are random. Without a GPU: tiny and labelled.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from types import SimpleNamespace

import torch

from interdomain.model import SIZES, Execution, Transformer, build_config
from interdomain.model.generation import PREFILL_CHUNK

from . import _bench
from ._cli import argument_parser, user_errors
from ._inference import Setup, decode_rows, interdomain_candidates, prefill_figures, random_model
from ._timing import Ceilings, attempt, ceilings, ratio, release

CONDITIONS = ("interdomain", "softmax")
# bf16-products: the paper's, float32 weights that every product rounds.
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "bf16-products": torch.float32}
SIZE_BATCHES = (1, 8)  # of all sizes but the largest
LONG_PROMPT = (1, 131_072)

# The paper's appendix "Inference Scaling", on an RTX 6000 Ada (48 GB), by autocast to bfloat16, softmax launched eagerly.
# (batch, prompt) -> GB at the peak (Table 12), in chunks of 2,048; None: out of memory, or not run.
PAPER_WAYS = ("softmax whole", "interdomain whole", "interdomain chunked")
PAPER_MEMORY = {
    (8, 4096): (14.65, 24.45, 17.58),
    (8, 8192): (21.42, None, 19.90),
    (8, 16_384): (None, None, 25.78),
    (16, 4096): (21.21, None, 26.54),
    (32, 2048): (21.16, 40.97, 36.62),
    (64, 512): (14.59, 24.77, 21.39),
}
# (size, batch) -> ms of softmax and of interdomain in a graph, ranges over prefixes, and speedup (Tables 11, 13 and 14).
PAPER_DECODE = {
    ("125M", 1): ("6.43 to 6.50", "2.45 to 2.46", 2.64),
    ("350M", 1): ("13.11 to 13.19", "5.64 to 5.65", 2.33),
    ("760M", 1): ("13.10 to 13.17", "8.61 to 8.64", 1.52),
    ("1.3B", 1): ("13.39 to 13.99", "12.42 to 12.51", 1.08),
    ("125M", 8): ("6.63 to 7.18", "2.93 to 3.06", 2.30),
    ("350M", 8): ("13.18 to 17.13", "6.92 to 7.04", 2.17),
    ("760M", 8): ("13.41 to 14.75", "10.77 to 10.88", 1.30),
    ("1.3B", 8): ("13.81 to 21.60", "15.73 to 15.98", 0.88),
    ("1.3B", 16): ("13.51 to 22.14", "19.51 to 19.60", 0.70),
    ("1.3B", 32): ("13.18 to 22.75", "28.37 to 28.58", 0.48),
    ("1.3B", 64): ("14.42 to 23.87", "59.08", 0.40),
}

# What is measured where nothing else is asked for, in this order: what tells most comes first.
GPU = dict(
    sizes=("125M", "350M", "760M", "1.3B"),
    batches=(1, 64, 8, 32, 16),
    prefixes=(4096, 16_384, 512, 8192, 2048, 1024),
    prompts=(*PAPER_MEMORY, LONG_PROMPT),  # the last is interdomain's alone: softmax would take most of the time
    chunk=PREFILL_CHUNK,
    dtype="bfloat16",
    steps=32,
    rounds=20,
    seconds=0.5,
)
QUICK = GPU | dict(prefixes=(4096, 16_384, 512), steps=16, rounds=8)
TINY = dict(
    **dict(sizes=("debug",), batches=(1, 2), prefixes=(32, 64), prompts=((2, 64), (1, 128)), chunk=32, dtype="float32"),
    **dict(steps=2, rounds=3, seconds=0.05),
)
DECODE = ["path", "B", "prefix", "ms a step", "tokens/s", "MB", "floor ms", "of floor", "speedup", "remark"]
SUMMARY = [
    *("model", "softmax eager ms", "fastest softmax ms", "max-fit", "interdomain ms", "max-fit interdomain", "speedup"),
    *("graph over eager softmax", "flat", "of floor"),
    *("paper: softmax eager ms", "paper: interdomain graph ms", "paper: speedup over eager"),
]
PROMPTS = ["prompt", "read", "GiB", "paper: GB", "tokens/s", "remark"]


def models_of(size: str, mode: SimpleNamespace, setup: Setup, report: _bench.Report) -> dict[str, Transformer]:
    """Both conditions; none, and a note, where the device has no room for them."""
    execution, dtype = Execution(bf16_products=mode.dtype == "bf16-products"), DTYPES[mode.dtype]
    makers = {c: lambda c=c: random_model(build_config(size, c), setup.device, dtype, execution) for c in CONDITIONS}
    good, bad = attempt(makers, setup.device)
    if bad:
        report.note(f"{size}: not run: {'; '.join(bad.values())}")
    return {} if bad else good


def decode_model(
    models: dict[str, Transformer],
    size: str,
    batches: Sequence[int],
    prefixes: Sequence[int],
    setup: Setup,
    limits: Ceilings,
    report: _bench.Report,
    deadline: _bench.Deadline,
) -> None:
    """The table of one size, a cell for each batch and prefix; and a row of the summary for each batch."""
    report.table(f"decode, {size}", DECODE)
    for batch in batches:
        makers, found = interdomain_candidates(models["interdomain"], batch, setup), []
        ours, remarks = attempt(makers, setup.device, passed=lambda: deadline.passed)
        for prefix in prefixes:
            if deadline.passed:
                report.note(f"decode, {size}, B={batch}, prefix {prefix:,}: {_bench.NOT_RUN}")
                continue
            rows = decode_rows(models, batch, prefix, ours, remarks, setup, limits, lambda: deadline.passed)
            found += rows
            for row in rows:
                report.add(f"decode, {size}", row)
            release(setup.device)
        report.add("decode, summary", summary_row(found, size, batch))
        ours = None
        release(setup.device)


def summary_row(rows: list[dict], size: str, batch: int) -> dict:
    """A row of the paper's decode tables: ranges over the prefixes that fitted, and two ratios of medians.

    "speedup" is the fastest of either kind, where both fitted; "graph over eager softmax" what the paper calls speedup: each
    median over what that path fitted. "flat": the most over the least time of interdomain's graph.
    """
    rows = sorted((row for row in rows if "ms a step" in row), key=lambda row: row["ms a step"])
    softmax, ours = (
        {row["prefix"]: row for row in reversed(rows) if row["path"].startswith(kind)} for kind in ("softmax", "interd")
    )
    both = softmax.keys() & ours.keys()
    medians = [statistics.median(kind[p]["ms a step"] for p in both) if both else None for kind in (softmax, ours)]
    eager, graph = (
        [r["ms a step"] for r in rows if r["path"] == path] for path in ("softmax, eager", "interdomain, graph")
    )
    row = {
        "model": f"{size}, B={batch}",
        "softmax eager ms": span(eager),
        "fastest softmax ms": span([row["ms a step"] for row in softmax.values()]),
        "max-fit": max(softmax, default=None),
        "interdomain ms": span([row["ms a step"] for row in ours.values()]),
        "max-fit interdomain": max(ours, default=None),
        "speedup": ratio(*medians),
        "graph over eager softmax": ratio(*(statistics.median(ms) if ms else None for ms in (eager, graph))),
        "flat": max(graph) / min(graph) if graph else None,
        "of floor": min((row["of floor"] for row in ours.values()), default=None),
    }
    return row | dict(zip(SUMMARY[-3:], PAPER_DECODE.get((size, batch), ()), strict=False))


def span(values: list[float]) -> str | None:
    """least to most, in the digits of `show`."""
    ends = [_bench.show(x) for x in (min(values), max(values))] if values else [None]
    return ends[0] if ends[0] == ends[-1] else " to ".join(ends)


def read_prompts(
    models: dict[str, Transformer],
    mode: SimpleNamespace,
    device: torch.device,
    report: _bench.Report,
    deadline: _bench.Deadline,
) -> None:
    """Every prompt read by both models, in one piece and in chunks."""
    report.table("reading a prompt", PROMPTS)
    for batch, length in mode.prompts:
        whole = [("interdomain whole", length), ("softmax whole", length)]
        chunked = [("interdomain chunked", mode.chunk), ("softmax chunked", mode.chunk)] if length > mode.chunk else []
        for way, chunk in chunked[:1] if (batch, length) == mode.prompts[-1] else (*chunked, *whole):
            figures = {"remark": _bench.NOT_RUN}
            if not deadline.passed:
                figures = prefill_figures(models[way.split()[0]], batch, length, chunk, device)
            paper = dict(zip(PAPER_WAYS, PAPER_MEMORY.get((batch, length), ()), strict=False)).get(way)
            how = {"prompt": f"B={batch}, {length:,} tokens", "read": way, "paper: GB": paper}
            report.add("reading a prompt", how | figures)


def parse(argv) -> argparse.Namespace:
    p = argument_parser(__doc__)
    _bench.add_arguments(p)
    p.add_argument("--sizes", nargs="+", help=f"of {', '.join(SIZES)} (default: the four; CPU: a tiny model)")
    p.add_argument(
        "--parts", nargs="+", help="of decode, prompts (both of the largest size), sizes (the others); default all"
    )
    p.add_argument("--batches", nargs="+", type=int, help=f"default {' '.join(map(str, sorted(GPU['batches'])))}")
    p.add_argument("--prefixes", nargs="+", type=int, help=f"default {' '.join(map(str, sorted(GPU['prefixes'])))}")
    p.add_argument("--steps", type=int, help="tokens in a timed call; default 32 (CPU: 2)")
    p.add_argument("--dtype", choices=tuple(DTYPES), help="of weights and cache; default bfloat16 (CPU: float32)")
    p.add_argument("--quick", action="store_true", help="on a GPU, what fits into two minutes")
    p.add_argument("--compile", action="store_true", help="time steps that torch.compile compiled before capture, too")
    return p.parse_args(argv)


@user_errors
@torch.no_grad()
def main(argv=None) -> int:
    args = parse(argv)
    device = _bench.choose_device(args.device)
    deadline = _bench.Deadline(args.time_limit)
    _bench.fill_in(args, device, **dict.fromkeys(("batches", "prefixes", "steps"), (None, None)))
    parts = _bench.choose("--parts", args.parts, ("decode", "prompts", "sizes"))
    defaults = TINY if device.type == "cpu" else QUICK if args.quick else GPU
    given = {k: v for k, v in vars(args).items() if k in defaults and v is not None}
    mode = SimpleNamespace(**defaults | given)
    *others, largest = sorted(_bench.choose("--sizes", mode.sizes, tuple(SIZES)), key=list(SIZES).index)
    options = {"parts": parts, **vars(mode), "compile": args.compile}
    report = _bench.Report("decode" if parts == ["decode"] else "inference", args.output, device, options)
    limits = ceilings(device)
    report.contents["ceilings"] = limits._asdict()
    report.note(
        f"A step takes one token per sequence through the whole model, logits included; its time is the median of {mode.steps} "
        f"steps in a row, candidates in turns. Random weights in {mode.dtype}, dynamics and interdomain's state in float32."
    )
    report.note(
        f"Floors: weights and state (or cache) read and written once, at the measured copy bandwidth of "
        f"{limits.bandwidth / 1e12:.3g} TB/s. Speedup: the fastest softmax of the cell over this path; the paper's: eager "
        "softmax over interdomain's graph, on an RTX 6000 Ada (48 GB)."
    )
    setup = Setup(device, mode.steps, mode.rounds, mode.seconds, args.compile)
    report.table("decode, summary", SUMMARY)
    for size in (*([largest] if {"decode", "prompts"} & {*parts} else []), *(others if "sizes" in parts else [])):
        models = {} if deadline.passed else models_of(size, mode, setup, report)
        if models and (size != largest or "decode" in parts):
            batches = mode.batches if size == largest else args.batches or SIZE_BATCHES
            decode_model(models, size, batches, mode.prefixes, setup, limits, report, deadline)
        if models and size == largest and "prompts" in parts:
            read_prompts(models, mode, device, report, deadline)
        models = None
        release(device)
    report.finish("unfinished" if deadline.passed else "complete")
    return 0


if __name__ == "__main__":
    sys.exit(main())
