"""The device that a run computes on: a machine without a GPU under TorchTitan, and what is refused there."""

import os

import torch

from interdomain.scan.triton_support import cannot_launch

from ..host import VERSION
from ..settings.job_config import refuse, value_of
from ..settings.schema import JobConfig


def device_here() -> torch.device:
    """The device that a run on this machine computes on."""
    return torch.device("cuda" if torch.accelerator.is_available() and torch.cuda.is_available() else "cpu")


def local_device() -> torch.device:
    """This rank's device, made the current one."""
    device = torch.device(device_here().type, int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def refuse_for_device(job_config: JobConfig) -> None:
    """Raises: ValueError for settings that only an accelerator can honour; where there is one, for a run that compiles, if
    nothing can be compiled for it."""
    if torch.accelerator.is_available():
        features, scan = (value_of(job_config, f"mixer.{name}") for name in ("features", "backend"))
        plain = features == "torch" and scan == "chunkwise-torch" and not job_config.compile.enable
        if torch.cuda.is_available() and not plain and (problem := cannot_launch()):
            raise ValueError(
                f"{problem}. Without kernels, much slower: --compile.no-enable --mixer.backend chunkwise-torch "
                "--mixer.features torch."
            )
        return
    problems = []
    needing = ["training.enable_cpu_offload"]
    if VERSION == "0.2.2":  # its profiler also asks for a GPU's events
        needing.append("profiling.enable_profiling")
    for setting in needing:
        if value_of(job_config, setting):
            problems.append(f"{setting} needs a GPU, and this machine has none. Turn it off to run on the CPU.")
    refuse(problems)
