"""FLOPs against a count of the products that are really made, and the sizes of states."""

import re

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from interdomain.model import CONDITIONS, Transformer, build_config
from interdomain.model.config import FIXED_STATE
from interdomain.model.flops import forward_flops_per_token, state_size, train_flops_per_token

from .common import OPTIONS, VARIANTS, small_config

# The others' products: test_fixed_state, test_softmax
SCANS = [v for v in VARIANTS if v[0] not in FIXED_STATE and "window" not in v[1]]


def counted(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize(("condition", "option"), SCANS)
def test_products_of_the_model(condition, option):
    """Linear layers, Fourier features and output head, counted by torch, for which the scan's op is nothing.

    Tables do not grow with T, so the differences of three lengths are free of them.
    """
    config = small_config(condition, **OPTIONS[option])
    softmax = sum(layer.mixer.kind == "softmax" for layer in config.layers)
    T = 128
    with sdpa_kernel(SDPBackend.MATH):  # the form whose products torch counts
        model = Transformer(config)
        lengths = [
            counted(lambda t=t: model(torch.zeros(1, t, dtype=torch.int64)))
            for t in (T, 2 * T, 3 * T)
        ]
    flops = forward_flops_per_token(config, T)
    # Beyond what grows with T^2 (softmax's scores and values, whole squares) ...
    square = (lengths[2] - 2 * lengths[1] + lengths[0]) / (2 * T * T)
    per_token = (lengths[1] - lengths[0]) / T - 3 * T * square
    assert per_token == flops["linear"] + flops["head"]
    if softmax:
        # ... of which the causal half, with its diagonal, is needed: (T + 1) / 2 keys per query.
        assert square == 2 * 2 * softmax * config.dim
        others = (
            0 if softmax == 2 else forward_flops_per_token(small_config(condition), T)["mixer"] / 2
        )
        assert flops["mixer"] - others == square * (T + 1) / 2


@pytest.mark.parametrize(("condition", "option"), VARIANTS)
def test_states_are_as_large_as_said(condition, option):
    config = small_config(condition, **OPTIONS[option])
    for layer, state in zip(
        config.layers, Transformer(config).init_state(3, 7).layers, strict=True
    ):
        if layer.mixer.kind == "softmax":
            tokens = 7 if layer.mixer.window is None else 1
            assert sum(x.numel() for x in (state.k, state.v)) == 3 * tokens * state_size(layer)
        else:
            assert state.ssm.numel() == 3 * state_size(layer)


# Of one layer and token: multiply-adds of the core and of the convolutions; numbers of its state (the paper's budget at 1.3B).
TABLE = {
    "softmax": (4097 * 64 * 12, 0, 4096),
    "interdomain": (73_728 * 12, 2 * 4 * 768, 524_288),
    "single-query": (73_728 * 12, 3 * 4 * 768, 524_288),
    "dual-linear": (40_960 * 12, 4 * 768, 524_288),
    "s4d": (40_960 * 12, 2 * 4 * 768, 524_288),
    # Three heads of 256: scores and sums in chunks of 64, reading and adding to the state; of the delta rule also the scores of
    # keys, half of a product for the system, and what the state has of the keys.
    "gla": ((2 * 64 + 2 * 256) * 768, 0, 524_288),
    "deltanet": ((2 * 64 + 2 * 256 + 64 + 64 + 256) * 768, 3 * 4 * 768, 524_288),
    "gated-deltanet": ((2 * 64 + 2 * 256 + 64 + 64 + 256) * 768, 3 * 4 * 768, 524_288),
    # 24 heads of 64 share keys of 128.
    "mamba2": (64 * 128 + (64 + 2 * 128) * 1536, 4 * (1536 + 256), 524_288),
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_every_condition_has_its_own_count(condition):
    """About 74 k multiply-adds per token and head, against 262 k for causal softmax at T = 4096."""
    config, row = build_config("125M", condition), re.sub("-(norope|rope|paired)$", "", condition)
    flops = forward_flops_per_token(config, 4096)
    core, conv, state = TABLE[row]  # a rotation is not counted
    assert (flops["mixer"], flops["conv"]) == (2 * 12 * core, 2 * 12 * conv)
    assert state_size(build_config("1.3B", condition)) == state
    assert train_flops_per_token(config, 4096) == 3 * sum(flops.values())
    longer = forward_flops_per_token(config, 65_536)["mixer"]
    assert longer > 15 * flops["mixer"] if condition == "softmax" else longer == flops["mixer"]
    if condition != "softmax":
        hybrid, softmax = (
            forward_flops_per_token(c, 4096)
            for c in (
                build_config("125M", condition, softmax_every=3),
                build_config("125M", "softmax"),
            )
        )
        assert all(
            hybrid[part] == (8 * flops[part] + 4 * softmax[part]) / 12
            for part in ("linear", "conv", "mixer")
        )
    if (
        condition == "interdomain"
    ):  # a shared state saves its updates only: 2M (R + D) per state head
        less = forward_flops_per_token(build_config("125M", condition, n_kv_heads=1), 4096)["mixer"]
        assert flops["mixer"] - less == 2 * 12 * 11 * 2 * 64 * 2 * 64


@pytest.mark.parametrize("T", [1, 6, 7, 100])
def test_a_window_s_scores_and_values(T):
    config = small_config("softmax", window=7)
    attended = sum(min(t, 7) for t in range(1, T + 1))
    assert forward_flops_per_token(config, T)["mixer"] == 2 * 2 * (config.dim * 2 * attended // T)
