"""Validation over the same fixed tokens every time, whatever the topology: loss, loss by position, accuracy of answers."""

import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from interdomain.data import MixtureDataset, PackedDataset

from ..data.dataloader import Batch, read_batch
from ..data.folders import open_dataset
from ..errors import user_errors
from ..host import IGNORE_INDEX, logger
from ..plan.device import device_here
from ..resume.checkpoint import SelfDescribingCheckpoints
from ..settings.schema import JobConfig
from ..step.meshes import Meshes
from ..step.passes import Passes
from .metrics import InterdomainMetrics, perplexity

ACCURACY = "validation_metrics/accuracy"
MOST_DOCUMENTS = 4096  # of a split whose losses are kept by document


def windows_of(dataset: PackedDataset | MixtureDataset, tokens: int) -> int:
    """The number of windows that a validation of so many tokens (0: all) takes of the split."""
    windows = math.ceil(tokens / dataset.seq_len)
    if windows > len(dataset):
        logger.warning(
            "validation.tokens is more than the split holds; using all of its %d windows.",
            len(dataset),
        )
    if windows == 0 or windows > len(dataset):
        return len(dataset)
    return windows


def by_document(dataset: PackedDataset | MixtureDataset) -> bool:
    return dataset.targets == dataset.seq_len and dataset.num_documents <= MOST_DOCUMENTS


class Totals:
    """Sums over a validation of what the model's head finds of each token (`Head.scores`), in float64.

    An answer is a run of consecutive labels of a window in a corpus with answers. It is right if each of its tokens is the
    argmax after the true tokens before it.
    """

    def __init__(
        self, parts: list[Any], meshes: Meshes, dataset: PackedDataset | MixtureDataset
    ) -> None:
        self.heads = [
            part.output for part in parts if part.output is not None
        ]  # none on most stages of a pipeline
        for head in self.heads:
            head.scores = []
        self.meshes = meshes
        self.answers = dataset.targets < dataset.seq_len
        # By position: losses and labels; and of answers: right ones and all.
        self.sums = torch.zeros(2, dataset.seq_len + 1, dtype=torch.float64, device=device_here())
        # By document: losses and labels.
        self.documents = (
            self.sums.new_zeros(2, dataset.num_documents) if by_document(dataset) else None
        )

    def add(self, labels: Tensor, documents: Tensor) -> None:
        """Adds the scores of the pass that was made. Collective among the ranks that share its sequences.

        Args:
            labels: Labels of whole sequences, [B, T].
            documents: Number of each label's document, [B, T].
        """
        labels = labels.to(self.sums.device)
        counted = labels != IGNORE_INDEX
        B, T = labels.shape
        share = T if self.meshes.context is None else T // self.meshes.context.size
        scores = torch.zeros(2, B, share, device=labels.device)
        for head in self.heads:
            scores = torch.cat(head.scores, dim=1).view(2, B, share)
            head.scores.clear()
        loss, wrong = self.meshes.gather_sequences(scores)
        self.sums[0, :T] += loss.double().sum(dim=0)
        self.sums[1, :T] += counted.sum(dim=0)
        if self.documents is not None:
            seen = torch.stack([loss.double(), counted.double()]).flatten(1)
            self.documents.index_add_(1, documents.to(self.sums.device).flatten(), seen)
        if self.answers:
            begins = counted & ~F.pad(counted[:, :-1], (1, 0))
            answer = (
                begins.flatten().cumsum(0) * counted.flatten()
            )  # its number, from 1; 0: no answer
            mistakes = torch.zeros(B * T + 1, device=labels.device).index_add_(
                0, answer, wrong.flatten()
            )
            self.sums[:, T] += torch.stack([begins.sum() - (mistakes[1:] > 0).sum(), begins.sum()])

    def close(self) -> dict[str, float]:
        """Scalars by tag. Collective."""
        for head in self.heads:
            head.scores = None
        for sums in (self.sums, self.documents):
            if sums is not None:
                dist.all_reduce(sums if self.meshes.first_of_sequences else sums.zero_())
        scalars = {}
        if self.answers:
            right, answers = self.sums[:, -1].tolist()
            scalars[ACCURACY] = right / answers
        # Stretches of positions: 0, 1, 2 to 3, 4 to 7, and so on.
        losses, labels = self.sums[:, :-1].tolist()
        begin = 0
        while begin < len(losses):
            end = min(2 * begin or 1, len(losses))
            count = sum(labels[begin:end])
            if count:
                scalars[f"validation_position/{begin:04d}-{end - 1:04d}"] = (
                    sum(losses[begin:end]) / count
                )
            begin = end
        return scalars


class FixedValidator:
    """Mean loss per token over windows that lie evenly over the validation split; ranks share them round robin.

    Runs at step 1 (the model is all but untrained), every `validation.freq` steps, and after the last step. If a run is
    killed after saving a step but before validating it, the next start runs that validation once (`run_missed_validation`).

    Args:
        rank: This rank's number among the data-parallel ranks.
        ranks: Number of data-parallel ranks.
        checkpoints: Results are written beside them.
    """

    @user_errors
    def __init__(
        self,
        job: JobConfig,
        rank: int,
        ranks: int,
        passes: Passes,
        metrics: InterdomainMetrics,
        checkpoints: SelfDescribingCheckpoints,
    ) -> None:
        self.job = job
        self.rank = rank
        self.ranks = ranks
        self.metrics = metrics
        self.checkpoints = checkpoints
        self.passes = passes
        self.dataset = open_dataset(job, "validation")
        self.windows = windows_of(self.dataset, job.validation.tokens)

    def should_validate(self, step: int) -> bool:
        return step in (1, self.job.training.steps) or step % self.job.validation.freq == 0

    def run_missed_validation(self, model_parts: list[Any], step: int) -> None:
        """Validate the step that the run continues from, if that was due and did not finish. Collective."""
        if not (step and self.should_validate(step) and self.checkpoints.lacks_validation(step)):
            return
        # torch.compile makes general code for the second shape that it meets: were that the training step's, its sums would be
        # in another order than without the restart.
        if self.job.compile.enable and step < self.job.training.steps:
            logger.warning(
                "step %d was saved and not validated, and is not now: with compile.enable, training comes first",
                step,
            )
            return
        logger.info("step %d was saved and not validated: validating it now", step)
        self.metrics.time_last_log = time.perf_counter()
        self.validate(model_parts, step)

    def _batches(self) -> Iterator[tuple[Batch, Tensor]]:
        """This rank's share, ({"input": [B, T], ...}, labels [B, T]) as the loader gives, and the labels' documents [B, T]; the
        last batches are filled up with ignored windows so that every rank makes the same number of forward passes (FSDP2's are
        collective)."""
        per_pass = self.job.validation.local_batch_size * self.ranks
        at_once = per_pass * self.passes.together
        positions = self.job.data.reset_state_at_documents
        for first in range(0, at_once * math.ceil(self.windows / at_once), per_pass):
            mine = range(first + self.rank, first + per_pass, self.ranks)
            indices = [min(i, self.windows - 1) * len(self.dataset) // self.windows for i in mine]
            inputs, labels = user_errors(read_batch)(self.dataset, indices, positions)
            labels[torch.tensor([i >= self.windows for i in mine])] = IGNORE_INDEX
            self.metrics.ntokens_since_last_log += labels.numel()
            documents = torch.zeros_like(labels)
            if by_document(self.dataset):
                documents = torch.stack(
                    [torch.from_numpy(self.dataset.documents(i)) for i in indices]
                )
            yield (inputs, labels), documents

    @torch.no_grad()
    def validate(self, model_parts: list[Any], step: int) -> None:
        for part in model_parts:
            part.eval()
        # Sums in float64: the result must not depend on how the windows are split over ranks.
        loss = torch.zeros((), dtype=torch.float64, device=device_here())
        everything = self._batches()
        totals = Totals(model_parts, self.passes.meshes, self.dataset)
        while together := list(itertools.islice(everything, self.passes.together)):
            batches, documents = zip(*together, strict=True)
            loss += self.passes.run(batches, backward=False)
            totals.add(torch.cat([labels for _, labels in batches]), torch.cat(documents))
        scalars = totals.close()
        dist.all_reduce(loss)
        mean = (loss / totals.sums[1, :-1].sum()).item()  # by labels that count
        self.metrics.log_validation(mean, step, scalars)
        by_document_sums = None if totals.documents is None else totals.documents.tolist()
        self.checkpoints.note_validation(
            step, mean, perplexity(mean), scalars.get(ACCURACY), by_document_sums
        )
        # As the backward pass leaves the parameters: a checkpoint may be saved next, and the optimizer's state is of shards.
        for part in model_parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            part.train()
