"""Times of one call, for the benchmarks: the median of several rounds; and the roofline of a GPU.

On a GPU a time is between two CUDA events around the call, after writes of several times the L2 cache; elsewhere it is the
wall clock's. Those writes also keep the GPU busy for LEAD_MS while the host issues the launches that are timed: the time is the
GPU's, as in training, where the host runs ahead. Without that lead the call finds the GPU idle, and every launch that the GPU
waits for counts. (triton.testing.do_bench has no lead, and times no part of a call.)
"""

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

MIN_FLUSH = 2**28  # bytes
LEAD_MS = 2.0
MAX_WRITES = 64
TARGET_SHAPE = "8x4096x32x64"


class Gpu(NamedTuple):
    """A GPU by its datasheet.

    Attributes:
        bandwidth: Bytes per second.
        flops: bf16 FLOP per second, without sparsity.
        goal: The goal for the scan: its forward and backward time at TARGET_SHAPE over that of the fastest attention. An H100
            needs 0.30 of FlashAttention-3's time to move the bytes alone (docs/tuning.md), so its goal is higher.
    """

    bandwidth: float
    flops: float
    goal: float | None = None


GPUS = {  # the first whose name is in PyTorch's name of the GPU ("NVIDIA GH200 480GB")
    "GH200": Gpu(4.0e12, 989e12),
    "H100 PCIe": Gpu(2.0e12, 756e12),
    "H100 NVL": Gpu(3.9e12, 835e12),
    "H100": Gpu(3.35e12, 989e12, goal=0.40),
    "H200": Gpu(4.8e12, 989e12, goal=0.30),
    "B200": Gpu(8.0e12, 2250e12),
    "A100-SXM4-80GB": Gpu(2.04e12, 312e12),
    "A100": Gpu(1.555e12, 312e12),
    "RTX 6000 Ada": Gpu(0.96e12, 364e12),
}


class Times(NamedTuple):
    """ms of one call: the median, the 10th and 90th percentile, and how many were taken."""

    median: float
    low: float
    high: float
    count: int


Call = (
    Callable[[], object] | tuple[Callable, ...]
)  # a chain of steps: each takes what the one before it returned
Timer = Callable[[Call], list[float]]  # ms of every step of a call


def measure(
    call: Call,
    device: torch.device,
    *,
    rounds: int = 20,
    seconds: float = 1.0,
    lead_ms: float = LEAD_MS,
) -> list[Times]:
    """Times of each step of a call, and last of all steps together, after two runs that compile and tune.

    Args:
        seconds: what all rounds may take together; at least 3 are taken.
        lead_ms: the host's head start; 0 to launch at an idle GPU, gaps included.
    """
    for _ in range(2):
        run_once(call)
    run = timer(device, lead_ms)
    once = sum(run(call)) / 1e3
    taken = []
    for _ in range(max(3, min(rounds, int(seconds / max(once, 1e-9))))):
        steps = run(call)
        taken.append([*steps, sum(steps)])
    last = len(taken) - 1
    times = []
    for column in zip(*taken, strict=True):
        ms = sorted(column)
        times.append(
            Times(statistics.median(ms), ms[round(0.1 * last)], ms[round(0.9 * last)], len(ms))
        )
    return times


def run_once(call: Call, mark: Callable[[], object] = lambda: None) -> None:
    """All steps, with mark() before the first and after each."""
    first, *rest = call if isinstance(call, tuple) else (call,)
    mark()
    result = first()
    mark()
    for step in rest:
        result = step(result)
        mark()


def timer(device: torch.device, lead_ms: float = LEAD_MS) -> Timer:
    """A timer of one run. On a GPU it overwrites the L2 cache before; without a lead, it waits until that is done."""
    if device.type != "cuda":
        return wall_timer
    size = max(MIN_FLUSH, 4 * torch.cuda.get_device_properties(device).L2_cache_size)
    trash = torch.empty(size // 4, dtype=torch.int32, device=device)

    def timed(call: Call, writes: int) -> list[float]:
        events = []

        def mark():
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()

        for _ in range(writes):
            trash.zero_()
        if not lead_ms:
            torch.cuda.synchronize()
        run_once(call, mark)
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]

    once = timed(trash.zero_, 1)[0]
    writes = max(1, min(MAX_WRITES, math.ceil(lead_ms / max(once, 1e-3))))
    return lambda call: timed(call, writes)


def wall_timer(call: Call) -> list[float]:
    at = []
    run_once(call, lambda: at.append(1e3 * time.perf_counter()))
    return [end - start for start, end in itertools.pairwise(at)]


def peak_memory(call: Call, device: torch.device) -> float | None:
    """MiB that a call allocates at its peak, beyond what was there; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run_once(call)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def gpu_of(device: torch.device) -> Gpu | None:
    """The datasheet of a device; None if it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_properties(device).name
    return next((gpu for known, gpu in GPUS.items() if known in name), None)


def roofline_ms(device: torch.device, nbytes: float, flops: float = 0.0) -> float | None:
    """The least ms in which this GPU moves these bytes and does these FLOPs; None if its datasheet is not known."""
    gpu = gpu_of(device)
    return None if gpu is None else 1e3 * max(nbytes / gpu.bandwidth, flops / gpu.flops)


def ratio(value: float | None, other: float | None) -> float | None:
    return value / other if value is not None and other else None
