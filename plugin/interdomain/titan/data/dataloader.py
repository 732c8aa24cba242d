"""Batches of packed windows of prepared corpora, for TorchTitan."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torchdata.nodes import IterableWrapper, PinMemory, Prefetcher

from interdomain.data import MixtureDataset, PackedDataset, Tokenizer

from ..errors import user_errors
from ..host import IGNORE_INDEX, BaseDataLoader, logger
from ..plan.run_plan import RunPlan
from ..settings.schema import JobConfig
from .folders import corpora_of, open_dataset, open_tokenizer

# ({"input": [B, T], ...}, labels [B, T]), int64; labels are the inputs' next tokens, or IGNORE_INDEX where only answers count
Batch = tuple[dict[str, Tensor], Tensor]
# What a fingerprint is made of, and the settings that change it.
CAUSES = {
    "corpora": "data.corpus (other files, or prepared again)",
    "weights": "data.weights",
    "seq_len": "training.seq_len",
    "order": "debug.seed",
}


def read_batch(dataset: PackedDataset | MixtureDataset, indices: Sequence[int], positions: bool) -> Batch:
    """Read these samples. Raises: ValueError for a damaged shard."""
    windows = torch.from_numpy(dataset.read_batch(indices))
    # A copy: of a single window, inputs and labels would be views of one memory, and labels are overwritten below.
    inputs, labels = {"input": windows[:, :-1].contiguous()}, windows[:, 1:].clone()
    if positions:
        inputs["positions"] = torch.stack([torch.from_numpy(dataset.positions(g)) for g in indices])
    for row, g in zip(labels, indices, strict=True):
        if (counted := dataset.counted(g)) is not None:
            row[~torch.from_numpy(counted)] = IGNORE_INDEX
    return inputs, labels


class PackedLoader(BaseDataLoader):
    """Endless batches, in pinned memory where there is a GPU.

    Micro-batch i of all ranks together is the next `local_batch * ranks` global samples; rank r takes the r-th run of
    `local_batch` of them. A step's samples therefore depend on the global batch size alone. The state is the number of
    samples that all ranks together were handed, and a fingerprint of the data and its order, so a run continues with the same
    batches on any number of ranks. torchdata reads ahead in a thread (worker processes would cost more than they save: a
    window is a copy out of mapped memory).

    Args:
        prefetch: micro-batches to read ahead; 0 reads when asked.
        positions: also give "positions", [B, T] int32, each token's number in its document (PackedDataset.positions).
    """

    def __init__(
        self,
        dataset: PackedDataset | MixtureDataset,
        *,
        local_batch: int,
        rank: int,
        ranks: int,
        prefetch: int = 0,
        positions: bool = False,
    ) -> None:
        self.dataset, self.fingerprint = dataset, dataset.fingerprint
        self.local_batch, self.rank, self.ranks = local_batch, rank, ranks
        self.prefetch, self.positions, self.consumed = prefetch, positions, 0

    def _read(self, first: int) -> Iterator[Batch | ValueError]:
        """This rank's micro-batches from a global sample on. One that cannot be read is its error: torchdata would print a
        traceback."""
        for start in range(first + self.rank * self.local_batch, 2**63, self.local_batch * self.ranks):
            indices = range(start, start + self.local_batch)
            try:
                yield read_batch(self.dataset, indices, self.positions)
            except ValueError as e:  # ids outside the vocabulary: a damaged shard
                yield e

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
            self.consumed += self.local_batch * self.ranks
            yield batch

    @user_errors
    def _take(self, batches: Iterator[Batch | ValueError]) -> Batch:
        batch = next(batches)
        if isinstance(batch, ValueError):
            raise batch
        return batch

    def state_dict(self) -> dict[str, Any]:
        made_of = json.dumps(self.dataset.made_of)
        return {"consumed_samples": self.consumed, "fingerprint": self.fingerprint, "made_of": made_of}

    @user_errors
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["fingerprint"] != self.fingerprint:
            there, here = json.loads(state_dict["made_of"]), self.dataset.made_of
            causes = [setting for name, setting in CAUSES.items() if there.get(name) != here[name]]
            raise ValueError(
                f"the checkpoint was made with other data (changed: {', '.join(causes) or 'the version'}), so its position "
                "in the data cannot be continued. Restore data.corpus, data.weights, training.seq_len and debug.seed. To "
                "train on the new data, start another run from it: --job.dump_folder, --checkpoint.initial_load_path, "
                "--checkpoint.no-initial_load_model_only and --checkpoint.exclude_from_loading dataloader."
            )
        self.consumed = state_dict["consumed_samples"]


@user_errors
def open_data(job_config: JobConfig, plan: RunPlan, rank: int, ranks: int) -> tuple[Tokenizer, PackedLoader]:
    """The run's tokenizer, and the training data of one of the data-parallel ranks."""
    tokenizer, dataset = open_tokenizer(job_config), open_dataset(job_config, "train")
    names, epochs = corpora_of(job_config), dataset.epochs(plan.steps * plan.global_batch)
    logger.info("data: %s", ", ".join(f"{name} for {n:.2f} epochs" for name, n in zip(names, epochs, strict=True)))
    return tokenizer, PackedLoader(
        dataset,
        local_batch=job_config.training.local_batch_size,
        rank=rank,
        ranks=ranks,
        prefetch=job_config.data.prefetch,
        positions=job_config.data.reset_state_at_documents,
    )
