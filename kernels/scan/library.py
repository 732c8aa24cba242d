"""Logging, refusals and cache tags that the ops of the scan and of the input features share."""

import functools
import hashlib
import inspect
import logging
import sys
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import is_gradtrackingtensor
from torch.autograd.forward_ad import unpack_dual
from torch.utils._python_dispatch import _get_current_dispatch_mode


def log_once(line: str) -> None:
    """Logs a line once per process.

    torch.compile runs it while it traces, because it is marked as constant below: it is in no
    graph.

    Args:
        line: "MODULE: text". The name of the logger is MODULE.
    """
    _log_once(line)


@functools.cache
def _log_once(line: str) -> None:
    """Logs a line. The cache runs this function once for each line."""
    logging.getLogger(line.partition(":")[0]).info(line)


# This is what torch.compiler.assume_constant_result sets. The function itself would import
# torch.compile's front end, which takes as long as importing torch.
log_once._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def first_derivatives_only(*tensors: Tensor | None) -> None:
    """Checks that no tensor takes part in forward-mode differentiation or in torch.func.grad.

    The ops have a backward only. They would silently drop a tangent, the derivative of a tensor in
    forward mode.

    Args:
        *tensors: The op's inputs; None is left out.

    Raises:
        NotImplementedError: One of the tensors has a tangent or is tracked by torch.func.
    """
    if torch.compiler.is_compiling():
        return
    present = [x for x in tensors if x is not None]
    if any(unpack_dual(x).tangent is not None for x in present):
        refuse_derivative("no forward-mode derivative")
    if any(is_gradtrackingtensor(x) for x in present):
        refuse_derivative(
            "no derivative by torch.func (grad, vjp, jacrev); torch.autograd.grad and backward() work"
        )


def refuse_derivative(lacking: str) -> NoReturn:
    """Raises NotImplementedError for a derivative that the ops lack.

    Args:
        lacking: A phrase for what is missing, such as "no second derivative"; it follows "the ops
            have" in the message.
    """
    raise NotImplementedError(
        f"the ops of the scan and of the input features have {lacking}. Plain PyTorch has all derivatives: "
        "backend='reference' of the scan, 'torch' of the input features"
    )


def no_second_derivative(backward: Any) -> None:
    """Gives an op that computes gradients a derivative that refuses to run.

    Args:
        backward: The op, from `torch.library.custom_op`.
    """
    backward.register_autograd(lambda ctx, *grads: refuse_derivative("no second derivative"))


def only_values(*tensors: Tensor | None) -> bool:
    """Returns True if only the values of a result count, so that no op is needed for it.

    That is so if no gradient is recorded, and no tracer, transform or dispatch mode is active.
    Callers then call the op's function directly: the first op of a process would import
    torch.compile's front end, which takes long.

    Args:
        *tensors: The op's inputs.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or _get_current_dispatch_mode()
    ):
        return False
    return not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors))


def tag_caches(module: str) -> None:
    """Keeps torch.compile from loading code that it compiled for other versions of a module's ops.

    Its caches on disk know an op by its name only. Without the tag, a backward that was compiled
    for an earlier version would be called with the arguments of the present one.

    Args:
        module: The name of the module, which is imported.
    """
    # A new source gives another tag, and with it another key of the caches.
    tag = hashlib.sha256(inspect.getsource(sys.modules[module]).encode()).hexdigest()[:8]
    if tag not in torch.compiler.config.cache_key_tag:
        torch.compiler.config.cache_key_tag += tag
