"""FLOPs against a count of the products that are computed, and the sizes of states."""

import re

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from interdomain.model import CONDITIONS, Transformer, build_config
from interdomain.model.config import FIXED_STATE
from interdomain.model.flops import forward_flops_per_token, state_size, train_flops_per_token

from .common import OPTIONS, VARIANTS, each_variant, small_config

# The baselines' recurrences are products that PyTorch counts, too.
COUNTED = [v for v in VARIANTS if v[0] not in FIXED_STATE and "window" not in v[1]]


def counted_flops(model, length):
    """Returns PyTorch's count of one forward pass. It does not see the op of the scan."""
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.int64))
    return counter.get_total_flops()


@pytest.mark.parametrize(("condition", "option"), COUNTED)
def test_products_of_the_model(condition, option):
    """Linear layers, Fourier features and the output head are as PyTorch counts them.

    Tables do not grow with T, so the difference of two lengths does not contain them.
    """
    config = small_config(condition, **OPTIONS[option])
    T = 128
    with sdpa_kernel(SDPBackend.MATH):  # the implementation whose products PyTorch counts
        model = Transformer(config)
        found = counted_flops(model, 2 * T) - counted_flops(model, T)
    flops = forward_flops_per_token(config, T)
    # PyTorch counts whole squares of softmax's scores and values, (2 T)^2 - T^2 of each.
    kinds = [layer.mixer.kind for layer in config.layers]
    scores_and_values = 2 * 2 * config.dim * 3 * T**2
    softmax = kinds.count("softmax") * scores_and_values
    assert found == T * (flops["linear"] + flops["head"]) + softmax


@each_variant
def test_sizes_of_states(condition, option):
    config = small_config(condition, **OPTIONS[option])
    state = Transformer(config).init_state(3, 7)
    for layer, layer_state in zip(config.layers, state.layers, strict=True):
        if layer.mixer.kind != "softmax":
            assert layer_state.ssm.numel() == 3 * state_size(layer)
            continue
        tokens = 7 if layer.mixer.window is None else 1
        numbers = layer_state.k.numel() + layer_state.v.numel()
        assert numbers == 3 * tokens * state_size(layer)


# Multiply-adds of one layer and token at 125M: those of the mixer and those of the convolutions.
TABLE = {
    "softmax": (4097 * 64 * 12, 0),
    "interdomain": (73_728 * 12, 2 * 4 * 768),
    "single-query": (73_728 * 12, 3 * 4 * 768),
    "dual-linear": (40_960 * 12, 4 * 768),
    "s4d": (40_960 * 12, 2 * 4 * 768),
    # Three heads of 256: scores and sums in chunks of 64, reading and adding to the state. The
    # delta rule also has the scores of keys, half of a product for the system, and one of the state.
    "gla": ((2 * 64 + 2 * 256) * 768, 0),
    "deltanet": ((2 * 64 + 2 * 256 + 64 + 64 + 256) * 768, 3 * 4 * 768),
    "gated-deltanet": ((2 * 64 + 2 * 256 + 64 + 64 + 256) * 768, 3 * 4 * 768),
    # 24 heads of 64 share keys of 128.
    "mamba2": (64 * 128 + (64 + 2 * 128) * 1536, 4 * (1536 + 256)),
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_counts_of_every_condition(condition):
    """A head has about 74 k multiply-adds per token, and causal softmax 262 k at T = 4096."""
    row = re.sub("-(norope|rope|paired)$", "", condition)  # a rotation is not counted
    mixer, conv = TABLE[row]
    config = build_config("125M", condition)
    flops = forward_flops_per_token(config, 4096)
    assert flops["mixer"] == 2 * 12 * mixer
    assert flops["conv"] == 2 * 12 * conv
    assert train_flops_per_token(config, 4096) == 3 * sum(flops.values())
    if condition != "softmax":
        # This is the paper's budget of a layer's state.
        assert state_size(build_config("1.3B", condition)) == 524_288


def test_heads_that_share_a_state():
    """They save its updates: 2M (R + D) multiply-adds for each of 11 heads in 12 layers."""
    whole = forward_flops_per_token(build_config("125M"), 4096)
    shared = forward_flops_per_token(build_config("125M", n_kv_heads=1), 4096)
    assert whole["mixer"] - shared["mixer"] == 2 * 12 * 11 * 2 * 64 * 2 * 64


@pytest.mark.parametrize("T", [1, 6, 7, 100])
def test_a_window_s_scores_and_values(T):
    config = small_config("softmax", window=7)
    attended = sum(min(t, 7) for t in range(1, T + 1))
    scores_and_values = 2 * config.dim * attended // T
    found = forward_flops_per_token(config, T)["mixer"]
    assert found == 2 * 2 * scores_and_values
