"""Values that a config.json may have, and those that a folder keeps when it is saved anew."""

import json

import pytest

hf = pytest.importorskip("interdomain.hf", exc_type=ImportError)
from interdomain.checkpoint.pretrained import to_transformers  # noqa: E402
from interdomain.model import build_config  # noqa: E402


def test_layer_types_say_which_layers_have_a_cache_of_keys_and_values():
    hybrid = build_config("debug", "interdomain", layers=["interdomain", "softmax"], window=8)
    types = {
        "interdomain": ["linear_attention"] * 4,
        "gla": ["linear_attention"] * 4,
        "softmax": ["full_attention"] * 4,
    }
    for condition, expected in types.items():
        assert (
            hf.InterdomainConfig(**to_transformers(build_config("debug", condition))).layer_types
            == expected
        )
    assert (
        hf.InterdomainConfig(**to_transformers(hybrid)).layer_types
        == ["linear_attention", "sliding_attention"] * 2
    )


def test_what_is_known_of_the_weights_is_not_kept_for_others(tmp_path):
    config = hf.InterdomainConfig(
        weights={"model.safetensors": "0"}, facts={"step": 400, "validation": {"loss": 2.4}}
    )
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert not {"weights", "facts"} & saved.keys()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_hidden_layers": 10**9}, "n_layers must be from 1 to 1,048,576: got 1000000000"),
        ({"hidden_size": 2**40}, "dim must be from 1 to 1,048,576: got 1099511627776"),
        ({"hidden_size": 30}, r"n_heads \* head_dim must be dim"),
        ({"num_key_value_heads": 3}, "mixer.n_kv_heads must divide n_heads"),
        ({"mixer": "mamba"}, "mixer.kind must be one of interdomain, "),
        (
            {"mixer": "hybrid", "layer_settings": [{"mixer": "softmax"}] * 3},
            "3 conditions.*divide n_layers = 2",
        ),
        (
            {"mixer": "hybrid", "layer_settings": [{}, {"readout": "imag"}]},
            "readout must be one of complex, real, hermitian: got imag",
        ),
        ({"query_readout": False, "num_key_value_heads": 2}, "n_kv_heads = 2 is not possible"),
        ({"window": 4}, "window"),
        ({"rope_theta": 0.0}, "rope_theta must be positive"),
    ],
)
def test_a_configuration_that_cannot_be(settings, words):
    """Also of a model, whose options `from_pretrained` sets after the configuration is made."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    with pytest.raises(ValueError, match=words):
        hf.InterdomainConfig(**sizes | settings)
    assert not hf.InterdomainConfig(**sizes, tie_word_embeddings=True).tie_word_embeddings
    config = hf.InterdomainConfig(**sizes)
    config.tie_word_embeddings = True
    assert not hf.InterdomainModel(config).config.tie_word_embeddings
    for name, value in settings.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=words):
        hf.InterdomainModel(config)
