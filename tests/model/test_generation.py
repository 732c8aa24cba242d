"""Generation against the whole forward pass, and sampling against its definition."""

import math

import pytest
import torch

from interdomain.model import CONDITIONS
from interdomain.model.generation import PREFILL_CHUNK, Decoder, Sampling, generate, prefill, sample

from .common import Largest, assert_exact, random_tokens, variant

GREEDY = Sampling(temperature=0)


def rows(model, prompts, **options):
    """The tokens of each prompt, without the Nones after its end."""
    steps = list(generate(model, prompts, **options))
    return [[step[i] for step in steps if step[i] is not None] for i in range(len(prompts))]


def prompt(model, length, seed=1):
    return random_tokens(model.config, 1, length, seed)[0].tolist()


@pytest.mark.parametrize(
    ("condition", "chunk"), [*((c, 7) for c in CONDITIONS), ("s4d", 1), ("softmax", PREFILL_CHUNK)]
)
def test_greedy_is_the_argmax_of_the_whole_pass(condition, chunk):
    """The prompt in pieces of any length, the text token by token."""
    model = variant(condition)
    tokens = prompt(model, 70)
    logits, state = prefill(model, torch.tensor([tokens]), chunk=chunk)
    with torch.no_grad():
        assert_exact(logits, model(torch.tensor([tokens]))[:, -1])
    assert state.position.tolist() == [70]
    found = rows(model, [tokens], max_tokens=12, sampling=GREEDY)[0]
    assert len(found) == 12
    with torch.no_grad():
        for token in found:
            assert token == model(torch.tensor([tokens]))[0, -1].argmax().item()
            tokens.append(token)


def test_memory_does_not_grow_with_the_prompt():
    model = variant("interdomain")

    def largest(length, chunk):
        with Largest() as found:
            prefill(model, random_tokens(model.config, 1, length), chunk=chunk)
        return found.largest

    assert largest(512, 32) == largest(128, 32) < largest(512, 512)


@pytest.mark.parametrize("condition", ["interdomain", "softmax"])
def test_rows_are_taken_and_copied(condition):
    model = variant(condition)
    _, state = prefill(model, random_tokens(model.config, 3, 11))
    beams = state.select(torch.tensor([2, 0, 2, 2]))
    next_tokens = torch.tensor([5, 6, 7, 8])
    taken = Decoder(model, beams).step(next_tokens)
    assert beams.position.tolist() == [12] * 4
    assert state.position.tolist() == [11] * 3  # of its own
    for i, row in enumerate((2, 0, 2, 2)):
        again = Decoder(model, state.clone()).step(next_tokens[i].expand(3))
        assert_exact(taken[i], again[row])


@pytest.mark.parametrize("condition", ["interdomain", "s4d", "softmax"])
def test_a_prompt_does_not_depend_on_its_neighbours(condition):
    model = variant(condition)
    prompts = [prompt(model, n, seed=n) for n in (5, 70, 1, 23)]
    for sampling in (GREEDY, Sampling(temperature=1.3, top_p=0.9)):
        together = rows(model, prompts, max_tokens=10, sampling=sampling, seed=4)
        alone = [rows(model, [p], max_tokens=10, sampling=sampling, seed=4)[0] for p in prompts]
        assert together == alone
        assert together[::-1] == rows(
            model, prompts[::-1], max_tokens=10, sampling=sampling, seed=4
        )


def test_a_seed_gives_a_text():
    model = variant("interdomain")
    tokens = [prompt(model, 5)]
    first, again, other = (rows(model, tokens, max_tokens=30, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    state = torch.get_rng_state()
    rows(model, tokens, max_tokens=3, seed=1)
    assert torch.equal(state, torch.get_rng_state())


def test_a_stop_token_ends_its_row_alone():
    model = variant("interdomain")
    prompts = [prompt(model, n, seed=n) for n in (5, 8)]
    free = rows(model, prompts, max_tokens=30, seed=1)
    stop = next(t for t in free[0] if t not in free[1])
    end = free[0].index(stop) + 1
    steps = list(generate(model, prompts, max_tokens=30, seed=1, stop=stop))
    assert [step[0] for step in steps] == free[0][:end] + [None] * (
        30 - end
    )  # the stop token itself is given out
    assert [step[1] for step in steps] == free[1]
    assert (
        len(list(generate(model, prompts[:1], max_tokens=30, seed=1, stop=stop))) == end
    )  # once all have ended


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(top_k=3, top_p=0.5)], ids=str)
def test_spare_rows_of_a_padded_vocabulary_are_never_chosen(sampling):
    model = variant("interdomain")
    with torch.no_grad():
        model.output.weight[40:] *= 100
    options = dict(max_tokens=50, sampling=sampling, seed=1)
    assert max(rows(model, [[1, 2]], **options)[0]) >= 40
    assert max(rows(model, [[1, 2]], vocab_size=40, **options)[0]) < 40


# Hand-made distribution: 0.5, 0.25, 0.125, 0.0625, 0.0625 in shuffled places.
PROBABILITIES = torch.tensor([0.0625, 0.5, 0.0625, 0.125, 0.25])
DRAWS = 4000


@pytest.mark.parametrize(
    ("sampling", "wanted"),
    [
        (Sampling(), [0.0625, 0.5, 0.0625, 0.125, 0.25]),
        (GREEDY, [0, 1, 0, 0, 0]),
        (Sampling(top_k=2), [0, 2 / 3, 0, 0, 1 / 3]),
        # Kept while the mass ahead of a token is below top_p: the token that crosses it is in.
        (Sampling(top_p=0.45), [0, 1, 0, 0, 0]),
        (Sampling(top_p=0.8), [0, 4 / 7, 0, 1 / 7, 2 / 7]),
        # Squares of the probabilities, normalised: 16, 4, 1, 1/4, 1/4 of 21.5.
        (Sampling(temperature=0.5), [0.25 / 21.5, 16 / 21.5, 0.25 / 21.5, 1 / 21.5, 4 / 21.5]),
        # The temperature comes first, then top_k, then top_p of what is left.
        (Sampling(temperature=0.5, top_p=0.74), [0, 1, 0, 0, 0]),
        (Sampling(temperature=1e-300), [0, 1, 0, 0, 0]),
        (Sampling(temperature=1e30), [0.2] * 5),
    ],
    ids=str,
)
def test_sampling(sampling, wanted):
    """Within five standard deviations; what has no probability is never drawn."""
    generators = [torch.Generator().manual_seed(i) for i in range(DRAWS)]
    drawn = (
        torch.bincount(
            sample(PROBABILITIES.log().expand(DRAWS, -1), sampling, generators), minlength=5
        )
        / DRAWS
    )
    for f, w in zip(drawn.tolist(), torch.tensor(wanted).tolist(), strict=True):
        assert f == w if w in (0, 1) else abs(f - w) < 5 * math.sqrt(w * (1 - w) / DRAWS)


def test_what_cannot_be_is_refused():
    model = variant("interdomain")
    for name, value in (("temperature", math.nan), ("top_p", 0.0), ("top_p", 1.1)):
        with pytest.raises(ValueError, match=f"{name}.*got {value}"):
            Sampling(**{name: value})
    for prompts, words in (
        ([], "at least one token"),
        ([[1], []], r"at least one token.*\[1, 0\]"),
    ):
        with pytest.raises(ValueError, match=words):
            list(generate(model, prompts, max_tokens=3))
    with pytest.raises(ValueError, match="for a state of 2"):
        prefill(model, torch.arange(5)[None], model.init_state(2))
    with pytest.raises(
        ValueError, match="one of each row"
    ):  # a graph would copy one token to both rows
        Decoder(model, model.init_state(2)).step(torch.tensor([1]))
