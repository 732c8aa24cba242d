"""interdomain bench-inference --output benchmarks/results/today

Time decoding and the reading of prompts, as the paper does.

A decode step of the whole model is timed over batch size and prefix length, for interdomain and
softmax, with and without CUDA graphs. Reading a prompt is timed with its peak memory. The paper's
figures stand beside ours. Weights are random, which changes no time. Without a GPU it runs at tiny
sizes on the CPU, and the results say so, or at the sizes and prefixes that you name.

    interdomain bench-inference --quick --sizes 125M --output benchmarks/results/quick

Documentation: docs/measurements.md
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from interdomain.model import SIZES, ModelConfig, ModelState, Transformer, build_config
from interdomain.model.generation import PREFILL_CHUNK, Decoder, prefill
from interdomain.tools._bench import results
from interdomain.tools._bench.processes import attempt, count_compilations
from interdomain.tools._bench.timing import Timer, measure, peak_memory, ratio, release
from interdomain.tools._cli import argument_parser, require_at_least, user_errors
from interdomain.tools._paper import PAPER

PATHS = ("softmax, eager", "softmax, graph", "interdomain, eager", "interdomain, graph")
PAPER_PATHS = ("softmax, eager", "interdomain, graph")  # those that the paper measured
SIZE_BATCHES = (1, 8)  # batch sizes of all model sizes but the first
ROOM = 16  # cache slots beyond those that a timed call fills, for the steps that warm up
# Columns of the tables.
DECODE = ["path", "B", "prefix", "ms a step", "paper: ms", "tokens/s", "speedup", "remark"]
PROMPTS = ["prompt", "read", "GiB", "paper: GB", "tokens/s", "remark"]


@dataclass(frozen=True)
class Mode:
    """The measurements that are made if no option says otherwise.

    They are made in this order: the most telling ones come first.

    Attributes:
        sizes: Names of model sizes. The first is measured at all batch sizes and with prompts.
        batches: Sequences decoded at once.
        prefixes: Tokens before the timed steps.
        prompts: (batch, tokens). The last one is read by interdomain in chunks only.
        chunk: Tokens of a chunk of a prompt.
        dtype: Name of the dtype of weights and caches.
        steps: Tokens in a timed call.
        rounds: The largest number of timed calls.
        seconds: The time that the timed calls may take together.
        paths: Those of PATHS to decode by: a model, and whether a CUDA graph launches the kernels.
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
# The paper's comparison in a minute: no prompts are read, and interdomain is timed as a CUDA graph
# only.
QUICK = Mode(
    sizes=("1.3B", "125M"),
    batches=(1, 8, 64),
    prefixes=(512, 4096, 16_384),
    prompts=(),
    steps=16,
    rounds=8,
    paths=("softmax, eager", "softmax, graph", "interdomain, graph"),
)
# For a CPU.
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
    """Makes a model as one that is loaded, with normal numbers for weights.

    Args:
        config: The model.
        device: The device of the weights.
        dtype: Name of the dtype of the weights.
    """
    # Weights get memory once, on the device.
    with torch.device("meta"):
        model = Transformer(config)
    model.to_empty(device=device)
    for x in (*model.parameters(), *model.buffers()):
        x.normal_(0, 0.02)
    return model.to(getattr(torch, dtype)).requires_grad_(False).eval()


def set_position(state: ModelState, prefix: int) -> None:
    """Makes a state count `prefix` tokens, on the host and in the tensor that the steps read.

    The states of the layers stay as they are: the time of a step depends on shapes only.
    """
    state.length = prefix
    state.position.fill_(prefix)


@dataclass
class Bench:
    """Makes the measurements, and adds their rows to the report.

    Attributes:
        mode: The measurements to make.
        device: The device that is measured.
        report: The report of the tool.
    """

    mode: Mode
    device: torch.device
    report: results.Report

    def decode(self, model: Transformer, graph: bool, batch: int, prefix: int) -> dict[str, Any]:
        """Times steps in a row from a prefix. Returns the figures of one step.

        Args:
            model: The model.
            graph: True runs a step as a CUDA graph, False launches its kernels one by one.
            batch: The number of sequences.
            prefix: The number of tokens before the first step.
        """
        mode = self.mode
        tokens = torch.randint(model.config.vocab_size, (batch,), device=self.device)

        # A state as it is after a prompt, without the time and memory of reading one.
        state = model.init_state(batch, capacity=prefix + mode.steps + ROOM)
        if state.capacity is not None:
            # Caches of softmax hold random numbers.
            for layer in state.layers:
                layer.k.normal_()
                layer.v.normal_()
        set_position(state, prefix)
        decoder = Decoder(model, state, room=mode.steps, graph=graph)

        def steps() -> None:
            set_position(decoder.state, prefix)
            for _ in range(mode.steps):
                decoder.step(tokens)

        # The GPU is idle when a call begins: the gaps that the host leaves count, as in decoding.
        _, times = measure(
            [steps], self.device, rounds=mode.rounds, seconds=mode.seconds, lead_ms=0
        )
        ms = times.median / mode.steps
        return {"ms a step": ms, "tokens/s": 1e3 * batch / ms, "times": times._asdict()}

    def read_prompt(
        self, model: Transformer, batch: int, length: int, chunk: int
    ) -> dict[str, Any]:
        """Reads a prompt twice.

        Args:
            model: The model.
            batch: The number of sequences.
            length: The number of tokens of each.
            chunk: The number of tokens that are read at a time.

        Returns:
            The speed of the second reading, and its peak memory with this model's weights.
        """
        tokens = torch.randint(model.config.vocab_size, (batch, length), device=self.device)
        # The first reading compiles and tunes.
        read = functools.partial(prefill, model, tokens, chunk=chunk)
        read()

        # The second one is timed, and its memory is measured.
        timer = Timer(self.device, lead_ms=0)
        ms: list[float] = []
        peak = peak_memory([lambda: ms.extend(timer.step_ms([read]))], self.device)
        row = {"tokens/s": 1e3 * batch * length / sum(ms)}
        if peak is not None:
            weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
            row["GiB"] = peak / 2**10 + weights / 2**30
        return row

    def attempt(self, measurement: functools.partial) -> dict[str, Any]:
        """Returns the figures of a measurement, or a remark why there are none.

        Args:
            measurement: The call, whose result is a dict of figures.
        """
        figures = attempt(measurement, self.device, "this row")
        return {"remark": figures} if isinstance(figures, str) else figures

    def decode_batch(self, models: dict[str, Transformer], size: str, batch: int) -> None:
        """Reports decoding from every prefix by every path.

        Args:
            models: The model of each condition.
            size: The name of their size.
            batch: The number of sequences.
        """
        # The paper's ranges over all prefixes.
        paper_ms = PAPER["decode"].get(size, {}).get(str(batch), ())
        paper: dict[str, str] = dict(zip(PAPER_PATHS, paper_ms, strict=False))
        for prefix in self.mode.prefixes:
            softmax_ms = []
            for path in self.mode.paths:
                condition, how = path.split(", ")
                row = {"path": path, "B": batch, "prefix": prefix, "paper: ms": paper.get(path)}
                model = models[condition]
                row |= self.attempt(
                    functools.partial(self.decode, model, how == "graph", batch, prefix)
                )
                ms = row.get("ms a step")
                # Softmax comes first in every mode's paths.
                if condition == "interdomain":
                    row["speedup"] = ratio(min(softmax_ms, default=None), ms)
                elif ms is not None:
                    softmax_ms.append(ms)
                self.report.add(f"decode, {size}", row)

    def read_prompts(self, models: dict[str, Transformer]) -> None:
        """Reports every prompt, read by both models in chunks and in one piece.

        Args:
            models: The model of each condition.
        """
        paper = {(row["batch"], row["tokens"]): row for row in PAPER["prompt_memory"]}
        self.report.table("reading a prompt", PROMPTS)
        for prompt in self.mode.prompts:
            batch, length = prompt
            for how, chunk in (("chunked", self.mode.chunk), ("whole", length)):
                for condition, model in models.items():
                    path = f"{condition} {how}"
                    if prompt == self.mode.prompts[-1] and path != "interdomain chunked":
                        continue
                    row = {"prompt": f"B={batch}, {length:,} tokens", "read": path}
                    row["paper: GB"] = paper.get(prompt, {}).get(path)
                    row |= self.attempt(
                        functools.partial(self.read_prompt, model, batch, length, chunk)
                    )
                    self.report.add("reading a prompt", row)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line. If `argv` is None, it is that of the process."""
    p = argument_parser(__doc__)
    results.add_arguments(p, "inference")
    p.add_argument(
        "--sizes",
        nargs="+",
        choices=SIZES,
        metavar="SIZE",
        help=f"{', '.join(SIZES)}; the first at all batch sizes and with prompts "
        f"(default: {' '.join(GPU.sizes)})",
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
def main(argv: list[str] | None = None) -> int:
    """Runs the command, by default with the process's arguments. Returns the exit status."""
    args = parse(argv)
    device = results.choose_device(args.device)
    require_at_least(args, steps=1, batches=1, prefixes=1)

    # The mode of the device, and what the options change in it.
    mode = GPU
    if device.type == "cpu":
        mode = TINY
    elif args.quick:
        mode = QUICK
    for name in ("sizes", "steps", "batches", "prefixes"):
        option = getattr(args, name)
        if option is not None:
            mode = replace(mode, **{name: option})

    # Both models of a size are in memory together.
    report = results.Report(args.name, args.output, device, asdict(mode), named=bool(args.prefixes))
    bench = Bench(mode, device, report)
    counts = count_compilations()
    for size in mode.sizes:
        models = {}
        for condition in ("interdomain", "softmax"):
            config = build_config(size, condition)
            models[condition] = random_model(config, device, mode.dtype)
        report.table(f"decode, {size}", DECODE)
        # Other sizes than the first have fewer batch sizes, and no prompts.
        first = size == mode.sizes[0]
        for batch in mode.batches:
            if first or args.quick or args.batches or batch in SIZE_BATCHES:
                bench.decode_batch(models, size, batch)
        if first and mode.prompts:
            bench.read_prompts(models)
        release(device)
    report.finish(counts=str(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
