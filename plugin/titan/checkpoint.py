"""Self-describing checkpoints: every `step-N` carries the model's configuration and the tokenizer that it was trained with.

step-N/interdomain.json   model configuration, size, condition, step, tokens, seed, data fingerprint, versions
step-N/tokenizer.model    the tokenizer
step-N/*.distcp           torch.distributed.checkpoint's shards
step-N/.metadata          its index, written last: a folder without it is not a checkpoint and is never loaded
"""

import errno
import json
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torchtitan.train
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpoint import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    TRAIN_STATE,
    CheckpointManager,
)

import interdomain
from interdomain.model import condition_of

from .errors import one_paragraph, stop

SIDECAR = "interdomain.json"
TOKENIZER = "tokenizer.model"
SIDECAR_VERSION = 1
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def describe_run(plan, dataset_fingerprint: str, tokenizer) -> None:
    """Set what every checkpoint of this run will say of itself."""
    record = {
        "format_version": SIDECAR_VERSION,
        "model": plan.config.to_dict(),
        "size": plan.size,
        "condition": condition_of(plan.config),
        "run": {
            "seed": plan.seed,
            "seq_len": plan.seq_len,
            "global_batch": plan.global_batch,
            "tokens_per_step": plan.tokens_per_step,
            "planned_steps": plan.steps,
            "data_fingerprint": dataset_fingerprint,
        },
        "tokenizer": {"file": TOKENIZER, "sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size},
        "versions": {
            "interdomain": interdomain.__version__,
            "torch": torch.__version__,
            "torchtitan": torchtitan.__version__,
        },
    }
    SelfDescribingCheckpoints.record, SelfDescribingCheckpoints.tokenizer = record, Path(tokenizer.path)


class SelfDescribingCheckpoints(CheckpointManager):
    """TorchTitan's manager, with a record beside every save, a check before every load, and plain words when a disk fills.

    `record` and `tokenizer` are set by `describe_run` before the trainer builds its manager.
    """

    record: dict
    tokenizer: Path

    def dcp_save(self, state_dict, checkpoint_id, *args, **kwargs):
        if dist.get_rank() == 0:
            self._begin(Path(checkpoint_id))
        dist.barrier()
        try:
            return super().dcp_save(state_dict, checkpoint_id, *args, **kwargs)
        except (CheckpointException, OSError) as e:
            causes = e.failures.values() if isinstance(e, CheckpointException) else [e]
            full = next((c for c in map(_os_error, causes) if c is not None and c.errno in DISK_FULL), None)
            if full is None:
                raise
            if dist.get_rank() == 0:
                shutil.rmtree(checkpoint_id, ignore_errors=True)
            last = self._find_load_step()
            kept = f"The last whole checkpoint is step {last}" if last >= 0 else "There is no earlier checkpoint"
            stop(
                f"The disk is full: saving {checkpoint_id} failed ({full.strerror}), and what was written of it is removed. "
                f"{kept} in {self.folder}. Free some space (checkpoint.keep_latest_k limits how many are kept), then start "
                "the same command again: it continues from there."
            )

    def _begin(self, folder: Path) -> None:
        """Make the folder, unmark an old checkpoint of the same step, and write the record."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".metadata").unlink(missing_ok=True)
        step = self.states[TRAIN_STATE].step
        record = {**self.record, "step": step, "tokens": step * self.record["run"]["tokens_per_step"]}
        shutil.copyfile(self.tokenizer, folder / TOKENIZER)
        (folder / SIDECAR).write_text(json.dumps(record, indent=2) + "\n")

    def dcp_load(self, state_dict, checkpoint_id, *args, **kwargs):
        self._check(Path(checkpoint_id))
        return super().dcp_load(state_dict, checkpoint_id, *args, **kwargs)

    @one_paragraph
    def _check(self, folder: Path) -> None:
        """Refuse another model's checkpoint by name and shape, before a byte of it is read into this one."""
        if not (folder / ".metadata").is_file():
            raise ValueError(
                f"{folder} is not a whole checkpoint: it has no .metadata, which is written last. Choose another "
                "checkpoint.load_step or checkpoint.initial_load_path."
            )
        found = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
        model = self.states[MODEL].state_dict()
        missing = [name for name in model if name not in found]
        others = tuple(f"{part}." for part in (OPTIMIZER, LR_SCHEDULER, DATALOADER, TRAIN_STATE))
        extra = [name for name in found if name not in model and not name.startswith(others)]
        shapes = [
            f"{name} is {list(found[name].size)} there and {list(tensor.shape)} here"
            for name, tensor in model.items()
            if name in found and list(found[name].size) != list(tensor.shape)
        ]
        if missing or extra or shapes:
            said = ""
            if (folder / SIDECAR).is_file():
                record = json.loads((folder / SIDECAR).read_text())
                said = f" (there: {record['size']}, {record['condition']})"
            examples = [f"{n} is missing there" for n in missing] + [f"{n} is unknown here" for n in extra] + shapes
            raise ValueError(
                f"{folder} is a checkpoint of another model{said}: {'; '.join(examples[:3])}"
                f"{f' (and {len(examples) - 3} more)' if len(examples) > 3 else ''}. Set model.flavor and [mixer] to "
                "those of the checkpoint, or give this run a folder of its own with --job.dump_folder."
            )


def _os_error(failure) -> OSError | None:
    """The OSError behind what a rank of torch.distributed.checkpoint reports, if there is one."""
    error = failure[0] if isinstance(failure, tuple) else failure
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def install() -> None:
    """Have the trainer build this manager instead of TorchTitan's, whichever way `torchtitan.train` was started."""
    for module in (torchtitan.train, sys.modules["__main__"]):
        if getattr(module, "CheckpointManager", None) is CheckpointManager:
            module.CheckpointManager = SelfDescribingCheckpoints
