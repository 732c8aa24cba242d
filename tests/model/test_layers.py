"""Linear and RMSNorm: PyTorch's functions, whichever way they are computed."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from interdomain.model import layers, mixer
from interdomain.model.generation import decode
from interdomain.model.layers import IN_CACHE, Linear, RMSNorm

from .common import lively, random_tokens, small_config, variant


class Operations(TorchDispatchMode):
    """The names of what is run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def drawn(module, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    for p in module.parameters():
        p.data = torch.randn(p.shape, generator=generator)
    return module.to(dtype)


@pytest.fixture(params=[True, False], ids=["amd", ""])
def batched(request, monkeypatch):
    """On a CPU of AMD's, and on others."""
    monkeypatch.setattr(layers, "AMD", request.param)
    return request.param


@pytest.mark.parametrize("N", [64, 6, 7])
@pytest.mark.parametrize("shape", [(1, 1, 768), (3, 768), (2, 2, 768), (6, 768), (768,), (0, 768)])
def test_linear_is_linear(shape, N, batched):
    layer = drawn(Linear(768, N))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), Operations() as ran:
        y = layer(x)
    exact = F.linear(x.double(), layer.weight.double())
    assert (y.shape, y.dtype, y.is_contiguous()) == (exact.shape, torch.float32, True)
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=2e-4)
    assert ("bmm" in ran.names) == (batched and 0 < x.numel() <= IN_CACHE and N == 64)
    apart = torch.stack([x, x], dim=-1)[..., 0]  # last stride 2
    with torch.no_grad():
        assert torch.equal(layer(apart), y)
    x.requires_grad_()
    layer(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, x.detach().reshape(-1, 768).sum(0).expand(N, -1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_pytorch_s_own(dtype):
    layer, norm = drawn(Linear(64, 8), dtype), drawn(RMSNorm(64, eps=1e-5), dtype)
    x = torch.randn(1, 64, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(layer(x), F.linear(x, layer.weight))
        assert torch.equal(norm(x), F.rms_norm(x, (64,), norm.weight, 1e-5))


@pytest.mark.parametrize("size", [0, 1e-4, 1, 1e4])
def test_rms_norm_is_rms_norm(size):
    norm = drawn(RMSNorm(64, eps=1e-5))
    x = size * torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y = norm(x)
    torch.testing.assert_close(y.double(), F.rms_norm(x.double(), (64,), norm.weight.double(), 1e-5), rtol=1e-5, atol=0)


def test_every_product_of_a_decode_step(monkeypatch):
    """The layers' four and the logits; none is left to the slow routine, and none takes it where gradients are recorded."""
    monkeypatch.setattr(layers, "AMD", True)
    model = lively(small_config("interdomain", vocab_size=64), torch.float32)
    state = model.init_state(1)
    tokens = torch.tensor([3])
    decode(model, tokens, state)
    with Operations() as ran:
        decode(model, tokens, state)
    assert not {"mm", "addmm"} & set(ran.names)
    assert "rms_norm" not in ran.names
    with Operations() as ran:
        model(tokens[None])
    assert ran.names.count("mm") == 2 * 7 + 1


@pytest.mark.parametrize("option", ["plain", "hermitian", "kv2"])
def test_a_step_whichever_way_w_lies(monkeypatch, batched, option):
    """As a CPU of AMD's reads it fastest, and as others do: the same logits as from the whole text."""
    monkeypatch.setattr(mixer, "AMD", batched)
    model = variant("interdomain", option)
    tokens = random_tokens(model.config, 2, 6)
    state = model.init_state(2)
    logits = torch.stack([decode(model, token, state) for token in tokens.mT], dim=1)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(tokens), rtol=0, atol=1e-10)
    for layer in state.layers:
        assert (layer.step.readout.is_contiguous(), layer.step.readout.mT.is_contiguous()) == (batched, not batched)
