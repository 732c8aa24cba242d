"""python -m interdomain.tools.check_kernels --output benchmarks/results/today

Run every backend of the scan and the one-token step on this machine's GPU (without one: on the CPU, tiny) and compare
outputs, states and all gradients with float64 on the same rounded inputs, by relative RMS error; then once more, for equal
bits. Run it before believing any figure. Exit status 0: every case passed. 1: a case failed (an error of three times its
bound or more, NaN, an exception, two runs that differ in a bit). 3: none failed, and an error is beyond its bound.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import torch
from torch import Tensor

from interdomain import scan
from interdomain.folders import write_whole

from . import _features
from ._bench import (
    Deadline,
    Report,
    add_arguments,
    choose,
    choose_device,
    exclusive,
    processes,
    reason,
    require_healthy,
    without_paths,
)
from ._cases import BOUNDS, COLUMNS, STEPS, Case, bound, groups
from ._cli import argument_parser, user_errors
from ._problems import CPU, make_documents, make_inputs, move

FAILED = 3  # times the bound: a lost term, sign or mask is far beyond it, a rounding is not
BEYOND, FAIL = "beyond the bound", "FAIL"
STATUS = {0: "passed", 1: "failed", 3: "beyond bounds"}  # by exit status
LOOP_LIMIT = 512  # tokens: beyond, the float64 chunkwise form judges, which agrees with the loop to 1e-10 by the tests


def run_case(case: Case, device: torch.device, seed: int = 0) -> dict:
    """A row: errors by tensor, whether two runs were equal in every bit, and PASS, BEYOND, FAIL, or FAIL and the reason."""
    row = _row(case)
    try:
        run = {"step": _step, "features": _input_features, "features step": _input_features_step}
        got, exact, again = run.get(case.kind, _scan)(case, device, seed)
        row |= {name: relative_rms(got[name], exact[name]) for name in exact}
    except Exception as e:
        return row | {"result": f"{FAIL}: {reason(e)}"}
    if again is not None:
        row["bit-equal"] = all(torch.equal(got[name], again[name]) for name in got)
    return row | verdict({name: row[name] for name in exact}, case.arithmetic, row["bit-equal"])


def _row(case: Case, **more) -> dict:
    """bound: of every tensor but, in bf16, dlog_decay (`bound`)."""
    return {"case": str(case), "bound": BOUNDS[case.arithmetic], "bit-equal": None, **more}


def verdict(errors: dict[str, float], arithmetic: str, bit_equal: bool | None = None) -> dict:
    """The result and the worst error of a row."""

    def all_below(factor: float) -> bool:  # `<` and not `>`: a NaN must fail
        return all(error < factor * bound(arithmetic, name) for name, error in errors.items())

    failed = bit_equal is False or not all_below(FAILED)
    return {"result": FAIL if failed else "PASS" if all_below(1) else BEYOND, "worst": max(errors.values())}


def status(results: list[str]) -> int:
    """The exit status."""
    if any(result not in ("PASS", BEYOND) for result in results):
        return 1
    return 3 if BEYOND in results else 0


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
        return run(inputs, cotangents, backend=case.backend, chunk_size=case.chunk_size, **options)

    got = candidate()
    again = candidate() if case.repeat else None
    double = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    judge = "reference" if case.shape.T <= LOOP_LIMIT else "chunkwise-torch"
    return got, run(double, tuple(x.double() for x in cotangents), backend=judge), again


def _input_features(case: Case, device: torch.device, seed: int) -> tuple[dict, dict, dict | None]:
    return _features.results(
        case.mode,
        case.shape,
        case.dtype,
        device,
        case.backend,
        past=case.state,
        repeat=case.repeat,
        packed=case.documents,
        seed=seed,
    )


def _input_features_step(case: Case, device: torch.device, seed: int) -> tuple[dict, dict, None]:
    return _features.step_results(case.shape, case.dtype, device, case.backend, seed)


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
            outs = _replay(
                lambda token, state: one_step(**token, **tables, state=state, inplace=True)[0], tokens, state
            )
        else:
            for token in tokens:
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


def _replay(step, tokens: list[dict[str, Tensor]], state: Tensor) -> list[Tensor]:
    """The step captured once in a CUDA graph and replayed for every token; `state` is updated in place."""
    static, before = {name: x.clone() for name, x in tokens[0].items()}, state.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compile and warm up outside of the capture
        step(static, state)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(static, state)
    state.copy_(before)
    outs = []
    for token in tokens:
        for name, x in token.items():
            static[name].copy_(x)
        graph.replay()
        outs.append(out.clone())
    return outs


def run_group(name: str, cases: list[Case], device: torch.device, report) -> None:
    """report(kind, row) for every case; after an error that the GPU does not survive, the rest of the group has failed."""
    broken = None
    for case in cases:
        row = _row(case, result=f"{FAIL}: {broken}") if broken else None
        row = {"group": name, **(row or run_case(case, device))}
        if not broken:
            try:
                require_healthy(device, str(case))
            except RuntimeError as e:
                broken = str(e)
                row["result"] = f"FAIL: {broken}"
        report(case.kind, row)


def run_apart(names: list[str], device: torch.device, jobs: int, deadline: Deadline, report) -> None:
    """Groups in processes of their own, several at a time: compilation takes most of the time, and a crash stays alone.

    Every row is reported within a second, also while its group still runs.
    """
    expected = groups(device.type == "cuda")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        files = {name: Path(folder) / f"{name}.json" for name in names}
        running = {name: pool.submit(_worker, name, device, files[name], deadline) for name in names}
        reported = dict.fromkeys(names, 0)
        while running:
            wait(running.values(), timeout=1, return_when=FIRST_COMPLETED)
            for name, worker in [*running.items()]:
                ended = worker.done()  # asked before the rows are read: none can follow
                rows = json.loads(files[name].read_text()) if files[name].is_file() else []
                for kind, row in rows[reported[name] :]:
                    report(kind, row)
                reported[name] = len(rows)
                if ended:
                    del running[name]
                    for case in expected[name][len(rows) :]:
                        report(case.kind, {"group": name, **_row(case, result=worker.result())})


def _worker(name: str, device: torch.device, file: Path, deadline: Deadline) -> str:
    """Runs a group, whose rows go into `file` -> the result of its cases that have no row."""
    if deadline.passed:
        return f"{FAIL}: not run: time limit"
    command = [sys.executable, "-m", "interdomain.tools.check_kernels", "--groups", name, "--rows", str(file)]
    try:
        done = subprocess.run(
            [*command, "--device", str(device)], capture_output=True, text=True, timeout=deadline.left
        )
    except subprocess.TimeoutExpired:
        return f"{FAIL}: cut by the time limit"
    said = done.stderr.strip().splitlines()
    last = without_paths(said[-1])[:200] if said else "no word"
    return f"{FAIL}: its process ended with status {done.returncode}: {last}"


def parse(argv) -> argparse.Namespace:
    p = argument_parser(__doc__)
    add_arguments(p)
    p.add_argument("--groups", nargs="+", metavar="NAME", help=f"of {', '.join(groups(True))} (default: all)")
    p.add_argument(
        "--workers",
        type=int,
        help="processes at a time (default: half the cores, at most 8; 1 on the CPU, and on a GPU that takes no more)",
    )
    p.add_argument(
        "--rows", type=Path, help=argparse.SUPPRESS
    )  # a process of run_apart: rows into this file, no report
    return p.parse_args(argv)


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    device = choose_device(args.device)
    deadline = Deadline(args.time_limit)
    available = groups(device.type == "cuda")
    names = choose("--groups", args.groups, available)
    if args.workers is not None and args.workers < 1:
        raise ValueError(f"--workers must be at least 1: got {args.workers}.")
    if device.type == "cuda" and (args.workers or 1) > 1 and exclusive():
        raise ValueError(
            f"--workers {args.workers}: the GPU takes one process at a time (nvidia-smi: compute mode Exclusive_Process). "
            "Leave --workers out, which means --workers 1 here; or nvidia-smi -c DEFAULT."
        )
    if args.rows:
        rows = []

        def keep(kind, row):
            rows.append((kind, row))
            write_whole(args.rows, json.dumps(rows).encode())

        for name in names:
            run_group(name, available[name], device, keep)
        return 0

    report = Report("check", args.output, device, {"groups": names})
    results = []
    for kind in COLUMNS:
        report.table(kind, ["case", "bound", *COLUMNS[kind], "bit-equal", "result"])

    def add(kind, row):
        results.append(row["result"])
        report.add(kind, row)

    jobs = args.workers or processes(device)
    if device.type == "cuda" or jobs > 1:
        run_apart(names, device, jobs, deadline, add)
    else:
        for name in names:
            if deadline.passed:
                add(available[name][0].kind, {"case": name, "result": "FAIL: not run: time limit"})
            else:
                run_group(name, available[name], device, add)
    code = status(results)
    if device.type == "cpu":
        report.note("On a CPU every backend is plain PyTorch, at tiny sizes; the Triton kernels are checked on a GPU.")
    elif code == 1:
        report.note(
            "A compiler may be at fault, above all on Hopper: benchmarks/README.md, under check, says what to try."
        )
    said = [f"{results.count('PASS')} of {len(results)} cases passed"]
    said += [f"{results.count(BEYOND)} beyond the bound"] if BEYOND in results else []
    report.finish(STATUS[code], ", ".join(said))
    return code


if __name__ == "__main__":
    sys.exit(main())
