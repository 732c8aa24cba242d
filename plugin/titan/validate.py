"""Validation loss and perplexity over the same fixed tokens every time, whatever the topology."""

import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from .checkpoint import SelfDescribingCheckpoints
from .data_folders import open_dataset
from .device import device_here
from .errors import one_paragraph
from .host import IGNORE_INDEX, BaseValidator, dist_sum, logger
from .metrics import InterdomainMetrics, perplexity
from .passes import Passes


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
        passes: Passes,
        metrics: InterdomainMetrics,
        checkpoints: SelfDescribingCheckpoints,
    ) -> None:
        super().__init__(job_config)
        self.rank, self.ranks, self.metrics, self.checkpoints = rank, ranks, metrics, checkpoints
        self.passes = passes
        self.dataset = open_dataset(job_config, "validation")
        config, held = job_config.validation, len(self.dataset)
        asked = math.ceil(config.tokens / config.seq_len)
        if asked > held:
            logger.warning("validation.tokens is more than the split holds; using all of its %d windows.", held)
        self.windows = min(asked or held, held)

    def should_validate(self, step: int) -> bool:
        return super().should_validate(step) or step == self.job_config.training.steps

    def run_missed_validation(self, model_parts: list[Any], step: int) -> None:
        """Validate the step that the run continues from, if that was due and did not finish. Collective."""
        if not (step and self.should_validate(step) and self.checkpoints.lacks_validation(step)):
            return
        config = self.job_config
        # torch.compile makes general code for the second shape that it meets: were that the training step's, its sums would be
        # in another order than without the restart.
        if config.compile.enable and step < config.training.steps:
            logger.warning(
                "step %d was saved and not validated, and is not now: with compile.enable, training comes first", step
            )
            return
        logger.info("step %d was saved and not validated: validating it now", step)
        self.metrics.time_last_log = time.perf_counter()
        self.validate(model_parts, step)

    def _batches(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """This rank's share, ({"input": [B, T], ...}, labels [B, T]) as the loader gives; the last batches are filled up with
        ignored windows so that every rank makes the same number of forward passes (FSDP2's are collective)."""
        per_pass = self.job_config.validation.local_batch_size * self.ranks
        at_once = per_pass * self.passes.together
        for first in range(0, at_once * math.ceil(self.windows / at_once), per_pass):
            mine = range(first + self.rank, first + per_pass, self.ranks)
            indices = [min(i, self.windows - 1) for i in mine]
            rows = torch.from_numpy(self._read(indices))
            labels = rows[:, 1:].clone()
            labels[torch.tensor([i >= self.windows for i in mine])] = IGNORE_INDEX
            self.metrics.ntokens_since_last_log += labels.numel()
            inputs = {"input": rows[:, :-1]}
            if self.job_config.data.reset_state_at_documents:
                inputs["positions"] = torch.stack([torch.from_numpy(self.dataset.positions(i)) for i in indices])
            yield inputs, labels

    @one_paragraph
    def _read(self, indices: list[int]) -> np.ndarray:
        return self.dataset.read_batch(indices)

    @torch.no_grad()
    def validate(self, model_parts: list[Any], step: int) -> None:
        for part in model_parts:
            part.eval()
        # Sums in float64: the result must not depend on how the windows are split over ranks.
        loss = torch.zeros((), dtype=torch.float64, device=device_here())
        tokens = torch.zeros((), dtype=torch.float64, device=device_here())
        everything = self._batches()
        while batches := list(itertools.islice(everything, self.passes.together)):
            loss += self.passes.run(batches, backward=False)
            tokens += sum((labels != IGNORE_INDEX).sum() for _, labels in batches)
        dims = self.metrics.parallel_dims
        mean = dist_sum(self.passes.meshes.whole(loss), dims.get_optional_mesh("loss"))
        mean /= dist_sum(tokens, dims.get_optional_mesh("batch"))
        self.metrics.log_validation(mean, step)
        self.checkpoints.note_validation(step, mean, perplexity(mean))
        # As the backward pass leaves the parameters: a checkpoint may be saved next, and the optimizer's state is of shards.
        for part in model_parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            part.train()
