"""What compiled kernels ask of a multiprocessor's memories, counted access by access: python -m tests.ptx.traffic 80,90

Shared memory gives 128 bytes per cycle, a word of each of 32 banks; global memory moves sectors of 32 bytes (CUDA C++
Programming Guide, Shared Memory; Best Practices Guide, Coalesced Access to Global Memory). An access whose words lie in one
bank takes more cycles than its bytes need, one whose words are scattered more sectors: both follow from the addresses. No cache
is in it: a sector is counted for every access that asks for it.

Printed for forward and backward of one head as training runs them, per chunk: 15 chunks less 7, so that only loops count.
"""

import sys
from typing import NamedTuple

import numpy as np
import torch

BANKS, WORD, SECTOR = 32, 4, 32


class Request(NamedTuple):
    """taken: cycles of shared memory, or sectors of global; fewest: for the same bytes of the same warps."""

    accesses: int = 0
    taken: int = 0
    fewest: int = 0


class Traffic(dict):
    """{(memory, instruction): Request} over all warps; memory is "shared" or "global"."""

    def add(self, memory, instruction, *counts):
        before = self.get((memory, instruction), Request())
        self[memory, instruction] = Request(*(a + int(b) for a, b in zip(before, counts, strict=True)))

    def shared(self, instruction, thread, address, size):
        """Threads access `size` bytes each at these addresses. Of more than a word, part of a warp is served at a time."""
        words = max(1, size // WORD)
        turn = np.repeat(thread.astype(np.int64) // 32 * 4 + thread % 32 // (BANKS // words), words)
        word = (address.astype(np.int64)[:, None] // WORD + np.arange(words)).ravel()
        distinct = np.unique(turn << 40 | word % BANKS << 32 | word)  # what several threads ask for is given once
        banks, count = np.unique(distinct >> 32, return_counts=True)
        _, first = np.unique(banks >> 8, return_index=True)
        cycles = np.maximum.reduceat(count, first)  # of a turn: as many as its busiest bank
        _, bytes_of_warp = np.unique(distinct >> 42, return_counts=True)
        self.add("shared", instruction, len(bytes_of_warp), cycles.sum(), (-(-bytes_of_warp // BANKS)).sum())

    def operands(self, instruction, groups, numbers):
        """Operands of wgmma, bf16, whose layouts have no conflicts."""
        cycles = groups * numbers * 2 // (BANKS * WORD)
        self.add("shared", instruction, groups, cycles, cycles)

    def device(self, instruction, thread, address, size):
        warp = thread.astype(np.int64) // 32 << 40
        sectors = np.unique(warp | address // SECTOR)
        _, different = np.unique(np.unique(warp | address) >> 40, return_counts=True)
        self.add("global", instruction, len(different), len(sectors), (-(-different * size // SECTOR)).sum())

    def total(self, memory):
        rows = [r for (m, _), r in self.items() if m == memory]
        return np.array([(r.taken, r.fewest) for r in rows] or [(0, 0)]).sum(0)


def training(chunks, chunk):
    """Launches of one head at R = D = M = 64."""
    from interdomain import scan

    from ..scan.common import Case, op_inputs

    case = Case(T=chunk * chunks, H=1, R=64, D=64, M=64, state=False)
    inputs, _ = op_inputs(case, torch.float32, torch.bfloat16)
    inputs = {n: None if x is None else x.detach().requires_grad_() for n, x in inputs.items()}
    o, _ = scan.interdomain_scan(**inputs, final_state=False, backend="chunkwise")
    o.backward(torch.randn_like(o))


def main(argv=None) -> None:
    from .launch import emulated

    (capabilities,) = argv or sys.argv[1:]
    for capability in map(int, capabilities.split(",")):
        with emulated(capability, traffic=True) as launches:
            for chunks in (7, 15):  # one segment
                training(chunks, 64 if capability == 90 else 32)
        half = len(launches) // 2
        print(f"sm_{capability} | programs | cycles of shared memory | fewest | sectors of global memory | fewest")
        for few, many in zip(launches[:half], launches[half:], strict=True):
            counts = [(many["traffic"].total(m) - few["traffic"].total(m)) / 8 for m in ("shared", "global")]
            cells = [few["kernel"], few["grid"], *(f"{x:.0f}" for x in np.concatenate(counts))]
            print(" | ".join(map(str, cells)))


if __name__ == "__main__":
    main()
