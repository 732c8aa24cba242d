"""Tile sizes of the Triton passes by device and shape, and the number of segments of time. Shapes as in triton_passes.py."""

import functools
from typing import NamedTuple

import torch

_MIN_SEGMENT = 8  # chunks; shorter ones pay more for the extra sweep than they gain
_SWEEPS = 0.25  # what the sweeps for the states between segments add: 1,280 bytes to 4,864 per token at 64 x 64 x 64
_MULTIPROCESSORS = 132  # assumed where there is no GPU to ask: Triton's interpreter


class Plan(NamedTuple):
    """Tile sizes. The budget behind them, checked by compilation in tests/scan/test_triton_compile.py: at most 255
    registers and 256 bytes of spills per thread, and shared memory for two programs per multiprocessor on sm_90
    (113 KB each), for one on sm_80 and sm_89 (99 KB)."""

    chunk: int  # L
    dtype: torch.dtype  # of the operands of every product
    precision: str  # of fp32 products; bf16 ones have no choice
    contract: tuple[int, int, int]  # state numbers of a program (2 BM BR), warps, stages
    expand: tuple[int, int, int]  # state numbers of a program (2M BD), warps, stages; also for adjoint
    decay: tuple[int, int, int]  # costate numbers of a program (2 BM BD, twice), warps, stages
    mix: tuple[int, int, int]  # numbers of W in a program (2M 2BM), warps, stages
    fused: tuple[int, int, int] | None  # as expand, for one that multiplies by W itself; None: mix does
    registers: int | None  # that a thread may have; None: for ptxas to choose
    held: bool = False  # whether adjoint and decay keep first operands of several products in registers

    @property
    def joined(self) -> bool:
        """Whether `adjoint` and `decay` go in one launch: where they take the same warps and stages."""
        return self.expand[1:] == self.decay[1:]


def make_plan(device: torch.device, dtype: torch.dtype, M: int, width: int, chunk_size: int | None) -> Plan:
    """Fixed sizes by (architecture, dtype, M, width): no autotuning, so no first-call storms and no run-to-run drift.

    bf16: chunks of 64 where the tensor cores take 64-row tiles (sm_90 and sm_100), of 32 elsewhere.
    fp32: chunks of 16 and a quarter of the state per program: there to check with, not to train with. `tf32x3` is fp32
    arithmetic to about 2^-21 on tensor cores.
    """
    major = capability(device)[0]
    wide = major in (9, 10)
    if dtype == torch.bfloat16:
        # On sm_100 and sm_103 a state is an accumulator in tensor memory, which is scaled in every chunk and read by other
        # products: Triton miscompiles that with more than one stage (triton-lang/triton #10590, #10993).
        # On sm_90 chunks under 64 mix `mma` and `wgmma` in a loop, and Triton (3.6, 3.9) has the next chunk loaded over what a
        # product still reads (tests/ptx finds it).
        stages = 1 if major == 10 or (major == 9 and chunk_size in (16, 32)) else 2
        state = (8192, 4, stages)
        plan = Plan(64 if wide else 32, dtype, "ieee", state, state, (4096, 4, stages), (8192, 4, stages), None, None)
        if major == 9 and M < 128 and width <= 64:  # every block of values multiplies by W: two blocks at most
            plan = plan._replace(fused=(4096, 4, stages))
        if major == 9 and chunk_size in (None, 64):
            # Where products are `wgmma`, which reads them from shared memory every time, and where registers are left.
            plan = plan._replace(held=16 < M < 128)
        if wide and M == 128:  # b~ tiles of 32 KB: two of them would leave room for one program only
            plan = plan._replace(expand=(8192, 4, 1))
        if width > 128:
            plan = plan._replace(contract=(8192, 4, 1))
    else:
        # Two warps keep Hopper on mma.sync: its own instruction takes fp32 operands in one orientation only.
        warps = 2 if wide else 4
        # Where all does not fit, at M = 128, ptxas would settle for 32 registers if it were not told that it may have more.
        tiles = (2048, warps, 1), (2048, warps, 1), (1024, warps, 1), (2048, warps, 1)
        plan = Plan(16, dtype, "tf32x3", *tiles, None, 255)
    return plan if chunk_size is None else plan._replace(chunk=chunk_size)


def capability(device: torch.device) -> tuple[int, int]:
    # Tensors on the CPU only ever meet Triton's interpreter: plan as for Hopper.
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def segment_count(sequences: int, chunks: int, device: torch.device) -> int:
    """How many parts to cut time into. `sequences` is B H; no part is shorter than 8 chunks."""
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    else:
        multiprocessors = _MULTIPROCESSORS
    return _segments(sequences, chunks, 2 * multiprocessors)


@functools.lru_cache
def _segments(sequences: int, chunks: int, slots: int) -> int:
    """By the chunks that a slot walks, one wave of programs after the other: a last wave that is nearly empty takes as long as
    a full one. Of the counts within a twentieth of the best, the smallest."""
    walked = {}
    for count in range(1, max(1, chunks // _MIN_SEGMENT) + 1):
        length = -(-chunks // count)
        waves = -(-sequences * -(-chunks // length) // slots)
        walked[count] = waves * length * (1 if count == 1 else 1 + _SWEEPS)
    best = min(walked.values())
    return next(count for count, cost in walked.items() if cost <= 1.05 * best)
