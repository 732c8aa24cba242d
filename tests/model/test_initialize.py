"""Initial values: a function of (seed, name) and nothing else, by the rules of `initialize`."""

import math

import pytest
import torch

from interdomain.model import CONDITIONS, Transformer, build_config, meta_model
from interdomain.model.initialize import initial_value, initialize
from interdomain.model.ssm import initial_A

from .common import OPTIONS, VARIANTS, random_tokens, small_config

LAYERS = 3


def config_of(condition="interdomain", **overrides):
    """One M = 64 head group as at 125M, wide enough for statistics."""
    shape = dict(dim=512, n_layers=LAYERS, n_heads=8, head_dim=64, n_basis=64, vocab_size=1000)
    return build_config("debug", condition, **{**shape, **overrides})


def initialized(config, seed=0):
    model = Transformer(config)
    with torch.no_grad():  # what a rule leaves out shows
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(math.nan)
    model.init_weights(seed)
    return model


@pytest.mark.parametrize(("condition", "option"), VARIANTS)
def test_every_parameter_and_buffer_has_a_rule(condition, option):
    model = initialized(small_config(condition, **OPTIONS[option]))
    for name, tensor in model.state_dict().items():
        assert tensor.isfinite().all(), name


def test_a_parameter_without_a_rule_is_an_error():
    model = Transformer(small_config("interdomain"))
    model.layers["0"].attention.wx = torch.nn.Linear(4, 4, bias=False)
    with pytest.raises(AssertionError, match=r"layers\.0\.attention\.wx\.weight"):
        model.init_weights()


def test_same_seed_same_values():
    config = small_config("dual-linear", output_gate=True)
    first, second, other = (initialized(config, seed).state_dict() for seed in (7, 7, 8))
    constant = ("norm", "log_A_real", "A_imag")
    for name in first:
        assert torch.equal(first[name], second[name]), name
        assert torch.equal(first[name], other[name]) == any(part in name for part in constant), name


def test_names_draw_apart():
    """No two tensors of one shape share their numbers."""
    values = [t for t in initialized(config_of(), 0).state_dict().values() if t.ndim == 2 and t.std() > 0]
    drawn = [v for v in values if not torch.equal(v, v[:1].expand_as(v))]
    for i, a in enumerate(drawn):
        for b in drawn[i + 1 :]:
            assert a.shape != b.shape or not torch.equal(a, b)


def test_order_and_neighbours_do_not_matter():
    """A part of the model, as a pipeline stage holds it, starts with the numbers that it has in the whole."""
    config = config_of(n_layers=LAYERS)
    whole = initialized(config)
    part = Transformer(config)
    part.tok_embeddings = part.output = part.norm = None
    for i in (1, 0):
        del part.layers[str(i)]
    initialize(part, config, 0)
    assert set(part.state_dict()) == {name for name in whole.state_dict() if name.startswith("layers.2.")}
    for name, tensor in part.state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name]), name


def test_wrappers_do_not_change_the_numbers():
    config = small_config("interdomain")
    plain, wrapped = initialized(config), Transformer(config)
    for i, layer in wrapped.layers.items():
        wrapped.layers[i] = torch.compile(layer)  # compiles nothing before its first call
    wrapped.init_weights(0)
    assert any("_orig_mod" in name for name in wrapped.state_dict())
    for a, b in zip(wrapped.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_surroundings_do_not_matter():
    config = small_config("interdomain", feature_map="rff")
    wanted = initialized(config).state_dict()
    torch.manual_seed(123)
    before = torch.get_rng_state()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            found = {name: initial_value(name, t.shape, config, 0) for name, t in wanted.items()}
    finally:
        torch.set_default_dtype(torch.float32)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == torch.float32
    assert torch.equal(torch.get_rng_state(), before)  # and nobody else's random numbers are used up


def assert_normal(x, std):
    """Mean and standard deviation within five standard errors."""
    n = x.numel()
    assert abs(x.mean().item()) < 5 * std / math.sqrt(n)
    assert abs(x.std().item() / std - 1) < 5 / math.sqrt(2 * n)
    # Normal, not uniform: 4.55 % lie beyond two standard deviations.
    beyond = (x.abs() > 2 * std).double().mean().item()
    assert abs(beyond - 0.0455) < 5 * math.sqrt(0.0455 / n)


def assert_uniform(x, low, high):
    n, width = x.numel(), high - low
    assert low <= x.min()
    assert x.max() <= high
    assert abs(x.mean().item() - (low + high) / 2) < 5 * width / math.sqrt(12 * n)
    assert abs(x.std().item() / (width / math.sqrt(12)) - 1) < 5 / math.sqrt(n)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_rules(condition):
    config = config_of(condition, **({} if condition == "softmax" else {"output_gate": True}))
    seen = set()
    for name, x in initialized(config).state_dict().items():
        kind, leaf = name.split(".")[-2:]
        seen.add(leaf if kind == "ssm" else kind)
        if kind in ("wo", "w2"):
            assert_normal(x, 0.02 / math.sqrt(2 * LAYERS))
        elif kind in ("tok_embeddings", "output", "wq", "wk", "wv", "wg", "w1", "w3"):
            assert_normal(x, 0.02)
        elif kind.endswith("_conv"):
            assert_uniform(x, -0.5, 0.5)  # 1 / sqrt(width 4), as torch.nn.Conv1d(groups=channels)
        elif leaf == "log_dt":
            assert x.shape == (8,)
        elif leaf == "log_A_real":
            assert (x.exp() - 0.5).abs().max() < 1e-7
        elif leaf == "A_imag":
            assert torch.equal(x, initial_A("s4d-inv", 64)[1].expand(8, 64))
        elif leaf == "C":
            assert_normal(x, 1 / 64)
        elif leaf == "c":
            assert_normal(x, 1 / 8)
        else:
            assert kind.endswith("norm")
            assert torch.equal(x, torch.ones_like(x) if leaf == "weight" else torch.zeros_like(x))
    assert {"wo", "w2", "tok_embeddings", "output", "wk", "w1", "w3", "norm", "attention_norm"} <= seen
    if condition != "softmax":
        assert {"k_conv", "k_norm", "v_norm", "log_dt", "log_A_real", "A_imag", "C", "wg"} <= seen
        assert ("c" in seen) != CONDITIONS[condition]["query_readout"]


def test_conv_rule_is_pytorch_s_default():
    conv = torch.nn.Conv1d(4096, 4096, 4, groups=4096)
    for default in (conv.weight, conv.bias):
        assert 0.49 < default.abs().max() <= 0.5
        assert_uniform(default.detach(), -0.5, 0.5)


def test_dt_is_log_uniform():
    config = config_of(dim=2048 * 2, n_heads=2048, head_dim=2)
    x = initial_value("layers.0.attention.ssm.log_dt", torch.Size([2048]), config, 0)
    assert_uniform(x, math.log(1e-3), math.log(1e-1))


@pytest.mark.parametrize(("c_form", "std"), [("full", 1 / 64), ("diagonal", 1 / 8)])
def test_c_scale(c_form, std):
    model = initialized(config_of(c_form=c_form))
    assert_normal(torch.cat([layer.attention.ssm.C.flatten() for layer in model.layers.values()]), std)


@pytest.mark.parametrize("c_form", ["full", "diagonal"])
def test_a_scale_of_c_is_that_of_the_complex_number(c_form):
    model = initialized(config_of(c_form=c_form, c_scale=1))
    C = torch.cat([layer.attention.ssm.C.flatten(end_dim=-2) for layer in model.layers.values()])
    assert C.square().sum(-1).mean().item() == pytest.approx(1, rel=0.1)  # S4D's complex N(0, 1)
    assert_normal(C.flatten(), math.sqrt(0.5))


def test_settings_of_the_start():
    shape = dict(dim=2048 * 2, n_heads=2048, head_dim=2, n_basis=4)
    config = config_of("s4d", **shape, linear_scale=3.0, dt_min=1e-2, dt_max=0.5, a_init="s4d-real")
    found = {
        leaf: initial_value(f"layers.0.attention.ssm.{leaf}", torch.Size(size), config, 0)
        for leaf, size in dict(log_dt=[2048], log_A_real=[2048, 4], A_imag=[2048, 4], c=[2048, 4]).items()
    }
    assert_uniform(found["log_dt"], math.log(1e-2), math.log(0.5))
    assert_normal(found["c"], 3.0)
    torch.testing.assert_close(found["log_A_real"].exp(), torch.tensor([1.0, 2, 3, 4]).expand(2048, 4))
    assert not found["A_imag"].any()
    decay, frequency = initial_A("s4d-lin", 3)
    torch.testing.assert_close(decay.exp(), torch.full((3,), 0.5))
    torch.testing.assert_close(frequency, torch.tensor([0, math.pi, 2 * math.pi]))


def test_fourier_frequencies():
    model = initialized(config_of(feature_map="rff"))
    for layer in model.layers.values():
        assert_normal(layer.attention.feature_map.frequencies, 64**-0.25)


def test_s4d_inv_frequencies():
    x = initial_A("s4d-inv", 64)[1]
    for n in (0, 1, 31, 63):
        assert x[n].item() == pytest.approx(64 / math.pi * (64 / (2 * n + 1) - 1), rel=1e-6)
    assert x.max().item() == pytest.approx(1283.4, abs=0.1)
    assert (x.diff() < 0).all()
    assert x[31] > 0 > x[32]


def test_the_readout_starts_well_below_the_residual():
    """The scale at step 0 decides whether the mixer learns: 0.04 where it was chosen, at this size; 2.5 learned worse."""
    config = build_config("debug")
    model = initialized(config)
    scales = []
    for layer in model.layers.values():
        layer.attention.wo.register_forward_pre_hook(
            lambda _, args: scales.append(args[0].square().mean().sqrt().item())
        )
    tokens = random_tokens(config, 2, 256)
    with torch.no_grad():
        residual = model.tok_embeddings(tokens)
        logits = model(tokens)
    assert len(scales) == config.n_layers
    assert all(0.002 < scale < 0.2 for scale in scales), scales
    # What reaches the residual is smaller than what it meets there, the embeddings at 0.02.
    with torch.no_grad():
        block = model.layers["0"]
        rope = (torch.ones(256, 1, 16), torch.zeros(256, 1, 16))
        mixed = block.attention(block.attention_norm(residual), rope, None)
    assert 0 < mixed.square().mean().sqrt() < 0.5 * residual.square().mean().sqrt()
    assert logits.std() < 1


def test_meta_models_hold_no_memory():
    assert all(t.is_meta for t in meta_model(build_config("1.3B")).state_dict().values())
