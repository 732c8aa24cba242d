"""bf16 products over float32 parameters: the dtypes inside the model, and the gradients."""

import pytest
import torch

from interdomain.model import Execution, Transformer
from interdomain.model.generation import Decoder, prefill
from interdomain.model.layers import Linear

from .common import assert_near, small_config

FLOAT32 = torch.float32
BF16 = torch.bfloat16
# Modules that read the residual stream.
STREAM = ("layers.0.attention_norm", "layers.0.ffn_norm", "layers.1.attention_norm", "norm")
TOKENS = torch.arange(80).view(2, 40) % 50


def model_of(condition):
    model = Transformer(small_config(condition), Execution(bf16_products=True))
    model.init_weights()
    return model


def check_float32_input(module, args):
    assert args[0].dtype == FLOAT32


def check_bf16_output(module, args, output):
    assert output.dtype == BF16


@pytest.mark.parametrize("condition", ["interdomain", "s4d", "softmax"])
def test_dtypes(condition):
    """The residual stream, the norms' inputs and all gradients are float32; products are bf16.

    test_mixer.py has the dtypes of the scan.
    """
    model = model_of(condition)
    for name in STREAM:
        model.get_submodule(name).register_forward_pre_hook(check_float32_input)
    for module in model.layers.modules():
        if isinstance(module, Linear):
            module.register_forward_hook(check_bf16_output)
    loss = model(TOKENS, labels=TOKENS)
    assert loss.dtype == FLOAT32
    assert model(TOKENS).dtype == BF16
    loss.backward()
    for name, p in model.named_parameters():
        assert p.dtype == p.grad.dtype == FLOAT32, name


@pytest.mark.parametrize("condition", ["interdomain", "softmax", "s4d"])
@torch.no_grad()
def test_generation(condition):
    """Pieces and single tokens continue a state whose convolution inputs or cache are bf16."""
    model = model_of(condition)
    whole = model(TOKENS).float()
    logits, state = prefill(model, TOKENS[:, :30], chunk=16)
    found = [logits]
    decoder = Decoder(model, state)
    for tokens in TOKENS[:, 30:].unbind(1):
        found.append(decoder.step(tokens))
    found = torch.stack(found, 1).float()
    assert_near(found, whole[:, 29:], 0.02 * whole.abs().max())
    layer = state.layers[0]
    tensor = layer.k if condition == "softmax" else layer.conv
    assert tensor.dtype == BF16
