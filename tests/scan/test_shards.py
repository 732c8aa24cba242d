"""Context parallelism: shards of sequences on 4 ranks equal one rank. Real processes over gloo, forked once.

tests/model/test_parallel.py has other numbers of ranks, and sequences that are one document.
"""

import pytest
import torch
from torch import distributed

from ..ranks import compute
from ..traffic import counted
from .common import (
    Case,
    assert_agree,
    gradients,
    linear_or_query,
    op_inputs,
    part_of_time,
    results,
    run_scan,
)
from .test_documents import packed

# Shards of a chunk and a part of one. 11 rows of a state do not divide into 4.
SIZE = 4
SHARD = 70
CASE = Case(T=SIZE * SHARD, B=3, H=1, G=2, R=5, D=4, M=11, state=False)
# First tokens of documents: in a shard, at its first token and at its last; one document through all shards; one that
# begins at a shard and one that goes on across one.
DOCUMENTS = packed(CASE.T, ((0, 5, 70, 90, 209), (0,), (0, 140, 200)))


def on_a_rank(linear, rank):
    """Returns outputs and gradients of a shard, whose final state has a cotangent of the rank's own."""
    inputs, (d_out, d_state) = op_inputs(CASE, torch.float64, linear=linear)
    begin = rank * SHARD
    shard = slice(begin, begin + SHARD)
    documents = DOCUMENTS[:, shard]
    if rank > 0:
        # Document 0 goes on from the rank before.
        documents = documents - DOCUMENTS[:, begin - 1 : begin]
    leaves = {}
    for name, x in part_of_time(inputs, shard).items():
        leaves[name] = x.detach().requires_grad_()
    group = distributed.group.WORLD.group_name
    outputs = run_scan(**leaves, documents=documents, group=group)
    got = results(outputs, (d_out[:, shard], (rank + 1) * d_state), leaves)
    return {name: x.detach() for name, x in got.items()}


def run_rank(rank, folder):
    seen = []
    for linear in (False, True):
        with counted() as traffic:
            got = on_a_rank(linear, rank)
        seen.append((got, traffic))
    torch.save(seen, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    compute(run_rank, SIZE, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(SIZE)]


def one_rank(linear):
    """By the loop over time: the whole sequences, and for the final state of every shard those up to its end."""
    inputs, (d_out, d_state) = op_inputs(CASE, torch.float64, linear=linear)
    states = []
    for rank in range(SIZE):
        up_to = slice((rank + 1) * SHARD)
        part = part_of_time(inputs, up_to)
        out, state = run_scan(**part, documents=DOCUMENTS[:, up_to], backend="reference")
        states.append(state)
    cotangents = [(rank + 1) * d_state for rank in range(SIZE)]
    grads = gradients((out, *states), (d_out, *cotangents), inputs)
    return {"out": out, "state": torch.stack(states), **grads}


@linear_or_query
def test_shards_are_the_whole(linear, ranks):
    """Values, every shard's final state, every gradient; less than two states each way, whatever the length."""
    # A rank adds up these rows of a state, and receives them and 1 float64 per sequence from each other rank: one
    # exchange forward, one backward.
    rows = -(-CASE.H * CASE.M // SIZE)
    received = CASE.B * (2 * 16 * rows * (CASE.R + CASE.D) + 8)
    shards = []
    for seen in ranks:
        shard, traffic = seen[linear]
        assert traffic == {"alltoall": 2 * (SIZE - 1) * received}
        shards.append(shard)
    got = {}
    for name in shards[0]:
        of_ranks = torch.stack([shard[name] for shard in shards])
        if name == "state":
            got[name] = of_ranks
        elif name in ("out", "dq", "dk", "dv", "dz"):
            got[name] = torch.cat([*of_ranks], dim=1)
        else:
            got[name] = of_ranks.sum(0)
    assert_agree(got, one_rank(linear), "float64")
