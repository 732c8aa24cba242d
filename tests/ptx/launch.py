"""Stands where the kernels of `chunkwise` do: compiles each launch for a GPU that is not there and follows it on CPU tensors.

    with emulated(90) as findings:
        interdomain_scan(..., backend="chunkwise")

What is compiled is what the launch code asks for. The first and the last program of a launch are followed; what they write is
no result, since numbers are not computed.
"""

import contextlib
from unittest import mock

import pytest
import torch

from interdomain.scan import ops, triton_launch, triton_plan

from ..scan import triton_budget
from .machine import Machine, width_of
from .memory import SPAN, Fault, Findings, Global, Shared
from .parse import Kernel, parse

LARGEST = 227 * 1024  # bytes of shared memory of a program on sm_90
COMPILED = {}


def narrowest_access(code: Kernel) -> int:
    """Returns the bytes of the narrowest access to shared memory, 4 at most."""
    narrowest = 4
    for block in code.blocks:
        for i in block:
            if i.name in ("ld", "st") and i.modifiers[0].startswith("shared"):
                narrowest = min(narrowest, width_of(i))
    return narrowest


def follow(code: Kernel, passed, programs, shared) -> Findings:
    """Returns what is found in these programs of the entry on tensors and numbers. shared: bytes."""
    if shared > LARGEST:
        raise Fault(f"{code.name} asks for {shared} bytes of shared memory")
    storages = []
    pointers = {}
    parameters = []
    for x in passed:
        if isinstance(x, torch.Tensor):
            storage = x.untyped_storage()
            if storage.data_ptr() not in pointers:
                storages.append(torch.tensor((), dtype=torch.uint8).set_(storage).numpy())
                pointers[storage.data_ptr()] = len(storages) * SPAN
            x = pointers[storage.data_ptr()] + x.storage_offset() * x.element_size()
        parameters.append(x)
    findings = Findings()
    for program in sorted(set(programs)):
        memory = Global(storages, code.constants)
        shared_memory = Shared(shared, code.threads, narrowest_access(code), findings)
        Machine(code, memory, shared_memory, parameters, program).run()
    return findings


@contextlib.contextmanager
def emulated(capability, only=""):
    """Yields a list of (report of triton_budget, Findings), one for each launch. only: the one kernel that is compiled."""
    findings = []

    def receive(kernel, programs, args, keywords):
        if only not in ("", kernel.__name__):
            return
        launch = triton_budget.described(kernel, args, keywords)
        key = repr((launch, capability))
        if key not in COMPILED:
            compiled = triton_budget.compile_launch(launch, capability)
            report = triton_budget.report(launch, compiled, capability)
            COMPILED[key] = parse(compiled.asm["ptx"]), report
        code, report = COMPILED[key]
        # What is no constant is passed, in order.
        values = dict(zip(kernel.arg_names, args, strict=False))
        passed = [values[name] for name in launch.signature]
        findings.append((report, follow(code, passed, (0, programs - 1), report["shared"])))

    with pytest.MonkeyPatch.context() as patch, triton_budget.stand_ins(triton_launch, receive):
        patch.setattr(triton_plan, "capability", mock.Mock(return_value=divmod(capability, 10)))
        patch.setattr(ops, "KERNEL_DEVICES", ("cuda", "cpu"))
        yield findings
