"""Batches of packed windows for TorchTitan, and the tokenizer under its interface.

The loader's whole state is one number, the samples that all ranks together have consumed, and a fingerprint of the data
and its order. It is the same on every rank, so a run continues with the same batches on any number of ranks.
"""

from pathlib import Path

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

from interdomain.data import PackedDataset
from interdomain.data.indexed import file_sha256

from .checkpoint import describe_run
from .errors import one_paragraph
from .plan import make_plan, open_dataset, open_tokenizer


class PackedLoader(BaseDataLoader):
    """Endless: ({"input": [B, T]}, labels [B, T]), both int64; labels are the inputs' next tokens.

    Micro-batch i of all ranks together is the next `local_batch * ranks` global samples; rank r takes the r-th run of
    `local_batch` of them. A step's samples therefore depend on the global batch size alone.
    """

    def __init__(self, dataset: PackedDataset, *, local_batch: int, rank: int, ranks: int) -> None:
        self.dataset, self.local_batch, self.rank, self.ranks = dataset, local_batch, rank, ranks
        self.consumed = 0

    def __iter__(self):
        while True:
            first = self.consumed + self.rank * self.local_batch
            # Counted before the batch is handed out: a checkpoint taken right after it must not repeat it.
            self.consumed += self.local_batch * self.ranks
            windows = torch.from_numpy(self._read(range(first, first + self.local_batch)))
            yield {"input": windows[:, :-1].contiguous()}, windows[:, 1:].contiguous()

    @one_paragraph
    def _read(self, indices: range):
        return self.dataset.read_batch(indices)  # refuses ids outside the vocabulary: a damaged shard

    def state_dict(self) -> dict:
        return {"consumed_samples": self.consumed, "fingerprint": self.dataset.fingerprint}

    @one_paragraph
    def load_state_dict(self, state: dict) -> None:
        if state["fingerprint"] != self.dataset.fingerprint:
            raise ValueError(
                "the checkpoint was made with other data: corpus, sequence length or seed differ from this run's, so "
                "the samples that it has seen cannot be told from those that it has not. Restore data.corpus, "
                "training.seq_len and debug.seed, or start over in the new data with "
                "--checkpoint.exclude_from_loading dataloader."
            )
        self.consumed = state["consumed_samples"]


class TitanTokenizer(BaseTokenizer):
    """A tokenizer of `interdomain.data` under TorchTitan's interface."""

    def __init__(self, tokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.bos_id, self.eos_id = tokenizer.bos_id, tokenizer.eos_id

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        return self.tokenizer.encode(text, add_bos=add_bos, add_eos=add_eos)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)

    def get_vocab_size(self) -> int:
        return self.tokenizer.vocab_size


@one_paragraph
def build_tokenizer(job_config) -> TitanTokenizer:
    # The first of the plugin's hooks that TorchTitan calls: nothing is built yet, so the whole configuration is checked.
    make_plan(job_config, torch.distributed.get_world_size())
    return TitanTokenizer(open_tokenizer(job_config))


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


@one_paragraph
def build_dataloader(*, dp_world_size: int, dp_rank: int, tokenizer, job_config) -> PackedLoader:
    dataset = open_dataset(job_config, "train")
    plan = make_plan(job_config, torch.distributed.get_world_size())
    describe_run(plan, dataset.fingerprint, _with_own_file(tokenizer.tokenizer, job_config))
    return PackedLoader(
        dataset,
        local_batch=job_config.training.local_batch_size,
        rank=dp_rank,
        ranks=dp_world_size,
    )
