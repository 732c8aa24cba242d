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
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from interdomain.model import SIZES, ModelConfig, ModelState, Transformer, build_config
from interdomain.model.generation import PREFILL_CHUNK, Decoder, prefill
from interdomain.tools._bench import results
from interdomain.tools._bench.timing import measure, peak_memory, ratio, release, timer
from interdomain.tools._cli import argument_parser, require_at_least, user_errors
from interdomain.tools._paper import PAPER

PATHS = ("softmax, eager", "softmax, graph", "interdomain, eager", "interdomain, graph")
PAPER_PATHS = ("softmax, eager", "interdomain, graph")
SIZE_BATCHES = (1, 8)  # of all sizes but the first
ROOM = 16  # slots beyond those that a timed call fills, for the steps that warm up
DECODE = ["path", "B", "prefix", "ms a step", "paper: ms", "tokens/s", "speedup", "remark"]
PROMPTS = ["prompt", "read", "GiB", "paper: GB", "tokens/s", "remark"]


@dataclass(frozen=True)
class Mode:
    """What is measured if nothing else is asked for, in this order: what tells most comes first.

    Attributes:
        prompts: (batch, tokens). The last one is read by interdomain in chunks only.
        steps: Tokens in a timed call.
        rounds: Timed calls, which may take `seconds` together.
    """

    sizes: Sequence[str] = ("1.3B", "125M", "350M", "760M")
    batches: Sequence[int] = (1, 64, 8, 32, 16)
    prefixes: Sequence[int] = (4096, 16_384, 512, 8192, 2048, 1024)
    prompts: Sequence[tuple[int, int]] = tuple(
        (row["batch"], row["tokens"]) for row in PAPER["prompt_memory"]
    )
    chunk: int = PREFILL_CHUNK
    dtype: str = "bfloat16"
    steps: int = 32
    rounds: int = 20
    seconds: float = 0.5
    paths: Sequence[str] = PATHS


GPU = Mode()
# The paper's comparison in a minute: no prompts are read, and interdomain is timed as a CUDA graph only.
QUICK = Mode(
    sizes=("1.3B", "125M"),
    batches=(1, 8, 64),
    prefixes=(512, 4096, 16_384),
    prompts=(),
    steps=16,
    rounds=8,
    paths=("softmax, eager", "softmax, graph", "interdomain, graph"),
)
TINY = Mode(
    sizes=("debug",),
    batches=(1, 2),
    prefixes=(32, 64),
    prompts=((2, 64), (1, 128)),
    chunk=32,
    dtype="float32",
    steps=2,
    rounds=3,
    seconds=0.05,
)


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
    state.position.fill_(prefix)
    return state


def decode_figures(
    model: Transformer, graph: bool, batch: int, prefix: int, mode: Mode, device: torch.device
) -> dict[str, Any]:
    """Milliseconds of one of mode.steps steps in a row from `prefix`."""
    tokens = torch.randint(model.config.vocab_size, (batch,), device=device)
    state = model.init_state(batch, capacity=prefix + mode.steps + ROOM)
    if state.capacity is not None:
        for layer in state.layers:
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


def prefill_figures(
    model: Transformer, batch: int, length: int, chunk: int, device: torch.device
) -> dict[str, Any]:
    """The second reading of [batch, length] tokens: GiB at the peak, with the weights of this model only, and tokens/s."""
    tokens = torch.randint(model.config.vocab_size, (batch, length), device=device)
    read = functools.partial(prefill, model, tokens, chunk=chunk)
    read()
    run = timer(device, lead_ms=0)
    if device.type == "cpu":
        return {"tokens/s": 1e3 * batch * length / sum(run(read))}
    ms: list[float] = []
    peak = peak_memory(lambda: ms.extend(run(read)), device) or 0.0
    weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    return {"GiB": peak / 2**10 + weights / 2**30, "tokens/s": 1e3 * batch * length / sum(ms)}


def attempt(figures: Callable[..., dict], *args: Any, device: torch.device) -> dict[str, Any]:
    """figures(*args, device), or a "remark" why there is nothing: out of memory is a result."""
    try:
        row = figures(*args, device)
    except Exception as e:
        row = {"remark": results.reason(e)}
    release(device)
    results.require_healthy(device, "this row")
    return row


def decode_batch(
    models, size: str, batch: int, mode: Mode, device: torch.device, report: results.Report
) -> None:
    """Rows of every prefix and path at one batch."""
    figures = PAPER["decode"].get(size, {}).get(str(batch), ())
    paper: dict[str, str] = dict(zip(PAPER_PATHS, figures, strict=False))
    for prefix in mode.prefixes:
        fastest_softmax = None
        for path in mode.paths:
            condition, how = path.split(", ")
            row = {"path": path, "B": batch, "prefix": prefix, "paper: ms": paper.get(path)}
            row |= attempt(
                decode_figures,
                models[condition],
                how == "graph",
                batch,
                prefix,
                mode,
                device=device,
            )
            ms = row.get("ms a step")
            if condition == "softmax":
                fastest_softmax = min(filter(None, (ms, fastest_softmax)), default=None)
            elif fastest_softmax:
                row["speedup"] = ratio(fastest_softmax, ms)
            report.add(f"decode, {size}", row)


def read_prompts(models, mode: Mode, device: torch.device, report: results.Report) -> None:
    """Every prompt read by both models, in chunks and in one piece."""
    paper = {(row["batch"], row["tokens"]): row for row in PAPER["prompt_memory"]}
    report.table("reading a prompt", PROMPTS)
    for prompt in mode.prompts:
        batch, length = prompt
        for how, chunk in (("chunked", mode.chunk), ("whole", length)):
            for condition, model in models.items():
                path = f"{condition} {how}"
                if prompt == mode.prompts[-1] and path != "interdomain chunked":
                    continue
                row = {"prompt": f"B={batch}, {length:,} tokens", "read": path}
                row["paper: GB"] = paper.get(prompt, {}).get(path)
                row |= attempt(prefill_figures, model, batch, length, chunk, device=device)
                report.add("reading a prompt", row)


def parse(argv) -> argparse.Namespace:
    p = argument_parser(__doc__)
    results.add_arguments(p, "inference")
    p.add_argument(
        "--sizes",
        nargs="+",
        metavar="SIZE",
        help=f"{', '.join(SIZES)}; the first at all batch sizes and with prompts (default: {' '.join(GPU.sizes)})",
    )
    p.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="tokens in a timed call, at least 1 (default: 32, with --quick 16; on a CPU 2)",
    )
    p.add_argument(
        "--batches",
        type=int,
        nargs="+",
        metavar="N",
        help="sequences decoded at once (default: by device)",
    )
    p.add_argument(
        "--prefixes",
        type=int,
        nargs="+",
        metavar="N",
        help="tokens before the step (default: by device)",
    )
    p.add_argument(
        "--quick",
        action="store_true",
        help="on a GPU: two sizes and few rounds, no prompts: one minute",
    )
    return p.parse_args(argv)


@user_errors
@torch.no_grad()
def main(argv=None) -> int:
    args = parse(argv)
    device = results.choose_device(args.device)
    require_at_least(args, steps=1, batches=1, prefixes=1)
    mode = QUICK if args.quick else GPU
    if device.type == "cpu":
        mode = TINY
    asked = {name: getattr(args, name) for name in ("sizes", "steps", "batches", "prefixes")}
    all_batches = mode is QUICK
    mode = replace(mode, **{name: option for name, option in asked.items() if option is not None})
    sizes = results.choose("--sizes", mode.sizes, tuple(SIZES))
    report = results.Report(args.name, args.output, device, asdict(mode), named=bool(args.prefixes))
    counts = results.count_compilations()
    for size in sizes:
        models = {
            c: random_model(build_config(size, c), device, mode.dtype)
            for c in ("interdomain", "softmax")
        }
        report.table(f"decode, {size}", DECODE)
        for batch in mode.batches if all_batches or size == sizes[0] else SIZE_BATCHES:
            decode_batch(models, size, batch, mode, device, report)
        if size == sizes[0] and mode.prompts:
            read_prompts(models, mode, device, report)
        release(device)
    report.finish(counts=str(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
