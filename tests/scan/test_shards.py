"""Context parallelism: shards of sequences on 2 and on 4 ranks equal one rank. Real processes over gloo, forked once."""

import itertools

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

# First tokens of documents: in a shard (of 24 or 48 tokens), at its first token and at its last; one document through all
# shards; one that begins at a shard and one that goes on across one.
DOCUMENTS = packed(96, ((0, 5, 24, 30, 71), (0,), (0, 48, 70)))
CASES = {
    "ragged": Case(T=280, B=1, G=3, R=5, D=4, M=6, state=False),
    "strong": Case(T=48, B=3, G=2, R=4, D=3, M=4, decay="strong", state=False),
    "documents": Case(T=96, B=3, G=2, R=5, D=4, M=6, state=False),
}
TOKENS = {"out", "dq", "dk", "dv", "dz"}


def on_a_rank(name, linear, rank, size, group):
    """Returns outputs and gradients of a shard, whose final state has a cotangent of the rank's own."""
    inputs, (d_out, d_state) = op_inputs(CASES[name], torch.float64, linear=linear)
    length = CASES[name].T // size
    begin = rank * length
    shard = slice(begin, begin + length)
    leaves = {}
    for n, x in part_of_time(inputs, shard).items():
        leaves[n] = x.detach().requires_grad_()
    documents = None
    if name == "documents":
        documents = DOCUMENTS[:, shard]
        if rank > 0:
            # Document 0 goes on from the rank before.
            documents = documents - DOCUMENTS[:, begin - 1 : begin]
    outputs = run_scan(**leaves, documents=documents, group=group)
    got = results(outputs, (d_out[:, shard], (rank + 1) * d_state), leaves)
    return {n: x.detach() for n, x in got.items()}


def run_rank(rank, folder):
    groups = {4: distributed.group.WORLD, 2: distributed.new_group([0, 1])}
    seen = {}
    for size, linear, name in itertools.product(groups, (False, True), CASES):
        if rank < size:
            with counted() as traffic:
                got = on_a_rank(name, linear, rank, size, groups[size].group_name)
            seen[name, linear, size] = got, traffic
    torch.save(seen, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    compute(run_rank, 4, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


def one_rank(name, linear, size):
    """By the loop over time: the whole sequences, and for the final state of every shard those up to its end."""
    inputs, (d_out, d_state) = op_inputs(CASES[name], torch.float64, linear=linear)
    states = []
    for rank in range(size):
        up_to = slice((rank + 1) * CASES[name].T // size)
        documents = DOCUMENTS[:, up_to] if name == "documents" else None
        part = part_of_time(inputs, up_to)
        out, state = run_scan(**part, documents=documents, backend="reference")
        states.append(state)
    cotangents = [(rank + 1) * d_state for rank in range(size)]
    grads = gradients((out, *states), (d_out, *cotangents), inputs)
    return {"out": out, "states": torch.stack(states), **grads}


@linear_or_query
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_shards_are_the_whole(name, size, linear, ranks):
    """Values, every shard's final state, every gradient; less than two states each way, whatever the length."""
    shards = [seen[name, linear, size][0] for seen in ranks[:size]]
    got = {"states": torch.stack([shard.pop("state") for shard in shards])}
    for n in shards[0]:
        of_ranks = torch.stack([shard[n] for shard in shards])
        if n in TOKENS:
            got[n] = torch.cat([*of_ranks], dim=1)
        else:
            got[n] = of_ranks.sum(0)
    assert_agree(got, one_rank(name, linear, size), "float64")

    # A rank adds up these rows of a state, and receives them and 1 float64 per sequence from each other rank: one
    # exchange forward, one backward.
    case = CASES[name]
    rows = -(-case.H * case.M // size)
    received = case.B * (2 * 16 * rows * (case.R + case.D) + 8)
    for seen in ranks[:size]:
        assert seen[name, linear, size][1] == {"alltoall": 2 * (size - 1) * received}
