"""One training run: it is built here, and its training step is here.

TorchTitan's trainer gives the loop over the steps (`Trainer.train`: load, step, save, validate), the process group, and its
state in a checkpoint. What it builds we build ourselves, from the plan and the plugin's own classes.
"""

import itertools
import logging
import os
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from interdomain.launcher import ENDED, notify_launcher
from interdomain.model import Transformer
from interdomain.patches import one_gloo_thread

from .data.dataloader import Batch, open_data
from .data.folders import data_record, text_fingerprint
from .errors import user_errors
from .host import (
    TRAIN_STATE,
    GarbageCollection,
    Trainer,
    init_logger,
    logger,
    set_determinism,
    set_pg_timeouts,
    translate,
)
from .host.patches import replace_meshes, use_cpu_if_alone
from .parallelize import parallelize, set_initial_values
from .plan.device import local_device
from .plan.run_plan import RunPlan, in_steps, make_plan
from .resume.checkpoint import SelfDescribingCheckpoints, describe_run
from .resume.lock import hold_folder, require_shared
from .resume.preemption import Preemption
from .resume.resume_from import loads_a_model
from .settings.schema import JobConfig
from .step.gradients import clip, reduce_shares
from .step.meshes import meshes_of
from .step.optimizer import GroupedOptimizers, GroupedSchedulers
from .step.passes import Passes, Pipeline, prune_to_stage
from .watch.metrics import InterdomainMetrics
from .watch.validate import FixedValidator


@record
def run(job: JobConfig) -> None:
    """Build, train and close the run of a configuration, on every rank that torchrun started."""
    init_logger()
    # TorchTitan sets the time limits of simulated groups, too, which have none.
    warnings.filterwarnings(
        "ignore", message="Set timeout is now only supported for either nccl or gloo"
    )
    warnings.filterwarnings("ignore", message=".*_set_pg_timeout. is deprecated")  # PyTorch 2.14
    if (
        os.environ.get("GROUP_RANK", "0") != "0"
    ):  # torchrun's number of this node: one of many speaks for all
        logger.setLevel(logging.WARNING)
    logger.info("Starting job: %s", job.job.description)
    trainer = None
    try:
        trainer = InterdomainTrainer(job)
        trainer.train()
    except Exception:
        if trainer:
            trainer.close()
        raise
    trainer.close()
    if trainer.step >= trainer.plan.steps:
        notify_launcher(ENDED)
    dist.destroy_process_group()


@user_errors
def check(job: JobConfig) -> RunPlan:
    """The plan of a configuration. If it cannot run on the ranks that were started, the process ends with an error message."""
    ranks = "WORLD_SIZE"
    if job.comm.mode == "fake_backend":
        ranks = "NGPU"
        missing = sorted({"NGPU", "RANK", "LOCAL_RANK"} - os.environ.keys())
        if missing:
            raise ValueError(
                f"comm.mode = fake_backend needs the environment variables NGPU (how many ranks to simulate), RANK=0 and "
                f"LOCAL_RANK=0: {', '.join(missing)} is not set."
            )
    return make_plan(job, int(os.environ[ranks]))


class InterdomainTrainer(Trainer):
    """One rank's part of a run: TorchTitan's `Trainer` with this project's model, data, optimizer, checkpoints and validation.

    Building it checks the configuration before the process group exists, then makes meshes, data, model, optimizer and
    checkpoints, in this order. `train()`, TorchTitan's, runs all steps; it saves and validates between them.

    Attributes:
        job: the settings.
        plan: what follows from them: model, steps, batch, ranks (`plan.RunPlan`).
        meshes: the process groups of this rank.
        model_parts: this rank's stages of the pipeline; without one, the model.
        passes: forward and backward passes of a step.
        step: the step that runs, from 1.

    Raises:
        SystemExit: the configuration cannot run, or another process writes to the folder; the reason is printed.
    """

    # TorchTitan's class declares other types for these.
    job_config: Any
    config: Any
    checkpointer: Any  # SelfDescribingCheckpoints
    metrics_processor: Any  # InterdomainMetrics
    model_parts: list[Any]  # of Transformer
    optimizers: Any  # GroupedOptimizers
    validator: Any  # FixedValidator

    def __init__(self, job: JobConfig) -> None:
        # Before the process group exists: nothing is built for a run that cannot be.
        self.plan = plan = check(job)
        use_cpu_if_alone()
        self.preemption = Preemption()
        self.lock = hold_folder(job)

        self.job = job = in_steps(job, plan)
        self.device = local_device()
        self.job_config = self.config = config = translate(job)
        if self.device.type == "cpu":
            one_gloo_thread()
            config.comm.trace_buf_size = (
                0  # TorchTitan would make an empty folder for NCCL's recorder
            )
        os.environ.pop(
            "TORCH_NCCL_ASYNC_ERROR_HANDLING", None
        )  # torchrun's: TorchTitan sets its own, with a warning
        self.parallel_dims = self.init_distributed()
        if job.comm.mode == "default":  # otherwise there are no other ranks
            require_shared(job, self.lock)
        self.gc_handler = GarbageCollection(gc_freq=job.training.gc_freq)
        self.meshes = meshes_of(self.parallel_dims)
        replace_meshes(self.parallel_dims, self.meshes.axes)
        self.meshes.set_timeouts(job.comm.init_timeout_seconds)
        set_determinism(self.parallel_dims, self.device, config.debug, distinct_seed_mesh_dims=[])

        rank = self.meshes.data_rank  # the ranks that share a sequence read the same samples
        tokenizer, self.dataloader = open_data(job, plan, rank, plan.topology.data_ranks)
        dataset = self.dataloader.dataset
        self.metrics_processor = InterdomainMetrics(job, self.parallel_dims, plan, self.meshes)
        self.model_parts = self.metrics_processor.model_parts = self._build_model()
        passes = Pipeline if plan.topology.pipeline > 1 else Passes
        targets = plan.global_batch * dataset.targets
        self.passes = passes(self.model_parts, plan, self.meshes, self.device, targets)
        self.optimizers = self.metrics_processor.optimizers = GroupedOptimizers(
            self.model_parts, job.optimizer
        )
        self.lr_schedulers = GroupedSchedulers(self.optimizers, job.lr_scheduler, plan.steps)
        self.step = self.ntokens_seen = 0
        self.checkpointer = SelfDescribingCheckpoints(
            record=describe_run(plan, job, data_record(job, dataset, tokenizer), tokenizer),
            tokenizer=tokenizer,
            milestones=plan.milestones,
            lock=self.lock,
            dataloader=self.dataloader,
            model_parts=self.model_parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={TRAIN_STATE: self},
            checkpoint_config=config.checkpoint,
            base_folder=job.job.dump_folder,
        )
        fingerprints = {"train": text_fingerprint(dataset)}
        if job.validation.enable:
            self.validator = FixedValidator(
                job,
                rank,
                plan.topology.data_ranks,
                self.passes,
                self.metrics_processor,
                self.checkpointer,
            )
            fingerprints["validation"] = text_fingerprint(self.validator.dataset)
        self.checkpointer.record["fingerprints"] = self.metrics_processor.fingerprints = (
            fingerprints
        )
        logger.info(
            "%s, %s parameters, %d steps: the trainer is built",
            plan.cell,
            f"{plan.n_params:,}",
            plan.steps,
        )

    def _build_model(self) -> list[Transformer]:
        """This rank's stages of the pipeline; without one, the whole model."""
        job, plan = self.job, self.plan
        logger.info("Building %s", plan.config)
        loaded = loads_a_model(job)
        parts = []
        for stage in plan.stages_of(self.meshes.pipeline.get_local_rank()):
            with torch.device("meta"):
                model = Transformer(plan.config, plan.execution)
            prune_to_stage(model, plan.stages[stage])
            parallelize(model, self.meshes, job, self.job_config, sum_in_backward=False)
            model.to_empty(device="cpu" if job.training.enable_cpu_offload else self.device.type)
            set_initial_values(
                model, plan.seed, loaded=loaded, device=self.device, group=self.meshes.stage
            )
            parts.append(model.train())
        return parts

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """Takes one step of the optimizer. The host waits for the device in logged steps only."""
        # Forward and backward: the loss is this rank's share of the mean.
        self.optimizers.zero_grad()
        batches = itertools.islice(data_iterator, self.plan.accumulation)
        loss = self.passes.run(batches, backward=True) / self.passes.targets

        # Gradients of all ranks.
        parameters = [p for part in self.model_parts for p in part.parameters()]
        reduce_shares(parameters, self.meshes)
        norm = clip(parameters, self.job.training.max_norm, self.meshes)

        # One all-reduce decides for all ranks whether to skip this update and whether to stop after it.
        decision = self.optimizers.step_guard.decide(loss, norm, self.preemption.asked is not None)
        self.optimizers.step(decision.skip)
        self.lr_schedulers.step()
        self.preemption.cast(decision.stop)

        # The log, and the end of a run that skips its steps.
        if self.metrics_processor.should_log(self.step):
            ranks = (
                self.plan.topology.data_ranks * self.plan.topology.context
            )  # ranks with tokens of their own
            worst = self.meshes.sum_over_model_ranks(loss) * ranks
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            self.metrics_processor.log_step(
                self.step, decision.loss.item(), worst.item(), norm.item()
            )
            max_skipped = self.job.training.max_skipped_steps
            self.optimizers.step_guard.check(
                max_skipped, self.step, decision.loss.item(), norm.item()
            )

    def should_continue_training(self) -> bool:
        """True if another step follows. TorchTitan asks between any two steps, after it has saved. Here a run that is asked to
        stop saves and ends."""
        if (
            not self.preemption.listening
        ):  # before any step: from here on there is something to save
            self.preemption.listen()
            self.first_step = self.step + 1
            self.metrics_processor.begin(self.step + 1)
            if self.step >= self.plan.steps:
                logger.warning(
                    "NO STEP IS TAKEN: the run continues from step %d, and training.steps = %d. To train on, set it higher.",
                    *(self.step, self.plan.steps),
                )
            if self.job.validation.enable:
                self.validator.run_missed_validation(self.model_parts, self.step)
        elif self.step == self.first_step:  # of this start: what is slow once has been done
            set_pg_timeouts(
                timedelta(seconds=self.job.comm.train_timeout_seconds), self.parallel_dims
            )
        if not super().should_continue_training():
            self.optimizers.step_guard.warn_at_the_end(self.step)
            return False  # asked or not, the run is at its end
        self.checkpointer.require_folder()
        if self.preemption.agreed():
            self.preemption.leave(self)
        return True

    def close(self) -> None:
        """Finish what is being written, and release the folder."""
        super().close()
        if self.lock:
            self.lock.release()


def __getattr__(name: str) -> Any:
    """TorchTitan 0.3.0's entry asks for the configuration of a file: --module interdomain.titan.trainer --config FILE.toml."""
    if name.endswith(".toml"):
        from .entry_0_3 import configuration_of_ours

        return lambda: configuration_of_ours(name, InterdomainTrainer)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
