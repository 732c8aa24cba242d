"""The optimizer's group of the dynamics and the input norms: no weight decay, its own learning rate (paper, optimizer)."""

import re

from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate

SSM_PARAMETER = re.compile(r"\.self_attention\.core\.(ssm|k_norm|v_norm)\.")


def overrides(lr: float, min_lr: float = 0.0, ssm_lr: float = 1e-3) -> dict:
    """`config_overrides` of get_megatron_optimizer, in whose OptimizerConfig stand the same lr and min_lr.

    Given alone, all other parameters decay, as in the paper; Megatron's own rule, that vectors do not, can stand beside it:
    `{**get_standard_config_overrides(config), **overrides(...)}`.
    """
    ours = ParamWithNamePredicate("interdomain", lambda p, name: bool(SSM_PARAMETER.search(name)))
    peak = min(lr, ssm_lr)
    # Nothing reads lr_mult, but up to Megatron-Core 0.18 a loaded checkpoint's groups are told apart by it and wd_mult alone.
    rates = {"max_lr": peak, "min_lr": min(min_lr, peak), "lr_mult": peak / lr}
    return {ParamKey(with_name_predicate=ours): {"wd_mult": 0.0, **rates}}
