"""TorchTitan's metrics, and what a person watching this model wants beside them: rates, tokens, perplexity, SSM statistics."""

import math
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from interdomain.model import Transformer
from interdomain.model.mixers.ssm import LIFE_SIGNS, SSMDynamics, scalars

from ..errors import user_errors
from ..host import LoggerContainer, MetricsProcessor, ParallelDims, logger, translate
from ..plan.run_plan import RunPlan
from ..settings.schema import JobConfig
from ..step.gradients import norms
from ..step.meshes import Meshes
from ..step.optimizer import GroupedOptimizers
from .run_log import RunLog, WandbLog


class InterdomainMetrics(MetricsProcessor):
    logger: Any
    fingerprints: dict[str, str]  # of the training and the validation text
    # The trainer sets these two. TorchTitan's class declares other types for them.
    model_parts: Any  # list[Transformer]
    optimizers: Any  # GroupedOptimizers

    def __init__(
        self, job: JobConfig, parallel_dims: ParallelDims, plan: RunPlan, meshes: Meshes
    ) -> None:
        # TorchTitan's own curves would be another run after every restart: `begin` opens ours.
        changed = {"metrics.enable_tensorboard": False, "metrics.enable_wandb": False}
        if not sys.stderr.isatty():
            changed["metrics.disable_color_printing"] = (
                True  # a file or a pipe would show the codes of colours
            )
        super().__init__(translate(job.changed(changed)), parallel_dims)
        self.logger = LoggerContainer()
        self.job = job
        self.plan = plan
        self.meshes = meshes
        self.num_flops_per_token = plan.flops_per_token
        self.started: tuple[int, float] | None = (
            None  # (step, time) at the first log, for the remaining time
        )

    def begin(self, first_step: int) -> None:
        """Open the curves of a start of the run, once a checkpoint has been loaded."""
        if dist.get_rank() != 0:
            return
        settings, folder = self.job.metrics, Path(self.job.job.dump_folder)
        if settings.enable_tensorboard:
            place = folder / settings.save_tb_folder
            self.logger.add_logger(
                user_errors(RunLog)(place, self.plan, self.job, first_step, self.fingerprints)
            )
        if settings.enable_wandb:
            self.logger.add_logger(WandbLog(folder, self.plan, self.job, self.fingerprints))

    def log_step(self, step: int, loss: float, worst_loss: float, grad_norm: float) -> None:
        """Logs a training step. Collective.

        Args:
            loss: Mean per token over all ranks.
            worst_loss: Mean per token on the rank with the highest loss.
        """
        # Since the last log or validation.
        seconds = time.perf_counter() - self.time_last_log
        steps = math.ceil(len(self.data_loading_times) / self.plan.accumulation)
        extra = {
            "n_tokens_seen": step * self.plan.tokens_per_step,
            "loss_metrics/perplexity": perplexity(loss),
            "lr": self.optimizers.rates["main"],
            "time_metrics/end_to_end(s)": seconds
            / steps,  # TorchTitan divides by log_freq, also after the first step
        }
        for name, rate in self.optimizers.rates.items():
            extra[f"lr/{name}"] = rate
        extra |= gradient_norms(self.optimizers, grad_norm, self.job.training.max_norm, self.meshes)
        extra |= self.optimizers.step_guard.scalars()
        # The mixer's statistics: at the first step, and if a multiple of `mixer_freq` has come since the last logged step.
        freq = self.job.metrics.mixer_freq
        if freq and (step == 1 or step // freq > (step - self.job.metrics.log_freq) // freq):
            extra |= mixer_statistics(self.model_parts, self.meshes)
        self.log(step, loss, worst_loss, grad_norm, extra)

        # How far the run is. The time that is left is known from the second log on.
        now = time.monotonic()
        if self.started is None:
            self.started = (step, now)
            return
        first, began = self.started
        steps = self.plan.steps
        left = timedelta(seconds=round((now - began) / (step - first) * (steps - step)))
        tokens = f"{step * self.plan.tokens_per_step:,} of {self.plan.tokens:,} tokens"
        logger.info("%5.1f %% of %d steps, %s, %s left", 100 * step / steps, steps, tokens, left)

    def log_validation(
        self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        scalars = extra_metrics or {}
        super().log_validation(
            loss, step, {"validation_metrics/perplexity": perplexity(loss)} | scalars
        )
        self.data_loading_times.clear()  # as TorchTitan's clock: what is logged next counts from here
        logger.info("validation perplexity: %.3f", perplexity(loss))
        if scalars:
            values = ", ".join(
                f"{tag.partition('/')[2]} {value:.4f}" for tag, value in scalars.items()
            )
            logger.info("validation accuracy and loss by position: %s", values)


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 80.0))  # e^80: a float32 of TensorBoard's ends at e^88


@torch.no_grad()
def gradient_norms(
    optimizers: GroupedOptimizers, total: float, max_norm: float, meshes: Meshes
) -> dict[str, float]:
    """Norm of the gradients of each parameter group, before they were clipped. Collective: every rank must call it.

    Args:
        total: Norm of all gradients, before clipping.
    """
    gradients: dict[str, list[Any]] = {name: [] for name in optimizers.names}
    for group in optimizers.groups:
        for p in group["params"]:
            if p.grad is not None:
                gradients[group["name"]].append(p.grad)
    clipped = min(
        1.0, max_norm / (total + 1e-6)
    )  # as torch.nn.utils.clip_grads_with_norm_ scaled them
    before = (norms(gradients.values(), meshes) / clipped).tolist()
    return {f"grad_norm/{name}": norm for name, norm in zip(gradients, before, strict=True) if norm}


@torch.no_grad()
def mixer_statistics(parts: list[Transformer], meshes: Meshes) -> dict[str, float]:
    """LIFE_SIGNS of each layer with basis functions.

    The parameters are complete on every rank of a stage (`gradients`). One read of the device for all layers. Collective.
    """
    device = next(parts[0].parameters()).device
    # Zeros: of the layers of other stages.
    signs = torch.zeros(parts[0].config.n_layers, len(LIFE_SIGNS), device=device)
    for part in parts:
        for i, layer in part.layers.items():
            ssm = getattr(layer.attention, "ssm", None)
            if isinstance(ssm, SSMDynamics):
                signs[int(i)] = ssm().life_signs()
    if meshes.pipeline.size() > 1:
        dist.all_reduce(signs, group=meshes.pipeline.get_group())
    return scalars(signs)
