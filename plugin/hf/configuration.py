"""config.json of an exported folder, as transformers sees it."""

from transformers import PretrainedConfig

from interdomain.model.config import ModelConfig, build_config


class InterdomainConfig(PretrainedConfig):
    """Our ModelConfig under `interdomain`, and what it says under transformers' own names beside it.

    Args:
        interdomain: `ModelConfig.to_dict()`; a small model's by default.
        weights: sha256 of every file of weights, or None.
    Raises: ValueError for a format version or a setting that this code does not know, and for a name of transformers' that is
        set to something else than the model is.
    """

    model_type = "interdomain"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (Trainer adds a list to it)

    def __init__(self, interdomain: dict | None = None, weights: dict | None = None, **kwargs):
        self.interdomain = build_config("debug").to_dict() if interdomain is None else interdomain
        self.weights = weights
        model = self.model
        names = {
            "vocab_size": model.vocab_size,
            "hidden_size": model.dim,
            "intermediate_size": model.ffn_hidden,
            "num_hidden_layers": model.n_layers,
            "num_attention_heads": model.n_heads,
            "num_key_value_heads": model.n_kv_heads,
            "head_dim": model.head_dim,
            "max_position_embeddings": model.max_seq_len,
        }
        for name, value in names.items():
            if kwargs.pop(name, value) != value:
                raise ValueError(
                    f"{name} is {value} in this model; change what stands under `interdomain`, not {name}."
                )
            setattr(self, name, value)
        self.use_cache = kwargs.pop("use_cache", True)
        if kwargs.setdefault("tie_word_embeddings", False):
            raise ValueError("tie_word_embeddings: the embeddings of this model are not tied; leave it out.")
        super().__init__(**kwargs)

    @property
    def model(self) -> ModelConfig:
        return ModelConfig.from_dict(self.interdomain)
