"""AdamW with a group of its own for the SSM parameters, and a schedule with one floor (paper, optimizer and schedule); Muon for
the matrices where a run asks for it."""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from interdomain.model.initialize import clean_name

from ..host import LRSchedulersContainer, OptimizersContainer
from ..plan.parameter_groups import group_of
from ..plan.schedule import multiple_of_peak
from .guard import StepGuard
from .muon import Muon


class GroupedOptimizers(OptimizersContainer):
    """Groups are named `main` (its learning rate is logged as "lr"), `ssm` (input norms and dynamics, where there are any) and
    `matrices` (of Muon).

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
        options = {"ssm": {"lr": min(config.lr, config.ssm_lr), "weight_decay": config.ssm_weight_decay}}
        optimizer = torch.optim.Adam if config.name == "Adam" else torch.optim.AdamW
        self.step_guard = StepGuard()
        self.rates: dict[str, float] = {}  # by group, of the last step
        # The same on all stages of a pipeline, whatever parameters they have.
        self.names = ("main", "ssm", "matrices") if config.name == "Muon" else ("main", "ssm")
        self.model_parts, self.optimizers = [], []  # of each optimizer its part: TorchTitan goes through both together
        for model in model_parts:
            groups: dict[str, list[Any]] = {name: [] for name in self.names}
            for name, p in model.named_parameters():
                if p.requires_grad:
                    groups[group_of(clean_name(name), p, config.name)].append(p)
            matrices = groups.pop("matrices", [])
            grouped = [{"params": own, "name": name, **options.get(name, {})} for name, own in groups.items() if own]
            self.optimizers.append(optimizer(grouped, **kwargs))
            if matrices:
                # So scaled, a change is as large as AdamW's: one learning rate and weight decay serve both.
                muon = {"lr": config.lr, "weight_decay": config.weight_decay, "momentum": config.momentum}
                group: Any = {"params": matrices, "name": "matrices"}
                self.optimizers.append(Muon([group], **muon, adjust_lr_fn="match_rms_adamw"))
            self.model_parts += [model] * (len(self.optimizers) - len(self.model_parts))
        self._post_init([p for group in self.groups for p in group["params"]], kwargs)

    def step(self, skip: Tensor | None = None) -> None:
        """skip: 1.0 on the device for a step that changes nothing (`Guard.verdict`)."""
        # Of the step now taken: by the time that metrics are logged, the schedule has moved on to the next.
        self.rates = {group["name"]: group["lr"] for group in self.groups}
        if self.optimizers[0].defaults["fused"]:  # AdamW's, and Muon here decides as it does
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
