"""AdamW with a group of its own for the SSM parameters, and a schedule with one floor (paper, optimizer and schedule)."""

import re

import torch
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from interdomain.model.initialize import clean_name

from .guard import Guard
from .host import LRSchedulersContainer, OptimizersContainer
from .schedule import multiple_of_peak

# Input norms (scales and biases) and the dynamics Delta, A, C, c. By name: tensor attributes do not survive sharding.
SSM_PARAMETER = re.compile(r"\.attention\.(ssm|k_norm|v_norm)\.")


class GroupedOptimizers(OptimizersContainer):
    """Group 0 is `main` (its learning rate is logged as "lr"). The others are `ssm`: the input norms, which FSDP2 shards,
    and the dynamics, which are whole on every rank, with the same settings; left out where a model has none.

    Hyperparameters belong to the configuration, not to the checkpoint: a changed learning rate takes effect on resume.
    A step that is not finite on any rank leaves weights and state as they are (`guard`).
    """

    def __init__(self, model_parts, optimizer_cls, kwargs, *, ssm_lr: float, ssm_weight_decay: float) -> None:
        self.model_parts = model_parts
        self.guard = Guard()
        self.optimizers = []
        everything = []
        for model in model_parts:
            named = [(clean_name(name), p) for name, p in model.named_parameters() if p.requires_grad]
            main = [p for name, p in named if not SSM_PARAMETER.search(name)]
            ssm = [p for name, p in named if SSM_PARAMETER.search(name)]
            groups = [{"params": main, "name": "main"}]
            own = {"name": "ssm", "lr": min(kwargs["lr"], ssm_lr), "weight_decay": ssm_weight_decay}
            for sharded in (True, False):  # PyTorch's multi-tensor functions take no mixture
                if part := [p for p in ssm if isinstance(p, DTensor) is sharded]:
                    groups.append({"params": part, **own})
            self.optimizers.append(optimizer_cls(groups, **kwargs))
            everything += main + ssm
        self._validate_length(len(model_parts))
        self._post_init(everything, kwargs)

    def step(self, skip: torch.Tensor | None = None) -> None:
        """skip: 1.0 on the device for a step that changes nothing (`Guard.verdict`)."""
        # Of the step now taken: by the time that metrics are logged, the schedule has moved on to the next.
        self.rates = {group["name"]: group["lr"] for group in self.optimizers[0].param_groups}
        if not self.optimizers[0].defaults["fused"]:
            if skip is not None and skip.item():  # only the fused implementation can decide on the device
                return
        else:
            for optimizer in self.optimizers:
                optimizer.found_inf = skip
        super().step()

    def load_state_dict(self, state_dict) -> None:
        kept = [[_hyperparameters(group) for group in o.param_groups] for o in self.optimizers]
        super().load_state_dict(state_dict)
        for optimizer, groups in zip(self.optimizers, kept, strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)


def _hyperparameters(group: dict) -> dict:
    return {name: value for name, value in group.items() if name != "params"}


def build_optimizers(model_parts, config) -> GroupedOptimizers:
    kwargs = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
        "fused": config.implementation == "fused",
        "foreach": config.implementation == "foreach",
    }
    cls = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}[config.name]
    return GroupedOptimizers(model_parts, cls, kwargs, ssm_lr=config.ssm_lr, ssm_weight_decay=config.ssm_weight_decay)


class GroupedSchedulers(LRSchedulersContainer):
    """A LambdaLR per optimizer with one factor per group. State: the step alone; rates follow from the configuration."""

    def __init__(self, optimizers, factor) -> None:
        """factor(peak_lr) -> (step -> multiple of the peak)."""
        self.schedulers = [
            LambdaLR(optimizer, [factor(group["lr"]) for group in optimizer.param_groups]) for optimizer in optimizers
        ]

    def state_dict(self) -> dict:
        return {"last_epoch": self.schedulers[0].last_epoch}

    def load_state_dict(self, state_dict: dict) -> None:
        for scheduler in self.schedulers:
            scheduler.last_epoch = state_dict["last_epoch"]
            rates = [
                base * factor(scheduler.last_epoch)
                for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            ]
            for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            scheduler._last_lr = rates


def build_lr_schedulers(optimizers, config, training_steps: int) -> GroupedSchedulers:
    def factor(peak: float):
        return multiple_of_peak(config, peak, steps=training_steps, warmup=config.warmup_steps)

    return GroupedSchedulers(optimizers, factor)
