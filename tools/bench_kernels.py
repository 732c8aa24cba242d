"""python -m interdomain.tools.bench_kernels --output benchmarks/results/today

Time the mixer core alone, forward and backward: ours by backend, PyTorch's attention, and FlashAttention's packages and
flash-linear-attention where installed, on the same inputs, beside the roofline of the GPU's datasheet. Without a GPU: tiny and
labelled.
"""

import argparse
import functools
import itertools
import os
import re
import sys

import torch

from . import _bench, _mixers
from ._apart import Emit
from ._cli import argument_parser, user_errors
from ._mixers import ATTENTION, NAMES, SLOW
from ._problems import Shape
from ._timing import Call, measure, peak_memory, ratio, roofline_ms, run_once

SHAPES = ("8x4096x64", "2x16384x64", "1x32768x64", "8x4096x96")
TINY = ("2x128x16", "1x256x24")
PHASES = ("forward", "backward", "both")
COLUMNS = [
    *("mixer", "forward ms", "backward ms", "both ms", "of best attention", "roofline ms", "of roofline"),
    *("peak MiB", "remark"),
]


def parse_shape(text: str, heads: int, basis: int) -> Shape:
    """BxTxd. Raises: ValueError."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if not found:
        raise ValueError(f"--shapes {text}: expected BATCHxTOKENSxHEAD_DIM, such as {SHAPES[0]}.")
    B, T, d = map(int, found.groups())
    return Shape(B, T, heads, d, basis)


def call_of(name: str, shape: Shape, device: torch.device) -> Call:
    """Forward as in training, then the gradients of every leaf: two steps that are timed apart and together."""
    forward, leaves, d_out = _mixers.candidate(name, shape, device)
    return forward, lambda o: torch.autograd.grad(o, leaves, d_out)


def run_case(case: tuple[str, str], emit: Emit, *, device: torch.device, shapes: dict[str, Shape], rounds: int) -> None:
    """emit(row of the table)."""
    name, shape = case[0], shapes[case[1]]
    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")  # what others' kernels chose is there for the next process
    row = {"mixer": name}
    try:
        call = call_of(name, shape, device)
        times = measure(call, device, rounds=rounds, seconds=1.0 if device.type == "cuda" else 0.05)
        row["peak MiB"] = peak_memory(call, device)
    except Exception as e:
        emit(row | {"remark": _bench.reason(e)})
        return
    for phase, taken in zip(PHASES, times, strict=True):
        row |= {f"{phase} ms": taken.median, f"{phase} times": taken._asdict()}
    row["roofline ms"] = roofline_ms(device, *_mixers.costs(name, shape))
    emit(row | {"of roofline": ratio(row["roofline ms"], row["both ms"])})


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
    p.add_argument("--rounds", type=int, help="timed calls of a candidate; default 20 (CPU: 3)")
    p.add_argument("--once", action="store_true", help="run every call once, for a profiler or a sanitizer")
    return p.parse_args(argv)


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    if args.once:  # without PyTorch's pools a sanitizer sees an access beyond a tensor's end
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
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
    for name, shape in itertools.product(names if args.once else (), shapes.values()):
        run_once(call_of(name, shape, device))
        print(f"ran {name}, {shape}", flush=True)
    if args.once:
        return 0

    report = _bench.Report(
        "kernels", args.output, device, {"mixers": names, "rounds": args.rounds, "dtype": "bfloat16"}
    )
    report.note("Roofline: inputs read and outputs written once, and the algebra's FLOPs, at the datasheet's rates.")
    if missing and not args.mixers:
        report.note(f"Not installed: {', '.join(sorted(set(missing.values())))}.")
    for shape in shapes.values():
        report.table(str(shape), COLUMNS)

    def add(case, rows, problem):
        name, shape = case[0], str(shapes[case[1]])
        row = {"mixer": name, **(rows[0] if rows else {})}
        if problem:
            row["remark"] = _bench.without_paths(problem)[:300]
        everything = [*report.rows(shape), row]
        best = min((r["both ms"] for r in everything if r["mixer"] in ATTENTION and "both ms" in r), default=None)
        for r in everything:
            r["of best attention"] = ratio(r.get("both ms"), best)
        report.add(shape, row)

    for name in (name for name in names if name in missing):
        for text in texts:
            add((name, text), [], f"{missing[name]} is not installed")
    cases = [(name, text) for name in names if name not in missing for text in texts]
    handle = functools.partial(run_case, device=device, shapes=shapes, rounds=args.rounds)
    _bench.work(device, [cases], add, handle, deadline)
    ran = sum("both ms" in row for shape in shapes.values() for row in report.rows(str(shape)))
    report.finish("unfinished" if deadline.passed else "complete", f"{ran} timings")
    return 0


if __name__ == "__main__":
    sys.exit(main())
