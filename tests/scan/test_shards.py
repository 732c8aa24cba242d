"""Context parallelism: shards of sequences on 2 and on 4 ranks equal one rank. Real processes over gloo, forked once."""

import functools
import multiprocessing

import pytest
import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from interdomain import scan
from interdomain.scan import shards

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
    inputs = {n: (x[:, mine] if n in "qkvz" else x).detach().requires_grad_() for n, x in inputs.items()}
    documents = documents_of(name)
    if documents is not None:
        documents = documents[:, mine] - (documents[:, mine.start - 1, None] if rank else 0)
    outputs = call(**inputs, documents=documents)
    grads = gradients(outputs, (d_out[:, mine], (rank + 1) * d_state), inputs)
    return {"out": outputs[0].detach(), "state": outputs[1].detach(), **grads}


def checkpointed(fn, group, saved):
    """fn in a block of selective activation checkpointing, which keeps the outputs of the ops if `saved`."""

    def policy(ctx, op, *args, **kwargs):
        keep = saved and op.namespace == "interdomain"
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def run(documents, **inputs):
        def block(*tensors):
            return fn(**dict(zip(inputs, tensors, strict=True)), documents=documents, group=group)

        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(block, *inputs.values(), use_reentrant=False, context_fn=contexts)

    return run


def run_rank(rank, folder):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", store=distributed.FileStore(f"{folder}/store", 4), rank=rank, world_size=4)
    groups = {4: distributed.group.WORLD, 2: distributed.new_group([0, 1])}
    results = {}
    for size in (2, 4) if rank < 2 else (4,):
        group = groups[size].group_name
        for linear in (False, True):
            fn = function(linear)
            calls = {(name, "eager"): functools.partial(fn, group=group) for name in CASES}
            if size == 2:
                compiled = torch.compile(functools.partial(fn, group=group), fullgraph=True, backend="aot_eager")
                calls |= {("documents", how): checkpointed(fn, group, how == "saved") for how in ("saved", "repeated")}
                calls["documents", "compiled"] = compiled
            for (name, how), call in calls.items():
                with counted() as traffic:
                    results[name, how, linear, size] = on_a_rank(name, linear, rank, size, call), traffic
    torch.save(results, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def count(rank, folder):
    """Operations of one exchange by the last of N simulated ranks, and bytes received by the bytes of a state."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    results = {}
    for size in (2, 8, 64):
        distributed.init_process_group("fake", store=FakeStore(), rank=size - 1, world_size=size)
        B, H, M, P, T = 1, 4, 32, 64, 100
        state, log_decay = torch.zeros(B, H, M, P, 2), torch.zeros(H, M, 2)
        with counted() as traffic, Operations() as operations:
            sent = shards.send(
                state, log_decay, T, torch.zeros(B, T, dtype=torch.int32), distributed.group.WORLD.group_name
            )
            shards.receive(sent, state.shape)
        results[size] = operations.n, sum(traffic.values()) / (state.nbytes + 4 * B)
        distributed.destroy_process_group()
    torch.save(results, f"{folder}/counts.pt")


class Operations(TorchDispatchMode):
    """Counts operations."""

    n = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.n += 1
        return op(*args, **(kwargs or {}))


def start(function, folder, nprocs):
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__, "torch._dynamo"])  # imported once
    torch.multiprocessing.start_processes(function, (str(folder),), nprocs=nprocs, start_method="forkserver")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    start(run_rank, folder, 4)
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
    for how, exchanges in (("eager", 2), ("compiled", 2), ("saved", 2), ("repeated", 3)):
        if (name, how, linear, size) not in ranks[0]:
            continue
        results, traffic = zip(*(r[name, how, linear, size] for r in ranks[:size]), strict=True)
        assert [*traffic] == [{"alltoall": exchanges * (size - 1) * received}] * size
        got = {n: [x[n] for x in results] for n in results[0]}
        got = {n: torch.cat(x, dim=1) if n in TOKENS else sum(x) if n != "state" else x for n, x in got.items()}
        got["states"] = torch.stack(got.pop("state"))
        assert_agree(got, expected, "float64")


def test_an_exchange_costs_the_same_on_any_number_of_ranks(tmp_path):
    start(count, tmp_path, 1)
    operations, states = zip(*torch.load(tmp_path / "counts.pt").values(), strict=True)
    assert len({*operations}) == 1
    assert all(states[i] < states[i + 1] < 2.02 for i in range(2))  # a document's number comes from every rank


def test_refusals():
    inputs, _ = op_inputs(Case(T=4, R=4, D=3, M=4), torch.float32)
    with pytest.raises(ValueError, match="initial_state with a group"):
        scan.interdomain_scan(**inputs, group="ranks")
    del inputs["initial_state"]
    for backend in ("fft", "reference"):
        with pytest.raises(ValueError, match=f"{backend}.*'chunkwise' does"):
            scan.interdomain_scan(**inputs, group="ranks", backend=backend)
