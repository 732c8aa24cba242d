"""Wrong values of Megatron's settings are refused on the command line, and by the layer itself."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.enums import AttnBackend

from interdomain.megatron import layer_spec, spec
from interdomain.megatron.checkpoint import BACKBONE
from interdomain.megatron.settings import REQUIRED_SETTINGS
from interdomain.model import build_config

# --model.size sets these; Megatron's defaults are other values.
MISSING = [
    "--attention-dropout",
    "--disable-bias-linear",
    "--hidden-dropout",
    "--normalization",
    "--position-embedding-type",
    "--swiglu",
    "--untie-embeddings-and-output-weights",
]


def layer(**settings):
    config = spec.transformer_config(build_config("debug"))
    for name, value in settings.items():
        setattr(config, name, value)
    attention = layer_spec().submodules.self_attention
    ranks = mock.Mock(**{"tp.size.return_value": 1})
    return attention.module(config, attention.submodules, 1, ranks, **attention.params)


def test_all_wrong_defaults_of_megatron_are_named_at_once(parse, capsys):
    with pytest.raises(SystemExit):
        parse("--spec interdomain.megatron.spec interdomain")
    lines = capsys.readouterr().err.removeprefix("error: ").splitlines()
    assert sorted(line.partition(":")[0] for line in lines) == MISSING


@pytest.mark.parametrize(
    ("flag", "name", "value"),
    [
        ("--swiglu", "activation_func", quick_gelu),
        ("--attention-backend", "attention_backend", AttnBackend.flash),
        ("--transformer-impl", "transformer_impl", "inference_optimized"),
        ("--hidden-dropout", "hidden_dropout", 0.1),
    ],
)
def test_a_wrong_setting_is_refused_by_the_layer(flag, name, value):
    """A user's own training loop has no command line."""
    with pytest.raises(ValueError, match=f"^{flag}: {name} = .*\\Z"):
        layer(**{name: value})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "Start it as python -m interdomain.megatron.run SCRIPT"),
        ({"ssm_lr": 1e-3, "reset_position_ids": True}, "^--reset-position-ids: "),
    ],
)
def test_arguments_of_a_script_are_checked_when_the_layer_is_made(arguments, words, monkeypatch):
    """They may have changed after they were read, and `run` may not have started the script."""
    module = SimpleNamespace(_GLOBAL_ARGS=SimpleNamespace(**arguments))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    with pytest.raises(ValueError, match=words):
        layer()


def test_the_record_of_a_checkpoint_has_the_allowed_values():
    allowed = {}
    for setting in REQUIRED_SETTINGS:
        allowed |= setting.allowed
    for name, value in BACKBONE.items():
        assert (allowed[name] or None) == (value or None), name
