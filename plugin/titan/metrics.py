"""TorchTitan's metrics, and what a person watching this model wants beside them: rates, tokens, perplexity, life signs."""

import math
import time

import torch
from torch.distributed.tensor import DTensor
from torchtitan.components.metrics import LoggerContainer, MetricsProcessor, TensorBoardLogger
from torchtitan.tools.logging import logger

from interdomain.scan.tables import decay_exponent

from .plan import make_plan


class InterdomainMetrics(MetricsProcessor):
    def __init__(self, job_config, parallel_dims, tag=None) -> None:
        super().__init__(job_config, parallel_dims, tag)
        self.plan = make_plan(job_config, parallel_dims.world_size)
        self.started: tuple[int, float] | None = None  # (step, time) at the first log, for the remaining time
        self.last_logged: int | None = None

    def log(self, step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=None) -> None:
        extra = dict(extra_metrics or {})
        extra["loss_metrics/perplexity"] = perplexity(global_avg_loss)
        extra |= {f"lr/{name}": rate for name, rate in self.optimizers.rates.items()}
        config = self.job_config.metrics
        if self._due(step, config.mixer_freq):
            extra |= life_signs(self.model_parts[0])
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra)
        if self._due(step, config.histogram_freq):
            self._log_histograms(step)
        self.last_logged = step
        self._log_progress(step)
        self._flush()

    def log_validation(self, loss, step, extra_metrics=None) -> None:
        extra = {
            "validation_metrics/perplexity": perplexity(loss),
            **(extra_metrics or {}),
            **life_signs(self.model_parts[0]),
        }
        super().log_validation(loss, step, extra)
        logger.info("validation perplexity: %.3f", extra["validation_metrics/perplexity"])
        self._flush()

    def _due(self, step: int, freq: int) -> bool:
        """Whether a multiple of `freq` has come since the last logged step, or this is the first. The same on every rank."""
        if not freq:
            return False
        return self.last_logged is None or step // freq > self.last_logged // freq

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
            _short(step * self.plan.tokens_per_step),
            _short(self.plan.tokens),
            f"{int(left // 3600)}:{int(left % 3600 // 60):02d}:{int(left % 60):02d}",
        )

    def _log_histograms(self, step: int) -> None:
        values = {}
        for name, log_decay, dt in dynamics(self.model_parts[0]):  # every rank: the parameters are sharded
            values[f"{name}/log10_timescale_tokens"] = -torch.log10(-log_decay[..., 0])
            values[f"{name}/log10_dt"] = torch.log10(dt)
        for writer in self._writers():
            for name, value in values.items():
                writer.add_histogram(name, value, step)

    def _writers(self) -> list:
        """TensorBoard's writers on this rank: none on most."""
        loggers = self.logger._loggers if isinstance(self.logger, LoggerContainer) else []
        return [each.writer for each in loggers if isinstance(each, TensorBoardLogger)]

    def _flush(self) -> None:
        for writer in self._writers():
            writer.flush()  # a run that ends early must not take its last two minutes of metrics with it


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 80.0))  # e^80: a float32 of TensorBoard's ends at e^88


@torch.no_grad()
def dynamics(model):
    """(name, log_decay [H, M, 2], dt [H]) per layer with a recurrence, on the CPU. Collective: every rank must call it."""
    for i, layer in enumerate(model.layers.values()):
        ssm = getattr(layer.attention, "ssm", None)
        if ssm is not None:
            log_dt, log_A_real, A_imag = (_whole(p) for p in (ssm.log_dt, ssm.log_A_real, ssm.A_imag))
            dt = log_dt.exp()
            yield f"mixer/layer_{i:02d}", decay_exponent(dt, log_A_real, A_imag), dt


def life_signs(model) -> dict[str, float]:
    """Per layer: timescales 1 / |log|Lambda|| in tokens, the smallest 1 - |Lambda|, quantiles of Delta, aliased modes."""
    signs = {}
    for name, log_decay, dt in dynamics(model):
        real, imag = log_decay.unbind(-1)
        timescale = -1 / real
        for label, value in (("min", timescale.min()), ("median", timescale.median()), ("max", timescale.max())):
            signs[f"{name}/timescale_tokens_{label}"] = value.item()
        signs[f"{name}/one_minus_abs_lambda_min"] = (-torch.expm1(real)).min().item()
        for q in (0.1, 0.5, 0.9):
            signs[f"{name}/dt_q{round(100 * q)}"] = dt.quantile(q).item()
        signs[f"{name}/aliased_fraction"] = (imag.abs() > math.pi).float().mean().item()
    return signs


def _whole(p: torch.Tensor) -> torch.Tensor:
    return (p.full_tensor() if isinstance(p, DTensor) else p.detach()).float().cpu()


def _short(n: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return str(n)


def build_metrics_processor(job_config, parallel_dims, model_args=None, tag=None) -> InterdomainMetrics:
    return InterdomainMetrics(job_config, parallel_dims, tag)
