"""The entry point with one kill or signal per start of the ranks: torchrun ... disturbed.py PLAN.json THE ENTRY'S FLAGS

PLAN: {"starts": [...], "spoil": {step: what}}. `starts` has an entry for each start, torchrun's restarts included:
[PLACE, STEP, RANK, SIGNAL, whose process: rank or agent], or null. Places: `step`, before training step N; `finish`, on rank 0,
when all shards of checkpoint N are written and its index is not; `validate`, before the validation of step N.
"""

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

PLACES = {
    "step": (InterdomainTrainer, "train_step", lambda trainer, *_: trainer.step),
    "finish": (FileSystemWriter, "finish", lambda writer, *_: step_of(writer.path)),
    "validate": (FixedValidator, "validate", lambda validator, models, step: step),
}


def disturb(place, step, rank, name, process):
    owner, method, step_now = PLACES[place]
    original = getattr(owner, method)

    def disturbed(self, *args, **kwargs):
        if step_now(self, *args) == step and int(os.environ["RANK"]) == rank:
            os.kill(os.getpid() if process == "rank" else os.getppid(), getattr(signal, name))
            if process == "agent":
                signal.pause()  # it ends this process
        return original(self, *args, **kwargs)

    setattr(owner, method, disturbed)


if __name__ == "__main__":
    plan = json.loads(Path(sys.argv.pop(1)).read_text())
    if signal_of := plan["starts"][int(os.environ["TORCHELASTIC_RESTART_COUNT"])]:
        disturb(*signal_of)
    train = InterdomainTrainer.train

    def spoiled(trainer):
        spoil_losses(trainer, plan.get("spoil"))
        train(trainer)

    InterdomainTrainer.train = spoiled
    entry.main()
