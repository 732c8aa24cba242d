"""Steps as a CUDA graph replays them: they read no number of the host's, write in place, and compute as the model."""

import pytest
import torch

from interdomain.model import ModelState
from interdomain.model.generation import Decoder, _restored, decode, prefill

from ..common import NothingReadBack
from .common import random_tokens, variant

VARIANTS = [("interdomain", "all"), ("s4d", "plain"), ("softmax", "kv2")]
VARIANTS += [("softmax", "window"), ("interdomain", "hybrid"), ("interdomain", "hybrid, window")]
STEPS = 5
CLOSE = dict(rtol=0, atol=1e-10)  # float64


def read(model, lengths=(7, 7)):
    """A state after two prompts of these lengths."""
    prompts = [random_tokens(model.config, 1, n, seed=n) for n in lengths]
    return ModelState.stack([prefill(model, prompt.to(model.output.weight.device), chunk=4)[1] for prompt in prompts])


def places(state):
    return [x.data_ptr() for layer in state.layers for x in layer.tensors().values()]


def assert_equal(state, other):
    for layer, wanted in zip(state.layers, other.layers, strict=True):
        used, kept = layer.aligned(state.length, state.length), wanted.aligned(other.length, other.length)
        for name, x in used.tensors().items():
            torch.testing.assert_close(x, kept.tensors()[name], rtol=0, atol=1e-12)
    assert (state.length, state.position.tolist()) == (other.length, other.position.tolist())


@torch.no_grad()
@pytest.mark.parametrize(("condition", "option"), VARIANTS)
@pytest.mark.parametrize("lengths", [(7, 7), (7, 4)])
def test_a_step_that_knows_its_place_by_a_tensor(condition, option, lengths):
    """The host's number of tokens stands still, as in a replay."""
    model = variant(condition, option)
    state, steps = read(model, lengths), random_tokens(model.config, 2, STEPS, seed=2).unbind(1)
    after, length = state.clone(), state.length
    wanted = [decode(model, tokens, after) for tokens in steps]
    if state.capacity is not None:
        state.reserve(length + STEPS)
    state.cursor = torch.full((1,), length)
    before, addresses = state.clone(), places(state)
    with _restored(state):
        for tokens in steps[:3]:
            model(tokens[:, None], state)
            state.cursor.fill_(state.length)
    state.length = length
    assert_equal(state, before)  # what is run before a capture leaves nothing
    for tokens, logits in zip(steps, wanted, strict=True):
        state.length = length
        with NothingReadBack():
            got = model(tokens[:, None], state)[:, -1]
        torch.testing.assert_close(got, logits, **CLOSE)
    state.length = length + STEPS
    assert places(state) == addresses
    assert_equal(state, after)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("condition", "option"), VARIANTS)
def test_replayed_steps_are_the_model_s(condition, option):
    model = variant(condition, option).cuda()
    state, steps = read(model), random_tokens(model.config, 2, STEPS, seed=2).cuda().unbind(1)
    after = state.clone()
    wanted = [decode(model, tokens, after).clone() for tokens in steps]
    with torch.autocast("cuda"), pytest.raises(ValueError, match="outside of it"):
        Decoder(model, state.clone(), room=1)
    decoder = Decoder(model, state, room=STEPS)
    for tokens, logits in zip(steps, wanted, strict=True):
        torch.testing.assert_close(decoder.step(tokens), logits, **CLOSE)
    assert_equal(state, after)
    if (condition, option) == ("softmax", "kv2"):
        with pytest.raises(ValueError, match="the cache is full: 12 tokens"):
            decoder.step(tokens)
