"""Context parallelism: a model whose sequences are in shards on several ranks is the model on one, gradients too."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from interdomain.model.shard import Shard

from .common import OPTIONS, lively, positions_of, random_tokens, small_config, variant

T = 64
# Documents begin two tokens before a shard, one before, with one, and in the midst of the first; one goes through all shards.
PACKED = ((14, 17, 17, 16), (64,), (5, 59))
CASES = {
    "interdomain": ("interdomain", {}, None),
    "interdomain, packed": ("interdomain", {}, PACKED),
    "s4d": ("s4d", {}, None),
    "s4d-rope, packed": ("s4d-rope", {}, PACKED),
    "single-query, packed": ("single-query", {}, PACKED),
    "dual-linear": ("dual-linear", {}, None),
    "rff, normalize": ("interdomain", OPTIONS["rff"] | OPTIONS["normalize"], None),
    "kv2, gate, packed": ("interdomain", OPTIONS["kv2"] | OPTIONS["gate"], PACKED),
    "softmax": ("softmax", {}, None),
    "softmax, kv2, packed": ("softmax", OPTIONS["kv2"], PACKED),
}
RANKS = 4  # one group of all of them, and two groups of two


def loss_and_gradients(case, shard=None):
    """The loss of this shard's tokens, and the gradients of all parameters, by name."""
    condition, options, lengths = CASES[case]
    model = lively(small_config(condition, **options))
    tokens = random_tokens(model.config, 3, T + 1)
    positions = positions_of(lengths) if lengths else None
    own = slice(None)
    if shard is not None:
        own = slice(shard.rank * T // shard.size, (shard.rank + 1) * T // shard.size)
        model.shard = shard
        for layer in model.layers.values():
            layer.attention.shard = shard
    positions = None if positions is None else positions[:, own]
    loss = model(tokens[:, :-1][:, own], positions=positions, labels=tokens[:, 1:][:, own])
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


def run_rank(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), RANKS), rank=rank, world_size=RANKS)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for group, index in ((dist.group.WORLD, rank), (pairs[rank // 2], rank % 2)):
        for i, case in enumerate(CASES):
            if group.size() == 2 and i % 2 != rank // 2:
                continue  # each pair computes half of the cases
            found = loss_and_gradients(case, Shard(group.group_name, index, group.size()))
            for x in found.values():
                dist.all_reduce(x, group=group)
            if index == 0:
                torch.save(found, folder / f"{case} {group.size()}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    mp.spawn(run_rank, (folder,), nprocs=RANKS)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_one_process(case, computed):
    expected = loss_and_gradients(case)
    for ranks in (2, 4):
        got = torch.load(computed / f"{case} {ranks}.pt")
        assert got.keys() == expected.keys()
        for name, x in expected.items():
            assert (got[name] - x).norm() <= 1e-10 * x.norm(), f"{name} on {ranks} ranks"


def test_a_state_with_a_shard_is_refused():
    model = variant("interdomain")
    state, model.shard = model.init_state(1), Shard("", 0, 2)
    with pytest.raises(NotImplementedError, match="one of 2 shards"):
        model(random_tokens(model.config, 1, 4), state)
