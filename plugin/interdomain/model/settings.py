"""Settings of a token mixer, each declared once: its type, default, help text and allowed values.

The section [mixer] of a TOML file, the flags of both hosts, config.json of an exported model and
the table in the documentation are all made from `MixerConfig`. `check_setting` is the only check of
one value; TorchTitan's settings use it, too. An exported model has a copy of this file, so it
imports the standard library and the table of feature maps only.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import Field, dataclass, field, fields
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from .feature_maps import FEATURE_MAPS

# The largest value of an integer setting. A damaged config.json may have a number that would take
# all memory or run forever.
LARGEST = 2**20

# Baselines whose state has a fixed size, too, and the settings of MixerConfig that each of them
# has.
FIXED_STATE = {
    "gla": ("n_basis", "state_heads", "conv_width"),
    "mamba2": ("n_basis", "state_heads", "conv_width", "dt_min", "dt_max"),
    "deltanet": ("n_basis", "state_heads", "conv_width"),
    "gated-deltanet": ("n_basis", "state_heads", "conv_width", "dt_min", "dt_max"),
}
BASELINES = {"softmax": ("n_kv_heads", "window"), **FIXED_STATE}
KINDS = ["interdomain", *BASELINES]
# The default width of the short convolution, for the kinds whose default is not 4.
CONV_WIDTH = {"gla": 0, "softmax": None}
# The output norms, and the value of w at the start.
OUTPUT_NORM_SCALE = {"rms": 1.0, "soft": 0.1}
# The default, in the help text, of a setting that `mixer.condition` sets.
BY_CONDITION = "as the condition has it"


def setting(
    default: Any, text: str, unset: str = "", choices: Collection[str] = (), least: int = 1
) -> Any:
    """Declares a field together with the help text of its flag.

    Args:
        default: The value of a setting that nobody sets.
        text: The help text, without the default.
        unset: What a run that does not set it has, for the help text. Empty: the default.
        choices: All values that it may have. Empty: any value of its type.
        least: The smallest value of an integer.
    """
    text = f"{text} Unset: {unset or str(default).lower()}."
    return field(default=default, metadata=dict(text=text, choices=choices, least=least))


@dataclass(frozen=True)
class MixerConfig:
    """The token mixer of one block: interdomain attention, or one of BASELINES.

    dual_input, query_readout and rope are the axes of the paper's ablation cube. A baseline has
    only the settings that BASELINES names.

    Raises:
        ValueError: A value is not allowed, or this kind of mixer does not have the setting.
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
        "How complex U and Gamma become real. complex: the real part of q^T U^T Gamma, nothing "
        "conjugated, the literal reading of paper eq. 13. real: their real parts are multiplied. "
        "hermitian: q^T U^T is conjugated.",
        choices=("complex", "real", "hermitian"),
    )
    c_form: str = setting(
        "full",
        "C per head: a full complex matrix, a diagonal, or the identity.",
        choices=("full", "diagonal", "identity"),
    )
    feature_map: str = setting(
        "silu",
        "Features of queries and keys (docs/paper.md). silu: SiLU, then l2 norm (paper eq. "
        "10). Without input norms: "
        + ", ".join(f"{name} ({xi.about})" for name, xi in FEATURE_MAPS.items() if xi)
        + ".",
        choices=tuple(FEATURE_MAPS),
    )
    normalize: bool = setting(
        False,
        (
            "Divide by the Nadaraya-Watson denominator eta (paper eq. 9); for positive maps, some "
            "of which need it."
        ),
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
        "Norm of each head's output o, before the gate; w is learned. rms: w o / rms(o). soft: w "
        "o / sqrt(w^2 + mean(o^2)), which is o where o is small, and rms where it is large. The "
        "paper's mixer has none.",
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
        (
            "C at the start: root mean square of |C_mn|; 1 is S4D's complex N(0, 1). It decides "
            "whether the mixer learns."
        ),
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
        "A at the start (Gu et al., 2022). s4d-inv: A_n = -1/2 + i M/pi (M/(2n+1) - 1), the "
        "paper's. s4d-lin: -1/2 + i pi n. s4d-real: -(n + 1).",
        choices=("s4d-inv", "s4d-lin", "s4d-real"),
    )

    def __post_init__(self) -> None:
        """Checks the values, alone and together, and sets the default width of the convolution."""
        check_fields("mixer.", self)

        # Settings that do not fit each other.
        if self.dt_min > self.dt_max:
            raise ValueError(
                f"mixer.dt_min must be at most mixer.dt_max: got {self.dt_min:g} and "
                f"{self.dt_max:g}."
            )
        feature_map = FEATURE_MAPS[self.feature_map]
        if feature_map and feature_map.needs_ratio and not self.normalize:
            raise ValueError(
                f"mixer.feature_map = {self.feature_map!r} scales each query by a factor that "
                "cancels only in the ratio of eq. 9: set mixer.normalize = true with it, or "
                "choose another map."
            )
        for name, reason in self.unused_settings().items():
            value = getattr(self, name)
            if value != getattr(MixerConfig, name):
                raise ValueError(
                    f"mixer.{name} = {value!r} is not possible: {reason}; or leave it out."
                )
        # A convolution over one token would only scale it.
        if self.conv_width == 1:
            raise ValueError(
                "mixer.conv_width must be 0, for no convolution, or at least 2: got 1."
            )
        if self.conv_width is None:
            object.__setattr__(self, "conv_width", CONV_WIDTH.get(self.kind, 4))

    @property
    def conv_past(self) -> int:
        """The number of tokens before its own that the convolution reads."""
        return max(0, (self.conv_width or 0) - 1)

    def unused_settings(self) -> dict[str, str]:
        """Returns the settings that this mixer does not have, with the reason and what to do."""
        if self.kind in BASELINES:
            used = BASELINES[self.kind]
            reason = (
                f"the {self.kind} condition has no switches but mixer.{', mixer.'.join(used)}. "
                "Choose another condition"
            )
            # n_basis is set by the model size (125M, debug): every mixer of a model has a value of
            # it, also softmax, which does not read it.
            others = [name for name in MIXER_SETTINGS if name not in ("kind", "n_basis", *used)]
            return dict.fromkeys(others, reason)

        # Settings of baselines, of parts that this mixer does not have, and of the readout.
        unused = {
            "window": (
                "only softmax layers have a window. Choose softmax, or set mixer.softmax_every"
            ),
            "state_heads": f"it is for {', '.join(FIXED_STATE)}. Choose one of these conditions",
        }
        if not self.output_gate:
            unused["gate_function"] = "there is no gate. Set mixer.output_gate = true"
        if self.output_norm == "none":
            unused["output_norm_scale"] = "there is no norm. Set mixer.output_norm"
        if self.normalize:
            unused["output_norm"] = (
                "mixer.normalize sets the scale of the output. Choose one of the two"
            )
        if self.c_form == "identity":
            unused["c_scale"] = "with mixer.c_form = 'identity' there is no C. Choose another form"
        if self.query_readout:
            unused["linear_scale"] = (
                "c belongs to the linear readout. Set mixer.query_readout = false"
            )
            return unused

        # The linear readout has no query, so it has nothing that acts on one.
        if not self.dual_input:
            unused["feature_map"] = (
                "there is no query or key to map. Set mixer.dual_input or query_readout = true"
            )
        for name in ("normalize", "n_kv_heads", "readout", "output_norm"):
            unused[name] = "it needs the query readout. Set mixer.query_readout = true"
        return unused


MIXER_SETTINGS = {f.name: f for f in fields(MixerConfig)}


class StateShape(NamedTuple):
    """State of a baseline in FIXED_STATE: each head is a key_width x value_width matrix."""

    heads: int
    key_width: int
    value_width: int


def state_shape(mixer: MixerConfig, dim: int) -> StateShape:
    """Returns the shape of the state of one layer of a baseline in FIXED_STATE.

    By default the state has 4 n_basis dim numbers, as many as interdomain attention's n_basis x 2
    dim complex ones. Its heads are 4 n_basis x 4 n_basis. Mamba-2, whose inner width is 2 dim, has
    heads of 2 n_basis x 64, or narrower ones if 64 does not divide 2 dim. With `state_heads` the
    heads are square and share dim; those of Mamba-2 keep their 2 n_basis rows and share its inner
    width, so its state stays as large.

    Args:
        mixer: The settings of the layer's mixer.
        dim: The width of the model.
    Raises:
        ValueError: The heads do not divide the width.
    """
    # Mamba-2's heads are narrower than their keys, and share an inner width of 2 dim.
    is_mamba = mixer.kind == "mamba2"
    width = 2 * dim if is_mamba else dim
    if mixer.state_heads is not None:
        if width % mixer.state_heads:
            name = "2 dim" if is_mamba else "dim"
            raise ValueError(
                f"mixer.state_heads must divide {name} = {width}: got {mixer.state_heads}."
            )
        value_width = width // mixer.state_heads
    elif is_mamba:
        value_width = math.gcd(width, 64)
    else:
        value_width = 4 * mixer.n_basis
        if width % value_width:
            raise ValueError(
                f"mixer.n_basis = {mixer.n_basis} with kind {mixer.kind}: a head of the state is "
                f"4 n_basis = {value_width} wide, which must divide dim = {dim}. Set another "
                "n_basis, or mixer.state_heads for a state of another size."
            )
    key_width = 2 * mixer.n_basis if is_mamba else value_width
    return StateShape(width // value_width, key_width, value_width)


def readout_std(mixer: MixerConfig, name: str) -> float:
    """Returns the standard deviation of a new readout parameter.

    The scale at which the readout starts decides whether the mixer learns: 1/M for the full matrix.
    1/sqrt(M) gives the diagonal the same scale, because it has one product per basis function
    instead of M.

    Args:
        mixer: The settings of the layer's mixer.
        name: "C", the standard deviation of its real and of its imaginary part; or "c" of the
            linear readout.
    """
    # mixer.c_scale is the root mean square of |C|, of both parts together.
    M = mixer.n_basis
    if name == "c":
        return M**-0.5 if mixer.linear_scale is None else mixer.linear_scale
    if mixer.c_scale is not None:
        return mixer.c_scale / math.sqrt(2)
    return 1 / M if mixer.c_form == "full" else M**-0.5


class Bound(NamedTuple):
    """The values that a setting may have.

    Attributes:
        description: The allowed values, as they complete the sentence "SETTING must be ...".
        allows: Returns True for an allowed value.
    """

    description: str
    allows: Callable[[Any], bool]


def one_of(names: Collection[str]) -> Bound:
    """Allows these names.

    Args:
        names: The allowed values. A name that is added to them later is allowed, too.
    """
    return Bound(f"one of {', '.join(names)}", names.__contains__)


def check_setting(name: str, value: Any, kind: Any, bound: Bound | None = None) -> None:
    """Checks one value.

    Args:
        name: The setting's name in the error, such as "mixer.n_basis".
        kind: Its type: a class, a union, a list of a type, or a Literal. A float may also be an
            integer.
        bound: The values that it may have. None stands for all, and the value None is always
            allowed if the type has it.
    Raises:
        ValueError: The value is of another type, or not allowed.
    """
    if not _has_type(value, kind):
        described = kind.__name__ if type(kind) is type else str(kind).replace("typing.", "")
        raise ValueError(f"{name} must be {described}: got {value!r}.")
    if bound is not None and value is not None and not bound.allows(value):
        raise ValueError(f"{name} must be {bound.description}: got {value}.")


def _has_type(value: Any, kind: Any) -> bool:
    """Returns True if the value has the type `kind`, which may be what `check_setting` allows."""
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is Literal:
        return value in arguments
    if origin in (Union, UnionType):
        return any(_has_type(value, one) for one in arguments)
    if origin is list:
        return isinstance(value, list) and all(_has_type(one, *arguments) for one in value)
    if kind in (int, float):
        # A bool is an int to Python, but `steps = true` is no number.
        return isinstance(value, int | kind) and not isinstance(value, bool)
    return isinstance(value, kind)


def check_fields(prefix: str, config: Any, skip: str = "") -> None:
    """Checks the value of each field of a configuration.

    Args:
        prefix: What stands before a field's name in an error, such as "mixer.".
        config: An instance of a dataclass, whose fields may be made by `setting`.
        skip: The name of a field that is not checked.
    Raises:
        ValueError: A value is not allowed. The error names the setting.
    """
    for f in fields(config):
        if f.name != skip:
            check_setting(f"{prefix}{f.name}", getattr(config, f.name), f.type, _bound_of(f))


def _bound_of(f: Field) -> Bound | None:
    """Returns the values that a field may have besides its type, None for all of the type.

    Args:
        f: A field of a dataclass, which `setting` may have made.
    """
    choices = f.metadata.get("choices")
    if choices:
        return one_of(choices)
    if _has_type(0.5, f.type):
        return Bound("positive and finite", lambda x: 0 < x < math.inf)
    if not _has_type(1, f.type):
        return None
    least = f.metadata.get("least", 1)
    # The length of a sequence makes no tensor of the model larger.
    if f.name == "max_seq_len":
        return Bound(f"at least {least}", lambda x: x >= least)
    return Bound(f"from {least} to {LARGEST:,}", lambda x: least <= x <= LARGEST)
