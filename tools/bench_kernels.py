"""python -m interdomain.tools.bench_kernels --out benchmarks/results/today

Time the mixer core alone, forward and backward: ours by backend, PyTorch's attention, and FlashAttention's packages,
flash-linear-attention or mamba_ssm where installed, on the same inputs in turns of one process, beside the least that each
must cost in bytes and FLOPs. --passes times each Triton pass alone; --tune times a fixed list of tile sizes for each.
Without a GPU: tiny and labelled.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile

import torch

from . import _features
from ._bench import Deadline, Report, add_arguments, choose, choose_device, reason
from ._cli import user_errors
from ._mixers import ATTENTION, NAMES, ON_CPU, TUNED, candidates, installed, make_problem
from ._problems import Shape, attention_flops, chunkwise_costs, io_bytes, segments
from ._timing import Ceilings, ceilings, host_ms, interleaved, peak_memory, ratio, release, usable

SHAPES = ("8x4096x64", "2x16384x64", "1x32768x64", "8x4096x96")
TINY = ("2x128x16", "1x256x24")
PHASES = ("forward", "backward", "both")
COLUMNS = [
    *(
        "mixer",
        "forward ms",
        "backward ms",
        "both ms",
        "of best attention",
        "I/O floor ms",
        "byte floor ms",
        "FLOP floor ms",
    ),
    *("of floor", "host ms", "peak MiB", "remark"),
]
TARGETS = (  # what, over what (the best of these), at which T, at most
    ("chunkwise", ATTENTION, 4096, 0.4),
    ("chunkwise", ATTENTION, 16384, 0.12),
    ("chunkwise", ("fla-gla",), 4096, 0.6),
    ("chunkwise", ("fla-gated-delta",), 4096, 0.6),
)
FLOOR_TARGET = 0.6  # of the byte floor, at least
TURNS = 5  # of a call at least, after those that warm up and measure its memory
TUNING = 0.4  # of the time that is left, at most, for others' kernels to tune themselves


def parse_shape(text: str, heads: int, basis: int) -> Shape:
    """BxTxd. Raises: ValueError."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if not found:
        raise ValueError(f"--shapes {text}: expected BATCHxTOKENSxHEAD_DIM, such as {SHAPES[0]}.")
    B, T, d = map(int, found.groups())
    return Shape(B, T, heads, d, basis)


def tune_apart(names, texts: list[str], shapes: list[Shape], deadline: Deadline) -> dict[Shape, dict[str, str]]:
    """Others' kernels tune themselves when they are first called, over hundreds of variants: in a process of their own that can
    be ended, and whose choices are kept on the disk. -> {shape: {mixer that was not done with it: why}}."""
    names = [name for name in names if name in TUNED and installed(name)]
    if not names:
        return {}
    os.environ["TRITON_CACHE_AUTOTUNING"] = "1"
    command = [sys.executable, "-m", "interdomain.tools.bench_kernels", "--tune-peers", "--device", "cuda"]
    command += ["--heads", str(shapes[0].H), "--basis", str(shapes[0].M), "--mixers", *names, "--shapes", *texts]
    seconds = TUNING * deadline.left
    with tempfile.TemporaryFile("w+") as said:
        try:
            status = subprocess.run(command, stdout=said, timeout=seconds).returncode
            why = f"the process in which it was tuned ended with status {status}"
        except subprocess.TimeoutExpired:
            why = f"it had not tuned itself within {seconds:.0f} s; --mixers and --time-limit give it longer"
        said.seek(0)
        done = set(said.read().splitlines())
    return {s: {name: f"not run: {why}" for name in names if f"{name} {s}" not in done} for s in shapes}


def tune_peers(names, shapes: list[Shape], device) -> None:
    """What `tune_apart` starts: a line for each that is done, with or without success."""
    for name in names:
        for shape in shapes:
            measure([name], shape, device, Ceilings(1.0, 1.0), Deadline(600), rounds=1, seconds=0.0)
            print(f"{name} {shape}", flush=True)


def measure(
    names,
    shape: Shape,
    device,
    limits: Ceilings,
    deadline: Deadline,
    rounds: int,
    seconds: float,
    without: dict[str, str] | None = None,
) -> list[dict]:
    """Rows of the kernel table, in the order of `names`; one that cannot run, or is among those `without`, says why in
    `remark`."""
    problem = make_problem(shape, device)
    without = without or {}
    builders, remarks = candidates([name for name in names if name not in without], problem)
    remarks |= without
    calls, besides = {}, {}
    for name, build in builders.items():
        try:
            call = _training_step(build())
        except Exception as e:
            remarks[name] = reason(e)
            continue
        good, bad = usable({name: call}, device, passed=lambda: deadline.passed)
        remarks |= bad
        if good:
            before = deadline.left
            besides[name] = {"peak MiB": peak_memory(call, device)}
            once = before - deadline.left
            if TURNS * once > deadline.left:  # it would take the others' time, too
                remarks[name] = f"not timed: a call takes {once:.2g} s, of {max(0, deadline.left):.2g} s that are left"
            else:
                calls |= good
                besides[name]["host ms"] = host_ms(call, device)
            release(device)
    # Near the end of the time, few turns and a table rather than none.
    seconds = min(seconds, max(0.05, deadline.left / (2 * len(calls) or 1)))
    times = interleaved(calls, device, rounds=rounds, seconds=seconds)
    rows = {name: _row(name, shape, device, limits, times.get(name), besides, remarks) for name in names}
    best = best_of(rows, ATTENTION)
    for row in rows.values():
        row["of best attention"] = ratio(row.get("both ms"), best and rows[best]["both ms"])
    release(device)
    return list(rows.values())


def _training_step(candidate) -> tuple:
    """Forward as in training, then the gradients of every leaf: two steps that are timed apart and together."""
    forward, leaves, d_out = candidate
    return forward, lambda o: torch.autograd.grad(o, leaves, d_out)


def _row(name, shape, device, limits, times, besides, remarks) -> dict:
    row = {"mixer": name, **besides.get(name, {}), "remark": remarks.get(name)}
    if times is None:
        return row
    for phase, taken in zip(PHASES, times, strict=True):
        row[f"{phase} ms"] = taken.median
        row[f"{phase} times"] = taken._asdict()
    floors = {phase: floor(name, shape, phase, device, limits) for phase in PHASES}
    row |= floors["both"]
    row["floors"] = floors
    own = [row[k] for k in ("byte floor ms", "FLOP floor ms") if row[k] is not None]
    row["of floor"] = ratio(max(own), row["both ms"])
    return row


def floor(name: str, shape: Shape, phase: str, device: torch.device, limits: Ceilings) -> dict:
    """Least times in ms, at this device's measured ceilings. I/O: inputs once, outputs once, whoever computes it.

    bytes: the reads and writes of chunkwise's passes; of everything else, I/O. FLOPs: chunkwise's and attention's own; of
    others None, for their algebra is not counted here.
    """
    inout = io_bytes(shape, name)[phase]
    nbytes, flops = inout, None
    if name in ("chunkwise", "chunkwise-kept"):
        costs = chunkwise_costs(shape, recompute=name == "chunkwise", segments=segments(shape, device))
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
            best = best_of(rows, others)
            got = ratio(rows.get(ours, {}).get("both ms"), best and rows[best]["both ms"])
            what = f"{ours} over {best or ' or '.join(others)}, forward and backward, {shape}"
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
    p = argparse.ArgumentParser(
        prog="python -m interdomain.tools.bench_kernels", description=__doc__.split("\n\n")[1], allow_abbrev=False
    )
    add_arguments(p)
    p.add_argument(
        "--shapes", nargs="+", metavar="BxTxD", help=f"batch, tokens, head width (default: {' '.join(SHAPES)})"
    )
    p.add_argument("--heads", type=int, help="default 32 (CPU: 2)")
    p.add_argument("--basis", type=int, help="M, basis functions per head; default 64 (CPU: 16)")
    p.add_argument("--mixers", nargs="+", metavar="NAME", help=f"of {', '.join(NAMES)} (default: all)")
    p.add_argument("--rounds", type=int, help="turns of a candidate; default 20 (CPU: 3)")
    p.add_argument("--passes", action="store_true", help="time each Triton pass alone, and nothing else")
    p.add_argument("--tune", action="store_true", help="time tile sizes for each Triton pass, and nothing else")
    p.add_argument(
        "--compile-part", metavar="I/N", help=argparse.SUPPRESS
    )  # of --tune: fill Triton's cache, in parallel
    p.add_argument("--tune-peers", action="store_true", help=argparse.SUPPRESS)  # a process of `tune_apart`
    return p.parse_args(argv)


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    device = choose_device(args.device)
    cuda = device.type == "cuda"
    deadline = Deadline(args.time_limit)
    names = choose("--mixers", args.mixers, NAMES)
    if not cuda and not args.mixers:
        names = list(ON_CPU)
    heads, basis, rounds = (
        given if given is not None else usual if cuda else tiny
        for given, usual, tiny in ((args.heads, 32, 2), (args.basis, 64, 16), (args.rounds, 20, 3))
    )
    for flag, value in (("--heads", heads), ("--basis", basis), ("--rounds", rounds)):
        if value < 1:
            raise ValueError(f"{flag} must be at least 1: got {value}.")
    shapes = [parse_shape(text, heads, basis) for text in args.shapes or (SHAPES if cuda else TINY)]
    if args.passes or args.tune:
        from . import _passes

        return _passes.run(args, device, shapes, rounds, deadline)

    if args.tune_peers:
        tune_peers(names, shapes, device)
        return 0

    report = Report("kernels", args.out, device, {"mixers": names, "rounds": rounds, "dtype": "bfloat16"})
    # Before this process uses the GPU, which may take one at a time.
    untuned = tune_apart(names, args.shapes or SHAPES, shapes, deadline) if cuda else {}
    limits = ceilings(device)
    report.contents["ceilings"] = limits._asdict()
    report.note(f"Measured ceilings: copy {limits.bandwidth / 1e12:.3g} TB/s read and written, {_product(cuda)} "
                f"{limits.flops / 1e12:.3g} TFLOP/s. Floors are times at these.")  # fmt: skip
    tables = {}
    for shape in shapes:
        report.table(str(shape), COLUMNS)
        if deadline.passed:
            report.note(f"{shape}: not run: time limit")
            continue
        # Each shape has its share, and the features a tenth: the slowest mixers of one do not take the next one's time.
        share = Deadline(max(1.0, 0.9 * deadline.left / (len(shapes) - len(tables))))
        seconds = 1.0 if cuda else 0.05
        rows = measure(names, shape, device, limits, share, rounds, seconds, untuned.get(shape))
        for row in rows:
            report.add(str(shape), row)
        tables[shape] = {row["mixer"]: row for row in rows}
    if not deadline.passed:
        _features.bench(report, shapes[0], device, limits, rounds, seconds=0.5 if cuda else 0.05)
    if cuda:
        report.table("targets", ["target", "bound", "measured", "met"])
        for row in targets(tables):
            report.add("targets", row)
    ran = sum("both ms" in row for rows in tables.values() for row in rows.values())
    report.finish("unfinished" if deadline.passed else "complete", f"{ran} timings")
    return 0


def _product(cuda: bool) -> str:
    return "bf16 matrix product" if cuda else "fp32 matrix product"


if __name__ == "__main__":
    sys.exit(main())
