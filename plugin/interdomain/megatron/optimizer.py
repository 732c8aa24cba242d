"""The recipe of the paper under Megatron: the parameter group of the dynamics and input norms, and the schedule."""

import re
from typing import Any

from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

SSM_PARAMETER = re.compile(r"\.self_attention\.core\.(ssm|k_norm|v_norm)\.")


def overrides(lr: float, min_lr: float = 0.0, ssm_lr: float = 1e-3) -> dict:
    """`config_overrides` of get_megatron_optimizer, in whose OptimizerConfig stand the same lr and min_lr.

    The group has no weight decay and its own learning rate. All other parameters decay, vectors too, as in the paper.
    """
    ours = ParamWithNamePredicate("interdomain", lambda p, name: bool(SSM_PARAMETER.search(name)))
    peak = min(lr, ssm_lr)
    # Nothing reads lr_mult, but up to Megatron-Core 0.18 a loaded checkpoint's groups are told apart by it and wd_mult alone.
    rates = {"max_lr": peak, "min_lr": min(min_lr, peak), "lr_mult": peak / lr}
    return {ParamKey(with_name_predicate=ours): {"wd_mult": 0.0, **rates}}


class Schedule(OptimizerParamScheduler):
    """Megatron's schedule with the learning rates that TorchTitan's runs have (titan.plan.schedule).

    Megatron gives the first update the rate 0, and the last one a rate above the floor. Here step s of a warmup of W steps has
    (s + 1) / W of the peak, the step after the warmup has the peak, and a floor above 0 is the last step's rate.

    Args:
        each: the amount that a step of training adds to the schedule's steps; Megatron-LM's script counts samples.
    """

    def __init__(self, *args: Any, each: int = 1, **kwargs: Any) -> None:
        self.each = each
        super().__init__(*args, **kwargs)

    def get_lr(self, param_group: dict) -> float:
        taken, decay = self.num_steps, self.lr_decay_steps
        self.num_steps += self.each if taken < self.lr_warmup_steps else 0
        self.lr_decay_steps = max(1, decay - (self.each if param_group.get("min_lr", self.min_lr) else 0))
        try:
            return super().get_lr(param_group)
        finally:
            self.num_steps, self.lr_decay_steps = taken, decay
