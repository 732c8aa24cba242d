"""TRITON_INTERPRET=1 python -m tests.rehearse --seeds 20 --rows rehearsal.jsonl --table rehearsal.md

Run every case of tools/check_kernels.py, and every test marked `gpu` that compares with a bound, on a CPU: the kernels under
Triton's interpreter with the plan for Hopper, on the numbers that a GPU will see (seed 0) and on those of other seeds. The
table has the worst error of each case beside its bound. Cases that are plain PyTorch run as they are.

Rows are appended as they come, seed after seed; what the file already has is not run again, so take a new file for other
kernels. `--only chunkwise T=130` runs the cases whose names hold every word. Exit status 1 if 1.5 times an error is beyond
its bound.

What differs from a GPU: fp32 products are exact to fp32, not 3xTF32 (2.6e-7 at worst in tests/ptx); sums have another
order; CUDA graphs run as plain calls; the longest sequences are cut (`cut` in the table).
"""

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import triton

if os.environ.get("TRITON_INTERPRET") != "1":
    sys.exit(
        "error: Triton's interpreter is chosen before triton is imported: TRITON_INTERPRET=1 python -m tests.rehearse"
    )

from interdomain import scan
from interdomain.features import support
from interdomain.scan import ops, triton_launch
from interdomain.tools import check_kernels
from interdomain.tools._bench import markdown_rows
from interdomain.tools._cases import COLUMNS, bound, groups
from interdomain.tools._problems import CPU

from .features import common as features_common
from .features import test_triton as features_tests
from .scan import test_triton_chunkwise, test_triton_gpu

MARGIN = 1.5


@dataclass(frozen=True)
class Item:
    group: str
    name: str
    arithmetic: str
    run: Callable[[int], dict[str, float]]  # seed -> errors by tensor
    remark: str = ""


def items() -> list[Item]:
    return [*_cases(), *_full_tiles(), *_long_sequences(), *_real_shapes()]


def _cases():
    for group, cases in groups(True).items():
        for case in cases:
            run, remark = replace(case, repeat=False, mode="in place" if case.mode == "graph" else case.mode), ""
            if case.shape.T > 10_000:
                ragged = case.shape.T % 64  # long enough for several segments
                run = replace(run, shape=replace(case.shape, T=2048 + ragged, H=4))
                remark = f"cut to T={run.shape.T} H=4"
            name = f"{case.kind}: {case}"
            yield Item(group, name, case.arithmetic, lambda seed, case=run: _errors(case, seed), remark)


def _errors(case, seed):
    row = check_kernels.run_case(case, CPU, seed)
    names = [name for name in COLUMNS[case.kind] if name in row]
    if not names:
        raise RuntimeError(f"{case}: {row['result']}")
    return {name: row[name] for name in names}


def _full_tiles():
    for linear in (False, True):
        for sizes in test_triton_gpu.FULL_TILES:
            for dtype in test_triton_gpu.DTYPES:
                for backend in ("chunkwise", "parallel"):

                    def run(seed, linear=linear, sizes=sizes, dtype=dtype, backend=backend):
                        test_triton_chunkwise.problem.cache_clear()
                        return test_triton_chunkwise.errors(
                            test_triton_gpu.full_tiles(sizes, dtype, linear, seed), dtype, linear, backend=backend
                        )

                    what = f"test_full_tiles: {sizes} {'linear' if linear else 'query'} {_word(dtype)} {backend}"
                    yield Item("test_full_tiles", what, test_triton_gpu.ARITHMETIC[dtype], run)


def _long_sequences():
    for backend in ("chunkwise", "parallel"):
        yield Item(
            "test_long_sequences",
            f"test_long_sequences: {backend}",
            "bf16",
            lambda seed, backend=backend: test_triton_gpu.long_sequence_errors(backend, T=1105, seed=seed),
            "cut to T=1105",
        )


def _real_shapes():
    for shape in features_tests.SHAPES:
        small = (shape[0], min(shape[1], 40), min(shape[2], 8), shape[3])
        for mix in features_common.MIXES:
            for dtype, arithmetic in features_tests.ARITHMETIC.items():

                def run(seed, mix=mix, small=small, dtype=dtype):
                    case, problem, expected = features_tests.real_problem(mix, small, dtype, seed)
                    return features_common.errors(features_common.run(case, *problem, backend="triton"), expected)

                remark = "" if small == shape else f"cut to {small}"
                what = f"test_real_shapes: {shape} {mix} {_word(dtype)}"
                yield Item("test_real_shapes", what, arithmetic, run, remark)


def _word(dtype):
    return str(dtype).removeprefix("torch.")


def interpret(monkeypatch) -> None:
    """Tensors on the CPU meet the kernels, under the repaired interpreter."""
    features_tests.repair(monkeypatch)
    monkeypatch.setattr(triton_launch, "chain_kernel", _WiderPrograms(triton_launch.chain_kernel))
    monkeypatch.setattr(support, "unsupported", lambda *args: None)
    monkeypatch.setattr(scan, "_choose", lambda backend, *args: backend)
    monkeypatch.setattr(scan, "_fused", lambda device: True)
    for backend in ("chunkwise", "parallel"):
        monkeypatch.setitem(ops.IMPLEMENTATIONS, backend, ops.TRITON[backend])


class _WiderPrograms:
    """chain_kernel with 2,048 numbers of the state per program in place of 32: the same operations on each number, in less
    of the interpreter's time."""

    def __init__(self, kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*args, M, BE, **constants):
            states, width = grid[0] // triton.cdiv(M * args[7], BE), 2048
            self.kernel[(states * triton.cdiv(M * args[7], width),)](*args, M=M, BE=width, **constants)

        return launch


KINDS = {
    "scan": "scans",
    "linear scan": "scans",
    "step": "steps",
    "features step": "steps",
    "features": "input features",
}


def tables(every: list[Item], rows: list[dict]) -> tuple[list[str], list[str], bool]:
    """Lines of the short and of the full table, and whether every tensor has its margin. A case's worst tensor is the one
    that comes nearest to its bound."""
    full, short, margins = [], {}, []
    for item in every:
        mine = [row["errors"] for row in rows if row["name"] == item.name]
        found = [(bound(item.arithmetic, tensor) / x, x, tensor) for row in mine for tensor, x in row.items() if x]
        if not found:
            continue
        margin, error, tensor = min(found)
        margins.append(margin)
        limit = f"{bound(item.arithmetic, tensor):.1e}"
        full.append([item.group, item.name, len(mine), limit, f"{error:.1e}", tensor, f"{margin:.1f}", item.remark])
        kind, _, case = item.name.partition(": ")
        seeds, worst = short.get((KINDS.get(kind, kind), item.arithmetic), ([], (1e9,)))
        worst = min(worst, (margin, f"{error:.1e}", limit, tensor, case))
        short[KINDS.get(kind, kind), item.arithmetic] = [*seeds, len(mine)], worst
    summary = [
        [*key, len(seeds), f"{min(seeds)} to {max(seeds)}", limit, error, f"{margin:.1f}", f"{tensor}, {case}"]
        for key, (seeds, (margin, error, limit, tensor, case)) in short.items()
    ]
    heads = ["seeds", "bound", "worst", "margin"]
    return (
        markdown_rows([["", "arithmetic", "cases", *heads, "in"], *_text(summary)]),
        markdown_rows([["group", "case", *heads[:3], "in", "margin", "remark"], *_text(full)]),
        min(margins) >= MARGIN,
    )


def _text(rows: list[list]) -> list[list[str]]:
    return [[str(cell) for cell in row] for row in rows]


PAGE = """# Errors before the first GPU

Nothing here ran on a GPU. This page is from `TRITON_INTERPRET=1 python -m tests.rehearse --seeds 20 --rows FILE --table PAGE`:
the cases of `tools/check_kernels.py`, and the tests marked `gpu` that compare with a bound, in Triton's interpreter
(PyTorch {torch}, Triton {triton}), on the numbers that a GPU will see (seed 0) and on other draws of them. Errors are relative
RMS against float64, of the tensor that came nearest to its bound over all seeds; the margin is bound / worst. In the
interpreter fp32 products are fp32, on a GPU 3xTF32 (2.6e-7 at worst in the emulator of tests/ptx); sums have another order;
CUDA graphs run as plain calls; long sequences are cut as the remark says.
"""


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m tests.rehearse", description=__doc__.split("\n\n")[1])
    p.add_argument("--seeds", type=int, default=20)
    p.add_argument("--rows", type=Path, help="file of rows, continued if it is there")
    p.add_argument("--table", type=Path, help="file of the table, in Markdown")
    p.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases whose group and name hold every word")
    args = p.parse_args()
    torch.set_num_threads(1)
    every = [item for item in items() if all(word in f"{item.group} {item.name}" for word in args.only)]
    rows = [json.loads(line) for line in args.rows.read_text().splitlines()] if args.rows and args.rows.exists() else []
    done = {(row["name"], row["seed"]) for row in rows}
    with pytest.MonkeyPatch.context() as monkeypatch:
        interpret(monkeypatch)
        for seed, item in itertools.product(range(args.seeds), every):
            if (item.name, seed) in done:
                continue
            began = time.monotonic()
            errors = item.run(seed)
            row = {"name": item.name, "seed": seed, "seconds": round(time.monotonic() - began, 2), "errors": errors}
            rows.append(row)
            worst = max((x / bound(item.arithmetic, tensor), tensor) for tensor, x in errors.items())
            print(f"{seed:3} {row['seconds']:6.1f} s  {worst[0]:.2f} bounds in {worst[1]}  {item.name}", flush=True)
            if args.rows:
                with args.rows.open("a") as f:
                    f.write(json.dumps(row) + "\n")
    summary, full, good = tables(every, rows)
    if args.table:
        page = PAGE.format(torch=torch.__version__, triton=triton.__version__)
        args.table.write_text("\n".join([page, *summary, "", *full]) + "\n")
    print("\n".join(summary if len(full) > 20 else full))
    seconds = sum(row["seconds"] for row in rows)
    print(f"{len(rows)} runs, {seconds / 60:.0f} minutes; every bound at least {MARGIN} times the worst: {good}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
