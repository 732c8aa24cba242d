"""A step whose loss or gradient norm is not finite on any rank changes nothing, on all ranks alike, and is counted.

Weights and the optimizer's state stay as they were; the learning rate and the data move on, as after any step. Everything
stays on the device: nothing is read back between the backward pass and the update. The counts are read where the trainer
reads the loss, every `metrics.log_freq` steps.
"""

import torch
import torch.distributed as dist

from ..errors import stop
from ..host import logger


class Guard:
    """Counts the steps skipped because loss or gradient norm was not finite."""

    def __init__(self) -> None:
        self.counts = torch.zeros(2)  # [skipped in all, skipped in a row]

    def verdict(self, loss: torch.Tensor, norm: torch.Tensor, asked: bool) -> torch.Tensor:
        """[1.0 for a step to skip, 1.0 where any rank was asked to leave], the same on all ranks, on the device. Collective.

        Args:
            loss: of this rank's micro-batches together. norm: of the gradients of all ranks. Scalars.
            asked: whether this rank was asked to leave: it travels with the other, so that a step has one small collective.
        """
        finite = torch.isfinite(norm) & torch.isfinite(loss).to(norm.device)
        # A fill, for a copy from the host would wait for the device.
        votes = torch.full((2,), float(asked), device=norm.device)
        votes[0] = ~finite
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)  # one rank's loss need not show in the norm
        bad = votes[0]
        total, row = self.counts.to(bad.device)
        self.counts = torch.stack([total + bad, (row + 1) * bad])
        return votes

    @property
    def skipped(self) -> int:
        return int(self.counts[0].item())

    @skipped.setter
    def skipped(self, total: int) -> None:
        self.counts = torch.tensor([float(total), 0.0])

    def scalars(self) -> dict[str, float]:
        total, row = self.counts.tolist()
        return {"skipped_steps/total": total, "skipped_steps/in_a_row": row}

    def warn_at_the_end(self, step: int) -> None:
        """Say so when the last steps of a run were skipped."""
        if row := int(self.counts[1].item()):
            logger.warning(
                "the last %d step(s) up to step %d were skipped, for loss or gradient norm was not finite: the weights are "
                "those of step %d.",
                *(row, step, step - row),
            )

    def stop_if_repeated(self, limit: int, step: int, loss: float, grad_norm: float) -> None:
        """End the run when `limit` steps in a row were skipped."""
        row = int(self.counts[1].item())
        if row >= limit:
            stop(
                f"the last {row} steps up to step {step} were skipped: loss {loss:g}, gradient norm {grad_norm:g} "
                f"(training.max_skipped_steps = {limit}). The weights are those of step {step - row}. From an earlier "
                "checkpoint (checkpoint.load_step), try a lower optimizer.lr, a longer warmup or a smaller training.max_norm."
            )
