"""The plan of a run: what a configuration implies, checked before anything is built.

`make_plan` is the one place that knows which settings are possible together. The trainer and the
dry run both call it. Every error names the setting, the value that was set, and the values that are
allowed.
"""

from dataclasses import dataclass
from typing import Any

import torch

from interdomain.model import (
    SIZES,
    Cell,
    Execution,
    ModelConfig,
    build_config,
    cell_of,
    count_parameters,
    meta_model,
)
from interdomain.model.config import EXECUTION_SETTINGS
from interdomain.model.flops import state_size, train_flops_per_token
from interdomain.model.transformer import mixer_class

from ..settings.problems import Problems
from ..settings.rules import (
    check_batch,
    check_combinations,
    check_device,
    check_reduction,
    check_schedule,
    check_topology,
)
from ..settings.schema import JobConfig
from .device import device_here
from .schedule import milestone_steps, run_length
from .topology import Topology, pipeline_stages, topology


@dataclass(frozen=True)
class RunPlan:
    """A run to come: the model, its length in steps and tokens, and its ranks.

    Attributes:
        config: Configuration of the model.
        size: Name of the model's size, such as 125M.
        execution: How the mixers are computed; no part of the model.
        seed: Seed of the initial weights.
        n_params: Parameters of the model.
        flops_per_token: FLOPs of the forward and backward pass per token.
        topology: Degrees of parallelism.
        stages: Names of the modules of each pipeline stage; `stages_of` gives the stages of a rank.
        schedule: Schedule of the pipeline.
        local_batch: Sequences of a micro-batch on one rank.
        global_batch: Sequences of a step on all ranks.
        seq_len: Tokens of a sequence.
        steps: Steps of the run.
        warmup_steps: Steps of the learning rate's warmup.
        milestones: Steps whose checkpoints are never removed.
        precision: The setting training.precision.
        reduces_each: Whether gradients are summed over the ranks after each micro-batch of several.
    """

    config: ModelConfig
    size: str
    execution: Execution
    seed: int
    n_params: int
    flops_per_token: int
    topology: Topology
    stages: tuple[tuple[str, ...], ...]
    schedule: str
    local_batch: int
    global_batch: int
    seq_len: int
    steps: int
    warmup_steps: int
    milestones: frozenset[int]
    precision: str
    reduces_each: bool

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step, on each rank that reads samples."""
        return self.global_batch // (self.local_batch * self.topology.data_ranks)

    def stages_of(self, rank: int) -> range:
        """Returns the numbers of the stages that one rank of the pipeline has.

        Args:
            rank: The rank's place in the pipeline.
        """
        return range(rank, len(self.stages), self.topology.pipeline)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step on all ranks."""
        return self.global_batch * self.seq_len

    @property
    def tokens(self) -> int:
        """Tokens of the run."""
        return self.steps * self.tokens_per_step

    @property
    def flops(self) -> int:
        """FLOPs of the run, forward and backward."""
        return self.tokens * self.flops_per_token

    @property
    def state(self) -> tuple[int, int]:
        """Numbers of the state of all layers: per sequence, and per token of a sequence."""
        fixed = 0
        growing = 0
        for layer in self.config.layers:
            if mixer_class(layer.mixer).state_grows(layer):
                growing += state_size(layer)
            else:
                fixed += state_size(layer)
        return fixed, growing

    @property
    def cell(self) -> Cell:
        """Names of the model's size and condition."""
        return cell_of(self.config, self.size)


def make_plan(
    job: JobConfig,
    world_size: int,
    on_gpus: bool = False,
    micro_batch: int | None = None,
) -> RunPlan:
    """Checks a configuration for a run on `world_size` ranks, and computes its plan.

    Nothing is built and nothing is written.

    Args:
        job: The configuration of the run.
        world_size: Number of ranks.
        on_gpus: The ranks are those of other machines, which have GPUs. Otherwise settings that
            this machine cannot honour are refused.
        micro_batch: Sequences of the micro-batches into which TorchTitan's pipeline divides a local
            batch. None: a local batch is a micro-batch.

    Raises:
        ValueError: The configuration cannot run. The message has all problems that can be told
            apart.
    """
    problems = Problems()
    with problems.collect():
        check_combinations(job)
    if not on_gpus:
        with problems.collect():
            check_device(job)
    plan = None
    with problems.collect():
        device = torch.device("cuda") if on_gpus else device_here()
        plan = _plan_on(device, job, world_size, micro_batch)
    problems.raise_all()
    assert plan is not None
    return plan


def _plan_on(
    device: torch.device, job: JobConfig, world_size: int, micro_batch: int | None
) -> RunPlan:
    """Returns the plan of a run. Each part is checked before the next one is computed from it.

    Args:
        device: Where the ranks compute.
        job: The configuration of the run.
        world_size: Number of ranks.
        micro_batch: As for `make_plan`.
    """
    parallel = job.parallelism

    # The model, and the ranks that divide it.
    config = model_config(job)
    mesh = topology(parallel, world_size)
    modules = pipeline_stages(parallel, config.n_layers)
    check_topology(job, config, device)

    # The batch of a step. TorchTitan's micro-batches are the local batches of the plan.
    training = with_batch(job, mesh.data_ranks).training
    check_batch(job, training, mesh.data_ranks, micro_batch)
    global_batch = training.global_batch_size
    local_batch = micro_batch or training.local_batch_size
    micro_batches = global_batch // (local_batch * mesh.data_ranks)
    check_reduction(training, micro_batches, pipelined=mesh.pipeline > 1)

    # The length of the run.
    tokens_per_step = global_batch * training.seq_len
    steps, warmup_steps = run_length(training, job.lr_scheduler, tokens_per_step)
    check_schedule(job, steps)

    # How the mixer is computed, which is no part of the model.
    chosen = {name: job[f"mixer.{name}"] for name in EXECUTION_SETTINGS}
    execution = Execution(**chosen, bf16_products=training.precision == "bf16-products")
    for mixer in config.mixers:
        execution.check_feature_map(mixer)

    return RunPlan(
        config=config,
        size=job.model.flavor,
        execution=execution,
        seed=job.debug.seed,
        n_params=count_parameters(meta_model(config)),
        flops_per_token=train_flops_per_token(config, training.seq_len),
        topology=mesh,
        stages=modules,
        schedule=parallel.pipeline_parallel_schedule,
        local_batch=local_batch,
        global_batch=global_batch,
        seq_len=training.seq_len,
        steps=steps,
        warmup_steps=warmup_steps,
        milestones=milestone_steps(job.checkpoint, steps, tokens_per_step),
        precision=training.precision,
        reduces_each=micro_batches > 1 and training.reduce_gradients == "micro-batch",
    )


def make_plan_for_torchtitan(
    job: JobConfig,
    world_size: int,
    micro_batch: int,
) -> RunPlan:
    """Returns the plan of a run under TorchTitan's own trainer, whose steps differ from ours.

    TorchTitan sums gradients after every micro-batch. With a pipeline it divides a local batch into
    micro-batches. These micro-batches are the local batches of the plan.

    Args:
        job: The configuration of the run.
        world_size: Number of ranks.
        micro_batch: TorchTitan's setting pipeline_parallel_microbatch_size.

    Raises:
        ValueError: The configuration cannot run. The message has all problems that can be told
            apart.
    """
    if job.parallelism.pipeline_parallel_degree == 1:
        return make_plan(job.changed({"training.reduce_gradients": "micro-batch"}), world_size)
    return make_plan(job, world_size, micro_batch=micro_batch)


def with_batch(job: JobConfig, data_ranks: int) -> JobConfig:
    """Returns the configuration with the numbers of sequences of a run on these ranks.

    Args:
        job: The configuration of the run.
        data_ranks: Groups of ranks that read samples of their own.
    """
    local_batch = job.training.local_batch_size
    global_batch = job.training.global_batch_size
    if global_batch < 0:
        global_batch = local_batch * data_ranks
    # A rank reads at most its share of a step. If the ranks do not divide the step, there is no
    # share, and `check_batch` says so.
    if global_batch % data_ranks == 0:
        local_batch = min(local_batch, global_batch // data_ranks)
    return job.changed(
        {
            "training.local_batch_size": local_batch,
            "training.global_batch_size": global_batch,
        }
    )


def in_steps(job: JobConfig, plan: RunPlan) -> JobConfig:
    """Returns the configuration as TorchTitan reads it: lengths in steps, this run's local batch.

    Args:
        job: The configuration of the run.
        plan: The plan of the run.
    """
    batch = with_batch(job, plan.topology.data_ranks).training
    return job.changed(
        {
            "training.local_batch_size": batch.local_batch_size,
            "training.steps": plan.steps,
            "training.tokens": 0,
            "lr_scheduler.warmup_steps": plan.warmup_steps,
            "lr_scheduler.warmup_tokens": 0,
        }
    )


def model_config(job: JobConfig) -> ModelConfig:
    """Returns the model of a size and a condition, with the values that [model] and [mixer] set.

    Args:
        job: The configuration of the run.
    """
    changed: dict[str, Any] = {}
    for name, value in vars(job.mixer).items():
        if name != "condition" and name not in EXECUTION_SETTINGS and value is not None:
            changed[name] = value
    for name in ("vocab_size", "dim", "n_layers", "n_heads"):
        value = getattr(job.model, name)
        if value:
            changed[name] = value
    # A head is dim / n_heads wide.
    if "dim" in changed or "n_heads" in changed:
        numbers = SIZES[job.model.flavor] | changed
        changed["head_dim"] = numbers["dim"] // numbers["n_heads"]
    return build_config(
        job.model.flavor,
        job.mixer.condition,
        max_seq_len=job.training.seq_len,
        **changed,
    )
