"""Forward and backward passes over the micro-batches of a step.

`Passes` runs the micro-batches through the whole model, one after the other. `Pipeline` runs them
through the stages of a pipeline, of which this rank has one or more.

Shapes: B sequences of a micro-batch on this rank, T tokens of a sequence on this rank.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from interdomain.model import Transformer
from interdomain.model.parallel import local_slice
from interdomain.model.shared_ssm import SharedSSMTensors

from ..data.dataloader import Batch
from ..plan.run_plan import RunPlan
from .meshes import Meshes


@dataclass
class Passes:
    """Passes through the whole model, one micro-batch after the other.

    With several micro-batches, gradients are summed over the ranks after each of them or once,
    after the last (`training.reduce_gradients`). Until they are summed, every rank holds all
    gradients in float32: 4 bytes per parameter, whatever the number of ranks.

    Attributes:
        parts: The model; with a pipeline, this rank's stages in order.
        plan: The plan of the run.
        meshes: The process groups of this rank.
        device: Where the model computes.
        targets: Labels of a training step that count, on all ranks together. The number is the same
            in every step.
        micro_batches_at_once: Micro-batches that `run` takes in validation.
    """

    parts: list[Any]
    plan: RunPlan
    meshes: Meshes
    device: torch.device
    targets: int
    micro_batches_at_once: int = field(default=1, init=False)

    def run(self, batches: Iterable[Batch], *, backward: bool) -> Tensor:
        """Runs micro-batches forward, and backward if asked. Collective.

        Args:
            batches: All micro-batches of a training step; in validation `micro_batches_at_once`.
            backward: Accumulate the gradients of the mean loss per label.

        Returns:
            The loss summed over this rank's labels, a scalar. Under tensor parallelism each rank
            has the labels in its part of the vocabulary: the ranks' results add up to the loss.
        """
        (model,) = self.parts  # without a pipeline there is one stage
        losses = []
        with self._shared_ssm_parameters(backward):
            for i, batch in enumerate(batches):
                inputs, labels = self._local_batch(batch)
                # FSDP2 sums gradients over the ranks after each micro-batch, or after the last.
                if backward and self.plan.accumulation > 1:
                    is_last = i == self.plan.accumulation - 1
                    model.set_requires_gradient_sync(self.plan.reduces_each or is_last)
                tokens = inputs.pop("input")
                loss = model(tokens, **inputs, labels=labels)
                if backward:
                    (loss / self.targets).backward()
                losses.append(loss.detach())
        return torch.stack(losses).sum()

    @contextlib.contextmanager
    def _shared_ssm_parameters(self, backward: bool) -> Iterator[None]:
        """Computes the scans' tables from the SSM parameters once, for all passes in this context.

        Args:
            backward: At the end, run one backward pass from the sums of the tables' gradients to
                the SSM parameters.
        """
        for part in self.parts:
            part.shared = SharedSSMTensors(part.ssm_tensors())
        yield
        for part in self.parts:
            if backward:
                part.shared.backward()
            part.shared = None

    def _local_batch(self, batch: Batch) -> Batch:
        """Returns this rank's tokens of the sequences, on the device.

        Args:
            batch: Inputs and labels of whole sequences, in pinned memory.
        """
        inputs, labels = batch
        local_inputs = {name: self._local(x) for name, x in inputs.items()}
        return local_inputs, self._local(labels)

    def _local(self, x: Tensor) -> Tensor:
        """Returns this rank's tokens of x [B, tokens of a sequence], on the device: [B, T]."""
        # Batches are in pinned memory: the host does not wait for the copy, and prepares this batch
        # while the device computes the last one.
        x = x.to(self.device, non_blocking=True)
        return local_slice(x, self.meshes.context, dim=1).contiguous()


class Stage(PipelineStage):
    """PyTorch's stage, under FSDP2: it sums gradients over the ranks during the backward pass."""

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: Any, last_backward: bool = False
    ) -> Any:
        """Sums the gradients of each layer while the layers before it run backward.

        PyTorch's schedule calls this for each micro-batch. PyTorch's method sums the gradients when
        all layers are done.

        Args:
            backward_type: "full": gradients of inputs and weights together.
            bwd_kwargs: Arguments of `stage_backward`.
            last_backward: True for the last micro-batch of a step.
        """
        if not last_backward:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        model: Any = self.submod
        model.set_is_last_backward(True)
        # Otherwise FSDP2 would gather the last layer once more.
        model.set_reshard_after_backward(False)
        model.set_requires_gradient_sync(True)
        return stage_backward(**bwd_kwargs), None


@dataclass
class Pipeline(Passes):
    """Passes through the stages of a pipeline, by one of PyTorch's schedules.

    All micro-batches of a step go through one schedule, so that the ranks are idle only once per
    step. The model's head, on the last stage, computes the summed loss.
    """

    def __post_init__(self) -> None:
        """Builds this rank's stages for PyTorch, and the schedule that runs them."""
        plan = self.plan
        pipeline = self.meshes.pipeline
        self.micro_batches_at_once = plan.accumulation
        self.losses: list[Tensor] = []
        stage_numbers = plan.stages_of(pipeline.get_local_rank())
        last_stage = len(plan.stages) - 1
        self.has_first_stage = 0 in stage_numbers
        self.has_last_stage = last_stage in stage_numbers

        # Shapes of what stages exchange. PyTorch would run a forward pass to infer them.
        B = plan.local_batch
        T = plan.seq_len // plan.topology.context
        tokens = torch.empty(B, T, dtype=torch.int64, device="meta")
        dtype = torch.float32
        if plan.precision == "bf16":
            dtype = torch.bfloat16
        # Tensor parallelism shares the tokens between the layers.
        shape = (B, T // plan.topology.tensor, plan.config.dim)
        hidden = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        loss = torch.empty((), device="meta", requires_grad=True)

        # This rank's stages.
        stages = []
        for part, number in zip(self.parts, stage_numbers, strict=True):
            inputs = hidden
            outputs = hidden
            if number == 0:
                inputs = tokens
            if number == last_stage:
                outputs = loss
            stage: Any = Stage(
                part,
                number,
                last_stage + 1,
                self.device,
                input_args=inputs,
                output_args=outputs,
                group=pipeline.get_group(),
            )
            if dist.get_backend() == "fake":
                # Simulated ranks never answer PyTorch's question whether their shapes are known.
                stage._warmup_backward_result = lambda received_result=None: torch.ones(1)
            stages.append(stage)

        # The schedule. Some take a single stage per rank, others a list.
        schedule_class: Any = get_schedule_class(plan.schedule)
        local_stages: Any = stages
        if not issubclass(schedule_class, PipelineScheduleMulti):
            (local_stages,) = stages
        self.schedule = schedule_class(
            local_stages,
            n_microbatches=plan.accumulation,
            loss_fn=self._mean_loss,
            scale_grads=False,
        )

    def _mean_loss(self, loss: Tensor, labels: Tensor) -> Tensor:
        """Notes the summed loss of a micro-batch, and returns what the backward pass begins with.

        Args:
            loss: What the last stage returned, the summed loss of a micro-batch.
            labels: Ignored: the last stage has used them.
        """
        self.losses.append(loss.detach())
        return loss / self.targets

    def run(self, batches: Iterable[Batch], *, backward: bool) -> Tensor:
        """Runs all micro-batches of a step through the pipeline, as `Passes.run`. Collective.

        Args:
            batches: All micro-batches of a step.
            backward: Accumulate the gradients of the mean loss per label.

        Returns:
            The loss summed over this rank's labels, a scalar: 0 on a rank without the last stage.
        """
        # PyTorch takes all micro-batches in one tensor, which it splits again.
        local_batches = [self._local_batch(batch) for batch in batches]
        first_inputs, _ = local_batches[0]
        arguments: dict[str, Any] = {}
        for name in first_inputs:
            arguments[name] = torch.cat([inputs[name] for inputs, _ in local_batches])
        tokens = arguments.pop("input")

        # Only the first stage takes tokens, and only the last one labels.
        positional = (tokens,) if self.has_first_stage else ()
        if self.has_last_stage:
            labels = torch.cat([labels for _, labels in local_batches])
            arguments["target"] = arguments["labels"] = labels

        self.losses = []
        run_schedule = self.schedule.step if backward else self.schedule.eval
        with self._shared_ssm_parameters(backward):
            run_schedule(*positional, **arguments, return_outputs=False)
        if not self.has_last_stage:
            return torch.zeros((), device=self.device)
        return torch.stack(self.losses).sum()


def prune_to_stage(model: Transformer, names: Collection[str]) -> None:
    """Removes from a model on the meta device what does not belong to a stage.

    Args:
        model: The whole model.
        names: Modules of the stage: `tok_embeddings`, `layers.0`, ..., `norm`, `output`.
    """
    for name in ("tok_embeddings", "norm", "output"):
        if name not in names:
            setattr(model, name, None)
    for i in list(model.layers):
        if f"layers.{i}" not in names:
            del model.layers[i]
