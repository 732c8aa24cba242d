"""interdomain bench-kernels --output benchmarks/results/today

Time the scan alone, beside attention and other mixers.

Forward and backward are timed on the same q, k and v: this package's backends, PyTorch's attention, and the kernels of
other packages that are installed. The table also has the roofline of the GPU's datasheet, the time of each kernel, and
a whole layer. Without a GPU it runs at tiny sizes on the CPU, and the results say so, or at the sizes that you name.

    interdomain bench-kernels --mixers chunkwise sdpa-flash --shapes 8x4096x32x64 --output benchmarks/results/1
    interdomain bench-kernels --mixers chunkwise sdpa-flash --shapes 1x4096x12x64 --dtype float32 --device cpu

Documentation: docs/benchmarks.md
"""

import argparse
import contextlib
import functools
import itertools
import os
import re
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity

from interdomain import InterdomainAttention, scan
from interdomain.features import input_features
from interdomain.scan.triton_plan import Plan, make_plan
from interdomain.tools._bench import results
from interdomain.tools._bench.cases import Case, Shape, make_inputs
from interdomain.tools._bench.peers import PEERS, UNTUNED, leave_untuned, peer, time_refused_kernels
from interdomain.tools._bench.timing import (
    TARGET_SHAPE,
    Call,
    gpu_of,
    measure,
    peak_memory,
    ratio,
    roofline_ms,
    run_once,
)
from interdomain.tools._cli import argument_parser, user_errors

CHUNKWISE = ("chunkwise", "chunkwise-kept")
ATTENTION = {
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-default": None,  # the one that PyTorch picks by itself
}
ALL_ATTENTION = (*ATTENTION, "flash-attn-3", "flash-attn-2")
STATEFUL = tuple(
    name for name in PEERS if name not in ALL_ATTENTION
)  # other algebra: no roofline of ours
SLOW = ("chunkwise-torch", "fft")  # on a GPU only if named
# The scan with one entry of its plan changed, to see what that entry is worth; only if named. The check does not cover them.
VARIANTS: dict[str, dict[str, Any]] = {
    "chunkwise-not-fused": {"fused": None},
    "chunkwise-8-warps": {"contract": (8192, 8, 2), "expand": (8192, 8, 2)},
    "chunkwise-1-stage": {"contract": (8192, 4, 1), "expand": (8192, 4, 1)},
    "chunkwise-3-stages": {"contract": (8192, 4, 3), "expand": (8192, 4, 3)},
    "chunkwise-not-held": {"held": False},
    "chunkwise-decay-2048": {"decay": 2048},
}
# In the order in which they run: those that a run which is cut should not lose come first.
NAMES = (
    "chunkwise",
    "sdpa-cudnn",
    "chunkwise-kept",
    "sdpa-flash",
    "features",
    "linear",
    "sdpa-default",
    "layer",
)
NAMES += (*PEERS, *SLOW, *VARIANTS)
ON_CPU = ("chunkwise", "features", "linear", "fft", "sdpa-flash", "layer")
SHAPES = ("8x4096x32x64", "2x16384x32x64", "1x32768x32x64", "8x4096x32x96")
TINY = ("2x128x2x16", "1x256x2x24")
PHASES = ("forward", "backward", "both")
COLUMNS = [
    "mixer",
    *(f"{phase} ms" for phase in PHASES),
    "of best attention",
    "roofline ms",
    "of roofline",
]
COLUMNS += ["peak MiB", "remark"]


def parse_shape(text: str) -> Shape:
    """BxTxHxd. Raises: ValueError."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){3}", text):
        raise ValueError(
            f"--shapes must be BATCHxTOKENSxHEADSxHEAD_DIM, such as {SHAPES[0]}: got {text}."
        )
    return Shape(*map(int, text.split("x")))


def candidate(
    name: str, shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Call:
    """Forward as in training, from q, k, v [B, T, H, d] to o, then the gradients of all that it reads: two steps."""
    if name == "layer":
        layer = InterdomainAttention(shape.H * shape.d, shape.H, n_basis=shape.M).to(device, dtype)
        x, d_out = torch.randn(2, shape.B, shape.T, shape.H * shape.d, device=device, dtype=dtype)
        leaves = [x.requires_grad_(), *layer.parameters()]
        return lambda: layer(x), lambda out: torch.autograd.grad(out, leaves, d_out)
    if name == "features":
        return features(shape, device, dtype)
    inputs: dict[str, Any]
    case = Case("linear scan" if name == "linear" else "scan", shape, dtype, state=False)
    inputs, (d_out, _) = make_inputs(case, device)
    leaves = list(inputs.values())
    if name in ATTENTION:
        leaves = [inputs[x] for x in ("q", "k", "v")]
        forward = functools.partial(attention, *leaves, backend=ATTENTION[name])
    elif name in PEERS:
        forward, leaves = peer(name, inputs["q"], inputs["k"], inputs["v"])
    elif name == "linear":  # the core of the s4d conditions: 2d channels in, 2d out
        inputs |= dict(final_state=False, backend="chunkwise")
        forward = lambda: scan.linear_scan(**inputs)[0]  # noqa: E731
    else:
        if device.type == "cuda":
            change_plan(VARIANTS.get(name, {}))
        backend = "chunkwise" if name in VARIANTS else name.removesuffix("-kept")
        inputs |= dict(backend=backend, recompute=name != "chunkwise-kept", final_state=False)
        forward = lambda: scan.interdomain_scan(**inputs)[0]  # noqa: E731
    return forward, lambda out: torch.autograd.grad(out, leaves, d_out)


def change_plan(changes: dict[str, Any]) -> None:
    """Makes this process plan its launches with these entries from now on."""
    from interdomain.scan import triton_chunkwise

    def changed_plan(*args: Any) -> Plan:
        return make_plan(*args)._replace(**changes)

    triton_chunkwise.make_plan = changed_plan


def features(s: Shape, device: torch.device, dtype: torch.dtype) -> Call:
    """The input features of q, k and v as a layer of interdomain has them, from three projections."""

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=device, dtype=dtype).requires_grad_()

    E = s.H * s.d
    angles = torch.rand(s.T, 1, s.d // 2, device=device)
    rope = (angles.cos(), angles.sin())
    x = [normal(s.B, s.T, E) for _ in range(3)]
    q_conv = (normal(E, 4), normal(E))
    k_conv = (normal(E, 4), normal(E))
    k_norm = (normal(s.d), normal(s.H, s.d))
    v_norm = (normal(s.d), normal(s.H, s.d))
    leaves = [*x, *q_conv, *k_conv, *k_norm, *v_norm]
    d_y = [torch.randn(s.B, s.T, s.H, s.d, device=device, dtype=dtype) for _ in range(3)]

    def forward() -> list[Tensor]:
        q = input_features(x[0], s.d, rope=rope, silu=True, conv=q_conv)
        k = input_features(x[1], s.d, rope=rope, silu=True, conv=k_conv, norm=k_norm)
        v = input_features(x[2], s.d, norm=v_norm)
        return [q, k, v]

    return forward, lambda y: torch.autograd.grad(y, leaves, d_y)


def attention(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend | None) -> Tensor:
    with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def costs(name: str, s: Shape) -> tuple[int, int]:
    """(bytes, FLOPs) of forward and backward: inputs read and outputs written once, products as MFU counts them.

    Per token and head, in rows of d bf16 numbers: q, k, v in and o out, then q, k, v, do in and dq, dk, dv out. `linear` has z
    of two rows in place of q, k, v and o; `features` three times x in and y out, then x and dy in and dx out.
    """
    rows = {"linear": 10, "features": 15}.get(name, 11)
    macs = 0
    if name in ALL_ATTENTION:  # two products over T (T + 1) / 2 pairs, and five
        macs = 7 * (s.T + 1) * s.d // 2
    if (
        name in CHUNKWISE
    ):  # scores, times the values, state; twice, and a product by W; the backward costs two forwards
        N = 2 * s.M
        macs = 3 * (2 * (scan.CHUNK * s.d + scan.CHUNK * N + 2 * N * s.d) + N * N)
    tokens = s.B * s.T * s.H
    return 2 * tokens * rows * s.d, 2 * tokens * macs


def run_case(
    case: tuple[str, Shape],
    device: torch.device,
    *,
    rounds: int,
    dtype: torch.dtype = torch.bfloat16,
    untuned: bool = False,
) -> dict[str, Any]:
    """A row of the table. untuned: see --untuned."""
    name, shape = case
    row: dict[str, Any] = {"mixer": name}
    try:
        call = candidate(name, shape, device, dtype)
        if name.startswith("fla-"):
            remarks = [time_refused_kernels(name, device)]
            if untuned:
                leave_untuned("fla")
                remarks.append(UNTUNED)
            row["remark"] = "; ".join(remark for remark in remarks if remark)
        times = measure(call, device, rounds=rounds, seconds=1.0 if device.type == "cuda" else 0.05)
        row["peak MiB"] = peak_memory(call, device)
    except Exception as e:
        return row | {"remark": results.reason(e)}
    for phase, taken in zip(PHASES, times, strict=True):
        row |= {f"{phase} ms": taken.median, f"{phase} times": taken._asdict()}
    counted = name != "layer" and name not in STATEFUL and dtype == torch.bfloat16
    row["roofline ms"] = roofline_ms(device, *costs(name, shape)) if counted else None
    if name in (*CHUNKWISE, "features", "linear"):
        row["kernels ms"] = kernel_times(call, device)
    return row | {"of roofline": ratio(row["roofline ms"], row["both ms"])}


def parse(argv) -> argparse.Namespace:
    p = argument_parser(__doc__)
    results.add_arguments(p, "kernels")
    p.add_argument(
        "--shapes",
        nargs="+",
        metavar="BxTxHxD",
        help=f"batch x tokens x heads x head width (default: {' '.join(SHAPES)}; on a CPU {' '.join(TINY)})",
    )
    p.add_argument(
        "--mixers",
        nargs="+",
        metavar="NAME",
        help=f"{', '.join(NAMES)} (default: all but {', '.join((*SLOW, *VARIANTS))}; on a CPU a few)",
    )
    p.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of q, k and v (default: bfloat16)",
    )
    p.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help="timed calls, at least 1 (default: 20; on a CPU 3)",
    )
    p.add_argument(
        "--untuned",
        action="store_true",
        help="leave flash-linear-attention's kernels one configuration each: tuning takes minutes",
    )
    p.add_argument(
        "--once", action="store_true", help="run every call once, for a profiler or a sanitizer"
    )
    return p.parse_args(argv)


def kernel_times(call: Call, device: torch.device) -> dict[str, float]:
    """ms of every kernel of a call by name (on a CPU of every operation), the longest first."""
    cuda = device.type == "cuda"
    with torch.profiler.profile(
        activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]
    ) as profile:
        run_once(call)
        if cuda:
            torch.cuda.synchronize()
    ms = {}
    for event in profile.key_averages():
        ms[event.key] = (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e3
    return dict(sorted(ms.items(), key=lambda item: -item[1]))


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    if args.once:  # without PyTorch's pools a sanitizer sees an access beyond a tensor's end
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    device = results.choose_device(args.device)
    named = bool(args.shapes)
    on_gpu = [name for name in NAMES if name not in (*SLOW, *VARIANTS)]
    results.fill_in(args, device, rounds=(20, 3), shapes=(SHAPES, TINY), mixers=(on_gpu, ON_CPU))
    names = results.choose("--mixers", args.mixers, NAMES)
    shapes = [parse_shape(text) for text in args.shapes]
    cases = list(itertools.product(names, shapes))
    dtype = getattr(torch, args.dtype)
    if args.once:
        for name, shape in cases:
            run_once(candidate(name, shape, device, dtype))
            print(f"ran {name}, {shape}", flush=True)
        return 0

    options = {"mixers": names, "rounds": args.rounds, "dtype": args.dtype}
    report = results.Report(args.name, args.output, device, options, named=named)
    gpu = gpu_of(device)
    if gpu is not None and gpu.goal:
        report.note(
            f"The goal on this card, at {TARGET_SHAPE}: at most {gpu.goal} of the fastest attention's time."
        )
    report.note(
        "Roofline: inputs read and outputs written once, the algebra's FLOPs, at the datasheet's rates, in bf16."
    )
    for shape in shapes:
        report.table(str(shape), COLUMNS)

    def add(case: tuple[str, Shape], row: dict | str) -> None:
        name, shape = case
        if isinstance(row, str):
            row = {"mixer": name, "remark": row}
        rows = [*report.rows(str(shape)), row]
        attention_ms = [
            each["both ms"] for each in rows if each["mixer"] in ALL_ATTENTION and "both ms" in each
        ]
        for each in rows:
            each["of best attention"] = ratio(each.get("both ms"), min(attention_ms, default=None))
        report.add(str(shape), row)

    run = functools.partial(run_case, rounds=args.rounds, dtype=dtype, untuned=args.untuned)
    results.work(device, [cases], run, add)
    rows = [row for shape in shapes for row in report.rows(str(shape))]
    timings = sum("both ms" in row for row in rows)
    report.finish(counts=f"{timings} timings, {results.compilations_of(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
