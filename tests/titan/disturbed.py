"""The entry point with one kill or signal per start of the ranks: torchrun ... disturbed.py PLAN.json THE ENTRY'S FLAGS

PLAN: {"starts": [...], "spoil": {step: what}}. `starts` has an entry for each start, torchrun's restarts included:
[PLACE, STEP, RANK, SIGNAL, whose process: rank or agent], or null. Places: `step`, before training step N; `finish`, on rank 0,
when all shards of checkpoint N are written and its index is not; `validate`, before the validation of step N.
"""

import gc
import json
import os
import signal
import sys
from pathlib import Path

from torch.distributed.checkpoint import FileSystemWriter

from interdomain.checkpoint.step_folder import step_of
from interdomain.titan import entry
from interdomain.titan.trainer import InterdomainTrainer
from interdomain.titan.watch.validate import FixedValidator
from tests.titan.driver import spoil_losses

# The method that is called at each place.
PLACES = {
    "step": (InterdomainTrainer, "train_step"),
    "finish": (FileSystemWriter, "finish"),
    "validate": (FixedValidator, "validate"),
}


def disturb(place, step, rank, name, process):
    """Sends a signal to this process or its agent right before a method is called."""
    owner, method = PLACES[place]
    original = getattr(owner, method)

    def disturbed(self, *args, **kwargs):
        if place == "step":
            step_now = self.step
        elif place == "finish":
            step_now = step_of(self.path)
        else:
            _, step_now = args
        if step_now == step and int(os.environ["RANK"]) == rank:
            target = os.getpid() if process == "rank" else os.getppid()
            os.kill(target, getattr(signal, name))
            if process == "agent":
                signal.pause()  # the agent's end ends this process
        return original(self, *args, **kwargs)

    setattr(owner, method, disturbed)


if __name__ == "__main__":
    gc.freeze()  # the collector need not look through what the fork inherited
    plan = json.loads(Path(sys.argv.pop(1)).read_text())
    disturbance = plan["starts"][int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
    if disturbance:
        disturb(*disturbance)
    train = InterdomainTrainer.train

    def spoil_and_train(trainer):
        spoil_losses(trainer, plan.get("spoil"))
        train(trainer)

    InterdomainTrainer.train = spoil_and_train
    entry.main()
