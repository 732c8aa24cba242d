"""A run that is killed at random moments ends with the bits of one that is not. By request, for it takes minutes:

INTERDOMAIN_SOAK=8 ./launch.sh test tests/titan/test_random_kills.py -n 0     (the number of kills)
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from interdomain.tools import compare_runs
from interdomain.tools._start.torchrun import REFUSED

from .runs import assert_same_tensors, start_launcher

KILLS = int(os.environ.get("INTERDOMAIN_SOAK", "0"))
KINDS = (("SIGKILL", "rank"), ("SIGKILL", "torchrun"), ("SIGTERM", "torchrun"), ("SIGUSR1", "rank"))
STEPS_PER_KILL = 40

pytestmark = pytest.mark.skipif(not KILLS, reason="minutes: by request, with INTERDOMAIN_SOAK=8")


def children(pid):
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def test_random_kills_change_no_bit(tmp_path, corpus):
    steps, draw = STEPS_PER_KILL * KILLS, random.Random(0)
    settings = {"training__local_batch_size": 4, "training__steps": steps, "metrics__enable_tensorboard": True}
    settings |= {"checkpoint__enable": True, "checkpoint__interval": 10, "checkpoint__async_mode": "async"}

    def start(name):
        with open(tmp_path / f"{name}.txt", "ab") as log:
            return start_launcher(corpus, tmp_path / name, "--ranks", 2, output=log, **settings)

    assert start("undisturbed").wait() == 0
    log, run, hits = tmp_path / "disturbed.txt", start("disturbed"), []
    while len(hits) < KILLS and run.poll() != 0:
        if run.poll() is not None:
            assert run.returncode != REFUSED, log.read_text()[-3000:]
            run = start("disturbed")
        # Mostly while it trains; a quarter of the kills at a random moment of a start.
        seen, early = log.read_bytes().count(b" step: "), draw.random() < 0.25
        while not early and run.poll() is None and log.read_bytes().count(b" step: ") == seen:
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 8 if early else 2))
        kind, to = draw.choice(KINDS)
        torchrun = children(run.pid)
        if pids := torchrun if to == "torchrun" else [rank for pid in torchrun for rank in children(pid)]:
            os.kill(draw.choice(pids), getattr(signal, kind))
            hits.append(f"{kind} {to}")
    while run.wait():
        assert run.returncode != REFUSED, log.read_text()[-3000:]
        run = start("disturbed")
    print(hits)
    ours, reference = (tmp_path / name for name in ("disturbed", "undisturbed"))
    assert compare_runs.main([str(ours), str(reference)]) == 0
    ours, reference = (folder / "checkpoint" / f"step-{steps}" for folder in (ours, reference))
    assert_same_tensors(ours, reference)
