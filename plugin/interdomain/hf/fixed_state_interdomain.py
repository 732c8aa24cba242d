"""Baselines with a state of fixed size, in plain PyTorch: gated linear attention (Yang et al., 2024), Mamba-2 (Dao & Gu, 2024),
DeltaNet (Yang et al., 2024) and gated DeltaNet (Yang et al., 2025).

    S_t = A_t S_(t-1) + k_t u_t^T,   o_t = S_t^T q_t,   A_t = diag(exp(decay_t))
    u_t = v_t, and of the delta rules u_t = beta_t (v_t - (A_t S_(t-1))^T k_t)
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .configuration_interdomain import InterdomainConfig
from .scan_interdomain import InterdomainCache, KeptInFloat32, Padding, ShortConv, features, residual_linear, take, wide

# Shapes: B batch, T tokens, H heads of state, G heads of queries and keys (H, or 1 for all), K key width, V value width,
#         L tokens of a chunk, N chunks, D 1 or K.

CHUNK = 64
LOW_RANK = 16  # of gated linear attention's gate, and what its logarithm is divided by


def state_shape(config: InterdomainConfig) -> tuple[int, int, int]:
    """(H, K, V). Without state_heads of 4 n_basis hidden_size numbers, as many as interdomain attention's state has."""
    wide, dim = config.mixer == "mamba2", config.hidden_size
    width = 2 * dim if wide else dim
    value_width = math.gcd(width, 64) if wide else 4 * config.n_basis
    heads = config.state_heads or width // value_width
    value_width = width // heads if config.state_heads else value_width
    if heads * value_width != width:
        raise ValueError(f"{config.mixer}: heads of {value_width} do not divide {width}; set state_heads or n_basis.")
    return heads, 2 * config.n_basis if wide else value_width, value_width


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
        return self.A_log, self.dt_bias, getattr(self, "D", None)

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
    """Queries, keys and values, a causal convolution with SiLU over them (but for gla), the recurrence, a norm, an output gate
    (but for deltanet)."""

    def __init__(self, config: InterdomainConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.kind = config, layer_idx, config.mixer
        dim, (H, K, V), kind = config.hidden_size, state_shape(config), config.mixer
        self.shape, values = (H, K, V), H * V
        self.widths = [K if kind == "mamba2" else H * K] * 2 + [values]

        def linear(rows: int, columns: int = dim) -> nn.Linear:
            return nn.Linear(columns, rows, bias=False)

        self.wq, self.wk, self.wv = (linear(rows) for rows in self.widths)
        conv = kind != "gla"
        self.conv = ShortConv(sum(self.widths), config.conv_width, bias=kind == "mamba2") if conv else None
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
        y, last = torch.cat((self.wq(x), self.wk(x), self.wv(x)), dim=-1), x.new_empty(len(x), 0)
        if self.conv is not None:
            weight, bias = self.conv()
            bias = weight.new_zeros(y.shape[2]) if bias is None else bias
            last = last_inputs(y, past, padding, self.config.conv_width - 1) if cache is not None else last
            y = F.silu(features(y, math.gcd(y.shape[2], 64), conv=(weight, bias), past=past).flatten(2))
        q, k, v = (
            z.unflatten(-1, (-1, n))
            for z, n in zip(y.split(self.widths, dim=-1), (*self.shape[1:2], *self.shape[1:]), strict=True)
        )
        o, S = self._core(x, q, k, v, S, padding)
        if cache is not None:
            cache.states[self.layer_idx] = last, S
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
        dtype, beta, u, D = wide(x.dtype), None, v, None
        decay = x.new_zeros(*x.shape[:2], 1, 1, dtype=dtype)
        if self.kind == "gla":
            gate = self.gate_up(self.gate_down(x)).to(dtype) + self.gate_bias
            decay = (F.logsigmoid(gate) / LOW_RANK).unflatten(-1, (-1, k.shape[-1]))
        elif hasattr(self, "ssm"):
            A_log, dt_bias, D = self.ssm()
            dt = F.softplus(self.wa(x).to(dtype) + dt_bias.to(dtype))
            decay = (-A_log.to(dtype).exp() * dt)[..., None]
            u = (v * dt[..., None]).to(v.dtype) if self.kind == "mamba2" else v
        if self.wb is not None:
            q, k = (F.normalize(y.to(dtype), dim=-1, eps=1e-6).to(v.dtype) for y in (q, k))
            beta = torch.sigmoid(self.wb(x).to(dtype))[..., None]
        if self.kind != "mamba2":
            q = q * q.shape[-1] ** -0.5
        if padding is not None:  # adds nothing, and nothing decays
            token = (torch.arange(x.shape[1], device=x.device) < padding.lengths[:, None])[..., None, None]
            k, decay = k.where(token, 0), decay.where(token, 0)
        S = x.new_zeros(len(x), *self.shape, dtype=dtype) if S is None else S
        with torch.autocast(x.device.type, enabled=False):
            o, S = recurrence(q.to(dtype), k.to(dtype), u.to(dtype), decay, beta, S)
        if D is not None:
            o = o.to(v.dtype) + D[:, None] * v
        return o.to(v.dtype), S


def recurrence(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, S: Tensor) -> tuple[Tensor, Tensor]:
    """q, k [B, T, G, K]; v [B, T, H, V]; decay [B, T, 1 or H, D]; beta [B, T, H, 1]; S [B, H, K, V] -> (o, the last S).

    Chunk by chunk; the corrections of the delta rule in a chunk solve a triangular system. Logs of decays are only ever added:
    no exponent is above 0.
    """
    (B, T, H, V), L = v.shape, min(CHUNK, 1 << (v.shape[1] - 1).bit_length())

    def chunked(x: Tensor) -> Tensor:  # [B, T, H, D] -> [N, B, H, L, D]; padding changes no state
        return F.pad(x, (0, 0, 0, 0, 0, -T % L)).unflatten(1, (-1, L)).permute(1, 0, 3, 2, 4).contiguous()

    q, k, v, decay = (chunked(x) for x in (q, k, v, decay))
    from_start = decay.cumsum(-2)
    to_end = F.pad(decay[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)
    kept = from_start[..., -1, :, None].exp()
    seen, written, inside, erased = q * from_start.exp(), (k * to_end.exp()).mT, scores(q, k, decay), None
    if beta is not None:
        own = torch.cat((v, (k * from_start.exp()).expand(*v.shape[:-1], -1)), dim=-1)
        beta = chunked(beta)
        system = beta * scores(k, k, decay).tril(-1)
        solved = torch.linalg.solve_triangular(system, beta * own, upper=False, unitriangular=True)
        v, erased = solved.split((V, k.shape[-1]), dim=-1)
    outputs = []
    for n in range(len(v)):
        u = v[n] if erased is None else v[n] - erased[n] @ S
        outputs.append(seen[n] @ S + inside[n] @ u)
        S = kept[n] * S + written[n] @ u
    return torch.stack(outputs).permute(1, 0, 3, 2, 4).reshape(B, -1, H, V)[:, :T], S


def scores(q: Tensor, k: Tensor, decay: Tensor) -> Tensor:
    """q_i . k_j, each channel decayed over the tokens j + 1 to i, and 0 for j > i: [..., L, L] of [..., L, K].

    With a decay for each channel, blocks are joined in pairs: both sides decay towards the border between them.
    """
    if decay.shape[-1] == 1:
        between = decay.expand(*decay.shape[:-1], decay.shape[-2]).tril(-1).cumsum(-2)
        return (q @ k.mT) * between.exp().tril()
    joined, before, after, h = (q * k).sum(-1)[..., None, None], decay, torch.zeros_like(decay), 1
    while h < q.shape[-2]:
        (_, later), (earlier, _), (b1, b2), (a1, a2) = (
            x.unflatten(-2, (-1, 2, h)).unbind(-3) for x in (q, k, before, after)
        )
        first, second = joined.unflatten(-3, (-1, 2)).unbind(-3)
        across = (later * b2.exp()) @ (earlier * a1.exp()).mT
        above = torch.cat((first, torch.zeros_like(first)), dim=-1)
        joined = torch.cat((above, torch.cat((across, second), dim=-1)), dim=-2)
        before = torch.cat((b1, b2 + b1[..., -1:, :]), dim=-2).flatten(-3, -2)
        after, h = torch.cat((a1 + b2[..., -1:, :], a2), dim=-2).flatten(-3, -2), 2 * h
    return joined.squeeze(-3)


def last_inputs(x: Tensor, past: Tensor | None, padding: Padding | None, n: int) -> Tensor:
    """The last n = W - 1 inputs of the convolutions, [B, n, E], of x [B, T, E] and what was before."""
    T = x.shape[1]
    x = F.pad(x, (0, 0, n, 0)) if past is None else torch.cat((past.to(x.dtype), x), dim=1)
    if padding is None:
        return x[:, T:]
    return take(x, padding.lengths[:, None] + torch.arange(n, device=x.device))
