"""Checkpoints that say what they are, are checked before they are loaded, and of which the last good one is never lost.

step-N/interdomain.json   model configuration, size, condition, step, tokens, settings, data fingerprints, versions
step-N/tokenizer.model    the tokenizer (tiktoken.json or hf_tokenizer.json where it is one)
step-N/validation.json    loss and perplexity, where the run validated after this step
step-N/KEEP               marks a milestone, which is never removed; a user may make this file, too
step-N/*.distcp           torch.distributed.checkpoint's shards
step-N/.metadata          its index, written last: a folder without it is not a checkpoint and is never loaded
step-N/.incomplete        only while a run saves or removes the checkpoint
step-N.damaged            could not be read back; no run loads, counts or removes it
step-N.superseded         came after a step that the run went back to (checkpoint.load_step), or lay where the run saved this
                          step; likewise

A run removes and overwrites only what it wrote itself: no link, no checkpoint of another run, no folder that lacks its index
and is not marked as `.incomplete`.
"""

import contextlib
import errno
import functools
import gc
import json
import os
import shutil
import traceback
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

import interdomain
from interdomain.checkpoint.index import altered_entry, load_part
from interdomain.checkpoint.step_folder import (
    DOCUMENTS,
    INCOMPLETE,
    KEEP,
    METADATA,
    SIDECAR,
    SIDECAR_FACTS,
    SIDECAR_VERSION,
    VALIDATION,
    finished_steps,
    is_unfinished,
    milestones,
    step_folders,
    step_of,
    write_record,
)
from interdomain.data import Tokenizer
from interdomain.folders import write_whole

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

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SHORT_WRITE = "unexpected pos"  # PyTorch reports a short write, on a full disk, in these words


def describe_run(plan: RunPlan, job: JobConfig, data: dict, tokenizer) -> dict:
    """The record that every checkpoint of this run carries. The trainer adds the fingerprints of the texts.

    Args:
        data: `data_record` of the training data.
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
        "format_version": SIDECAR_VERSION,
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
    """TorchTitan's manager, with a record beside every save, a check before every load, and an explanation when a disk fills.

    A damaged checkpoint is skipped, and the one before it is loaded.

    Args:
        record: of `describe_run`. tensors: of the whole model, by name, of which this rank may have a part.
        tokenizer: written into every checkpoint.
        milestones: steps that are saved whatever the interval, and never removed.
        lock: on rank 0, where the run holds its folders.
    """

    saving = ""  # the folder being written, or written last
    branched_from: int | None = None  # the step that the run last went back to

    def __init__(
        self,
        *,
        record: dict,
        tensors: dict,
        tokenizer: Tokenizer,
        milestones: Collection[int],
        lock: RunLock | None,
        checkpoint_config,
        **torchtitans,
    ) -> None:
        self.record = record
        self.tensors = tensors
        self.tokenizer = tokenizer
        self.lock = lock
        self.milestones = milestones
        # The run's folder, and those that it had before: records of older versions name none.
        self.run_folders = {record.get("folder"), None}
        super().__init__(checkpoint_config=checkpoint_config, sd_adapter=None, **torchtitans)

    # Saving

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        return super()._should_save(curr_step, last_step or curr_step in self.milestones)

    @user_errors
    def dcp_save(self, state_dict: dict, checkpoint_id: str, *args, **kwargs):
        self._check_finite(checkpoint_id)
        self.saving = str(checkpoint_id)
        with self._explain_full_disk():
            on_rank_0(lambda: self._write_record(Path(checkpoint_id)))
            saved = super().dcp_save(state_dict, checkpoint_id, *args, **kwargs)
        if isinstance(saved, Future):
            saved.add_done_callback(lambda _: self._unmark_if_complete(Path(checkpoint_id)))
        else:
            self._unmark_if_complete(Path(checkpoint_id))
        return saved

    def _unmark_if_complete(self, folder: Path) -> None:
        if dist.get_rank() == 0 and (folder / METADATA).is_file():
            (folder / INCOMPLETE).unlink(missing_ok=True)

    def _check_finite(self, checkpoint_id: str) -> None:
        """Ends the run before weights that are not finite would become its latest checkpoint. Collective."""
        each_finite = []
        for part in self.states[MODEL].model:
            for p in part.parameters():
                local = p.to_local() if isinstance(p, DTensor) else p
                each_finite.append(local.detach().isfinite().all().to(device_here()))
        finite = torch.stack(each_finite).all().float()
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        if not finite.item():
            stop(
                f"the weights are not finite, so {checkpoint_id} is not saved. {self._last_complete()} "
                "Try a lower optimizer.lr, a longer warmup or a smaller training.max_norm from there."
            )

    def _async_wait(self) -> None:
        with self._explain_full_disk():  # an asynchronous save that failed raises its error here
            super()._async_wait()

    @contextlib.contextmanager
    def _explain_full_disk(self) -> Iterator[None]:
        try:
            yield
        except (CheckpointException, OSError) as e:
            full = _disk_full(e)
            if full is None:
                raise
            if dist.get_rank() == 0 and self._wrote(Path(self.saving)):
                with contextlib.suppress(OSError):
                    _remove(Path(self.saving))
            stop(
                f"The disk is full: saving {self.saving} failed ({full}), and what was written of it is removed. "
                f"{self._last_complete()} Free some space (checkpoint.keep_latest_k limits how many are kept), then start the "
                "same command again: it continues from there."
            )

    def _last_complete(self) -> str:
        last = max(finished_steps(Path(self.folder)), default="none")
        return f"The last complete checkpoint is step {last}."

    @user_errors
    def require_folder(self) -> None:
        """End this rank if another run has taken the folder over."""
        if self.lock:
            self.lock.check_held()

    def _write_record(self, folder: Path) -> None:
        """Make the folder, with the record and the tokenizer. On rank 0."""
        if self.lock:
            self.lock.refresh()
            self.lock.check_held()
        step = self.states[TRAIN_STATE].step
        optimizers = self.states[OPTIMIZER]
        keep = step in self.milestones or (folder / KEEP).exists()
        if self._wrote(folder):
            _remove(folder)
        elif os.path.lexists(folder):
            logger.warning(
                "renamed to %s, to save this step: %s", set_aside(folder, "superseded").name, folder
            )
        # First of all, so that a save which is interrupted at any later moment is known as one.
        folder.mkdir(parents=True, exist_ok=True)
        (folder / INCOMPLETE).touch()
        record = self.record | {
            "step": step,
            "tokens": step * self.record["run"]["tokens_per_step"],
        }
        record |= optimizers.step_guard.state_dict() | {"branched_from": self.branched_from}
        if optimizers.rates:  # a later start compares them (schedule.check_jump)
            record |= {
                "lr": optimizers.rates["main"],
                "peak_lr": optimizers.optimizers[0].defaults["lr"],
            }
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
        """Write a step's validation beside its checkpoint, where it has one.

        documents: sums of losses and of labels, by document, where the split has few.
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
            write_whole(folder / DOCUMENTS, (json.dumps(by_document) + "\n").encode())
        result = {"step": step, "loss": loss, "perplexity": perplexity}
        if accuracy is not None:
            result["accuracy"] = accuracy
        write_whole(folder / VALIDATION, (json.dumps(result) + "\n").encode())

    @user_errors
    def lacks_validation(self, step: int) -> bool:
        """True if this step was saved and not validated. Collective; the same on all ranks."""
        result = self._folder_of(step) / VALIDATION
        return on_rank_0(lambda: self.enable and self._is_saved_here(step) and not result.exists())

    def _is_saved_here(self, step: int) -> bool:
        """True if the step has a folder, which is not a link to a checkpoint elsewhere."""
        folder = self._folder_of(step)
        return folder.is_dir() and not folder.is_symlink()

    def _folder_of(self, step: int) -> Path:
        return Path(self._create_checkpoint_id(step))

    def save_now(self, step: int) -> bool:
        """Return once a checkpoint of this step is on the disk. False: the run saves none."""
        if self.enable:
            self._async_wait()
            if step != step_of(self.saving):
                self.save(step, last_step=True)
        return self.enable

    def _save_last_step(self, curr_step: int) -> None:
        super()._save_last_step(curr_step)
        self._purge_stale_checkpoints()  # TorchTitan keeps one more than it was told after the last step

    def _purge_stale_checkpoints(self) -> None:
        """Keep the milestones and the latest `keep_latest_k` finished checkpoints, the one being saved included. Unfinished
        saves of earlier steps go too, and nothing that this run did not write.
        """
        current = step_of(self.saving)
        if self.keep_latest_k <= 0 or dist.get_rank() != 0 or current is None:
            return
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
        """True if this run, or the one that it continues, wrote a step folder."""
        unfinished = is_unfinished(folder)
        if folder.is_symlink() or not (unfinished or (folder / METADATA).is_file()):
            return False
        try:
            record = json.loads((folder / SIDECAR).read_text())
        except FileNotFoundError:  # not written yet, or removed already
            return unfinished
        except (OSError, ValueError):
            return False
        return isinstance(record, dict) and record.get("folder") in self.run_folders

    # Loading

    @user_errors
    @torch.no_grad()
    def load(self, step: int = -1) -> bool:
        """Load the checkpoint of this step, or the latest one (-1), or checkpoint.initial_load_path. False: there is none.

        Not TorchTitan's, which takes a folder with remains of a save alone for a run that has checkpoints. Collective.
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
            if point.source != "latest":
                stop(
                    f"{damage}. Choose another checkpoint.load_step or checkpoint.initial_load_path."
                )
            on_rank_0(functools.partial(set_damaged_aside, point.folder, damage))
        return False

    def _load(self, point: ResumePoint) -> str | None:
        """Returns what is damaged, on all ranks alike; None: nothing, and it is loaded. Collective."""
        logger.info("Loading the checkpoint from %s.", point.folder)
        initial = point.source == "initial"
        if not initial:
            self.exclude_from_loading = []
            self.run_folders.add(point.record.get("folder"))
        states = self._states_to_load(initial and self.initial_load_model_only)
        continues = TRAIN_STATE in states
        require_same_run(
            point, self.record, self.tensors, batch=continues, optimizer=OPTIMIZER in states
        )
        # Ranks share the reading. All must agree on the outcome.
        damage_by_rank: list[str | None] = [None] * dist.get_world_size()
        own_damage = altered_entry(point.folder, point.files, dist.get_rank(), len(damage_by_rank))
        dist.all_gather_object(damage_by_rank, own_damage)
        for damage in damage_by_rank:
            if damage:
                return damage
        load_part(point.folder, point.files, states)
        self.states[MODEL].load_state_dict(states)
        origin = {name: point.record[name] for name in SIDECAR_FACTS}
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
        """Keeps what the continued run was trained on in this run's record, if its data was other data."""
        run = record["run"]
        earlier = list(run.get("earlier_data", []))
        text = record.get("fingerprints", {}).get("train")
        if text is not None and text != self.record["fingerprints"]["train"]:
            facts = {name: run[name] for name in ("data_fingerprint", "corpora") if name in run}
            earlier.append(facts | {"ends": record["step"]})
        if earlier:
            self.record["run"]["earlier_data"] = earlier


def _mark_incomplete(folder: Path) -> None:
    """Before a checkpoint is removed: a folder of which a part is gone is not a checkpoint any more."""
    with contextlib.suppress(FileNotFoundError):  # it is unfinished
        (folder / METADATA).rename(folder / INCOMPLETE)


def _remove(folder: Path) -> None:
    """Remove a step folder of this run, and last the mark by which the next start knows what a kill has left of it."""
    _mark_incomplete(folder)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != INCOMPLETE:
            path.unlink()
    shutil.rmtree(folder)


def _disk_full(error: BaseException) -> str | None:
    """The system's words if `error` says that a disk is full.

    PyTorch hides the system's error behind one of its own, and on the way from rank to rank only the text is left.
    """
    causes = [error]
    if isinstance(error, CheckpointException):
        causes = [cause for cause, _ in error.failures.values()]
    text = ""
    for cause in causes:
        text += "".join(traceback.format_exception(cause))
    for reason in (*map(os.strerror, DISK_FULL), SHORT_WRITE):
        if reason in text:
            return reason
    return None
