"""bench_kernels --passes and --tune: the Triton passes of `chunkwise` one at a time, at the shipped tiles and at others.

The passes are launched as kernels/scan/triton_chunkwise.py launches them, on tensors of the same shapes.
"""

import os
import subprocess
import sys

import torch

from interdomain.scan import triton_support

from ._bench import Deadline, Report, exclusive, processes
from ._mixers import make_problem
from ._problems import Shape, backward_passes, forward_passes, pass_costs, segments
from ._timing import Ceilings, ceilings, interleaved, ratio, release, usable

PASSES = ("contract", "mix_expand", "mix", "mix_backward", "expand", "adjoint", "decay")
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
            "decay": lambda: launch.decay(plan, tab, span, b, d_o, v, states, states, values),
        }
        if plan.joined:
            calls["adjoint_decay"] = lambda: launch.adjoint_decay(
                plan, tab, span, b, d_o, v, states, states, values, out
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
        from interdomain.scan.triton_chunkwise import segment_count
        from interdomain.scan.triton_launch import Span

        s = self.shape
        total = -(-s.T // plan.chunk)
        count = segment_count(s.B * s.H, total, self.device)
        if self.segmented is not None:
            count = min(2, total) if self.segmented else 1
        chunks = -(-total // count)
        return Span(s.T, -(-total // chunks), chunks)

    def plan(self):
        """The tiles that are shipped for this device and shape."""
        from interdomain.scan.triton_launch import make_plan

        return make_plan(self.device, self.q.dtype, self.shape.M, self.shape.d, None)


def run(args, device: torch.device, shapes: list[Shape], rounds: int, deadline: Deadline) -> int:
    """What --passes and --tune do, after bench_kernels has read its flags."""
    part = "tune" if args.tune else "passes"
    if args.compile_part:
        compile_part(args.compile_part, shapes[0], device)
        return 0
    report = Report(part, args.out, device, {"rounds": rounds, "dtype": "bfloat16"})
    problem = triton_support.missing(device)
    if problem or (device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1"):
        report.note(f"The passes are Triton and need a GPU: {problem or 'there is none here'}.")
        report.finish("skipped")
        return 0
    limits = ceilings(device)
    report.contents["ceilings"] = limits._asdict()
    if args.tune and device.type == "cuda":
        compile_apart(args, deadline)
    for shape in shapes if args.passes or args.shapes else shapes[:1]:
        if deadline.passed:
            report.note(f"{shape}: not run: time limit")
            continue
        measure = tune if args.tune else passes
        measure(report, Setup(shape, device), limits, rounds, deadline)
        release(device)
    report.finish("unfinished" if deadline.passed else "complete")
    return 0


def passes(report: Report, setup: Setup, limits: Ceilings, rounds: int, deadline: Deadline) -> None:
    plan, name = setup.plan(), str(setup.shape)
    report.table(name, ["pass", "times a step", "ms", "byte floor ms", "FLOP floor ms", "of floor", "TB/s", "remark"])
    good, bad = usable(setup.calls(plan), setup.device, passed=lambda: deadline.passed)
    times = interleaved(good, setup.device, rounds=rounds, seconds=0.5)
    costs = pass_costs(setup.shape, plan.chunk)
    # recompute=True: the backward runs contract of the forward again. What is 0 times there is the parts of a joined pass.
    step = (*forward_passes(bool(plan.fused)), *backward_passes(plan.joined), "contract")
    count = {one: step.count(one) for one in costs}
    count |= {"tables": 2, "states": 2, "costates": 1, "chain": 3}
    total = 0.0
    for one in (*good, *bad):
        row = {"pass": one, "times a step": count[one], "remark": bad.get(one)}
        if one in times:
            ms = times[one][-1].median
            row |= {"ms": ms, "times": times[one][-1]._asdict()}
            total += ms * count[one]
            if one in costs:
                nbytes, flops = costs[one]
                row |= {"byte floor ms": limits.floor_ms(nbytes), "FLOP floor ms": limits.floor_ms(0, flops)}
                row |= {"of floor": ratio(limits.floor_ms(nbytes, flops), ms), "TB/s": nbytes / ms / 1e9}
        report.add(name, row)
    remark = "forward and backward, recompute=True" if not bad else "not all passes ran"
    report.add(name, {"pass": "all of a step", "ms": None if bad else total, "remark": remark})


def tune(report: Report, setup: Setup, limits: Ceilings, rounds: int, deadline: Deadline) -> None:
    """ms of every pass at every tile size, best first; what the device has no room for says so."""
    shipped, costs = setup.plan(), None
    for one in PASSES:
        if getattr(shipped, FIELD[one]) is None:
            continue
        name = f"{one}, {setup.shape}"
        report.table(name, ["tiles", "ms", "of shipped", "of floor", "shipped", "remark"])
        plans = {label(plan, one): plan for plan in [shipped, *alternatives(shipped, one)]}
        good, bad = {}, {}
        for text, plan in plans.items():
            ran, failed = usable({text: _one(setup, plan, one)}, setup.device, passed=lambda: deadline.passed)
            good |= ran
            bad |= failed
        times = {k: t[-1].median for k, t in interleaved(good, setup.device, rounds=rounds, seconds=0.2).items()}
        for text in (*sorted(times, key=times.get), *bad):
            costs = pass_costs(setup.shape, plans[text].chunk)[one]
            row = {"tiles": text, "ms": times.get(text), "remark": bad.get(text)}
            row |= {
                "of shipped": ratio(row["ms"], times.get(label(shipped, one))),
                "shipped": text == label(shipped, one),
            }
            row["of floor"] = ratio(limits.floor_ms(*costs), row["ms"])
            report.add(name, row)


def _one(setup: Setup, plan, one: str):
    """A pass as a call that prepares itself when it first runs: tables too may fail at a plan."""
    made = []

    def call():
        if not made:
            made.append(setup.calls(plan)[one])
        return made[0]()

    return call


def alternatives(plan, one: str) -> list:
    field = FIELD[one]
    return [plan._replace(chunk=chunk, **{field: tile}) for chunk in CHUNKS for tile in TILES[field]]


def label(plan, one: str) -> str:
    numbers, warps, stages = getattr(plan, FIELD[one])
    return f"chunk {plan.chunk}, {numbers} numbers, {warps} warps, {stages} stages"


def compile_apart(args, deadline: Deadline) -> None:
    """Fill Triton's cache from several processes at once, each with its part of the list."""
    if exclusive():  # the GPU is this process's
        return
    jobs = processes(torch.device("cuda"))
    command = [sys.executable, "-m", "interdomain.tools.bench_kernels", "--tune", "--device", "cuda"]
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
    setup = Setup(Shape(2, 256, 2, shape.d, shape.M), device, segments(shape, device) > 1)
    every = [(one, plan) for one in PASSES for plan in alternatives(setup.plan(), one)]
    for one, plan in every[i::n]:
        usable({one: _one(setup, plan, one)}, device)
