"""The names of the `torch.library` ops: `interdomain::scan` in the package, a namespace of its own in every copy of this code.

An exported folder holds such a copy, and several of them may live in one process with the package; PyTorch would let the last
one registered take the name from the others.
"""

import hashlib


def op_name(module: str, name: str) -> str:
    """`name` qualified for an op that `module` (its `__name__`) registers."""
    folder = module.rpartition(".")[0]
    if folder.partition(".")[0] == "interdomain":
        return f"interdomain::{name}"
    return f"interdomain_{hashlib.sha256(folder.encode()).hexdigest()[:8]}::{name}"
