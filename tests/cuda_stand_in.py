"""A stand-in for torch.cuda on a machine without a GPU: tensors stay on the CPU, and a captured graph is replayed op by op.

It is as strict as a CUDA graph where that matters: what Python does while capturing is done once, inputs and outputs are the
tensors of the capture, nothing has run when the capture ends, and an op that needs the host in between is refused.
"""

import contextlib
import time
import types

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")
# Ops that wait for the device, or copy from a Python object on the host.
HOST = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::lift_fresh"}


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls, self.fresh, self.before = [], [], {}

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        if func._schema.name in HOST:
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        inputs = tensors((args, kwargs))
        known = {storage(x) for x in self.fresh}
        for x in tensors(written(func, args, kwargs)):
            if storage(x) not in known:
                self.before.setdefault(storage(x), (x, x.clone()))
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        self.fresh += [x for x in tensors(out) if storage(x) not in {storage(y) for y in inputs}]
        return out


def written(func, args, kwargs):
    """The arguments that `func` writes to."""
    names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    given = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
    return [given.get(name) for name in names]


def tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def storage(x):
    return x.untyped_storage().data_ptr()


class Graph:
    """torch.cuda.CUDAGraph."""

    recorder = None

    @torch.no_grad()
    def replay(self):
        assert self.recorder is not None, "nothing was captured"
        for func, args, kwargs, out in self.recorder.calls:
            for old, new in zip(tensors(out), tensors(func(*args, **kwargs)), strict=True):
                if storage(old) != storage(new):
                    old.copy_(new)


@contextlib.contextmanager
def capture(graph, stream=None, capture_error_mode="global"):
    """torch.cuda.graph: afterwards everything written is as it was, and everything made holds NaN until the first replay."""
    graph.stream = stream
    with Recorder() as recorder:
        yield
    for x, old in recorder.before.values():
        x.copy_(old)
    for x in recorder.fresh:
        if x.is_floating_point():
            x.fill_(torch.nan)
    graph.recorder = recorder


class OnTheCPU(TorchFunctionMode):
    """What is asked of "cuda" is done on the CPU."""

    def __torch_function__(self, func, kinds, args=(), kwargs=None):
        def here(x):
            return CPU if isinstance(x, torch.device) and x.type == "cuda" else x

        return func(*map(here, args), **{name: here(x) for name, x in (kwargs or {}).items()})


class OnCUDA(torch.Tensor):
    """A tensor that says it is on CUDA; what is computed from it does not."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: torch.device("cuda", 0))


def on_cuda(state):
    """A ModelState whose device is CUDA to those who ask."""
    state.position = state.position.as_subclass(OnCUDA)
    return state


class Stream:
    """torch.cuda.Stream: work is done when it is asked for."""

    def __init__(self, device=None):
        self.device = device

    def __eq__(self, other):  # an index or none: there is one
        return isinstance(other, Stream)

    __hash__ = None

    def wait_stream(self, other):
        pass


class Event:
    """torch.cuda.Event."""

    def __init__(self, enable_timing):
        pass

    def clock(self):
        return 1e3 * time.perf_counter()

    def record(self):
        self.at = self.clock()

    def elapsed_time(self, end):
        return end.at - self.at


def streams() -> dict:
    """Attributes of torch.cuda for streams and graphs."""
    return dict(
        Stream=Stream,
        current_stream=Stream,
        stream=lambda s: contextlib.nullcontext(),
        device=lambda d: contextlib.nullcontext(),
        CUDAGraph=Graph,
        graph=capture,
    )


def gpu(name) -> dict:
    """Attributes of torch.cuda on a machine with this GPU."""
    sizes = dict(total_memory=2**37, L2_cache_size=2**16, multi_processor_count=132, major=9, minor=0)
    return streams() | dict(
        is_available=lambda: True,
        get_device_properties=lambda device: types.SimpleNamespace(name=name, **sizes),
        synchronize=lambda: None,
        empty_cache=lambda: None,
        reset_peak_memory_stats=lambda: None,
        memory_allocated=lambda: 2**20,
        max_memory_allocated=lambda: 6 * 2**20,
        Event=Event,
    )
