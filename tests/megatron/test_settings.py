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

from ..common import REPOSITORY
from .conftest import GOOD, SWITCHES

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
# Switches that Megatron-LM can only turn on.
ONLY_ON = {"--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"}
FLAGS = []  # every flag that can be given a wrong value
for setting in REQUIRED_SETTINGS:
    if setting.flag.startswith("-") and setting.flag not in ONLY_ON:
        FLAGS.append(setting.flag)


def layer(**settings):
    config = spec.transformer_config(build_config("debug"))
    for name, value in settings.items():
        setattr(config, name, value)
    attention = layer_spec().submodules.self_attention
    ranks = mock.Mock(**{"tp.size.return_value": 1})
    return attention.module(config, attention.submodules, 1, ranks, **attention.params)


@pytest.mark.parametrize("flag", FLAGS)
def test_a_wrong_flag_is_refused(flag, parse, capsys):
    line = flag
    if flag == "--transformer-impl":
        line += " inference_optimized"
    elif flag.removeprefix("--") not in SWITCHES.split():
        line += " other"
    with pytest.raises(SystemExit) as ended:
        parse(f"{GOOD} {line}")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {flag}: ")


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


def test_the_table_is_complete():
    """docs/megatron.md lists every setting, and a checkpoint's record has the allowed values."""
    page = (REPOSITORY / "docs/megatron.md").read_text()
    allowed = {}
    flags = {}
    for setting in REQUIRED_SETTINGS:
        flags.setdefault((setting.otherwise, setting.use), []).append(f"`{setting.flag}`")
        allowed |= setting.allowed
    # A row has all flags of one effect and one remedy.
    for (otherwise, use), group in flags.items():
        assert f"| {', '.join(group)} | {otherwise} | {use} |\n" in page
    for name, value in BACKBONE.items():
        assert (allowed[name] or None) == (value or None), name
