"""A model over several ranks: each computes its part of the tokens or of the heads, and gets from the others what it needs.

    torch.ops.interdomain.before.default            a part's tail, to the rank after it
    torch.ops.interdomain.gather_shards.default     all parts, to every rank
    torch.ops.interdomain.scatter_shards.default    the sum over the ranks, of which each gets its part

All are collective, forward and backward: every rank of the group must call them, the first and the last too.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from interdomain.scan.library import tag_caches

# Tensor parallelism: which parameters the ranks have parts of, by the module's name, and along which dimension. They are the
# large ones. All others are whole on every rank, and what each has of their gradients is to be summed over the ranks; so is a
# module of such a name with the attribute `whole`.
SHARDED = {"tok_embeddings": 0, "output": 0, "wq": 0, "wk": 0, "wv": 0, "wg": 0, "w1": 0, "w3": 0, "wo": 1, "w2": 1}


def split_dimension(model: nn.Module, name: str) -> int | None:
    """The dimension along which the ranks of tensor parallelism have parts of a module's parameters; None: each has all."""
    return None if getattr(model.get_submodule(name), "whole", False) else SHARDED.get(name.rpartition(".")[2])


class Part(NamedTuple):
    """The part, of `size` equal ones, that a rank has; the ranks of a process group have the parts in order.

    group: the group's name (`ProcessGroup.group_name`); rank: this rank's place in it.
    """

    group: str
    rank: int
    size: int


def shard_of(x: Tensor, part: Part | None, dim: int = 0) -> Tensor:
    """This rank's part of x along a dimension, a view; x itself where part is None."""
    return x if part is None else x.chunk(part.size, dim)[part.rank]


def gather_tokens(x: Tensor, part: Part | None) -> Tensor:
    """The tokens of all ranks, [B, T / size, E] -> [B, T, E]; x itself where part is None."""
    if part is None:
        return x
    return gather_shards(x, part.size, part.group).transpose(0, 1).flatten(1, 2)


def scatter_tokens(x: Tensor, part: Part | None) -> Tensor:
    """The adjoint: this rank's tokens of the sum over all ranks, [B, T, E] -> [B, T / size, E]; x itself where part is None."""
    if part is None:
        return x
    return scatter_shards(x.unflatten(1, (part.size, -1)).transpose(0, 1), part.size, part.group)


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


def tail_before(x: Tensor, n: int, part: Part, back: Tensor | None) -> Tensor:
    """The last n tokens of the shard before, [B, n, E] of x [B, T, E]; zeros but for the last `back` [B], where that is given:
    those are of the first token's document."""
    past = before(x[:, -n:], part.group, 1)
    if back is None:
        return past
    distance = torch.arange(n, 0, -1, device=x.device)[:, None]
    return past.masked_fill(distance > back[:, None, None], 0)


@torch.library.custom_op("interdomain::gather_shards", mutates_args=())
def gather_shards(x: Tensor, size: int, group: str) -> Tensor:
    """x of all ranks, one after the other: [size, *x.shape]. A rank's gradient is the sum of what all ranks have for its x."""
    return _gather(x, size, group)


@gather_shards.register_fake
def _(x, size, group):
    return x.new_empty(size, *x.shape)


@torch.library.custom_op("interdomain::scatter_shards", mutates_args=())
def scatter_shards(x: Tensor, size: int, group: str) -> Tensor:
    """The sum over all ranks of x[rank], where rank is this one: [size, ...] -> [...]."""
    c10d = torch.ops._c10d_functional  # gloo reduces and gathers flat tensors only
    summed = c10d.wait_tensor(c10d.reduce_scatter_tensor(x.contiguous().flatten(), "sum", size, group))
    return torch.ops.aten._unsafe_view(summed, x.shape[1:])  # FSDP2 warns of a module that returns a view


@scatter_shards.register_fake
def _(x, size, group):
    return x.new_empty(x.shape[1:])


def _setup(ctx, inputs, output):
    _, ctx.size, ctx.group = inputs


gather_shards.register_autograd(
    lambda ctx, d: (scatter_shards(d, ctx.size, ctx.group), None, None), setup_context=_setup
)
scatter_shards.register_autograd(
    lambda ctx, d: (gather_shards(d, ctx.size, ctx.group), None, None), setup_context=_setup
)


def _gather(x: Tensor, size: int, group: str) -> Tensor:
    c10d = torch.ops._c10d_functional
    everyone = c10d.wait_tensor(c10d.all_gather_into_tensor(x.contiguous().flatten(), size, group))
    return everyone.view(size, *x.shape)


tag_caches(__name__)
