"""config.json of an Interdomain Attention model."""

from transformers import PretrainedConfig

CHOICES = {
    "mixer": ("interdomain", "softmax"),
    "readout": ("complex", "real", "hermitian"),
    "c_form": ("full", "diagonal", "identity"),
    "feature_map": ("silu", "rff"),
    "a_init": ("s4d-inv", "s4d-lin", "s4d-real"),
}
# Folders exported before this file was written have one object `interdomain` in place of these names.
FORMER_NAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "kind": "mixer",
}


class InterdomainConfig(PretrainedConfig):
    """A Llama-style decoder around one kind of token mixer.

    Args:
        hidden_size, num_hidden_layers, num_attention_heads, intermediate_size, ...: as in Llama. intermediate_size: None for
            8/3 of hidden_size, rounded up to a multiple of 128.
        num_key_value_heads: heads of keys, values and state, which query heads share in groups; None: as many as query heads.
        mixer: `interdomain`, or `softmax` for causal attention, which reads none of what follows.
        dual_input: keys and values are mapped apart. query_readout: the state is read with a query, not linearly. rope: queries
            and keys are rotated. All three are the paper's interdomain attention, none of them is S4D.
        n_basis: M, the basis functions (complex states) of a head.
        conv_width: of the causal convolution over queries and keys.
        readout: how complex states become a real output. `complex`: Re(q^T U^T Gamma) with nothing conjugated; `real`: the real
            parts multiplied; `hermitian`: the left factor conjugated.
        c_form: the matrix C of a head: `full`, `diagonal` or `identity`.
        feature_map: `silu` (SiLU, then the l2 norm) or `rff` (random Fourier features).
        normalize: divide by the Nadaraya-Watson denominator. output_gate: o <- sigmoid(Wg x) * o.
        initializer_range, c_scale, linear_scale, dt_min, dt_max, a_init: how a new model starts: standard deviation of linear
            layers; scale of C (None: the project's) and of the linear readout; range of the step size; form of A.
        interdomain: the settings of a folder of the former format.
        weights: checksums of the files that config.json lies beside; not kept, for another folder has other files.
    Raises: ValueError for an unknown choice, and for sizes that do not fit.
    """

    model_type = "interdomain"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (Trainer adds a list to it)

    def __init__(
        self,
        vocab_size: int = 32_000,
        hidden_size: int = 768,
        intermediate_size: int | None = None,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        max_position_embeddings: int = 4096,
        rope_theta: float = 10_000.0,
        rms_norm_eps: float = 1e-5,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        mixer: str = "interdomain",
        dual_input: bool = True,
        query_readout: bool = True,
        rope: bool = True,
        n_basis: int = 64,
        conv_width: int = 4,
        readout: str = "complex",
        c_form: str = "full",
        feature_map: str = "silu",
        normalize: bool = False,
        output_gate: bool = False,
        c_scale: float | None = None,
        linear_scale: float | None = None,
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
        a_init: str = "s4d-inv",
        interdomain: dict | None = None,
        weights: dict | None = None,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size or -(-8 * hidden_size // (3 * 128)) * 128
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.rope_theta = rope_theta
        self.rms_norm_eps = rms_norm_eps
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        self.mixer = mixer
        self.dual_input = dual_input
        self.query_readout = query_readout
        self.rope = rope
        self.n_basis = n_basis
        self.conv_width = conv_width
        self.readout = readout
        self.c_form = c_form
        self.feature_map = feature_map
        self.normalize = normalize
        self.output_gate = output_gate
        self.c_scale = c_scale
        self.linear_scale = linear_scale
        self.dt_min = dt_min
        self.dt_max = dt_max
        self.a_init = a_init
        former: dict = {**interdomain, **interdomain["mixer"]} if interdomain else {}
        for name, value in former.items():
            if name not in ("mixer", "format_version") and value is not None:
                setattr(self, str(FORMER_NAMES.get(name, name)), value)
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)
        self.pad_token_id, self.bos_token_id, self.eos_token_id = pad_token_id, bos_token_id, eos_token_id
        self._check()

    def _check(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: {', '.join(allowed)}.")
        heads, groups, width = self.num_attention_heads, self.num_key_value_heads, self.head_dim
        if heads * width != self.hidden_size or width % 2:
            raise ValueError(
                f"num_attention_heads times an even head_dim must be hidden_size: got {heads}, {width}, {self.hidden_size}."
            )
        if heads % groups:
            raise ValueError(f"num_key_value_heads must divide num_attention_heads = {heads}: got {groups}.")
        if not self.query_readout and (groups != heads or self.normalize or self.readout != "complex"):
            raise ValueError(
                "without query_readout there is no query to share, normalise by or conjugate: leave out num_key_value_heads, "
                "normalize and readout."
            )
