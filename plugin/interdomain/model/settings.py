"""Settings of a token mixer, each declared once: type, default, text, and the values that it may have.

[mixer] of a TOML file, the flags of both hosts, config.json of an exported folder and the documentation's table are made of
`MixerConfig`. A folder has a copy of this file, which imports the standard library and the table of feature maps.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, cast

from .feature_maps import FEATURE_MAPS

LARGEST = 2**20  # of a size: a damaged number would take all memory, or for ever

# Baselines whose state has a fixed size, too: of each, the settings of MixerConfig that it has.
FIXED_STATE = {
    "gla": ("n_basis", "state_heads", "conv_width"),
    "mamba2": ("n_basis", "state_heads", "conv_width", "dt_min", "dt_max"),
    "deltanet": ("n_basis", "state_heads", "conv_width"),
    "gated-deltanet": ("n_basis", "state_heads", "conv_width", "dt_min", "dt_max"),
}
BASELINES = {"softmax": ("n_kv_heads", "window"), **FIXED_STATE}
KINDS = ["interdomain", *BASELINES]
CONV_WIDTH = {"gla": 0, "softmax": None}  # where it is not 4 by default
OUTPUT_NORM_SCALE = {"rms": 1.0, "soft": 0.1}
BY_CONDITION = "as the condition has it"


def setting(
    default: Any, text: str, unset: str = "", choices: Collection[str] = (), least: int = 1
) -> Any:
    """A field with the help of its flag.

    Args:
        unset: what holds for a run that does not set it, if not the default.
        choices: all values that it may have. least: the smallest of an integer.
    """
    text = f"{text} Unset: {unset or str(default).lower()}."
    return field(default=default, metadata=dict(text=text, choices=choices, least=least))


@dataclass(frozen=True)
class MixerConfig:
    """The token mixer of one block: interdomain attention, or one of BASELINES, which have the settings named there. The axes
    of the paper's ablation cube are dual_input, query_readout and rope.

    Raises:
        ValueError: a value that is not allowed, or a setting that this kind does not have.
    """

    kind: str = setting("interdomain", "The kind of mixer.", choices=KINDS)
    dual_input: bool = setting(
        True,
        "Input of the recurrence: key features and values (true), or two generic projections.",
        BY_CONDITION,
    )
    query_readout: bool = setting(
        True,
        "Readout: by the query (true; paper eq. 13), or a linear contraction, as in S4D.",
        BY_CONDITION,
    )
    rope: bool = setting(
        True, "Rotary embedding (RoPE) on the inputs of queries and keys.", BY_CONDITION
    )
    n_basis: int = setting(
        64,
        "M, basis functions per head: complex dimensions of the state.",
        "as the size has it (64; debug 32)",
    )
    conv_width: int | None = setting(
        None, "Taps of the short convolution (SC of paper eq. 10); 0 for none.", "4; gla 0", least=0
    )
    readout: str = setting(
        "complex",
        "How complex U and Gamma become real. complex: the real part of q^T U^T Gamma, nothing conjugated, the literal reading "
        "of paper eq. 13. real: their real parts are multiplied. hermitian: q^T U^T is conjugated.",
        choices=("complex", "real", "hermitian"),
    )
    c_form: str = setting(
        "full",
        "C per head: a full complex matrix, a diagonal, or the identity.",
        choices=("full", "diagonal", "identity"),
    )
    feature_map: str = setting(
        "silu",
        "Features of queries and keys (docs/kernel-view.md). silu: SiLU, then l2 norm (paper eq. 10). Without input norms: "
        + ", ".join(f"{name} ({xi.about})" for name, xi in FEATURE_MAPS.items() if xi)
        + ".",
        choices=tuple(FEATURE_MAPS),
    )
    normalize: bool = setting(
        False,
        "Divide by the Nadaraya-Watson denominator eta (paper eq. 9); for positive maps, some of which need it.",
    )
    output_gate: bool = setting(
        False,
        "Multiply the output by sigmoid(Wg x): the paper's formula; its text calls the gate SiLU.",
    )
    gate_function: str = setting(
        "sigmoid",
        "Function of the output gate; silu is the baselines'.",
        choices=("sigmoid", "silu"),
    )
    output_norm: str = setting(
        "none",
        "Norm of each head's output o, before the gate; w is learned. rms: w o / rms(o). soft: w o / sqrt(w^2 + mean(o^2)), "
        "which is o where o is small, and rms where it is large. The paper's mixer has none.",
        choices=("none", *OUTPUT_NORM_SCALE),
    )
    output_norm_scale: float | None = setting(
        None, "w of the output norm at the start.", "1 for rms, 0.1 for soft"
    )
    n_kv_heads: int | None = setting(
        None,
        "Heads of keys, values and state; groups of query heads share one.",
        "as many as query heads",
    )
    state_heads: int | None = setting(
        None,
        "Baselines with a state of fixed size: heads of the state.",
        "as many as make it as large as interdomain attention's, 4 * n_basis * dim numbers",
    )
    window: int | None = setting(
        None,
        "Softmax layers: tokens that a token attends to, itself included.",
        "itself and all before it",
    )
    c_scale: float | None = setting(
        None,
        "C at the start: root mean square of |C_mn|; 1 is S4D's complex N(0, 1). It decides whether the mixer learns.",
        "sqrt(2)/M, or sqrt(2/M) if C is diagonal (the paper leaves it open)",
    )
    linear_scale: float | None = setting(
        None, "Linear readout at the start: standard deviation of c.", "1/sqrt(M)"
    )
    dt_min: float = setting(
        1e-3, "Smallest Delta (step size per token) at the start; log-uniform up to dt_max."
    )
    dt_max: float = setting(1e-1, "Largest Delta at the start.")
    a_init: str = setting(
        "s4d-inv",
        "A at the start (Gu et al., 2022). s4d-inv: A_n = -1/2 + i M/pi (M/(2n+1) - 1), the paper's. s4d-lin: -1/2 + i pi n. "
        "s4d-real: -(n + 1).",
        choices=("s4d-inv", "s4d-lin", "s4d-real"),
    )

    def __post_init__(self) -> None:
        check_fields("mixer.", self)
        if self.dt_min > self.dt_max:
            raise ValueError(
                f"mixer.dt_min must be at most mixer.dt_max: got {self.dt_min:g} and {self.dt_max:g}."
            )
        xi = FEATURE_MAPS[self.feature_map]
        if xi and xi.needs_ratio and not self.normalize:
            raise ValueError(
                f"mixer.feature_map = {self.feature_map!r} scales each query by a factor that cancels only in the ratio of "
                "eq. 9: set mixer.normalize = true with it, or choose another map."
            )
        for name, why in self.without_meaning().items():
            if getattr(self, name) != getattr(MixerConfig, name):
                raise ValueError(
                    f"mixer.{name} = {getattr(self, name)!r} is not possible: {why}; or leave it out."
                )
        if self.conv_width == 1:
            raise ValueError(
                "mixer.conv_width must be 0, for no convolution, or at least 2: got 1."
            )
        if self.conv_width is None:
            object.__setattr__(self, "conv_width", CONV_WIDTH.get(self.kind, 4))

    @property
    def conv_past(self) -> int:
        """Tokens before its own that a convolution reads."""
        return max(0, (self.conv_width or 0) - 1)

    def without_meaning(self) -> dict[str, str]:
        """The settings that this mixer cannot have other than their default, and what to do."""
        if self.kind in BASELINES:  # n_basis belongs to the size: softmax does not read it
            names = BASELINES[self.kind]
            why = f"the {self.kind} condition has no switches but mixer.{', mixer.'.join(names)}. Choose another condition"
            return {f.name: why for f in fields(self) if f.name not in ("kind", "n_basis", *names)}
        unread: dict[str, str] = {
            "window": "only softmax layers have a window. Choose softmax, or set mixer.softmax_every",
            "state_heads": f"it is for {', '.join(FIXED_STATE)}. Choose one of these conditions",
        }
        if not self.output_gate:
            unread["gate_function"] = "there is no gate. Set mixer.output_gate = true"
        if self.output_norm == "none":
            unread["output_norm_scale"] = "there is no norm. Set mixer.output_norm"
        if self.normalize:
            unread["output_norm"] = (
                "mixer.normalize sets the scale of the output. Choose one of the two"
            )
        if self.c_form == "identity":
            unread["c_scale"] = "with mixer.c_form = 'identity' there is no C. Choose another form"
        if self.query_readout:
            return unread | {
                "linear_scale": "c belongs to the linear readout. Set mixer.query_readout = false"
            }
        if not self.dual_input:
            unread["feature_map"] = (
                "there is no query or key to map. Set mixer.dual_input or query_readout = true"
            )
        why = "it needs the query readout. Set mixer.query_readout = true"
        return unread | dict.fromkeys(("normalize", "n_kv_heads", "readout", "output_norm"), why)


MIXER_SETTINGS = {f.name: f for f in fields(MixerConfig)}


class StateShape(NamedTuple):
    """State of a baseline in FIXED_STATE: each head is a matrix of key_width x value_width numbers."""

    heads: int
    key_width: int
    value_width: int


def state_shape(mixer: MixerConfig, dim: int) -> StateShape:
    """Shape with, by default, 4 n_basis dim numbers per layer, as interdomain attention's state: n_basis x 2 dim complex ones.

    Heads of 4 n_basis x 4 n_basis; of Mamba-2, whose inner width is 2 dim, of 2 n_basis x 64 (less, where 64 does not divide
    2 dim). With `state_heads` the heads are square and share dim. Mamba-2's share its inner width: its state stays as large.
    Raises: ValueError for widths that do not divide.
    """
    wide = mixer.kind == "mamba2"
    width, name = (2 * dim, "2 dim") if wide else (dim, "dim")
    if mixer.state_heads is not None:
        if width % mixer.state_heads:
            raise ValueError(
                f"mixer.state_heads must divide {name} = {width}: got {mixer.state_heads}."
            )
        head = width // mixer.state_heads
    else:
        head = math.gcd(width, 64) if wide else 4 * mixer.n_basis
        if width % head:
            allowed = ", ".join(str(n // 4) for n in range(4, dim + 1, 4) if dim % n == 0)
            raise ValueError(
                f"mixer.n_basis = {mixer.n_basis} with kind {mixer.kind}: a head of the state is 4 n_basis = {head} wide, "
                f"which must divide dim = {dim}. Set one of {allowed}, or mixer.state_heads for a state of another size."
            )
    return StateShape(width // head, 2 * mixer.n_basis if wide else head, head)


def readout_std(mixer: Any) -> dict[str, float]:
    """Standard deviation of a new C, of its real and of its imaginary part, and of a new c. mixer: has MixerConfig's settings.

    The scale at which the readout starts decides whether the mixer learns: 1/M for the full matrix; 1/sqrt(M) gives the
    diagonal the same (one product per basis function instead of M).
    """
    M = mixer.n_basis
    C = (
        (1 / M if mixer.c_form == "full" else M**-0.5)
        if mixer.c_scale is None
        else mixer.c_scale / math.sqrt(2)
    )
    return {"C": C, "c": M**-0.5 if mixer.linear_scale is None else mixer.linear_scale}


def one_of(name: str, value: Any, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} = {value!r} is unknown; allowed: {', '.join(allowed)}.")


def check_fields(prefix: str, config: Any, without: str = "") -> None:
    """Types, choices and ranges. Raises ValueError that names the setting."""
    for f in (f for f in fields(config) if f.name != without):
        name, value, kind = f"{prefix}{f.name}", getattr(config, f.name), cast(Any, f.type)
        real, least = (
            isinstance(0.0, kind),
            f.metadata.get("least", 1),
        )  # a JSON or TOML file may have 1 for 1.0
        # A bool is an int to Python, but `dim = true` is no size.
        if not isinstance(value, kind | int if real else kind) or (
            isinstance(value, bool) and kind is not bool
        ):
            raise ValueError(f"{name} must be {getattr(kind, '__name__', kind)}: got {value!r}.")
        if f.metadata.get("choices"):
            one_of(name, value, f.metadata["choices"])
        elif real and value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite: got {value}.")
        elif type(value) is int and value < least:
            raise ValueError(f"{name} must be at least {least}: got {value}.")
        elif type(value) is int and f.name != "max_seq_len" and value > LARGEST:
            raise ValueError(f"{name} must be at most {LARGEST:,}: got {value}.")
