"""bench_kernels --passes: the Triton passes of `chunkwise` one at a time; --once launches them and measures nothing.

The passes are launched as kernels/scan/triton_chunkwise.py launches them, on tensors of the same shapes.
"""

import argparse
import functools
import os
from collections.abc import Callable

import torch

from interdomain.scan import triton_support

from . import _apart, _bench
from ._mixers import make_problem
from ._problems import Shape, pass_costs
from ._timing import interleaved, ratio, roofline_ms, usable

# Each group has a process of its own on a GPU.
GROUPS = (
    *(("contract", "tables"), ("adjoint_decay", "adjoint", "decay"), ("mix_expand", "mix", "mix_backward")),
    *(("expand",), ("states", "costates", "chain")),
)
COLUMNS = ["pass", "times a step", "ms", "TB/s", "roofline ms", "of roofline", "remark"]
NOT_THERE = "no part of this plan"


def plan_of(shape: Shape, device: torch.device):
    """The `Plan` that bf16 inputs of this shape get on this device."""
    from interdomain.scan.triton_plan import make_plan  # Triton need not be there

    return make_plan(device, torch.bfloat16, shape.M, shape.d, None)


@functools.lru_cache(1)
def make_calls(shape: Shape, device: torch.device) -> dict[str, Callable]:
    """The passes of the plan, `tables`, and where time is cut into segments `states`, `costates` and `chain` besides."""
    from interdomain.scan import triton_chunkwise
    from interdomain.scan import triton_launch as launch

    plan, problem = plan_of(shape, device), make_problem(shape, device)
    q, k, v, log_decay, mixing = (x.detach() for x in problem.inputs.values())
    d_o, out = problem.d_out, torch.empty_like(v)
    rows = (shape.B, shape.H, shape.T, 2 * shape.M)
    a, b, c = (torch.randn(rows, device=device).to(q.dtype) for _ in range(3))
    total = -(-shape.T // plan.chunk)
    chunks = -(-total // triton_chunkwise.segment_count(shape.B * shape.H, total, device))
    span = launch.Span(shape.T, -(-total // chunks), chunks)
    tab = launch.Tables.build(log_decay, plan, span)
    keys, values = (0, 2 * shape.d), (shape.d, 2 * shape.d)
    states = None
    if span.segments > 1:
        states = torch.randn(shape.B, shape.H, span.segments, shape.M, 2 * shape.d, 2, device=device)
    adjoint = functools.partial(launch.adjoint, plan, tab, span, b, d_o, states, values, shape.H)
    calls = {
        "tables": lambda: launch.Tables.build(log_decay, plan),
        "contract": lambda: launch.contract(plan, tab, span, q, k, states, keys),
        "mix_backward": lambda: launch.mix_backward(plan, tab, a, c, mixing),
        "expand": lambda: launch.expand(plan, tab, span, b, v, states, values, out),
    }
    if plan.fused:
        calls["mix_expand"] = lambda: launch.expand(plan, tab, span, a, v, states, values, out, mixing=mixing)
    else:
        calls["mix"] = lambda: launch.mix(plan, tab, a, mixing)
    if plan.joined:
        calls["adjoint_decay"] = lambda: adjoint(out, v=v, state=states)
    else:
        calls |= {"adjoint": lambda: adjoint(out), "decay": lambda: adjoint(v=v, state=states)}
    if states is None:
        return calls
    local = torch.empty_like(states)

    def sweep():
        for x, channels in ((k, keys), (v, values)):
            launch.expand(plan, tab, span, None, x, None, channels, None, local)

    def back():
        for x, channels in ((q, keys), (d_o, values)):
            launch.adjoint(plan, tab, span, b, x, None, channels, shape.H, None, local)

    chain = functools.partial(launch.chain, tab, states, None, span, plan.chunk)
    return calls | {"states": sweep, "costates": back, "chain": chain}


def times_a_step(plan) -> dict[str, int]:
    """How often a training step launches each pass; the backward repeats contract (`recompute`)."""
    counts = {"tables": 2, "contract": 3, "mix_backward": 1, "states": 2, "costates": 1, "chain": 3}
    counts |= {"mix_expand": 1, "expand": 1} if plan.fused else {"mix": 1, "expand": 2}
    return counts | ({"adjoint_decay": 2} if plan.joined else {"adjoint": 2, "decay": 2})


def run(args: argparse.Namespace, device: torch.device, shapes: dict[str, Shape], deadline: _bench.Deadline) -> int:
    """What --passes and --once do, after bench_kernels has read its flags."""
    problem = triton_support.missing(device)
    if problem or (device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1"):
        problem = f"The passes are Triton and need a GPU: {problem or 'there is none here'}."
        if args.once:
            raise ValueError(problem)
        report = _bench.Report("passes", args.output, device, {})
        report.note(problem)
        report.finish("skipped")
        return 0
    if args.once:
        return once(args.once, list(shapes.values()), device)
    report = _bench.Report("passes", args.output, device, {"rounds": args.rounds, "dtype": "bfloat16"})
    for shape in shapes.values():
        report.table(str(shape), COLUMNS)

    def add(case, rows, problem):
        one, text = case
        counts = times_a_step(plan_of(shapes[text], device))
        row = {"pass": one, "times a step": counts.get(one, 0), **(rows[-1] if rows else {}), **_bench.ended(problem)}
        report.add(str(shapes[text]), row)

    jobs = [[(one, text) for text in shapes for one in group] for group in GROUPS]
    handle = functools.partial(run_case, device=device, shapes=shapes, rounds=args.rounds)
    _bench.work(device, jobs, add, handle, deadline)
    for shape in shapes.values():
        step = [row for row in report.rows(str(shape)) if row.get("remark") != NOT_THERE]
        ran = all(row.get("ms") for row in step)
        total = sum(row["ms"] * row["times a step"] for row in step) if ran else None
        report.add(str(shape), {"pass": "all of a step", "ms": total, "remark": "" if ran else "not all passes ran"})
    report.finish("unfinished" if deadline.passed else "complete")
    return 0


def run_case(
    case: tuple[str, str], emit: _apart.Emit, *, device: torch.device, shapes: dict[str, Shape], rounds: int
) -> None:
    """The row of a pass. Raises: RuntimeError if the GPU does not survive it."""
    one, text = case
    try:
        calls = make_calls(shapes[text], device)
    except Exception as e:  # tables, too, are launched
        emit({"remark": _bench.reason(e)})
        _bench.require_healthy(device, one)
        return
    good, bad = usable({one: calls[one]} if one in calls else {}, device)
    if not good:
        emit({"remark": bad.get(one, NOT_THERE)})
        return
    taken = interleaved(good, device, rounds=rounds, seconds=0.5)[one][-1]
    row = {"ms": taken.median, "times": taken._asdict()}
    if costs := pass_costs(shapes[text]).get(one):
        least = roofline_ms(device, *costs)
        row |= {"TB/s": costs[0] / taken.median / 1e9, "roofline ms": least, "of roofline": ratio(least, taken.median)}
    emit(row)


def once(names: list[str], shapes: list[Shape], device: torch.device) -> int:
    """Launch passes once each, for a profiler or a sanitizer that watches this process. Raises: ValueError."""
    for shape in shapes:
        calls = make_calls(shape, device)
        for name in calls if "all" in names else _bench.choose("--once", names, calls):
            calls[name]()
            if device.type == "cuda":
                torch.cuda.synchronize()
            print(f"launched {name}, {shape}", flush=True)
    return 0
