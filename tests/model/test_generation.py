"""Generation against the whole forward pass, and sampling against its definition."""

import pytest
import torch

from interdomain.model import CONDITIONS
from interdomain.model.generation import PREFILL_CHUNK, Decoder, Sampling, generate, prefill, sample

from .common import Largest, assert_exact, prompt_of, random_tokens, variant

GREEDY = Sampling(temperature=0)


def generated(model, prompts, **options):
    """Returns the new tokens of each prompt, without the Nones after its end."""
    rows = [[] for _ in prompts]
    for step in generate(model, prompts, **options):
        for row, token in zip(rows, step, strict=True):
            if token is not None:
                row.append(token)
    return rows


def prompts_of(model, *lengths):
    return [prompt_of(model, length)[0].tolist() for length in lengths]


@pytest.mark.parametrize(
    ("condition", "chunk"),
    [
        *[(condition, 7) for condition in CONDITIONS],
        ("s4d", 1),
        ("softmax", PREFILL_CHUNK),
    ],
)
@torch.no_grad()
def test_greedy_is_the_argmax_of_the_whole_pass(condition, chunk):
    """The prompt is read in pieces, the text token by token."""
    model = variant(condition)
    (prompt,) = prompts_of(model, 70)
    logits, state = prefill(model, torch.tensor([prompt]), chunk=chunk)
    assert state.position.tolist() == [70]
    (text,) = generated(model, [prompt], max_tokens=12, sampling=GREEDY)
    whole = model(torch.tensor([prompt + text]))[0]
    assert_exact(logits[0], whole[69])
    assert text == whole[69:-1].argmax(-1).tolist()


def largest_tensor(model, length, chunk):
    with Largest() as seen:
        prefill(model, prompt_of(model, length), chunk=chunk)
    return seen.largest


def test_memory_does_not_grow_with_the_prompt():
    model = variant("interdomain")
    in_pieces = largest_tensor(model, 512, 32)
    assert in_pieces == largest_tensor(model, 128, 32)
    assert in_pieces < largest_tensor(model, 512, 512)


@pytest.mark.parametrize("condition", ["interdomain", "softmax"])
@torch.no_grad()
def test_rows_of_a_state_are_selected_as_copies(condition):
    model = variant(condition)
    prompts = random_tokens(model.config, 3, 11)
    _, state = prefill(model, prompts)
    rows = torch.tensor([2, 0, 2, 2])
    beams = state.select(rows)
    tokens = torch.tensor([5, 6, 7, 8])
    _, again = prefill(model, prompts[rows])
    assert_exact(Decoder(model, beams).step(tokens), Decoder(model, again).step(tokens))
    assert beams.position.tolist() == [12] * 4
    assert state.position.tolist() == [11] * 3


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.3, top_p=0.9)], ids=str)
@pytest.mark.parametrize("condition", ["interdomain", "s4d", "softmax"])
def test_a_prompt_does_not_depend_on_its_neighbours(condition, sampling):
    model = variant(condition)
    prompts = prompts_of(model, 5, 70, 1, 23)
    options = {"max_tokens": 10, "sampling": sampling, "seed": 4}
    together = generated(model, prompts, **options)
    for prompt, text in zip(prompts, together, strict=True):
        assert generated(model, [prompt], **options) == [text]


def test_a_seed_determines_the_text():
    model = variant("interdomain")
    prompts = prompts_of(model, 5)
    global_state = torch.get_rng_state()
    first = generated(model, prompts, max_tokens=30, seed=1)
    assert generated(model, prompts, max_tokens=30, seed=1) == first
    assert generated(model, prompts, max_tokens=30, seed=2) != first
    assert torch.equal(global_state, torch.get_rng_state())


def test_a_stop_token_ends_only_its_row():
    """The stop token itself is given out. Generation ends when all rows have ended."""
    model = variant("interdomain")
    prompts = prompts_of(model, 5, 8)
    first, second = generated(model, prompts, max_tokens=30, seed=1)
    stop = next(token for token in first if token not in second)
    end = first.index(stop) + 1
    options = {"max_tokens": 30, "seed": 1, "stop": stop}
    stopped, unchanged = zip(*generate(model, prompts, **options), strict=True)
    assert stopped == (*first[:end], *[None] * (30 - end))
    assert unchanged == tuple(second)
    steps = list(generate(model, prompts[:1], **options))
    assert len(steps) == end


def test_spare_rows_of_a_padded_vocabulary_are_never_chosen():
    model = variant("interdomain")
    with torch.no_grad():
        model.output.weight[40:] *= 100
    options = {"max_tokens": 50, "sampling": Sampling(top_k=3, top_p=0.5), "seed": 1}
    (text,) = generated(model, [[1, 2]], **options)
    assert max(text) >= 40
    (text,) = generated(model, [[1, 2]], vocab_size=40, **options)
    assert max(text) < 40


PROBABILITIES = torch.tensor([1, 8, 1, 2, 4]) / 16
DRAWS = 4000


@pytest.mark.parametrize(
    ("sampling", "weights"),
    [
        (Sampling(), [1, 8, 1, 2, 4]),
        (GREEDY, [0, 1, 0, 0, 0]),
        (Sampling(top_k=2), [0, 2, 0, 0, 1]),
        # A token is kept while the mass ahead of it is below top_p.
        (Sampling(top_p=0.45), [0, 1, 0, 0, 0]),
        (Sampling(top_p=0.8), [0, 4, 0, 1, 2]),
        # The squares of the probabilities.
        (Sampling(temperature=0.5), [1, 64, 1, 4, 16]),
        # The temperature comes first, then top_k, then top_p.
        (Sampling(temperature=0.5, top_p=0.74), [0, 1, 0, 0, 0]),
        (Sampling(temperature=1e-300), [0, 1, 0, 0, 0]),
        (Sampling(temperature=1e30), [1, 1, 1, 1, 1]),
    ],
    ids=str,
)
def test_sampling(sampling, weights):
    """Frequencies are within five standard deviations; zero probability is never drawn."""
    generators = [torch.Generator().manual_seed(seed) for seed in range(DRAWS)]
    logits = PROBABILITIES.log().expand(DRAWS, -1)
    tokens = sample(logits, sampling, generators)
    found = torch.bincount(tokens, minlength=5) / DRAWS
    wanted = torch.tensor(weights) / sum(weights)
    deviation = (wanted * (1 - wanted) / DRAWS).sqrt()
    assert ((found - wanted).abs() <= 5 * deviation).all(), f"{found}, expected {wanted}"


def test_wrong_prompts_and_states_are_refused():
    model = variant("interdomain")
    with pytest.raises(ValueError, match=r"at least one token.*\[1, 0\]"):
        generated(model, [[1], []], max_tokens=3)
    state = model.init_state(2)
    with pytest.raises(ValueError, match="for a state of 2"):
        prefill(model, torch.arange(5)[None], state)
    # A CUDA graph would copy one token to both rows.
    with pytest.raises(ValueError, match="one of each row"):
        Decoder(model, state).step(torch.tensor([1]))
