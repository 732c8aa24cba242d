"""The names of the `torch.library` ops: `interdomain::scan` in the package, a namespace of its own in every copy of this code.

An exported folder holds such a copy, and several of them may live in one process with the package; PyTorch would let the last
one registered take the name from the others.
"""

import hashlib
import inspect
import sys

import torch


def op_name(module: str, name: str) -> str:
    """`name` qualified for an op that `module` (its `__name__`) registers."""
    folder = module.rpartition(".")[0]
    if folder.partition(".")[0] == "interdomain":
        return f"interdomain::{name}"
    return f"interdomain_{hashlib.sha256(folder.encode()).hexdigest()[:8]}::{name}"


def tag_caches(module: str) -> None:
    """Keep torch.compile from loading what it compiled for other versions of the ops of `module`.

    Its caches on disk know an op by name: a backward pass compiled last week would be called with this week's arguments.
    """
    tag = hashlib.sha256(inspect.getsource(sys.modules[module]).encode()).hexdigest()[:8]
    if tag not in torch.compiler.config.cache_key_tag:
        torch.compiler.config.cache_key_tag += tag
