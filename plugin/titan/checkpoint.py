"""Self-describing checkpoints: every `step-N` carries the model's configuration and the tokenizer that it was trained with.

step-N/interdomain.json   model configuration, size, condition, step, tokens, seed, data fingerprint, versions
step-N/tokenizer.model    the tokenizer (tiktoken.json or hf_tokenizer.json where it is one)
step-N/validation.json    loss and perplexity, where the run validated after this step (.begun: where it is to make up for it)
step-N/*.distcp           torch.distributed.checkpoint's shards
step-N/.metadata          its index, written last: a folder without it is not a checkpoint and is never loaded
step-N.damaged            one that did not read back whole, kept to be looked at; no run loads, counts or removes it
step-N.superseded         one after a step that the run went back to (checkpoint.load_step); likewise
"""

import contextlib
import errno
import json
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import interdomain
from interdomain.folders import write_whole
from interdomain.model import ModelConfig, cell_of
from interdomain.model.distributed_checkpoint import (
    METADATA,
    SIDECAR,
    SIDECAR_VERSION,
    VALIDATION,
    altered_entry,
    step_of,
)

from .choice import Choice, choose, set_damaged_aside, set_later_aside, steps_in
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
from .lock import FolderLock
from .plan import tokens_at
from .preemption import children_keep_saving
from .whole import fault, is_finished, read_whole

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
    """A checkpoint that passed the check of its files and cannot be read, or not as it was saved. The same on all ranks."""


class SelfDescribingCheckpoints(CheckpointManager):
    """TorchTitan's manager, with a record beside every save, a check before every load, and plain words when a disk fills.

    A checkpoint that does not read back whole is skipped for the one before it.

    Args:
        record: of `describe_run`. tokenizer: the file that every checkpoint gets a copy of.
        lock: on rank 0, where the run holds its folder.
    """

    resumed = (0, 0)  # (step, tokens) that this process continues from
    saving = ""  # the folder being written, or written last
    asked_without: tuple = ()  # checkpoint.exclude_from_loading
    branched_from: int | None = None  # the step that the run last went back to
    measured: dict | None = None  # the last validation of this process: {"step", "loss", "perplexity"}
    kept: frozenset = frozenset()  # steps that retention knows to be whole, the one being saved included

    def __init__(
        self, *, record: dict, tokenizer: Path, lock: FolderLock | None, checkpoint_config, **torchtitans
    ) -> None:
        self.record, self.tokenizer, self.lock = record, tokenizer, lock
        self.checksums = checkpoint_config.checksums
        self.asked_without = tuple(checkpoint_config.exclude_from_loading)
        super().__init__(checkpoint_config=checkpoint_config, sd_adapter=None, **torchtitans)

    # Saving

    def dcp_save(self, state_dict, checkpoint_id, *args, **kwargs):
        self.saving = str(checkpoint_id)
        with self._plain_words_when_full():
            self._begin(Path(checkpoint_id))
            with children_keep_saving():  # async_with_pinned_mem writes in a process of its own
                return super().dcp_save(state_dict, checkpoint_id, *args, **kwargs)

    def _async_wait(self) -> None:
        with self._plain_words_when_full():  # where what an asynchronous save failed at comes up
            super()._async_wait()

    @contextlib.contextmanager
    def _plain_words_when_full(self):
        try:
            yield
        except (CheckpointException, OSError) as e:
            causes = [failure[0] for failure in e.failures.values()] if isinstance(e, CheckpointException) else [e]
            full = next((word for word in map(_disk_full, causes) if word), None)
            if full is None:
                raise
            if dist.get_rank() == 0:
                shutil.rmtree(self.saving, ignore_errors=True)
            last = self._find_load_step()
            kept = f"The last whole checkpoint is step {last}" if last >= 0 else "There is no earlier checkpoint"
            stop(
                f"The disk is full: saving {self.saving} failed ({full}), and what was written of it is removed. "
                f"{kept} in {self.folder}. Free some space (checkpoint.keep_latest_k limits how many are kept), then start "
                "the same command again: it continues from there."
            )

    @one_paragraph
    def require_folder(self) -> None:
        """End this rank if another run has taken the folder over."""
        if self.lock:
            self.lock.require()

    @one_paragraph
    def _begin(self, folder: Path) -> None:
        """Make the folder on rank 0, and tell every rank if that failed."""
        _on_rank_0(lambda: self._write_record(folder))

    def _write_record(self, folder: Path) -> None:
        if self.lock:
            self.lock.beat()
            self.lock.require()
        if is_finished(folder) and fault(folder):
            set_damaged_aside(folder)
        if folder.exists():  # an older checkpoint of this step, or the remains of one: unmarked before it is removed
            (folder / METADATA).unlink(missing_ok=True)
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        step = self.states[TRAIN_STATE].step
        tokens = tokens_at(step, self.resumed, self.record["run"]["tokens_per_step"])
        shutil.copyfile(self.tokenizer, folder / self.tokenizer.name)
        record = {**self.record, "step": step, "tokens": tokens, "skipped_steps": self.states[OPTIMIZER].guard.skipped}
        if rates := getattr(self.states[OPTIMIZER], "rates", None):  # a later start compares (schedule.refuse_jump)
            record |= {"lr": rates["main"], "peak_lr": self.states[OPTIMIZER].optimizers[0].defaults["lr"]}
        # What every restart of the same command asks for again (see choice.py).
        record |= {"branched_from": self.branched_from, "started_without": list(self.asked_without)}
        write_whole(folder / SIDECAR, (json.dumps(record, indent=2) + "\n").encode())
        if self.measured and self.measured["step"] == step:  # a run that leaves saves after its validation
            self._write_validation(folder)

    def note_validation(self, step: int, loss: float, perplexity: float) -> None:
        """Write beside the checkpoint of this step what the model was measured at: now, or when it is saved."""
        self.measured = {"step": step, "loss": loss, "perplexity": perplexity}
        ours = self._keeps() and not (self.lock and self.lock.lost)
        if dist.get_rank() == 0 and ours and self._folder_of(step).is_dir():
            try:
                self._write_validation(self._folder_of(step))
            except OSError as e:  # no reason to end a run
                logger.warning("%s", e)

    def _write_validation(self, folder: Path) -> None:
        write_whole(folder / VALIDATION, (json.dumps(self.measured) + "\n").encode())

    def claim_validation(self, step: int) -> bool:
        """Whether there is a checkpoint of this step and no validation beside it; True once, for a validation that fails is no
        reason for every start to end in it. Collective; the same on all ranks."""
        return self._keeps() and _on_rank_0(lambda: self._claim_validation(self._folder_of(step)))

    def _claim_validation(self, folder: Path) -> bool:
        begun = folder / f"{VALIDATION}.begun"
        lacking = folder.is_dir() and not (begun.exists() or (folder / VALIDATION).exists())
        if lacking:
            with contextlib.suppress(OSError):
                begun.touch()
        return lacking

    def _folder_of(self, step: int) -> Path:
        return Path(self._create_checkpoint_id(step))

    def _keeps(self) -> bool:
        return self.enable and not self.load_only

    def save_now(self, step: int) -> bool:
        """Have a whole checkpoint of this step on the disk before this returns. False: the run saves none."""
        if not self._keeps():
            return False
        failed = self._save_under_way_failed()
        if failed or step_of(self.saving) != step:
            self.save(step, last_step=True)
        return True

    def _save_under_way_failed(self) -> bool:
        """Wait for an asynchronous save. Collective; the same answer on all ranks.

        What asks a run to leave may have ended it: torchrun's SIGTERM goes to the processes of a rank as well, and with
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
        """Keep the latest `keep_latest_k` whole checkpoints, the one being saved included. Remains of older saves go too.

        Unmarked before they are removed: a folder of which a part is gone is not a checkpoint any more.
        """
        if self.keep_latest_k <= 0 or dist.get_rank() != 0:
            return
        steps = self._steps()
        current = step_of(self.saving)
        # An index has an entry for every tensor of every rank: it is read once, and not for what this process saved. A save
        # that failed would have ended it.
        whole = [step for step in steps if step == current or step in self.kept or self._is_whole(step)]
        self.kept = frozenset(whole[-self.keep_latest_k :])
        for step in steps:
            if step not in self.kept and step < current:
                path = self._create_checkpoint_id(step)
                (Path(path) / METADATA).unlink(missing_ok=True)
                self.purge_queue.put(path)

    # Finding

    def _find_load_step(self, folder: str = "") -> int:
        """The latest whole checkpoint's step, or -1."""
        return max(filter(self._is_whole, self._steps()), default=-1)

    def _steps(self) -> list[int]:
        return steps_in(Path(self.folder))

    def _is_whole(self, step: int) -> bool:
        return fault(self._folder_of(step)) is None

    # Loading

    def load(self, step: int = -1) -> bool:
        if not self.enable:
            return super().load(step)
        skipped: dict[int, str] = {}  # step -> what is wrong with it
        while choice := self._choose(step, skipped):
            self.exclude_from_loading, self.branched_from = choice.without, choice.branched_from
            try:
                loaded = super().load(choice.step)
            except Unreadable as e:
                if choice.named:
                    stop(f"{e}. Choose another step with checkpoint.load_step, or -1 for the latest that is whole.")
                skipped[choice.step] = str(e)
                continue
            _on_rank_0(lambda: self._pass_over(choice, skipped))
            return loaded
        return self._load_initial()

    def _pass_over(self, choice: Choice, skipped: dict[int, str]) -> None:
        for other in skipped:
            set_damaged_aside(self._folder_of(other))
        if choice.named and not self.load_only:
            set_later_aside(Path(self.folder), choice.step)

    def _load_initial(self) -> bool:
        if not self.initial_load_path:
            return False
        # TorchTitan ignores initial_load_path where the checkpoint folder exists, even one without a whole checkpoint.
        folder, self.folder = self.folder, os.path.join(self.folder, "none")
        try:
            return super().load(-1)
        except Unreadable as e:
            stop(f"{e}. Give another checkpoint.initial_load_path.")
        finally:
            self.folder = folder

    @one_paragraph
    def _choose(self, step: int, skipped: dict[int, str]) -> Choice | None:
        """What all ranks load; None: there is nothing in the folder.

        Rank 0 looks; `skipped` comes back on all ranks with the damaged ones that are newer.
        """
        choice, found = _on_rank_0(lambda: self._look(step, dict(skipped)))
        skipped |= found
        return choice

    def _look(self, step: int, skipped: dict[int, str]) -> tuple[Choice | None, dict[int, str]]:
        data = self.record["run"].get("data_fingerprint")
        asked = {"without": list(self.asked_without), "data": data, "saving": not self.load_only}
        choice = choose(Path(self.folder), step, skipped, **asked)
        if choice is None and self.initial_load_path and not os.path.isdir(self.initial_load_path):
            raise FileNotFoundError(
                f"checkpoint.initial_load_path = {self.initial_load_path} is not a folder. Give a checkpoint "
                "(a folder step-N), or one that python -m interdomain.tools.convert --to-checkpoint wrote."
            )
        return choice, skipped

    def dcp_load(self, state_dict, checkpoint_id, *args, **kwargs):
        folder = Path(checkpoint_id)
        index, record = self._check(folder)
        if self.checksums:
            self._check_bytes(folder, index)
        try:
            super().dcp_load(state_dict, checkpoint_id, *args, **kwargs)
        except CheckpointException as e:
            causes = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in e.failures.items())
            raise Unreadable(f"{folder} could not be read ({causes})") from None
        if TRAIN_STATE in state_dict:
            self._continue_counting(record)

    def _check_bytes(self, folder: Path, index) -> None:
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, altered_entry(folder, index, dist.get_rank(), len(found)))
        if reason := next(filter(None, found), None):
            raise Unreadable(reason)

    def _continue_counting(self, record: dict) -> None:
        """TorchTitan restores one rank's count of tokens, and sums the ranks': give each its share of the true count."""
        trainer = self.states[TRAIN_STATE]
        per_step, planned = (self.record["run"][name] for name in ("tokens_per_step", "planned_steps"))
        tokens = record.get("tokens", trainer.step * per_step)
        self.resumed = trainer.metrics_processor.resumed = (trainer.step, tokens)
        self.states[OPTIMIZER].guard.skipped = record.get("skipped_steps", 0)
        share, rest = divmod(tokens, dist.get_world_size())  # every rank reads data: there is no other parallelism
        trainer.ntokens_seen = share + (dist.get_rank() < rest)
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
        """Refuse a damaged or another model's checkpoint before a byte of it is read into this one.

        Returns: the checkpoint's index, and its record, empty if it has none.
        """
        try:
            index, record = read_whole(folder)
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


def _on_rank_0(act):
    """What `act` returns on rank 0, or the OSError or ValueError that it raises there, on every rank. Collective."""
    outcome = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = act()
        except (OSError, ValueError) as e:
            outcome[1] = e
    dist.broadcast_object_list(outcome)
    result, error = outcome
    if error is not None:
        raise error
    return result


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
