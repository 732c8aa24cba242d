"""Whether a checkpoint is complete, and whether it holds this model. No tensor is read here."""

import json
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from interdomain.model import ModelConfig, cell_of
from interdomain.model.distributed_checkpoint import METADATA, SIDECAR, check_lengths, parse_index

from .host import DATALOADER, LR_SCHEDULER, OPTIMIZER, TRAIN_STATE

REQUIRED = {"model", "size", "condition"}  # in the record of every version
OTHER_STATE = tuple(f"{part}." for part in (OPTIMIZER, LR_SCHEDULER, DATALOADER, TRAIN_STATE))


def is_finished(folder: Path) -> bool:
    """Whether its save came to the end: the index is written last. What is not finished was never a checkpoint."""
    return (folder / METADATA).is_file()


def read_checked(folder: Path) -> tuple[bytes, dict]:
    """A checkpoint's index, as bytes, and its record ({} where there is none), after a check of its files and their lengths.

    Raises: ValueError that names the file and what is wrong with it; OSError.
    """
    if not is_finished(folder):
        raise ValueError(f"{folder} is not a complete checkpoint: it has no {METADATA}, which is written last.")
    index = (folder / METADATA).read_bytes()
    check_lengths(folder, parse_index(index, folder))
    sidecar = folder / SIDECAR
    if not sidecar.is_file():
        return index, {}
    try:
        record = json.loads(sidecar.read_text())
    except ValueError as e:
        raise ValueError(f"{sidecar} is damaged ({e}).") from e
    if not isinstance(record, dict) or not record.keys() >= REQUIRED:
        raise ValueError(f"{sidecar} is damaged: it does not say of what model it is.")
    return index, record


def require_same_model(folder: Path, index: Metadata, record: dict, config: dict, tensors: dict) -> None:
    """Refuse a checkpoint of another model.

    Args:
        index, record: of the checkpoint. config, tensors: this model's configuration and state dict.
    Raises: ValueError.
    """
    found, pairs = index.state_dict_metadata, []
    if record:  # settings that make another model of the same tensors; the context length does not
        there, here = (ModelConfig.from_dict(c).to_dict() for c in (record["model"], config))
        pairs = [(name, there[name], here[name]) for name in here if name not in ("max_seq_len", "mixer")]
        pairs += [(f"mixer.{name}", there["mixer"][name], value) for name, value in here["mixer"].items()]
    there = {
        name: list(getattr(entry, "size", ())) for name, entry in found.items() if not name.startswith(OTHER_STATE)
    }
    here = {name: list(tensor.shape) for name, tensor in tensors.items()}
    pairs += [(name, there.get(name, "missing"), here.get(name, "missing")) for name in sorted(there | here)]
    if differences := [f"{name} is {a} there and {b} here" for name, a, b in pairs if a != b]:
        cell = f" (there: {cell_of(ModelConfig.from_dict(record['model']), record['size'])})" if record else ""
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise ValueError(
            f"{folder} is a checkpoint of another model{cell}: {'; '.join(differences[:3])}{more}. Set model.flavor and "
            "[mixer] to those of the checkpoint, or give this run a folder of its own with --job.dump_folder."
        )
