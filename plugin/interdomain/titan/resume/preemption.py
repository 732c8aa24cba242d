"""Stopping when the scheduler asks: all ranks agree, and the run saves a checkpoint.

The signals are SIGTERM (preemption; torchrun passes it on to its ranks) and SIGUSR1 (which SLURM's
`--signal` sends before the time limit). The same command line continues the run. If torchrun itself
is killed, its ranks end at once: an orphan would go on writing into the folder of the run that
continues.
"""

import os
import signal
import time
from types import FrameType
from typing import Any, NoReturn

import torch

from interdomain.launcher import (
    LEFT,
    end_with_parent,
    launcher_has_ended,
    launchers_signal,
    notify_launcher,
)

from ..host import logger

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preemption:
    """Requests to stop: this rank's own, and the one that all ranks agree on between two steps.

    The all-reduce of every step carries the ranks' votes (`StepGuard.decide`). Between two steps,
    the host reads the vote of the step before the last. The last vote may still be under way on the
    device, and the host does not wait for it. All ranks read the vote of the same step, so all stop
    after the same step.

    Attributes:
        asked: The name of the signal that asked this rank to stop.
        listening: Whether signals are noted. Until `listen` they end the process.
        last: The vote of the last step, and the event after its copy to the host.
        before: The vote of the step before the last.
    """

    def __init__(self) -> None:
        """Makes this rank end together with its torchrun. Signals are noted after `listen` only."""
        self.asked: str | None = None
        self.listening = False
        self.last: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        self.before: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        _die_with_torchrun(signal.SIGKILL)
        # torchrun may have been killed before the line above.
        if launcher_has_ended():
            raise SystemExit("this rank's torchrun was killed while the rank began: ending with it")

    def listen(self) -> None:
        """Notes signals from now on, in place of ending the process by them."""
        for number in SIGNALS:
            signal.signal(number, self._note)
        self.listening = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal: notes the first one. `frame` is Python's, and is ignored."""
        if self.asked is None:
            self.asked = launchers_signal() or signal.Signals(number).name
            # A step may take long.
            logger.info("%s: leaving after the next step.", self.asked)
        # torchrun stops waiting at its third signal. The save must not end with it.
        _die_with_torchrun(0)

    def cast(self, vote: torch.Tensor) -> None:
        """Takes the vote of a step.

        Args:
            vote: A scalar on the device. It is not 0 if any rank was asked to stop.
        """
        copied = None
        if vote.is_cuda:
            vote = torch.empty((), pin_memory=True).copy_(vote, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self.before = self.last
        self.last = (vote, copied)

    def agreed(self) -> bool:
        """Returns whether any rank was asked to stop by the end of the step before the last.

        The answer is the same on all ranks.
        """
        if self.before is None:
            return False
        vote, copied = self.before
        if copied:
            copied.synchronize()  # the next step runs on the device meanwhile
        return bool(vote)

    def leave(self, trainer: Any) -> NoReturn:
        """Saves a checkpoint and ends the training with exit status 0. Collective.

        Torchrun restarts only ranks that fail.

        `Trainer.train` is wrapped by torch's `record`, which returns on SystemExit(0). Then
        `trainer.run` closes the run as at its end.

        Args:
            trainer: The `InterdomainTrainer`.
        """
        saved = trainer.checkpointer.save_now(trainer.step)
        why = "a signal to another rank"
        if self.asked:
            why = self.asked
        # Newer versions of SLURM tell a job when its time limit is, in seconds since 1970.
        end_time = os.environ.get("SLURM_JOB_END_TIME")
        if end_time:
            left = int(end_time) - int(time.time())
            why += f", {left} s before the job's time limit"
        result = "checkpoint.enable is off, so nothing is saved"
        if saved:
            result = "saved"
        logger.info(
            "leaving after step %d (%s): %s. The same command continues from there.",
            trainer.step,
            why,
            result,
        )
        notify_launcher(LEFT)
        raise SystemExit(0)


def _die_with_torchrun(number: int) -> None:
    """Asks for a signal (0: none) when the parent of this process ends, if it is torchrun.

    Args:
        number: The signal's number.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(number)
