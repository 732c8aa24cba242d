"""A step whose loss or gradient norm is not finite, or far above those before it, changes nothing, on all ranks alike.

Weights and the optimizer's state stay as they were; the learning rate and the data move on, as after any step. Everything
stays on the device: nothing is read back between the backward pass and the update. The counts are read where the trainer
reads the loss, every `metrics.log_freq` steps.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import stop
from ..host import logger

WINDOW = 128  # steps that a spike is judged by
RECORDED = 128  # spikes whose steps are known: the last ones


class Guard:
    """Skips and counts the steps whose loss or gradient norm is not finite or, with `deviations`, a spike.

    A spike is a loss or a norm more than `deviations` standard deviations above the mean of the last WINDOW steps that were
    not skipped; there are none before there are so many. Only what rises counts: the steep fall at a run's start is none.

    Attributes:
        deviations: 0: there are no spikes.
        window: losses and norms of the last steps, [2, WINDOW], the latest last; NaN where there was none yet.
        spikes: steps of the last spikes, [RECORDED], the latest last; 0 where there was none yet.
        counts: [steps that were not finite, spikes, skipped in a row]. known: the first two at the last `news`.
    """

    deviations = 0.0

    def __init__(self) -> None:
        self.load_state_dict({})

    def verdict(self, loss: Tensor, norm: Tensor, asked: bool, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """(1.0 for a step to skip, not 0 where any rank was asked to leave, the loss of all ranks): scalars on the device, the
        same on all ranks. Collective.

        Args:
            loss: this rank's share. norm: of the gradients of all ranks. Scalars.
            asked: whether this rank was asked to leave: it travels with the others, so that a step has one small collective.
        """
        # Fills, for a copy from the host would wait for the device. The norm goes along: the ranks' own may differ in the last
        # bit, and all must judge alike.
        vote = torch.full_like(norm, float(asked))
        sums = torch.stack([loss.to(norm.device), norm / dist.get_world_size(), vote])
        dist.all_reduce(sums)
        values, device = sums[:2], sums.device
        self.window, self.spikes, self.counts = (x.to(device) for x in (self.window, self.spikes, self.counts))
        finite = values.isfinite().all()
        skip, spike = ~finite, torch.zeros_like(finite)
        if self.deviations:
            std, mean = torch.std_mean(self.window, dim=1)  # NaN until the window is full: nothing is above it
            spike = finite & (values > mean + self.deviations * std).any()
            skip = skip | spike
            self.window = torch.where(skip, self.window, torch.cat([self.window[:, 1:], values[:, None]], dim=1))
            latest = torch.full((1,), step, device=device)
            self.spikes = torch.where(spike, torch.cat([self.spikes[1:], latest]), self.spikes)
        row = (self.counts[2] + 1) * skip
        self.counts = torch.stack([self.counts[0] + ~finite, self.counts[1] + spike, row])
        return skip.float(), sums[2], sums[0]

    def state_dict(self) -> dict[str, Any]:
        """Entries for a checkpoint's record. JSON holds these floats to the bit."""
        not_finite, spikes, row = self.counts.tolist()
        state = {"skipped_steps": not_finite + spikes, "skipped_in_a_row": row, "spikes": spikes}
        losses, norms = self.window[:, self.window[0].isfinite()].tolist()
        return state | {"spike_steps": self.spike_steps, "recent_losses": losses, "recent_grad_norms": norms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what a record has of `state_dict`: those of older versions have the first entry alone, or nothing."""
        spikes, steps = state.get("spikes", 0), state.get("spike_steps", [])
        counts = state.get("skipped_steps", 0) - spikes, spikes, state.get("skipped_in_a_row", 0)
        self.counts, self.known = torch.tensor(counts), counts[:2]
        recent = [state.get(name, []) for name in ("recent_losses", "recent_grad_norms")]
        self.window = torch.tensor([[float("nan")] * (WINDOW - len(values)) + values for values in recent])
        self.spikes = torch.tensor([0] * (RECORDED - len(steps)) + steps)

    @property
    def spike_steps(self) -> list[int]:
        return [step for step in self.spikes.tolist() if step]

    def scalars(self) -> dict[str, float]:
        not_finite, spikes, row = self.counts.tolist()
        counts = {"total": not_finite + spikes, "not_finite": not_finite, "spikes": spikes, "in_a_row": row}
        return {f"skipped_steps/{name}": float(n) for name, n in counts.items()}

    def news(self) -> str:
        """Words for the steps skipped since the last call; empty: none."""
        counts = tuple(self.counts.tolist()[:2])
        not_finite, spikes = (now - before for now, before in zip(counts, self.known, strict=True))
        self.known = counts
        steps = ", ".join(map(str, self.spike_steps[-spikes:]))
        said = [f"{not_finite} step(s) were skipped that were not finite"] if not_finite else []
        return "; ".join(said + ([f"{spikes} spike(s) were skipped: step(s) {steps}"] if spikes else []))

    def warn_at_the_end(self, step: int) -> None:
        """Say so when the last steps of a run were skipped."""
        if row := int(self.counts[2].item()):
            logger.warning(
                "the last %d step(s) up to step %d were skipped (loss or gradient norm not finite, or a spike): the weights "
                "are those of step %d.",
                *(row, step, step - row),
            )

    def stop_if_repeated(self, limit: int, step: int, loss: float, grad_norm: float) -> None:
        """End the run when `limit` steps in a row were skipped."""
        row = int(self.counts[2].item())
        if row >= limit:
            stop(
                f"the last {row} steps up to step {step} were skipped: loss {loss:g}, gradient norm {grad_norm:g} "
                f"(training.max_skipped_steps = {limit}). The weights are those of step {step - row}. From an earlier "
                "checkpoint (checkpoint.load_step), try a lower optimizer.lr, a longer warmup or a smaller training.max_norm."
            )
