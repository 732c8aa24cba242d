"""The recurrence of Interdomain Attention: its parameters, the scan, one step, and what is kept between passes.

Per head, with X_t = Lambda X_(t-1) + [k_t; v_t]^T, a state of M basis functions (Lambda complex, diagonal, constant in time):

    a_t = X^k_t q_t        b_t = W a_t        o_t = Re(b_t^T X^v_t)

W is one real matrix that holds the input gain and C (equations 11 to 13 of Interdomain Attention: Beyond Token-Level Key-Value
Memory, 2026). Where the package `interdomain` is installed its kernels compute this, elsewhere the plain PyTorch of this file.
"""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from .configuration_interdomain import InterdomainConfig

try:
    from interdomain.features import input_features
    from interdomain.scan import interdomain_scan, interdomain_step, linear_scan, linear_step
except ImportError:
    input_features = None

# Shapes: B batch, T tokens, H heads of state, G query heads of each, R key features, D value width (R = D = head_dim),
#         P = R + D channels, M basis functions, W convolution width, E channels of the convolutions, L tokens of a chunk,
#         N chunks. Complex numbers are real pairs: [..., 2], or [..., 2M] as (real parts | imaginary parts).

CHUNK = 64  # with a decay of at most one e-fold per token, its powers span e^-32 to e^32: far from float32's limits


# The dynamics: from parameters to what the scan reads. float32, or float64.


def decay_exponent(dt: Tensor, log_A_real: Tensor, A_imag: Tensor) -> Tensor:
    """theta = dt A, [H, M, 2], with a smooth bound of one e-fold per token: x (1 + x^8)^(-1/8) of x = dt |Re A|."""
    x = dt[:, None] * log_A_real.exp()
    low, high = x.clamp(max=1.0), x.clamp(min=1.0)
    return torch.stack((-low * (1 + (low / high) ** 8) ** -0.125, dt[:, None] * A_imag), dim=-1)


def input_gain(theta: Tensor, dt: Tensor) -> Tensor:
    """Zero-order hold, (exp(theta) - 1) dt / theta, [H, M, 2]."""
    re, im = theta.unbind(-1)
    # exp(theta) - 1 without cancellation: cos(im) - 1 = -2 sin(im / 2)^2.
    numerator = torch.expm1(re) * im.cos() - 2 * (im / 2).sin() ** 2, re.exp() * im.sin()
    # The quotient does not depend on `scale`, which keeps |theta|^2 from underflowing.
    scale = torch.maximum(re.abs(), im.abs()).detach().clamp_min(torch.finfo(re.dtype).tiny)
    re, im, num_re, num_im = (x / scale for x in (re, im, *numerator))
    factor = dt[:, None] / (re * re + im * im)
    return torch.stack(((num_re * re + num_im * im) * factor, (num_im * re - num_re * im) * factor), dim=-1)


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """Complex product of pairs [..., 2]."""
    (a, b), (c, d) = x.unbind(-1), y.unbind(-1)
    return torch.stack((a * c - b * d, a * d + b * c), dim=-1)


def mixing_matrix(gain: Tensor, C: Tensor | None, readout: str) -> Tensor:
    """W = G(Cb^T) P G(Cb), [H, 2M, 2M]: Cb = C diag(gain), G(Z) = [[Re Z, -Im Z], [Im Z, Re Z]], P by `readout`.

    C: [H, M, M, 2], a diagonal [H, M, 2], or None for the identity.
    """
    if C is not None and C.ndim == 4:
        cb = multiply(C, gain[:, None]).movedim(-1, 0)
    else:
        cb = torch.diag_embed((gain if C is None else multiply(C, gain)).movedim(-1, 0))

    def real_form(z: Tensor) -> Tensor:
        re, im = z.unbind(0)
        return torch.cat((torch.cat((re, -im), dim=-1), torch.cat((im, re), dim=-1)), dim=-2)

    M = gain.shape[1]
    sign = {"complex": 1.0, "hermitian": -1.0, "real": 0.0}[readout]
    projection = torch.cat((cb.new_ones(M), cb.new_full((M,), sign)))[:, None]
    return real_form(cb.mT) @ (projection * real_form(cb))


def readout_vector(gain: Tensor, C: Tensor | None, c: Tensor) -> Tensor:
    """w = gain (C^T c), [H, 2M]: the linear readout is y_t = Re(sum_m w_m X_t[m])."""
    if C is None:
        projected = torch.stack((c, torch.zeros_like(c)), dim=-1)
    else:
        projected = C * c[..., None] if C.ndim == 3 else (C * c[:, :, None, None]).sum(1)
    return multiply(gain, projected).movedim(-1, 1).flatten(1)


def decay_powers(theta: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Real and imaginary part of Lambda^j for exponents [J], each [H, J, M]; phases of up to 128 radians a token ask for
    float64."""
    j = exponents.to(torch.float64)[:, None]
    re, im = theta.double()[:, None].unbind(-1)
    magnitude, phase = (re * j).exp(), torch.remainder(im * j, 2 * math.pi)
    return (magnitude * phase.cos()).to(theta.dtype), (magnitude * phase.sin()).to(theta.dtype)


# The scan in plain PyTorch: by chunks, and one token.


def rotate(x: Tensor, factor: tuple[Tensor, Tensor]) -> Tensor:
    """x [..., 2M] times a complex factor (real, imaginary part), each [..., M]."""
    (a, b), (c, d) = x.chunk(2, dim=-1), factor
    return torch.cat((a * c - b * d, a * d + b * c), dim=-1)


def plain_scan(
    q: Tensor | None, k: Tensor, v: Tensor, theta: Tensor, table: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """All tokens, by chunks: inside a chunk Lambda^(i-j) = E_i T_j is split around its middle, which makes matrix products.

    Args:
        q: [B, T, H G, R], or None for the linear readout. k: [B, T, H, R]. v: [B, T, H, D]. theta: [H, M, 2].
        table: W [H, 2M, 2M], or w [H, 2M] for the linear readout. state: [B, H, M, P, 2], or None for zeros.
    Returns: (o [B, T, H G, D], or [B, T, H, P] for the linear readout; the state after the last token).
    """
    dtype, (_, T, H, R), middle = theta.dtype, k.shape, CHUNK // 2
    position = torch.arange(CHUNK, device=k.device)
    E, frame = decay_powers(theta, position - middle), torch.cat(decay_powers(theta, middle - position), dim=-1)
    ends = torch.tensor([middle + 1, CHUNK, (T - 1) % CHUNK - middle], device=k.device)
    enter, carry, leave = zip(*(x[:, :, None].unbind(1) for x in decay_powers(theta, ends)), strict=True)

    def chunked(x: Tensor) -> Tensor:  # [B, T, H, D] -> [B, H, N, L, D]
        return F.pad(x.to(dtype).transpose(1, 2), (0, 0, 0, -T % CHUNK)).unflatten(2, (-1, CHUNK))

    # States before every chunk, as S = Lambda^(middle + 1) X, [B, H, N, P, 2M].
    z = chunked(torch.cat((k, v), dim=-1))
    added = torch.einsum("bhnlp,hlm->bhnpm", z, frame)
    current = torch.zeros_like(added[:, :, 0])
    if state is not None:
        current = rotate(state.permute(0, 1, 3, 4, 2).flatten(-2), enter)
    S, total = [], current
    for n in range(added.shape[2]):
        S.append(current)
        total = current + added[:, :, n]
        current = rotate(total, carry)
    S = torch.stack(S, dim=2)
    final = rotate(total, leave).unflatten(-1, (2, -1)).permute(0, 1, 4, 2, 3)

    def weights(b: Tensor, E: tuple[Tensor, Tensor]) -> Tensor:  # [..., L, 2M]: Re((E b)^T x) is a product with them
        re, im = rotate(b, E).chunk(2, dim=-1)
        return torch.cat((re, -im), dim=-1)

    if q is None:
        b = weights(table[:, None], E)
        o = torch.einsum("hij,bhnjp->bhnip", (b @ frame.mT).tril(), z) + torch.einsum("him,bhnpm->bhnip", b, S)
    else:
        rows = chunked(q).unflatten(1, (H, -1)).transpose(1, 2)  # [B, G, H, N, L, R]
        S, z, E = S[:, None], z[:, None], (E[0][:, None], E[1][:, None])
        scores = (rows @ z[..., :R].mT).tril()
        a = torch.einsum("bghnij,hjm->bghnim", scores, frame) + rows @ S[..., :R, :]
        b = weights(torch.einsum("bghnlm,hom->bghnlo", rotate(a, E), table), E)
        o = torch.einsum("bghnim,hjm->bghnij", b, frame).tril() @ z[..., R:] + b @ S[..., R:, :].mT
        o = o.transpose(1, 2).flatten(1, 2)
    return o.flatten(2, 3)[:, :, :T].transpose(1, 2).to(v.dtype), final


def plain_step(
    q: Tensor | None, k: Tensor, v: Tensor, decay: Tensor, table: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: as `plain_scan` without T, of decay = Lambda [H, M, 2]."""
    dtype, R, M = decay.dtype, k.shape[-1], decay.shape[1]
    z = torch.cat((k, v), dim=-1).to(dtype)[:, :, None]
    re, im = multiply(decay[:, :, None], state).unbind(-1)
    re = re + z
    if q is None:
        o = (table[:, :M, None] * re - table[:, M:, None] * im).sum(-2)
    else:
        q = q.to(dtype).unflatten(1, (k.shape[1], -1))  # [B, H, G, R]
        b = torch.cat((q @ re[..., :R].mT, q @ im[..., :R].mT), dim=-1) @ table.mT
        o = (b[..., :M] @ re[..., R:] - b[..., M:] @ im[..., R:]).flatten(1, 2)
    return o.to(v.dtype), torch.stack((re, im), dim=-1)


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32 for arithmetic that half precision would spoil; float64 stays."""
    return torch.promote_types(dtype, torch.float32)


def plain_features(x, head_dim, conv=None, past=None, rope=None, silu=False, norm=None, eps=1e-5) -> Tensor:
    """Convolution, RoPE, SiLU with the l2 norm, RMSNorm with a bias per head, each if asked for: x [B, T, E] -> [B, T, H, R].

    conv: (weight [E, 1, W], bias [E]); past: the W - 1 inputs before x, or None for zeros. rope: (cos, sin), each
    [B, T, 1, R / 2]. norm: (scale [R], bias [H, R]).
    """
    y = x.to(wide(x.dtype))
    if conv is not None:
        weight, bias = (p.to(y.dtype) for p in conv)
        T, W = x.shape[1], weight.shape[-1]
        window = F.pad(y, (0, 0, W - 1, 0)) if past is None else torch.cat((past.to(y.dtype), y), dim=1)
        y = bias + sum(window[:, i : i + T] * weight[:, 0, i] for i in range(W))
    y = y.unflatten(-1, (-1, head_dim))
    if rope is not None:
        (cos, sin), (a, b) = rope, y.chunk(2, dim=-1)
        y = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    if silu:
        y = F.normalize(F.silu(y), dim=-1, eps=1e-6)
    if norm is not None:
        y = F.rms_norm(y, (head_dim,), norm[0].to(y.dtype), eps) + norm[1].to(y.dtype)
    return y.to(x.dtype)


def features(x: Tensor, head_dim: int, **stages) -> Tensor:
    """`plain_features`, by a kernel where there is one."""
    return (plain_features if input_features is None else input_features)(x, head_dim, **stages)


def scan(q: Tensor | None, k: Tensor, v: Tensor, tables, state: Tensor | None) -> tuple[Tensor, Any]:
    """`plain_scan`, by the package's kernels where it is installed; no last state without a first. tables: SSMDynamics'."""
    theta, _, table = tables
    with torch.autocast(k.device.type, enabled=False):
        if input_features is None:
            return plain_scan(q, k, v, theta, table, state)
        cached = state is not None
        if q is None:
            z = torch.cat((k, v), dim=-1)
            return linear_scan(z, theta, table, initial_state=state, final_state=cached)
        return interdomain_scan(q, k, v, theta, table, initial_state=state, final_state=cached)


def step(q: Tensor | None, k: Tensor, v: Tensor, tables, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: as `scan`, of [B, 1, H, ...]."""
    theta, decay, table = tables
    k, v, q = k[:, 0], v[:, 0], None if q is None else q[:, 0]
    with torch.autocast(k.device.type, enabled=False):
        if input_features is None:
            o, state = plain_step(q, k, v, decay, table, state)
        elif q is None:
            o, state = linear_step(torch.cat((k, v), dim=-1), theta, table, state, decay=decay)
        else:
            o, state = interdomain_step(q, k, v, theta, table, state, decay=decay)
    return o[:, None], state


def residual_linear(in_features: int, out_features: int) -> nn.Linear:
    """A projection whose output is added to the residual stream: it starts smaller the deeper the model is."""
    linear = nn.Linear(in_features, out_features, bias=False)
    setattr(linear, "writes_residual", True)  # noqa: B010 (for _init_weights)
    return linear


class ShortConv(nn.Module):
    """Parameters of a causal depthwise convolution."""

    def __init__(self, channels: int, width: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias: Any = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(self) -> tuple[Tensor, Any]:  # by a call, around which accelerate brings what it has offloaded
        return self.weight, self.bias


class InputNorm(nn.Module):
    """Parameters of an RMSNorm over a head's channels, with a bias per head."""

    def __init__(self, n_heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.empty(*shape)) for shape in ((head_dim,), (n_heads, head_dim)))

    forward = ShortConv.forward


class KeptInFloat32(nn.Module):
    """A module whose parameters and buffers `half()`, `to(torch.bfloat16)` and the like move, but do not round."""

    def _apply(self, fn, recurse=True):
        def moved(x: Tensor) -> Tensor:
            out = fn(x)
            return x.to(out.device) if out.dtype in (torch.bfloat16, torch.float16) else out

        return super()._apply(moved, recurse)


class FeatureMap(KeptInFloat32):
    """The feature maps but `silu`: `rff`, and the positive `elu`, `softplus` and `favor` (FAVOR+, Choromanski et al., 2021).

    The random vectors are fixed; the query heads of a group share them with their keys.
    """

    def __init__(self, name: str, n_heads: int, head_dim: int) -> None:
        super().__init__()
        self.name = name
        self.frequencies: Tensor
        if name in ("rff", "favor"):
            vectors = head_dim if name == "favor" else head_dim // 2
            self.register_buffer("frequencies", torch.empty(n_heads, vectors, head_dim, dtype=torch.float32))

    def forward(self, x: Tensor, query: bool) -> Tensor:
        """[B, T, H G, R] -> the same shape; query: whether these are queries, or keys."""
        y, R = x.to(wide(x.dtype)), x.shape[-1]
        if self.name == "elu":  # elu + 1
            return ((F.relu(y) + y.clamp(max=0).exp()) * R**-0.5).to(x.dtype)
        if self.name == "softplus":
            return (F.softplus(y) * R**-0.5).to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            groups = y.unflatten(2, (self.frequencies.shape[0], -1))
            projected = torch.einsum("bthgr,hfr->bthgf", groups, self.frequencies.to(y.dtype)).flatten(2, 3)
        if self.name == "rff":
            return (torch.cat((projected.cos(), projected.sin()), dim=-1) * (2 / R) ** 0.5).to(x.dtype)
        if query:  # relative to the largest, which cancels in the ratio
            projected = projected - projected.detach().amax(dim=-1, keepdim=True)
        else:
            projected = projected - y.square().sum(-1, keepdim=True) / (2 * R**0.5)
            projected = projected.clamp(max=0.7 * math.log(torch.finfo(x.dtype).max))
        return (projected.exp() * R**-0.5).to(x.dtype)


def divided(o: Tensor, v: Tensor) -> Tensor:
    """By the Nadaraya-Watson denominator, the last channel of o [B, T, H G, D + 1]: at most 16 times as large as v, by mean."""
    above, below, v = (x.to(wide(o.dtype)) for x in (o[..., :-1], o[..., -1:], v[..., :-1]))
    allowed = 16.0 * v.abs().mean(-1, keepdim=True).repeat_interleave(o.shape[2] // v.shape[2], dim=2)
    least = torch.maximum(below.abs() * allowed, above.abs().mean(-1, keepdim=True))
    sign = torch.where(below < 0, -1.0, 1.0)
    return (above * (sign * allowed) / least.clamp_min(torch.finfo(least.dtype).tiny)).to(o.dtype)


class SSMDynamics(KeptInFloat32):
    """Step size, A, C and the linear readout's c of every head; float32 always: bfloat16 rounds a decay of 0.999 to 1."""

    def __init__(self, config: InterdomainConfig) -> None:
        super().__init__()
        self.config = config
        self.readout: str = config.readout
        H, M = config.num_key_value_heads, config.n_basis

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=torch.float32))

        self.log_dt = parameter(H)
        self.log_A_real = parameter(H, M)
        self.A_imag = parameter(H, M)
        shapes = {"full": (H, M, M, 2), "diagonal": (H, M, 2), "identity": None}
        self.C = parameter(*shapes[config.c_form]) if shapes[config.c_form] else None
        self.c = None if config.query_readout else parameter(H, M)

    def forward(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """(theta [H, M, 2], Lambda [H, M, 2], W [H, 2M, 2M] or w [H, 2M]), computed in float32 or float64 `dtype`."""
        log_dt, log_A_real, A_imag = (p.to(dtype) for p in (self.log_dt, self.log_A_real, self.A_imag))
        C, c = (None if p is None else p.to(dtype) for p in (self.C, self.c))
        with torch.autocast(log_dt.device.type, enabled=False):
            dt = log_dt.exp()
            theta = decay_exponent(dt, log_A_real, A_imag)
            gain = input_gain(theta, dt)
            table = mixing_matrix(gain, C, self.readout) if c is None else readout_vector(gain, C, c)
            one = torch.ones(1, device=theta.device)
            return theta, torch.stack(decay_powers(theta, one), dim=-1)[:, 0], table

    def init_values(self) -> None:
        """A new model's; within transformers' `_init_weights`."""
        config = self.config
        M, n = config.n_basis, torch.arange(config.n_basis, dtype=torch.float64, device="cpu")
        decay, frequency = {
            "s4d-inv": (torch.full_like(n, 0.5), M / math.pi * (M / (2 * n + 1) - 1)),
            "s4d-lin": (torch.full_like(n, 0.5), math.pi * n),
            "s4d-real": (n + 1, torch.zeros_like(n)),
        }[config.a_init]
        nn.init.uniform_(self.log_dt, math.log(config.dt_min), math.log(config.dt_max))
        for parameter, values in ((self.log_A_real, decay.log()), (self.A_imag, frequency)):
            if not getattr(parameter, "_is_hf_initialized", False):  # transformers' mark of a loaded one
                parameter.copy_(values)
        if self.C is not None:
            scale = 1 / M if config.c_form == "full" else M**-0.5
            nn.init.normal_(self.C, 0.0, scale if config.c_scale is None else config.c_scale / math.sqrt(2))
        if self.c is not None:
            nn.init.normal_(self.c, 0.0, M**-0.5 if config.linear_scale is None else config.linear_scale)


# What is carried from one pass to the next.


@dataclass(eq=False)
class InterdomainCache:
    """`past_key_values`. A recurrent layer has a state of fixed size, a softmax layer the keys and values so far: of all slots,
    or of the last `window` tokens of each row.

    It cannot go back: to continue one text in several ways, copy it (`copy.deepcopy`) before.

    Attributes:
        length: tokens read, padding included. position: tokens of each row without padding, [B]; None before the first.
        slots: by the window of softmax layers (0: none), which token each slot of theirs holds, [B, S]; -1 for padding.
        states: by layer, (last inputs of the convolutions [B, W - 1, E], X [B, H, M, P, 2]), or (keys, values); of
            FixedStateMixer S [B, H, K, V] in place of X.
        tables: by layer, what the scan reads of the parameters: (theta, decay, table), computed once.
    """

    length: int = 0
    position: Tensor | None = None
    slots: dict[int, Tensor] = field(default_factory=dict)
    states: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    tables: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    is_compileable: ClassVar[bool] = False
    is_croppable: ClassVar[bool] = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def reorder_cache(self, indices: Tensor) -> None:
        """Rows of other texts in place of these: the beams that go on."""
        at = {i: indices.to(pair[0].device) for i, pair in self.states.items()}
        self.states = {i: (x[at[i]], y[at[i]]) for i, (x, y) in self.states.items()}
        self.slots = {window: x[indices.to(x.device)] for window, x in self.slots.items()}
        self.position = None if self.position is None else self.position[indices.to(self.position.device)]


# For torch.export. `length` is a number of Python's, which would be a constant of the exported step: it is left out.
pytree.register_dataclass(
    InterdomainCache,
    field_names=["position", "slots", "states", "tables"],
    drop_field_names=["length"],
    serialized_type_name=f"{__name__}.InterdomainCache",
)


class Padding(NamedTuple):
    """Rows of unequal length. The recurrent layers compute with every row's tokens first and its padding last, where no token
    sees it.

    order: the positions in that order, [B, T]. back: undoes it. lengths: tokens of each row, [B].
    """

    order: Tensor
    back: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> "Padding":
        """mask: [B, T], False for padding."""
        order = mask.int().argsort(dim=1, descending=True, stable=True)
        return cls(order, order.argsort(dim=1), mask.sum(1))

    def state_after(self, z: Tensor, theta: Tensor, state: Tensor) -> Tensor:
        """X after each row's tokens: Lambda^lengths X + sum_j Lambda^(T - 1 - j) z_j with the tokens last, [B, H, M, P, 2].

        The scan's own last state has also decayed over the padding. z: [B, T, H, P] in this order.
        """
        T, t = z.shape[1], torch.arange(z.shape[1], device=z.device)
        z = take(z, (t + self.lengths[:, None]) % T).to(theta.dtype)
        z = torch.where((t >= T - self.lengths[:, None])[:, :, None, None], z, 0)
        added = torch.stack([torch.einsum("bthp,htm->bhmp", z, x) for x in decay_powers(theta, T - 1 - t)], dim=-1)
        passed = torch.stack(decay_powers(theta, self.lengths), dim=-1).transpose(0, 1)[:, :, :, None]
        return multiply(passed, state) + added


def take(x: Tensor, index: Tensor) -> Tensor:
    """x [B, T, ...] at positions index [B, J] of each row: [B, J, ...]."""
    return x.gather(1, index.view(*index.shape, *(1,) * (x.ndim - 2)).expand(*index.shape, *x.shape[2:]))
