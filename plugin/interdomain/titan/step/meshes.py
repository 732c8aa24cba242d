"""The process groups of a run: one mesh with an axis for each kind of parallelism, of size 1 where a run does not use it.

TorchTitan's own meshes have no groups for axes of size 1. Here they have, so that one rank takes the same path as many.
"""

from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor

from interdomain.model.shard import Part, gather_shards

from ..host import ParallelDims
from ..plan.device import device_here


class Meshes(NamedTuple):
    """The meshes and groups that this rank belongs to.

    data: (replicas, shards) or (shards,), FSDP2's. The ranks that share a sequence are shards as well, for each has its own
        part of the gradients. tensor, pipeline: the other axes. parameters: that of every parameter: data, and tensor where
        it has several ranks. stage: all ranks that have the same layers.
    context: this rank's part of its sequences; None: all of them.
    """

    data: DeviceMesh
    tensor: DeviceMesh
    pipeline: DeviceMesh
    parameters: DeviceMesh
    stage: dist.ProcessGroup | None
    context: Part | None

    def sum_over_model_ranks(self, loss: Tensor) -> Tensor:
        """A loss, summed over the ranks that have shares of it for the same tokens. Collective."""
        loss = loss.clone()
        for mesh in (self.tensor, self.pipeline):
            if mesh.size() > 1:
                dist.all_reduce(loss, group=mesh.get_group())
        return loss

    def set_timeouts(self, seconds: int) -> None:
        """The time limit of a collective in these groups; TorchTitan sets those of its own."""
        groups = [group for mesh in (self.data, self.tensor, self.pipeline) for group in mesh.get_all_groups()]
        for group in (*groups, self.stage):
            if group is not None:
                _set_pg_timeout(timedelta(seconds=seconds), group)

    def gather_sequences(self, x: Tensor) -> Tensor:
        """Numbers of this rank's tokens, [..., T / context], as those of all tokens, [..., T], and summed. Collective."""
        if self.context is not None:
            x = gather_shards(x, self.context).movedim(0, -2).flatten(-2)
        return self.sum_over_model_ranks(x)


def meshes_of(dims: ParallelDims) -> Meshes:
    """The groups of a run, built at the first call. Collective. The order of the ranks is TorchTitan's."""
    if "interdomain" in vars(dims):
        return vars(dims)["interdomain"]
    names = ("pipeline", "replicas", "shards", "tensor")
    shape = dims.pp, dims.dp_replicate, dims.dp_shard * dims.cp, dims.tp
    mesh = init_device_mesh(device_here().type, shape, mesh_dim_names=names)
    context = dims.get_optional_mesh("cp")
    data = ("replicas", "shards") if dims.dp_replicate > 1 else ("shards",)
    meshes = vars(dims)["interdomain"] = Meshes(
        data=mesh[data],
        tensor=mesh["tensor"],
        pipeline=mesh["pipeline"],
        parameters=mesh[(*data, "tensor") if dims.tp > 1 else data],
        stage=mesh[names[1:]]._flatten("stage").get_group() if dims.pp > 1 else None,  # None: all ranks
        context=part_of(context) if context else None,
    )
    return meshes


def part_of(mesh: DeviceMesh) -> Part:
    return Part(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size())


def is_divided(x: DTensor, axis: str) -> bool:
    """True if the ranks of an axis of the mesh have different parts of x."""
    names = x.device_mesh.mesh_dim_names or ()
    return axis in names and x.placements[names.index(axis)].is_shard()


def is_whole(x: DTensor) -> bool:
    """True if every rank of a stage has all of x, or a share of it (`Partial`): the dynamics."""
    return not any(placement.is_shard() for placement in x.placements)
