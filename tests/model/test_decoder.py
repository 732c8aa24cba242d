"""Steps as a CUDA graph replays them: they read nothing on the host and write in place."""

import pytest
import torch

from interdomain.model import ModelState
from interdomain.model.generation import Decoder, _restored, prefill

from ..common import NothingReadBack
from .common import assert_exact, prompt_of, random_tokens, tensors_of, variant

VARIANTS = [
    ("interdomain", "all"),
    ("s4d", "plain"),
    ("softmax", "kv2"),
    ("softmax", "window"),
    ("interdomain", "hybrid"),
    ("interdomain", "hybrid, window"),
]
STEPS = 5


def prompts_and_steps(model, lengths):
    """Returns the state after two prompts, more tokens, and the logits after each of them."""
    device = model.output.weight.device
    states = []
    for length in lengths:
        _, state = prefill(model, prompt_of(model, length).to(device), chunk=4)
        states.append(state)
    state = ModelState.stack(states)
    decoder = Decoder(model, state.clone(), graph=False)
    steps = []
    for tokens in random_tokens(model.config, STEPS, 2).to(device):
        steps.append((tokens, decoder.step(tokens)))
    return state, steps


@torch.no_grad()
@pytest.mark.parametrize("lengths", [(7, 7), (7, 4)])
@pytest.mark.parametrize(("condition", "option"), VARIANTS)
def test_a_captured_step_reads_its_position_from_a_tensor(condition, option, lengths):
    """The host's number of tokens does not change, as in a replay."""
    model = variant(condition, option)
    state, steps = prompts_and_steps(model, lengths)
    if state.capacity is not None:
        state.reserve(state.length + STEPS)
    state.captured = True
    addresses = [x.data_ptr() for x in tensors_of(state)]
    # Warm-up steps before a capture leave the state as it was.
    with _restored(state):
        for tokens in random_tokens(model.config, 3, 2):
            model(tokens[:, None], state)
    for tokens, logits in steps:
        with NothingReadBack():
            found = model(tokens[:, None], state)[:, -1]
        assert_exact(found, logits)
    assert [x.data_ptr() for x in tensors_of(state)] == addresses
    assert state.position.tolist() == [length + STEPS for length in lengths]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("condition", "option"), VARIANTS)
def test_replayed_steps_are_the_model_s(condition, option):
    model = variant(condition, option).cuda()
    state, steps = prompts_and_steps(model, (7, 7))
    with torch.autocast("cuda"), pytest.raises(ValueError, match="outside of it"):
        Decoder(model, state.clone(), room=1)
    decoder = Decoder(model, state, room=STEPS)
    for tokens, logits in steps:
        assert_exact(decoder.step(tokens), logits)
    assert state.length == 7 + STEPS
    if (condition, option) == ("softmax", "kv2"):
        with pytest.raises(ValueError, match="the cache is full: 12 tokens"):
            decoder.step(tokens)
