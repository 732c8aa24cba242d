"""AdamW with a group of its own for the SSM parameters, and a schedule with one floor (paper, optimizer and schedule)."""

import functools
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from interdomain.model.initialize import clean_name

from ..host import LRSchedulersContainer, OptimizersContainer
from ..plan.schedule import multiple_of_peak
from .guard import Guard

# Input norms (scales and biases) and the dynamics Delta, A, C, c. By name: tensor attributes do not survive sharding.
SSM_PARAMETER = re.compile(r"\.attention\.(ssm|k_norm|v_norm)\.")


class GroupedOptimizers(OptimizersContainer):
    """Groups are named `main` (its learning rate is logged as "lr") and `ssm` (input norms and dynamics, where there are any).

    Hyperparameters belong to the configuration, not to the checkpoint: a changed learning rate takes effect on resume.
    A step that is not finite on any rank leaves weights and state as they are (`guard`).
    """

    def __init__(self, model_parts: list[nn.Module], config: Any) -> None:
        """config: settings [optimizer]."""
        kwargs = {
            "lr": config.lr,
            "betas": (config.beta1, config.beta2),
            "eps": config.eps,
            "weight_decay": config.weight_decay,
            "fused": config.implementation == "fused",
            "foreach": config.implementation == "foreach",
        }
        ssm = {"name": "ssm", "lr": min(config.lr, config.ssm_lr), "weight_decay": config.ssm_weight_decay}
        optimizer = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}[config.name]
        self.model_parts, self.guard = model_parts, Guard()
        self.rates: dict[str, float] = {}  # by group, of the last step
        self.optimizers = []
        for model in model_parts:
            named = [(clean_name(name), p) for name, p in model.named_parameters() if p.requires_grad]
            of_ssm = [p for name, p in named if SSM_PARAMETER.search(name)]
            others = [p for name, p in named if not SSM_PARAMETER.search(name)]
            groups = [{"params": others, "name": "main"}, {"params": of_ssm, **ssm}]
            self.optimizers.append(optimizer([group for group in groups if group["params"]], **kwargs))
        self._post_init([p for group in self.groups for p in group["params"]], kwargs)

    def step(self, skip: Tensor | None = None) -> None:
        """skip: 1.0 on the device for a step that changes nothing (`Guard.verdict`)."""
        # Of the step now taken: by the time that metrics are logged, the schedule has moved on to the next.
        self.rates = {group["name"]: group["lr"] for group in self.groups}
        if self.optimizers[0].defaults["fused"]:
            for optimizer in self.optimizers:
                optimizer.found_inf = skip
        elif skip is not None and skip.item():  # only the fused implementation can decide on the device
            return
        super().step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        ours = [{name: value for name, value in group.items() if name != "params"} for group in self.groups]
        super().load_state_dict(state_dict)
        for group, hyperparameters in zip(self.groups, ours, strict=True):
            group.update(hyperparameters)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all model parts."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]


class GroupedSchedulers(LRSchedulersContainer):
    """A LambdaLR per optimizer with one factor per group. State: the step alone; rates follow from the configuration."""

    schedulers: list[LambdaLR]

    def __init__(self, optimizers: Iterable[Optimizer], config: Any, steps: int) -> None:
        """config: settings [lr_scheduler]. steps: of the run."""
        factor = functools.partial(multiple_of_peak, config, steps=steps, warmup=config.warmup_steps)
        self.schedulers = [LambdaLR(o, [factor(group["lr"]) for group in o.param_groups]) for o in optimizers]

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.schedulers[0].last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for scheduler in self.schedulers:
            step = scheduler.last_epoch = state_dict["last_epoch"]
            rates = [peak * factor(step) for peak, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
            for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
