"""The device that a run computes on."""

import os
from typing import NamedTuple

import torch

from interdomain.launcher import keep_freed_memory


class Gpu(NamedTuple):
    """A GPU that a plan is made for.

    Attributes:
        name: Its name, such as GH200.
        memory: Its memory in bytes.
    """

    name: str
    memory: float


def gpu_here() -> Gpu | None:
    """Returns the first GPU of this machine, or None if it has none."""
    if device_here().type == "cpu":
        return None
    properties = torch.cuda.get_device_properties(0)
    return Gpu(properties.name, properties.total_memory)


def device_here() -> torch.device:
    """Returns the device that a run on this machine computes on: the GPU, or else the CPU."""
    if torch.accelerator.is_available() and torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("cpu")


def local_device() -> torch.device:
    """Returns the device of this rank, and makes it the current one.

    On a CPU the rank keeps the memory that it frees.
    """
    device = torch.device(device_here().type, int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    return device
