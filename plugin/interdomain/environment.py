"""The machine and the versions that a result depends on. No host name, no user, no path.

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
    record = {}
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        driver = _output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        ).partition("\n")[0]
        record = {
            "GPU": p.name,
            "compute capability": f"{p.major}.{p.minor}",
            "driver": driver or "unknown",
        }
        ptxas = _output(os.environ.get("TRITON_PTXAS_PATH", ""), "--version").rpartition("\n")[2]
        record["ptxas"] = ptxas or "Triton's own"
        cudnn: int | None = torch.backends.cudnn.version()
        record["CUDA"] = f"{torch.version.cuda}, cuDNN {cudnn}"
    model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"
    record["CPU"] = f"{model[1] if model else platform.machine()}, {cores}"
    record |= {"Python": platform.python_version(), "PyTorch": torch.__version__}
    return (
        record
        | dict.fromkeys(PACKAGES, "not installed")
        | versions(PACKAGES)
        | {"commit": commit()}
    )


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit() -> str:
    """This clone's commit, with a word if it was changed since; INTERDOMAIN_COMMIT names it where git cannot."""
    describe = "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=, changed since"
    described = _output("git", "-C", str(ROOT), "-c", f"safe.directory={ROOT}", *describe)
    return described or os.environ.get("INTERDOMAIN_COMMIT") or "unknown"


def _output(*command: str) -> str:
    """Output of a program; empty if the program is not there or fails."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


if __name__ == "__main__":  # .github/ISSUE_TEMPLATE asks for it
    for name, fact in environment(
        torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ).items():
        print(f"{name}: {fact}")
