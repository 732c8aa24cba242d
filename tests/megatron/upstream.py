"""upstream.py SCRIPT ARGUMENTS: interdomain.megatron.run without CUDA, with what else Megatron-LM's script asks of it."""

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
    """A stream that has nothing to wait for."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class Event(Stream):
    def elapsed_time(self, other):
        return 1.0


class Device(str):
    """The CPU, which a text such as f"cuda:{torch.cuda.current_device()}" calls 0."""

    def __format__(self, _):
        return "0"


def install():
    cpu.install()
    cuda = torch.cuda
    cuda.current_device = lambda: Device("cpu")
    cuda.is_available, cuda.device_count, cuda.set_device = lambda: True, lambda: 2, lambda *_: None
    cuda.get_device_properties, cuda.get_device_name = lambda *_: DEVICE, lambda *_: "none"
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.memory_stats = lambda *_, **__: collections.defaultdict(int)
    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
    ):
        setattr(cuda, name, lambda *_, **__: 0)
    cuda.empty_cache = cuda.reset_peak_memory_stats = lambda *_: None
    cuda.get_rng_state_all, cuda.stream = list, lambda *_: contextlib.nullcontext()
    cuda.Event, cuda.Stream, cuda.current_stream = Event, Stream, lambda *_: Stream()
    from megatron.core.datasets import utils

    utils.compile_helpers = lambda: None  # the wheel's are there
    if windows := os.environ.get("WINDOWS"):  # a file of samples to train on, in their order
        from megatron.core.datasets.gpt_dataset import GPTDataset

        windows, read = torch.load(windows), GPTDataset.__getitem__
        GPTDataset.__getitem__ = lambda self, i: (
            read(self, i) | {"tokens": windows[i, :-1], "labels": windows[i, 1:]}
        )
    with contextlib.suppress(ImportError):
        from megatron.legacy import fused_kernels

        fused_kernels.load = lambda args: None


if __name__ == "__main__":
    install()
    run.main()
