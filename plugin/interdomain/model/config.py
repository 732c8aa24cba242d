"""Model configuration as data: a table of sizes, a table of conditions, and their product.

The two tables do not know each other; `build_config(size, condition)` is any cell of the paper's study, and overrides reach
every field by name. Configurations are frozen: change one with `dataclasses.replace`.
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
    one_of,
    setting,
    state_shape,
)

FORMAT_VERSION = 2


@dataclass(frozen=True)
class Execution:
    """Ways of computing the model. No field changes the function or its parameters. All but one are settings of [mixer]."""

    backend: str = setting(
        "auto",
        f"Implementation of the scan (docs/kernels.md): {', '.join(scan.BACKENDS)}. reference is the paper's "
        "sequential scan. All compute the same function.",
        choices=scan.BACKENDS,
    )
    recompute: bool = setting(
        True,
        "Recompute the scan's scores in the backward pass (true), or keep them for a shorter one: 4 bytes per token, layer, "
        "query head and basis function in bf16; none with full activation checkpointing. For chunkwise on CUDA. "
        "The results are the same bits.",
    )
    features: str = setting(
        "auto",
        "Implementation of convolution, RoPE, feature map and input norm: auto, triton (one kernel, on CUDA) or torch. All "
        "compute the same function.",
        choices=features.BACKENDS,
    )
    bf16_products: bool = False  # of float32 parameters in bfloat16, under autocast

    def refuse_map(self, mixer: MixerConfig) -> None:
        """Raises: ValueError for the Triton kernel of the features and a map that it does not have."""
        if self.features == "triton" and FEATURE_MAPS[mixer.feature_map]:
            raise ValueError(
                f"mixer.features = 'triton' with mixer.feature_map = {mixer.feature_map!r}: the kernel has silu alone, and the "
                "other maps are plain PyTorch. Set mixer.features = 'auto', which takes the kernel for what comes before the "
                "map where it can, or 'torch'."
            )


EXECUTION_SETTINGS = {f.name: f for f in fields(Execution) if f.metadata}


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-style pre-norm decoder around token mixers (paper, backbone details).

    Attributes:
        dim: width.
        n_layers: blocks.
        n_heads: query heads.
        head_dim: width of a head, even; n_heads * head_dim = dim.
        vocab_size: rows of the embedding and of the head.
        max_seq_len: tokens of a training sequence.
        rope_theta: base of the rotary embedding.
        norm_eps: epsilon of every RMSNorm.
        mixers: of the layers in order, repeated until all have one: the shortest such pattern. The paper's models have one,
            hybrids several; code that works for both reads `layers`.

    Raises:
        ValueError: a value that is not allowed, or numbers that do not fit each other.
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
        check_fields("", self, without="mixers")
        if not self.mixers or self.n_layers % len(self.mixers):
            raise ValueError(
                f"mixer.layers has {len(self.mixers)} conditions: their number must divide n_layers = {self.n_layers}."
            )
        object.__setattr__(self, "mixers", _shortest(self.mixers))
        if self.n_heads * self.head_dim != self.dim:
            raise ValueError(
                f"n_heads * head_dim must be dim: got {self.n_heads} * {self.head_dim}, dim = {self.dim}."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even (RoPE rotates pairs): got {self.head_dim}.")
        for mixer in self.mixers:
            if mixer.kind in FIXED_STATE:
                state_shape(mixer, self.dim)
            elif self.n_heads % (mixer.n_kv_heads or self.n_heads):
                raise ValueError(
                    f"mixer.n_kv_heads must divide n_heads = {self.n_heads}: got {mixer.n_kv_heads}."
                )

    @property
    def mixer(self) -> MixerConfig:
        """The mixer of all layers. A hybrid has none such: ValueError."""
        (mixer,) = self.mixers
        return mixer

    @cached_property
    def layers(self) -> "tuple[ModelConfig, ...]":
        """Configuration of each layer: that of a model whose layers are all like it."""
        if len(self.mixers) == 1:
            return (self,) * self.n_layers
        pattern = tuple(replace(self, mixers=(mixer,)) for mixer in self.mixers)
        return pattern * (self.n_layers // len(pattern))

    @property
    def n_kv_heads(self) -> int:
        """Heads of keys, values and state."""
        return self.mixer.n_kv_heads or self.n_heads

    @property
    def ffn_hidden(self) -> int:
        """SwiGLU width: 2/3 * 4 * dim, rounded up to a multiple of 128 (paper, backbone details)."""
        return -(-8 * self.dim // (3 * 128)) * 128

    def to_dict(self) -> dict[str, Any]:
        """All settings, for JSON. `mixer` holds those of the mixer; of a hybrid, a list of them."""
        settings = asdict(self)
        mixers = settings.pop("mixers")
        return {
            "format_version": FORMAT_VERSION,
            **settings,
            "mixer": list(mixers) if len(mixers) > 1 else mixers[0],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "ModelConfig":
        """Inverse of `to_dict`.

        Raises:
            ValueError: unknown keys, or another version: a silently dropped setting would be another model.
        """
        settings = dict(data)
        version = settings.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise ValueError(
                f"format version {version!r} of a model; this program reads version {FORMAT_VERSION}."
            )
        mixers = settings.pop("mixer", {})
        if not isinstance(mixers, list):
            mixers = [mixers]
        check_names("model", settings, MODEL_SETTINGS)
        for mixer in mixers:
            check_names("mixer", mixer, MIXER_SETTINGS)
        return cls(**settings, mixers=tuple(MixerConfig(**mixer) for mixer in mixers))


MODEL_SETTINGS = tuple(f.name for f in fields(ModelConfig) if f.name != "mixers")


# Paper, appendix "Backbone details"; the 125M, 350M and 760M rows are the only ones that reproduce its parameter counts.
SIZES: dict[str, dict[str, int]] = {
    "debug": dict(
        dim=128, n_layers=4, n_heads=4, head_dim=32, n_basis=32, vocab_size=2048, max_seq_len=256
    ),
    "125M": dict(dim=768, n_layers=12, n_heads=12, head_dim=64, n_basis=64),
    "350M": dict(dim=1024, n_layers=24, n_heads=16, head_dim=64, n_basis=64),
    "760M": dict(dim=1536, n_layers=24, n_heads=16, head_dim=96, n_basis=64),
    "1.3B": dict(dim=2048, n_layers=24, n_heads=32, head_dim=64, n_basis=64),
    # Not in the paper: width, layers and heads of Llama's models, 6.7 and 65 billion parameters.
    "7B": dict(dim=4096, n_layers=32, n_heads=32, head_dim=128, n_basis=64),
    "70B": dict(dim=8192, n_layers=80, n_heads=64, head_dim=128, n_basis=64),
}

# The eight corners of the cube, of which the paper reports six; ours, which pairs a key with its value (docs/pairing.md); the
# baselines. A model is named by the first whose settings it has.
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
    """The configuration of a cell of the study: `size` x `condition`.

    Args:
        size: a row of SIZES: debug, 125M, 350M, 760M, 1.3B, 7B or 70B.
        condition: a row of CONDITIONS: interdomain, softmax, s4d, ...
        layers: a hybrid: a condition for each layer, instead of `condition`. A shorter list is repeated.
        softmax_every: a hybrid: N, where layers N - 1, 2N - 1, ... are softmax and the others `condition`.
        overrides: any field of ModelConfig or MixerConfig. In a hybrid, a field of MixerConfig goes to all layers whose
            mixer has it.

    Raises:
        ValueError: an unknown size, condition or field, or a combination that is not possible.
    """
    one_of("model size", size, tuple(SIZES))
    for name in (condition, *layers):
        one_of("mixer.layers" if name in layers else "mixer.condition", name, tuple(CONDITIONS))
    check_names("model or mixer", overrides, (*MODEL_SETTINGS, *MIXER_SETTINGS))
    if layers and softmax_every is not None:
        raise ValueError(
            f"mixer.layers and mixer.softmax_every = {softmax_every} both choose layers: leave one out."
        )
    settings = {**SIZES[size], **overrides}
    model = {name: value for name, value in settings.items() if name in MODEL_SETTINGS}
    pattern = layers or _with_softmax(condition, softmax_every, model["n_layers"])
    rows = [MixerConfig(n_basis=SIZES[size]["n_basis"], **CONDITIONS[name]) for name in pattern]
    of_mixers = {name: value for name, value in overrides.items() if name in MIXER_SETTINGS}
    return ModelConfig(**model, mixers=with_settings(rows, of_mixers))


def with_settings(
    mixers: Sequence[MixerConfig], settings: Mapping[str, Any]
) -> tuple[MixerConfig, ...]:
    """The mixers of a model's layers, each with the settings that it has. Raises: ValueError for one that none of them has."""
    unread = [mixer.without_meaning() for mixer in mixers]
    # A setting that no mixer has goes to all, for their error.
    nowhere = {name for name in settings if all(name in names for names in unread)}
    changed = []
    for mixer, names in zip(mixers, unread, strict=True):
        own = {
            name: value for name, value in settings.items() if name in nowhere or name not in names
        }
        changed.append(replace(mixer, **own))
    return tuple(changed)


def _with_softmax(condition: str, every: int | None, n_layers: int) -> list[str]:
    """The condition of each layer."""
    if every is None:
        return [condition]
    if condition == "softmax" or not 2 <= every <= n_layers:
        raise ValueError(
            f"mixer.softmax_every = {every} with mixer.condition = {condition}: it must be from 2 to n_layers = {n_layers}, "
            "and the condition another one than softmax. Change it, or leave it out."
        )
    return ["softmax" if i % every == every - 1 else condition for i in range(n_layers)]


class Cell(NamedTuple):
    """A cell of the study in words: rows of SIZES and CONDITIONS, each with every setting in which a model differs from it.

    Attributes:
        size: such as "125M", or "125M with n_layers 6".
        condition: such as "interdomain", "interdomain, c_form identity", or of a hybrid "interdomain, softmax_every 3".
    """

    size: str
    condition: str

    def __str__(self) -> str:
        return f"{self.size}, {self.condition}"


def cell_of(config: ModelConfig, size: str) -> Cell:
    """The cell of a configuration.

    Args:
        config: of the model.
        size: a row of SIZES, or the size of an earlier `Cell`. Settings are compared with the row where it is known.

    Returns:
        Such as ("125M", "interdomain") or ("125M with n_layers 6", "interdomain, n_basis 32"). Of a hybrid
            ("125M", "interdomain, softmax_every 3") or ("125M", "softmax + interdomain + s4d").
    """
    row = config
    n_basis = MixerConfig.n_basis
    name = str(size).partition(" with ")[0]
    if name in SIZES:
        size = name
        row = build_config(name)
        n_basis = SIZES[name]["n_basis"]

    def differences(got: Any, usual: Any, *without: str) -> list[str]:
        changed = []
        for name, value in vars(got).items():
            if name not in without and value != getattr(usual, name):
                changed.append(
                    f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
                )
        return changed

    changed = ", ".join(
        differences(config, row, "mixers", "layers", "head_dim")
    )  # dim and n_heads say what head_dim is
    conditions = [_condition_of(mixer) for mixer in config.mixers]
    settings: list[str] = []
    for mixer, condition in zip(config.mixers, conditions, strict=True):
        unread = ["n_basis"] if mixer.kind == "softmax" else []
        settings += differences(
            mixer, MixerConfig(n_basis=n_basis, **CONDITIONS[condition]), *unread
        )
    first = conditions[0]
    every = 1 + [*conditions, "softmax"].index("softmax")
    if 1 < every <= len(conditions) and conditions == _with_softmax(first, every, len(conditions)):
        conditions = [f"{first}, softmax_every {every}"]
    words = ", ".join([" + ".join(conditions), *dict.fromkeys(settings)])
    return Cell(f"{size} with {changed}" if changed else size, words)


def _condition_of(mixer: MixerConfig) -> str:
    """The first condition whose row a mixer has."""
    for name, row in CONDITIONS.items():
        if {"kind": "interdomain", **row}.items() <= vars(mixer).items():
            return name
    raise AssertionError(f"no condition has the settings of {mixer}")


def _shortest(pattern: tuple[MixerConfig, ...]) -> tuple[MixerConfig, ...]:
    """The part of a pattern that it repeats."""
    n = 1
    while pattern[:n] * (len(pattern) // n) != pattern:
        n += 1
    return pattern[:n]


def check_names(where: str, got: Iterable[str], allowed: Iterable[str]) -> None:
    unknown = [name for name in got if name not in allowed]
    if unknown:
        raise ValueError(
            f"unknown {where} setting(s): {', '.join(unknown)}; allowed: {', '.join(allowed)}."
        )
