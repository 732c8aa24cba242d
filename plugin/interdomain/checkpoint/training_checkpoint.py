"""A training checkpoint of this project, and its tokenizer."""

from pathlib import Path

import torch

from interdomain.data import Tokenizer
from interdomain.model import meta_model

from . import step_folder as checkpoints
from .index import check_bytes, read_tensors, tensor_index
from .pretrained import load_checked_tokenizer


class Checkpoint:
    """A training checkpoint of this project: its model, and what is recorded of it. `MegatronCheckpoint` has the
    same attributes and methods."""

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


def open_checkpoint(source: Path) -> tuple[Checkpoint, Tokenizer]:
    """The checkpoint at `source`, or a run's newest complete one, and its tokenizer."""
    checkpoint = Checkpoint(checkpoints.latest_checkpoint(source))
    record = checkpoints.record_folder(checkpoint.folder)
    return checkpoint, load_checked_tokenizer(record, checkpoint.config, checkpoint.record)
