"""config.json of an Interdomain Attention model."""

import copy

from transformers import PretrainedConfig

CHOICES = {
    "mixer": ("interdomain", "softmax", "gla", "mamba2", "deltanet", "gated-deltanet", "hybrid"),
    "readout": ("complex", "real", "hermitian"),
    "c_form": ("full", "diagonal", "identity"),
    "feature_map": ("silu", "rff", "elu", "softplus", "favor"),
    "a_init": ("s4d-inv", "s4d-lin", "s4d-real"),
}
LARGEST = 2**20  # of a size: a damaged number would take all memory, or for ever
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
    dual_input=True,
    query_readout=True,
    rope=True,
    n_basis=64,
    conv_width=4,
    readout="complex",
    c_form="full",
    feature_map="silu",
    normalize=False,
    output_gate=False,
    window=None,
    state_heads=None,
    layer_settings=None,
    c_scale=None,
    linear_scale=None,
    dt_min=1e-3,
    dt_max=1e-1,
    a_init="s4d-inv",
)


class InterdomainConfig(PretrainedConfig):
    """A Llama-style decoder around token mixers.

    Args:
        hidden_size, num_hidden_layers, num_attention_heads, intermediate_size, ...: as in Llama. intermediate_size: None for
            8/3 of hidden_size, rounded up to a multiple of 128. What is left out is as in DEFAULTS.
        num_key_value_heads: heads of keys, values and state, which query heads share in groups; None: as many as query heads.
        mixer: `interdomain`, or `softmax` for causal attention, which reads `window` alone of what follows; `hybrid` where
            `layer_settings` has these settings for each layer, from the mixer to a_init and num_key_value_heads: a list that is
            repeated where it is shorter than the layers.
            `gla`, `mamba2`, `deltanet` and `gated-deltanet` are baselines with a fixed state, which read n_basis, state_heads,
            conv_width and the range of the step size.
        state_heads: of those, the heads of the state; None: those with which it is as large as interdomain attention's.
        window: of softmax, the tokens that a token attends to, itself and those before it; None for all.
        dual_input: keys and values are mapped apart. query_readout: the state is read with a query, not linearly. rope: queries
            and keys are rotated. All three are the paper's interdomain attention, none of them is S4D.
        n_basis: M, the basis functions (complex states) of a head.
        conv_width: of the causal convolution over queries and keys.
        readout: how complex states become a real output. `complex`: Re(q^T U^T Gamma) with nothing conjugated; `real`: the real
            parts multiplied; `hermitian`: the left factor conjugated.
        c_form: the matrix C of a head: `full`, `diagonal` or `identity`.
        feature_map: `silu` (SiLU, then the l2 norm), `rff` (random Fourier features), or a positive one: `elu` (elu + 1),
            `softplus`, `favor` (random features of the softmax kernel; needs normalize).
        normalize: divide by the Nadaraya-Watson denominator. output_gate: o <- sigmoid(Wg x) * o.
        initializer_range, c_scale, linear_scale, dt_min, dt_max, a_init: how a new model starts: standard deviation of linear
            layers; scale of C (None: the project's) and of the linear readout; range of the step size; form of A.
        weights, facts: checksums of the files that config.json lies beside, and what is known of them; not kept, for a folder
            that is saved anew has other weights.
        layer_types: read from the mixers: which layers have a cache of keys and values, in transformers' words.
    Raises: ValueError for an unknown choice, and for sizes that do not fit.
    """

    model_type = "interdomain"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (Trainer adds a list to it)

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
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "n_basis"):
            if not 0 < getattr(self, name) <= LARGEST:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: 1 to {LARGEST:,}.")
        self.intermediate_size = intermediate_size or -(-8 * self.hidden_size // (3 * 128)) * 128
        self.num_key_value_heads = num_key_value_heads or self.num_attention_heads
        self.head_dim = head_dim or self.hidden_size // self.num_attention_heads
        super().__init__(**{"tie_word_embeddings": False, **settings})
        if self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings: the head has a matrix of its own; leave it out.")
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(self, name, settings.get(name))
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: {', '.join(allowed)}.")
        if self.mixer == "hybrid":
            if not self.layer_settings or self.num_hidden_layers % len(self.layer_settings):
                raise ValueError(
                    f"layer_settings: their number must divide {self.num_hidden_layers}: {self.layer_settings}."
                )
            for own in self.layer_settings:  # each as the configuration of a model of such layers
                sizes = dict(hidden_size=self.hidden_size, num_attention_heads=self.num_attention_heads)
                InterdomainConfig(**sizes, head_dim=self.head_dim, **own)
        each = [self.of_layer(i) for i in range(self.num_hidden_layers)]
        growing = {None: "full_attention"}
        self.layer_types = [
            growing.get(own.window, "sliding_attention") if own.mixer == "softmax" else "linear_attention"
            for own in each
        ]
        heads, groups, width = self.num_attention_heads, self.num_key_value_heads, self.head_dim
        if heads * width != self.hidden_size or width % 2:
            raise ValueError(f"hidden_size must be heads x an even head_dim: got {self.hidden_size}, {heads}, {width}.")
        if heads % groups:
            raise ValueError(f"num_key_value_heads must divide num_attention_heads = {heads}: got {groups}.")
        if not self.query_readout and (groups != heads or self.normalize or self.readout != "complex"):
            raise ValueError("without query_readout leave out num_key_value_heads, normalize and readout.")
        if self.feature_map == "favor" and not self.normalize:
            raise ValueError("feature_map = 'favor' scales its queries, which cancels in a ratio only: set normalize.")

    def of_layer(self, i: int) -> "InterdomainConfig":
        """The configuration of a model all of whose layers are like layer i."""
        if self.mixer != "hybrid":
            return self
        own = copy.copy(self)
        for name, value in self.layer_settings[i % len(self.layer_settings)].items():
            setattr(own, name, value)
        return own
