"""Converts the model's settings to those of config.json in an exported model, and back.

A setting that transformers knows has transformers' name there.
"""

from dataclasses import asdict
from typing import Any

from interdomain.model.config import MODEL_SETTINGS, ModelConfig
from interdomain.model.settings import MIXER_SETTINGS

# The settings that have another name in config.json, with that name.
NAMES_IN_CONFIG_JSON = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "kind": "mixer",
}
# The value of `mixer` in a model whose layers differ. The member `layer_settings` then holds the
# mixer's settings of the first layers, a pattern that the following layers repeat.
HYBRID = "hybrid"


def to_transformers(config: ModelConfig) -> dict[str, Any]:
    """Returns a model's settings as config.json has them. `from_transformers` is the inverse.

    If all layers have the same mixer, its settings stand beside the model's, and `mixer` is its
    kind. Else `mixer` is "hybrid", and `layer_settings` is a list with the mixer's settings of the
    first layers: the shortest pattern that all layers repeat.

    Args:
        config: The model's configuration.
    """
    # The model's own settings. Those of its mixers follow, layer by layer.
    settings = config.to_dict()
    del settings["mixer"]
    record = _with_json_names(settings)
    mixers = []
    # One repetition of the pattern. `config.layers` describes each layer by the ModelConfig of a
    # model whose layers are all like it.
    for layer in config.layers[: len(config.mixers)]:
        mixer = asdict(layer.mixer)
        # A MixerConfig has None for as many heads of keys and values as query heads. transformers
        # wants the number. n_kv_heads moves to the end, so that config.json is the same file that
        # earlier versions of this program wrote.
        del mixer["n_kv_heads"]
        mixers.append(_with_json_names({**mixer, "n_kv_heads": layer.n_kv_heads}))
    if len(mixers) == 1:
        record |= mixers[0]
    else:
        record |= {"mixer": HYBRID, "layer_settings": mixers}
    return record | {"intermediate_size": config.ffn_hidden}


def _with_json_names(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns settings under their names in config.json, such as hidden_size for dim."""
    return {NAMES_IN_CONFIG_JSON.get(name, name): value for name, value in settings.items()}


def from_transformers(record: dict[str, Any]) -> ModelConfig:
    """Reads the model's configuration from config.json. This is the inverse of `to_transformers`.

    Args:
        record: The contents of config.json. Members that are no settings of the model or of its
            mixers are ignored.

    Raises:
        KeyError: `mixer`, `format_version` or a setting of the model is missing. A setting of a
            mixer that is missing has its default.
        TypeError, ValueError: A setting has a value that is not allowed.
    """
    settings = {}
    for name in ("format_version", *MODEL_SETTINGS):
        settings[name] = record[NAMES_IN_CONFIG_JSON.get(name, name)]
    # Where the settings of each mixer are. If all layers have the same mixer, they are among the
    # model's own.
    layers = [record]
    if record["mixer"] == HYBRID:
        # None is the default of InterdomainConfig. ModelConfig refuses an empty list.
        layers = record["layer_settings"] or []
    mixers = []
    for layer in layers:
        # A setting is missing if it is newer than the file. It then has its default.
        mixer = {}
        for name in MIXER_SETTINGS:
            key = NAMES_IN_CONFIG_JSON.get(name, name)
            if key in layer:
                mixer[name] = layer[key]
        # A MixerConfig has None for as many heads of keys and values as query heads.
        if mixer.get("n_kv_heads") == settings["n_heads"]:
            mixer["n_kv_heads"] = None
        mixers.append(mixer)
    return ModelConfig.from_dict({**settings, "mixer": mixers})
