"""python -m interdomain.tools.bench_kernels --output benchmarks/results/today

Time the mixer core alone, forward and backward: ours by backend, PyTorch's attention, and FlashAttention's packages,
flash-linear-attention or mamba_ssm where installed, on the same inputs, beside the least that each must cost in bytes and
FLOPs. On a GPU each has a process of its own. --passes times each Triton pass alone; --tune times a fixed list of tile sizes
for each. Without a GPU: tiny and labelled.
"""

import argparse
import functools
import importlib.util
import os
import re
import sys

import torch

from . import _apart, _features
from ._bench import (
    Deadline,
    Report,
    add_arguments,
    choose,
    choose_device,
    ended,
    reason,
    require_healthy,
)
from ._cli import argument_parser, user_errors
from ._mixers import ATTENTION, NAMES, ON_CPU, SLOW, TUNED, absent, candidate, made_by, make_problem
from ._problems import Shape, attention_flops, chunkwise_costs, io_bytes, segments, tiles
from ._timing import Ceilings, Yardsticks, host_ms, interleaved, peak_memory, ratio, release, usable

SHAPES = ("8x4096x64", "2x16384x64", "1x32768x64", "8x4096x96")
TINY = ("2x128x16", "1x256x24")
PHASES = ("forward", "backward", "both")
COLUMNS = [
    *("mixer", "forward ms", "backward ms", "both ms", "of best attention", "I/O floor ms", "byte floor ms"),
    *("FLOP floor ms", "of floor", "copy TB/s", "product TFLOP/s", "host ms", "peak MiB", "by", "remark"),
]
OURS = ("chunkwise", "chunkwise-kept")
TARGETS = (  # which (the faster of these), over what (the best of these), at which T, at most
    (OURS, ATTENTION, 4096, 0.3),
    (OURS, ATTENTION, 16384, 0.12),
    (OURS, ("fla-gla",), 4096, 0.6),
    (OURS, ("fla-gated-delta",), 4096, 0.6),
)
FLOOR_TARGET = 0.6  # of the byte floor, at least
FEATURES = "input features"


def parse_shape(text: str, heads: int, basis: int) -> Shape:
    """BxTxd. Raises: ValueError."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if not found:
        raise ValueError(f"--shapes {text}: expected BATCHxTOKENSxHEAD_DIM, such as {SHAPES[0]}.")
    B, T, d = map(int, found.groups())
    return Shape(B, T, heads, d, basis)


def measure(name: str, shape: Shape, device: torch.device, rounds: int, seconds: float, emit) -> None:
    """emit(row of the kernel table); once more with the kernel that an attention called, which the profiler tells."""
    row = {"mixer": name, "by": made_by(name)}
    if name in TUNED:
        os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")  # what it chose is there for the next process
    try:
        call = _training_step(candidate(name, make_problem(shape, device)))
    except Exception as e:
        failed = {name: reason(e)}
    else:
        _, failed = usable({name: call}, device)
    if failed:
        emit(row | {"remark": failed[name]})
        require_healthy(device, name)
        return
    row |= {"peak MiB": peak_memory(call, device), "host ms": host_ms(call, device)}
    yardsticks = Yardsticks(device)
    times = interleaved({name: call} | yardsticks.calls, device, rounds=rounds, seconds=seconds)
    limits = yardsticks.ceilings(times)
    for phase, taken in zip(PHASES, times[name], strict=True):
        row[f"{phase} ms"] = taken.median
        row[f"{phase} times"] = taken._asdict()
    floors = {phase: floor(name, shape, phase, device, limits) for phase in PHASES}
    row |= floors["both"] | {"floors": floors} | limits.rates()
    own = [row[k] for k in ("byte floor ms", "FLOP floor ms") if row[k] is not None]
    row["of floor"] = ratio(max(own), row["both ms"])
    emit(row)
    if name in ATTENTION and device.type == "cuda":
        emit(row | {"by": f"{row['by']}: {longest_kernel(call[0])}"})


def longest_kernel(call) -> str:
    """Name of the kernel that takes most of a call's time on the GPU."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    kernels = [event for event in seen.key_averages() if event.device_type == DeviceType.CUDA]
    return max(kernels, key=lambda e: e.self_device_time_total).key[:80] if kernels else "kernel unknown"


def _training_step(made) -> tuple:
    """Forward as in training, then the gradients of every leaf: two steps that are timed apart and together."""
    forward, leaves, d_out = made
    return forward, lambda o: torch.autograd.grad(o, leaves, d_out)


def floor(name: str, shape: Shape, phase: str, device: torch.device, limits: Ceilings) -> dict:
    """Least times in ms, at this device's measured ceilings. I/O: inputs once, outputs once, whoever computes it.

    bytes: the reads and writes of chunkwise's passes; of everything else, I/O. FLOPs: chunkwise's and attention's own; of
    others None, for their algebra is not counted here.
    """
    inout = io_bytes(shape, name)[phase]
    nbytes, flops = inout, None
    if name in OURS and importlib.util.find_spec("triton"):  # whose plans say what is executed
        recompute, cut = name != "chunkwise-kept", segments(shape, device)
        costs = chunkwise_costs(shape, tiles(shape, device), recompute=recompute, segments=cut)
        nbytes, flops = costs[phase]
    elif name in ATTENTION:
        flops = attention_flops(shape)[phase]
    return {
        "I/O floor ms": limits.floor_ms(inout),
        "byte floor ms": limits.floor_ms(nbytes),
        "FLOP floor ms": None if flops is None else limits.floor_ms(0, flops),
    }


def best_of(rows: dict[str, dict], names) -> str | None:
    """Of those that ran, the fastest, forward and backward together."""
    ran = [name for name in names if rows.get(name, {}).get("both ms")]
    return min(ran, key=lambda name: rows[name]["both ms"], default=None)


def targets(tables: dict[Shape, dict[str, dict]]) -> list[dict]:
    """The project's targets for head width 64, against what was measured here."""
    found = []
    for ours, others, T, bound in TARGETS:
        for shape, rows in tables.items():
            if shape.T != T or shape.d != 64:
                continue
            mine, best = best_of(rows, ours), best_of(rows, others)
            got = ratio(mine and rows[mine]["both ms"], best and rows[best]["both ms"])
            what = f"{mine or ours[0]} over {best or ' or '.join(others)}, forward and backward, {shape}"
            found.append({"target": what, "bound": f"at most {bound}", "measured": got, "met": got and got <= bound})
    for shape, rows in tables.items():
        row = rows.get("chunkwise", {})
        got = ratio(row.get("byte floor ms"), row.get("both ms"))
        what = f"chunkwise, byte floor over time, {shape}"
        found.append(
            {"target": what, "bound": f"at least {FLOOR_TARGET}", "measured": got, "met": got and got >= FLOOR_TARGET}
        )
    return found


def parse(argv) -> argparse.Namespace:
    p = argument_parser(__doc__)
    add_arguments(p)
    p.add_argument(
        "--shapes", nargs="+", metavar="BxTxD", help=f"batch, tokens, head width (default: {' '.join(SHAPES)})"
    )
    p.add_argument("--heads", type=int, help="default 32 (CPU: 2)")
    p.add_argument("--basis", type=int, help="M, basis functions per head; default 64 (CPU: 16)")
    p.add_argument(
        "--mixers",
        nargs="+",
        metavar="NAME",
        help=f"of {', '.join(NAMES)} (default: all that are installed; on a GPU without {', '.join(SLOW)})",
    )
    p.add_argument("--rounds", type=int, help="turns of a candidate; default 20 (CPU: 3)")
    p.add_argument("--passes", action="store_true", help="time each Triton pass alone, and nothing else")
    p.add_argument("--tune", action="store_true", help="time tile sizes for each Triton pass, and nothing else")
    p.add_argument(
        "--compile-part", metavar="I/N", help=argparse.SUPPRESS
    )  # of --tune: fill Triton's cache, in parallel
    p.add_argument(
        "--once", nargs="+", metavar="PASS", help="launch these passes once, for a profiler or a sanitizer; no table"
    )
    p.add_argument("--worker", help=argparse.SUPPRESS)  # a process of _apart
    return p.parse_args(argv)


def work(args, device: torch.device, jobs: list[list], add, handle, deadline: Deadline) -> None:
    """Every case of `jobs`: on a GPU in processes of their own, which are this command with --worker."""
    if device.type != "cuda":
        _apart.inline(jobs, add, handle, left=lambda: deadline.left)
        return
    command = [sys.executable, "-m", "interdomain.tools.bench_kernels", "--device", str(device)]
    command += [flag for flag in ("--passes", "--tune") if getattr(args, flag[2:])]
    for flag, value in (("--heads", args.heads), ("--basis", args.basis), ("--rounds", args.rounds)):
        command += [flag, str(value)]
    command += ["--shapes", *args.shapes] if args.shapes else []
    _apart.run([*command, "--worker"], jobs, add, left=lambda: deadline.left)


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    device = choose_device(args.device)
    cuda = device.type == "cuda"
    deadline = Deadline(args.time_limit)
    names = choose("--mixers", args.mixers, NAMES)
    missing = {name: package for name in names if (package := absent(name))}
    if not args.mixers:
        names = [name for name in names if name not in (*SLOW, *missing)] if cuda else list(ON_CPU)
    for flag, usual, tiny in (("heads", 32, 2), ("basis", 64, 16), ("rounds", 20, 3)):
        if getattr(args, flag) is None:
            setattr(args, flag, usual if cuda else tiny)
        if getattr(args, flag) < 1:
            raise ValueError(f"--{flag} must be at least 1: got {getattr(args, flag)}.")
    texts = args.shapes or list(SHAPES if cuda else TINY)
    shapes = {text: parse_shape(text, args.heads, args.basis) for text in texts}
    if args.worker and cuda:  # long imports, while another worker measures
        for module in ("torch._dynamo", "interdomain.scan.triton_chunkwise"):
            importlib.import_module(module)
    if args.passes or args.tune or args.once:
        from . import _passes

        return _passes.run(args, device, shapes, deadline, work)

    handle = functools.partial(run_case, device=device, args=args)
    if args.worker:
        return _apart.serve(args.worker, handle)
    report = Report("kernels", args.output, device, {"mixers": names, "rounds": args.rounds, "dtype": "bfloat16"})
    report.note(
        f"Yardsticks, in turns with the row's own calls: a copy and {'a bf16' if cuda else 'an fp32'} matrix product. Floors "
        "are times at these."
    )
    if missing and not args.mixers:
        report.note(f"Not installed: {', '.join(sorted(set(missing.values())))}.")
    for shape in shapes.values():
        report.table(str(shape), COLUMNS)
    features = f"{FEATURES}, {shapes[texts[0]]}"
    report.table(features, _features.TABLE)

    def add(case, rows, problem):
        name, text = case
        if name == FEATURES:
            for row in rows or [{"features": "any", **ended(problem)}]:
                report.add(features, row)
            return
        table = str(shapes[text])
        row = {"mixer": name, **(rows[-1] if rows else {}), **ended(problem)}
        everything = {r["mixer"]: r for r in (*report.rows(table), row)}
        best = best_of(everything, ATTENTION)
        for r in everything.values():
            r["of best attention"] = ratio(r.get("both ms"), best and everything[best]["both ms"])
        report.add(table, row)

    jobs = []
    for name in names:
        if name in missing:
            for text in texts:
                add((name, text), [], f"{missing[name]} is not installed")
        else:
            jobs.append([(name, text) for text in texts])
    work(args, device, [*jobs, [(FEATURES, texts[0])]], add, handle, deadline)
    tables = {shape: {row["mixer"]: row for row in report.rows(str(shape))} for shape in shapes.values()}
    if cuda:
        report.table("targets", ["target", "bound", "measured", "met"])
        for row in targets(tables):
            report.add("targets", row)
    ran = sum("both ms" in row for rows in tables.values() for row in rows.values())
    report.finish("unfinished" if deadline.passed else "complete", f"{ran} timings")
    return 0


def run_case(case, emit, *, device: torch.device, args) -> None:
    """A row of the kernel table, or those of the input features. Raises: RuntimeError if the GPU does not survive it."""
    name, text = case
    shape = parse_shape(text, args.heads, args.basis)
    seconds = 1.0 if device.type == "cuda" else 0.05
    if name == FEATURES:
        for row in _features.bench(shape, device, args.rounds, seconds / 2):
            emit(row)
    else:
        measure(name, shape, device, args.rounds, seconds, emit)
    release(device)


if __name__ == "__main__":
    sys.exit(main())
