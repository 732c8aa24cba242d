"""FLOPs against a count of the products that are really made, and memory against its own definition."""

import itertools

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from interdomain.model import CONDITIONS, Transformer, build_config, count_parameters, meta_model
from interdomain.model.config import PRECISIONS
from interdomain.model.flops import forward_flops_per_token, memory_estimate, state_size, train_flops_per_token

from .common import OPTIONS, VARIANTS, small_config


def counted(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize(("condition", "option"), VARIANTS)
def test_products_of_the_model(condition, option):
    """Linear layers, Fourier features and output head, counted by torch, for which the scan's op is nothing.

    Tables do not grow with T, so the difference of two lengths is free of them.
    """
    config = small_config(condition, **OPTIONS[option])
    T = 128
    with sdpa_kernel(SDPBackend.MATH):  # the form whose products torch counts
        model = Transformer(config)
        lengths = [counted(lambda t=t: model(torch.zeros(1, t, dtype=torch.int64))) for t in (T, 2 * T)]
    flops = forward_flops_per_token(config, T)
    softmax = condition == "softmax"
    # Beyond what grows with T^2 (softmax's scores and values, whole squares) ...
    square = (lengths[1] - 2 * lengths[0]) / (2 * T * T) if softmax else 0
    per_token = (lengths[1] - lengths[0]) / T - 3 * T * square
    assert per_token == flops["linear"] + flops["head"]
    if softmax:
        # ... of which the causal half, with its diagonal, is needed: (T + 1) / 2 keys per query.
        assert square == 2 * 2 * config.n_layers * config.dim
        assert flops["mixer"] == square * (T + 1) / 2


@pytest.mark.parametrize(("condition", "option"), VARIANTS)
def test_states_are_as_large_as_said(condition, option):
    config = small_config(condition, **OPTIONS[option])
    (state, *_) = Transformer(config).init_state(3, 7).layers
    if config.mixer.kind == "softmax":
        assert sum(x.numel() for x in (state.k, state.v)) == 3 * 7 * state_size(config)
    else:
        assert state.ssm.numel() == 3 * state_size(config)


# Of one layer and token: multiply-adds of the core and of the convolutions; numbers of its state (the paper's budget at 1.3B).
TABLE = {
    "softmax": (4097 * 64 * 12, 0, 4096),
    "interdomain": (73_728 * 12, 2 * 4 * 768, 524_288),
    "single-query": (73_728 * 12, 3 * 4 * 768, 524_288),
    "dual-linear": (40_960 * 12, 4 * 768, 524_288),
    "s4d": (40_960 * 12, 2 * 4 * 768, 524_288),
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_every_condition_has_its_own_count(condition):
    """About 74 k multiply-adds per token and head, against 262 k for causal softmax at T = 4096."""
    config, row = build_config("125M", condition), condition.removesuffix("-norope").removesuffix("-rope")
    flops = forward_flops_per_token(config, 4096)
    core, conv, state = TABLE[row]  # a rotation is not counted
    assert (flops["mixer"], flops["conv"]) == (2 * 12 * core, 2 * 12 * conv)
    assert state_size(build_config("1.3B", condition)) == state
    assert train_flops_per_token(config, 4096) == 3 * sum(flops.values())
    longer = forward_flops_per_token(config, 65_536)["mixer"]
    assert longer > 15 * flops["mixer"] if condition == "softmax" else longer == flops["mixer"]
    if condition == "interdomain":  # a shared state saves its updates only: 2M (R + D) per state head
        less = forward_flops_per_token(build_config("125M", condition, n_kv_heads=1), 4096)["mixer"]
        assert flops["mixer"] - less == 2 * 12 * 11 * 2 * 64 * 2 * 64


def estimate(config, **changes):
    settings = dict(shards=4, local_batch=8, seq_len=256, checkpointing="none", precision="bf16")
    return memory_estimate(config, count_parameters(meta_model(config)), **{**settings, **changes})


@pytest.mark.parametrize("condition", ["interdomain", "s4d", "softmax"])
def test_memory(condition):
    config = small_config(condition, n_layers=6)  # with two, a block that is computed again is half of all
    n = count_parameters(meta_model(config))
    found = estimate(config)
    # float32 parameters, gradients, and two moments, each on 1 of 4 devices.
    assert (found["parameters"], found["gradients"], found["optimizer"]) == (n, n, 2 * n)

    some = estimate(config, replicated=n // 2, accumulated=True)
    on_each = n // 2 + (n - n // 2) // 4
    assert (some["parameters"], some["gradients"], some["optimizer"]) == (4 * on_each, 4 * on_each + 4 * n, 8 * on_each)
    assert estimate(config, shards=1, accumulated=True) == estimate(config, shards=1)  # nothing to gather

    def total(**changes):
        return sum(estimate(config, **changes).values())

    growing = [dict(local_batch=b) for b in (1, 2, 8)], [dict(seq_len=t) for t in (64, 256, 1024)]
    growing += ([dict(shards=s) for s in (8, 4, 1)],)
    growing += ([dict(checkpointing=c) for c in ("full", "selective", "none")], [dict(precision=p) for p in PRECISIONS])
    for changes in growing:
        for less, more in itertools.pairwise(total(**change) for change in changes):
            assert less < more
    kept = 2 * config.mixer.n_basis * config.n_heads * 6 * 8 * 256 * 2 * (condition == "interdomain")
    for checkpointing, expected in (("none", kept), ("selective", kept), ("full", 0)):
        assert total(checkpointing=checkpointing, recompute=False) - total(checkpointing=checkpointing) == expected
    assert total() < sum(estimate(small_config(condition, n_layers=7)).values())
    assert total() < sum(estimate(small_config(condition, n_layers=6, vocab_size=200)).values())
