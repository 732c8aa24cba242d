"""Settings and formulas: these files of the package interdomain, one after the other.

model/feature_maps.py
model/settings.py
scan/tables.py
scan/step.py
features/plain.py
model/mixers/fixed_state_scan.py
"""


# interdomain/model/feature_maps.py

"""Functions of queries and keys in plain PyTorch: rotary angles, feature maps, and the ratio that `normalize` asks for."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Shapes: B batch, T time, H heads, R head_dim.

MAX_GAIN = 16.0  # of the normalised readout: how much larger than the token's own value it may be


def widened(x: Tensor) -> Tensor:
    """x in float32 for arithmetic that bf16 would spoil; a float64 model stays float64 throughout."""
    return x if x.dtype == torch.float64 else x.float()


def rope_tables(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles at integer `positions` [T] or [B, T], each [..., T, 1, head_dim / 2] of `dtype`.

    Angles are float64: a float32 one is off by 2e-4 radians at position 4096 and by 0.06 at a million.
    """
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
    angles = positions[..., None, None] * theta ** (-pairs / head_dim)
    return angles.cos().to(dtype), angles.sin().to(dtype)


class KeptInFloat32(nn.Module):
    """A module whose parameters and buffers `half()`, `to(torch.bfloat16)` and the like move, but do not round."""

    def _apply(self, fn, recurse=True):
        def moved(t: Tensor) -> Tensor:
            out = fn(t)
            return t.to(out.device) if out.dtype in (torch.bfloat16, torch.float16) else out

        return super()._apply(moved, recurse)


class FeatureMap(KeptInFloat32):
    """xi of paper eq. 3 as a function of R numbers, in plain PyTorch on every device. FEATURE_MAPS has all of them.

    Attributes of a class:
        about: a few words, for the help of `mixer.feature_map`.
        needs_ratio: a query's features have a factor that cancels only in the ratio of eq. 9 (`mixer.normalize`).
        vectors: random vectors of each head of keys, as a share of R.
    """

    about, needs_ratio, vectors = "", False, 0.0

    def __init__(self, n_kv_heads: int, head_dim: int) -> None:
        super().__init__()

    @staticmethod
    def drawn(normal: Tensor) -> Tensor:
        """The random vectors [H_kv, vectors, R], made of normal ones with variance R^(-1/2)."""
        return normal

    def forward(self, x: Tensor, heads: Any = None, *, query: bool = False) -> Tensor:
        """x [B, T, H, R], queries or keys -> [B, T, H, R] in x's dtype.

        heads: which part of the heads x has (`shard.Part`), where a model computes a part.
        """
        raise NotImplementedError


class PointwiseFeatures(FeatureMap):
    """xi(x) = f(x) / sqrt(R), of a positive function f of a number."""

    f: Any

    def forward(self, x: Tensor, heads: Any = None, *, query: bool = False) -> Tensor:
        return (self.f(widened(x)) * x.shape[-1] ** -0.5).to(x.dtype)


class EluFeatures(PointwiseFeatures):
    about = "elu + 1, positive"  # Katharopoulos et al., 2020
    f = staticmethod(lambda y: F.relu(y) + y.clamp(max=0).exp())  # F.elu(y) + 1 would round to zero below -17


class SoftplusFeatures(PointwiseFeatures):
    about = "positive"
    f = staticmethod(F.softplus)


class RandomFeatures(FeatureMap):
    """Base of the maps by projections on random vectors w.

    The vectors are drawn once and fixed (a buffer, [H_kv, vectors, R]); query heads of a group use those of their keys, or the
    inner product would estimate nothing.
    """

    def __init__(self, n_kv_heads: int, head_dim: int) -> None:
        super().__init__(n_kv_heads, head_dim)
        self.frequencies: Tensor
        shape = n_kv_heads, int(self.vectors * head_dim), head_dim
        self.register_buffer("frequencies", torch.empty(shape, dtype=torch.float32))

    def projected(self, x: Tensor, heads: Any) -> Tensor:
        """w.x, [B, T, H, vectors], of x [B, T, H, R] with H a multiple of H_kv, or `heads` of them."""
        B, T, H, R = x.shape
        frequencies = self.frequencies if heads is None else self.frequencies.chunk(heads.size)[heads.rank]
        groups = widened(x).view(B, T, len(frequencies), -1, R)
        with torch.autocast(x.device.type, enabled=False):
            return torch.einsum("bthgr,hfr->bthgf", groups, frequencies.to(groups.dtype)).reshape(B, T, H, -1)


class RandomFourierFeatures(RandomFeatures):
    """xi(x) = sqrt(2 / R) [cos(w.x), sin(w.x)] of R / 2 vectors (paper eq. 5): xi(x).xi(y) estimates a Gaussian kernel."""

    about, vectors = "random Fourier features; paper eq. 5", 0.5

    def forward(self, x: Tensor, heads: Any = None, *, query: bool = False) -> Tensor:
        angles = self.projected(x, heads)
        return (torch.cat([angles.cos(), angles.sin()], dim=-1) * (2 / x.shape[-1]) ** 0.5).to(x.dtype)


class PositiveRandomFeatures(RandomFeatures):
    """xi(x) = exp(w.x - |x|^2 / (2 sqrt(R))) / sqrt(R) of R orthogonal vectors (FAVOR+, Choromanski et al., 2021).

    xi(q).xi(k) estimates exp(q.k / sqrt(R)), without bias over the draws. A query's features are divided by the largest of
    them, which cancels in paper eq. 4. A key's keep their scale, for a factor of its own would be a weight. They cannot grow
    with the key: their exponent is at most sqrt(R) |w|^2 / 2, about 32 for R = 64. Near overflow it is cut off.
    """

    about, needs_ratio, vectors = "softmax's kernel, positive", True, 1.0

    @staticmethod
    def drawn(normal: Tensor) -> Tensor:
        """Each still normal, those of a head orthogonal."""
        columns = normal.double().mT
        q, r = torch.linalg.qr(columns)  # q does not depend on the columns' lengths, which are those of r
        q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]
        return (q * columns.norm(dim=1, keepdim=True)).mT.float()

    def forward(self, x: Tensor, heads: Any = None, *, query: bool = False) -> Tensor:
        R, exponent = x.shape[-1], self.projected(x, heads)
        if query:
            exponent = exponent - exponent.detach().amax(dim=-1, keepdim=True)
        else:
            exponent = exponent - widened(x).square().sum(-1, keepdim=True) / (2 * R**0.5)
            exponent = exponent.clamp(max=0.7 * math.log(torch.finfo(x.dtype).max))  # 62 in bfloat16 and float32
        return (exponent.exp() * R**-0.5).to(x.dtype)


# By name, the values of `mixer.feature_map`. None: SiLU with the l2 norm, within `interdomain.features`, before input norms.
FEATURE_MAPS: dict[str, type[FeatureMap] | None] = {
    "silu": None,
    "rff": RandomFourierFeatures,
    "elu": EluFeatures,
    "softplus": SoftplusFeatures,
    "favor": PositiveRandomFeatures,
}


def feature_map(name: str, n_kv_heads: int, head_dim: int) -> FeatureMap | None:
    """The map `MixerConfig.feature_map` of a layer; None for `silu`."""
    made = FEATURE_MAPS[name]
    return made and made(n_kv_heads, head_dim)


GATES = {"sigmoid": torch.sigmoid, "silu": F.silu}


def normed(o: Tensor, weight: Tensor, eps: float, soft: bool) -> Tensor:
    """The output norm over D of o [B, T, H, D], with w [D]: w o / sqrt(eps + mean(o^2)); soft: w o / sqrt(w^2 + mean(o^2))."""
    o32, w = widened(o), widened(weight)
    floor = w.square() + 1e-12 if soft else eps  # a weight that is 0 gives 0
    return (o32 * w * torch.rsqrt(o32.square().mean(-1, keepdim=True) + floor)).to(o.dtype)


def divided(o: Tensor, v: Tensor) -> Tensor:
    """Numerator over the Nadaraya-Watson denominator, the last channel of o [B, T, H, D + 1] -> [B, T, H, D], of o's dtype.

    A kernel average lies between its values, but an estimate of one need not: its denominator can vanish. Where the quotient
    would be larger than MAX_GAIN times the token's own value v [B, T, G, D + 1], both as means of |x| over D, the denominator
    is as large as makes it just that, with its sign. The scales of v, of the features and of C cancel; no state is needed.
    """
    numerator, denominator = widened(o[..., :-1]), widened(o[..., -1:])
    allowed = MAX_GAIN * widened(v[..., :-1]).abs().mean(-1, keepdim=True)
    allowed = allowed.repeat_interleave(o.shape[2] // v.shape[2], dim=2)
    sign = torch.where(denominator < 0, -1.0, 1.0)
    # Not with a quotient as the floor: a value of zeros gives an output of zeros.
    below = torch.maximum(denominator.abs() * allowed, numerator.abs().mean(-1, keepdim=True))
    return (numerator * (sign * allowed) / below.clamp_min(torch.finfo(below.dtype).tiny)).to(o.dtype)


# interdomain/model/settings.py

"""Settings of a token mixer, each declared once: type, default, text, and the values that it may have.

[mixer] of a TOML file, the flags of both hosts, config.json of an exported folder and the documentation's table are made of
`MixerConfig`. A folder has a copy of this file, which imports the standard library and the table of feature maps.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import Any, cast


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


def setting(default: Any, text: str, unset: str = "", choices: Collection[str] = (), least: int = 1) -> Any:
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
        True, "Input of the recurrence: key features and values (true), or two generic projections.", BY_CONDITION
    )
    query_readout: bool = setting(
        True, "Readout: by the query (true; paper eq. 13), or a linear contraction, as in S4D.", BY_CONDITION
    )
    rope: bool = setting(True, "Rotary embedding (RoPE) on the inputs of queries and keys.", BY_CONDITION)
    n_basis: int = setting(
        64, "M, basis functions per head: complex dimensions of the state.", "as the size has it (64; debug 32)"
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
        False, "Divide by the Nadaraya-Watson denominator eta (paper eq. 9); for positive maps, some of which need it."
    )
    output_gate: bool = setting(
        False, "Multiply the output by sigmoid(Wg x): the paper's formula; its text calls the gate SiLU."
    )
    gate_function: str = setting(
        "sigmoid", "Function of the output gate; silu is the baselines'.", choices=("sigmoid", "silu")
    )
    output_norm: str = setting(
        "none",
        "Norm of each head's output o, before the gate; w is learned. rms: w o / rms(o). soft: w o / sqrt(w^2 + mean(o^2)), "
        "which is o where o is small, and rms where it is large. The paper's mixer has none.",
        choices=("none", *OUTPUT_NORM_SCALE),
    )
    output_norm_scale: float | None = setting(None, "w of the output norm at the start.", "1 for rms, 0.1 for soft")
    n_kv_heads: int | None = setting(
        None, "Heads of keys, values and state; groups of query heads share one.", "as many as query heads"
    )
    state_heads: int | None = setting(
        None,
        "Baselines with a state of fixed size: heads of the state.",
        "as many as make it as large as interdomain attention's, 4 * n_basis * dim numbers",
    )
    window: int | None = setting(
        None, "Softmax layers: tokens that a token attends to, itself included.", "itself and all before it"
    )
    c_scale: float | None = setting(
        None,
        "C at the start: root mean square of |C_mn|; 1 is S4D's complex N(0, 1). It decides whether the mixer learns.",
        "sqrt(2)/M, or sqrt(2/M) if C is diagonal (the paper leaves it open)",
    )
    linear_scale: float | None = setting(None, "Linear readout at the start: standard deviation of c.", "1/sqrt(M)")
    dt_min: float = setting(1e-3, "Smallest Delta (step size per token) at the start; log-uniform up to dt_max.")
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
            raise ValueError(f"mixer.dt_min must be at most mixer.dt_max: got {self.dt_min:g} and {self.dt_max:g}.")
        xi = FEATURE_MAPS[self.feature_map]
        if xi and xi.needs_ratio and not self.normalize:
            raise ValueError(
                f"mixer.feature_map = {self.feature_map!r} scales each query by a factor that cancels only in the ratio of "
                "eq. 9: set mixer.normalize = true with it, or choose another map."
            )
        for name, why in self.without_meaning().items():
            if getattr(self, name) != getattr(MixerConfig, name):
                raise ValueError(f"mixer.{name} = {getattr(self, name)!r} is not possible: {why}; or leave it out.")
        if self.conv_width == 1:
            raise ValueError("mixer.conv_width must be 0, for no convolution, or at least 2: got 1.")
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
            unread["output_norm"] = "mixer.normalize sets the scale of the output. Choose one of the two"
        if self.c_form == "identity":
            unread["c_scale"] = "with mixer.c_form = 'identity' there is no C. Choose another form"
        if self.query_readout:
            return unread | {"linear_scale": "c belongs to the linear readout. Set mixer.query_readout = false"}
        if not self.dual_input:
            unread["feature_map"] = "there is no query or key to map. Set mixer.dual_input or query_readout = true"
        why = "it needs the query readout. Set mixer.query_readout = true"
        return unread | dict.fromkeys(("normalize", "n_kv_heads", "readout", "output_norm"), why)


MIXER_SETTINGS = {f.name: f for f in fields(MixerConfig)}


def from_version_1(settings: dict[str, Any], kind: str) -> dict[str, Any]:
    """Settings of a mixer as a record of version 1 has them: its conv_width is 4 where no convolution was, too.

    kind: the name of the setting that says the mixer's kind.
    """
    return settings | ({"conv_width": None} if settings.get(kind) in CONV_WIDTH else {})


def one_of(name: str, value: Any, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} = {value!r} is unknown; allowed: {', '.join(allowed)}.")


def check_fields(prefix: str, config: Any, without: str = "") -> None:
    """Types, choices and ranges. Raises ValueError that names the setting."""
    for f in (f for f in fields(config) if f.name != without):
        name, value, kind = f"{prefix}{f.name}", getattr(config, f.name), cast(Any, f.type)
        real, least = isinstance(0.0, kind), f.metadata.get("least", 1)  # a JSON or TOML file may have 1 for 1.0
        # A bool is an int to Python, but `dim = true` is no size.
        if not isinstance(value, kind | int if real else kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{name} must be {getattr(kind, '__name__', kind)}: got {value!r}.")
        if f.metadata.get("choices"):
            one_of(name, value, f.metadata["choices"])
        elif real and value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite: got {value}.")
        elif type(value) is int and value < least:
            raise ValueError(f"{name} must be at least {least}: got {value}.")
        elif type(value) is int and f.name != "max_seq_len" and value > LARGEST:
            raise ValueError(f"{name} must be at most {LARGEST:,}: got {value}.")


# interdomain/scan/tables.py

"""Small per-head tables: log-decay, input gain, mixing matrix, readout vector, powers of the decay.

Shapes: H heads, M basis functions, J exponents. Complex numbers are real pairs [..., 2]: optimisers, FSDP and inductor
handle those everywhere, complex dtypes only in places. All of it is differentiable by autograd and cheap: it runs once
per step, for the heads of all layers, not once per token. Inputs fp32 or fp64; outputs in the same dtype. Derivation in
docs/kernels.md.
"""

import math

import torch
from torch import Tensor

# |Lambda| >= e^-1: the shortest memory is about one token. It keeps every power that a chunk of 64 tokens needs inside
# e^64, far from fp32 overflow (e^88), and lies 20 times above the fastest decay of the S4D-Inv initialisation (0.05).
MAX_DECAY_PER_TOKEN = 1.0

CHUNK = 64  # tokens of a chunk

READOUTS = ("complex", "hermitian", "real")


def decay_exponent(dt: Tensor, log_A_real: Tensor, A_imag: Tensor) -> Tensor:
    """theta = log Lambda = dt * A per token (paper eq. 11), with A = -exp(log_A_real) + i A_imag and a soft bound on the decay.

    With x = dt * exp(log_A_real) and b = MAX_DECAY_PER_TOKEN, Re(theta) = -x (1 + (x/b)^8)^(-1/8): x itself for small x
    (relative deviation (x/b)^8 / 8, below fp32 rounding for x <= 0.12), b for large x. Above the bound the gradient
    falls as (b/x)^9 and is not cut off, unlike that of a clamp.

    Args:
        dt: Delta, the step size, [H], > 0.
        log_A_real: log of -Re A, [H, M].
        A_imag: Im A, [H, M].

    Returns:
        log_decay, [H, M, 2] as (real < 0, imaginary part in radians), per token.
    """
    x = dt[:, None] * log_A_real.exp()
    bound = torch.full_like(x, MAX_DECAY_PER_TOKEN)
    # The function is symmetric in x and b; scaled by the larger of the two, the eighth power cannot overflow.
    low, high = torch.minimum(x, bound), torch.maximum(x, bound)
    decay = low * (1 + (low / high) ** 8) ** -0.125
    return torch.stack((-decay, dt[:, None] * A_imag), dim=-1)


def input_gain(log_decay: Tensor, dt: Tensor) -> Tensor:
    """Zero-order hold beta = (Lambda - 1) / A, with A = theta / dt: the A that log_decay stands for, bound included.

    Args:
        log_decay: theta, [H, M, 2].
        dt: Delta, [H].

    Returns:
        beta, [H, M, 2].
    """
    re, im = log_decay.unbind(-1)
    # exp(theta) - 1 without cancellation: cos(im) - 1 = -2 sin(im/2)^2.
    num_re = torch.expm1(re) * torch.cos(im) - 2 * torch.sin(im / 2) ** 2
    num_im = torch.exp(re) * torch.sin(im)
    # The quotient does not depend on `scale` (so it needs no gradient); it keeps |theta|^2 from underflowing.
    scale = torch.maximum(re.abs(), im.abs()).detach().clamp_min(torch.finfo(re.dtype).tiny)
    re, im, num_re, num_im = re / scale, im / scale, num_re / scale, num_im / scale
    factor = dt[:, None] / (re * re + im * im)
    return torch.stack(((num_re * re + num_im * im) * factor, (num_im * re - num_re * im) * factor), dim=-1)


def mixing_matrix(gain: Tensor, C: Tensor | None, readout: str = "complex") -> Tensor:
    """W = G(Cb^T) P G(Cb): input gain, C and the readout variant in one real matrix per head.

    Cb = C diag(gain), G(Z) = [[Re Z, -Im Z], [Im Z, Re Z]], and P = I (`complex`), diag(I, -I) (`hermitian`) or
    diag(I, 0) (`real`).

    Args:
        gain: beta, from `input_gain`, [H, M, 2].
        C: projection onto the basis, [H, M, M, 2] full or [H, M, 2] diagonal. None: identity.
        readout: one of READOUTS: how complex U and Gamma become real.

    Returns:
        W, [H, 2M, 2M], acting on [Re a; Im a].

    Raises:
        ValueError: for another readout, or a shape of C that is none of these.
    """
    if readout not in READOUTS:
        raise ValueError(f"readout is {readout!r}; allowed: {', '.join(READOUTS)}")
    M = gain.shape[1]
    if C is None:
        cb = torch.diag_embed(gain.movedim(-1, 0))  # [2, H, M, M]
    elif C.shape == gain.shape:
        cb = torch.diag_embed(multiply(C, gain).movedim(-1, 0))
    elif C.shape == (*gain.shape[:2], M, 2):
        cb = multiply(C, gain[:, None]).movedim(-1, 0)
    else:
        raise ValueError(_C_SHAPE.format(got=tuple(C.shape), full=(*gain.shape[:2], M, 2), diagonal=tuple(gain.shape)))
    sign = {"complex": 1.0, "hermitian": -1.0, "real": 0.0}[readout]
    projection = torch.cat((cb.new_ones(M), cb.new_full((M,), sign)))[:, None]
    # Autocast would round these products to bf16, and with them every weight of C.
    with torch.autocast(gain.device.type, enabled=False):
        return _real_form(cb.mT) @ (projection * _real_form(cb))


def readout_vector(gain: Tensor, C: Tensor | None, c: Tensor) -> Tensor:
    """w = gain * (C^T c), the linear readout on unit-gain states: y = Re(sum_m w_m X[m]).

    Args:
        gain: beta, from `input_gain`, [H, M, 2].
        C: as in `mixing_matrix`.
        c: real weights, [H, M].

    Returns:
        w, [H, 2M] as (Re w | Im w).

    Raises:
        ValueError: for another shape of C.
    """
    if C is None:
        projected = torch.stack((c, torch.zeros_like(c)), dim=-1)
    elif C.shape == gain.shape:
        projected = C * c[..., None]
    elif C.shape == (*gain.shape[:2], gain.shape[1], 2):
        projected = (C * c[:, :, None, None]).sum(1)
    else:
        full = (*gain.shape[:2], gain.shape[1], 2)
        raise ValueError(_C_SHAPE.format(got=tuple(C.shape), full=full, diagonal=tuple(gain.shape)))
    return multiply(gain, projected).movedim(-1, 1).flatten(1)


def powers(log_decay: Tensor, exponents: Tensor) -> Tensor:
    """Lambda^j for every exponent j, negative ones included.

    The phase is multiplied and reduced in fp64: at M = 64 it reaches 128 radians per token, where fp32 would be off by
    5e-4 radians after 64 tokens.

    Args:
        log_decay: theta, [H, M, 2].
        exponents: [J], integers of any dtype.

    Returns:
        [H, J, M, 2] in log_decay's dtype.
    """
    j = exponents.to(dtype=torch.float64, device=log_decay.device)[:, None]
    re, im = log_decay.double().unbind(-1)
    magnitude = torch.exp(re[:, None] * j)
    phase = torch.remainder(im[:, None] * j, 2 * math.pi)
    return torch.stack((magnitude * torch.cos(phase), magnitude * torch.sin(phase)), dim=-1).to(log_decay.dtype)


_C_SHAPE = "C has shape {got}; allowed: {full} (full), {diagonal} (diagonal) or None (identity)"


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """Product of two complex tensors given as real pairs."""
    (x_re, x_im), (y_re, y_im) = x.unbind(-1), y.unbind(-1)
    return torch.stack((x_re * y_re - x_im * y_im, x_re * y_im + x_im * y_re), dim=-1)


def _real_form(z: Tensor) -> Tensor:
    """G(Z) of z = (Re Z, Im Z), [2, H, M, M] -> [H, 2M, 2M]."""
    re, im = z.unbind(0)
    return torch.cat((torch.cat((re, -im), dim=-1), torch.cat((im, re), dim=-1)), dim=-2)


# interdomain/scan/step.py

"""One token at a time: O(M (R + D) + M^2) work per head, and no position anywhere (the recurrence is time-invariant).

Shapes: B batch, T time, H state heads, Hq = G H query heads, R key features, D value width, P = R + D channels,
M basis functions. decay: Lambda, [H, M, 2]. mixing: W, [H, 2M, 2M], or its upper half [H, M, 2M] (see `interdomain_step`).

Plain PyTorch, differentiable, over the state itself. The fused kernels are in triton_step.py.
"""

import torch
from torch import Tensor



def decay_factor(log_decay: Tensor) -> Tensor:
    """Lambda = exp(log_decay) per token, for `interdomain_step` and `linear_step`.

    Args:
        log_decay: theta, [H, M, 2].

    Returns:
        Lambda, [H, M, 2].
    """
    one = torch.ones(1, device=log_decay.device)  # made there: a copy from the host would break CUDA-graph capture
    return powers(log_decay, one)[:, 0]


def scan_step(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, mixing: Tensor, state: Tensor) -> Tensor:
    """Returns o [B, Hq, D] in v's dtype, and overwrites the state [B, H, M, P, 2], which is contiguous."""
    (B, H, M, _, _), R = state.shape, q.shape[-1]
    X = _advanced(torch.cat((k, v), dim=-1), decay, state)
    a = q.to(X.dtype).unflatten(1, (H, -1)) @ X[..., :R].mT  # [B, H, G, M]
    a = torch.cat((a.real, a.imag), dim=-1)
    if mixing.shape[1] == M:
        a = torch.stack((a, torch.cat((a[..., M:], -a[..., :M]), dim=-1)), dim=-2)
    b = a.transpose(0, 1).reshape(H, -1, 2 * M) @ mixing.mT  # one product for all sequences: W is read once
    b = torch.complex(*b.view(H, B, -1, 2, M).transpose(0, 1).unbind(-2))
    return (b @ X[..., R:]).real.flatten(1, 2).to(v.dtype)


def linear_one_step(z: Tensor, decay: Tensor, readout: Tensor, state: Tensor) -> Tensor:
    """Returns y [B, H, P] in z's dtype, and overwrites the state [B, H, M, P, 2], which is contiguous."""
    w = torch.complex(*readout.unflatten(1, (2, 1, -1)).unbind(1))  # [H, 1, M]
    return (w @ _advanced(z, decay, state)).real.squeeze(2).to(z.dtype)


def _advanced(z: Tensor, decay: Tensor, state: Tensor) -> Tensor:
    """X = Lambda X + z^T, over the state; z [B, H, P]. Returns it as [B, H, M, P] complex."""
    X = torch.view_as_complex(state)
    return X.mul_(torch.view_as_complex(decay)[:, :, None]).add_(z.to(X.dtype)[:, :, None])


# interdomain/features/plain.py

"""The features in plain PyTorch, recorded by autograd: the CPU path, with which tests compare the kernels."""

import torch
from torch import Tensor
from torch.nn import functional as F

# Shapes: B batch, T time, H heads, R head_dim, E = H R channels, W convolution width.


def features(x, head_dim, weight, bias, past, documents, cos, sin, silu, scale, shift, eps) -> Tensor:
    """x [B, T, E]; weight [E, W]; past [B, W - 1, E]; documents [B, T]; None for tensors not there. Returns [B, T, H, R]."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.to(dtype)
    if weight is not None:
        y = _convolved(y, weight.to(dtype), bias.to(dtype), past, documents)
    y = y.unflatten(-1, (-1, head_dim))
    if cos is not None:
        other = y.roll(head_dim // 2, dims=-1)  # the halves (b, a) of (a, b)
        y = y * torch.cat([cos, cos], dim=-1) + other * torch.cat([-sin, sin], dim=-1)
    if silu:
        y = F.normalize(F.silu(y), dim=-1, eps=1e-6)
    if scale is not None:
        y = F.rms_norm(y, scale.shape, scale.to(dtype), eps) + shift.to(dtype)
    return y.to(x.dtype)  # the only rounding


def _convolved(x: Tensor, weight: Tensor, bias: Tensor, past: Tensor | None, documents: Tensor | None) -> Tensor:
    T, W = x.shape[1], weight.shape[-1]
    window = F.pad(x, (0, 0, W - 1, 0)) if past is None else torch.cat([past.to(x.dtype), x], dim=1)
    # Shifted sums in [B, T, E]: no transpose to the layout of conv1d. A tap's weights are copied to one piece: read with a
    # stride of W, they would take four times as long as the sum.
    y, taps = bias, weight.mT.contiguous()
    for i in range(W):
        seen = window[:, i : i + T]
        if documents is not None:  # what came before the first token is of document 0
            same = F.pad(documents, (W - 1, 0))[:, i : i + T] == documents
            seen = torch.where(same[..., None], seen, 0)
        y = torch.addcmul(y, seen, taps[i])
    return y


def step(x, head_dim, weight, bias, past, cos, sin, rotated, silu, scale, shift, eps) -> Tensor:
    """One token of all projections, x [B, H R] -> [B, H, R], in few operations that overwrite x.

    weight [W, C] and past [B, W - 1, C], overwritten; scale and shift [N, R]; see `input_features_step`.
    """
    y = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    if weight is not None:
        u = y[:, : weight.shape[1]]
        window = torch.cat([past, u[:, None]], dim=1)
        past.copy_(window[:, 1:])
        u.copy_((window * weight).sum(1).add_(bias))
    y = y.view(x.shape[0], -1, head_dim)
    if rotated:
        u = y[:, :rotated].view(y.shape[0], rotated, 2, -1)  # the halves
        other = u.flip(2)
        other[:, :, 0].neg_()
        u.mul_(cos).addcmul_(other, sin)
    if silu:
        u = F.silu(y[:, :silu], inplace=True)
        u.div_(torch.linalg.vector_norm(u, dim=-1, keepdim=True).clamp_min_(1e-6))
    if scale is not None:
        u = y[:, -len(scale) :]
        n = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
        u.mul_(torch.addcmul(n.new_full((1,), eps), n, n, value=1 / head_dim).rsqrt_()).mul_(scale).add_(shift)
    return y.to(x.dtype)


# interdomain/model/mixers/fixed_state_scan.py

"""The recurrence of the fixed-state baselines in plain PyTorch: a matrix state that decays, is corrected, and is added to.

    S_t = A_t S_{t-1} + k_t u_t^T,   o_t = S_t^T q_t,   A_t = diag(exp(log_decay_t))
    u_t = v_t                                           gated linear attention (Yang et al., 2024, eq. 3), Mamba-2
    u_t = beta_t (v_t - (A_t S_{t-1})^T k_t)            the delta rules (Yang et al., 2024, eq. 5; 2025, eq. 10)

Logs of decays are only ever added, never subtracted: no exponent is above 0 however strong the gates are, and -inf at a
document's first token is an exact reset.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


# Shapes: B batch, T time, H heads, G heads of queries and keys (H, or 1 for all), K key width, V value width, L chunk length,
#         N chunks, D 1 or K.


def plain_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """All tokens of the recurrence above, chunk by chunk.

    Args:
        q, k: [B, T, G, K]; v: [B, T, H, V].
        log_decay: at most 0, [B, T, H] or per channel of the keys [B, T, H, K]; None for none.
        beta: of the delta rule, [B, T, H]; None for u = v.
        initial_state: [B, H, K, V], float32 or float64; None for zeros.
        documents: [B, T] integers, never falling along T: a state stops at the end of its document. 0 continues initial_state.
    Returns: (o [B, T, H, V] in v's dtype, S after the last token), computed in float32 (float64). Differentiable.
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    B, T, H, V = v.shape
    if initial_state is None:
        initial_state = v.new_zeros(B, H, k.shape[3], V, dtype=dtype)
    with torch.autocast(v.device.type, enabled=False):
        decay = v.new_zeros(B, T, 1, dtype=dtype) if log_decay is None else log_decay.to(dtype)
        decay = decay[..., None] if decay.ndim == 3 else decay
        if documents is not None:
            decay = decay.masked_fill(first_tokens(documents)[..., None, None], -torch.inf)
        q, k, u = (x.to(dtype) for x in (q, k, v))
        beta = None if beta is None else beta.to(dtype)[..., None]
        o, state = (_one_token if T == 1 else _by_chunks)(q, k, u, decay, beta, initial_state)
        return o.to(v.dtype), state


def l2_normed(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dimension, as flash-linear-attention has queries and keys of the delta rules."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def first_tokens(documents: Tensor) -> Tensor:
    """Mask of the tokens that are the first of their document, [B, T] bool; what came before the first token is of
    document 0."""
    return documents != F.pad(documents, (1, 0))[:, :-1]


def in_order(step: Callable, state: Tensor, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """step(state, inputs[n]) -> (state, o), for every n: (the last state, o stacked). Exported as one operation for any n,
    without gradients: those of a symbolic number of tokens cannot be translated to ONNX."""
    if torch.compiler.is_exporting():
        from torch._higher_order_ops import scan  # late: it is slow to import

        return scan(step, state.detach(), [x.detach() for x in inputs])
    outputs = []
    for each in zip(*inputs, strict=True):
        state, o = step(state, each)
        outputs.append(o)
    return state, torch.stack(outputs)


def _one_token(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, S: Tensor) -> tuple[Tensor, Tensor]:
    """One token: as the recurrence is written."""
    S = decay[:, 0, :, :, None].exp() * S
    u, k = v[:, 0], k[:, 0, :, :, None]
    if beta is not None:
        u = beta[:, 0] * (u - (k * S).sum(-2))
    S = S + k * u[:, :, None]
    return (q[:, 0, :, None] @ S).transpose(1, 2), S


def _by_chunks(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, S: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence by chunks (Yang et al., 2024, section 4.1; the delta rule in its WY form, Yang et al., 2024, section 3.2).

    decay: [B, T, 1 or H, D]; beta: [B, T, H, 1].
    """
    B, T, H, V = v.shape
    # An exported graph goes token by token: ONNX has no triangular solve, and T is a symbol there.
    L = 1 if torch.compiler.is_exporting() else min(CHUNK, 1 << (T - 1).bit_length())

    def chunked(x: Tensor) -> Tensor:  # [B, T, H, D] -> [N, B, H, L, D]; padding changes no state
        return F.pad(x, (0, 0, 0, 0, 0, -T % L)).unflatten(1, (-1, L)).permute(1, 0, 3, 2, 4).contiguous()

    q, k, v, decay = (chunked(x) for x in (q, k, v, decay))
    from_start = decay.cumsum(-2)  # of the chunk to each token, which is included
    to_end = F.pad(decay[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)  # from each token, which is not
    kept = from_start[..., -1, :, None].exp()
    seen, written, scores, erased = q * from_start.exp(), (k * to_end.exp()).mT, _decayed_scores(q, k, decay), []
    if beta is not None:
        # u_i + beta_i sum_{j<i} (k_i . k_j decayed) u_j = beta_i (v_i - what k_i reads of the chunk's first state)
        beta = chunked(beta)
        right = torch.cat([v, (k * from_start.exp()).expand(*v.shape[:-1], -1)], dim=-1)
        solved = beta * right
        if L > 1:
            system = beta * _decayed_scores(k, k, decay).tril(-1)
            solved = torch.linalg.solve_triangular(system, solved, upper=False, unitriangular=True)
        v, *erased = solved.split([V, k.shape[-1]], dim=-1)

    def chunk(S: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        seen, scores, kept, written, u, *erased = inputs
        u = u - erased[0] @ S if erased else u
        return kept * S + written @ u, seen @ S + scores @ u

    S, o = in_order(chunk, S, [seen, scores, kept, written, v, *erased])  # o: [N, B, H, L, V]
    return o.permute(1, 0, 3, 2, 4).reshape(B, -1, H, V)[:, :T], S


def _decayed_scores(q: Tensor, k: Tensor, decay: Tensor) -> Tensor:
    """q_i . k_j, each channel decayed over the tokens j + 1 to i, and 0 for j > i: [..., L, L] of [..., L, K].

    One decay for all channels is a factor of the product. With one per channel, blocks of a token are joined in pairs until
    they are the chunk: the later block's queries and the earlier one's keys are both decayed towards the border between them.
    """
    if decay.shape[-1] == 1:
        between = decay.expand(*decay.shape[:-1], decay.shape[-2]).tril(-1).cumsum(-2)
        return (q @ k.mT) * between.exp().tril()
    scores, before, after = (q * k).sum(-1)[..., None, None], decay, torch.zeros_like(decay)
    for h in (1 << i for i in range((q.shape[-2] - 1).bit_length())):  # tokens of a block
        (_, later), (earlier, _), (b1, b2), (a1, a2) = (
            x.unflatten(-2, (-1, 2, h)).unbind(-3) for x in (q, k, before, after)
        )
        first, second = scores.unflatten(-3, (-1, 2)).unbind(-3)
        across = (later * b2.exp()) @ (earlier * a1.exp()).mT
        above = torch.cat([first, torch.zeros_like(first)], dim=-1)
        scores = torch.cat([above, torch.cat([across, second], dim=-1)], dim=-2)
        before = torch.cat([b1, b2 + b1[..., -1:, :]], dim=-2).flatten(-3, -2)
        after = torch.cat([a1 + b2[..., -1:, :], a2], dim=-2).flatten(-3, -2)
    return scores.squeeze(-3)
