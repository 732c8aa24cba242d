"""The process groups of a run: one mesh with an axis for each kind of parallelism, of size 1 where a run does not use it.

TorchTitan's own meshes have no groups for axes of size 1. Here they have, so that one rank takes the same path as many. Under
our trainer TorchTitan builds none (`host.patches.replace_meshes`): a group's buffers exist once.
"""

from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor

from interdomain.model.shard import Part

from ..host import ParallelDims
from ..plan.device import device_here


class Meshes(NamedTuple):
    """The meshes and groups that this rank belongs to.

    Attributes:
        data: FSDP2's mesh, (replicas, shards) or (shards,). The ranks that share a sequence are shards as well, for each has
            its own part of the gradients.
        tensor: The ranks that share heads, feed-forward and vocabulary.
        pipeline: The ranks that share the layers.
        parameters: The mesh of every parameter: `data`, and `tensor` if it has several ranks.
        stage: All ranks that have the same layers. None: all ranks.
        context: This rank's part of its sequences. None: whole sequences.
        axes: All meshes of one dimension, by name.
    """

    data: DeviceMesh
    tensor: DeviceMesh
    pipeline: DeviceMesh
    parameters: DeviceMesh
    stage: dist.ProcessGroup | None
    context: Part | None
    axes: dict[str, DeviceMesh]

    @property
    def data_rank(self) -> int:
        """This rank's number among those that have sequences of their own; ranks that share sequences have one number."""
        rank = 0
        for size, place in zip(self.data.shape, self.data.get_coordinate() or (), strict=True):
            rank = rank * size + place
        return rank // (self.context.size if self.context else 1)

    @property
    def first_of_sequences(self) -> bool:
        """True on one of the ranks that share sequences."""
        has_first_tokens = self.context is None or self.context.rank == 0
        return (
            has_first_tokens and self.tensor.get_local_rank() == self.pipeline.get_local_rank() == 0
        )

    def sum_over_model_ranks(self, loss: Tensor) -> Tensor:
        """A loss, summed over the ranks that have shares of it for the same tokens. Collective."""
        loss = loss.clone()
        for mesh in (self.tensor, self.pipeline):
            if mesh.size() > 1:
                dist.all_reduce(loss, group=mesh.get_group())
        return loss

    def set_timeouts(self, seconds: int) -> None:
        """The time limit of a collective in these groups until the first step; TorchTitan sets that of the others."""
        for mesh in self.axes.values():
            _set_pg_timeout(timedelta(seconds=seconds), mesh.get_group())

    def gather_sequences(self, x: Tensor) -> Tensor:
        """Numbers of this rank's tokens, [..., T / context], as those of all tokens, [..., T], and summed. Collective."""
        if self.context is not None:
            x = self.context.gather(x).movedim(0, -2).flatten(-2)
        return self.sum_over_model_ranks(x)


def meshes_of(dims: ParallelDims) -> Meshes:
    """The groups of a run, built at the first call. Collective. The order of the ranks is TorchTitan's."""
    if "interdomain" in vars(dims):
        return vars(dims)["interdomain"]
    names = ("pipeline", "replicas", "shards", "tensor")
    shape = dims.pp, dims.dp_replicate, dims.dp_shard * dims.cp, dims.tp
    mesh = init_device_mesh(device_here().type, shape, mesh_dim_names=names)
    axes = {name: mesh[name] for name in names}
    if dims.cp > 1:
        # No collective runs among the ranks with sequences of their own: a group without buffers serves.
        sizes = (dims.dp_shard, dims.cp)
        shards = mesh["shards"]._unflatten(
            0, sizes, ("sequences", "context"), backend_override={"sequences": "fake"}
        )
        axes["context"] = shards["context"]
    if dims.pp > 1:
        axes["stage"] = mesh[names[1:]]._flatten("stage")
    data = ("replicas", "shards") if dims.dp_replicate > 1 else ("shards",)
    meshes = vars(dims)["interdomain"] = Meshes(
        data=mesh[data],
        tensor=mesh["tensor"],
        pipeline=mesh["pipeline"],
        parameters=mesh[(*data, "tensor") if dims.tp > 1 else data],
        stage=axes["stage"].get_group() if dims.pp > 1 else None,  # None: all ranks
        context=part_of(axes["context"]) if dims.cp > 1 else None,
        axes=axes,
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
