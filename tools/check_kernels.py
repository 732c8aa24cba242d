"""python -m interdomain.tools.check_kernels --output benchmarks/results/today

Run every backend of the scan and the one-token step on this machine's GPU (without one: on the CPU, tiny) and compare
outputs, states and all gradients with float64 on the same rounded inputs, by relative RMS error; then once more, for equal
bits. Run it before believing any figure. Exit status 0: every case passed. 1: a case failed (an error of three times its
bound or more, NaN, an exception, two runs that differ in a bit). 3: none failed, and an error is beyond its bound.
"""

import argparse
import functools
import sys

import torch
from torch import Tensor

from interdomain import scan

from . import _bench, _features
from ._apart import Emit
from ._cases import BOUNDS, COLUMNS, STEPS, Case, bound, groups
from ._cli import argument_parser, user_errors
from ._problems import CPU, make_documents, make_inputs, move
from ._timing import captured

FAILED = 3  # times the bound: a lost term, sign or mask is far beyond it, a rounding is not
BEYOND, FAIL = "beyond the bound", "FAIL"
STATUS = {0: "passed", 1: "failed", 3: "beyond bounds"}  # by exit status
LOOP_LIMIT = 512  # tokens: beyond, the float64 chunkwise form judges, which agrees with the loop to 1e-10 by the tests


def run_case(case: Case, device: torch.device, seed: int = 0) -> dict:
    """A row: errors by tensor, whether two runs were equal in every bit, and PASS, BEYOND, FAIL, or FAIL and the reason."""
    row = _row(case)
    try:
        run = {"step": _step, "features": _features.results, "features step": _features.step_results}
        got, exact, again = run.get(case.kind, _scan)(case, device, seed)
        row |= {name: relative_rms(got[name], exact[name]) for name in exact}
    except Exception as e:
        return row | {"result": f"{FAIL}: {_bench.reason(e)}"}
    if again is not None:
        row["bit-equal"] = all(torch.equal(got[name], again[name]) for name in got)
    return row | verdict({name: row[name] for name in exact}, case.arithmetic, row["bit-equal"])


def _row(case: Case) -> dict:
    """bound: of every tensor but, in bf16, dlog_decay (`bound`)."""
    return {"case": str(case), "bound": BOUNDS[case.arithmetic], "bit-equal": None}


def verdict(errors: dict[str, float], arithmetic: str, bit_equal: bool | None = None) -> dict:
    """The result and the worst error of a row."""

    def all_below(factor: float) -> bool:  # `<` and not `>`: a NaN must fail
        return all(error < factor * bound(arithmetic, name) for name, error in errors.items())

    failed = bit_equal is False or not all_below(FAILED)
    return {"result": FAIL if failed else "PASS" if all_below(1) else BEYOND, "worst": max(errors.values())}


def relative_rms(got: Tensor, exact: Tensor) -> float:
    """RMS of the error over RMS of the value; both in float64."""
    if got.shape != exact.shape:
        raise ValueError(f"the result has shape {tuple(got.shape)}, expected {tuple(exact.shape)}")
    got, exact = got.detach().double(), exact.detach().double()
    return ((got - exact).square().mean().sqrt() / exact.square().mean().sqrt().clamp_min(1e-300)).item()


def _scan(case: Case, device: torch.device, seed: int) -> tuple[dict, dict, dict | None]:
    linear = case.kind == "linear scan"
    what = dict(linear=linear, state=case.state, mixed=True, wider=case.wider)
    # On the CPU: the same numbers whatever the GPU.
    inputs, cotangents = move(make_inputs(case.shape, case.dtype, CPU, seed=seed, **what), device)
    options = {} if linear else {"recompute": case.recompute}
    documents = make_documents(case.shape, CPU, seed=seed).to(device) if case.documents else None

    def run(inputs, cotangents, **options):
        fn = scan.linear_scan if linear else scan.interdomain_scan
        found = fn(**inputs, documents=documents, final_state=case.state, **options)
        found = {name: x for name, x in zip(("out", "state"), found, strict=True) if x is not None}
        grads = torch.autograd.grad(tuple(found.values()), list(inputs.values()), cotangents[: len(found)])
        return found | {f"d{n}": g for n, g in zip(inputs, grads, strict=True)}

    def candidate():
        return run(inputs, cotangents, backend=case.backend, **options)

    got = candidate()
    again = candidate() if case.repeat else None
    double = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    judge = "reference" if case.shape.T <= LOOP_LIMIT else "chunkwise-torch"
    return got, run(double, tuple(x.double() for x in cotangents), backend=judge), again


def _step(case: Case, device: torch.device, seed: int) -> tuple[dict, dict, None]:
    """STEPS tokens one by one from a state, against the float64 loop over the same tokens."""
    what = dict(linear=case.linear, state=True, mixed=True, wider=case.wider)
    inputs, _ = move(make_inputs(case.shape, case.dtype, CPU, seed=seed, **what), device)
    inputs = {name: x.detach() for name, x in inputs.items()}
    before = inputs.pop("initial_state")
    names = ("z",) if case.linear else ("q", "k", "v")
    tables = {name: x for name, x in inputs.items() if name not in names}
    if case.half:
        tables |= {"mixing": tables["mixing"][:, : case.shape.M].contiguous()}
        tables |= {"decay": scan.decay_factor(tables["log_decay"])}
    one_step = scan.linear_step if case.linear else scan.interdomain_step
    tokens = [{name: inputs[name][:, t].contiguous() for name in names} for t in range(STEPS)]
    state, outs = before.clone(), []
    with torch.no_grad():
        if case.mode == "graph":
            static = {name: x.clone() for name, x in tokens[0].items()}
            replay, out = captured(lambda: one_step(**static, **tables, state=state, inplace=True)[0])
            state.copy_(before)
            for token in tokens:
                for name, x in token.items():
                    static[name].copy_(x)
                replay()
                outs.append(out.clone())
        for token in tokens if case.mode != "graph" else ():
            kept = state.clone()
            out, new = one_step(**token, **tables, state=state, inplace=bool(case.mode))
            if not case.mode and not torch.equal(kept, state):
                raise AssertionError("the step changed the state that it was given")
            if case.mode and new.data_ptr() != state.data_ptr():
                raise AssertionError("the step in place returned another state")
            state = new
            outs.append(out)
    run = scan.linear_scan if case.linear else scan.interdomain_scan
    double = {name: x.double() for name, x in inputs.items()}
    exact, final = run(**double, initial_state=before.double(), backend="reference")
    return {"out": torch.stack(outs, dim=1), "state": state}, {"out": exact, "state": final}, None


def check_one(which: tuple[str, int], emit: Emit, *, device: torch.device) -> None:
    """A case by its group and number. Raises: RuntimeError if the GPU does not survive it: another process takes the rest."""
    group, i = which
    case = groups(device.type == "cuda")[group][i]
    emit(run_case(case, device))
    _bench.require_healthy(device, str(case))


def parse(argv) -> argparse.Namespace:
    p = argument_parser(__doc__)
    _bench.add_arguments(p)
    p.add_argument("--groups", nargs="+", metavar="NAME", help=f"of {', '.join(groups(True))} (default: all)")
    return p.parse_args(argv)


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    device, deadline = _bench.choose_device(args.device), _bench.Deadline(args.time_limit)
    available = groups(device.type == "cuda")
    names = _bench.choose("--groups", args.groups, available)
    report, results = _bench.Report("check", args.output, device, {"groups": names}), []
    for kind in COLUMNS:
        report.table(kind, ["case", "bound", *COLUMNS[kind], "bit-equal", "result"])

    def add(case, rows, problem):
        group, i = case
        row = {"group": group, **(rows[0] if rows else _row(available[group][i]))}
        if problem:
            row["result"] = f"{FAIL}: {_bench.without_paths(problem)[:200]}"
        results.append(row["result"])
        report.add(available[group][i].kind, row)

    jobs = [[(name, i) for i in range(len(available[name]))] for name in names]
    workers = _bench.processes() if device.type == "cuda" else 1
    handle = functools.partial(check_one, device=device)
    _bench.work(device, jobs, add, handle, deadline, workers=workers, least=60)
    code = 1 if set(results) - {"PASS", BEYOND} else 3 if BEYOND in results else 0
    if device.type == "cpu":
        report.note("On a CPU every backend is plain PyTorch, at tiny sizes; the Triton kernels are checked on a GPU.")
    elif code == 1:
        report.note("A compiler may be at fault, above all on Hopper: benchmarks/README.md says what to try.")
    report.finish(STATUS[code], f"{results.count('PASS')} of {len(results)} cases passed")
    return code


if __name__ == "__main__":
    sys.exit(main())
