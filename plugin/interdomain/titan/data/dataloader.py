"""Batches of packed windows of prepared corpora, for TorchTitan."""

import json
from collections.abc import Iterator, Sequence
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

# ({"input": [B, T], ...}, labels [B, T]), int64; labels are the inputs' next tokens, or IGNORE_INDEX where only answers count
Batch = tuple[dict[str, Tensor], Tensor]


def read_batch(
    dataset: PackedDataset | MixtureDataset, indices: Sequence[int], positions: bool
) -> Batch:
    """Read these samples. Raises: ValueError for a damaged shard."""
    windows = torch.from_numpy(dataset.read_batch(indices))
    # A copy: of a single window, inputs and labels would be views of one memory, and labels are overwritten below.
    inputs = {"input": windows[:, :-1].contiguous()}
    labels = windows[:, 1:].clone()
    if positions:
        inputs["positions"] = torch.stack([torch.from_numpy(dataset.positions(g)) for g in indices])
    for row, g in zip(labels, indices, strict=True):
        if (counted := dataset.counted(g)) is not None:
            row[~torch.from_numpy(counted)] = IGNORE_INDEX
    return inputs, labels


class PackedLoader(BaseDataLoader):
    """Endless batches, in pinned memory where there is a GPU.

    Micro-batch i of all ranks together is the next `local_batch * ranks` global samples; rank r takes the r-th run of
    `local_batch` of them. A step's samples therefore depend on the global batch size alone. torchdata reads ahead in a thread
    (worker processes would cost more than they save: a window is a copy out of mapped memory).

    The state is the number of samples that all ranks together were handed, and a fingerprint of the data and its order, so a
    run continues with the same batches on any number of ranks. A state of other corpora or weights is taken, too: then the
    data changes at this sample, and each corpus goes on after the samples of it that were read before.

    Args:
        local_batch: sequences of one pass of a rank.
        prefetch: micro-batches to read ahead; 0 reads when asked.
        positions: also give "positions", [B, T] int32, each token's number in its document (PackedDataset.positions).
        may_reorder: whether a state of another seed may be loaded: the run goes on at the same position of another order.

    Attributes:
        consumed: samples that all ranks together were handed since the run's first step.
        begins: `consumed` when the data last changed.
        read_before: samples of each corpus that were read until then, by the corpus's fingerprint.
    """

    def __init__(
        self,
        dataset: PackedDataset | MixtureDataset,
        local_batch: int,
        *,
        rank: int,
        ranks: int,
        prefetch: int = 0,
        positions: bool = False,
        may_reorder: bool = False,
    ) -> None:
        self.dataset = dataset
        self.local_batch = local_batch
        self.rank = rank
        self.ranks = ranks
        self.prefetch = prefetch
        self.positions = positions
        self.may_reorder = may_reorder
        self.consumed = self.begins = 0
        self.read_before: dict[str, int] = {}

    def _read(self, consumed: int) -> Iterator[Batch | ValueError]:
        """This rank's micro-batches from a global sample on.

        A batch that cannot be read is given as its error, because torchdata would print a traceback.
        """
        while True:
            first = consumed - self.begins + self.rank * self.local_batch
            try:
                yield read_batch(
                    self.dataset, range(first, first + self.local_batch), self.positions
                )
            except ValueError as e:  # ids outside the vocabulary: a damaged shard
                yield e
            consumed += self.local_batch * self.ranks

    def __iter__(self) -> Iterator[Batch]:
        node = IterableWrapper(self._read(self.consumed))
        if torch.cuda.is_available():
            node = PinMemory(node)
        if self.prefetch:
            node = Prefetcher(node, self.prefetch)
        node.reset()
        while True:
            batch = self._take(node)
            # Counted before the batch is handed out: a checkpoint taken right after it must not repeat it.
            self.consumed += len(batch[1]) * self.ranks
            yield batch

    @user_errors
    def _take(self, batches: Iterator[Batch | ValueError]) -> Batch:
        batch = next(batches)
        if isinstance(batch, ValueError):
            raise batch
        return batch

    def state_dict(self) -> dict[str, Any]:
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
        saved = json.loads(state_dict["made_of"])
        made_of = self.dataset.made_of
        if "before" in saved:
            raise ValueError(
                "the checkpoint is of a run whose data changed at set steps, which this version cannot continue."
            )
        self.consumed = state_dict["consumed_samples"]
        settings = {"seq_len": "training.seq_len", "order": "debug.seed"}
        changed = [setting for name, setting in settings.items() if saved[name] != made_of[name]]
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
        self.begins = saved.get("begins", 0)
        self.read_before = saved.get("read_before", {})
        if any(saved[name] != made_of[name] for name in ("corpora", "weights")):
            self._change_data(saved)
        for part in self.dataset.parts:
            part.first = self.read_before.get(part.corpus.fingerprint, 0)

    def _change_data(self, saved: dict[str, Any]) -> None:
        """Begin to read this loader's data where a run has left other data, described by a state's "made_of"."""
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
    """The run's tokenizer, and the training data of one of the data-parallel ranks."""
    tokenizer = open_tokenizer(job)
    dataset = open_dataset(job, "train")
    epochs = dataset.epochs(plan.steps * plan.global_batch)
    for folder, n in zip(folders_of(job.data.corpus), epochs, strict=True):
        logger.info("data: %s for %.2f epochs", folder, n)
    return (
        tokenizer,
        PackedLoader(
            dataset,
            job.training.local_batch_size,  # TorchTitan's trainer divides its local batches into a pipeline's
            rank=rank,
            ranks=ranks,
            prefetch=job.data.prefetch,
            positions=job.data.reset_state_at_documents,
            may_reorder=job.checkpoint.load_step != -1,
        ),
    )
