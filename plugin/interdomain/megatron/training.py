"""What a training loop on Megatron-Core needs besides the layers.

That is the paper's parameter groups and learning rates, SSM parameters that are computed once a
step, and the pieces of sequences for context parallelism.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from interdomain.model.mixers.interdomain import InterdomainMixer
from interdomain.model.shared_ssm import SharedSSMTensors

# Names of the SSM parameters and of the input norms.
SSM_PARAMETER = re.compile(r"\.self_attention\.core\.(ssm|k_norm|v_norm)\.")


def overrides(lr: float, min_lr: float = 0.0, ssm_lr: float = 1e-3) -> dict:
    """Returns the SSM parameter group: `config_overrides` of get_megatron_optimizer.

    The SSM parameters and input norms have no weight decay and their own learning rate. All other
    parameters decay, vectors too, as in the paper.

    Args:
        lr: The peak learning rate of all other parameters, OptimizerConfig's lr.
        min_lr: Their learning rate after the decay, OptimizerConfig's min_lr.
        ssm_lr: The peak learning rate of the SSM parameters is min(lr, ssm_lr).
    """
    ours = ParamWithNamePredicate("interdomain", lambda p, name: bool(SSM_PARAMETER.search(name)))
    peak = min(lr, ssm_lr)
    # Nothing reads lr_mult as a factor, but up to Megatron-Core 0.18 a loaded checkpoint's groups
    # are told apart only by it and wd_mult.
    settings = {"wd_mult": 0.0, "max_lr": peak, "min_lr": min(min_lr, peak), "lr_mult": peak / lr}
    return {ParamKey(with_name_predicate=ours): settings}


class Schedule(OptimizerParamScheduler):
    """Megatron's schedule with the learning rates of runs under TorchTitan (titan.plan.schedule).

    Megatron gives the first update the rate 0, and the last one a rate above the floor. Here step s
    of a warmup of W steps has (s + 1) / W of the peak, the step after the warmup has the peak, and
    a floor above 0 is the last step's rate.

    Args:
        each: The amount that a training step adds to the schedule's steps; Megatron-LM's script
            counts samples.
        args, kwargs: The arguments of OptimizerParamScheduler.
    """

    def __init__(self, *args: Any, each: int = 1, **kwargs: Any) -> None:
        self.each = each
        super().__init__(*args, **kwargs)

    def get_lr(self, param_group: dict) -> float:
        """Returns the learning rate of a parameter group at the present step.

        Args:
            param_group: The optimizer's parameter group. Its own "min_lr", if there is one, is the
                floor in place of self.min_lr.
        """
        # self.each is one training step in the units of num_steps.
        num_steps = self.num_steps
        decay_steps = self.lr_decay_steps
        # The warmup is one step ahead of Megatron's, and the decay to a floor ends one step
        # earlier. Megatron's formula reads both numbers from self, so they are changed for its
        # call.
        if num_steps < self.lr_warmup_steps:
            self.num_steps += self.each
        if param_group.get("min_lr", self.min_lr):
            self.lr_decay_steps = max(1, decay_steps - self.each)
        lr = super().get_lr(param_group)
        self.num_steps = num_steps
        self.lr_decay_steps = decay_steps
        return lr


class SSMTensorsOnce:
    """Computes SSM parameters once a step. It is a TransformerConfig's `finalize_model_grads_func`.

    It goes backward through the SSM parameters of all micro-batches at once, and then calls
    Megatron's own function. As long as a config has it, mixers in training read what was computed
    from the SSM parameters at the first micro-batch of a step. In the first step each layer is
    computed by itself. The call at its end sees the layers of this rank, and those with the same
    settings are then computed together.

    Args:
        finalize: Megatron's own function.
    Attributes:
        finalize: Megatron's own function.
        mixers: The InterdomainAttention of each layer of this rank that has SSM parameters. It is
            empty in the first step.
        shared: For each InterdomainAttention that has run in this step, the tensors that were
            computed for it and others, and its place among them.
    """

    def __init__(self, finalize: Callable[..., Any]) -> None:
        self.finalize = finalize
        self.mixers: list[Any] = []
        self.shared: dict[Any, tuple[SharedSSMTensors, int]] = {}

    def enter(self, mixer: Any, x: Tensor) -> tuple[Tensor, Any]:
        """Gives a forward pass of a mixer the tensors of this step.

        Args:
            mixer: The InterdomainAttention.
            x: The products that its core reads. The pass must go on from the returned x.
        Returns:
            x, and the core's tensors of SSM parameters (`Mixer.ssm_tensors`). None instead of
            these: the mixer computes its own.
        """
        if mixer not in self.shared:
            # Only interdomain attention has such tensors. A layer that is recomputed goes forward
            # without gradients first, and no other pass could go backward through those tensors.
            if not torch.is_grad_enabled() or not isinstance(mixer.core, InterdomainMixer):
                return x, None
            # Compute the tensors of this layer and of all others with the same settings.
            alike = [other for other in self.mixers if other.whole.mixer == mixer.whole.mixer]
            if not alike:
                alike = [mixer]
            shared = SharedSSMTensors(mixer.core.ssm_tensors([other.core for other in alike]))
            for i, other in enumerate(alike):
                self.shared[other] = (shared, i)
        shared, i = self.shared[mixer]
        return x, shared.layers[i]

    def __call__(self, model: list[Any], *args: Any, **named: Any) -> Any:
        """Goes backward through the SSM parameters, and calls Megatron's function.

        Args:
            model: The modules of this rank, one for each virtual stage.
            args, named: Megatron's other arguments.
        """
        # The layers of this rank with SSM parameters. In the next step `enter` computes those with
        # the same settings together.
        self.mixers = []
        for chunk in model:
            for module in chunk.modules():
                if isinstance(getattr(module, "core", None), InterdomainMixer):
                    self.mixers.append(module)
        # self.shared has an entry for each layer. Layers that were computed together have the same
        # SharedSSMTensors, which goes backward once, with the gradients of all micro-batches.
        groups = dict.fromkeys(shared for shared, _ in self.shared.values())
        for shared in groups:
            shared.backward()
        self.shared.clear()
        return self.finalize(model, *args, **named)


def contiguous(batch: dict[str, Any], *_: Any, cp_group: Any = None, **__: Any) -> dict[str, Any]:
    """Cuts this rank's piece from a batch, in place of Megatron's `get_batch_on_this_cp_rank`.

    Megatron's own gives a rank two pieces, the n-th from either end, because softmax works more on
    later tokens. Here a state is handed from piece to piece, and each token costs the same. Packed
    documents may begin and end anywhere.

    Args:
        batch: Tensors [B, S] by Megatron's names: tokens, labels, loss_mask and position_ids are
            cut.
        cp_group: The context-parallel ranks. None: Megatron's.
    Returns:
        The batch with tensors [B, S / ranks].
    Raises:
        ValueError: The ranks do not divide S.
    """
    group: Any = cp_group or parallel_state.get_context_parallel_group()
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        x = batch.get(name)
        if x is None:
            continue
        if x.shape[1] % group.size():
            raise ValueError(
                f"{x.shape[1]} tokens cannot be cut into {group.size()} equal pieces. Set a "
                "sequence length that the context-parallel ranks divide."
            )
        batch[name] = x.chunk(group.size(), dim=1)[group.rank()].contiguous()
    return batch
