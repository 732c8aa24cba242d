"""The curves of a run in TensorBoard and Weights & Biases, and a description of the run.

A run has one curve, however often it was restarted.
"""

import json
import os
import secrets
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from interdomain.checkpoint.event_files import open_events
from interdomain.environment import environment
from interdomain.folders import write_atomically

from ..host import BaseLogger, logger
from ..plan.device import device_here
from ..plan.run_plan import RunPlan
from ..settings.schema import JobConfig

# TorchTitan's tags and this plugin's. Custom Scalars cannot show tags with parentheses.
RENAMED = {
    "mfu(%)": "machine/mfu_percent",
    "memory/max_reserved(GiB)": "machine/memory_reserved_gib",
    "time_metrics/data_loading(%)": "machine/data_wait_percent",
    "time_metrics/end_to_end(s)": "machine/seconds_per_step",
}
# The page "Custom Scalars" of TensorBoard: the tags of each chart, as regular expressions.
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
    """Writes TensorBoard events.

    Every start of the run writes a file of its own, which says with which step it begins
    (`purge_step`). TensorBoard drops what earlier files have from that step on, so that steps which
    a restart runs again replace the old ones.
    """

    def __init__(
        self,
        folder: Path,
        plan: RunPlan,
        job: JobConfig,
        first_step: int,
        fingerprints: dict[str, str],
    ) -> None:
        """Opens a file of events, and writes a description of this start.

        Args:
            folder: Folder of the run's events.
            plan: The plan of the run.
            job: Its configuration.
            first_step: The first step after this start.
            fingerprints: Fingerprints of the training and validation texts.
        """
        self.writer: SummaryWriter | None = open_events(folder, first_step, max_queue=1000)
        logger.info("TensorBoard: %s, from step %d", folder, first_step)

        # The charts of the page "Custom Scalars".
        layout: dict[str, Any] = {}
        for category, charts in CHARTS.items():
            layout[category] = {}
            for title, tags in charts.items():
                # TensorBoard matches the start of a tag. `$` makes it match the whole tag.
                layout[category][title] = ["Multiline", [f"{tag}$" for tag in tags]]
        self.writer.add_custom_scalars(layout)

        # The page "Text".
        for name, entry in description_of(plan, job, fingerprints).items():
            text = json.dumps(entry, indent=2)
            self.writer.add_text(f"run/{name}", f"```\n{text}\n```", first_step)
        self.writer.flush()

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Writes scalars, by tag.

        Args:
            metrics: Scalars by TorchTitan's tags.
            step: The step that they belong to.
        """
        if self.writer is None:
            return
        try:
            for tag, value in with_our_tags(metrics).items():
                self.writer.add_scalar(tag, value, step)
            # A run that is killed must not lose the last two minutes, TensorBoard's default.
            self.writer.flush()
        except OSError as e:
            # A full disk ends the curve, but not the run. Checkpoints report their own failures.
            logger.warning(
                "TensorBoard's events could not be written (%s): the curve ends here, the run goes on.",
                e,
            )
            self.writer = None

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


class WandbLog(BaseLogger):
    """Logs to one run of Weights & Biases across restarts. The file `wandb_id` has its id.

    The environment variables of Weights & Biases hold: WANDB_PROJECT, WANDB_MODE and others. The x
    axis is the value `step`, not the number of the record: Weights & Biases drops records whose
    number it has had before, and a restart runs steps again.
    """

    def __init__(
        self, folder: Path, plan: RunPlan, job: JobConfig, fingerprints: dict[str, str]
    ) -> None:
        """Starts or continues the run there.

        Args:
            folder: The run's folder.
            plan: The plan of the run.
            job: Its configuration.
            fingerprints: Fingerprints of the training and validation texts.
        """
        import wandb  # pyright: ignore[reportMissingImports]

        id_file = folder / "wandb_id"
        if not id_file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(id_file, secrets.token_hex(8).encode())
        self.run = wandb.init(
            id=id_file.read_text().strip(),
            resume="allow",
            dir=folder,
            project=os.environ.get("WANDB_PROJECT", "interdomain"),
            name=os.environ.get("WANDB_RUN_NAME", folder.name),
            config=description_of(plan, job, fingerprints),
        )
        self.run.define_metric("*", step_metric="step")
        logger.info("Weights & Biases: run %s of project %s", self.run.id, self.run.project)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.run.log({"step": step, **with_our_tags(metrics)})

    def close(self) -> None:
        self.run.finish()


def with_our_tags(metrics: dict[str, Any]) -> dict[str, Any]:
    """Returns metrics with this plugin's tags, too.

    Args:
        metrics: Scalars by TorchTitan's tags.
    """
    metrics = dict(metrics)
    for tag, our_tag in RENAMED.items():
        if tag in metrics:
            metrics[our_tag] = metrics[tag]
    return metrics


def description_of(plan: RunPlan, job: JobConfig, fingerprints: dict[str, str]) -> dict[str, Any]:
    """Describes a start of a run: settings and machine, as JSON values.

    Args:
        plan: The plan of the run.
        job: Its configuration.
        fingerprints: Fingerprints of the training and validation texts.
    """
    return {
        "hyperparameters": hyperparameters(plan, job) | {"fingerprints": fingerprints},
        "configuration": job.to_dict(),
        "environment": environment(device_here()),
    }


def hyperparameters(plan: RunPlan, job: JobConfig) -> dict[str, Any]:
    """Returns the hyperparameters in which the runs of a study differ (`tools.study`).

    Args:
        plan: The plan of the run.
        job: The configuration of the run.
    """
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
    # The initial values of the mixer. Baselines have no such settings.
    for mixer in plan.config.mixers:
        if mixer.kind == "interdomain":
            for name in ("n_basis", "c_scale", "linear_scale", "dt_min", "dt_max", "a_init"):
                value = getattr(mixer, name)
                if value is not None:
                    table[name] = value
    return table
