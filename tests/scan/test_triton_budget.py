"""The recurrence and the step in Triton against a written budget, by compilation alone. No GPU; one process per row."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

REGISTERS = 255
SPILL = 64  # bytes per thread; the shipped tiles spill nothing
SHARED = 48 * 1024  # bytes per program: several on every multiprocessor since sm_80


@pytest.mark.parametrize(
    ("capability", "dtype", "shapes"),
    [
        (
            90,
            "bf16",
            ["sequential/64x64x64:documents", "sequential/64x64x64:linear", "step/64x64x64", "step/64x64x64:linear"],
        ),
        (80, "bf16", ["sequential/96x97x64", "step/96x97x64", "step/64x64x64:G4"]),
        (89, "fp32", ["sequential/128x129x128:linear", "sequential/128x129x128:G2", "step/128x129x128:G2"]),
    ],
    ids=["sm_90", "sm_80", "sm_89"],
)
def test_budget(capability, dtype, shapes, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.scan.triton_budget", str(capability), dtype, *shapes]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    kernels = {r["kernel"] for r in reports}
    assert kernels >= {
        "contract_scan_kernel",
        "expand_scan_kernel",
        "reverse_scan_kernel",
        "contract_step_kernel",
        "expand_step_kernel",
    }
    over = [r for r in reports if r["registers"] > REGISTERS or r["spill"] > SPILL or r["shared"] > SHARED]
    assert not over, "\n".join(map(str, over))
