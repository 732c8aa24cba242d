"""TorchTitan's metrics, and what a person watching this model wants beside them: rates, tokens, perplexity, life signs."""

import logging
import math
import re
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from interdomain.model import Transformer
from interdomain.model.initialize import clean_name
from interdomain.scan.tables import decay_exponent

from .device import device_here
from .gradients import norms
from .host import LoggerContainer, MetricsProcessor, ParallelDims, logger
from .optimizer import GroupedOptimizers
from .plan import RunPlan, tokens_at
from .run_log import RunLog

# Parameter groups whose gradient norms are drawn: the first pattern that a name matches.
GROUPS = {
    "dynamics": re.compile(r"\.attention\.ssm\."),
    "mixer": re.compile(r"\.attention\."),  # projections, convolutions, feature maps, input norms
    "feed_forward": re.compile(r"\.feed_forward\."),
    "embeddings": re.compile(r"^(tok_embeddings|output)\."),  # and the head
    "norms": re.compile(""),  # of the blocks, and the last
}


class InterdomainMetrics(MetricsProcessor):
    job_config: Any
    model_parts: list[Any]
    optimizers: GroupedOptimizers

    def __init__(self, job_config: Any, parallel_dims: ParallelDims, plan: RunPlan) -> None:
        config = job_config.metrics
        # TorchTitan's TensorBoard folder has the time of the start as its name: every restart would open another run.
        wanted, config.enable_tensorboard = config.enable_tensorboard, False
        super().__init__(job_config, parallel_dims)
        config.enable_tensorboard = wanted
        self.plan, self.num_flops_per_token = plan, plan.flops_per_token
        self.resumed = (0, 0)  # (step, tokens) that this process continues from; a checkpoint that is loaded sets it
        self.run_log: RunLog | None = None
        if wanted and dist.get_rank() == 0:
            self.run_log = RunLog(Path(job_config.job.dump_folder) / config.save_tb_folder, plan, job_config)
            if not isinstance(self.logger, LoggerContainer):
                self.logger = LoggerContainer()
            self.logger.add_logger(self.run_log)
        self.spikes = SpikeSign()
        self.began = False
        self.started: tuple[int, float] | None = None  # (step, time) at the first log, for the remaining time
        self.life_signs_at: int | None = None
        if math.isinf(self.gpu_peak_flops):  # a CPU, whose peak is not known
            logger.addFilter(_without_mfu)

    def should_log(self, step: int) -> bool:
        self._begin(step)  # the trainer asks after every step: here the checkpoint has been loaded
        return super().should_log(step)

    def _begin(self, first_step: int) -> None:
        if self.run_log and not self.began:
            self.run_log.begin(first_step, self.tokens_at)
        self.began = True

    def log_step(self, step: int, loss: float, worst_loss: float, grad_norm: float) -> None:
        """Log a training step. loss: mean per token; worst_loss: of the rank with the highest. Collective."""
        config, model = self.job_config.metrics, self.model_parts[0]
        seconds, waited = time.perf_counter() - self.time_last_log, _slowest(sum(self.data_loading_times))
        steps = len(self.data_loading_times) / self.plan.accumulation  # since that time
        extra = {
            "n_tokens_seen": self.tokens_at(step),
            "loss_metrics/perplexity": perplexity(loss),
            "loss_metrics/spike": self.spikes(loss),
            "lr": self.optimizers.rates["main"],
            **{f"lr/{name}": rate for name, rate in self.optimizers.rates.items()},
            **gradient_norms(model, grad_norm, self.job_config.training.max_norm),
            **self.optimizers.guard.scalars(),
            "machine/data_wait_percent": 100 * waited / seconds,
            "time_metrics/end_to_end(s)": seconds / steps,  # TorchTitan divides by log_freq
        }
        if self._due(step, config.mixer_freq):
            extra |= life_signs(model)
            self.life_signs_at = step
        if self.run_log and self._due(step, config.histogram_freq):
            for tag, values in histograms(model).items():
                self.run_log.histogram(tag, values, step)
        self.log(step, loss, worst_loss, grad_norm, extra)
        self._log_progress(step)
        limit = self.job_config.training.max_skipped_steps
        self.optimizers.guard.stop_if_repeated(limit, step, loss, grad_norm)

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        self._begin(step + 1)  # a start may begin with a missed validation
        extra = {"validation_metrics/perplexity": perplexity(loss), **(extra_metrics or {})}
        if self.life_signs_at != step:  # not twice
            extra |= life_signs(self.model_parts[0])
        super().log_validation(loss, step, extra)
        self.data_loading_times.clear()  # as TorchTitan's clock: what is logged next counts from here
        logger.info("validation perplexity: %.3f", extra["validation_metrics/perplexity"])

    def tokens_at(self, step: int) -> int:
        return tokens_at(step, self.resumed, self.plan.tokens_per_step)

    def _due(self, step: int, freq: int) -> bool:
        """Whether a multiple of `freq` has come since the last logged step, or this is the first."""
        return bool(freq) and (step == 1 or step // freq > (step - self.job_config.metrics.log_freq) // freq)

    def _log_progress(self, step: int) -> None:
        now = time.monotonic()
        if self.started is None:
            self.started = (step, now)
            return
        first, began = self.started
        left = (now - began) / (step - first) * (self.plan.steps - step)
        logger.info(
            "%5.1f %% of %d steps, %s of %s tokens, %s left",
            100 * step / self.plan.steps,
            self.plan.steps,
            _short(self.tokens_at(step)),
            _short(self.tokens_at(self.plan.steps)),
            f"{int(left // 3600)}:{int(left % 3600 // 60):02d}:{int(left % 60):02d}",
        )


class SpikeSign:
    """How many standard deviations the loss rose further, from one log to the next, than in the last 50; 0 for the first 10."""

    def __init__(self) -> None:
        self.last: float | None = None
        self.rises: deque[float] = deque(maxlen=50)

    def __call__(self, loss: float) -> float:
        if not math.isfinite(loss):
            return math.nan
        last, self.last = self.last, loss
        if last is None:
            return 0.0
        sign = 0.0
        if len(self.rises) >= 10 and (deviation := statistics.pstdev(self.rises)):
            sign = (loss - last - statistics.fmean(self.rises)) / deviation
        self.rises.append(loss - last)
        return sign


@torch.no_grad()
def gradient_norms(model: Transformer, total: float, max_norm: float) -> dict[str, float]:
    """Norm of the gradients of each parameter group, before they were clipped. Collective: every rank must call it.

    total: the norm of all, before clipping.
    """
    groups: dict[str, list[Tensor]] = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            group = next(group for group, pattern in GROUPS.items() if pattern.search(clean_name(name)))
            groups.setdefault(group, []).append(p.grad)
    clipped = min(1.0, max_norm / (total + 1e-6))  # as torch.nn.utils.clip_grads_with_norm_ scaled them
    before = (norms(groups.values()) / clipped).tolist()
    return {f"grad_norm/{group}": norm for group, norm in zip(groups, before, strict=True)}


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 80.0))  # e^80: a float32 of TensorBoard's ends at e^88


@torch.no_grad()
def dynamics(model: Transformer) -> tuple[list[str], Tensor, Tensor]:
    """(names, log_decay [layers, H, M, 2], dt [layers, H]) of the layers with a recurrence, on the CPU.

    The parameters are complete on every rank (`gradients`): no collective. One read of the device for all layers.
    """
    layers = {f"mixer/layer_{i:02d}": getattr(x.attention, "ssm", None) for i, x in enumerate(model.layers.values())}
    layers = {name: ssm for name, ssm in layers.items() if ssm is not None}
    if not layers:
        return [], torch.empty(0), torch.empty(0)
    joined = [torch.cat([ssm.log_dt[:, None], ssm.log_A_real, ssm.A_imag], dim=1) for ssm in layers.values()]
    joined = torch.cat(joined).cpu()  # [layers H, 1 + 2M]
    n_basis = joined.shape[1] // 2
    log_dt, log_A_real, A_imag = joined.split([1, n_basis, n_basis], dim=1)
    dt = log_dt.flatten().exp()
    log_decay = decay_exponent(dt, log_A_real, A_imag)
    return list(layers), log_decay.unflatten(0, (len(layers), -1)), dt.unflatten(0, (len(layers), -1))


def life_signs(model: Transformer) -> dict[str, float]:
    """Per layer: timescales 1 / |log|Lambda|| in tokens, the smallest 1 - |Lambda|, quantiles of Delta, aliased modes."""
    names, log_decay, dt = dynamics(model)
    if not names:
        return {}
    real, imag = log_decay.flatten(1, 2).unbind(-1)  # [layers, H M]
    timescale, lost = -1 / real, -torch.expm1(real)
    deciles = dt.quantile(torch.tensor([0.1, 0.5, 0.9]), dim=1)
    signs = {
        "timescale_tokens_min": timescale.amin(1),
        "timescale_tokens_median": timescale.median(1).values,
        "timescale_tokens_max": timescale.amax(1),
        "one_minus_abs_lambda_min": lost.amin(1),
        **{f"dt_q{q}": values for q, values in zip((10, 50, 90), deciles, strict=True)},
        "aliased_fraction": (imag.abs() > math.pi).float().mean(1),
    }
    table = torch.stack(list(signs.values())).tolist()
    return {
        f"{name}/{sign}": x for sign, row in zip(signs, table, strict=True) for name, x in zip(names, row, strict=True)
    }


def histograms(model: Transformer) -> dict[str, Tensor]:
    """Per layer: timescales in tokens [H, M] and Delta [H], as powers of ten."""
    names, log_decay, dt = dynamics(model)
    if not names:
        return {}
    timescales = -torch.log10(-log_decay[..., 0])
    return {
        **{f"{name}/log10_timescale_tokens": x for name, x in zip(names, timescales, strict=True)},
        **{f"{name}/log10_dt": x for name, x in zip(names, dt.log10(), strict=True)},
    }


def _slowest(seconds: float) -> float:
    """The largest of all ranks': the others wait for that one in their collectives. Collective."""
    most = torch.tensor(seconds, dtype=torch.float32, device=device_here())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.item()


def _without_mfu(record: logging.LogRecord) -> bool:
    """Remove the MFU, which is 0 there, from TorchTitan's line of a step."""
    record.msg = re.sub(r"  (\x1b\[\d+m)?mfu: 0\.00%", "", str(record.msg))
    return True


def _short(n: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return str(n)
