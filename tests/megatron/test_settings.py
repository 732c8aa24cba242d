"""Wrong uses of Megatron's settings: each is refused on the command line of Megatron-LM's script, and by the layer."""

import sys
from types import SimpleNamespace

import pytest
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from interdomain.megatron import layer_spec, spec
from interdomain.megatron.checkpoint import BACKBONE
from interdomain.megatron.settings import REQUIRED_SETTINGS
from interdomain.model import build_config

from ..common import REPOSITORY
from .conftest import GOOD, SWITCHES

BARE = "--spec interdomain.megatron.spec interdomain"
# Switches that Megatron's defaults leave out, and --model.size sets.
MISSING = [
    "--swiglu",
    "--disable-bias-linear",
    "--normalization",
    "--untie-embeddings-and-output-weights",
]
MISSING += ["--position-embedding-type", "--attention-dropout", "--hidden-dropout"]
# A value that is not allowed, where "other" is.
OTHER = {"transformer_impl": "inference_optimized"}
NAMES = [(setting.flag, name) for setting in REQUIRED_SETTINGS for name in setting.allowed]
ALONE = {
    "--swiglu",
    "--disable-bias-linear",
    "--untie-embeddings-and-output-weights",
}  # no flag gives another value


def line_of(flag):
    """A wrong use on the command line."""
    name = flag.strip("-")
    return (
        flag if name in SWITCHES.split() else f"{flag} {OTHER.get(name.replace('-', '_'), 'other')}"
    )


def layer(**settings):
    config = spec.transformer_config(build_config("debug"))
    for name, value in settings.items():
        setattr(config, name, value)
    attention, ranks = (
        layer_spec().submodules.self_attention,
        SimpleNamespace(tp=SimpleNamespace(size=lambda: 1)),
    )
    return attention.module(config, attention.submodules, 1, ranks, **attention.params)


@pytest.mark.parametrize(
    "flag", [s.flag for s in REQUIRED_SETTINGS if s.flag[0] == "-" and s.flag not in ALONE]
)
def test_on_the_command_line(flag, parse, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(f"{GOOD} {line_of(flag)}")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {flag}: ")


def test_all_that_megatron_s_defaults_lack_is_named_at_once(parse, capsys):
    with pytest.raises(SystemExit):
        parse(BARE)
    lines = capsys.readouterr().err.removeprefix("error: ").splitlines()
    assert sorted(text.partition(":")[0] for text in lines) == sorted(MISSING)


@pytest.mark.parametrize(
    ("flag", "name", "value"),
    [(f, n, OTHER.get(n, "other")) for f, n in NAMES if n in TransformerConfig.__dataclass_fields__]
    + [
        ("--swiglu", "activation_func", quick_gelu),
        ("--attention-backend", "attention_backend", AttnBackend.flash),
    ],
)
def test_in_a_training_loop_of_one_s_own(flag, name, value):
    with pytest.raises(ValueError, match=f"^{flag}: {name} = ") as refused:
        layer(**{name: value})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "Start it as python -m interdomain.megatron.run SCRIPT"),
        (dict(ssm_lr=1e-3, reset_position_ids=True), "^--reset-position-ids: "),
    ],
)
def test_what_a_script_of_megatron_lm_has_when_the_layer_is_made(arguments, words, monkeypatch):
    """Whoever started the script, and whatever changed its arguments after they were read."""
    module = SimpleNamespace(_GLOBAL_ARGS=SimpleNamespace(**arguments))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    with pytest.raises(ValueError, match=words):
        layer()


def test_the_table_is_whole():
    """The documentation lists it, and every setting of a checkpoint's record is in it."""
    page = (REPOSITORY / "docs/megatron.md").read_text()
    for flag, _, otherwise, use in REQUIRED_SETTINGS:
        assert f"| `{flag}` | {otherwise} | {use} |\n" in page
    allowed = {
        name: value for setting in REQUIRED_SETTINGS for name, value in setting.allowed.items()
    }
    assert {name: allowed[name] or None for name in BACKBONE} == {
        name: value or None for name, value in BACKBONE.items()
    }
