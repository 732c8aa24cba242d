"""How the benchmarks time: candidates take turns, the median of each; and the two ceilings of a device.

On a GPU a time is between two CUDA events around the call, after writes of several times the L2 cache; elsewhere it is the
wall clock's. Those writes also keep the GPU busy for LEAD_MS while the host issues the launches that are timed: the time is the
GPU's, as in training, where the host runs ahead. Without that lead the call finds the GPU idle, and every launch that the GPU
waits for counts. (triton.testing.do_bench has neither turns nor lead, and times no part of a call.) A process of its own takes
turns with the two yardsticks, a copy and a matrix product: a GPU whose clocks drifted shows there.
"""

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from ._bench import NOT_RUN, reason, require_healthy

MIN_FLUSH = 2**28  # bytes
LEAD_MS = 2.0
MAX_WRITES = 64
COPY_BYTES, PRODUCT = 2**30, 8192  # of the yardsticks on a GPU


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


def usable(calls: dict, device: torch.device, *, passed: Callable[[], bool] = lambda: False) -> tuple[dict, dict]:
    """Run every call twice (compilation, autotuning): (those that can run, why the others cannot)."""

    def twice(call: Call) -> Call:
        run_once(call)
        run_once(call)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return call

    return attempt({name: partial(twice, call) for name, call in calls.items()}, device, passed=passed)


def attempt(makers: dict, device: torch.device, *, passed: Callable[[], bool] = lambda: False) -> tuple[dict, dict]:
    """(what the makers return, why the others fail). Raises: RuntimeError if one leaves the GPU in an error state."""
    good, bad = {}, {}
    for name, make in makers.items():
        if passed():
            bad[name] = NOT_RUN
            continue
        try:
            good[name] = make()
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


class Ceilings(NamedTuple):
    """What this device reaches in PyTorch: bytes/s of a copy, read and written; FLOP/s of one large product."""

    bandwidth: float
    flops: float

    def floor_ms(self, nbytes: float, flops: float = 0.0) -> float:
        return 1e3 * max(nbytes / self.bandwidth, flops / self.flops)

    def rates(self) -> dict[str, float]:
        return {"copy TB/s": self.bandwidth / 1e12, "product TFLOP/s": self.flops / 1e12}


class Yardsticks:
    """A copy of 1 GiB and a bf16 product of 8192^3 random numbers (CPU: 16 MiB, fp32 512^3); of zeros it is faster."""

    def __init__(self, device: torch.device) -> None:
        self.device, cuda = device, device.type == "cuda"
        self.size, self.n, dtype = (COPY_BYTES, PRODUCT, torch.bfloat16) if cuda else (2**24, 512, torch.float32)
        source = torch.rand(self.size // 4, device=device)
        target = torch.empty_like(source)
        x, y = (torch.randn(self.n, self.n, dtype=dtype, device=device) for _ in range(2))
        out = torch.empty_like(x)
        self.calls = {"copy": lambda: target.copy_(source), "product": lambda: torch.matmul(x, y, out=out)}
        for call in self.calls.values():
            call()

    def beside(self, calls: dict, **how) -> tuple[dict[str, list[Times]], Ceilings]:
        """`interleaved` with both yardsticks: (times of the calls, the ceilings meanwhile)."""
        times = interleaved(calls | self.calls, self.device, **how)
        copy, product = (times.pop(name)[-1].median for name in ("copy", "product"))
        return times, Ceilings(2e3 * self.size / copy, 2e3 * self.n**3 / product)


def ceilings(device: torch.device) -> Ceilings:
    return Yardsticks(device).beside({}, seconds=0.5 if device.type == "cuda" else 0.05)[1]


def ratio(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None or not math.isfinite(other) or not other else value / other
