"""PyTorch's Muon for matrices of which each rank has a part.

Newton-Schulz needs a whole matrix. On DTensors PyTorch's own step would exchange parts in each of its fifteen products. So here
momentum, weight decay and the change are of a rank's own part, and PyTorch's Newton-Schulz runs on whole matrices. They pass in
rounds of as many as there are ranks that have parts of them (shards, context, tensor). In a round every rank gathers all,
in bfloat16 as Newton-Schulz reads them, computes one, and hands it to the others. Each replica does so for itself.
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
    """Takes DTensors of one mesh.

    Attributes:
        found_inf: 1.0 on the device for a step that changes nothing, as for fused AdamW.
    """

    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Collective among the ranks that have the same layers."""
        for group in self.param_groups:
            parameters: list[Any] = []
            gradients: list[Any] = []
            momenta: list[Any] = []
            self._init_group(group, parameters, gradients, momenta)
            updates = (self._update(*pair, group) for pair in zip(gradients, momenta, strict=True))
            for p, whole in zip(
                parameters, _orthogonalized(updates, parameters, group), strict=True
            ):
                part = distribute_tensor(
                    whole, p.device_mesh, p.placements, src_data_rank=None
                ).to_local()
                decayed = p.to_local() * (1 - group["lr"] * group["weight_decay"])
                rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], p.shape)
                self._assign(p.to_local(), decayed.add_(part, alpha=-rate))

    def _update(self, gradient: DTensor, momentum: DTensor, group: dict[str, Any]) -> Tensor:
        """Move the momentum on. Returns: this rank's part of the matrix to orthogonalize, bfloat16."""
        g, m = gradient.to_local(), momentum.to_local()
        self._assign(m, m.lerp(g, 1 - group["momentum"]))
        return (g.lerp(m, group["momentum"]) if group["nesterov"] else m).bfloat16()

    def _assign(self, x: Tensor, new: Tensor) -> None:
        """Put new values into x, but in a step that changes nothing."""
        x.copy_(new if self.found_inf is None else torch.where(self.found_inf > 0, x, new))


def _orthogonalized(
    updates: Iterator[Tensor], parameters: list[Any], group: dict[str, Any]
) -> Iterator[Tensor]:
    """Whole matrices, one after the other. Collective.

    Args:
        updates: This rank's part of each matrix.
    """
    mesh = parameters[0].device_mesh
    axes = [
        mesh[name] for name in mesh.mesh_dim_names if name != "replicas" and mesh[name].size() > 1
    ]
    places = list(itertools.product(*(range(axis.size()) for axis in axes)))
    mine = tuple(axis.get_local_rank() for axis in axes)
    for first in range(0, len(parameters), len(places)):
        together = dict(zip(places, parameters[first:], strict=False))
        own = torch.empty(0)
        for place, p in together.items():
            part = DTensor.from_local(
                next(updates), mesh, p.placements, shape=p.shape, stride=p.stride(), run_check=False
            )
            whole = part.full_tensor()
            if place == mine:
                own = whole
        if (
            mine in together
        ):  # after all gathers: a product between two of them would hold up the second on all ranks
            own = _zeropower_via_newtonschulz(
                own, group["ns_coefficients"], group["ns_steps"], group["eps"]
            ).contiguous()
        for place, p in together.items():
            device = p.to_local().device
            result = (
                own if place == mine else torch.empty(p.shape, dtype=torch.bfloat16, device=device)
            )
            for axis, rank in zip(axes, place, strict=True):
                dist.broadcast(result, group=axis.get_group(), group_src=rank)
            yield result
