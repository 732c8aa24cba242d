"""One launch of a kernel in PTX, on tensors of the CPU."""

import itertools
import re
import time

import numpy as np
import torch

from . import matrix, scalar  # noqa: F401 (they register their instructions)
from .machine import Machine
from .memory import SPAN, Fault, Findings, Global
from .parse import Kernel

THREADS = 1 << 14  # of the programs that run at once
LARGEST = 227 * 1024  # shared memory of a program on sm_90


def unfenced(block):
    """Products whose registers another instruction writes after the last wgmma.fence, which must stand between."""
    dirty, found = None, []
    for i in block:
        registers = set(re.findall(r"%\w+", " ".join(i.operands[:1])))
        if i.opcode.startswith("wgmma.fence"):
            dirty = set()
        elif i.opcode.startswith("wgmma.mma_async"):
            registers |= set(re.findall(r"%\w+", i.operands[1])) if i.operands[1][0] == "{" else set()
            found += [i] if dirty is None or registers & dirty else []
        elif dirty is not None and not i.opcode.startswith("st"):
            dirty |= registers
    return found


def execute(code: Kernel, passed, grid, shared, traffic=None):
    """Runs the entry on CPU tensors and numbers, in place; -> report. traffic: a `Traffic` to count in."""
    if shared > LARGEST:
        raise Fault(f"{code.name} asks for {shared} bytes of shared memory")
    storages, pointers = [], {}
    for x in passed:
        if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in pointers:
            storage = x.untyped_storage()
            if storage.nbytes():
                assert storage.data_ptr() % 16 == 0
                storages.append(torch.tensor((), dtype=torch.uint8).set_(storage).numpy())
            pointers[storage.data_ptr()] = max(1, len(storages))
    memory, findings = Global(storages, code.constants), Findings()
    for i in itertools.chain(*map(unfenced, code.blocks)):
        findings.add("wgmma with registers that no wgmma.fence came after", i, 1)
    parameters = np.zeros(
        len(code.parameters), np.uint64
    )  # after ours follow pointers to scratch, of which there is none
    for k, x in enumerate(passed):
        if isinstance(x, torch.Tensor):
            x = pointers[x.untyped_storage().data_ptr()] * SPAN + x.storage_offset() * x.element_size()
        parameters[k] = x & 0xFFFFFFFFFFFFFFFF
    opcodes = " ".join(i.opcode for block in code.blocks for i in block)
    widths = re.findall(r"\b(?:ld|st)\.shared\S*?\.[busf](\d+)\b", opcodes)
    granule = min([4, *(int(x) // 8 for x in widths)])  # the narrowest access to shared memory, 4 at most
    start, instructions, batch = time.perf_counter(), 0, max(1, THREADS // code.threads)
    for first in range(0, grid, batch):
        programs = range(first, min(grid, first + batch))
        machine = Machine(code, memory, parameters, programs, shared, granule, findings, traffic)
        machine.run()
        instructions += machine.executed
    seconds = time.perf_counter() - start
    return {"kernel": code.name, "grid": grid, "findings": findings, "instructions": instructions, "seconds": seconds}
