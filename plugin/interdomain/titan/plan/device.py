"""The device that a run computes on: a machine without a GPU under TorchTitan, and what is refused there."""

import contextlib
import math
import os
import types
import warnings
from pathlib import Path

import torch

from interdomain.scan.triton_support import cannot_launch

from ..host import DEVICE_COPIES, utils
from ..settings.job_config import refuse, value_of
from ..settings.schema import JobConfig


def _cpu_module() -> types.SimpleNamespace:
    """torch.cpu, with the rest of what TorchTitan asks of an accelerator's module."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    ours = {
        "set_device": lambda device: None,
        "current_device": lambda: 0,  # torch.cpu says "cpu"; a barrier wants an index
        "get_device_name": lambda device=None: "CPU",
        "get_device_properties": lambda device=None: types.SimpleNamespace(total_memory=memory),
        "memory_stats": lambda device=None: _peak_memory(),
        "reset_peak_memory_stats": _reset_peak_memory,
        "empty_cache": lambda: None,
    }
    return types.SimpleNamespace(**vars(torch.cpu) | ours)


def _peak_memory() -> dict[str, int]:
    """This process's largest resident memory since it was reset, under the names of the CUDA allocator's statistics; {} where
    it is not Linux."""
    if not (status := Path("/proc/self/status")).exists():
        return {}
    peak = 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])
    return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}


def _reset_peak_memory() -> None:
    with contextlib.suppress(OSError):  # not Linux, or a container that forbids it: the peak is then of the whole run
        Path("/proc/self/clear_refs").write_text("5")


def use_cpu_if_alone() -> None:
    """Point TorchTitan, which assumes an accelerator, at the CPU where there is none. Before it is asked for a device."""
    if torch.accelerator.is_available():
        return
    cpu = _cpu_module()
    for module in DEVICE_COPIES:
        vars(module).update(device_type="cpu", device_module=cpu)
    # TorchTitan would take the device for an A100. There is no figure to compare with: the utilisation shown is 0.
    utils.get_peak_flops = lambda device_name: math.inf
    # Its DTensors draw no random numbers here: initial values are drawn before they are sharded (interdomain.model.initialize).
    warnings.filterwarnings("ignore", message="DTensor (random operators|manual_seed)")


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
    for setting in ("training.enable_cpu_offload", "profiling.enable_profiling"):
        if value_of(job_config, setting):
            problems.append(f"{setting} needs a GPU, and this machine has none. Turn it off to run on the CPU.")
    refuse(problems)
