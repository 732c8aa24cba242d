"""The process groups of a run: a device mesh with one axis for each kind of parallelism.

TorchTitan's own meshes have no process groups for axes of size 1. The meshes of this module have
them, so that one rank runs the same code as many. Under our trainer, TorchTitan uses these meshes
in place of its own (`host.patches.replace_meshes`), so that each group's buffers exist only once.
"""

from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor

from interdomain.model.parallel import GroupRank

from ..host import ParallelDims
from ..plan.device import device_here


class Meshes(NamedTuple):
    """The meshes and process groups of this rank.

    Attributes:
        data: FSDP2's mesh, (replicas, shards) or (shards,). Ranks that share a sequence (context
            parallelism) belong to the shards, because each of them has gradients of its own tokens.
        tensor: The ranks that share heads, feed-forward layers and vocabulary.
        pipeline: The ranks that share the layers.
        parameters: The mesh of all parameters: `data`, and `tensor` if that has several ranks.
        stage: All ranks that have the same layers. None: all ranks of the run.
        context: This rank's place in context parallelism. None: this rank has whole sequences.
        axes: All meshes of one dimension, by name.
    """

    data: DeviceMesh
    tensor: DeviceMesh
    pipeline: DeviceMesh
    parameters: DeviceMesh
    stage: dist.ProcessGroup | None
    context: GroupRank | None
    axes: dict[str, DeviceMesh]

    @property
    def data_rank(self) -> int:
        """This rank's number among the data-parallel ranks. Ranks of one sequence have the same."""
        shards = self.axes["shards"]
        replica = self.axes["replicas"].get_local_rank()
        rank = replica * shards.size() + shards.get_local_rank()
        # The ranks of a sequence are neighbours among the shards.
        if self.context:
            rank //= self.context.size
        return rank

    @property
    def is_first_of_sequences(self) -> bool:
        """True on exactly one of the ranks that share sequences."""
        has_first_tokens = self.context is None or self.context.rank == 0
        return (
            has_first_tokens
            and self.tensor.get_local_rank() == 0
            and self.pipeline.get_local_rank() == 0
        )

    def sum_over_model_ranks(self, x: Tensor) -> Tensor:
        """Sums x over the ranks that share the model and have the same tokens. Collective."""
        x = x.clone()
        for mesh in (self.tensor, self.pipeline):
            if mesh.size() > 1:
                dist.all_reduce(x, group=mesh.get_group())
        return x

    def set_timeouts(self, seconds: int) -> None:
        """Sets the timeout of collectives in these groups, as TorchTitan does in its own."""
        for mesh in self.axes.values():
            _set_pg_timeout(timedelta(seconds=seconds), mesh.get_group())

    def gather_sequences(self, x: Tensor) -> Tensor:
        """Gathers values per token of whole sequences, and sums them over the model's ranks.

        Collective.

        Args:
            x: Values of this rank's tokens, [..., T / cp_size].

        Returns:
            Values of all tokens, [..., T].
        """
        if self.context is not None:
            x = self.context.gather(x).movedim(0, -2).flatten(-2)
        return self.sum_over_model_ranks(x)


def meshes_of(dims: ParallelDims) -> Meshes:
    """Returns the meshes of a run. The first call builds them, and is collective.

    Args:
        dims: TorchTitan's degrees of parallelism. The result is kept in it. The ranks have the same
            order as in TorchTitan's own meshes.
    """
    if "interdomain" in vars(dims):
        return vars(dims)["interdomain"]

    # One mesh over all ranks. Context parallelism is a part of the axis `shards`.
    names = ("pipeline", "replicas", "shards", "tensor")
    shape = (dims.pp, dims.dp_replicate, dims.dp_shard * dims.cp, dims.tp)
    mesh = init_device_mesh(device_here().type, shape, mesh_dim_names=names)
    axes = {name: mesh[name] for name in names}

    context = None
    if dims.cp > 1:
        # Nothing is sent between the ranks of the axis `sequences`: its group needs no buffers.
        shards = mesh["shards"]._unflatten(
            0,
            (dims.dp_shard, dims.cp),
            ("sequences", "context"),
            backend_override={"sequences": "fake"},
        )
        axes["context"] = shards["context"]
        context = place_in(shards["context"])

    # The ranks of a stage have the same layers, and different slices of them.
    stage = None
    if dims.pp > 1:
        axes["stage"] = mesh[names[1:]]._flatten("stage")
        stage = axes["stage"].get_group()

    # FSDP2's mesh, and the mesh of the parameters, have no axes of size 1 beside the shards.
    data = ("shards",)
    if dims.dp_replicate > 1:
        data = ("replicas", "shards")
    parameters = data
    if dims.tp > 1:
        parameters = (*data, "tensor")

    meshes = Meshes(
        data=mesh[data],
        tensor=mesh["tensor"],
        pipeline=mesh["pipeline"],
        parameters=mesh[parameters],
        stage=stage,
        context=context,
        axes=axes,
    )
    vars(dims)["interdomain"] = meshes
    return meshes


def place_in(mesh: DeviceMesh) -> GroupRank:
    """Returns this rank's place in a mesh of one dimension."""
    return GroupRank(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size())


def is_divided(x: DTensor, axis: str) -> bool:
    """Returns True if ranks have different slices of x.

    Args:
        x: A parameter or gradient.
        axis: Name of the axis of its mesh along which the ranks are compared, such as "tensor".
    """
    names = x.device_mesh.mesh_dim_names or ()
    return axis in names and x.placements[names.index(axis)].is_shard()


def is_whole(x: DTensor) -> bool:
    """Returns True if every rank of a stage has all of x, or a summand of it (`Partial`).

    Among the parameters, these are the SSM parameters.
    """
    return not any(placement.is_shard() for placement in x.placements)
