"""Tile sizes of the Triton passes by device and shape, and the number of segments of time.

Shapes as in triton_passes.py: H state heads, R key features, D value width, M basis functions, L
tokens of a chunk; BM, BR, BD and BK are sizes of blocks of M, R and D that a program computes.
"""

import functools
from typing import NamedTuple

import torch

# The least number of chunks of a segment: shorter segments lose more by the extra sweep than they
# gain.
_MIN_CHUNKS_OF_SEGMENT = 8
# The cost of the extra sweeps for the states between segments, relative to that of the passes:
# 1,280 bytes per token beside 4,864, at M = R = D = 64.
_COST_OF_SWEEPS = 0.25
# Multiprocessors that are assumed if there is no GPU to ask, as in Triton's interpreter (H100:
# 132).
_ASSUMED_MULTIPROCESSORS = 132


class Plan(NamedTuple):
    """Tile sizes and launch options of the passes.

    A tile is given as (its number of elements, warps of a program, stages of the loop). The budget
    behind them, checked by compilation in tests/ptx/test_ptx.py: at most 255 registers and 256
    bytes of spills per thread, and shared memory for two programs per multiprocessor on sm_90 (113
    KB each), for one on sm_80 and sm_89 (99 KB).

    Attributes:
        chunk: L, tokens of a chunk.
        dtype: The dtype of the operands of every product.
        precision: Triton's `input_precision` of fp32 products; bf16 products have no choice.
        contract: The tile of the state in pass 1, 2 BM BR elements.
        expand: The tile of the state in passes 2 and 3, 2M BD elements.
        decay: Elements of the tile of the costate, 2 BM BK, in the programs of the gradient of
            log_decay. They have a second tile of this size, and share their launch with pass 3.
        mix: The tile of W, 2M 2BM elements.
        fused: The tile of the state in a pass 2 that multiplies by W itself. None means that `mix`
            does it.
        registers: The most registers of a thread; None lets ptxas choose.
        operands_in_registers: True if pass 3 and the gradient of log_decay keep the first operands
            of several products in registers.
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
    operands_in_registers: bool = False


def make_plan(device: torch.device, dtype: torch.dtype, M: int, width: int) -> Plan:
    """Returns fixed tile sizes for an architecture, a dtype, M and a width.

    There is no autotuning: the first call is not slow, and all runs use the same sizes.

    In bf16, chunks have 64 tokens if the tensor cores take tiles of 64 rows (sm_90 and sm_100), and
    32 elsewhere. In fp32, chunks have 16 tokens and a program has a quarter of the state: fp32 is
    meant for checks, not for training. `tf32x3` is fp32 arithmetic to about 2^-21 on tensor cores.

    Args:
        device: The device that runs the passes.
        dtype: The dtype of the operands.
        M: Number of basis functions.
        width: The larger of R and D; 0 for the linear readout.
    """
    # `wide` is True if the tensor cores take tiles of 64 rows.
    major = capability(device)[0]
    wide = major in (9, 10)
    if dtype == torch.float32:
        # With two warps, Hopper uses mma.sync: its own instruction takes fp32 operands in one
        # orientation only.
        warps = 4
        if wide:
            warps = 2
        tile = (2048, warps, 1)
        # L = 16, and the same tiles for all passes. At M = 128 not everything fits into registers.
        # ptxas would then use 32 of them, unless it is told that it may use more.
        return Plan(
            chunk=16,
            dtype=dtype,
            precision="tf32x3",
            contract=tile,
            expand=tile,
            decay=1024,
            mix=tile,
            registers=255,
        )
    # Tiles are (elements, warps, stages), as in `Plan`. On sm_100, sm_103 and sm_110 a state is an
    # accumulator in tensor memory, which is scaled in every chunk and read by other products:
    # Triton miscompiles that with more than one stage (triton-lang/triton #10590, #10993).
    one_stage = (8192, 4, 1)
    tile = (8192, 4, 2)
    if major in (10, 11):
        tile = one_stage
    chunk = 64 if wide else 32
    # Pass 1 has the whole width of a key in one tile.
    contract = tile
    if width > 128:
        contract = one_stage
    # At M = 128 a tile of b~ has 32 KB: two of them would leave room for one program only.
    expand = tile
    if wide and M == 128:
        expand = one_stage
    # On Hopper there are registers left below M = 128. Each block of values multiplies by W, so
    # that pays for one or two blocks only.
    hopper = major == 9 and M < 128
    fused = None
    if hopper and width <= 64:
        fused = (4096, 4, 2)
    # `wgmma` reads operands from shared memory for each product, unless they are in registers.
    operands_in_registers = hopper and M > 16
    return Plan(
        chunk=chunk,
        dtype=dtype,
        precision="ieee",
        contract=contract,
        expand=expand,
        decay=4096,
        mix=tile,
        fused=fused,
        operands_in_registers=operands_in_registers,
    )


def capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability of a device.

    On a CPU, kernels run only in Triton's interpreter. The plan is then that of Hopper.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)
    return (9, 0)


def segment_count(sequences: int, chunks: int, device: torch.device) -> int:
    """Returns the number of segments to cut time into, so that there is work for the whole GPU.

    No segment is shorter than 8 chunks.

    Args:
        sequences: Sequences of all heads, B H.
        chunks: Chunks of a sequence.
        device: The device that runs the passes.
    """
    # Two programs are counted for each multiprocessor.
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    else:
        multiprocessors = _ASSUMED_MULTIPROCESSORS
    return _segments(sequences, chunks, 2 * multiprocessors)


@functools.lru_cache
def _segments(sequences: int, chunks: int, slots: int) -> int:
    """Returns the smallest number of segments that costs at most 5 % more than the best one.

    The cost is the number of chunks that one slot of the GPU computes one after the other. There is
    a program for each segment of each sequence. Programs run in waves of `slots`, and a last wave
    that is nearly empty takes as long as a full one. More than one segment costs extra sweeps.

    Args:
        sequences: Sequences of all heads, B H.
        chunks: Chunks of a sequence.
        slots: Programs that run side by side.
    """
    costs = {}
    for count in range(1, max(1, chunks // _MIN_CHUNKS_OF_SEGMENT) + 1):
        # The chunks of a segment, the segments that they make, and the waves of programs. All three
        # quotients are rounded up.
        length = -(-chunks // count)
        segments = -(-chunks // length)
        waves = -(-sequences * segments // slots)
        cost = waves * length
        if count > 1:
            cost *= 1 + _COST_OF_SWEEPS
        costs[count] = cost
    best = min(costs.values())
    return next(count for count, cost in costs.items() if cost <= 1.05 * best)
