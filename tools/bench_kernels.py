"""python -m interdomain.tools.bench_kernels --output benchmarks/results/today

Time the mixer core alone, forward and backward: ours by backend, PyTorch's attention, and FlashAttention's packages,
flash-linear-attention or mamba_ssm where installed, on the same inputs, beside the roofline of the GPU's datasheet. On a GPU
each has a process of its own. --passes times each Triton pass alone. Without a GPU: tiny and labelled.
"""

import argparse
import functools
import os
import re
import sys

import torch

from . import _bench, _mixers
from ._apart import Emit
from ._cli import argument_parser, user_errors
from ._mixers import ATTENTION, NAMES, SLOW, make_problem
from ._problems import Shape, attention_flops, chunkwise_flops, io_bytes
from ._timing import interleaved, peak_memory, ratio, release, roofline_ms, usable

SHAPES = ("8x4096x64", "2x16384x64", "1x32768x64", "8x4096x96")
TINY = ("2x128x16", "1x256x24")
PHASES = ("forward", "backward", "both")
COLUMNS = [
    *("mixer", "forward ms", "backward ms", "both ms", "of best attention", "roofline ms", "of roofline"),
    *("peak MiB", "remark"),
]
IMPORTS = ("torch._dynamo", "interdomain.scan.triton_chunkwise")  # that take long, while another process measures


def parse_shape(text: str, heads: int, basis: int) -> Shape:
    """BxTxd. Raises: ValueError."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if not found:
        raise ValueError(f"--shapes {text}: expected BATCHxTOKENSxHEAD_DIM, such as {SHAPES[0]}.")
    B, T, d = map(int, found.groups())
    return Shape(B, T, heads, d, basis)


def measure(name: str, shape: Shape, device: torch.device, rounds: int, seconds: float, emit: Emit) -> None:
    """emit(row of the kernel table)."""
    row = {"mixer": name}
    if name in _mixers.TUNED:
        os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")  # what it chose is there for the next process
    try:
        forward, leaves, d_out = _mixers.candidate(name, make_problem(shape, device))
    except Exception as e:
        emit(row | {"remark": _bench.reason(e)})
        return
    # Forward as in training, then the gradients of every leaf: two steps that are timed apart and together.
    call = forward, lambda o: torch.autograd.grad(o, leaves, d_out)
    good, bad = usable({name: call}, device)
    if bad:
        emit(row | {"remark": bad[name]})
        return
    row["peak MiB"] = peak_memory(call, device)
    times = interleaved(good, device, rounds=rounds, seconds=seconds)[name]
    for phase, taken in zip(PHASES, times, strict=True):
        row |= {f"{phase} ms": taken.median, f"{phase} times": taken._asdict()}
    flops = attention_flops if name in ATTENTION else chunkwise_flops if name in _mixers.OURS[:2] else None
    row["roofline ms"] = roofline_ms(device, sum(io_bytes(shape, name)), sum(flops(shape)) if flops else 0)
    row["of roofline"] = ratio(row["roofline ms"], row["both ms"])
    emit(row)


def parse(argv) -> argparse.Namespace:
    p = argument_parser(__doc__)
    _bench.add_arguments(p)
    p.add_argument(
        "--shapes", nargs="+", metavar="BxTxD", help=f"batch, tokens, head width; default {' '.join(SHAPES)}"
    )
    p.add_argument("--heads", type=int, help="default 32 (CPU: 2)")
    p.add_argument("--basis", type=int, help="M, basis functions per head; default 64 (CPU: 16)")
    p.add_argument(
        "--mixers", nargs="+", help=f"of {', '.join(NAMES)}; default: those installed, but {', '.join(SLOW)}"
    )
    p.add_argument("--rounds", type=int, help="turns of a candidate; default 20 (CPU: 3)")
    p.add_argument("--passes", action="store_true", help="time each Triton pass alone, and nothing else")
    p.add_argument("--once", nargs="+", metavar="PASS", help="launch these passes once, for a profiler or a sanitizer")
    return p.parse_args(argv)


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    device = _bench.choose_device(args.device)
    cuda = device.type == "cuda"
    deadline = _bench.Deadline(args.time_limit)
    names = _bench.choose("--mixers", args.mixers, NAMES)
    missing = {name: package for name in names if (package := _mixers.absent(name))}
    if not args.mixers:
        names = [name for name in names if name not in (*SLOW, *missing)] if cuda else list(_mixers.ON_CPU)
    _bench.fill_in(args, device, heads=(32, 2), basis=(64, 16), rounds=(20, 3))
    texts = args.shapes or list(SHAPES if cuda else TINY)
    shapes = {text: parse_shape(text, args.heads, args.basis) for text in texts}
    if args.passes or args.once:
        from . import _passes

        return _passes.run(args, device, shapes, deadline)

    options = {"mixers": names, "rounds": args.rounds, "dtype": "bfloat16"}
    report = _bench.Report("kernels", args.output, device, options)
    report.note("Roofline: inputs read and outputs written once, and the algebra's FLOPs, at the datasheet's rates.")
    if missing and not args.mixers:
        report.note(f"Not installed: {', '.join(sorted(set(missing.values())))}.")
    for shape in shapes.values():
        report.table(str(shape), COLUMNS)

    def add(case, rows, problem):
        name, text = case
        row = {"mixer": name, **(rows[-1] if rows else {}), **_bench.ended(problem)}
        everything = [*report.rows(str(shapes[text])), row]
        best = min((r["both ms"] for r in everything if r["mixer"] in ATTENTION and "both ms" in r), default=None)
        for r in everything:
            r["of best attention"] = ratio(r.get("both ms"), best)
        report.add(str(shapes[text]), row)

    for name in (name for name in names if name in missing):
        for text in texts:
            add((name, text), [], f"{missing[name]} is not installed")
    jobs = [[(name, text) for text in texts] for name in names if name not in missing]
    handle = functools.partial(run_case, device=device, shapes=shapes, rounds=args.rounds)
    _bench.work(device, jobs, add, handle, deadline, imports=IMPORTS)
    ran = sum("both ms" in row for shape in shapes.values() for row in report.rows(str(shape)))
    report.finish("unfinished" if deadline.passed else "complete", f"{ran} timings")
    return 0


def run_case(case: tuple[str, str], emit: Emit, *, device: torch.device, shapes: dict[str, Shape], rounds: int) -> None:
    """A row of the table. Raises: RuntimeError if the GPU does not survive it."""
    name, text = case
    measure(name, shapes[text], device, rounds, 1.0 if device.type == "cuda" else 0.05, emit)
    _bench.require_healthy(device, name)
    release(device)


if __name__ == "__main__":
    sys.exit(main())
