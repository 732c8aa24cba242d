"""Checkpoints that say what they are, are checked before they are loaded, and of which the last good one is never lost.

step-N/interdomain.json   model configuration, size, condition, step, tokens, seed, data fingerprint, versions
step-N/tokenizer.model    the tokenizer (tiktoken.json or hf_tokenizer.json where it is one)
step-N/validation.json    loss and perplexity, where the run validated after this step (.begun: a start tried a missed one)
step-N/*.distcp           torch.distributed.checkpoint's shards
step-N/.metadata          its index, written last: a folder without it is not a checkpoint and is never loaded
step-N.damaged            could not be read back; no run loads, counts or removes it
step-N.superseded         came after a step that the run went back to (checkpoint.load_step); likewise
"""

import contextlib
import errno
import functools
import gc
import json
import os
import shutil
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint

import interdomain
from interdomain.data import Tokenizer
from interdomain.folders import write_whole
from interdomain.model.distributed_checkpoint import (
    METADATA,
    SIDECAR,
    SIDECAR_VERSION,
    VALIDATION,
    SafeReader,
    altered_entry,
    finished_steps,
    parse_index,
    step_of,
)

from .errors import one_paragraph, stop
from .host import MODEL, OPTIMIZER, TRAIN_STATE, VERSION, CheckpointManager, logger
from .integrity import is_finished, require_same_model
from .lock import FolderLock
from .plan import tokens_at
from .preemption import children_keep_saving
from .resume_from import ResumePoint, all_steps, find_resume_point, on_rank_0, set_damaged_aside, set_later_aside

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def describe_run(plan, dataset_fingerprint: str, tokenizer) -> dict:
    """The record that every checkpoint of this run carries."""
    of_the_plan = ("seed", "precision", "seq_len", "global_batch", "tokens_per_step")
    run = {name: getattr(plan, name) for name in of_the_plan}
    return {
        "format_version": SIDECAR_VERSION,
        "model": plan.config.to_dict(),
        "size": plan.cell.size,
        "condition": plan.cell.condition,
        "run": {**run, "planned_steps": plan.steps, "data_fingerprint": dataset_fingerprint},
        "tokenizer": {"file": tokenizer.file, "sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size},
        "versions": {"interdomain": interdomain.__version__, "torch": torch.__version__, "torchtitan": VERSION},
    }


class Unreadable(Exception):
    """Tensors of a checkpoint cannot be read, or are not those that were saved. Raised on all ranks alike."""


class SelfDescribingCheckpoints(CheckpointManager):
    """TorchTitan's manager, with a record beside every save, a check before every load, and an explanation when a disk fills.

    A damaged checkpoint is skipped, and the one before it is loaded.

    Args:
        record: of `describe_run`. tokenizer: written into every checkpoint.
        lock: on rank 0, where the run holds its folder.
    """

    resumed = (0, 0)  # (step, tokens) that this process continues from
    loaded: int | None = None  # the step of this folder that was loaded
    saving = ""  # the folder being written, or written last
    branched_from: int | None = None  # the step that the run last went back to

    def __init__(
        self, *, record: dict, tokenizer: Tokenizer, lock: FolderLock | None, checkpoint_config, **torchtitans
    ) -> None:
        self.record, self.tokenizer, self.lock = record, tokenizer, lock
        self.checksums = checkpoint_config.checksums
        self.excluded_parts = list(checkpoint_config.exclude_from_loading)
        super().__init__(checkpoint_config=checkpoint_config, sd_adapter=None, **torchtitans)

    # Saving

    def dcp_save(self, state_dict: dict, checkpoint_id: str, *args, **kwargs):
        self.saving = str(checkpoint_id)
        with self._explain_full_disk():
            self._make_folder(Path(checkpoint_id))
            with children_keep_saving():  # async_with_pinned_mem writes in a process of its own
                return super().dcp_save(state_dict, checkpoint_id, *args, **kwargs)

    def _async_wait(self) -> None:
        with self._explain_full_disk():  # an asynchronous save that failed raises its error here
            super()._async_wait()

    @contextlib.contextmanager
    def _explain_full_disk(self) -> Iterator[None]:
        try:
            yield
        except (CheckpointException, OSError) as e:
            if (full := _disk_full(e)) is None:
                raise
            if dist.get_rank() == 0:
                shutil.rmtree(self.saving, ignore_errors=True)
            last = max(finished_steps(Path(self.folder)), default="none")
            stop(
                f"The disk is full: saving {self.saving} failed ({full}), and what was written of it is removed. The last "
                f"complete checkpoint is step {last}. Free some space (checkpoint.keep_latest_k limits how many are kept), "
                "then start the same command again: it continues from there."
            )

    @one_paragraph
    def require_folder(self) -> None:
        """End this rank if another run has taken the folder over."""
        if self.lock:
            self.lock.require()

    @one_paragraph
    def _make_folder(self, folder: Path) -> None:
        """On rank 0: the folder, with the record and the tokenizer. Collective."""
        on_rank_0(lambda: self._write_record(folder))

    def _write_record(self, folder: Path) -> None:
        if self.lock:
            self.lock.beat()
            self.lock.require()
        if folder.exists():  # from an older save of this step; without its index it is no checkpoint
            (folder / METADATA).unlink(missing_ok=True)
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        self.tokenizer.write(folder)
        step, optimizers = self.states[TRAIN_STATE].step, self.states[OPTIMIZER]
        tokens = tokens_at(step, self.resumed, self.record["run"]["tokens_per_step"])
        record = {**self.record, "step": step, "tokens": tokens, "skipped_steps": optimizers.guard.skipped}
        if rates := getattr(optimizers, "rates", None):  # a later start compares (schedule.refuse_jump)
            record |= {"lr": rates["main"], "peak_lr": optimizers.optimizers[0].defaults["lr"]}
        # Every restart of the same command asks for these again (see resume_from.py).
        record |= {"branched_from": self.branched_from, "started_without": self.excluded_parts}
        write_whole(folder / SIDECAR, (json.dumps(record, indent=2) + "\n").encode())

    def note_validation(self, step: int, loss: float, perplexity: float) -> None:
        """Write a step's validation beside its checkpoint, where it has one."""
        if dist.get_rank() or not self._saves() or (self.lock and self.lock.lost):
            return
        folder, result = self._folder_of(step), {"step": step, "loss": loss, "perplexity": perplexity}
        if folder.is_dir():
            try:
                write_whole(folder / VALIDATION, (json.dumps(result) + "\n").encode())
            except OSError as e:  # no reason to end a run
                logger.warning("%s", e)

    def claim_validation(self, step: int) -> bool:
        """Whether this step was saved and not validated. True for one start only: a validation that fails must not end every
        start. Collective; the same on all ranks."""

        def claim() -> bool:
            done, begun = (self._folder_of(step) / name for name in (VALIDATION, f"{VALIDATION}.begun"))
            missed = done.parent.is_dir() and not (begun.exists() or done.exists())
            if missed:
                begun.touch()
            return missed

        return self._saves() and on_rank_0(claim)

    def _folder_of(self, step: int) -> Path:
        return Path(self._create_checkpoint_id(step))

    def _saves(self) -> bool:
        return self.enable and not self.load_only

    def save_now(self, step: int) -> bool:
        """Return once a checkpoint of this step is on the disk. False: the run saves none."""
        if not self._saves():
            return False
        failed = self._pending_save_failed()
        if failed or step not in (step_of(self.saving), self.loaded):
            self.save(step, last_step=True)
        return True

    def _pending_save_failed(self) -> bool:
        """Wait for an asynchronous save. Collective; the same answer on all ranks."""
        failed = False
        # With async_with_pinned_mem a process writes, which the signal that asks a run to leave may have ended.
        try:
            self._async_wait()
        except (CheckpointException, Exception) as e:
            logger.warning("SKIPPED: the save of %s that was under way failed (%s).", self.saving, e)
            failed, self.save_future = True, None
        everywhere = [False] * dist.get_world_size()
        dist.all_gather_object(everywhere, failed)
        return any(everywhere)

    def _save_last_step(self, curr_step: int) -> None:
        super()._save_last_step(curr_step)
        self._purge_stale_checkpoints()  # TorchTitan keeps one more than it was told after the last step

    def _purge_stale_checkpoints(self) -> None:
        """Keep the latest `keep_latest_k` finished checkpoints, the one being saved included. Remains of older saves go too.

        The index is removed first: a folder of which a part is gone is not a checkpoint any more.
        """
        current = step_of(self.saving)
        if self.keep_latest_k <= 0 or dist.get_rank() != 0 or current is None:
            return
        steps = [step for step in all_steps(Path(self.folder)) if step <= current]
        keep = [step for step in steps if step == current or is_finished(self._folder_of(step))][-self.keep_latest_k :]
        for step in steps:
            if step not in keep:
                (self._folder_of(step) / METADATA).unlink(missing_ok=True)
                self.purge_queue.put(str(self._folder_of(step)))

    # Loading

    @torch.no_grad()
    def load(self, step: int = -1) -> bool:
        """Load the checkpoint of this step, or the latest one (-1), or checkpoint.initial_load_path. False: there is none.

        Not TorchTitan's, which takes a folder with remains of a save alone for a run that has checkpoints. Collective.
        """
        if not self.enable:
            return False
        while point := self._find_resume_point(step):
            self.exclude_from_loading, self.branched_from = point.excluded_parts, point.branched_from
            try:
                self._load(point)
            except Unreadable as e:
                if not point.latest:
                    stop(f"{e}. Choose another checkpoint.load_step or checkpoint.initial_load_path.")
                on_rank_0(functools.partial(set_damaged_aside, point.folder, str(e)))
                continue
            if point.goes_back and self._saves():
                on_rank_0(functools.partial(set_later_aside, point.folder))
            return True
        return False

    @one_paragraph
    def _find_resume_point(self, step: int) -> ResumePoint | None:
        """What all ranks load; None: there is nothing."""
        settings = {"initial": self.initial_load_path, "exclude": self.excluded_parts, "saving": not self.load_only}
        settings["data"] = self.record["run"].get("data_fingerprint")
        return on_rank_0(lambda: find_resume_point(Path(self.folder), step, **settings))

    def _load(self, point: ResumePoint) -> None:
        logger.info("Loading the checkpoint from %s.", point.folder)
        begin, folder = time.monotonic(), point.folder
        index = parse_index(point.index, folder)
        self._require_same_model(folder, index, point.record)
        if self.checksums:
            damaged = [None] * dist.get_world_size()
            dist.all_gather_object(damaged, altered_entry(folder, index, dist.get_rank(), len(damaged)))
            if any(damaged):
                raise Unreadable(next(filter(None, damaged)))
        ours = point.latest or point.goes_back
        states = self._states_to_load(not ours and self.initial_load_model_only)
        try:
            load_checkpoint(states, storage_reader=SafeReader(folder, index))
        except CheckpointException as e:
            causes = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in e.failures.items())
            raise Unreadable(f"{folder} could not be read ({causes})") from None
        self.states[MODEL].load_state_dict(states)
        if ours:
            self.loaded = step_of(folder)
        if TRAIN_STATE in states:
            self._continue_counting(point.record)
        gc.collect()  # the trainer has turned off Python's own collections
        logger.info("Finished loading the checkpoint in %.2f seconds.", time.monotonic() - begin)

    @one_paragraph
    def _require_same_model(self, folder: Path, index: Metadata, record: dict) -> None:
        require_same_model(folder, index, record, self.record["model"], self.states[MODEL].state_dict())

    def _continue_counting(self, record: dict) -> None:
        """Tokens and skipped steps go on from the checkpoint's. The schedule counts steps, whatever their tokens."""
        trainer = self.states[TRAIN_STATE]
        per_step, planned = (self.record["run"][name] for name in ("tokens_per_step", "planned_steps"))
        tokens = record.get("tokens", trainer.step * per_step)
        self.resumed = trainer.metrics_processor.resumed = (trainer.step, tokens)
        self.states[OPTIMIZER].guard.skipped = record.get("skipped_steps", 0)
        before = record.get("run", {}).get("tokens_per_step", per_step)
        done = f"{trainer.step:,} of {planned:,} steps are done, of {before:,} tokens each"
        if before != per_step and trainer.step >= planned:
            stop(
                f"nothing would be trained: {done}, and this run's are of {per_step:,}. Set training.steps (with "
                "--training.tokens 0) to the step at which it is to end, or restore the batch."
            )
        if before != per_step:
            logger.warning("%s, and this run's are of %d: it still ends with step %d.", done, per_step, planned)
        elif trainer.step >= planned:
            logger.warning("nothing is left to train: %s.", done)


def _disk_full(error: BaseException) -> str | None:
    """The system's words if `error` says that a disk is full.

    PyTorch hides the system's error behind one of its own, and on the way from rank to rank only the text is left.
    """
    causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    text = "".join(line for cause in causes for line in traceback.format_exception(cause))
    return next((words for words in map(os.strerror, DISK_FULL) if words in text), None)
