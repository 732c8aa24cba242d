"""Runs whose state stops at the documents: what they compute is what every document gives by itself."""

import pytest
import torch
from torch.nn import functional as F

from interdomain.model import Transformer
from interdomain.titan.data.folders import open_dataset
from interdomain.titan.plan.run_plan import make_plan
from interdomain.titan.settings.job_config import read_job_config

from .conftest import flags

pytestmark = pytest.mark.e2e


def one_by_one(corpus, condition):
    """Mean loss of the first step's batch at the initial values, from a forward pass for every document."""
    job = read_job_config(flags(corpus, "folder", mixer__condition=condition))
    plan, dataset = make_plan(job, 1), open_dataset(job, "train")
    model = Transformer(plan.config)
    model.init_weights(plan.seed)
    total = 0.0
    with torch.no_grad():
        for g in range(plan.global_batch):
            window = torch.from_numpy(dataset[g])
            starts = (torch.from_numpy(dataset.positions(g)) == 0).nonzero().flatten().tolist()
            lengths = [b - a for a, b in zip(starts, (*starts[1:], plan.seq_len), strict=True)]
            logits = torch.cat([model(x[None])[0] for x in window[:-1].split(lengths)])
            total += F.cross_entropy(logits, window[1:], reduction="sum").item()
    return total / (plan.global_batch * plan.seq_len)


@pytest.mark.parametrize("condition", ["interdomain", "softmax"])
def test_first_loss(two, short, condition):
    name = "documents" if condition == "interdomain" else "documents softmax"
    first, through = (two.seen(run)["log"][1]["loss"] for run in (name, f"through documents {condition}"))
    expected = one_by_one(short, condition)
    assert first == pytest.approx(expected, rel=2e-6)
    assert abs(through - expected) > 2e-5 * expected  # the batch has documents that end within a window


def test_compiled_and_checkpointed(one, two):
    """On one rank, against two."""
    eager, compiled = two.seen("documents"), one.seen("documents compiled")
    for kind in ("log", "validation"):
        assert eager[kind].keys() == compiled[kind].keys() != set()
        for step, seen in eager[kind].items():
            assert compiled[kind][step]["loss"] == pytest.approx(seen["loss"], rel=1e-4)
