"""upstream.py SCRIPT ARGUMENTS: interdomain.megatron.run without CUDA."""

import collections
import contextlib
import os
from types import SimpleNamespace

import torch

from interdomain.megatron import run
from tests.megatron import cpu

DEVICE = SimpleNamespace(
    major=9, minor=0, name="none", total_memory=1 << 36, multi_processor_count=1
)


class Stream:
    """A stream or an event with nothing to wait for."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return cpu.nothing

    def elapsed_time(self, other):
        return 1.0


class Device(str):
    """The CPU, which a text such as f"cuda:{torch.cuda.current_device()}" calls 0."""

    def __format__(self, _):
        return "0"


def always(value):
    """Returns a function that returns the value."""

    def function(*args, **kwargs):
        return value

    return function


def install():
    cpu.install()
    cuda = torch.cuda
    cuda.current_device = always(Device("cpu"))
    cuda.is_available = always(True)
    cuda.device_count = always(2)
    cuda.set_device = cpu.nothing
    cuda.get_device_properties = always(DEVICE)
    cuda.get_device_name = always("none")
    cuda.get_device_capability = always((9, 0))
    cuda.memory_stats = always(collections.defaultdict(int))
    cuda.memory_allocated = always(0)
    cuda.max_memory_allocated = always(0)
    cuda.memory_reserved = always(0)
    cuda.max_memory_reserved = always(0)
    cuda.empty_cache = cpu.nothing
    cuda.reset_peak_memory_stats = cpu.nothing
    cuda.get_rng_state_all = list
    cuda.stream = contextlib.nullcontext
    cuda.Event = Stream
    cuda.Stream = Stream
    cuda.current_stream = Stream
    from megatron.core.datasets import utils

    utils.compile_helpers = cpu.nothing  # the wheel has them
    if "WINDOWS" in os.environ:
        read_windows(torch.load(os.environ["WINDOWS"]))
    with contextlib.suppress(ImportError):
        from megatron.legacy import fused_kernels

        fused_kernels.load = cpu.nothing


def read_windows(windows):
    """Makes GPTDataset return these samples, in their order."""
    from megatron.core.datasets.gpt_dataset import GPTDataset

    read = GPTDataset.__getitem__

    def read_window(self, i):
        return read(self, i) | {"tokens": windows[i, :-1], "labels": windows[i, 1:]}

    GPTDataset.__getitem__ = read_window


if __name__ == "__main__":
    install()
    run.main()
