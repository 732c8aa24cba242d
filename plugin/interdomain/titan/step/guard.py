"""A step whose loss or gradient norm is not finite changes nothing, on all ranks alike.

Weights and the optimizer's state stay as they were; the learning rate and the data move on, as after any step. Everything
stays on the device: nothing is read back between the backward pass and the update. The counts are read where the trainer
logs, every `metrics.log_freq` steps.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import stop
from ..host import logger


class Decision(NamedTuple):
    """What all ranks do after a step's backward pass: scalars on the device, the same on all ranks."""

    skip: Tensor  # 1.0 to skip the update, else 0.0
    stop: Tensor  # not 0 if any rank received a signal to stop
    loss: Tensor  # mean per token over all ranks


class StepGuard:
    """Skips and counts the steps whose loss or gradient norm is not finite.

    Attributes:
        counts: [skipped steps, skipped steps in a row up to now].
    """

    def __init__(self) -> None:
        self.counts = torch.zeros(2, dtype=torch.int64)
        self.reported = 0  # skipped steps at the last `check`

    def decide(self, loss: Tensor, grad_norm: Tensor, stop_requested: bool) -> Decision:
        """One all-reduce decides for all ranks whether to skip this update and whether to stop after it.

        Args:
            loss: This rank's share of the mean loss.
            grad_norm: Norm of the gradients of all ranks.
            stop_requested: Whether this rank received a signal to stop.
        """
        # Filled on the device: a copy from the host would wait for it.
        vote = torch.full_like(grad_norm, float(stop_requested))
        # The ranks' own norms may differ in the last bit, and all ranks must decide alike.
        sums = torch.stack([loss.to(grad_norm.device), grad_norm / dist.get_world_size(), vote])
        dist.all_reduce(sums)
        skip = ~sums[:2].isfinite().all()
        skipped, in_a_row = self.counts.to(sums.device)
        self.counts = torch.stack([skipped + skip, (in_a_row + 1) * skip])
        return Decision(skip.float(), sums[2], sums[0])

    def check(self, max_in_a_row: int, step: int, loss: float, grad_norm: float) -> None:
        """Warn of the steps that were skipped since the last check, and end the run if too many were skipped in a row.

        Args:
            max_in_a_row: The setting training.max_skipped_steps.
        """
        skipped, in_a_row = self.counts.tolist()
        new = skipped - self.reported
        self.reported = skipped
        if new:
            logger.warning("up to step %d: %d step(s) were skipped that were not finite", step, new)
        if in_a_row >= max_in_a_row:
            stop(
                f"the last {in_a_row} steps up to step {step} were skipped: loss {loss:g}, gradient norm {grad_norm:g} "
                f"(training.max_skipped_steps = {max_in_a_row}). The weights are those of step {step - in_a_row}. From an "
                "earlier checkpoint (checkpoint.load_step), try a lower optimizer.lr, a longer warmup or a smaller "
                "training.max_norm."
            )

    def warn_at_the_end(self, step: int) -> None:
        """Warn if the last steps of a run were skipped."""
        in_a_row = int(self.counts[1])
        if in_a_row:
            logger.warning(
                "the last %d step(s) up to step %d were skipped (loss or gradient norm not finite): the weights are those of "
                "step %d.",
                *(in_a_row, step, step - in_a_row),
            )

    def scalars(self) -> dict[str, float]:
        """The counts for TensorBoard."""
        skipped, in_a_row = self.counts.tolist()
        return {"skipped_steps/total": float(skipped), "skipped_steps/in_a_row": float(in_a_row)}

    def state_dict(self) -> dict[str, Any]:
        """Entries of a checkpoint's record."""
        skipped, in_a_row = self.counts.tolist()
        return {"skipped_steps": skipped, "skipped_in_a_row": in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a record's `state_dict`. Records of older versions may lack entries."""
        self.reported = state.get("skipped_steps", 0)
        self.counts = torch.tensor([self.reported, state.get("skipped_in_a_row", 0)])
