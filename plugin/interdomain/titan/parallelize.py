"""Parts of heads and sequences, activation checkpointing, compilation and FSDP2: one path for one rank and many.

Order: matrices are split first; checkpointing wraps the bare block, torch.compile the wrapped block, FSDP2 the compiled one.
"""

from collections.abc import Callable, Iterator
from itertools import starmap
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Partial, Placement, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Split

from interdomain.model import Transformer
from interdomain.model.initialize import initialize
from interdomain.model.layers import LocalParameters
from interdomain.model.shard import split_dimension

from .host import SAVED_OPS, apply_ac, apply_compile, disable_fsdp_gradient_division, logger
from .plan.device import device_here
from .settings.schema import JobConfig
from .step.meshes import Meshes, part_of

# Ops whose outputs selective activation checkpointing saves, in addition to TorchTitan's list. Recomputing the scan would cost
# more time than anything else saves, and what ranks exchange is small. All-gathers are left out: recomputing one needs memory
# for a single block only.
SCAN_OPS = {
    torch.ops.interdomain.scan.default,
    torch.ops.interdomain.linear_scan.default,
    torch.ops.interdomain.fla_recurrence.default,
    torch.ops.interdomain.send_state.default,
    torch.ops._c10d_functional.all_to_all_single.default,
}


def parallelize(
    model: Transformer, meshes: Meshes, job: JobConfig, config: Any, *, sum_in_backward: bool
) -> None:
    """Parallelizes a model, or a stage of one, on the meta device.

    Args:
        config: TorchTitan's configuration, whose sections [activation_checkpoint] and [compile] its own functions read.
        sum_in_backward: Whether FSDP2 sums the gradients of parameters that the tensor axis does not split, one by one, over
            that axis. Otherwise `gradients.reduce_shares` does, once per step.
    """
    if meshes.tensor.size() > 1:
        distribute_over_heads(model, meshes.tensor)
    for ssm in dynamics_of(model):
        distribute(ssm, meshes.parameters, Replicate())
    model.set_parts(
        shard=meshes.context, heads=part_of(meshes.tensor) if meshes.tensor.size() > 1 else None
    )
    compiled = job.compile.enable and "model" in job.compile.components
    if job.activation_checkpoint.mode != "none":
        saved = SAVED_OPS | SCAN_OPS
        apply_ac(
            model,
            config.activation_checkpoint,
            model_compile_enabled=compiled,
            op_sac_save_list=saved,
        )
    if compiled:
        apply_compile(model, config.compile)
    if model.output is not None and job.compile.enable and "loss" in job.compile.components:
        model.output.compile_loss(job.compile.backend)
    shard(model, meshes.data, job)
    if meshes.tensor.size() > 1:
        for unit in (model.tok_embeddings, *model.layers.values(), model.norm, model.output):
            if unit is not None:
                read_local_slices(unit, sum_in_backward)


def dynamics_of(model: Transformer) -> list[nn.Module]:
    """The modules whose parameters are whole on every rank."""
    blocks: Any = model.layers.values()
    modules = [getattr(block.attention, "ssm", None) for block in blocks]
    return [ssm for ssm in modules if ssm is not None]


def distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Make DTensors of a module's own parameters."""
    for name, p in list(module.named_parameters(recurse=False)):
        whole = distribute_tensor(p, mesh, [placement] * mesh.ndim, src_data_rank=None)
        setattr(module, name, nn.Parameter(whole))


def distribute_over_heads(model: Transformer, mesh: DeviceMesh) -> None:
    """Tensor parallelism: every rank of the mesh has a slice of each large matrix, of the other parameters all."""
    for name, module in model.named_modules():
        if isinstance(module, LocalParameters):
            dim = split_dimension(model, name)
            distribute(module, mesh, Replicate() if dim is None else Split(dim))


def read_local_slices(unit: nn.Module, sum_in_backward: bool) -> None:
    """Give the modules of `unit` this rank's slices of their parameters as plain tensors, before each forward pass.

    After FSDP2's own hook, which gathers them, and outside of what is compiled: torch.compile would pass a DTensor's mesh from
    the forward to the backward graph, and takes it for a tensor where the backward pass computes an attention again.
    """
    modules = [module for module in unit.modules() if isinstance(module, LocalParameters)]
    names = [
        (module, name) for module in modules for name, _ in module.named_parameters(recurse=False)
    ]

    def read(*_: Any) -> None:
        for module, name in names:
            p: Any = getattr(module, name)
            shares = [Partial()] if sum_in_backward and p.placements[0].is_replicate() else None
            module._buffers[f"local_{name}"] = p.to_local(
                grad_placements=shares
            )  # a Parameter is refused by nn.Module

    unit.register_forward_pre_hook(read)


@torch.no_grad()
def set_initial_values(
    model: Transformer,
    seed: int,
    *,
    loaded: bool,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Fill the memory that `to_empty` gave. Collective among the ranks of the group, which have the same layers: each tensor is
    drawn by one of them, so all have the bits of its processor.

    Args:
        loaded: whether a checkpoint replaces all parameters.
        device: of the forward pass. FSDP2 fetches from the CPU what it has offloaded, and nothing else.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)

    def draw_in_turns(
        draw: Callable[..., Tensor], wanted: list[tuple[str, torch.Size]]
    ) -> Iterator[Tensor]:
        """In each round every rank draws one tensor, and hands it to the others."""
        for first in range(0, len(wanted), ranks):
            mine = [draw(*one).to(device) for one in wanted[first + rank : first + ranks][:1]]
            for source, (_, shape) in enumerate(wanted[first : first + ranks]):
                # Zeros: of simulated ranks (comm.mode) nothing comes.
                full = (
                    mine.pop()
                    if source == rank
                    else torch.zeros(shape, dtype=torch.float32, device=device)
                )
                dist.broadcast(full, group=group, group_src=source)
                yield full

    initialize(
        model,
        model.config,
        seed,
        parameters=not loaded,
        draw_all=draw_in_turns if ranks > 1 else starmap,
    )
    for layer in model.layers.values():
        for name in ("ssm", "feature_map"):  # not sharded by FSDP2
            module = getattr(layer.attention, name, None)
            if module is not None:
                module.to(device)


def shard(model: Transformer, mesh: DeviceMesh, job: JobConfig) -> None:
    """FSDP2: one group per block. The dynamics stay float32, and whole on every rank (`gradients` says why)."""
    training = job.training
    # The blocks must not cast their inputs: the dynamics reach them as float32 tensors.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if training.precision == "bf16" else torch.float32,
        reduce_dtype=torch.bfloat16 if training.mixed_precision_reduce == "bf16" else torch.float32,
        cast_forward_inputs=False,
    )
    config: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if training.enable_cpu_offload:
        config["offload_policy"] = CPUOffloadPolicy()
    when, pipeline = (
        job.parallelism.fsdp_reshard_after_forward,
        job.parallelism.pipeline_parallel_degree,
    )
    # A pipeline runs a block for many micro-batches: by default it is gathered once for all of them.
    reshard = when == "always" or (when == "default" and pipeline == 1)

    if model.tok_embeddings is not None:
        fully_shard(model.tok_embeddings, **config, reshard_after_forward=reshard)
    dynamics = {p for ssm in dynamics_of(model) for p in ssm.parameters()}
    for layer in model.layers.values():
        fully_shard(layer, **config, reshard_after_forward=reshard, ignored_params=dynamics)
    if model.output is not None:  # needed again at once in the backward pass
        fully_shard([model.norm, model.output], **config, reshard_after_forward=when == "always")
    fully_shard(model, **config)

    disable_fsdp_gradient_division(model)  # the loss is already divided by the global token count
    if device_here().type == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(
                    True
                )  # gloo has neither AVG nor PREMUL_SUM
    logger.info("Applied FSDP2 over mesh %s", mesh)
