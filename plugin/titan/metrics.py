"""TorchTitan's metrics, and what a person watching this model wants beside them: rates, tokens, perplexity, life signs."""

import copy
import logging
import math
import re
import time
from pathlib import Path

import torch

from interdomain.model.initialize import clean_name
from interdomain.scan.tables import decay_exponent

from .device import device_here
from .gradients import norms
from .host import LoggerContainer, MetricsProcessor, logger
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
    def __init__(self, job_config, parallel_dims, plan: RunPlan) -> None:
        # TorchTitan's TensorBoard folder has the time of the start as its name: every restart would open another run.
        without_tensorboard = copy.copy(job_config)
        without_tensorboard.metrics = copy.copy(job_config.metrics)
        without_tensorboard.metrics.enable_tensorboard = False
        super().__init__(without_tensorboard, parallel_dims)
        self.job_config, self.plan = job_config, plan
        self.num_flops_per_token = plan.flops_per_token
        self.resumed = (0, 0)  # (step, tokens) that this process continues from; a checkpoint that is loaded sets it
        self.run_log = _run_log(job_config, self.plan)
        if self.run_log:
            if not isinstance(self.logger, LoggerContainer):
                self.logger = LoggerContainer()
            self.logger.add_logger(self.run_log)
        self.spikes = SpikeSign()
        self.first_step: int | None = None  # of this start
        self.started: tuple[int, float] | None = None  # (step, time) at the first log, for the remaining time
        self.last_logged: int | None = None
        self.clock_since: int | None = None  # the step after which TorchTitan's clock began
        self.life_signs_at: int | None = None
        if math.isinf(self.gpu_peak_flops):  # no figure of this device to compare with
            logger.addFilter(_without_utilisation)

    def should_log(self, step: int) -> bool:
        self._begin(step)  # the trainer asks after every step: here the checkpoint has been loaded
        return super().should_log(step)

    def _begin(self, first_step: int) -> None:
        if self.first_step is None:
            self.first_step, self.clock_since = first_step, first_step - 1
            if self.run_log:
                self.run_log.begin(first_step, self.tokens_at)

    def log(self, step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=None) -> None:
        config = self.job_config.metrics
        model = self.model_parts[0]
        extra = dict(extra_metrics or {})
        extra["n_tokens_seen"] = self.tokens_at(step)
        extra["loss_metrics/perplexity"] = perplexity(global_avg_loss)
        extra["loss_metrics/spike"] = self.spikes(global_avg_loss)
        extra |= {f"lr/{name}": rate for name, rate in self.optimizers.rates.items()}
        extra |= gradient_norms(model, grad_norm, self.job_config.training.max_norm)
        extra |= self.optimizers.guard.scalars()
        extra["machine/data_wait_percent"] = self._data_wait_percent()
        # TorchTitan divides by log_freq, whatever number of steps it was.
        seconds = time.perf_counter() - self.time_last_log
        extra["time_metrics/end_to_end(s)"] = seconds / (step - self.clock_since)
        if self._due(step, config.mixer_freq):
            extra |= life_signs(model)
            self.life_signs_at = step
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra)
        if self._due(step, config.histogram_freq):
            self._log_histograms(step)
        self.last_logged = self.clock_since = step
        self._log_progress(step)
        if self.run_log:
            self.run_log.flush()
        limit = self.job_config.training.max_skipped_steps
        self.optimizers.guard.stop_if_repeated(limit, step, global_avg_loss, grad_norm)

    def log_validation(self, loss, step, extra_metrics=None) -> None:
        self._begin(step + 1)  # a start may begin with a missed validation
        extra = {
            "validation_metrics/perplexity": perplexity(loss),
            **(extra_metrics or {}),
        }
        if self.life_signs_at != step:  # not twice
            extra |= life_signs(self.model_parts[0])
        super().log_validation(loss, step, extra)
        self.data_loading_times.clear()  # as TorchTitan's clock: what is logged next counts from here
        self.clock_since = step
        logger.info("validation perplexity: %.3f", extra["validation_metrics/perplexity"])
        if self.run_log:
            self.run_log.flush()

    def tokens_at(self, step: int) -> int:
        return tokens_at(step, self.resumed, self.plan.tokens_per_step)

    def _data_wait_percent(self) -> float:
        """Of the time since the last log, on the rank that waited longest: the others wait for it in their collectives.

        Collective.
        """
        seconds = torch.tensor(sum(self.data_loading_times), dtype=torch.float32, device=device_here())
        torch.distributed.all_reduce(seconds, op=torch.distributed.ReduceOp.MAX)
        return 100 * seconds.item() / (time.perf_counter() - self.time_last_log)

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
            _short(self.tokens_at(step)),
            _short(self.tokens_at(self.plan.steps)),
            f"{int(left // 3600)}:{int(left % 3600 // 60):02d}:{int(left % 60):02d}",
        )

    def _log_histograms(self, step: int) -> None:
        if not self.run_log:
            return
        names, log_decay, dt = dynamics(self.model_parts[0])
        timescales, dts = -torch.log10(-log_decay[..., 0]), torch.log10(dt)
        for name, timescale, of_heads in zip(names, timescales, dts, strict=True):
            self.run_log.histogram(f"{name}/log10_timescale_tokens", timescale, step)
            self.run_log.histogram(f"{name}/log10_dt", of_heads, step)


def _run_log(job_config, plan) -> RunLog | None:
    """The TensorBoard log of this rank: rank 0's, or every rank's in a folder of its own."""
    config, rank = job_config.metrics, torch.distributed.get_rank()
    if not config.enable_tensorboard or (rank and not config.save_for_all_ranks):
        return None
    folder = Path(job_config.job.dump_folder) / config.save_tb_folder
    return RunLog(folder / f"rank_{rank}" if config.save_for_all_ranks else folder, plan, job_config)


class SpikeSign:
    """How many standard deviations the loss rose further, from one log to the next, than it has lately."""

    MEMORY = 50  # logged losses
    FIRST = 10  # the mean and deviation of fewer say little: 0 until then

    def __init__(self) -> None:
        self.last, self.n, self.mean, self.variance = None, 0, 0.0, 0.0

    def __call__(self, loss: float) -> float:
        deviation = 0.0 if self.last is None else loss - self.last - self.mean
        sign = deviation / math.sqrt(self.variance) if self.n >= self.FIRST and self.variance else 0.0
        if not math.isfinite(loss):
            return loss - loss  # not a number
        if self.last is not None:
            self.n += 1
            weight = 1 / min(self.n, self.MEMORY)
            self.mean += weight * deviation
            self.variance = (1 - weight) * (self.variance + weight * deviation**2)
        self.last = loss
        return sign


@torch.no_grad()
def gradient_norms(model, total: float, max_norm: float) -> dict[str, float]:
    """Norm of the gradients of each parameter group, before they were clipped. Collective: every rank must call it.

    total: the norm of all, before clipping.
    """
    groups: dict[str, list] = {}
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
def dynamics(model) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """(names, log_decay [layers, H, M, 2], dt [layers, H]) of the layers with a recurrence, on the CPU.

    The parameters are whole on every rank (`gradients`): no collective. One read of the device for all layers.
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
    return list(layers), *(x.unflatten(0, (len(layers), -1)) for x in (log_decay, dt))


def life_signs(model) -> dict[str, float]:
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
    table = torch.stack(list(signs.values()), dim=1).tolist()
    return {
        f"{name}/{sign}": value
        for name, row in zip(names, table, strict=True)
        for sign, value in zip(signs, row, strict=True)
    }


def _short(n: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return str(n)


def _without_utilisation(record: logging.LogRecord) -> bool:
    """TorchTitan's line of a step without its MFU of 0."""
    record.msg = re.sub(r"  (\x1b\[\d+m)?mfu: 0\.00%", "", str(record.msg))
    return True
