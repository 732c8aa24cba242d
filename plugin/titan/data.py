"""Batches of packed windows for TorchTitan, and the tokenizer.

The loader's whole state is one number, the samples that all ranks together have consumed, and a fingerprint of the data
and its order. It is the same on every rank, so a run continues with the same batches on any number of ranks.
"""

import json
from pathlib import Path

import torch
from torchdata.nodes import BaseNode, PinMemory, Prefetcher

from interdomain.data import MixtureDataset, PackedDataset
from interdomain.data.indexed import file_sha256

from .corpora import corpora_of, open_dataset, open_tokenizer
from .errors import one_paragraph
from .host import BaseDataLoader, logger
from .stream import StreamLoader

# What a fingerprint is made of, and the settings that change it.
CAUSES = {
    "corpora": "data.corpus (other files, or prepared again)",
    "weights": "data.weights",
    "seq_len": "training.seq_len",
    "order": "debug.seed",
}


class MicroBatches(BaseNode):
    """torchdata's source node: one rank's micro-batches, without end.

    Micro-batch i of all ranks together is the next `local_batch * ranks` global samples; rank r takes the r-th run of
    `local_batch` of them. A step's samples therefore depend on the global batch size alone. State: the samples that all ranks
    together have consumed. A sample that cannot be read is handed on as the ValueError, for torchdata would print a traceback.
    """

    def __init__(self, dataset, *, local_batch: int, rank: int, ranks: int, positions: bool) -> None:
        super().__init__()
        self.dataset, self.local_batch, self.rank, self.positions = dataset, local_batch, rank, positions
        self.per_batch = local_batch * ranks
        self.consumed = 0

    def reset(self, initial_state: dict | None = None) -> None:
        super().reset(initial_state)
        self.consumed = (initial_state or {}).get("consumed", 0)

    def get_state(self) -> dict:
        return {"consumed": self.consumed}

    def next(self):
        first = self.consumed + self.rank * self.local_batch
        self.consumed += self.per_batch
        indices = range(first, first + self.local_batch)
        try:
            windows = torch.from_numpy(self.dataset.read_batch(indices))
        except ValueError as e:  # ids outside the vocabulary: a damaged shard
            return e
        inputs = {"input": windows[:, :-1].contiguous()}
        if self.positions:
            inputs["positions"] = torch.stack([torch.from_numpy(self.dataset.positions(g)) for g in indices])
        return inputs, windows[:, 1:].contiguous()


class PackedLoader(BaseDataLoader):
    """Endless: ({"input": [B, T]}, labels [B, T]), both int64, in pinned memory where there is a GPU; labels are the inputs'
    next tokens.

    torchdata reads ahead in a thread (worker processes would cost more than they save: a window is a copy out of mapped
    memory). The state counts what was handed out, so nothing of what was read ahead is lost or repeated by a run that
    continues, on any number of ranks and with any `prefetch`.

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
        self.batches = MicroBatches(dataset, local_batch=local_batch, rank=rank, ranks=ranks, positions=positions)
        self.prefetch, self.consumed = prefetch, 0

    def __iter__(self):
        start = {"consumed": self.consumed}
        node = self.batches
        if torch.cuda.is_available():
            node, start = PinMemory(node), _before(start)
        if self.prefetch:
            node, start = Prefetcher(node, self.prefetch), _before(start)
        node.reset(start)
        while True:
            batch = self._take(node)
            # Counted before the batch is handed out: a checkpoint taken right after it must not repeat it.
            self.consumed += self.batches.per_batch
            yield batch

    @one_paragraph
    def _take(self, node):
        batch = next(node)
        if isinstance(batch, ValueError):
            raise batch
        return batch

    def state_dict(self) -> dict:
        made_of = json.dumps(self.dataset.made_of)
        return {"consumed_samples": self.consumed, "fingerprint": self.dataset.fingerprint, "made_of": made_of}

    @one_paragraph
    def load_state_dict(self, state: dict) -> None:
        if state["fingerprint"] != self.dataset.fingerprint:
            there, here = json.loads(state["made_of"]), self.dataset.made_of
            causes = [setting for name, setting in CAUSES.items() if there.get(name) != here[name]]
            raise ValueError(
                f"the checkpoint was made with other data, by {', '.join(causes) or 'another version'}: the samples that it "
                "has seen cannot be told from those that it has not. Restore data.corpus, data.weights, "
                "training.seq_len and debug.seed, or start over in the new data with "
                "--checkpoint.exclude_from_loading dataloader."
            )
        self.consumed = state["consumed_samples"]


def _before(state: dict) -> dict:
    """The state of a torchdata node with a thread that has handed out nothing since its source had this state."""
    return {"snapshot": state, "steps_since_snapshot": 0}


@one_paragraph
def build_tokenizer(job_config):
    """The run's tokenizer, with a file of its own that checkpoints can copy."""
    return _with_own_file(open_tokenizer(job_config), job_config)


def _with_own_file(tokenizer, job_config):
    """The tokenizer from the one file, under its own name, that checkpoints copy: a corpus holds it, other places may not."""
    if tokenizer.path.name == tokenizer.file and file_sha256(tokenizer.path) == tokenizer.sha256:
        return tokenizer
    folder = Path(job_config.job.dump_folder) / "tokenizer"
    if torch.distributed.get_rank() == 0:  # which saves
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.write(folder)
    tokenizer.path = folder / tokenizer.file
    return tokenizer


def _build_stream(ranks, rank, tokenizer, job_config):
    logger.warning(
        "streaming %s: this run can be continued on %d data-parallel rank(s) only, and cannot tell whether the data changed.",
        job_config.data.stream,
        ranks,
    )
    return StreamLoader(
        job_config.data.stream,
        tokenizer,
        seq_len=job_config.training.seq_len,
        local_batch=job_config.training.local_batch_size,
        rank=rank,
        ranks=ranks,
    )


@one_paragraph
def build_dataloader(*, plan, rank: int, tokenizer, job_config) -> BaseDataLoader:
    """rank: of the data-parallel ranks."""
    if job_config.data.stream:
        return _build_stream(plan.data_ranks, rank, tokenizer, job_config)
    dataset = open_dataset(job_config, "train")
    names, epochs = corpora_of(job_config), dataset.epochs(plan.steps * plan.global_batch)
    logger.info("data: %s", ", ".join(f"{name} for {n:.2f} epochs" for name, n in zip(names, epochs, strict=True)))
    return PackedLoader(
        dataset,
        local_batch=plan.local_batch,
        rank=rank,
        ranks=plan.data_ranks,
        prefetch=job_config.data.prefetch,
        positions=job_config.data.reset_state_at_documents,
    )
