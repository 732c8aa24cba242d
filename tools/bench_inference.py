"""python -m interdomain.tools.bench_inference --output benchmarks/results/today

Time inference as in the paper's appendix: a decode step of the whole model over batch and prefix, interdomain and softmax,
launched eagerly and in CUDA graphs, of the four sizes; peak memory and speed of reading a prompt; beside the paper's figures.
Weights are random. Without a GPU: tiny and labelled.

A step's time depends on shapes alone, so no prompt is read before it: interdomain's state is put at its prefix by its position,
and softmax's cache holds random keys and values.
"""

import argparse
import statistics
import sys
from types import SimpleNamespace

import torch

from interdomain.model import SIZES, Execution, ModelConfig, ModelState, Transformer, build_config
from interdomain.model.generation import PREFILL_CHUNK, Decoder, decode, prefill
from interdomain.model.initialize import initial_value

from . import _bench
from ._cli import argument_parser, user_errors
from ._timing import measure, peak_memory, ratio, release, roofline_ms, timer

CONDITIONS = ("interdomain", "softmax")
# bf16-products: the paper's, float32 weights that every product rounds.
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "bf16-products": torch.float32}
SIZE_BATCHES = (1, 8)  # of all sizes but the largest
LARGE = 2**20  # numbers: tensors from this on are drawn on the device, not as training draws them
ROOM = 16  # slots beyond those that a timed call fills, for the steps that warm up

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
    sizes=("1.3B", "125M", "350M", "760M"),
    batches=(1, 64, 8, 32, 16),
    prefixes=(4096, 16_384, 512, 8192, 2048, 1024),
    prompts=(*PAPER_MEMORY, (1, 131_072)),
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
DECODE = ["path", "B", "prefix", "ms a step", "tokens/s", "roofline ms", "of roofline", "speedup", "remark"]
SUMMARY = [
    *("model", "softmax eager ms", "fastest softmax ms", "interdomain ms", "speedup"),
    *("paper: softmax eager ms", "paper: interdomain graph ms", "paper: speedup over eager"),
]
PROMPTS = ["prompt", "read", "GiB", "paper: GB", "tokens/s", "remark"]


@torch.no_grad()
def random_model(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, execution: Execution | None = None
) -> Transformer:
    """As a folder is loaded; small tensors, the dynamics among them, as training starts from them, large ones normal."""
    with torch.device("meta"):
        model = Transformer(config, execution)
    model.to_empty(device=device)
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.numel() < LARGE:
            x.copy_(initial_value(name, x.shape, config, seed=0))
        else:
            x.normal_(0, 0.02)
    return model.to(dtype).requires_grad_(False).eval()


def model_bytes(model: Transformer) -> int:
    return sum(x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers()))


def step_bytes(model: Transformer, state: ModelState, prefix: int) -> int:
    """What a step must move: weights read; the state read and written, or a cache of `prefix` tokens read and one written.

    Of the embedding only a row per sequence is read: none counts. Of the dynamics (in fp32), Lambda and half of W: the
    readout `complex` has the other half by symmetry.
    """
    weights = sum(
        p.numel() * p.element_size()
        for name, p in model.named_parameters()
        if not name.startswith("tok_embeddings.") and ".ssm." not in name
    )
    if state.capacity is not None:
        return weights + state.nbytes() // state.capacity * (prefix + 1)
    M = model.config.mixer.n_basis
    return weights + model.config.n_layers * model.config.n_kv_heads * 4 * (2 * M + 2 * M * M) + 2 * state.nbytes()


def random_tokens(model: Transformer, *shape: int) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, shape, device=model.tok_embeddings.weight.device)


def put(state: ModelState, prefix: int) -> ModelState:
    """`state` as it stands after `prefix` tokens, but for what its tensors hold."""
    state.position.fill_(prefix)
    state.length = prefix
    if state.cursor is not None:
        state.cursor.fill_(prefix)
    return state


def decode_figures(model: Transformer, graph: bool, batch: int, prefix: int, mode, device: torch.device) -> dict:
    """A row: ms of one of mode.steps steps in a row from `prefix`. What does not fit says so in "remark"."""
    try:
        tokens = random_tokens(model, batch)
        state = model.init_state(batch, capacity=prefix + mode.steps + ROOM)
        for layer in state.layers if state.capacity is not None else ():
            layer.k.normal_()
            layer.v.normal_()
        put(state, prefix)
        if graph:
            decoder = Decoder(model, state, room=mode.steps)
            state, step = decoder.state, lambda: decoder.step(tokens)
        else:
            step = lambda: decode(model, tokens, state)  # noqa: E731

        def prepare():
            put(state, prefix)
            if device.type == "cuda":
                torch.cuda.synchronize()

        def run(_):
            for _ in range(mode.steps):
                step()

        # At an idle GPU: eager, the host's gaps count.
        taken = measure((prepare, run), device, rounds=mode.rounds, seconds=mode.seconds, lead_ms=0)[1]
    except Exception as e:  # a cache that does not fit, as a rule
        return {"remark": _bench.reason(e)}
    ms = taken.median / mode.steps
    least = roofline_ms(device, step_bytes(model, state, prefix))
    row = {"ms a step": ms, "tokens/s": 1e3 * batch / ms, "roofline ms": least, "of roofline": ratio(least, ms)}
    return row | {"times": taken._asdict()}


def decode_model(models, size: str, batches, mode, device, report: _bench.Report, deadline: _bench.Deadline) -> None:
    """The table of one size, a cell for each batch and prefix; and a row of the summary for each batch."""
    report.table(f"decode, {size}", DECODE)
    paths = [(condition, graph) for condition in ("softmax", "interdomain") for graph in (False, True)]
    for batch in batches:
        found = []
        for prefix in mode.prefixes:
            cell = []
            for condition, graph in paths:
                row = {"path": f"{condition}, {'graph' if graph else 'eager'}", "B": batch, "prefix": prefix}
                if deadline.passed:
                    row["remark"] = _bench.NOT_RUN
                elif graph and device.type == "cpu":
                    row["remark"] = "a CUDA graph needs a GPU"
                else:
                    row |= decode_figures(models[condition], graph, batch, prefix, mode, device)
                    release(device)
                    _bench.require_healthy(device, row["path"])
                best = min(
                    (r["ms a step"] for r in cell if r["path"].startswith("s") and "ms a step" in r), default=None
                )
                if condition == "interdomain":
                    row["speedup"] = ratio(best, row.get("ms a step"))
                cell.append(row)
                report.add(f"decode, {size}", row)
            found += cell
        report.add("decode, summary", summary_row(found, size, batch))


def summary_row(rows: list[dict], size: str, batch: int) -> dict:
    """A row of the paper's decode tables: ranges over the prefixes that fitted, the ratio of medians where both did."""

    def fastest(kind: str) -> dict[int, float]:
        timed = [row for row in rows if row["path"].startswith(kind) and "ms a step" in row]
        return {row["prefix"]: row["ms a step"] for row in sorted(timed, key=lambda row: -row["ms a step"])}

    softmax, ours = fastest("softmax"), fastest("interdomain")
    both = softmax.keys() & ours.keys()
    medians = [statistics.median(kind[p] for p in both) if both else None for kind in (softmax, ours)]
    figures = (span(fastest("softmax, eager")), span(softmax), span(ours), ratio(*medians))
    return dict(zip(SUMMARY, (f"{size}, B={batch}", *figures, *PAPER_DECODE.get((size, batch), ())), strict=False))


def span(ms: dict[int, float]) -> str | None:
    """least to most, in the digits of `show`."""
    return f"{_bench.show(min(ms.values()))} to {_bench.show(max(ms.values()))}" if ms else None


def prefill_figures(model: Transformer, batch: int, length: int, chunk: int, device: torch.device) -> dict:
    """GiB at the peak, these weights included, and tokens/s, of the second time that random tokens [batch, length] are read.

    What else lives on the device is left out. One that cannot be read says why in "remark": out of memory is a result.
    """
    run, found, ms = timer(device, lead_ms=0), {}, []
    try:
        tokens = random_tokens(model, batch, length)

        def read():
            prefill(model, tokens, chunk=chunk)

        read()
        peak = peak_memory(lambda: ms.extend(run(read)), device)
        if peak is not None:
            found["GiB"] = peak / 2**10 + model_bytes(model) / 2**30
        found["tokens/s"] = 1e3 * batch * length / sum(ms or run(read))
    except Exception as e:
        found["remark"] = _bench.reason(e)
    release(device)
    _bench.require_healthy(device, "reading a prompt")
    return found


def read_prompts(models, mode, device, report: _bench.Report, deadline: _bench.Deadline) -> None:
    """Every prompt read by both models, in chunks and in one piece; the last by interdomain in chunks alone."""
    report.table("reading a prompt", PROMPTS)
    for batch, length in mode.prompts:
        ways = [(f"{c} {how}", c, n) for how, n in (("chunked", mode.chunk), ("whole", length)) for c in CONDITIONS]
        for way, condition, chunk in ways[:1] if (batch, length) == mode.prompts[-1] else ways:
            figures = {"remark": _bench.NOT_RUN}
            if not deadline.passed:
                figures = prefill_figures(models[condition], batch, length, chunk, device)
            paper = dict(zip(PAPER_WAYS, PAPER_MEMORY.get((batch, length), ()), strict=False)).get(way)
            how = {"prompt": f"B={batch}, {length:,} tokens", "read": way, "paper: GB": paper}
            report.add("reading a prompt", how | figures)


def parse(argv) -> argparse.Namespace:
    p = argument_parser(__doc__)
    _bench.add_arguments(p)
    p.add_argument("--sizes", nargs="+", help=f"of {', '.join(SIZES)}; the first has all batches and the prompts")
    p.add_argument("--parts", nargs="+", help="of decode, prompts (of the first size), sizes (the others); default all")
    p.add_argument("--batches", nargs="+", type=int, help=f"default {' '.join(map(str, sorted(GPU['batches'])))}")
    p.add_argument("--prefixes", nargs="+", type=int, help=f"default {' '.join(map(str, sorted(GPU['prefixes'])))}")
    p.add_argument("--steps", type=int, help="tokens in a timed call; default 32 (CPU: 2)")
    p.add_argument("--dtype", choices=tuple(DTYPES), help="of weights and cache; default bfloat16 (CPU: float32)")
    p.add_argument("--quick", action="store_true", help="on a GPU, what fits into two minutes")
    return p.parse_args(argv)


@user_errors
@torch.no_grad()
def main(argv=None) -> int:
    args = parse(argv)
    device, deadline = _bench.choose_device(args.device), _bench.Deadline(args.time_limit)
    _bench.fill_in(args, device, **dict.fromkeys(("batches", "prefixes", "steps"), (None, None)))
    parts = _bench.choose("--parts", args.parts, ("decode", "prompts", "sizes"))
    defaults = TINY if device.type == "cpu" else QUICK if args.quick else GPU
    mode = SimpleNamespace(**defaults | {k: v for k, v in vars(args).items() if k in defaults and v is not None})
    first, *others = _bench.choose("--sizes", mode.sizes, tuple(SIZES))
    report = _bench.Report(
        "decode" if parts == ["decode"] else "inference", args.output, device, {"parts": parts} | vars(mode)
    )
    report.note(
        f"A step takes one token per sequence through the whole model, logits included; its time is the median of {mode.steps} "
        f"steps in a row. Random weights in {mode.dtype}, dynamics and interdomain's state in float32. Roofline: weights and "
        "state (or cache) read and written once, at the datasheet's bandwidth. Speedup: the fastest softmax of the cell over "
        "this path; the paper's: eager softmax over interdomain's graph, on an RTX 6000 Ada (48 GB)."
    )
    report.table("decode, summary", SUMMARY)
    execution = Execution(bf16_products=mode.dtype == "bf16-products")
    for size in (*([first] if {"decode", "prompts"} & {*parts} else []), *(others if "sizes" in parts else [])):
        if deadline.passed:
            break
        try:
            models = {c: random_model(build_config(size, c), device, DTYPES[mode.dtype], execution) for c in CONDITIONS}
        except torch.OutOfMemoryError:
            report.note(f"{size}: not run: no room for both models")
            continue
        if size != first or "decode" in parts:
            batches = mode.batches if size == first else args.batches or SIZE_BATCHES
            decode_model(models, size, batches, mode, device, report, deadline)
        if size == first and "prompts" in parts:
            read_prompts(models, mode, device, report, deadline)
        del models
        release(device)
    report.finish("unfinished" if deadline.passed else "complete")
    return 0


if __name__ == "__main__":
    sys.exit(main())
