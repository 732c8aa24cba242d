"""A run's curves in TensorBoard and Weights & Biases: one across restarts, what the run is, and a page of charts."""

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from interdomain.checkpoint.event_files import open_events
from interdomain.environment import environment
from interdomain.folders import write_whole

from ..errors import stop
from ..host import BaseLogger, logger
from ..plan.device import device_here
from ..plan.dry_run import describe
from ..plan.run_plan import RunPlan
from ..settings.schema import JobConfig

# TorchTitan's tags -> ours: the custom scalars' charts stay empty where a tag has parentheses.
RENAMED = {
    "mfu(%)": "machine/mfu_percent",
    "memory/max_reserved(GiB)": "machine/memory_reserved_gib",
    "time_metrics/data_loading(%)": "machine/data_wait_percent",
    "time_metrics/end_to_end(s)": "machine/seconds_per_step",
}
# The tab "Custom Scalars": a run's health on one page. A chart's lines are patterns of tags.
CHARTS = {
    "Learning": {
        "Loss: training, validation": ["loss_metrics/global_avg_loss", "validation_metrics/loss"],
        "Loss: mean and worst rank": [
            "loss_metrics/global_avg_loss",
            "loss_metrics/global_max_loss",
        ],
        "Validation: answers that are right (corpora that have answers)": [
            "validation_metrics/accuracy"
        ],
        "Gradient norm, before clipping": ["grad_norm"],
        "Gradient norm of the SSM group": ["grad_norm/ssm"],
        "Learning rates": [r"lr/\w+"],
        "Steps skipped": [r"skipped_steps/\w+"],
    },
    "Machine": {
        "Tokens per second, all ranks": ["machine/tokens_per_second"],
        "Model FLOPs utilisation (%)": ["machine/mfu_percent"],
        "Memory, peak since the last log (GiB)": ["machine/memory_reserved_gib"],
        "Waiting for data (% of the time)": ["machine/data_wait_percent"],
        "Seconds per step": ["machine/seconds_per_step"],
    },
    "Mixer by layer": {
        "Longest timescale (tokens)": [r"mixer/layer_\d+/timescale_tokens_max"],
        "Median timescale (tokens)": [r"mixer/layer_\d+/timescale_tokens_median"],
        "Smallest 1 - |Lambda|": [r"mixer/layer_\d+/one_minus_abs_lambda_min"],
        "Median Delta": [r"mixer/layer_\d+/dt_median"],
        "Share of modes at the bound on the decay": [r"mixer/layer_\d+/share_at_decay_bound"],
        "Root mean square of |C|": [r"mixer/layer_\d+/c_rms"],
    },
}


class RunLog(BaseLogger):
    """Writes into `folder`, to which every restart of the run appends.

    Steps that a restart runs again replace the old ones: each file says with which step it begins (`purge_step`), and
    TensorBoard drops what earlier files hold from there on.
    """

    def __init__(
        self,
        folder: Path,
        plan: RunPlan,
        job: JobConfig,
        first_step: int,
        fingerprints: dict[str, str],
    ) -> None:
        self.plan = plan
        self.writer: SummaryWriter | None = open_events(folder, first_step, max_queue=1000)
        logger.info("TensorBoard: %s, from step %d", folder, first_step)
        layout: dict[str, Any] = {}
        for category, charts in charts_of(job).items():
            layout[category] = {}
            for chart, tags in charts.items():
                # TensorBoard matches a pattern from the start only.
                layout[category][chart] = ["Multiline", [f"{tag}$" for tag in tags]]
        self.writer.add_custom_scalars(layout)
        for tag, facts in facts_of(plan, job, fingerprints).items():
            text = facts
            if tag != "plan":
                text = json.dumps(facts, indent=2)
            self.writer.add_text(f"run/{tag}", f"```\n{text}\n```", first_step)
        self.writer.flush()

    def log(self, metrics: dict[str, Any], step: int) -> None:
        if self.writer is None:
            return
        with self._until_it_fails():
            for tag, value in with_our_tags(metrics, self.plan).items():
                self.writer.add_scalar(tag, value, step)
            self.writer.flush()  # a run that is killed must not take its last two minutes of metrics with it

    def close(self) -> None:
        if self.writer is not None:
            with self._until_it_fails():
                self.writer.close()

    @contextlib.contextmanager
    def _until_it_fails(self) -> Iterator[None]:
        """A full disk ends the curve and not the run: its checkpoints decide for themselves."""
        try:
            yield
        except OSError as e:
            logger.warning(
                "TensorBoard's events could not be written (%s): the curve ends here, the run goes on.",
                e,
            )
            self.writer = None


class WandbLog(BaseLogger):
    """Logs to one run of Weights & Biases across restarts, whose id is the file wandb_id in `folder`.

    WANDB_PROJECT, WANDB_RUN_NAME, WANDB_MODE and the other variables of Weights & Biases hold. The x axis is the value `step`,
    not the number of the record: Weights & Biases drops records whose number it has had.
    """

    def __init__(
        self, folder: Path, plan: RunPlan, job: JobConfig, fingerprints: dict[str, str]
    ) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self.plan = plan
        id_file = folder / "wandb_id"
        if not id_file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(id_file, secrets.token_hex(8).encode())
        try:
            self.run = wandb.init(
                id=id_file.read_text().strip(),
                resume="allow",
                dir=folder,
                project=os.environ.get("WANDB_PROJECT", "interdomain"),
                name=os.environ.get("WANDB_RUN_NAME", folder.name),
                config=facts_of(plan, job, fingerprints),
            )
        except wandb.Error as e:
            stop(
                f"metrics.enable_wandb: Weights & Biases cannot be used ({e}). Log in with `wandb login`, set "
                "WANDB_MODE=offline, or leave the setting out."
            )
        self.run.define_metric("*", step_metric="step")
        logger.info("Weights & Biases: run %s of project %s", self.run.id, self.run.project)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.run.log({"step": step, **with_our_tags(metrics, self.plan)})

    def close(self) -> None:
        self.run.finish()


def with_our_tags(metrics: dict[str, Any], plan: RunPlan) -> dict[str, Any]:
    """TorchTitan's metrics, with our names for some of them, and the throughput of all ranks."""
    metrics = dict(metrics)
    for tag, ours in RENAMED.items():
        if tag in metrics:
            metrics[ours] = metrics[tag]
    if "throughput(tps)" in metrics:  # of one rank
        metrics["machine/tokens_per_second"] = metrics["throughput(tps)"] * plan.topology.ranks
    return metrics


def charts_of(job: JobConfig) -> dict[str, dict[str, list[str]]]:
    """CHARTS, and one for the loss of each stretch of positions: TensorBoard gives the curves of a chart one colour."""
    charts = dict(CHARTS)
    if job.validation.enable:
        by_position = {}
        begin = 0
        while begin < job.validation.seq_len:
            end = min(2 * begin or 1, job.validation.seq_len)
            by_position[f"Tokens {begin:,} to {end - 1:,} of the window"] = [
                rf"validation_position/{begin:04d}-\d+"
            ]
            begin = end
        charts["Validation loss by position"] = by_position
    return charts


def facts_of(plan: RunPlan, job: JobConfig, fingerprints: dict[str, str]) -> dict[str, Any]:
    """Facts of a start of a run: its plan as text; hyperparameters, configuration and machine as tables."""
    return {
        "plan": describe(plan, job),
        "hyperparameters": hyperparameters(plan, job) | {"fingerprints": fingerprints},
        "configuration": job.to_dict(),
        "environment": environment(device_here()),
    }


def hyperparameters(plan: RunPlan, job: JobConfig) -> dict[str, Any]:
    """Settings in which the runs of a study differ (tools.study)."""
    optimizer = job.optimizer
    table = {
        "model": plan.cell.size,
        "condition": plan.cell.condition,
        "tokens": plan.tokens,
        "tokens_per_step": plan.tokens_per_step,
        "seq_len": plan.seq_len,
        "warmup_steps": plan.warmup_steps,
        "seed": plan.seed,
        "precision": plan.precision,
        "parameters": plan.n_params,
        "state": plan.state,
        "recompute": plan.execution.recompute,
        "ranks": plan.topology.ranks,
        "lr": optimizer.lr,
        "ssm_lr": min(optimizer.lr, optimizer.ssm_lr),
        "weight_decay": optimizer.weight_decay,
        "max_norm": job.training.max_norm,
    }
    # What the mixer starts from. Layers of other kinds have no such settings.
    for mixer in plan.config.mixers:
        if mixer.kind == "interdomain":
            for name in ("n_basis", "c_scale", "linear_scale", "dt_min", "dt_max", "a_init"):
                value = getattr(mixer, name)
                if value is not None:
                    table[name] = value
    return table
