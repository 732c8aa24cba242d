"""bf16 products over float32 parameters, residual stream and norms: the dtypes inside the model, and the gradients."""

import pytest
import torch

from interdomain.model import Execution, Transformer
from interdomain.model.generation import Decoder, prefill

from .common import small_config

FLOAT32, BF16 = torch.float32, torch.bfloat16
TOKENS = torch.arange(80).view(2, 40) % 50


def model_of(condition, **options):
    model = Transformer(small_config(condition, **options), Execution(bf16_products=True))
    model.init_weights()
    return model


@pytest.mark.parametrize("condition", ["interdomain", "s4d", "softmax"])
def test_dtypes(condition):
    """Into every module and out of it (into the scan: test_mixer)."""
    model, into, out = model_of(condition), {}, {}

    def note(name):
        def hook(module, args, output):
            into[name] = next((x.dtype for x in args if isinstance(x, torch.Tensor)), None)
            out[name] = output.dtype if isinstance(output, torch.Tensor) else None

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(note(name))
    loss = model(TOKENS, labels=TOKENS)
    assert (
        loss.dtype == out["tok_embeddings"] == out["layers.0"] == out["layers.1"] == FLOAT32
    )  # the residual stream
    assert into["layers.0.attention_norm"] == into["layers.1.ffn_norm"] == into["norm"] == FLOAT32
    assert {
        out[name]
        for name in out
        if name.split(".")[-1] in ("wq", "wk", "wv", "wo", "w1", "w2", "w3")
    } == {BF16}
    assert model(TOKENS).dtype == BF16
    assert all(p.dtype == FLOAT32 for p in model.parameters())
    loss.backward()
    assert all(p.grad.dtype == FLOAT32 for p in model.parameters())


@pytest.mark.parametrize("condition", ["interdomain", "softmax", "s4d"])
@torch.no_grad()
def test_generation(condition):
    """In pieces and token by token, from a state whose convolution inputs or cache are bf16."""
    model = model_of(condition)
    whole = model(TOKENS).float()
    logits, state = prefill(model, TOKENS[:, :30], chunk=16)
    decoder = Decoder(model, state)
    found = [logits, *(decoder.step(TOKENS[:, t]) for t in range(30, 40))]
    torch.testing.assert_close(
        torch.stack(found, 1).float(), whole[:, 29:], rtol=0, atol=0.02 * whole.abs().max().item()
    )
    layer = state.layers[0]
    assert (layer.k if condition == "softmax" else layer.conv).dtype == BF16
