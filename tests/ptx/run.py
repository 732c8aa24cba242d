"""Runs tests on what Triton compiles for GPUs that are not there: python -m tests.ptx.run 80,90 tests/ptx/tiles.py -k segments

The first argument names compute capabilities (80, 89, 90), the others are pytest's. Tests of the Triton kernels that else run
in Triton's interpreter, tests/scan/test_triton_chunkwise.py and its like, run on the emulator instead, and fail on what it
finds, too. The last line but pytest's says how much ran.
"""

import os
import sys

import pytest

from ..scan import triton_interpreter
from .launch import emulated


class Report:
    """A pytest plugin: a test whose launches did what no kernel may fails."""

    def __init__(self, launches):
        self.launches, self.totals, self.notes = launches, [0, 0, 0], {}

    def pytest_collection_modifyitems(self, items):
        """Tests that start the interpreter in a process of its own, or compile, have nothing to do here."""
        items[:] = [x for x in items if not x.name.startswith(("test_in_the_interpreter", "test_budget"))]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item):
        self.launches.clear()
        outcome = yield
        faults = [
            f"{launch['kernel']}: {kind}, {n} times: {where}"
            for launch in self.launches
            for (kind, where), n in launch["findings"].faults().items()
        ]
        for launch in self.launches:
            for (kind, _), n in launch["findings"].items():
                if kind.startswith("note:"):
                    self.notes[launch["kernel"], kind] = self.notes.get((launch["kernel"], kind), 0) + n
        self.totals = [a + b for a, b in zip(self.totals, self.counts(), strict=True)]
        if faults and outcome.excinfo is None:
            outcome.force_exception(AssertionError("\n".join(faults[:20])))

    def counts(self):
        return (
            len(self.launches),
            sum(x["instructions"] for x in self.launches),
            sum(x["seconds"] for x in self.launches),
        )

    def pytest_terminal_summary(self, terminalreporter):
        for (kernel, kind), n in self.notes.items():
            terminalreporter.write_line(f"{kernel}: {n:,} times {kind}")
        launches, instructions, seconds = self.totals
        terminalreporter.write_line(f"emulated {launches} launches, {instructions:,} instructions, {seconds:.0f} s")


def main(argv=None) -> int:
    capabilities, *rest = argv or sys.argv[1:]
    # The kernels are imported by now, to be compiled; the tests, which are not, take this for the interpreter.
    os.environ["TRITON_INTERPRET"] = "1"
    triton_interpreter.repair = lambda monkeypatch: None
    codes = []
    for capability in capabilities.split(","):
        with emulated(int(capability)) as launches:
            # Those that start the interpreter in a process of its own have nothing to do here.
            codes.append(
                pytest.main(["-p", "no:xdist", "-k", "not in_the_interpreter", *rest], plugins=[Report(launches)])
            )
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
