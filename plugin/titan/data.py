"""Batches of packed windows for TorchTitan, and the tokenizer.

The loader's whole state is one number, the samples that all ranks together have consumed, and a fingerprint of the data
and its order. It is the same on every rank, so a run continues with the same batches on any number of ranks.
"""

import json
import queue
import threading
from pathlib import Path

import torch

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


class PackedLoader(BaseDataLoader):
    """Endless: ({"input": [B, T]}, labels [B, T]), both int64; labels are the inputs' next tokens.

    Micro-batch i of all ranks together is the next `local_batch * ranks` global samples; rank r takes the r-th run of
    `local_batch` of them. A step's samples therefore depend on the global batch size alone. A thread reads ahead (worker
    processes would cost more than they save: a window is a copy out of mapped memory); the state counts what was
    handed out, so nothing of what was read ahead is lost or repeated by a run that continues.

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
        self.dataset, self.local_batch, self.rank, self.ranks = dataset, local_batch, rank, ranks
        self.prefetch, self.positions, self.fingerprint = prefetch, positions, dataset.fingerprint
        self.consumed = 0

    def __iter__(self):
        batches = self._ahead() if self.prefetch else map(self._read, self._firsts())
        try:
            while True:
                batch = self._take(batches)
                # Counted before the batch is handed out: a checkpoint taken right after it must not repeat it.
                self.consumed += self.local_batch * self.ranks
                yield batch
        finally:
            if self.prefetch:
                batches.close()

    @one_paragraph
    def _take(self, batches):
        return next(batches)  # refuses ids outside the vocabulary: a damaged shard

    def _firsts(self):
        first = self.consumed + self.rank * self.local_batch
        while True:
            yield first
            first += self.local_batch * self.ranks

    def _read(self, first: int):
        indices = range(first, first + self.local_batch)
        windows = torch.from_numpy(self.dataset.read_batch(indices))
        inputs = {"input": windows[:, :-1].contiguous()}
        if self.positions:
            inputs["positions"] = torch.stack([torch.from_numpy(self.dataset.positions(g)) for g in indices])
        return inputs, windows[:, 1:].contiguous()

    def _ahead(self):
        """The batches, read by a thread of their own, which ends with this generator."""
        ready, stop = queue.Queue(self.prefetch), threading.Event()

        def put(item) -> bool:
            while not stop.is_set():
                try:
                    ready.put(item, timeout=0.2)
                    return True
                except queue.Full:
                    pass
            return False

        def read() -> None:
            try:
                for first in firsts:
                    if not put((self._read(first), None)):
                        return
            except BaseException as e:  # raised where the batch is asked for
                put((None, e))

        firsts = self._firsts()
        thread = threading.Thread(target=read, name="data", daemon=True)
        thread.start()
        try:
            while True:
                batch, error = ready.get()
                if error is not None:
                    raise error
                yield batch
        finally:
            stop.set()
            thread.join()

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
