"""What the ranks send each other of the dynamics, and the norm and clipping of gradients that are sharded or whole."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from interdomain.model import Transformer, build_config
from interdomain.titan.gradients import clip, norms, reduce_replicated
from interdomain.titan.parallelize import shard
from interdomain.titan.settings import read_job_config

from .conftest import flags

RANKS = 256


@pytest.fixture
def many():
    """A process group of 256 ranks, of which this one exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


class Sent(TorchDispatchMode):
    """Adds up the largest tensor of every collective: the gathered one, the one to scatter, the one to add up."""

    def __init__(self):
        super().__init__()
        self.bytes = []

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            self.bytes.append(max(x.numel() * x.element_size() for x in tensors))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize(("size", "condition"), [("1.3B", "interdomain"), ("125M", "s4d")])
def test_the_dynamics_are_sent_as_they_are(many, size, condition, replicas):
    """Per step, on 256 ranks: at most 1.1 of the gradients' bytes and of the parameters'. Both sizes have fewer heads than
    that: FSDP2 would pad them to 256."""
    with torch.device("meta"):
        model = Transformer(build_config(size, condition))
    job = read_job_config(flags("corpus", "folder"))
    names = ("fsdp",) if replicas == 1 else ("dp_replicate", "fsdp")
    shape = (RANKS,) if replicas == 1 else (replicas, RANKS // replicas)
    shard(model, init_device_mesh("cpu", shape, mesh_dim_names=names), job)
    for layer in model.layers.values():
        layer.attention.ssm.to_empty(device="cpu")
        for p in layer.attention.ssm.parameters():
            torch.nn.init.constant_(p, 0.1)
    dynamics = [p for layer in model.layers.values() for p in layer.attention.ssm.parameters()]
    with Sent() as sent:
        for _ in range(2):  # micro-batches
            sum(table.sum() for tables in model.dynamics() for table in tables).backward()
        reduce_replicated(model.parameters())
    real = sum(4 * p.numel() for p in dynamics)
    assert all(p.grad is not None and p.grad.shape == p.shape for p in dynamics)
    assert real <= sum(sent.bytes) <= 1.1 * real
    assert isinstance(model.layers["0"], FSDPModule)
    assert model.layers["0"].attention.wk.weight.to_local().shape[0] < model.config.dim


def test_norm_and_clipping_of_sharded_and_whole_gradients(alone):
    torch.manual_seed(0)
    sharded, whole = torch.nn.Linear(7, 5), torch.nn.Linear(3, 4)
    reference = [torch.nn.Parameter(p.detach().clone()) for p in (*sharded.parameters(), *whole.parameters())]
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    parameters = [*sharded.parameters(), *whole.parameters()]
    for p, plain in zip(parameters, reference, strict=True):
        plain.grad = torch.randn_like(plain)
        p.grad = plain.grad.clone()
        if isinstance(p, DTensor):
            p.grad = distribute_tensor(p.grad, p.device_mesh, p.placements)
    expected = torch.nn.utils.clip_grad_norm_(reference, 0.5)
    by_group = norms([[p.grad for p in sharded.parameters()], [p.grad for p in whole.parameters()], []])
    assert math.hypot(*by_group.tolist()) == pytest.approx(expected.item(), rel=1e-6)
    assert by_group[2] == 0
    assert clip(parameters, 0.5).item() == pytest.approx(expected.item(), rel=1e-6)
    for p, plain in zip(parameters, reference, strict=True):
        found = p.grad.full_tensor() if isinstance(p, DTensor) else p.grad
        torch.testing.assert_close(found, plain.grad, rtol=1e-6, atol=0)
    parameters[-1].grad.fill_(math.nan)
    assert clip(parameters, 0.5).isnan()
