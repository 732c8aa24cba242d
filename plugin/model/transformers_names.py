"""A model's settings and tensors under the names that an exported folder has for transformers."""

from typing import Any

from .config import MIXER_SETTINGS, MODEL_SETTINGS, ModelConfig

AUTO_MAP = {
    "AutoConfig": "configuration_interdomain.InterdomainConfig",
    "AutoModel": "modeling_interdomain.InterdomainModel",
    "AutoModelForCausalLM": "modeling_interdomain.InterdomainForCausalLM",
    "AutoModelForSequenceClassification": "modeling_interdomain.InterdomainForSequenceClassification",
}
# Settings that transformers knows by another name; the mixer's others stand beside them under their own.
SETTINGS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "kind": "mixer",
}
BASE = "model."  # before the name of every tensor but the head's: transformers' base_model_prefix


def stored_name(name: str) -> str:
    """A tensor's name in a folder. `name.removeprefix(BASE)` is the inverse; older folders have no prefix."""
    return name if name.startswith("output.") else BASE + name


def _renamed(name: str) -> str:
    return SETTINGS.get(name, name)


def to_transformers(config: ModelConfig) -> dict[str, Any]:
    """The settings as config.json has them."""
    settings: dict[str, Any] = config.to_dict()
    mixer: dict[str, Any] = settings.pop("mixer")
    mixer.pop("n_kv_heads")
    return {
        **{_renamed(name): value for name, value in (settings | mixer).items()},
        "num_key_value_heads": config.n_kv_heads,
        "intermediate_size": config.ffn_hidden,
    }


def from_transformers(record: dict[str, Any]) -> ModelConfig:
    """The model of a config.json. Raises: KeyError, TypeError, ValueError."""
    if "interdomain" in record:  # as folders had it that carry their code as some forty files
        return ModelConfig.from_dict(record["interdomain"])
    settings = {name: record[_renamed(name)] for name in ("format_version", *MODEL_SETTINGS)}
    mixer = {name: record[_renamed(name)] for name in MIXER_SETTINGS if name != "n_kv_heads"}
    shared = record["num_key_value_heads"]
    mixer["n_kv_heads"] = None if shared == settings["n_heads"] else shared
    config = ModelConfig.from_dict({**settings, "mixer": mixer})
    if record["intermediate_size"] != config.ffn_hidden:
        raise ValueError(
            f"intermediate_size is {record['intermediate_size']}; a model of this width has {config.ffn_hidden} here."
        )
    return config
