"""Costs of one training step between the ranks and between host and device, counted on TorchTitan's fake backend."""

import json

import pytest

from ..ranks import launch
from .runs import flags

pytestmark = pytest.mark.e2e

COUNT = """
import collections, json, os, sys
from torch.utils._python_dispatch import TorchDispatchMode
from interdomain.titan.settings.job_config import read_job_config
from interdomain.titan.trainer import InterdomainTrainer

class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()
    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        space, _, name = func._schema.name.partition("::")
        reads = "_local_scalar_dense", "nonzero", "is_nonzero", "equal", "lift_fresh"
        if "c10d" in space and "wait" not in name or name in reads:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))

os.environ["NGPU"] = "256"
seen = []
for accumulation in (1, 2):
    batch = ["--training.global_batch_size", str(256 * accumulation)]
    trainer = InterdomainTrainer(read_job_config([*sys.argv[2:], *batch]))
    batches = trainer.batch_generator(trainer.dataloader)
    for trainer.step in (1, 2):  # the first step is logged
        assert trainer.should_continue_training()
        with Count() as count:
            trainer.train_step(batches)
    seen.append(count.seen)
    trainer.close()
open(sys.argv[1], "w").write(json.dumps(seen))
"""


def test_a_step_on_256_ranks(corpus, tmp_path):
    """Gradients once, however many micro-batches; the SSM parameters in one piece; and the host reads nothing."""
    (tmp_path / "count.py").write_text(COUNT)
    settings = {
        "training__local_batch_size": 1,
        "comm__mode": "fake_backend",
        "metrics__log_freq": 100,
    }
    arguments = flags(corpus, tmp_path / "run", **settings)
    launch(tmp_path / "log.txt", 1, tmp_path / "count.py", tmp_path / "seen.json", *arguments)
    once, twice = json.loads((tmp_path / "seen.json").read_text())
    assert twice.pop("_allgather_base_") <= 2 * once.pop("_allgather_base_")
    # 2 blocks, embedding, head; the SSM parameters gradients, the norm, and guard and signals together.
    assert once == twice == {"_reduce_scatter_base_": 4, "allreduce_": 3}
