"""python -m interdomain.tools.bench_inference --output benchmarks/results/today

Time inference as in the paper's appendix: a decode step of the whole model over batch and prefix, interdomain and softmax,
eager and in CUDA graphs; the four sizes; peak memory and speed of reading a prompt; beside the least that each must move, and
the paper's figures. Weights are random. Without a GPU: tiny and labelled; with --sizes, decoding on the CPU measured for real.
"""

import argparse
import sys
from dataclasses import dataclass, field, replace

import torch

from interdomain.model import SIZES, Execution, Transformer, build_config
from interdomain.model.generation import PREFILL_CHUNK

from . import _inference_paper as paper
from ._bench import Deadline, Report, add_arguments, choose, choose_device, reason
from ._cli import argument_parser, user_errors
from ._inference import (
    CONDITIONS,
    Setup,
    built,
    decode_rows,
    flat_row,
    interdomain_candidates,
    prefill_figures,
    random_model,
    softmax_candidates,
)
from ._inference_tables import (
    DECODE,
    MEMORY,
    SPEED,
    SUMMARY,
    TARGETS,
    cpu_targets,
    memory_row,
    panels,
    speed_row,
    summary_row,
    targets,
)
from ._plots import draw
from ._timing import Ceilings, ceilings, release

PARTS = ("decode", "memory", "sizes")
# The paper's, in the order in which they are measured: what the targets name comes first.
BATCHES, PREFIXES, SIZE_BATCHES = (1, 64, 8, 32, 16), (4096, 16_384, 512, 8192, 2048, 1024), (1, 8)
LONG_PROMPT = (1, 131_072)
# bf16-products: the paper's, float32 weights that every product rounds.
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "bf16-products": torch.float32}


@dataclass(frozen=True)
class Mode:
    """What is measured where nothing else is asked for."""

    sizes: tuple[str, ...] = ("125M", "350M", "760M", "1.3B")
    parts: tuple[str, ...] = PARTS
    batches: tuple[int, ...] = BATCHES
    prefixes: tuple[int, ...] = PREFIXES
    size_batches: tuple[int, ...] = SIZE_BATCHES
    prompts: tuple[tuple[int, int], ...] = tuple(paper.MEMORY)
    long_prompt: tuple[int, int] = LONG_PROMPT
    chunk: int = PREFILL_CHUNK
    dtype: str = "bfloat16"
    steps: int = 32
    rounds: int = 20
    seconds: float = 0.5
    eager_only: bool = False


GPU = Mode()
QUICK = replace(GPU, prefixes=(4096, 16_384, 512), steps=16, rounds=8)
TINY = Mode(
    *(("debug",), PARTS, (1, 2), (32, 64), (1, 2), ((2, 64),), (1, 128), 32, "float32"),
    **dict(steps=2, rounds=3, seconds=0.05),
)
CPU = Mode(
    parts=("decode",), batches=(1, 8), prefixes=(512,), dtype="float32", steps=8, rounds=40, seconds=80, eager_only=True
)


@dataclass
class Bench:
    """What was measured so far, and how."""

    report: Report
    mode: Mode
    setup: Setup
    limits: Ceilings
    deadline: Deadline
    rows: list[dict] = field(default_factory=list)
    flats: dict[tuple[str, int], dict] = field(default_factory=dict)  # (size, batch)
    memory: dict[tuple[str, int, int], dict] = field(default_factory=dict)  # (size, batch, tokens)

    def late(self, what: str) -> bool:
        if self.deadline.passed:
            self.report.note(f"{what}: not run: time limit")
        return self.deadline.passed

    def models(self, size: str) -> dict[str, Transformer]:
        """Both conditions; none, and a note, where the device has no room for them."""
        made = {}
        try:
            for condition in CONDITIONS:
                config = build_config(size, condition)
                execution = Execution(bf16_products=self.mode.dtype == "bf16-products")
                made[condition] = random_model(config, self.setup.device, DTYPES[self.mode.dtype], execution)
        except torch.OutOfMemoryError as e:
            self.report.note(f"{size}: not run: {reason(e)}")
            made = {}
        return made

    def decode(self, models: dict[str, Transformer], size: str, batches) -> None:
        table = f"decode, {size}"
        self.report.table(table, DECODE)
        for batch in batches:
            if not self.late(f"{table}, B={batch}"):
                self.decode_batch(models, size, batch, table)
                release(self.setup.device)

    def decode_batch(self, models: dict[str, Transformer], size: str, batch: int, table: str) -> None:
        ours, remarks = built(
            interdomain_candidates(models["interdomain"], batch, self.setup), self.setup, self.deadline
        )
        graphed = ours.get(f"interdomain, {self.setup.launched}")
        if graphed and not self.deadline.passed and (flat := flat_row(graphed, self.mode.prefixes, self.setup)):
            self.flats[size, batch] = flat
        for prefix in self.mode.prefixes:
            if self.late(f"{table}, B={batch}, prefix {prefix:,}"):
                continue
            try:
                rows = self.decode_cell(models, batch, prefix, ours, remarks)
            except torch.OutOfMemoryError as e:  # the timer itself needs some
                rows = [{"path": "any", "prefix": prefix, "remark": reason(e)}]
            release(self.setup.device)
            for row in rows:
                self.rows.append({"size": size, "B": batch, **row})
                self.report.add(table, self.rows[-1])

    def decode_cell(self, models, batch, prefix, ours, remarks) -> list[dict]:
        s, deadline = self.setup, self.deadline
        try:
            builders = softmax_candidates(models["softmax"], batch, prefix, s)
        except Exception as e:  # a cache that does not fit, as a rule
            builders, remarks = {}, {**remarks, "softmax, any": reason(e)}
        release(s.device)
        softmax, others = built(builders, s, deadline)
        return decode_rows(ours | softmax, remarks | others, models, prefix, s, self.limits, deadline)

    def prompts(self, models: dict[str, Transformer], size: str) -> None:
        table = f"peak memory of reading a prompt, {size}"
        self.report.table(table, MEMORY)
        for cell in (*self.mode.prompts, self.mode.long_prompt):
            if not self.late(f"prompts of {cell[0]} x {cell[1]:,} tokens"):
                self.memory[size, *cell] = figures = self.prompt_figures(models, *cell)
                self.report.add(table, memory_row(cell, figures))
        table = f"tokens/s of reading a prompt, {size}"
        self.report.table(table, SPEED)
        for (_, *cell), figures in self.memory.items():
            self.report.add(table, speed_row(cell, figures))

    def prompt_figures(self, models: dict[str, Transformer], batch: int, length: int) -> dict[str, dict]:
        """What each way of reading gives. The long prompt is interdomain's alone: softmax would take most of the time."""
        chunk = self.mode.chunk
        ways = {"interdomain chunked": ("interdomain", chunk)}
        if (batch, length) != self.mode.long_prompt:
            ways["softmax chunked"] = "softmax", chunk
            ways |= {f"{condition} whole": (condition, length) for condition in CONDITIONS}
        found, seen = {}, {}
        for way, (condition, piece) in ways.items():
            key = condition, min(piece, length)  # a prompt of one piece is read once
            if key not in seen:
                seen[key] = {"remark": "not run: time limit"}
                if not self.deadline.passed:
                    seen[key] = prefill_figures(models[condition], batch, length, piece, self.setup.device)
            found[way] = seen[key]
        return found

    def summarise(self, sizes) -> None:
        report = self.report
        batches = sorted({row["B"] for row in self.rows if row["size"] == sizes[-1]})
        tables = {f"decode summary, {sizes[-1]}": [(sizes[-1], batch) for batch in batches]}
        if len(sizes) > 1:
            tables |= {f"sizes, B={batch}": [(size, batch) for size in sizes] for batch in self.mode.size_batches}
        for name, cells in tables.items():
            report.table(name, SUMMARY)
            for size, batch in cells:
                report.add(name, summary_row(self.rows, self.flats, size, batch))
        report.contents["flat"] = {f"{size}, B={batch}": row for (size, batch), row in self.flats.items()}
        drawn = [panel for size in sizes for panel in panels(self.rows, size)]
        if drawn and len(self.mode.prefixes) > 1 and draw(report.folder / "inference.png", drawn) is None:
            report.note("No plot: matplotlib is not installed.")


def settle(args, device: torch.device) -> tuple[list[str], Mode]:
    """The sizes, smallest first, and what of a mode was asked for otherwise. Raises: ValueError."""
    gpu = QUICK if args.quick else GPU
    mode = gpu if device.type == "cuda" else CPU if args.sizes else TINY
    sizes = choose("--sizes", args.sizes or list(mode.sizes), tuple(SIZES))
    parts = choose("--parts", args.parts or list(mode.parts), PARTS)
    for flag in ("batches", "prefixes", "steps", "rounds", "threads"):
        given = getattr(args, flag)
        least = min(given) if isinstance(given, list) else given
        if least is not None and least < 1:
            raise ValueError(f"--{flag} must be at least 1: got {least}.")
    batches = args.batches and tuple(dict.fromkeys(args.batches))
    asked = {
        "parts": tuple(parts),
        "batches": batches,
        "size_batches": batches,
        "prefixes": args.prefixes and tuple(dict.fromkeys(args.prefixes)),
        **{name: getattr(args, name) for name in ("dtype", "steps", "rounds")},
    }
    return sorted(set(sizes), key=list(SIZES).index), replace(mode, **{k: v for k, v in asked.items() if v is not None})


def parse(argv) -> argparse.Namespace:
    p = argument_parser(__doc__)
    add_arguments(p)
    p.add_argument("--sizes", nargs="+", help=f"of {', '.join(SIZES)} (default: the four; CPU: a tiny model)")
    p.add_argument(
        "--parts", nargs="+", help="of decode, memory (both of the largest size), sizes (the others) (default: all)"
    )
    p.add_argument("--batches", nargs="+", type=int, help=f"default {' '.join(map(str, sorted(BATCHES)))}")
    p.add_argument("--prefixes", nargs="+", type=int, help=f"tokens; default {' '.join(map(str, sorted(PREFIXES)))}")
    p.add_argument("--steps", type=int, help="tokens in a timed call; default 32 (CPU: 8)")
    p.add_argument("--rounds", type=int, help="turns of a candidate at most, and at least 3; default 20 (CPU: 40)")
    p.add_argument(
        "--dtype",
        choices=tuple(DTYPES),
        help="of weights and cache, or the paper's way; default bfloat16 (CPU: float32)",
    )
    p.add_argument("--threads", type=int, help="of PyTorch on a CPU; default: as PyTorch chooses")
    p.add_argument(
        "--quick", action="store_true", help="on a GPU, what fits into two minutes: three prefixes, fewer steps"
    )
    p.add_argument("--compile", action="store_true", help="time steps that torch.compile compiled before capture, too")
    return p.parse_args(argv)


@user_errors
@torch.no_grad()
def main(argv=None) -> int:
    args = parse(argv)
    device = choose_device(args.device)
    deadline = Deadline(args.time_limit)
    sizes, mode = settle(args, device)
    if args.threads:
        torch.set_num_threads(args.threads)
    options = {
        **{k: getattr(mode, k) for k in ("parts", "batches", "prefixes", "dtype", "steps", "rounds", "chunk")},
        **{"sizes": sizes, "compile": args.compile, "threads": torch.get_num_threads()},
    }
    on_cpu = device.type == "cpu" and args.sizes
    label = f"measured on a CPU, {torch.get_num_threads()} thread(s)" if on_cpu else None
    report = Report("inference", args.output, device, options, label)
    limits = ceilings(device)
    report.contents["ceilings"] = limits._asdict()
    setup = Setup(device, mode.steps, mode.rounds, mode.seconds, mode.eager_only, args.compile)
    bench = Bench(report, mode, setup, limits, deadline)
    report.note(
        f"A step takes one token per sequence through the whole model, logits included; its time is the median of {mode.steps} "
        f"steps in a row, candidates in turns. Random weights in {mode.dtype}, dynamics and interdomain's state in float32."
    )
    report.note(
        f"Floors: weights and state (or cache) read and written once, at the measured copy bandwidth of "
        f"{limits.bandwidth / 1e12:.3g} TB/s. Speedup: fastest softmax over fastest interdomain; the paper's: "
        "eager softmax over interdomain's graph."
    )
    report.note(f"Columns 'paper' are {paper.GPU}: bfloat16 by autocast, softmax launched eagerly.")
    main_size = sizes[-1]
    models = bench.models(main_size) if {"decode", "memory"} & set(mode.parts) else {}
    if models and "decode" in mode.parts:
        bench.decode(models, main_size, mode.batches)
    if models and "memory" in mode.parts:
        bench.prompts(models, main_size)
    models = None
    release(device)
    if "sizes" in mode.parts:
        for size in sizes if "decode" not in mode.parts else sizes[:-1]:
            if not bench.late(size) and (models := bench.models(size)):
                bench.decode(models, size, mode.size_batches)
            models = None
            release(device)
    bench.summarise(sizes)
    found = []
    if device.type == "cuda":
        found = targets(bench.rows, bench.flats, bench.memory, mode.long_prompt)
    elif on_cpu:
        found = cpu_targets(bench.rows)
    if found:
        report.table("targets", TARGETS)
        for row in found:
            report.add("targets", row)
    ran = sum("ms a step" in row for row in bench.rows) + sum(
        "tokens/s" in x for f in bench.memory.values() for x in f.values()
    )
    report.finish("unfinished" if deadline.passed else "complete", f"{ran} figures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
