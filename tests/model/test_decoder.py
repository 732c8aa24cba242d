"""Steps as a CUDA graph replays them: they read no number of the host's, write in place, and compute as the model."""

import pytest
import torch

from interdomain.model import ModelState
from interdomain.model.generation import Decoder, _restored, prefill

from ..common import NothingReadBack
from .common import assert_exact, random_tokens, variant

VARIANTS = [("interdomain", "all"), ("s4d", "plain"), ("softmax", "kv2")]
VARIANTS += [("softmax", "window"), ("interdomain", "hybrid"), ("interdomain", "hybrid, window")]
STEPS = 5


def read(model, lengths=(7, 7)):
    """A state after two prompts of these lengths."""
    prompts = [random_tokens(model.config, 1, n, seed=n) for n in lengths]
    return ModelState.stack(
        [prefill(model, prompt.to(model.output.weight.device), chunk=4)[1] for prompt in prompts]
    )


def places(state):
    return [x.data_ptr() for layer in state.layers for x in layer.tensors().values()]


def assert_equal(state, other):
    assert (state.length, state.position.tolist()) == (other.length, other.position.tolist())
    for layer, wanted in zip(state.layers, other.layers, strict=True):
        for name, x in layer.tensors().items():
            y = wanted.tensors()[name]
            if layer.capacity is not None:  # slots after a row's last token mean nothing
                used = torch.arange(state.length, device=x.device) < state.position[:, None]
                x, y = (z[:, :, : state.length] * used[:, None, :, None] for z in (x, y))
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize(("condition", "option"), VARIANTS)
@pytest.mark.parametrize("lengths", [(7, 7), (7, 4)])
def test_a_step_that_knows_its_place_by_a_tensor(condition, option, lengths):
    """The host's number of tokens stands still, as in a replay."""
    model = variant(condition, option)
    state, steps = read(model, lengths), random_tokens(model.config, 2, STEPS, seed=2).unbind(1)
    after, length = state.clone(), state.length
    decoder = Decoder(model, after)
    wanted = [decoder.step(tokens) for tokens in steps]
    if state.capacity is not None:
        state.reserve(length + STEPS)
    state.captured = True
    before, addresses = state.clone(), places(state)
    with _restored(state):
        for tokens in steps[:3]:
            model(tokens[:, None], state)
    assert_equal(state, before)  # what is run before a capture leaves nothing
    for tokens, logits in zip(steps, wanted, strict=True):
        with NothingReadBack():
            got = model(tokens[:, None], state)[:, -1]
        assert_exact(got, logits)
    state.length += STEPS
    assert places(state) == addresses
    assert_equal(state, after)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("condition", "option"), VARIANTS)
def test_replayed_steps_are_the_model_s(condition, option):
    model = variant(condition, option).cuda()
    state, steps = read(model), random_tokens(model.config, 2, STEPS, seed=2).cuda().unbind(1)
    after = state.clone()
    decoder = Decoder(model, after, graph=False)
    wanted = [decoder.step(tokens) for tokens in steps]
    with torch.autocast("cuda"), pytest.raises(ValueError, match="outside of it"):
        Decoder(model, state.clone(), room=1)
    decoder = Decoder(model, state, room=STEPS)
    for tokens, logits in zip(steps, wanted, strict=True):
        assert_exact(decoder.step(tokens), logits)
    assert_equal(state, after)
    if (condition, option) == ("softmax", "kv2"):
        with pytest.raises(ValueError, match="the cache is full: 12 tokens"):
            decoder.step(tokens)
