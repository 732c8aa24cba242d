"""Pipeline parallelism: the model's layers over ranks, and the micro-batches of a step through them by PyTorch's schedules."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from interdomain.model import Transformer

from .dataloader import Batch
from .meshes import Meshes
from .plan import RunPlan


def stages_of(plan: RunPlan, rank: int) -> range:
    """The stages of a rank of the pipeline: every `plan.pipeline`-th."""
    return range(rank, len(plan.stages), plan.pipeline)


def keep(model: Transformer, names: Collection[str]) -> None:
    """Make a stage of a model on the meta device: the modules of these names alone."""
    for name in ("tok_embeddings", "norm", "output"):
        if name not in names:
            setattr(model, name, None)
    for i in list(model.layers):
        if f"layers.{i}" not in names:
            del model.layers[i]


class Pipeline:
    """This rank's stages, and the schedule that runs the micro-batches through all ranks'.

    All micro-batches of a step go through one schedule: it has one idle phase, however many they are. The last stage computes
    the summed loss itself, in its head.
    """

    def __init__(self, parts: list[Any], plan: RunPlan, schedule: str, meshes: Meshes, device: torch.device) -> None:
        """parts: this rank's stages, in order. schedule: parallelism.pipeline_parallel_schedule."""
        self.plan, self.sums = plan, []
        numbers, last = stages_of(plan, meshes.pipeline.get_local_rank()), len(plan.stages) - 1
        self.first, self.last = 0 in numbers, last in numbers
        # Said here, they need not be found out by a pass through all stages.
        B, T = plan.local_batch, plan.seq_len // plan.context
        tokens = torch.empty(B, T, dtype=torch.int64, device="meta")
        dtype = torch.bfloat16 if plan.precision == "bf16" else torch.float32
        hidden = torch.empty(B, T // plan.tensor, plan.config.dim, dtype=dtype, device="meta")
        loss = torch.empty((), device="meta")
        stages = [
            PipelineStage(
                part,
                n,
                last + 1,
                device,
                input_args=hidden if n else tokens,
                output_args=loss if n == last else hidden,
                group=meshes.pipeline.get_group(),
            )
            for part, n in zip(parts, numbers, strict=True)
        ]
        kind: Any = get_schedule_class(schedule)
        given = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
        self.schedule = kind(given, n_microbatches=plan.accumulation, loss_fn=self._mean, scale_grads=False)

    def _mean(self, loss: Tensor, labels: Tensor) -> Tensor:
        """Where a backward pass begins: gradients of the sum would be larger by the number of the step's tokens."""
        self.sums.append(loss.detach())
        return loss / self.plan.tokens_per_step

    def run(self, batches: list[Batch], *, backward: bool) -> Tensor:
        """The summed loss of so many micro-batches as a step has; 0 on a rank without the last stage. Collective.

        backward: also add the gradients of the mean loss per token.
        """
        inputs = {name: torch.cat([inputs[name] for inputs, _ in batches]) for name in batches[0][0]}
        tokens, labels = inputs.pop("input"), torch.cat([labels for _, labels in batches])
        first = (tokens,) if self.first else ()
        last = {"target": labels, "labels": labels} if self.last else {}
        self.sums = []
        act = self.schedule.step if backward else self.schedule.eval
        act(*first, **inputs, **last, return_outputs=False)
        return torch.stack(self.sums).sum() if self.last else torch.zeros((), device=labels.device)
