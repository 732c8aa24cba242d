"""Activation checkpointing, compilation and FSDP2 around the model: one path for one rank, many, replicas and both.

Order: checkpointing wraps the bare block, torch.compile the wrapped block, FSDP2 the compiled block.
"""

import warnings

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from .device import device_here
from .host import SAVED_OPS, TORCH_DTYPE_MAP, apply_ac, apply_compile, disable_fsdp_gradient_division, logger

# What selective checkpointing saves beside torchtitan's own list: recomputing the scan would cost more than all it saves.
SCAN_OPS = {torch.ops.interdomain.scan.default, torch.ops.interdomain.linear_scan.default}


def parallelize(model, parallel_dims, job_config):
    compiled = job_config.compile.enable and "model" in job_config.compile.components
    if job_config.activation_checkpoint.mode != "none":
        apply_ac(
            model,
            job_config.activation_checkpoint,
            model_compile_enabled=compiled,
            op_sac_save_list=SAVED_OPS | SCAN_OPS,
            base_folder=job_config.job.dump_folder,
        )
    if compiled:
        apply_compile(model, job_config.compile)
    shard(model, _mesh(parallel_dims), job_config)
    return model


def _mesh(parallel_dims) -> DeviceMesh:
    """(replicas, shards) or (shards,): of size 1 where there is nothing to shard, so that one rank takes the same path.

    TorchTitan's DDP is not used: it averages gradients that its loss has already normalised by the global token count.
    """
    if parallel_dims.dp_shard > 1:
        return parallel_dims.get_mesh(["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"])
    if parallel_dims.dp_replicate_enabled:
        return init_device_mesh(
            device_here().type, (parallel_dims.dp_replicate, 1), mesh_dim_names=("dp_replicate", "fsdp")
        )
    return init_device_mesh(device_here().type, (1,), mesh_dim_names=("fsdp",))


def shard(model, mesh: DeviceMesh, job_config) -> None:
    """FSDP2: one group per block, one float32 group for the dynamics of all blocks."""
    training = job_config.training
    reduce_dtype = TORCH_DTYPE_MAP[training.mixed_precision_reduce]
    config = {"mesh": mesh}
    if training.enable_cpu_offload:
        config["offload_policy"] = CPUOffloadPolicy()
    # The blocks must not cast their inputs: the dynamics reach them as float32 tensors.
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=reduce_dtype,
        cast_forward_inputs=False,
    )
    reshard = {"default": True, "always": True, "never": False}[job_config.parallelism.fsdp_reshard_after_forward]
    always = job_config.parallelism.fsdp_reshard_after_forward == "always"

    dynamics = [layer.attention.ssm for layer in model.layers.values() if hasattr(layer.attention, "ssm")]
    if dynamics:
        # One all-gather and one reduce-scatter for all layers: the dynamics are small and needed throughout. They are handed
        # out as views, which nothing writes into: a copy of each would be a kernel per layer and parameter.
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(FSDPSSMDynamics.* returned a view tensor")
        float32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(dynamics, **config, mp_policy=float32, reshard_after_forward=False)
    fully_shard(model.tok_embeddings, **config, mp_policy=policy, reshard_after_forward=reshard)
    for layer in model.layers.values():
        fully_shard(layer, **config, mp_policy=policy, reshard_after_forward=reshard)
    # Needed again at once in the backward pass.
    fully_shard([model.norm, model.output], **config, mp_policy=policy, reshard_after_forward=always)
    fully_shard(model, **config, mp_policy=policy)

    disable_fsdp_gradient_division(model)  # the loss is already divided by the global token count
    if device_here().type == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has neither AVG nor PREMUL_SUM
    logger.info("Applied FSDP2 over mesh %s", dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)))
