"""What one training step costs between the ranks and between host and device, counted on TorchTitan's fake backend."""

import json

import pytest

from .conftest import flags

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
        if "c10d" in space and "wait" not in name or name in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal"):
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))

os.environ["NGPU"] = sys.argv[1]
trainer = InterdomainTrainer(read_job_config(sys.argv[3:]))
batches = trainer.batch_generator(trainer.dataloader)
for trainer.step in (1, 2):  # the first step is logged
    assert trainer.should_continue_training()
    with Count() as count:
        trainer.train_step(batches)
open(sys.argv[2], "w").write(json.dumps(count.seen))
trainer.close()
"""


def test_a_step_on_256_ranks(corpus, launch, tmp_path):
    """Gradients once, however many micro-batches; the dynamics' in one piece; and the host reads nothing."""
    (tmp_path / "count.py").write_text(COUNT)
    seen = {}
    for accumulation in (1, 2):
        settings = {"training__local_batch_size": 1, "training__global_batch_size": 256 * accumulation}
        settings |= {"comm__mode": "fake_backend", "metrics__log_freq": 100}
        given = flags(corpus, tmp_path / "run", **settings)
        launch(1, tmp_path / "count.py", 256, tmp_path / "seen.json", *given)
        seen[accumulation] = json.loads((tmp_path / "seen.json").read_text())
    gathers = {accumulation: found.pop("_allgather_base_") for accumulation, found in seen.items()}
    assert gathers[2] <= 2 * gathers[1]
    # 4 blocks, embedding, head; the dynamics' gradients, the norm, and guard and signals together.
    assert seen[1] == seen[2] == {"_reduce_scatter_base_": 6, "allreduce_": 3}
