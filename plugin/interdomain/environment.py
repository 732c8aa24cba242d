"""The machine and the versions that a result depends on, without names of hosts, users or paths.

`python -m interdomain.environment` prints them.
"""

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("triton", "torchtitan", "flash-attn", "flash-linear-attention", "mamba-ssm")


def environment(device: torch.device) -> dict[str, str | int | None]:
    """Describes this machine.

    Args:
        device: The device that a result is computed on. A GPU is described, too.
    Returns:
        Texts by name: GPU and driver, CPU, versions of packages, the commit.
    """
    record: dict[str, str | int | None] = {}
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        drivers = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        ptxas = _output(os.environ.get("TRITON_PTXAS_PATH", ""), "--version")
        cudnn: int | None = torch.backends.cudnn.version()
        record["GPU"] = gpu.name
        record["compute capability"] = f"{gpu.major}.{gpu.minor}"
        # There is a line for each GPU.
        record["driver"] = drivers.partition("\n")[0] or "unknown"
        record["ptxas"] = ptxas.rpartition("\n")[2] or "Triton's own"
        record["CUDA"] = f"{torch.version.cuda}, cuDNN {cudnn}"
    cpu_info = Path("/proc/cpuinfo").read_text()
    match = re.search(r"^model name\s*:\s*(.+)$", cpu_info, re.MULTILINE)
    cpu = match[1] if match else platform.machine()
    record["CPU"] = f"{cpu}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"
    record["Python"] = platform.python_version()
    record["PyTorch"] = torch.__version__
    record |= dict.fromkeys(PACKAGES, "not installed")
    record |= versions(PACKAGES)
    record["commit"] = commit()
    return record


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Returns the versions of those packages that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit() -> str:
    """Returns the commit of this clone, and says if files were changed since.

    Without git it is the value of the environment variable INTERDOMAIN_COMMIT.
    """
    git = ("git", "-C", str(ROOT), "-c", f"safe.directory={ROOT}")
    options = ("--always", "--abbrev=40", "--exclude=*", "--dirty=, changed since")
    described = _output(*git, "describe", *options)
    return described or os.environ.get("INTERDOMAIN_COMMIT") or "unknown"


def _output(*command: str) -> str:
    """Returns the output of a program; empty if the program is not installed or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


if __name__ == "__main__":  # .github/ISSUE_TEMPLATE asks for it
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, text in environment(device).items():
        print(f"{name}: {text}")
