"""The shipped kernels against a written budget, by compilation alone. No GPU needed."""

import pytest

from .devices import compiled

pytest.importorskip("triton")

# Bytes of shared memory of a program of `chunkwise`. sm_90 has 227 KB for two programs; sm_89 99 KB, which sm_80 has, too.
SHARED = {90: 113 * 1024, 89: 99 * 1024, 80: 99 * 1024}
REGISTERS = 255  # of a thread, at 128 threads and two programs per multiprocessor
# Bytes per thread: a few loads per chunk of 800 instructions. fp32 is there to check with; 3xTF32 holds operands twice.
SPILL = {"bf16": 256, "fp32": 512}
# Of the other kernels: spilled bytes, shared memory. `features` has 1 KB before the loop, and spills 136 bytes, in Triton 3.6.
OTHERS = {"step": (64, 48 * 1024), "features": (144, 2048), "features_step": (0, 2048)}

ROWS = {
    # R x D x M: all launches that train on sm_90 in bf16; beside them, of each kernel the one that does most.
    (90, "bf16"): [
        *("64x64x64:training", "64x64x64:documents+ragged+most", "64x64x64:linear+most", "96x96x64:most"),
        "64x64x64:shards+sweeps",
        *("step/64x64x64", "features/64x64x64:k", "features_step/64x64x64"),
    ],
    (90, "fp32"): ["64x64x64:ragged+most"],
    (80, "bf16"): ["64x64x64:ragged+most", "features/96x96x64:k+past+documents"],
    (89, "bf16"): ["64x64x64:shards+sweeps"],
    (89, "fp32"): ["step/128x129x128:G2"],
}
SCAN = ("contract", "expand", "mix", "adjoint", "tables", "chain", "sum", "contract_step", "expand_step")
KERNELS = {f"{name}_kernel" for name in (*SCAN, "forward", "backward", "step")}  # the last three are of the features


@pytest.mark.slow_group("kernels/", "tests/scan/", "tests/features/")
def test_budget(tmp_path):
    arguments = [x for (capability, dtype), shapes in ROWS.items() for x in (str(capability), dtype, *shapes)]
    reports = compiled(tmp_path, "tests.scan.triton_budget", *arguments)
    assert {r["kernel"] for r in reports if r["capability"] == 90} == KERNELS
    over = []
    for r in reports:
        family = r["shape"].rpartition("/")[0]
        spill, shared = OTHERS.get(family, (SPILL[r["dtype"]], SHARED[r["capability"]]))
        # On Hopper, transpositions of registers are what compilers get wrong. Elsewhere loaded tiles take that path, too.
        transposed = r["transposed"] if (r["capability"], r["dtype"], family) == (90, "bf16", "") else 0
        if r["registers"] > REGISTERS or r["spill"] > spill or r["shared"] > shared or transposed or r["serialized"]:
            over.append(str(r))
    assert not over, "\n".join(over)
