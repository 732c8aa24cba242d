"""The step guard: an update whose loss or gradient norm is not finite is skipped on all ranks.

Weights and optimizer state stay as they are. The learning rate and the data move on, as after any
step. All of it happens on the device: the host reads nothing between the backward pass and the
update. It reads the counts of skipped steps when the trainer logs, every `metrics.log_freq` steps.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import stop
from ..host import logger


class Decision(NamedTuple):
    """What all ranks do after a backward pass: scalars on the device, the same on all ranks.

    Attributes:
        skip: 1.0 to skip the update, else 0.0.
        stop: Nonzero if any rank received a signal to stop.
        loss: Mean loss per token over all ranks.
    """

    skip: Tensor
    stop: Tensor
    loss: Tensor


class StepGuard:
    """Decides which updates are skipped, and counts them.

    Attributes:
        counts: [skipped steps, skipped steps in a row up to now], int64, on the device.
        reported: Skipped steps that a warning has named.
    """

    def __init__(self) -> None:
        self.counts = torch.zeros(2, dtype=torch.int64)
        self.reported = 0

    def decide(self, loss: Tensor, grad_norm: Tensor, stop_requested: bool) -> Decision:
        """Decides for all ranks whether to skip this update and whether to stop after it.

        Collective: one all-reduce.

        Args:
            loss: This rank's share of the mean loss, a scalar.
            grad_norm: Norm of the gradients of all ranks, a float32 scalar on the device.
            stop_requested: True if this rank received a signal to stop.
        """
        # The value is filled in on the device: a copy from the host would make the host wait.
        stop_vote = torch.full_like(grad_norm, float(stop_requested))

        # Norms of different ranks may differ in the last bit. Their mean is the same on all ranks.
        shares = [loss.to(grad_norm.device), grad_norm / dist.get_world_size(), stop_vote]
        sums = torch.stack(shares)
        dist.all_reduce(sums)

        skip = ~sums[:2].isfinite().all()
        skipped, in_a_row = self.counts.to(sums.device)
        self.counts = torch.stack([skipped + skip, (in_a_row + 1) * skip])
        return Decision(skip=skip.float(), stop=sums[2], loss=sums[0])

    def report(self, step: int) -> None:
        """Warns of the steps that were skipped since the last report.

        Args:
            step: The step that was taken last.
        """
        skipped, in_a_row = self.counts.tolist()
        if skipped > self.reported:
            logger.warning(
                "%d step(s) up to step %d were skipped, because the loss or the gradient norm was "
                "not finite. The weights are those of step %d.",
                skipped - self.reported,
                step,
                step - in_a_row,
            )
        self.reported = skipped

    def check_limit(self, max_in_a_row: int, step: int, loss: float, grad_norm: float) -> None:
        """Ends the run with an error message if too many steps in a row were skipped.

        Args:
            max_in_a_row: The setting training.max_skipped_steps.
            step: The step that was taken last.
            loss: Its loss.
            grad_norm: Its gradient norm.
        """
        in_a_row = int(self.counts[1])
        if in_a_row >= max_in_a_row:
            stop(
                f"the last {in_a_row} steps up to step {step} were skipped: loss {loss:g}, "
                f"gradient norm {grad_norm:g} (training.max_skipped_steps = {max_in_a_row}). From "
                "an earlier checkpoint (checkpoint.load_step), try a lower optimizer.lr, a longer "
                "warmup or a smaller training.max_norm."
            )

    def scalars(self) -> dict[str, float]:
        """Returns the counts for TensorBoard, by tag."""
        skipped, in_a_row = self.counts.tolist()
        return {"skipped_steps/total": float(skipped), "skipped_steps/in_a_row": float(in_a_row)}

    def state_dict(self) -> dict[str, int]:
        """Returns the counts as entries of a checkpoint's `interdomain.json`."""
        skipped, in_a_row = self.counts.tolist()
        return {"skipped_steps": skipped, "skipped_in_a_row": in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the counts of a checkpoint.

        Args:
            state: Its `interdomain.json`. Those of older versions lack the counts.
        """
        self.reported = state.get("skipped_steps", 0)
        self.counts = torch.tensor([self.reported, state.get("skipped_in_a_row", 0)])
