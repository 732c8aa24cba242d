"""Every kind of model: every parameter learns, nothing looks ahead, and a state continues."""

import pytest
import torch

from interdomain.model import ModelState

from .common import (
    IN_TIME,
    assert_exact,
    assert_near,
    each_variant,
    in_pieces,
    normal,
    positions_of,
    prompt_of,
    random_tokens,
    tensors_of,
    variant,
)


@each_variant
def test_every_parameter_learns(condition, option):
    model = variant(condition, option)
    # Every token of the vocabulary of 61, so that every row of the embedding learns.
    tokens = torch.arange(62).view(2, 31) % 61
    logits = model(tokens)
    assert logits.dtype == torch.float64
    logits.backward(normal(2, 31, 61, seed=2))
    for name, p in model.named_parameters():
        assert p.grad.isfinite().all(), name
        assert (p.grad != 0).all(), name


@pytest.mark.parametrize(("condition", "option"), IN_TIME)
class TestTime:
    @torch.no_grad()
    def test_pieces_continue_the_whole(self, condition, option):
        """A state is written in place, and is the same after one piece and after many."""
        model = variant(condition, option)
        tokens = random_tokens(model.config, 2, 90)
        whole = model(tokens)
        end = model.init_state(2, capacity=90)
        assert_exact(model(tokens, end), whole)
        last = model(tokens, model.init_state(2), last=3)
        assert_exact(last, whole[:, -3:])
        state = model.init_state(2, capacity=90)
        addresses = [x.data_ptr() for x in tensors_of(state)]
        lengths = [1, 2, 65, 1, 1, 1, 7, 1, 11]
        assert_exact(in_pieces(model, tokens, lengths, state), whole)
        assert [x.data_ptr() for x in tensors_of(state)] == addresses
        assert state.position.tolist() == [90, 90]
        for found, wanted in zip(tensors_of(state), tensors_of(end), strict=True):
            assert_exact(found, wanted)

    @torch.no_grad()
    def test_stacked_states_are_separate(self, condition, option):
        """Stacked states can be stacked again, as a server does when a request joins a batch."""
        model = variant(condition, option)
        prompts = [prompt_of(model, length) for length in (3, 70, 1, 12)]
        states = [model.init_state(1) for _ in prompts]
        for prompt, state in zip(prompts, states, strict=True):
            model(prompt, state)
        first_two = ModelState.stack(states[:2])
        stacked = ModelState.stack([first_two, *states[2:]])
        more = random_tokens(model.config, 4, 6)
        together = in_pieces(model, more, [1, 4, 1], stacked)
        for prompt, continued, logits in zip(prompts, more, together, strict=True):
            text = torch.cat([prompt[0], continued])
            assert_exact(logits, model(text[None])[0, -6:])
        assert stacked.position.tolist() == [9, 76, 7, 18]

    def test_packed_documents_are_separate(self, condition, option):
        """Logits and gradients are those of each document by itself.

        Documents are shorter than the convolution, of one token, and longer than a scan's chunk.
        The first and the last one begin in their middle: a window may cut documents.
        """
        model = variant(condition, option)
        lengths = ((3, 1, 66, 2, 8), (40, 40))
        positions = positions_of(lengths)
        positions[0, :3] += 7
        positions[0, -8:] += 1
        tokens = random_tokens(model.config, 2, 80)
        packed = model(tokens, positions=positions.to(torch.uint8))
        separate = []
        for row, row_lengths in zip(tokens, lengths, strict=True):
            for document in row.split(row_lengths):
                separate.append(model(document[None])[0])
        separate = torch.cat(separate).view_as(packed)
        assert_exact(packed, separate)
        assert (packed - model(tokens)).abs().max() > 1e-3
        weights = normal(*packed.shape, seed=2)
        parameters = list(model.parameters())
        found = torch.autograd.grad(packed, parameters, weights)
        wanted = torch.autograd.grad(separate, parameters, weights)
        for x, y in zip(found, wanted, strict=True):
            # Near a zero of the normalised form's denominator, gradients reach 1e5.
            assert_near(x, y, 1e-8 * y.abs().max().clamp_min(1))


def test_wrong_positions_are_refused():
    model = variant("interdomain")
    tokens = random_tokens(model.config, 1, 4)
    for positions in (torch.arange(4.0)[None], torch.arange(3)[None]):
        with pytest.raises(ValueError, match=r"positions are .*expected integers \[1, 4\]"):
            model(tokens, positions=positions)
    with pytest.raises(ValueError, match="leave one out"):
        model(tokens, model.init_state(1), positions=torch.arange(4)[None])
