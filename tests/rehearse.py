"""TRITON_INTERPRET=1 python -m tests.rehearse --seeds 20 --rows rows.jsonl --table page.md

Rehearse the cases of tools/check_kernels.py on a CPU: the kernels under Triton's interpreter with the plan for Hopper, on the
numbers that a GPU will see (seed 0) and on those of other seeds. The table has the worst error of each case beside its bound.

Rows are appended as they come; what the file already has is not run again, so take a new file for other kernels. `--only
chunkwise T=130` runs the cases whose names hold every word. Exit status 1 if 1.5 times an error is beyond its bound.

What differs from a GPU: fp32 products are exact to fp32, not 3xTF32; sums have another order; CUDA graphs run as plain calls;
the longest sequences are cut.
"""

import argparse
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton

from interdomain.scan import triton_launch
from interdomain.tools import check_kernels
from interdomain.tools._bench import markdown_rows
from interdomain.tools._cases import COLUMNS, bound, groups
from interdomain.tools._problems import CPU

from .scan.devices import INTERPRETED, use_kernels

MARGIN = 1.5


class WiderPrograms:
    """chain_kernel with 2,048 numbers of the state per program in place of 32: the same operations in less of the time."""

    def __init__(self, kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*args, M, BE, **constants):
            states, width = grid[0] // triton.cdiv(M * args[7], BE), 2048
            self.kernel[(states * triton.cdiv(M * args[7], width),)](*args, M=M, BE=width, **constants)

        return launch


def cases() -> dict:
    """{name: (what is run, arithmetic)}"""
    found = {}
    for case in itertools.chain.from_iterable(groups(True).values()):
        run = replace(case, repeat=False, mode="in place" if case.mode == "graph" else case.mode)
        if case.shape.T > 10_000:  # still long enough for several segments
            run = replace(run, shape=replace(case.shape, T=2048 + case.shape.T % 64, H=4))
        found[f"{case.kind}: {case}"] = run, case.arithmetic
    return found


def errors(case, seed: int) -> dict[str, float]:
    row = check_kernels.run_case(case, CPU, seed)
    found = {name: row[name] for name in COLUMNS[case.kind] if name in row}
    if not found:
        raise RuntimeError(f"{case}: {row['result']}")
    return found


def table(every: dict, rows: list[dict]) -> tuple[list[str], bool]:
    """A row for each case, of the tensor that came nearest to its bound, and whether every tensor has its margin."""
    cells, margins = [["case", "seeds", "bound", "worst", "in", "margin"]], []
    for name, (_, arithmetic) in every.items():
        mine = [row["errors"] for row in rows if row["name"] == name]
        found = [(bound(arithmetic, tensor) / x, x, tensor) for row in mine for tensor, x in row.items() if x]
        if found:
            margin, error, tensor = min(found)
            margins.append(margin)
            limit = f"{bound(arithmetic, tensor):.1e}"
            cells.append([name, str(len(mine)), limit, f"{error:.1e}", tensor, f"{margin:.1f}"])
    return markdown_rows(cells), min(margins) >= MARGIN


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rehearse", description=__doc__.split("\n\n")[1])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--rows", type=Path, required=True, help="file of rows, continued if it is there")
    parser.add_argument("--table", type=Path, help="file of the table, in Markdown")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases whose names hold every word")
    args = parser.parse_args()
    if not INTERPRETED:
        parser.error("Triton's interpreter is chosen before triton is imported: set TRITON_INTERPRET=1")
    torch.set_num_threads(1)
    every = {name: case for name, case in cases().items() if all(word in name for word in args.only)}
    rows = [json.loads(line) for line in args.rows.read_text().splitlines()] if args.rows.exists() else []
    done = {(row["name"], row["seed"]) for row in rows}
    with pytest.MonkeyPatch.context() as monkeypatch, args.rows.open("a") as file:
        use_kernels(monkeypatch)
        monkeypatch.setattr(triton_launch, "chain_kernel", WiderPrograms(triton_launch.chain_kernel))
        for seed, name in itertools.product(range(args.seeds), every):
            if (name, seed) not in done:
                rows.append({"name": name, "seed": seed, "errors": errors(every[name][0], seed)})
                file.write(json.dumps(rows[-1]) + "\n")
                file.flush()
                print(seed, name, flush=True)
    lines, good = table(every, rows)
    if args.table:
        args.table.write_text("\n".join(["# Errors before the first GPU", "", *lines]) + "\n")
    print("\n".join(lines))
    print(f"{len(rows)} runs; every bound at least {MARGIN} times the worst: {good}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
