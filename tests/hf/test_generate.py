"""transformers' `generate` on a folder's own code, against whole forward passes of the model that was exported."""

import copy
import sys

import pytest
import torch

from interdomain.model.generation import Sampling, generate

from .common import CASES, CLOSE, KINDS, TOKENS, greedy, random_texts

ON = dict(do_sample=False, eos_token_id=None)  # to the end


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_the_same_function(loaded, case):
    model, there = loaded(case)
    assert type(there).__module__.startswith("transformers_modules.")
    tokens = random_texts(2, 33)
    wanted = model(tokens)
    out = there(tokens)
    torch.testing.assert_close(out.logits, wanted, **CLOSE)
    assert out.past_key_values.get_seq_length() == 33
    for options in (dict(use_cache=False), dict(logits_to_keep=5), dict(logits_to_keep=torch.tensor([3, 30]))):
        kept = options.get("logits_to_keep", 0)
        kept = slice(-kept, None) if isinstance(kept, int) else kept
        torch.testing.assert_close(there(tokens, **options).logits, wanted[:, kept], **CLOSE)
    assert there(tokens, use_cache=False).past_key_values is None
    # A step from the state, and a piece.
    step = there(tokens[:, :1], past_key_values=out.past_key_values)
    more = there(tokens[:, 1:4], past_key_values=step.past_key_values).logits
    again = model(torch.cat([tokens, tokens[:, :4]], dim=1))
    torch.testing.assert_close(step.logits, again[:, 33:34], **CLOSE)
    torch.testing.assert_close(more, again[:, 34:], **CLOSE)


@pytest.mark.parametrize("case", CASES)
def test_greedy_text_is_that_of_every_other_path(loaded, case):
    model, there = loaded(case)
    tokens = random_texts(1, 20)
    found = there.generate(tokens, max_new_tokens=8, **ON)
    assert torch.equal(found, greedy(model, tokens, 8))
    assert torch.equal(found, there.generate(tokens, max_new_tokens=8, use_cache=False, **ON))
    ours = generate(model, tokens.tolist(), max_tokens=8, sampling=Sampling(temperature=0), vocab_size=TOKENS)
    assert found[0, 20:].tolist() == [row[0] for row in ours]


@pytest.mark.parametrize("case", CASES)
def test_left_padding_leaves_no_trace(loaded, case):
    _, there = loaded(case)
    rows = [random_texts(1, length, seed=length) for length in (3, 14, 1)]
    T = 14
    tokens = torch.cat([torch.nn.functional.pad(row, (T - row.shape[1], 0), value=0) for row in rows])
    mask = torch.stack([torch.arange(T) >= T - row.shape[1] for row in rows]).long()
    # Without a state the same: what is in the place of padding is not read.
    logits = there(tokens, attention_mask=mask, use_cache=False).logits
    for row, found in zip(rows, logits, strict=True):
        torch.testing.assert_close(found[-row.shape[1] :], there(row).logits[0], **CLOSE)
    for options in ({}, dict(use_cache=False), dict(prefill_chunk_size=5)):
        found = there.generate(tokens, attention_mask=mask, max_new_tokens=6, **ON, **options)
        for row, text in zip(rows, found, strict=True):
            assert torch.equal(text[T:], there.generate(row, max_new_tokens=6, **ON)[0, row.shape[1] :]), options


@pytest.mark.parametrize("case", KINDS)
def test_beams(loaded, case, monkeypatch):
    _, there = loaded(case)
    cache = sys.modules[type(there).__module__].InterdomainCache
    select, moved = cache.reorder_cache, []
    monkeypatch.setattr(cache, "reorder_cache", lambda self, rows: (moved.append(rows.tolist()), select(self, rows)))
    tokens = random_texts(2, 9)
    options = dict(max_new_tokens=6, num_beams=4, num_return_sequences=3, length_penalty=0.0, **ON)
    found = there.generate(tokens, **options)
    assert found.shape == (6, 15)
    assert len({tuple(row) for row in found.tolist()}) == 6
    assert torch.equal(found, there.generate(tokens, use_cache=False, **options))
    assert any(rows != sorted(set(rows)) for rows in moved)  # some beam was dropped for another


@pytest.mark.parametrize("case", KINDS)
def test_sampling(loaded, case):
    _, there = loaded(case)
    tokens = random_texts(2, 9)
    options = dict(
        max_new_tokens=6, do_sample=True, temperature=0.9, top_p=0.95, num_return_sequences=2, eos_token_id=None
    )
    texts = []
    for use_cache in (True, True, False):
        torch.manual_seed(5)
        texts.append(there.generate(tokens, use_cache=use_cache, **options))
    assert texts[0].shape == (4, 15)
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])
    assert len({tuple(row) for row in texts[0].tolist()}) == 4
    assert texts[0].max() < TOKENS


@pytest.mark.parametrize("case", KINDS)
def test_a_text_that_goes_on(loaded, case):
    """Turn by turn with the returned state: what a state has read is not read again, and the text is that of one prompt."""
    model, there = loaded(case)
    read = []
    hook = there.tok_embeddings.register_forward_hook(lambda _, args, out: read.append(args[0].shape[1]))
    text, cache = random_texts(2, 12), None
    for turn in range(3):
        wanted = greedy(model, text, 5)
        fork = copy.deepcopy(cache)
        for past in (cache, fork):
            read.clear()
            out = there.generate(text, past_key_values=past, max_new_tokens=5, return_dict_in_generate=True, **ON)
            assert torch.equal(out.sequences, wanted)
            assert read == [12 if turn == 0 else 5, 1, 1, 1, 1]  # the last token of the turn before, and four new ones
        cache = out.past_key_values
        assert cache.get_seq_length() == wanted.shape[1] - 1
        text = torch.cat([wanted, random_texts(2, 4, seed=turn)], dim=1)
    # The new tokens alone, with a mask over the whole.
    mask = torch.ones(2, text.shape[1])
    found = there.generate(text[:, -5:], past_key_values=cache, attention_mask=mask, max_new_tokens=3, **ON)
    hook.remove()
    assert torch.equal(found[:, 5:], greedy(model, text, 3)[:, -3:])


@pytest.mark.parametrize("case", ["interdomain", "softmax"])
def test_a_left_padded_batch_goes_on(loaded, case):
    model, there = loaded(case)
    short, long = random_texts(1, 4), random_texts(1, 10, seed=2)
    text = torch.cat([torch.nn.functional.pad(short, (6, 0)), long])
    mask = (torch.arange(10) >= torch.tensor([[6], [0]])).long()
    options = dict(max_new_tokens=4, return_dict_in_generate=True, **ON)
    out = there.generate(text, attention_mask=mask, **options)
    more = random_texts(2, 3, seed=3)
    text = torch.cat([out.sequences, more], dim=1)
    mask = torch.cat([mask, torch.ones(2, 7, dtype=torch.long)], dim=1)
    found = there.generate(text, attention_mask=mask, past_key_values=out.past_key_values, **options).sequences
    for row, start in ((0, 6), (1, 0)):
        assert torch.equal(found[row, start:], greedy(model, text[row : row + 1, start:], 4)[0])


@pytest.mark.parametrize("chunk", [1, 7, 40])
@pytest.mark.parametrize("case", ["interdomain", "softmax", "dual-linear"])
def test_chunked_prefill(loaded, case, chunk):
    model, there = loaded(case)
    tokens = random_texts(2, 30)
    found = there.generate(tokens, max_new_tokens=4, prefill_chunk_size=chunk, **ON)
    assert torch.equal(found, greedy(model, tokens, 4))


def test_a_long_prompt_is_read_in_pieces(loaded):
    model, there = loaded("interdomain")
    read = []
    hook = there.tok_embeddings.register_forward_hook(lambda _, args, out: read.append(args[0].shape[1]))
    tokens = random_texts(1, 2100)
    found = there.generate(tokens, max_new_tokens=2, **ON)
    hook.remove()
    assert read == [2048, 52, 1]
    assert torch.equal(found, greedy(model, tokens, 2))


@pytest.mark.parametrize("case", ["interdomain", "softmax"])
def test_a_state_of_inference_mode_goes_on_outside(loaded, case):
    model, there = loaded(case)
    with torch.inference_mode():
        out = there.generate(random_texts(1, 9), max_new_tokens=3, return_dict_in_generate=True, **ON)
    mask = torch.ones(1, 12)  # or a token that pads would be taken for padding
    found = there.generate(
        out.sequences, attention_mask=mask, past_key_values=out.past_key_values, max_new_tokens=3, **ON
    )
    assert torch.equal(found, greedy(model, random_texts(1, 9), 6))


def test_the_pipeline(exported, tokenizer):
    from transformers import pipeline

    model, folder = exported("interdomain")
    generate = pipeline("text-generation", model=str(folder), trust_remote_code=True, device="cpu")
    prompts = ["import os", "def f(x):"]
    out = generate(prompts, max_new_tokens=5, do_sample=False, batch_size=2, return_full_text=False)
    for prompt, (found,) in zip(prompts, out, strict=True):
        ids = tokenizer.encode(prompt)
        text = greedy(model, torch.tensor([ids]), 5)[0].tolist()
        assert tokenizer.eos_id not in text
        assert found["generated_text"] == tokenizer.decode(text).removeprefix(prompt)


@torch.no_grad()
def test_hidden_states(loaded):
    _, there = loaded("interdomain")
    tokens = random_texts(2, 9)
    out = there(tokens, output_hidden_states=True, logits_to_keep=1)
    assert [h.shape for h in out.hidden_states] == [(2, 9, 32)] * 3
    assert torch.equal(out.hidden_states[0], there.tok_embeddings(tokens))
    torch.testing.assert_close(there.output(out.hidden_states[-1])[:, -1:], out.logits)
    assert there(tokens).hidden_states is None
    steps = there.generate(tokens, max_new_tokens=3, output_hidden_states=True, return_dict_in_generate=True, **ON)
    assert [h[0].shape[1] for h in steps.hidden_states] == [9, 1, 1]
    as_tuple = there(tokens, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert torch.equal(as_tuple[0], there(tokens).logits)


@pytest.mark.parametrize("case", ["interdomain", "softmax"])
def test_exported_for_any_length(loaded, case):
    """By torch.export, without a state."""
    _, there = loaded(case)
    shapes = {"input_ids": {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}, "use_cache": None}
    program = torch.export.export(there, (random_texts(2, 9),), dict(use_cache=False), dynamic_shapes=shapes)
    tokens = random_texts(3, 21)
    found = program.module()(tokens, use_cache=False).logits
    torch.testing.assert_close(found, there(tokens).logits, **CLOSE)


def test_it_ends_at_the_end_of_text(loaded, tokenizer):
    """A row that has ended is filled up with padding, and does not disturb the others."""
    model, there = loaded("interdomain")
    tokens = random_texts(2, 9)
    whole = greedy(model, tokens, 8)
    stop = whole[0, 11].item()  # the third new token of the first row
    found = there.generate(tokens, max_new_tokens=8, do_sample=False, eos_token_id=stop)
    assert found[0].tolist() == whole[0, :12].tolist() + 5 * [tokenizer.unk_id]
    assert torch.equal(found[1], whole[1])
