"""What all `torch.library` ops of this code share: their names, how they are called, the caches of what is compiled with them.

A name is `interdomain::scan` in the package, and in a namespace of its own in every copy of this code: an exported folder holds
such a copy, several of them may live in one process with the package, and PyTorch would let the last one registered take the
name from the others.
"""

import hashlib
import inspect
import sys

import torch
from torch import Tensor
from torch.library import CustomOpDef


def op_name(module: str, name: str) -> str:
    """`name` qualified for an op that `module` (its `__name__`) registers."""
    folder = module.rpartition(".")[0]
    if folder.partition(".")[0] == "interdomain":
        return f"interdomain::{name}"
    return f"interdomain_{hashlib.sha256(folder.encode()).hexdigest()[:8]}::{name}"


def call(op: CustomOpDef, *args):
    """op(*args), past PyTorch's dispatcher where that has nothing to do: no gradient is recorded, nothing traces or looks on.

    The way through it takes some 20 microseconds of the host, twice per layer and token of eager decoding, and its first op
    imports torch.compile's front end: as long again as importing torch.
    """
    return op(*args) if _observed(args) else op._init_fn(*args)


def _observed(args: tuple) -> bool:
    # In this order: what torch.compile traces ends with the first.
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    tensors = [x for x in args if isinstance(x, Tensor)]
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return recorded or any(type(x) not in (Tensor, torch.nn.Parameter) for x in tensors)


def tag_caches(module: str) -> None:
    """Keep torch.compile from loading what it compiled for other versions of the ops of `module`.

    Its caches on disk know an op by name: a backward pass compiled last week would be called with this week's arguments.
    """
    tag = hashlib.sha256(inspect.getsource(sys.modules[module]).encode()).hexdigest()[:8]
    if tag not in torch.compiler.config.cache_key_tag:
        torch.compiler.config.cache_key_tag += tag
