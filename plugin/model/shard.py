"""A sequence over several ranks: each has a shard of its tokens, in order, and gets from the others what its layers need.

    torch.ops.interdomain.before.default           a shard's tail, to the rank after it
    torch.ops.interdomain.gather_shards.default    all shards, to every rank

Both are collective, forward and backward: every rank of the group must call them, the first and the last too.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from interdomain.scan.library import tag_caches

# Tensor parallelism: which parameters the ranks have parts of, by the module's name, and along which dimension. They are the
# large ones. All others are whole on every rank, and what each has of their gradients is to be summed over the ranks.
SHARDED = {"tok_embeddings": 0, "output": 0, "wq": 0, "wk": 0, "wv": 0, "wg": 0, "w1": 0, "w3": 0, "wo": 1, "w2": 1}


class Shard(NamedTuple):
    """Which part of its sequences a rank has: of T tokens, those from rank T on. All shards have the same T.

    group: the name of a process group (`ProcessGroup.group_name`) whose ranks have the shards of the same sequences, in order;
    rank, size: this rank's place in it, and the number of shards.
    """

    group: str
    rank: int
    size: int


@torch.library.custom_op("interdomain::before", mutates_args=())
def before(x: Tensor, group: str, step: int) -> Tensor:
    """x of the rank `step` before this one, zeros where there is none. The gradient goes the same way back."""
    members = dist.distributed_c10d._resolve_process_group(group)  # pyright: ignore[reportArgumentType, reportPrivateImportUsage]
    there = dist.get_rank(members) - step
    everyone = _gather(x, members.size(), group)
    return everyone[there].clone() if 0 <= there < members.size() else torch.zeros_like(x)


@before.register_fake
def _(x, group, step):
    return x.new_empty(x.shape)


def _setup_before(ctx, inputs, output):
    _, ctx.group, ctx.step = inputs


before.register_autograd(lambda ctx, d: (before(d, ctx.group, -ctx.step), None, None), setup_context=_setup_before)


@torch.library.custom_op("interdomain::gather_shards", mutates_args=())
def gather_shards(x: Tensor, size: int, group: str) -> Tensor:
    """x of all ranks, one after the other: [size, *x.shape]. A rank's gradient is the sum of what all ranks have for its x."""
    return _gather(x, size, group)


@gather_shards.register_fake
def _(x, size, group):
    return x.new_empty(size, *x.shape)


def _setup_gather(ctx, inputs, output):
    _, ctx.size, ctx.group = inputs


def _scatter(ctx, d):
    c10d = torch.ops._c10d_functional
    own = c10d.wait_tensor(c10d.reduce_scatter_tensor(d.flatten(), "sum", ctx.size, ctx.group))
    return own.view(d.shape[1:]), None, None


gather_shards.register_autograd(_scatter, setup_context=_setup_gather)


def _gather(x: Tensor, size: int, group: str) -> Tensor:
    c10d = torch.ops._c10d_functional  # gloo gathers flat tensors only
    everyone = c10d.wait_tensor(c10d.all_gather_into_tensor(x.flatten(), size, group))
    return everyone.view(size, *x.shape)


tag_caches(__name__)
