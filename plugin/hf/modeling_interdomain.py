"""Interdomain Attention in transformers: a Llama-style decoder whose token mixer reads a recurrent state of fixed size.

Per head, with X_t = Lambda X_(t-1) + [k_t; v_t]^T, a state of M basis functions (Lambda complex, diagonal, constant in time):

    a_t = X^k_t q_t        b_t = W a_t        o_t = Re(b_t^T X^v_t)

W is one real matrix that holds the input gain and C (equations 11 to 13 of Interdomain Attention: Beyond Token-Level Key-Value
Memory, 2026). Where the package `interdomain` is installed its kernels compute this, elsewhere the plain PyTorch of this file.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.utils import can_return_tuple

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


# What is carried from one pass to the next.


class InterdomainCache:
    """`past_key_values`. A recurrent layer has a state of fixed size, a softmax layer the keys and values so far.

    It cannot go back: to continue one text in several ways, copy it (`copy.deepcopy`) before.

    Attributes:
        length: tokens read, padding included. position: tokens of each row without padding, [B]; None before the first.
        mask: which of softmax's slots hold a token, [B, length] bool; None in other models.
        states: by layer, (last inputs of the convolutions [B, W - 1, E], X [B, H, M, P, 2]), or (keys, values).
        tables: by layer, what the scan reads of the parameters: (theta, decay, table), computed once.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self) -> None:
        self.length = 0
        self.position: Tensor | None = None
        self.mask: Tensor | None = None
        self.states: dict[int, tuple[Tensor, Tensor]] = {}
        self.tables: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1  # no limit

    def batch_select_indices(self, indices: Tensor) -> None:
        self.states = {i: tuple(x[indices.to(x.device)] for x in pair) for i, pair in self.states.items()}
        self.position, self.mask = (None if x is None else x[indices.to(x.device)] for x in (self.position, self.mask))

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.position is not None:
            rows = torch.arange(len(self.position), device=self.position.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def reset(self) -> None:
        self.__init__()

    def crop(self, max_length: int) -> None:
        raise NotImplementedError(
            "a recurrent state cannot forget its last tokens: copy the cache before it reads them."
        )


def _cache_leaves(cache: InterdomainCache) -> tuple[list[tuple[Any, Any]], None]:
    names = ("position", "mask", "states", "tables")
    return [(pytree.GetAttrKey(name), getattr(cache, name)) for name in names], None


def _cache_of_leaves(leaves: Any, context: None) -> InterdomainCache:
    cache = InterdomainCache()
    cache.position, cache.mask, cache.states, cache.tables = leaves
    return cache


# For torch.export. `length` is a number of Python's, which would be a constant of the exported step: it is left out.
pytree.register_pytree_node(
    InterdomainCache,
    lambda cache: ([leaf for _, leaf in _cache_leaves(cache)[0]], None),
    _cache_of_leaves,
    serialized_type_name=f"{__name__}.InterdomainCache",
    flatten_with_keys_fn=_cache_leaves,
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

    def last(self, x: Tensor) -> Tensor:
        """x [B, T, ...] in that order -> the padding first, as zeros, and the tokens last."""
        T = x.shape[1]
        t = torch.arange(T, device=x.device)
        moved = take(x, (t + self.lengths[:, None]) % T)
        return torch.where((t >= T - self.lengths[:, None]).view(*x.shape[:2], *(1,) * (x.ndim - 2)), moved, 0)


def take(x: Tensor, index: Tensor) -> Tensor:
    """x [B, T, ...] at positions index [B, J] of each row: [B, J, ...]."""
    return x.gather(1, index.view(*index.shape, *(1,) * (x.ndim - 2)).expand(*index.shape, *x.shape[2:]))


# The modules.


def residual_linear(in_features: int, out_features: int) -> nn.Linear:
    """A projection whose output is added to the residual stream: it starts smaller the deeper the model is."""
    linear = nn.Linear(in_features, out_features, bias=False)
    linear.writes_residual = True  # for _init_weights
    return linear


class ShortConv(nn.Module):
    """Parameters of a causal depthwise convolution."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.empty(channels))


class InputNorm(nn.Module):
    """Parameters of an RMSNorm over a head's channels, with a bias per head."""

    def __init__(self, n_heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(head_dim))
        self.bias = nn.Parameter(torch.empty(n_heads, head_dim))


class KeptInFloat32(nn.Module):
    """A module whose parameters and buffers `half()`, `to(torch.bfloat16)` and the like move, but do not round."""

    def _apply(self, fn, recurse=True):
        def moved(x: Tensor) -> Tensor:
            out = fn(x)
            return x.to(out.device) if out.dtype in (torch.bfloat16, torch.float16) else out

        return super()._apply(moved, recurse)


class RandomFourierFeatures(KeptInFloat32):
    """sqrt(2 / R) [cos(w x), sin(w x)] with fixed frequencies, which the query heads of a group share with their keys."""

    def __init__(self, n_heads: int, head_dim: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.empty(n_heads, head_dim // 2, head_dim, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, H G, R] -> the same shape."""
        groups = x.to(wide(x.dtype)).unflatten(2, (self.frequencies.shape[0], -1))
        with torch.autocast(x.device.type, enabled=False):
            angles = torch.einsum("bthgr,hfr->bthgf", groups, self.frequencies.to(groups.dtype))
        return (torch.cat((angles.cos(), angles.sin()), dim=-1) * (2 / x.shape[-1]) ** 0.5).flatten(2, 3).to(x.dtype)


class SSMDynamics(KeptInFloat32):
    """Step size, A, C and the linear readout's c of every head; float32 always: bfloat16 rounds a decay of 0.999 to 1."""

    def __init__(self, config: InterdomainConfig) -> None:
        super().__init__()
        self.readout = config.readout
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
        names = ("log_dt", "log_A_real", "A_imag", "C", "c")
        log_dt, log_A_real, A_imag, C, c = (None if (p := getattr(self, n)) is None else p.to(dtype) for n in names)
        with torch.autocast(self.log_dt.device.type, enabled=False):
            dt = log_dt.exp()
            theta = decay_exponent(dt, log_A_real, A_imag)
            gain = input_gain(theta, dt)
            table = mixing_matrix(gain, C, self.readout) if c is None else readout_vector(gain, C, c)
            one = torch.ones(1, device=theta.device)
            return theta, torch.stack(decay_powers(theta, one), dim=-1)[:, 0], table


class InterdomainMixer(nn.Module):
    """The recurrence, read with a query or linearly. With a single input wk and wv are the paper's a and b."""

    def __init__(self, config: InterdomainConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        dim, heads = config.hidden_size, config.num_key_value_heads
        kv_dim = heads * config.head_dim
        if config.query_readout:
            self.wq = nn.Linear(dim, dim, bias=False)
            self.q_conv = ShortConv(dim, config.conv_width)
        self.wk = nn.Linear(dim, kv_dim, bias=False)
        self.k_conv = ShortConv(kv_dim, config.conv_width)
        self.wv = nn.Linear(dim, kv_dim, bias=False)
        if not config.dual_input:
            self.v_conv = ShortConv(kv_dim, config.conv_width)
        rff = config.feature_map == "rff"
        self.feature_map = RandomFourierFeatures(heads, config.head_dim) if rff else None
        self.k_norm = None if rff else InputNorm(heads, config.head_dim)
        self.v_norm = None if rff else InputNorm(heads, config.head_dim)
        self.ssm = SSMDynamics(config)
        out_dim = dim if config.query_readout else 2 * dim
        self.wg = nn.Linear(dim, out_dim, bias=False) if config.output_gate else None
        self.wo = residual_linear(out_dim, dim)

    def forward(
        self, hidden: Tensor, rope, padding: Padding | None = None, past_key_values: InterdomainCache | None = None
    ) -> Tensor:
        """[B, T, dim] -> [B, T, dim]; a cache is advanced. rope: (cos, sin) of the tokens in the padding's order."""
        config, cache, dtype = self.config, past_key_values, wide(hidden.dtype)
        x = hidden if padding is None else take(hidden, padding.order)
        past, state = (None, None) if cache is None else cache.states.get(self.layer_idx, (None, None))
        tables = (
            self.ssm(dtype) if cache is None or self.layer_idx not in cache.tables else cache.tables[self.layer_idx]
        )

        inputs = {name: getattr(self, f"w{name}")(x) for name in "qkv" if hasattr(self, f"w{name}")}
        convolved = {name: y for name, y in inputs.items() if hasattr(self, f"{name}_conv")}
        pasts = {}
        if past is not None:
            pasts = dict(zip(convolved, past.split([y.shape[-1] for y in convolved.values()], dim=-1), strict=True))
        features = {name: self._features(name, y, pasts.get(name), rope) for name, y in inputs.items()}
        q, k, v = features.get("q"), features["k"], features["v"]
        if config.normalize:  # the coefficients of a channel of ones are the denominator
            v = torch.cat((v, torch.ones_like(v[..., :1])), dim=-1)
        with torch.autocast(x.device.type, enabled=False):
            o, final = self._scan(q, k, v, tables, state, padding, cache is not None)
        if cache is not None:
            cache.tables[self.layer_idx] = tables
            cache.states[self.layer_idx] = (
                self._last_inputs(torch.cat((*convolved.values(),), dim=-1), past, padding),
                final,
            )
        if config.normalize:
            top, below = o[..., :-1].to(dtype), o[..., -1:].to(dtype)
            o = (top / (torch.where(below < 0, -1.0, 1.0) * below.abs().clamp_min(1e-6))).to(o.dtype)
        o = o.flatten(2)
        if self.wg is not None:
            o = torch.sigmoid(self.wg(x)) * o
        o = self.wo(o)
        return o if padding is None else take(o, padding.back)

    def _features(self, name: str, y: Tensor, past: Tensor | None, rope) -> Tensor:
        """A projection [B, T, E] -> queries, keys or values [B, T, H, R]."""
        conv, norm = getattr(self, f"{name}_conv", None), getattr(self, f"{name}_norm", None)
        mapped = name == "q" or (name == "k" and self.config.dual_input)
        y = (plain_features if input_features is None else input_features)(
            y,
            self.head_dim,
            conv=None if conv is None else (conv.weight, conv.bias),
            past=past,
            rope=rope if self.config.rope and name != "v" else None,
            silu=mapped and self.feature_map is None,
            norm=None if norm is None else (norm.weight, norm.bias),
            eps=self.config.rms_norm_eps,
        )
        return self.feature_map(y) if mapped and self.feature_map is not None else y

    def _scan(self, q, k, v, tables, state, padding: Padding | None, cached: bool) -> tuple[Tensor, Tensor | None]:
        theta, decay, table = tables
        if cached and state is None:
            shape = k.shape[0], *theta.shape[:2], k.shape[-1] + v.shape[-1], 2
            state = torch.zeros(shape, dtype=theta.dtype, device=k.device)
        if cached and k.shape[1] == 1 and padding is None:
            token = (None if q is None else q[:, 0]), k[:, 0], v[:, 0]
            if input_features is None:
                o, final = plain_step(*token, decay, table, state)
            elif q is None:
                o, final = linear_step(torch.cat(token[1:], dim=-1), theta, table, state, decay=decay)
            else:
                o, final = interdomain_step(*token, theta, table, state, decay=decay)
            return o[:, None], final
        if input_features is None:
            o, final = plain_scan(q, k, v, theta, table, state)
        elif q is None:
            z = torch.cat((k, v), dim=-1)
            o, final = linear_scan(z, theta, table, initial_state=state, final_state=cached)
        else:
            o, final = interdomain_scan(q, k, v, theta, table, initial_state=state, final_state=cached)
        if cached and padding is not None:
            # The scan's last state has also decayed over the padding: Lambda^lengths X + sum_j Lambda^(T - 1 - j) z_j instead.
            z = padding.last(torch.cat((k, v), dim=-1)).to(theta.dtype)
            back = torch.arange(z.shape[1] - 1, -1, -1, device=z.device)
            added = torch.stack([torch.einsum("bthp,htm->bhmp", z, x) for x in decay_powers(theta, back)], dim=-1)
            passed = torch.stack(decay_powers(theta, padding.lengths), dim=-1).transpose(0, 1)[:, :, :, None]
            final = multiply(passed, state) + added
        return o, final

    def _last_inputs(self, x: Tensor, past: Tensor | None, padding: Padding | None) -> Tensor:
        """The last W - 1 inputs of the convolutions, [B, W - 1, E], of x [B, T, E] and what was before."""
        n, T = self.config.conv_width - 1, x.shape[1]
        x = F.pad(x, (0, 0, n, 0)) if past is None else torch.cat((past.to(x.dtype), x), dim=1)
        if padding is None:
            return x[:, T:]
        return take(x, padding.lengths[:, None] + torch.arange(n, device=x.device))


class SoftmaxMixer(nn.Module):
    """The baseline: causal softmax attention with RoPE."""

    def __init__(self, config: InterdomainConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.head_dim = layer_idx, config.head_dim
        kv_dim = config.num_key_value_heads * config.head_dim
        self.wq = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.wk = nn.Linear(config.hidden_size, kv_dim, bias=False)
        self.wv = nn.Linear(config.hidden_size, kv_dim, bias=False)
        self.wo = residual_linear(config.hidden_size, config.hidden_size)

    def forward(
        self, hidden: Tensor, rope, mask: Tensor | None = None, past_key_values: InterdomainCache | None = None
    ) -> Tensor:
        """[B, T, dim] -> [B, T, dim]. mask: which slots a token attends to, bool [B, 1, T, S]; None: all up to its own."""
        run = plain_features if input_features is None else input_features
        q, k = (run(w(hidden), self.head_dim, rope=rope).transpose(1, 2) for w in (self.wq, self.wk))
        v = self.wv(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if past_key_values is not None:
            before = past_key_values.states.get(self.layer_idx)
            if before is not None:
                k, v = (torch.cat((x.to(y.dtype), y), dim=2) for x, y in zip(before, (k, v), strict=True))
            past_key_values.states[self.layer_idx] = k, v
        causal = mask is None and bool(q.shape[2] > 1)  # an exported shape is no number
        grouped = q.shape[1] != k.shape[1]
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
        return self.wo(o.transpose(1, 2).flatten(2))


class InterdomainMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: InterdomainConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = residual_linear(config.intermediate_size, config.hidden_size)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class InterdomainDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: InterdomainConfig, layer_idx: int) -> None:
        super().__init__()
        mixer = SoftmaxMixer if config.mixer == "softmax" else InterdomainMixer
        self.attention = mixer(config, layer_idx)
        self.feed_forward = InterdomainMLP(config)
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, hidden: Tensor, rope=None, unseen=None, past_key_values: InterdomainCache | None = None
    ) -> Tensor:
        """[B, T, dim] -> [B, T, dim]. unseen: the mixer's `padding` or `mask`."""
        hidden = hidden + self.attention(self.attention_norm(hidden), rope, unseen, past_key_values)
        return hidden + self.feed_forward(self.ffn_norm(hidden))


class InterdomainPreTrainedModel(PreTrainedModel):
    config_class = InterdomainConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["InterdomainDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _is_stateful = True  # no assisted generation, which takes tokens back

    def post_init(self) -> None:
        super().post_init()
        # After it, for transformers 4 refuses names of which a model has no parameter.
        self._keep_in_fp32_modules_strict = {"ssm", "frequencies"}

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        config, init = self.config, nn.init
        if isinstance(module, nn.Linear | nn.Embedding):
            depth = 2 * config.num_hidden_layers if getattr(module, "writes_residual", False) else 1
            init.normal_(module.weight, 0.0, config.initializer_range / math.sqrt(depth))
        elif isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, ShortConv):
            bound = config.conv_width**-0.5
            init.uniform_(module.weight, -bound, bound)
            init.uniform_(module.bias, -bound, bound)
        elif isinstance(module, InputNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, RandomFourierFeatures):
            init.normal_(module.frequencies, 0.0, config.head_dim**-0.25)
        elif isinstance(module, SSMDynamics):
            self._init_dynamics(module)

    def _init_dynamics(self, module: SSMDynamics) -> None:
        config, init, M = self.config, nn.init, self.config.n_basis
        n = torch.arange(M, dtype=torch.float64, device="cpu")
        decay, frequency = {
            "s4d-inv": (torch.full_like(n, 0.5), M / math.pi * (M / (2 * n + 1) - 1)),
            "s4d-lin": (torch.full_like(n, 0.5), math.pi * n),
            "s4d-real": (n + 1, torch.zeros_like(n)),
        }[config.a_init]
        init.uniform_(module.log_dt, math.log(config.dt_min), math.log(config.dt_max))
        for parameter, values in ((module.log_A_real, decay.log()), (module.A_imag, frequency)):
            if not getattr(parameter, "_is_hf_initialized", False):  # transformers' mark of a loaded one
                parameter.copy_(values)
        if module.C is not None:
            scale = 1 / M if config.c_form == "full" else M**-0.5
            init.normal_(module.C, 0.0, scale if config.c_scale is None else config.c_scale / math.sqrt(2))
        if module.c is not None:
            init.normal_(module.c, 0.0, M**-0.5 if config.linear_scale is None else config.linear_scale)


class InterdomainModel(InterdomainPreTrainedModel):
    """Tokens to the output of the last norm, without a head."""

    _keys_to_ignore_on_load_unexpected = [r"^output\.weight$"]  # noqa: RUF012 (of a language model)

    def __init__(self, config: InterdomainConfig) -> None:
        super().__init__(config)
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(InterdomainDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.tok_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.tok_embeddings = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: InterdomainCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """As in transformers' decoders.

        Args:
            attention_mask: [B, T] or [B, tokens read + T], 0 for padding: before, after or between the tokens of a row, also in
                a turn that continues a cache. Padding leaves no trace.
            position_ids: accepted where they count a row's tokens, with padding or without; the model counts by itself.
            use_cache: None for the configuration's in evaluation, and for False in training.
        Raises: ValueError for other position_ids, a mask of another shape, another model's cache, and attention matrices.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, one of the two.")
        if output_attentions:
            raise ValueError("output_attentions: this model has no attention matrices to return; leave it out.")
        if inputs_embeds is None:
            inputs_embeds = self.tok_embeddings(input_ids)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if self.gradient_checkpointing and self.training:
            use_cache, past_key_values = False, None
        if not isinstance(past_key_values, InterdomainCache | None):
            raise ValueError(
                f"past_key_values is a {type(past_key_values).__name__}; give the InterdomainCache that the model returned."
            )
        cache = InterdomainCache() if use_cache and past_key_values is None else past_key_values
        rope, unseen, seen = self._prepare(inputs_embeds, attention_mask, position_ids, cache)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        hidden, recorded = inputs_embeds, ()
        for layer in self.layers:
            recorded += (hidden,)
            hidden = layer(hidden, rope, unseen, past_key_values=cache)
        hidden = self.norm(hidden)
        if cache is not None:
            cache.position, cache.length = seen, cache.length + hidden.shape[1]
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=cache if use_cache else None,
            hidden_states=(*recorded, hidden) if output_hidden_states else None,
        )

    def _prepare(self, embeds: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache):
        """(RoPE's cos and sin, what the mixers need to know of padding, tokens of each row after this pass [B])."""
        (B, T, _), device = embeds.shape, embeds.device
        looking = not torch.compiler.is_compiling()  # values decide nothing where a graph is traced
        softmax = self.config.mixer == "softmax"
        start = torch.zeros(B, dtype=torch.int64, device=device)
        if cache is not None and cache.position is not None:
            if len(cache.position) != B:
                raise ValueError(
                    f"past_key_values holds {len(cache.position)} texts, this batch {B}: continue all of them."
                )
            start = cache.position.to(device)
        mask = None
        if attention_mask is not None:
            before = 0 if cache is None else cache.length
            if attention_mask.ndim != 2 or (looking and attention_mask.shape not in ((B, T), (B, before + T))):
                expected = f"{[B, T]}" + (f" or {[B, before + T]}" if before else "")
                raise ValueError(f"attention_mask is {list(attention_mask.shape)}; expected {expected}.")
            mask = attention_mask[:, -T:].to(device=device, dtype=torch.bool)
            if mask.all() if looking else T == 1:
                mask = None
        ones = torch.ones(B, T, dtype=torch.bool, device=device) if mask is None else mask
        counted = start[:, None] + ones.long().cumsum(1) - 1
        if position_ids is not None and looking:
            given, slots = (
                position_ids.to(device),
                torch.arange(T, device=device) + (0 if cache is None else cache.length),
            )
            if (given != counted)[ones].any() and (given != slots).any():
                raise ValueError(
                    "position_ids must count the tokens of each row from 0, as this model does itself: leave them out. (Packed "
                    "sequences are not supported.)"
                )
        positions = counted.clamp_min(0) if softmax or mask is None else start[:, None] + torch.arange(T, device=device)
        unseen = None if mask is None else Padding.of(mask)
        if softmax:
            unseen = self._attended(ones, mask, cache)
        rope = None
        if self.config.rope:
            pairs = torch.arange(0, self.config.head_dim, 2, dtype=torch.float64, device=device) / self.config.head_dim
            angles = positions[..., None, None] * self.config.rope_theta**-pairs
            rope = angles.cos().to(wide(embeds.dtype)), angles.sin().to(wide(embeds.dtype))
        return rope, unseen, start + ones.sum(1)

    def _attended(self, ones: Tensor, mask: Tensor | None, cache: InterdomainCache | None) -> Tensor | None:
        """For softmax: the slots each token attends to, [B, 1, T, S]; None for all up to its own. A cache notes the mask."""
        T, before = ones.shape[1], None if cache is None else cache.mask
        slots = ones if before is None else torch.cat((before.to(ones.device), ones), dim=1)
        if cache is not None:
            cache.mask = slots
        if mask is None and before is None:
            return None
        S = slots.shape[1]
        own = S - T + torch.arange(T, device=ones.device)[:, None]
        at = torch.arange(S, device=ones.device)
        # Padding attends to itself: a query without any key would be NaN.
        return ((slots[:, None] & (at <= own)) | (at == own))[:, None]


class InterdomainForCausalLM(InterdomainPreTrainedModel, GenerationMixin):
    def __init__(self, config: InterdomainConfig) -> None:
        super().__init__(config)
        self.model = InterdomainModel(config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.tok_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.tok_embeddings = value

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.output = new_embeddings

    def get_decoder(self) -> InterdomainModel:
        return self.model

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: InterdomainCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """The arguments of `InterdomainModel`, and:

        labels: [B, T], -100 where nothing is predicted. Padding and a row's first token, which follows nothing, never are.
        logits_to_keep: the last so many positions, or these positions; 0 for all.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        hidden = outputs.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.output(hidden[:, kept])
        loss = None
        if labels is not None:
            if attention_mask is not None:
                mask = attention_mask[:, -hidden.shape[1] :].to(labels.device).bool()
                labels = labels.masked_fill(~(mask & F.pad(mask, (1, 0))[:, :-1]), -100)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, past_key_values=None, inputs_embeds: Tensor | None = None, **kwargs
    ) -> dict[str, Any]:
        new = kwargs.get("next_sequence_length")  # transformers 5
        if past_key_values is not None and (
            new < 1 if new is not None else len(kwargs.get("cache_position", "-")) == 0
        ):
            raise ValueError(
                f"past_key_values has read {past_key_values.get_seq_length()} tokens, input_ids has {input_ids.shape[1]}: give "
                "the whole text, what was read and at least one token more."
            )
        return super().prepare_inputs_for_generation(
            input_ids, past_key_values=past_key_values, inputs_embeds=inputs_embeds, **kwargs
        )

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args) -> None:
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        if generation_config.use_cache and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = InterdomainCache()


class InterdomainForSequenceClassification(InterdomainPreTrainedModel):
    """A linear head on each row's last token."""

    _keys_to_ignore_on_load_unexpected = [r"^output\.weight$"]  # noqa: RUF012 (of a language model)

    def __init__(self, config: InterdomainConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = InterdomainModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.tok_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.tok_embeddings = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: InterdomainCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs,
    ) -> SequenceClassifierOutputWithPast:
        """The last token is the last that attention_mask keeps; without one, the last that is not config.pad_token_id."""
        outputs = self.model(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, **kwargs)
        logits = self.score(outputs.last_hidden_state)
        (B, T, _), device = logits.shape, logits.device
        mask = None if attention_mask is None else attention_mask[:, -T:]
        if mask is None and input_ids is not None and self.config.pad_token_id is not None:
            mask = input_ids != self.config.pad_token_id
        last = torch.full((B,), T - 1, device=device)
        if mask is not None:
            last = (torch.arange(T, device=device) * mask.to(device)).argmax(-1)
        pooled = logits[torch.arange(B, device=device), last]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=pooled, config=self.config)
        return SequenceClassifierOutputWithPast(
            loss=loss,
            logits=pooled,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )
