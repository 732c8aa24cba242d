"""A step whose loss or gradient norm is not finite on any rank changes nothing, on all ranks alike, and is counted.

Weights and the optimizer's state stay as they were; the learning rate and the data move on, as after any step. Everything
stays on the device: nothing is read back between the backward pass and the update. The counts are read where TorchTitan
reads the loss, every `metrics.log_freq` steps.
"""

import functools
from types import SimpleNamespace

import torch
import torch.distributed as dist

from .errors import stop

# What the step being made has shown on this rank: its loss (a sum over micro-batches) and its gradient norm.
seen = SimpleNamespace(loss=None, norm=None)


def seeing_loss(forward_backward_step):
    @functools.wraps(forward_backward_step)
    def step(*args, **kwargs):
        loss = forward_backward_step(*args, **kwargs)
        value = loss.detach()
        seen.loss = value if seen.loss is None else seen.loss + value
        return loss

    return step


def seeing_norm(clip_grad_norm_):
    @functools.wraps(clip_grad_norm_)
    def clip(*args, **kwargs):
        seen.norm = clip_grad_norm_(*args, **kwargs)
        return seen.norm

    return clip


class Guard:
    """Whether a step counts, and how many did not."""

    def __init__(self) -> None:
        self.counts = torch.zeros(2)  # [skipped in all, skipped in a row]

    def verdict(self) -> torch.Tensor | None:
        """1.0 for a step to skip, else 0.0: a scalar on the device, the same on all ranks. Collective.

        None where no trainer has shown a gradient norm.
        """
        if seen.norm is None:
            return None
        finite = torch.isfinite(seen.norm)
        if seen.loss is not None:
            finite = finite & torch.isfinite(seen.loss).to(finite.device)
        seen.loss = seen.norm = None
        bad = (~finite).float().reshape(())
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)  # one rank's loss need not show in the norm
        total, row = self.counts.to(bad.device)
        self.counts = torch.stack([total + bad, (row + 1) * bad])
        return bad

    @property
    def skipped(self) -> int:
        return int(self.counts[0].item())

    @skipped.setter
    def skipped(self, total: int) -> None:
        self.counts = torch.tensor([float(total), 0.0])

    def scalars(self) -> dict[str, float]:
        total, row = self.counts.tolist()
        return {"skipped_steps/total": total, "skipped_steps/in_a_row": row}

    def stop_if_repeated(self, limit: int, step: int, loss: float, grad_norm: float) -> None:
        """End the run when `limit` steps in a row were skipped."""
        row = int(self.counts[1].item())
        if row >= limit:
            stop(
                f"the last {row} steps up to step {step} were skipped: loss {loss:g}, gradient norm {grad_norm:g} "
                f"(training.max_skipped_steps = {limit}). The weights are those of step {step - row}. Try a lower "
                "optimizer.lr, a longer warmup or a smaller training.max_norm from an earlier checkpoint "
                "(checkpoint.load_step), other data (debug.seed with --checkpoint.exclude_from_loading dataloader), and "
                "python -m interdomain.tools.check_kernels for the kernels."
            )
