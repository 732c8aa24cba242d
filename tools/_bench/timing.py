"""Times of one call, its peak memory, and the roofline of a GPU, for the benchmarks.

On a GPU a time lies between two CUDA events. Before the call, the L2 cache is overwritten. These
writes keep the GPU busy for LEAD_MS while the host issues the launches of the call. So the time is
the GPU's, as in training, where the host runs ahead. Without this lead the GPU is idle when the
call begins, and it waits for launches. (triton.testing.do_bench has no lead, and does not time the
parts of a call.) On a CPU a time is that of the wall clock.
"""

import gc
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

MIN_FLUSH = 2**28  # bytes of the tensor whose writing flushes the L2 cache, at least
LEAD_MS = 2.0  # milliseconds that the host has to issue launches before the timed call begins
MAX_WRITES = 64  # writes of that tensor before a call, at most
WARMUPS = 2  # calls that compile and tune
MIN_ROUNDS = 3  # timed calls, even if they take longer than they may
PERCENTILES = (0.5, 0.1, 0.9)  # in the order of the fields of Times
TARGET_SHAPE = "8x4096x32x64"  # batch x tokens x heads x head width at which a goal is set

# The steps of a call, such as forward and backward. The first takes nothing, and each other one
# what the one before it returned.
Call = Sequence[Callable]


class Gpu(NamedTuple):
    """A GPU by its datasheet.

    Attributes:
        bandwidth: Bytes per second.
        flops: bf16 FLOP per second, without sparsity.
        goal: The goal for the scan: its forward and backward time at TARGET_SHAPE over that of the
            fastest attention. An H100 needs 0.30 of FlashAttention-3's time to move the bytes
            (docs/measurements.md), so its goal is higher.
    """

    bandwidth: float
    flops: float
    goal: float | None = None


# The entry of a GPU is the first whose name is part of PyTorch's name of the GPU ("NVIDIA GH200
# 480GB").
GPUS = {
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
    """Milliseconds of a call.

    Attributes:
        median: The median of all timed calls.
        low: The 10th percentile.
        high: The 90th percentile.
        count: The number of timed calls.
    """

    median: float
    low: float
    high: float
    count: int


def measure(
    call: Call,
    device: torch.device,
    *,
    rounds: int = 20,
    seconds: float = 1.0,
    lead_ms: float = LEAD_MS,
) -> list[Times]:
    """Times a call several times, after two calls that compile and tune.

    Args:
        call: The steps.
        device: The device that they run on.
        rounds: The largest number of timed calls.
        seconds: The time that all rounds may take together. At least three are taken.
        lead_ms: The head start of the host in milliseconds. 0 launches at an idle GPU, and the gaps
            between launches count.

    Returns:
        The times of each step, and last those of all steps together.
    """
    for _ in range(WARMUPS):
        run_once(call)

    # One timed call says how many are affordable.
    timer = Timer(device, lead_ms)
    call_seconds = sum(timer.step_ms(call)) / 1e3
    affordable = int(seconds / max(call_seconds, 1e-9))
    samples = []
    for _ in range(max(MIN_ROUNDS, min(rounds, affordable))):
        step_ms = timer.step_ms(call)
        samples.append([*step_ms, sum(step_ms)])

    # The percentiles over the rounds, of each step and of their sum.
    levels = torch.tensor(PERCENTILES, dtype=torch.float64)
    percentiles = torch.tensor(samples, dtype=torch.float64).quantile(levels, dim=0)  # [3, steps]
    return [Times(*column, count=len(samples)) for column in percentiles.T.tolist()]


def run_once(call: Call, after_step: Callable[[], object] | None = None) -> None:
    """Runs the steps of a call, and calls `after_step` after each."""
    results = ()
    for step in call:
        results = (step(*results),)
        if after_step is not None:
            after_step()


class Timer:
    """Times single runs of a call.

    Args:
        device: The device that the call runs on.
        lead_ms: As in `measure`.
    """

    def __init__(self, device: torch.device, lead_ms: float = LEAD_MS) -> None:
        self.on_gpu = device.type == "cuda"
        self.lead_ms = lead_ms
        self.writes = 1
        # Writing a tensor that is larger than the L2 cache flushes the cache.
        if self.on_gpu:
            cache_size = torch.cuda.get_device_properties(device).L2_cache_size
            size = max(MIN_FLUSH, 4 * cache_size)
            self.flushed = torch.empty(size // 4, dtype=torch.int32, device=device)
            # The number of writes that together take as long as the lead.
            (write_ms,) = self.step_ms([self.flushed.zero_])
            writes = math.ceil(lead_ms / max(write_ms, 1e-3))
            self.writes = max(1, min(MAX_WRITES, writes))

    def step_ms(self, call: Call) -> list[float]:
        """Runs a call once. Returns the milliseconds of each of its steps.

        Args:
            call: The steps, such as forward and backward pass.
        """
        # On a CPU: by the wall clock.
        if not self.on_gpu:
            seconds = [time.perf_counter()]
            run_once(call, lambda: seconds.append(time.perf_counter()))
            return [1e3 * (end - start) for start, end in itertools.pairwise(seconds)]

        events = []

        def record() -> None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            events.append(event)

        # Flush the cache, and keep the GPU busy while the host issues the launches below: these
        # writes together take as long as the lead.
        for _ in range(self.writes):
            self.flushed.zero_()
        # Without a lead the GPU must be idle when the call begins.
        if not self.lead_ms:
            torch.cuda.synchronize()
        record()
        run_once(call, record)
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]


def peak_memory(call: Call, device: torch.device) -> float | None:
    """Runs a call once.

    Returns:
        The MiB that it allocates at its peak, beyond what was allocated before; None on a CPU.
    """
    if device.type != "cuda":
        run_once(call)
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run_once(call)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def release(device: torch.device) -> None:
    """Gives unused memory of this process back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def gpu_of(device: torch.device) -> Gpu | None:
    """Returns the datasheet of a device; None for a CPU, and for a GPU that is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_properties(device).name
    for known, gpu in GPUS.items():
        if known in name:
            return gpu
    return None


def roofline_ms(device: torch.device, nbytes: float, flops: float = 0.0) -> float | None:
    """Returns the least time in which a device moves bytes and does FLOPs, by its datasheet.

    Args:
        device: The device.
        nbytes: Bytes that are read and written.
        flops: bf16 FLOPs.

    Returns:
        Milliseconds; None if the datasheet is not known.
    """
    gpu = gpu_of(device)
    if gpu is None:
        return None
    return 1e3 * max(nbytes / gpu.bandwidth, flops / gpu.flops)


def ratio(value: float | None, other: float | None) -> float | None:
    """Returns value / other; None if one of them is not known, or if `other` is 0."""
    if value is None or not other:
        return None
    return value / other
