"""Steps as a CUDA graph replays them: they read nothing on the host and write in place."""

import pytest
import torch

from interdomain.model import ModelState
from interdomain.model.generation import Decoder, _restored, prefill

from ..common import NothingReadBack
from .common import assert_exact, random_tokens, variant

VARIANTS = [
    ("interdomain", "all"),
    ("s4d", "plain"),
    ("softmax", "kv2"),
    ("softmax", "window"),
    ("interdomain", "hybrid"),
    ("interdomain", "hybrid, window"),
]
STEPS = 5


def state_after_prompts(model, lengths):
    states = []
    for length in lengths:
        tokens = random_tokens(model.config, 1, length, seed=length).to(model.output.weight.device)
        _, state = prefill(model, tokens, chunk=4)
        states.append(state)
    return ModelState.stack(states)


def addresses_of(state):
    return [x.data_ptr() for layer in state.layers for x in layer.tensors().values()]


def assert_equal_states(state, other):
    assert state.length == other.length
    assert state.position.tolist() == other.position.tolist()
    for layer, wanted in zip(state.layers, other.layers, strict=True):
        for name, x in layer.tensors().items():
            y = wanted.tensors()[name]
            if layer.capacity is not None:
                # Slots after a row's last token mean nothing.
                used = torch.arange(state.length, device=x.device) < state.position[:, None]
                x = x[:, :, : state.length] * used[:, None, :, None]
                y = y[:, :, : state.length] * used[:, None, :, None]
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("lengths", [(7, 7), (7, 4)])
@pytest.mark.parametrize(("condition", "option"), VARIANTS)
def test_a_captured_step_reads_its_position_from_a_tensor(condition, option, lengths):
    """The host's number of tokens does not change, as in a replay."""
    model = variant(condition, option)
    state = state_after_prompts(model, lengths)
    steps = random_tokens(model.config, 2, STEPS, seed=2).unbind(1)
    after = state.clone()
    decoder = Decoder(model, after)
    wanted = [decoder.step(tokens) for tokens in steps]
    if state.capacity is not None:
        state.reserve(state.length + STEPS)
    state.captured = True
    before = state.clone()
    addresses = addresses_of(state)
    # Warm-up steps before a capture leave the state as it was.
    with _restored(state):
        for tokens in steps[:3]:
            model(tokens[:, None], state)
    assert_equal_states(state, before)
    for tokens, logits in zip(steps, wanted, strict=True):
        with NothingReadBack():
            found = model(tokens[:, None], state)[:, -1]
        assert_exact(found, logits)
    state.length += STEPS
    assert addresses_of(state) == addresses
    assert_equal_states(state, after)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("condition", "option"), VARIANTS)
def test_replayed_steps_are_the_model_s(condition, option):
    model = variant(condition, option).cuda()
    state = state_after_prompts(model, (7, 7))
    steps = random_tokens(model.config, 2, STEPS, seed=2).cuda().unbind(1)
    after = state.clone()
    decoder = Decoder(model, after, graph=False)
    wanted = [decoder.step(tokens) for tokens in steps]
    with torch.autocast("cuda"), pytest.raises(ValueError, match="outside of it"):
        Decoder(model, state.clone(), room=1)
    decoder = Decoder(model, state, room=STEPS)
    for tokens, logits in zip(steps, wanted, strict=True):
        assert_exact(decoder.step(tokens), logits)
    assert_equal_states(state, after)
    if (condition, option) == ("softmax", "kv2"):
        with pytest.raises(ValueError, match="the cache is full: 12 tokens"):
            decoder.step(steps[0])
