"""The entry point with one disturbance per start: torchrun ... disturbed.py PLAN.json THE ENTRY'S FLAGS

PLAN is a list with an entry for each start of the ranks, torchrun's restarts included:
{"flags": more of them, "rank": who, "at": ["step" | "write" | "finish" | "validate", N], "signal": "SIGKILL", "times": 1,
"to": "rank" | "agent" | "launcher", "lock": {constants of interdomain.titan.lock}}

step: in training step N. write: before this rank writes its shard of checkpoint N. finish: when all shards of checkpoint N
are written and its index is not (rank 0). validate: before the validation of step N. No "at": nothing happens.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torchtitan.train
from torch.distributed.checkpoint import FileSystemWriter

from interdomain.titan import entry, lock
from interdomain.titan.trainer import InterdomainTrainer
from interdomain.titan.validate import FixedValidator

ENTRY = json.loads(Path(sys.argv.pop(1)).read_text())[int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
sys.argv += ENTRY.get("flags", [])


def disturb(place):
    if int(os.environ["RANK"]) == ENTRY["rank"]:
        pids = {"rank": os.getpid(), "agent": os.getppid(), "launcher": int(os.environ.get("LAUNCHER", 0))}
        for _ in range(ENTRY.get("times", 1)):
            os.kill(pids[ENTRY.get("to", "rank")], getattr(signal, ENTRY["signal"]))
        while ENTRY.get("to") == "launcher" and not place.preemption.asked:  # steps are quicker than its answer
            time.sleep(0.01)


def before(place, name, condition):
    original = getattr(place, name)

    def disturbed(self, *args, **kwargs):
        if condition(self, *args):
            disturb(self)
        return original(self, *args, **kwargs)

    setattr(place, name, disturbed)


def main():
    kind, step = ENTRY.get("at", (None, None))
    if kind == "step":
        before(InterdomainTrainer, "train_step", lambda trainer, *_: trainer.step == step)
    elif kind == "validate":
        before(FixedValidator, "validate", lambda validator, models, at: at == step)
    elif kind is not None:
        method = {"write": "write_data", "finish": "finish"}[kind]
        before(FileSystemWriter, method, lambda writer, *_: str(writer.path).endswith(f"step-{step}"))
    for name, value in ENTRY.get("lock", {}).items():
        setattr(lock, name, value)
    # At the end the trainer waits two seconds for other ranks' last lines.
    torchtitan.train.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)
    entry.main()


if __name__ == "__main__":
    main()
