"""Bytes that a rank receives in a step, counted: as many as the dry run says. Of context parallelism, one state a layer."""

import pytest

from interdomain.titan.plan.run_plan import make_plan
from interdomain.titan.settings.job_config import read_job_config

pytestmark = pytest.mark.e2e

COUNTED = [
    *("2 text", "2 replicas", "2 context layers", "2 tensor layers", "2 pipeline layers", "2 context softmax"),
    *("2 context full", "2 context full long", "2 context softmax long", "2 tensor selective", "2 tensor bfloat16"),
    *("2 context fixed", "2 tensor fixed", "2 once", "2 each bfloat16"),
    *("2 shards muon", "2 tensor muon", "4 tensor context muon"),
]
FEW = 200  # bytes: of the sums of a few numbers, such as the gradients' norm


def received(runs, name):
    return max(seen["traffic"] for seen in runs.every(name))


@pytest.mark.parametrize("name", COUNTED)
def test_a_step_receives_what_the_dry_run_says(runs, name):
    counted = received(runs, name)
    expected = sum(make_plan(read_job_config(runs.jobs[name]["args"]), int(name[0])).traffic.values())
    assert 0 <= counted - expected < FEW


def test_context_parallelism_receives_the_same_whatever_the_length(runs):
    assert received(runs, "2 context full") == received(runs, "2 context full long")
    assert received(runs, "2 context softmax long") > received(runs, "2 text")
