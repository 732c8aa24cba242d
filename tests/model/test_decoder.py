"""Decoder on a stand-in for torch.cuda: a step that is captured once and replayed gives what the model gives step by step."""

import pytest
import torch

from interdomain.model import ModelState
from interdomain.model.generation import Decoder, decode, prefill

from .. import cuda_stand_in
from ..cuda_stand_in import on_cuda
from .common import random_tokens, variant

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU; there is one")
VARIANTS = [("interdomain", "all"), ("s4d", "plain"), ("softmax", "kv2")]
VARIANTS += [("softmax", "window"), ("interdomain", "hybrid"), ("interdomain", "hybrid, window")]
STEPS = 5
CLOSE = dict(rtol=0, atol=1e-10)  # float64


@pytest.fixture
def cuda(monkeypatch):
    for name, value in cuda_stand_in.streams().items():
        monkeypatch.setattr(torch.cuda, name, value)
    with cuda_stand_in.OnTheCPU():
        yield


def read(model, lengths=(7, 7)):
    """A state after two prompts of these lengths."""
    prompts = [random_tokens(model.config, 1, n, seed=n) for n in lengths]
    return on_cuda(ModelState.stack([prefill(model, prompt, chunk=4)[1] for prompt in prompts]))


def assert_equal(state, other):
    for layer, wanted in zip(state.layers, other.layers, strict=True):
        used, kept = layer.aligned(state.length, state.length), wanted.aligned(other.length, other.length)
        for name, x in used.tensors().items():
            torch.testing.assert_close(x, kept.tensors()[name], rtol=0, atol=1e-12)
    assert (state.length, state.position.tolist()) == (other.length, other.position.tolist())


@pytest.mark.parametrize(("condition", "option"), VARIANTS)
@pytest.mark.parametrize("lengths", [(7, 7), (7, 4)])
def test_replayed_steps_are_the_model_s(condition, option, lengths, cuda, monkeypatch):
    model = variant(condition, option)
    state, steps = read(model, lengths), random_tokens(model.config, 2, STEPS, seed=2).unbind(1)
    after = state.clone()
    wanted = [decode(model, tokens, after) for tokens in steps]
    before = state.clone()
    decoder = Decoder(model, state, room=STEPS)
    assert_equal(state, before)  # warm-up and capture have left nothing
    places = [x.data_ptr() for layer in state.layers for x in layer.tensors().values()]
    with monkeypatch.context() as only_the_graph_runs:
        only_the_graph_runs.setattr(type(model), "forward", None)
        for tokens, logits in zip(steps, wanted, strict=True):
            torch.testing.assert_close(decoder.step(tokens), logits, **CLOSE)
        if (condition, option) == ("softmax", "kv2") or option == "hybrid":
            with pytest.raises(ValueError, match="the cache is full: 12 tokens"):
                decoder.step(tokens)
    assert [x.data_ptr() for layer in state.layers for x in layer.tensors().values()] == places
    assert_equal(state, after)
    torch.testing.assert_close(decode(model, tokens, state.clone()), decode(model, tokens, after), **CLOSE)


def test_no_capture_under_autocast(cuda, monkeypatch):
    """Autocast frees its copies of weights when it ends, and the graph would go on reading them."""
    model = variant("softmax")
    state = read(model)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device=None: True)
    with pytest.raises(ValueError, match="outside of it"):
        Decoder(model, state, room=1)
