"""Saving and loading checkpoints, each with a record beside its tensors.

    step-N/interdomain.json   the record: model configuration, size, condition, step, tokens,
                              settings, data fingerprints, versions
    step-N/tokenizer.model    the tokenizer (or tiktoken.json, or hf_tokenizer.json)
    step-N/validation.json    loss and perplexity, if the run validated after this step
    step-N/KEEP               marks a milestone, which is never removed; a user may make it, too
    step-N/*.distcp           shards of torch.distributed.checkpoint
    step-N/.metadata          its index, written last: a folder without it is no checkpoint
    step-N/.incomplete        exists only while a run saves or removes the checkpoint
    step-N.damaged            a checkpoint that could not be read back
    step-N.superseded         a checkpoint after the step that the run went back to
                              (checkpoint.load_step), or one that lay in the place of a new save

No run loads, counts or removes a folder with one of the last two names.

A checkpoint is checked before it is loaded. A run removes and overwrites only what it wrote itself:
no link, no checkpoint of another run, and no folder that lacks its index and the mark
`.incomplete`.
"""

import contextlib
import errno
import functools
import gc
import json
import os
import shutil
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

import interdomain
from interdomain.checkpoint.index import find_damage, load_part
from interdomain.checkpoint.step_folder import (
    DOCUMENTS,
    INCOMPLETE,
    KEEP,
    METADATA,
    RECORD_FACTS,
    RECORD_FILE,
    RECORD_VERSION,
    VALIDATION,
    finished_steps,
    is_unfinished,
    milestones,
    step_folders,
    step_of,
    write_record,
)
from interdomain.data import Tokenizer
from interdomain.folders import write_atomically

from ..errors import stop, user_errors
from ..host import MODEL, OPTIMIZER, TRAIN_STATE, VERSION, CheckpointManager, logger
from ..plan.device import device_here
from ..plan.run_plan import RunPlan
from ..settings.schema import JobConfig
from .lock import RunLock
from .resume_from import (
    ResumePoint,
    find_resume_point,
    on_rank_0,
    require_same_run,
    set_aside,
    set_damaged_aside,
    set_later_aside,
    warn_of_changes,
)

# Texts in the error of a write to a full disk. PyTorch reports a short write as "unexpected pos".
DISK_FULL = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)]
DISK_FULL.append("unexpected pos")


def describe_run(plan: RunPlan, job: JobConfig, data: dict, tokenizer: Tokenizer) -> dict:
    """Returns a run's record, `interdomain.json`.

    It has the model's size and condition in the study. Our trainer writes the record into every
    checkpoint; before that it adds fingerprints, which are hashes of the training and the validation
    text and of the weights of their corpora. Under TorchTitan's trainer the record lies in the run's
    folder.

    Args:
        plan: The plan of the run: what follows from the settings, such as the number of steps.
        job: The settings.
        data: Facts of the training data, from `data_record` or `text_record`.
        tokenizer: The tokenizer of the training data.
    """
    run = {
        "seed": plan.seed,
        "precision": plan.precision,
        "planned_steps": plan.steps,
        "seq_len": plan.seq_len,
        "global_batch": plan.global_batch,
        "tokens_per_step": plan.tokens_per_step,
    }
    return {
        "format_version": RECORD_VERSION,
        "model": plan.config.to_dict(),
        "size": plan.cell.size,
        "condition": plan.cell.condition,
        "run": run | data,
        "configuration": job.to_dict(),
        "folder": str(Path(job.job.dump_folder).resolve()),
        "tokenizer": {
            "file": tokenizer.file,
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
        },
        "versions": {
            "interdomain": interdomain.__version__,
            "torch": torch.__version__,
            "torchtitan": VERSION,
        },
    }


class SelfDescribingCheckpoints(CheckpointManager):
    """TorchTitan's manager with records, checks before each load, and milestones.

    A damaged checkpoint is skipped, and the one before it is loaded.

    Args:
        record: The run's record, from `describe_run`.
        tokenizer: Written into every checkpoint.
        milestones: Steps that are saved whatever the interval, and never removed.
        lock: The lock of the run's folders, on rank 0.
        checkpoint_config: TorchTitan's settings [checkpoint].
        torchtitans: Other arguments of TorchTitan's manager.

    Attributes:
        saving: The folder that is being written, or was written last.
        branched_from: The step that the run last went back to.
        run_folders: The run's folder, and those that it had before. Records of older versions name
            no folder.
    """

    saving = ""
    branched_from: int | None = None

    def __init__(
        self,
        *,
        record: dict,
        tokenizer: Tokenizer,
        milestones: Collection[int],
        lock: RunLock | None,
        checkpoint_config: Any,
        **torchtitans: Any,
    ) -> None:
        """Takes what the checkpoints of the run need; TorchTitan's arguments are passed on."""
        self.record = record
        self.tokenizer = tokenizer
        self.lock = lock
        self.milestones = milestones
        self.run_folders = {record.get("folder"), None}
        super().__init__(checkpoint_config=checkpoint_config, sd_adapter=None, **torchtitans)

    # Saving

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        return super()._should_save(curr_step, last_step or curr_step in self.milestones)

    @user_errors
    def dcp_save(self, state_dict: dict, checkpoint_id: str, *args: Any, **kwargs: Any) -> Any:
        """Saves a checkpoint: TorchTitan's hook, with its arguments. Collective.

        Args:
            state_dict: What to save, by name.
            checkpoint_id: Path of the checkpoint's folder.
            args: Other arguments of TorchTitan's method, such as its kind of asynchronous save.
            kwargs: Likewise.
        """
        folder = Path(checkpoint_id)
        self._check_finite(folder)
        self.saving = str(folder)
        with self._explain_full_disk():
            on_rank_0(lambda: self._write_record(folder))
            saved = super().dcp_save(state_dict, checkpoint_id, *args, **kwargs)
        # The save is complete now, or, in a thread, later.
        if isinstance(saved, Future):
            saved.add_done_callback(lambda _: self._unmark_if_complete(folder))
        else:
            self._unmark_if_complete(folder)
        return saved

    def _unmark_if_complete(self, folder: Path) -> None:
        if dist.get_rank() == 0 and (folder / METADATA).is_file():
            (folder / INCOMPLETE).unlink(missing_ok=True)

    def _check_finite(self, folder: Path) -> None:
        """Ends the run before weights that are not finite become a checkpoint. Collective."""
        each_finite = []
        for part in self.states[MODEL].model:
            for p in part.parameters():
                local = p.to_local() if isinstance(p, DTensor) else p
                each_finite.append(local.detach().isfinite().all().to(device_here()))
        finite = torch.stack(each_finite).all().float()
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        if not finite.item():
            stop(
                f"the weights are not finite, so {folder} is not saved. {self._last_complete()} Try "
                "a lower optimizer.lr, a longer warmup or a smaller training.max_norm from there."
            )

    def _async_wait(self) -> None:
        # An asynchronous save that failed raises its error here.
        with self._explain_full_disk():
            super()._async_wait()

    @contextlib.contextmanager
    def _explain_full_disk(self) -> Iterator[None]:
        """Explains a save that fails on a full disk, and removes the part that was written."""
        try:
            yield
        except (CheckpointException, OSError) as e:
            # PyTorch wraps the system's error, and passes only its text from rank to rank.
            reasons = [text for text in DISK_FULL if text in str(e)]
            if not reasons:
                raise
            if dist.get_rank() == 0 and self._wrote(Path(self.saving)):
                with contextlib.suppress(OSError):
                    _remove(Path(self.saving))
            stop(
                f"The disk is full: saving {self.saving} failed ({reasons[0]}), and what was written "
                f"of it is removed. {self._last_complete()} Free some space "
                "(checkpoint.keep_latest_k limits how many are kept), then start the same command "
                "again: it continues from there."
            )

    def _last_complete(self) -> str:
        last = max(finished_steps(Path(self.folder)), default="none")
        return f"The last complete checkpoint is step {last}."

    @user_errors
    def require_folder(self) -> None:
        """Ends this rank if another run has taken the folder over."""
        if self.lock:
            self.lock.check_held()

    def _write_record(self, folder: Path) -> None:
        """Makes the folder of a checkpoint, with the record and the tokenizer. Called on rank 0.

        Args:
            folder: The folder to make, step-N.
        """
        if self.lock:
            self.lock.refresh()
            self.lock.check_held()

        # Make room: an older save of this run is removed, and anything else is renamed.
        step = self.states[TRAIN_STATE].step
        keep = step in self.milestones or (folder / KEEP).exists()
        if self._wrote(folder):
            _remove(folder)
        elif os.path.lexists(folder):
            aside = set_aside(folder, "superseded").name
            logger.warning("renamed to %s, to save this step: %s", aside, folder)

        # The mark comes first, so that an interrupted save is known as one at any later moment.
        folder.mkdir(parents=True, exist_ok=True)
        (folder / INCOMPLETE).touch()

        optimizers = self.states[OPTIMIZER]
        record = self.record | {
            "step": step,
            "tokens": step * self.record["run"]["tokens_per_step"],
        }
        record |= optimizers.step_guard.state_dict() | {"branched_from": self.branched_from}
        if optimizers.rates:
            record["lr"] = optimizers.rates["main"]
            record["peak_lr"] = optimizers.optimizers[0].defaults["lr"]
        write_record(folder, record, self.tokenizer)
        if keep:
            (folder / KEEP).touch()

    @user_errors
    def note_validation(
        self,
        step: int,
        loss: float,
        perplexity: float,
        accuracy: float | None,
        documents: list[list[float]] | None,
    ) -> None:
        """Writes the result of a validation beside the checkpoint of its step, if there is one.

        Args:
            step: The step after which the model was validated.
            loss: Mean loss per token, in nats.
            perplexity: exp(loss).
            accuracy: Fraction of answers that were right, for a corpus with answers. None for
                others.
            documents: The sum of losses (nats) and the number of labels of each document, two
                lists. None if the split has many documents.
        """
        if not self.enable or dist.get_rank() != 0 or not self._is_saved_here(step):
            return
        folder = self._folder_of(step)
        if documents is not None:
            losses, labels = documents
            by_document = {
                "nats": [float(f"{x:.7g}") for x in losses],
                "labels": [int(n) for n in labels],
            }
            write_atomically(folder / DOCUMENTS, (json.dumps(by_document) + "\n").encode())
        result = {"step": step, "loss": loss, "perplexity": perplexity}
        if accuracy is not None:
            result["accuracy"] = accuracy
        write_atomically(folder / VALIDATION, (json.dumps(result) + "\n").encode())

    @user_errors
    def lacks_validation(self, step: int) -> bool:
        """Returns whether this step was saved and not validated. Collective.

        Args:
            step: A step of this run.
        """
        result = self._folder_of(step) / VALIDATION
        return on_rank_0(lambda: self.enable and self._is_saved_here(step) and not result.exists())

    def _is_saved_here(self, step: int) -> bool:
        """Returns whether the step has a folder that is not a link to a checkpoint elsewhere."""
        folder = self._folder_of(step)
        return folder.is_dir() and not folder.is_symlink()

    def _folder_of(self, step: int) -> Path:
        return Path(self._create_checkpoint_id(step))

    def save_now(self, step: int) -> bool:
        """Returns once a checkpoint of this step is on the disk, or False if the run saves none."""
        if self.enable:
            self._async_wait()
            if step != step_of(self.saving):
                self.save(step, last_step=True)
        return self.enable

    def _save_last_step(self, curr_step: int) -> None:
        super()._save_last_step(curr_step)
        # After the last step TorchTitan would keep one more than `keep_latest_k`.
        self._purge_stale_checkpoints()

    def _purge_stale_checkpoints(self) -> None:
        """Removes all but the milestones and the latest `keep_latest_k` checkpoints.

        The checkpoint that is being saved counts. Unfinished saves of earlier steps are removed,
        too. Nothing is removed that this run did not write.
        """
        if self.keep_latest_k <= 0 or dist.get_rank() != 0:
            return
        current = step_of(self.saving)
        assert current is not None
        folder = Path(self.folder)
        finished = sorted(step for step in {*finished_steps(folder), current} if step <= current)
        kept = {*finished[-self.keep_latest_k :], *milestones(folder)}
        for path in step_folders(folder):
            step = step_of(path)
            if step is None or step > current or step in kept or not self._wrote(path):
                continue
            _mark_incomplete(path)
            self.purge_queue.put(str(path))

    def _wrote(self, folder: Path) -> bool:
        """Returns whether this run, or the one that it continues, wrote a step folder."""
        unfinished = is_unfinished(folder)
        if folder.is_symlink() or not (unfinished or (folder / METADATA).is_file()):
            return False
        try:
            record = json.loads((folder / RECORD_FILE).read_text())
        except FileNotFoundError:  # not written yet, or removed already
            return unfinished
        except (OSError, ValueError):
            return False
        return record.get("folder") in self.run_folders

    # Loading

    @user_errors
    @torch.no_grad()
    def load(self, step: int = -1) -> bool:
        """Loads a checkpoint. Collective.

        It replaces TorchTitan's method, for which a folder with nothing but the remains of a save
        is a run's checkpoint.

        Args:
            step: The step to load. -1: the latest one, or else checkpoint.initial_load_path.

        Returns:
            Whether there was a checkpoint to load.
        """
        if not self.enable:
            return False
        folder = Path(self.folder)
        while point := on_rank_0(
            lambda: find_resume_point(folder, step, self.initial_load_path, self.record)
        ):
            damage = self._load(point)
            if damage is None:
                self.branched_from = point.branched_from
                if point.source == "load_step":
                    on_rank_0(lambda: set_later_aside(folder, step))
                return True
            # Only the latest checkpoint is replaced by the one before it.
            if point.source != "latest":
                stop(
                    f"{damage}. Choose another checkpoint.load_step or checkpoint.initial_load_path."
                )
            on_rank_0(functools.partial(set_damaged_aside, point.folder, damage))
        return False

    def _load(self, point: ResumePoint) -> str | None:
        """Loads a checkpoint unless it is damaged. Collective.

        Args:
            point: The checkpoint, from `find_resume_point`.

        Returns:
            The damage, the same on all ranks, or None if the checkpoint is loaded.
        """
        logger.info("Loading the checkpoint from %s.", point.folder)
        initial = point.source == "initial"
        if not initial:
            self.exclude_from_loading = []
            self.run_folders.add(point.record.get("folder"))
        states = self._states_to_load(initial and self.initial_load_model_only)
        continues = TRAIN_STATE in states
        require_same_run(point, self.record, batch=continues, optimizer=OPTIMIZER in states)

        # Each rank reads a part of the files. All ranks must agree on the outcome.
        damage_by_rank: list[str | None] = [None] * dist.get_world_size()
        own_damage = find_damage(point.folder, point.files, dist.get_rank(), len(damage_by_rank))
        dist.all_gather_object(damage_by_rank, own_damage)
        for damage in damage_by_rank:
            if damage:
                return damage
        load_part(point.folder, point.files, states)
        self.states[MODEL].load_state_dict(states)

        # The run's record names the weights that it started from, and other data that it has seen.
        origin = {name: point.record[name] for name in RECORD_FACTS}
        if continues:
            origin = point.record["run"].get("started_from")
            self._note_earlier_data(point.record)
            if dist.get_rank() == 0:
                warn_of_changes(point, self.record)
            self.states[OPTIMIZER].step_guard.load_state_dict(point.record)
        if origin:
            self.record["run"]["started_from"] = origin
        gc.collect()  # the trainer has turned off Python's own collections
        return None

    def _note_earlier_data(self, record: dict) -> None:
        """Adds the data that the continued run was trained on to the record, if it was other data.

        Args:
            record: The record of the checkpoint that the run continues.
        """
        run = record["run"]
        earlier = list(run.get("earlier_data", []))
        text = record.get("fingerprints", {}).get("train")
        if text is not None and text != self.record["fingerprints"]["train"]:
            facts = {name: run[name] for name in ("data_fingerprint", "corpora") if name in run}
            earlier.append(facts | {"ends": record["step"]})
        if earlier:
            self.record["run"]["earlier_data"] = earlier


def _mark_incomplete(folder: Path) -> None:
    """Turns the index into the mark `.incomplete`, before a checkpoint is removed.

    From then on the folder is not taken for a checkpoint.
    """
    with contextlib.suppress(FileNotFoundError):  # an unfinished save has no index
        (folder / METADATA).rename(folder / INCOMPLETE)


def _remove(folder: Path) -> None:
    """Removes a step folder of this run.

    The mark `.incomplete` goes last: after a kill, the next start knows by it that this run left
    the rest.
    """
    _mark_incomplete(folder)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != INCOMPLETE:
            path.unlink()
    shutil.rmtree(folder)
