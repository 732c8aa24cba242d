"""Batches of packed windows of prepared corpora, for TorchTitan."""

import itertools
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchdata.nodes import IterableWrapper, PinMemory, Prefetcher

from interdomain.data import MixtureDataset, PackedDataset, Tokenizer

from ..errors import user_errors
from ..host import IGNORE_INDEX, BaseDataLoader, logger
from ..plan.run_plan import RunPlan
from ..settings.schema import JobConfig
from .folders import epochs_in_words, open_tokenizer, open_training

# ({"input": [B, T], ...}, labels [B, T]), int64; labels are the inputs' next tokens, or IGNORE_INDEX where only answers count
Batch = tuple[dict[str, Tensor], Tensor]
# What a fingerprint is made of, and the settings that change it.
CAUSES = {
    "corpora": "data.corpus (other files, or prepared again)",
    "weights": "data.weights",
    "seq_len": "training.seq_len",
    "order": "debug.seed",
    "before": "data stages that are over",
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


class StageData(NamedTuple):
    """Data of a stage of the run: windows, and sequences of one pass of a rank and of a step."""

    dataset: PackedDataset | MixtureDataset
    local_batch: int
    global_batch: int
    begins: int = 0  # steps before the stage


class PackedLoader(BaseDataLoader):
    """Endless batches, in pinned memory where there is a GPU.

    Micro-batch i of all ranks together is the next `local_batch * ranks` global samples; rank r takes the r-th run of
    `local_batch` of them. A step's samples therefore depend on the global batch size alone. The state is the number of
    samples that all ranks together were handed, and a fingerprint of the data and its order, so a run continues with the same
    batches on any number of ranks. torchdata reads ahead in a thread (worker processes would cost more than they save: a
    window is a copy out of mapped memory).

    Args:
        stages: in order; each ends at the step at which the next one begins.
        prefetch: micro-batches to read ahead; 0 reads when asked.
        positions: also give "positions", [B, T] int32, each token's number in its document (PackedDataset.positions).
        may_reorder: whether a state of another seed may be loaded: the run goes on at the same position of another order.
    """

    def __init__(
        self,
        stages: Sequence[StageData],
        *,
        rank: int,
        ranks: int,
        prefetch: int = 0,
        positions: bool = False,
        may_reorder: bool = False,
    ) -> None:
        self.stages, self.rank, self.ranks = stages, rank, ranks
        self.prefetch, self.positions, self.may_reorder, self.consumed = prefetch, positions, may_reorder, 0
        lengths = [(b.begins - a.begins) * a.global_batch for a, b in itertools.pairwise(stages)]
        self.ends = list(itertools.accumulate(lengths))  # of the stages but the last, in samples

    def _read(self, consumed: int) -> Iterator[Batch | ValueError]:
        """This rank's micro-batches from a global sample on. One that cannot be read is its error: torchdata would print a
        traceback."""
        while True:
            i = bisect_right(self.ends, consumed)
            dataset, local, _, _ = self.stages[i]
            first = consumed - [0, *self.ends][i] + self.rank * local
            try:
                yield read_batch(dataset, range(first, first + local), self.positions)
            except ValueError as e:  # ids outside the vocabulary: a damaged shard
                yield e
            consumed += local * self.ranks

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

    def _described(self, consumed: int) -> tuple[str, dict[str, Any]]:
        """(fingerprint, what it is made of) of the stage of the last sample that was read, with the stages before it."""
        i = bisect_left(self.ends, consumed)
        made_of = dict(self.stages[i].dataset.made_of)
        if i:
            made_of["before"] = [[self.stages[n].dataset.fingerprint, self.ends[n]] for n in range(i)]
        return self.stages[i].dataset.fingerprint, made_of

    def state_dict(self) -> dict[str, Any]:
        fingerprint, made_of = self._described(self.consumed)
        return {"consumed_samples": self.consumed, "fingerprint": fingerprint, "made_of": json.dumps(made_of)}

    @user_errors
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        consumed, there = state_dict["consumed_samples"], json.loads(state_dict["made_of"])
        fingerprint, here = self._described(consumed)
        if state_dict["fingerprint"] != fingerprint or there.get("before") != here.get("before"):
            causes = [setting for name, setting in CAUSES.items() if there.get(name) != here.get(name)]
            if causes == [CAUSES["order"]] and self.may_reorder:
                logger.warning(
                    "another debug.seed: the data goes on after %d samples of another order. Some samples of this epoch may be "
                    "read twice, and others not at all.",
                    consumed,
                )
                self.consumed = consumed
                return
            raise ValueError(
                f"the checkpoint was made with other data (changed: {', '.join(causes) or 'the version'}), so its position "
                "in the data cannot be continued. Restore data.corpus, data.weights, training.seq_len and debug.seed, and the "
                "data.stages that have begun. To leave data out, go back with checkpoint.load_step and another debug.seed. To "
                "train on the new data, start another run from it: --job.dump_folder, "
                "--checkpoint.initial_load_path, --checkpoint.no-initial_load_model_only and --checkpoint.exclude_from_loading "
                "dataloader."
            )
        self.consumed = consumed


@user_errors
def open_data(job_config: JobConfig, plan: RunPlan, rank: int, ranks: int) -> tuple[Tokenizer, PackedLoader]:
    """The run's tokenizer, and the training data of one of the data-parallel ranks."""
    tokenizer, datasets = open_tokenizer(job_config), open_training(plan)
    for stage, words in zip(plan.data_stages, epochs_in_words(plan, datasets), strict=True):
        logger.info("data%s: %s", f" from step {stage.begins + 1}" if stage.begins else "", words)
    # TorchTitan's trainer divides its local batches into a pipeline's.
    local = [job_config.training.local_batch_size, *(stage.local_batch for stage in plan.later)]
    facts = zip(plan.data_stages, datasets, local, strict=True)
    return tokenizer, PackedLoader(
        [StageData(dataset, each, stage.global_batch, stage.begins) for stage, dataset, each in facts],
        rank=rank,
        ranks=ranks,
        prefetch=job_config.data.prefetch,
        positions=job_config.data.reset_state_at_documents,
        may_reorder=job_config.checkpoint.load_step != -1,
    )
