"""config.json of an Interdomain Attention model."""

from dataclasses import fields
from typing import Any

from transformers import PretrainedConfig
from transformers.utils import logging

from .plain_interdomain import FORMAT_VERSION, MixerConfig, ModelConfig, from_transformers

# The settings with defaults, under their names in config.json. Those of the mixer follow below.
DEFAULTS: dict[str, Any] = dict(
    vocab_size=32_000,
    hidden_size=768,
    num_hidden_layers=12,
    num_attention_heads=12,
    max_position_embeddings=4096,
    rope_theta=10_000.0,
    rms_norm_eps=1e-5,
    initializer_range=0.02,
    use_cache=True,
    mixer="interdomain",
    layer_settings=None,
    format_version=FORMAT_VERSION,
)
for setting in fields(MixerConfig):
    if setting.name not in ("kind", "n_kv_heads"):  # they are `mixer` and `num_key_value_heads`
        DEFAULTS[setting.name] = setting.default


class InterdomainConfig(PretrainedConfig):
    """A Llama-style decoder around token mixers.

    Args:
        intermediate_size: Width of the feed-forward layers. None for 8/3 of hidden_size, rounded up
            to a multiple of 128.
        num_key_value_heads: Heads of keys, values and state, which groups of query heads share.
            None for as many as query heads.
        head_dim: Width of a head. It must be hidden_size / num_attention_heads.
        weights: Checksums of the files beside config.json. They are dropped, because a model that
            is saved anew has other weights.
        facts: What is known of the run that made the files beside config.json. They are dropped,
            too.
        layer_types: Ignored. It follows from the mixers: the layers that have a cache of keys and
            values, as transformers calls them.
        settings: The names in DEFAULTS, and what every `PretrainedConfig` takes. `mixer` is a kind
            of `MixerConfig`, and dual_input, readout and so on are its settings. With `mixer =
            "hybrid"`, the list `layer_settings` holds the mixer's settings of each layer instead,
            `mixer` and num_key_value_heads among them; a list that is shorter than the layers is
            repeated. initializer_range is the standard deviation of embeddings and linear layers in
            a new model; that of the output projections wo and w2 is divided by sqrt(2
            num_hidden_layers). hidden_size, num_attention_heads and so on are as in Llama.

    Raises:
        ValueError: A choice is unknown, sizes do not fit, or the mixer does not have a setting.
    """

    model_type = "interdomain"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012 (Trainer adds a list to it)

    def __init__(
        self,
        intermediate_size: int | None = None,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        weights: dict | None = None,
        facts: dict | None = None,
        layer_types: list | None = None,
        **settings: Any,
    ) -> None:
        """Sets every setting as an attribute, under its name in config.json.

        The class has the arguments. `weights` (checksums of the weight files), `facts` (about the
        run that made them) and `layer_types` are arguments only to take them out of `settings`: a
        config.json has them, and they are not used.
        """
        # The settings of the model and of its mixers.
        for name, default in DEFAULTS.items():
            setattr(self, name, settings.pop(name, default))
        self.num_key_value_heads = num_key_value_heads or self.num_attention_heads
        # max: without heads, `to_model_config` reports an error; here it would be a division by 0.
        self.head_dim = head_dim or self.hidden_size // max(self.num_attention_heads, 1)

        # The settings that are left are transformers' own. transformers 4 would tie embeddings by
        # default, and transformers 5 may have no attributes for these ids.
        super().__init__(**{"tie_word_embeddings": False, **settings})
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(self, name, settings.get(name))

        # Check the settings, and set what follows from them.
        model = self.to_model_config()
        self.intermediate_size = intermediate_size or model.ffn_hidden
        # transformers' names of layers: with a state of fixed size, with the keys and values of all
        # tokens (no window), or with those of the last ones.
        self.layer_types = []
        for layer in model.layers:
            if layer.mixer.kind != "softmax":
                self.layer_types.append("linear_attention")
            elif layer.mixer.window is None:
                self.layer_types.append("full_attention")
            else:
                self.layer_types.append("sliding_attention")

    def to_model_config(self) -> ModelConfig:
        """Checks the configuration, and returns it as the package's `ModelConfig`.

        __init__ calls this, and a model again when it is made, because `from_pretrained` sets
        options after __init__. It turns tie_word_embeddings off, with a warning.

        Raises:
            ValueError: A choice is unknown, sizes do not fit, or a setting is not one of the
                model's mixer (`mixer` and `layer_settings`).
            TypeError: A setting has a value of another type.
        """
        # With this setting, transformers 4 would make the embedding and the head one matrix.
        if self.tie_word_embeddings:
            logging.get_logger(__name__).warning(
                "tie_word_embeddings is off: the head has a matrix of its own."
            )
            self.tie_word_embeddings = False
        # The attributes have the names of config.json, which this function reads. `ModelConfig`
        # checks the values.
        return from_transformers(vars(self))
