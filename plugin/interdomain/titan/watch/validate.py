"""Validation under our trainer, over the same fixed tokens every time and on any number of ranks.

It computes the mean loss, the loss by position and by document, and the accuracy of answers.

Shapes: B sequences of a micro-batch, T tokens of a validation sequence.
"""

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
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
from .metrics import ACCURACY, InterdomainMetrics, perplexity

# Losses by document are recorded for validation splits of at most this many documents.
MOST_DOCUMENTS = 4096


def windows_of(dataset: PackedDataset | MixtureDataset, tokens: int) -> int:
    """Returns the number of windows of a validation.

    Args:
        dataset: The validation split.
        tokens: The setting validation.tokens, rounded up to whole windows. 0: the whole split.
    """
    available = len(dataset)
    if tokens == 0:
        return available
    windows = math.ceil(tokens / dataset.seq_len)
    if windows > available:
        logger.warning(
            "validation.tokens is more than the split holds; using all of its %d windows.",
            available,
        )
    return min(windows, available)


class ValidationSums:
    """Sums of losses and labels over a validation, in float64.

    An answer is a run of consecutive labels in a corpus with answers. It is right if each of its
    tokens is the model's most likely one after the true tokens before it.

    Attributes:
        heads: This rank's stages that have the model's head. While a list is set as their `scores`,
            they append loss and mistake of each token (`Head.scores`).
        by_position: Losses and labels that count, by position in the window, [2, T].
        by_document: Losses and labels that count, by document, [2, documents]. None: the split has
            answers, or too many documents.
        answers: Right answers and all answers, [2]. None: the corpus has no answers.
    """

    def __init__(
        self, parts: list[Any], meshes: Meshes, dataset: PackedDataset | MixtureDataset
    ) -> None:
        """Starts a validation.

        Args:
            parts: This rank's stages of the model.
            meshes: The process groups of this rank.
            dataset: The validation split.
        """
        self.meshes = meshes
        self.heads = [part.output for part in parts if part.output is not None]
        for head in self.heads:
            head.scores = []
        device = device_here()
        self.by_position = torch.zeros(2, dataset.seq_len, dtype=torch.float64, device=device)
        self.by_document = None
        self.answers = None
        if dataset.targets < dataset.seq_len:
            self.answers = self.by_position.new_zeros(2)
        elif dataset.num_documents <= MOST_DOCUMENTS:
            self.by_document = self.by_position.new_zeros(2, dataset.num_documents)

    def add(self, labels: Tensor, documents: Tensor) -> None:
        """Adds what the heads computed in the last pass.

        Collective among the ranks that share its sequences.

        Args:
            labels: Labels of whole sequences, [B, T].
            documents: Number of each label's document, [B, T].
        """
        labels = labels.to(self.by_position.device)
        counted = labels != IGNORE_INDEX
        B, T = labels.shape
        local_T = T
        if self.meshes.context is not None:
            local_T = T // self.meshes.context.size

        # Loss and mistake (0 or 1) of each token. Ranks without a head contribute zeros: the sum
        # over the pipeline's ranks is that of the rank with the head.
        scores = torch.zeros(2, B, local_T, device=labels.device)
        for head in self.heads:
            scores = torch.cat(head.scores, dim=1).view(2, B, local_T)
            head.scores.clear()
        loss, mistake = self.meshes.gather_sequences(scores)  # [B, T] each

        self.by_position[0] += loss.double().sum(dim=0)
        self.by_position[1] += counted.sum(dim=0)
        if self.by_document is not None:
            values = torch.stack([loss.double(), counted.double()]).flatten(1)
            self.by_document.index_add_(1, documents.to(labels.device).flatten(), values)
        if self.answers is not None:
            # An answer begins at a label that counts, after one that does not. It is wrong if one
            # of its tokens is a mistake.
            begins = counted & ~F.pad(counted[:, :-1], (1, 0))
            # Number the answers from 1. Labels that do not count have the number 0.
            number = begins.flatten().cumsum(0) * counted.flatten()
            mistakes = torch.zeros(B * T + 1, device=labels.device)
            mistakes.index_add_(0, number, mistake.flatten())
            all_answers = begins.sum()
            wrong_answers = (mistakes[1:] > 0).sum()
            self.answers += torch.stack([all_answers - wrong_answers, all_answers])

    def close(self) -> dict[str, float]:
        """Sums over all ranks, and ends the validation. Collective.

        Returns:
            The accuracy of answers and the mean loss by ranges of positions, by tag.
        """
        for head in self.heads:
            head.scores = None

        # Ranks that share sequences have the same sums: one of them counts.
        for sums in (self.by_position, self.by_document, self.answers):
            if sums is not None:
                if not self.meshes.is_first_of_sequences:
                    sums.zero_()
                dist.all_reduce(sums)

        scalars = {}
        if self.answers is not None:
            right, answers = self.answers.tolist()
            scalars[ACCURACY] = right / answers

        # Ranges of positions: 0, 1, 2 to 3, 4 to 7, and so on.
        losses, labels = self.by_position.tolist()
        begin = 0
        while begin < len(losses):
            end = min(max(1, 2 * begin), len(losses))
            count = sum(labels[begin:end])
            if count:
                tag = f"validation_position/{begin:04d}-{end - 1:04d}"
                scalars[tag] = sum(losses[begin:end]) / count
            begin = end
        return scalars


@dataclass
class FixedValidator:
    """Computes the mean loss per token over windows that lie evenly over the validation split.

    It runs after step 1 (an almost untrained model), every `validation.freq` steps, and after the
    last step.

    Attributes:
        job: The configuration of the run.
        rank: This rank's number among the data-parallel ranks.
        ranks: Number of data-parallel ranks.
        passes: Runs the forward passes.
        metrics: Logs the results.
        checkpoints: The results are written beside the step's checkpoint.
        dataset: The validation split.
        windows: Number of windows of a validation.

    Raises:
        SystemExit: There is no validation split, or it cannot be read. The reason is printed.
    """

    job: JobConfig
    rank: int
    ranks: int
    passes: Passes
    metrics: InterdomainMetrics
    checkpoints: SelfDescribingCheckpoints

    @user_errors
    def __post_init__(self) -> None:
        self.dataset = open_dataset(self.job, "validation")
        self.windows = windows_of(self.dataset, self.job.validation.tokens)

    def should_validate(self, step: int) -> bool:
        """Returns True if the model is validated after this step."""
        return step in (1, self.job.training.steps) or step % self.job.validation.freq == 0

    def run_missed_validation(self, model_parts: list[Any], step: int) -> None:
        """Validates a step that was saved, if a kill prevented its validation. Collective.

        Args:
            model_parts: This rank's stages of the model.
            step: The step of the checkpoint that was loaded. 0: none was.
        """
        due = step > 0 and self.should_validate(step)
        if not due or not self.checkpoints.lacks_validation(step):
            return
        # torch.compile makes general code for the second shape that it meets. If that were the
        # training step's shape, its sums would be in another order than without the restart.
        if self.job.compile.enable and step < self.job.training.steps:
            logger.warning(
                "step %d was saved and not validated, and is not now: with compile.enable, training "
                "comes first",
                step,
            )
            return
        logger.info("step %d was saved and not validated: validating it now", step)
        self.metrics.time_last_log = time.perf_counter()
        self.validate(model_parts, step)

    def _batches(self) -> Iterator[tuple[Batch, Tensor]]:
        """Yields this rank's micro-batches, and the document numbers of their labels, [B, T].

        All ranks make the same number of forward passes, because FSDP2's are collective. The last
        micro-batches are filled up with windows whose labels are all ignored.
        """
        windows_per_pass = self.job.validation.local_batch_size * self.ranks
        windows_at_once = windows_per_pass * self.passes.micro_batches_at_once
        filled_up = windows_at_once * math.ceil(self.windows / windows_at_once)
        with_positions = self.job.data.reset_state_at_documents
        for first in range(0, filled_up, windows_per_pass):
            # The ranks take windows in turn. Window n of the validation is window `index` there.
            indices = []
            ignored = []
            for n in range(first + self.rank, first + windows_per_pass, self.ranks):
                index = min(n, self.windows - 1) * len(self.dataset) // self.windows
                indices.append(index)
                ignored.append(n >= self.windows)
            inputs, labels = user_errors(read_batch)(self.dataset, indices, with_positions)
            labels[torch.tensor(ignored)] = IGNORE_INDEX
            self.metrics.ntokens_since_last_log += labels.numel()

            documents = [torch.from_numpy(self.dataset.documents(index)) for index in indices]
            yield (inputs, labels), torch.stack(documents)

    @torch.no_grad()
    def validate(self, model_parts: list[Any], step: int) -> None:
        """Validates the model, logs the results, and writes them beside the checkpoint. Collective.

        Args:
            model_parts: This rank's stages of the model.
            step: The step that was taken last.
        """
        for part in model_parts:
            part.eval()

        # Sum in float64: the result must not depend on how the windows are shared among the ranks.
        loss = torch.zeros((), dtype=torch.float64, device=device_here())
        sums = ValidationSums(model_parts, self.passes.meshes, self.dataset)
        remaining = self._batches()
        while at_once := list(itertools.islice(remaining, self.passes.micro_batches_at_once)):
            batches, documents = zip(*at_once, strict=True)
            loss += self.passes.run(batches, backward=False)
            sums.add(torch.cat([labels for _, labels in batches]), torch.cat(documents))
        scalars = sums.close()
        dist.all_reduce(loss)
        mean = (loss / sums.by_position[1].sum()).item()

        self.metrics.log_validation(mean, step, scalars)
        by_document = None
        if sums.by_document is not None:
            by_document = sums.by_document.tolist()
        self.checkpoints.note_validation(
            step, mean, perplexity(mean), scalars.get(ACCURACY), by_document
        )

        # Leave the parameters sharded, as a backward pass does. The optimizer's state is sharded,
        # and a checkpoint with both may be saved next.
        for part in model_parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            part.train()
