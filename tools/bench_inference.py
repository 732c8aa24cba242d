"""interdomain bench-inference --output benchmarks/results/today

Time decoding and the reading of prompts, as the paper does.

A decode step of the whole model is timed over batch size and prefix length, for interdomain and softmax, with and
without CUDA graphs. Reading a prompt is timed with its peak memory. The paper's figures stand beside ours. Weights are
random, which changes no time. Without a GPU it runs at tiny sizes on the CPU, and the results say so, or at the sizes and
prefixes that you name.

    interdomain bench-inference --quick --sizes 125M --output benchmarks/results/quick

Documentation: docs/benchmarks.md
"""

import argparse
import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch

from interdomain.model import SIZES, ModelConfig, ModelState, Transformer, build_config
from interdomain.model.generation import PREFILL_CHUNK, Decoder, prefill
from interdomain.tools._bench import compilations, results
from interdomain.tools._bench.timing import measure, peak_memory, ratio, release, timer
from interdomain.tools._cli import argument_parser, require_at_least, user_errors

PATHS = ("softmax, eager", "softmax, graph", "interdomain, eager", "interdomain, graph")
SIZE_BATCHES = (1, 8)  # of all sizes but the first
ROOM = 16  # slots beyond those that a timed call fills, for the steps that warm up

# The paper's appendix "Inference Scaling", on an RTX 6000 Ada (48 GB), by autocast to bfloat16, softmax launched eagerly.
# (batch, prompt) -> GB at the peak (Table 12), in chunks of 2,048; None: out of memory, or not run.
PAPER_MEMORY = {
    (8, 4096): {"softmax whole": 14.65, "interdomain whole": 24.45, "interdomain chunked": 17.58},
    (8, 8192): {"softmax whole": 21.42, "interdomain whole": None, "interdomain chunked": 19.90},
    (8, 16_384): {"softmax whole": None, "interdomain whole": None, "interdomain chunked": 25.78},
    (16, 4096): {"softmax whole": 21.21, "interdomain whole": None, "interdomain chunked": 26.54},
    (32, 2048): {"softmax whole": 21.16, "interdomain whole": 40.97, "interdomain chunked": 36.62},
    (64, 512): {"softmax whole": 14.59, "interdomain whole": 24.77, "interdomain chunked": 21.39},
}
LONG_PROMPT = (1, 131_072)  # read by interdomain in chunks alone
# (size, batch) -> ms of a step over the prefixes, softmax eager and interdomain in a graph (Tables 11, 13 and 14).
PAPER_PATHS = ("softmax, eager", "interdomain, graph")
PAPER_DECODE = {
    ("125M", 1): ("6.43 to 6.50", "2.45 to 2.46"),
    ("350M", 1): ("13.11 to 13.19", "5.64 to 5.65"),
    ("760M", 1): ("13.10 to 13.17", "8.61 to 8.64"),
    ("1.3B", 1): ("13.39 to 13.99", "12.42 to 12.51"),
    ("125M", 8): ("6.63 to 7.18", "2.93 to 3.06"),
    ("350M", 8): ("13.18 to 17.13", "6.92 to 7.04"),
    ("760M", 8): ("13.41 to 14.75", "10.77 to 10.88"),
    ("1.3B", 8): ("13.81 to 21.60", "15.73 to 15.98"),
    ("1.3B", 16): ("13.51 to 22.14", "19.51 to 19.60"),
    ("1.3B", 32): ("13.18 to 22.75", "28.37 to 28.58"),
    ("1.3B", 64): ("14.42 to 23.87", "59.08"),
}

# What is measured where nothing else is asked for, in this order: what tells most comes first.
GPU: dict[str, Any] = dict(sizes=("1.3B", "125M", "350M", "760M"), batches=(1, 64, 8, 32, 16))
GPU |= dict(prompts=(*PAPER_MEMORY, LONG_PROMPT))
GPU |= dict(prefixes=(4096, 16_384, 512, 8192, 2048, 1024), chunk=PREFILL_CHUNK, dtype="bfloat16")
GPU |= dict(steps=32, rounds=20, seconds=0.5)  # of a timed call; how often, and what all of them may take
# The paper's comparison in a minute: no prompts are read, and interdomain is timed as a CUDA graph only.
QUICK: dict[str, Any] = GPU | dict(
    sizes=("1.3B", "125M"), batches=(1, 8, 64), prefixes=(512, 4096, 16_384), prompts=(), steps=16, rounds=8
)
QUICK_PATHS = tuple(path for path in PATHS if path != "interdomain, eager")
TINY: dict[str, Any] = dict(sizes=("debug",), batches=(1, 2), prefixes=(32, 64), prompts=((2, 64), (1, 128)), chunk=32)
TINY |= dict(dtype="float32", steps=2, rounds=3, seconds=0.05)
DECODE = ["path", "B", "prefix", "ms a step", "paper: ms", "tokens/s", "speedup", "remark"]
PROMPTS = ["prompt", "read", "GiB", "paper: GB", "tokens/s", "remark"]


@torch.no_grad()
def random_model(config: ModelConfig, device: torch.device, dtype: str) -> Transformer:
    """A model like one from a folder, with normal numbers for weights."""
    with torch.device("meta"):
        model = Transformer(config)
    model.to_empty(device=device)
    for x in (*model.parameters(), *model.buffers()):
        x.normal_(0, 0.02)
    return model.to(getattr(torch, dtype)).requires_grad_(False).eval()


def put(state: ModelState, prefix: int) -> ModelState:
    """`state` as it stands after `prefix` tokens, but for what its tensors hold."""
    state.length = prefix
    for x in (state.position, state.cursor):
        if x is not None:
            x.fill_(prefix)
    return state


def decode_figures(model: Transformer, graph: bool, batch: int, prefix: int, mode, device: torch.device) -> dict:
    """ms of one of mode.steps steps in a row from `prefix`."""
    tokens = torch.randint(model.config.vocab_size, (batch,), device=device)
    state = model.init_state(batch, capacity=prefix + mode.steps + ROOM)
    for layer in state.layers if state.capacity is not None else ():
        layer.k.normal_()
        layer.v.normal_()
    decoder = Decoder(model, put(state, prefix), room=mode.steps, graph=graph)

    def steps():
        put(decoder.state, prefix)
        for _ in range(mode.steps):
            decoder.step(tokens)

    # At an idle GPU: eager, the host's gaps count.
    taken = measure(steps, device, rounds=mode.rounds, seconds=mode.seconds, lead_ms=0)[-1]
    ms = taken.median / mode.steps
    return {"ms a step": ms, "tokens/s": 1e3 * batch / ms, "times": taken._asdict()}


def prefill_figures(model: Transformer, batch: int, length: int, chunk: int, device: torch.device) -> dict:
    """GiB at the peak, with the weights of this model alone, and tokens/s: the second time that [batch, length] are read."""
    tokens = torch.randint(model.config.vocab_size, (batch, length), device=device)
    read = functools.partial(prefill, model, tokens, chunk=chunk)
    read()
    run, ms, row = timer(device, lead_ms=0), [], {}
    if (peak := peak_memory(lambda: ms.extend(run(read)), device)) is not None:
        weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
        row["GiB"] = peak / 2**10 + weights / 2**30
    return row | {"tokens/s": 1e3 * batch * length / sum(ms or run(read))}


def attempt(figures: Callable[..., dict], *args: Any, device: torch.device) -> dict:
    """figures(*args, device), or a "remark" why there is nothing: out of memory is a result."""
    try:
        row = figures(*args, device)
    except Exception as e:
        row = {"remark": results.reason(e)}
    release(device)
    results.require_healthy(device, "this row")
    return row


def decode_batch(models, size: str, batch: int, mode, device, report: results.Report) -> None:
    """Rows of every prefix and path at one batch."""
    paper: dict[str, str] = dict(zip(PAPER_PATHS, PAPER_DECODE.get((size, batch), ()), strict=False))
    for prefix in mode.prefixes:
        softmax = []  # ms of its paths
        for path in mode.paths:
            condition, way = path.split(", ")
            row = {"path": path, "B": batch, "prefix": prefix, "paper: ms": paper.get(path)}
            row |= attempt(decode_figures, models[condition], way == "graph", batch, prefix, mode, device=device)
            if "ms a step" in row and condition == "softmax":
                softmax.append(row["ms a step"])
            elif softmax:
                row["speedup"] = ratio(min(softmax), row.get("ms a step"))
            report.add(f"decode, {size}", row)


def read_prompts(models, mode, device, report: results.Report) -> None:
    """Every prompt read by both models, in chunks and in one piece; the last by interdomain in chunks alone."""
    report.table("reading a prompt", PROMPTS)
    for batch, length in mode.prompts:
        for how, condition in itertools.product(("chunked", "whole"), models):
            way, chunk = f"{condition} {how}", mode.chunk if how == "chunked" else length
            if (batch, length) == mode.prompts[-1] and way != "interdomain chunked":
                continue
            paper = PAPER_MEMORY.get((batch, length), {}).get(way)
            row = {"prompt": f"B={batch}, {length:,} tokens", "read": way, "paper: GB": paper}
            figures = attempt(prefill_figures, models[condition], batch, length, chunk, device=device)
            report.add("reading a prompt", row | figures)


def parse(argv) -> argparse.Namespace:
    p = argument_parser(__doc__)
    results.add_arguments(p, "inference")
    text = f"{', '.join(SIZES)}; the first at all batch sizes and with prompts (default: {' '.join(GPU['sizes'])})"
    p.add_argument("--sizes", nargs="+", metavar="SIZE", help=text)
    text = "tokens in a timed call, at least 1 (default: 32, with --quick 16; on a CPU 2)"
    p.add_argument("--steps", type=int, metavar="N", help=text)
    for name, text in {"--batches": "sequences decoded at once", "--prefixes": "tokens before the step"}.items():
        p.add_argument(name, type=int, nargs="+", metavar="N", help=f"{text} (default: by device)")
    p.add_argument("--quick", action="store_true", help="on a GPU: two sizes and few rounds, no prompts: one minute")
    return p.parse_args(argv)


@user_errors
@torch.no_grad()
def main(argv=None) -> int:
    args = parse(argv)
    device = results.choose_device(args.device)
    require_at_least(args, steps=1, batches=1, prefixes=1)
    defaults = TINY if device.type == "cpu" else QUICK if args.quick else GPU
    mode = argparse.Namespace(**defaults | {k: v for k, v in vars(args).items() if k in defaults and v is not None})
    mode.paths = QUICK_PATHS if defaults is QUICK else PATHS
    sizes = results.choose("--sizes", mode.sizes, tuple(SIZES))
    report = results.Report(args.name, args.output, device, vars(mode), named=bool(args.prefixes))
    counts = compilations.count()
    for size in sizes:
        models = {c: random_model(build_config(size, c), device, mode.dtype) for c in ("interdomain", "softmax")}
        report.table(f"decode, {size}", DECODE)
        all_batches = size == sizes[0] or defaults is QUICK
        for batch in mode.batches if all_batches else SIZE_BATCHES:
            decode_batch(models, size, batch, mode, device, report)
        if size == sizes[0] and mode.prompts:
            read_prompts(models, mode, device, report)
        release(device)
    report.finish(counts=str(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
