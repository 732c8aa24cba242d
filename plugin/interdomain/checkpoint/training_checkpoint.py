"""A training checkpoint of this project, opened with its tokenizer."""

from pathlib import Path

from torch import Tensor

from interdomain.data import Tokenizer

from . import step_folder
from .index import check_bytes, read_tensors
from .pretrained import load_checked_tokenizer


class TrainingCheckpoint:
    """A checkpoint of this project. `MegatronCheckpoint` has the same attributes and methods.

    Args:
        folder: The folder of the checkpoint.

    Attributes:
        folder: The folder of the checkpoint.
        config: The model's configuration.
        record: The contents of interdomain.json.

    Raises:
        FileNotFoundError, ValueError: interdomain.json is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config, self.record = step_folder.read_run_record(folder)

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Reads tensors of the model to the CPU.

        Args:
            names: The tensors' names in the package's model.

        Raises:
            FileNotFoundError, ValueError: The checkpoint is not complete, or damaged.
        """
        return read_tensors(self.folder, names)

    def check_bytes(self, names: list[str]) -> None:
        """Checks that tensors are stored as they were saved, and that no file is cut off.

        Args:
            names: The tensors' names in the package's model.

        Raises:
            FileNotFoundError, ValueError: The checkpoint is not complete, or damaged.
        """
        check_bytes(self.folder, names)


def open_checkpoint(source: Path) -> tuple[TrainingCheckpoint, Tokenizer]:
    """Opens a checkpoint, or a run's newest complete one, and its tokenizer.

    Only interdomain.json and the tokenizer are read here. If `source` is a checkpoint, a folder
    step-N, nobody has looked at its index and tensors: `read` and `check_bytes` say if they are
    missing or damaged.

    Args:
        source: The folder of a checkpoint, of checkpoints, or of a run.

    Raises:
        FileNotFoundError, ValueError: There is no such folder, no complete checkpoint in a folder
            of several, or interdomain.json or the tokenizer is missing or damaged.
    """
    # The tokenizer is beside interdomain.json: in the checkpoint, or in the folder of a run of
    # TorchTitan's own trainer.
    checkpoint = TrainingCheckpoint(step_folder.latest_checkpoint(source))
    folder = step_folder.record_folder(checkpoint.folder)
    return checkpoint, load_checked_tokenizer(folder, checkpoint.config, checkpoint.record)
