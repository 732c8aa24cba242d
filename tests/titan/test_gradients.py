"""The norm and clipping of gradients that are sharded or complete on every rank."""

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

from interdomain.titan.parallelize import distribute
from interdomain.titan.step.gradients import clip, norms
from interdomain.titan.step.meshes import Meshes


def test_norm_and_clipping_of_sharded_and_whole_gradients(alone):
    torch.manual_seed(0)
    sharded, whole = torch.nn.Linear(7, 5), torch.nn.Linear(3, 4)
    reference = [torch.nn.Parameter(p.detach().clone()) for p in (*sharded.parameters(), *whole.parameters())]
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("pipeline", "shards", "tensor"))
    meshes = Meshes(mesh["shards"], mesh["tensor"], mesh["pipeline"], mesh["shards"], None, None)
    fully_shard(sharded, mesh=meshes.data)
    distribute(whole, meshes.parameters, Replicate())
    parameters = [*sharded.parameters(), *whole.parameters()]
    for p, plain in zip(parameters, reference, strict=True):
        plain.grad = torch.randn_like(plain)
        p.grad = distribute_tensor(plain.grad.clone(), p.device_mesh, p.placements)
    expected = torch.nn.utils.clip_grad_norm_(reference, 0.5)
    by_group = norms([[p.grad for p in sharded.parameters()], [p.grad for p in whole.parameters()], []], meshes)
    assert math.hypot(*by_group.tolist()) == pytest.approx(expected.item(), rel=1e-6)
    assert by_group[2] == 0
    assert clip(parameters, 0.5, meshes).item() == pytest.approx(expected.item(), rel=1e-6)
    for p, plain in zip(parameters, reference, strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), plain.grad, rtol=1e-6, atol=0)
    parameters[-1].grad.to_local().fill_(math.nan)
    assert clip(parameters, 0.5, meshes).isnan()
