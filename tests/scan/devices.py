"""Where the tests of the Triton kernels run: on a GPU, or without one in a process of their own under Triton's interpreter.

It has to be chosen before triton is imported.
"""

import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from interdomain.scan import library, triton_support

from ..common import REPOSITORY

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu"
if torch.cuda.is_available() and not INTERPRETED:
    DEVICE = "cuda"
on_kernels = pytest.mark.skipif(
    not INTERPRETED and DEVICE == "cpu", reason="needs a GPU or TRITON_INTERPRET=1"
)


def poison(monkeypatch):
    """Uninitialised memory reads as NaN: what is not written shows, instead of passing on a lucky zero page."""

    def poisoned(make):
        def made(*args, **kwargs):
            x = make(*args, **kwargs).detach()
            if x.is_floating_point() or x.is_complex():
                x.fill_(float("nan"))
            return x

        return made

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


def nothing_unsupported(*args):
    """Stands where torch.compile would not trace a mock."""


def use_kernels(monkeypatch):
    """On a CPU the public functions take the Triton kernels; the interpreter rounds to bf16 as a GPU does; memory is NaN."""
    from interdomain.features import support
    from interdomain.scan import ops

    if INTERPRETED:
        from . import triton_interpreter

        triton_interpreter.repair(monkeypatch)
        monkeypatch.setattr(support, "unsupported", nothing_unsupported)
        monkeypatch.setattr(ops, "KERNEL_DEVICES", ("cuda", "cpu"))
    poison(monkeypatch)


@pytest.fixture
def pretend_gpu(monkeypatch):
    """Tensors on "cuda" without numbers, where the choice of a backend sees a new GPU and Triton."""
    tensor_cores = mock.Mock(return_value=True)
    monkeypatch.setattr(triton_support, "_has_bf16_tensor_cores", tensor_cores)
    monkeypatch.setattr(triton_support, "_INSTALLED", True)
    library._log_once.cache_clear()
    with FakeTensorMode():
        yield


def in_process(*command, **environment):
    """The output of a Python process, started in the repository with these variables; the process must succeed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0", **environment}
    done = subprocess.run(
        [sys.executable, *command], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout
