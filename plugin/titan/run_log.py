"""A run's TensorBoard folder: one curve across restarts, the same by tokens, hyperparameters, and a prepared layout."""

import contextlib
import functools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from .host import BaseLogger, logger
from .layout import BY_TOKENS, LAYOUT, RENAMED, TOKENS

EVENTS = "events.out.tfevents.*"


def _or_without(write):
    """A write that fails, on a full disk for one, ends the curves and not the run."""

    @functools.wraps(write)
    def written(self, *args):
        if self.given_up:
            return
        try:
            write(self, *args)
        except OSError as e:
            self._give_up(e)

    return written


class RunLog(BaseLogger):
    """Writes into `folder`, to which every restart of the run appends.

    Steps that a restart runs again replace the old ones: each file says with which step it begins (`purge_step`), and
    TensorBoard drops what earlier files hold from there on. `folder/tokens` holds a few curves again with the number of
    tokens in place of the step; a folder of its own, for what a file drops, it drops from every curve of its folder.
    """

    def __init__(self, folder: Path, plan, job_config) -> None:
        self.folder, self.plan, self.job_config = folder, plan, job_config
        self.steps = self.tokens = None  # writers
        self.given_up = False

    @_or_without
    def begin(self, first_step: int, tokens_at: Callable[[int], int]) -> None:
        """Open the files of a start whose first step is `first_step` (1: a run from the beginning).

        tokens_at: step -> tokens trained on up to its end; the steps of an earlier start may have been of another number.
        """
        if first_step == 1:
            set_aside(self.folder)
        threading.excepthook = _thread_failed
        self.tokens_at = tokens_at
        self.steps = SummaryWriter(self.folder, max_queue=1000, purge_step=first_step)
        self.tokens = SummaryWriter(self.folder / TOKENS, max_queue=1000, purge_step=tokens_at(first_step - 1) + 1)
        logger.info("TensorBoard: %s, from step %d", self.folder, first_step)
        self._describe(first_step)

    @_or_without
    def log(self, metrics: dict, step: int) -> None:
        metrics = metrics | {ours: metrics[theirs] for theirs, ours in RENAMED.items() if theirs in metrics}
        if "throughput(tps)" in metrics:  # of one rank
            metrics["machine/tokens_per_second"] = metrics["throughput(tps)"] * self.plan.world_size
        for tag, value in metrics.items():
            self.steps.add_scalar(tag, value, step)
        for tag, by_tokens in BY_TOKENS.items():
            if tag in metrics:
                self.tokens.add_scalar(by_tokens, metrics[tag], self.tokens_at(step))

    @_or_without
    def histogram(self, tag: str, values, step: int) -> None:
        self.steps.add_histogram(tag, values, step)

    @_or_without
    def flush(self) -> None:
        """A run that ends early must not take its last two minutes of metrics with it."""
        self.steps.flush()
        self.tokens.flush()

    @_or_without
    def close(self) -> None:
        if self.steps is not None:  # a run may end before its first step
            self.steps.close()
            self.tokens.close()

    def _give_up(self, error: OSError) -> None:
        self.given_up = True
        logger.warning(
            "TensorBoard: writing into %s failed (%s). Training goes on, without curves from here on; the next start writes "
            "them again.",
            self.folder,
            error.strerror or error,
        )
        for writer in (self.steps, self.tokens):
            with contextlib.suppress(OSError):
                if writer is not None:
                    writer.close()

    def _describe(self, step: int) -> None:
        self.steps.add_custom_scalars(LAYOUT)
        # Not add_hparams: it would open a run of its own, with the time as its name, at every restart.
        curves = dict.fromkeys(("loss_metrics/global_avg_loss", "validation_metrics/loss"))
        facts = hyperparameters(self.plan, self.job_config)
        experiment, session, _ = hparams(facts, curves)
        self.steps.file_writer.add_summary(experiment)
        self.steps.file_writer.add_summary(session)
        configuration = json.dumps(self.job_config.to_dict(), indent=2, default=str)
        # TensorBoard keeps the first start's row of HParams; the text is every start's.
        texts = {"plan": self.plan.describe(), "hyperparameters": json.dumps(facts), "configuration": configuration}
        for tag, text in texts.items():
            self.steps.add_text(f"run/{tag}", f"```\n{text}\n```", step)
        self.flush()


def _thread_failed(args, otherwise=threading.excepthook) -> None:
    """A writer's thread hands its failure to who writes next: printed as well, its traceback would look like the run's end."""
    if not type(args.thread).__module__.startswith("tensorboard."):
        otherwise(args)


def hyperparameters(plan, job_config) -> dict:
    """What runs of a study differ in, one row of TensorBoard's table."""
    optimizer, mixer = job_config.optimizer, plan.config.mixer
    start = ("n_basis", "c_scale", "linear_scale", "dt_min", "dt_max", "a_init")
    return {
        "model": plan.cell.size,
        "condition": plan.cell.condition,
        **{
            name: getattr(mixer, name) for name in start if mixer.kind != "softmax" and getattr(mixer, name) is not None
        },
        "parameters": plan.n_params,
        "tokens": plan.tokens,
        "tokens_per_step": plan.tokens_per_step,
        "seq_len": plan.seq_len,
        "warmup_steps": plan.warmup_steps,
        "lr": optimizer.lr,
        "ssm_lr": min(optimizer.lr, optimizer.ssm_lr),
        "weight_decay": optimizer.weight_decay,
        "max_norm": job_config.training.max_norm,
        "seed": plan.seed,
        "recompute": plan.execution.recompute,
        "ranks": plan.world_size,
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
