"""The metrics of a training run under our trainer: what is logged of a step and of a validation.

TorchTitan's `MetricsProcessor`, the base class, measures time, throughput and memory, prints a
line, and passes the scalars on to its loggers (`run_log`). This module adds perplexity, tokens,
learning rates, gradient norms by parameter group, skipped steps and SSM statistics.
"""

import math
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from interdomain.model import Transformer
from interdomain.model.mixers.ssm import SSM, SSM_STATISTICS, scalars

from ..errors import user_errors
from ..host import LoggerContainer, MetricsProcessor, ParallelDims, logger, translate
from ..plan.run_plan import RunPlan
from ..settings.schema import JobConfig
from ..step.gradients import norms
from ..step.meshes import Meshes
from ..step.optimizer import GroupedOptimizers
from .run_log import RunLog, WandbLog

ACCURACY = "validation_metrics/accuracy"  # a tag


class InterdomainMetrics(MetricsProcessor):
    """TorchTitan's metrics with those of this plugin.

    Attributes:
        logger: Receives scalars by tag. `begin` adds TensorBoard and Weights & Biases to it.
        fingerprints: Fingerprints of the training and validation texts. The trainer sets them.
        model_parts: This rank's stages of the model. The trainer sets them.
        optimizers: The optimizers of the run. The trainer sets them.
        first_log: Step and time of the first log, from which the remaining time is estimated.
    """

    # TorchTitan's class declares other types for these.
    logger: Any  # LoggerContainer
    fingerprints: dict[str, str]
    model_parts: Any  # list[Transformer]
    optimizers: Any  # GroupedOptimizers

    def __init__(
        self, job: JobConfig, parallel_dims: ParallelDims, plan: RunPlan, meshes: Meshes
    ) -> None:
        """Starts the clock. `begin` opens the loggers.

        Args:
            job: The configuration of the run.
            parallel_dims: TorchTitan's degrees of parallelism.
            plan: The plan of the run.
            meshes: The process groups of this rank.
        """
        # TorchTitan's own loggers would start another curve at every restart.
        changed = {"metrics.enable_tensorboard": False, "metrics.enable_wandb": False}
        if not sys.stderr.isatty():
            # In a file or a pipe, the codes of colours would be seen as text.
            changed["metrics.disable_color_printing"] = True
        super().__init__(translate(job.changed(changed)), parallel_dims)
        self.logger = LoggerContainer()
        self.job = job
        self.plan = plan
        self.meshes = meshes
        self.num_flops_per_token = plan.flops_per_token
        self.first_log: tuple[int, float] | None = None

    @user_errors
    def begin(self, first_step: int) -> None:
        """Opens the logs of the run on rank 0, once a checkpoint has been loaded.

        Args:
            first_step: The first step after this start. Curves of an earlier start end before it.

        Raises:
            SystemExit: A log cannot be opened. The reason is printed.
        """
        if dist.get_rank() != 0:
            return
        settings = self.job.metrics
        folder = Path(self.job.job.dump_folder)
        if settings.enable_tensorboard:
            events = folder / settings.save_tb_folder
            self.logger.add_logger(
                RunLog(events, self.plan, self.job, first_step, self.fingerprints)
            )
        if settings.enable_wandb:
            self.logger.add_logger(WandbLog(folder, self.plan, self.job, self.fingerprints))

    def log_step(self, step: int, loss: float, worst_loss: float, grad_norm: float) -> None:
        """Logs a training step, if `should_log`. Collective.

        Args:
            step: The step that was taken.
            loss: Mean loss per token over all ranks.
            worst_loss: Mean loss per token of the rank where it is highest.
            grad_norm: Norm of all gradients before clipping.
        """
        extra = {
            "n_tokens_seen": step * self.plan.tokens_per_step,
            "loss_metrics/perplexity": perplexity(loss),
            "lr": self.optimizers.rates["main"],
        }

        # The optimizer: learning rates and gradient norms by group, skipped steps.
        for name, rate in self.optimizers.rates.items():
            extra[f"lr/{name}"] = rate
        extra |= gradient_norms(self.optimizers, grad_norm, self.job.training.max_norm, self.meshes)
        extra |= self.optimizers.step_guard.scalars()

        # SSM statistics: in step 1, and if a multiple of `mixer_freq` came since the last log.
        freq = self.job.metrics.mixer_freq
        if freq:
            previous = step - self.job.metrics.log_freq
            if step == 1 or step // freq > previous // freq:
                extra |= mixer_statistics(self.model_parts, self.meshes)

        # Time per step since the last log or validation. TorchTitan divides by log_freq, which is
        # wrong after the first step and after a validation.
        seconds = time.perf_counter() - self.time_last_log
        # Its list of loading times has an entry for each micro-batch since then.
        steps_since = len(self.data_loading_times) // self.plan.accumulation
        extra["time_metrics/end_to_end(s)"] = seconds / steps_since
        # The throughput of all ranks together. TorchTitan's is that of one.
        tokens_per_second = self.plan.tokens_per_step * steps_since / seconds
        extra["machine/tokens_per_second"] = tokens_per_second

        self.log(step, loss, worst_loss, grad_norm, extra)
        self._log_progress(step, tokens_per_second)

    def _log_progress(self, step: int, tokens_per_second: float) -> None:
        """Prints how far and how fast the run is, and how long it will still take.

        The first log has no such line: the step that it follows compiles and connects.

        Args:
            step: The step that was taken.
            tokens_per_second: Throughput of all ranks together.
        """
        now = time.monotonic()
        if self.first_log is None:
            self.first_log = (step, now)
            return
        first_step, first_time = self.first_log
        seconds_per_step = (now - first_time) / (step - first_step)
        steps = self.plan.steps
        logger.info(
            "%5.1f %% of %d steps, %s tokens per second on all ranks, %s left",
            100 * step / steps,
            steps,
            f"{tokens_per_second:,.0f}",
            timedelta(seconds=round(seconds_per_step * (steps - step))),
        )

    def log_validation(
        self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        """Logs a validation.

        Args:
            loss: Mean loss per token over all windows.
            step: The step after which the model was validated.
            extra_metrics: Further scalars by tag.
        """
        tags = {"validation_metrics/perplexity": perplexity(loss), **(extra_metrics or {})}
        super().log_validation(loss, step, tags)
        # TorchTitan restarts its clock here. The count of steps must restart, too.
        self.data_loading_times.clear()
        logger.info("validation perplexity: %.3f", perplexity(loss))
        if ACCURACY in tags:
            logger.info("validation accuracy of answers: %.4f", tags[ACCURACY])


def perplexity(loss: float) -> float:
    """Returns exp(loss), bounded by e^80: TensorBoard's float32 overflows at e^88."""
    return math.exp(min(loss, 80.0))


@torch.no_grad()
def gradient_norms(
    optimizers: GroupedOptimizers, total: float, max_norm: float, meshes: Meshes
) -> dict[str, float]:
    """Computes the gradient norm of each parameter group before clipping. Collective.

    Args:
        optimizers: Their gradients have been clipped.
        total: Norm of all gradients before clipping.
        max_norm: The norm to which they were clipped.
        meshes: The process groups of this rank.

    Returns:
        Norms by tag. A group without gradients on any rank is left out.
    """
    gradients: dict[str, list[Any]] = {name: [] for name in optimizers.names}
    for group in optimizers.groups:
        for p in group["params"]:
            if p.grad is not None:
                gradients[group["name"]].append(p.grad)
    # The factor by which torch.nn.utils.clip_grads_with_norm_ scaled the gradients.
    scale = min(1.0, max_norm / (total + 1e-6))
    unclipped = (norms(gradients.values(), meshes) / scale).tolist()
    norm_of_group = zip(gradients, unclipped, strict=True)
    return {f"grad_norm/{name}": norm for name, norm in norm_of_group if norm}


@torch.no_grad()
def mixer_statistics(parts: list[Transformer], meshes: Meshes) -> dict[str, float]:
    """Computes the SSM statistics of each layer that has basis functions. Collective.

    The host reads the device once for all layers.

    Args:
        parts: This rank's stages of the model. SSM parameters are whole on each rank of a stage.
        meshes: The process groups of this rank.

    Returns:
        Statistics by tag, such as "mixer/layer_00/dt_median".
    """
    # Rows of layers on other stages stay zero, and the sum over the stages fills them.
    device = next(parts[0].parameters()).device
    statistics = torch.zeros(parts[0].config.n_layers, len(SSM_STATISTICS), device=device)
    for part in parts:
        for i, layer in part.layers.items():
            ssm = getattr(layer.attention, "ssm", None)
            if isinstance(ssm, SSM):
                statistics[int(i)] = ssm().ssm_statistics()
    if meshes.pipeline.size() > 1:
        dist.all_reduce(statistics, group=meshes.pipeline.get_group())
    return scalars(statistics)
