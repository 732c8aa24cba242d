"""Context and tensor parallelism, and stages: a model whose parts are on several ranks is the model on one, gradients too."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from interdomain.model import loss, meta_model
from interdomain.model.loss import IGNORE_INDEX
from interdomain.model.parallel import GroupRank, local_slice, split_dimension
from interdomain.patches import one_gloo_thread

from ..ranks import forks
from .common import (
    OPTIONS,
    assert_same_tensors,
    lively,
    positions_of,
    random_tokens,
    small_config,
    variant,
)

T = 64
# Documents begin two tokens before a shard, one before, with one, and in the midst of the first; one goes through all shards,
# and of two tokens at an edge each is a document.
PACKED = ((14, 17, 17, 16), (64,), (5, 10, 1, 1, 47))
HEADS = dict(state_heads=4)
CASES = {
    "interdomain": ("interdomain", {}, None),
    "interdomain, packed": ("interdomain", {}, PACKED),
    "single-query, packed": ("single-query", {}, PACKED),
    "single-query-norope": ("single-query-norope", {}, None),
    "dual-linear-norope, packed": ("dual-linear-norope", {}, PACKED),
    "s4d, gate": ("s4d", OPTIONS["gate"], None),
    "s4d-rope, packed": ("s4d-rope", {}, PACKED),
    "kv2, rff, normalize, gate, packed": ("interdomain", OPTIONS["all"], PACKED),
    "favor, normalize": ("interdomain", OPTIONS["favor"], None),
    "kv2, gate": ("interdomain", OPTIONS["kv2"] | OPTIONS["gate"] | OPTIONS["hermitian"], None),
    "softmax, kv2, packed": ("softmax", OPTIONS["kv2"], PACKED),
    "window": ("softmax", OPTIONS["window"], None),
    "window of more than a shard, packed": ("softmax", dict(window=20), PACKED),
    "gla, conv, packed": ("gla", HEADS | OPTIONS["conv"], PACKED),
    "mamba2": ("mamba2", HEADS, None),
    "mamba2, packed": ("mamba2", HEADS, PACKED),
    "deltanet, no conv, packed": ("deltanet", HEADS | OPTIONS["no conv"], PACKED),
    "no conv, packed": ("interdomain", OPTIONS["no conv"], PACKED),
    "hybrid": ("interdomain", OPTIONS["hybrid"], None),
    "gated-deltanet, hybrid, packed": ("gated-deltanet", HEADS | OPTIONS["hybrid"], PACKED),
    "hybrid, window, packed": ("interdomain", OPTIONS["hybrid, window"], PACKED),
}
TOPOLOGIES = ((4, 1), (1, 4), (2, 2))  # ranks of context parallelism, of tensor parallelism
RANKS = 4
STAGES = (("tok_embeddings", "layers.0"), (), ("layers.1", "norm"), ("output",))
COMPILED, COMPILED_SHARDS = "kv2, gate", "mamba2, packed"


def runs(case, topology):
    """All on a grid of both. Documents say nothing of heads, and without any, two shards are as good as four."""
    packed, heads = CASES[case][2] is not None, CASES[case][1].get("n_kv_heads", 4)
    return heads % topology[1] == 0 and (topology == (2, 2) or packed == (topology == (4, 1)))


def stages_of(model):
    """The model as a pipeline has it, with the same parameters."""
    stages = []
    for names in STAGES:
        stage = meta_model(model.config)
        for name in ("tok_embeddings", "norm", "output"):
            setattr(stage, name, getattr(model, name) if name in names else None)
        stage.layers = nn.ModuleDict(
            {k: layer for k, layer in model.layers.items() if f"layers.{k}" in names}
        )
        stages.append(stage)
    return stages


def part_of(mesh):
    return (
        GroupRank(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size())
        if mesh and mesh.size() > 1
        else None
    )


def distribute(model, mesh):
    """Put DTensors in place of the parameters that have parts, as a run does; modules read them as local tensors."""
    from torch.distributed.tensor import Shard, distribute_tensor

    for name, module in model.named_modules():
        dim = split_dimension(model, name)
        if dim is not None:
            whole = module.weight.detach()
            module.weight = nn.Parameter(
                distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None)
            )
            module._buffers["local_weight"] = module.weight.to_local()


def loss_and_gradients(case, meshes=(None, None), *, staged=False, compiled=""):
    """The loss and the gradients of all parameters, by name, of this rank's part of the tokens and of the heads."""
    condition, options, lengths = CASES[case]
    model = lively(small_config(condition, vocab_size=64, **options))
    tokens = random_tokens(model.config, 3, T + 1)
    tokens, labels = tokens[:, :-1], tokens[:, 1:].clone()
    labels[:, ::9] = IGNORE_INDEX
    shard, heads = map(part_of, meshes)
    if heads:
        distribute(model, meshes[1])
    stages = stages_of(model) if staged else [model]
    for stage in stages:
        stage.set_ranks(cp_rank=shard, tp_rank=heads)
    if compiled:
        model.output.compile_loss(compiled)
        for layer in model.layers.values():
            layer.compile(backend=compiled, fullgraph=True)
    positions = local_slice(positions_of(lengths), shard, dim=1) if lengths else None
    x = local_slice(tokens, shard, dim=1)
    for stage in stages:
        x = stage(x, positions=positions, labels=local_slice(labels, shard, dim=1))
    x.backward()
    return {"loss": x.detach()} | {name: p.grad for name, p in model.named_parameters()}


def summed(found, context, tensor):
    """Over the ranks; of the parameters that have parts the whole gradients."""
    for name, x in found.items():
        parted = hasattr(x, "full_tensor")
        found[name] = x = x.full_tensor() if parted else x
        for mesh in (context, None if parted else tensor):
            if mesh is not None and mesh.size() > 1:
                dist.all_reduce(x, group=mesh.get_group())
    return found


def hidden(mesh):
    """PyTorch's products that a layer computes between the start of each of its exchanges and the wait for it, forward and
    backward, as the profiler sees them."""
    model = lively(small_config("interdomain", vocab_size=64))
    del model.layers["1"]
    model.set_ranks(cp_rank=part_of(mesh))
    tokens = random_tokens(model.config, 2, T)
    with torch.profiler.profile() as profile:
        model(tokens, labels=tokens).backward()
    names = [
        event.name for event in sorted(profile.events(), key=lambda event: event.time_range.start)
    ]
    started = [i for i, name in enumerate(names) if name == "_c10d_functional::all_to_all_single"]
    waited = [i for i, name in enumerate(names) if name == "_c10d_functional::wait_tensor"]
    assert all(start < wait for start, wait in zip(started, waited, strict=True))
    return [{"aten::mm", "aten::bmm"} & {*names[i:j]} for i, j in zip(started, waited, strict=True)]


def collectives(mesh):
    """{collective: calls} of a forward and backward pass with the heads on several ranks, by CommDebugMode."""
    model = lively(small_config("interdomain", vocab_size=64))
    distribute(model, mesh)
    model.set_ranks(tp_rank=part_of(mesh))
    tokens = random_tokens(model.config, 2, T)
    with CommDebugMode() as counted:
        model(tokens, labels=tokens).backward()
    return {str(op): n for op, n in counted.get_comm_counts().items()}


def run_rank(rank, folder):
    torch.set_num_threads(1)
    one_gloo_thread()
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), RANKS), rank=rank, world_size=RANKS
    )
    assert dist.group.WORLD._get_backend(torch.device("cpu")).options._threads == 1
    meshes = {}
    for c, t in TOPOLOGIES:
        grid = init_device_mesh("cpu", (c, t), mesh_dim_names=("cp", "tp"))
        meshes[c, t] = grid["cp"], grid["tp"]
    cp, tp = meshes[2, 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "piece_tokens", lambda vocab_size: 50)  # several pieces
        for case, topology in itertools.product(CASES, TOPOLOGIES):
            if runs(case, topology):
                found = summed(
                    loss_and_gradients(case, meshes[topology], staged=topology == (2, 2)),
                    *meshes[topology],
                )
                if rank == 0:
                    torch.save(found, folder / f"{case} on {topology}.pt")
        if rank < 2:  # the first ranks of tensor parallelism
            found = summed(loss_and_gradients(COMPILED, (None, tp), compiled="aot_eager"), None, tp)
            torch.save(found, folder / f"{COMPILED} on {rank}, compiled.pt")
            torch._dynamo.reset()
            torch.save(collectives(tp), folder / f"collectives {rank}.pt")
        if rank % 2 == 0:  # two shards
            found = summed(
                loss_and_gradients(COMPILED_SHARDS, (cp, None), compiled="aot_eager"), cp, None
            )
            torch.save(found, folder / f"{COMPILED_SHARDS} on {rank}, compiled.pt")
        torch.save(hidden(cp), folder / f"hidden {rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    folder, context = tmp_path_factory.mktemp("shards"), forks()
    mp.start_processes(run_rank, (folder,), nprocs=RANKS, start_method=context.get_start_method())
    return folder


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_one_process(case, computed):
    expected = loss_and_gradients(case)
    files = [path for path in computed.iterdir() if path.name.startswith(f"{case} on ")]
    compiled = 2 if case in (COMPILED, COMPILED_SHARDS) else 0
    assert len(files) == sum(runs(case, topology) for topology in TOPOLOGIES) + compiled
    for path in files:
        found = torch.load(path)
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            assert (found[name] - x).norm() <= 1e-10 * x.norm(), f"{name}: {path.name}"


def test_exchanges_run_beside_products(computed):
    """The tail beside the first projection, the state beside the queries' and the scores within chunks, and backward likewise.
    Of the state's two messages the first waits on a CPU; on CUDA it has a stream of its own."""
    for rank in range(RANKS):
        tail, _, state, _, costate, tail_back = torch.load(computed / f"hidden {rank}.pt")
        assert (tail, state) == ({"aten::mm"}, {"aten::mm", "aten::bmm"})
        assert (costate, tail_back) == ({"aten::bmm"}, {"aten::mm"})


def test_collectives_are_seen(computed):
    """Each way: four of each of two layers, the embedding's and the head's; and the normalisers of the loss's three pieces."""
    for rank in range(2):
        counts = torch.load(computed / f"collectives {rank}.pt", weights_only=False)
        assert counts == {
            "c10d_functional.all_gather_into_tensor": 13,
            "c10d_functional.reduce_scatter_tensor": 10,
        }


def test_stages_are_the_model_to_the_bit():
    whole = loss_and_gradients("interdomain, packed")
    assert_same_tensors(loss_and_gradients("interdomain, packed", staged=True), whole)


@pytest.mark.parametrize("part", ["cp_rank", "tp_rank"])
def test_a_state_with_a_part_is_refused(part):
    model = variant("interdomain")
    state = model.init_state(1)
    model.set_ranks(**{part: GroupRank("", 0, 2)})
    with pytest.raises(NotImplementedError, match="one of 2 parts"):
        model(random_tokens(model.config, 1, 4), state)
