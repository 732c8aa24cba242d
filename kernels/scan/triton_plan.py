"""Tile sizes of the Triton passes by device and shape, and the number of segments of time.

Shapes as in triton_passes.py.
"""

import functools
from typing import NamedTuple

import torch

# The least chunks of a segment: shorter ones pay more for the extra sweep than they gain.
_MIN_SEGMENT = 8
# The part that the sweeps for the states between segments add to the passes: 1,280 bytes to 4,864
# per token at 64 x 64 x 64.
_SWEEPS = 0.25
# Assumed if there is no GPU to ask, as in Triton's interpreter.
_MULTIPROCESSORS = 132


class Plan(NamedTuple):
    """Tile sizes.

    The budget behind them, checked by compilation in tests/ptx/test_ptx.py: at most 255 registers
    and 256 bytes of spills per thread, and shared memory for two programs per multiprocessor on
    sm_90 (113 KB each), for one on sm_80 and sm_89 (99 KB).

    Attributes:
        chunk: L.
        dtype: The dtype of the operands of every product.
        precision: The precision of fp32 products; bf16 ones have no choice.
        contract: (state numbers of a program, 2 BM BR; warps; stages).
        expand: (state numbers of a program, 2M BD; warps; stages), also for adjoint.
        decay: Costate numbers of a program (2 BM BD, twice). Its launch is adjoint's.
        mix: (numbers of W in a program, 2M 2BM; warps; stages).
        fused: As expand, for a pass that multiplies by W itself. None leaves that to mix.
        registers: Registers that a thread may have; None lets ptxas choose.
        held: True if adjoint and decay keep the first operands of several products in registers.
    """

    chunk: int
    dtype: torch.dtype
    precision: str
    contract: tuple[int, int, int]
    expand: tuple[int, int, int]
    decay: int
    mix: tuple[int, int, int]
    fused: tuple[int, int, int] | None = None
    registers: int | None = None
    held: bool = False


def make_plan(device: torch.device, dtype: torch.dtype, M: int, width: int) -> Plan:
    """Returns fixed sizes by architecture, dtype, M and width.

    There is no autotuning, so there are no first-call storms and no run-to-run drift.

    bf16: chunks of 64 if the tensor cores take 64-row tiles (sm_90 and sm_100), of 32 elsewhere.

    fp32: chunks of 16 and a quarter of the state per program, to check with and not to train with.
    `tf32x3` is fp32 arithmetic to about 2^-21 on tensor cores.

    Args:
        device: The device that runs the passes.
        dtype: The dtype of the operands.
        M: Number of basis functions.
        width: The larger of R and D; 0 for the linear readout.
    """
    major = capability(device)[0]
    wide = major in (9, 10)
    if dtype == torch.float32:
        # Two warps keep Hopper on mma.sync: its own instruction takes fp32 operands in one
        # orientation only.
        tile = (2048, 2 if wide else 4, 1)
        # Where all does not fit, at M = 128, ptxas would settle for 32 registers if it were not
        # told that it may have more.
        return Plan(16, dtype, "tf32x3", tile, tile, 1024, tile, registers=255)
    # On sm_100, sm_103 and sm_110 a state is an accumulator in tensor memory, which is scaled in
    # every chunk and read by other products: Triton miscompiles that with more than one stage
    # (triton-lang/triton #10590, #10993).
    tile = (8192, 4, 1 if major in (10, 11) else 2)
    one_stage = (8192, 4, 1)
    hopper = major == 9 and M < 128
    return Plan(
        64 if wide else 32, dtype, "ieee",
        contract=one_stage if width > 128 else tile,
        # b~ tiles of 32 KB at M = 128: two of them would leave room for one program only.
        expand=one_stage if wide and M == 128 else tile,
        decay=4096,
        mix=tile,
        # Every block of values multiplies by W: two blocks at most.
        fused=(4096, 4, 2) if hopper and width <= 64 else None,
        # Where products are `wgmma`, which reads them from shared memory every time, and where
        # registers are left.
        held=hopper and M > 16,
    )  # fmt: skip


def capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability of a device.

    Tensors on the CPU only ever meet Triton's interpreter: the plan is that of Hopper then.
    """
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def segment_count(sequences: int, chunks: int, device: torch.device) -> int:
    """Returns the number of parts to cut time into.

    No part is shorter than 8 chunks.

    Args:
        sequences: B H.
        chunks: Chunks of a sequence.
        device: The device that runs the passes.
    """
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    else:
        multiprocessors = _MULTIPROCESSORS
    return _segments(sequences, chunks, 2 * multiprocessors)


@functools.lru_cache
def _segments(sequences: int, chunks: int, slots: int) -> int:
    """Returns the smallest of the counts within a twentieth of the best one.

    A count is judged by the chunks that a slot walks, one wave of programs after the other: a last
    wave that is nearly empty takes as long as a full one.

    Args:
        sequences: B H.
        chunks: Chunks of a sequence.
        slots: Programs that run side by side.
    """
    walked = {}
    for count in range(1, max(1, chunks // _MIN_SEGMENT) + 1):
        length = -(-chunks // count)
        waves = -(-sequences * -(-chunks // length) // slots)
        walked[count] = waves * length * (1 if count == 1 else 1 + _SWEEPS)
    best = min(walked.values())
    return next(count for count, cost in walked.items() if cost <= 1.05 * best)
