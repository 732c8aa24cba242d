"""How the benchmarks time: candidates take turns, the median of each; and the roofline of a GPU.

On a GPU a time is between two CUDA events around the call, after writes of several times the L2 cache; elsewhere it is the
wall clock's. Those writes also keep the GPU busy for LEAD_MS while the host issues the launches that are timed: the time is the
GPU's, as in training, where the host runs ahead. Without that lead the call finds the GPU idle, and every launch that the GPU
waits for counts. (triton.testing.do_bench has neither turns nor lead, and times no part of a call.)
"""

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from ._bench import reason, require_healthy

MIN_FLUSH = 2**28  # bytes
LEAD_MS = 2.0
MAX_WRITES = 64
# (bytes/s, bf16 FLOP/s without sparsity) by NVIDIA's datasheets; the first whose name is part of the GPU's.
DATASHEET = {
    "H100 PCIe": (2.0e12, 756e12),
    "H100 NVL": (3.9e12, 835e12),
    "H100": (3.35e12, 989e12),
    "H200": (4.8e12, 989e12),
    "B200": (8.0e12, 2250e12),
    "A100-SXM4-80GB": (2.04e12, 312e12),
    "A100": (1.555e12, 312e12),
    "RTX 6000 Ada": (0.96e12, 364e12),
}


class Times(NamedTuple):
    """ms of one call: the median, the 10th and 90th percentile, and how many were taken."""

    median: float
    low: float
    high: float
    count: int


Call = Callable[[], object] | tuple[Callable, ...]  # a chain of steps: each takes what the one before it returned
Timer = Callable[[list[Call]], list[list[float]]]  # ms of every step of every call


def interleaved(
    calls: dict, device: torch.device, *, rounds: int = 20, seconds: float = 1.0, lead_ms: float = LEAD_MS
) -> dict[str, list[Times]]:
    """Times of calls that ran before (`usable`), in turns: of each step of a chain, and last of all steps together.

    Args:
        rounds: turns of a fast candidate. seconds: what all turns of one candidate may take together; at least 3 are taken.
        lead_ms: the host's head start; 0 to launch at an idle GPU, gaps included.
    """
    run = timer(device, lead_ms)
    turns = {n: max(3, min(rounds, int(seconds / max(sum(run([call])[0]) / 1e3, 1e-9)))) for n, call in calls.items()}
    total = max(turns.values(), default=0)
    taken = {name: [] for name in calls}
    for i in range(total):
        # Evenly spread turns; a rotating start, so that nobody always follows the same neighbour.
        now = [n for n in calls if (i + 1) * turns[n] // total > i * turns[n] // total]
        now = now[i % len(now) :] + now[: i % len(now)]
        for name, steps in zip(now, run([calls[n] for n in now]), strict=True):
            taken[name].append([*steps, sum(steps)])
    return {name: [summary(list(ms)) for ms in zip(*rows, strict=True)] for name, rows in taken.items()}


def summary(ms: list[float]) -> Times:
    ordered, last = sorted(ms), len(ms) - 1
    return Times(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], len(ordered))


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
    return cuda_timer(device, lead_ms) if device.type == "cuda" else wall_timer


def wall_timer(calls: list[Call]) -> list[list[float]]:
    ms = []
    for call in calls:
        at = []
        run_once(call, lambda at=at: at.append(1e3 * time.perf_counter()))
        ms.append([end - start for start, end in itertools.pairwise(at)])
    return ms


def cuda_timer(device: torch.device, lead_ms: float = LEAD_MS) -> Timer:
    """A timer of one run each, with the L2 cache overwritten before it; without a lead, at a GPU that is done with that."""
    size = max(MIN_FLUSH, 4 * torch.cuda.get_device_properties(device).L2_cache_size)
    trash = torch.empty(size // 4, dtype=torch.int32, device=device)

    def timed(calls: list[Call], writes: int) -> list[list[float]]:
        marks = []
        for call in calls:
            events = []

            def mark(events=events):
                events.append(torch.cuda.Event(enable_timing=True))
                events[-1].record()

            for _ in range(writes):
                trash.zero_()
            if not lead_ms:
                torch.cuda.synchronize()
            run_once(call, mark)
            marks.append(events)
        torch.cuda.synchronize()
        return [[start.elapsed_time(end) for start, end in itertools.pairwise(events)] for events in marks]

    once = timed([trash.zero_], 1)[0][0]
    writes = max(1, min(MAX_WRITES, math.ceil(lead_ms / max(once, 1e-3))))
    return lambda calls: timed(calls, writes)


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


def usable(calls: dict, device: torch.device) -> tuple[dict, dict]:
    """Run every call twice (compilation, autotuning): (those that can run, why the others cannot).

    Raises: RuntimeError if one leaves the GPU in an error state.
    """
    good, bad = {}, {}
    for name, call in calls.items():
        try:
            for _ in range(2):
                run_once(call)
            if device.type == "cuda":
                torch.cuda.synchronize()
            good[name] = call
        except Exception as e:
            bad[name] = reason(e)
        if name in bad:  # outside of `except`, where the exception would keep the tensors alive
            release(device)
            require_healthy(device, str(name))
    return good, bad


def captured(call: Callable[[], object]) -> tuple[Callable[[], None], object]:
    """(replay, what the call returned): the launches of a call in a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # nothing may be compiled while capturing
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph.replay, out


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def roofline_ms(device: torch.device, nbytes: float, flops: float = 0.0) -> float | None:
    """The least ms in which this GPU moves these bytes and does these FLOPs by its datasheet; None if that is not known."""
    name = torch.cuda.get_device_properties(device).name if device.type == "cuda" else ""
    for known, (bandwidth, peak) in DATASHEET.items():
        if known in name:
            return 1e3 * max(nbytes / bandwidth, flops / peak)
    return None


def ratio(value: float | None, other: float | None) -> float | None:
    return value / other if value is not None and other else None
