"""Validation loss and perplexity over the same fixed tokens every time, whatever the topology."""

import math
import time
from collections.abc import Iterable, Iterator
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from interdomain.model import Transformer

from .checkpoint import SelfDescribingCheckpoints
from .data_folders import open_dataset
from .device import device_here
from .errors import one_paragraph
from .host import IGNORE_INDEX, BaseValidator, dist_sum, logger
from .metrics import InterdomainMetrics, perplexity


class FixedValidator(BaseValidator):
    """Mean loss per token over the first windows of the validation split, in order; ranks share them round robin.

    Runs at step 1 (the model is all but untrained), every `validation.freq` steps, and after the last step. If a run is
    killed after saving a step but before validating it, the next start runs that validation once (`run_missed_validation`).

    Args:
        rank, ranks: of the data-parallel ranks. checkpoints: results are written beside them.
    """

    job_config: Any

    @one_paragraph
    def __init__(
        self,
        job_config: Any,
        rank: int,
        ranks: int,
        metrics: InterdomainMetrics,
        checkpoints: SelfDescribingCheckpoints,
    ) -> None:
        super().__init__(job_config)
        self.rank, self.ranks, self.metrics, self.checkpoints = rank, ranks, metrics, checkpoints
        self.dataset = open_dataset(job_config, "validation")
        config = job_config.validation
        self.windows = len(self.dataset)
        asked = math.ceil(config.tokens / config.seq_len)
        if asked > self.windows:
            logger.warning(
                "validation.tokens = %d is more than the split holds; using all of its %d windows of %d tokens.",
                config.tokens,
                self.windows,
                config.seq_len,
            )
        self.windows = min(asked or self.windows, self.windows)

    def should_validate(self, step: int) -> bool:
        return super().should_validate(step) or step == self.job_config.training.steps

    def run_missed_validation(self, model_parts: list[Any], step: int) -> None:
        """Validate the step that the run continues from, if that was due and did not finish. Collective."""
        if not (step and self.should_validate(step) and self.checkpoints.lacks_validation(step)):
            return
        config = self.job_config
        shapes = {(part.local_batch_size, part.seq_len) for part in (config.training, config.validation)}
        # torch.compile makes general code for the second shape that it meets: were that the training step's, its sums would be
        # in another order than without the restart.
        if config.compile.enable and len(shapes) > 1 and step < config.training.steps:
            logger.warning(
                "step %d was saved and not validated, and is not now: with compile.enable, validation of another batch size or "
                "length than training's cannot come first.",
                step,
            )
            return
        logger.info("step %d was saved and not validated: validating it now", step)
        self.metrics.time_last_log = time.perf_counter()
        self.validate(model_parts, step)

    def _batches(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """This rank's share, ({"input": [B, T], ...}, labels [B, T]) as the loader gives; the last batches are filled up with
        ignored windows so that every rank makes the same number of forward passes (FSDP2's are collective)."""
        per_pass = self.job_config.validation.local_batch_size * self.ranks
        for first in range(0, self.windows, per_pass):
            mine = range(first + self.rank, first + per_pass, self.ranks)
            indices = [min(i, self.windows - 1) for i in mine]
            rows = torch.from_numpy(self._read(indices))
            labels = rows[:, 1:].clone()
            labels[torch.tensor([i >= self.windows for i in mine])] = IGNORE_INDEX
            inputs = {"input": rows[:, :-1]}
            if self.job_config.data.reset_state_at_documents:
                inputs["positions"] = torch.stack([torch.from_numpy(self.dataset.positions(i)) for i in indices])
            yield {name: x.to(device_here()) for name, x in inputs.items()}, labels.to(device_here())

    @one_paragraph
    def _read(self, indices: list[int]) -> np.ndarray:
        return self.dataset.read_batch(indices)

    @torch.no_grad()
    def validate(self, model_parts: list[Any], step: int) -> None:
        (model,) = model_parts
        model.eval()
        # Sums in float64: the result must not depend on how the windows are split over ranks.
        loss = torch.zeros((), dtype=torch.float64, device=device_here())
        tokens = torch.zeros((), dtype=torch.float64, device=device_here())
        for inputs, labels in self._batches():
            loss += model(inputs.pop("input"), **inputs, labels=labels)
            tokens += (labels != IGNORE_INDEX).sum()
            self.metrics.ntokens_since_last_log += labels.numel()
        mesh = self.metrics.parallel_dims.get_optional_mesh("loss")
        mean = dist_sum(loss, mesh) / dist_sum(tokens, mesh)
        self.metrics.log_validation(mean, step, extra_metrics=self._readout_rms(model))
        self.checkpoints.note_validation(step, mean, perplexity(mean))
        # As the backward pass leaves the parameters: a checkpoint may be saved next, and the optimizer's state is of shards.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        model.train()

    @torch.no_grad()
    def _readout_rms(self, model: Transformer) -> dict[str, float]:
        """Root mean square of each mixer's readout (the input of wo) on the first validation window of this rank."""
        rms, hooks = {}, []
        for i, layer in enumerate(cast(Iterable[Any], model.layers.values())):

            def record(module: nn.Module, args: tuple[Tensor], i: int = i) -> None:
                rms[f"mixer/layer_{i:02d}/readout_rms"] = args[0].float().square().mean().sqrt().item()

            hooks.append(layer.attention.wo.register_forward_pre_hook(record))
        try:
            inputs, _ = next(self._batches())
            inputs = {name: tensor[:1] for name, tensor in inputs.items()}
            with torch.compiler.set_stance("force_eager"):  # hooks inside compiled blocks would not run
                model(inputs.pop("input"), **inputs)
        finally:
            for hook in hooks:
                hook.remove()
        return rms
