"""python -m interdomain.tools._bench.machine --output DIR

Record what this machine is and what can be imported on it.

It also measures two rates that no kernel can exceed: those of a copy in memory and of a large
matrix product.

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
NVIDIA_SMI = ("nvidia-smi", "-q", "-d", "CLOCK,POWER,TEMPERATURE,PERFORMANCE")


def describe_import(name: str) -> str:
    """Returns the version of a package, or the reason why it cannot be imported."""
    try:
        module = importlib.import_module(name)
    except Exception as e:
        return results.reason(e)
    return getattr(module, "__version__", "imported")


def copy_rate(device: torch.device, nbytes: int) -> float:
    """Returns the TB/s of a copy, bytes read and written together.

    Args:
        device: The device that is measured.
        nbytes: The bytes that are copied.
    """
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = measure([lambda: target.copy_(source)], device)
    return 2 * nbytes / times[0].median / 1e9


def product_rate(device: torch.device, size: int) -> float:
    """Returns the TFLOP/s of a bf16 matrix product of random numbers.

    Args:
        device: The device that is measured.
        size: Rows and columns of the square matrices.
    """
    a, b = torch.randn(2, size, size, device=device).bfloat16()
    times = measure([lambda: a @ b], device)
    return 2 * size**3 / times[0].median / 1e9


@user_errors
def main(argv: list[str] | None = None) -> int:
    """Runs the command, by default with the process's arguments. Returns the exit status."""
    parser = argument_parser(__doc__)
    results.add_arguments(parser, "machine")
    args = parser.parse_args(argv)
    device = results.choose_device(args.device)
    # Larger than any cache.
    nbytes = 2**32
    size = 8192
    if device.type == "cpu":
        nbytes = 2**24
        size = 256

    report = results.Report(args.name, args.output, device, {})
    # Packages that the other parts need.
    report.table("imports", ["package", "found"])
    for name in IMPORTED:
        report.add("imports", {"package": name, "found": describe_import(name)})
    # Rates that no kernel exceeds.
    report.table("ceilings", ["what", "rate"])
    report.add("ceilings", {"what": "copy, TB/s", "rate": copy_rate(device, nbytes)})
    product = f"{size} x {size} bf16 matrix product, TFLOP/s"
    report.add("ceilings", {"what": product, "rate": product_rate(device, size)})
    report.finish()
    if device.type == "cuda":
        # For the log: clocks, power and temperature, just after the product.
        subprocess.run(NVIDIA_SMI, check=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
