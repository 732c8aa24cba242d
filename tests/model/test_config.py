"""Configurations: the product of the tables, the way through JSON, and wrong settings."""

import json

import pytest

from interdomain.checkpoint.pretrained import from_transformers, to_transformers
from interdomain.model import MixerConfig, ModelConfig, build_config, cell_of

from .common import OPTIONS, each_variant


@each_variant
def test_the_way_through_json(condition, option):
    config = build_config("debug", condition, **OPTIONS[option])
    text = json.dumps(config.to_dict())
    assert ModelConfig.from_dict(json.loads(text)) == config
    assert from_transformers({**to_transformers(config), "facts": {}}) == config


def test_the_layers_of_a_hybrid():
    """A setting goes to the layers that have it. A pattern need not divide the number of layers."""
    config = build_config(
        "125M", "s4d", softmax_every=5, n_kv_heads=3, c_form="diagonal", window=64
    )
    softmax = MixerConfig("softmax", n_kv_heads=3, window=64)
    s4d = MixerConfig(
        dual_input=False,
        query_readout=False,
        rope=False,
        c_form="diagonal",
    )
    mixers = [layer.mixer for layer in config.layers]
    assert mixers[:5] == mixers[5:10] == [s4d, s4d, s4d, s4d, softmax]
    assert mixers[10:] == [s4d, s4d]
    name = "s4d, softmax_every 5, c_form diagonal, n_kv_heads 3, window 64"
    assert cell_of(config, "125M").condition == name
    layers = ["interdomain", "interdomain", "softmax"] * 2
    assert build_config("125M", layers=layers) == build_config("125M", softmax_every=3)
    assert build_config("125M", layers=["softmax"] * 4) == build_config("125M", "softmax")


def test_a_model_s_name():
    """A name has every setting that differs from the size and the condition."""
    config = build_config(
        "125M",
        "s4d",
        n_layers=6,
        head_dim=96,
        n_heads=8,
        a_init="s4d-lin",
        linear_scale=0.5,
    )
    cell = cell_of(config, "125M")
    assert str(cell) == "125M with n_layers 6, n_heads 8, s4d, linear_scale 0.5, a_init s4d-lin"
    assert cell_of(config, cell.size) == cell  # as a record has it
    layers = build_config("debug", layers=["softmax", "interdomain-norope"])
    assert str(cell_of(layers, "debug")) == "debug, softmax + interdomain-norope"
    # softmax does not read n_basis, in which its size differs.
    assert cell_of(build_config("debug", "softmax"), "mine").condition == "softmax"


REFUSED = [
    ("interdomian", {}, "mixer.condition must be one of .*interdomain.*: got interdomian"),
    ("interdomain", {"n_bassis": 3}, "n_bassis.*vocab_size.*n_basis"),
    ("interdomain", {"readout": "imag"}, "mixer.readout must be one of .*hermitian: got imag"),
    ("interdomain", {"n_kv_heads": 5}, "mixer.n_kv_heads must divide n_heads = 12: got 5"),
    ("interdomain", {"dim": 12 * 63, "head_dim": 63}, "head_dim must be even.*63"),
    ("interdomain", {"c_scale": 1.0, "c_form": "identity"}, "mixer.c_scale.*'identity'"),
    ("interdomain", {"dt_min": 0.2}, "mixer.dt_min.*0.2 and 0.1"),
    ("interdomain", {"feature_map": "favor"}, "'favor'.*mixer.normalize = true"),
    ("interdomain", {"window": 4}, "mixer.window = 4.*only softmax.*softmax_every"),
    ("interdomain", {"softmax_every": 13}, "mixer.softmax_every = 13 .*from 2 to n_layers = 12"),
    ("softmax", {"layers": ["s4d"] * 5}, "mixer.layers has 5 conditions.*divide n_layers = 12"),
    ("s4d", {"layers": ["softmax", "softmax"], "dt_min": 0.01}, "mixer.dt_min = 0.01.*softmax"),
    ("gla", {"n_basis": 5}, "4 n_basis = 20 wide, which must divide dim = 768"),
    ("mamba2", {"state_heads": 5}, "state_heads must divide 2 dim = 1536: got 5"),
    ("deltanet", {"output_gate": True}, "output_gate.*no switches but mixer.n_basis"),
    ("interdomain", {"state_heads": 2}, "state_heads = 2 is not possible: it is for gla"),
]


@pytest.mark.parametrize(("condition", "overrides", "words"), REFUSED)
def test_settings_that_no_model_has_are_refused(condition, overrides, words):
    with pytest.raises(ValueError, match=words):
        build_config("125M", condition, **overrides)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format_version": 3}, "version 3.*reads version 2"),
        ({"window": 128}, "window.*allowed: dim"),
        ({"mixer": {"gate": True}}, "gate.*allowed.*output_gate"),
        ({"dim": "128"}, "dim must be int: got '128'"),
    ],
)
def test_a_record_of_another_version_or_with_unknown_settings_is_refused(changes, words):
    record = build_config("debug").to_dict()
    with pytest.raises(ValueError, match=words):
        ModelConfig.from_dict(record | changes)
