"""FLOPs against a count of the products that are really made, and memory against its own definition."""

import itertools
import re

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from interdomain.model import CONDITIONS, Transformer, build_config, meta_model
from interdomain.model.config import FIXED_STATE
from interdomain.model.costs.flops import forward_flops_per_token, memory_estimate, state_size, train_flops_per_token
from interdomain.model.costs.traffic import held
from interdomain.model.transformer import mixer_class

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
        lengths = [counted(lambda t=t: model(torch.zeros(1, t, dtype=torch.int64))) for t in (T, 2 * T, 3 * T)]
    flops = forward_flops_per_token(config, T)
    # Beyond what grows with T^2 (softmax's scores and values, whole squares) ...
    square = (lengths[2] - 2 * lengths[1] + lengths[0]) / (2 * T * T)
    per_token = (lengths[1] - lengths[0]) / T - 3 * T * square
    assert per_token == flops["linear"] + flops["head"]
    if softmax:
        # ... of which the causal half, with its diagonal, is needed: (T + 1) / 2 keys per query.
        assert square == 2 * 2 * softmax * config.dim
        others = 0 if softmax == 2 else forward_flops_per_token(small_config(condition), T)["mixer"] / 2
        assert flops["mixer"] - others == square * (T + 1) / 2


@pytest.mark.parametrize(("condition", "option"), VARIANTS)
def test_states_are_as_large_as_said(condition, option):
    config = small_config(condition, **OPTIONS[option])
    for layer, state in zip(config.layers, Transformer(config).init_state(3, 7).layers, strict=True):
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
            for c in (build_config("125M", condition, softmax_every=3), build_config("125M", "softmax"))
        )
        assert all(hybrid[part] == (8 * flops[part] + 4 * softmax[part]) / 12 for part in ("linear", "conv", "mixer"))
    if condition == "interdomain":  # a shared state saves its updates only: 2M (R + D) per state head
        less = forward_flops_per_token(build_config("125M", condition, n_kv_heads=1), 4096)["mixer"]
        assert flops["mixer"] - less == 2 * 12 * 11 * 2 * 64 * 2 * 64


@pytest.mark.parametrize("T", [1, 6, 7, 100])
def test_a_window_s_scores_and_values(T):
    config = small_config("softmax", window=7)
    attended = sum(min(t, 7) for t in range(1, T + 1))
    assert forward_flops_per_token(config, T)["mixer"] == 2 * 2 * (config.dim * 2 * attended // T)


def names(layers):
    """Names of a stage's modules."""
    return [f"layers.{i}" for i in range(layers)]


def estimate(config, stages=None, **changes):
    stages = stages or [["tok_embeddings", *names(config.n_layers), "norm", "output"]]
    settings = dict(shards=4, local_batch=8, seq_len=256, checkpointing="none", precision="bf16")
    return memory_estimate(
        config, held(meta_model(config), stages, changes.get("tensor", 1)), **{**settings, **changes}
    )


def total(config, **changes):
    return sum(estimate(config, **changes).values())


@pytest.mark.parametrize("condition", ["interdomain", "s4d", "softmax"])
def test_memory(condition):
    config = small_config(condition, n_layers=6)  # with two, a block that is computed again is half of all
    own = held(meta_model(config), [["tok_embeddings", *names(6), "norm", "output"]])
    found, n = estimate(config), own.parameters
    # float32 parameters, gradients, and two moments, each on 1 of 4 devices; the dynamics on each.
    on_each = (n - own.dynamics) // 4 + own.dynamics
    assert (found["parameters"], found["gradients"], found["optimizer"]) == (4 * on_each, 4 * on_each, 8 * on_each)
    assert estimate(config, accumulated=True)["gradients"] == 4 * on_each + 4 * n
    assert estimate(config, shards=1, accumulated=True) == estimate(config, shards=1)  # nothing to gather
    assert estimate(config, stay_gathered=True)["gathered"] > found["gathered"]

    growing = [dict(local_batch=b) for b in (1, 2, 8)], [dict(seq_len=t) for t in (64, 256, 1024)]
    growing += ([dict(shards=s) for s in (8, 4, 1)],)
    growing += ([dict(checkpointing=c) for c in ("full", "selective", "none")],)
    growing += ([dict(precision=p) for p in ("bf16", "bf16-products", "float32")],)
    for changes in growing:
        for less, more in itertools.pairwise(total(config, **change) for change in changes):
            assert less < more
    kept = 2 * config.mixer.n_basis * config.n_heads * 6 * 8 * 256 * 2 * (condition == "interdomain")
    for checkpointing, expected in (("none", kept), ("selective", kept), ("full", 0)):
        whole = total(config, checkpointing=checkpointing)
        assert total(config, checkpointing=checkpointing, recompute=False) - whole == expected
    assert total(config) < total(small_config(condition, n_layers=7))
    assert total(config) < total(small_config(condition, n_layers=6, vocab_size=200))


@pytest.mark.parametrize(
    ("condition", "checkpointing"),
    [("interdomain", "selective"), ("interdomain", "none"), ("s4d", "full"), ("softmax", "none")],
)
def test_memory_by_axis(condition, checkpointing):
    """More ranks of an axis never take more of a device's memory, and what they divide falls by about their number."""
    config = build_config("350M", condition)
    own = dict(local_batch=8, seq_len=8192, checkpointing=checkpointing)
    for axis in ("context", "tensor"):
        each = [estimate(config, **own, **{axis: degree}) for degree in (1, 2, 4, 8)]
        for less, more in itertools.pairwise(reversed(each)):
            assert sum(less.values()) < sum(more.values())
        # Of 8 ranks each keeps the products' inputs of all tokens (tensor), or softmax's keys and values (context).
        assert each[3]["activations"] < 0.45 * each[0]["activations"]
    assert estimate(config, tensor=4)["loss"] < estimate(config)["loss"]
    # A pipeline's rank: some layers for several micro-batches, several stages, the ends' modules.
    stage, halves = [names(6)], [names(3), names(6)[3:]]
    one, two, four = (estimate(config, stage, **own, in_flight=(n,))["activations"] for n in (1, 2, 4))
    assert four - two == 2 * (two - one) > 0
    assert one == two - one or checkpointing == "full"  # where a block is computed again
    both = estimate(config, halves, **own, in_flight=(2, 2))["activations"]
    assert both - two == 2 * 8 * 8192 * config.dim * 2  # what the first stage passes on
    middle, last = estimate(config, stage, **own), estimate(config, [[*names(6), "norm", "output"]], **own)
    assert middle["loss"] == 0 < estimate(config, **own)["loss"] == last["loss"]
    assert middle["parameters"] < last["parameters"] < estimate(config, **own)["parameters"]


def test_the_bytes_of_a_run_of_the_paper_s_largest_size():
    settings = dict(shards=8, local_batch=4, seq_len=4096, accumulated=True, compiled=True, recompute=False)
    wanted = [698_570_240, 6_108_197_376, 1_397_140_480, 639_961_490, 34_099_691_520, 1_774_190_592]
    assert list(estimate(build_config("1.3B", "interdomain"), **settings).values()) == wanted


@pytest.mark.parametrize(("window", "precision"), [(None, "bf16"), (16, "bf16"), (None, "float32")])
def test_the_mask_of_documents(window, precision):
    """One for all layers, as the mixer makes it; in blocks, with the rows that fill the last block."""
    B, T, settings = 8, 256, dict(precision=precision, checkpointing="full")
    config = small_config("softmax", window=window, max_seq_len=T)
    positions = torch.arange(T).expand(B, T) % 100
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    made = mixer_class(config.mixer).packing(config.mixer, torch.arange(T), positions, dtype, None)
    masks = [mask for mask in (made.mask, made.blocks) if mask is not None]
    kept = total(config, documents=True, **settings) - total(config, **settings)
    assert kept == pytest.approx(sum(mask.nbytes for mask in masks), rel=0.04)
    assert total(small_config("interdomain"), documents=True) == total(small_config("interdomain"))
