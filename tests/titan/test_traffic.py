"""Bytes that context parallelism moves, beside those of FSDP2: per layer and direction one state, whatever the length."""

import pytest

from interdomain.titan.plan import make_plan
from interdomain.titan.settings import read_job_config

from .conftest import Runs, flags

pytestmark = pytest.mark.e2e


def test_context_parallelism_receives_states(tmp_path, corpus, launch):
    runs, shared = Runs(2, tmp_path, corpus, launch), {"parallelism__context_parallel_degree": 2}
    for name, settings in (("apart", {}), ("64", shared), ("128", shared | {"training__seq_len": 128})):
        batch = 8 if settings else 4
        runs.add(name, **settings, training__local_batch_size=batch, training__steps=1, probes=["traffic"])
    runs.start()
    config = make_plan(read_job_config(flags(corpus, tmp_path)), 1).config
    H, R, rows = config.n_heads, config.head_dim, config.mixer.conv_width - 1  # rows: of q and k
    state, inputs = 8 * H * config.mixer.n_basis * (R + R) + 4, 4 * rows * 2 * H * R
    for rank in range(2):
        ((apart,), (ours,), (longer,)) = (
            runs.seen(name, rank)["traffic"][1].values() for name in ("apart", "64", "128")
        )
        assert ours == longer
        calls, received = (a - b for a, b in zip(ours.pop("allgather"), apart.pop("allgather"), strict=True))
        assert (calls, received) == (config.n_layers * 2 * 2, config.n_layers * 2 * 8 * (state + inputs))
        assert ours == apart
