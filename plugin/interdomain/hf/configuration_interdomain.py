"""config.json of an Interdomain Attention model."""

import copy
from dataclasses import fields

from transformers import PretrainedConfig
from transformers.utils import logging

from .plain_interdomain import CONV_WIDTH, KINDS, LARGEST, MixerConfig

MIXER = {f.name: f.default for f in fields(MixerConfig) if f.name not in ("kind", "n_kv_heads")}
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
    **MIXER,
)


class InterdomainConfig(PretrainedConfig):
    """A Llama-style decoder around token mixers.

    Args:
        hidden_size, num_hidden_layers, num_attention_heads, intermediate_size, ...: as in Llama. intermediate_size: None for
            8/3 of hidden_size, rounded up to a multiple of 128. What is left out is as in DEFAULTS.
        num_key_value_heads: heads of keys, values and state, which query heads share in groups; None: as many as query heads.
        mixer: one of KINDS; or `hybrid` where `layer_settings` has the mixer's settings for each layer, mixer and
            num_key_value_heads among them: a list that is repeated where it is shorter than the layers.
        initializer_range: standard deviation of linear layers in a new model.
        dual_input, query_readout, ..., a_init: the other settings of the mixer, as `MixerConfig` has them.
        weights, facts: checksums of the files that config.json lies beside, and what is known of them; not kept, for a folder
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
        self.intermediate_size = intermediate_size or -(-8 * self.hidden_size // (3 * 128)) * 128
        self.num_key_value_heads = num_key_value_heads or self.num_attention_heads
        self.head_dim = head_dim or self.hidden_size // max(self.num_attention_heads, 1)
        super().__init__(**{"tie_word_embeddings": False, **settings})
        if self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings: the head has a matrix of its own; leave it out.")
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(self, name, settings.get(name))
        self._set_conv_width()
        self.check()
        growing = {None: "full_attention"}
        self.layer_types = [
            growing.get(layer.window, "sliding_attention") if layer.mixer == "softmax" else "linear_attention"
            for layer in (self.of_layer(i) for i in range(self.num_hidden_layers))
        ]

    def check(self) -> None:
        """Raises ValueError as the class says. Again when a model is made: `from_pretrained` sets its options later."""
        if self.tie_word_embeddings:
            logging.get_logger(__name__).warning("tie_word_embeddings is off: the head has a matrix of its own.")
            self.tie_word_embeddings = False
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
            if not 0 < getattr(self, name) <= LARGEST:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: 1 to {LARGEST:,}.")
        for name in ("rope_theta", "rms_norm_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be larger than 0: got {getattr(self, name)}.")
        if self.mixer not in (*KINDS, "hybrid"):
            raise ValueError(f"mixer is {self.mixer!r}; allowed: {', '.join(KINDS)}, hybrid.")
        if self.mixer == "hybrid":
            if not self.layer_settings or self.num_hidden_layers % len(self.layer_settings):
                raise ValueError(
                    f"layer_settings: their number must divide {self.num_hidden_layers}: {self.layer_settings}."
                )
            for layer in self.layer_settings:  # each as the configuration of a model of such layers
                sizes = dict(hidden_size=self.hidden_size, num_attention_heads=self.num_attention_heads)
                InterdomainConfig(**sizes, head_dim=self.head_dim, **layer)
        heads, groups, width = self.num_attention_heads, self.num_key_value_heads, self.head_dim
        if heads * width != self.hidden_size or width % 2:
            raise ValueError(f"hidden_size must be heads x an even head_dim: got {self.hidden_size}, {heads}, {width}.")
        if heads % groups:
            raise ValueError(f"num_key_value_heads must divide num_attention_heads = {heads}: got {groups}.")
        if self.mixer != "hybrid":
            self.mixer_config  # noqa: B018 (it checks itself)

    @property
    def mixer_config(self) -> MixerConfig:
        heads = None if self.num_key_value_heads == self.num_attention_heads else self.num_key_value_heads
        return MixerConfig(kind=self.mixer, n_kv_heads=heads, **{name: getattr(self, name) for name in MIXER})

    def of_layer(self, i: int) -> "InterdomainConfig":
        """The configuration of a model all of whose layers are like layer i."""
        if self.mixer != "hybrid":
            return self
        layer = copy.copy(self)
        for name, value in self.layer_settings[i % len(self.layer_settings)].items():
            setattr(layer, name, value)
        layer._set_conv_width()
        return layer

    def _set_conv_width(self) -> None:
        """The convolution's width where none is set; a hybrid's layers have theirs."""
        if self.conv_width is None and self.mixer != "hybrid":
            self.conv_width = CONV_WIDTH.get(self.mixer, 4)
