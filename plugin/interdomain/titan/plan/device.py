"""The device that a run computes on."""

import os

import torch


def device_here() -> torch.device:
    """The device that a run on this machine computes on."""
    return torch.device(
        "cuda" if torch.accelerator.is_available() and torch.cuda.is_available() else "cpu"
    )


def local_device() -> torch.device:
    """This rank's device, made the current one."""
    device = torch.device(device_here().type, int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
