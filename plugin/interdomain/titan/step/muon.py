"""PyTorch's Muon for matrices that are sharded over ranks.

Newton-Schulz needs whole matrices. On DTensors, PyTorch's own Muon would communicate in each of its
fifteen matrix products. Here each rank updates momentum and weights of its own shard, and PyTorch's
Newton-Schulz runs on whole matrices, in rounds. A round takes as many matrices as there are ranks
that hold shards of them (shards, context, tensor): every rank gathers all of them, in bfloat16 as
Newton-Schulz reads them, orthogonalizes one, and broadcasts it. Each replica does so by itself.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz


class Muon(torch.optim.Muon):
    """Muon for DTensors that share one mesh.

    Attributes:
        found_inf: 1.0 on the device for a step that changes nothing, as in fused AdamW. None: every
            step takes effect.
    """

    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Updates the parameters. Collective among the ranks that have the same layers.

        Args:
            closure: Ignored. PyTorch's optimizers have this argument.
        """
        for group in self.param_groups:
            parameters: list[Any] = []
            gradients: list[Any] = []
            momenta: list[Any] = []
            self._init_group(group, parameters, gradients, momenta)

            # Both are generators, so that only the matrices of one round are in memory.
            directions = self._directions(gradients, momenta, group)
            matrices = _orthogonalized(directions, parameters, group)
            for p, matrix in zip(parameters, matrices, strict=True):
                update = distribute_tensor(
                    matrix, p.device_mesh, p.placements, src_data_rank=None
                ).to_local()
                decayed = p.to_local() * (1 - group["lr"] * group["weight_decay"])
                rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], p.shape)
                self._assign_unless_skipped(p.to_local(), decayed.add_(update, alpha=-rate))

    def _directions(
        self, gradients: list[Any], momenta: list[Any], group: dict[str, Any]
    ) -> Iterator[Tensor]:
        """Updates each momentum, and yields this rank's shard of the matrix to orthogonalize, bf16.

        Args:
            gradients: DTensors of the gradients.
            momenta: DTensors of the momenta, float32, in the same order.
            group: Muon's parameter group, with its options.
        """
        for gradient, momentum in zip(gradients, momenta, strict=True):
            g = gradient.to_local()
            m = momentum.to_local()
            self._assign_unless_skipped(m, m.lerp(g, 1 - group["momentum"]))
            if group["nesterov"]:
                m = g.lerp(m, group["momentum"])
            yield m.bfloat16()

    def _assign_unless_skipped(self, x: Tensor, new: Tensor) -> None:
        """Writes `new` into x, unless the step changes nothing."""
        if self.found_inf is not None:
            new = torch.where(self.found_inf > 0, x, new)
        x.copy_(new)


def _orthogonalized(
    shards: Iterator[Tensor], parameters: list[Any], group: dict[str, Any]
) -> Iterator[Tensor]:
    """Yields whole orthogonalized matrices, bf16, one after the other. Collective.

    Args:
        shards: This rank's shard of each matrix.
        parameters: The DTensors of the matrices, in the same order.
        group: Muon's parameter group, with the options of Newton-Schulz.
    """
    # A rank's coordinates on the axes over which the matrices are sharded.
    mesh = parameters[0].device_mesh
    axes = []
    for name in mesh.mesh_dim_names:
        if name != "replicas" and mesh[name].size() > 1:
            axes.append(mesh[name])
    all_coordinates = list(itertools.product(*(range(axis.size()) for axis in axes)))
    own_coordinates = tuple(axis.get_local_rank() for axis in axes)

    for first in range(0, len(parameters), len(all_coordinates)):
        # Each rank of a round gets one matrix. The last round may have fewer matrices than ranks.
        matrix_of_rank = dict(zip(all_coordinates, parameters[first:], strict=False))

        # Gather all matrices of the round, and keep this rank's.
        own = torch.empty(0)
        for coordinates, p in matrix_of_rank.items():
            shard = DTensor.from_local(
                next(shards), mesh, p.placements, shape=p.shape, stride=p.stride(), run_check=False
            )
            whole = shard.full_tensor()
            if coordinates == own_coordinates:
                own = whole

        # Compute after all gathers: between two of them, it would delay the second on all ranks.
        if own_coordinates in matrix_of_rank:
            own = _zeropower_via_newtonschulz(
                own, group["ns_coefficients"], group["ns_steps"], group["eps"]
            ).contiguous()

        # Broadcast the results along each axis in turn.
        for coordinates, p in matrix_of_rank.items():
            result = own
            if coordinates != own_coordinates:
                result = torch.empty(p.shape, dtype=torch.bfloat16, device=p.to_local().device)
            for axis, rank in zip(axes, coordinates, strict=True):
                dist.broadcast(result, group=axis.get_group(), group_src=rank)
            yield result
