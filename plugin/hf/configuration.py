"""config.json of an exported folder, as transformers sees it."""

from transformers import PretrainedConfig

from interdomain.model.config import ModelConfig, build_config


class InterdomainConfig(PretrainedConfig):
    """Our ModelConfig under `interdomain`, and what it says under transformers' own names beside it.

    Args:
        interdomain: `ModelConfig.to_dict()`; a small model's by default.
        weights: sha256 of the files in the folder that this is read from. Not kept: they are not another folder's.
    Raises: ValueError for a format version or a setting that this code does not know, and for a name of transformers' that is
        set to something else than the model is (but for max_position_embeddings, by which nothing is computed).
    """

    model_type = "interdomain"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (Trainer adds a list to it)

    def __init__(self, interdomain: dict | None = None, weights: dict | None = None, **kwargs):
        self.interdomain = build_config("debug").to_dict() if interdomain is None else interdomain
        for name, value in self._described().items():
            setattr(self, name, kwargs.pop(name, value))
        self.max_position_embeddings = kwargs.pop("max_position_embeddings", self.model.max_seq_len)
        self.use_cache = kwargs.pop("use_cache", True)
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)
        self.check()

    def _described(self) -> dict[str, int]:
        model = self.model
        return {
            "vocab_size": model.vocab_size,
            "hidden_size": model.dim,
            "intermediate_size": model.ffn_hidden,
            "num_hidden_layers": model.n_layers,
            "num_attention_heads": model.n_heads,
            "num_key_value_heads": model.n_kv_heads,
            "head_dim": model.head_dim,
        }

    def check(self) -> None:
        """Whether transformers' names still say what the model is: whoever loads it can set them."""
        for name, value in self._described().items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"{name} is {value} in this model; change what stands under `interdomain`, not {name}."
                )
        if self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings: the embeddings of this model are not tied; leave it out.")

    @property
    def model(self) -> ModelConfig:
        return ModelConfig.from_dict(self.interdomain)
