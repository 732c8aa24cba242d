"""Configurations: the product of the tables, the way through JSON, and what no model has."""

import json

import pytest

from interdomain.model import MixerConfig, ModelConfig, build_config, cell_of

from .common import OPTIONS, VARIANTS


@pytest.mark.parametrize(("condition", "option"), VARIANTS)
def test_a_model_s_name_and_its_way_through_json(condition, option):
    """Every setting in which a model differs from the size and the condition is in its name."""
    overrides = OPTIONS[option]
    cell = cell_of(build_config("debug", condition, **overrides), "debug")
    assert cell.condition.split(", ")[0] == " + ".join(overrides.get("layers", [condition]))
    assert set(cell.condition.split(", ")[1:]) == {
        f"{k} {v}"
        for k, v in overrides.items()
        if k not in ("dim", "n_heads", "head_dim", "layers")
    }
    config = build_config("debug", condition, **overrides)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert cell.size == ("debug with dim 192, n_heads 2" if "dim" in overrides else "debug")


def test_the_layers_of_a_hybrid():
    """A setting is that of the layers which have it; a pattern need not divide the layers."""
    settings = dict(n_kv_heads=3, c_form="diagonal", window=64)
    config = build_config("125M", "s4d", softmax_every=5, **settings)
    mixers = [layer.mixer for layer in config.layers]
    assert [i for i, mixer in enumerate(mixers) if mixer.kind == "softmax"] == [4, 9]
    assert mixers[9] == MixerConfig("softmax", n_kv_heads=3, window=64)
    s4d = dict(dual_input=False, query_readout=False, rope=False)
    assert mixers[10] == MixerConfig(**s4d, c_form="diagonal")
    name = "s4d, softmax_every 5, c_form diagonal, n_kv_heads 3, window 64"
    assert cell_of(config, "125M").condition == name
    named = build_config("125M", layers=["interdomain", "interdomain", "softmax"] * 2)
    assert named == build_config("125M", "interdomain", softmax_every=3)
    assert build_config("125M", "s4d", layers=["softmax"] * 4) == build_config("125M", "softmax")


def test_a_cell_s_name_as_text_and_from_its_own_name():
    config = build_config(
        "125M", "s4d", n_layers=6, head_dim=96, n_heads=8, a_init="s4d-lin", linear_scale=0.5
    )
    cell = cell_of(config, "125M")
    assert str(cell) == "125M with n_layers 6, n_heads 8, s4d, linear_scale 0.5, a_init s4d-lin"
    assert cell_of(config, cell.size) == cell  # as a record has it
    assert cell_of(build_config("1.3B", "dual-linear"), "1.3B") == ("1.3B", "dual-linear")
    assert cell_of(config, "mine") == ("mine", cell.condition)
    assert (
        cell_of(build_config("debug", "softmax"), "mine").condition == "softmax"
    )  # which does not read n_basis


# Condition, overrides, and what the message must name.
REFUSED = [
    (
        "interdomian",
        {},
        "mixer.condition must be one of .*interdomain.*s4d-rope.*: got interdomian",
    ),
    ("interdomain", dict(n_bassis=3), "n_bassis.*vocab_size.*n_basis"),
    (
        "interdomain",
        dict(readout="imag"),
        "mixer.readout must be one of complex, real, hermitian: got imag",
    ),
    (
        "interdomain",
        dict(conv_width=1),
        "mixer.conv_width must be 0, for no convolution, or at least 2: got 1",
    ),
    ("interdomain", dict(n_kv_heads=5), "mixer.n_kv_heads must divide n_heads = 12: got 5"),
    ("interdomain", dict(dim=12 * 63, head_dim=63), "head_dim must be even.*63"),
    ("interdomain", dict(n_layers=True), "n_layers must be int: got True"),
    (
        "interdomain",
        dict(c_scale=1.0, c_form="identity"),
        "mixer.c_scale.*mixer.c_form = 'identity'",
    ),
    ("interdomain", dict(dt_min=0.2), "mixer.dt_min.*0.2 and 0.1"),
    (
        "interdomain",
        dict(feature_map="favor"),
        "mixer.feature_map = 'favor'.*mixer.normalize = true",
    ),
    ("softmax", dict(output_gate=True), "mixer.output_gate = True.*softmax.*n_kv_heads"),
    ("interdomain", dict(window=4), "mixer.window = 4.*only softmax.*softmax_every"),
    ("interdomain", dict(softmax_every=13), "mixer.softmax_every = 13 .*from 2 to n_layers = 12"),
    ("softmax", dict(softmax_every=2), "mixer.softmax_every = 2 with mixer.condition = softmax"),
    ("softmax", dict(layers=["s4d"] * 5), "mixer.layers has 5 conditions.*divide n_layers = 12"),
    ("softmax", dict(layers=["s4d", "softmax"], softmax_every=2), "leave one out"),
    ("s4d", dict(layers=["softmax", "softmax"], dt_min=0.01), "mixer.dt_min = 0.01.*softmax"),
    ("s4d-rope", dict(feature_map="rff"), "mixer.feature_map.*'rff'.*mixer.dual_input"),
]


@pytest.mark.parametrize(("condition", "overrides", "words"), REFUSED)
def test_what_no_model_has_is_refused(condition, overrides, words):
    with pytest.raises(ValueError, match=words):
        build_config("125M", condition, **overrides)


def test_a_record_of_another_version_or_with_unknown_settings_is_refused():
    record = build_config("debug").to_dict()
    for changes, words in (
        (dict(format_version=3), "version 3.*reads version 2"),
        (dict(format_version=None), "version None.*it has none.*reads version 2"),
        (dict(window=128), "window.*allowed: dim"),
        (dict(mixer={"gate": True}), "gate.*allowed.*output_gate"),
        (dict(dim="128"), "dim must be int: got '128'"),
    ):
        with pytest.raises(ValueError, match=words):
            ModelConfig.from_dict(record | changes)
