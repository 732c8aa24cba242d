"""Our trainer: how a run is built, and what happens in one training step.

TorchTitan's trainer, the base class, provides the loop over the steps (`Trainer.train`: load a
checkpoint, train, save, validate), the process group, and the trainer's own state in checkpoints.
This module builds data, model, optimizer, checkpoints and validation from the plan of the run.
"""

import functools
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
    """Builds a run and trains it, on every rank that torchrun started.

    Args:
        job: The configuration of the run.
    """
    init_logger()
    # PyTorch 2.14 prints this for every group.
    warnings.filterwarnings("ignore", message=".*_set_pg_timeout. is deprecated")
    # torchrun sets GROUP_RANK, the number of this node. Only the first node logs its progress.
    if os.environ.get("GROUP_RANK", "0") != "0":
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

    # A run that a signal stopped is not at its end, and the launcher already knows.
    if trainer.step >= trainer.plan.steps:
        notify_launcher(ENDED)
    dist.destroy_process_group()


@user_errors
def check(job: JobConfig) -> RunPlan:
    """Makes the plan of a run on the ranks that were started.

    Args:
        job: The configuration of the run.

    Raises:
        SystemExit: The configuration cannot run. The reasons are printed.
    """
    variable = "WORLD_SIZE"  # torchrun sets it
    if job.comm.mode == "fake_backend":
        variable = "NGPU"
        if variable not in os.environ:
            raise ValueError(
                "comm.mode = fake_backend needs the environment variables NGPU (how many ranks to "
                "simulate), RANK=0 and LOCAL_RANK=0: NGPU is not set."
            )
    return make_plan(job, int(os.environ[variable]))


class InterdomainTrainer(Trainer):
    """Trains a run on one rank. `train()`, TorchTitan's method, runs all steps.

    Attributes:
        job: The settings, with all lengths in steps.
        plan: What follows from the settings: model, steps, batch sizes, topology.
        preemption: Signals that ask this rank to stop, and what all ranks agreed on.
        lock: Protects the run's folder from a second run. None if nothing is written there.
        meshes: The process groups of this rank.
        model_parts: This rank's stages of the pipeline; without one, the model.
        passes: Runs the forward and backward passes of a step.
        step: The current step, from 1.
        first_step: The first step after this start of the run.
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
        """Checks the configuration, and builds everything that the run needs. Collective.

        Args:
            job: The settings as the user gave them.

        Raises:
            SystemExit: The configuration cannot run, or another process writes to the run's folder.
                The reasons are printed.
        """
        # Before the process group: check the settings, and lock the run's folder.
        self.plan = plan = check(job)
        use_cpu_if_alone()
        self.preemption = Preemption()
        self.lock = hold_folder(job)

        # The process groups.
        self.job = job = in_steps(job, plan)
        self.device = local_device()
        self.job_config = self.config = config = translate(job)
        if self.device.type == "cpu":
            one_gloo_thread()
            # TorchTitan would make an empty folder for NCCL's flight recorder.
            config.comm.trace_buf_size = 0
        # TorchTitan sets its own value, and would warn of torchrun's.
        os.environ.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING", None)
        self.parallel_dims = self.init_distributed()
        if job.comm.mode == "default":  # a simulated run has no other ranks
            require_shared(job, self.lock)
        self.gc_handler = GarbageCollection(gc_freq=job.training.gc_freq)
        self.meshes = meshes_of(self.parallel_dims)
        replace_meshes(self.parallel_dims, self.meshes.axes)
        self.meshes.set_timeouts(job.comm.init_timeout_seconds)
        set_determinism(self.parallel_dims, self.device, config.debug, distinct_seed_mesh_dims=[])

        # Data. Ranks that share a sequence have the same data rank, and read the same samples.
        data_rank = self.meshes.data_rank
        data_ranks = plan.topology.data_ranks
        tokenizer, self.dataloader = open_data(job, plan, data_rank, data_ranks)
        dataset = self.dataloader.dataset
        fingerprints = {"train": text_fingerprint(dataset)}

        # Model, passes and optimizer. The clock of the metrics starts before all of it.
        self.metrics_processor = InterdomainMetrics(job, self.parallel_dims, plan, self.meshes)
        self.model_parts = self._build_model()
        passes = Passes
        if plan.topology.pipeline > 1:
            passes = Pipeline
        targets = plan.global_batch * dataset.targets
        self.passes = passes(self.model_parts, plan, self.meshes, self.device, targets)
        self.optimizers = GroupedOptimizers(self.model_parts, job.optimizer)
        self.lr_schedulers = GroupedSchedulers(self.optimizers, job.lr_scheduler, plan.steps)
        self.metrics_processor.model_parts = self.model_parts
        self.metrics_processor.optimizers = self.optimizers
        self.metrics_processor.fingerprints = fingerprints

        # Checkpoints. TorchTitan's trainer saves these two attributes and sets them on resume.
        self.step = 0
        self.ntokens_seen = 0
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

        # Validation.
        if job.validation.enable:
            self.validator = FixedValidator(
                job,
                data_rank,
                data_ranks,
                self.passes,
                self.metrics_processor,
                self.checkpointer,
            )
            fingerprints["validation"] = text_fingerprint(self.validator.dataset)
        self.checkpointer.record["fingerprints"] = fingerprints
        logger.info(
            "%s, %s parameters, %d steps: the trainer is built",
            plan.cell,
            f"{plan.n_params:,}",
            plan.steps,
        )

    def _build_model(self) -> list[Transformer]:
        """Builds this rank's stages of the pipeline; without one, the whole model."""
        job = self.job
        plan = self.plan
        logger.info("Building %s", plan.config)
        parts = []
        for stage in plan.stages_of(self.meshes.pipeline.get_local_rank()):
            # On the meta device first: no rank ever holds parameters that are not its own.
            with torch.device("meta"):
                model = Transformer(plan.config, plan.execution)
            prune_to_stage(model, plan.stages[stage])
            parallelize(model, self.meshes, job, self.job_config, sum_in_backward=False)

            # Then allocate this rank's shards, and draw their values.
            storage_device = self.device.type
            if job.training.enable_cpu_offload:
                storage_device = "cpu"
            model.to_empty(device=storage_device)
            set_initial_values(
                model,
                plan.seed,
                loaded=loads_a_model(job),
                device=self.device,
                group=self.meshes.stage,
            )
            parts.append(model.train())
        return parts

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """Trains one step. The host waits for the device only in steps that are logged.

        Args:
            data_iterator: Yields this rank's micro-batches.
        """
        # Forward and backward. The loss is this rank's share of the mean over all ranks.
        self.optimizers.zero_grad()
        batches = itertools.islice(data_iterator, self.plan.accumulation)
        loss = self.passes.run(batches, backward=True) / self.passes.targets

        # Sum the gradients over the ranks, and clip them.
        parameters = [p for part in self.model_parts for p in part.parameters()]
        reduce_shares(parameters, self.meshes)
        grad_norm = clip(parameters, self.job.training.max_norm, self.meshes)

        # One all-reduce decides for all ranks whether to skip this update, and to stop after it.
        step_guard = self.optimizers.step_guard
        stop_requested = self.preemption.asked is not None
        decision = step_guard.decide(loss, grad_norm, stop_requested)

        # Update the weights and the learning rate, and note whether to stop.
        self.optimizers.step(decision.skip)
        self.lr_schedulers.step()
        self.preemption.cast(decision.stop)

        # Log, and end a run that skips its steps.
        if self.metrics_processor.should_log(self.step):
            # The mean loss of the worst rank, from its share of the mean over all ranks.
            ranks_with_tokens = self.plan.topology.data_ranks * self.plan.topology.context
            worst_loss = self.meshes.sum_over_model_ranks(loss) * ranks_with_tokens
            dist.all_reduce(worst_loss, op=dist.ReduceOp.MAX)

            mean_loss = decision.loss.item()
            norm = grad_norm.item()
            self.metrics_processor.log_step(self.step, mean_loss, worst_loss.item(), norm)
            step_guard.report(self.step)
            max_skipped = self.job.training.max_skipped_steps
            step_guard.check_limit(max_skipped, self.step, mean_loss, norm)

    def should_continue_training(self) -> bool:
        """Returns True if another step follows.

        TorchTitan calls this before the first step, when a checkpoint has been loaded, and after
        each step, when it has been saved. A run that a signal asked to stop saves and ends here.
        """
        if not self.preemption.listening:
            self._begin()
        elif self.step == self.first_step:
            # The first step compiles and connects, which takes long. Later steps have less time.
            seconds = self.job.comm.train_timeout_seconds
            set_pg_timeouts(timedelta(seconds=seconds), self.parallel_dims)

        # A run at its end needs no other reason to stop.
        if not super().should_continue_training():
            self.optimizers.step_guard.report(self.step)
            return False
        self.checkpointer.require_folder()
        if self.preemption.agreed():
            self.preemption.leave(self)
        return True

    def _begin(self) -> None:
        """Prepares the first step after this start, once a checkpoint has been loaded."""
        # From here on there is something to save when a signal comes.
        self.preemption.listen()
        self.first_step = self.step + 1
        self.metrics_processor.begin(self.first_step)
        if self.step >= self.plan.steps:
            logger.warning(
                "NO STEP IS TAKEN: the run continues from step %d, and training.steps = %d. To train "
                "on, set it higher.",
                self.step,
                self.plan.steps,
            )
        if self.job.validation.enable:
            self.validator.run_missed_validation(self.model_parts, self.step)

    def close(self) -> None:
        """Finishes what is being written, and releases the run's folder."""
        super().close()
        if self.lock:
            self.lock.release()


def __getattr__(name: str) -> Any:
    """Returns a function that makes the configuration of a TOML file.

    TorchTitan 0.3.0's entry looks it up here, by the name of the file:
    --module interdomain.titan.trainer --config FILE.toml.
    """
    if name.endswith(".toml"):
        from .entry_0_3 import configuration_of_ours

        return functools.partial(configuration_of_ours, name, InterdomainTrainer)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
