"""Initial values: a function of (seed, name) and nothing else, by the rules of `initialize`."""

import math
import re

import pytest
import torch

from interdomain.model import Transformer, build_config
from interdomain.model.initialize import initial_value

from .common import OPTIONS, VARIANTS, assert_same_tensors, small_config

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
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    model.layers["0"].attention.wx = torch.nn.Linear(4, 4, bias=False)
    with pytest.raises(AssertionError, match=r"layers\.0\.attention\.wx\.weight"):
        model.init_weights()


def test_a_hybrid_s_layers_start_as_their_models_do():
    own = dict(dt_min=0.05, c_form="diagonal", n_kv_heads=2)
    found = initialized(small_config("s4d", layers=["softmax", "single-query"], **own))
    for layer, kind in enumerate(("softmax", "single-query")):
        settings = own if layer else dict(n_kv_heads=2)
        alone = initialized(small_config(kind, **settings))
        assert_same_tensors(
            found.layers[str(layer)].state_dict(), alone.layers[str(layer)].state_dict()
        )


def test_a_value_depends_on_seed_and_name_alone():
    config = config_of("s4d", output_gate=True)
    values = initialized(config, 7).state_dict()
    constant = ("norm", "log_A_real", "A_imag")
    for name, other in initialized(config, 8).state_dict().items():
        assert torch.equal(values[name], other) == any(part in name for part in constant), name
    drawn = [v for name, v in values.items() if not any(part in name for part in constant)]
    for i, a in enumerate(drawn):  # no two tensors of one shape share their numbers
        assert not any(a.shape == b.shape and torch.equal(a, b) for b in drawn[i + 1 :])

    # Not on order or neighbours, nor on default dtype, device and random numbers around it, none of which are used up.
    torch.manual_seed(123)
    before = torch.get_rng_state()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            found = {name: initial_value(name, x.shape, config, 7) for name, x in values.items()}
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same_tensors(found, values)
    assert torch.equal(torch.get_rng_state(), before)


def normal(std):
    def check(x):
        """Mean and standard deviation, within five standard errors."""
        n = x.numel()
        assert abs(x.mean().item()) < 5 * std / math.sqrt(n)
        assert abs(x.std().item() / std - 1) < 5 / math.sqrt(2 * n)
        assert x.abs().max() > 2 * std  # no uniform distribution

    return check


def uniform(low, high):
    def check(x):
        """All between; mean and standard deviation within five standard errors."""
        n, std = x.numel(), (high - low) / math.sqrt(12)
        assert low <= x.min() <= x.max() <= high
        assert abs(x.mean().item() - (low + high) / 2) < 5 * std / math.sqrt(n)
        assert abs(x.std().item() / std - 1) < 5 / math.sqrt(n)

    return check


def equal(*wanted):
    def check(x):
        torch.testing.assert_close(x, torch.tensor(wanted).repeat(len(x) // len(wanted)))

    return check


# S4D-Inv at M = 64: 64/pi (64 / (2n + 1) - 1).
S4D_INV = [64 / math.pi * (64 / (2 * n + 1) - 1) for n in range(64)]
RULES = {
    r"(wo|w2)\.weight": normal(0.02 / math.sqrt(2 * LAYERS)),
    r"(tok_embeddings|output|wq|wk|wv|wg|w1|w3)\.weight": normal(0.02),
    r"_conv\.(weight|bias)": uniform(
        -0.5, 0.5
    ),  # 1 / sqrt(width 4), as torch.nn.Conv1d(groups=channels)
    r"norm\.weight": equal(1.0),
    r"norm\.bias": equal(0.0),
    r"log_dt": uniform(math.log(1e-3), math.log(1e-1)),
    r"log_A_real": equal(math.log(0.5)),
    r"A_imag": equal(*S4D_INV),
    r"ssm\.C": normal(1 / 64),
    r"ssm\.c": normal(1 / 8),
    r"frequencies": normal(64**-0.25),
}
# Condition, settings, and the rules that these change.
CASES = [
    ("softmax", {}, {}),
    ("interdomain", dict(output_gate=True, feature_map="rff"), {}),
    ("s4d", dict(linear_scale=3.0), {r"ssm\.c": normal(3.0)}),
    (
        "interdomain",
        dict(c_form="diagonal", dt_max=0.5, a_init="s4d-lin"),
        {
            r"ssm\.C": normal(1 / 8),
            r"log_dt": uniform(math.log(1e-3), math.log(0.5)),
            r"A_imag": equal(*(math.pi * n for n in range(64))),
        },
    ),
    (
        "interdomain",
        dict(c_scale=1.0, a_init="s4d-real"),  # S4D's complex N(0, 1)
        {
            r"ssm\.C": normal(math.sqrt(0.5)),
            r"A_imag": equal(0.0),
            r"log_A_real": equal(*map(math.log, range(1, 65))),
        },
    ),
]


@pytest.mark.parametrize(("condition", "settings", "changed"), CASES)
def test_rules(condition, settings, changed):
    rules, values = RULES | changed, {}
    for name, x in initialized(config_of(condition, **settings)).state_dict().items():
        (rule,) = (pattern for pattern in rules if re.search(rf"{pattern}$", name))
        values.setdefault(rule, []).append(x.flatten())
    for rule, parts in values.items():
        rules[rule](torch.cat(parts))
