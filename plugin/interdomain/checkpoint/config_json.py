"""Converts the model's settings to those of config.json in an exported model, and back.

A setting that transformers knows has transformers' name there.
"""

from dataclasses import asdict
from typing import Any

from interdomain.model.config import MODEL_SETTINGS, ModelConfig
from interdomain.model.settings import MIXER_SETTINGS

# The names in config.json of settings that have another name there.
SETTINGS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "kind": "mixer",
}
# The mixer of a model whose layers differ. `layer_settings` then holds the mixer's settings of the first layers, a
# pattern that the following layers repeat.
HYBRID = "hybrid"


def to_transformers(config: ModelConfig) -> dict[str, Any]:
    """Returns the settings as config.json has them."""
    settings = config.to_dict()
    del settings["mixer"]
    record = _renamed(settings)
    mixers = []
    for layer in config.layers[: len(config.mixers)]:
        mixer = asdict(layer.mixer)
        del mixer[
            "n_kv_heads"
        ]  # None for as many as query heads, which transformers wants as a number
        mixers.append(_renamed({**mixer, "n_kv_heads": layer.n_kv_heads}))
    if len(mixers) == 1:
        record |= mixers[0]
    else:
        record |= {"mixer": HYBRID, "layer_settings": mixers}
    return record | {"intermediate_size": config.ffn_hidden}


def _renamed(settings: dict[str, Any]) -> dict[str, Any]:
    return {SETTINGS.get(name, name): value for name, value in settings.items()}


def from_transformers(record: dict[str, Any]) -> ModelConfig:
    """Returns the model's configuration.

    Args:
        record: The contents of config.json. Others than the model's settings are ignored.

    Raises:
        KeyError, TypeError, ValueError: A setting is missing, or has a value that is not allowed.
    """
    settings = {}
    for name in ("format_version", *MODEL_SETTINGS):
        settings[name] = record[SETTINGS.get(name, name)]
    layers = [record]
    if record["mixer"] == HYBRID:
        layers = record["layer_settings"] or []
    mixers = []
    for layer in layers:
        # A setting that is newer than the file has its default.
        mixer = {}
        for name in MIXER_SETTINGS:
            key = SETTINGS.get(name, name)
            if key in layer:
                mixer[name] = layer[key]
        if mixer.get("n_kv_heads") == settings["n_heads"]:
            mixer["n_kv_heads"] = None
        mixers.append(mixer)
    return ModelConfig.from_dict({**settings, "mixer": mixers})
