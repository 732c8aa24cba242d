"""Self-describing checkpoints: every `step-N` carries the model's configuration and the tokenizer that it was trained with.

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
import gc
import json
import os
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import interdomain
from interdomain.data import Tokenizer
from interdomain.folders import write_whole
from interdomain.model import ModelConfig, cell_of
from interdomain.model.distributed_checkpoint import (
    METADATA,
    SIDECAR,
    SIDECAR_VERSION,
    VALIDATION,
    SafeReader,
    WrittenByNewerPyTorch,
    altered_entry,
    parse_index,
    step_of,
)

from .errors import one_paragraph, stop
from .host import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    TRAIN_STATE,
    VERSION,
    CheckpointManager,
    logger,
)
from .integrity import Contents, is_finished
from .lock import FolderLock
from .plan import tokens_at
from .preemption import children_keep_saving
from .resume_from import Candidates, Choice, on_rank_0, set_damaged_aside, steps_in

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def describe_run(plan, dataset_fingerprint: str, tokenizer) -> dict:
    """What every checkpoint of this run says of itself."""
    return {
        "format_version": SIDECAR_VERSION,
        "model": plan.config.to_dict(),
        "size": plan.cell.size,
        "condition": plan.cell.condition,
        "run": {
            "seed": plan.seed,
            "precision": plan.precision,
            "seq_len": plan.seq_len,
            "global_batch": plan.global_batch,
            "tokens_per_step": plan.tokens_per_step,
            "planned_steps": plan.steps,
            "data_fingerprint": dataset_fingerprint,
        },
        "tokenizer": {"file": tokenizer.file, "sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size},
        "versions": {
            "interdomain": interdomain.__version__,
            "torch": torch.__version__,
            "torchtitan": VERSION,
        },
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
    saving = ""  # the folder being written, or written last
    excluded_parts: tuple = ()  # checkpoint.exclude_from_loading
    branched_from: int | None = None  # the step that the run last went back to
    last_validation: dict | None = None  # of this process: {"step", "loss", "perplexity"}
    candidates: Candidates | None = None  # while a checkpoint is chosen and loaded; rank 0 alone reads

    def __init__(
        self, *, record: dict, tokenizer: Tokenizer, lock: FolderLock | None, checkpoint_config, **torchtitans
    ) -> None:
        self.record, self.tokenizer, self.lock = record, tokenizer, lock
        self.checksums = checkpoint_config.checksums
        self.excluded_parts = tuple(checkpoint_config.exclude_from_loading)
        super().__init__(checkpoint_config=checkpoint_config, sd_adapter=None, **torchtitans)

    # Saving

    def dcp_save(self, state_dict, checkpoint_id, *args, **kwargs):
        self.saving = str(checkpoint_id)
        with self._explain_full_disk():
            self._make_folder(Path(checkpoint_id))
            with children_keep_saving():  # async_with_pinned_mem writes in a process of its own
                return super().dcp_save(state_dict, checkpoint_id, *args, **kwargs)

    def _async_wait(self) -> None:
        with self._explain_full_disk():  # an asynchronous save that failed raises its error here
            super()._async_wait()

    @contextlib.contextmanager
    def _explain_full_disk(self):
        try:
            yield
        except (CheckpointException, OSError) as e:
            causes = [failure[0] for failure in e.failures.values()] if isinstance(e, CheckpointException) else [e]
            full = next((word for word in map(_disk_full, causes) if word), None)
            if full is None:
                raise
            if dist.get_rank() == 0:
                shutil.rmtree(self.saving, ignore_errors=True)
            last = max(filter(self._is_finished, steps_in(Path(self.folder))), default=-1)
            left = f"The last whole checkpoint is step {last}" if last >= 0 else "There is no earlier checkpoint"
            stop(
                f"The disk is full: saving {self.saving} failed ({full}), and what was written of it is removed. "
                f"{left} in {self.folder}. Free some space (checkpoint.keep_latest_k limits how many are kept), then start "
                "the same command again: it continues from there."
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
        if is_finished(folder) and Candidates(Path(self.folder)).fault(step_of(folder)):
            set_damaged_aside(folder)
        # An older save of this step: its index is removed first, so that no half is taken for a checkpoint.
        if folder.exists():
            (folder / METADATA).unlink(missing_ok=True)
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        step = self.states[TRAIN_STATE].step
        tokens = tokens_at(step, self.resumed, self.record["run"]["tokens_per_step"])
        self.tokenizer.write(folder)
        record = {**self.record, "step": step, "tokens": tokens, "skipped_steps": self.states[OPTIMIZER].guard.skipped}
        if rates := getattr(self.states[OPTIMIZER], "rates", None):  # a later start compares (schedule.refuse_jump)
            record |= {"lr": rates["main"], "peak_lr": self.states[OPTIMIZER].optimizers[0].defaults["lr"]}
        # Every restart of the same command asks for these again (see resume_from.py).
        record |= {"branched_from": self.branched_from, "started_without": list(self.excluded_parts)}
        write_whole(folder / SIDECAR, (json.dumps(record, indent=2) + "\n").encode())
        # A run that leaves saves after its validation.
        if self.last_validation and self.last_validation["step"] == step:
            self._write_validation(folder)

    def note_validation(self, step: int, loss: float, perplexity: float) -> None:
        """Write a step's validation beside its checkpoint: now, or when the checkpoint is saved."""
        self.last_validation = {"step": step, "loss": loss, "perplexity": perplexity}
        ours = self._saves() and not (self.lock and self.lock.lost)
        if dist.get_rank() == 0 and ours and self._folder_of(step).is_dir():
            try:
                self._write_validation(self._folder_of(step))
            except OSError as e:  # no reason to end a run
                logger.warning("%s", e)

    def _write_validation(self, folder: Path) -> None:
        write_whole(folder / VALIDATION, (json.dumps(self.last_validation) + "\n").encode())

    def claim_validation(self, step: int) -> bool:
        """Whether this step was saved and not validated. True for one start only: a validation that fails must not end every
        start. Collective; the same on all ranks."""
        return self._saves() and on_rank_0(lambda: self._claim_validation(self._folder_of(step)))

    def _claim_validation(self, folder: Path) -> bool:
        begun = folder / f"{VALIDATION}.begun"
        missed = folder.is_dir() and not (begun.exists() or (folder / VALIDATION).exists())
        if missed:
            with contextlib.suppress(OSError):
                begun.touch()
        return missed

    def _folder_of(self, step: int) -> Path:
        return Path(self._create_checkpoint_id(step))

    def _saves(self) -> bool:
        return self.enable and not self.load_only

    def save_now(self, step: int) -> bool:
        """Return once a checkpoint of this step is on the disk. False: the run saves none."""
        if not self._saves():
            return False
        failed = self._pending_save_failed()
        if failed or step_of(self.saving) != step:
            self.save(step, last_step=True)
        return True

    def _pending_save_failed(self) -> bool:
        """Wait for an asynchronous save. Collective; the same answer on all ranks.

        The signal that asks a run to leave may have ended the save: torchrun sends SIGTERM to all processes of a rank, and with
        async_with_pinned_mem one of them writes.
        """
        failed = False
        try:
            self._async_wait()
        except (CheckpointException, Exception) as e:
            logger.warning("SKIPPED: the save of %s that was under way failed (%s).", self.saving, e)
            failed, self.save_future = True, None
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, failed)
        return any(everywhere)

    def _save_last_step(self, curr_step: int) -> None:
        super()._save_last_step(curr_step)
        self._purge_stale_checkpoints()  # TorchTitan keeps one more than it was told after the last step

    def _purge_stale_checkpoints(self) -> None:
        """Keep the latest `keep_latest_k` finished checkpoints, the one being saved included. Remains of older saves go too.

        No index is read. Those saved or loaded by this process are known to be whole, and damaged ones after them are renamed.
        The index is removed first: a folder of which a part is gone is not a checkpoint any more.
        """
        if self.keep_latest_k <= 0 or dist.get_rank() != 0:
            return
        steps, current = steps_in(Path(self.folder)), step_of(self.saving)
        keep = [step for step in steps if step == current or self._is_finished(step)][-self.keep_latest_k :]
        for step in steps:
            if step not in keep and step < current:
                (self._folder_of(step) / METADATA).unlink(missing_ok=True)
                self.purge_queue.put(str(self._folder_of(step)))

    def _is_finished(self, step: int) -> bool:
        return is_finished(self._folder_of(step))

    # Loading

    @torch.no_grad()
    def load(self, step: int = -1) -> bool:
        """Load the checkpoint of this step, or the latest one (-1), or checkpoint.initial_load_path. False: there is none.

        Not TorchTitan's, which takes a folder with remains of a save alone for a run that has checkpoints. Collective.
        """
        if not self.enable:
            return False
        self.candidates = Candidates(Path(self.folder))
        try:
            while choice := self._choose(step):
                self.exclude_from_loading, self.branched_from = choice.excluded_parts, choice.branched_from
                try:
                    self._load(self._folder_of(choice.step), model_only=choice.step == 0)  # 0: a seed checkpoint
                except Unreadable as e:
                    if choice.goes_back:
                        stop(f"{e}. Choose another step with checkpoint.load_step, or -1 for the latest that is whole.")
                    self.candidates.damaged[self._folder_of(choice.step)] = str(e)
                    continue
                on_rank_0(lambda: self.candidates.rename_others(choice, saving=not self.load_only))
                return True
            if self.initial_load_path:
                try:
                    self._load(Path(self.initial_load_path), model_only=self.initial_load_model_only)
                except Unreadable as e:
                    stop(f"{e}. Give another checkpoint.initial_load_path.")
            return bool(self.initial_load_path)
        finally:
            self.candidates = None

    @one_paragraph
    def _choose(self, step: int) -> Choice | None:
        """What all ranks load; None: there is nothing in the folder. Rank 0 looks."""
        return on_rank_0(lambda: self._choose_on_rank_0(step))

    def _choose_on_rank_0(self, step: int) -> Choice | None:
        data = self.record["run"].get("data_fingerprint")
        exclude = list(self.excluded_parts)
        choice = self.candidates.choose(step, exclude=exclude, data=data, saving=not self.load_only)
        if choice is None and self.initial_load_path and not os.path.isdir(self.initial_load_path):
            raise FileNotFoundError(
                f"checkpoint.initial_load_path = {self.initial_load_path} is not a folder. Give a checkpoint "
                "(a folder step-N), or one that python -m interdomain.tools.convert --to-checkpoint wrote."
            )
        return choice

    def _load(self, folder: Path, model_only: bool) -> None:
        logger.info("Loading the checkpoint from %s.", folder)
        begin = time.monotonic()
        index, record = self._check(folder)
        if self.checksums:
            self._check_bytes(folder, index)
        states = self._states_to_load(model_only)
        try:
            dcp.load(states, storage_reader=SafeReader(folder, index))
        except CheckpointException as e:
            causes = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in e.failures.items())
            raise Unreadable(f"{folder} could not be read ({causes})") from None
        self.states[MODEL].load_state_dict(states)
        if TRAIN_STATE in states:
            self._continue_counting(record)
        gc.collect()  # the trainer has turned off Python's own collections
        logger.info("Finished loading the checkpoint in %.2f seconds.", time.monotonic() - begin)

    def _check_bytes(self, folder: Path, index) -> None:
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, altered_entry(folder, index, dist.get_rank(), len(found)))
        if reason := next(filter(None, found), None):
            raise Unreadable(reason)

    def _continue_counting(self, record: dict) -> None:
        """Tokens and skipped steps go on from the checkpoint's. Stops a run, or warns of one, with nothing left to train."""
        trainer = self.states[TRAIN_STATE]
        per_step, planned = (self.record["run"][name] for name in ("tokens_per_step", "planned_steps"))
        tokens = record.get("tokens", trainer.step * per_step)
        self.resumed = trainer.metrics_processor.resumed = (trainer.step, tokens)
        self.states[OPTIMIZER].guard.skipped = record.get("skipped_steps", 0)
        then = record.get("run", {}).get("tokens_per_step", per_step)
        left = planned - trainer.step
        if then != per_step and left <= 0:
            stop(
                f"nothing would be trained: the schedule counts steps, the checkpoint is of step {trainer.step:,}, of {then:,} "
                f"tokens each, and this run of {planned:,} steps of {per_step:,} tokens. Say by training.steps (with "
                f"--training.tokens 0) at which step it is to end, or restore training.global_batch_size and training.seq_len."
            )
        if then != per_step:
            logger.warning(
                "the checkpoint's steps were of %d tokens, this run's are of %d: the schedule counts steps, and ends with step "
                "%d, after %d tokens in all.",
                then,
                per_step,
                planned,
                tokens + left * per_step,
            )
        elif left <= 0:
            logger.warning(
                "nothing is left to train: the checkpoint is of step %d, and the run of %d steps (training.steps or "
                "training.tokens).",
                trainer.step,
                planned,
            )

    @one_paragraph
    def _check(self, folder: Path) -> tuple:
        """Refuse a damaged or another model's checkpoint. Collective.

        Returns: the checkpoint's index, and its record, empty if it has none.
        """
        try:
            _, index, record = self._read(folder)
        except WrittenByNewerPyTorch:
            raise
        except ValueError as e:
            raise ValueError(f"{e} Choose another checkpoint.load_step or checkpoint.initial_load_path.") from e
        differences = _other_switches(record["model"], self.record["model"]) if record else []
        differences += self._other_tensors(index.state_dict_metadata)
        if differences:
            said = f" (there: {cell_of(ModelConfig.from_dict(record['model']), record['size'])})" if record else ""
            more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
            raise ValueError(
                f"{folder} is a checkpoint of another model{said}: {'; '.join(differences[:3])}{more}. Set model.flavor "
                "and [mixer] to those of the checkpoint, or give this run a folder of its own with --job.dump_folder."
            )
        return index, record

    def _read(self, folder: Path) -> Contents:
        """What a checkpoint says of itself: read by rank 0, sent to the others as bytes, and parsed there. Collective."""
        here: list[Contents] = []

        def read() -> tuple[bytes, dict]:
            here.append((self.candidates or Candidates(Path(self.folder))).read(folder))
            return here[0].data, here[0].record

        data, record = on_rank_0(read)
        return here[0] if here else Contents(data, parse_index(data, folder), record)

    def _other_tensors(self, found: dict) -> list[str]:
        """What differs between the tensors of a checkpoint and those of this model, in words."""
        model = self.states[MODEL].state_dict()
        others = tuple(f"{part}." for part in (OPTIMIZER, LR_SCHEDULER, DATALOADER, TRAIN_STATE))
        return [
            *(f"{name} is missing there" for name in model if name not in found),
            *(f"{name} is unknown here" for name in found if name not in model and not name.startswith(others)),
            *(
                f"{name} is {list(found[name].size)} there and {list(tensor.shape)} here"
                for name, tensor in model.items()
                if name in found and list(found[name].size) != list(tensor.shape)
            ),
        ]


def _other_switches(there: dict, here: dict) -> list[str]:
    """Settings that make another model of the same tensors (RoPE, the readout, ...). The context length does not."""
    there, here = (ModelConfig.from_dict(config).to_dict() for config in (there, here))
    pairs = [(name, there[name], here[name]) for name in here if name not in ("max_seq_len", "mixer")]
    pairs += [(f"mixer.{name}", there["mixer"][name], value) for name, value in here["mixer"].items()]
    return [f"{name} is {a} there and {b} here" for name, a, b in pairs if a != b]


def _disk_full(error: BaseException) -> str | None:
    """The system's words if `error` says that a disk is full.

    PyTorch's serialisation hides the system's error behind one of its own, and the chain between them does not survive the
    way from one rank to another; what is left then is the text.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            return error.strerror
        text = str(error)
        for number in DISK_FULL:
            if os.strerror(number) in text:
                return os.strerror(number)
        error = error.__cause__ or error.__context__
    return None
