"""python -m interdomain.tools.bench_decode --output benchmarks/results/today

Time one token of one layer while decoding: the fused step in place (eager and in a CUDA graph) and in plain PyTorch, beside
softmax attention against a cache of 512, 4,096 and 16,384 tokens. Microseconds, bytes, and what part of the measured copy
bandwidth that is. Without a GPU: tiny and labelled.
"""

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from interdomain import scan
from interdomain.scan import step

from ._bench import Deadline, Report, add_arguments, choose_device, reason
from ._cli import argument_parser, user_errors
from ._problems import attention_step_bytes, dynamics, step_bytes
from ._timing import LEAD_MS, ceilings, interleaved, ratio, release, usable

COLUMNS = ["step", "graph", "us", "MB", "of copy bandwidth", "over fused", "layers", "remark"]
BATCHES, CACHES = (1, 8, 64), (512, 4096, 16384)
TINY_BATCHES, TINY_CACHES = (1, 2), (32, 64)
MAX_LAYERS = 96
ATTENTION = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


@dataclass(frozen=True)
class Sizes:
    B: int
    H: int
    d: int
    M: int


def layers_for(nbytes: int, device: torch.device) -> int:
    """Layers, each with tensors of its own, that one timed call walks: so many that they do not stay in the L2 cache."""
    if device.type != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(MAX_LAYERS, -(-4 * cache // nbytes)))


def interdomain_layers(s: Sizes, n: int, device: torch.device, fused: bool) -> list[Callable]:
    """The step of n layers, each updating a state of its own in place, with what a model computes once for all steps."""
    theta, W, _ = (x.float().to(device) for x in dynamics(s.H, s.M))
    decay, W = scan.decay_factor(theta), W[:, : s.M]

    def layer():
        q, k, v = (torch.randn(s.B, s.H, s.d, device=device).bfloat16() for _ in range(3))
        state = torch.zeros(s.B, s.H, s.M, 2 * s.d, 2, device=device)
        own = theta, W.clone(), state  # memory of its own for what is large
        if fused:
            return lambda: scan.interdomain_step(q, k, v, *own, decay=decay, inplace=True)[0]

        def plain():
            o, new = step.scan_step(q, k, v, decay, *own[1:])
            state.copy_(new)
            return o

        return plain

    return [layer() for _ in range(n)]


def attention_layers(s: Sizes, length: int, n: int, device: torch.device, backend: SDPBackend) -> list[Callable]:
    """The step of n layers, each writing one key and value and attending to a cache of `length` tokens, [B, H, length, d]."""

    def layer():
        q, k, v = (torch.randn(s.B, s.H, 1, s.d, device=device).bfloat16() for _ in range(3))
        keys, values = (torch.randn(s.B, s.H, length, s.d, device=device, dtype=torch.bfloat16) for _ in range(2))

        def attend():
            keys[:, :, -1:].copy_(k)
            values[:, :, -1:].copy_(v)
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, keys, values)

        return attend

    return [layer() for _ in range(n)]


def in_order(layers: list[Callable]) -> Callable:
    def call():
        for layer in layers:
            layer()

    return call


def captured(call: Callable) -> Callable:
    """The same launches, from a CUDA graph. `call` has run before: nothing is compiled in the capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def steps(s: Sizes, lengths, device: torch.device) -> list[tuple[str, int, Callable[[int], list[Callable]]]]:
    """(name, bytes of a layer, n -> n layers), attention once per backend of PyTorch's: the best is reported."""
    ours = step_bytes(s.B, s.H, s.d, s.M)
    found = [
        ("interdomain, fused in place", ours, lambda n: interdomain_layers(s, n, device, True)),
        ("interdomain, plain PyTorch", ours, lambda n: interdomain_layers(s, n, device, False)),
    ]
    if device.type != "cuda":
        found[:1] = [("interdomain, in place", *found[0][1:])]
    backends = ATTENTION if device.type == "cuda" else (SDPBackend.FLASH_ATTENTION,)
    for length, backend in itertools.product(lengths, backends):
        name = f"softmax, cache {length:,}, {backend.name.removesuffix('_ATTENTION').lower()}"
        nbytes = attention_step_bytes(s.B, s.H, s.d, length)
        found.append((name, nbytes, lambda n, length=length, b=backend: attention_layers(s, length, n, device, b)))
    return found


def measure(s: Sizes, lengths, device, bandwidth: float, deadline: Deadline, rounds: int) -> list[dict]:
    """One row per step and way of launching; of attention's backends the fastest at each length."""
    rows = []
    for name, nbytes, build in steps(s, lengths, device):
        n = layers_for(nbytes, device)
        row = {"step": name, "graph": False, "MB": nbytes / 1e6, "layers": n}
        try:
            call = in_order(build(n))
        except torch.OutOfMemoryError as e:
            rows.append(row | {"remark": reason(e)})
            release(device)
            continue
        calls, bad = usable({False: call}, device, passed=lambda: deadline.passed)
        if calls and device.type == "cuda":
            try:
                calls[True] = captured(call)
            except Exception as e:
                bad[True] = f"not captured: {reason(e)}"
        times = {}
        # Eager, the host's gaps count; the launch of a graph hides behind the token before it.
        for graph, lead in ((False, 0.0), (True, LEAD_MS)):
            if graph in calls:
                times |= interleaved({graph: calls[graph]}, device, rounds=rounds, seconds=0.3, lead_ms=lead)
        for graph in (False, True):
            if graph in times:
                us = 1e3 * times[graph][-1].median / n
                figures = {"us": us, "of copy bandwidth": nbytes / (us / 1e6) / bandwidth}
                rows.append(row | {"graph": graph, **figures})
            elif graph in bad:
                rows.append(row | {"graph": graph, "remark": bad[graph]})
        call = calls = build = None
        release(device)
    return compared(rows)


def compared(rows: list[dict]) -> list[dict]:
    """The fastest backend of attention for each cache and way of launching, and every time over that of our fused step."""
    ours = {row["graph"]: row.get("us") for row in rows if row["step"] == rows[0]["step"]}
    kept, best = [], {}
    for row in rows:
        if not row["step"].startswith("softmax"):
            kept.append(row)
            continue
        key = row["step"].rsplit(", ", 1)[0], row["graph"]
        if key not in best or row.get("us", float("inf")) < best[key].get("us", float("inf")):
            best[key] = row
    kept += best.values()
    for row in kept:
        row["over fused"] = ratio(row.get("us"), ours.get(row["graph"]))
    return kept


def parse(argv) -> argparse.Namespace:
    p = argument_parser(__doc__)
    add_arguments(p)
    p.add_argument("--batches", nargs="+", type=int, help=f"default {' '.join(map(str, BATCHES))}")
    p.add_argument("--caches", nargs="+", type=int, help=f"tokens; default {' '.join(map(str, CACHES))}")
    p.add_argument("--heads", type=int, help="default 32 (CPU: 2)")
    p.add_argument("--head-dim", type=int, help="default 64 (CPU: 16)")
    p.add_argument("--basis", type=int, help="M, basis functions per head; default 64 (CPU: 16)")
    p.add_argument("--rounds", type=int, help="turns of a candidate; default 30 (CPU: 3)")
    return p.parse_args(argv)


@user_errors
@torch.no_grad()
def main(argv=None) -> int:
    args = parse(argv)
    device = choose_device(args.device)
    cuda = device.type == "cuda"
    deadline = Deadline(args.time_limit)
    batches = args.batches or (BATCHES if cuda else TINY_BATCHES)
    lengths = args.caches or (CACHES if cuda else TINY_CACHES)
    H, d, M, rounds = (
        given if given is not None else usual if cuda else tiny
        for given, usual, tiny in (
            *((args.heads, 32, 2), (args.head_dim, 64, 16), (args.basis, 64, 16)),
            (args.rounds, 30, 3),
        )
    )
    for flag, values in {
        "--batches": batches, "--caches": lengths, "--heads": [H], "--head-dim": [d], "--basis": [M], "--rounds": [rounds]
    }.items():  # fmt: skip
        if min(values) < 1:
            raise ValueError(f"{flag} must be at least 1: got {min(values)}.")
    options = {"heads": H, "head_dim": d, "basis": M, "rounds": rounds, "dtype": "bfloat16, states float32"}
    report = Report("decode", args.output, device, options)
    limits = ceilings(device)
    report.contents["ceilings"] = limits._asdict()
    report.note(f"Measured copy bandwidth: {limits.bandwidth / 1e12:.3g} TB/s, read and written. One layer, one token.")
    ran = 0
    for B in batches:
        name = f"B={B} H={H} d={d} M={M}"
        report.table(name, COLUMNS)
        if deadline.passed:
            report.note(f"{name}: not run: time limit")
            continue
        for row in measure(Sizes(B, H, d, M), lengths, device, limits.bandwidth, deadline, rounds):
            ran += "us" in row
            report.add(name, row)
    report.finish("unfinished" if deadline.passed else "complete", f"{ran} timings")
    return 0


if __name__ == "__main__":
    sys.exit(main())
