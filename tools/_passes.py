"""bench_kernels --passes and --tune: the Triton passes of `chunkwise` one at a time, at the shipped tiles and at others.

--once launches them and measures nothing, for a profiler or a sanitizer. The passes are launched as
kernels/scan/triton_chunkwise.py launches them, on tensors of the same shapes.
"""

import argparse
import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from interdomain.scan import triton_support

from . import _apart, _bench
from ._mixers import make_problem
from ._problems import Shape, pass_costs, segment_count, step_passes, tiles
from ._timing import Yardsticks, ratio, usable

if TYPE_CHECKING:
    from interdomain.scan.triton_plan import Plan  # Triton need not be there

# Each group has a process of its own on a GPU.
GROUPS = (
    *(("contract", "tables"), ("adjoint_decay", "adjoint", "decay"), ("mix_expand", "mix", "mix_backward")),
    *(("expand",), ("states", "costates", "chain")),
)
COLUMNS = ["ms", "byte floor ms", "FLOP floor ms", "of floor", "TB/s", "copy TB/s", "product TFLOP/s", "remark"]
CHUNKS = (32, 64)
# Field of Plan: (state numbers of a program, warps, stages) to try, at either chunk length. `expand` serves adjoint too. Eight
# warps are not among them: kernels/README.md says what they may do on Hopper.
TILES = {
    "contract": [(8192, 4, 1), (8192, 4, 2), (8192, 4, 3), (4096, 4, 2), (4096, 4, 3)],
    "mix": [(16384, 4, 1), (16384, 4, 2), (8192, 4, 1), (8192, 4, 2), (8192, 4, 3)],
    "fused": [(4096, 4, 1), (4096, 4, 2), (4096, 4, 3), (8192, 4, 2)],
    "expand": [(8192, 4, 1), (8192, 4, 2), (8192, 4, 3), (4096, 4, 2), (4096, 4, 3)],
    "decay": [(4096, 4, 1), (4096, 4, 2), (4096, 4, 3), (2048, 4, 2)],
}
FIELD = {  # of the passes that have tiles
    **{name: name for name in ("contract", "mix", "expand", "decay")},
    **{"mix_expand": "fused", "mix_backward": "mix", "adjoint": "expand"},
}
NOT_THERE = "no part of this plan"


class Setup:
    """Tensors of one problem, and its passes as calls for any plan."""

    @staticmethod
    @functools.lru_cache(1)
    def of(shape: Shape, device: torch.device) -> "Setup":
        return Setup(shape, device)

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        problem = make_problem(shape, device)
        self.q, self.k, self.v, self.log_decay, self.mixing = (x.detach() for x in problem.inputs.values())
        self.d_o = problem.d_out
        rows = (shape.B, shape.H, shape.T, 2 * shape.M)
        self.a, self.b, self.c = (torch.randn(rows, device=device).to(self.q.dtype) for _ in range(3))
        self.out = torch.empty_like(self.v)

    def calls(self, plan: "Plan") -> dict[str, Callable]:
        """The passes at these tiles; `tables`, and where time is cut `states`, `costates` and `chain` besides."""
        from interdomain.scan import triton_launch as launch

        s, device = self.shape, self.device
        total = -(-s.T // plan.chunk)
        chunks = -(-total // segment_count(s, device, plan.chunk))
        span = launch.Span(s.T, -(-total // chunks), chunks)
        tab = launch.Tables.build(self.log_decay, plan, span)
        keys, values = (0, 2 * s.d), (s.d, 2 * s.d)
        states = None
        if span.segments > 1:
            states = torch.randn(s.B, s.H, span.segments, s.M, 2 * s.d, 2, device=device)
        q, k, v, d_o, b, out = self.q, self.k, self.v, self.d_o, self.b, self.out
        calls = {
            "tables": lambda: launch.Tables.build(self.log_decay, plan),
            "contract": lambda: launch.contract(plan, tab, span, q, k, states, keys),
            "mix": lambda: launch.mix(plan, tab, self.a, self.mixing),
            "mix_backward": lambda: launch.mix_backward(plan, tab, self.a, self.c, self.mixing),
            "expand": lambda: launch.expand(plan, tab, span, b, v, states, values, out),
            "adjoint": lambda: launch.adjoint(plan, tab, span, b, d_o, states, values, s.H, out),
            "decay": lambda: launch.adjoint(plan, tab, span, b, d_o, states, values, s.H, v=v, state=states),
        }
        if plan.joined:
            calls["adjoint_decay"] = lambda: launch.adjoint(
                plan, tab, span, b, d_o, states, values, s.H, out, v=v, state=states
            )
        if plan.fused:
            calls["mix_expand"] = lambda: launch.expand(
                plan, tab, span, self.a, v, states, values, out, mixing=self.mixing
            )
        if states is None:
            return calls
        local = torch.empty_like(states)

        def sweep():
            for x, channels in ((k, keys), (v, values)):
                launch.expand(plan, tab, span, None, x, None, channels, None, local)

        def back():
            for x, channels in ((q, keys), (d_o, values)):
                launch.adjoint(plan, tab, span, b, x, None, channels, s.H, None, local)

        def chain():
            return launch.chain(tab, states, None, span, plan.chunk)

        return calls | {"states": sweep, "costates": back, "chain": chain}


def run(args: argparse.Namespace, device: torch.device, shapes: dict[str, Shape], deadline: _bench.Deadline) -> int:
    """What --passes, --tune and --once do, after bench_kernels has read its flags."""
    part = "tune" if args.tune else "passes"
    problem = triton_support.missing(device)
    if problem or (device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1"):
        problem = f"The passes are Triton and need a GPU: {problem or 'there is none here'}."
        if args.once:
            raise ValueError(problem)
        report = _bench.Report(part, args.output, device, {})
        report.note(problem)
        report.finish("skipped")
        return 0
    if args.once:
        return once(args.once, list(shapes.values()), device)
    report = _bench.Report(part, args.output, device, {"rounds": args.rounds, "dtype": "bfloat16"})
    texts = list(shapes) if args.shapes or not args.tune else list(shapes)[:1]
    jobs, add = (tune_jobs if args.tune else pass_jobs)(report, {text: shapes[text] for text in texts}, device)
    if args.tune and device.type == "cuda" and (workers := _bench.processes()) > 1:
        # Fill Triton's cache from several processes first: most of the time is compilation.
        handle = functools.partial(run_case, device=device, shapes=shapes, rounds=0)
        _bench.work(device, jobs, lambda case, rows, problem: None, handle, deadline, workers=workers)
    handle = functools.partial(run_case, device=device, shapes=shapes, rounds=args.rounds)
    _bench.work(device, jobs, add, handle, deadline)
    for table in report.contents["tables"] if args.passes else ():
        step = [row for row in report.rows(table) if row["times a step"] and row.get("remark") != NOT_THERE]
        ran = all(row.get("ms") for row in step)
        total = sum(row["ms"] * row["times a step"] for row in step) if ran else None
        report.add(table, {"pass": "all of a step", "ms": total, "remark": "" if ran else "not all passes ran"})
    report.finish("unfinished" if deadline.passed else "complete")
    return 0


def run_case(
    case: tuple[str, str, int], emit: _apart.Emit, *, device: torch.device, shapes: dict[str, Shape], rounds: int
) -> None:
    """The row of a pass at the tiles with this number."""
    one, text, i = case
    plan = tiles(shapes[text], device)
    emit(measure(Setup.of(shapes[text], device), one, alternatives(plan, one)[i] if i else plan, rounds))


def once(names: list[str], shapes: list[Shape], device: torch.device) -> int:
    """Launch passes once each, for a profiler or a sanitizer that watches this process. Raises: ValueError."""
    for shape in shapes:
        calls = Setup(shape, device).calls(tiles(shape, device))
        for name in calls if "all" in names else _bench.choose("--once", names, calls):
            calls[name]()
            if device.type == "cuda":
                torch.cuda.synchronize()
            print(f"launched {name}, {shape}", flush=True)
    return 0


def pass_jobs(report: _bench.Report, shapes: dict[str, Shape], device: torch.device) -> tuple[list, _apart.Add]:
    """(cases (pass, shape, 0) by group, what to do with the row of one)."""
    for shape in shapes.values():
        report.table(str(shape), ["pass", "times a step", *COLUMNS])

    def add(case, rows, problem):
        one, text, _ = case
        passes = sum(step_passes(tiles(shapes[text], device), cut=True).values(), ())
        count = {"tables": 2, "chain": 3}.get(one, passes.count(one))  # 0: no part of this plan
        row = {"pass": one, "times a step": count, **(rows[-1] if rows else {}), **_bench.ended(problem)}
        report.add(str(shapes[text]), row)

    return [[(one, text, 0) for text in shapes for one in group] for group in GROUPS], add


def tune_jobs(report: _bench.Report, shapes: dict[str, Shape], device: torch.device) -> tuple[list, _apart.Add]:
    """(cases (pass, shape, number of the tiles) by pass, what to do with the row of one: best first)."""
    plans = {}
    for text, shape in shapes.items():
        for one in (one for one in FIELD if getattr(tiles(shape, device), FIELD[one]) is not None):
            report.table(f"{one}, {shape}", ["tiles", "shipped", "of shipped", *COLUMNS])
            plans[one, text] = alternatives(tiles(shape, device), one)

    def add(case, rows, problem):
        one, text, i = case
        row = {"tiles": label(plans[one, text][i], one), "shipped": not i}
        report.add(f"{one}, {shapes[text]}", row | (rows[-1] if rows else {}) | _bench.ended(problem))
        taken = report.rows(f"{one}, {shapes[text]}")
        shipped = next((r.get("ms") for r in taken if r["shipped"]), None)
        for r in taken:
            r["of shipped"] = ratio(r.get("ms"), shipped)
        taken.sort(key=lambda r: r.get("ms") or float("inf"))
        report.write()

    return [[(one, text, i) for i in range(len(found))] for (one, text), found in plans.items()], add


def measure(setup: Setup, one: str, plan: "Plan", rounds: int) -> dict:
    """ms of a pass beside its floors, in turns with the yardsticks; rounds = 0: only compile it.

    Raises: RuntimeError if the GPU does not survive it.
    """
    made = []

    def call():  # tables, too, may fail at a plan
        if not made:
            made.append(setup.calls(plan).get(one))
        return made[0] and made[0]()

    good, bad = usable({one: call}, setup.device)
    if bad or not rounds or not made[0]:
        return {"remark": bad.get(one, NOT_THERE)}
    times, limits = Yardsticks(setup.device).beside(good, rounds=rounds, seconds=0.5)
    ms = times[one][-1].median
    row = {"ms": ms, "times": times[one][-1]._asdict(), **limits.rates()}
    if costs := pass_costs(setup.shape, plan).get(one):
        nbytes, flops = costs
        row |= {"byte floor ms": limits.floor_ms(nbytes), "FLOP floor ms": limits.floor_ms(0, flops)}
        row |= {"of floor": ratio(limits.floor_ms(nbytes, flops), ms), "TB/s": nbytes / ms / 1e9}
    return row


def alternatives(plan: "Plan", one: str) -> list["Plan"]:
    """The plan itself, then those with other tiles of this pass."""
    field = FIELD[one]
    other = [plan._replace(chunk=chunk, **{field: tile}) for chunk in CHUNKS for tile in TILES[field]]
    return [plan, *(p for p in other if label(p, one) != label(plan, one))]


def label(plan: "Plan", one: str) -> str:
    numbers, warps, stages = getattr(plan, FIELD[one])
    return f"chunk {plan.chunk}, {numbers} numbers, {warps} warps, {stages} stages"
