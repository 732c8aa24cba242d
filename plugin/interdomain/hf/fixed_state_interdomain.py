"""The baselines: softmax attention, and four with a state of fixed size.

These are gated linear attention (Yang et al., 2024), Mamba-2 (Dao & Gu, 2024), DeltaNet (Yang et al., 2024) and gated DeltaNet
(Yang et al., 2025). Their recurrence is in plain_interdomain.py.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .configuration_interdomain import InterdomainConfig
from .plain_interdomain import KeptInFloat32, l2_normed, plain_recurrence, state_shape
from .scan_interdomain import Attended, InterdomainCache, Padding, ShortConv, features, residual_linear, take, wide

# Shapes: B batch, T tokens, H heads of state, K key width, V value width.

LOW_RANK = 16  # of gated linear attention's gate, and what its logarithm is divided by


class StepSize(KeptInFloat32):
    """The decay exp(-exp(A_log) softplus(x + dt_bias)) of each head, and of Mamba-2 the skip D."""

    A_log: Tensor
    dt_bias: Tensor
    D: Tensor

    def __init__(self, config: InterdomainConfig, n_heads: int) -> None:
        super().__init__()
        self.config = config
        for name in ("A_log", "dt_bias", "D") if config.mixer == "mamba2" else ("A_log", "dt_bias"):
            setattr(self, name, nn.Parameter(torch.empty(n_heads, dtype=torch.float32)))

    def forward(self) -> tuple[Tensor, Tensor, Tensor | None]:  # by a call, as ShortConv's
        """(A_log, dt_bias, D), as copies: FSDP2 frees parameters that it has gathered for a call when the call ends."""
        self.check_float32()
        D = self.D.clone() if hasattr(self, "D") else None
        return self.A_log.clone(), self.dt_bias.clone(), D

    def init_values(self) -> None:
        """A new model's; within transformers' `_init_weights`."""
        low, high = math.log(self.config.dt_min), math.log(self.config.dt_max)
        dt = torch.empty(self.A_log.shape).uniform_(low, high).exp()
        values = {"A_log": torch.empty(dt.shape).uniform_(float(self.config.mixer == "mamba2"), 16.0).log()}
        values |= {"dt_bias": dt + (-torch.expm1(-dt)).log(), "D": torch.ones_like(dt)}
        for name, parameter in self.named_parameters():
            if not getattr(parameter, "_is_hf_initialized", False):  # transformers' mark of a loaded one
                parameter.copy_(values[name])


class FixedStateMixer(nn.Module):
    """Queries, keys and values, a causal convolution over them, SiLU (of gla with a convolution only), the recurrence, a norm,
    an output gate (but for deltanet)."""

    def __init__(self, config: InterdomainConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.kind = config, layer_idx, config.mixer
        dim, (H, K, V), kind = config.hidden_size, state_shape(config.mixer_config, config.hidden_size), config.mixer
        self.shape, values = (H, K, V), H * V
        self.widths = [K if kind == "mamba2" else H * K] * 2 + [values]

        def linear(rows: int, columns: int = dim) -> nn.Linear:
            return nn.Linear(columns, rows, bias=False)

        self.wq, self.wk, self.wv = (linear(rows) for rows in self.widths)
        taps = config.conv_width
        self.conv = ShortConv(sum(self.widths), taps, bias=kind == "mamba2") if taps else None
        if kind == "gla":
            self.gate_down, self.gate_up = linear(LOW_RANK), linear(values, LOW_RANK)
            self.gate_bias = nn.Parameter(torch.empty(values))
        if kind in ("mamba2", "gated-deltanet"):
            self.wa, self.ssm = linear(H), StepSize(config, H)
        self.wb = linear(H) if "deltanet" in kind else None
        self.wg = None if kind == "deltanet" else linear(values)
        self.norm = nn.RMSNorm(values if kind == "mamba2" else V, eps=config.rms_norm_eps)
        self.wo = residual_linear(values, dim)

    def forward(
        self, hidden: Tensor, rope, padding: Padding | None = None, past_key_values: InterdomainCache | None = None
    ) -> Tensor:
        """[B, T, dim] -> [B, T, dim]; a cache is advanced."""
        cache = past_key_values
        x = hidden if padding is None else take(hidden, padding.order)
        past, S = (None, None) if cache is None else cache.states.get(self.layer_idx, (None, None))
        y, last = torch.cat((self.wq(x), self.wk(x), self.wv(x)), dim=-1), x.new_empty(x.shape[0], 0)
        if self.conv is not None:
            weight, bias = self.conv()
            bias = weight.new_zeros(y.shape[2]) if bias is None else bias
            last = last_inputs(y, past, padding, self.config.conv_width - 1) if cache is not None else last
            y = features(y, math.gcd(y.shape[2], 64), conv=(weight, bias), past=past).flatten(2)
        y = y if self.kind == "gla" and self.conv is None else F.silu(y)
        q, k, v = (
            z.unflatten(-1, (-1, n))
            for z, n in zip(y.split(self.widths, dim=-1), (*self.shape[1:2], *self.shape[1:]), strict=True)
        )
        o, S = self._core(x, q, k, v, S, padding)
        if cache is not None:
            cache.advance(self.layer_idx, last, S)
        gate = None if self.wg is None else F.silu(self.wg(x))
        if self.kind == "mamba2":
            o = self.norm(o.flatten(2) * gate)
        else:
            o = self.norm(o).flatten(2)
            o = o if gate is None else o * gate
        o = self.wo(o)
        return o if padding is None else take(o, padding.back)

    def _core(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, S: Tensor | None, padding: Padding | None) -> Any:
        """(o [B, T, H, V], the state after the last token that is no padding)."""
        dtype, decay, beta, u, D = wide(x.dtype), None, None, v, None
        if self.kind == "gla":
            gate = self.gate_up(self.gate_down(x)).to(dtype) + self.gate_bias
            decay = (F.logsigmoid(gate) / LOW_RANK).unflatten(-1, (-1, k.shape[-1]))
        elif hasattr(self, "ssm"):
            A_log, dt_bias, D = self.ssm()
            dt = F.softplus(self.wa(x).to(dtype) + dt_bias.to(dtype))
            decay = -A_log.to(dtype).exp() * dt
            u = (v * dt[..., None]).to(v.dtype) if self.kind == "mamba2" else v
        if self.wb is not None:
            q, k = (l2_normed(y.to(dtype)).to(v.dtype) for y in (q, k))
            beta = torch.sigmoid(self.wb(x).to(dtype))
        if self.kind != "mamba2":
            q = q * q.shape[-1] ** -0.5
        if padding is not None:  # adds nothing, and nothing decays
            token = (torch.arange(x.shape[1], device=x.device) < padding.lengths[:, None])[..., None, None]
            k = k.where(token, 0)
            decay = None if decay is None else decay.where(token.flatten(2) if decay.ndim == 3 else token, 0)
        o, S = plain_recurrence(q, k, u, decay, beta, initial_state=S)
        if D is not None:
            o = (o + D[:, None] * v).to(v.dtype)
        return o, S


class SoftmaxMixer(nn.Module):
    """The baseline: causal softmax attention with RoPE, over all tokens before or a sliding window."""

    def __init__(self, config: InterdomainConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.head_dim = layer_idx, config.head_dim
        kv_dim = config.num_key_value_heads * config.head_dim
        self.wq = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.wk = nn.Linear(config.hidden_size, kv_dim, bias=False)
        self.wv = nn.Linear(config.hidden_size, kv_dim, bias=False)
        self.wo = residual_linear(config.hidden_size, config.hidden_size)

    def forward(
        self, hidden: Tensor, rope, attended: Attended, past_key_values: InterdomainCache | None = None
    ) -> Tensor:
        """[B, T, dim] -> [B, T, dim]; a cache is advanced."""
        mask, kept = attended
        q, k = (features(w(hidden), self.head_dim, rope=rope).transpose(1, 2) for w in (self.wq, self.wk))
        v = self.wv(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if past_key_values is not None:
            before = past_key_values.states.get(self.layer_idx)
            if before is not None:
                k, v = (torch.cat((x.to(y.dtype), y), dim=2) for x, y in zip(before, (k, v), strict=True))
            near = [x if kept is None else take(x.transpose(1, 2), kept).transpose(1, 2) for x in (k, v)]
            past_key_values.advance(self.layer_idx, *near)
        causal = mask is None and bool(q.shape[2] > 1)  # an exported shape is no number
        o = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
        return self.wo(o.transpose(1, 2).flatten(2))


def last_inputs(x: Tensor, past: Tensor | None, padding: Padding | None, n: int) -> Tensor:
    """The last n = W - 1 inputs of the convolutions, [B, n, E], of x [B, T, E] and what was before."""
    T = x.shape[1]
    x = F.pad(x, (0, 0, n, 0)) if past is None else torch.cat((past.to(x.dtype), x), dim=1)
    if padding is None:
        return x[:, T:]
    return take(x, padding.lengths[:, None] + torch.arange(n, device=x.device))
