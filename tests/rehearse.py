"""TRITON_INTERPRET=1 python -m tests.rehearse --seeds 20 --table page.md

Run the cases of tools/check_kernels.py on a CPU: the kernels in Triton's interpreter, planned as for Hopper, on the numbers
that a GPU will see (seed 0) and on those of other seeds. The table has the tensor of each case that came nearest to its bound:
the draws of the inputs, the bound, the worst relative RMS error against float64, the tensor, and bound / worst.
`--only chunkwise T=130` runs the cases whose names hold every word. Exit status 1 if an error is more than its bound / 1.5.

What differs from a GPU: fp32 products are exact to fp32, not 3xTF32; sums have another order; CUDA graphs run as plain calls;
the longest sequences are cut.
"""

import argparse
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from interdomain.markdown import markdown_rows
from interdomain.tools import check_kernels
from interdomain.tools._bench.cases import Case, groups

from .scan.devices import INTERPRETED, use_kernels

MARGIN = 1.5


def row(case: Case, seeds: int) -> tuple[list[str], float]:
    """A case's line, for the tensor that came nearest to its bound over all seeds; and bound / error of that tensor."""
    run = replace(case, repeat=False, mode="in place" if case.mode == "graph" else case.mode)
    if case.shape.T > 10_000:  # still long enough for several segments
        run = replace(run, shape=replace(case.shape, T=2048 + case.shape.T % 64, H=4))
    results = [check_kernels.run_case(run, torch.device("cpu"), seed) for seed in range(seeds)]
    worst = max(results, key=lambda one: one["worst"] / one["bound"])
    margin = worst["bound"] / worst["worst"]
    numbers = [f"{worst['bound']:.1e}", f"{worst['worst']:.1e}", worst["in"], f"{margin:.1f}"]
    return [str(case), str(seeds), *numbers], margin


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.rehearse", description=__doc__.split("\n\n")[1]
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--table", type=Path, required=True, help="file of the table, in Markdown")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="cases whose names hold every word"
    )
    args = parser.parse_args(argv)
    if not INTERPRETED:
        parser.error(
            "Triton's interpreter is chosen before triton is imported: set TRITON_INTERPRET=1"
        )
    torch.set_num_threads(1)
    cells, margins = [["case", "seeds", "bound", "worst", "in", "margin"]], []
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_kernels(monkeypatch)
        for case in itertools.chain.from_iterable(groups(True).values()):
            if all(word in str(case) for word in args.only):
                cell, margin = row(case, args.seeds)
                cells.append(cell)
                margins.append(margin)
                print(*cell, sep=" | ", flush=True)
                args.table.write_text("\n".join(markdown_rows(cells)) + "\n")
    good = min(margins) >= MARGIN
    print(f"{len(margins)} cases; every bound at least {MARGIN} times the worst: {good}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
