"""config.json of an Interdomain Attention model."""

from dataclasses import fields

from transformers import PretrainedConfig
from transformers.utils import logging

from .plain_interdomain import FORMAT_VERSION, MixerConfig, ModelConfig, from_transformers

DEFAULTS = dict(
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
    **{f.name: f.default for f in fields(MixerConfig) if f.name not in ("kind", "n_kv_heads")},
)


class InterdomainConfig(PretrainedConfig):
    """A Llama-style decoder around token mixers.

    Args:
        hidden_size, num_hidden_layers, num_attention_heads, intermediate_size, ...: as in Llama. intermediate_size: None for
            8/3 of hidden_size, rounded up to a multiple of 128. What is left out is as in DEFAULTS.
        num_key_value_heads: heads of keys, values and state, which query heads share in groups; None: as many as query heads.
        mixer: a kind of `MixerConfig`; or `hybrid` where `layer_settings` has the mixer's settings for each layer, mixer and
            num_key_value_heads among them: a list that is repeated where it is shorter than the layers.
        initializer_range: standard deviation of linear layers in a new model.
        dual_input, query_readout, ..., a_init: the other settings of the mixer, as `MixerConfig` has them.
        weights, facts: checksums of the files that config.json lies beside, and what is known of them; not kept, for a model
            that is saved anew has other weights.
        layer_types: read from the mixers: which layers have a cache of keys and values, in transformers' words.
    Raises: ValueError for an unknown choice, for sizes that do not fit, and for a setting that the mixer does not have.
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
        **settings,
    ):
        for name, default in DEFAULTS.items():
            setattr(self, name, settings.pop(name, default))
        self.num_key_value_heads = num_key_value_heads or self.num_attention_heads
        self.head_dim = head_dim or self.hidden_size // max(self.num_attention_heads, 1)
        super().__init__(**{"tie_word_embeddings": False, **settings})
        if self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings: the head has a matrix of its own; leave it out.")
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(self, name, settings.get(name))
        model = self.checked()
        self.intermediate_size = intermediate_size or model.ffn_hidden
        self.layer_types = []
        for layer in model.layers:
            softmax = "full_attention" if layer.mixer.window is None else "sliding_attention"
            self.layer_types.append(
                softmax if layer.mixer.kind == "softmax" else "linear_attention"
            )

    def checked(self) -> ModelConfig:
        """The model's own configuration. Raises ValueError as the class says. Again when a model is made: `from_pretrained`
        sets its options later."""
        if self.tie_word_embeddings:
            logging.get_logger(__name__).warning(
                "tie_word_embeddings is off: the head has a matrix of its own."
            )
            self.tie_word_embeddings = False
        return from_transformers(vars(self))
