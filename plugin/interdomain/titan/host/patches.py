"""What this plugin changes inside TorchTitan 0.2.2 and 0.3.0.

Each function says why it is needed and when it can go.
"""

import math
import os
import resource
import warnings
from types import SimpleNamespace
from typing import Any

import torch


def use_cpu_if_alone() -> None:
    """Makes TorchTitan, which expects an accelerator, use the CPU if there is none.

    Call it before TorchTitan asks for a device. It can go when TorchTitan trains on a CPU; 0.3.0
    does not.
    """
    if torch.accelerator.is_available():
        return
    from . import DEVICE_COPIES, utils

    device_module = _cpu_module()
    for module in DEVICE_COPIES:
        vars(module).update(device_type="cpu", device_module=device_module)
    # TorchTitan would compare with an A100. Compared with infinity, the utilisation is 0.
    utils.get_peak_flops = lambda device_name: math.inf
    # TorchTitan warns that random numbers of DTensors are not synchronised on a CPU. The plugin
    # draws none: initial values are drawn before they are sharded (`interdomain.model.initialize`).
    warnings.filterwarnings("ignore", message="DTensor (random operators|manual_seed)")


def _cpu_module() -> SimpleNamespace:
    """Returns torch.cpu, with what else TorchTitan expects of an accelerator's module."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    additions = {
        "set_device": lambda device: None,
        "current_device": lambda: 0,  # torch.cpu returns "cpu", and a barrier needs a number
        "get_device_name": lambda device=None: "CPU",
        "get_device_properties": lambda device=None: SimpleNamespace(total_memory=memory),
        "memory_stats": lambda device=None: _peak_memory(),
        "reset_peak_memory_stats": lambda: None,
        "empty_cache": lambda: None,
    }
    return SimpleNamespace(**vars(torch.cpu) | additions)


def _peak_memory() -> dict[str, int]:
    """Returns the peak memory of this process in bytes, by names of the CUDA allocator."""
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux counts in KiB
    return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}


def _meshes_attribute(dims: Any) -> str:
    """Returns the name of the attribute of ParallelDims that has the meshes of one dimension.

    Args:
        dims: TorchTitan's degrees of parallelism.
    """
    if hasattr(dims, "_single_axis_meshes"):
        return "_single_axis_meshes"  # 0.3.0
    return "_meshes"  # 0.2.2


def replace_meshes(dims: Any, axes: dict[str, Any]) -> None:
    """Gives TorchTitan meshes in place of those that it would build when first asked for one.

    So the buffers of a process group exist only once. It can go when ParallelDims takes meshes;
    0.3.0 does not.

    Args:
        dims: TorchTitan's degrees of parallelism.
        axes: Meshes of one dimension, by name.
    """
    vars(dims)[_meshes_attribute(dims)] = axes
    # TorchTitan reads only the device of this mesh.
    vars(dims)["_world_mesh"] = axes["shards"]


def add_meshes(dims: Any, axes: dict[str, Any]) -> None:
    """Makes TorchTitan set the timeouts of these groups together with those of its own.

    It can go when TorchTitan's `set_pg_timeouts` takes groups; 0.3.0's does not.

    Args:
        dims: TorchTitan's degrees of parallelism.
        axes: Meshes of one dimension, by name.
    """
    dims.get_all_one_dimensional_meshes()  # builds TorchTitan's own, if there are none yet
    getattr(dims, _meshes_attribute(dims)).update(axes)


def validator_of_windows(parts: dict[str, Any], windows: Any) -> Any:
    """Makes TorchTitan 0.2.2's Validator, whose `__init__` would open a data set of TorchTitan's.

    It can go with TorchTitan 0.2.2: the validator of 0.3.0 takes a data loader.

    Args:
        parts: The other arguments of the validator.
        windows: The batches to validate on.
    """
    from . import Validator

    validator = Validator.__new__(Validator)
    vars(validator).update(parts, validation_dataloader=windows)
    return validator
