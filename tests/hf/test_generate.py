"""transformers' `generate` on an exported model, against whole passes of the native model."""

import copy

import pytest
import torch
from torch.nn import functional as F

from .common import (
    CLOSE,
    GREEDY,
    code_of,
    each_case,
    each_kind,
    greedy,
    padded,
    padded_batch,
    random_texts,
)


@each_case
def test_greedy_text_of_every_path(native, there):
    """The text is the same with a cache, without one, in chunks and from embeddings, behind padding on either side."""
    rows = [random_texts(1, length, seed=length) for length in (3, 14, 1)]
    wanted = torch.cat([greedy(native, row, 6)[:, -6:] for row in rows])
    options = {"max_new_tokens": 6, **GREEDY}
    for side in ("left", "right"):
        tokens, mask = padded(rows, side)
        for use_cache in (True, False):
            text = there.generate(tokens, attention_mask=mask, use_cache=use_cache, **options)
            assert torch.equal(text[:, 14:], wanted), f"{side}, use_cache={use_cache}"
    # Only the last chunk gives a next token.
    tokens, mask = padded(rows, "left")
    text = there.generate(tokens, attention_mask=mask, prefill_chunk_size=5, **options)
    assert torch.equal(text[:, 14:], wanted)
    embeddings = there.get_input_embeddings()(tokens)
    text = there.generate(inputs_embeds=embeddings, attention_mask=mask, **options)
    assert torch.equal(text, wanted)


@each_kind
def test_beams(there):
    """Beam search with a cache, whose rows move, finds what it finds without one."""
    tokens = random_texts(2, 9)
    options = {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.0, **GREEDY}
    found = there.generate(tokens, max_new_tokens=6, **options)
    assert len(found.unique(dim=0)) == 6
    without_cache = there.generate(tokens, max_new_tokens=6, use_cache=False, **options)
    assert torch.equal(found, without_cache)


@each_kind
def test_a_text_continues_with_the_returned_cache(native, there):
    """Turn by turn, tokens that the cache has read are not read again, by a copy of it neither."""
    lengths = []

    def record(module, args, output):
        lengths.append(args[0].shape[1])

    hook = there.get_input_embeddings().register_forward_hook(record)
    options = {"max_new_tokens": 5, "return_dict_in_generate": True, **GREEDY}
    text = random_texts(2, 12)
    cache = None
    # After the first turn: the last token of the turn before, and four new ones.
    for turn, prompt_length in enumerate((12, 5, 5)):
        wanted = greedy(native, text, 5)
        for past in (cache, copy.deepcopy(cache)):
            lengths.clear()
            with torch.inference_mode(turn == 0):
                out = there.generate(text, past_key_values=past, **options)
            assert torch.equal(out.sequences, wanted)
            assert lengths == [prompt_length, 1, 1, 1, 1]
        cache = out.past_key_values
        assert cache.get_seq_length() == wanted.shape[1] - 1
        text = torch.cat([wanted, random_texts(2, 4, seed=turn)], dim=1)
    hook.remove()
    with pytest.raises(ValueError, match="one token more"):
        there.generate(wanted[:, :-1], past_key_values=cache, **options)


@each_kind
def test_a_mask_of_other_tokens_than_the_cache_has_read(native, there):
    """The padding of an answer that ended early was read: the text is computed anew."""
    text = random_texts(2, 13)
    mask = torch.ones(2, 13).long()
    mask[0, :3] = 0
    cache = there(text[:, :9], attention_mask=mask[:, :9]).past_key_values
    assert cache.has_read(mask)
    mask[0, :6] = torch.tensor([1, 1, 1, 0, 0, 0])  # as many tokens as were read
    with pytest.raises(ValueError, match="Leave past_key_values out"):
        there(text[:, 9:], attention_mask=mask, past_key_values=copy.copy(cache))
    options = {"past_key_values": cache, "max_new_tokens": 4, **GREEDY}
    found = there.generate(text, attention_mask=mask, **options)
    for row in range(2):
        wanted = greedy(native, text[row : row + 1, mask[row].bool()], 4)
        assert torch.equal(found[row, -4:], wanted[0, -4:])


def test_the_end_of_text(loaded, tokenizer):
    """A row that has ended is filled up with padding, and does not disturb the others."""
    model, there = loaded("interdomain")
    tokens = random_texts(2, 9)
    whole = greedy(model, tokens, 8)
    stop = whole[0, 11].item()  # the third new token of the first row
    found = there.generate(tokens, max_new_tokens=8, do_sample=False, eos_token_id=stop)
    whole[0, 12:] = tokenizer.unk_id
    assert torch.equal(found, whole)


def test_generation_that_needs_another_cache_is_refused(loaded):
    there = loaded("interdomain")[1]
    tokens = random_texts(1, 9)
    with pytest.raises(ValueError, match="stateful"):
        there.generate(tokens, max_new_tokens=2, prompt_lookup_num_tokens=3)
    with pytest.raises(NotImplementedError, match="call generate with a padded batch"):
        there.init_continuous_batching()
    with pytest.raises(ValueError, match="cache_implementation is 'static'"):
        there.generate(tokens, max_new_tokens=2, cache_implementation="static")


@each_kind
def test_embeddings_that_a_wrapper_puts_before_the_text(there, monkeypatch):
    """PEFT's prompt tuning puts embeddings before the text, and ones before the mask.

    It does so if it finds no cache, or one of transformers' that has read nothing.
    """
    virtual = random_texts(2, 3, seed=5)
    prepare = there.prepare_inputs_for_generation

    def prepare_with_prompt(*args, **kwargs):
        inputs = prepare(*args, **kwargs)
        inputs["attention_mask"] = F.pad(inputs["attention_mask"], (3, 0), value=1)
        if inputs[code_of(there).CACHE_NAME].get_seq_length():
            inputs["input_ids"] = inputs["input_ids"][:, -1:]
        else:
            text = torch.cat([virtual, inputs.pop("input_ids")], dim=1)
            inputs["inputs_embeds"] = there.get_input_embeddings()(text)
        return inputs

    tokens, mask = padded_batch()
    options = {"max_new_tokens": 5, **GREEDY}
    text = torch.cat([virtual, tokens], dim=1)
    wanted = there.generate(text, attention_mask=F.pad(mask, (3, 0), value=1), **options)
    monkeypatch.setattr(there, "prepare_inputs_for_generation", prepare_with_prompt)
    found = there.generate(tokens, attention_mask=mask, **options)
    assert torch.equal(found[:, 12:], wanted[:, 15:])


@each_kind
@torch.no_grad()
def test_methods_of_a_cache(there):
    tokens = random_texts(2, 9)
    token = random_texts(2, 1, seed=2)
    cache = there(tokens).past_key_values
    assert len(cache) == there.config.num_hidden_layers
    assert cache.get_mask_sizes(1, 0) == (10, 0)
    with pytest.raises(NotImplementedError, match="cannot take tokens back"):
        cache.crop(-1)
    wanted = there(token, past_key_values=copy.deepcopy(cache)).logits
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([2, 3]))
    assert cache.batch_size == 2
    found = there(token, past_key_values=cache).logits
    torch.testing.assert_close(found, wanted, **CLOSE)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(there(tokens, past_key_values=cache).logits, there(tokens).logits)


@each_kind
@torch.no_grad()
def test_offloaded_weights(there):
    """device_map brings weights that are on "cpu" or "disk" around the call of their module."""
    accelerate = pytest.importorskip("accelerate")
    offloaded = copy.deepcopy(there)
    accelerate.cpu_offload(offloaded, execution_device=torch.device("cpu"))
    tokens = random_texts(2, 9)
    assert torch.equal(offloaded(tokens).logits, there(tokens).logits)
