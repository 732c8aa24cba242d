"""What a training loop on Megatron-Core takes beside the layers: the recipe of the paper, SSM parameters once a step, pieces
of sequences for context parallelism."""

import re
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from interdomain.model.dynamics import SharedDynamics
from interdomain.model.mixers.interdomain import InterdomainMixer

SSM_PARAMETER = re.compile(r"\.self_attention\.core\.(ssm|k_norm|v_norm)\.")


def overrides(lr: float, min_lr: float = 0.0, ssm_lr: float = 1e-3) -> dict:
    """`config_overrides` of get_megatron_optimizer, whose OptimizerConfig has the same lr and min_lr.

    The SSM parameters and input norms have no weight decay and their own learning rate. All other parameters decay, vectors
    too, as in the paper.
    """
    ours = ParamWithNamePredicate("interdomain", lambda p, name: bool(SSM_PARAMETER.search(name)))
    peak = min(lr, ssm_lr)
    # Nothing reads lr_mult, but up to Megatron-Core 0.18 a loaded checkpoint's groups are told apart by it and wd_mult alone.
    settings = {"wd_mult": 0.0, "max_lr": peak, "min_lr": min(min_lr, peak), "lr_mult": peak / lr}
    return {ParamKey(with_name_predicate=ours): settings}


class Schedule(OptimizerParamScheduler):
    """Megatron's schedule with the learning rates that TorchTitan's runs have (titan.plan.schedule).

    Megatron gives the first update the rate 0, and the last one a rate above the floor. Here step s of a warmup of W steps has
    (s + 1) / W of the peak, the step after the warmup has the peak, and a floor above 0 is the last step's rate.

    Args:
        each: The amount that a step of training adds to the schedule's steps; Megatron-LM's script counts samples.
    """

    def __init__(self, *args: Any, each: int = 1, **kwargs: Any) -> None:
        self.each = each
        super().__init__(*args, **kwargs)

    def get_lr(self, param_group: dict) -> float:
        taken, decay = self.num_steps, self.lr_decay_steps
        if taken < self.lr_warmup_steps:
            self.num_steps += self.each
        if param_group.get("min_lr", self.min_lr):
            self.lr_decay_steps = max(1, decay - self.each)
        try:
            return super().get_lr(param_group)
        finally:
            self.num_steps = taken
            self.lr_decay_steps = decay


class DynamicsOnce:
    """A TransformerConfig's `finalize_model_grads_func`: one backward pass through the dynamics, then Megatron's own function.

    While a config has it, mixers in training read dynamics that are computed once a step: in the first step each for itself,
    later those of all layers of the rank together, which the call of the first step has seen.
    """

    def __init__(self, finalize: Callable[..., Any]) -> None:
        self.finalize = finalize
        self.mixers: list[Any] = []
        self.shared: dict[
            Any, tuple[SharedDynamics, int]
        ] = {}  # by mixer; with its place among the layers

    def enter(self, mixer: Any, x: Tensor) -> tuple[Tensor, Any]:
        """Returns x and the dynamics for a pass of the mixer that goes on from x. None: the mixer computes its own."""
        if mixer not in self.shared:
            # Recomputed layers go forward without gradients first, and in a first step there is nothing yet.
            if not torch.is_grad_enabled() or not isinstance(mixer.core, InterdomainMixer):
                return x, None
            alike = [other for other in self.mixers if other.whole.mixer == mixer.whole.mixer] or [
                mixer
            ]
            shared = SharedDynamics(mixer.core.dynamics([other.core for other in alike]))
            for i, other in enumerate(alike):
                self.shared[other] = shared, i
        shared, i = self.shared[mixer]
        return x, shared.layers[i]

    def __call__(self, model: list[Any], *args: Any, **named: Any) -> Any:
        modules = [module for chunk in model for module in chunk.modules()]
        self.mixers = [
            module
            for module in modules
            if isinstance(getattr(module, "core", None), InterdomainMixer)
        ]
        for shared in dict.fromkeys(shared for shared, _ in self.shared.values()):
            shared.backward()
        self.shared.clear()
        return self.finalize(model, *args, **named)


def contiguous(batch: dict[str, Any], *_: Any, cp_group: Any = None, **__: Any) -> dict[str, Any]:
    """This rank's piece of a batch [B, S], each [B, S / ranks]; takes the place of Megatron's `get_batch_on_this_cp_rank`.

    Megatron's own gives a rank two pieces, the n-th from either end, because softmax works more on later tokens.
    A state is handed from piece to piece, and each token costs the same. Packed documents may begin and end anywhere.

    Raises: ValueError for a length that the ranks do not divide.
    """
    group: Any = cp_group or parallel_state.get_context_parallel_group()
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        x = batch.get(name)
        if x is None:
            continue
        if x.shape[1] % group.size():
            raise ValueError(
                f"{x.shape[1]} tokens cannot be cut into {group.size()} equal pieces. Set a sequence length that the "
                "context-parallel ranks divide."
            )
        batch[name] = x.chunk(group.size(), dim=1)[group.rank()].contiguous()
    return batch
