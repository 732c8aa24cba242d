"""What one forward and one backward launch: Triton kernels, and operations of PyTorch that would launch one. No GPU."""

import math
import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

kernels = pytest.importorskip("interdomain.scan.triton_chunkwise")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the same in the interpreter")

PASSES = {"contract_kernel", "mix_kernel", "expand_kernel", "adjoint_kernel"}
FREE = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")  # views are found by their schema


class Launches(TorchDispatchMode):
    """Stands where every kernel of triton_launch.py does, and keeps names in order; computes nothing."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.names = []
        for name in vars(kernels.launch).copy():
            if name.endswith("_kernel"):
                monkeypatch.setattr(kernels.launch, name, self.Kernel(name, self.names))

    class Kernel:
        def __init__(self, name, names):
            self.name, self.names = name, names

        def __getitem__(self, grid):
            return self.launch

        def launch(self, *args, **constants):
            # Triton compiles for multiples of 16 bytes, or for a load per number.
            assert not any(x.data_ptr() % 16 for x in args if isinstance(x, torch.Tensor)), self.name
            self.names.append(self.name)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        view = any(x.alias_info and not x.alias_info.is_write for x in func._schema.returns)
        name = func.overloadpacket.__name__
        if not view and name not in FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    def take(self):
        names, self.names[:] = list(self.names), []
        return names


def count(monkeypatch, linear, segments, documents=False, M=64, make=torch.zeros):
    """-> names of what a forward launches, and of what a backward does."""
    monkeypatch.setattr(kernels, "segment_count", lambda *args: segments)
    B, T, H, R = 2, 256, 3, 64
    tokens = [make(B, T, H, R, dtype=torch.bfloat16) for _ in range(1 if linear else 3)]
    tables = make(H, M, 2), make(*(H, 2 * M) if linear else (H, 2 * M, 2 * M))
    state = make(B, H, M, R if linear else 2 * R, 2)
    kw = {"documents": make(B, T, dtype=torch.int32)} if documents else {}
    forward = kernels.linear_forward if linear else kernels.scan_forward
    backward = kernels.linear_backward if linear else kernels.scan_backward
    with Launches(monkeypatch) as launches:
        forward(*tokens, *tables, state, None, **kw)
        found = launches.take()
        backward(tokens[0], state, *tokens, *tables, state, None, True, **kw)
        return found, launches.take()


def beside(names):
    """Without the passes, sorted."""
    return sorted(x for x in names if x not in PASSES)


@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("segments", [1, 4])
def test_query_readout(segments, documents, monkeypatch):
    """Of PyTorch only the cast of W and the sum of the parts of its gradient."""
    forward, backward = count(monkeypatch, False, segments, documents)
    chains = ["chain_kernel"] * (segments > 1)
    assert beside(forward) == [*chains, "copy_", "tables_kernel"]
    assert beside(backward) == [*chains, *chains, "copy_", "sum", "sum_kernel", "tables_kernel"]
    assert len(beside(backward)) <= 6


@pytest.mark.parametrize("M", [64, 128])
@pytest.mark.parametrize("segments", [1, 4])
def test_linear_readout(segments, M, monkeypatch):
    """Nothing of PyTorch. At M = 128 adjoint and decay are two launches."""
    forward, backward = count(monkeypatch, True, segments, M=M)
    chains = ["chain_kernel"] * (segments > 1)
    assert beside(forward) == [*chains, "tables_kernel"]
    assert beside(backward) == [*chains, *chains, "sum_kernel", "sum_kernel", "tables_kernel"]
    assert len(forward) <= 6
    assert len(backward) <= 10


@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("linear", [False, True], ids=["query", "linear"])
def test_pointers_are_aligned(linear, segments, documents, monkeypatch):
    """All inputs start one element in: `launch` above refuses what was not copied."""

    def one_in(*shape, dtype=torch.float32):
        return torch.zeros(math.prod(shape) + 1, dtype=dtype)[1:].view(shape)

    assert all(map(len, count(monkeypatch, linear, segments, documents, make=one_in)))
