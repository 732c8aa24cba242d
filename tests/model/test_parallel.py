"""Context and tensor parallelism: ranks together compute the model on one rank.

Four forked ranks compute losses and gradients once for all tests.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from interdomain.model import loss
from interdomain.model.loss import IGNORE_INDEX
from interdomain.model.parallel import GroupRank, local_slice, split_dimension

from ..ranks import compute
from ..scan.common import assert_within
from .common import (
    OPTIONS,
    lively,
    positions_of,
    random_tokens,
    small_config,
    variant,
)

T = 64
# A rank has 16, 32 or 64 tokens. Documents begin two tokens before a rank's first token, one before
# it, at it, and inside a rank's tokens; one document covers all ranks.
PACKED = ((14, 17, 17, 16), (64,), (5, 10, 1, 1, 47))
HEADS = {"state_heads": 4}
CASES = {  # by name: the condition, its settings, and the lengths of packed documents
    "interdomain": ("interdomain", {}, None),
    "interdomain, packed": ("interdomain", {}, PACKED),
    "single-query, kv2, gate, packed": ("single-query", OPTIONS["kv2"] | OPTIONS["gate"], PACKED),
    "single-query-norope": ("single-query-norope", {}, None),
    "dual-linear-norope, packed": ("dual-linear-norope", {}, PACKED),
    "s4d, gate": ("s4d", OPTIONS["gate"], None),
    "s4d-rope, packed": ("s4d-rope", {}, PACKED),
    "kv2, rff, normalize, gate, packed": ("interdomain", OPTIONS["all"], PACKED),
    "kv2, favor, normalize, packed": ("interdomain", OPTIONS["favor"], PACKED),
    "softmax, kv2, packed": ("softmax", OPTIONS["kv2"], PACKED),
    "window": ("softmax", OPTIONS["window"], None),
    "window of more than a rank's tokens, packed": ("softmax", {"window": 20}, PACKED),
    "gla, conv, packed": ("gla", HEADS | OPTIONS["conv"], PACKED),
    "mamba2": ("mamba2", HEADS, None),
    "mamba2, packed": ("mamba2", HEADS, PACKED),
    "deltanet, no conv, packed": ("deltanet", HEADS | OPTIONS["no conv"], PACKED),
    "no conv, packed": ("interdomain", OPTIONS["no conv"], PACKED),
    "gated-deltanet, hybrid, packed": ("gated-deltanet", HEADS | OPTIONS["hybrid"], PACKED),
    "hybrid, window, packed": ("interdomain", OPTIONS["hybrid, window"], PACKED),
}
TOPOLOGIES = ((4, 1), (1, 4), (2, 2))  # context-parallel ranks, tensor-parallel ranks
RANKS = 4
# Compiled blocks under context parallelism. Those of tests/titan have other mixers and heads.
COMPILED = "mamba2, packed"


def topologies_of(case):
    """Returns the topologies on which a case runs: both axes, and one of them.

    Packed documents concern context parallelism. Two key heads cannot be on four ranks.
    """
    _, _, lengths = CASES[case]
    if lengths is None:
        return [(1, 4), (2, 2)]
    return [(4, 1), (2, 2)]


def rank_in(mesh):
    if mesh is None or mesh.size() == 1:
        return None
    return GroupRank(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size())


def distribute(model, mesh):
    """Makes DTensors of the parameters that tensor parallelism splits, as a run does."""
    for name, module in model.named_modules():
        dim = split_dimension(model, name)
        if dim is not None:
            weight = module.weight.detach()
            weight = distribute_tensor(weight, mesh, [Shard(dim)], src_data_rank=None)
            module.weight = nn.Parameter(weight)
            module._buffers["local_weight"] = module.weight.to_local()


def loss_and_gradients(case, cp_mesh=None, tp_mesh=None, compiled=False):
    """Returns the loss and the gradients of all parameters, by name, summed over the ranks."""
    condition, options, lengths = CASES[case]
    model = lively(small_config(condition, vocab_size=64, **options))
    cp_rank = rank_in(cp_mesh)
    tp_rank = rank_in(tp_mesh)
    if tp_rank:
        distribute(model, tp_mesh)
    model.set_ranks(cp_rank=cp_rank, tp_rank=tp_rank)
    if compiled:
        model.output.compile_loss("aot_eager")
        for layer in model.layers.values():
            layer.compile(backend="aot_eager", fullgraph=True)

    # This rank's tokens, labels and positions.
    tokens = random_tokens(model.config, 3, T + 1)
    labels = tokens[:, 1:].clone()
    labels[:, ::9] = IGNORE_INDEX
    labels = local_slice(labels, cp_rank, dim=1)
    tokens = local_slice(tokens[:, :-1], cp_rank, dim=1)
    positions = None
    if lengths:
        positions = local_slice(positions_of(lengths), cp_rank, dim=1)
    value = model(tokens, positions=positions, labels=labels)
    value.backward()

    found = {"loss": value.detach()}
    for name, p in model.named_parameters():
        found[name] = p.grad
    for name, x in found.items():
        split = hasattr(x, "full_tensor")
        if split:
            x = x.full_tensor()
        if cp_rank:
            dist.all_reduce(x, group=cp_mesh.get_group())
        if tp_rank and not split:
            dist.all_reduce(x, group=tp_mesh.get_group())
        found[name] = x
    return found


def event_start(event):
    return event.time_range.start


def products_beside_exchanges(mesh):
    """Returns the kinds of matrix products between the start of each exchange and the wait for it.

    They are those of one layer, forward and backward, as the profiler sees them.
    """
    model = lively(small_config("interdomain", n_layers=1, vocab_size=64))
    model.set_ranks(cp_rank=rank_in(mesh))
    tokens = random_tokens(model.config, 2, T)
    with torch.profiler.profile() as profile:
        model(tokens, labels=tokens).backward()
    exchanges = []
    waiting = []  # exchanges that have started
    for event in sorted(profile.events(), key=event_start):
        if event.name == "_c10d_functional::all_to_all_single":
            waiting.append(set())
            exchanges.append(waiting[-1])
        elif event.name == "_c10d_functional::wait_tensor":
            waiting.pop(0)
        elif event.name in ("aten::mm", "aten::bmm"):
            for products in waiting:
                products.add(event.name)
    return exchanges


def several_pieces(vocab_size):
    return 50


def run_rank(rank, folder):
    assert dist.group.WORLD._get_backend(torch.device("cpu")).options._threads == 1
    loss.piece_tokens = several_pieces
    meshes = {}
    for sizes in TOPOLOGIES:
        meshes[sizes] = init_device_mesh("cpu", sizes, mesh_dim_names=("cp", "tp"))
    for case in CASES:
        for sizes in topologies_of(case):
            mesh = meshes[sizes]
            found = loss_and_gradients(case, mesh["cp"], mesh["tp"])
            if rank == 0:
                torch.save(found, folder / f"{case} on {sizes}.pt")
    cp_mesh = meshes[2, 2]["cp"]
    if rank % 2 == 0:  # the first context-parallel group
        found = loss_and_gradients(COMPILED, cp_mesh=cp_mesh, compiled=True)
        torch.save(found, folder / f"{COMPILED} on {rank}, compiled.pt")
    torch.save(products_beside_exchanges(cp_mesh), folder / f"products {rank}.pt")


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    compute(run_rank, RANKS, folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_one_process(case, computed):
    expected = loss_and_gradients(case)
    files = list(computed.glob(f"{case} on *.pt"))
    assert len(files) == (4 if case == COMPILED else 2)
    for path in files:
        assert_within(torch.load(path), expected, 1e-10)


def test_exchanges_run_beside_products(computed):
    """Products run between the start of an exchange and the wait for it, forward and backward.

    The exchanges are those of the convolution's tail, the state (two messages) and their gradients.
    On a CPU the first message of the state is waited for at once.
    """
    for rank in range(RANKS):
        exchanges = torch.load(computed / f"products {rank}.pt")
        tail, _, state, _, state_gradient, tail_gradient = exchanges
        assert tail == tail_gradient == {"aten::mm"}
        assert state == {"aten::mm", "aten::bmm"}
        assert state_gradient == {"aten::bmm"}


@pytest.mark.parametrize("axis", ["cp_rank", "tp_rank"])
def test_a_state_on_several_ranks_is_refused(axis):
    model = variant("interdomain")
    state = model.init_state(1)
    model.set_ranks(**{axis: GroupRank("", 0, 2)})
    with pytest.raises(NotImplementedError, match="one of 2 parts"):
        model(random_tokens(model.config, 1, 4), state)
