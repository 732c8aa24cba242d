"""python -m interdomain.tools.check_kernels --out benchmarks/results/today

Run every backend of the scan and the one-token step on this machine's GPU (without one: on the CPU, tiny) and compare
outputs, states and all gradients with float64 on the same rounded inputs, by relative RMS error; then once more, for equal
bits. Exit status 1 if anything is beyond its bound. Run it before believing any figure.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
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
from ._cli import user_errors
from ._problems import Shape, make_documents, make_inputs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Relative RMS error. fp32: 3xTF32 or fp32 products and fp32 sums. bf16: operands rounded (1.7e-3 each) at eight places in
# a row; the interpreter's worst is 4.8e-3 (kernels/README.md). fp16 is rounded to bf16 first: 5.6e-3.
BOUNDS = {FP32: 1e-5, BF16: 6e-3, FP16: 8e-3}
LOOP_LIMIT = 512  # tokens: beyond, the float64 chunkwise form judges, which agrees with the loop to 1e-10 by the tests
STEPS = 4

COLUMNS = {
    "scan": ["out", "state", "dq", "dk", "dv", "dlog_decay", "dmixing", "dinitial_state"],
    "linear scan": ["out", "state", "dz", "dlog_decay", "dreadout", "dinitial_state"],
    "step": ["out", "state"],
    "features": _features.COLUMNS,
    "features step": _features.STEP_COLUMNS,
}


@dataclass(frozen=True)
class Case:
    kind: str  # a key of COLUMNS
    shape: Shape
    dtype: torch.dtype = BF16
    backend: str = "chunkwise"
    # Start from a state and return one, with their gradients, or neither, as training does; features: from past inputs.
    state: bool = True
    recompute: bool = True
    chunk_size: int | None = None
    documents: bool = False  # several packed into each sequence
    repeat: bool = False  # run twice and compare bits
    mode: str = ""  # of the steps: "", "in place", "graph"; of the features: which projection
    linear: bool = False  # of the steps
    half: bool = False  # of the steps: W by its upper half and Lambda made beforehand, as a model has them
    wider: int = 0  # channels that v has beyond q and k: the ones of the normalised form

    def __str__(self) -> str:
        words = [self.backend if self.kind != "step" else "linear" if self.linear else "query", str(self.shape)]
        words += [str(self.dtype).removeprefix("torch."), self.mode]
        words += ["" if self.state or self.kind == "step" else "no state", "" if self.recompute else "kept"]
        words += [f"chunk {self.chunk_size}" if self.chunk_size else "", "documents" if self.documents else ""]
        words += ["half of W" if self.half else "", f"v wider by {self.wider}" if self.wider else ""]
        return " ".join(word for word in words if word)


def groups(cuda: bool) -> dict[str, list[Case]]:
    """Cases by group; a group shares compiled kernels and runs in one process. Those that compile longest come first.

    On the CPU the same, at sizes for seconds, without what only a GPU has.
    """

    def q(backend="chunkwise", **kw):
        shape = {k: kw.pop(k) for k in ("B", "T", "H", "d", "M", "G") if k in kw}
        return Case("scan", Shape(**({"B": 2, "T": 257, "H": 4} | shape)), backend=backend, **kw)

    def lin(*args, **kw):
        return replace(q(*args, **kw), kind="linear scan")

    def features(backend, mode, **kw):
        return replace(q(backend, mode=mode, **kw), kind="features")

    def features_step(backend, **kw):
        return replace(q(backend, T=STEPS, **kw), kind="features step")

    def step(**kw):
        return replace(q(T=STEPS, **kw), kind="step")

    every = {
        "documents": [
            *(q(documents=True, repeat=True), q(documents=True, dtype=FP32, G=2, T=130)),
            *(lin(documents=True, T=130), q("parallel", documents=True, T=130), q(documents=True, M=128, T=130)),
            q(B=1, H=32, T=32_768, documents=True, state=False),
        ],
        "chunkwise-fp32": [
            *(q(dtype=FP32, repeat=True), q(dtype=FP32, recompute=False, state=False, T=63)),
            q(dtype=FP32, M=128, T=70),
        ],
        "chunkwise-M128": [q(M=128, repeat=True)],
        "chunkwise": [
            *(q(repeat=True), q(recompute=False, repeat=True), q(T=1, B=1), q(T=256, state=False, repeat=True)),
            q(T=65, G=4, H=2, repeat=True),
        ],
        "sequential": [
            *(q("sequential", repeat=True, T=130), q("sequential", dtype=FP32, G=2, d=96, T=70)),
            *(q("sequential", documents=True, T=130), lin("sequential", documents=True, T=70)),
            *(lin("sequential", repeat=True, T=130), lin("sequential", dtype=FP32, state=False, T=63)),
        ],
        "chunkwise-linear": [
            *(lin(repeat=True), lin(dtype=FP32, T=130), lin(d=96, T=63, state=False)),
            lin(B=1, H=2, T=70_001),
        ],
        "chunkwise-d96": [q(d=96, repeat=True), q(d=96, dtype=FP32, T=70, state=False)],
        "chunkwise-wider": [q(wider=1, T=130, repeat=True), q(wider=1, d=96, T=63, state=False)],
        "parallel-fp32": [
            *(q("parallel", dtype=FP32), lin("parallel", dtype=FP32, state=False)),
        ],
        "parallel": [
            *(q("parallel", repeat=True, T=130), q("parallel", G=2, d=96, T=63), lin("parallel", repeat=True, T=130)),
        ],
        "chunkwise-long": [
            q(B=1, H=32, T=32_768, state=False, repeat=True),  # several segments in flight
            q(B=1, H=2, T=70_001),  # beyond 65,536, and ragged
        ],
        "chunkwise-M16-M32": [q(M=16, T=130), q(M=32, T=130)],
        # Converted tiles are transposed in registers, which Triton has got wrong on Hopper.
        "chunkwise-fp16": [q(dtype=FP16, T=130, repeat=True), lin(dtype=FP16, T=130)],
        "chunkwise-chunk32": [q(chunk_size=32, T=130, repeat=True)],
        "fft": [
            *(q("fft", repeat=True, T=130), q("fft", dtype=FP32, T=257), q("fft", G=2, d=96, T=63, state=False)),
            *(lin("fft", T=130), lin("fft", dtype=FP32, T=257, state=False)),
        ],
        "chunkwise-torch": [
            *(q("chunkwise-torch", repeat=True), q("chunkwise-torch", dtype=FP32, G=2, d=96, T=130)),
            *(lin("chunkwise-torch", T=130), lin("chunkwise-torch", dtype=FP32, T=65)),
        ],
        "reference": [q("reference", dtype=FP32, T=63), lin("reference", dtype=FP32, T=63)],
        "features": [
            *(features("triton", mode, repeat=True) for mode in _features.STAGES),
            *(features("triton", mode, dtype=FP32, d=96, T=65) for mode in ("query", "key", "value")),
            *(features("triton", "key", state=False, T=1), features("triton", "key", B=1, T=70_001)),
            *(features("triton", mode, documents=True) for mode in ("query", "key")),
            *(features("torch", "key", documents=True), features("torch", "a", dtype=FP32)),
        ],
        "step": [
            *(step(), step(mode="in place"), step(mode="graph"), step(dtype=FP32, G=4, H=2), step(d=96, B=3, H=5)),
            *(step(half=True, mode=mode) for mode in ("", "in place", "graph")),
            *(step(half=True, dtype=FP32, G=4, H=2, B=40), step(half=True, d=96, wider=1)),
            *(step(linear=True), step(linear=True, mode="in place"), step(linear=True, mode="graph", dtype=FP32, d=96)),
            *(
                features_step("triton"),
                features_step("triton", B=1),
                features_step("triton", dtype=FP32, d=96, B=19, H=5),
            ),
            features_step("torch"),
        ],
    }
    if cuda:
        return every
    del every["sequential"]  # Triton's only
    return {
        name: [_tiny(c) for c in cases if c.mode != "graph" and c.backend != "triton"] for name, cases in every.items()
    }


def _tiny(case: Case) -> Case:
    s = case.shape
    small = Shape(B=min(s.B, 2), T=min(s.T, 33), H=min(s.H, 2), d=s.d // 8, M=s.M // 8, G=min(s.G, 2))
    return replace(case, shape=small, chunk_size=case.chunk_size and 8)


def run_case(case: Case, device: torch.device) -> dict:
    """A row: errors by tensor, whether two runs were equal in every bit, PASS or FAIL or the reason it could not run."""
    row = {"case": str(case), "bound": BOUNDS[case.dtype], "bit-equal": None}
    try:
        run = {"step": _step, "features": _input_features, "features step": _input_features_step}
        got, exact, again = run.get(case.kind, _scan)(case, device)
    except Exception as e:
        row["result"] = f"FAIL: {reason(e)}"
    else:
        row |= {name: relative_rms(got[name], exact[name]) for name in exact}
        if again is not None:
            row["bit-equal"] = all(torch.equal(got[name], again[name]) for name in got)
        # `not <` instead of `>`: a NaN must fail.
        beyond = [name for name in exact if not row[name] < row["bound"]]
        row["result"] = "FAIL" if beyond or row["bit-equal"] is False else "PASS"
        row["worst"] = max(row[name] for name in exact)
    return row


def relative_rms(got: Tensor, exact: Tensor) -> float:
    """RMS of the error over RMS of the value; both in float64."""
    if got.shape != exact.shape:
        raise ValueError(f"the result has shape {tuple(got.shape)}, expected {tuple(exact.shape)}")
    got, exact = got.detach().double(), exact.detach().double()
    return ((got - exact).square().mean().sqrt() / exact.square().mean().sqrt().clamp_min(1e-300)).item()


def _scan(case: Case, device: torch.device) -> tuple[dict, dict, dict | None]:
    linear = case.kind == "linear scan"
    what = dict(linear=linear, state=case.state, mixed=True, wider=case.wider)
    inputs, cotangents = make_inputs(case.shape, case.dtype, device, **what)
    options = {} if linear else {"recompute": case.recompute}
    documents = make_documents(case.shape, device) if case.documents else None

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


def _input_features(case: Case, device: torch.device) -> tuple[dict, dict, dict | None]:
    packed = case.documents
    return _features.results(case.mode, case.shape, case.dtype, device, case.backend, case.state, case.repeat, packed)


def _input_features_step(case: Case, device: torch.device) -> tuple[dict, dict, None]:
    return _features.step_results(case.shape, case.dtype, device, case.backend)


def _step(case: Case, device: torch.device) -> tuple[dict, dict, None]:
    """STEPS tokens one by one from a state, against the float64 loop over the same tokens."""
    what = dict(linear=case.linear, state=True, mixed=True, wider=case.wider)
    inputs, _ = make_inputs(case.shape, case.dtype, device, **what)
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
        row = {"case": str(case), "bound": BOUNDS[case.dtype], "result": f"FAIL: {broken}"} if broken else None
        row = {"group": name, **(row or run_case(case, device))}
        if not broken:
            try:
                require_healthy(device, str(case))
            except RuntimeError as e:
                broken = str(e)
                row["result"] = f"FAIL: {broken}"
        report(case.kind, row)


def run_apart(names: list[str], device: torch.device, jobs: int, deadline: Deadline, report) -> None:
    """Groups in processes of their own, several at a time: compilation takes most of the time, and a crash stays alone."""
    expected = groups(device.type == "cuda")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(_worker, name, device, Path(folder), deadline): name for name in names}
        for done in as_completed(running):
            name = running[done]
            rows, problem = done.result()
            for kind, row in rows:
                report(kind, row)
            for case in expected[name][len(rows) :]:
                report(case.kind, {"group": name, "case": str(case), "bound": BOUNDS[case.dtype], "result": problem})


def _worker(name: str, device: torch.device, folder: Path, deadline: Deadline) -> tuple[list, str]:
    """(rows of a group, what to say of its cases that have none)."""
    file = folder / f"{name}.json"
    command = [sys.executable, "-m", "interdomain.tools.check_kernels", "--groups", name, "--rows", str(file)]
    problem = "FAIL: not run: time limit"
    if not deadline.passed:
        try:
            done = subprocess.run(
                [*command, "--device", device.type], capture_output=True, text=True, timeout=deadline.left
            )
            said = done.stderr.strip().splitlines()
            last = without_paths(said[-1])[:200] if said else "no word"
            problem = f"FAIL: its process ended with status {done.returncode}: {last}"
        except subprocess.TimeoutExpired:
            problem = "FAIL: cut by the time limit"
    return (json.loads(file.read_text()) if file.is_file() else []), problem


def parse(argv) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="python -m interdomain.tools.check_kernels", description=__doc__.split("\n\n")[1], allow_abbrev=False
    )
    add_arguments(p)
    p.add_argument("--groups", nargs="+", metavar="NAME", help=f"of {', '.join(groups(True))} (default: all)")
    p.add_argument(
        "--jobs",
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
    if args.jobs is not None and args.jobs < 1:
        raise ValueError(f"--jobs must be at least 1: got {args.jobs}.")
    if device.type == "cuda" and (args.jobs or 1) > 1 and exclusive():
        raise ValueError(
            f"--jobs {args.jobs}: the GPU takes one process at a time (nvidia-smi: compute mode Exclusive_Process). Leave "
            "--jobs out, which means --jobs 1 here; or nvidia-smi -c DEFAULT."
        )
    if args.rows:
        rows = []

        def keep(kind, row):
            rows.append((kind, row))
            write_whole(args.rows, json.dumps(rows).encode())

        for name in names:
            run_group(name, available[name], device, keep)
        return 0

    report = Report("check", args.out, device, {"groups": names})
    results = []
    for kind in COLUMNS:
        report.table(kind, ["case", "bound", *COLUMNS[kind], "bit-equal", "result"])

    def add(kind, row):
        results.append(row["result"])
        report.add(kind, row)

    jobs = args.jobs or processes(device)
    if device.type == "cuda" or jobs > 1:
        run_apart(names, device, jobs, deadline, add)
    else:
        for name in names:
            if deadline.passed:
                add(available[name][0].kind, {"case": name, "result": "FAIL: not run: time limit"})
            else:
                run_group(name, available[name], device, add)
    failed = sum(result != "PASS" for result in results)
    if device.type == "cpu":
        report.note("On a CPU every backend is plain PyTorch, at tiny sizes; the Triton kernels are checked on a GPU.")
    elif failed:
        report.note(
            "A compiler may be at fault, above all on Hopper: benchmarks/README.md, under check, says what to try."
        )
    report.finish("failed" if failed else "passed", f"{len(results) - failed} of {len(results)} cases passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
