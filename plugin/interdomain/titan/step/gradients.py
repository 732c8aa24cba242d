"""The gradients of a step, between the backward pass and the optimizer: summed over ranks, measured, clipped.

All parameters of a stage are DTensors on one mesh (`Meshes.parameters`), so PyTorch's functions take them together. Most are
sharded by FSDP2, which sums their gradients over data itself. The dynamics are whole on every rank (`Replicate`): a rank's
gradient is that of its own tokens and heads (`Partial`). Of parameters that the tensor axis does not split (norms,
convolutions), a rank's gradients are of its own tokens or heads, too. `reduce_shares` adds up both.

Why the dynamics are no group of FSDP2. FSDP2 shards dimension 0, which is heads: 32 at 1.3B, so that 256 ranks would gather
8 times the real bytes in every micro-batch. A mesh of (ranks, 1) pads nothing, but needs process groups of its own, copies the
parameters in every micro-batch and sums their gradients as often. Whole parameters need one all-reduce per step, however many
micro-batches it has. They cost their memory on every rank: 100 MB at 1.3B, with gradients and optimizer state.
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
    """Sum the gradients that FSDP2 does not: of the dynamics over all ranks that have them, in one all-reduce, and of all
    parameters but the split matrices over the tensor axis, in another. Collective, once per step.

    Sums, not means: the loss is already divided by the token count of all ranks.
    """
    trained: list[Any] = [p for p in parameters if p.grad is not None]
    shared = [p for p in trained if not is_divided(p, "tensor")]
    dynamics = [p for p in shared if is_whole(p)]
    _all_reduce([p.grad.to_local() for p in dynamics], meshes.stage)
    for p in dynamics:
        p.grad = DTensor.from_local(p.grad.to_local(), p.device_mesh, p.placements, run_check=False)
    _all_reduce([p.grad.to_local() for p in shared if not is_whole(p)], meshes.tensor.get_group())


def _all_reduce(tensors: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum tensors over the ranks, in place, in one exchange."""
    if not tensors or dist.get_world_size(group) == 1:
        return
    flat = torch.cat([x.flatten() for x in tensors])
    dist.all_reduce(flat, group=group)
    for x, summed in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
        x.copy_(summed.view_as(x))


def norms(groups: Iterable[list[Any]], meshes: Meshes) -> Tensor:
    """Norm of each group of gradients over all ranks, [groups] float32, the same on every rank.

    One collective for all groups and each axis of the mesh.

    Args:
        groups: DTensors. Those that the tensor axis does not split are equal on its ranks.
    """
    groups = list(groups)
    device = next(g.device for group in groups for g in group)

    def squares(chosen: Callable[[DTensor], bool]) -> Tensor:
        """Sums of squares of what is here, in float64: as norms of norms, they would be rounded twice more."""
        # PyTorch's norm of nothing is on the CPU: the host would wait for its copy.
        total = torch.zeros(len(groups), dtype=torch.float64, device=device)
        for i, group in enumerate(groups):
            local = [g.to_local() for g in group if chosen(g)]
            if local:
                total[i] = torch.nn.utils.get_total_norm(local).to(device).double().square()
        return total

    def add_up(x: Tensor, mesh: DeviceMesh) -> None:
        if mesh.size() > 1:
            dist.all_reduce(x, group=mesh.get_group())

    total = squares(lambda g: is_divided(g, "tensor"))
    add_up(total, meshes.tensor)
    total += squares(lambda g: is_divided(g, "shards") and not is_divided(g, "tensor"))
    add_up(total, meshes.data["shards"])
    total += squares(is_whole)
    add_up(total, meshes.pipeline)
    return total.sqrt().float()


def clip(parameters: Iterable[nn.Parameter], max_norm: float, meshes: Meshes) -> Tensor:
    """Scales all gradients so that their norm over all ranks is at most `max_norm`. Collective; after `reduce_shares`.

    Returns:
        The norm before, a float32 scalar on the device, the same on every rank.
    """
    trained: list[Any] = [p for p in parameters if p.grad is not None]
    (total,) = norms([[p.grad for p in trained]], meshes)
    torch.nn.utils.clip_grads_with_norm_(trained, max_norm, total)
    return total
