"""Joined projections: the same numbers, no memory beyond the weights, and never those of before."""

import copy
import io

import pytest
import torch
from safetensors.torch import save

from interdomain.model import Transformer
from interdomain.model.generation import decode, prefill
from interdomain.model.joined import JoinedProjections, join_projections
from interdomain.model.pretrained import storage_dtype

from .common import lively, random_tokens, small_config, variant

GROUPED = [("interdomain", "kv2"), ("dual-linear", "plain"), ("softmax", "kv2")]


def joined(model):
    return [module for module in model.modules() if isinstance(module, JoinedProjections) and module.joined is not None]


def continuation(model, tokens):
    _, state = prefill(model, tokens[:, :-1])
    return decode(model, tokens[:, -1], state)


def storages(model):
    return sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}.values())


@pytest.mark.parametrize(("condition", "option"), GROUPED)
def test_the_same_model_in_the_same_memory(condition, option):
    model = variant(condition, option)
    tokens = random_tokens(model.config, 2, 9)
    wanted, names, nbytes = continuation(model, tokens), list(model.state_dict()), storages(model)
    values = {name: x.clone() for name, x in model.state_dict().items()}
    join_projections(model)
    assert len(joined(model)) == 4  # mixer and SwiGLU of two layers
    torch.testing.assert_close(continuation(model, tokens), wanted, rtol=0, atol=1e-12)
    assert list(model.state_dict()) == names
    assert all(torch.equal(x, values[name]) for name, x in model.state_dict().items())
    assert storages(model) == nbytes
    assert len(save(model.state_dict())) < nbytes + 2**14  # every tensor once


def test_one_product_where_joined(monkeypatch):
    model = variant("interdomain")
    _, state = prefill(model, random_tokens(model.config, 2, 5))
    calls = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w, b=None: calls.append(len(w)) or linear(x, w, b))
    decode(model, torch.tensor([1, 2]), state)
    apart = len(calls)
    join_projections(model)
    calls.clear()
    decode(model, torch.tensor([1, 2]), state)
    assert (apart, len(calls)) == (2 * 7 + 1, 2 * 4 + 1)


def changed(model):
    """Ways to give a joined model other weights, or other places for them."""
    other = lively(model.config, torch.float64, seed=5)

    def one_by_one():
        for name, p in other.named_parameters():
            holder, _, last = name.rpartition(".")
            setattr(model.get_submodule(holder), last, p)
        return model

    def data():
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.data = q.data
        return model

    def in_place():
        with torch.no_grad():
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                p.copy_(q)
        return model

    def trained_copy():
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for p, q in zip(twin.parameters(), other.parameters(), strict=True):
                p.copy_(q)
        return twin

    def assigned():
        model.load_state_dict(other.state_dict(), assign=True)
        return model

    def loaded():
        model.load_state_dict(other.state_dict())
        return model

    return other, (one_by_one, data, in_place, trained_copy, assigned, loaded)


@pytest.mark.parametrize("way", range(6))
@pytest.mark.parametrize("condition", ["interdomain", "softmax"])
def test_never_the_weights_of_before(condition, way):
    model = variant(condition)
    join_projections(model)
    tokens = random_tokens(model.config, 2, 9)
    before = continuation(model, tokens)
    other, ways = changed(model)
    wanted = continuation(other, tokens)
    assert (wanted - before).abs().max() > 0.1
    torch.testing.assert_close(continuation(ways[way](), tokens), wanted, rtol=0, atol=1e-12)


class Adapted(torch.nn.Module):
    """A layer inside another, as adapters put it there."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    @property
    def weight(self):
        return self.layer.weight

    def forward(self, x):
        return 2 * self.layer(x)


@pytest.mark.parametrize("first", ["joined", "adapted"])
def test_adapters_are_heard(first):
    model, plain = variant("interdomain"), variant("interdomain")
    tokens = random_tokens(model.config, 2, 9)
    if first == "joined":
        join_projections(model)
    for layer in model.layers.values():
        layer.attention.wk, layer.feed_forward.w3 = Adapted(layer.attention.wk), Adapted(layer.feed_forward.w3)
    join_projections(model)
    with torch.no_grad():
        for layer in plain.layers.values():
            layer.attention.wk.weight *= 2
            layer.feed_forward.w3.weight *= 2
    torch.testing.assert_close(continuation(model, tokens), continuation(plain, tokens), rtol=0, atol=1e-12)


def test_copies_and_moves():
    model = lively(small_config("interdomain"), torch.float32)
    join_projections(model)
    tokens = random_tokens(model.config, 1, 6)
    wanted = continuation(model, tokens)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert not joined(twin)  # join it again
        assert storages(twin) == storages(model)
        torch.testing.assert_close(continuation(twin, tokens), wanted)
    model.to(torch.bfloat16)
    for module in joined(model):
        assert module.joined.dtype == torch.bfloat16
        assert module._is_joined()
    assert len(joined(model)) == 4
    low = Transformer(model.config)
    low.load_state_dict(model.state_dict(), assign=True)
    torch.testing.assert_close(continuation(model, tokens), continuation(low, tokens), rtol=0.05, atol=0.05)
    assert storages(model) == sum(
        p.numel() * storage_dtype(name, torch.bfloat16).itemsize for name, p in model.named_parameters()
    )
