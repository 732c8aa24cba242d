"""Values that a config.json may have, and those that are kept when a model is saved anew."""

import json

import pytest

hf = pytest.importorskip("interdomain.hf", exc_type=ImportError)
from interdomain.checkpoint.pretrained import to_transformers  # noqa: E402
from interdomain.model import build_config  # noqa: E402


def test_layer_types_say_which_layers_have_a_cache_of_keys_and_values():
    config = build_config("debug", layers=["interdomain", "gla", "softmax", "softmax"], window=8)
    wanted = ["linear_attention"] * 2 + ["sliding_attention"] * 2
    assert hf.InterdomainConfig(**to_transformers(config)).layer_types == wanted
    config = build_config("debug", "softmax")
    assert hf.InterdomainConfig(**to_transformers(config)).layer_types == ["full_attention"] * 4


def test_facts_about_the_weights_are_not_kept_for_others(tmp_path):
    config = hf.InterdomainConfig(weights={"model.safetensors": "0"}, facts={"step": 400})
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved.keys().isdisjoint({"weights", "facts"})


SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hidden_size": 2**40}, "dim must be from 1 to 1,048,576: got 1099511627776"),
        ({"hidden_size": 30}, r"n_heads \* head_dim must be dim"),
        ({"mixer": "mamba"}, "mixer.kind must be one of interdomain, "),
        (
            {"mixer": "hybrid", "layer_settings": [{"mixer": "softmax"}] * 3},
            "3 conditions.*divide n_layers = 2",
        ),
    ],
)
def test_a_configuration_of_no_model_is_refused(settings, words):
    """A model checks it again: `from_pretrained` sets options after the configuration is made."""
    with pytest.raises(ValueError, match=words):
        hf.InterdomainConfig(**SIZES | settings)
    config = hf.InterdomainConfig(**SIZES)
    for name, value in settings.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=words):
        hf.InterdomainModel(config)


def test_embeddings_are_never_tied():
    config = hf.InterdomainConfig(**SIZES, tie_word_embeddings=True)
    assert not config.tie_word_embeddings
    config.tie_word_embeddings = True
    assert not hf.InterdomainModel(config).config.tie_word_embeddings
