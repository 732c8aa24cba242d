"""Batches of packed windows of prepared corpora.

Shapes: B sequences of a rank's micro-batch, T tokens of a sequence.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torchdata.nodes import IterableWrapper, PinMemory, Prefetcher

from interdomain.data import MixtureDataset, PackedDataset, Tokenizer
from interdomain.data.sampling import counts_in, fair_pattern

from ..errors import user_errors
from ..host import IGNORE_INDEX, BaseDataLoader, logger
from ..plan.run_plan import RunPlan
from ..settings.schema import JobConfig
from .folders import folders_of, open_dataset, open_tokenizer

# Inputs by name ("input", and "positions" if asked for), and labels; each [B, T]. A label is the
# next token, or IGNORE_INDEX if only answers count in the loss and it is none.
Batch = tuple[dict[str, Tensor], Tensor]


def read_batch(
    dataset: PackedDataset | MixtureDataset, indices: Sequence[int], positions: bool
) -> Batch:
    """Reads samples as a batch.

    Args:
        dataset: Windows of T + 1 tokens.
        indices: Global indices of the samples.
        positions: Also read "positions", int32: each token's position in its document.

    Raises:
        ValueError: A shard is damaged.
    """
    windows = torch.from_numpy(dataset.read_batch(indices))  # [B, T + 1]
    inputs = {"input": windows[:, :-1].contiguous()}
    # A copy, because inputs and labels of a single window would share their memory.
    labels = windows[:, 1:].clone()
    if positions:
        rows = [torch.from_numpy(dataset.positions(index)) for index in indices]
        inputs["positions"] = torch.stack(rows)
    for row, index in zip(labels, indices, strict=True):
        counted = dataset.counted(index)
        if counted is not None:
            row[~torch.from_numpy(counted)] = IGNORE_INDEX
    return inputs, labels


@dataclass
class PackedLoader(BaseDataLoader):
    """Endless batches of one rank, in pinned memory if there is a GPU.

    Micro-batch i of all ranks together is the next `local_batch * ranks` samples of the data set;
    rank r takes the r-th `local_batch` of them. So the samples of a step depend only on the global
    batch size. torchdata reads ahead in a thread: worker processes would cost more than they save,
    because reading a window is a copy out of mapped memory.

    The state is the number of samples that all ranks together were given, and what the data is made
    of. So a run continues with the same samples on any number of ranks. If a state of other corpora
    or weights is loaded, the data changes at this sample, and each corpus continues after the
    samples of it that were read before.

    Attributes:
        dataset: Windows of T + 1 tokens.
        local_batch: B, sequences of a micro-batch.
        rank: This rank's number among the data-parallel ranks.
        ranks: Number of data-parallel ranks.
        prefetch: Micro-batches to read ahead. 0: each is read when it is needed.
        positions: Also read each token's position in its document, int32.
        may_reorder: A state of another seed may be loaded. The run then continues at the same
            position of another order.
        consumed: Samples that all ranks together were given since the first step of the run.
        begins: `consumed` when the data last changed.
        read_before: Samples of each corpus that were read until then, by the corpus's fingerprint.
    """

    dataset: PackedDataset | MixtureDataset
    local_batch: int
    rank: int
    ranks: int
    prefetch: int = 0
    positions: bool = False
    may_reorder: bool = False

    def __post_init__(self) -> None:
        self.consumed = 0
        self.begins = 0
        self.read_before: dict[str, int] = {}

    def __iter__(self) -> Iterator[Batch]:
        """Yields this rank's batches without end, from sample `consumed` on, and counts them."""
        node = IterableWrapper(self._read(self.consumed))
        if torch.cuda.is_available():
            node = PinMemory(node)
        if self.prefetch:
            node = Prefetcher(node, self.prefetch)
        node.reset()
        while True:
            batch = self._next_batch(node)
            # Count a batch before the trainer gets it: a checkpoint that is saved after its step
            # must not repeat it.
            _, labels = batch  # [B, T]
            self.consumed += len(labels) * self.ranks
            yield batch

    def _read(self, consumed: int) -> Iterator[Batch]:
        """Yields this rank's micro-batches.

        Args:
            consumed: Samples of all ranks before the first micro-batch.
        """
        while True:
            first = consumed - self.begins + self.rank * self.local_batch
            indices = range(first, first + self.local_batch)
            yield read_batch(self.dataset, indices, self.positions)
            consumed += self.local_batch * self.ranks

    @user_errors
    def _next_batch(self, batches: Iterator[Batch]) -> Batch:
        """Returns the next batch. A damaged shard ends the run with an error message."""
        return next(batches)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the data, the same on every rank."""
        made_of = dict(self.dataset.made_of)
        if self.begins:
            made_of |= {"begins": self.begins, "read_before": self.read_before}
        return {
            "consumed_samples": self.consumed,
            "fingerprint": self.dataset.fingerprint,
            "made_of": json.dumps(made_of),
        }

    @user_errors
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues where a checkpoint's run was.

        Args:
            state_dict: The `state_dict` of a loader, of any rank.

        Raises:
            SystemExit: The position cannot be continued, because the sequence length or the order
                of the samples is another. The reason is printed.
        """
        saved = json.loads(state_dict["made_of"])
        made_of = self.dataset.made_of
        if "before" in saved:
            raise ValueError(
                "the checkpoint is of a run whose data changed at set steps, which this version cannot continue."
            )
        self.consumed = state_dict["consumed_samples"]

        # Another sequence length is refused, and another order, unless the user goes back to an
        # earlier step to read other samples from there.
        changed = []
        if saved["seq_len"] != made_of["seq_len"]:
            changed.append("training.seq_len")
        if saved["order"] != made_of["order"]:
            changed.append("debug.seed")
        if changed == ["debug.seed"] and self.may_reorder:
            logger.warning(
                "another debug.seed: the data goes on after %d samples of another order. Some samples of this epoch may be "
                "read twice, and others not at all.",
                self.consumed,
            )
        elif changed:
            raise ValueError(
                f"the checkpoint was made with another {' and '.join(changed)}, so its position in the data cannot be "
                "continued. Restore the setting. To leave data out, go back with checkpoint.load_step and another debug.seed. "
                "To train on with the new one, start another run from it: --job.dump_folder, "
                "--checkpoint.initial_load_path, --checkpoint.no-initial_load_model_only and --checkpoint.exclude_from_loading "
                "dataloader."
            )

        # Other corpora or weights are read from here on.
        self.begins = saved.get("begins", 0)
        self.read_before = saved.get("read_before", {})
        if (saved["corpora"], saved["weights"]) != (made_of["corpora"], made_of["weights"]):
            self._change_data(saved)
        for part in self.dataset.parts:
            part.first = self.read_before.get(part.corpus.fingerprint, 0)

    def _change_data(self, saved: dict[str, Any]) -> None:
        """Begins to read this loader's data after a run that read other data.

        Args:
            saved: What the other data was made of, as in `state_dict`.
        """
        # Count the samples of each corpus that the run has read.
        pattern = fair_pattern([Fraction(weight) for weight in saved["weights"]])
        counts = counts_in(pattern, self.consumed - self.begins)
        read = dict(self.read_before)
        for corpus, count in zip(saved["corpora"], counts, strict=True):
            read[corpus] = self.read_before.get(corpus, 0) + count
        self.begins = self.consumed
        self.read_before = read
        logger.warning(
            "THE DATA CHANGES after %d samples: data.corpus or data.weights are not the checkpoint's. A corpus that was read "
            "before goes on where it was left.",
            self.consumed,
        )


@user_errors
def open_data(
    job: JobConfig, plan: RunPlan, rank: int, ranks: int
) -> tuple[Tokenizer, PackedLoader]:
    """Opens the tokenizer and the training data of a run.

    Args:
        job: The configuration of the run.
        plan: Its plan.
        rank: This rank's number among the data-parallel ranks.
        ranks: Number of data-parallel ranks.

    Raises:
        SystemExit: There are no such data, or they do not fit the model. The reason is printed.
    """
    tokenizer = open_tokenizer(job)
    dataset = open_dataset(job, "train")
    epochs = dataset.epochs(plan.steps * plan.global_batch)
    for folder, n in zip(folders_of(job.data.corpus), epochs, strict=True):
        logger.info("data: %s for %.2f epochs", folder, n)
    loader = PackedLoader(
        dataset,
        # Under TorchTitan's trainer a pipeline divides a local batch into its micro-batches.
        job.training.local_batch_size,
        rank=rank,
        ranks=ranks,
        prefetch=job.data.prefetch,
        positions=job.data.reset_state_at_documents,
        may_reorder=job.checkpoint.load_step != -1,
    )
    return tokenizer, loader
