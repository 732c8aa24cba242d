"""Bytes that a process receives from other ranks, counted where every call of torch.distributed passes: at the dispatcher.

Collectives of Python and of C++, functional or not, inside custom ops, compiled code and FSDP2, forward and backward, send and
receive: all call an op of the namespace c10d, in whatever thread. Tensors are on the CPU; the backend may be gloo or fake.
"""

import collections
import contextlib
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

KINDS = (
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "recv",
    "reduce_scatter",
    "scatter",
    "send",
)
# Every call has this key, in any thread. What lies below is the backend.
KEY = torch._C.DispatchKey.BackendSelect


def bytes_of(arg):
    return sum(leaf.nbytes for leaf in tree_leaves(arg) if isinstance(leaf, torch.Tensor))


def received_bytes(kind, args, ranks):
    """Returns the bytes that a rank receives in a call: those that a ring moves.

    An all-reduce is a reduce-scatter and an all-gather. A broadcast counts as if no rank had the result before.
    """
    first = bytes_of(args[0])
    if kind in ("broadcast", "scatter", "recv"):
        return first
    if kind == "allgather":  # output, input
        return first - bytes_of(args[1])
    if kind == "reduce_scatter":  # output, input
        return bytes_of(args[1]) - first
    if kind == "allreduce":
        return 2 * first * (len(ranks) - 1) // len(ranks)
    if kind == "alltoall":
        # Output, input, group, rows from each rank: what a rank sends to itself is not received.
        rows = dict(zip(ranks, args[3], strict=True))
        return first - first * rows[dist.get_rank()] // sum(rows.values())
    return 0


@contextlib.contextmanager
def counted():
    """Yields {collective: bytes received}, which the calls of this process fill."""
    received = collections.Counter()

    def count(op, kind, keys, *args):
        # A ReduceOp comes after the group.
        group = ProcessGroup.unbox(next(x for x in args if isinstance(x, torch.ScriptObject)))
        received[kind] += received_bytes(kind, args, dist.get_process_group_ranks(group))
        return op.redispatch(keys.remove(KEY), *args)

    with torch.library._scoped_library("c10d", "IMPL") as library:
        for name in torch._C._dispatch_get_all_op_names():
            namespace, _, base = name.partition("::")
            for kind in KINDS:
                if namespace == "c10d" and base.lstrip("_").startswith(kind):
                    op = getattr(torch.ops.c10d, base).default
                    call = partial(count, op, kind)
                    library.impl(op, call, "BackendSelect", with_keyset=True)
        yield received
