"""The gradients of a step, between the backward pass and the optimizer: summed over ranks, measured, clipped.

Most parameters are sharded by FSDP2 (DTensors), which sums their gradients itself. The dynamics are plain tensors, complete and
equal on every rank (`parallelize`): each rank has the gradients of its own tokens, and `reduce_replicated` adds them up.

Why plain tensors and not a group of FSDP2. FSDP2 shards dimension 0, which is heads: 32 at 1.3B, so that 256 ranks would gather
8 times the real bytes in every micro-batch. A mesh of (ranks, 1) pads nothing, but needs process groups of its own, copies the
parameters in every micro-batch and sums their gradients as often. Plain tensors need one all-reduce per step, however many
micro-batches it has. They cost their memory on every rank: 100 MB at 1.3B, with gradients and optimizer state.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def reduce_replicated(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
    """Sum the gradients of the plain parameters over all ranks of the group, in one all-reduce. Collective, once per step.

    A sum, not a mean: the loss is already divided by the token count of all ranks.
    """
    replicated = [p for p in parameters if p.grad is not None and not isinstance(p, DTensor)]
    if not replicated or dist.get_world_size(group) == 1:
        return
    flat = torch.cat([p.grad.flatten() for p in replicated if p.grad is not None])
    dist.all_reduce(flat, group=group)
    for p, summed in zip(replicated, flat.split([p.numel() for p in replicated]), strict=True):
        p.grad = summed.view_as(p)


def norms(groups: Iterable[list[Tensor]]) -> Tensor:
    """Norm of each group of gradients over all ranks, [groups] float32, the same on every rank. One collective for all groups.

    Args:
        groups: DTensors of one mesh, sharded over its last dimension, and plain tensors, equal on every rank.
    """
    sharded, plain, meshes, devices = [], [], set(), []
    for group in groups:
        dtensors = [g for g in group if isinstance(g, DTensor)]
        meshes |= {g.device_mesh for g in dtensors}
        sharded.append([g.to_local() for g in dtensors])
        plain.append([g for g in group if not isinstance(g, DTensor)])
        devices += [g.device for g in (*sharded[-1], *plain[-1])]

    def squares(groups: list[list[Tensor]]) -> Tensor:
        # PyTorch's norm of nothing is on the CPU: the host would wait for its copy.
        nothing = torch.zeros((), device=devices[0])
        each = [torch.nn.utils.get_total_norm(g).to(devices[0]) if g else nothing for g in groups]
        # Sums of squares in float64: as norms of norms, they would be rounded twice more.
        return torch.stack(each).double().square()

    total = squares(sharded)
    if meshes:
        (mesh,) = meshes
        dist.all_reduce(total, group=mesh.get_group(mesh.ndim - 1))
    return (total + squares(plain)).sqrt().float()


def clip(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their norm over all ranks is at most `max_norm`. Collective; after `reduce_replicated`.

    Returns: the norm before, a float32 scalar on the device, the same on every rank.
    """
    parameters = [p for p in parameters if p.grad is not None]
    (total,) = norms([[p.grad for p in parameters if p.grad is not None]])
    for sharded in (True, False):  # PyTorch's multi-tensor functions take no mixture of DTensors and plain tensors
        part = [p for p in parameters if isinstance(p, DTensor) is sharded]
        torch.nn.utils.clip_grads_with_norm_(part, max_norm, total)
    return total
