"""Bytes that a process receives from other ranks, counted where every call of torch.distributed passes: at the dispatcher.

Collectives of Python and of C++, functional or not, inside custom ops, compiled code and FSDP2, forward and backward, send and
receive: all call an op of the namespace c10d, in whatever thread. Tensors on the CPU; the backend may be gloo or fake.
"""

import collections
import contextlib

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

# Bytes that a rank receives, from those of the op's first argument and of its second, on P ranks: what a ring moves (of an
# all-reduce: of a reduce-scatter and an all-gather). Of a broadcast: as if no rank had the result before.
RECEIVED = {
    "allgather": lambda out, into, P: out - into,
    "reduce_scatter": lambda out, into, P: into - out,
    "allreduce": lambda x, _, P: 2 * x * (P - 1) // P,
    "alltoall": lambda out, own, _: out - own,  # own: what the rank sends to itself
    "broadcast": lambda x, _, P: x,
    "scatter": lambda out, *_: out,
    "send": lambda *_: 0,
    "recv": lambda x, *_: x,
    "barrier": lambda *_: 0,
}
KEY = (
    torch._C.DispatchKey.BackendSelect
)  # every call has it, in any thread; what lies below is the backend


@contextlib.contextmanager
def counted():
    """-> {collective: bytes received}, which the calls of this process fill."""
    received = collections.Counter()

    def watch(op, kind):
        def call(keys, *args):
            # A ReduceOp comes after the group.
            group = ProcessGroup.unbox(next(x for x in args if isinstance(x, torch.ScriptObject)))
            ranks = dist.get_process_group_ranks(group)
            sizes = []
            for arg in args[:2]:
                tensors = [x for x in tree_leaves(arg) if isinstance(x, torch.Tensor)]
                sizes.append(sum(x.nbytes for x in tensors))
            if kind == "alltoall":
                rows = dict(zip(ranks, args[3], strict=True))
                sizes[1] = sizes[0] * rows[dist.get_rank()] // sum(rows.values())
            received[kind] += RECEIVED[kind](*sizes, len(ranks))
            return op.redispatch(keys.remove(KEY), *args)

        return call

    with torch.library._scoped_library("c10d", "IMPL") as library:
        for name in torch._C._dispatch_get_all_op_names():
            if not name.startswith("c10d::"):
                continue
            op = getattr(torch.ops.c10d, name.removeprefix("c10d::")).default
            kinds = [kind for kind in RECEIVED if op._opname.lstrip("_").startswith(kind)]
            if kinds:
                library.impl(op, watch(op, kinds[0]), "BackendSelect", with_keyset=True)
        yield received
