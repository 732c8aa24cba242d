"""Logging, refusals and cache tags that the `torch.library` ops of the scan and of the input features share."""

import functools
import hashlib
import inspect
import logging
import sys

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual


def log_once(line: str) -> None:
    """Log "MODULE: ..." under that module's name, once per process. torch.compile runs it while it traces: no graph has it."""
    _log_once(line)


@functools.cache
def _log_once(line: str) -> None:
    logging.getLogger(line.partition(":")[0]).info(line)


# What torch.compiler.assume_constant_result sets; it would import torch.compile's front end, as long again as torch itself.
log_once._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def no_forward_mode(*tensors: Tensor | None) -> None:
    """Raise NotImplementedError for dual tensors of forward-mode differentiation: an op would drop the tangent silently."""
    if torch.compiler.is_compiling():
        return
    if any(x is not None and unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "the kernels have no forward-mode derivative; plain PyTorch has: backend='reference' of the scan, 'torch' of "
            "the input features"
        )


def tag_caches(module: str) -> None:
    """Keep torch.compile from loading code that it compiled for other versions of the ops of `module`.

    Its caches on disk know an op by its name alone: a backward compiled last week would be called with the arguments of today.
    """
    tag = hashlib.sha256(inspect.getsource(sys.modules[module]).encode()).hexdigest()[:8]
    if tag not in torch.compiler.config.cache_key_tag:
        torch.compiler.config.cache_key_tag += tag
