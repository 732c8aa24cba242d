"""Tensor and context parallelism, activation checkpointing, torch.compile and FSDP2.

One rank runs the same code as many. The order matters: tensor parallelism splits the matrices,
checkpointing wraps the bare block, torch.compile the wrapped block, and FSDP2 the compiled one.
"""

from collections.abc import Callable, Iterator
from itertools import starmap
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor

from interdomain.model import Transformer
from interdomain.model.initialize import initialize
from interdomain.model.layers import LocalParameters
from interdomain.model.parallel import split_dimension

from .host import SAVED_OPS, apply_ac, apply_compile, disable_fsdp_gradient_division, logger
from .plan.device import device_here
from .settings.schema import JobConfig
from .step.meshes import Meshes, place_in

# Ops whose outputs selective activation checkpointing saves, in addition to TorchTitan's list.
# Recomputing a scan would cost more time than checkpointing saves elsewhere, and what ranks
# exchange is small. All-gathers are left out: recomputing one needs memory for a single block only.
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
    """Parallelizes a model, or a stage of a pipeline, on the meta device.

    Args:
        model: The model or the stage.
        meshes: The process groups of this rank.
        job: The configuration of the run.
        config: TorchTitan's configuration, whose sections [activation_checkpoint] and [compile]
            TorchTitan's functions read.
        sum_in_backward: Sum the gradients of parameters that tensor parallelism does not split in
            the backward pass, one by one. Otherwise `gradients.reduce_shares` sums them, once per
            step.
    """
    # Tensor and context parallelism.
    tensor_place = None
    if meshes.tensor.size() > 1:
        apply_tensor_parallelism(model, meshes.tensor)
        tensor_place = place_in(meshes.tensor)
    for ssm in ssm_modules(model):
        distribute(ssm, meshes.parameters, Replicate())
    model.set_ranks(cp_rank=meshes.context, tp_rank=tensor_place)

    # Activation checkpointing, then compilation of the blocks and of the loss.
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

    # FSDP2. Its hooks must run before those that read local slices of what it gathers.
    apply_fsdp(model, meshes.data, job)
    if meshes.tensor.size() > 1:
        for unit in (model.tok_embeddings, *model.layers.values(), model.norm, model.output):
            if unit is not None:
                read_local_slices(unit, sum_in_backward)


def ssm_modules(model: Transformer) -> list[nn.Module]:
    """Returns the modules with SSM parameters, which are whole on every rank of a stage."""
    blocks: Any = model.layers.values()
    modules = [getattr(block.attention, "ssm", None) for block in blocks]
    return [ssm for ssm in modules if ssm is not None]


def distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Makes DTensors of a module's own parameters.

    Args:
        module: The module; its submodules stay as they are.
        mesh: The ranks over which the parameters are distributed.
        placement: How, on each axis of the mesh.
    """
    for name, p in list(module.named_parameters(recurse=False)):
        whole = distribute_tensor(p, mesh, [placement] * mesh.ndim, src_data_rank=None)
        setattr(module, name, nn.Parameter(whole))


def apply_tensor_parallelism(model: Transformer, mesh: DeviceMesh) -> None:
    """Distributes matrices, norms and convolutions over the tensor-parallel ranks.

    Every rank has a slice of a large matrix, unless its module asks for the `whole` matrix, and all
    of the other parameters. `parallelize` distributes the SSM parameters.

    Args:
        model: The model or a stage of a pipeline.
        mesh: `Meshes.tensor`.
    """
    for name, module in model.named_modules():
        # The class of modules with matrices, norms and convolutions.
        if isinstance(module, LocalParameters):
            dim = split_dimension(model, name)
            placement = Replicate() if dim is None else Shard(dim)
            distribute(module, mesh, placement)


def read_local_slices(unit: nn.Module, sum_in_backward: bool) -> None:
    """Makes modules use this rank's slices of their parameters, as plain tensors.

    A hook reads the slices before each forward pass. It runs after FSDP2's hook, which gathers the
    parameters, and outside of compiled code: torch.compile would pass a DTensor's mesh from the
    forward to the backward graph, and take it for a tensor when the backward pass recomputes.

    Args:
        unit: A module that FSDP2 gathers as a whole.
        sum_in_backward: Sum the gradients of whole parameters over the ranks in the backward pass.
    """
    owned: list[tuple[nn.Module, str]] = []
    for module in unit.modules():
        if isinstance(module, LocalParameters):
            owned += [(module, name) for name, _ in module.named_parameters(recurse=False)]

    def read(*_: Any) -> None:
        for module, name in owned:
            p: Any = getattr(module, name)
            # `Partial` makes the backward pass sum the ranks' gradients.
            shares = [Partial()] if sum_in_backward and p.placements[0].is_replicate() else None
            # Not setattr: nn.Module would refuse a tensor in the place of a parameter.
            module._buffers[f"local_{name}"] = p.to_local(grad_placements=shares)

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
    """Sets the initial values, after `to_empty`.

    Collective among the ranks that have the same layers. One rank draws each tensor for all, so
    that all have the same bits, whatever their processors.

    Args:
        model: The model or a stage of a pipeline.
        seed: Seed of the run.
        loaded: True if a checkpoint will replace all parameters.
        device: Where the model computes. FSDP2 moves the parameters that it offloads to the CPU,
            but no others.
        group: The ranks that have the same layers. None: all ranks.
    """
    ranks = dist.get_world_size(group)
    rank = dist.get_rank(group)

    def draw_in_turns(
        draw: Callable[..., Tensor], wanted: list[tuple[str, torch.Size]]
    ) -> Iterator[Tensor]:
        """Yields the tensors in order. In each round every rank draws one, and broadcasts it."""
        for first in range(0, len(wanted), ranks):
            # This rank's tensor, if the last round has one for it.
            mine = [draw(*one).to(device) for one in wanted[first + rank : first + ranks][:1]]
            for source, (_, shape) in enumerate(wanted[first : first + ranks]):
                # Zeros, not empty: simulated ranks (comm.mode) send nothing.
                full = (
                    mine.pop()
                    if source == rank
                    else torch.zeros(shape, dtype=torch.float32, device=device)
                )
                dist.broadcast(full, group=group, group_src=source)
                yield full

    draw_all = draw_in_turns if ranks > 1 else starmap
    initialize(model, model.config, seed, parameters=not loaded, draw_all=draw_all)
    # FSDP2 does not shard these modules, and does not move them.
    for layer in model.layers.values():
        for name in ("ssm", "feature_map"):
            module = getattr(layer.attention, name, None)
            if module is not None:
                module.to(device)


def apply_fsdp(model: Transformer, mesh: DeviceMesh, job: JobConfig) -> None:
    """Shards the model with FSDP2: a group for each block, for the embedding, and for the head.

    SSM parameters stay float32 and whole on every rank (`step.gradients` says why).

    Args:
        model: The model or a stage of a pipeline.
        mesh: `Meshes.data`.
        job: The configuration of the run.
    """
    training = job.training
    # Blocks must not cast their inputs. Among these are float32 tensors that were computed from the
    # SSM parameters outside of the blocks.
    param_dtype = torch.bfloat16 if training.precision == "bf16" else torch.float32
    reduce_dtype = torch.bfloat16 if training.mixed_precision_reduce == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    config: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if training.enable_cpu_offload:
        config["offload_policy"] = CPUOffloadPolicy()

    # By default a pipeline gathers a block once for all micro-batches.
    when = job.parallelism.fsdp_reshard_after_forward
    has_pipeline = job.parallelism.pipeline_parallel_degree > 1
    reshard = when == "always" or (when == "default" and not has_pipeline)

    if model.tok_embeddings is not None:
        fully_shard(model.tok_embeddings, **config, reshard_after_forward=reshard)
    ssm_parameters = {p for ssm in ssm_modules(model) for p in ssm.parameters()}
    for layer in model.layers.values():
        fully_shard(layer, **config, reshard_after_forward=reshard, ignored_params=ssm_parameters)
    # The backward pass begins with the head, so by default it stays gathered.
    if model.output is not None:
        fully_shard([model.norm, model.output], **config, reshard_after_forward=when == "always")
    fully_shard(model, **config)

    # Gradients are summed: the loss is already divided by the token count of all ranks.
    disable_fsdp_gradient_division(model)
    if device_here().type == "cpu":
        # Gloo has neither AVG nor PREMUL_SUM.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    logger.info("Applied FSDP2 over mesh %s", mesh)
