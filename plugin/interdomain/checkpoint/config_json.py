"""The model's settings as config.json of an exported model has them: under transformers' names, if it has one."""

from dataclasses import asdict
from typing import Any

from interdomain.model.config import MODEL_SETTINGS, ModelConfig
from interdomain.model.settings import MIXER_SETTINGS

# Settings that transformers knows by another name; the mixer's others stand beside them under their own.
SETTINGS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "kind": "mixer",
}
HYBRID = "hybrid"  # the mixer of a model whose `layer_settings` say what the settings of each layer are, in a pattern


def to_transformers(config: ModelConfig) -> dict[str, Any]:
    """The settings as config.json has them."""
    settings: dict[str, Any] = config.to_dict()
    del settings["mixer"]
    mixers = []
    for layer in config.layers[: len(config.mixers)]:
        mixer = {
            SETTINGS.get(name, name): value
            for name, value in asdict(layer.mixer).items()
            if name != "n_kv_heads"
        }
        mixers.append(mixer | {"num_key_value_heads": layer.n_kv_heads})
    return {
        **{SETTINGS.get(name, name): value for name, value in settings.items()},
        **(mixers[0] if len(mixers) == 1 else {"mixer": HYBRID, "layer_settings": mixers}),
        "intermediate_size": config.ffn_hidden,
    }


def from_transformers(record: dict[str, Any]) -> ModelConfig:
    """The model of a config.json. Raises: KeyError, TypeError, ValueError."""
    settings = {
        name: record[SETTINGS.get(name, name)] for name in ("format_version", *MODEL_SETTINGS)
    }
    mixers = []
    layers = record["layer_settings"] or [] if record["mixer"] == HYBRID else [record]
    for layer in layers:
        # What a folder from before a setting lacks has the setting's default.
        mixer = {
            name: layer[key]
            for name in MIXER_SETTINGS
            if (key := SETTINGS.get(name, name)) in layer
        }
        shared = layer.get("num_key_value_heads")
        mixers.append(mixer | {"n_kv_heads": None if shared == settings["n_heads"] else shared})
    return ModelConfig.from_dict({**settings, "mixer": mixers})
