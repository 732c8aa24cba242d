"""FLOPs per token, and the size of a layer's state. A multiply-add counts as two FLOPs.

Each mixer counts its own core and state (`mixers.base.Mixer`). This module adds the parts that all
mixers share.
"""

import functools
from collections import Counter

import torch

from .config import ModelConfig
from .layers import Linear, ShortConv
from .transformer import TransformerBlock, mixer_class


def forward_flops_per_token(config: ModelConfig, seq_len: int) -> dict[str, int]:
    """Returns the FLOPs of a forward pass per token.

    Embedding look-ups, norms and activations are not counted: they are bound by memory, and below 1
    %.

    Args:
        config: The model.
        seq_len: Tokens of a sequence, which softmax attention depends on.
    Returns:
        FLOPs of the linear layers ("linear"), output head ("head"), convolutions ("conv") and mixer
        cores ("mixer").
    """
    macs: Counter[str] = Counter()
    for layer in config.layers:
        macs += _block_macs(layer, seq_len)
    return {
        "linear": 2 * macs["linear"],
        "head": 2 * config.dim * config.vocab_size,
        "conv": 2 * macs["conv"],
        "mixer": 2 * macs["mixer"],
    }


@functools.cache  # all layers with the same settings are counted once
def _block_macs(layer: ModelConfig, seq_len: int) -> Counter[str]:
    """Returns the multiply-adds of a block per token.

    Each weight of a linear layer or a convolution makes one.

    Args:
        layer: An entry of `ModelConfig.layers`.
        seq_len: Tokens of a sequence, which softmax attention depends on.
    """
    macs: Counter[str] = Counter(mixer_class(layer.mixer).macs(layer, seq_len))
    # A block on the meta device has the shapes of its weights, and takes no memory.
    with torch.device("meta"):
        block = TransformerBlock(layer, None)
    for module in block.modules():
        if isinstance(module, Linear):
            macs["linear"] += module.weight.numel()
        elif isinstance(module, ShortConv):
            macs["conv"] += module.weight.numel()
    return macs


def train_flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Returns the FLOPs of forward and backward pass per token, three times the forward's.

    Recomputation is not counted.

    Args:
        config: The model.
        seq_len: Tokens of a sequence, which softmax attention depends on.
    """
    return 3 * sum(forward_flops_per_token(config, seq_len).values())


def state_size(layer: ModelConfig) -> int:
    """Returns the number of elements of a layer's state per sequence (the paper's state budget).

    A complex number counts as two. For softmax without a window the result is per sequence and
    token.
    """
    return mixer_class(layer.mixer).state_size(layer)
