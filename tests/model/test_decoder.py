"""Decoder on a stand-in for torch.cuda: a step that is captured once and replayed gives what the model gives step by step."""

import pytest
import torch

from interdomain.model.generation import Decoder, decode, prefill

from .. import cuda_stand_in
from ..cuda_stand_in import on_cuda
from .common import random_tokens, variant

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU; there is one")
VARIANTS = [
    ("interdomain", "plain"),
    ("interdomain", "all"),
    ("s4d", "plain"),
    ("softmax", "plain"),
    ("softmax", "kv2"),
]
STEPS = 5


@pytest.fixture
def cuda(monkeypatch):
    for name, value in cuda_stand_in.streams().items():
        monkeypatch.setattr(torch.cuda, name, value)
    with cuda_stand_in.OnTheCPU():
        yield


def read(model, padding=None, length=7):
    """A state after a prompt of two rows."""
    tokens = random_tokens(model.config, 2, length)
    return on_cuda(prefill(model, tokens, chunk=4, padding=padding)[1])


def steps(model):
    return random_tokens(model.config, 2, STEPS, seed=2).unbind(1)


def expected(model, state):
    """Step by step from a copy of the state: (logits of every step, the state after them)."""
    state = state.clone()
    return [decode(model, tokens, state) for tokens in steps(model)], state


def assert_equal(state, other):
    for layer, wanted in zip(state.layers, other.layers, strict=True):
        for name, x in layer.tensors().items():
            y = wanted.tensors()[name]
            if name in "kv":
                x, y = x[:, :, : state.length], y[:, :, : other.length]
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
    assert (state.length, state.position.tolist()) == (other.length, other.position.tolist())


@pytest.mark.parametrize(("condition", "option"), VARIANTS)
@pytest.mark.parametrize("padding", [None, [0, 3]], ids=["", "padded"])
def test_replayed_steps_are_the_model_s(condition, option, padding, cuda, monkeypatch):
    model = variant(condition, option)
    state = read(model, padding and torch.tensor(padding))
    wanted, after = expected(model, state)
    before = state.clone()
    decoder = Decoder(model, state, room=STEPS)
    assert decoder.state is state
    assert_equal(state, before)  # warm-up and capture have left nothing
    places = [x.data_ptr() for layer in state.layers for x in layer.tensors().values()]
    monkeypatch.setattr(type(model), "forward", None)  # from now on only the graph runs
    for tokens, logits in zip(steps(model), wanted, strict=True):
        torch.testing.assert_close(decoder.step(tokens), logits, rtol=0, atol=1e-10)  # float64
    assert [x.data_ptr() for layer in state.layers for x in layer.tensors().values()] == places
    assert_equal(state, after)


@pytest.mark.parametrize("condition", ["interdomain", "softmax"])
def test_a_copy_of_its_state_goes_on_without_it(condition, cuda):
    model = variant(condition)
    state = read(model)
    _, after = expected(model, state)
    decoder = Decoder(model, state, room=STEPS + 1)
    for tokens in steps(model):
        decoder.step(tokens)
    copy = state.clone()
    tokens = steps(model)[0]
    wanted = decode(model, tokens, after)
    torch.testing.assert_close(decode(model, tokens, copy), wanted, rtol=0, atol=1e-10)
    torch.testing.assert_close(decoder.step(tokens), wanted, rtol=0, atol=1e-10)


def test_logits_are_overwritten_by_the_next_step(cuda):
    model = variant("interdomain")
    decoder = Decoder(model, read(model))
    first = decoder.step(steps(model)[0])
    kept = first.clone()
    assert decoder.step(steps(model)[1]).data_ptr() == first.data_ptr()
    assert not torch.equal(first, kept)


def test_a_full_cache_is_refused_and_nothing_is_written(cuda):
    model = variant("softmax")
    state = read(model)
    decoder = Decoder(model, state, room=1)
    decoder.step(steps(model)[0])
    full = state.clone()
    with pytest.raises(ValueError, match=r"the cache is full: 8 tokens.*more room"):
        decoder.step(steps(model)[1])
    assert_equal(state, full)


def test_the_first_token_of_all(cuda):
    model = variant("softmax")
    state = on_cuda(model.init_state(2))
    wanted, _ = expected(model, state)
    decoder = Decoder(model, state, room=STEPS)
    for tokens, logits in zip(steps(model), wanted, strict=True):
        torch.testing.assert_close(decoder.step(tokens), logits, rtol=0, atol=1e-10)


def test_without_cuda_the_same_without_a_graph():
    model = variant("softmax")
    state = prefill(model, random_tokens(model.config, 2, 7))[1]
    with pytest.raises(ValueError, match="needs a model on CUDA: this one is on cpu"):
        Decoder(model, state, graph=True)
    wanted, after = expected(model, state)
    decoder = Decoder(model, state)
    assert decoder.graph is None
    for tokens, logits in zip(steps(model), wanted, strict=True):
        torch.testing.assert_close(decoder.step(tokens), logits, rtol=0, atol=1e-12)
    assert_equal(state, after)


def test_the_stand_in_does_nothing_of_what_python_would_do_again(cuda):
    """Without the Decoder's cursor a captured step writes the same slot for ever: the stand-in must show that."""
    model = variant("softmax")
    state = read(model)
    state.reserve(STEPS)
    wanted, _ = expected(model, state)
    tokens, graph = torch.zeros(2, dtype=torch.int64), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = decode(model, tokens, state)
    assert logits.isnan().all()
    found = []
    for new in steps(model):
        tokens.copy_(new)
        graph.replay()
        found.append(logits.clone())
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=1e-10)
    assert (found[1] - wanted[1]).abs().max() > 1e-3
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            logits.sum().item()
