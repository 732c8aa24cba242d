"""A training loop on Megatron-Core only, which docs/megatron.md describes."""

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from interdomain.megatron import (
    Schedule,
    SSMTensorsOnce,
    block_spec,
    contiguous,
    overrides,
    transformer_config,
)

# Megatron's default form, dp_reshardable, saves float32 parameters of the distributed optimizer and
# cannot load them.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def gpt_model(config, spec, megatron):
    return GPTModel(
        megatron,
        block_spec(megatron, spec),
        config.vocab_size,
        config.max_seq_len,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="none",
        share_embeddings_and_output_weights=False,
    )


class Run:
    """A model, its optimizer and its schedule on the groups of `parallel_state`.

    Args:
        megatron_config: A function with the arguments of `transformer_config`.
        make_model: A function with the arguments of `gpt_model`.
        settings: More settings of TransformerConfig.
    """

    def __init__(
        self,
        config,
        spec,
        *,
        lr,
        min_lr,
        ssm_lr,
        steps,
        warmup_steps,
        micro_batch,
        bf16=False,
        megatron_config=transformer_config,
        make_model=gpt_model,
        **settings,
    ):
        self.step = 0
        self.config = config
        self.micro_batch = micro_batch
        dtype = torch.bfloat16 if bf16 else torch.float32
        megatron = megatron_config(
            config,
            bf16=bf16,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            use_cpu_initialization=True,
            tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
            pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
            context_parallel_size=parallel_state.get_context_parallel_world_size(),
            **settings,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        torch.manual_seed(1)
        model = make_model(config, spec, megatron)
        self.model = Float16Module(megatron, model) if bf16 else model
        gradients = DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True
        )
        self.ddp = DistributedDataParallel(megatron, gradients, self.model)

        # The recipe of the paper.
        optimizer = OptimizerConfig(
            lr=lr,
            min_lr=min_lr,
            adam_beta1=0.9,
            adam_beta2=0.95,
            weight_decay=0.1,
            clip_grad=1.0,
            use_distributed_optimizer=True,
            bf16=bf16,
            params_dtype=dtype,
        )
        groups = overrides(lr, min_lr, ssm_lr)
        self.optimizer = get_megatron_optimizer(optimizer, [self.ddp], config_overrides=groups)
        self.schedule = Schedule(
            self.optimizer,
            init_lr=0.0,
            max_lr=lr,
            min_lr=min_lr,
            lr_warmup_steps=warmup_steps,
            lr_decay_steps=max(steps, warmup_steps + 1),
            lr_decay_style="cosine",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=1,
            wd_incr_style="constant",
        )
        megatron.finalize_model_grads_func = SSMTensorsOnce(finalize_model_grads)
        megatron.grad_scale_func = self.optimizer.scale_loss

    def gradients(self, batches):
        """Computes gradients of this rank's micro-batches [B, S + 1].

        Returns the mean loss of all ranks on a pipeline's last stage, None on the others.
        """
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=[self.ddp],
            num_microbatches=len(batches),
            seq_length=self.config.max_seq_len,
            micro_batch_size=self.micro_batch,
            forward_only=False,
        )
        if not parallel_state.is_pipeline_last_stage():
            return None
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        loss = torch.stack(losses).mean() / group.size()
        dist.all_reduce(loss, group=group)
        return loss.item()

    def update(self):
        """Updates the parameters, and returns the norm of the gradients."""
        _, norm, _ = self.optimizer.step()
        self.schedule.step(1)
        self.step += 1
        return norm

    def save(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save(self._state(loading=False), str(folder))

    def load(self, checkpoint):
        """Continues from a checkpoint, which may be of another layout of ranks."""
        state = dist_checkpointing.load(self._state(loading=True), str(checkpoint))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self.schedule.step(self.step)

    def load_weights(self, checkpoint):
        model = self.model.sharded_state_dict(metadata=METADATA.copy())
        self.model.load_state_dict(
            dist_checkpointing.load({"model": model}, str(checkpoint))["model"]
        )
        self.optimizer.reload_model_params()

    def _state(self, loading):
        model = self.model.sharded_state_dict(metadata=METADATA.copy())
        optimizer = self.optimizer.sharded_state_dict(
            model, is_loading=loading, metadata=METADATA.copy()
        )
        return {"model": model, "optimizer": optimizer, "step": self.step}


def forward(batches, model):
    tokens = next(batches)
    batch = contiguous({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
    return model(batch["tokens"], None, None, labels=batch["labels"]), mean_loss


def mean_loss(losses):
    """Returns the loss to differentiate, which Megatron multiplies by its ranks, and the mean."""
    loss = losses.float().mean()
    return loss / parallel_state.get_context_parallel_world_size(), loss.detach()
