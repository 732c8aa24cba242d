"""bf16 products over float32 parameters: the dtypes inside the model, and the gradients."""

import pytest
import torch

from interdomain.model import Execution, Transformer
from interdomain.model.layers import Linear

from .common import small_config

FLOAT32 = torch.float32
BF16 = torch.bfloat16
# Modules that read the residual stream.
STREAM = ("layers.0.attention_norm", "layers.0.ffn_norm", "layers.1.attention_norm", "norm")
TOKENS = torch.arange(80).view(2, 40) % 50


def check_float32_input(module, args):
    assert args[0].dtype == FLOAT32


def check_bf16_output(module, args, output):
    assert output.dtype == BF16


@pytest.mark.parametrize("condition", ["interdomain", "s4d", "softmax"])
def test_dtypes(condition):
    """The residual stream, the norms' inputs and all gradients are float32; products are bf16.

    test_mixer.py has the dtypes of the scan.
    """
    model = Transformer(small_config(condition), Execution(bf16_products=True))
    model.init_weights()
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
