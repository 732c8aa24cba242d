"""Shards of sequences, activation checkpointing, compilation and FSDP2 for the model: one path for one rank and many.

Order: checkpointing wraps the bare block, torch.compile the wrapped block, FSDP2 the compiled block.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from interdomain.model import Transformer
from interdomain.model.initialize import initialize
from interdomain.model.shard import Part, own

from .device import device_here
from .host import (
    SAVED_OPS,
    ActivationCheckpoint,
    ParallelDims,
    apply_ac,
    apply_compile,
    disable_fsdp_gradient_division,
    logger,
)

# What selective checkpointing saves beside torchtitan's own list: recomputing the scan would cost more than all it saves.
# A shard's exchange before it likewise; not gather_shards, softmax's keys and values of all shards: recomputed, they are one
# block's at a time.
SCAN_OPS = {
    torch.ops.interdomain.scan.default,
    torch.ops.interdomain.linear_scan.default,
    torch.ops.interdomain.before.default,
}


def parallelize(model: Transformer, parallel_dims: ParallelDims, job_config: Any) -> None:
    share_sequences(model, parallel_dims)
    compiled = job_config.compile.enable and "model" in job_config.compile.components
    if job_config.activation_checkpoint.mode != "none":
        checkpoint_blocks(model, job_config.activation_checkpoint, model_compile_enabled=compiled)
    if compiled:
        apply_compile(model, job_config.compile)
    if job_config.compile.enable and "loss" in job_config.compile.components:
        model.output.compile_loss(job_config.compile.backend)
    shard(model, _mesh(parallel_dims), job_config)


def share_sequences(model: Transformer, parallel_dims: ParallelDims) -> None:
    """Context parallelism: the model computes this rank's shard of its sequences, where they have any."""
    if not parallel_dims.cp_enabled:
        return
    mesh = parallel_dims.get_mesh("cp")
    model.set_parts(shard=Part(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size()))


def own_shard(x: Tensor, shard: Part | None) -> Tensor:
    """This rank's tokens of whole sequences, [B, T] -> [B, T / size]: contiguous, not TorchTitan's head and tail."""
    return own(x, shard, dim=1).contiguous()


def checkpoint_blocks(model: nn.Module, settings: ActivationCheckpoint, **options: Any) -> None:
    """Activation checkpointing by settings [activation_checkpoint]."""
    apply_ac(model, settings, op_sac_save_list=SAVED_OPS | SCAN_OPS, **options)


@torch.no_grad()
def set_initial_values(model: Transformer, seed: int, *, loaded: bool, device: torch.device) -> None:
    """Into the memory that `to_empty` gave. Collective.

    Args:
        loaded: whether a checkpoint replaces all parameters: drawing them takes every rank 8 s at 1.3B.
        device: of the forward pass. FSDP2 fetches from the CPU what it has offloaded, and nothing else.
    """
    initialize(model, model.config, seed, parameters=not loaded)
    for layer in model.layers.values():
        for part in (getattr(layer.attention, name, None) for name in ("ssm", "feature_map")):  # not sharded by FSDP2
            if part is not None:
                part.to(device)
                if not loaded and torch.distributed.get_world_size() > 1:
                    for p in part.parameters():  # another kind of processor draws other last bits
                        torch.distributed.broadcast(p, 0)


def _mesh(parallel_dims: ParallelDims) -> DeviceMesh:
    """(replicas, shards) or (shards,): of size 1 where there is nothing to shard, so that one rank takes the same path. The
    ranks that share a sequence are shards as well, for each has its own part of the gradients.

    TorchTitan's DDP is not used: it averages gradients that its loss has already normalised by the global token count.
    """
    if parallel_dims.fsdp_enabled:
        return parallel_dims.get_mesh(["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"])
    if parallel_dims.dp_replicate_enabled:
        return init_device_mesh(
            device_here().type, (parallel_dims.dp_replicate, 1), mesh_dim_names=("dp_replicate", "fsdp")
        )
    return init_device_mesh(device_here().type, (1,), mesh_dim_names=("fsdp",))


def shard(model: Transformer, mesh: DeviceMesh, job_config: Any) -> None:
    """FSDP2: one group per block. The dynamics stay plain float32 tensors, complete on every rank (`gradients` says why)."""
    training = job_config.training
    config: dict[str, Any] = {"mesh": mesh}
    if training.enable_cpu_offload:
        config["offload_policy"] = CPUOffloadPolicy()
    # The blocks must not cast their inputs: the dynamics reach them as float32 tensors.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if training.precision == "bf16" else torch.float32,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    reshard = {"default": True, "always": True, "never": False}[job_config.parallelism.fsdp_reshard_after_forward]
    always = job_config.parallelism.fsdp_reshard_after_forward == "always"

    fully_shard(model.tok_embeddings, **config, mp_policy=policy, reshard_after_forward=reshard)
    for layer in model.layers.values():
        ssm: Any = getattr(layer.attention, "ssm", None)
        dynamics = set(ssm.parameters()) if ssm else None
        fully_shard(layer, **config, mp_policy=policy, reshard_after_forward=reshard, ignored_params=dynamics)
    # Needed again at once in the backward pass.
    fully_shard([model.norm, model.output], **config, mp_policy=policy, reshard_after_forward=always)
    fully_shard(model, **config, mp_policy=policy)

    disable_fsdp_gradient_division(model)  # the loss is already divided by the global token count
    if device_here().type == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has neither AVG nor PREMUL_SUM
    logger.info("Applied FSDP2 over mesh %s", mesh)
