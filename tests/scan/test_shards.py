"""Context parallelism: shards of sequences on 2 and on 4 ranks equal one rank. Real processes over gloo, forked once."""

import functools
import itertools

import pytest
import torch
from torch import distributed

from interdomain import scan

from ..ranks import forks
from ..traffic import counted
from .common import Case, assert_agree, function, gradients, linear_or_query, op_inputs
from .test_documents import packed

# First tokens of documents: in a shard (of 24 or 48 tokens), at its first token and at its last; one document through all
# shards; one that begins at a shard and one that goes on across one.
STARTS = ((0, 5, 24, 30, 71), (0,), (0, 48, 70))
CASES = {
    "ragged": Case(T=280, B=1, G=3, R=5, D=4, M=6, state=False),
    "strong": Case(T=48, B=3, G=2, R=4, D=3, M=4, decay="strong", state=False),
    "documents": Case(T=96, B=3, G=2, R=5, D=4, M=6, state=False),
}
TOKENS = {"out", "dq", "dk", "dv", "dz"}


def documents_of(name):
    return packed(CASES[name].T, STARTS) if name == "documents" else None


def on_a_rank(name, linear, rank, size, call):
    """Outputs and gradients of a shard: the whole sequence's in its place, or its share. Every rank uses its final state."""
    inputs, (d_out, d_state) = op_inputs(CASES[name], torch.float64, linear=linear)
    length = CASES[name].T // size
    mine = slice(rank * length, (rank + 1) * length)
    inputs = {
        n: (x[:, mine] if n in "qkvz" else x).detach().requires_grad_() for n, x in inputs.items()
    }
    documents = documents_of(name)
    if documents is not None:
        documents = documents[:, mine] - (documents[:, mine.start - 1, None] if rank else 0)
    outputs = call(**inputs, documents=documents)
    grads = gradients(outputs, (d_out[:, mine], (rank + 1) * d_state), inputs)
    return {"out": outputs[0].detach(), "state": outputs[1].detach(), **grads}


def run_rank(rank, folder):
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(f"{folder}/store", 4), rank=rank, world_size=4
    )
    groups = {4: distributed.group.WORLD, 2: distributed.new_group([0, 1])}
    results = {}
    sizes = (2, 4) if rank < 2 else (4,)
    for size, linear, name in itertools.product(sizes, (False, True), CASES):
        call = functools.partial(function(linear), group=groups[size].group_name)
        with counted() as traffic:
            results[name, linear, size] = on_a_rank(name, linear, rank, size, call), traffic
    torch.save(results, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    method = forks().get_start_method()
    torch.multiprocessing.start_processes(run_rank, (str(folder),), nprocs=4, start_method=method)
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


def one_rank(name, linear, size):
    """By the loop over time: the whole sequences, and for the final state of every other shard those up to its end."""
    inputs, (d_out, d_state) = op_inputs(CASES[name], torch.float64, linear=linear)
    documents, states = documents_of(name), []
    for rank in range(size):
        upto = slice((rank + 1) * CASES[name].T // size)
        part = {n: x[:, upto] if n in "qkvz" else x for n, x in inputs.items()}
        numbers = None if documents is None else documents[:, upto]
        out, state = function(linear)(**part, documents=numbers, backend="reference")
        states.append((rank + 1) * state)
    grads = gradients((out, sum(states)), (d_out, d_state), inputs)
    return {"out": out, "states": torch.stack([x / (r + 1) for r, x in enumerate(states)]), **grads}


@linear_or_query
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_shards_are_the_whole(name, size, linear, ranks):
    """Values, every shard's final state, every gradient; less than two states each way, whatever the length."""
    case = CASES[name]
    rows = -(-case.H * case.M // size)  # of a state, that a rank adds up
    received = case.B * (2 * 16 * rows * (case.R + case.D) + 8)  # of each other rank; float64
    expected = one_rank(name, linear, size)
    results, traffic = zip(*(seen[name, linear, size] for seen in ranks[:size]), strict=True)
    assert [*traffic] == [
        {"alltoall": 2 * (size - 1) * received}
    ] * size  # one exchange forward, one backward
    got = {"states": torch.stack([one["state"] for one in results])}
    for n in results[0].keys() - {"state"}:
        of_ranks = [one[n] for one in results]
        got[n] = torch.cat(of_ranks, dim=1) if n in TOKENS else sum(of_ranks)
    assert_agree(got, expected, "float64")


def test_refusals():
    inputs, _ = op_inputs(Case(T=4, R=4, D=3, M=4), torch.float32)
    with pytest.raises(ValueError, match="initial_state with a group"):
        scan.interdomain_scan(**inputs, group="ranks")
    del inputs["initial_state"]
    for backend in ("fft", "reference"):
        with pytest.raises(ValueError, match=f"{backend}.*'chunkwise' does"):
            scan.interdomain_scan(**inputs, group="ranks", backend=backend)
