"""Initial values: a function of the seed and the name, by the rules of `initialize`."""

import math
import re

import pytest
import torch

from interdomain.model import Transformer, build_config
from interdomain.model.initialize import initial_value

from .common import OPTIONS, assert_same_tensors, each_variant, small_config

LAYERS = 3
WIDE = {"dim": 512, "n_layers": LAYERS, "n_heads": 8, "head_dim": 64, "n_basis": 64}


def wide_config(condition="interdomain", **overrides):
    """Returns a configuration that is wide enough for statistics."""
    return build_config(
        "debug",
        condition,
        **WIDE,
        vocab_size=1000,
        **overrides,
    )


def initialized(config, seed=0):
    model = Transformer(config)
    # A tensor without a rule keeps these.
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(math.nan)
    model.init_weights(seed)
    return model


@each_variant
def test_every_parameter_and_buffer_has_a_rule(condition, option):
    model = initialized(small_config(condition, **OPTIONS[option]))
    for name, tensor in model.state_dict().items():
        assert tensor.isfinite().all(), name


def test_layers_of_a_hybrid_start_as_those_of_their_models():
    mixer = {"dt_min": 0.05, "c_form": "diagonal", "n_kv_heads": 2}
    hybrid = initialized(small_config("s4d", layers=["softmax", "single-query"], **mixer))
    softmax = initialized(small_config("softmax", n_kv_heads=2))
    single_query = initialized(small_config("single-query", **mixer))
    for number, model in (("0", softmax), ("1", single_query)):
        wanted = model.layers[number].state_dict()
        assert_same_tensors(hybrid.layers[number].state_dict(), wanted)


def test_a_value_depends_only_on_seed_and_name():
    config = small_config("s4d", output_gate=True)
    values = initialized(config, 7).state_dict()
    distinct = set()
    drawn = 0
    for name, other in initialized(config, 8).state_dict().items():
        constant = "norm" in name or name.endswith(("log_A_real", "A_imag"))
        assert torch.equal(values[name], other) == constant, name
        if not constant:
            distinct.add(tuple(values[name].flatten()[:2].tolist()))
            drawn += 1
    assert len(distinct) == drawn  # no two tensors have the same numbers

    # The default dtype and device do not matter, and no global random numbers are used up.
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = {name: initial_value(name, x.shape, config, 7) for name, x in values.items()}
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same_tensors(found, values)
    assert torch.equal(torch.get_rng_state(), before)


def assert_mean_and_std(x, mean, std):
    """Checks both within five standard errors."""
    n = x.numel()
    assert x.mean().item() == pytest.approx(mean, abs=5 * std / math.sqrt(n))
    assert x.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * n))


def assert_normal(x, std):
    assert_mean_and_std(x, 0, std)
    assert x.abs().max() > 2 * std  # a uniform distribution has no such values


def assert_uniform(x, low, high):
    assert low <= x.min()
    assert x.max() <= high
    assert_mean_and_std(x, (low + high) / 2, (high - low) / math.sqrt(12))


def assert_constant(x, *values):
    wanted = torch.tensor(values).repeat(len(x) // len(values))
    torch.testing.assert_close(x, wanted)


# S4D-Inv at M = 64: 64/pi (64 / (2n + 1) - 1).
S4D_INV = [64 / math.pi * (64 / (2 * n + 1) - 1) for n in range(64)]
S4D_LIN = [math.pi * n for n in range(64)]
S4D_REAL = [math.log(n) for n in range(1, 65)]
RULES = {
    r"(wo|w2)\.weight": (assert_normal, 0.02 / math.sqrt(2 * LAYERS)),
    r"(tok_embeddings|output|wq|wk|wv|wg|w1|w3)\.weight": (assert_normal, 0.02),
    # 1 / sqrt(width 4), as in torch.nn.Conv1d(groups=channels)
    r"_conv\.(weight|bias)": (assert_uniform, -0.5, 0.5),
    r"norm\.weight": (assert_constant, 1.0),
    r"norm\.bias": (assert_constant, 0.0),
    r"log_dt": (assert_uniform, math.log(1e-3), math.log(1e-1)),
    r"log_A_real": (assert_constant, math.log(0.5)),
    r"A_imag": (assert_constant, *S4D_INV),
    r"ssm\.C": (assert_normal, 1 / 64),
    r"ssm\.c": (assert_normal, 1 / 8),
    r"frequencies": (assert_normal, 64**-0.25),
}
DIAGONAL = {
    r"ssm\.C": (assert_normal, 1 / 8),
    r"log_dt": (assert_uniform, math.log(1e-3), math.log(0.5)),
    r"A_imag": (assert_constant, *S4D_LIN),
}
S4D_PAPER = {  # complex N(0, 1)
    r"ssm\.C": (assert_normal, math.sqrt(0.5)),
    r"A_imag": (assert_constant, 0.0),
    r"log_A_real": (assert_constant, *S4D_REAL),
}


@pytest.mark.parametrize(
    ("condition", "settings", "changed_rules"),
    [
        ("softmax", {}, {}),
        ("interdomain", {"output_gate": True, "feature_map": "rff"}, {}),
        ("s4d", {"linear_scale": 3.0}, {r"ssm\.c": (assert_normal, 3.0)}),
        ("interdomain", {"c_form": "diagonal", "dt_max": 0.5, "a_init": "s4d-lin"}, DIAGONAL),
        ("interdomain", {"c_scale": 1.0, "a_init": "s4d-real"}, S4D_PAPER),
    ],
)
def test_rules(condition, settings, changed_rules):
    state = initialized(wide_config(condition, **settings)).state_dict()
    rules = RULES | changed_rules
    for pattern, (check, *numbers) in rules.items():
        names = [name for name in state if re.search(rf"{pattern}$", name)]
        tensors = [state.pop(name).flatten() for name in names]
        if tensors:
            check(torch.cat(tensors), *numbers)
    assert not state
