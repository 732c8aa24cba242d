"""Bytes that a rank receives in a step, counted: as many as the dry run says. Of context parallelism, one state a layer."""

import pytest

from interdomain.titan.plan.run_plan import make_plan
from interdomain.titan.settings.job_config import read_job_config

from .conftest import Runs, parallel

pytestmark = pytest.mark.e2e

LONG = {"training__seq_len": 128}
CASES = {
    **{axis: parallel(**{axis: 2}) for axis in ("shards", "replicas", "context", "tensor", "pipeline")},
    "context, long": parallel(context=2) | LONG,
    "context, softmax, long": parallel(context=2) | LONG | {"mixer__condition": "softmax"},
    "context, hybrid": parallel(context=2) | {"mixer__softmax_every": 2, "mixer__window": 16},
    "context, full": parallel(context=2) | {"activation_checkpoint__mode": "full"},
    "tensor, selective": parallel(tensor=2) | {"activation_checkpoint__mode": "selective"},
    "tensor, bf16": parallel(tensor=2) | {"training__precision": "bf16"},
}
FEW = 200  # bytes: of the sums of a few numbers, such as the gradients' norm


@pytest.fixture(scope="module")
def runs(tmp_path_factory, corpus, launch):
    runs = Runs(2, tmp_path_factory.mktemp("traffic"), corpus, launch)
    for name, settings in CASES.items():
        runs.add(name, **settings, training__steps=1, probes=["traffic"])
    return runs.start()


def received(runs, name, rank):
    (kinds,) = runs.seen(name, rank)["traffic"][1].values()  # two ranks have one group
    return sum(received for _, received in kinds.values())


@pytest.mark.parametrize("name", CASES)
def test_a_step_receives_what_the_dry_run_says(runs, name):
    (job,) = (job for job in runs.jobs if job["name"] == name)
    expected = sum(make_plan(read_job_config(job["args"]), 2).traffic.values())
    assert 0 <= max(received(runs, name, rank) for rank in (0, 1)) - expected < FEW


def test_context_parallelism_receives_the_same_whatever_the_length(runs):
    assert received(runs, "context", 0) == received(runs, "context, long", 0)
    assert received(runs, "context, softmax, long", 0) > received(runs, "shards", 0)
