"""interdomain check-kernels --output benchmarks/results/today

Compare the kernels' results with float64 on this machine.

The scan, the one-token step and whole layers run on the GPU. Outputs, states and gradients are
compared with float64 on the same inputs, by relative RMS error. Many cases run twice and must agree
in every bit. Run this before you believe a benchmark. Without a GPU it runs at tiny sizes on the
CPU, and the results say so.

    interdomain check-kernels --groups layer-interdomain step --device cpu \
        --output benchmarks/results/layer

Exit status: 0 every case passed; 1 a case failed (NaN, an exception, different bits, or 3 times the
allowed error); 2 a wrong option; 3 no case failed, but one has more than the allowed error

Documentation: docs/measurements.md; the allowed errors: docs/kernels.md
"""

import argparse
import copy
import functools
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from interdomain import InterdomainAttention, scan
from interdomain.model import Execution
from interdomain.tools._bench import processes, results
from interdomain.tools._bench.cases import LAYERS, Case, groups, make_inputs
from interdomain.tools._bench.pages import FAIL, UNFINISHED, VERDICTS
from interdomain.tools._cli import argument_parser, user_errors

CPU = torch.device("cpu")
# Results of a case, the best first.
PASS = "PASS"
BEYOND = "beyond the bound"
SEVERITY = (PASS, BEYOND, FAIL)
# The status of the results and the exit status, by the worst result of all cases.
STATUS = {PASS: "passed", BEYOND: "beyond bounds", FAIL: "failed"}
EXIT = {PASS: 0, BEYOND: 3, FAIL: 1}
# An error of this many times the bound is a failure: a lost term, sign or mask is far beyond it,
# and no rounding is.
FAILED = 3
# Up to this many tokens the loop over time judges. Beyond, the chunkwise form in float64 does,
# which agrees with the loop to 1e-10 by the tests.
LOOP_LIMIT = 512
DOCUMENT_TOKENS = 20  # the length of a packed document, on average
TOKENS = ("q", "k", "v", "z")  # inputs of a scan with a time axis
CPU_NOTE = (
    "On a CPU every backend is plain PyTorch, at tiny sizes; the Triton kernels are checked on a "
    "GPU."
)
COMPILER_NOTE = (
    "A compiler may be at fault, above all on Hopper: docs/measurements.md says what to try."
)

Tensors = dict[str, Tensor]


@dataclass
class Problem:
    """The inputs of a case, and two functions of them whose results should agree.

    Attributes:
        inputs: Tensors by name, on the CPU.
        cotangents: The gradients of the results by name, on the CPU.
        tested: Computes the results on the device under test.
        judge: Computes them from the same inputs in float64.
    """

    inputs: Tensors
    cotangents: Tensors
    tested: Callable[[Tensors], Tensors]
    judge: Callable[[Tensors], Tensors]


def run_case(case: Case, device: torch.device, seed: int = 0) -> dict[str, Any]:
    """Runs a case and judges it.

    Args:
        case: The case.
        device: The device under test.
        seed: Seed of the inputs. All numbers are drawn on the CPU: they are the same for every GPU.

    Returns:
        A row of the table. It has the result (PASS, beyond the bound, or FAIL), whether two runs
        had equal bits, the error of every tensor, and the name of the tensor whose error is the
        largest in units of its bound.
    """
    row: dict[str, Any] = {"case": str(case), "bit-equal": None}

    # The kernels under test, once or twice.
    problem = PROBLEMS[case.kind](case, device, seed)
    inputs = converted(problem.inputs, device=device)
    cotangents = converted(problem.cotangents, device=device)
    got = with_gradients(problem.tested, inputs, cotangents)
    if case.repeat:
        again = with_gradients(problem.tested, inputs, cotangents)
        row["bit-equal"] = all(torch.equal(got[name], again[name]) for name in got)

    # The judge gets the same inputs, as they were rounded to the dtype under test.
    inputs = converted(inputs, dtype=torch.float64)
    cotangents = converted(cotangents, dtype=torch.float64)
    exact = with_gradients(problem.judge, inputs, cotangents)
    errors = {name: relative_rms(got[name], exact[name]) for name in exact}

    # Errors in units of their bounds. A NaN counts as larger than any number.
    in_bounds = {}
    for name, error in errors.items():
        in_bounds[name] = math.inf if math.isnan(error) else error / case.bound(name)
    worst = max(in_bounds, key=in_bounds.__getitem__)
    row |= {"worst": errors[worst], "in": worst, "bound": case.bound(worst), "errors": errors}
    if row["bit-equal"] is False or in_bounds[worst] >= FAILED:
        row["result"] = FAIL
    elif in_bounds[worst] >= 1:
        row["result"] = BEYOND
    else:
        row["result"] = PASS
    return row


def converted(tensors: Tensors, **to: Any) -> Tensors:
    """Converts each tensor by `Tensor.to(**to)`. Leaves that record gradients stay leaves.

    Args:
        tensors: Tensors by name.
        **to: The arguments `device` or `dtype`.
    """
    result = {}
    for name, x in tensors.items():
        result[name] = x.detach().to(**to).requires_grad_(x.requires_grad)
    return result


def with_gradients(
    function: Callable[[Tensors], Tensors], inputs: Tensors, cotangents: Tensors
) -> Tensors:
    """Returns the results of a function, and the gradients of the leaves among its inputs.

    The gradient of an input has its name with a "d" before it.

    Args:
        function: Computes results by name.
        inputs: Its inputs by name.
        cotangents: The gradient of each result, from which the backward pass starts.
    """
    outputs = function(inputs)
    leaves = {name: x for name, x in inputs.items() if x.requires_grad}
    # A step has no gradients.
    if not leaves:
        return outputs
    d_outputs = [cotangents[name] for name in outputs]
    grads = torch.autograd.grad(list(outputs.values()), list(leaves.values()), d_outputs)
    gradients = {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return outputs | gradients


def relative_rms(got: Tensor, exact: Tensor) -> float:
    """Returns the RMS of the error over the RMS of the value, both in float64.

    Args:
        got: The result under test.
        exact: The result in float64.
    """
    assert got.shape == exact.shape, f"{tuple(got.shape)} instead of {tuple(exact.shape)}"
    got = got.detach().double()
    exact = exact.detach().double()
    error = (got - exact).square().mean().sqrt()
    scale = exact.square().mean().sqrt().clamp_min(1e-300)
    return (error / scale).item()


def scan_problem(case: Case, device: torch.device, seed: int) -> Problem:
    """Makes the problem of a scan over whole sequences, with all gradients.

    Args:
        case: The case.
        device: The device under test.
        seed: Seed of the inputs.
    """
    inputs, cotangents = make_inputs(case, CPU, mixed=True, seed=seed)
    run_scan: Callable[..., tuple] = scan.linear_scan if case.linear else scan.interdomain_scan
    options: dict[str, Any] = {"final_state": case.state}
    if case.documents:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.rand(case.shape.B, case.shape.T, generator=generator) < 1 / DOCUMENT_TOKENS
        starts[0, 0] = False  # the first sequence continues its initial state
        options["documents"] = starts.cumsum(1).to(device)

    # The two implementations that are compared.
    tested: dict[str, Any] = {"backend": case.backend}
    if not case.linear:
        tested["recompute"] = case.recompute
    judge = {"backend": "reference" if case.shape.T <= LOOP_LIMIT else "chunkwise-torch"}

    def run(inputs: Tensors, **implementation: Any) -> Tensors:
        out, state = run_scan(**inputs, **options, **implementation)
        if state is None:
            return {"out": out}
        return {"out": out, "state": state}

    return Problem(
        inputs, cotangents, functools.partial(run, **tested), functools.partial(run, **judge)
    )


def step_problem(case: Case, device: torch.device, seed: int) -> Problem:
    """Makes the problem of a few tokens that are read one by one from a state.

    The judge is the float64 loop over the same tokens. There are no gradients.

    Args:
        case: The case.
        device: The device under test.
        seed: Seed of the inputs.
    """
    inputs, _ = make_inputs(case, CPU, mixed=True, seed=seed)
    inputs = {name: x.detach() for name, x in inputs.items()}
    loop: Callable[..., tuple] = scan.linear_scan if case.linear else scan.interdomain_scan
    one_step: Callable[..., tuple] = scan.linear_step if case.linear else scan.interdomain_step

    @torch.no_grad()
    def tested(inputs: Tensors) -> Tensors:
        # The tables (decays, mixing or readout weights) are the same for all tokens.
        tokens = {}
        tables = {}
        for name, x in inputs.items():
            if name in TOKENS:
                tokens[name] = x
            elif name != "initial_state":
                tables[name] = x
        step = functools.partial(one_step, **tables, inplace=bool(case.mode))
        state = inputs["initial_state"].clone()
        outs = []
        for t in range(case.shape.T):
            token = {name: x[:, t].contiguous() for name, x in tokens.items()}
            # The first token's step is captured; the graph replays it for all tokens.
            if case.mode == "graph" and t == 0:
                step = captured(step, token, state)
            out, state = step(**token, state=state)
            outs.append(out)
        return {"out": torch.stack(outs, dim=1), "state": state}

    @torch.no_grad()
    def judge(inputs: Tensors) -> Tensors:
        out, state = loop(**inputs, backend="reference")
        return {"out": out, "state": state}

    return Problem(inputs, {}, tested, judge)


def captured(step: Callable, token: Tensors, state: Tensor) -> Callable:
    """Captures a step in place on `state` as a CUDA graph.

    Args:
        step: The step, with its tables bound.
        token: The inputs of one token by name.
        state: The state, which the graph overwrites. It is as before when this returns.

    Returns:
        A function that is called as the step is.
    """
    # A graph reads its inputs from tensors that stay where they are.
    static = {name: x.clone() for name, x in token.items()}
    before = state.clone()
    # A first call compiles the kernels: nothing may be compiled while capturing.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(**static, state=state)
    torch.cuda.current_stream().wait_stream(side)

    # Capture, and undo what the first call did to the state.
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
    """Makes the problem of a layer with its projections and input features.

    It is compared on a sequence, with all gradients, or token by token.

    Args:
        case: The case.
        device: The device under test.
        seed: Seed of the weights and inputs.
    """
    s = case.shape
    dim = s.H * s.d
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    layer = InterdomainAttention(dim, s.H, n_basis=s.M, **LAYERS[case.mode])
    # Norms start as 1 and 0, where a kernel that loses them would not show.
    for norm in (layer.mixer.k_norm, layer.mixer.v_norm):
        assert norm is not None
        norm.weight.data += 0.1 * torch.randn(norm.weight.shape)
        norm.bias.data += 0.1 * torch.randn(norm.bias.shape)
    layer = layer.to(case.dtype)

    # The same layer twice: in plain PyTorch and float64, and as it is tested.
    exact_layer = copy.deepcopy(layer).double().to(device)
    exact_layer.mixer.execution = Execution("chunkwise-torch", features="torch")
    layer.mixer.execution = Execution("chunkwise", features=case.backend)
    layer = layer.to(device)

    # Input and gradient of the output.
    x = torch.randn(s.B, s.T, dim, generator=generator).to(case.dtype)
    d_out = torch.randn(s.B, s.T, dim, generator=generator).to(case.dtype)

    # Token by token from an empty state, against the whole sequence at once.
    if case.kind == "layer step":

        @torch.no_grad()
        def by_token(inputs: Tensors) -> Tensors:
            state = layer.init_state(s.B)
            outs = [layer(inputs["x"][:, t : t + 1], state) for t in range(s.T)]
            return {"out": torch.cat(outs, dim=1)}

        @torch.no_grad()
        def whole(inputs: Tensors) -> Tensors:
            return {"out": exact_layer(inputs["x"])}

        return Problem({"x": x}, {"out": d_out}, by_token, whole)

    # The whole sequence with all gradients.
    positions = None
    if case.documents:
        positions = (torch.arange(s.T, device=device) % DOCUMENT_TOKENS).expand(s.B, s.T)

    def run(inputs: Tensors, called: InterdomainAttention) -> Tensors:
        parameters = inputs.copy()
        x = parameters.pop("x")
        out = torch.func.functional_call(called, parameters, (x,), {"positions": positions})
        return {"out": out}

    inputs = {"x": x.requires_grad_()}
    for name, parameter in layer.named_parameters():
        # The cases of the scan judge the gradients of the SSM parameters: log_dt has few numbers,
        # and nothing averages.
        if ".ssm." not in name:
            inputs[name] = parameter
    tested = functools.partial(run, called=layer)
    judge = functools.partial(run, called=exact_layer)
    return Problem(inputs, {"out": d_out}, tested, judge)


# The function that makes the problem of each `Case.kind`.
PROBLEMS = {
    "scan": scan_problem,
    "linear scan": scan_problem,
    "step": step_problem,
    "linear step": step_problem,
    "layer": layer_problem,
    "layer step": layer_problem,
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line. If `argv` is None, it is that of the process."""
    p = argument_parser(__doc__)
    results.add_arguments(p, "check")
    p.add_argument(
        "--groups",
        nargs="+",
        choices=groups(True),
        metavar="NAME",
        help=f"{', '.join(groups(True))} (default: all)",
    )
    return p.parse_args(argv)


@user_errors
def main(argv: list[str] | None = None) -> int:
    """Runs the command, by default with the process's arguments. Returns the exit status."""
    args = parse(argv)
    device = results.choose_device(args.device)
    available = groups(device.type == "cuda")
    names = args.groups or list(available)
    report = results.Report(args.name, args.output, device, {"groups": names})

    # A row for each set of sizes. It has its verdict when all its cases ran, or one failed.
    by_sizes: dict[str, dict[str, Any]] = {}
    for name in names:
        for case in available[name]:
            start = {"cases": 0, "ran": 0, "worst result": PASS, "verdict": UNFINISHED}
            sizes = by_sizes.setdefault(case.sizes, {"sizes": case.sizes, **start})
            sizes["cases"] += 1
    report.table(VERDICTS, ["sizes", "cases", "ran", "verdict"], by_sizes.values())
    report.table("cases", ["case", "worst", "in", "bound", "bit-equal", "result"])

    def add(case: Case, row: dict | str) -> None:
        # A case that raised, crashed or hung has failed.
        if isinstance(row, str):
            row = {"case": str(case), "result": f"{FAIL}: {row}"}
        result = row["result"].partition(":")[0]
        sizes = by_sizes[case.sizes]
        sizes["ran"] += 1
        sizes["worst result"] = max(sizes["worst result"], result, key=SEVERITY.index)
        if sizes["worst result"] == FAIL or sizes["ran"] == sizes["cases"]:
            sizes["verdict"] = sizes["worst result"]
        report.add("cases", row)

    # Cases that compile take a core, and those that run take the GPU. Some cores are left for the
    # launches.
    workers = max(1, len(os.sched_getaffinity(0)) * 3 // 4)
    processes.run_cases(device, [available[name] for name in names], run_case, add, workers)

    # The worst result of all cases is that of the check.
    worst = max((sizes["worst result"] for sizes in by_sizes.values()), key=SEVERITY.index)
    if device.type == "cpu":
        report.note(CPU_NOTE)
    elif worst == FAIL:
        report.note(COMPILER_NOTE)
    rows = report.rows("cases")
    passed = sum(row["result"] == PASS for row in rows)
    compiled = processes.compilations_of(rows)
    report.finish(STATUS[worst], f"{passed} of {len(rows)} cases passed, {compiled}")
    return EXIT[worst]


if __name__ == "__main__":
    sys.exit(main())
