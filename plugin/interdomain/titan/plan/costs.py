"""Costs of a step for the ranks that need the most: memory, traffic, and how long a sequence could be."""

import bisect

from interdomain.model import ModelConfig, meta_model
from interdomain.model.costs.flops import memory_estimate
from interdomain.model.costs.traffic import held, traffic
from interdomain.scan import CHUNK

from ..settings.job_config import value_of
from ..settings.schema import JobConfig
from .pipeline_order import in_flight, stages_of
from .topology import Topology

CARD = 80_000_000_000  # bytes of a device, for which the dry run says how long a sequence may be


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
        self.model, ranks = meta_model(config), mesh.pipeline
        schedule = job.parallelism.pipeline_parallel_schedule if ranks > 1 else "1F1B"
        own = [stages_of(schedule, r, ranks, len(stages)) for r in range(ranks)]
        self.held = [held(self.model, [stages[i] for i in numbers], mesh.tensor) for numbers in own]
        self.turns = [any(i + 1 in numbers for i in numbers) for numbers in own]
        self.in_flight = [in_flight(schedule, r, ranks, len(stages) // ranks, micro_batches) for r in range(ranks)]
        reshard = job.parallelism.fsdp_reshard_after_forward
        self.stay_gathered = reshard == "never" or (reshard == "default" and ranks > 1)

    def memory(self, local_batch: int, seq_len: int) -> dict[str, int]:
        """Bytes by part, of the rank that needs the most."""
        job, mesh = self.job, self.mesh
        each = [
            memory_estimate(
                self.config,
                part,
                shards=mesh.shards * mesh.context,
                local_batch=local_batch,
                seq_len=seq_len,
                context=mesh.context,
                tensor=mesh.tensor,
                in_flight=micro_batches,
                checkpointing=job.activation_checkpoint.mode,
                precision=job.training.precision,
                accumulated=self.micro_batches > 1,
                stay_gathered=self.stay_gathered,
                compiled=job.compile.enable and "model" in job.compile.components,
                recompute=value_of(job, "mixer.recompute"),
            )
            for part, micro_batches in zip(self.held, self.in_flight, strict=True)
        ]
        return max(each, key=lambda parts: sum(parts.values()))

    def traffic(self) -> dict[str, int]:
        """Bytes by axis, of the rank that receives the most."""
        job, mesh, n = self.job, self.mesh, self.micro_batches
        once = 1 if mesh.pipeline > 1 else n  # a pipeline keeps what is gathered for all micro-batches
        head = 2 * n if job.parallelism.fsdp_reshard_after_forward == "always" else once
        each = [
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
                checkpointing=job.activation_checkpoint.mode,
                gathers=once if self.stay_gathered else 2 * n,
                head_gathers=head,
                turn=turn,
            )
            for part, turn in zip(self.held, self.turns, strict=True)
        ]
        return max(each, key=lambda axes: sum(axes.values()))

    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that CARD bytes are enough to train on, one at a time; 0 where none is."""
        step = self.mesh.context * self.mesh.tensor * CHUNK
        lengths = range(step, 2**32, step)
        fitting = bisect.bisect_right(lengths, CARD, key=lambda tokens: sum(self.memory(1, tokens).values()))
        return fitting * step
