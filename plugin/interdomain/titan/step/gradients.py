"""Sums, measures and clips the gradients of a step, between the backward pass and the optimizer.

All parameters of a stage are DTensors on one mesh (`Meshes.parameters`), so that PyTorch's
functions take them together. There are three kinds:

- Most parameters are sharded by FSDP2, which sums their gradients over the data-parallel ranks.
- SSM parameters are whole on every rank (`Replicate`). The gradient of a rank comes from its own
  tokens and heads only (`Partial`).
- Parameters that FSDP2 shards and tensor parallelism does not split (norms, convolutions). The
  gradient of a tensor-parallel rank comes from its own tokens or heads only.

`reduce_shares` sums the gradients of the second and the third kind.

Why FSDP2 does not shard the SSM parameters: it shards dimension 0, which is heads. There are 32 at
1.3B, so 256 ranks would gather 8 times the real bytes in every micro-batch. A mesh of (ranks, 1)
needs no padding, but process groups of its own, a copy of the parameters and a reduction of their
gradients in every micro-batch. Whole parameters need one all-reduce per step, however many
micro-batches it has. They take memory on every rank: 100 MB at 1.3B, with gradients and optimizer
state.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .meshes import Meshes, is_divided, is_whole


def reduce_shares(parameters: Iterable[nn.Parameter], meshes: Meshes) -> None:
    """Sums the gradients that FSDP2 does not sum. Collective, once per step.

    The gradient on a rank is its share of a sum over the ranks. It is summed, not averaged: the
    loss is already divided by the token count of all ranks.

    Args:
        parameters: This rank's parameters, all of them DTensors.
        meshes: The process groups of this rank.
    """
    trained: list[Any] = [p for p in parameters if p.grad is not None]
    unsplit = [p for p in trained if not is_divided(p, "tensor")]

    # SSM parameters are whole on every rank. One all-reduce over all ranks that have these layers,
    # the ranks of this pipeline stage.
    ssm_parameters = [p for p in unsplit if is_whole(p)]
    _all_reduce([p.grad.to_local() for p in ssm_parameters], meshes.stage)
    # The gradients are no longer `Partial`: they have the placement of their parameters.
    for p in ssm_parameters:
        p.grad = DTensor.from_local(p.grad.to_local(), p.device_mesh, p.placements, run_check=False)

    # Under tensor parallelism, norms and convolutions are the same on its ranks: one all-reduce
    # over these. FSDP2 has given the gradients the placement of their parameters.
    _all_reduce([p.grad.to_local() for p in unsplit if not is_whole(p)], meshes.tensor.get_group())


def _all_reduce(tensors: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """Sums tensors over the ranks of a group, in place, in one collective."""
    if not tensors or dist.get_world_size(group) == 1:
        return
    flat = torch.cat([x.flatten() for x in tensors])
    dist.all_reduce(flat, group=group)
    for x, summed in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
        x.copy_(summed.view_as(x))


def norms(groups: Iterable[list[Any]], meshes: Meshes) -> Tensor:
    """Computes the norm of each group of gradients over all ranks.

    Collective: one all-reduce for each axis of the mesh, whatever the number of groups.

    Args:
        groups: Gradients, as DTensors, after `reduce_shares`.
        meshes: The process groups of this rank.

    Returns:
        [groups], float32, on the device, the same on every rank.
    """
    groups = list(groups)
    device = next(g.device for group in groups for g in group)

    def squares(chosen: Callable[[DTensor], bool]) -> Tensor:
        """Returns each group's sum of squares over the local slices of the chosen gradients.

        The sums are float64. Float32 norms of norms would be rounded two more times.
        """
        # A group without gradients keeps its 0. PyTorch's norm of an empty list is a tensor on the
        # CPU, and the host would wait while it is copied.
        total = torch.zeros(len(groups), dtype=torch.float64, device=device)
        for i, group in enumerate(groups):
            local = [g.to_local() for g in group if chosen(g)]
            if local:
                total[i] = torch.nn.utils.get_total_norm(local).to(device).double().square()
        return total

    def add_up(x: Tensor, mesh: DeviceMesh) -> None:
        if mesh.size() > 1:
            dist.all_reduce(x, group=mesh.get_group())

    # Each gradient enters before the first axis over which it is divided, and counts once.
    total = squares(lambda g: is_divided(g, "tensor"))
    add_up(total, meshes.tensor)
    total += squares(lambda g: is_divided(g, "shards") and not is_divided(g, "tensor"))
    add_up(total, meshes.data["shards"])
    total += squares(is_whole)
    # The stages of a pipeline have different parameters.
    add_up(total, meshes.pipeline)
    return total.sqrt().float()


def clip(parameters: Iterable[nn.Parameter], max_norm: float, meshes: Meshes) -> Tensor:
    """Scales all gradients so that their norm over all ranks is at most `max_norm`. Collective.

    Args:
        parameters: This rank's parameters. `reduce_shares` has summed their gradients.
        max_norm: The setting training.max_norm.
        meshes: The process groups of this rank.

    Returns:
        The norm before clipping, a float32 scalar on the device, the same on every rank.
    """
    trained: list[Any] = [p for p in parameters if p.grad is not None]
    (total,) = norms([[p.grad for p in trained]], meshes)
    torch.nn.utils.clip_grads_with_norm_(trained, max_norm, total)
    return total
