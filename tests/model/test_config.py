"""Configurations: the product of the tables, the way through JSON, and what no model has."""

import json

import pytest

from interdomain.model import ModelConfig, build_config, cell_of

from .common import OPTIONS, VARIANTS


@pytest.mark.parametrize(("condition", "option"), VARIANTS)
def test_a_model_s_name_and_its_way_through_json(condition, option):
    """Every setting in which a model differs from the size and the condition is in its name."""
    overrides = OPTIONS[option]
    cell = cell_of(build_config("debug", condition, **overrides), "debug")
    assert cell.condition.split(", ")[0] == condition
    assert set(cell.condition.split(", ")[1:]) == {
        f"{k} {v}" for k, v in overrides.items() if k not in ("dim", "n_heads", "head_dim")
    }
    config = build_config("debug", condition, **overrides)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert cell.size == ("debug with dim 192, n_heads 2" if "dim" in overrides else "debug")


def test_a_cell_s_name_as_text_and_from_its_own_name():
    config = build_config("125M", "s4d", n_layers=6, head_dim=96, n_heads=8, a_init="s4d-lin", linear_scale=0.5)
    cell = cell_of(config, "125M")
    assert str(cell) == "125M with n_layers 6, n_heads 8, s4d, linear_scale 0.5, a_init s4d-lin"
    assert cell_of(config, cell.size) == cell  # as a record has it
    assert cell_of(build_config("1.3B", "dual-linear"), "1.3B") == ("1.3B", "dual-linear")
    assert cell_of(config, "mine") == ("mine", cell.condition)
    assert cell_of(build_config("debug", "softmax"), "mine").condition == "softmax"  # which does not read n_basis


# (condition, overrides), what the message must name: what was got, and what is allowed or to be done.
REFUSED = [
    (("interdomian", {}), ["'interdomian'", "interdomain", "s4d-rope", "softmax"]),
    (("interdomain", dict(n_bassis=3)), ["n_bassis", "n_basis", "vocab_size"]),
    (("interdomain", dict(readout="imag")), ["mixer.readout", "'imag'", "complex, real, hermitian"]),
    (("interdomain", dict(n_basis=0)), ["mixer.n_basis", "at least 1", "got 0"]),
    (("interdomain", dict(n_kv_heads=5)), ["mixer.n_kv_heads", "got 5", "[1, 2, 3, 4, 6, 12]"]),
    (("interdomain", dict(dim=700)), ["n_heads * head_dim", "768", "700"]),
    (("interdomain", dict(dim=12 * 63, head_dim=63)), ["head_dim", "even", "63"]),
    (("interdomain", dict(n_layers=True)), ["n_layers", "int", "True"]),
    (("interdomain", dict(norm_eps=float("nan"))), ["norm_eps", "positive", "nan"]),
    (("interdomain", dict(n_layers=10**6)), ["n_layers", "at most 10,000", "got 1,000,000"]),
    (("interdomain", dict(c_scale=1.0, c_form="identity")), ["mixer.c_scale", "mixer.c_form = 'identity'"]),
    (("interdomain", dict(linear_scale=1.0)), ["mixer.linear_scale", "query_readout = false"]),
    (("interdomain", dict(dt_min=0.2)), ["mixer.dt_min", "mixer.dt_max", "0.2 and 0.1"]),
    (("softmax", dict(output_gate=True)), ["softmax", "mixer.output_gate = True", "n_kv_heads"]),
    (("s4d", dict(n_kv_heads=1)), ["mixer.n_kv_heads", "query readout", "query_readout = true"]),
    (("s4d-rope", dict(feature_map="rff")), ["mixer.feature_map", "'rff'", "mixer.dual_input"]),
]


def refusal(make, *args, **options) -> str:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 (the message is checked by the caller)
        make(*args, **options)
    return str(refused.value)


def test_what_no_model_has_is_refused():
    for (condition, overrides), words in REFUSED:
        message = refusal(build_config, "125M", condition, **overrides)
        assert all(word in message for word in words), message
    assert all(word in refusal(build_config, "126M") for word in ("'126M'", "125M", "1.3B", "debug"))


def described(**changes):
    return {**build_config("debug").to_dict(), **changes}


def test_a_record_of_before_the_settings_of_the_start_has_their_defaults():
    old = described()
    for name in ("c_scale", "linear_scale", "dt_min", "dt_max", "a_init"):
        del old["mixer"][name]
    assert ModelConfig.from_dict(old) == build_config("debug")


def without(name):
    return {key: value for key, value in described().items() if key != name}


def test_a_damaged_record_is_refused():
    for data, words in (
        (described(format_version=2), ["version 2", "reads version 1", "update"]),
        (without("format_version"), ["version None", "reads version 1"]),
        (described(window=128), ["window", "allowed", "dim"]),
        (described(mixer={"gate": True}), ["gate", "allowed", "output_gate"]),
        (described(mixer="interdomain"), ["mixer", "'interdomain'", "named settings"]),
        (described(dim="128"), ["dim", "int", "'128'"]),
        (without("head_dim"), ["lacks head_dim"]),
        ([1], ["[1]", "named settings"]),
    ):
        message = refusal(ModelConfig.from_dict, data)
        assert all(word in message for word in words), message
