"""The recurrence and the step in Triton against a written budget, by compilation alone. No GPU."""

import importlib.util

import pytest

from .test_triton_compile import compiled

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

REGISTERS = 255
SPILL = 64  # bytes per thread; the shipped tiles spill nothing
SHARED = 48 * 1024  # bytes per program: several on every multiprocessor since sm_80


ROWS = {
    (90, "bf16"): [
        "sequential/64x64x64:documents+most",
        "sequential/64x64x64:linear+most",
        "step/64x64x64",
        "step/64x64x64:linear",
    ],
    (80, "bf16"): ["sequential/96x97x64:most", "step/96x97x64:most", "step/64x64x64:G4"],
    (89, "fp32"): ["sequential/128x129x128:linear+most", "sequential/128x129x128:G2+most", "step/128x129x128:G2"],
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return compiled(ROWS, tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize(("capability", "dtype"), ROWS, ids=str)
def test_budget(capability, dtype, reports):
    reports = reports[capability, dtype]
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
