"""Limits of the Triton kernels, checked without importing triton: shapes, dtypes and device only.

torch.compile traces through `unsupported`, and a machine without triton asks it too.
"""

import functools
import importlib.util
import subprocess

import torch
from torch import Tensor

# The numbers of basis functions M that the chunkwise kernels have.
BASIS_SIZES = (16, 32, 64, 128)
# The largest R or D. Pass 1 needs the whole width of a key in one tile. Widths above 128 serve
# heads of 128 channels with the ones column of the normalised form.
MAX_WIDTH = 256

_INSTALLED = importlib.util.find_spec("triton") is not None


def missing(device: torch.device | None) -> str | None:
    """Returns the reason why no Triton kernel of this package runs on a device; None if some do.

    The kernels for one token (triton_step.py, decoding) take any shape, so they need no more than
    this. A CPU gives None, too, for Triton's interpreter in tests: callers ask KERNEL_DEVICES
    first.

    Args:
        device: The device. None means a GPU of another machine, which is assumed to have what the
            kernels need.
    """
    if device is None:
        return None
    if not _INSTALLED:
        return "triton is not installed"
    if torch.version.hip is not None:
        return "the Triton kernels are made for NVIDIA GPUs"
    if device.type == "cuda" and not _has_bf16_tensor_cores(device.index):
        return "the Triton kernels need compute capability 8.0 or higher"
    return None


def unsupported(device: torch.device | None, dtype: torch.dtype, M: int, width: int) -> str | None:
    """Returns the reason why operands cannot run on the chunkwise Triton kernels; None if they can.

    Args:
        device: The device. None means a GPU of another machine, which is assumed to have what the
            kernels need.
        dtype: The widest dtype of the operands.
        M: Number of basis functions.
        width: The larger of R (the width of a key) and D (that of a value); 0 for the linear
            readout, which takes every width.
    """
    problem = missing(device)
    if problem:
        return problem
    if dtype == torch.float64:
        return "the inputs are float64 and the Triton kernels compute in bf16 or fp32"
    if M not in BASIS_SIZES:
        # int: with dynamic shapes, M is a symbol under torch.compile, which has no text.
        return f"M is {int(M)} and the Triton kernels have M = {', '.join(map(str, BASIS_SIZES))}"
    if width > MAX_WIDTH:
        return f"R or D is above {MAX_WIDTH}, the widest that the Triton kernels have"
    return None


@functools.cache
def cannot_launch() -> str | None:
    """Returns the reason why Triton could launch nothing on this machine; None if it can.

    Triton compiles its launcher, which is written in C, at the first launch. This function finds an
    error before a run has started. It uses no GPU, so that the process needs no memory there.
    """
    # The import fails without Triton, and with a Triton for other GPUs.
    try:
        from triton.backends.nvidia.driver import CudaUtils
    except ImportError:
        return None
    try:
        CudaUtils()
    except (RuntimeError, OSError, ImportError, AssertionError, subprocess.SubprocessError) as e:
        reason = " ".join(str(e).split())
        if isinstance(e, subprocess.SubprocessError):
            reason = "the compiler failed"
        return (
            f"Triton cannot build its launcher here ({reason}): it needs a C compiler (gcc or clang on PATH, or CC) and "
            "Python's headers (Debian: apt-get install gcc python3-dev)"
        )
    return None


def operand_dtype(*inputs: Tensor) -> torch.dtype:
    """Returns the dtype of the operands of every product.

    It is the widest of float64, float32 and bfloat16 among the inputs. fp16 counts as bfloat16,
    because powers of Lambda reach e^32, which fp16 does not hold.

    Args:
        *inputs: q, k and v, or k and v, or z.
    """
    dtypes = [x.dtype for x in inputs]
    if torch.float64 in dtypes:
        return torch.float64
    if torch.float32 in dtypes:
        return torch.float32
    return torch.bfloat16


def _has_bf16_tensor_cores(device_index: int | None) -> bool:
    """Returns True for compute capability 8.0 or higher."""
    return torch.cuda.get_device_capability(device_index) >= (8, 0)


# This is what torch.compiler.assume_constant_result sets. The function itself would import
# torch.compile's front end, which takes as long as importing torch.
_has_bf16_tensor_cores._dynamo_marked_constant = True
