"""What all `torch.library` ops of this code share: their names, how they are called, the caches of what is compiled with them.

A name is `interdomain::scan` in the package, and in a namespace of its own in every copy of this code: an exported folder holds
such a copy, several of them may live in one process with the package, and PyTorch would let the last one registered take the
name from the others.
"""

import functools
import hashlib
import inspect
import logging
import sys

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd.forward_ad import unpack_dual
from torch.autograd.graph import increment_version
from torch.library import CustomOpDef

PLAIN = "plain PyTorch has: backend='reference' of the scan, 'torch' of the input features"


def op_name(module: str, name: str) -> str:
    """`name` qualified for an op that `module` (its `__name__`) registers."""
    folder = module.rpartition(".")[0]
    if folder.partition(".")[0] == "interdomain":
        return f"interdomain::{name}"
    return f"interdomain_{hashlib.sha256(folder.encode()).hexdigest()[:8]}::{name}"


def log_once(line: str) -> None:
    """Log "MODULE: ..." under that module's name, once per process. torch.compile runs it while it traces: no graph has it."""
    _log_once(line)


@functools.cache
def _log_once(line: str) -> None:
    logging.getLogger(line.partition(":")[0]).info(line)


# What torch.compiler.assume_constant_result sets; it would import torch.compile's front end, as long again as torch itself.
log_once._dynamo_marked_constant = True


def call(op: CustomOpDef, *args):
    """op(*args), past PyTorch's dispatcher where that has nothing to do: no gradient is recorded, nothing traces, and there is
    no dispatch mode, functorch transform, subclass of Tensor or tensor without memory.

    The way through it takes some 20 microseconds of the host, twice per layer and token of eager decoding, and its first op
    imports torch.compile's front end: as long again as importing torch.
    """
    if torch.compiler.is_compiling():
        return op(*args)
    tensors = [x for x in args if isinstance(x, Tensor)]
    if any(unpack_dual(x).tangent is not None for x in tensors):  # the dispatcher would drop it without a word
        raise NotImplementedError(f"{op._name} has no forward-mode derivative; {PLAIN}")
    if any(level.key() == _functorch.TransformType.Grad for level in _functorch.get_interpreter_stack() or ()):
        raise NotImplementedError(
            f"{op._name} has no derivative that torch.func.grad can take, as torch.autograd can; {PLAIN}"
        )
    if _observed(tensors):
        return op(*args)
    out = op._init_fn(*args)
    for i in _written(op):  # as the dispatcher does: autograd refuses to go back through a state that was overwritten
        if args[i] is not None and not args[i].is_inference():
            increment_version(args[i])
    return out


def _observed(tensors: list[Tensor]) -> bool:
    if torch._C._len_torch_dispatch_stack() or _functorch.peek_interpreter_stack() is not None:
        return True
    if torch._C._get_tracing_state() is not None or any(x.is_meta for x in tensors):
        return True
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return recorded or any(type(x) not in (Tensor, torch.nn.Parameter) for x in tensors)


def differentiated_once(backward: CustomOpDef) -> None:
    """A gradient that has no gradient itself says so."""

    def refuse(ctx, *cotangents):
        raise NotImplementedError(f"{backward._name} has no derivative of its own (a second one); {PLAIN}")

    backward.register_autograd(refuse)


@functools.cache
def _written(op: CustomOpDef) -> list[int]:
    """Which arguments the op overwrites."""
    arguments = op._opoverload._schema.arguments
    return [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]


def tag_caches(module: str) -> None:
    """Keep torch.compile from loading what it compiled for other versions of the ops of `module`.

    Its caches on disk know an op by name: a backward pass compiled last week would be called with this week's arguments.
    """
    tag = hashlib.sha256(inspect.getsource(sys.modules[module]).encode()).hexdigest()[:8]
    if tag not in torch.compiler.config.cache_key_tag:
        torch.compiler.config.cache_key_tag += tag
