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

from .scan.devices import use_kernels

MARGIN = 1.5


def on_this_machine(case: Case) -> Case:
    """Returns the case that runs in its place: once, not as a CUDA graph, at a length that the interpreter can reach."""
    case = replace(case, repeat=False)
    if case.mode == "graph":
        case = replace(case, mode="in place")
    tokens = case.shape.T
    if tokens > 10_000:  # still long enough for several segments
        case = replace(case, shape=replace(case.shape, T=2048 + tokens % 64, H=4))
    return case


def margin_of(result: dict) -> float:
    return result["bound"] / result["worst"]


def main(argv: list[str] | None = None) -> int:
    description = __doc__.split("\n\n")[1]
    parser = argparse.ArgumentParser(prog="python -m tests.rehearse", description=description)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--table", type=Path, required=True, help="file of the table, in Markdown")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="cases whose names hold every word"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    cells = [["case", "seeds", "bound", "worst", "in", "margin"]]
    margins = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_kernels(monkeypatch)
        for case in itertools.chain.from_iterable(groups(True).values()):
            if not all(word in str(case) for word in args.only):
                continue
            results = []
            for seed in range(args.seeds):
                run = on_this_machine(case)
                results.append(check_kernels.run_case(run, torch.device("cpu"), seed))
            # The tensor that came nearest to its bound over all seeds
            nearest = min(results, key=margin_of)
            margins.append(margin_of(nearest))
            errors = [f"{nearest['bound']:.1e}", f"{nearest['worst']:.1e}", nearest["in"]]
            cells.append([str(case), str(args.seeds), *errors, f"{margins[-1]:.1f}"])
            args.table.write_text("\n".join(markdown_rows(cells)) + "\n")
    print(f"{len(margins)} cases; every bound at least {min(margins):.1f} times the worst")
    return int(min(margins) < MARGIN)


if __name__ == "__main__":
    sys.exit(main())
