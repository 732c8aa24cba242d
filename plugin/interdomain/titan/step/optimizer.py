"""AdamW with a group of its own for the SSM parameters, and a schedule with one floor (paper, optimizer and schedule); Muon for
the matrices where a run asks for it."""

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
from ..settings.schema import Optimizer as OptimizerSettings
from .guard import StepGuard
from .muon import Muon


class GroupedOptimizers(OptimizersContainer):
    """AdamW or Adam for each part of a model, and Muon for its matrices if a run asks for it.

    Groups are named `main` (its learning rate is logged as "lr"), `ssm` (input norms and SSM parameters, if there are any) and
    `matrices` (Muon's).

    Hyperparameters belong to the configuration, not to the checkpoint: a changed learning rate takes effect on resume.
    A step that is not finite on any rank leaves weights and state as they are (`guard`).

    Args:
        settings: The section [optimizer].
    """

    def __init__(self, model_parts: list[nn.Module], settings: OptimizerSettings) -> None:
        kwargs = {
            "lr": settings.lr,
            "betas": (settings.beta1, settings.beta2),
            "eps": settings.eps,
            "weight_decay": settings.weight_decay,
            "fused": settings.implementation == "fused",
            "foreach": settings.implementation == "foreach",
        }
        optimizer = torch.optim.Adam if settings.name == "Adam" else torch.optim.AdamW
        self.step_guard = StepGuard()
        self.rates: dict[str, float] = {}  # learning rates of the last step, by group
        # The same on all stages of a pipeline, whatever parameters they have.
        self.names = ("main", "ssm", "matrices") if settings.name == "Muon" else ("main", "ssm")
        # `model_parts[i]` belongs to `optimizers[i]`; TorchTitan zips the two lists.
        self.model_parts = []
        self.optimizers = []
        for model in model_parts:
            parameters: dict[str, list[Any]] = {name: [] for name in self.names}
            for name, p in model.named_parameters():
                if p.requires_grad:
                    parameters[group_of(clean_name(name), p, settings.name)].append(p)
            groups = []
            if parameters["main"]:
                groups.append({"params": parameters["main"], "name": "main"})
            if parameters["ssm"]:
                rate = min(settings.lr, settings.ssm_lr)
                ssm = {
                    "params": parameters["ssm"],
                    "name": "ssm",
                    "lr": rate,
                    "weight_decay": settings.ssm_weight_decay,
                }
                groups.append(ssm)
            self.optimizers.append(optimizer(groups, **kwargs))
            self.model_parts.append(model)
            if parameters.get("matrices"):
                muon = Muon(
                    [{"params": parameters["matrices"], "name": "matrices"}],
                    lr=settings.lr,
                    weight_decay=settings.weight_decay,
                    momentum=settings.momentum,
                    # So scaled, a change is as large as AdamW's: one learning rate and weight decay serve both.
                    adjust_lr_fn="match_rms_adamw",
                )
                self.optimizers.append(muon)
                self.model_parts.append(model)
        self._post_init([p for group in self.groups for p in group["params"]], kwargs)

    def step(self, skip: Tensor | None = None) -> None:
        """Takes a step.

        Args:
            skip: 1.0 on the device for a step that changes nothing (`StepGuard.decide`).
        """
        # The rates of this step: by the time that metrics are logged, the schedule has moved on to the next.
        self.rates = {group["name"]: group["lr"] for group in self.groups}
        if self.optimizers[0].defaults["fused"]:  # AdamW's, and Muon here decides as it does
            for optimizer in self.optimizers:
                optimizer.found_inf = skip
        elif (
            skip is not None and skip.item()
        ):  # only the fused implementation can decide on the device
            return
        super().step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        ours = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.groups
        ]
        super().load_state_dict(state_dict)
        for group, hyperparameters in zip(self.groups, ours, strict=True):
            group.update(hyperparameters)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all model parts."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]


class GroupedSchedulers(LRSchedulersContainer):
    """A LambdaLR per optimizer with one factor per group. State: only the step; rates follow from the configuration.

    Args:
        settings: The section [lr_scheduler], ours or TorchTitan's with the same values.
        steps: Steps of the run.
    """

    schedulers: list[Any]  # of LambdaLR

    def __init__(self, optimizers: Iterable[Optimizer], settings: Any, steps: int) -> None:
        self.schedulers = []
        for optimizer in optimizers:
            factors = []
            for group in optimizer.param_groups:
                factors.append(
                    multiple_of_peak(
                        settings, group["lr"], steps=steps, warmup=settings.warmup_steps
                    )
                )
            self.schedulers.append(LambdaLR(optimizer, factors))

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.schedulers[0].last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for scheduler in self.schedulers:
            scheduler.last_epoch = state_dict["last_epoch"]
            groups = scheduler.optimizer.param_groups
            for group, peak, factor in zip(
                groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
            ):
                group["lr"] = peak * factor(scheduler.last_epoch)
