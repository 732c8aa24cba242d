"""python -m interdomain.tools._bench.machine --output DIR

Record what this machine is, what can be imported on it, and two rates that no kernel can exceed: those of a copy in memory
and of a large matrix product.

    python -m interdomain.tools._bench.machine --device cpu --output benchmarks/results/today
"""

import importlib
import subprocess
import sys

import torch

from interdomain.tools._bench import results
from interdomain.tools._bench.timing import measure
from interdomain.tools._cli import argument_parser, user_errors

IMPORTED = ("triton", "torchtitan", "interdomain.titan", "fla")


def describe_import(name: str) -> str:
    """The version of a package, or the reason why it cannot be imported."""
    try:
        module = importlib.import_module(name)
    except Exception as e:
        return results.reason(e)
    return getattr(module, "__version__", "imported")


def copy_rate(device: torch.device, nbytes: int) -> float:
    """TB/s of a copy, bytes read and written together."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    *_, whole = measure(lambda: target.copy_(source), device)
    return 2 * nbytes / whole.median / 1e9


def product_rate(device: torch.device, size: int) -> float:
    """TFLOP/s of a bf16 matrix product of random numbers."""
    a, b = torch.randn(2, size, size, device=device).bfloat16()
    *_, whole = measure(lambda: a @ b, device)
    return 2 * size**3 / whole.median / 1e9


@user_errors
def main(argv: list[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    results.add_arguments(parser, "machine")
    args = parser.parse_args(argv)
    device = results.choose_device(args.device)
    report = results.Report(args.name, args.output, device, {})
    report.table("imports", ["package", "found"])
    for name in IMPORTED:
        report.add("imports", {"package": name, "found": describe_import(name)})
    on_cpu = device.type == "cpu"
    nbytes = 2**24 if on_cpu else 2**32
    size = 256 if on_cpu else 8192
    report.table("ceilings", ["what", "rate"])
    report.add("ceilings", {"what": "copy, TB/s", "rate": copy_rate(device, nbytes)})
    report.add(
        "ceilings",
        {
            "what": f"{size} x {size} bf16 matrix product, TFLOP/s",
            "rate": product_rate(device, size),
        },
    )
    report.finish()
    if not on_cpu:  # for the log: clocks, power and temperature, just after the product
        subprocess.run(
            ["nvidia-smi", "-q", "-d", "CLOCK,POWER,TEMPERATURE,PERFORMANCE"], check=False
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
