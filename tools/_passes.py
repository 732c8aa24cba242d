"""bench_kernels --passes and --tune: the Triton passes of `chunkwise` one at a time, at the shipped tiles and at others.

--once launches them and measures nothing, for a profiler or a sanitizer.

The passes are launched as kernels/scan/triton_chunkwise.py launches them, on tensors of the same shapes.
"""

import functools
import os
import subprocess
import sys

import torch

from interdomain.scan import triton_support

from . import _apart
from ._bench import Deadline, Report, ended, exclusive, processes, require_healthy
from ._mixers import make_problem
from ._problems import Shape, backward_passes, forward_passes, pass_costs, segment_count, tiles
from ._timing import Yardsticks, interleaved, ratio, usable

# Each group has a process of its own on a GPU.
GROUPS = (
    *(("contract", "tables"), ("adjoint_decay", "adjoint", "decay"), ("mix_expand", "mix", "mix_backward")),
    *(("expand",), ("states", "costates", "chain")),
)
PASSES = ("contract", "mix_expand", "mix", "mix_backward", "expand", "adjoint", "decay")  # that have tiles
PASS_COLUMNS = [
    *("pass", "times a step", "ms", "byte floor ms", "FLOP floor ms", "of floor", "TB/s"),
    *("copy TB/s", "product TFLOP/s", "remark"),
]
TILE_COLUMNS = ["tiles", "ms", "of shipped", "of floor", "copy TB/s", "product TFLOP/s", "shipped", "remark"]
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
FIELD = {name: name for name in TILES} | {"mix_expand": "fused", "mix_backward": "mix", "adjoint": "expand"}


class Setup:
    """Tensors of one problem, and its passes as calls for any plan."""

    def __init__(self, shape: Shape, device: torch.device, segmented: bool | None = None) -> None:
        """segmented: as if time were cut, whatever this shape asks for; None: as it asks."""
        self.shape, self.device, self.segmented = shape, device, segmented
        problem = make_problem(shape, device)
        self.q, self.k, self.v, self.log_decay, self.mixing = (x.detach() for x in problem.inputs.values())
        self.d_o = problem.d_out
        rows = (shape.B, shape.H, shape.T, 2 * shape.M)
        self.a, self.b, self.c = (torch.randn(rows, device=device).to(self.q.dtype) for _ in range(3))
        self.out = torch.empty_like(self.v)

    def calls(self, plan) -> dict:
        """The passes at these tiles; `tables`, and where time is cut `states`, `costates` and `chain` besides."""
        from interdomain.scan import triton_launch as launch

        s, device = self.shape, self.device
        span = self.span(plan)
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

    def span(self, plan):
        from interdomain.scan.triton_launch import Span

        total = -(-self.shape.T // plan.chunk)
        count = segment_count(self.shape, self.device, plan.chunk)
        if self.segmented is not None:
            count = min(2, total) if self.segmented else 1
        chunks = -(-total // count)
        return Span(self.shape.T, -(-total // chunks), chunks)

    def plan(self):
        return tiles(self.shape, self.device)


def run(args, device: torch.device, shapes: dict[str, Shape], deadline: Deadline, work) -> int:
    """What --passes, --tune and --once do, after bench_kernels has read its flags."""
    part = "tune" if args.tune else "passes"
    if args.tune and not args.shapes:
        shapes = dict([next(iter(shapes.items()))])
    if args.compile_part:
        compile_part(args.compile_part, next(iter(shapes.values())), device)
        return 0
    problem = triton_support.missing(device)
    if problem or (device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1"):
        problem = f"The passes are Triton and need a GPU: {problem or 'there is none here'}."
        if args.once:
            raise ValueError(problem)
        report = Report(part, args.output, device, {})
        report.note(problem)
        report.finish("skipped")
        return 0
    setup = functools.lru_cache(1)(lambda text: Setup(shapes[text], device))
    if args.once:
        return once(args.once, [setup(text) for text in shapes], device)

    def handle(case, emit):
        emit((time_tile if args.tune else time_pass)(setup(case[1]), *case[::2], args.rounds))

    if args.worker:
        return _apart.serve(args.worker, handle)
    report = Report(part, args.output, device, {"rounds": args.rounds, "dtype": "bfloat16"})
    if args.tune and device.type == "cuda":
        compile_apart(args, deadline)
    jobs, add = (tune_jobs if args.tune else pass_jobs)(report, shapes, device)
    work(args, device, jobs, add, handle, deadline)
    report.finish("unfinished" if deadline.passed else "complete")
    return 0


def once(names: list[str], setups: list[Setup], device: torch.device) -> int:
    """Launch passes once each, for a profiler or a sanitizer that watches this process. Raises: ValueError."""
    for setup in setups:
        calls = setup.calls(setup.plan())
        if unknown := [name for name in names if name not in calls and name != "all"]:
            raise ValueError(f"--once {', '.join(unknown)}: unknown; allowed: all, {', '.join(calls)}.")
        for name in calls if "all" in names else names:
            calls[name]()
            if device.type == "cuda":
                torch.cuda.synchronize()
            print(f"launched {name}, {setup.shape}", flush=True)
    return 0


def pass_names(shape: Shape, device: torch.device) -> list[str]:
    """What `Setup.calls` has for this shape, found without a tensor: another process makes them."""
    plan = tiles(shape, device)
    left_out = {"mix_expand": not plan.fused, "adjoint_decay": not plan.joined}
    left_out |= dict.fromkeys(GROUPS[-1], segment_count(shape, device, plan.chunk) == 1)
    return [name for group in GROUPS for name in group if not left_out.get(name)]


def pass_jobs(report: Report, shapes: dict[str, Shape], device: torch.device):
    """(cases (pass, shape) by group, what to do with the row of one)."""
    names = {text: pass_names(shape, device) for text, shape in shapes.items()}
    for shape in shapes.values():
        report.table(str(shape), PASS_COLUMNS)

    def add(case, rows, problem):
        one, text = case
        shape, table = shapes[text], str(shapes[text])
        plan = tiles(shape, device)
        # recompute=True: the backward runs contract of the forward again. What is 0 times there is no part of this plan.
        step = (*forward_passes(plan), *backward_passes(plan), "contract")
        count = {"tables": 2, "states": 2, "costates": 1, "chain": 3}.get(one, step.count(one))
        report.add(table, {"pass": one, "times a step": count, **(rows[-1] if rows else {}), **ended(problem)})
        taken = report.rows(table)
        if len(taken) == len(names[text]):
            whole = all(row.get("ms") for row in taken)
            report.add(table, {
                "pass": "all of a step",
                "ms": sum(row["ms"] * row["times a step"] for row in taken) if whole else None,
                "remark": "forward and backward, recompute=True" if whole else "not all passes ran",
            })  # fmt: skip

    return [[(one, text) for text in shapes for one in group if one in names[text]] for group in GROUPS], add


def time_pass(setup: Setup, one: str, rounds: int) -> dict:
    plan = setup.plan()
    return _time(setup, one, lambda: setup.calls(plan)[one], plan, rounds, 0.5)


def tune_jobs(report: Report, shapes: dict[str, Shape], device: torch.device):
    """(cases (pass, shape, number of the tiles) by pass, what to do with the row of one: best first)."""
    jobs, plans = [], {}
    for text, shape in shapes.items():
        shipped = tiles(shape, device)
        for one in PASSES:
            if getattr(shipped, FIELD[one]) is not None:
                report.table(f"{one}, {shape}", TILE_COLUMNS)
                plans[one, text] = alternatives(shipped, one)
                jobs.append([(one, text, i) for i in range(len(plans[one, text]))])

    def add(case, rows, problem):
        one, text, i = case
        table = f"{one}, {shapes[text]}"
        shipped, plan = tiles(shapes[text], device), plans[one, text][i]
        row = {"tiles": label(plan, one), **(rows[-1] if rows else {}), **ended(problem)}
        report.add(table, row | {"shipped": label(plan, one) == label(shipped, one)})
        taken = report.rows(table)
        base = next((r.get("ms") for r in taken if r["shipped"]), None)
        for r in taken:
            r["of shipped"] = ratio(r.get("ms"), base)
        taken.sort(key=lambda r: r.get("ms") or float("inf"))
        report.write()

    return jobs, add


def time_tile(setup: Setup, one: str, i: int, rounds: int) -> dict:
    plan = alternatives(setup.plan(), one)[i]
    return _time(setup, one, lambda: setup.calls(plan)[one], plan, rounds, 0.2)


def _time(setup: Setup, one: str, call, plan, rounds: int, seconds: float) -> dict:
    """ms of a call beside its floors, in turns with the yardsticks. Raises: RuntimeError if the GPU does not survive it."""
    made = []

    def prepared():  # tables, too, may fail at a plan
        if not made:
            made.append(call())
        return made[0]()

    good, bad = usable({one: prepared}, setup.device)
    if bad:
        require_healthy(setup.device, one)
        return {"remark": bad[one]}
    yardsticks = Yardsticks(setup.device)
    times = interleaved(good | yardsticks.calls, setup.device, rounds=rounds, seconds=seconds)
    limits, ms = yardsticks.ceilings(times), times[one][-1].median
    row = {"ms": ms, "times": times[one][-1]._asdict(), **limits.rates()}
    costs = pass_costs(setup.shape, plan)
    if one in costs:
        nbytes, flops = costs[one]
        row |= {"byte floor ms": limits.floor_ms(nbytes), "FLOP floor ms": limits.floor_ms(0, flops)}
        row |= {"of floor": ratio(limits.floor_ms(nbytes, flops), ms), "TB/s": nbytes / ms / 1e9}
    return row


def alternatives(plan, one: str) -> list:
    """The plan itself, then those with other tiles of this pass."""
    field = FIELD[one]
    other = [plan._replace(chunk=chunk, **{field: tile}) for chunk in CHUNKS for tile in TILES[field]]
    return [plan, *(p for p in other if label(p, one) != label(plan, one))]


def label(plan, one: str) -> str:
    numbers, warps, stages = getattr(plan, FIELD[one])
    return f"chunk {plan.chunk}, {numbers} numbers, {warps} warps, {stages} stages"


def compile_apart(args, deadline: Deadline) -> None:
    """Fill Triton's cache from several processes at once, each with its part of the list."""
    if exclusive():  # the GPU is this process's
        return
    jobs = processes(torch.device("cuda"))
    command = [sys.executable, "-m", "interdomain.tools.bench_kernels", "--tune", "--device", args.device]
    for flag, values in (("--shapes", args.shapes), ("--heads", args.heads), ("--basis", args.basis)):
        if values:
            command += [flag, *map(str, values if isinstance(values, list) else [values])]
    parts = [subprocess.Popen([*command, "--compile-part", f"{i}/{jobs}"]) for i in range(jobs)]
    for part in parts:
        try:
            part.wait(timeout=max(1.0, deadline.left))
        except subprocess.TimeoutExpired:
            part.kill()
            part.wait()


def compile_part(text: str, shape: Shape, device: torch.device) -> None:
    """Run every n-th configuration once, on a short problem that compiles to the same kernels. What fails fails again later."""
    i, n = map(int, text.split("/"))
    setup = Setup(Shape(2, 256, 2, shape.d, shape.M), device, segment_count(shape, device) > 1)
    every = [(one, plan) for one in PASSES for plan in alternatives(setup.plan(), one)]
    for one, plan in every[i::n]:
        usable({one: lambda one=one, plan=plan: setup.calls(plan)[one]()}, device)
