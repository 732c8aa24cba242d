"""The plan of a run: what a job configuration implies, computed and checked before anything expensive is built.

`make_plan` is the one place that knows which settings are possible together; the trainer and the dry run both go through it.
Every error names the setting, what was given, and what is allowed.
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
    check_micro_batches,
    check_reduction,
    check_schedule,
    check_topology,
)
from ..settings.schema import JobConfig
from .device import device_here
from .schedule import milestone_steps, run_length
from .topology import Topology, pipeline_stages, stages_of, topology


@dataclass(frozen=True)
class RunPlan:
    """The run to come: the model, the schedule in steps and tokens, and the topology.

    Attributes:
        stages: Names of each pipeline stage's modules; `stages_of` says which stages a rank has.
        schedule: The pipeline's schedule.
        milestones: Steps whose checkpoints are never removed.
        reduces_each: Whether gradients are summed over the ranks after each micro-batch, and not once a step.
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
        """The stages of a rank of the pipeline."""
        return stages_of(rank, self.topology.pipeline, len(self.stages))

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    @property
    def flops(self) -> int:
        """FLOPs of the run, forward and backward."""
        return self.tokens * self.flops_per_token

    @property
    def state(self) -> tuple[int, int]:
        """Numbers of the state of all layers: (per sequence, per sequence and token)."""
        sizes = [0, 0]
        for layer in self.config.layers:
            sizes[mixer_class(layer.mixer).state_grows(layer)] += state_size(layer)
        return sizes[0], sizes[1]

    @property
    def cell(self) -> Cell:
        return cell_of(self.config, self.size)


def make_plan(
    job: JobConfig, world_size: int, on_gpus: bool = False, stages: list[list[str]] | None = None
) -> RunPlan:
    """Check a configuration for a run on `world_size` ranks, and compute its plan. Nothing is built and nothing is written.

    Args:
        on_gpus: The ranks are other machines', known to have GPUs. Otherwise settings that this machine cannot honour are
            refused.
        stages: As for `pipeline_stages`.

    Raises:
        ValueError: With every setting that is not possible.
    """
    problems = Problems()
    with problems.collect():
        check_combinations(job)
    if not on_gpus:
        with problems.collect():
            check_device(job)

    # The model, and the ranks that divide it.
    training, parallel = job.training, job.parallelism
    config = mesh = None
    with problems.collect():
        config = model_config(job)
        mesh = topology(parallel, world_size)
        modules = pipeline_stages(parallel, config.n_layers, stages)
        check_topology(job, config, torch.device("cuda") if on_gpus else device_here())
        at_once = training.local_batch_size * mesh.data_ranks
        global_batch = training.global_batch_size if training.global_batch_size > 0 else at_once
        check_batch(job, mesh.data_ranks, mesh.pipeline, global_batch)
        micro_batches = global_batch // at_once
        check_reduction(training, micro_batches, pipelined=mesh.pipeline > 1)
        tokens_per_step = global_batch * training.seq_len
        steps, warmup_steps = run_length(training, job.lr_scheduler, tokens_per_step)
        check_schedule(job, steps)
    problems.raise_all()
    assert config is not None
    assert mesh is not None

    # How the mixer is computed, which is no part of the model.
    chosen = {name: job[f"mixer.{name}"] for name in EXECUTION_SETTINGS}
    execution = Execution(**chosen, bf16_products=training.precision == "bf16-products")
    for mixer in config.mixers:
        execution.refuse_map(mixer)

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
        local_batch=training.local_batch_size,
        global_batch=global_batch,
        seq_len=training.seq_len,
        steps=steps,
        warmup_steps=warmup_steps,
        milestones=milestone_steps(job.checkpoint, steps, tokens_per_step),
        precision=training.precision,
        reduces_each=micro_batches > 1 and training.reduce_gradients == "micro-batch",
    )


def make_plan_for_torchtitan(
    job: JobConfig, world_size: int, micro_batch: int, stages: list[list[str]] | None = None
) -> RunPlan:
    """The plan of a run under TorchTitan's own trainer, which takes a step in another way.

    It sums gradients after every micro-batch. With a pipeline it divides a local batch into micro-batches, which are the local
    batches of the plan.

    Args:
        micro_batch: TorchTitan's setting pipeline_parallel_microbatch_size.
        stages: As for `pipeline_stages`.

    Raises:
        ValueError: With every setting that is not possible.
    """
    job = job.changed({"checkpoint.exclude_from_loading": []})  # TorchTitan's has no conditions
    if job.parallelism.pipeline_parallel_degree == 1:
        return make_plan(job.changed({"training.reduce_gradients": "micro-batch"}), world_size)
    check_micro_batches(job, micro_batch)
    mesh = topology(job.parallelism, world_size)
    global_batch = job.training.global_batch_size
    if global_batch < 0:
        global_batch = job.training.local_batch_size * mesh.data_ranks
    check_batch(job, mesh.data_ranks, 1, global_batch)
    divided = {
        "training.global_batch_size": global_batch,
        "training.local_batch_size": micro_batch,
        "validation.local_batch_size": micro_batch,
    }
    return make_plan(job.changed(divided), world_size, stages=stages)


def in_steps(job: JobConfig, plan: RunPlan) -> JobConfig:
    """The configuration with its lengths in steps: TorchTitan reads these, and the run records them."""
    return job.changed(
        {
            "training.steps": plan.steps,
            "training.tokens": 0,
            "lr_scheduler.warmup_steps": plan.warmup_steps,
            "lr_scheduler.warmup_tokens": 0,
        }
    )


def model_config(job: JobConfig) -> ModelConfig:
    """Size x condition, with the switches that [mixer] and the numbers that [model] set on top."""
    model, mixer = job.model, job.mixer
    changed: dict[str, Any] = {}
    for name, value in vars(mixer).items():
        if name != "condition" and name not in EXECUTION_SETTINGS and value is not None:
            changed[name] = value
    for name in ("vocab_size", "dim", "n_layers", "n_heads"):
        if value := getattr(model, name):
            changed[name] = value
    if "dim" in changed or "n_heads" in changed:  # heads are dim / n_heads wide
        size = SIZES[model.flavor] | changed
        changed["head_dim"] = size["dim"] // size["n_heads"]
    return build_config(model.flavor, mixer.condition, max_seq_len=job.training.seq_len, **changed)
