"""transformers' `generate` on a folder's own code, against whole forward passes of the model that was exported."""

import copy

import pytest
import torch

from .common import CLOSE, ON, code_of, each_case, each_kind, greedy, padded, random_texts


@each_case
def test_greedy_text_of_every_path(native, there):
    tokens = random_texts(2, 20)
    wanted = greedy(native, tokens, 8)
    embeds = there.get_input_embeddings()(tokens)
    assert torch.equal(there.generate(tokens, max_new_tokens=8, **ON), wanted)
    assert torch.equal(there.generate(tokens, max_new_tokens=8, use_cache=False, **ON), wanted)
    assert torch.equal(there.generate(tokens, max_new_tokens=8, prefill_chunk_size=7, **ON), wanted)
    assert torch.equal(there.generate(inputs_embeds=embeds, max_new_tokens=8, **ON), wanted[:, 20:])


@pytest.mark.parametrize("side", ["left", "right"])
@each_kind
def test_padding_leaves_no_trace(native, there, side):
    rows = [random_texts(1, length, seed=length) for length in (3, 14, 1)]
    tokens, mask = padded(rows, side)
    wanted = torch.cat([greedy(native, row, 6)[:, -6:] for row in rows])
    in_chunks = (
        dict(prefill_chunk_size=5) if side == "left" else {}
    )  # only the last chunk gives a next token
    for options in ({}, dict(use_cache=False), in_chunks):
        text = there.generate(tokens, attention_mask=mask, max_new_tokens=6, **ON, **options)
        assert torch.equal(text[:, 14:], wanted), options


@each_kind
def test_beams(there, monkeypatch):
    cache, moved = code_of(there).InterdomainCache, []
    select = cache.reorder_cache
    monkeypatch.setattr(
        cache, "reorder_cache", lambda self, rows: (moved.append(rows.tolist()), select(self, rows))
    )
    tokens = random_texts(2, 9)
    options = dict(max_new_tokens=6, num_beams=4, num_return_sequences=3, length_penalty=0.0, **ON)
    found = there.generate(tokens, **options)
    assert len({tuple(row) for row in found.tolist()}) == 6
    assert torch.equal(found, there.generate(tokens, use_cache=False, **options))
    assert any(rows != sorted(set(rows)) for rows in moved)  # some beam was dropped for another


@each_kind
def test_a_text_that_goes_on(native, there):
    """Turn by turn with the returned cache: what it has read is not read again, and the text is that of one prompt."""
    read = []
    hook = there.get_input_embeddings().register_forward_hook(
        lambda _, args, out: read.append(args[0].shape[1])
    )
    text, cache = random_texts(2, 12), None
    for turn in range(3):
        wanted = greedy(native, text, 5)
        fork = copy.deepcopy(cache)
        for past in (cache, fork):
            read.clear()
            with torch.inference_mode(turn == 0):
                out = there.generate(
                    text, past_key_values=past, max_new_tokens=5, return_dict_in_generate=True, **ON
                )
            assert torch.equal(out.sequences, wanted)
            assert read == [
                12 if turn == 0 else 5,
                1,
                1,
                1,
                1,
            ]  # the last token of the turn before, and four new ones
        cache = out.past_key_values
        assert cache.get_seq_length() == wanted.shape[1] - 1
        text = torch.cat([wanted, random_texts(2, 4, seed=turn)], dim=1)
    hook.remove()
    with pytest.raises(ValueError, match="one token more"):
        there.generate(wanted[:, :-1], past_key_values=cache, max_new_tokens=5, **ON)


@each_kind
def test_a_mask_that_leaves_out_other_tokens_than_were_left_out(native, there):
    """As after an answer that ended early, whose padding was read as text: the text is that without a cache."""
    text, mask, cache = random_texts(2, 9), torch.ones(2, 13).long(), None
    mask[0, :3] = 0
    for begin, end in ((0, 6), (6, 9)):
        cache = there(
            text[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True
        )
        cache = cache.past_key_values
    cache.reorder_cache(torch.tensor([1, 0]))
    text = torch.cat([text.flip(0), random_texts(2, 4, seed=3)], dim=1)
    mask = mask.flip(0)
    assert cache.has_read(mask)
    mask[1, :6] = torch.tensor([1, 1, 1, 0, 0, 0])  # as many tokens as were read
    with pytest.raises(ValueError, match="Leave past_key_values out"):
        there(text[:, 9:], attention_mask=mask, past_key_values=copy.copy(cache))
    found = there.generate(text, attention_mask=mask, past_key_values=cache, max_new_tokens=4, **ON)
    for row in range(2):
        wanted = greedy(native, text[row, mask[row].bool()][None], 4)
        assert torch.equal(found[row, -4:], wanted[0, -4:])


def test_the_end_of_text(loaded, tokenizer):
    """A row that has ended is filled up with padding, and does not disturb the others."""
    model, there = loaded("interdomain")
    tokens = random_texts(2, 9)
    whole = greedy(model, tokens, 8)
    stop = whole[0, 11].item()  # the third new token of the first row
    found = there.generate(tokens, max_new_tokens=8, do_sample=False, eos_token_id=stop)
    assert found[0].tolist() == whole[0, :12].tolist() + 5 * [tokenizer.unk_id]
    assert torch.equal(found[1], whole[1])


def test_what_needs_another_cache_is_refused(loaded):
    there, tokens = loaded("interdomain")[1], random_texts(1, 9)
    with pytest.raises(ValueError, match="stateful"):
        there.generate(tokens, max_new_tokens=2, prompt_lookup_num_tokens=3)
    with pytest.raises(NotImplementedError, match="call generate with a padded batch"):
        there.init_continuous_batching()
    with pytest.raises(ValueError, match="cache_implementation is 'static'"):
        there.generate(tokens, max_new_tokens=2, cache_implementation="static")


@each_kind
def test_tokens_that_a_wrapper_puts_before_the_text(there, monkeypatch):
    """As PEFT's prompt tuning does, where it finds no cache, or one of transformers' that has read nothing: embeddings before
    those of the text, and ones before its mask."""
    from transformers.cache_utils import Cache

    virtual = random_texts(2, 3, seed=5)
    tokens, mask = padded([random_texts(1, 4), random_texts(1, 9, seed=2)], "left")
    prepare = there.prepare_inputs_for_generation

    def prepare_with_prompt(*args, **kwargs):
        inputs = prepare(*args, **kwargs)
        inputs["attention_mask"] = torch.cat([torch.ones(2, 3), inputs["attention_mask"]], dim=1)
        cache = inputs.get("past_key_values", inputs.get("cache"))
        assert isinstance(cache, Cache)
        if cache.get_seq_length():
            inputs["input_ids"] = inputs["input_ids"][:, -1:]
        else:
            text = torch.cat([virtual, inputs.pop("input_ids")], dim=1)
            inputs["inputs_embeds"] = there.get_input_embeddings()(text)
        return inputs

    rows, whole = (
        torch.cat([virtual, tokens], dim=1),
        torch.cat([torch.ones(2, 3).long(), mask], dim=1),
    )
    wanted = there.generate(rows, attention_mask=whole, max_new_tokens=5, **ON)
    monkeypatch.setattr(there, "prepare_inputs_for_generation", prepare_with_prompt)
    found = there.generate(tokens, attention_mask=mask, max_new_tokens=5, **ON)
    assert torch.equal(found[:, 9:], wanted[:, 12:])


@each_kind
@torch.no_grad()
def test_methods_of_a_cache(there):
    there = copy.deepcopy(there).double()
    tokens, token = random_texts(2, 9), random_texts(2, 1, seed=2)
    cache = there(tokens).past_key_values
    assert (len(cache), cache.batch_size, cache.get_mask_sizes(1, 0)) == (
        there.config.num_hidden_layers,
        2,
        (10, 0),
    )
    with pytest.raises(NotImplementedError, match="cannot take tokens back"):
        cache.crop(-1)
    wanted = there(token, past_key_values=copy.deepcopy(cache)).logits
    more = copy.deepcopy(cache)
    more.batch_repeat_interleave(3)
    logits = there(token.repeat_interleave(3, dim=0), past_key_values=more).logits
    torch.testing.assert_close(logits, wanted.repeat_interleave(3, dim=0), **CLOSE)
    more.batch_select_indices(torch.tensor([3]))
    assert more.batch_size == 1
    cache.reset()
    assert (len(cache), cache.get_seq_length(), cache.batch_size) == (0, 0, -1)
    assert torch.equal(there(tokens, past_key_values=cache).logits, there(tokens).logits)


@pytest.mark.parametrize("grad", [True, False])
@each_kind
def test_copies_of_a_cache_go_their_own_ways(there, grad):
    tokens = random_texts(2, 9)
    for duplicate in (copy.copy, copy.deepcopy):
        with torch.set_grad_enabled(grad):
            cache = there(tokens[:, :5]).past_key_values
            there(tokens[:, 5:].flip(1), past_key_values=duplicate(cache))
            found = there(tokens[:, 5:], past_key_values=duplicate(cache)).logits
            assert cache.get_seq_length() == 5
            torch.testing.assert_close(found, there(tokens).logits[:, 5:], **CLOSE)
            assert found.requires_grad == grad


@each_kind
def test_offloaded_weights(there):
    """Weights of modules on "cpu" or "disk", by device_map: they are brought around the module's call."""
    accelerate = pytest.importorskip("accelerate")
    tokens = random_texts(2, 9)
    with torch.no_grad():
        expected = there(tokens).logits
        offloaded = accelerate.cpu_offload(
            copy.deepcopy(there), execution_device=torch.device("cpu")
        )
        assert torch.equal(offloaded(tokens).logits, expected)
