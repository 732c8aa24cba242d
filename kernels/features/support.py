"""Limits of the Triton kernels, checked without importing triton.

torch.compile traces through `unsupported`.
"""

import torch

from interdomain.scan.triton_support import missing

# The widest convolution. A tap costs 32 registers per thread in the backward: weight, its gradient,
# the input and its pending gradient.
MAX_WIDTH = 4
# The widest head: a warp has half of it.
MAX_HEAD_DIM = 256


def unsupported(
    device: torch.device | None,
    dtype: torch.dtype,
    head_dim: int,
    width: int,
    rope_gradient: bool = False,
) -> str | None:
    """Returns the reason why an input cannot run on the Triton kernels; None if it can.

    Args:
        device: The device of the input; None for a GPU of another machine, as in the scan.
        dtype: The dtype of the input.
        head_dim: R, the channels of a head.
        width: The width of the convolution; 0 for none.
        rope_gradient: True if the rotary tables require a gradient.
    """
    if device is not None and device.type != "cuda":
        return f"the input is on {device.type}"
    problem = missing(device)
    if problem:
        return problem
    if dtype == torch.float64:
        return "the input is float64 and the Triton kernels compute in fp32"
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        return f"head_dim is {head_dim} and the Triton kernels have even ones up to {MAX_HEAD_DIM}"
    if width > MAX_WIDTH:
        return f"the convolution is {width} wide and the Triton kernels have {MAX_WIDTH} at most"
    if rope_gradient:
        return "the rotary tables require a gradient, which the Triton kernels do not have"
    return None
