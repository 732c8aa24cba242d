"""A run's TensorBoard folder: one curve across restarts, the same by tokens, hyperparameters, and a page of charts."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from .host import BaseLogger, logger
from .plan import RunPlan

EVENTS = "events.out.tfevents.*"
TOKENS = "tokens"  # the subfolder of curves whose step is the number of tokens
BY_TOKENS = {  # tag -> its name there
    "loss_metrics/global_avg_loss": "by_tokens/loss",
    "loss_metrics/perplexity": "by_tokens/perplexity",
    "validation_metrics/loss": "by_tokens/validation_loss",
    "validation_metrics/perplexity": "by_tokens/validation_perplexity",
}
# TorchTitan's tags -> ours: the custom scalars' charts stay empty where a tag has parentheses.
RENAMED = {
    "mfu(%)": "machine/mfu_percent",
    "memory/max_active(GiB)": "machine/memory_active_gib",
    "memory/max_reserved(GiB)": "machine/memory_reserved_gib",
    "time_metrics/end_to_end(s)": "machine/seconds_per_step",
}
# The tab "Custom Scalars": a run's health on one page. A chart's lines are patterns of tags.
CHARTS = {
    "Learning": {
        "Loss: training, validation": ["loss_metrics/global_avg_loss", "validation_metrics/loss"],
        "Loss by tokens": ["by_tokens/loss", "by_tokens/validation_loss"],
        "Perplexity by tokens": ["by_tokens/perplexity", "by_tokens/validation_perplexity"],
        "Validation loss": ["validation_metrics/loss"],
        "Gradient norm, before clipping": ["grad_norm"],
        "Learning rates": [r"lr/\w+"],
        "Rise of the loss, in standard deviations": ["loss_metrics/spike"],
        "Loss: mean and worst rank": ["loss_metrics/global_avg_loss", "loss_metrics/global_max_loss"],
        "Steps skipped": [r"skipped_steps/\w+"],
    },
    "Machine": {
        "Tokens per second, all ranks": ["machine/tokens_per_second"],
        "Model FLOPs utilisation (%)": ["machine/mfu_percent"],
        "Memory, peak since the last log (GiB)": [r"machine/memory_\w+_gib"],
        "Waiting for data, slowest rank (% of the time)": ["machine/data_wait_percent"],
        "Seconds per step": ["machine/seconds_per_step"],
        "Allocation retries, out of memory": ["memory/num_alloc_retries", "memory/num_ooms"],
    },
    # One chart each: TensorBoard gives all lines of a run in a chart the same colour.
    "Gradient norm by parameter group": {
        "All": ["grad_norm"],
        "Dynamics": ["grad_norm/dynamics"],
        "Mixer: projections, convolutions, norms": ["grad_norm/mixer"],
        "Feed-forward": ["grad_norm/feed_forward"],
        "Embedding and head": ["grad_norm/embeddings"],
        "Norms of blocks": ["grad_norm/norms"],
    },
    "Mixer by layer": {
        "Longest timescale (tokens)": [r"mixer/layer_\d+/timescale_tokens_max"],
        "Median timescale (tokens)": [r"mixer/layer_\d+/timescale_tokens_median"],
        "Smallest 1 - |Lambda|": [r"mixer/layer_\d+/one_minus_abs_lambda_min"],
        "Median Delta": [r"mixer/layer_\d+/dt_q50"],
        "Aliased modes (fraction)": [r"mixer/layer_\d+/aliased_fraction"],
        "Readout RMS": [r"mixer/layer_\d+/readout_rms"],
    },
}


class RunLog(BaseLogger):
    """Writes into `folder`, to which every restart of the run appends.

    Steps that a restart runs again replace the old ones: each file says with which step it begins (`purge_step`), and
    TensorBoard drops what earlier files hold from there on. `folder/tokens` holds a few curves again with the number of
    tokens in place of the step; a folder of its own, for what a file drops, it drops from every curve of its folder.
    """

    def __init__(self, folder: Path, plan: RunPlan, job_config: Any) -> None:
        self.folder, self.plan, self.job_config = folder, plan, job_config
        self.writers: tuple[SummaryWriter, SummaryWriter] | None = None  # by steps, by tokens

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A write that fails, on a full disk for one, ends the curves and not the run."""
        try:
            yield
        except OSError as e:
            self.writers = None
            logger.warning(
                "TensorBoard: writing into %s failed (%s). Training goes on, without curves from here on; the next start "
                "writes them again.",
                self.folder,
                e.strerror or e,
            )

    def begin(self, first_step: int, tokens_at: Callable[[int], int]) -> None:
        """Open the files of a start whose first step is `first_step` (1: a run from the beginning).

        tokens_at: step -> tokens trained on up to its end; the steps of an earlier start may have been of another number.
        """
        self.tokens_at = tokens_at
        with self._writing():
            if first_step == 1:
                set_aside(self.folder)
            by_steps = SummaryWriter(self.folder, max_queue=1000, purge_step=first_step)
            purge = tokens_at(first_step - 1) + 1
            self.writers = by_steps, SummaryWriter(self.folder / TOKENS, max_queue=1000, purge_step=purge)
            logger.info("TensorBoard: %s, from step %d", self.folder, first_step)
            self._describe(by_steps, first_step)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        if self.writers is None:
            return
        by_steps, by_tokens = self.writers
        metrics = metrics | {ours: metrics[theirs] for theirs, ours in RENAMED.items() if theirs in metrics}
        if "throughput(tps)" in metrics:  # of one rank
            metrics["machine/tokens_per_second"] = metrics["throughput(tps)"] * self.plan.world_size
        with self._writing():
            for tag, value in metrics.items():
                by_steps.add_scalar(tag, value, step)
            for tag, name in BY_TOKENS.items():
                if tag in metrics:
                    by_tokens.add_scalar(name, metrics[tag], self.tokens_at(step))
            # A run that is killed must not take its last two minutes of metrics with it.
            by_steps.flush()
            by_tokens.flush()

    def histogram(self, tag: str, values: Tensor, step: int) -> None:
        if self.writers is not None:
            with self._writing():
                self.writers[0].add_histogram(tag, values, step)

    def close(self) -> None:
        with self._writing():
            for writer in self.writers or ():
                writer.close()

    def _describe(self, writer: SummaryWriter, step: int) -> None:
        # TensorBoard matches a pattern from the start only.
        multiline = {
            category: {chart: ["Multiline", [f"{tag}$" for tag in tags]] for chart, tags in charts.items()}
            for category, charts in CHARTS.items()
        }
        writer.add_custom_scalars(multiline)
        # Not add_hparams: it would open a run of its own, with the time as its name, at every restart.
        facts = hyperparameters(self.plan, self.job_config)
        curves = dict.fromkeys(("loss_metrics/global_avg_loss", "validation_metrics/loss"))
        for summary in hparams(facts, curves)[:2]:
            writer._get_file_writer().add_summary(summary)
        configuration = json.dumps(self.job_config.to_dict(), indent=2, default=str)
        # TensorBoard keeps the first start's row of HParams; the text is every start's.
        texts = {"plan": self.plan.describe(), "hyperparameters": json.dumps(facts), "configuration": configuration}
        for tag, text in texts.items():
            writer.add_text(f"run/{tag}", f"```\n{text}\n```", step)
        writer.flush()


def hyperparameters(plan: RunPlan, job_config: Any) -> dict[str, Any]:
    """What runs of a study differ in, one row of TensorBoard's table."""
    optimizer, mixer = job_config.optimizer, plan.config.mixer
    start = ("n_basis", "c_scale", "linear_scale", "dt_min", "dt_max", "a_init") if mixer.kind == "interdomain" else ()
    return {
        "model": plan.cell.size,
        "condition": plan.cell.condition,
        **{name: getattr(mixer, name) for name in start if getattr(mixer, name) is not None},
        **{
            name: getattr(plan, name)
            for name in ("tokens", "tokens_per_step", "seq_len", "warmup_steps", "seed", "precision")
        },
        **{"parameters": plan.n_params, "recompute": plan.execution.recompute, "ranks": plan.world_size},
        **{"lr": optimizer.lr, "ssm_lr": min(optimizer.lr, optimizer.ssm_lr), "weight_decay": optimizer.weight_decay},
        "max_norm": job_config.training.max_norm,
    }


def set_aside(folder: Path) -> None:
    """Move another run's events out of the way, to `folder/earlier-TIME`: TensorBoard shows them as a run beside this."""
    files = sorted(folder.glob(EVENTS))
    if not files:
        return
    began = time.strftime("%Y%m%d-%H%M%S", time.localtime(files[0].stat().st_mtime))
    aside = folder / f"earlier-{began}"
    for source, target in ((folder, aside), (folder / TOKENS, aside / TOKENS)):
        target.mkdir(parents=True, exist_ok=True)
        for file in sorted(source.glob(EVENTS)):
            file.rename(target / file.name)
    logger.info("TensorBoard: events of an earlier run moved to %s", aside)
