"""Model configuration as data: a table of sizes, a table of conditions, and their product.

The two tables do not know each other. `build_config(size, condition)` gives any cell of the paper's
study, and its overrides set any field by name. Configurations are frozen: change one with
`dataclasses.replace`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

from interdomain import features, scan

from .feature_maps import FEATURE_MAPS
from .settings import (
    FIXED_STATE,
    MIXER_SETTINGS,
    MixerConfig,
    check_fields,
    check_setting,
    one_of,
    setting,
    state_shape,
)

# Version of the dictionary that `ModelConfig.to_dict` returns. `from_dict` reads only this one.
FORMAT_VERSION = 2


@dataclass(frozen=True)
class Execution:
    """How the model is computed.

    No field changes the function or its parameters. All but the last are settings of [mixer].
    """

    backend: str = setting(
        "auto",
        f"Implementation of the scan (docs/kernels.md): {', '.join(scan.BACKENDS)}. reference is "
        "the paper's sequential scan. All compute the same function.",
        choices=scan.BACKENDS,
    )
    recompute: bool = setting(
        True,
        "Recompute the scan's scores in the backward pass (true), or keep them for a shorter "
        "one: 4 bytes per token, layer, query head and basis function in bf16; none with full "
        "activation checkpointing. For chunkwise on CUDA. The results are the same bits.",
    )
    features: str = setting(
        "auto",
        "Implementation of convolution, RoPE, feature map and input norm: auto, triton (one "
        "kernel, on CUDA) or torch. All compute the same function.",
        choices=features.BACKENDS,
    )
    # Under autocast, compute products of float32 parameters in bfloat16.
    bf16_products: bool = False

    def check_feature_map(self, mixer: MixerConfig) -> None:
        """Checks that the chosen implementation of the features has this mixer's feature map.

        Raises:
            ValueError: It is the Triton kernel, which has silu only.
        """
        if self.features == "triton" and FEATURE_MAPS[mixer.feature_map]:
            raise ValueError(
                f"mixer.features = 'triton' with mixer.feature_map = {mixer.feature_map!r}: the "
                "kernel has silu only, and the other maps are plain PyTorch. Set mixer.features "
                "= 'torch'; or 'auto', which uses the kernel for what comes before the map if it "
                "can."
            )


EXECUTION_SETTINGS = {f.name: f for f in fields(Execution) if f.metadata}


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-style pre-norm decoder around token mixers (paper, backbone details).

    Attributes:
        dim: Width of the model.
        n_layers: Number of blocks.
        n_heads: Number of query heads.
        head_dim: Width of a head, an even number. n_heads * head_dim = dim.
        vocab_size: Rows of the embedding and of the output head.
        max_seq_len: Tokens of a training sequence.
        rope_theta: Base of the rotary embedding.
        norm_eps: Epsilon of every RMSNorm.
        mixers: The shortest pattern of mixers that, repeated, gives the mixers of all layers in
            order. The paper's models have one mixer, a hybrid has several. Code that works for both
            reads `layers`.
    Raises:
        ValueError: A value is not allowed, or two values do not fit each other.
    """

    dim: int
    n_layers: int
    n_heads: int
    head_dim: int
    vocab_size: int = 32_000
    max_seq_len: int = 4096
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    mixers: tuple[MixerConfig, ...] = field(default_factory=lambda: (MixerConfig(),))

    def __post_init__(self) -> None:
        """Checks the values, alone and together, and shortens the pattern of mixers."""
        check_fields("", self, skip="mixers")
        # Two configurations of one model are equal: the pattern of mixers is the shortest one.
        if not self.mixers or self.n_layers % len(self.mixers):
            raise ValueError(
                f"mixer.layers has {len(self.mixers)} conditions: their number must divide "
                f"n_layers = {self.n_layers}."
            )
        object.__setattr__(self, "mixers", _shortest_pattern(self.mixers))
        if self.n_heads * self.head_dim != self.dim:
            raise ValueError(
                f"n_heads * head_dim must be dim: got {self.n_heads} * {self.head_dim}, dim = "
                f"{self.dim}."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even (RoPE rotates pairs): got {self.head_dim}.")
        # The heads of each mixer.
        for mixer in self.mixers:
            if mixer.kind in FIXED_STATE:
                # It raises the error, if there is one.
                state_shape(mixer, self.dim)
            elif mixer.n_kv_heads and self.n_heads % mixer.n_kv_heads:
                raise ValueError(
                    f"mixer.n_kv_heads must divide n_heads = {self.n_heads}: got "
                    f"{mixer.n_kv_heads}."
                )

    @property
    def mixer(self) -> MixerConfig:
        """The mixer of all layers. Raises a ValueError in a hybrid."""
        (mixer,) = self.mixers
        return mixer

    @cached_property
    def layers(self) -> "tuple[ModelConfig, ...]":
        """For each layer, the configuration of a model whose layers are all like it."""
        if len(self.mixers) == 1:
            return (self,) * self.n_layers
        pattern = tuple(replace(self, mixers=(mixer,)) for mixer in self.mixers)
        return pattern * (self.n_layers // len(pattern))

    @property
    def n_kv_heads(self) -> int:
        """Number of heads of keys, values and state."""
        return self.mixer.n_kv_heads or self.n_heads

    @property
    def ffn_hidden(self) -> int:
        """Width of SwiGLU: 8/3 dim, rounded up to a multiple of 128 (paper, backbone details)."""
        return -(-8 * self.dim // (3 * 128)) * 128

    def to_dict(self) -> dict[str, Any]:
        """Returns all settings, for JSON.

        `mixer` has those of the mixer; in a hybrid it is a list of them.
        """
        settings = asdict(self)
        mixer = list(settings.pop("mixers"))
        if len(mixer) == 1:
            mixer = mixer[0]
        return {"format_version": FORMAT_VERSION, **settings, "mixer": mixer}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "ModelConfig":
        """Reads what `to_dict` returned.

        Args:
            data: The settings. One that is left out has its default.
        Raises:
            ValueError: A setting is unknown (leaving it out would give another model), or
                `format_version` is missing or not the version of this program.
        """
        settings = dict(data)
        version = settings.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise ValueError(
                f"the model has format version {version!r} (None: it has none); this program "
                f"reads version {FORMAT_VERSION}."
            )
        mixers = settings.pop("mixer", {})
        if not isinstance(mixers, list):
            mixers = [mixers]
        check_names("model", settings, MODEL_SETTINGS)
        for mixer in mixers:
            check_names("mixer", mixer, MIXER_SETTINGS)
        return cls(**settings, mixers=tuple(MixerConfig(**mixer) for mixer in mixers))


MODEL_SETTINGS = tuple(f.name for f in fields(ModelConfig) if f.name != "mixers")


# The model sizes (paper, appendix "Backbone details"). The paper leaves widths and heads of 125M,
# 350M and 760M open: these rows are the only ones that give its parameter counts.
SIZES: dict[str, dict[str, int]] = {
    "debug": dict(
        dim=128, n_layers=4, n_heads=4, head_dim=32, n_basis=32, vocab_size=2048, max_seq_len=256
    ),
    "125M": dict(dim=768, n_layers=12, n_heads=12, head_dim=64, n_basis=64),
    "350M": dict(dim=1024, n_layers=24, n_heads=16, head_dim=64, n_basis=64),
    "760M": dict(dim=1536, n_layers=24, n_heads=16, head_dim=96, n_basis=64),
    "1.3B": dict(dim=2048, n_layers=24, n_heads=32, head_dim=64, n_basis=64),
    # Not in the paper: the width, layers and heads of Llama's models with 6.7 and 65 billion
    # parameters.
    "7B": dict(dim=4096, n_layers=32, n_heads=32, head_dim=128, n_basis=64),
    "70B": dict(dim=8192, n_layers=80, n_heads=64, head_dim=128, n_basis=64),
}

# The conditions of the study: the mixer settings that each of them fixes. They are the eight
# corners of the paper's cube, of which it reports six; interdomain-paired, which pairs a key with
# its value (docs/paper.md); and the baselines. A model is named after the first condition whose
# settings it has.
CONDITIONS: dict[str, dict[str, Any]] = {
    "softmax": dict(kind="softmax"),
    "interdomain": dict(dual_input=True, query_readout=True, rope=True),
    "interdomain-paired": dict(
        dual_input=True, query_readout=True, rope=False, readout="hermitian", output_norm="soft"
    ),
    "interdomain-norope": dict(dual_input=True, query_readout=True, rope=False),
    "single-query": dict(dual_input=False, query_readout=True, rope=True),
    "single-query-norope": dict(dual_input=False, query_readout=True, rope=False),
    "dual-linear": dict(dual_input=True, query_readout=False, rope=True),
    "dual-linear-norope": dict(dual_input=True, query_readout=False, rope=False),
    "s4d": dict(dual_input=False, query_readout=False, rope=False),
    "s4d-rope": dict(dual_input=False, query_readout=False, rope=True),
    **{kind: dict(kind=kind) for kind in FIXED_STATE},
}


def build_config(
    size: str,
    condition: str = "interdomain",
    *,
    layers: Sequence[str] = (),
    softmax_every: int | None = None,
    **overrides: Any,
) -> ModelConfig:
    """Returns the configuration of one cell of the study: `size` x `condition`.

    Args:
        size: A row of SIZES: debug, 125M, 350M, 760M, 1.3B, 7B or 70B.
        condition: A row of CONDITIONS: interdomain, softmax, s4d, ...
        layers: A hybrid: a condition for each layer, instead of `condition`. A shorter list is
            repeated.
        softmax_every: A hybrid: N, so that layers N - 1, 2N - 1, ... are softmax and the others
            `condition`.
        overrides: Any field of ModelConfig or MixerConfig. In a hybrid, a field of MixerConfig goes
            to all layers whose mixer has it.
    Raises:
        ValueError: A size, condition or field is unknown, or the combination is not possible.
    """
    check_setting("model size", size, str, one_of(SIZES))
    check_setting("mixer.condition", condition, str, one_of(CONDITIONS))
    for name in layers:
        check_setting("mixer.layers", name, str, one_of(CONDITIONS))
    check_names("model or mixer", overrides, (*MODEL_SETTINGS, *MIXER_SETTINGS))
    if layers and softmax_every is not None:
        raise ValueError(
            f"mixer.layers and mixer.softmax_every = {softmax_every} both choose layers: leave "
            "one out."
        )
    # The overrides are of the model or of its mixers.
    model: dict[str, Any] = dict(SIZES[size])
    n_basis = model.pop("n_basis")
    mixer = {}
    for name, value in overrides.items():
        if name in MODEL_SETTINGS:
            model[name] = value
        else:
            mixer[name] = value
    # The mixers of the layers, from their conditions.
    pattern = layers or _with_softmax(condition, softmax_every, model["n_layers"])
    mixers = [MixerConfig(n_basis=n_basis, **CONDITIONS[name]) for name in pattern]
    return ModelConfig(**model, mixers=with_settings(mixers, mixer))


def with_settings(
    mixers: Sequence[MixerConfig], settings: Mapping[str, Any]
) -> tuple[MixerConfig, ...]:
    """Sets fields of a model's mixers, each in the mixers that have it.

    Args:
        mixers: The mixers of the layers.
        settings: Fields of MixerConfig.
    Returns:
        The changed mixers, in the same order.
    Raises:
        ValueError: None of the mixers has a setting, or a value is not allowed.
    """
    unused = [mixer.unused_settings() for mixer in mixers]
    changed = []
    for mixer, without in zip(mixers, unused, strict=True):
        own = {}
        for name, value in settings.items():
            # A setting that no mixer has goes to all, which raises their error.
            if name not in without or all(name in others for others in unused):
                own[name] = value
        changed.append(replace(mixer, **own))
    return tuple(changed)


def _with_softmax(condition: str, every: int | None, n_layers: int) -> list[str]:
    """Returns the conditions of the layers, or a single one if all are alike.

    Args:
        condition: The condition of all layers that are not softmax.
        every: N of `build_config`: layers N - 1, 2N - 1, ... are softmax. None: no layer is.
        n_layers: The number of layers of the model.
    """
    if every is None:
        return [condition]
    if condition == "softmax" or not 2 <= every <= n_layers:
        raise ValueError(
            f"mixer.softmax_every = {every} with mixer.condition = {condition}: it must be from 2 "
            f"to n_layers = {n_layers}, and the condition another one than softmax. Change it, or "
            "leave it out."
        )
    pattern = [condition] * n_layers
    for layer in range(every - 1, n_layers, every):
        pattern[layer] = "softmax"
    return pattern


class Cell(NamedTuple):
    """The name of a model in the study: a size and a condition, each with the model's differences.

    Attributes:
        size: Such as "125M", or "125M with n_layers 6".
        condition: Such as "interdomain", "interdomain, c_form identity", or for a hybrid
            "interdomain, softmax_every 3".
    """

    size: str
    condition: str

    def __str__(self) -> str:
        return f"{self.size}, {self.condition}"


def cell_of(config: ModelConfig, size: str) -> Cell:
    """Names a model after its size and condition, and every setting in which it differs from them.

    Args:
        config: The model.
        size: A row of SIZES, or the size of an earlier `Cell`. The settings are compared with the
            row if there is one.
    Returns:
        Such as ("125M", "interdomain") or ("125M with n_layers 6", "interdomain, n_basis 32"); for
        a hybrid ("125M", "interdomain, softmax_every 3") or ("125M", "softmax + interdomain +
        s4d").
    """
    # The size, with the settings of the model that differ from its row.
    n_basis = MixerConfig.n_basis
    row = size.partition(" with ")[0]
    if row in SIZES:
        size = row
        n_basis = SIZES[row]["n_basis"]
        # dim and n_heads say what head_dim is.
        compared = [name for name in MODEL_SETTINGS if name != "head_dim"]
        changed = _differences(config, build_config(row), compared)
        if changed:
            size = f"{row} with {', '.join(changed)}"

    # The settings of the mixers that differ from their conditions, each once.
    pattern = [_condition_of(mixer) for mixer in config.mixers]
    settings = []
    for mixer, condition in zip(config.mixers, pattern, strict=True):
        usual = MixerConfig(n_basis=n_basis, **CONDITIONS[condition])
        compared = list(MIXER_SETTINGS)
        # Softmax does not read n_basis.
        if mixer.kind == "softmax":
            compared.remove("n_basis")
        for difference in _differences(mixer, usual, compared):
            if difference not in settings:
                settings.append(difference)

    # The condition; of a hybrid, by softmax_every if that gives the same pattern.
    name = " + ".join(pattern)
    if "softmax" in pattern[1:]:
        every = pattern.index("softmax") + 1
        if every > 1 and pattern == _with_softmax(pattern[0], every, len(pattern)):
            name = f"{pattern[0]}, softmax_every {every}"
    return Cell(size, ", ".join([name, *settings]))


def _differences(config: Any, usual: Any, names: Iterable[str]) -> list[str]:
    """Returns those of the settings whose value is not the usual one, such as "n_layers 6".

    Args:
        config: A ModelConfig or a MixerConfig.
        usual: The same class, with the values to compare with.
        names: The names of the settings to compare.
    """
    changed = []
    for name in names:
        value = getattr(config, name)
        if value != getattr(usual, name):
            if isinstance(value, float):
                value = f"{value:g}"
            changed.append(f"{name} {value}")
    return changed


def _condition_of(mixer: MixerConfig) -> str:
    """Returns the first condition whose settings a mixer has."""
    for name, row in CONDITIONS.items():
        if {"kind": "interdomain", **row}.items() <= vars(mixer).items():
            return name
    raise AssertionError(f"no condition has the settings of {mixer}")


def _shortest_pattern(pattern: tuple[MixerConfig, ...]) -> tuple[MixerConfig, ...]:
    """Returns the shortest beginning that, repeated, gives the pattern."""
    n = 1
    while pattern[:n] * (len(pattern) // n) != pattern:
        n += 1
    return pattern[:n]


def check_names(where: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """Checks the names of settings.

    Args:
        where: What the settings belong to, for the error: "model" or "mixer".
        given: The names.
        allowed: The names that are allowed.
    Raises:
        ValueError: A name is unknown.
    """
    unknown = [name for name in given if name not in allowed]
    if unknown:
        raise ValueError(
            f"unknown {where} setting(s): {', '.join(unknown)}; allowed: {', '.join(allowed)}."
        )
