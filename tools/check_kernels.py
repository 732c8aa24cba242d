"""interdomain check-kernels --output benchmarks/results/today

Compare the kernels' results with float64 on this machine.

The scan, the one-token step and whole layers run on the GPU. Outputs, states and gradients are compared with float64 on
the same inputs, by relative RMS error. Many cases run twice and must agree in every bit. Run this before you believe a
benchmark. Without a GPU it runs at tiny sizes on the CPU, and the results say so.

    interdomain check-kernels --groups layer-interdomain step --device cpu --output benchmarks/results/layer

Exit status: 0 every case passed; 1 a case failed (NaN, an exception, different bits, or 3 times the allowed error); 2 a
wrong option; 3 no case failed, but one has more than the allowed error

Documentation: docs/benchmarks.md; the allowed errors: docs/kernels.md
"""

import argparse
import copy
import functools
import math
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from interdomain import InterdomainAttention, scan
from interdomain.model import Execution
from interdomain.tools._bench import results as _bench
from interdomain.tools._bench.cases import LAYERS, STEPS, Case, convert, groups, make_inputs
from interdomain.tools._bench.pages import FAIL, UNFINISHED, VERDICTS
from interdomain.tools._cli import argument_parser, user_errors

CPU = torch.device("cpu")
FAILED = 3  # times the bound: a lost term, sign or mask is far beyond it, a rounding is not
BEYOND = "beyond the bound"
SEVERITY = ("PASS", BEYOND, FAIL)
STATUS = {0: "passed", 1: "failed", 3: "beyond bounds"}  # by exit status
LOOP_LIMIT = 512  # tokens: beyond, the float64 chunkwise form judges, which agrees with the loop to 1e-10 by the tests
# (arguments, cotangents of the results, function(exact, arguments) -> results by name). exact: by the form that judges.
Problem = tuple[dict, tuple[Tensor, ...], Callable[[bool, dict], dict[str, Tensor]]]


def run_case(case: Case, device: torch.device, seed: int = 0) -> dict:
    """A row: errors by tensor, whether two runs were equal in every bit, and PASS, BEYOND, FAIL, or FAIL and the reason.

    All numbers are drawn on the CPU: the same whatever the GPU.
    """
    row = {"case": str(case), "bit-equal": None}
    try:
        inputs, cotangents, function = PROBLEMS[case.kind](case, device, seed)
        inputs, cotangents = convert((inputs, cotangents), device=device)
        got = with_gradients(function, False, inputs, cotangents)
        if case.repeat:
            again = with_gradients(function, False, inputs, cotangents)
            row["bit-equal"] = all(torch.equal(got[name], again[name]) for name in got)
        inputs, cotangents = convert((inputs, cotangents), dtype=torch.float64)
        exact = with_gradients(function, True, inputs, cotangents)
        errors = {name: relative_rms(got[name], exact[name]) for name in exact}
    except Exception as e:
        return row | {"result": f"{FAIL}: {_bench.reason(e)}"}
    # The error that is largest in units of its bound. A NaN is larger than any number, and `<` is false for it.
    in_bounds = {name: error / case.bound(name) for name, error in errors.items()}
    worst = max(
        in_bounds, key=lambda name: math.inf if math.isnan(in_bounds[name]) else in_bounds[name]
    )
    result = FAIL
    if row["bit-equal"] is not False and in_bounds[worst] < FAILED:
        result = "PASS" if in_bounds[worst] < 1 else BEYOND
    row |= {"worst": errors[worst], "in": worst, "bound": case.bound(worst), "errors": errors}
    return row | {"result": result}


def with_gradients(
    function: Callable, exact: bool, inputs: dict, cotangents: tuple[Tensor, ...]
) -> dict[str, Tensor]:
    """Results, and the gradients of the leaves among the inputs as d and their name."""
    results = function(exact, inputs)
    leaves = {name: x for name, x in inputs.items() if x.requires_grad}
    if leaves:
        grads = torch.autograd.grad(
            tuple(results.values()), list(leaves.values()), cotangents[: len(results)]
        )
        results |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return results


def relative_rms(got: Tensor, exact: Tensor) -> float:
    """RMS of the error over RMS of the value; both in float64."""
    if got.shape != exact.shape:
        raise ValueError(f"the result has shape {tuple(got.shape)}, expected {tuple(exact.shape)}")
    got, exact = got.detach().double(), exact.detach().double()
    return (
        (got - exact).square().mean().sqrt() / exact.square().mean().sqrt().clamp_min(1e-300)
    ).item()


def scan_problem(case: Case, device: torch.device, seed: int) -> Problem:
    inputs, cotangents = make_inputs(case, CPU, mixed=True, seed=seed)
    run: Callable[..., tuple] = scan.linear_scan if case.linear else scan.interdomain_scan
    options: dict[str, Any] = {"final_state": case.state}
    if case.documents:  # of 20 tokens on average; the first sequence continues its initial state
        starts = (
            torch.rand(case.shape.B, case.shape.T, generator=torch.Generator().manual_seed(seed))
            < 1 / 20
        )
        starts[0, 0] = False
        options["documents"] = starts.cumsum(1).to(device)
    tested: dict[str, Any] = {"backend": case.backend}
    if not case.linear:
        tested["recompute"] = case.recompute
    judge = {"backend": "reference" if case.shape.T <= LOOP_LIMIT else "chunkwise-torch"}

    def function(exact: bool, inputs: dict) -> dict[str, Tensor]:
        out, state = run(**inputs, **options, **(judge if exact else tested))
        return {"out": out} if state is None else {"out": out, "state": state}

    return inputs, cotangents, function


def step_problem(case: Case, device: torch.device, seed: int) -> Problem:
    """STEPS tokens one by one from a state, against the float64 loop over the same tokens."""
    inputs = {
        name: x.detach() for name, x in make_inputs(case, CPU, mixed=True, seed=seed)[0].items()
    }
    loop: Callable[..., tuple] = scan.linear_scan if case.linear else scan.interdomain_scan
    one_step: Callable[..., tuple] = scan.linear_step if case.linear else scan.interdomain_step
    by_token = [name for name in ("q", "k", "v", "z") if name in inputs]
    tables = [name for name in ("log_decay", "mixing", "readout") if name in inputs]

    @torch.no_grad()
    def function(exact: bool, inputs: dict) -> dict[str, Tensor]:
        if exact:
            out, state = loop(**inputs, backend="reference")
            return {"out": out, "state": state}
        step = functools.partial(
            one_step, **{name: inputs[name] for name in tables}, inplace=bool(case.mode)
        )
        state = inputs["initial_state"].clone()
        outs = []
        for t in range(STEPS):
            token = {name: inputs[name][:, t].contiguous() for name in by_token}
            if case.mode == "graph" and t == 0:
                step = captured(step, token, state)
            out, state = step(**token, state=state)
            outs.append(out)
        return {"out": torch.stack(outs, dim=1), "state": state}

    return inputs, (), function


def captured(step: Callable, token: dict[str, Tensor], state: Tensor) -> Callable:
    """A step in place on `state` as a CUDA graph, called as the step is."""
    static = {name: x.clone() for name, x in token.items()}
    before = state.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # nothing may be compiled while capturing
        step(**static, state=state)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = step(**static, state=state)
    state.copy_(before)

    def replay(state: Tensor, **token: Tensor) -> tuple[Tensor, Tensor]:
        for name, x in token.items():
            static[name].copy_(x)
        graph.replay()
        return out.clone(), state

    return replay


def layer_problem(case: Case, device: torch.device, seed: int) -> Problem:
    """A layer with its projections and input features: a sequence and all gradients, or the same token by token."""
    s = case.shape
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    layer = InterdomainAttention(s.H * s.d, s.H, n_basis=s.M, **LAYERS[case.mode])
    for norm in (
        layer.mixer.k_norm,
        layer.mixer.v_norm,
    ):  # they start as 1 and 0, where losing them would not show
        assert norm is not None
        norm.weight.data += 0.1 * torch.randn(norm.weight.shape)
        norm.bias.data += 0.1 * torch.randn(norm.bias.shape)
    layer = layer.to(case.dtype)
    judge = copy.deepcopy(layer).double().to(device)
    judge.mixer.execution = Execution("chunkwise-torch", features="torch")
    layer.mixer.execution = Execution("chunkwise", features=case.backend)
    layer = layer.to(device)
    x = torch.randn(s.B, s.T, s.H * s.d, generator=generator).to(case.dtype)
    d_out = torch.randn(s.B, s.T, s.H * s.d, generator=generator).to(case.dtype)
    positions = None
    if case.documents:
        positions = (torch.arange(s.T, device=device) % 20).expand(s.B, s.T)

    def whole(exact: bool, inputs: dict) -> dict[str, Tensor]:
        parameters = {name: value for name, value in inputs.items() if name != "x"}
        called = judge if exact else layer
        return {
            "out": torch.func.functional_call(
                called, parameters, (inputs["x"],), {"positions": positions}
            )
        }

    @torch.no_grad()
    def by_token(exact: bool, inputs: dict) -> dict[str, Tensor]:
        if exact:
            return {"out": judge(inputs["x"])}
        state = layer.init_state(s.B)
        return {
            "out": torch.cat([layer(inputs["x"][:, t : t + 1], state) for t in range(s.T)], dim=1)
        }

    if case.kind == "layer step":
        return {"x": x}, (d_out,), by_token
    # The scan's cases judge the gradients of the dynamics: of log_dt there are few numbers, and nothing averages.
    inputs = {
        name: parameter for name, parameter in layer.named_parameters() if ".ssm." not in name
    }
    return {"x": x.requires_grad_(), **inputs}, (d_out,), whole


PROBLEMS = {
    **dict.fromkeys(("scan", "linear scan"), scan_problem),
    **dict.fromkeys(("step", "linear step"), step_problem),
    **dict.fromkeys(("layer", "layer step"), layer_problem),
}


class Verdicts:
    """One verdict for each set of sizes, as a row that changes with every case that ran."""

    def __init__(self, cases: Iterable[Case]) -> None:
        self.rows: dict[str, dict] = {}
        for case in cases:
            row = self.rows.setdefault(
                case.sizes, {"sizes": case.sizes, "cases": 0, "ran": 0, "verdict": UNFINISHED}
            )
            row["cases"] += 1

    def add(self, case: Case, result: str) -> None:
        row = self.rows[case.sizes]
        row["ran"] += 1
        if result.startswith(FAIL):
            result = FAIL
        row["worst result"] = max(row.get("worst result", "PASS"), result, key=SEVERITY.index)
        if row["worst result"] == FAIL or row["ran"] == row["cases"]:
            row["verdict"] = row["worst result"]


def parse(argv) -> argparse.Namespace:
    p = argument_parser(__doc__)
    _bench.add_arguments(p, "check")
    p.add_argument(
        "--groups",
        nargs="+",
        metavar="NAME",
        help=f"{', '.join(groups(True))} (default: all)",
    )
    return p.parse_args(argv)


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    device = _bench.choose_device(args.device)
    available = groups(device.type == "cuda")
    names = _bench.choose("--groups", args.groups, available)
    report = _bench.Report(args.name, args.output, device, {"groups": names})
    results = []
    verdicts = Verdicts(case for name in names for case in available[name])
    report.table(VERDICTS, ["sizes", "cases", "ran", "verdict"], verdicts.rows.values())
    report.table("cases", ["case", "worst", "in", "bound", "bit-equal", "result"])

    def add(case: Case, row: dict | str) -> None:
        if isinstance(row, str):
            row = {"case": str(case), "result": f"{FAIL}: {row}"}
        results.append(row["result"])
        verdicts.add(case, row["result"])
        report.add("cases", row)

    # Cases that compile take a core, those that run only the GPU: some cores are left for the launches.
    workers = max(1, len(os.sched_getaffinity(0)) * 3 // 4)
    _bench.work(device, [available[name] for name in names], run_case, add, workers)
    code = 0
    if BEYOND in results:
        code = 3
    if set(results) - {"PASS", BEYOND}:
        code = 1
    if device.type == "cpu":
        report.note(
            "On a CPU every backend is plain PyTorch, at tiny sizes; the Triton kernels are checked on a GPU."
        )
    elif code == 1:
        report.note(
            "A compiler may be at fault, above all on Hopper: docs/benchmarks.md says what to try."
        )
    passed = f"{results.count('PASS')} of {len(results)} cases passed"
    report.finish(STATUS[code], f"{passed}, {_bench.compilations_of(report.rows('cases'))}")
    return code


if __name__ == "__main__":
    sys.exit(main())
