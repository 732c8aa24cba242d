"""interdomain bench-kernels --output benchmarks/results/today

Time the scan alone, beside attention and other mixers.

Forward and backward are timed on the same q, k and v: this package's backends, PyTorch's attention,
and the kernels of other packages that are installed. The table also has the roofline of the GPU's
datasheet, the time of each kernel, and a whole layer. Without a GPU it runs at tiny sizes on the
CPU, and the results say so, or at the sizes that you name.

    interdomain bench-kernels --mixers chunkwise sdpa-flash --shapes 8x4096x32x64 \
        --output benchmarks/results/1
    interdomain bench-kernels --mixers chunkwise sdpa-flash --shapes 1x4096x12x64 --dtype float32 \
        --device cpu

Documentation: docs/measurements.md
"""

import argparse
import functools
import os
import re
import sys
from collections.abc import Callable
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
from interdomain.tools._bench.peers import (
    IN_PYTORCH,
    KERNELS,
    PEERS,
    UNTUNED,
    leave_untuned,
    peer,
    time_refused_kernels,
)
from interdomain.tools._bench.processes import compilations_of, run_cases
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

# A mixer is the name of a computation that is timed; `candidate` makes its call. "linear" is the
# scan with a fixed readout, as in S4D. "chunkwise-kept" keeps the result of the forward's first
# pass for the backward; "chunkwise" computes it again.
CHUNKWISE = ("chunkwise", "chunkwise-kept")
OURS = (*CHUNKWISE, "features", "linear")  # mixers whose kernels are timed one by one
ATTENTION = {
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
}
ALL_ATTENTION = (*ATTENTION, "flash-attn-3", "flash-attn-2")
# The scan with one entry of its launch plan (triton_plan.Plan) changed, to see what that entry is
# worth. check-kernels does not cover these.
VARIANTS: dict[str, dict[str, Any]] = {
    "chunkwise-not-fused": {"fused": None},
    "chunkwise-8-warps": {"contract": (8192, 8, 2), "expand": (8192, 8, 2)},
    "chunkwise-1-stage": {"contract": (8192, 4, 1), "expand": (8192, 4, 1)},
    "chunkwise-3-stages": {"contract": (8192, 4, 3), "expand": (8192, 4, 3)},
    "chunkwise-not-held": {"operands_in_registers": False},
    "chunkwise-decay-2048": {"decay": 2048},
}
# Mixers in the order in which they run: those that a run which is cut should not lose come first.
ON_GPU = (
    "chunkwise",
    "sdpa-cudnn",
    "chunkwise-kept",
    "sdpa-flash",
    "features",
    "linear",
    "layer",
    *KERNELS,
)
ON_CPU = ("chunkwise", "features", "linear", "fft", "sdpa-flash", "layer")
ONLY_IF_NAMED = ("chunkwise-torch", "fft", *VARIANTS, *IN_PYTORCH)
NAMES = (*ON_GPU, *ONLY_IF_NAMED)
SHAPES = ("8x4096x32x64", "2x16384x32x64", "1x32768x32x64", "8x4096x32x96")
TINY = ("2x128x2x16", "1x256x2x24")
PHASES = ("forward", "backward", "both")
COLUMNS = [
    "mixer",
    "forward ms",
    "backward ms",
    "both ms",
    "of best attention",
    "roofline ms",
    "of roofline",
    "peak MiB",
    "remark",
]
ROOFLINE_NOTE = (
    "Roofline: inputs read and outputs written once, the algebra's FLOPs, at the datasheet's "
    "rates, in bf16."
)


def parse_shape(text: str) -> Shape:
    """Reads BxTxHxd.

    Raises:
        ValueError: The text has another form.
    """
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){3}", text):
        raise ValueError(
            f"--shapes must be BATCHxTOKENSxHEADSxHEAD_DIM, such as {SHAPES[0]}: got {text}."
        )
    return Shape(*map(int, text.split("x")))


def candidate(
    name: str, shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Call:
    """Makes the call that is timed.

    Args:
        name: One of NAMES.
        shape: B, T, H and d of q, k and v.
        device: The device that it runs on.
        dtype: The dtype of q, k and v.

    Returns:
        Two steps. The first is forward as in training, from q, k, v [B, T, H, d] to o. The second
        computes the gradients of all tensors that the first reads.
    """
    # A whole layer and the input features have inputs of their own.
    if name == "layer":
        layer = InterdomainAttention(shape.H * shape.d, shape.H, n_basis=shape.M).to(device, dtype)
        x, d_out = torch.randn(2, shape.B, shape.T, shape.H * shape.d, device=device, dtype=dtype)
        x.requires_grad_()
        return with_backward(functools.partial(layer, x), [x, *layer.parameters()], d_out)
    if name == "features":
        return features(shape, device, dtype)

    # All others read the same q, k and v; the linear readout reads [k; v].
    kind = "linear scan" if name == "linear" else "scan"
    inputs, cotangents = make_inputs(Case(kind, shape, dtype, state=False), device)
    run: Callable
    arguments: dict[str, Any] = inputs
    if name in ATTENTION:
        run = functools.partial(attention, backend=ATTENTION[name])
        arguments = {"q": inputs["q"], "k": inputs["k"], "v": inputs["v"]}
    elif name in PEERS:
        run, arguments = peer(name, inputs["q"], inputs["k"], inputs["v"])
    elif name == "linear":
        run = functools.partial(scan.linear_scan, final_state=False, backend="chunkwise")
    else:
        # The other names are backends of the scan, or variants of the backend `chunkwise`. On a CPU
        # there are no plans. Without changes, the plan of an earlier variant is undone.
        if device.type == "cuda":
            change_plan(VARIANTS.get(name, {}))
        backend = "chunkwise" if name in VARIANTS else name.removesuffix("-kept")
        recompute = name != "chunkwise-kept"
        run = functools.partial(
            scan.interdomain_scan, final_state=False, backend=backend, recompute=recompute
        )

    def forward() -> Tensor:
        out = run(**arguments)
        # Scans return a state, too; early versions of FlashAttention 3 the logsumexp.
        return out[0] if isinstance(out, tuple) else out

    leaves = [x for x in arguments.values() if isinstance(x, Tensor)]
    return with_backward(forward, leaves, cotangents["out"])


def with_backward(forward: Callable, leaves: list[Tensor], d_out: Any) -> Call:
    """Makes the steps of a call.

    Args:
        forward: The first step.
        leaves: The tensors whose gradients the second step takes.
        d_out: The gradient of the first step's result.
    """
    return forward, functools.partial(torch.autograd.grad, inputs=leaves, grad_outputs=d_out)


def change_plan(changes: dict[str, Any]) -> None:
    """Makes this process plan its launches with other entries from now on.

    Args:
        changes: The new value of each field of `triton_plan.Plan` that changes.
    """
    from interdomain.scan import triton_chunkwise

    def changed_plan(*args: Any) -> Plan:
        return make_plan(*args)._replace(**changes)

    triton_chunkwise.make_plan = changed_plan


def features(s: Shape, device: torch.device, dtype: torch.dtype) -> Call:
    """Makes the call that computes q, k and v of an interdomain layer from three projections.

    Args:
        s: B, T, H and d of q, k and v.
        device: The device that it runs on.
        dtype: The dtype of all tensors but the rotary angles.
    """

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=device, dtype=dtype).requires_grad_()

    # Inputs and parameters of the right shapes, with random values.
    dim = s.H * s.d
    angles = torch.rand(s.T, 1, s.d // 2, device=device)
    rope = (angles.cos(), angles.sin())
    x = [normal(s.B, s.T, dim) for _ in range(3)]
    q_conv = (normal(dim, 4), normal(dim))
    k_conv = (normal(dim, 4), normal(dim))
    k_norm = (normal(s.d), normal(s.H, s.d))
    v_norm = (normal(s.d), normal(s.H, s.d))

    def forward() -> list[Tensor]:
        q = input_features(x[0], s.d, rope=rope, silu=True, conv=q_conv)
        k = input_features(x[1], s.d, rope=rope, silu=True, conv=k_conv, norm=k_norm)
        v = input_features(x[2], s.d, norm=v_norm)
        return [q, k, v]

    leaves = [*x, *q_conv, *k_conv, *k_norm, *v_norm]
    d_y = [torch.randn(s.B, s.T, s.H, s.d, device=device, dtype=dtype) for _ in range(3)]
    return with_backward(forward, leaves, d_y)


def attention(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend) -> Tensor:
    """Returns PyTorch's causal attention of q, k, v [B, T, H, d] by one of its backends."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def costs(name: str, s: Shape) -> tuple[int, int] | None:
    """Counts the least that forward and backward need in bf16.

    Inputs are read and outputs written once. Products are those that MFU counts.

    Args:
        name: One of NAMES.
        s: The shape of q, k and v.

    Returns:
        Bytes and FLOPs; None for a mixer with another algebra.
    """
    # Per token and head, rows of d numbers: q, k, v are read and o is written, then q, k, v, do are
    # read and dq, dk, dv written.
    rows = 11
    macs = 0
    if name == "linear":
        rows = 10  # z and y have two rows each: z, y; z, dy, dz
    elif name == "features":
        rows = 15  # three times: x, y; x, dy, dx
    elif name in ALL_ATTENTION:
        # Two products over T (T + 1) / 2 pairs, and five in the backward.
        macs = 7 * (s.T + 1) * s.d // 2
    elif name == "fft" or name.startswith("chunkwise"):
        # Twice the scores, their products with the values and the state; and a product by W. The
        # backward costs two forwards.
        N = 2 * s.M
        macs = 3 * (2 * (scan.CHUNK * s.d + scan.CHUNK * N + 2 * N * s.d) + N * N)
    else:
        return None
    tokens = s.B * s.T * s.H
    return 2 * tokens * rows * s.d, 2 * tokens * macs


def run_case(
    case: tuple[str, Shape],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    untuned: bool = False,
) -> dict[str, Any]:
    """Times a mixer at a shape.

    Args:
        case: The mixer and the shape.
        device: The device that is measured.
        dtype: The dtype of q, k and v.
        untuned: The option --untuned.

    Returns:
        A row of the table.
    """
    name, shape = case
    rounds = 20
    seconds = 1.0
    if device.type == "cpu":
        rounds = 3
        seconds = 0.05
    row: dict[str, Any] = {"mixer": name}
    call = candidate(name, shape, device, dtype)

    # Kernels of flash-linear-attention are timed under conditions that the row has to mention.
    remarks = time_refused_kernels(name, device)
    if untuned and name.startswith("fla-"):
        leave_untuned("fla")
        remarks.append(UNTUNED)
    if remarks:
        row["remark"] = "; ".join(remarks)

    # Time and memory.
    times = measure(call, device, rounds=rounds, seconds=seconds)
    row["peak MiB"] = peak_memory(call, device)
    for phase, phase_times in zip(PHASES, times, strict=True):
        row[f"{phase} ms"] = phase_times.median
        row[f"{phase} times"] = phase_times._asdict()

    # The roofline is of bf16 only.
    counted = costs(name, shape)
    row["roofline ms"] = None
    if counted is not None and dtype == torch.bfloat16:
        row["roofline ms"] = roofline_ms(device, *counted)
    row["of roofline"] = ratio(row["roofline ms"], row["both ms"])
    if name in OURS:
        row["kernels ms"] = kernel_times(call, device)
    return row


def kernel_times(call: Call, device: torch.device) -> dict[str, float]:
    """Returns the ms of every kernel of a call by name. On a CPU these are operations.

    Args:
        call: The steps.
        device: The device that they run on.
    """
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        run_once(call)
        if on_gpu:
            torch.cuda.synchronize()

    # The profiler adds up the calls of each kernel, in microseconds.
    ms = {}
    for event in profile.key_averages():
        own_time = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        ms[event.key] = own_time / 1e3
    return ms


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line. If `argv` is None, it is that of the process."""
    p = argument_parser(__doc__)
    results.add_arguments(p, "kernels")
    p.add_argument(
        "--shapes",
        nargs="+",
        metavar="BxTxHxD",
        help="batch x tokens x heads x head width "
        f"(default: {' '.join(SHAPES)}; on a CPU {' '.join(TINY)})",
    )
    p.add_argument(
        "--mixers",
        nargs="+",
        choices=NAMES,
        metavar="NAME",
        help=f"{', '.join(NAMES)} (default: all but {', '.join(ONLY_IF_NAMED)}; on a CPU a few)",
    )
    p.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of q, k and v (default: bfloat16)",
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


@user_errors
def main(argv: list[str] | None = None) -> int:
    """Runs the command, by default with the process's arguments. Returns the exit status."""
    args = parse(argv)
    if args.once:
        # Without PyTorch's pools a sanitizer sees an access beyond a tensor's end.
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    device = results.choose_device(args.device)
    named = bool(args.shapes)
    results.fill_in(args, device, shapes=(SHAPES, TINY), mixers=(ON_GPU, ON_CPU))
    shapes = [parse_shape(text) for text in args.shapes]
    dtype = getattr(torch, args.dtype)
    cases = [(name, shape) for name in args.mixers for shape in shapes]

    # Under a profiler or a sanitizer nothing is measured here.
    if args.once:
        for name, shape in cases:
            run_once(candidate(name, shape, device, dtype))
            print(f"ran {name}, {shape}", flush=True)
        return 0

    options = {"mixers": args.mixers, "dtype": args.dtype}
    report = results.Report(args.name, args.output, device, options, named=named)
    gpu = gpu_of(device)
    if gpu is not None and gpu.goal:
        report.note(
            f"The goal on this card, at {TARGET_SHAPE}: "
            f"at most {gpu.goal} of the fastest attention's time."
        )
    report.note(ROOFLINE_NOTE)
    for shape in shapes:
        report.table(str(shape), COLUMNS)

    def add(case: tuple[str, Shape], row: dict | str) -> None:
        name, shape = case
        if isinstance(row, str):
            row = {"mixer": name, "remark": row}
        # The fastest attention so far may be this row: compare all rows of the table anew.
        rows = [*report.rows(str(shape)), row]
        attention_ms = [
            x["both ms"] for x in rows if x["mixer"] in ALL_ATTENTION and "both ms" in x
        ]
        fastest = min(attention_ms, default=None)
        for other in rows:
            other["of best attention"] = ratio(other.get("both ms"), fastest)
        report.add(str(shape), row)

    run = functools.partial(run_case, dtype=dtype, untuned=args.untuned)
    run_cases(device, [cases], run, add)

    # The last line counts over all tables.
    rows = []
    for shape in shapes:
        rows += report.rows(str(shape))
    timings = sum("both ms" in row for row in rows)
    report.finish(counts=f"{timings} timings, {compilations_of(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
