"""The exported model's classes against the native model: values, gradients, steps, padding."""

import copy

import pytest
import torch
from torch.nn import functional as F

from interdomain.checkpoint.pretrained import stored_name, to_transformers

from ..model.common import lively, random_tokens, small_config
from ..scan.common import assert_within
from .common import CASES, code_of, each_case, padded, padded_batch, random_texts

EXACT = {"rtol": 1e-9, "atol": 1e-10}


def native_model(case):
    condition, settings = CASES[case]
    return lively(small_config(condition, **settings))


@pytest.fixture
def in_plain_pytorch(monkeypatch):
    """A function that makes `interdomain.hf`'s model of a native one, in plain PyTorch from then on."""
    hf = pytest.importorskip("interdomain.hf")

    def make(native):
        settings = to_transformers(native.config)
        model = hf.InterdomainForCausalLM(hf.InterdomainConfig(**settings)).double().eval()
        state = {stored_name(name): tensor for name, tensor in native.state_dict().items()}
        model.load_state_dict(state)
        monkeypatch.setattr("interdomain.model.mixers.kernels.HAS_PACKAGE", False)
        return model

    return make


# Lengths of the texts that two rows get in each turn, and the side of the padding.
TURNS = {
    "whole": [((75, 75), "left")],
    "pieces": [((66, 66), "left"), ((1, 1), "left"), ((1, 1), "left"), ((7, 7), "left")],
    "padding": [((70, 3), "left"), ((2, 66), "right"), ((1, 1), "left")],
    "padding, right": [((70, 3), "right"), ((2, 66), "left"), ((1, 1), "left")],
}


@pytest.mark.parametrize("turns", TURNS.values(), ids=TURNS)
@each_case
def test_logits_and_gradients_turn_by_turn(in_plain_pytorch, case, turns):
    """Prefill over two chunks, steps and more text with a cache. Padding in any turn leaves no trace."""
    native = native_model(case)
    model = in_plain_pytorch(native).train(len(turns) == 1)
    texts = random_tokens(native.config, 2, 0).split(1)
    mask = torch.zeros(2, 0)
    cache = None
    logits = []
    for lengths, side in turns:
        rows = [random_tokens(native.config, 1, n, seed=n) for n in lengths]
        texts = [torch.cat(row, dim=1) for row in zip(texts, rows, strict=True)]
        tokens, turn_mask = padded(rows, side)
        mask = torch.cat([mask, turn_mask], dim=1)
        given = None if mask.all() else mask
        out = model(tokens, attention_mask=given, past_key_values=cache)
        cache = out.past_key_values
        logits.append(out.logits)
    logits = torch.cat(logits, dim=1)
    for row, text in enumerate(texts):
        found = logits[row, mask[row].bool()]
        wanted = native(text)[0]
        torch.testing.assert_close(found, wanted, **EXACT)
        F.cross_entropy(wanted, text[0]).backward()
        F.cross_entropy(found, text[0]).backward(retain_graph=True)
    expected = {stored_name(name): p.grad for name, p in native.named_parameters()}
    assert_within({name: p.grad for name, p in model.named_parameters()}, expected, 1e-8)
    for number, layer in enumerate(native.config.layers):
        if cache is not None and layer.mixer.kind == "softmax":
            keys, _ = cache.states[number]
            assert keys.shape[2] == (layer.mixer.window or mask.shape[1]), (keys.shape, mask.shape)


@torch.no_grad()
def test_positions_and_logits_to_keep(loaded):
    """Positions that count the tokens of the mask, or all tokens, change nothing."""
    model = loaded("interdomain")[1]
    assert code_of(model).__name__.startswith("transformers_modules.")
    assert code_of(model, "plain").HAS_PACKAGE
    tokens, mask = padded_batch()
    logits = model(tokens, attention_mask=mask).logits
    last = model(tokens, attention_mask=mask, logits_to_keep=5).logits
    assert torch.equal(last, logits[:, -5:])
    for positions in ((mask.cumsum(1) - 1).clamp_min(0), torch.arange(12)[None]):
        settings = {"attention_mask": mask, "position_ids": positions}
        assert torch.equal(model(tokens, **settings).logits, logits)
        assert model.generate(tokens, max_new_tokens=1, **settings).shape == (2, 13)


PACKED = {"position_ids": torch.arange(12)[None] % 6}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (PACKED, "position_ids"),
        ({"cu_seq_lens_q": torch.tensor([0, 6, 12])}, "no packed sequences"),
        ({"position_ids": torch.arange(11)[None]}, "position_ids"),
        ({"attention_mask": torch.ones(2, 5)}, "attention_mask"),
        ({"inputs_embeds": torch.zeros(2, 12, 32)}, "inputs_embeds"),
        ({"output_attentions": True}, "output_attentions"),
        ({"past_key_values": [(1, 2)]}, "past_key_values"),
    ],
)
def test_wrong_arguments_are_refused(loaded, settings, words):
    model = loaded("interdomain")[1]
    tokens, _ = padded_batch()
    with pytest.raises(ValueError, match=words):
        model(tokens, **settings)


@torch.no_grad()
def test_a_cache_of_other_rows_and_traces_are_refused(loaded):
    model = loaded("interdomain")[1]
    tokens, _ = padded_batch()
    with pytest.raises(ValueError, match="past_key_values"):
        model(tokens, past_key_values=model(tokens[:1]).past_key_values)
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(ValueError, match="no packed sequences"):
        compiled(tokens, **PACKED)
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
    """One graph serves all prompts, left-padded and of several chunks, and one serves all steps.

    They run without the package's kernels. For ONNX: pip install onnx onnxscript onnxruntime.
    """
    exporters = pytest.importorskip(
        f"transformers.exporters.exporter_{backend.lower()}", reason="transformers 5 has them"
    )
    if backend == "Onnx":
        pytest.importorskip("onnxruntime")
    model = copy.deepcopy(there)
    layers = 2 if case == "hybrid" else 1
    del model.model.layers[layers:]
    model.config.num_hidden_layers = layers
    tokens, mask = padded_batch()
    exporter = getattr(exporters, f"{backend}Exporter")()
    config = getattr(exporters, f"{backend}Config")(dynamic=True)
    inputs = {"input_ids": tokens, "attention_mask": mask}
    graphs = exporter.export_for_generation(model, inputs, config).runners

    tokens, mask = padded([random_texts(1, n, seed=n) for n in (150, 70, 3)], "left")
    code = code_of(model)
    cache = None
    graph_cache = code.InterdomainCache()
    for name, new in (("prefill", tokens), ("decode", tokens[:, :1]), ("decode", tokens[:, 1:2])):
        wanted = model(new, attention_mask=mask, past_key_values=cache)
        found = graphs[name](input_ids=new, attention_mask=mask, **{code.CACHE_NAME: graph_cache})
        cache = wanted.past_key_values
        graph_cache = found.past_key_values
        read = mask[:, -new.shape[1] :].bool()
        torch.testing.assert_close(found.logits[read], wanted.logits[read], rtol=1e-3, atol=1e-3)
        mask = F.pad(mask, (0, 1), value=1)
