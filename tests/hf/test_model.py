"""The folder's classes against the native model: values, gradients, steps, padding."""

import copy

import pytest
import torch
from torch.nn import functional as F

from interdomain.checkpoint.pretrained import from_transformers, stored_name, to_transformers

from ..model.common import VARIANTS, lively, random_tokens, small_config, variant
from .common import CASES, code_of, each_case, padded, random_texts

EXACT = dict(rtol=1e-9, atol=1e-10)


@pytest.fixture
def plain(monkeypatch):
    """plain(model of the package) -> the same in `interdomain.hf`, from now on in plain PyTorch."""
    hf = pytest.importorskip("interdomain.hf")

    def make(native):
        settings = to_transformers(native.config)
        assert from_transformers({**settings, "facts": {}}) == native.config
        model = hf.InterdomainForCausalLM(hf.InterdomainConfig(**settings)).double().eval()
        model.load_state_dict(
            {stored_name(name): tensor for name, tensor in native.state_dict().items()}
        )
        monkeypatch.setattr("interdomain.model.mixers.kernels.HAS_PACKAGE", False)
        return model

    return make


@pytest.mark.parametrize(("condition", "option"), VARIANTS)
def test_logits_gradients_and_steps(plain, condition, option):
    """In float64, over two chunks: a whole pass; and prefill, steps and a second piece with a cache."""
    native = variant(condition, option)
    tokens = random_tokens(native.config, 2, 75)
    wanted = native(tokens)
    F.cross_entropy(wanted.flatten(0, 1), tokens.flatten()).backward()
    model = plain(native)
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


@pytest.mark.parametrize(
    "sides", [("left", "left"), ("right", "left"), ("left", "right"), ("right", "right")]
)
@each_case
@torch.no_grad()
def test_turns_of_unequal_length(plain, case, sides):
    """Padding anywhere, in the first turn and in the next ones, is as if it were not there."""
    condition, overrides = CASES[case]
    native = lively(small_config(condition, **overrides))
    turns = [
        [random_tokens(native.config, 1, n, seed=n) for n in lengths]
        for lengths in ((70, 3), (2, 66), (1, 1))
    ]
    wanted = [native(torch.cat([turn[row] for turn in turns], dim=1))[0] for row in range(2)]
    model = plain(native)
    cache, mask, found = None, torch.zeros(2, 0), ([], [])
    for turn, side in zip(turns, (*sides, "left"), strict=True):
        tokens, new = padded(turn, side)
        mask = torch.cat([mask, new], dim=1)
        out = model(tokens, attention_mask=mask, past_key_values=cache)
        cache = out.past_key_values
        for row in range(2):
            found[row].append(out.logits[row, new[row].bool()])
    for row in range(2):
        torch.testing.assert_close(torch.cat(found[row]), wanted[row], **EXACT)


@torch.no_grad()
def test_positions_masks_and_embeddings(loaded):
    _, model = loaded("interdomain")
    assert code_of(model).__name__.startswith("transformers_modules.")
    assert code_of(model, "plain").HAS_PACKAGE
    tokens, mask = padded([random_texts(1, 5), random_texts(1, 12, seed=2)], "left")
    out = model(tokens, attention_mask=mask)
    assert torch.equal(
        model(tokens, attention_mask=mask, logits_to_keep=5).logits, out.logits[:, -5:]
    )
    counted = (mask.cumsum(1) - 1).clamp_min(0)
    assert torch.equal(model(tokens, attention_mask=mask, position_ids=counted).logits, out.logits)
    assert torch.equal(
        model(tokens, attention_mask=mask, position_ids=torch.arange(12)[None]).logits, out.logits
    )
    for wrong in (
        dict(position_ids=torch.arange(12)[None] % 6),
        dict(position_ids=torch.arange(11)[None]),
        dict(position_ids=torch.arange(12)[:, None]),
        dict(position_ids=torch.arange(12).expand(3, 2, 12)),
        dict(attention_mask=torch.ones(2, 5)),
        dict(attention_mask=torch.ones(2, 1, 12, 12)),
        dict(inputs_embeds=torch.zeros(2, 12, 32)),
        dict(output_attentions=True),
        dict(past_key_values=[(1, 2)]),
        dict(past_key_values=model(tokens[:1]).past_key_values),
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            model(tokens, **wrong)
    packed = dict(position_ids=torch.arange(12)[None] % 6)
    with pytest.raises(ValueError, match="no packed sequences"):
        torch.compile(model, backend="eager")(tokens, **packed)
    with pytest.raises(ValueError, match="no packed sequences"):
        model(tokens, cu_seq_lens_q=torch.tensor([0, 6, 12], dtype=torch.int32))
    for right in (
        dict(attention_mask=mask, position_ids=counted),
        dict(position_ids=torch.arange(12)[None]),
    ):
        assert model.generate(tokens, **right, max_new_tokens=1).shape == (2, 13)
    with pytest.raises(NotImplementedError, match=r"use torch\.export"):
        torch.jit.trace(model, tokens)


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        ("Dynamo", "s4d"),
        ("Onnx", "hybrid"),
        ("Onnx", "s4d"),
        ("Onnx", "gla"),
        ("Onnx", "gated-deltanet"),
    ],
)
@torch.no_grad()
def test_graphs_of_transformers_exporters(there, case, backend):
    """One graph for all prompts, left-padded and of several chunks, and one for all steps, without the package's kernels.

    For ONNX: pip install onnx onnxscript onnxruntime.
    """
    module = pytest.importorskip(
        f"transformers.exporters.exporter_{backend.lower()}", reason="transformers 5 has them"
    )
    if backend == "Onnx":
        pytest.importorskip("onnxruntime")
    model = copy.deepcopy(there)
    del model.model.layers[2 if case == "hybrid" else 1 :]
    model.config.num_hidden_layers = len(model.model.layers)
    tokens, mask = padded([random_texts(1, n, seed=n) for n in (4, 9)], "left")
    config = getattr(module, f"{backend}Config")(dynamic=True)
    inputs = dict(input_ids=tokens, attention_mask=mask)
    run = (
        getattr(module, f"{backend}Exporter")().export_for_generation(model, inputs, config).runners
    )
    found, wanted, name_of_cache = code_of(model).InterdomainCache(), None, code_of(model).CACHE
    tokens, mask = padded([random_texts(1, n, seed=n) for n in (150, 70, 3)], "left")
    for name, new in (("prefill", tokens), ("decode", tokens[:, :1]), ("decode", tokens[:, 1:2])):
        reference = model(new, attention_mask=mask, past_key_values=wanted)
        out = run[name](input_ids=new, attention_mask=mask, **{name_of_cache: found})
        found, wanted, seen = (
            out.past_key_values,
            reference.past_key_values,
            mask[:, -new.shape[1] :].bool(),
        )
        torch.testing.assert_close(out.logits[seen], reference.logits[seen], rtol=1e-3, atol=1e-3)
        mask = torch.cat([mask, torch.ones(3, 1).long()], dim=1)
