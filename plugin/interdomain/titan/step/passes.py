"""Forward and backward passes of the micro-batches of a step: one after the other, or through the stages of a pipeline."""

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from interdomain.model import Transformer
from interdomain.model.dynamics import SharedDynamics
from interdomain.model.shard import shard_of

from ..data.dataloader import Batch
from ..plan.run_plan import RunPlan
from .meshes import Meshes


class Passes:
    """Passes through the whole model, one micro-batch after the other.

    Under accumulation the gradients are summed over the ranks after each micro-batch, or once, after the last. Until then every
    rank holds all of them, in float32: 4 bytes per parameter, whatever the number of ranks.
    """

    together = 1  # micro-batches that `run` takes for validation

    def __init__(
        self, parts: list[Any], plan: RunPlan, meshes: Meshes, device: torch.device, targets: int
    ) -> None:
        """Passes through this rank's part of the model.

        Args:
            parts: The model; with a pipeline this rank's stages, in order.
            targets: Labels of a step that count, on all ranks together; the same number in every step.
        """
        self.parts = parts
        self.plan = plan
        self.meshes = meshes
        self.device = device
        self.targets = targets

    def run(self, batches: Iterable[Batch], *, backward: bool) -> Tensor:
        """This rank's share of the summed loss. Collective.

        Args:
            batches: All micro-batches of a step; without `backward` only `together` of them.
            backward: Whether to add up the gradients of the mean loss per label of the step that counts.
        """
        (model,) = self.parts
        losses = []
        with self._dynamics_once(backward):
            for i, batch in enumerate(batches):
                inputs, labels = self._this_ranks_share(batch)
                if backward and self.plan.accumulation > 1:
                    model.set_requires_gradient_sync(
                        self.plan.reduces_each or i == self.plan.accumulation - 1
                    )
                loss = model(inputs.pop("input"), **inputs, labels=labels)
                if backward:
                    (loss / self.targets).backward()
                losses.append(loss.detach())
        return torch.stack(losses).sum()

    @contextlib.contextmanager
    def _dynamics_once(self, backward: bool) -> Iterator[None]:
        """Compute the dynamics of this rank's stages once for all passes within; at the end, one backward pass through that."""
        for part in self.parts:
            part.shared = SharedDynamics(part.dynamics())
        yield
        for part in self.parts:
            if backward:
                part.shared.backward()
            part.shared = None

    def _this_ranks_share(self, batch: Batch) -> Batch:
        """This rank's tokens. Batches of a corpus are pinned: the host does not wait, and prepares this one while the device
        computes the last."""
        inputs, labels = batch

        def share(x: Tensor) -> Tensor:
            return shard_of(
                x.to(self.device, non_blocking=True), self.meshes.context, dim=1
            ).contiguous()

        return {name: share(x) for name, x in inputs.items()}, share(labels)


class Stage(PipelineStage):
    """PyTorch's stage, under FSDP2: it sums gradients over the ranks while it goes backward."""

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: Any, last_backward: bool = False
    ) -> Any:
        """Sum each layer's gradients while the layers before it go backward. PyTorch begins when all have."""
        if not last_backward:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        model: Any = self.submod
        model.set_is_last_backward(True)
        model.set_reshard_after_backward(False)  # or FSDP2 gathers the last layer once more
        model.set_requires_gradient_sync(True)
        return stage_backward(**bwd_kwargs), None


class Pipeline(Passes):
    """Passes through this rank's stages and the other ranks', by one of PyTorch's schedules.

    All micro-batches of a step go through one schedule: it has one idle phase, however many they are. The last stage computes
    the summed loss itself, in its head.
    """

    def __init__(
        self, parts: list[Any], plan: RunPlan, meshes: Meshes, device: torch.device, targets: int
    ) -> None:
        super().__init__(parts, plan, meshes, device, targets)
        self.together = plan.accumulation
        self.losses: list[Tensor] = []
        numbers = plan.stages_of(meshes.pipeline.get_local_rank())
        last = len(plan.stages) - 1
        self.has_first_stage = 0 in numbers
        self.has_last_stage = last in numbers

        # The shapes between stages. Without them PyTorch would infer them with a forward pass through every stage.
        B, T = plan.local_batch, plan.seq_len // plan.topology.context
        tokens = torch.empty(B, T, dtype=torch.int64, device="meta")
        dtype = torch.bfloat16 if plan.precision == "bf16" else torch.float32
        shape = (B, T // plan.topology.tensor, plan.config.dim)
        hidden = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        loss = torch.empty((), device="meta", requires_grad=True)
        stages = []
        for part, n in zip(parts, numbers, strict=True):
            inputs = hidden if n else tokens
            outputs = loss if n == last else hidden
            group = meshes.pipeline.get_group()
            stage: Any = Stage(
                part, n, last + 1, device, input_args=inputs, output_args=outputs, group=group
            )
            if (
                dist.get_backend() == "fake"
            ):  # nobody answers PyTorch's question whether all stages have said their shapes
                stage._warmup_backward_result = lambda received_result=None: torch.ones(1)
            stages.append(stage)
        kind: Any = get_schedule_class(plan.schedule)
        local: Any = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
        self.schedule = kind(
            local, n_microbatches=plan.accumulation, loss_fn=self._note, scale_grads=False
        )

    def _note(self, loss: Tensor, labels: Tensor) -> Tensor:
        self.losses.append(loss.detach())
        return loss / self.targets

    def run(self, batches: Iterable[Batch], *, backward: bool) -> Tensor:
        mine = [self._this_ranks_share(batch) for batch in batches]
        arguments: dict[str, Any] = {}
        for name in mine[0][0]:
            arguments[name] = torch.cat([inputs[name] for inputs, _ in mine])
        tokens = arguments.pop("input")
        first = (tokens,) if self.has_first_stage else ()
        if self.has_last_stage:
            arguments["target"] = arguments["labels"] = torch.cat([labels for _, labels in mine])
        self.losses = []
        act = self.schedule.step if backward else self.schedule.eval
        with self._dynamics_once(backward):
            act(*first, **arguments, return_outputs=False)
        return (
            torch.stack(self.losses).sum()
            if self.has_last_stage
            else torch.zeros((), device=self.device)
        )


def prune_to_stage(model: Transformer, names: Collection[str]) -> None:
    """Make a stage of a model on the meta device: the modules of these names alone."""
    for name in ("tok_embeddings", "norm", "output"):
        if name not in names:
            setattr(model, name, None)
    for i in list(model.layers):
        if f"layers.{i}" not in names:
            del model.layers[i]
