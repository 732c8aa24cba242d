"""Stopping when the scheduler asks: a signal is noted, agreed on by all ranks, and answered with a complete checkpoint.

SIGTERM (preemption; torchrun passes it on to its ranks) and SIGUSR1 (what `--signal` in SLURM sends before the time limit).
The same command line continues the run. If torchrun itself is killed, the ranks end at once: an orphan would go on writing into
the folder of the run that continues.
"""

import os
import signal

import torch

from interdomain.launcher import LEFT, end_with_parent, launcher_has_ended, notify_launcher

from ..host import logger

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preemption:
    """Requests to leave: this rank's, and the one that all ranks agree on between two steps.

    Every step's collective carries the ranks' votes (`guard`). Between two steps, the host reads the vote of the step before
    the last: the last one's may still be under way on the device, and nothing waits for it. All ranks read the vote of the
    same step, so all leave after the same step.
    """

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self.listening = False
        self.last = self.before = None  # votes: of the last step, and of the one before it
        _die_with_torchrun(signal.SIGKILL)
        if launcher_has_ended():  # before the line above
            raise SystemExit("this rank's torchrun was killed while the rank began: ending with it")

    def listen(self) -> None:
        """Note signals, in place of ending the process by them; a second signal changes nothing."""
        for number in SIGNALS:
            signal.signal(number, self._note)
        self.listening = True

    def _note(self, number, frame) -> None:
        self.asked = self.asked or signal.Signals(number)
        # torchrun gives up waiting at its third signal: the save must not end with it.
        _die_with_torchrun(0)

    def cast(self, vote: torch.Tensor) -> None:
        """Take a step's outcome: a scalar on the device, not 0 where any rank was asked to leave."""
        copied = None
        if vote.is_cuda:
            vote = torch.empty((), pin_memory=True).copy_(vote, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self.before, self.last = self.last, (vote, copied)

    def agreed(self) -> bool:
        """True if any rank was asked to leave by the end of the step before the last: the same answer on all ranks."""
        if self.before is None:
            return False
        vote, copied = self.before
        if copied:
            copied.synchronize()  # the step after it is under way on the device meanwhile
        return bool(vote)

    def leave(self, trainer) -> None:
        """Save, say so, and end the training with exit status 0: torchrun restarts only what fails. Collective.

        `Trainer.train` returns on SystemExit(0), for it is a torch `record`; then `trainer.run` closes the run as at its end.
        """
        saved = trainer.checkpointer.save_now(trainer.step)
        why = self.asked.name if self.asked else "a signal to another rank"
        result = "saved" if saved else "checkpoint.enable is off, so nothing is saved"
        logger.info(
            "leaving after step %d (%s): %s. The same command continues from there.",
            trainer.step,
            why,
            result,
        )
        notify_launcher(LEFT)
        raise SystemExit(0)


def _die_with_torchrun(number: int) -> None:
    """`end_with_parent`, where torchrun is the parent."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(number)
