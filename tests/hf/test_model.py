"""The folder's classes against the native model: values, gradients, steps, padding."""

import copy

import pytest
import torch
from torch.nn import functional as F

from interdomain.files.pretrained import from_transformers, stored_name, to_transformers

from ..model.common import VARIANTS, lively, random_tokens, small_config, variant
from .common import CASES, CLOSE, code_of, padded, random_texts

EXACT = dict(rtol=1e-9, atol=1e-10)


@pytest.fixture
def classes(monkeypatch):
    """`interdomain.hf` in plain PyTorch; what `loaded` gives computes with the package's kernels."""
    hf = pytest.importorskip("interdomain.hf")
    from interdomain.hf import scan_interdomain

    monkeypatch.setattr(scan_interdomain, "input_features", None)
    return hf


def of_native(classes, native, kind="InterdomainForCausalLM"):
    settings = to_transformers(native.config)
    assert from_transformers({**settings, "facts": {}}) == native.config
    model = getattr(classes, kind)(classes.InterdomainConfig(**settings)).to(native.norm.weight.dtype)
    model.load_state_dict({stored_name(name): tensor for name, tensor in native.state_dict().items()})
    return model.eval()


@pytest.mark.parametrize(("condition", "option"), VARIANTS)
def test_logits_gradients_and_steps(classes, condition, option):
    """In float64, over two chunks: a whole pass; and prefill, steps and a second piece with a cache."""
    native = variant(condition, option)
    model, tokens = of_native(classes, native), random_tokens(native.config, 2, 75)
    wanted = native(tokens)
    F.cross_entropy(wanted.flatten(0, 1), tokens.flatten()).backward()
    whole, pieces, cache = model.train()(tokens).logits, [], None
    for piece in tokens.split([66, 1, 1, 7], dim=1):
        out = model.eval()(piece, past_key_values=cache)
        cache, pieces = out.past_key_values, [*pieces, out.logits]
    for logits in (whole, torch.cat(pieces, dim=1)):
        torch.testing.assert_close(logits, wanted, **EXACT)
        model.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        for name, p in native.named_parameters():
            found = model.get_parameter(stored_name(name)).grad
            assert (found - p.grad).abs().max() <= 1e-8 * p.grad.abs().max(), name
    for i, own in enumerate(native.config.layers):
        if own.mixer.kind == "softmax":
            assert cache.states[i][0].shape[2] == (own.mixer.window or 75)


@pytest.mark.parametrize("sides", [("left", "left"), ("right", "left"), ("left", "right"), ("right", "right")])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_turns_of_unequal_length(classes, case, sides):
    """Padding anywhere, in the first turn and in the next ones, is as if it were not there."""
    condition, overrides = CASES[case]
    native = lively(small_config(condition, **overrides))
    model = of_native(classes, native)
    turns = [[random_tokens(native.config, 1, n, seed=n) for n in lengths] for lengths in ((70, 3), (2, 66), (1, 1))]
    cache, mask, found = None, torch.zeros(2, 0), ([], [])
    for turn, side in zip(turns, (*sides, "left"), strict=True):
        tokens, new = padded(turn, side)
        mask = torch.cat([mask, new], dim=1)
        out = model(tokens, attention_mask=mask, past_key_values=cache)
        cache = out.past_key_values
        for row in range(2):
            found[row].append(out.logits[row, new[row].bool()])
    for row in range(2):
        text = torch.cat([turn[row] for turn in turns], dim=1)
        torch.testing.assert_close(torch.cat(found[row]), native(text)[0], **EXACT)


@torch.no_grad()
def test_positions_masks_and_embeddings(loaded):
    _, model = loaded("interdomain")
    assert code_of(model).__name__.startswith("transformers_modules.")
    assert code_of(model, "scan").input_features is not None  # the package's kernels
    tokens, mask = padded([random_texts(1, 5), random_texts(1, 12, seed=2)], "left")
    out = model(tokens, attention_mask=mask)
    assert torch.equal(model(tokens, attention_mask=mask, logits_to_keep=5).logits, out.logits[:, -5:])
    counted = (mask.cumsum(1) - 1).clamp_min(0)
    assert torch.equal(model(tokens, attention_mask=mask, position_ids=counted).logits, out.logits)
    assert torch.equal(model(tokens, attention_mask=mask, position_ids=torch.arange(12)[None]).logits, out.logits)
    embeds = model.get_input_embeddings()(tokens)
    assert torch.equal(model(inputs_embeds=embeds, attention_mask=mask).logits, out.logits)
    states = model(tokens, attention_mask=mask, output_hidden_states=True).hidden_states
    assert [h.shape for h in states] == [(2, 12, 32)] * 3
    assert torch.equal(model.output(states[-1]), out.logits)
    assert torch.equal(model(tokens, attention_mask=mask, return_dict=False)[0], out.logits)
    for wrong in (
        dict(position_ids=torch.arange(12)[None] % 6),
        dict(attention_mask=torch.ones(2, 5)),
        dict(attention_mask=torch.ones(2, 1, 12, 12)),
        dict(inputs_embeds=embeds),
        dict(output_attentions=True),
        dict(past_key_values=[(1, 2)]),
        dict(past_key_values=model(tokens[:1]).past_key_values),
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            model(tokens, **wrong)


@torch.no_grad()
def test_export_of_passes_and_of_the_decode_step(loaded):
    _, model = loaded("hybrid")  # of interdomain attention and softmax
    auto = torch.export.Dim.AUTO
    shapes = {"input_ids": {0: auto, 1: auto}, "use_cache": None}
    program = torch.export.export(model, (random_texts(2, 9),), dict(use_cache=False), dynamic_shapes=shapes)
    tokens = random_texts(3, 21)
    torch.testing.assert_close(program.module()(tokens, use_cache=False).logits, model(tokens).logits, **CLOSE)
    cache, token = model(random_texts(2, 9)).past_key_values, random_texts(2, 1, seed=2)
    program = torch.export.export(model, (), dict(input_ids=token, past_key_values=copy.deepcopy(cache)), strict=False)
    out = program.module()(input_ids=token, past_key_values=copy.deepcopy(cache))
    wanted = model(token, past_key_values=cache)
    torch.testing.assert_close(out.logits, wanted.logits, **CLOSE)
    torch.testing.assert_close(out.past_key_values.states, wanted.past_key_values.states, **CLOSE)
