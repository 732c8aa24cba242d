"""Costs of a step for the ranks that need the most: memory, traffic, and how long a sequence could be."""

import bisect
import functools
from dataclasses import replace
from typing import NamedTuple

from interdomain.model import ModelConfig, Transformer, meta_model
from interdomain.model.costs.flops import memory_estimate
from interdomain.model.costs.traffic import Held, held, traffic
from interdomain.model.shard import split_dimension
from interdomain.scan import CHUNK

from ..settings.job_config import value_of
from ..settings.schema import JobConfig
from .parameter_groups import group_of
from .pipeline_order import idle, in_flight, stages_of
from .topology import Topology

CARD = 80_000_000_000  # bytes of a device, for which the dry run says how long a sequence may be


@functools.lru_cache(maxsize=4)
def _model(config: ModelConfig) -> Transformer:
    return meta_model(config)


@functools.lru_cache(maxsize=4096)
def _held(config: ModelConfig, stages: tuple[tuple[str, ...], ...], tensor: int) -> Held:
    return held(_model(config), stages, tensor)


class Matrix(NamedTuple):
    """A matrix of Muon's. divided: whether tensor parallelism splits it."""

    rows: int
    columns: int
    divided: bool

    @property
    def numbers(self) -> int:
        return self.rows * self.columns


@functools.lru_cache(maxsize=4096)
def _matrices(config: ModelConfig, stages: tuple[tuple[str, ...], ...]) -> list[Matrix]:
    """Matrices of Muon in some stages."""
    model, modules = _model(config), {name for stage in stages for name in stage}
    return [
        Matrix(p.shape[0], p.shape[1], split_dimension(model, name.rpartition(".")[0]) is not None)
        for name, p in model.named_parameters()
        if ".".join(name.split(".")[:2]) in modules and group_of(name, p, "Muon") == "matrices"
    ]


class Costs:
    """stages: names of each stage's modules; micro_batches: of a step, on each rank that reads samples."""

    def __init__(
        self,
        job: JobConfig,
        config: ModelConfig,
        mesh: Topology,
        stages: tuple[tuple[str, ...], ...],
        micro_batches: int,
    ) -> None:
        self.job, self.config, self.mesh, self.micro_batches = job, config, mesh, micro_batches
        self.stages = stages
        self.model, ranks = _model(config), mesh.pipeline
        schedule = job.parallelism.pipeline_parallel_schedule if ranks > 1 else "1F1B"
        own = [stages_of(schedule, r, ranks, len(stages)) for r in range(ranks)]
        self.held = [_held(config, tuple(stages[i] for i in numbers), mesh.tensor) for numbers in own]
        muon = job.optimizer.name == "Muon"
        self.matrices = [_matrices(config, tuple(stages[i] for i in numbers)) if muon else [] for numbers in own]
        self.turns = [any(i + 1 in numbers for i in numbers) for numbers in own]
        self.in_flight = [in_flight(schedule, r, ranks, len(stages) // ranks, micro_batches) for r in range(ranks)]
        reshard = job.parallelism.fsdp_reshard_after_forward
        self.stay_gathered = reshard == "never" or (reshard == "default" and ranks > 1)
        # How often parameters are gathered in a step. A pipeline keeps what is gathered for all micro-batches.
        once = 1 if ranks > 1 else micro_batches
        self.gathers = once if self.stay_gathered else 2 * micro_batches
        self.head_gathers = 2 * micro_batches if reshard == "always" else once

    @property
    def checkpointing(self) -> str:
        """Extent of what the backward pass recomputes: none, selective or full. Every n-th block counts as none for n > 1."""
        config = self.job.activation_checkpoint
        if config.mode != "selective" or config.selective_ac_option == "op":
            return config.mode
        return "full" if config.selective_ac_option == "1" else "none"

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        return self.job.training.local_batch_size * self.mesh.data_ranks * self.micro_batches

    def idle(self) -> float:
        """Share of a step that the ranks of a pipeline wait."""
        ranks, schedule = self.mesh.pipeline, self.job.parallelism.pipeline_parallel_schedule
        return idle(schedule, ranks, len(self.stages) // ranks, self.micro_batches) if ranks > 1 else 0.0

    def reduces_each(self, local_batch: int, seq_len: int) -> bool:
        """True if gradients are summed over the ranks after each micro-batch; else they are once a step."""
        training = self.job.training
        if self.micro_batches == 1 or self.mesh.pipeline > 1 or training.reduce_gradients == "step":
            return False
        if training.reduce_gradients == "micro-batch":
            return True
        raise AssertionError(training.reduce_gradients)

    def memory(self, local_batch: int, seq_len: int, each: bool | None = None) -> dict[str, int]:
        """Bytes by part, of the rank that needs the most. each: as `reduces_each`; None: what that chooses."""
        job, mesh = self.job, self.mesh
        config = replace(self.config, max_seq_len=seq_len) if seq_len != self.config.max_seq_len else self.config
        each = self.reduces_each(local_batch, seq_len) if each is None else each
        needed = [
            memory_estimate(
                config,
                part,
                shards=mesh.shards * mesh.context,
                local_batch=local_batch,
                seq_len=seq_len,
                context=mesh.context,
                tensor=mesh.tensor,
                in_flight=micro_batches,
                checkpointing=self.checkpointing,
                precision=job.training.precision,
                accumulated=self.micro_batches > 1 and not each,
                stay_gathered=self.stay_gathered,
                compiled=job.compile.enable and "model" in job.compile.components,
                recompute=value_of(job, "mixer.recompute"),
                documents=job.data.reset_state_at_documents,
            )
            for part, micro_batches in zip(self.held, self.in_flight, strict=True)
        ]
        for parts, matrices in zip(needed, self.matrices, strict=True):  # Muon has one moment
            held = sum(x.numbers // (mesh.tensor if x.divided else 1) for x in matrices)
            parts["optimizer"] -= 4 * held // (mesh.shards * mesh.context)
        return max(needed, key=lambda parts: sum(parts.values()))

    def reductions(self) -> str:
        """When gradients are summed, in words, and what that and the other way cost in bytes."""
        training = self.job.training
        size = training.local_batch_size, training.seq_len
        chosen = self.reduces_each(*size)
        costs = []
        for each in (chosen, not chosen):
            needs, receives = sum(self.memory(*size, each).values()) / 2**30, sum(self.traffic(each).values()) / 2**30
            when = "after each micro-batch" if each else "once a step"
            costs.append(f"{when} ({needs:.2f} GiB of memory, {receives:.3g} GiB received)")
        possible = self.micro_batches > 1 and self.mesh.pipeline == 1 and training.mixed_precision_reduce == "float32"
        return f"summed in {training.mixed_precision_reduce} {'; '.join(costs if possible else costs[:1])}"

    def traffic(self, each: bool | None = None) -> dict[str, int]:
        """Bytes by axis, of the rank that receives the most. each: as for `memory`."""
        job, mesh, n = self.job, self.mesh, self.micro_batches
        if each is None:
            each = self.reduces_each(job.training.local_batch_size, job.training.seq_len)
        received = [
            traffic(
                self.config,
                part,
                replicas=mesh.replicas,
                shards=mesh.shards,
                context=mesh.context,
                tensor=mesh.tensor,
                local_batch=job.training.local_batch_size,
                seq_len=job.training.seq_len,
                micro_batches=n,
                precision=job.training.precision,
                checkpointing=self.checkpointing,
                gathers=self.gathers,
                head_gathers=self.head_gathers,
                turn=turn,
                reductions=n if each else 1,
                reduced=2 if job.training.mixed_precision_reduce == "bf16" else 4,
            )
            for part, turn in zip(self.held, self.turns, strict=True)
        ]
        for axes, matrices in zip(received, self.matrices, strict=True):
            axes["matrices"] = sum(map(self._exchanged, matrices))
        return max(received, key=lambda axes: sum(axes.values()))

    def _exchanged(self, matrix: Matrix) -> int:
        """Bytes received for a matrix of Muon: bfloat16, gathered of all that have a part, and the result over each axis."""
        shards, tensor = self.mesh.shards * self.mesh.context, self.mesh.tensor
        parts = shards * (tensor if matrix.divided else 1)
        return 2 * (matrix.numbers - matrix.numbers // parts + matrix.numbers * ((shards > 1) + (tensor > 1)))

    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that CARD bytes are enough to train on, one at a time; 0 where none is."""
        step = self.mesh.context * self.mesh.tensor * CHUNK
        lengths = range(step, 2**32, step)
        fitting = bisect.bisect_right(lengths, CARD, key=lambda tokens: sum(self.memory(1, tokens).values()))
        return fitting * step
