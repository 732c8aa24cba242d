"""Bytes that a process receives from other ranks, counted where every call of torch.distributed passes: at the dispatcher.

Collectives of Python and of C++, functional or not, inside custom ops, compiled code and FSDP2, forward and backward, send and
receive: all call an op of the namespace c10d, in whatever thread. Tensors on the CPU; the backend may be gloo or fake.
"""

import collections
import contextlib

import torch
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

# Bytes that a rank receives, from those of the op's first argument and of its second, on P ranks: what a ring moves (of an
# all-reduce: of a reduce-scatter and an all-gather). Of broadcast, scatter and reduce: as if no rank had the result before.
RECEIVED = {
    "allgather": lambda out, into, P: out - into,
    "reduce_scatter": lambda out, into, P: into - out,
    "allreduce": lambda x, _, P: 2 * x * (P - 1) // P,
    "alltoall": lambda out, own, _: out - own,  # own: what the rank sends to itself
    "broadcast": lambda x, _, P: x,
    "scatter": lambda out, *_: out,
    "gather": lambda out, into, P: max(0, out - into),
    "reduce": lambda x, *_: x,
    "send": lambda *_: 0,
    "recv": lambda x, *_: x,
    "barrier": lambda *_: 0,
}
KEY = torch._C.DispatchKey.BackendSelect  # every call has it, in any thread; what lies below is the backend


@contextlib.contextmanager
def counted():
    """-> {collective: bytes received}, which the calls of this process fill."""
    received = collections.Counter()

    def watch(op):
        # The longest name that the op's begins with: reduce_scatter_tensor_coalesced_ is no reduce.
        kind = max((kind for kind in RECEIVED if _begins(op, kind)), key=len)

        def call(keys, *args):
            size = [sum(x.nbytes for x in tree_leaves(arg) if isinstance(x, torch.Tensor)) for arg in args[:2]]
            # A ReduceOp comes after the group.
            group = ProcessGroup.unbox(next(x for x in args if isinstance(x, torch.ScriptObject)))
            if kind == "alltoall":
                rows = args[3]
                size[1] = size[0] * rows[group.rank()] // sum(rows)
            received[kind] += RECEIVED[kind](*size, group.size())
            return op.redispatch(keys.remove(KEY), *args)

        return call

    with torch.library._scoped_library("c10d", "IMPL") as library:
        for name in torch._C._dispatch_get_all_op_names():
            if name.startswith("c10d::"):
                op = getattr(torch.ops.c10d, name.removeprefix("c10d::")).default
                if _begins(op, tuple(RECEIVED)):
                    library.impl(op, watch(op), "BackendSelect", with_keyset=True)
        yield received


def _begins(op, names):
    return op._opname.lstrip("_").startswith(names)
