"""What the model cannot do is refused in words, before it computes anything."""

import copy

import pytest
import torch
from torch import nn

from .common import greedy, random_texts

ON = dict(max_new_tokens=2, do_sample=False, eos_token_id=None)


def mask(*rows):
    return torch.tensor(rows)


REFUSED = {
    "negative token": (dict(input_ids=mask([5, -1])), ["the token -1", "vocabulary of 0 to 419"]),
    "token beyond": (dict(input_ids=mask([5, 420])), ["the token 420", "the folder's own tokenizer"]),
    "no tokens": (dict(input_ids=torch.zeros(1, 0, dtype=torch.long)), ["one at least", "[1, 0]"]),
    "one dimension": (dict(input_ids=torch.arange(4)), ["[batch, tokens]", "[4]"]),
    "floats": (dict(input_ids=torch.rand(1, 4)), ["must be int64 or int32", "got torch.float32"]),
    "bytes": (dict(input_ids=torch.ones(1, 4, dtype=torch.uint8)), ["must be int64 or int32", "got torch.uint8"]),
    "hole": (dict(attention_mask=mask([1, 0, 1, 1])), ["zeros between tokens", "only padding before the text"]),
    "right": (
        dict(attention_mask=mask([1, 1, 1, 0]), use_cache=True),
        ["after the text", "padding_side='left'", "use_cache=False"],
    ),
    "mask too long": (dict(attention_mask=torch.ones(1, 5)), ["attention_mask is [1, 5]", "expected [1, 4]"]),
    "mask of 4 dimensions": (dict(attention_mask=torch.ones(1, 1, 4, 4)), ["attention_mask is [1, 1, 4, 4]"]),
    "attentions": (dict(output_attentions=True), ["no attention matrices"]),
    "positions": (dict(position_ids=torch.arange(4)[None]), ["no use for position_ids"]),
    "embeddings": (dict(input_ids=None, inputs_embeds=torch.ones(1, 4, 32)), ["no use for inputs_embeds"]),
    "nothing": (dict(input_ids=None), ["input_ids are missing: this model reads tokens"]),
    "another cache": (dict(past_key_values=[(1, 2)]), ["is a list", "InterdomainCache"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_meaning_is_refused(loaded, case):
    _, there = loaded("interdomain")
    arguments, words = REFUSED[case]
    with pytest.raises(ValueError, match=r".") as raised:
        there(**{"input_ids": torch.arange(4)[None] + 5, **arguments})
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("case", ["interdomain", "softmax"])
@torch.no_grad()
def test_padding_on_the_right_needs_no_state(loaded, case):
    """As in training and scoring: nothing reads what comes later."""
    model, there = loaded(case)
    tokens = random_texts(2, 8)
    padded = mask([1] * 5 + [0] * 3, [0] * 2 + [1] * 5 + [0])  # the second on both sides
    out = there(tokens, attention_mask=padded)
    assert out.past_key_values is None
    found = out.logits
    torch.testing.assert_close(found[0, :5], model(tokens[:1, :5])[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1, 2:7], model(tokens[1:, 2:7])[0], rtol=1e-4, atol=1e-4)


def test_wrapped_embeddings(loaded):
    """An adapter's have none of their attributes."""
    there = copy.deepcopy(loaded("interdomain")[1])
    tokens = random_texts(1, 5)
    wanted = there(tokens).logits
    there.set_input_embeddings(nn.Sequential(there.tok_embeddings))
    there.tok_embeddings.weight = there.tok_embeddings[0].weight
    assert torch.equal(there(tokens).logits, wanted)
    there.set_output_embeddings(nn.Identity())
    assert there(tokens).logits.shape[-1] == there.config.hidden_size


def test_a_cache_that_does_not_fit(loaded):
    _, there = loaded("interdomain")
    tokens = random_texts(1, 9)
    out = there.generate(tokens, return_dict_in_generate=True, **ON)
    for text in (tokens, out.sequences[:, :10]):  # shorter than what was read, and as long
        with pytest.raises(ValueError, match=r"has read 10 tokens, input_ids has \d+: give the whole text"):
            there.generate(text, past_key_values=out.past_key_values, **ON)
    with pytest.raises(ValueError, match="holds 1 texts, input_ids 2"):
        there.generate(out.sequences.repeat(2, 1), past_key_values=out.past_key_values, **ON)
    with pytest.raises(NotImplementedError, match="cannot forget its last tokens"):
        out.past_key_values.crop(3)
    more = there.generate(out.sequences, past_key_values=out.past_key_values, **ON)  # nothing was lost
    assert torch.equal(more, greedy(loaded("interdomain")[0], tokens, 4))


def test_positions_of_a_text_are_refused(loaded):
    """They would be ignored."""
    with pytest.raises(ValueError, match="position_ids"):
        loaded("interdomain")[1].generate(random_texts(1, 9), position_ids=torch.arange(9)[None] + 3, **ON)


def test_generation_that_takes_tokens_back_is_refused(loaded):
    _, there = loaded("interdomain")
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        there.generate(random_texts(1, 9), max_new_tokens=2, prompt_lookup_num_tokens=3)


def test_a_mask_made_of_pad_tokens_says_so(loaded, tokenizer):
    """transformers takes the pad token inside a text for padding, where it is not told otherwise."""
    model, there = loaded("interdomain")
    tokens = random_texts(1, 9)
    tokens[0, 4] = tokenizer.unk_id
    told = "makes one of the pad tokens in input_ids: then give one"
    with pytest.raises(ValueError, match=told):
        there.generate(tokens, **ON)
    out = there.generate(tokens, attention_mask=torch.ones(1, 9), return_dict_in_generate=True, **ON)
    assert torch.equal(out.sequences, greedy(model, tokens, 2))
    # In a text that goes on: the first new token.
    text = torch.cat([out.sequences, torch.tensor([[tokenizer.unk_id, 7]])], dim=1)
    text[0, 10] = tokenizer.unk_id
    with pytest.raises(ValueError, match=told):
        there.generate(text, past_key_values=out.past_key_values, **ON)
