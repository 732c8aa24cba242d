"""Leaving when the scheduler asks: a signal is noted, agreed on by all ranks, and answered with a whole checkpoint.

SIGTERM (preemption; torchrun passes it on to its ranks) and SIGUSR1 (what `--signal` in SLURM sends before the time limit).
The same command line continues the run. Every other end of torchrun is the ranks' end at once: they are its children, and
an orphan would go on writing into the folder of the run that continues.
"""

import contextlib
import ctypes
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torchtitan.tools.logging import logger

from interdomain.outcome import LEFT, launcher_has_ended, tell_launcher

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent dies


class Preemption:
    """What this rank was asked, and what all ranks together make of it at the boundaries between steps."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self.votes = self.vote = None
        _die_with_torchrun(signal.SIGKILL)
        # torchrun was killed before the line above: left alone, the ranks would find each other and train.
        if launcher_has_ended():
            raise SystemExit("this rank's torchrun was killed while the rank began: ending with it")

    def listen(self, comm) -> None:
        """From now on the signals are noted and nothing else; a second one changes nothing. Before it, they end the process.

        Collective.
        """
        for number in SIGNALS:
            signal.signal(number, self._note)
        # gloo: its collectives run beside the device's.
        seconds = max(comm.init_timeout_seconds, comm.train_timeout_seconds)
        self.votes = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))

    def _note(self, number, frame) -> None:
        self.asked = self.asked or signal.Signals(number)
        # torchrun gives up waiting at its third signal: the save must not end with it.
        _die_with_torchrun(0)

    def agreed(self) -> bool:
        """Whether any rank had been asked at the boundary before this one: the same answer on all. After `listen`. Collective.

        A boundary's votes are counted while the next step runs, so that no step waits for them.
        """
        before = self.settle()
        ballot = torch.tensor([self.asked is not None], dtype=torch.int32)
        self.vote = dist.all_reduce(ballot, op=dist.ReduceOp.MAX, group=self.votes, async_op=True), ballot
        return before

    def settle(self) -> bool:
        """The outcome of the pending vote; none is pending after it."""
        if self.vote is None:
            return False
        work, ballot = self.vote
        work.wait()
        self.vote = None
        return bool(ballot.item())

    def leave(self, trainer) -> None:
        """Save, say so, and end this process with exit status 0: torchrun restarts only what fails. Collective."""
        self.settle()
        saved = trainer.checkpointer.save_now(trainer.step)
        why = self.asked.name if self.asked else "a signal to another rank"
        kept = "saved" if saved else "checkpoint.enable is off, so nothing is saved"
        logger.info("leaving after step %d (%s): %s. The same command continues from there.", trainer.step, why, kept)
        tell_launcher(LEFT)
        trainer.close()
        dist.destroy_process_group()  # as at a run's end: with NCCL, a rank that leaves without it may hang or fail
        raise SystemExit(0)


@contextlib.contextmanager
def children_keep_saving():
    """Processes that start in here never get SIGUSR1, which schedulers send to every process and which would end them.

    SIGTERM is how Python itself ends its daemons. What comes for this process meanwhile is noted after the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _die_with_torchrun(number: int) -> None:
    """Ask Linux for this signal when torchrun dies; 0: for none."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
