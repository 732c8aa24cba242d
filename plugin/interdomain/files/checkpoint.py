"""A training checkpoint of this project or of Megatron-Core, and its tokenizer."""

from pathlib import Path

import torch

from interdomain.data import Tokenizer, check_vocab, load_tokenizer, recorded_documents
from interdomain.model import meta_model

from . import distributed_checkpoint as checkpoints
from .checkpoint_index import check_bytes, read_tensors, tensor_index
from .megatron_checkpoint import TOKENIZER_DIGITS, MegatronCheckpoint, find_checkpoint
from .pretrained import load_checked_tokenizer


class Checkpoint:
    """A training checkpoint of this project: its model, and what is recorded of it. `MegatronCheckpoint` has the same."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config, self.record = checkpoints.read_sidecar(folder)
        self.index = tensor_index(folder)
        for name, tensor in meta_model(self.config).state_dict().items():
            shape = list(self.index[name].size) if name in self.index else "missing"
            if shape != list(tensor.shape):
                raise ValueError(
                    f"{folder} is damaged: {name} is {shape}, but the record has {list(tensor.shape)}. Take another checkpoint."
                )

    def read(self, names: list[str]) -> dict[str, torch.Tensor]:
        return read_tensors(self.folder, names)

    def check_bytes(self, names: list[str]) -> None:
        check_bytes(self.folder, names)


def open_checkpoint(source: Path, tokenizer: Path | None) -> tuple[Checkpoint | MegatronCheckpoint, Tokenizer]:
    """The checkpoint at `source`, or a run's newest complete one, and its tokenizer.

    Raises: ValueError for a tokenizer given for a checkpoint that has its own; for one of Megatron-Core, without a tokenizer or
        with another than the run's.
    """
    folder = find_checkpoint(source)
    if folder is None:
        if tokenizer:
            raise ValueError(
                f"--tokenizer is for checkpoints of Megatron-Core. {source} has its own tokenizer: leave it out."
            )
        checkpoint = Checkpoint(checkpoints.latest_checkpoint(source))
        record = checkpoints.record_folder(checkpoint.folder)
        return checkpoint, load_checked_tokenizer(record, checkpoint.config, checkpoint.record)
    if not tokenizer:
        raise ValueError(
            f"{folder} is a checkpoint of Megatron-Core, without a tokenizer. Give the corpus's with --tokenizer."
        )
    megatron, loaded = MegatronCheckpoint(folder), load_tokenizer(tokenizer)
    check_vocab(loaded.vocab_size, megatron.config.vocab_size)
    if megatron.tokenizer not in (None, loaded.sha256[:TOKENIZER_DIGITS]):
        raise ValueError(
            f"--tokenizer {tokenizer} is not the tokenizer of the run's corpus (sha256 {loaded.sha256[:TOKENIZER_DIGITS]}... "
            f"against {megatron.tokenizer}...). Give the corpus that the run was trained on."
        )
    loaded.documents = recorded_documents(megatron.record["run"], loaded)
    return megatron, loaded
