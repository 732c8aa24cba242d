"""What the plugin changes inside TorchTitan 0.2.2 and 0.3.0, and in PyTorch while TorchTitan is imported.

Each entry has its reason and says when it can go.
"""

import contextlib
import functools
import math
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


@contextlib.contextmanager
def compile_at_first_call() -> Iterator[None]:
    """Context in which `torch.compile` compiles at the first call of its result.

    TorchTitan compiles attention of its own at import, which costs a second of every start. Can go when TorchTitan does not;
    0.3.0 does.
    """
    torch_compile = torch.compile

    def compile_later(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        compiled = functools.cache(lambda: torch_compile(function, **options))
        return functools.wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))

    torch.compile = compile_later
    try:
        yield
    finally:
        torch.compile = torch_compile


def use_cpu_if_alone() -> None:
    """Point TorchTitan, which assumes an accelerator, at the CPU where there is none. Before it is asked for a device.

    Can go when TorchTitan trains on a CPU; 0.3.0 does not.
    """
    if torch.accelerator.is_available():
        return
    from . import DEVICE_COPIES, utils

    cpu = _cpu_module()
    for module in DEVICE_COPIES:
        vars(module).update(device_type="cpu", device_module=cpu)
    # TorchTitan would take the device for an A100. There is no figure to compare with: the utilisation shown is 0.
    utils.get_peak_flops = lambda device_name: math.inf
    # Its DTensors draw no random numbers here: initial values are drawn before they are sharded (interdomain.model.initialize).
    warnings.filterwarnings("ignore", message="DTensor (random operators|manual_seed)")


def _cpu_module() -> SimpleNamespace:
    """torch.cpu, with the rest of what TorchTitan asks of an accelerator's module."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    ours = {
        "set_device": lambda device: None,
        "current_device": lambda: 0,  # torch.cpu says "cpu"; a barrier wants an index
        "get_device_name": lambda device=None: "CPU",
        "get_device_properties": lambda device=None: SimpleNamespace(total_memory=memory),
        "memory_stats": lambda device=None: _peak_memory(),
        "reset_peak_memory_stats": _reset_peak_memory,
        "empty_cache": lambda: None,
    }
    return SimpleNamespace(**vars(torch.cpu) | ours)


def _peak_memory() -> dict[str, int]:
    """This process's largest resident memory since it was reset, under the names of the CUDA allocator's statistics; {} where
    it is not Linux."""
    if not (status := Path("/proc/self/status")).exists():
        return {}
    peak = 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])
    return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}


def _reset_peak_memory() -> None:
    with contextlib.suppress(
        OSError
    ):  # not Linux, or a container that forbids it: the peak is then of the whole run
        Path("/proc/self/clear_refs").write_text("5")


def _meshes(dims: Any) -> str:
    """The attribute of ParallelDims with TorchTitan's meshes of one dimension."""
    return (
        "_single_axis_meshes" if hasattr(dims, "_single_axis_meshes") else "_meshes"
    )  # 0.3.0 and 0.2.2


def replace_meshes(dims: Any, axes: dict[str, Any]) -> None:
    """Gives TorchTitan meshes in place of those that it would build when it is first asked for one.

    A group's buffers then exist once. Can go when ParallelDims takes meshes; 0.3.0 does not.

    Args:
        axes: Meshes of one dimension, by name.
    """
    # Only the device is read of the world's mesh.
    vars(dims).update({_meshes(dims): axes, "_world_mesh": axes["shards"]})


def add_meshes(dims: Any, axes: dict[str, Any]) -> None:
    """Lets TorchTitan set the time limits of these groups together with those of its own.

    Can go when TorchTitan's `set_pg_timeouts` takes groups; 0.3.0's does not.

    Args:
        axes: Meshes of one dimension, by name.
    """
    # The first question builds TorchTitan's own.
    dims.get_all_one_dimensional_meshes()
    getattr(dims, _meshes(dims)).update(axes)


def validator_of_windows(parts: dict[str, Any], windows: Any) -> Any:
    """TorchTitan 0.2.2's Validator, whose `__init__` would open a data set of its own. parts: its arguments.

    Can go with TorchTitan 0.2.2: 0.3.0's takes a data loader.
    """
    from . import Validator

    validator = Validator.__new__(Validator)
    vars(validator).update(parts, validation_dataloader=windows)
    return validator
