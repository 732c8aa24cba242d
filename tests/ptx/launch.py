"""Stands where the kernels of `chunkwise` do: compiles each launch for a GPU that is not there and follows it on CPU tensors.

    with emulated(90) as findings:
        interdomain_scan(..., backend="chunkwise")

What is compiled is what the launch code asks for. The first and the last program of a launch are followed; what they write is
no result, since numbers are not computed.
"""

import contextlib
import re
from unittest import mock

import pytest
import torch

from interdomain.scan import ops, triton_launch, triton_plan

from ..scan import triton_budget
from .machine import Machine
from .memory import SPAN, Fault, Findings, Global
from .parse import Kernel, parse

LARGEST = 227 * 1024  # bytes of shared memory of a program on sm_90


def follow(code: Kernel, passed, programs, shared) -> Findings:
    """Faults in these programs of the entry on tensors and numbers. shared: bytes."""
    if shared > LARGEST:
        raise Fault(f"{code.name} asks for {shared} bytes of shared memory")
    storages, pointers = [], {}
    for x in passed:
        if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in pointers:
            storages.append(torch.tensor((), dtype=torch.uint8).set_(x.untyped_storage()).numpy())
            pointers[x.untyped_storage().data_ptr()] = len(storages)

    def value(x):
        if isinstance(x, torch.Tensor):
            return (
                pointers[x.untyped_storage().data_ptr()] * SPAN
                + x.storage_offset() * x.element_size()
            )
        return x

    opcodes = " ".join(i.opcode for block in code.blocks for i in block)
    widths = re.findall(r"\b(?:ld|st)\.shared\S*?\.[busf](\d+)\b", opcodes)
    granule = min(
        [4, *(int(x) // 8 for x in widths)]
    )  # the narrowest access to shared memory, 4 bytes at most
    findings = Findings()
    for program in sorted(set(programs)):
        memory = Global(storages, code.constants)
        Machine(code, memory, [value(x) for x in passed], program, shared, granule, findings).run()
    return findings


class Followed:
    """kernel[grid](*args, **constants) as Triton has it."""

    compiled: dict = {}  # noqa: RUF012 (of all kernels)

    def __init__(self, kernel, capability, findings):
        self.kernel, self.capability, self.findings = kernel, capability, findings

    def __getitem__(self, grid):
        return lambda *args, **constants: self.launch(grid[0], args, constants)

    def launch(self, grid, args, constants):
        launch = triton_budget.described(self.kernel, *args, **constants)
        key = repr((launch, self.capability))
        if key not in self.compiled:
            compiled = triton_budget.compile_launch(launch, self.capability)
            self.compiled[key] = (
                parse(compiled.asm["ptx"]),
                triton_budget.report(launch, compiled, self.capability),
            )
        code, report = self.compiled[key]
        values = dict(zip(self.kernel.arg_names, args, strict=False))
        passed = [values[n] for n in launch[1]]  # what is no constant, in order
        self.findings.append((report, follow(code, passed, (0, grid - 1), report["shared"])))


@contextlib.contextmanager
def emulated(capability, only=""):
    """-> a list of (report of triton_budget, Findings), one for each launch. only: the one kernel that is compiled."""
    findings = []
    with pytest.MonkeyPatch.context() as patch:
        for name, kernel in vars(triton_launch).copy().items():
            if name.endswith("_kernel"):
                followed = (
                    Followed(kernel, capability, findings)
                    if only in ("", name)
                    else mock.MagicMock()
                )
                patch.setattr(triton_launch, name, followed)
        patch.setattr(triton_plan, "capability", lambda device: divmod(capability, 10))
        patch.setattr(ops, "KERNEL_DEVICES", ("cuda", "cpu"))
        yield findings
