"""The optimizers of a run and their learning rate schedule.

AdamW trains all parameters. The SSM parameters form a group of their own, with a lower learning
rate and without weight decay (paper, "Optimizer and schedule"). With `optimizer.name = Muon`, Muon
trains the matrices of attention and feed-forward layers, and AdamW the rest.
"""

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
    """AdamW or Adam for each part of a model, and Muon for its matrices if the settings say so.

    The parameter groups are `main`, `ssm` (input norms and SSM parameters, if the model has any)
    and `matrices` (Muon). TorchTitan logs the learning rate of the first group, `main`, as "lr".

    Hyperparameters come from the configuration, not from the checkpoint: a changed learning rate
    takes effect on resume. The step guard decides which steps change nothing.

    Attributes:
        step_guard: Decides which updates are skipped.
        rates: Learning rates of the last step, by group.
        names: Names of all groups that a model can have, the same on all stages of a pipeline.
        optimizers: One or two per model part.
        model_parts: `model_parts[i]` has the parameters of `optimizers[i]`: TorchTitan zips the two
            lists. With Muon, each part stands there twice.
    """

    def __init__(self, model_parts: list[nn.Module], settings: OptimizerSettings) -> None:
        """Makes the optimizers.

        Args:
            model_parts: This rank's stages of the pipeline; without one, the model.
            settings: The section [optimizer].
        """
        self.step_guard = StepGuard()
        self.rates: dict[str, float] = {}
        self.names = ["main", "ssm"]
        if settings.name == "Muon":
            self.names.append("matrices")
        adam = torch.optim.AdamW
        if settings.name == "Adam":
            adam = torch.optim.Adam
        adam_options = {
            "lr": settings.lr,
            "betas": (settings.beta1, settings.beta2),
            "eps": settings.eps,
            "weight_decay": settings.weight_decay,
            "fused": settings.implementation == "fused",
            "foreach": settings.implementation == "foreach",
        }

        self.model_parts = []
        self.optimizers = []
        for model in model_parts:
            # Sort the parameters into groups by their names.
            parameters: dict[str, list[Any]] = {name: [] for name in self.names}
            for name, p in model.named_parameters():
                if p.requires_grad:
                    parameters[group_of(clean_name(name), p, settings.name)].append(p)

            # AdamW takes two groups. A stage of a pipeline may lack one of them.
            groups = []
            if parameters["main"]:
                groups.append({"params": parameters["main"], "name": "main"})
            if parameters["ssm"]:
                ssm_group = {
                    "params": parameters["ssm"],
                    "name": "ssm",
                    "lr": min(settings.lr, settings.ssm_lr),
                    "weight_decay": settings.ssm_weight_decay,
                }
                groups.append(ssm_group)
            self.optimizers.append(adam(groups, **adam_options))
            self.model_parts.append(model)

            # Muon takes the matrices.
            if parameters.get("matrices"):
                muon = Muon(
                    [{"params": parameters["matrices"], "name": "matrices"}],
                    lr=settings.lr,
                    weight_decay=settings.weight_decay,
                    momentum=settings.momentum,
                    # Scales updates to the size of AdamW's, so that both share one learning rate.
                    adjust_lr_fn="match_rms_adamw",
                )
                self.optimizers.append(muon)
                self.model_parts.append(model)
        self._post_init([p for group in self.groups for p in group["params"]], adam_options)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self, skip: Tensor | None = None) -> None:
        """Updates the parameters.

        Args:
            skip: 1.0 on the device for an update that changes nothing (`StepGuard.decide`). None:
                under TorchTitan's own trainer, no update is skipped.
        """
        # When metrics are logged, the schedule has already moved on to the next step's rates.
        self.rates = {group["name"]: group["lr"] for group in self.groups}

        is_fused = self.optimizers[0].defaults["fused"]
        if is_fused:
            # Fused AdamW reads `found_inf` on the device, and so does this package's Muon.
            for optimizer in self.optimizers:
                optimizer.found_inf = skip
        elif skip is not None and skip.item():
            # The other implementations cannot skip on the device: the host has to wait and decide.
            return
        super().step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the optimizers' state, and keeps the hyperparameters of the configuration.

        Args:
            state_dict: The state of all optimizers, as TorchTitan's `state_dict` returns it.
        """
        hyperparameters = []
        for group in self.groups:
            hyperparameters.append({name: x for name, x in group.items() if name != "params"})
        # Loading replaces the dicts of the groups, so they are read again.
        super().load_state_dict(state_dict)
        for group, configured in zip(self.groups, hyperparameters, strict=True):
            group.update(configured)


class GroupedSchedulers(LRSchedulersContainer):
    """A LambdaLR for each optimizer, with a factor for each parameter group.

    The state has only the step: learning rates follow from it and from the configuration.
    """

    schedulers: list[Any]  # of LambdaLR. TorchTitan declares another type.

    def __init__(self, optimizers: Iterable[Optimizer], settings: Any, steps: int) -> None:
        """Makes the schedules.

        Args:
            optimizers: `GroupedOptimizers`.
            settings: The section [lr_scheduler], this plugin's or TorchTitan's.
            steps: Steps of the run.
        """
        self.schedulers = []
        for optimizer in optimizers:
            factors = []
            for group in optimizer.param_groups:
                factor = multiple_of_peak(
                    settings, group["lr"], steps=steps, warmup=settings.warmup_steps
                )
                factors.append(factor)
            self.schedulers.append(LambdaLR(optimizer, factors))

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of steps that were taken."""
        return {"last_epoch": self.schedulers[0].last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets the learning rates of the step in `state_dict`, as configured now."""
        step = state_dict["last_epoch"]
        for scheduler in self.schedulers:
            scheduler.last_epoch = step
            groups = scheduler.optimizer.param_groups
            peaks = scheduler.base_lrs
            factors = scheduler.lr_lambdas
            for group, peak, factor in zip(groups, peaks, factors, strict=True):
                group["lr"] = peak * factor(step)
