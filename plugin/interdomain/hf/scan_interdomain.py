"""The recurrence of Interdomain Attention: its parameters, the scan, one step, and what is kept between passes.

Per head, with X_t = Lambda X_(t-1) + [k_t; v_t]^T, a state of M basis functions (Lambda complex, diagonal, constant in time):

    a_t = X^k_t q_t        b_t = W a_t        o_t = Re(b_t^T X^v_t)

W is one real matrix that holds the input gain and C (equations 11 to 13 of Interdomain Attention: Beyond Token-Level Key-Value
Memory, 2026). Where the package `interdomain` is installed its kernels compute this, elsewhere plain_interdomain.py.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.utils import logging

from .configuration_interdomain import InterdomainConfig
from .plain_interdomain import (
    CHUNK,
    OUTPUT_NORM_SCALE,
    KeptInFloat32,
    backward_pass,
    check_not_recomputed,
    decay_exponent,
    decay_factor,
    in_order,
    initial_A,
    input_gain,
    is_exporting,
    linear_one_step,
    mixing_matrix,
    multiply,
    normed,
    powers,
    readout_std,
    readout_vector,
    scan_step,
)
from .plain_interdomain import features as plain_features

INTERFACE = installed = 1  # of the package's functions that are called here

try:
    import interdomain.scan
    from interdomain.features import input_features
    from interdomain.scan import interdomain_scan, interdomain_step, linear_scan, linear_step

    installed = getattr(interdomain.scan, "INTERFACE", 0)
except ImportError:
    input_features = None
if installed != INTERFACE:
    input_features = None
    logging.get_logger(__name__).warning(
        f"This folder's code calls interface {INTERFACE} of the package interdomain, and the installed one has {installed}: it "
        "computes in plain PyTorch. Install the version of config.json's `converted_by`, or convert again."
    )

# Shapes: B batch, T tokens, H heads of state, G query heads of each, R key features, D value width (R = D = head_dim),
#         P = R + D channels, M basis functions, W convolution width, E channels of the convolutions. Complex numbers are real
#         pairs: [..., 2], or [..., 2M] as (real parts | imaginary parts).


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32 for arithmetic that half precision would spoil; float64 stays."""
    return torch.promote_types(dtype, torch.float32)


def features(x: Tensor, head_dim: int, conv=None, past=None, rope=None, silu=False, norm=None, eps=1e-5) -> Tensor:
    """Convolution, RoPE, SiLU with the l2 norm, RMSNorm with a bias per head, each if asked for: x [B, T, E] -> [B, T, H, R].

    conv: (weight [E, 1, W], bias [E]); past: the W - 1 inputs before x, or None for zeros. rope: (cos, sin), each
    [B, T, 1, R / 2]. norm: (scale [R], bias [H, R]).
    """
    if input_features is not None and not is_exporting():  # other runtimes do not have the kernels
        return input_features(x, head_dim, conv=conv, past=past, rope=rope, silu=silu, norm=norm, eps=eps)
    weight, bias = (None, None) if conv is None else (conv[0].flatten(1), conv[1])
    (cos, sin), (scale, shift) = rope or (None, None), norm or (None, None)
    return plain_features(x, head_dim, weight, bias, past, None, cos, sin, silu, scale, shift, eps)


def plain_scan(
    q: Tensor | None, k: Tensor, v: Tensor, theta: Tensor, table: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """All tokens by chunks of L, in operations that every runtime of an exported graph has (no complex numbers).

    A chunk starts with S = Lambda^h X, h = L / 2. Its token i reads Lambda^(i + 1 - h) (S + sum_j Lambda^(h - 1 - j) z_j), of
    all tokens j up to its own: no power leaves the range of float32. Complex vectors are pairs, [..., M, 2] or [..., 2M].

    Args:
        q: [B, T, H G, R], or None for the linear readout. k: [B, T, H, R]. v: [B, T, H, D]. theta: [H, M, 2].
        table: W [H, 2M, 2M], or w [H, 2M] for the linear readout. state: [B, H, M, P, 2], or None for zeros.
    Returns: (o [B, T, H G, D], or [B, T, H, P] for the linear readout; the state after the last token).
    """
    (B, T, H, R), M = k.shape, theta.shape[1]
    L = 1 if T == 1 else CHUNK
    N, h, i = (T + L - 1) // L, L // 2, torch.arange(L, device=k.device)
    missing = N * L - T
    # A chunk of zeros behind an exported graph's tokens: one chunk alone would make N a constant of that graph.
    more = int(is_exporting() and T > 1)

    def chunked(x: Tensor) -> Tensor:  # [B, T, H G, C] -> [N, B, H, G, L, C], zeros in front
        x = F.pad(x.to(theta.dtype), (0, 0, 0, 0, missing, more * L)).unflatten(2, (H, -1))
        return x.unflatten(1, (N + more, L)).permute(1, 0, 3, 4, 2, 5)

    def decayed(x: Tensor, read: Tensor) -> Tensor:
        return multiply(read, x.unflatten(-1, (M, 2))).flatten(-2)

    read = powers(theta, i + 1 - h)[:, None]  # [H, 1, L, M, 2]
    written, kept = (powers(theta, j).flatten(2)[:, None] for j in (h - 1 - i, L + h - 1 - i))  # [H, 1, L, 2M]
    enter, passed, leave = (powers(theta, i[:1] + n) for n in (h - missing, L, -h))  # [H, 1, M, 2]

    z = chunked(torch.cat((k, v), dim=-1))
    sums = (z.mT @ kept).squeeze(3).unflatten(-1, (M, 2))  # [N, B, H, P, M, 2]
    state = theta.new_zeros(B, H, M, z.shape[-1], 2) if state is None else state
    start, each = multiply(enter, state.transpose(2, 3)), passed.expand(N + more, *passed.shape)
    last, S = in_order(lambda S, chunk: (multiply(chunk[0], S) + chunk[1], S.clone()), start, [each, sums])
    last = S[-1] if more else last
    S = S.flatten(-2)[:, :, :, None]  # [N, B, H, 1, P, 2M]

    # The conjugate of b, for a real part is the product of pairs with conjugates; of (real parts | imaginary parts), pairs.
    table = torch.stack((table[:, :M], -table[:, M:]), dim=2).flatten(1, 2)
    if q is None:
        b, first = table[:, None, None], 0  # channels from `first` on are read
    else:
        q, first = chunked(q), R
        a = (q @ z[..., :R].mT).tril() @ written + q @ S[..., :R, :]
        W = table.unflatten(2, (2, M)).transpose(2, 3).flatten(2)
        b = decayed(a, read) @ W.mT[:, None]
    b = decayed(b, torch.stack((read[..., 0], -read[..., 1]), dim=-1))
    o = (b @ written.mT).tril() @ z[..., first:] + b @ S[..., first:, :].mT
    o = o.permute(1, 0, 4, 2, 3, 5).flatten(1, 2).flatten(2, 3)[:, missing : missing + T]
    return o.to(v.dtype), multiply(leave, last).transpose(2, 3)


def scan(q: Tensor | None, k: Tensor, v: Tensor, tables, state: Tensor | None) -> tuple[Tensor, Any]:
    """`plain_scan`, by the package's kernels where it is installed; no last state without a first. tables: SSMDynamics'."""
    theta, _, table = tables
    with torch.autocast(k.device.type, enabled=False):
        if input_features is None or is_exporting():
            return plain_scan(q, k, v, theta, table, state)
        cached = state is not None
        if q is None:
            z = torch.cat((k, v), dim=-1)
            return linear_scan(z, theta, table, initial_state=state, final_state=cached)
        return interdomain_scan(q, k, v, theta, table, initial_state=state, final_state=cached)


def step(q: Tensor | None, k: Tensor, v: Tensor, tables, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: as `scan`, of [B, 1, H, ...]."""
    if is_exporting():
        return scan(q, k, v, tables, state)
    theta, decay, table = tables
    k, v, q = k[:, 0], v[:, 0], None if q is None else q[:, 0]
    with torch.autocast(k.device.type, enabled=False):
        z = torch.cat((k, v), dim=-1)
        if input_features is None:
            state = state.clone(memory_format=torch.contiguous_format)  # a plain step overwrites it
            tables = decay, table, state
            o = linear_one_step(z, *tables) if q is None else scan_step(q, k, v, *tables)
        elif q is None:
            o, state = linear_step(z, theta, table, state, decay=decay)
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


class OutputNorm(nn.Module):
    """The norm of a head's output over its channels."""

    def __init__(self, config: InterdomainConfig) -> None:
        super().__init__()
        self.eps, self.soft = config.rms_norm_eps, config.output_norm == "soft"
        self.start = config.output_norm_scale or OUTPUT_NORM_SCALE[config.output_norm]
        self.weight = nn.Parameter(torch.empty(config.head_dim))

    def forward(self, o: Tensor) -> Tensor:
        return normed(o, self.weight, self.eps, self.soft)


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
        self.check_float32()
        log_dt, log_A_real, A_imag = (p.to(dtype) for p in (self.log_dt, self.log_A_real, self.A_imag))
        C, c = (None if p is None else p.to(dtype) for p in (self.C, self.c))
        with torch.autocast(log_dt.device.type, enabled=False):
            dt = log_dt.exp()
            theta = decay_exponent(dt, log_A_real, A_imag)
            gain = input_gain(theta, dt)
            table = mixing_matrix(gain, C, self.readout) if c is None else readout_vector(gain, C, c)
            return theta, decay_factor(theta), table

    def init_values(self) -> None:
        """A new model's; within transformers' `_init_weights`."""
        config = self.config
        nn.init.uniform_(self.log_dt, math.log(config.dt_min), math.log(config.dt_max))
        for parameter, values in zip(
            (self.log_A_real, self.A_imag), initial_A(config.a_init, config.n_basis), strict=True
        ):
            if not getattr(parameter, "_is_hf_initialized", False):  # transformers' mark of a loaded one
                parameter.copy_(values)
        for name, std in readout_std(config).items():
            if (parameter := getattr(self, name)) is not None:
                nn.init.normal_(parameter, 0.0, std)


# What is carried from one pass to the next.


class InterdomainCache(Cache):
    """`past_key_values`. A recurrent layer has a state of fixed size, a softmax layer the keys and values so far: of all slots,
    or of the last `window` tokens of each row.

    It cannot go back: to continue one text in several ways, copy it (`copy.copy`) before.

    It is a plain object on purpose, and no pytree node. Wrappers such as FSDP2 and DDP rebuild the dataclasses, tuples, lists,
    dictionaries and pytree nodes among a module's arguments and results, and a layer would then advance the copy. By its base
    class PEFT knows it for a cache, and so do transformers' exporters, which then make pytree nodes of caches.

    Args:
        gathered: what iterating over another cache gives, as nn.DataParallel joins the rows of several. None for no token yet.

    Attributes:
        length: tokens read, padding included. position: tokens of each row without padding, [B]; None before the first.
        slots: by the window of softmax layers (0: none), which token each slot of theirs holds, [B, S]; -1 for padding.
        states: by layer, (last inputs of the convolutions [B, W - 1, E], X [B, H, M, P, 2]), or (keys, values); of
            FixedStateMixer S [B, H, K, V] in place of X.
        tables: by layer, what the scan reads of the parameters: (theta, decay, table), computed once.
        masks: (tokens before, mask [B, T], False for padding) of each pass with padding.
        made_in: `backward_pass` when the cache was made.
    """

    # Properties of the base class. Not linear: it counts the tokens, and `generate` gives it only what is new.
    is_compileable = False  # pyright: ignore[reportAssignmentType]
    is_croppable = False  # pyright: ignore[reportAssignmentType]
    is_linear = (False,)  # pyright: ignore[reportAssignmentType]

    # These are not in `vars`, which transformers' exporters go by: a number of Python's would be a constant of an exported
    # step, and the tables and masks would be inputs and outputs of it.
    __slots__ = ("length", "made_in", "masks", "tables")

    def __new__(cls, *args: Any) -> "InterdomainCache":
        cache = super().__new__(cls)
        cache.length = 0
        cache.made_in = backward_pass()
        cache.masks = []
        cache.tables = {}
        return cache

    def __init__(self, gathered: Iterable | None = None) -> None:
        self.position: Tensor | None = None
        self.slots: dict[int, Tensor] = {}
        self.states: dict[int, tuple[Tensor, Tensor]] = {}
        if gathered is not None:
            mask, self.position, self.slots, self.states = gathered
            if mask is not None:
                self.length = mask.shape[1]
                self.masks = [(0, mask)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(length={self.length}, batch_size={self.batch_size})"

    def __iter__(self) -> Iterator[Any]:
        """Its parts, of tensors whose first dimension is the rows."""
        yield None if self.position is None else self.mask()
        yield self.position
        yield self.slots
        yield self.states

    def mask(self) -> Tensor:
        """What was read, [B, length], False for padding."""
        assert self.position is not None
        read = torch.ones(self.batch_size, self.length, dtype=torch.bool, device=self.position.device)
        for begin, mask in self.masks:
            read[:, begin : begin + mask.shape[1]] = mask
        return read

    def has_read(self, mask: Tensor) -> bool:
        """True if what this mask has before the new tokens, [B, length + T], is what was read."""
        if self.position is None or len(mask) != self.batch_size:  # other rows are refused elsewhere
            return True
        return torch.equal(mask[:, : self.length].bool(), self.mask().to(mask.device))

    def advance(self, layer_idx: int, first: Tensor, second: Tensor) -> None:
        """Take over a layer's new state."""
        check_not_recomputed(self.made_in)
        self.states[layer_idx] = first, second

    def _with(self, function: Callable[[Tensor], Tensor]) -> "InterdomainCache":
        """A cache of the function of each tensor. The tables, which no pass writes, are shared."""
        other = InterdomainCache()
        other.length = self.length
        other.position = None if self.position is None else function(self.position)
        other.slots = {window: function(x) for window, x in self.slots.items()}
        other.states = {i: (function(x), function(y)) for i, (x, y) in self.states.items()}
        other.masks = [(begin, function(x)) for begin, x in self.masks]
        other.tables = dict(self.tables)
        return other

    def __copy__(self) -> "InterdomainCache":
        return self._with(lambda x: x)  # a pass puts new tensors in the place of the old ones, and writes none

    def __deepcopy__(self, memo: dict) -> "InterdomainCache":
        return self._with(Tensor.clone)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(length of an attention mask for the next tokens, its first token)."""
        return self.length + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # transformers' word for no limit

    def __len__(self) -> int:
        """Layers that have a state."""
        return len(self.states)

    @property
    def batch_size(self) -> int:
        return -1 if self.position is None else len(self.position)

    def reset(self) -> None:
        """Forget all tokens."""
        self.length = 0
        self.masks = []
        self.tables = {}
        vars(self).update(vars(InterdomainCache()))

    def crop(self, tokens: int) -> None:
        raise NotImplementedError(
            f"crop({tokens}): a recurrent state cannot take tokens back. Copy the cache before them (copy.copy), or "
            "read the text again from its start."
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def reorder_cache(self, indices: Tensor) -> None:
        """Rows of other texts in place of these: the beams that go on."""
        others = self._with(lambda x: x[indices.to(x.device)])
        self.masks = others.masks
        vars(self).update(vars(others))


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
        lengths = mask.sum(1, keepdim=True)
        back = torch.where(mask, mask.cumsum(1), lengths + (~mask).cumsum(1)) - 1
        at = torch.arange(mask.shape[1], device=mask.device).expand_as(back)
        return cls(torch.zeros_like(back).scatter(1, back, at), back, lengths[:, 0])

    def state_after(self, z: Tensor, theta: Tensor, state: Tensor) -> Tensor:
        """X after each row's tokens: Lambda^lengths X + sum_j Lambda^(T - 1 - j) z_j with the tokens last, [B, H, M, P, 2].

        The scan's own last state has also decayed over the padding. z: [B, T, H, P] in this order.
        """
        T, t = z.shape[1], torch.arange(z.shape[1], device=z.device)
        at = t - (T - self.lengths[:, None])  # which token is in each place with the tokens last
        z = torch.where((at >= 0)[:, :, None, None], take(z, at.clamp_min(0)).to(theta.dtype), 0)
        added = torch.stack([torch.einsum("bthp,htm->bhmp", z, x) for x in powers(theta, T - 1 - t).unbind(-1)], dim=-1)
        passed = powers(theta, self.lengths).transpose(0, 1)[:, :, :, None]
        return multiply(passed, state) + added


class Attended(NamedTuple):
    """Keys that a softmax layer attends to.

    mask: which slots a token attends to, bool [B, 1, T, S]; None: all up to its own. kept: of a window, the slots that stay
    in the cache, [B, window]; None: all."""

    mask: Tensor | None = None
    kept: Tensor | None = None

    @classmethod
    def of(cls, window: int, token: Tensor, mask: Tensor | None, cache: InterdomainCache | None) -> "Attended":
        """token: which token of its row is in each place, [B, T]; a cache notes those of its slots."""
        T, before, kept = token.shape[1], None if cache is None else cache.slots.get(window), None
        tokens = token if mask is None else token.masked_fill(~mask, -1)
        slots = tokens if before is None else torch.cat((before.to(tokens.device), tokens), dim=1)
        S = slots.shape[1]
        if cache is not None:
            if window and window < S:
                # Each row's last tokens, whatever padding is between.
                kept = slots.topk(window, dim=1).indices
            cache.slots[window] = slots if kept is None else slots.gather(1, kept)
        if mask is None and before is None and not (window and window < T):
            return cls(None, kept)
        seen = (slots[:, None] >= 0) & (slots[:, None] <= token[..., None])
        if window:
            seen &= slots[:, None] > token[..., None] - window
        # Padding attends to itself: a query without any key would be NaN.
        itself = torch.arange(S, device=slots.device) == S - T + torch.arange(T, device=slots.device)[:, None]
        return cls((seen | itself)[:, None], kept)


def take(x: Tensor, index: Tensor) -> Tensor:
    """x [B, T, ...] at positions index [B, J] of each row: [B, J, ...]."""
    return x.gather(1, index.view(*index.shape, *(1,) * (x.ndim - 2)).expand(*index.shape, *x.shape[2:]))
